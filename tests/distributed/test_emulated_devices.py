"""O-01: strategies on emulated devices, one for each rank, with collectives in the order of NCCL's streams."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_runs import failing, quiet
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import TrainModule
from drivetrain.testing import World, run_distributed
from drivetrain_strategies import DDPStrategy, FSDPStrategy
from emulated_cuda import EmulatedCuda, emulated_cuda, requires_emulated_cuda
from worlds import Seen, preloaded, seen

pytestmark = requires_emulated_cuda()

_worlds: dict[int, World] = {}
"""Ranks apart from those of `worlds`: autograd keeps the number of devices that it first saw."""


@pytest.fixture(scope="module", autouse=True)
def _close_worlds() -> Iterator[None]:
    yield
    while _worlds:
        _worlds.popitem()[1].close()


def on_ranks(nprocs: int, fn: Callable[..., Any], *args: Any) -> list[Seen]:
    """Call ``fn(gpu, *args)`` on ranks with a device each; return the results and what the emulation recorded."""
    world = _worlds.setdefault(nprocs, World(nprocs, preload=preloaded()))
    return world.run(_on_rank, fn, args, nprocs, process_group=None, timeout=160.0)


def on_new_ranks(fn: Callable[..., Any], *args: Any, devices: int = 2, visible: bool = True) -> list[Seen]:
    """Call ``fn(gpu, *args)`` on two ranks, which end with it; if not ``visible``, each sees only its own device."""
    return run_distributed(_on_rank, 2, fn, args, devices, visible, process_group=None, timeout=160.0)


def _on_rank(fn: Callable[..., Any], args: tuple[Any, ...], devices: int, visible: bool = True) -> Seen:
    if not visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["RANK"]
    with emulated_cuda(devices) as gpu:
        return seen(gpu, fn(gpu, *args))


class Net(TrainModule):
    def __init__(self, scalar: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
        self.scale = nn.Parameter(torch.ones(())) if scalar else 1.0
        self.current_device = -1
        self.device_of_batches = ""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if torch.cuda.is_initialized():
            self.current_device = torch.cuda.current_device()
        self.device_of_batches = str(batch[0].device)
        loss = nn.functional.mse_loss((self.net(batch[0]) * self.scale).float(), batch[1].float())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", nn.functional.mse_loss(self.net(batch[0]).float(), batch[1].float()), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def trained(strategy: Any, accelerator: str, build: Callable[[], Any] = Net, batches: int = 8, **settings: Any) -> Any:
    """Train a module that is built with a fixed seed on a device for each rank, and return it."""
    torch.manual_seed(0)
    module, size = build(), int(os.environ["WORLD_SIZE"])
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(4 * size * batches, width, generator=generator) for width in (8, 1)))
    if strategy == OFFLOADED:
        strategy = FSDPStrategy(cpu_offload=True)
    fit = quiet(**{"accelerator": accelerator, "devices": size, "strategy": strategy, **settings})
    fit.fit(module, DataLoader(data, batch_size=4), DataLoader(data, batch_size=16))
    return module


OFFLOADED = "fsdp, offloaded"
ZERO = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")


def _equal(gpu: EmulatedCuda, strategy: str, precision: str) -> bool:
    settings: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "log_every_n_steps": 1}
    torch.cuda.set_device(0)
    there = trained(strategy, "cuda", precision=precision, **settings)
    assert there.current_device == int(os.environ["RANK"])
    assert torch.cuda.current_device() == 0
    here = trained(strategy, "cpu", precision=precision, **settings)
    pairs = zip(there.state_dict().values(), here.state_dict().values(), strict=True)
    return all(torch.equal(one.cpu(), other) for one, other in pairs)


@pytest.mark.parametrize(
    ("strategy", "ranks", "precision"),
    [
        ("ddp", 2, "32-true"),
        ("ddp", 2, "16-mixed"),
        ("ddp", 2, "bf16-mixed"),
        ("fsdp", 2, "bf16-mixed"),
        ("hsdp", 4, "32-true"),
        (OFFLOADED, 2, "16-mixed"),
        pytest.param("deepspeed_stage_1", 2, "32-true", marks=ZERO),
        pytest.param("deepspeed_stage_2", 2, "bf16-mixed", marks=ZERO),
        pytest.param("deepspeed_stage_3", 2, "bf16-mixed", marks=ZERO),
    ],
)
def test_a_run_gives_the_cpus_weights_without_a_race(strategy: str, ranks: int, precision: str) -> None:  # O-01
    for one in on_ranks(ranks, _equal, strategy, precision):
        assert one.returned
        assert not one.races, one.report
        assert not one.frees_in_use, one.report


def _in_a_group_on_nccl(gpu: EmulatedCuda, ours: bool) -> list[str]:
    if ours:
        torch.cuda.set_device(int(os.environ["RANK"]))
        dist.init_process_group("nccl")
    options: dict[str, Any] = {} if ours else {"process_group_backend": "nccl"}
    found = []
    for strategy in (DDPStrategy(**options), FSDPStrategy(**options), FSDPStrategy(cpu_offload=True, **options)):
        with failing() as error:
            trained(strategy, "cuda", gradient_clip_val=0.5)
        found.append(error["text"])
    if ours:
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("ours", [True, False])
def test_offloaded_shards_need_a_group_for_the_host(ours: bool) -> None:  # O-03
    for one in on_ranks(2, _in_a_group_on_nccl, ours):
        by_ddp, by_fsdp, refused = one.returned
        assert by_ddp == by_fsdp == ""
        assert "FSDPStrategy(cpu_offload=True) with a process group on 'nccl'" in refused
        assert ("backend='cpu:gloo,cuda:nccl'" if ours else "leave process_group_backend out") in refused
        assert not one.races, one.report


class Adapted(Net):
    """Has frozen weights: in float32 eight times 64 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(8))).requires_grad_(False)
        self.before = [one.detach().clone() for one in self.frozen.parameters()]
        self.bytes_on_device = self.peak = 0

    def on_train_start(self) -> None:
        self.bytes_on_device = torch.cuda.memory_allocated()

    def on_train_end(self) -> None:
        self.peak = torch.cuda.max_memory_allocated()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        used = self.frozen(batch[0].repeat(1, 16)).mean()
        return super().training_step(batch, batch_idx) + used.float()


