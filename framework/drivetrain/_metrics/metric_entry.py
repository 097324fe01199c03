"""Entry: one logged key, with the latest value and the values accumulated in the epoch."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

import torch

from drivetrain._metrics.values import copy_as_tensor
from drivetrain._runtime.transfer import move_to
from drivetrain.errors import ConfigurationError

_OPERATIONS: dict[Any, str] = {
    "mean": "mean",
    "sum": "sum",
    "max": "max",
    "min": "min",
    torch.mean: "mean",
    torch.sum: "sum",
    torch.max: "max",
    torch.min: "min",
    "avg": "mean",
    sum: "sum",
    max: "max",
    min: "min",
}

_OPTION_FIELDS = ("on_step", "on_epoch", "prog_bar", "logger", "operation", "sync_dist", "attribute", "loader")
_VALUE_FIELDS = ("last", "result", "fresh", "total", "weight")
_AGES = ("reduced_at", "logged_at")

_FOLD_AT = 64  # the number of pending values at which they are reduced to one value


@dataclass(slots=True, eq=False)
class Entry:
    """The state of one logged key. Device tensors stay on their device, and no method waits for the device.

    Attributes:
        name: the key.
        options: the arguments of `log`, which further calls have to repeat.
        on_step: keep the latest value.
        on_epoch: accumulate over the epoch.
        prog_bar: show the values in the progress bar.
        logger: send the values to the loggers.
        operation: "mean", "sum", "max" or "min".
        sync_dist: see `TrainModule.log`.
        metric: the metric object, if one was logged.
        attribute: the metric object's name on the module.
        loader: the suffix of the key that identifies one of several loaders. ``_step`` and ``_epoch`` are inserted
            before this suffix.
        loader_idx: with several loaders, the index of the loader that was in use when the key was first logged.
        last: the latest value.
        reduced: the value of ``last`` after the latest reduction over ranks.
        merged: a value of ``last`` that was merged from several ranks of a checkpoint, and the number of these ranks.
        result: the value of the latest epoch.
        reduced_at: the global step at which ``result`` was reduced.
        logged_at: the global step at which ``last`` was logged; None if ``result`` is newer.
        weighed: a value of ``last`` whose weight is a tensor, and whether this weight is not 0.
        fresh: whether ``last`` was not sent to the loggers yet.
        resumed: whether the key was restored from a checkpoint and has not been logged since.
        total: the weighted sum, sum, maximum or minimum of the epoch's values, without those that wait.
        weight: the sum of the weights of the epoch's values.
        waiting: the values that `total` does not contain yet.
        weights: the weights of the values that wait.
    """

    name: str
    options: tuple[Any, ...]
    on_step: bool
    on_epoch: bool
    prog_bar: bool
    logger: bool
    operation: str
    sync_dist: bool | None
    metric: Any = None
    attribute: str | None = None
    loader: str = ""
    loader_idx: int | None = None
    last: torch.Tensor | float | None = None
    reduced: torch.Tensor | float | None = None
    merged: tuple[torch.Tensor | float | None, int] = (None, 1)
    result: torch.Tensor | None = None
    reduced_at: int | None = None
    logged_at: int | None = None
    weighed: tuple[torch.Tensor | float | None, torch.Tensor | float] = (None, 1.0)
    fresh: bool = False
    resumed: bool = False
    total: torch.Tensor | float | None = None
    weight: torch.Tensor | float = 0.0
    waiting: list[torch.Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    @property
    def step_name(self) -> str:
        return self._suffixed("step") if self.on_epoch else self.name

    @property
    def epoch_name(self) -> str:
        return self._suffixed("epoch") if self.on_step else self.name

    def _suffixed(self, kind: str) -> str:
        return f"{self.name.removesuffix(self.loader)}_{kind}{self.loader}"

    def named_values(self) -> dict[str, tuple[torch.Tensor | float, int | None, int | None]]:
        """Return the values by each of the key's names, with the global steps at which they were reduced and logged.

        If there are step values and epoch values, `name` is the newer of the two.
        """
        values: dict[str, tuple[torch.Tensor | float, int | None, int | None]] = {}
        if self.result is not None:
            values[self.epoch_name] = values[self.name] = self.result, self.reduced_at, None
        if self.on_step and self.last is not None:
            values[self.step_name] = self.last, None, self.logged_at
            if self.result is None or self.logged_at is not None:
                values[self.name] = values[self.step_name]
        return values

    def reset(self) -> None:
        """Clear the epoch's values."""
        self.total, self.weight = None, 0.0
        self.waiting, self.weights = [], []

    @property
    def idle(self) -> bool:
        """Whether the key was restored from a checkpoint without values and has not been logged since.

        Ranks that did not exist when the checkpoint was saved do not know such a key.
        """
        return self.resumed and self.total is None and not self.waiting

    def last_with_weight(self, value: torch.Tensor | float, weight: torch.Tensor) -> torch.Tensor | float:
        """Return ``value``, or the latest value if ``weight`` is 0. The weight is not read by the host."""
        has_weight = weight.detach() != 0
        value = value if self.last is None else torch.where(has_weight, value, self.last)
        self.weighed = value, has_weight
        return value

    @property
    def has_weight(self) -> torch.Tensor | float:
        """Whether `last` was logged with a weight other than 0."""
        return self.weighed[1] if self.last is self.weighed[0] else 1.0

    def accumulate(self, value: torch.Tensor | float, weight: torch.Tensor | float) -> None:
        """Add one value to the epoch. Every operation sums the weights, but only a mean uses them as factors."""
        self.resumed = False
        if isinstance(weight, torch.Tensor):
            weight = _wide(weight)
            self.weight = self.weight + weight
            part = weight * (_wide(value) if isinstance(value, torch.Tensor) else value)
            # A value without weight does not count: the mean over no tokens is NaN.
            self.total = self._combine(self.total, torch.where(weight == 0, 0.0, part))
            return
        if not weight:
            self.total = 0.0 if self.total is None else self.total
            return
        self.weight += weight
        if isinstance(value, torch.Tensor):
            self.waiting.append(value)
            self.weights.append(weight)
            if len(self.waiting) >= _FOLD_AT:
                self._fold()
        else:
            self.total = self._combine(self.total, value * weight if self.operation == "mean" else value)

    def epoch_total(self) -> torch.Tensor | float | None:
        """Return the weighted sum, sum, maximum or minimum of the values so far, or None if there are no values."""
        if self.waiting:
            self._fold()
        return self.total

    def _fold(self) -> None:
        # A key may be logged from the host and from a device.
        for device in dict.fromkeys(value.device for value in self.waiting):
            indices = [index for index, value in enumerate(self.waiting) if value.device == device]
            values = [_wide(self.waiting[index]) for index in indices]
            if self.operation == "mean":
                # The weights are Python scalars, because copying a tensor of weights would wait for the device.
                values = list(torch._foreach_mul(values, [self.weights[index] for index in indices]))
            stacked = torch.stack(values)
            folded = {"max": stacked.amax, "min": stacked.amin}.get(self.operation, stacked.sum)()
            self.total = self._combine(self.total, folded)
        self.waiting = []
        self.weights = []

    def _combine(self, total: torch.Tensor | float | None, value: torch.Tensor | float) -> torch.Tensor | float:
        if total is None:
            return value
        if self.operation in ("mean", "sum"):
            return total + value
        if isinstance(total, torch.Tensor) or isinstance(value, torch.Tensor):
            pick = torch.maximum if self.operation == "max" else torch.minimum
            device = total.device if isinstance(total, torch.Tensor) else value.device  # type: ignore[union-attr]
            pair = [torch.as_tensor(part, dtype=torch.float64, device=device) for part in (total, value)]
            return pick(*pair)
        return max(total, value) if self.operation == "max" else min(total, value)

    # State for checkpoints

    def clone(self) -> Entry:
        """Return a copy that later values of this entry do not change."""
        clone = copy(self)
        clone.waiting, clone.weights = self.waiting[:], self.weights[:]
        return clone

    def state_dict(self) -> dict[str, Any]:
        """Return the options and values of the key. `MetricStore` saves the state of a metric object separately."""
        self.epoch_total()
        return {
            **{name: getattr(self, name) for name in (*_OPTION_FIELDS, *_VALUE_FIELDS, *_AGES)},
            "options": list(self.options[:2]),  # on_step and on_epoch as passed to `log`, before defaults
            "is_reduced": self.last is not None and self.last is self.reduced,
        }

    @classmethod
    def of_state(cls, name: str, state: Mapping[str, Any], device: torch.device) -> Self:
        """Create an entry from a result of `state_dict`, with the values on ``device``.

        Raises:
            KeyError, TypeError, ValueError: ``state`` is not a result of `state_dict`.
        """
        option_values = {key: state[key] for key in ("prog_bar", "logger", "operation", "sync_dist")}
        if not all(isinstance(state[key], str | None) for key in ("attribute", "operation", "loader")):
            raise TypeError(f"the entry of {name!r} has an option that is not a str")
        for key in ("last", "result", "total"):
            if state[key] is not None:
                copy_as_tensor(state[key])  # raises an error if the value is no number
        on_step, on_epoch = state["options"]
        entry = cls(name, (on_step, on_epoch, *option_values.values()), **{key: state[key] for key in _OPTION_FIELDS})
        for key in _VALUE_FIELDS:
            # A result has been reduced and is on the host.
            setattr(entry, key, state[key] if key == "result" else move_to(state[key], device))
        entry.reduced = entry.last if state["is_reduced"] else None
        for key in _AGES:
            setattr(entry, key, None if state[key] is None else int(state[key]))
        entry.resumed = True
        return entry

    def merge(self, other: Self) -> None:
        """Add the values that another rank has accumulated."""
        if other.total is not None:
            self.total = self._combine(self.total, other.total)
        self.weight += other.weight
        if self.on_step and self.sync_dist and None not in (self.last, other.last) and self.last is not self.reduced:
            self._merge_last(other.last)

    @property
    def ranks_of_last(self) -> int:
        """The number of ranks whose values `last` stands for: 1, unless it was merged from ranks of a checkpoint."""
        return self.merged[1] if self.last is self.merged[0] else 1

    def _merge_last(self, last: Any) -> None:
        """Merge the step value of another rank, which is to be reduced over ranks."""
        count = self.ranks_of_last
        is_mean = self.operation == "mean"
        total = self._combine(self.last * count if is_mean else self.last, last)  # type: ignore[operator]
        self.last = total / (count + 1) if is_mean else total
        self.merged = self.last, count + 1

    def adopt_options(self, options: tuple[Any, ...], operation: str | None) -> bool:
        """Return True if this entry was restored and ``options`` equal its options. If so, store ``options``.

        The checkpoint stores only the name of a reduction. ``options`` contain the object that was passed to `log`,
        such as ``torch.mean`` or ``"mean"``.
        """
        if not self.resumed or (*options[:4], operation, options[5]) != self.options:
            return False
        self.options, self.resumed = options, False
        return True


