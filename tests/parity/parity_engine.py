"""The same cases under `Fit`, on one rank of a strategy."""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from parity_cases import BY_NAME, SEED, Case
from parity_device import DEVICE
from parity_nets import Batch, Gan, Net
from parity_reference import Trace, stream
from parity_strategies import Candidate
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from drivetrain import Callback, Fit, RunContext, TrainModule


@dataclass
class Record:
    """What one rank observed in a run."""

    losses: list[float] = field(default_factory=list)
    weights_of_losses: list[float] = field(default_factory=list)
    indices: list[list[int]] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)
    clipped_norms: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: str = ""


class Trained(TrainModule):
    """A network of the cases as a `TrainModule`."""

    def __init__(self, case: Case, splits: bool) -> None:
        super().__init__()
        self.net: Net = case.net()
        self._case = case
        self._splits = splits

    def configure_model(self) -> None:
        if self._splits:
            self.net.split(self.device_mesh["tensor"])

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.net.loss(batch)

    def configure_optimizers(self) -> tuple[list[Optimizer], list[dict[str, Any]]]:
        optimizers = self._case.optimize(self.net)
        schedulers = self._case.schedule(optimizers)
        return optimizers, [{"scheduler": scheduler, "interval": interval} for scheduler, interval in schedulers]


class Weighed(Trained):
    """A module that states the number of items over which its loss is a mean."""

    def batch_weight(self, batch: Batch) -> float:
        return self.net.weight(batch)


class Players(Trained):
    """A GAN with manual optimization."""

    net: Gan

    def __init__(self, case: Case, splits: bool) -> None:
        super().__init__(case, splits)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        generator, discriminator = self.optimizers()
        losses = []
        for optimizer, play in ((discriminator, self.net.discriminator_loss), (generator, self.net.generator_loss)):
            with self.toggled_optimizer(optimizer):
                loss = play(batch)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            losses.append(loss)
        return {"loss": losses[0] + losses[1]}


