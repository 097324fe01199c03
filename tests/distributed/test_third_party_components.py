"""Third-party strategies, precisions, launchers and environments are correct, or refused. Rows K-01, K-02, K-03."""

from __future__ import annotations

import operator
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from small_runs import TIGHT, Regression, Saver, global_batches, loader, quiet, refusal, train_by_hand, trained, weights
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from averaging import Averaging
from drivetrain import ConfigurationError, Precision, Strategy
from drivetrain.environments import Environment, Placement
from drivetrain.launchers import Devices, Launcher, named_launcher, torchrun_variables
from drivetrain.precision import MixedPrecision, resolve_precision
from drivetrain.testing import run_distributed
from drivetrain_strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from drivetrain_strategies.fsdp.strategy import mixed_precision_policy
from worlds import free_port, on_ranks


class Unconnected(Strategy):
    """Written as for one process: on several, each would train a model of its own."""

    name = "unconnected"

    def setup_module(self, module: Any) -> Any:
        self.module = module
        return operator.call


class LeavesOutTheEnvironment(Averaging):
    def setup_environment(self) -> None:
        pass


class CountsForItself(Averaging):
    @property  # type: ignore[misc]  # final: type checkers refuse this override as well
    def world_size(self) -> int:
        return 1


class WithMaxNorm(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(4, 1, max_norm=1.0)


def _refusals() -> list[str]:
    texts = []
    for kind in (Unconnected, LeavesOutTheEnvironment, CountsForItself, Averaging):
        module: Any = WithMaxNorm() if kind is Averaging else Regression()
        before = weights(module)
        texts.append(refusal(module, loader(16, 4), strategy=kind()))
        assert torch.equal(weights(module), before)
    return texts


LOCAL_CONTROL = "a LocalControl, is rank 0 of 1, in a process that is rank"


def test_ranks_that_would_train_apart_are_refused() -> None:  # K-01
    for rank, found in enumerate(on_ranks(_refusals, 2)):
        assert all(text.startswith("ConfigurationError") for text in found), found
        unconnected, left_out, counts, with_max_norm = found
        assert f"Unconnected.control, {LOCAL_CONTROL} {rank} of 2" in unconnected
        assert "subclass drivetrain.strategies.DistributedStrategy" in unconnected
        assert f"LeavesOutTheEnvironment.control, {LOCAL_CONTROL} {rank} of 2" in left_out
        assert f"CountsForItself is rank {rank} of 1, in a process that is rank {rank} of 2" in counts
        assert "'table' is an Embedding with max_norm=1.0, on several ranks" in with_max_norm


def keep_a_wrapper(strategy: Any, module: Any) -> Any:
    strategy.module = torch.nn.Sequential(module)
    return operator.call


def return_nothing(strategy: Any, module: Any) -> None:
    Averaging.setup_module(strategy, module)


def return_the_module(strategy: Any, module: Any) -> Any:
    Averaging.setup_module(strategy, module)
    return module


INCOMPLETE: dict[str, Any] = {
    "self.module to a NoneType": lambda strategy, module: operator.call,
    "self.module to a Sequential": keep_a_wrapper,
    "returned a NoneType": return_nothing,
    "returned a Regression": return_the_module,
}


def test_an_incomplete_setup_module_is_refused() -> None:  # K-01
    for told, setup_module in INCOMPLETE.items():
        strategy = type("Incomplete", (Averaging,), {"setup_module": setup_module})()
        text = refusal(Regression(), loader(16, 4), strategy=strategy, devices=1)
        assert text.startswith("ConfigurationError: Incomplete.setup_module has set")
        assert told in text


class WithoutSuper(Averaging):
    def setup_optimizers(self, optimizers: Any) -> Any:
        self.optimizers = list(optimizers)
        return self.optimizers


class Unfreezing(Regression):
    """Trains its last layer in the first epoch, then both. A table has sparse gradients, on rank 0 alone."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(4, 1, sparse=True)
        self.register_buffer("steps", torch.zeros(()))
        self.counts: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1 + self.global_rank
        loss = self.loss(batch)
        return loss + self.table(torch.tensor([1])).sum() if self.global_rank == 0 else loss

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)

    def on_train_epoch_end(self) -> None:
        self.counts.append(float(self.steps))


def _unfreeze() -> Any:
    module = Unfreezing()
    trained(module, loader(32, 4), strategy=WithoutSuper(), max_epochs=2)
    return weights(module.net), module.table.weight.detach(), module.counts


def test_ranks_stay_equal_whichever_method_is_overridden() -> None:  # K-01, I-03
    reference = Regression()
    for trains in (False, True):
        reference.net[0].requires_grad_(trains)
        train_by_hand(reference, global_batches(32, 8))
    (net, table, counts), (other_net, other_table, other_counts) = on_ranks(_unfreeze, 2)
    torch.testing.assert_close(net, weights(reference), **TIGHT)
    assert torch.equal(net, other_net)
    assert torch.equal(table, other_table)
    assert (counts, other_counts) == ([4.0, 8.0], [8.0, 16.0])  # each rank's own, even after unfreezing


CPU = torch.device("cpu")
PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def toy() -> Precision:
    """Build the example of the docs, from its own code."""
    (block,) = (one for one in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "ToyFloat8" in one)
    names: dict[str, Any] = {"torch": torch, "Precision": Precision}
    exec(block.partition("\nmodule = ")[0], names)
    made: Precision = names["ToyFloat8"]()
    return made


class Recomputing(Regression):
    """Runs its layers again in the backward, and predicts."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        predicted = checkpoint(self.net, batch[0], use_reentrant=False)
        return functional.mse_loss(predicted, batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


def _train_toy(strategy: str, batch: int, path: str) -> list[torch.Tensor]:
    options: dict[str, Any] = {"strategy": strategy, "precision": toy(), "max_epochs": 2}
    module = Recomputing()
    whole = trained(Regression(), loader(64, batch), callbacks=Saver(path), **options)
    found = [whole, trained(Regression(), loader(64, batch), ckpt_path=path, **options)]
    found.append(trained(module, loader(64, batch), **options))
    return [*found, *quiet(**options).predict(module, loader(64, batch))[:1]]


@pytest.mark.parametrize(("strategy", "ranks"), [("single_device", 1), ("ddp", 2), ("fsdp", 2)])
def test_the_precision_of_the_docs_equals_the_hand_written_loop(strategy: str, ranks: int, tmp_path: Path) -> None:
    # K-03: each rank rounds its part of a batch of 8, by a scale of its own
    parts, rounded, plain = global_batches(64, 8 // ranks) * 2, Regression(), Regression()

    def step(part: Any, batch_idx: int) -> torch.Tensor:
        with toy().forward_context():
            return rounded.loss(part)

    train_by_hand(rounded, parts, window=ranks, step=step)
    train_by_hand(plain, parts, window=ranks)
    with toy().forward_context():
        predicted = rounded.net(parts[0][0])
    path = str(tmp_path / "saved")
    for whole, resumed, recomputed, outputs in on_ranks(_train_toy, ranks, strategy, 8 // ranks, path, timeout=150):
        assert torch.allclose(whole, weights(rounded), atol=1e-6)
        assert not torch.allclose(whole, weights(plain), atol=1e-3)
        assert torch.equal(resumed, whole)
        assert torch.equal(recomputed, whole)
        assert torch.allclose(outputs, predicted, atol=1e-5)


class DoublesInputs(Precision):
    updates = 0

    def convert_batch(self, batch: Any) -> Any:
        return 2 * batch[0], batch[1]

    def update(self) -> None:
        self.updates += 1


def test_overridden_methods_of_a_precision_are_called_without_a_flag() -> None:  # K-03
    precision = DoublesInputs()
    reference = train_by_hand(Regression(), [(2 * x, y) for x, y in global_batches(16, 4)])
    assert torch.allclose(trained(Regression(), loader(16, 4), precision=precision), weights(reference), atol=1e-6)
    assert precision.updates == 4


class Unnamed(Precision):
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(2 * loss)


class Doubled(MixedPrecision):
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(2 * loss)


def test_deepspeed_refuses_methods_that_its_engine_would_not_call() -> None:  # K-03
    doubled = Doubled("bf16-mixed", CPU)
    named = {"'float8-toy', a ToyFloat8": toy(), "'Unnamed', a Unnamed": Unnamed(), "Doubled": doubled}
    for name, precision in named.items():
        with pytest.raises(ConfigurationError, match=f"{name}, under DeepSpeed"):
            DeepSpeedStrategy().bind(Placement(), CPU, precision)
    for built_in in (resolve_precision("bf16-mixed", CPU), Precision()):  # as objects
        strategy = DeepSpeedStrategy()
        strategy.bind(Placement(), CPU, built_in)
        assert strategy.precision.name == built_in.name


class ReducedInHalf(Precision):
    reduce_dtype = torch.bfloat16


def test_a_reduction_dtype_of_a_precision_is_used() -> None:  # K-03
    assert mixed_precision_policy(ReducedInHalf()).reduce_dtype is torch.bfloat16
    two = Placement(world_size=2, local_world_size=2)
    with_hook, alone, refused = DDPStrategy(comm_hook="bf16"), DDPStrategy(), DDPStrategy()
    for strategy, placement in ((with_hook, two), (alone, Placement()), (refused, two)):
        strategy.bind(placement, CPU, ReducedInHalf())
    with_hook.check(Regression())
    alone.check(Regression())
    with pytest.raises(ConfigurationError, match=r"'ReducedInHalf' reduces gradients in torch.bfloat16"):
        refused.check(Regression())


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

    def call(self, placement: Placement, function: Any, *arguments: Any, **options: Any) -> Any:
        store = TCPStore(placement.address, placement.port, is_master=True, wait_for_workers=False)
        first, sent = replace(placement, port=store.port), self.folder / "work"
        sent.write_bytes(pickle.dumps((function, arguments)))
        command = [*self.wrapper, sys.executable, "-c", _RANK, str(sent)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        variables = [torchrun_variables(first.neighbour(rank)) for rank in range(placement.world_size)]
        ranks = [subprocess.Popen(command, env=environment | of_rank) for of_rank in variables]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}")
        return pickle.loads(Path(f"{sent}.of_rank_0").read_bytes())


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
    with pytest.raises(TypeError, match="Lazy implements neither launch, which returns LaunchedProcesses, nor call"):
        type("Lazy", (Launcher,), {})
    for method in ("launch", "call"):
        launcher = type("Lazy", (Launcher,), {method: lambda *_, **options: None})()
        told = refusal(Regression(), loader(16, 4), strategy="ddp", devices=2, launcher=launcher)
        assert told.startswith(("NotImplementedError: Lazy", "AttributeError: 'NoneType'"))


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

    def call(self, placement: Placement, function: Any, *arguments: Any, device: str = "cpu", **options: Any) -> Any:
        self.asked.append((device, placement.world_size, placement.num_nodes))
        raise ConfigurationError("The cluster is full")


def _install(folder: Path, entry_points: str) -> None:
    info = folder / "cargo-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cargo\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


def test_a_launcher_places_devices_and_is_found_by_its_registered_name(tmp_path: Path, monkeypatch: Any) -> None:
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
    port = free_port()
    reference = weights(train_by_hand(Regression(), global_batches(64, 8)))
    for rank, (*trained_weights, devices, variable) in enumerate(
        run_distributed(_work_for_a_farm, 2, tmp_path, port, process_group=None)
    ):
        for found, *places in trained_weights:
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
