"""Defects that are planted one at a time, by replacing functions, to check that the fuzzer finds them.

They reproduce the visible effect of an old defect rather than undo its fix, so that they stay valid when the code
changes. Each has the number of the defect that it reproduces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

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
def replaced(owner: Any, name: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace ``owner.name`` by ``by(original)`` within the context. Missing attributes are not created."""
    if not hasattr(owner, name):
        yield
        return
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, by(before))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def logged_values_change() -> Plant:
    """1: the logged value is the tensor itself, and changes with it."""

    def by(record: Any) -> Any:
        def planted_record(self: MetricStore, name: str, value: Any, *options: Any, **named: Any) -> None:
            record(self, name, value, *options, **named)
            entry = self.entries.get(name)
            if entry is None or self.muted or not isinstance(value, Tensor) or not value.requires_grad:
                return
            kept = value.detach().reshape(())
            if entry.on_step:
                entry.last = kept
            if entry.on_epoch and entry.waiting:
                entry.waiting[-1] = kept

        return planted_record

    return replaced(MetricStore, "record", by)


def unscaled_once() -> Plant:
    """2: fp16 gradients are unscaled once per `training_step`, however often the optimizer steps."""
    return replaced(LossScaler, "scale_again", _nothing)


def stale_casts() -> Plant:
    """3: autocast's cache of casts survives an optimizer step."""
    return replaced(torch, "clear_autocast_cache", _nothing)


@contextlib.contextmanager
def unfrozen_unnoticed() -> Iterator[None]:
    """4: parameters unfrozen within a run are not synchronised."""
    with contextlib.ExitStack() as stack:
        for strategy in (DDPStrategy, FSDPStrategy):
            if "trainable_changed" in vars(strategy):
                stack.enter_context(replaced(strategy, "trainable_changed", _nothing))
        yield


@contextlib.contextmanager
def length_cuts() -> Iterator[None]:
    """5: `len(loader)` ends the epoch even if there is more data."""

    def by(epoch: Any) -> Any:
        def planted_epoch(self: Any, number: int, start: int = 0, *rest: Any, **named: Any) -> Any:
            pairs = epoch(self, number, start, *rest, **named)
            return pairs if self.length is None else islice(pairs, max(0, self.length - start))

        return planted_epoch

    with replaced(IterableSource, "epoch", by), replaced(MapSource, "epoch", by):
        yield


@contextlib.contextmanager
def joiners_leave_buffers() -> Iterator[None]:
    """8: a buffer that a joining rank reassigns keeps the joining rank's value."""

    @contextlib.contextmanager
    def leaving_a_trace(module: Any, metrics: Any) -> Iterator[None]:
        company = None if metrics.joining else uneven_inputs.Joining(metrics)
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            if company is not None:
                company.end()

    with contextlib.ExitStack() as stack:
        for owner in (step, manual_step):
            stack.enter_context(replaced(owner, "without_side_effects", lambda before: leaving_a_trace))
        yield


def joiners_share_containers() -> Plant:
    """8: a joining rank gets the batch that a step has already modified."""
    return replaced(windows, "copy_containers", _as_it_is)


def validation_draws() -> Plant:
    """10: validation draws from training's generators."""

    def by(run: Any) -> Any:
        def planted_run(self: ValidationPlan) -> None:
            run(self)
            torch.empty((), dtype=torch.int64).random_()

        return planted_run

    return replaced(ValidationPlan, "run", by)


def layers_stay_behind() -> Plant:
    """11: layers built in `configure_model` do not come back from started processes."""

    def by(fill: Any) -> Any:
        def planted_fill(self: Outcome, module: Any) -> None:
            if any(True for _ in module.parameters()):
                fill(self, module)

        return planted_fill

    return replaced(Outcome, "fill", by)


def weights_come_back_rounded() -> Plant:
    """11: weights come back in the dtype that the caller's module had before."""

    def by(fill: Any) -> Any:
        def planted_fill(self: Outcome, module: Any) -> None:
            before = {name: one.dtype for name, one in module.named_parameters()}
            fill(self, module)
            for name, one in module.named_parameters():
                one.data = one.data.to(before.get(name, one.dtype))

        return planted_fill

    return replaced(Outcome, "fill", by)


def gradients_are_views() -> Plant:
    """12: DDP overwrites the gradients that an optimizer kept, because they are views of its buckets."""

    def by(init: Any) -> Any:
        def planted_init(self: DDPStrategy, *options: Any, **named: Any) -> None:
            init(self, *options, **{"gradient_as_bucket_view": True, **named})

        return planted_init

    return replaced(DDPStrategy, "__init__", by)


def evaluated_as_trained() -> Plant:
    """13: a checkpoint is evaluated with its trained weights, although it holds averages."""

    def by(evaluates: Any) -> Any:
        def planted_evaluates(self: WeightAveraging) -> bool | None:
            return None if evaluates.fget(self) is None else False

        return property(planted_evaluates)

    return replaced(WeightAveraging, "evaluates_averages", by)


def _as_it_is(before: Any) -> Any:
    return lambda batch: batch


def _nothing(before: Any) -> Any:
    return lambda *arguments: None


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


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant the defect ``name`` within the context; none for ""."""
    if not name:
        yield
        return
    with PLANTS[name]():
        yield
