"""What a strategy measures, predicts, draws and exchanges, in addition to training.

Written by hand: programs of `oracle` evaluate one loader within a run, seed the ranks themselves and predict nothing.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from parity_strategies import Candidate
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from drivetrain import Fit, TrainModule
from drivetrain.callbacks import LambdaCallback
from drivetrain.strategies import DistributedStrategy, strategy_by_name
from drivetrain_strategies import DDPStrategy
from oracle.engine import QUIET, strategy_of
from oracle.outcome import whole
from oracle.program import Program

SEED = 5
SIZES = ((97, 8), (35, 8), (3, 8), (5, 1))
"""Samples and batch size of a rank: tails shorter than the ranks, fewer samples than ranks."""

CLASSES = 3
Batch = tuple[Tensor, ...]


def samples(count: int) -> Batch:
    """Inputs (n, 6), classes (n,), indices (n,)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=generator)
    return x, x[:, :CLASSES].argmax(-1), torch.arange(count)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def seeded_mlp() -> nn.Module:
    torch.manual_seed(SEED)
    return mlp()


@dataclass
class Findings:
    scores: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    predictions: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    masks: list[list[Tensor]] = field(default_factory=list)
    initial: list[Tensor] = field(default_factory=list)
    unseeded: Tensor | None = None
    reductions: list[int] = field(default_factory=list)
    error: str = ""


class Observed(TrainModule):
    """Draws a dropout mask in every training step; scored by means, a maximum and a metric object, which counts."""

    def __init__(self, splits: bool, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net: Any = net
        self.splits = splits
        self.masks: list[Tensor] = []
        self.initial: list[Tensor] = []
        # One for each loader; a metric object belongs to one data set.
        self.accuracies: Any = nn.ModuleList(MulticlassAccuracy(CLASSES, average="micro") for _ in SIZES)

    def configure_model(self) -> None:
        if self.net is None:
            self.net = mlp()
        if self.splits:
            styles: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor"], styles)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if not self.initial:
            self.initial = [whole(self.net[0].weight)]
        self.masks.append(nn.functional.dropout(torch.ones(64), 0.5))
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y, _ = batch
        output = self.net(x)
        self.accuracies[dataloader_idx].update(output, y)
        self.log("loss", nn.functional.cross_entropy(output, y))
        self.log("accuracy", self.accuracies[dataloader_idx])
        self.log("most", output.max(), reduce_fx="max")

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> tuple[Tensor, Tensor]:
        return batch[2], self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def observe(candidate: Candidate, ranks: int, rank: int) -> Findings:
    findings = Findings()
    common: dict[str, Any] = {"strategy": None, "devices": ranks, "accelerator": "cpu", "logger": False, **QUIET}

    def fit(strategy: Any = None, **settings: Any) -> Fit:
        return Fit(**{**common, "strategy": strategy or strategy_of(candidate.strategy, Program()), **settings})

    try:
        _evaluate(findings, fit, candidate.tensor > 1)
        _draw(findings, fit, rank, candidate.tensor > 1)
        if ranks > 1:
            _count_exchanges(findings, fit, candidate, ranks)
    except Exception:
        findings.error = traceback.format_exc()
    return findings


def _evaluate(findings: Findings, fit: Callable[..., Fit], splits: bool) -> None:
    loaders = [DataLoader(TensorDataset(*samples(count)), batch_size=size) for count, size in SIZES]
    module = Observed(splits, seeded_mlp())
    scores = fit().validate(module, loaders, verbose=False)
    predictions = fit().predict(module, loaders)
    for number, size in enumerate(SIZES):
        named = {name.removesuffix(f"/dataloader_idx_{number}"): value for name, value in scores[number].items()}
        findings.scores[size], findings.predictions[size] = named, predictions[number]


def _draw(findings: Findings, fit: Callable[..., Fit], rank: int, splits: bool) -> None:
    loader = DataLoader(TensorDataset(*samples(16)), batch_size=4)
    for _ in range(2):
        # Draws of the process before a seeded run must not matter.
        torch.manual_seed(100 + 10 * rank + len(findings.masks))
        module = Observed(splits)
        fit(seed=SEED, max_epochs=1).fit(module, loader)
        findings.masks.append(module.masks)
        findings.initial += module.initial
    torch.manual_seed(rank)
    module = Observed(splits, mlp())
    fit(max_steps=1).fit(module, loader)
    findings.unseeded = module.initial[0]


def _count_exchanges(findings: Findings, fit: Callable[..., Fit], candidate: Candidate, ranks: int) -> None:
    """Record, after each micro-batch, how often the gradients of all parameters have been exchanged so far."""
    strategy = strategy_of(candidate.strategy, Program())
    strategy = strategy_by_name(strategy) if isinstance(strategy, str) else strategy
    loader = DataLoader(TensorDataset(*samples(40)), batch_size=8 // (ranks // candidate.tensor))
    with _counted(strategy, candidate) as count:
        note = LambdaCallback(on_train_batch_end=lambda *_: findings.reductions.append(count[0]))
        fit(strategy, max_epochs=1, accumulate_grad_batches=2, callbacks=note).fit(
            Observed(candidate.tensor > 1, seeded_mlp()), loader
        )
    once = next(reduced for reduced in findings.reductions if reduced)
    findings.reductions = [reduced // once if reduced % once == 0 else -1 for reduced in findings.reductions]


@contextlib.contextmanager
def _counted(strategy: Any, candidate: Candidate) -> Iterator[list[int]]:
    """Count the exchanges of a strategy's gradients within the context."""
    count = [0]

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            tensors = [one for one in (*arguments, *options.values()) if isinstance(one, Tensor)]
            # Norms, weights and flags are a few numbers.
            count[0] += not tensors or any(one.numel() > 8 for one in tensors)
            return function(*arguments, **options)

        return call

    def hook(state, bucket):  # torch inspects annotations, which must not be strings
        count[0] += 1
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None is the whole world

    with contextlib.ExitStack() as patches:
        if isinstance(strategy, DDPStrategy):
            strategy.comm_hook = hook
        elif candidate.shards or candidate.is_zero:
            # Newer versions of torch and DeepSpeed call reduce_scatter_single, which is no name of older ones.
            for name in ("all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter_single"):
                if hasattr(dist, name):
                    patches.enter_context(patch.object(dist, name, counted(getattr(dist, name))))
        elif isinstance(strategy, DistributedStrategy):
            strategy.exchange_gradients = counted(strategy.exchange_gradients)  # type: ignore[method-assign]
        yield count
