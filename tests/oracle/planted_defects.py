"""Defects that are planted one at a time, by replacing functions, to check that the fuzzer finds them.

Each reproduces the visible effect of an old defect, whose number it has, and stays valid when the code changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from drivetrain._data.iterable_source import IterableSource
from drivetrain._data.loaders import MapSource
from drivetrain._engine.ranks.remote_run import RemoteResult
from drivetrain._loops import manual_step, step, uneven_inputs, windows
from drivetrain._loops.validation import ValidationPlan
from drivetrain._metrics.metric_store import MetricStore
from drivetrain.callbacks.weight_averaging import WeightAveraging
from drivetrain.precision._loss_scaler import LossScaler
from drivetrain_strategies.ddp.strategy import DDPStrategy
from drivetrain_strategies.fsdp.strategy import FSDPStrategy


def replaced(owner: Any, name: str, by: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """Replace ``owner.name`` by ``by``, which gets the original first, within the context."""
    before = getattr(owner, name)
    original = before.fget if isinstance(before, property) else before

    def planted_function(*arguments: Any, **named: Any) -> Any:
        return by(original, *arguments, **named)

    return patch.object(owner, name, property(planted_function) if isinstance(before, property) else planted_function)


def nothing(before: Any, *arguments: Any) -> None: ...


def record(before: Any, self: MetricStore, name: str, value: Any, *options: Any, **named: Any) -> None:
    """The logged value is the tensor itself, and changes with it."""
    before(self, name, value, *options, **named)
    entry = self.entries.get(name)
    if entry is None or self.muted or not isinstance(value, Tensor) or not value.requires_grad:
        return
    kept = value.detach().reshape(())
    if entry.on_step:
        entry.last = kept
    if entry.on_epoch and entry.waiting:
        entry.waiting[-1] = kept


def cut_epoch(before: Any, self: Any, number: int, start: int = 0, *rest: Any, **named: Any) -> Any:
    """`len(loader)` ends the epoch even if there is more data."""
    pairs = before(self, number, start, *rest, **named)
    return pairs if self.length is None else islice(pairs, max(0, self.length - start))


@contextlib.contextmanager
def leaving_a_trace(before: Any, module: Any, metrics: Any) -> Iterator[None]:
    """A buffer that a joining rank reassigns keeps the joining rank's value."""
    company = None if metrics.joining else uneven_inputs.LoggingPaused(metrics, joins=True)
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        if company is not None:
            company.end()


def draw_in_validation(before: Any, self: ValidationPlan) -> None:
    before(self)
    torch.empty((), dtype=torch.int64).random_()


def fill_layers_that_are_there(before: Any, self: RemoteResult, module: Any) -> None:
    """Layers built in `configure_model` do not come back from started processes."""
    if any(True for _ in module.parameters()):
        before(self, module)


def fill_rounded(before: Any, self: RemoteResult, module: Any) -> None:
    """Weights come back in the dtype that the caller's module had before."""
    dtypes = {name: one.dtype for name, one in module.named_parameters()}
    before(self, module)
    for name, one in module.named_parameters():
        one.data = one.data.to(dtypes.get(name, one.dtype))


def init_with_views(before: Any, self: DDPStrategy, *options: Any, **named: Any) -> None:
    """DDP overwrites the gradients that an optimizer kept, because they are views of its buckets."""
    before(self, *options, **{"gradient_as_bucket_view": True, **named})


PLANTS: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    "1-logged-values-change": [(MetricStore, "record", record)],
    # fp16 gradients are unscaled once per `training_step`, however often the optimizer steps.
    "2-unscaled-once": [(LossScaler, "scale_again", nothing)],
    # Autocast's cache of casts survives an optimizer step.
    "3-stale-casts": [(torch, "clear_autocast_cache", nothing)],
    # Parameters unfrozen within a run are not synchronised.
    "4-unfrozen-unnoticed": [(strategy, "trainable_changed", nothing) for strategy in (DDPStrategy, FSDPStrategy)],
    "5-length-cuts": [(source, "epoch", cut_epoch) for source in (IterableSource, MapSource)],
    "8-joiners-leave-buffers": [(owner, "without_side_effects", leaving_a_trace) for owner in (step, manual_step)],
    # A joining rank gets the batch that a step has already modified.
    "8-joiners-share-containers": [(windows, "copy_containers", lambda before, batch: batch)],
    # Validation draws from training's generators.
    "10-validation-draws": [(ValidationPlan, "run", draw_in_validation)],
    "11-layers-stay-behind": [(RemoteResult, "fill", fill_layers_that_are_there)],
    "11-weights-come-back-rounded": [(RemoteResult, "fill", fill_rounded)],
    "12-gradients-are-views": [(DDPStrategy, "__init__", init_with_views)],
    # A checkpoint is evaluated with its trained weights, although it holds averages.
    "13-evaluated-as-trained": [
        (WeightAveraging, "evaluates_averages", lambda before, self: None if before(self) is None else False)
    ],
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant the defect ``name`` within the context; none for ""."""
    with contextlib.ExitStack() as stack:
        for replacement in PLANTS[name] if name else ():
            stack.enter_context(replaced(*replacement))
        yield
