"""Settings: code > environment > file > default (A-07), read by their types."""

from __future__ import annotations

import inspect
import os
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from drivetrain import ConfigurationError, Fit
from drivetrain_strategies import DDPStrategy


@pytest.fixture(autouse=True)
def _in_an_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def setting(fit: Fit, name: str) -> tuple[Any, str]:
    return fit.settings[name].value, fit.settings[name].source


def test_precedence_for_every_argument(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "drivetrain.toml").write_text('max_epochs = 1\ndevices = 1\nprecision = "64-true"\n')
    monkeypatch.setenv("DRIVETRAIN_MAX_EPOCHS", "2")
    monkeypatch.setenv("DRIVETRAIN_DEVICES", "2")
    monkeypatch.setenv("DRIVETRAIN_INFERENCE_MODE", "false")
    before = dict(os.environ)
    fit = Fit(max_epochs=3, inference_mode=True)
    assert dict(os.environ) == before
    assert setting(fit, "max_epochs") == (3, "code")
    assert setting(fit, "inference_mode") == (True, "code")  # although it is the default
    assert setting(Fit(max_epochs=None), "max_epochs") == (None, "code")
    assert setting(fit, "devices") == (2, "environment DRIVETRAIN_DEVICES")
    assert setting(fit, "precision") == ("64-true", f"file {tmp_path / 'drivetrain.toml'}")
    assert setting(fit, "strategy") == ("auto", "default")
    assert (fit.max_epochs, fit.devices, fit.precision_setting) == (3, 2, "64-true")
    assert list(fit.settings) == list(inspect.signature(Fit).parameters)
    assert "strategy: 'StrategyName | str | Strategy' = " in str(inspect.signature(Fit))  # as help() shows it


def test_two_objects_in_one_process_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Special(Fit):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**{"max_epochs": 9, **arguments})

    first = Fit(max_epochs=1)
    monkeypatch.setenv("DRIVETRAIN_DEVICES", "4")
    second = Special(strategy="ddp")
    assert (first.max_epochs, *setting(first, "devices")) == (1, "auto", "default")
    assert (setting(second, "max_epochs"), second.devices) == ((9, "code"), 4)
    assert setting(second, "strategy") == ("ddp", "code")


@pytest.mark.parametrize(
    ("variable", "values"),
    [
        ("MAX_EPOCHS", {"7": 7, "none": None}),
        ("GRADIENT_CLIP_VAL", {"0.5": 0.5}),
        ("LIMIT_TRAIN_BATCHES", {"1": 1, "1.0": 1.0}),
        ("FAST_DEV_RUN", {"3": 3, "true": True}),
        ("INFERENCE_MODE", {"False": False}),
        ("DETERMINISTIC", {"warn": "warn"}),
        ("DEVICES", {"[0, 1]": [0, 1], "0,1": "0,1", "auto": "auto"}),
        ("STRATEGY", {'"ddp"': "ddp"}),
        ("PRECISION", {"16": 16, "16-mixed": "16-mixed"}),
        ("LOGGER", {"false": False, '["csv", "tensorboard"]': ["csv", "tensorboard"]}),
        ("DEFAULT_ROOT_DIR", {text: text for text in ("2024-01-01", "/data/runs", "true", "1\nx = 2")}),
        ("COMPILE", {"{mode = 'default'}": {"mode": "default"}}),
    ],
)
def test_a_variable_is_read_by_the_annotation(monkeypatch: Any, variable: str, values: dict[str, object]) -> None:
    for text, value in values.items():
        monkeypatch.setenv(f"DRIVETRAIN_{variable}", text)
        found, _ = setting(Fit(accelerator="cpu"), variable.lower())
        assert found == value
        assert type(found) is type(value)  # 1 and 1.0 and True are different limits


@pytest.mark.parametrize(
    ("variable", "text", "takes"),
    [
        *(("MAX_EPOCHS", text, "int | None") for text in ("many", "1.5", "true", "")),
        *(("INFERENCE_MODE", text, "bool") for text in ("1", "none")),
        ("DETERMINISTIC", "always", "bool | Literal['warn'] | None"),
        ("GRADIENT_CLIP_VAL", "[1.0]", "int | float | None"),
        ("CALLBACKS", "Timer", "Callback | list[Callback] | None"),
    ],
)
def test_a_value_of_another_type_is_refused(monkeypatch: Any, variable: str, text: str, takes: str) -> None:
    monkeypatch.setenv(f"DRIVETRAIN_{variable}", text)
    with pytest.raises(ConfigurationError) as caught:
        Fit(**{variable.lower(): None})  # type: ignore[arg-type]  # checked although code overrides it
    message = str(caught.value).replace('"', "'")
    assert f"DRIVETRAIN_{variable}" in message
    assert repr(text) in message
    assert f"{variable.lower()} takes {takes}" in message


def test_an_unknown_name_gets_the_nearest_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # A-07, G-06
    with pytest.raises(ConfigurationError, match=r"Fit\(\) has no argument 'max_epoch'. Did you mean 'max_epochs'\?"):
        Fit(max_epoch=3)  # type: ignore[call-arg]
    for variable in ("DRIVETRAIN_MAX_EPOCH", "DRIVETRAIN_max_epochs"):
        message = rf"(?s){variable}='3'.*Did you mean 'DRIVETRAIN_MAX_EPOCHS'\?.*Unset {variable}, or"
        monkeypatch.setenv(variable, "3")
        with pytest.raises(ConfigurationError, match=message):
            Fit()
        monkeypatch.delenv(variable)
    (tmp_path / "drivetrain.toml").write_text("devices = 1\nmax_epoch = 3\n")
    message = r"sets 'max_epoch', which is not a setting. Did you mean 'max_epochs'\?"
    with pytest.raises(ConfigurationError, match=message):
        Fit()


def test_a_file_named_by_a_variable_replaces_the_default_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "drivetrain.toml").write_text("max_epochs = 1\n")
    path = tmp_path / "other.toml"
    path.write_text('devices = [0, 1]\nlogger = "none"\nlimit_train_batches = 0.5\n')
    monkeypatch.setenv("DRIVETRAIN_CONFIG", path.name)
    fit = Fit(accelerator="cpu")
    assert setting(fit, "devices") == ([0, 1], f"file {path}")
    assert setting(fit, "logger") == (None, f"file {path}")
    assert fit.limit_train_batches == 0.5
    assert setting(fit, "max_epochs") == (None, "default")


def test_an_invalid_file_and_a_missing_one_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "drivetrain.toml"
    for text, match in (("max_epochs = ", "cannot be read"), ('max_epochs = "3"', "takes int")):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=match) as caught:
            Fit()
        assert str(path) in str(caught.value)
    for name in ("missing.toml", ""):
        monkeypatch.setenv("DRIVETRAIN_CONFIG", name)
        with pytest.raises(ConfigurationError, match=f"{tmp_path / name} cannot be read"):
            Fit()


def test_settings_print_and_travel_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_DEVICES", "2")
    settings = Fit(max_epochs=3).settings
    lines = str(settings).splitlines()
    assert len(lines) == len(settings)
    assert "devices=2 (environment DRIVETRAIN_DEVICES)" in lines
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_a_timeout_may_be_seconds() -> None:  # S-17
    assert DDPStrategy(timeout=60.0)._group.timeout == DDPStrategy(timeout=timedelta(minutes=1))._group.timeout
