"""`torchmetrics.Metric` objects: recognised, computed over ranks, and their state kept."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from drivetrain.errors import CheckpointError, ConfigurationError


def all_ranks() -> None:
    """The group of all ranks, as torch takes it. A function by name, since a `Fit` is pickled for new processes."""


class MetricObjects:
    """The metric objects of a module, and what those came to that were logged.

    Args:
        module: has them as attributes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.group: Callable[[], Any] = all_ranks
        """Gives the ranks over which they are reduced, or None for all.

        It is asked and its answer not kept: while a failed rank holds a process group, peers blocked in it wait on.
        """
        self._ending = False  # between an epoch's first reduction and its end, where hooks log, and reset by hand
        self._settled: dict[str, torch.Tensor] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._computed: dict[str, Any] = {}

    def all(self) -> dict[str, Any]:
        """Every metric object, by its attribute."""
        if "torchmetrics" not in sys.modules:
            return {}
        return {name: child for name, child in self._module.named_modules() if is_metric(child)}

    def merged(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """Return each object's state after it has seen what it had on each of several ranks.

        Raises:
            CheckpointError: there is no way to merge them.
        """
        by_name: dict[str, list[Mapping[str, Any]]] = {}
        for state in states:
            for name, saved in state.items():
                by_name.setdefault(name, []).append(saved)
        return {
            name: all_saved[0] if len(all_saved) == 1 else merged_metric_state(name, self.at(name), all_saved)
            for name, all_saved in by_name.items()
        }

    def at(self, attribute: str) -> Any:
        """The metric object of that name."""
        return self._module.get_submodule(attribute)

    def attribute_of(self, name: str, metric: Any) -> str:
        """Where the module has ``metric``, which was logged as ``name``.

        Raises:
            ConfigurationError: nowhere.
        """
        for attribute, child in self._module.named_modules():
            if child is metric:
                return str(attribute)
        raise ConfigurationError(
            f"log({name!r}) was given a {type(metric).__name__} that is no attribute of the module.",
            "a metric must move with the module, and be found again on every rank and after a resume.",
            "assign it in __init__ (self.accuracy = ...), or pass metric_attribute=.",
        )

    def logged(self, key: str, metric: Any) -> None:
        """Note that the epoch value ``key`` is ``metric``'s: by its end, or as it is where the end has begun."""
        if self._ending:
            # The hook may reset it next, and to compute it now would communicate.
            self._settled.pop(key, None)
            self._states[key] = metric_state(metric)

    def computed(self, name: str, key: str, metric: Any, together: bool) -> torch.Tensor:
        """Return what the epoch value ``key`` comes to, see `computed`; the same again, unless it was logged since."""
        value = self._settled.get(key)
        if value is None:
            value = computed(name, metric, together, self.group(), self._states.pop(key, None))
            self._settled[key] = value
            self._computed[key] = metric
        return value

    def end_epoch(self) -> None:
        """The epoch's data are over, and what was logged of them is computed."""
        self._ending = True

    def begin_epoch(self) -> None:
        """What comes from here on belongs to another epoch."""
        self._ending = False
        self._settled, self._states, self._computed = {}, {}, {}

    def reset(self) -> None:
        """Reset what the epoch computed, and begin another: on a rank too that had no data, and logged none of it."""
        for metric in self._computed.values():
            reset(metric)
        self.begin_epoch()


def is_metric(value: Any) -> bool:
    """Whether ``value`` is a `torchmetrics.Metric`."""
    # Whoever holds a metric has imported torchmetrics; nobody else pays for it.
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def metric_state(metric: Any) -> dict[str, Any]:
    """Return a copy of the states that a metric declares with add_state, and of what it keeps about them."""
    return {name: _copied(value) for name, value in _kept(metric).items()}


def set_metric_state(metric: Any, state: Mapping[str, Any]) -> None:
    """Put back what `metric_state` returned."""
    metric.__dict__.update(state)


def reset(metric: Any) -> None:
    """Let a metric object forget what it has seen."""
    # An evaluation ends within torch.inference_mode, whose tensors training could not count in.
    with torch.inference_mode(False):
        metric.reset()


def merged_metric_state(name: str, metric: Any, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the state of one object that has seen what those of several ranks have.

    A class that has a ``merge_state`` of its own is left to it; else each state is brought together in the way in which
    ``compute`` does it over ranks. torchmetrics' own ``Metric.merge_state`` is not asked: it refuses what has
    ``full_state_update``, sums included, and stacks states that have no reduction, to which the next update would add.

    Args:
        name: where the module has the metric.
        metric: the object; afterwards as before.
        states: what `metric_state` returned on each rank.

    Raises:
        CheckpointError: more than one has seen something, and there is no way to merge them.
    """
    alone = [key for key, reduction in metric._reductions.items() if reduction is None and _has_tensor(states, key)]
    own = type(metric).merge_state is not sys.modules["torchmetrics"].Metric.merge_state
    if own or alone:
        # What has seen nothing adds nothing, and need not know how.
        states = [state for state in states if state["_update_count"]] or states[:1]
    if len(states) == 1:
        return states[0]
    if alone and not own:
        raise _unmergeable(name, metric, f"dist_reduce_fx=None for {', '.join(alone)} says no way to do it")
    merged = {**states[0], "_update_count": sum(state["_update_count"] for state in states), "_computed": None}
    try:
        return merged | (_by_itself(metric, states) if own else _as_in_compute(metric, states))
    except Exception as error:
        raise _unmergeable(name, metric, f"{type(error).__name__}: {error}") from error


def _by_itself(metric: Any, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    now = _kept(metric)
    try:
        set_metric_state(metric, {key: _copied(value) for key, value in states[0].items()})
        for state in states[1:]:
            metric.merge_state({key: state[key] for key in metric._defaults})
            metric._update_count += state["_update_count"]
        return {key: getattr(metric, key) for key in metric._defaults}
    finally:
        set_metric_state(metric, now)


def _as_in_compute(metric: Any, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    from torchmetrics.utilities import dim_zero_cat  # whoever has a metric has imported it

    merged: dict[str, Any] = {}
    for key, reduction in metric._reductions.items():
        parts = [state[key] for state in states]
        if any(isinstance(part, list) for part in parts):
            merged[key] = [each for part in parts for each in (part if isinstance(part, list) else [part])]
        elif reduction is dim_zero_cat:
            merged[key] = dim_zero_cat(parts)
        else:
            try:
                merged[key] = reduction(torch.stack(parts))
            except Exception as error:
                raise ValueError(f"of {key}: {error}") from error
    return merged


def _has_tensor(states: Sequence[Mapping[str, Any]], key: str) -> bool:
    return any(isinstance(state.get(key), torch.Tensor) for state in states)


def _unmergeable(name: str, metric: Any, why: str) -> CheckpointError:
    return CheckpointError(
        f"What several ranks' {type(metric).__name__} {name!r} had seen cannot be merged.",
        f"the run goes on with fewer ranks than it was saved with, within an epoch; {why}.",
        "resume on as many ranks or more, or from a checkpoint between two epochs; or give the metric's class a "
        "merge_state(incoming_state) of its own.",
    )


def _kept(metric: Any) -> dict[str, Any]:
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache"]
    return {name: getattr(metric, name) for name in names if name in metric.__dict__}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()  # what a metric that was called on a loss gave has a graph, and no deepcopy
    if type(value) in (list, tuple):
        return type(value)(_copied(part) for part in value)
    if type(value) is dict:
        return {key: _copied(part) for key, part in value.items()}
    return copy.deepcopy(value)


def computed(
    name: str, metric: Any, together: bool, group: Any, state: Mapping[str, Any] | None = None
) -> torch.Tensor:
    """Return the number that a metric logged as ``name`` computes.

    Args:
        name: for the error.
        metric: the object.
        together: over all ranks; collective then.
        group: the ranks, where the metric names none itself; None for all.
        state: what it was, where that counts and not what it is.

    Raises:
        ConfigurationError: it computes something else.
    """
    before, now = (metric.sync_on_compute, metric.process_group), _kept(metric)
    metric.sync_on_compute = together
    metric.process_group = metric.process_group or group
    if state is not None:
        set_metric_state(metric, state)
    try:
        value = metric.compute()
    finally:
        metric.sync_on_compute, metric.process_group = before
        if state is not None:
            set_metric_state(metric, now)
    # A copy: what a metric computes may be the very tensor that it goes on to count in.
    return one_number(name, metric, value).to("cpu", copy=True)


def forward_value(name: str, metric: Any) -> torch.Tensor | None:
    """Return what a metric logged as ``name`` gave for the batch that it was called on; None where it was not called.

    Raises:
        ConfigurationError: it computes something else than a number.
    """
    value = metric._forward_cache
    return None if value is None else one_number(name, metric, value).clone()


def one_number(name: str, metric: Any, value: Any) -> torch.Tensor:
    """Return what a metric computed, of shape () and without its graph.

    Raises:
        ConfigurationError: it is more than one number.
    """
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.float64)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise ConfigurationError(
        f"log({name!r}) was given a {type(metric).__name__}, which computes {found}.",
        "a logged value is one number.",
        "compute it in on_train_epoch_end or on_validation_epoch_end, and log its elements one at a time.",
    )
