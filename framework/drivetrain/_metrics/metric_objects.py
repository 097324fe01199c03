"""MetricObjects: the `torchmetrics.Metric` objects of a module, their values over all ranks and their saved state."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain.errors import CheckpointError, ConfigurationError


def default_process_group() -> None:
    """Return None, torch's value for the group of all ranks.

    This is a named function because a lambda could not be pickled with the `Fit`.
    """


class MetricObjects:
    """The metric objects of a module, and the epoch values of the metrics that were logged.

    Args:
        module: the module with the metrics as attributes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.group: Callable[[], Any] = default_process_group
        """Returns the process group in which the metrics are reduced, or None for all ranks.

        Look the group up on every use and never store it: a stored reference keeps the group alive after a failure, and
        blocked peers would hang.
        """
        self._is_reduced = False  # True from an epoch's reduction to its end; hooks may log or reset metrics in between
        self._epoch_values: dict[str, torch.Tensor] = {}  # the computed values of this epoch, by key
        self._late_states: dict[str, dict[str, Any]] = {}  # states of metrics logged after the reduction, by key
        self._computed_metrics: dict[str, Any] = {}  # the metrics whose value this epoch computed, by key
        self._claims: dict[str, tuple[str, str | None]] = {}  # each metric's stage, and its epoch value's key

    def all(self) -> dict[str, Any]:
        """Return all metric objects by attribute name."""
        if "torchmetrics" not in sys.modules:
            return {}
        return {name: child for name, child in self._module.named_modules() if is_metric(child)}

    def restorer(self) -> Callable[[], None]:
        """Return a function that restores the present states of all metric objects."""
        states = [(metric, metric_state(metric)) for metric in self.all().values()]

        def restore() -> None:
            for metric, state in states:
                set_metric_state(metric, state)

        return restore

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """Return the state of each metric object, merged from the states of several ranks.

        Raises:
            CheckpointError: the states of a metric cannot be merged.
        """
        by_name: dict[str, list[Mapping[str, Any]]] = {}
        for state in states:
            for name, saved in state.items():
                by_name.setdefault(name, []).append(saved)
        return {
            name: all_saved[0] if len(all_saved) == 1 else merge_metric_states(name, self.at(name), all_saved)
            for name, all_saved in by_name.items()
        }

    def at(self, attribute: str) -> Any:
        """Return the metric object at ``attribute``."""
        return self._module.get_submodule(attribute)

    def attribute_of(self, name: str, metric: Any) -> str:
        """Return the attribute name of ``metric``, which was logged as ``name``.

        Raises:
            ConfigurationError: ``metric`` is not an attribute of the module.
        """
        for attribute, child in self._module.named_modules():
            if child is metric:
                return str(attribute)
        raise ConfigurationError(
            f"log({name!r}) was given a {type(metric).__name__} that is not an attribute of the module.",
            "a metric must move with the module and exist on every rank and after a resume.",
            "assign the metric in __init__ (self.accuracy = ...), or pass metric_attribute=.",
        )

    def claim(self, attribute: str, key: str | None, stage: str) -> None:
        """Record the stage and key under which a metric is logged, of which there must be one.

        Args:
            attribute: the metric's name on the module.
            key: the key of an epoch value; None for a key that has only step values.
            stage: the stage.

        Raises:
            ConfigurationError: the metric was logged under another key, for another loader, or in another stage.
        """
        stage_before, key_before = self._claims.get(attribute, (stage, key))
        if stage_before == stage and (key is None or key_before in (None, key)):
            self._claims[attribute] = stage, key or key_before
            return
        raise ConfigurationError(
            f"log({key!r}) in the stage {stage!r} was given the {type(self.at(attribute)).__name__} {attribute!r}, "
            f"which was logged as {key_before!r} in the stage {stage_before!r}.",
            "a metric object has one state: each value would be computed from the updates of both.",
            "create one metric object for each stage and each loader (in a torch.nn.ModuleList, indexed by "
            "dataloader_idx), or log it once.",
        )

    def note_logged(self, key: str, metric: Any) -> None:
        """Record that ``metric`` was logged as the epoch value ``key``.

        If the epoch was already reduced, drop the cached value and keep the metric's current state.
        """
        if self._is_reduced:
            # The state is kept because the hook may reset the metric next, and computing the value would communicate.
            self._epoch_values.pop(key, None)
            self._late_states[key] = metric_state(metric)

    def epoch_value(self, name: str, key: str, metric: Any, across_ranks: bool) -> torch.Tensor:
        """Return the epoch value ``key``, computed by `compute_value` and cached until the key is logged again."""
        value = self._epoch_values.get(key)
        if value is None:
            value = compute_value(name, metric, across_ranks, self.group(), self._late_states.pop(key, None))
            self._epoch_values[key] = value
            self._computed_metrics[key] = metric
        return value

    def mark_reduced(self) -> None:
        """Record that the epoch's data has ended and that its values are computed."""
        self._is_reduced = True

    def begin_epoch(self) -> None:
        """Start a new epoch, and drop the values and states of the previous one."""
        self._is_reduced = False
        self._epoch_values, self._late_states, self._computed_metrics = {}, {}, {}

    def reset(self) -> None:
        """Reset the metrics that this epoch computed, even on a rank without data, and start a new epoch."""
        for metric in self._computed_metrics.values():
            reset(metric)
        self.begin_epoch()


