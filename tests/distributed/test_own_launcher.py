"""Third-party launchers and environments, written with public names only, work like the built-in ones. K-02, K-03."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from small_runs import Regression, global_batches, loader, quiet, refusal, train_by_hand, weights
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from drivetrain import ConfigurationError
from drivetrain.environments import Environment, Placement
from drivetrain.launchers import Devices, Launcher, Work, named_launcher, torchrun_variables
from drivetrain.testing import run_distributed
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


def test_ranks_behind_another_program_train_the_callers_module(tmp_path: Path) -> None:
    module = Model()
    fit = quiet(strategy="ddp", devices=2, launcher=Wrapped(tmp_path, "nice", "-n", "3"))
    fit.fit(module, loader(64, 4))
    assert torch.allclose(weights(module), weights(train_by_hand(Model(), global_batches(64, 8))), atol=1e-6)
    assert (fit.global_step, fit.state, fit.world_size) == (8, "finished", 2)
    assert fit.callback_metrics["nice"] == os.nice(0) + 3


def test_a_launcher_that_starts_nothing_is_refused() -> None:  # K-03
    with pytest.raises(TypeError, match="Lazy implements neither launch, which returns a World, nor run"):
        type("Lazy", (Launcher,), {})
    runs: dict[str, Any] = {
        "Lazy.run returned without executing the run": lambda *_, **where: None,
        "The function passed to work.run_in_other_processes returned a NoneType": (
            lambda _, work, placement, **where: work.run_in_other_processes(lambda function, *arguments: None)
        ),
    }
    for message, run in runs.items():
        launcher = type("Lazy", (Launcher,), {"run": run})()
        assert message in refusal(Regression(), loader(16, 4), strategy="ddp", devices=2, launcher=launcher)


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


def _install(folder: Path, entry_points: str) -> None:
    info = folder / "cargo-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cargo\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


def test_a_launcher_places_devices_and_is_found_by_the_name_that_its_package_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, cluster = loader(8, 4), Cluster()
    settings: dict[str, Any] = {"accelerator": "gpu", "devices": 3, "num_nodes": 2}
    full = "ConfigurationError: The cluster is full"
    assert refusal(Model(), batches, strategy="ddp", launcher=cluster, **settings).startswith(full)
    assert cluster.asked == [("gpu", 3), 3, ("cuda", 6, 2)]
    monkeypatch.syspath_prepend(tmp_path)
    _install(tmp_path, f"[drivetrain.launchers]\ncargo_ship = {__name__}:Cluster\nfork = builtins:dict\n")
    assert refusal(Model(), batches, strategy="ddp", devices=3, launcher="cargo_ship").startswith(full)
    unknown = r"(?s)'cargo_shipp' is unknown. Did you mean 'cargo_ship'.*subprocess"
    with pytest.raises(ConfigurationError, match=unknown):
        quiet(launcher="cargo_shipp")
    assert isinstance(named_launcher("fork"), Launcher)  # built-in names cannot be replaced
    _install(tmp_path, "[drivetrain.launchers]\ncargo_ship = builtins:dict\n")
    monkeypatch.syspath_prepend(tmp_path)
    told = refusal(Model(), batches, strategy="ddp", devices=2, launcher="cargo_ship")
    assert told.startswith("ConfigurationError")
    assert "'cargo_ship' (builtins:dict) made a dict, not a Launcher" in told


class Farm(Environment):
    """A scheduler with variables of its own, which has started two processes."""

    def placement(self) -> Placement:
        worker, workers = self.variables.integer("FARM_WORKER"), self.variables.integer("FARM_WORKERS")
        return Placement(worker, workers, worker, workers)

    @property
    def main_port(self) -> int:
        return self.variables.integer("FARM_PORT")


_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


def _work_for_a_farm(folder: Path, port: int) -> list[Any]:
    sys.path.insert(0, str(folder))
    farm = {"FARM_WORKER": os.environ["RANK"], "FARM_WORKERS": "2", "FARM_PORT": str(port)}
    found: list[Any] = []
    for name in [name for name in os.environ if name.startswith(_OF_TORCHRUN)]:
        del os.environ[name]
    with mock.patch.dict(os.environ, farm):
        for environment in (Farm(), "farm"):
            module, fit = Regression(), quiet(strategy="ddp", environment=environment)
            before = fit.global_rank
            fit.fit(module, loader(64, 4))
            found.append((weights(module), before, fit.global_rank, fit.local_rank, fit.world_size))
        found.append(refusal(Regression(), loader(64, 4), strategy="ddp", environment="farm", devices=3))
        del os.environ["FARM_WORKERS"]
        found.append(refusal(Regression(), loader(64, 4), strategy="ddp", environment="farm"))
    return found


def test_ranks_of_a_third_party_scheduler_train_together(tmp_path: Path) -> None:
    _install(tmp_path, f"[drivetrain.environments]\nfarm = {__name__}:Farm\n")
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    reference = weights(train_by_hand(Regression(), global_batches(64, 8)))
    for rank, (*trained, devices, variable) in enumerate(
        run_distributed(_work_for_a_farm, 2, tmp_path, port, process_group=None)
    ):
        for found, *places in trained:
            torch.testing.assert_close(found, reference)
            assert places == [rank, rank, rank, 2]
        assert "devices x num_nodes = 3, and Farm has 2 processes." in devices
        assert "FARM_WORKERS is not set" in variable
        assert "Farm was detected or chosen as the environment" in variable


class Desk(Environment):
    """An environment that is not a cluster, and reports so."""

    started_processes = False

    def placement(self) -> Placement:
        return Placement()


def test_missing_processes_are_started_and_what_does_not_fit_is_refused_by_name() -> None:
    batches, reference = loader(16, 4), weights(train_by_hand(Regression(), global_batches(16, 8)))
    for environment in (Desk(), "plain"):
        module, fit = Regression(), quiet(strategy="ddp", devices=2, launcher="fork", environment=environment)
        fit.fit(module, batches)
        assert weights(module).allclose(reference, atol=1e-6)
        assert (fit.world_size, fit.environment) == (2, environment)
    # Only several nodes require the node's rank.
    assert refusal(Regression(), batches, devices=1, environment=Desk()) == "nothing was raised: "
    told = refusal(Regression(), batches, strategy="ddp", devices=1, num_nodes=2, environment=Desk())
    assert told.startswith("ConfigurationError: num_nodes=2 with environment='Desk'")
    assert "Desk.first_placement_on_node" in told
    alone = type("Alone", (SingleDeviceStrategy,), {"name": "alone"})
    told = refusal(Regression(), batches, strategy=alone(), devices=2)
    assert told.startswith("ConfigurationError: strategy='alone' with 2 devices")
