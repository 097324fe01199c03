"""One logged key: its latest value, and what an epoch has accumulated of it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, NoReturn, Self

import torch

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

_OPENED_WITH = ("on_step", "on_epoch", "prog_bar", "logger", "operation", "sync_dist", "attribute", "loader")
_GATHERED = ("last", "result", "fresh", "total", "weight")

_FOLD_AT = 64  # how many values wait before they are folded into one


class Entry:
    """The state of one key. Device tensors stay on their device; nothing here waits for it.

    Args:
        name: the key.
        options: what `log` was told, compared on every further call.
        on_step: keep the latest value.
        on_epoch: accumulate over the epoch.
        prog_bar: show it in the progress bar.
        logger: send it to the loggers.
        operation: "mean", "sum", "max" or "min".
        sync_dist: see `TrainModule.log`.
        metric: the metric object, where one was logged.
        attribute: its name on the module.
        loader: the end of the key that names a loader among several, behind which ``_step`` and ``_epoch`` do not go.
    """

    __slots__ = (
        "attribute",
        "fresh",
        "last",
        "loader",
        "logger",
        "metric",
        "name",
        "of_loader",
        "on_epoch",
        "on_step",
        "operation",
        "options",
        "prog_bar",
        "reduced",
        "result",
        "resumed",
        "sync_dist",
        "total",
        "waiting",
        "weight",
        "weights",
    )

    def __init__(
        self,
        name: str,
        options: tuple[Any, ...],
        *,
        on_step: bool,
        on_epoch: bool,
        prog_bar: bool,
        logger: bool,
        operation: str,
        sync_dist: bool | None,
        metric: Any = None,
        attribute: str | None = None,
        loader: str = "",
    ) -> None:
        self.name = name
        self.options = options
        self.on_step = on_step
        self.on_epoch = on_epoch
        self.prog_bar = prog_bar
        self.logger = logger
        self.operation = operation
        self.sync_dist = sync_dist
        self.metric = metric
        self.attribute = attribute
        self.loader = loader
        self.of_loader: int | None = None  # the index of the loader among several that first logged it
        self.last: torch.Tensor | float | None = None
        self.reduced: torch.Tensor | float | None = None  # what `last` was made by the last reduction over ranks
        self.result: torch.Tensor | None = None
        self.fresh = False
        self.resumed = False
        self.reset()

    @property
    def step_name(self) -> str:
        return self._forked("step") if self.on_epoch else self.name

    @property
    def epoch_name(self) -> str:
        return self._forked("epoch") if self.on_step else self.name

    def _forked(self, kind: str) -> str:
        return f"{self.name.removesuffix(self.loader)}_{kind}{self.loader}"

    def reset(self) -> None:
        """Forget what the epoch accumulated."""
        self.total: torch.Tensor | float | None = None
        self.weight: torch.Tensor | float = 0.0
        self.waiting: list[torch.Tensor] = []
        self.weights: list[float] = []

    @property
    def idle(self) -> bool:
        """Whether it came from a checkpoint with nothing in it, and was not logged since.

        Ranks that were not there when it was saved do not know of it.
        """
        return self.resumed and self.total is None and not self.waiting

    def accumulate(self, value: torch.Tensor | float, weight: torch.Tensor | float) -> None:
        """Add one value to the epoch. Only a mean has weights; of other operations they count the values."""
        if isinstance(weight, torch.Tensor):
            weight = _wide(weight)
            self.weight = self.weight + weight
            self.total = self._combine(
                self.total, weight * (_wide(value) if isinstance(value, torch.Tensor) else value)
            )
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
        """The weighted sum, sum, maximum or minimum so far; None where nothing came."""
        if self.waiting:
            self._fold()
        return self.total

    def _fold(self) -> None:
        # One key may be logged from the host and from the device.
        for device in dict.fromkeys(value.device for value in self.waiting):
            here = [index for index, value in enumerate(self.waiting) if value.device == device]
            values = [_wide(self.waiting[index]) for index in here]
            if self.operation == "mean":
                # Python scalars, not a tensor of weights, whose copy to the device would wait for it.
                values = list(torch._foreach_mul(values, [self.weights[index] for index in here]))
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

    # What a checkpoint keeps

    def clone(self) -> Entry:
        """Return an entry that has what this one has now, whatever this one takes from here on."""
        clone = copy(self)
        clone.waiting, clone.weights = self.waiting[:], self.weights[:]
        return clone

    def state_dict(self) -> dict[str, Any]:
        """Return how the key was opened and what came since; the metric object keeps its own state."""
        self.epoch_total()
        state = {name: getattr(self, name) for name in (*_OPENED_WITH, *_GATHERED)}
        forced = self.options[:2]  # what `log` was told, which need not be what it came to
        return {**state, "forced": list(forced), "is_reduced": self.last is not None and self.last is self.reduced}

    @classmethod
    def of_state(cls, name: str, state: Mapping[str, Any], device: torch.device) -> Self:
        """Make the entry that `state_dict` described, its values on ``device``.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        texts, flags = (state["attribute"], state["operation"], state["loader"]), (state["on_step"], state["on_epoch"])
        if not all(one is None or isinstance(one, str) for one in texts) or not all(type(one) is bool for one in flags):
            raise ValueError(f"{name!r} is described by {texts} and {flags}")
        forced = state["forced"]
        if not isinstance(forced, list) or len(forced) != 2 or not all(one in (None, True, False) for one in forced):
            raise ValueError(f"{name!r} was logged with {forced!r}")
        check_value(name, state["weight"])
        for key in ("last", "result", "total"):
            if state[key] is not None:
                check_value(name, state[key])
        named = {key: state[key] for key in ("prog_bar", "logger", "operation", "sync_dist")}
        entry = cls(name, (*state["forced"], *named.values()), **{key: state[key] for key in _OPENED_WITH})
        for key in _GATHERED:
            # A result was reduced, and lies on the host.
            setattr(entry, key, state[key] if key == "result" else move_to(state[key], device))
        entry.reduced = entry.last if state["is_reduced"] else None
        entry.resumed = True
        return entry

    def merge(self, other: Self) -> None:
        """Add what another rank had gathered."""
        if other.total is not None:
            self.total = self._combine(self.total, other.total)
        self.weight += other.weight

    def goes_on_with(self, options: tuple[Any, ...], operation: str | None) -> bool:
        """Whether this came from a checkpoint, and is now logged the same way; it then takes the very options.

        Of a reduction the checkpoint knows the name, and not whether it was given as ``torch.mean`` or ``"mean"``.
        """
        if not self.resumed or (*options[:4], operation, options[5]) != self.options:
            return False
        self.options, self.resumed = options, False
        return True