def is_metric(value: Any) -> bool:
    """Return True if ``value`` is a `torchmetrics.Metric`."""
    # Code that has a metric has imported torchmetrics, so this module does not import torchmetrics itself.
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def metric_state(metric: Any) -> dict[str, Any]:
    """Return a copy of the states declared with add_state, and of torchmetrics' own attributes, as the update count."""
    return {name: _copy_state(value) for name, value in _saved_attributes(metric).items()}


def set_metric_state(metric: Any, state: Mapping[str, Any]) -> None:
    """Give a metric the state that `metric_state` returned."""
    metric.__dict__.update(state)


def reset(metric: Any) -> None:
    """Reset a metric object."""
    # An evaluation resets metrics within torch.inference_mode, and training could not update inference tensors.
    with torch.inference_mode(False):
        metric.reset()


def merge_metric_states(name: str, metric: Any, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the merged state of one metric object from the states of several ranks.

    If the metric's class overrides ``merge_state``, that method merges the states. Otherwise each state is merged as
    ``compute`` merges it over ranks. torchmetrics' default ``Metric.merge_state`` is not used, for two reasons. It
    refuses metrics with ``full_state_update``, even if their states are sums. It stacks states whose reduction is None,
    and the next update would then add to the stacked tensor.

    Args:
        name: the metric's name on the module.
        metric: the metric object, whose state the call does not change.
        states: the result of `metric_state` on each rank.

    Raises:
        CheckpointError: several states have data and cannot be merged.
    """
    unreducible = [
        key for key, reduction in metric._reductions.items() if reduction is None and _has_tensor(states, key)
    ]
    has_own_merge = type(metric).merge_state is not sys.modules["torchmetrics"].Metric.merge_state
    if has_own_merge or unreducible:
        # The states of ranks without data contribute nothing, so they need no merge.
        states = [state for state in states if state["_update_count"]] or states[:1]
    if len(states) == 1:
        return states[0]
    if unreducible and not has_own_merge:
        raise _unmergeable(name, metric, f"dist_reduce_fx=None for {', '.join(unreducible)} does not define a merge")
    common = {**states[0], "_update_count": sum(state["_update_count"] for state in states), "_computed": None}
    try:
        return common | (_merge_by_metric(metric, states) if has_own_merge else _merge_by_reductions(metric, states))
    except Exception as error:
        raise _unmergeable(name, metric, f"{type(error).__name__}: {error}") from error


def _merge_by_metric(metric: Any, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    state_before = _saved_attributes(metric)
    try:
        set_metric_state(metric, {key: _copy_state(value) for key, value in states[0].items()})
        for state in states[1:]:
            metric.merge_state({key: state[key] for key in metric._defaults})
            metric._update_count += state["_update_count"]
        return {key: getattr(metric, key) for key in metric._defaults}
    finally:
        set_metric_state(metric, state_before)


def _merge_by_reductions(metric: Any, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    from torchmetrics.utilities import dim_zero_cat  # the module of the metric has imported torchmetrics already

    merged: dict[str, Any] = {}
    for key, reduction in metric._reductions.items():
        parts = [state[key] for state in states]
        if any(isinstance(part, list) for part in parts):
            merged[key] = [element for part in parts for element in (part if isinstance(part, list) else [part])]
        elif reduction is dim_zero_cat:
            merged[key] = dim_zero_cat(parts)
        else:
            merged[key] = reduction(torch.stack(parts))
    return merged


def _has_tensor(states: Sequence[Mapping[str, Any]], key: str) -> bool:
    return any(isinstance(state.get(key), torch.Tensor) for state in states)


def _unmergeable(name: str, metric: Any, why: str) -> CheckpointError:
    return CheckpointError(
        f"The states of {type(metric).__name__} {name!r} from several ranks cannot be merged.",
        f"the run resumes within an epoch on fewer ranks than it was saved with; {why}.",
        "resume on as many ranks or more, or from a checkpoint between two epochs; or implement "
        "merge_state(incoming_state) in the metric's class.",
    )


def _saved_attributes(metric: Any) -> dict[str, Any]:
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache"]
    return {name: getattr(metric, name) for name in names if name in metric.__dict__}


def _copy_state(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # deepcopy fails for a non-leaf tensor, such as the state of a metric that was updated with a loss.
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(_copy_state(part) for part in value)
    if type(value) is dict:
        return {key: _copy_state(part) for key, part in value.items()}
    return copy.deepcopy(value)


def compute_value(
    name: str, metric: Any, across_ranks: bool, group: Any, state: Mapping[str, Any] | None = None
) -> torch.Tensor:
    """Return the value of a metric that was logged as ``name``.

    Args:
        name: the logged name, for error messages.
        metric: the metric object.
        across_ranks: whether to compute over all ranks, which is collective.
        group: the process group to compute in if the metric has none of its own; None for all ranks.
        state: the state to compute from; None for the metric's current state.

    Raises:
        ConfigurationError: the value is not a single number.
    """
    settings_before, state_before = (metric.sync_on_compute, metric.process_group), _saved_attributes(metric)
    metric.sync_on_compute = across_ranks
    metric.process_group = metric.process_group or group
    if state is not None:
        set_metric_state(metric, state)
    try:
        value = metric.compute()
    finally:
        metric.sync_on_compute, metric.process_group = settings_before
        if state is not None:
            set_metric_state(metric, state_before)
    # The value is copied because it may be the tensor that the metric updates.
    return as_scalar(name, metric, value).to("cpu", copy=True)


def check_list_states(control: ControlPlane, name: str, attribute: str, metric: Any) -> None:
    """Check that lists of states that torchmetrics gathers one by one are equally long on all ranks. Collective.

    Raises:
        ConfigurationError: they are not, so that the ranks would wait for each other. Raised on every rank.
    """
    states = {key: getattr(metric, key) for key, reduction in metric._reductions.items() if reduction is None}
    lengths = {key: len(state) for key, state in states.items() if isinstance(state, list)}
    if not lengths or control.world_size == 1:
        return
    table = control.all_gather(torch.tensor([float(length) for length in lengths.values()], dtype=torch.float64))
    for key, column in zip(lengths, table.T.int().tolist(), strict=True):
        if len(set(column)) > 1:
            raise ConfigurationError(
                f"The state {key!r} of the {type(metric).__name__} {attribute!r}, which was logged as {name!r}, has "
                f"another length on each rank: {', '.join(map(str, column))}.",
                "with dist_reduce_fx=None, torchmetrics gathers a list element by element, so the ranks would wait for "
                "each other.",
                "use dist_reduce_fx='cat' and a state of tensors, or update the metric equally often on every rank.",
            )


def forward_value(name: str, metric: Any) -> torch.Tensor | None:
    """Return the value that a metric's ``forward`` returned for the current batch; None if it was not called.

    Raises:
        ConfigurationError: the value is not a single number.
    """
    value = metric._forward_cache
    return None if value is None else as_scalar(name, metric, value).clone()


def as_scalar(name: str, metric: Any, value: Any) -> torch.Tensor:
    """Return a computed value as a tensor of shape () without a graph.

    Raises:
        ConfigurationError: ``value`` is not a single number.
    """
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.float64)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    description = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise ConfigurationError(
        f"log({name!r}) was given a {type(metric).__name__}, which computes {description}.",
        "a logged value is one number.",
        "compute the value in on_train_epoch_end or on_validation_epoch_end, and log its elements one at a time.",
    )
