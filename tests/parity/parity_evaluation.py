"""What a strategy measures, predicts and draws, in addition to training."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from parity_cases import SEED
from parity_engine import settings, whole
from parity_nets import Batch, Mlp, numbers
from parity_strategies import Candidate
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Fit, RunContext, TrainModule
from drivetrain.callbacks import LambdaCallback
from drivetrain.strategies import DistributedStrategy, strategy_by_name
from drivetrain_strategies import DDPStrategy

SIZES = ((102, 8), (97, 8), (65, 8), (35, 8), (3, 8), (5, 1))
"""Samples and batch size of a rank: dividing by nothing, tails shorter than the ranks, fewer samples than ranks."""

CLASSES = 3


def classes(samples: int) -> Batch:
    """Inputs (n, 6), classes (n,), indices (n,)."""
    x, y, indices = numbers(samples)
    return x, y.argmax(-1), indices


@dataclass
class Findings:
    """The observations of one rank, by subject."""

    scores: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    predictions: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    train_accuracy: list[float] = field(default_factory=list)
    masks: list[list[Tensor]] = field(default_factory=list)
    initial: list[Tensor] = field(default_factory=list)
    unseeded: Tensor | None = None
    reductions: list[int] = field(default_factory=list)
    error: str = ""


class Scored(TrainModule):
    """Scored by a mean of its batches' means, and by a metric object, which counts."""

    def __init__(self, splits: bool) -> None:
        super().__init__()
        import torchmetrics

        self.net = Mlp()
        self._splits = splits
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES, average="micro")
        # One for each loader; a metric object belongs to one data set.
        self.accuracies: Any = nn.ModuleList(self.accuracy.clone() for _ in SIZES)

    def configure_model(self) -> None:
        if self._splits:
            self.net.split(self.device_mesh["tensor"])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y, _ = batch
        output = self.net(x)
        # The correct answers differ in each epoch, so that values kept from a previous epoch would show.
        self.accuracy(output, (y + self.current_epoch) % CLASSES)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(output, y)

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
        return torch.optim.SGD(self.parameters(), lr=0.0)


class EpochAccuracy(Callback):
    """Keeps every epoch's value."""

    priority = -1

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_epoch_end(self, trainer: RunContext, module: TrainModule) -> None:
        self.values.append(float(trainer.callback_metrics["accuracy"]))