def check_value(name: str, value: Any) -> None:
    """Raises:
    ValueError: what a checkpoint holds for a logged value is no number.
    """
    if not (value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, int | float)):
        raise ValueError(f"{name!r} has a value of type {type(value).__name__}")


def operation_of(reduce_fx: Any) -> str | None:
    """Return the name of a reduction that was given as a name or a function; None where it is no known one."""
    try:
        return _OPERATIONS.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)
    except TypeError:  # it cannot be looked up
        return None


def _wide(value: torch.Tensor) -> torch.Tensor:
    """``value`` in the widest type that its device has."""
    return value.double() if value.device.type != "mps" else value.float()


def refuse_other_options(name: str, before: tuple[Any, ...], after: tuple[Any, ...]) -> NoReturn:
    """Refuse to log a key in another way than before.

    Raises:
        ConfigurationError: always; names what changed.
    """
    labels = ("on_step", "on_epoch", "prog_bar", "logger", "reduce_fx", "sync_dist")
    changed = [
        f"{label} from {old!r} to {new!r}" for label, old, new in zip(labels, before, after, strict=True) if old != new
    ]
    raise ConfigurationError(
        f"log({name!r}) was called with other options than before: {', '.join(changed)}.",
        "a key has one meaning within a stage.",
        "use the same options, or another key.",
    )


def refuse_another_kind(entry: Entry, value: Any) -> NoReturn:
    """Refuse a number for a key that is a metric object's, another object, or an object for a number's key.

    Raises:
        ConfigurationError: always; says what it was.
    """
    before = "a number" if entry.metric is None else f"the {type(entry.metric).__name__} {entry.attribute!r}"
    raise ConfigurationError(
        f"log({entry.name!r}) was given a {type(value).__name__}, and {before} before.",
        "a key has one meaning within a stage.",
        "use another key.",
    )
