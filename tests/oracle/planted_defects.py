"""Defects that are planted one at a time, by replacing functions, to check that the fuzzer finds them.

They reproduce the visible effect of an old defect rather than undo its fix, so that they stay valid when the code
changes. Each has the number of the defect that it reproduces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from drivetrain._engine.remote_result import Outcome
from drivetrain._loops import manual_step, step, uneven_inputs, windows
from drivetrain._loops.validation import ValidationPlan
from drivetrain._metrics.metric_store import MetricStore
from drivetrain.callbacks.weight_averaging import WeightAveraging
from drivetrain.data._iterable_source import IterableSource
from drivetrain.data._loaders import MapSource
from drivetrain.precision._loss_scaler import LossScaler
from drivetrain_strategies.ddp.strategy import DDPStrategy
from drivetrain_strategies.fsdp.strategy import FSDPStrategy

Plant = contextlib.AbstractContextManager[None]


@contextlib.contextmanager
def replaced(owner: Any, name: str, by: Any) -> Iterator[None]:
    """Replace ``owner.name`` by ``by``, which gets the original first, within the context. Nothing is created."""
    if not hasattr(owner, name):
        yield
        return
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, lambda *arguments, **named: by(before, *arguments, **named))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def nothing(before: Any, *arguments: Any) -> None:
    """Do nothing."""


def logged_values_change() -> Plant:
    """1: the logged value is the tensor itself, and changes with it."""

    def record(before: Any, self: MetricStore, name: str, value: Any, *options: Any, **named: Any) -> None:
        before(self, name, value, *options, **named)
        entry = self.entries.get(name)
        if entry is None or self.muted or not isinstance(value, Tensor) or not value.requires_grad:
            return
        kept = value.detach().reshape(())
        if entry.on_step:
            entry.last = kept
        if entry.on_epoch and entry.waiting:
            entry.waiting[-1] = kept

    return replaced(MetricStore, "record", record)


def unscaled_once() -> Plant:
    """2: fp16 gradients are unscaled once per `training_step`, however often the optimizer steps."""
    return replaced(LossScaler, "scale_again", nothing)


def stale_casts() -> Plant:
    """3: autocast's cache of casts survives an optimizer step."""
    return replaced(torch, "clear_autocast_cache", nothing)


@contextlib.contextmanager
def unfrozen_unnoticed() -> Iterator[None]:
    """4: parameters unfrozen within a run are not synchronised."""
    with contextlib.ExitStack() as stack:
        for strategy in (DDPStrategy, FSDPStrategy):
            if "trainable_changed" in vars(strategy):
                stack.enter_context(replaced(strategy, "trainable_changed", nothing))
        yield


@contextlib.contextmanager
def length_cuts() -> Iterator[None]:
    """5: `len(loader)` ends the epoch even if there is more data."""

    def epoch(before: Any, self: Any, number: int, start: int = 0, *rest: Any, **named: Any) -> Any:
        pairs = before(self, number, start, *rest, **named)
        return pairs if self.length is None else islice(pairs, max(0, self.length - start))

    with replaced(IterableSource, "epoch", epoch), replaced(MapSource, "epoch", epoch):
        yield


@contextlib.contextmanager
def joiners_leave_buffers() -> Iterator[None]:
    """8: a buffer that a joining rank reassigns keeps the joining rank's value."""

    @contextlib.contextmanager
    def leaving_a_trace(before: Any, module: Any, metrics: Any) -> Iterator[None]:
        company = None if metrics.joining else uneven_inputs.Joining(metrics)
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            if company is not None:
                company.end()

    name = "without_side_effects"
    with replaced(step, name, leaving_a_trace), replaced(manual_step, name, leaving_a_trace):
        yield


def joiners_share_containers() -> Plant:
    """8: a joining rank gets the batch that a step has already modified."""
    return replaced(windows, "copy_containers", lambda before, batch: batch)


def validation_draws() -> Plant:
    """10: validation draws from training's generators."""

    def run(before: Any, self: ValidationPlan) -> None:
        before(self)
        torch.empty((), dtype=torch.int64).random_()

    return replaced(ValidationPlan, "run", run)


def layers_stay_behind() -> Plant:
    """11: layers built in `configure_model` do not come back from started processes."""

    def fill(before: Any, self: Outcome, module: Any) -> None:
        if any(True for _ in module.parameters()):
            before(self, module)

    return replaced(Outcome, "fill", fill)


def weights_come_back_rounded() -> Plant:
    """11: weights come back in the dtype that the caller's module had before."""

    def fill(before: Any, self: Outcome, module: Any) -> None:
        dtypes = {name: one.dtype for name, one in module.named_parameters()}
        before(self, module)
        for name, one in module.named_parameters():
            one.data = one.data.to(dtypes.get(name, one.dtype))

    return replaced(Outcome, "fill", fill)


def gradients_are_views() -> Plant:
    """12: DDP overwrites the gradients that an optimizer kept, because they are views of its buckets."""

    def init(before: Any, self: DDPStrategy, *options: Any, **named: Any) -> None:
        before(self, *options, **{"gradient_as_bucket_view": True, **named})

    return replaced(DDPStrategy, "__init__", init)


@contextlib.contextmanager
def evaluated_as_trained() -> Iterator[None]:
    """13: a checkpoint is evaluated with its trained weights, although it holds averages."""
    before: Any = WeightAveraging.evaluates_averages
    planted: Any = property(lambda self: None if before.fget(self) is None else False)
    with patch.object(WeightAveraging, "evaluates_averages", planted):
        yield


PLANTS: dict[str, Callable[[], Plant]] = {
    "1-logged-values-change": logged_values_change,
    "2-unscaled-once": unscaled_once,
    "3-stale-casts": stale_casts,
    "4-unfrozen-unnoticed": unfrozen_unnoticed,
    "5-length-cuts": length_cuts,
    "8-joiners-leave-buffers": joiners_leave_buffers,
    "8-joiners-share-containers": joiners_share_containers,
    "10-validation-draws": validation_draws,
    "11-layers-stay-behind": layers_stay_behind,
    "11-weights-come-back-rounded": weights_come_back_rounded,
    "12-gradients-are-views": gradients_are_views,
    "13-evaluated-as-trained": evaluated_as_trained,
}


def planted(name: str) -> Plant:
    """Plant the defect ``name`` within the context; none for ""."""
    return PLANTS[name]() if name else contextlib.nullcontext()
