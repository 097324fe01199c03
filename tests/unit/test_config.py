"""Settings: code > environment > file > default (A-07), read without side effects (A-01, A-05)."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from drivetrain._config.precedence import Setting, Settings, resolved_settings
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from somewhere import Callback, Logger, Plugin, Strategy  # type: ignore[import-not-found]


class Engine:
    """Has arguments of every kind that `Fit` has."""

    settings: Settings

    @resolved_settings
    def __init__(
        self,
        *,
        strategy: str | Strategy = "auto",
        devices: int | str | list[int] = "auto",
        precision: str | int = "32-true",
        max_epochs: int | None = None,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        limit_train_batches: int | float | None = None,
        fast_dev_run: bool | int = False,
        inference_mode: bool = True,
        callbacks: Sequence[Callback] | Callback | None = None,
        plugins: list[Plugin[int]] | None = None,
        logger: Logger | Sequence[Logger] | bool | None = None,
        default_root_dir: str | Path | None = None,
        folder: Path | None = None,
        options: dict[str, Any] | None = None,
        anything: Any = None,
    ) -> None:
        """What an engine does."""
        self.values = {name: value for name, value in locals().items() if name != "self"}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("DRIVETRAIN_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_precedence_for_every_argument(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # code > environment > file > default, and the source of each value is recorded
    (tmp_path / "drivetrain.toml").write_text('max_epochs = 1\ndevices = 1\nprecision = "64-true"\n')
    monkeypatch.setenv("DRIVETRAIN_MAX_EPOCHS", "2")
    monkeypatch.setenv("DRIVETRAIN_DEVICES", "2")
    engine = Engine(max_epochs=3)
    assert engine.settings["max_epochs"] == Setting(3, "code")
    assert engine.settings["devices"] == Setting(2, "environment DRIVETRAIN_DEVICES")
    assert engine.settings["precision"] == Setting("64-true", f"file {tmp_path / 'drivetrain.toml'}")
    assert engine.settings["strategy"] == Setting("auto", "default")
    assert {name: setting.value for name, setting in engine.settings.items()} == engine.values
    assert list(engine.settings) == list(inspect.signature(Engine.__init__).parameters)[1:]


def test_an_explicit_value_equal_to_the_default_counts_as_set(monkeypatch: pytest.MonkeyPatch) -> None:
    #
    monkeypatch.setenv("DRIVETRAIN_MAX_EPOCHS", "5")
    monkeypatch.setenv("DRIVETRAIN_INFERENCE_MODE", "false")
    engine = Engine(max_epochs=None, inference_mode=True)
    assert engine.values["max_epochs"] is None
    assert engine.settings["max_epochs"].source == "code"
    assert engine.values["inference_mode"] is True


def test_two_objects_in_one_process_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    #
    first = Engine(max_epochs=1)
    monkeypatch.setenv("DRIVETRAIN_DEVICES", "4")
    second = Engine(max_epochs=2)
    assert (first.values["max_epochs"], first.values["devices"]) == (1, "auto")
    assert (second.values["max_epochs"], second.values["devices"]) == (2, 4)
    assert first.settings["devices"].source == "default"


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("MAX_EPOCHS", "7", 7),
        ("MAX_EPOCHS", "none", None),
        ("GRADIENT_CLIP_VAL", "0.5", 0.5),
        ("GRADIENT_CLIP_VAL", "1", 1.0),
        ("GRADIENT_CLIP_ALGORITHM", "value", "value"),
        ("LIMIT_TRAIN_BATCHES", "1", 1),
        ("LIMIT_TRAIN_BATCHES", "1.0", 1.0),
        ("FAST_DEV_RUN", "3", 3),
        ("FAST_DEV_RUN", "true", True),
        ("INFERENCE_MODE", "False", False),
        ("DEVICES", "[0, 1]", [0, 1]),
        ("DEVICES", "0,1", "0,1"),
        ("DEVICES", "auto", "auto"),
        ("STRATEGY", "ddp", "ddp"),
        ("STRATEGY", '"ddp"', "ddp"),
        ("PRECISION", "16", 16),
        ("PRECISION", "16-mixed", "16-mixed"),
        ("LOGGER", "false", False),
        ("DEFAULT_ROOT_DIR", "2024-01-01", "2024-01-01"),
        ("DEFAULT_ROOT_DIR", "/data/runs", "/data/runs"),
        ("DEFAULT_ROOT_DIR", "true", "true"),
        ("DEFAULT_ROOT_DIR", "1\nx = 2", "1\nx = 2"),
        ("FOLDER", "a/b", Path("a/b")),
        ("OPTIONS", "{a = 1}", {"a": 1}),
        ("ANYTHING", "[1, 'x']", [1, "x"]),
    ],
)
def test_a_variable_is_read_by_the_annotation(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, value: object
) -> None:
    monkeypatch.setenv(f"DRIVETRAIN_{variable}", text)
    found = Engine().values[variable.lower()]
    assert found == value
    assert type(found) is type(value)  # 1 and 1.0 and True are different limits


@pytest.mark.parametrize(
    ("variable", "text", "accepts"),
    [
        ("MAX_EPOCHS", "many", "a whole number or none"),
        ("MAX_EPOCHS", "1.5", "a whole number or none"),
        ("MAX_EPOCHS", "true", "a whole number or none"),
        ("MAX_EPOCHS", "", "a whole number or none"),
        ("INFERENCE_MODE", "1", "true or false"),
        ("INFERENCE_MODE", "none", "true or false"),
        ("GRADIENT_CLIP_ALGORITHM", "agc", "'norm' or 'value'"),
        ("GRADIENT_CLIP_VAL", "[1.0]", "a number with a decimal point or none"),
        ("LOGGER", "csv", "true or false or none"),
    ],
)
def test_a_value_of_another_type_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, accepts: str
) -> None:
    monkeypatch.setenv(f"DRIVETRAIN_{variable}", text)
    with pytest.raises(ConfigurationError) as caught:
        Engine()
    message = str(caught.value)
    assert f"DRIVETRAIN_{variable}" in message
    assert repr(text) in message
    assert f"accepts {accepts}." in message


def test_a_mistake_is_refused_even_where_code_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_MAX_EPOCHS", "many")
    with pytest.raises(ConfigurationError, match="DRIVETRAIN_MAX_EPOCHS"):
        Engine(max_epochs=1)


@pytest.mark.parametrize("name", ["callbacks", "plugins"])
@pytest.mark.parametrize("where", ["environment", "file"])
def test_objects_come_from_code_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, where: str) -> None:
    if where == "environment":
        monkeypatch.setenv(f"DRIVETRAIN_{name.upper()}", "[]")
    else:
        (tmp_path / "drivetrain.toml").write_text(f"{name} = []\n")
    with pytest.raises(ConfigurationError, match=f"{name} takes Python objects.*\n.*Pass {name}= in code"):
        Engine()


def test_an_unknown_variable_gets_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # A-07, G-06
    monkeypatch.setenv("DRIVETRAIN_MAX_EPOCH", "3")
    with pytest.raises(
        ConfigurationError,
        match=r"(?s)DRIVETRAIN_MAX_EPOCH='3'.*Did you mean 'DRIVETRAIN_MAX_EPOCHS'\?.*Unset DRIVETRAIN_MAX_EPOCH, or",
    ):
        Engine()


def test_a_lower_case_variable_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_max_epochs", "3")
    with pytest.raises(ConfigurationError, match=r"Did you mean 'DRIVETRAIN_MAX_EPOCHS'\?"):
        Engine()


def test_an_unknown_key_gets_the_nearest_name(tmp_path: Path) -> None:
    # A-07, G-06
    (tmp_path / "drivetrain.toml").write_text("acumulate = 1\nmax_epoch = 3\n")
    with pytest.raises(ConfigurationError, match="sets 'acumulate'"):
        Engine()
    (tmp_path / "drivetrain.toml").write_text("max_epoch = 3\n")
    with pytest.raises(
        ConfigurationError, match=r"sets 'max_epoch', which is not a setting. Did you mean 'max_epochs'\?"
    ):
        Engine()


def test_an_unknown_argument_gets_the_nearest_name() -> None:
    # G-06: not a bare TypeError
    with pytest.raises(
        ConfigurationError, match=r"Engine\(\) has no argument 'max_epoch'. Did you mean 'max_epochs'\?"
    ):
        Engine(max_epoch=3)  # type: ignore[call-arg]


def test_an_argument_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"got positional arguments: 'ddp'"):
        Engine("ddp")  # type: ignore[call-arg]


def test_a_file_named_by_a_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "drivetrain.toml").write_text("max_epochs = 1\n")
    (tmp_path / "other.toml").write_text('devices = [0, 1]\nlogger = "none"\nlimit_train_batches = 0.5\n')
    monkeypatch.setenv("DRIVETRAIN_CONFIG", "other.toml")
    engine = Engine()
    assert engine.settings["devices"] == Setting([0, 1], f"file {tmp_path / 'other.toml'}")
    assert engine.values["logger"] is None
    assert engine.settings["logger"].source != "default"
    assert engine.values["limit_train_batches"] == 0.5
    assert engine.settings["max_epochs"].source == "default"  # the named file replaces the default one


@pytest.mark.parametrize("name", ["missing.toml", ""])
def test_a_named_file_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("DRIVETRAIN_CONFIG", name)
    with pytest.raises(ConfigurationError, match=f"DRIVETRAIN_CONFIG='{name}' cannot be read"):
        Engine()


@pytest.mark.parametrize(("text", "match"), [("max_epochs = ", "is not TOML"), ('max_epochs = "3"', "accepts a whole")])
def test_an_invalid_file_is_refused(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "drivetrain.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=match) as caught:
        Engine()
    assert str(tmp_path / "drivetrain.toml") in str(caught.value)


def test_reading_has_no_side_effects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    #
    (tmp_path / "drivetrain.toml").write_text("max_epochs = 1\n")
    monkeypatch.setenv("DRIVETRAIN_DEVICES", "2")
    environment = dict(os.environ)
    stamp = (tmp_path / "drivetrain.toml").stat().st_mtime_ns
    Engine()
    assert dict(os.environ) == environment
    assert [path.name for path in tmp_path.iterdir()] == ["drivetrain.toml"]
    assert (tmp_path / "drivetrain.toml").stat().st_mtime_ns == stamp


def test_the_signature_is_preserved() -> None:
    parameters = inspect.signature(Engine).parameters
    assert parameters["gradient_clip_algorithm"].default == "norm"
    assert parameters["max_epochs"].kind is inspect.Parameter.KEYWORD_ONLY
    assert Engine.__init__.__doc__ == "What an engine does."


def test_a_subclass_may_pass_on_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    class Special(Engine):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**{"max_epochs": 9, **arguments})

    monkeypatch.setenv("DRIVETRAIN_DEVICES", "2")
    engine = Special(strategy="ddp")
    assert engine.settings["max_epochs"] == Setting(9, "code")
    assert engine.settings["devices"].value == 2
    assert engine.settings["strategy"] == Setting("ddp", "code")


def test_settings_print_as_a_table_and_travel_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_DEVICES", "2")
    settings = Engine(max_epochs=3).settings
    lines = str(settings).splitlines()
    assert lines[0].split() == ["setting", "value", "source"]
    assert len(lines) == 1 + len(settings)
    assert any(line.split() == ["devices", "2", "environment", "DRIVETRAIN_DEVICES"] for line in lines)
    assert any(line.split() == ["max_epochs", "3", "code"] for line in lines)
    assert pickle.loads(pickle.dumps(settings)) == settings
    with pytest.raises(TypeError):
        settings["devices"] = Setting(1, "code")  # type: ignore[index]
