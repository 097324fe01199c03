"""Settings: code > environment > file > default (A-07), and names of parts, built in and from other packages (K-03)."""

from __future__ import annotations

import inspect
import itertools
import os
import pickle
import re
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import ConfigurationError, Fit, Logger, Precision, TrainModule
from drivetrain.environments import Environment, Placement, PlainEnvironment, environment_by_name
from drivetrain.launchers import FunctionLauncher, SubprocessLauncher, named_launcher
from drivetrain.loggers import CSVLogger, TensorBoardLogger
from drivetrain.precision import FullPrecision, resolve_precision
from drivetrain.profilers import Profiler, SimpleProfiler
from drivetrain.strategies import strategy_by_name
from drivetrain_strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy


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
    ("variable", "text", "accepts"),
    [
        *(("MAX_EPOCHS", text, "a whole number or none") for text in ("many", "1.5", "true", "")),
        *(("INFERENCE_MODE", text, "true or false") for text in ("1", "none")),
        ("DETERMINISTIC", "always", "'warn' or true or false or none"),
        ("GRADIENT_CLIP_VAL", "[1.0]", "a whole number or a number with a decimal point or none"),
    ],
)
def test_a_value_of_another_type_is_refused(monkeypatch: Any, variable: str, text: str, accepts: str) -> None:
    monkeypatch.setenv(f"DRIVETRAIN_{variable}", text)
    with pytest.raises(ConfigurationError) as caught:
        Fit(**{variable.lower(): None})  # type: ignore[arg-type]  # checked although code overrides it
    message = str(caught.value)
    assert f"DRIVETRAIN_{variable}" in message
    assert repr(text) in message
    assert f"accepts {accepts}." in message


@pytest.mark.parametrize("name", ["callbacks", "plugins"])
def test_objects_come_from_code_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    refused = f"{name} takes Python objects.*\n.*Pass {name}= in code"
    monkeypatch.setenv(f"DRIVETRAIN_{name.upper()}", "[]")
    with pytest.raises(ConfigurationError, match=refused):
        Fit()
    monkeypatch.delenv(f"DRIVETRAIN_{name.upper()}")
    (tmp_path / "drivetrain.toml").write_text(f"{name} = []\n")
    with pytest.raises(ConfigurationError, match=refused):
        Fit()


def test_an_unknown_name_gets_the_nearest_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # A-07, G-06
    with pytest.raises(ConfigurationError, match=r"Fit\(\) has no argument 'max_epoch'. Did you mean 'max_epochs'\?"):
        Fit(max_epoch=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match=r"got positional arguments: 'ddp'"):
        Fit("ddp")  # type: ignore[call-arg]
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
    for text, match in (("max_epochs = ", "is not TOML"), ('max_epochs = "3"', "accepts a whole")):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=match) as caught:
            Fit()
        assert str(path) in str(caught.value)
    for name in ("missing.toml", ""):
        monkeypatch.setenv("DRIVETRAIN_CONFIG", name)
        with pytest.raises(ConfigurationError, match=f"DRIVETRAIN_CONFIG='{name}' cannot be read"):
            Fit()


def test_settings_print_as_a_table_and_travel_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_DEVICES", "2")
    settings = Fit(max_epochs=3).settings
    lines = [line.split() for line in str(settings).splitlines()]
    assert lines[0] == ["setting", "value", "source"]
    assert len(lines) == 1 + len(settings)
    assert ["devices", "2", "environment", "DRIVETRAIN_DEVICES"] in lines
    assert ["max_epochs", "3", "code"] in lines
    assert pickle.loads(pickle.dumps(settings)) == settings
    with pytest.raises(TypeError):
        settings["devices"] = settings["max_epochs"]  # type: ignore[index]


def test_a_timeout_may_be_seconds_and_an_invalid_one_is_refused_by_name() -> None:  # S-17
    strategies = (DDPStrategy, FSDPStrategy, DeepSpeedStrategy)
    values = ["60", -1.0, 0, True, float("nan"), float("inf"), timedelta(0)]
    for strategy, name, value in itertools.product(strategies, ("timeout", "step_timeout"), values):
        with pytest.raises(ConfigurationError, match=f"{name}={re.escape(repr(value))} is not a timeout"):
            strategy(**{name: value})
    assert DDPStrategy(timeout=60.0)._group.timeout == DDPStrategy(timeout=timedelta(minutes=1))._group.timeout


CPU = torch.device("cpu")
QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_checkpointing": False}


class ListLogger(Logger):
    """Takes the folder, as factories of loggers do."""

    name, version = "list", "0"

    def __init__(self, root: str) -> None:
        self.root = root

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None: ...


class FarmEnvironment(Environment):
    name = "farm"

    @classmethod
    def detect(cls, variables: Mapping[str, str]) -> bool:
        return False

    def placement(self) -> Placement:
        return Placement(self.variables.integer("FARM_WORKER"), self.variables.integer("FARM_WORKERS"))


class FinePrecision(Precision):
    name = "fine"


class CountingProfiler(Profiler):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def start(self, phase: str) -> None:
        self.counts[phase] += 1

    def stop(self, phase: str) -> None:
        assert self.counts[phase]

    def summary(self) -> str:
        return f"forward {self.counts['forward']}"


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, group: str, **points: str) -> None:
    name = group.replace(".", "_")
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *(f"{k} = {v}" for k, v in points.items())]))
    monkeypatch.syspath_prepend(folder)