class Dropping(TrainModule):
    """Records the dropout masks, and the initial weights."""

    def __init__(self, splits: bool, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net: Any = net
        self.masks: list[Tensor] = []
        self.initial: Tensor | None = None
        self._splits = splits

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Linear(6, 3)
        if self._splits:
            parallelize_module(self.net, self.device_mesh["tensor"], ColwiseParallel(output_layouts=Replicate()))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.initial is None:
            self.initial = whole(self.net.weight.detach().clone())
        mask = nn.functional.dropout(torch.ones(64), 0.5)
        self.masks.append(mask)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def scored(splits: bool = False) -> Scored:
    torch.manual_seed(SEED)
    return Scored(splits)


def observe(candidate: Candidate, ranks: int, rank: int) -> Findings:
    """Evaluate, predict, and draw."""
    findings = Findings()
    splits = candidate.tensor > 1
    try:
        common: dict[str, Any] = settings(candidate, ranks)
        # One data set alone, and all the others in one run.
        _evaluate(findings, common, splits, *SIZES[:1])
        _evaluate(findings, common, splits, *SIZES[1:])
        accuracy = EpochAccuracy()
        loader = DataLoader(TensorDataset(*classes(97)), batch_size=16, shuffle=True)
        Fit(**common, max_epochs=2, callbacks=accuracy, seed=SEED).fit(scored(splits), loader)
        findings.train_accuracy = accuracy.values
        _draw(findings, common, rank, splits)
        strategy = candidate.strategy()
        strategy = strategy_by_name(strategy) if isinstance(strategy, str) else strategy
        if candidate.zero:
            _count_exchanges(findings, common)
        elif strategy.shards_parameters:
            _count_reduce_scatters(findings, common, candidate)
        elif isinstance(strategy, DDPStrategy):
            _count_reductions(findings, common)
        elif isinstance(strategy, DistributedStrategy):
            _count_own_exchanges(findings, common, strategy)
    except Exception:
        findings.error = traceback.format_exc()
    return findings


def _evaluate(findings: Findings, common: dict[str, Any], splits: bool, *sizes: tuple[int, int]) -> None:
    loaders = [DataLoader(TensorDataset(*classes(samples)), batch_size=batch_size) for samples, batch_size in sizes]
    module = scored(splits)
    scores = Fit(**common).validate(module, loaders, verbose=False)
    predictions = Fit(**common).predict(module, loaders)
    for number, size in enumerate(sizes):
        findings.scores[size] = {
            name.removesuffix(f"/dataloader_idx_{number}"): value for name, value in scores[number].items()
        }
        findings.predictions[size] = predictions[number] if len(sizes) > 1 else predictions


def _count_reductions(findings: Findings, common: dict[str, Any]) -> None:
    """Record, after each micro-batch, how many gradient buckets have been reduced so far."""
    count = [0]

    def hook(state, bucket):  # torch inspects annotations, which must not be strings
        count[0] += 1
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None is the whole world

    def note(*_: Any) -> None:
        findings.reductions.append(count[0])

    strategy = strategy_by_name(common["strategy"])
    strategy.comm_hook = hook  # type: ignore[attr-defined]
    loader = DataLoader(TensorDataset(*classes(80)), batch_size=8 // common["devices"])
    Fit(
        **{**common, "strategy": strategy},
        max_epochs=1,
        accumulate_grad_batches=4,
        callbacks=LambdaCallback(on_train_batch_end=note),
    ).fit(scored(), loader)


def _count_own_exchanges(findings: Findings, common: dict[str, Any], strategy: DistributedStrategy) -> None:
    """Record, after each micro-batch, how often the strategy has exchanged gradients so far."""
    count = [0]
    exchange = strategy.exchange_gradients

    def counted() -> None:
        count[0] += 1
        exchange()

    def note(*_: Any) -> None:
        findings.reductions.append(count[0])

    strategy.exchange_gradients = counted  # type: ignore[method-assign]
    loader = DataLoader(TensorDataset(*classes(80)), batch_size=8 // common["devices"])
    watch = LambdaCallback(on_train_batch_end=note)
    Fit(**{**common, "strategy": strategy}, max_epochs=1, accumulate_grad_batches=4, callbacks=watch).fit(
        scored(), loader
    )


# What FSDP and newer versions of DeepSpeed call; torch 2.11 has it under its older name.
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def _count_reduce_scatters(findings: Findings, common: dict[str, Any], candidate: Candidate) -> None:
    """Record, after each micro-batch, how often the gradients of all units have been reduced so far."""
    count = [0]
    reduce_scatter = getattr(dist, REDUCE_SCATTER)

    def counted(*arguments: Any, **options: Any) -> Any:
        count[0] += 1
        return reduce_scatter(*arguments, **options)

    def note(*_: Any) -> None:
        findings.reductions.append(count[0])

    setattr(dist, REDUCE_SCATTER, counted)
    try:
        size = 8 // (common["devices"] // candidate.tensor)
        loader = DataLoader(TensorDataset(*classes(80)), batch_size=size)
        Fit(**common, max_epochs=1, accumulate_grad_batches=4, callbacks=LambdaCallback(on_train_batch_end=note)).fit(
            scored(candidate.tensor > 1), loader
        )
    finally:
        setattr(dist, REDUCE_SCATTER, reduce_scatter)
    units = findings.reductions[3]  # of the first window
    findings.reductions = [reduced // units if reduced % units == 0 else -1 for reduced in findings.reductions]


def _count_exchanges(findings: Findings, common: dict[str, Any]) -> None:
    """Record, after each micro-batch, how often ZeRO has exchanged gradients so far."""
    count = [0]

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            tensors = [one for one in (*arguments, *options.values()) if isinstance(one, Tensor)]
            count[0] += any(one.numel() > 8 for one in tensors)  # norms and flags are single numbers
            return function(*arguments, **options)

        return call

    names = ("all_reduce", "reduce", REDUCE_SCATTER)
    functions = {name: getattr(dist, name) for name in names}
    for name, function in functions.items():
        setattr(dist, name, counted(function))
    try:
        loader = DataLoader(TensorDataset(*classes(80)), batch_size=8 // common["devices"])
        note = LambdaCallback(on_train_batch_end=lambda *_: findings.reductions.append(count[0]))
        Fit(**common, max_epochs=1, accumulate_grad_batches=4, callbacks=note).fit(scored(), loader)
    finally:
        for name, function in functions.items():
            setattr(dist, name, function)
    once = next(reduced for reduced in findings.reductions if reduced)
    findings.reductions = [reduced // once if reduced % once == 0 else -1 for reduced in findings.reductions]


def _draw(findings: Findings, common: dict[str, Any], rank: int, splits: bool) -> None:
    loader = DataLoader(TensorDataset(*numbers(32)), batch_size=4)
    for _ in range(2):
        # Draws of the process before a seeded run must not matter.
        torch.manual_seed(100 + 10 * rank + len(findings.masks))
        module = Dropping(splits)
        Fit(**common, seed=SEED, max_epochs=1).fit(module, loader)
        findings.masks.append(module.masks)
        assert module.initial is not None
        findings.initial.append(module.initial)
    torch.manual_seed(rank)
    module = Dropping(splits, nn.Linear(6, 3))
    Fit(**common, max_epochs=1).fit(module, loader)
    findings.unseeded = module.initial
