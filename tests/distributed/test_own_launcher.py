"""Third-party launchers, written with public names only, drive runs like the built-in ones. K-02, K-03."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import run_cases
from small_runs import Regression, global_batches, loader, quiet, train_by_hand, weights
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from drivetrain import ConfigurationError
from drivetrain.environments import Placement
from drivetrain.launchers import Devices, Launcher, Work, named_launcher, torchrun_variables
from drivetrain_strategies import SingleDeviceStrategy

_RANK = """
import os, pickle, sys
function, arguments = pickle.load(open(sys.argv[1], "rb"))
result = function(*arguments)
pickle.dump(result, open(f"{sys.argv[1]}.of_rank_{os.environ['RANK']}", "wb"))
"""


class Wrapped(Launcher):
    """Starts each rank by a command line, wrapped in another program."""

    def __init__(self, folder: Path, *wrapper: str) -> None:
        self.folder, self.wrapper = folder, wrapper

    def run(self, work: Work, placement: Placement, *, address: str = "127.0.0.1", port: int = 0) -> Any:
        store = TCPStore(address, port, is_master=True, wait_for_workers=False)
        sent = self.folder / "work"

        def call(function: Any, *arguments: Any) -> Any:
            sent.write_bytes(pickle.dumps((function, arguments)))
            command = [*self.wrapper, sys.executable, "-c", _RANK, str(sent)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            places = [replace(placement, rank=rank, local_rank=rank) for rank in range(placement.world_size)]
            variables = [torchrun_variables(place, address, store.port) for place in places]
            ranks = [subprocess.Popen(command, env=environment | of_rank) for of_rank in variables]
            codes = [rank.wait() for rank in ranks]
            if any(codes):
                raise RuntimeError(f"the ranks ended with {codes}")
            return pickle.loads(Path(f"{sent}.of_rank_0").read_bytes())

        return work.run_in_other_processes(call)


class Model(Regression):
    def on_train_epoch_end(self) -> None:
        self.log("nice", float(os.nice(0)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).mean())


def test_ranks_behind_another_program_train_the_callers_module(tmp_path: Path) -> None:
    module = Model()
    fit = quiet(strategy="ddp", devices=2, launcher=Wrapped(tmp_path, "nice", "-n", "3"))
    fit.fit(module, loader(64, 4))
    assert torch.allclose(weights(module), weights(train_by_hand(Model(), global_batches(64, 8))), atol=1e-6)
    assert (fit.global_step, fit.state, fit.world_size) == (8, "finished", 2)
    assert fit.callback_metrics["nice"] == os.nice(0) + 3


def test_a_user_defined_command_runs_the_script_again(tmp_path: Path) -> None:
    body = """
    from drivetrain.launchers import Launcher, SubprocessLauncher

    class NiceScript(SubprocessLauncher):
        def command(self):
            return ["nice", "-n", "4", *super().command()]

    class Nice(Launcher):
        def launch(self, placement, **where):
            return NiceScript().launch(placement, **where)

    before = os.nice(0)
    module = Regression()
    fit = quiet(strategy="ddp", devices=2, launcher=Nice())
    fit.fit(module, loader(64, 4))
    say("of", fit.world_size, "at", before, f"{weights(module).sum():.6f}")
    """
    run = run_cases(tmp_path, body, ["nice"])["nice"]
    assert run.code == 0, run.errors
    here, total = os.nice(0), run.said[0].split()[-1]
    assert run.said == [f"0 of 2 at {here} {total}", f"1 of 2 at {here + 4} {total}"]


def test_a_launcher_overrides_one_of_two_methods() -> None:
    with pytest.raises(TypeError, match="StartsNothing implements neither launch, which returns a World, nor run"):
        type("StartsNothing", (Launcher,), {})


class DoesNothing(Launcher):
    def run(self, work: Work, placement: Placement, **where: Any) -> Any:
        return None


class AnswersForItself(Launcher):
    def run(self, work: Work, placement: Placement, **where: Any) -> Any:
        return work.run_in_other_processes(lambda function, *arguments: None)


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        (DoesNothing(), "DoesNothing.run returned without executing the run"),
        (AnswersForItself(), "The function passed to work.run_in_other_processes returned a NoneType"),
    ],
)
def test_a_launcher_that_runs_nothing_is_refused(launcher: Any, message: str) -> None:
    # K-03: previously fit succeeded without training
    with pytest.raises(ConfigurationError, match=message):
        quiet(strategy="ddp", devices=2, launcher=launcher).fit(Regression(), loader(16, 4))


class Cluster(Launcher):
    """Provides machines that the caller cannot see."""

    places_devices = True

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def devices(self, accelerator: str, devices: int | str | list[int]) -> Devices:
        self.asked.append((accelerator, devices))
        return Devices("cuda", (0, 1, 2), chosen=True)

    def check(self, num_local: int) -> None:
        self.asked.append(num_local)

    def run(self, work: Work, placement: Placement, **where: Any) -> Any:
        self.asked.append((work.device, placement.world_size, placement.num_nodes))
        raise ConfigurationError("The cluster is full")


def test_a_launcher_that_places_devices_is_asked_for_them() -> None:
    cluster = Cluster()
    with pytest.raises(ConfigurationError, match="The cluster is full"):
        quiet(strategy="ddp", accelerator="gpu", devices=3, num_nodes=2, launcher=cluster).fit(Model(), loader(8, 4))
    assert cluster.asked == [("gpu", 3), 3, ("cuda", 6, 2)]


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, made: str) -> None:
    info = folder / "cargo-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cargo\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[drivetrain.launchers]\ncargo_ship = {made}\nfork = builtins:dict\n")
    monkeypatch.syspath_prepend(folder)


def test_a_launcher_is_found_by_the_name_that_its_package_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, monkeypatch, f"{__name__}:Cluster")
    with pytest.raises(ConfigurationError, match="The cluster is full"):
        quiet(strategy="ddp", devices=3, launcher="cargo_ship").fit(Model(), loader(8, 4))
    unknown = r"(?s)'cargo_shipp' is unknown. Did you mean 'cargo_ship'.*subprocess"
    with pytest.raises(ConfigurationError, match=unknown):
        quiet(launcher="cargo_shipp")
    assert isinstance(named_launcher("fork"), Launcher)  # built-in names cannot be replaced
    _install(tmp_path, monkeypatch, "builtins:dict")
    with pytest.raises(ConfigurationError, match=r"'cargo_ship' \(builtins:dict\) made a dict, not a Launcher"):
        quiet(strategy="ddp", devices=2, launcher="cargo_ship").fit(Model(), loader(8, 4))


def test_built_in_and_default_launchers_read_no_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(**_: Any) -> Any:
        raise AssertionError("nobody asked for anything of another package")

    monkeypatch.setattr("importlib.metadata.entry_points", read)
    for setting in ("auto", "fork"):
        fit = quiet(launcher=setting, strategy=SingleDeviceStrategy())
        fit.validate(Model(), loader(8, 4), verbose=False)
        assert fit.state == "finished"