CASES: dict[str, tuple[str, str, type, Callable[[str], object]]] = {  # group, built-in name and class, use of a name
    "strategy": ("drivetrain.strategies", "ddp", DDPStrategy, strategy_by_name),
    "launcher": ("drivetrain.launchers", "fork", FunctionLauncher, named_launcher),
    "logger": ("drivetrain.loggers", "csv", CSVLogger, lambda name: Fit(**QUIET, logger=name).loggers[0]),
    "environment": ("drivetrain.environments", "plain", PlainEnvironment, environment_by_name),
    "precision": ("drivetrain.precision", "32-true", FullPrecision, lambda name: resolve_precision(name, CPU)),
    "profiler": ("drivetrain.profilers", "simple", SimpleProfiler, lambda name: Fit(**QUIET, profiler=name).profiler),
}


@pytest.mark.parametrize("setting", CASES)
def test_names_of_other_packages_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    group, ours, kind, use = CASES[setting]
    points = {"cargo": "collections:UserList", "gone": "nowhere_to_be_found:Cargo", ours: "builtins:dict"}
    install(tmp_path, monkeypatch, group, **points)
    assert type(use(ours)) is kind  # built-in names cannot be replaced
    unknown = rf"(?s){setting}='carg' is unknown. Did you mean 'cargo'\?(?=.*'{group}')(?=.*{ours}).*cargo"
    with pytest.raises(ConfigurationError, match=unknown):
        Fit(**{**QUIET, setting: "carg"})
    refused = rf"The {setting} 'cargo' \(collections:UserList\) made a UserList, not a "
    with pytest.raises(ConfigurationError, match=refused):
        use("cargo")
    missing = rf"(?s)The {setting} 'gone' \(nowhere_to_be_found:Cargo\) cannot be imported.*No module named"
    with pytest.raises(ConfigurationError, match=missing):
        use("gone")


def test_built_in_names_need_no_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"logger='cvs' is unknown. Did you mean 'csv'"):
        Fit(**QUIET, logger="cvs", fast_dev_run=True)  # although the run has no loggers
    monkeypatch.delattr("importlib.metadata.entry_points")
    assert Fit(**QUIET, logger="csv", fast_dev_run=True).loggers == []
    Fit(**QUIET, logger=["csv"], launcher="fork", environment="slurm", precision="bf16", profiler="simple")
    assert isinstance(environment_by_name("plain"), PlainEnvironment)
    assert resolve_precision("bf16", CPU).name == "bf16-mixed"


def test_loggers_come_from_code_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "drivetrain.loggers", cargo=f"{__name__}:ListLogger")
    given = ListLogger("mine")
    fit = Fit(**QUIET, logger=["csv", given, "cargo", "tensorboard"], default_root_dir=tmp_path / "runs")
    loggers: list[Any] = fit.loggers
    assert loggers[1] is given
    assert [type(each) for each in loggers] == [CSVLogger, ListLogger, ListLogger, TensorBoardLogger]
    assert loggers[0].save_dir == loggers[3].save_dir == loggers[2].root == str(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()  # construction writes nothing
    values = {"csv": [CSVLogger], '["cargo", "csv"]': [ListLogger, CSVLogger], "False": []}
    for text, kinds in values.items():
        monkeypatch.setenv("DRIVETRAIN_LOGGER", text)
        fit = Fit(**QUIET)
        assert [type(each) for each in fit.loggers] == kinds
    assert str(fit.settings["logger"]) == "False (environment DRIVETRAIN_LOGGER)"
    monkeypatch.delenv("DRIVETRAIN_LOGGER")
    (tmp_path / "drivetrain.toml").write_text('logger = ["cargo", "csv"]\nenvironment = "slurm"\n')
    fit = Fit(**QUIET)
    assert [type(each) for each in fit.loggers] == [ListLogger, CSVLogger]
    assert fit.environment == "slurm"
    (tmp_path / "drivetrain.toml").write_text("logger = 3\n")
    with pytest.raises(ConfigurationError, match="logger was set to 3"):
        Fit(**QUIET)


def test_objects_of_another_package_are_made_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: dict[str, type] = {"environments": FarmEnvironment, "precision": FinePrecision}
    kinds |= {"strategies": SingleDeviceStrategy, "launchers": SubprocessLauncher}
    for group, kind in kinds.items():
        install(tmp_path, monkeypatch, f"drivetrain.{group}", cargo=f"{kind.__module__}:{kind.__qualname__}")
    monkeypatch.setenv("FARM_WORKER", "2")
    monkeypatch.setenv("FARM_WORKERS", "4")
    assert Fit(**QUIET, environment="cargo").global_rank == 2
    assert environment_by_name("cargo", {"FARM_WORKER": "1", "FARM_WORKERS": "4"}).placement() == Placement(1, 4)
    assert type(resolve_precision("cargo", CPU)) is FinePrecision
    assert Fit(**QUIET, precision="cargo").precision_setting == "cargo"
    assert type(strategy_by_name("cargo")) is SingleDeviceStrategy
    assert type(named_launcher("cargo")) is SubprocessLauncher
    Fit(**QUIET, strategy="cargo", launcher="cargo")


def test_a_profiler_of_another_package_measures(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:  # K-03
    install(tmp_path, monkeypatch, "drivetrain.profilers", cargo=f"{__name__}:CountingProfiler")
    monkeypatch.setenv("DRIVETRAIN_PROFILER", "cargo")
    fit = Fit(**QUIET, logger=False, enable_model_summary=False, max_epochs=1, default_root_dir=tmp_path / "runs")

    class Net(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    fit.fit(Net(), DataLoader(torch.ones(6, 2), batch_size=2))  # type: ignore[arg-type]
    assert isinstance(fit.profiler, CountingProfiler)
    assert fit.profiler.counts["forward"] == fit.profiler.counts["optimizer"] == 3
    assert "forward 3" in capsys.readouterr().out
    assert fit.log_dir is not None
    assert Path(fit.log_dir, "profile", "fit-counting-rank-0.txt").read_text() == "forward 3"