def _frozen_under_zero(gpu: EmulatedCuda, stage: int) -> tuple[int, int, bool]:
    torch.cuda.set_device(int(os.environ["RANK"]))
    torch.cuda.reset_peak_memory_stats()
    module = trained(f"deepspeed_stage_{stage}", "cuda", Adapted, precision="bf16-mixed", limit_val_batches=0)
    after = [one.detach().cpu() for one in module.frozen.parameters()]
    return module.bytes_on_device, module.peak, all(map(torch.equal, module.before, after))


@ZERO
@pytest.mark.parametrize("stage", [1, 2])
def test_frozen_weights_stay_in_host_memory_under_zero(stage: int) -> None:
    # O-01: in float32, unchanged; the device has them in bf16 only, from the start
    for one in on_ranks(2, _frozen_under_zero, stage):
        held, peak, same = one.returned
        assert same
        assert 256 << 10 <= held <= (256 + 64 + 32) << 10
        assert peak <= (256 + 2 * 64 + 32) << 10  # one in float32 at a time, and the previous one
        assert not one.races, one.report


def _syncs(gpu: EmulatedCuda, strategy: str, scalar: bool, settings: dict[str, Any]) -> dict[int, list[str]]:
    found = {}
    for batches in (8, 16):
        gpu.forget()
        trained(strategy, "cuda", lambda: Net(scalar), batches, limit_val_batches=0, **settings)
        found[batches] = [str(sync) for sync in gpu.host_syncs]
        found[batches] += [str(copy) for copy in gpu.blocking_copies if copy.direction == "to the host"]
    return found


@pytest.mark.parametrize(
    ("strategy", "scalar", "settings"),
    [("ddp", False, {"gradient_clip_val": 0.5}), ("fsdp", False, {"gradient_clip_val": 0.5}), ("fsdp", True, {})],
)
def test_the_host_waits_no_more_often_for_more_steps(strategy: str, scalar: bool, settings: Any) -> None:  # O-01
    for one in on_ranks(2, _syncs, strategy, scalar, settings):
        found = one.returned
        assert len(found[16]) == len(found[8]), "\n".join(found[16])


def _devices_used(gpu: EmulatedCuda, strategy: str, devices: Any) -> tuple[int, str]:
    module = trained(strategy, "cuda", devices=devices)
    return module.current_device, module.device_of_batches


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", pytest.param("deepspeed_stage_1", marks=ZERO)])
def test_ranks_compute_on_the_requested_or_the_only_visible_device(strategy: str) -> None:  # O-01
    found = on_new_ranks(_devices_used, strategy, [1, 3], devices=4)
    assert [one.returned for one in found] == [(1, "cuda:1"), (3, "cuda:3")]
    if strategy == "ddp":
        for one in on_new_ranks(_devices_used, strategy, "auto", visible=False):
            assert one.returned == (0, "cuda:0")


NOTEBOOK = """
from small_runs import Regression, loader, quiet
from emulated_cuda import emulated_cuda

module = Regression()
with emulated_cuda(2):
    quiet(accelerator="gpu", devices=2, strategy="ddp", launcher="fork").fit(module, loader(16, 4))
print("it has trained")
"""


def test_processes_forked_by_a_notebook_can_use_their_devices(tmp_path: Path) -> None:  # O-01
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)
    assert "it has trained" in done.stdout, done.stderr[-3000:]


class Split(Net):
    """Splits its layers over ranks, but for a norm: an embedding and a last layer with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 10, bias=False))
        self.net[3].weight = self.net[0].weight

    def configure_model(self) -> None:
        whole = ColwiseParallel(output_layouts=Replicate())
        plan = {"0": RowwiseParallel(input_layouts=Replicate()), "1": whole, "3": whole}
        parallelize_module(self.net, self.device_mesh["tensor"], plan)
        self.net[3].weight = self.net[0].weight  # splitting gave each layer a parameter of its own

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        words = (batch[0].abs() * 3).long().clamp(max=9)
        return nn.functional.cross_entropy(self.net(words).flatten(0, 1), words.flatten())


def _split(gpu: EmulatedCuda) -> bool:
    torch.cuda.set_device(int(os.environ["RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    first, by_cpu, third = (
        trained(FSDPStrategy(tensor_parallel=2), accelerator, Split, limit_val_batches=0).state_dict()
        for accelerator in ("cuda", "cpu", "cuda")
    )
    dist.destroy_process_group()
    return all(torch.equal(one[name].cpu(), value) for one in (first, third) for name, value in by_cpu.items())


@pytest.mark.parametrize("ranks", [2, 4])
def test_split_layers_train_together_with_whole_ones(ranks: int) -> None:
    # O-01: the third run has meshes equal to the first one's, whose groups have ended; the script's own group remains
    for one in on_ranks(ranks, _split):
        assert one.returned
        assert not one.races, one.report