class Recorder(Callback):
    """Records the values to compare. The strategy provides gradients and state, since it knows where they are
    stored.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.record = Record()

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        self.record.trace.planned = trainer.estimated_stepping_batches

    def on_before_optimizer_step(self, trainer: RunContext, module: TrainModule, optimizer: Optimizer) -> None:
        optimizers = trainer.optimizers
        if module.automatic_optimization:
            if optimizer is not optimizers[0]:
                return
        else:
            optimizers = [optimizer]
        # A bound that is never reached, to learn the norm before clipping.
        norm = float(trainer.strategy.clip_gradients(optimizers, 1e30))
        self.record.trace.norms.append(norm if math.isfinite(norm) else math.inf)
        self.record.trace.rates.append([group["lr"] for one in optimizers for group in one.param_groups])

    def on_train_batch_end(
        self, trainer: RunContext, module: Trained, outputs: dict[str, Tensor], batch: Batch, batch_idx: int
    ) -> None:
        record, joining = self.record, trainer.joining
        weighs = isinstance(module, Weighed)
        weight = 0.0 if joining else module.net.weight(batch) if weighs else len(batch[0])
        record.losses.append(float(outputs["loss"]))
        record.weights_of_losses.append(weight)
        record.indices.append([] if joining else batch[-1].tolist())
        record.trace.steps.append(trainer.global_step)
        if trainer.gradient_norm is not None and self.case.clip is not None:
            self.record.clipped_norms.append(float(trainer.gradient_norm))
        precision = trainer.strategy.precision
        if precision.name == "16-mixed":
            record.trace.scales.append(precision.state_dict()["scale"])

    def on_train_end(self, trainer: RunContext, module: Trained) -> None:
        for index in range(len(trainer.optimizers)):
            state = trainer.strategy.optimizer_state(index)["state"]
            self.record.trace.states.append(
                {
                    name.removeprefix("net."): {key: whole(value) for key, value in values.items()}
                    for name, values in state.items()
                }
            )


def whole(value: Any) -> Any:
    """Return a tensor that is sharded over ranks as a gathered CPU tensor, and anything else unchanged."""
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.cpu() if isinstance(value, Tensor) else value


class Parts(IterableDataset[Batch]):
    """A stream of batches for this rank alone, or shared with the ranks that read the same data."""

    def __init__(self, case: Case, data_rank: int) -> None:
        self._case = case
        self._data_rank = data_rank

    def __iter__(self) -> Iterator[Batch]:
        return stream(self._case, self._data_rank)


def settings(candidate: Candidate, ranks: int) -> dict[str, Any]:
    """Return settings that all runs of the suite share."""
    return {
        "strategy": candidate.strategy(),
        "devices": ranks,
        "accelerator": DEVICE,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }


def train(case: Case, candidate: Candidate, rank: int, ranks: int, precision: str) -> Record:
    """Train ``case`` under ``candidate`` on this rank."""
    torch.manual_seed(SEED)
    kind = Players if not case.automatic else Weighed if case.weighs else Trained
    module = kind(case, splits=candidate.tensor > 1)
    if case.own_parts:
        loader = DataLoader(Parts(case, rank // candidate.tensor), batch_size=None)
    else:
        size = case.batch // (ranks // candidate.tensor)
        loader = DataLoader(TensorDataset(*case.data()), batch_size=size, shuffle=True)
    recorder = Recorder(case)
    clip: dict[str, Any] = (
        {} if case.clip is None else {"gradient_clip_val": case.clip[0], "gradient_clip_algorithm": case.clip[1]}
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Fit(
            **settings(candidate, ranks),
            precision=precision,
            max_epochs=case.epochs,
            accumulate_grad_batches=case.accumulate,
            seed=SEED,
            callbacks=recorder,
            **clip,
        ).fit(module, loader)
    record = recorder.record
    record.warnings = [str(warning.message) for warning in caught]
    record.trace.weights = {name: value.detach().cpu().clone() for name, value in module.net.state_dict().items()}
    return record


def train_all(jobs: Sequence[tuple[str, str]], candidate: Candidate, rank: int, ranks: int) -> list[Record]:
    """Train every case, given as its name and a precision; failures are returned as such."""
    records = []
    for name, precision in jobs:
        try:
            records.append(train(BY_NAME[name], candidate, rank, ranks, precision))
        except Exception:
            records.append(Record(error=traceback.format_exc()))
    return records


def together(case: Case, records: Sequence[Record]) -> Trace:
    """Merge the records of all ranks: losses weighted over ranks and micro-batches; each global micro-batch's samples.

    Args:
        case: the case.
        records: the record of one rank for each share of the data.
    """
    first = records[0].trace
    trace = Trace(
        norms=first.norms,
        rates=first.rates,
        steps=first.steps,
        planned=first.planned,
        weights=first.weights,
        states=first.states,
    )
    start = 0
    for stop in _ends_of_windows(case, len(first.steps)):
        total = mean = 0.0
        for record in records:
            window = zip(record.losses[start:stop], record.weights_of_losses[start:stop], strict=True)
            for loss, weight in window:
                if weight:  # the mean over no items may be NaN
                    total += weight
                    mean += weight * loss
        trace.losses.append(mean / total if total else math.nan)
        trace.scales += first.scales[stop - 1 : stop]
        start = stop
    trace.batches = [
        [index for record in records for index in record.indices[position]] for position in range(len(first.steps))
    ]
    return trace


def _ends_of_windows(case: Case, micro_batches: int) -> Iterator[int]:
    """Return the ends of windows, counted over the whole run: an epoch's last one may be short."""
    epoch = micro_batches // case.epochs
    for start in range(0, micro_batches, epoch):
        for offset in range(0, epoch, case.accumulate):
            yield start + min(epoch, offset + case.accumulate)