def operation_of(reduce_fx: Any) -> str | None:
    """Return the name of a reduction that is given as a name or a function, or None if the reduction is unknown."""
    try:
        return _OPERATIONS.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)
    except TypeError:  # `reduce_fx` is not hashable
        return None


def _wide(value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` in the widest floating-point type that its device supports."""
    return value.double() if value.device.type != "mps" else value.float()


def raise_options_mismatch(name: str, before: tuple[Any, ...], after: tuple[Any, ...]) -> NoReturn:
    """Raise the error for a key that is logged with other options than before.

    Raises:
        ConfigurationError: always. The message has both sets of options.
    """
    raise ConfigurationError(
        f"log({name!r}) was called with (on_step, on_epoch, prog_bar, logger, reduce_fx, sync_dist) {after}, and with "
        f"{before} before.",
        "a key has one meaning within a stage.",
        "use the same options, or another key.",
    )


def raise_kind_mismatch(entry: Entry, value: Any) -> NoReturn:
    """Raise the error for a key that was logged with a number and now with a metric object, or vice versa.

    Raises:
        ConfigurationError: always. The message gives the earlier kind of value.
    """
    before = "a number" if entry.metric is None else f"the {type(entry.metric).__name__} {entry.attribute!r}"
    raise ConfigurationError(
        f"log({entry.name!r}) was given a {type(value).__name__}, but it was given {before} before.",
        "a key has one meaning within a stage.",
        "use another key.",
    )
