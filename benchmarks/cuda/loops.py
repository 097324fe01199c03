"""The same work on devices, as a user of plain PyTorch would write it and with the engine."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.cuda.devices import DEVICE
from benchmarks.cuda.nets import GPT2, GPT_124M, Shape, tokens
from benchmarks.nets import checksum
from benchmarks.work import WORKS, Work
from drivetrain import Fit, Strategy, TrainModule
from drivetrain_strategies import FSDPStrategy

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
"""What FSDP's users write for bf16: weights are gathered in half precision, gradients summed in full."""

Data = Callable[[Tensor], Dataset[Any]]


@dataclass(frozen=True)
class Job:
    """A network and the way in which it is trained.

    Attributes:
        work: the network, its data and its optimizer.
        precision: as `Fit` takes it.
        strategy: ``single_device``, ``ddp``, ``fsdp``, or ``fsdp-bf16``, which gathers weights in bf16.
        compile: arguments of `torch.compile`, or None.
    """

    work: Work
    precision: str = "32-true"
    strategy: str = "single_device"
    compile: dict[str, Any] | None = None

    def net(self) -> nn.Module:
        net = self.work.net()
        if self.compile is None:
            return net
        compiled: nn.Module = torch.compile(net, **self.compile)  # type: ignore[assignment]  # of a module it is one
        return compiled

    def loader(self, steps: int, data: Data | None, whole: bool) -> DataLoader[Any]:
        """Return the batches of this rank, or of all ranks, in pinned memory."""
        ranks = _ranks()
        made = self.work.data(steps * ranks)
        assert isinstance(made, TensorDataset)
        tensors = made.tensors
        if not whole:
            rank, batch = dist.get_rank() if ranks > 1 else 0, self.work.batch
            shape = steps, ranks, batch
            tensors = tuple(each.view(*shape, *each.shape[1:])[:, rank].flatten(0, 1) for each in tensors)
        dataset = TensorDataset(*tensors) if data is None else data(*tensors)
        return DataLoader(dataset, batch_size=self.work.batch, pin_memory=True)


def by_hand(job: Job, steps: int, data: Data | None = None) -> float:
    """Run the loop without a framework; returns a checksum of the weights."""
    net = job.net().to(DEVICE)
    model = _wrapped(net, job.strategy)
    optimizer = job.work.optimizer(net)
    loss_of, dtype = job.work.loss, AUTOCAST.get(job.precision)
    if job.strategy == "fsdp-bf16":
        dtype = None
    scaler = torch.amp.GradScaler(DEVICE) if dtype == torch.float16 else None
    for batch in job.loader(steps, data, whole=False):
        batch = [part.to(DEVICE, non_blocking=True) for part in batch]
        optimizer.zero_grad()
        with contextlib.nullcontext() if dtype is None else torch.autocast(DEVICE, dtype):
            loss = loss_of(model, batch)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return checksum(net)


def by_engine(
    job: Job, steps: int, data: Data | None = None, kind: type[Trained] | None = None, **settings: Any
) -> float:
    """Run the same training under `Fit`, with further settings."""
    module = (kind or Trained)(job)
    strategy: str | Strategy = job.strategy
    if strategy == "fsdp-bf16":
        strategy = FSDPStrategy(mixed_precision=BF16)
    options = {"devices": _ranks(), "max_epochs": 1, "barebones": True, **settings}
    fit = Fit(accelerator=DEVICE, strategy=strategy, precision=job.precision, **options)
    fit.fit(module, job.loader(steps, data, whole=_ranks() > 1))
    return checksum(module.net)


class Trained(TrainModule):
    """A job's network."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.net = job.net()
        self.loss_of = job.work.loss
        self.make_optimizer = job.work.optimizer

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss_of(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.net)


def gpt(shape: Shape = GPT_124M, short: int = 5, long: int = 35) -> Work:
    """Return a GPT of the given shape with AdamW, as it is trained on a device."""
    return Work(
        "gpt-124m",
        lambda: copy.deepcopy(_prototype(shape)),
        _next_token,
        fused_adamw,
        lambda steps: TensorDataset(tokens(steps * shape.batch, shape)),
        shape.batch,
        short,
        long,
        long,
    )


@functools.cache  # Initialization takes seconds, so it is done once; every loop starts with the same weights.
def _prototype(shape: Shape) -> GPT2:
    return GPT2(shape)


def fused_adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)


def plain_adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-4)


def small(name: str, rehearse: bool) -> Work:
    """Return a work of `benchmarks.work`; a rehearsal has only a few steps."""
    work = WORKS[name]
    if not rehearse:
        return work
    few = {"short": 2, "long": 6, "fewer": 6}
    return Work(work.name, work.build, work.loss, work.optimizer, work.data, work.batch, **few)


def _next_token(net: nn.Module, batch: list[Tensor]) -> Tensor:
    loss: Tensor = net(batch[0])
    return loss


def _wrapped(net: nn.Module, strategy: str) -> nn.Module:
    if strategy == "ddp":
        index = torch.cuda.current_device()
        return DistributedDataParallel(net, device_ids=[index])
    if strategy.startswith("fsdp"):
        policy = BF16 if strategy == "fsdp-bf16" else MixedPrecisionPolicy()
        for block in net.blocks:  # type: ignore[union-attr]
            fully_shard(block, mp_policy=policy)
        fully_shard(net, mp_policy=policy)
    return net


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
