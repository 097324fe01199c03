"""Names of parts: built in, and from other packages (K-03)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import ConfigurationError, Fit, Logger, Precision
from drivetrain.environments import Environment, Placement, PlainEnvironment, environment_by_name
from drivetrain.launchers import FunctionLauncher, SubprocessLauncher, named_launcher
from drivetrain.loggers import CSVLogger, TensorBoardLogger
from drivetrain.precision import FullPrecision, resolve_precision
from drivetrain.profilers import Profiler, SimpleProfiler
from drivetrain.strategies import strategy_by_name
from drivetrain_strategies import DDPStrategy, SingleDeviceStrategy
from one_layer import OneLayer


@pytest.fixture(autouse=True)
def _in_an_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


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
    def __init__(self) -> None:  # does not call that of the base class
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
    with pytest.raises(ConfigurationError, match="logger=3 "):
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
    fit.fit(OneLayer(), DataLoader(torch.ones(6, 2), batch_size=2))  # type: ignore[arg-type]
    assert isinstance(fit.profiler, CountingProfiler)
    assert fit.profiler.counts["forward"] == fit.profiler.counts["optimizer"] == 3
    assert "forward 3" in capsys.readouterr().out
    assert fit.log_dir is not None
    assert Path(fit.log_dir, "profile", "fit-counting-rank-0.txt").read_text() == "forward 3"
