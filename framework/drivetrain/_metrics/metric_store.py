"""MetricStore: stores the values of `TrainModule.log` and reduces them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain._distributed.control_plane import ControlPlane, LocalControl
from drivetrain._metrics.metric_entry import (
    Entry,
    operation_of,
    raise_kind_mismatch,
    raise_options_mismatch,
)
from drivetrain._metrics.metric_objects import (
    MetricObjects,
    check_list_states,
    forward_value,
    is_metric,
    metric_state,
    reset,
    set_metric_state,
)
from drivetrain._metrics.packing import combine, gather_packed, to_host
from drivetrain._metrics.values import copy_as_tensor, number, weight
from drivetrain._runtime.transfer import first_dimension, move_to
from drivetrain.errors import ConfigurationError, nearest


class MetricStore:
    """Holds all logged keys of a run, by stage.

    The loops set the attributes `stage`, `batch`, `samples` and `dataloader_idx`. A step only calls `record`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.objects = MetricObjects(module)
        self.control: ControlPlane = LocalControl()
        self.progress: Any = SimpleNamespace(global_step=0)
        """The counters of the run, of which ``global_step`` is read."""
        self.contributes = True
        """Whether the values of this rank count. If several ranks read the same data, only one of them has True."""
        self._stages: dict[str, dict[str, Entry]] = {}
        self.entries: dict[str, Entry] = {}
        self.stage: str | None = None
        self.joining = False
        """True while this rank has no data left and runs steps only to match the other ranks' collectives."""
        self.muted = False
        """True while logged values are discarded: while `joining` is True, or while a closure repeats a step."""
        self.batch: Any = None
        """The current micro-batch, or None between micro-batches."""
        self.samples: int | None = None
        """The number of samples in the current micro-batch; None if the sampler does not know this number."""
        self.dataloader_idx: int | None = None
        self.had_data = False
        """Whether this rank got samples in the stage's epoch, from each loader if the stage has several loaders."""
        self._had_data: dict[str | None, bool] = {}
        # True if this rank was added during the epoch. Such a rank may lack keys that other ranks have logged.
        self._joined_late = False
        self._values: dict[str, Tensor | float] = {}

    # Recording, called by steps

    def record(
        self,
        name: str,
        value: Any,
        on_step: bool | None,
        on_epoch: bool | None,
        prog_bar: bool,
        logger: bool,
        reduce_fx: Any,
        batch_size: Any,
        sync_dist: bool | None,
        add_dataloader_idx: bool,
        metric_attribute: str | None,
    ) -> None:
        """Record one value; see `TrainModule.log`."""
        if self.dataloader_idx is not None and add_dataloader_idx:
            name = f"{name}/dataloader_idx_{self.dataloader_idx}"
        options = (on_step, on_epoch, prog_bar, logger, reduce_fx, sync_dist)
        entry = self.entries.get(name)
        if entry is None or entry.options != options:
            entry = self._get_or_create(name, value, options, entry, metric_attribute)
        if self.muted:
            return  # the key is registered above, since all ranks reduce it together
        if entry.metric is not None:
            self._record_metric(entry, value)
            return
        if type(value) is Tensor and value.numel() == 1:
            # The tensor is always cloned, because the user may modify it in place, and because a view would keep the
            # memory of its base tensor allocated.
            value = value.detach().clone() if value.requires_grad else value.clone()
            if value.dim():
                value = value.reshape(())
        elif type(value) is not float and type(value) is not int:
            if is_metric(value):
                raise_kind_mismatch(entry, value)
            value = number(name, value)
        if entry.operation != "mean":
            batch_size = 1
        elif batch_size is not None and not (type(batch_size) is int and batch_size >= 0):
            batch_size = weight(name, batch_size)
        has_tensor = isinstance(batch_size, Tensor)
        if entry.on_step and (batch_size is None or has_tensor or batch_size):
            entry.last = entry.last_with_weight(value, batch_size) if has_tensor else value
            entry.fresh = True
            entry.logged_at = self.progress.global_step
        if entry.on_epoch:
            entry.accumulate(value, self._weight() if batch_size is None else batch_size)

    def _weight(self) -> float:
        if self.batch is None:
            return 1  # a value that is logged between micro-batches does not belong to the last micro-batch
        if self.samples is None:
            self.samples = first_dimension(self.batch)
        return self.samples

    def _record_metric(self, entry: Entry, metric: Any) -> None:
        if metric is not entry.metric:
            # The user may assign a new metric object to the same attribute in each epoch.
            if not is_metric(metric) or metric is not self.objects.at(entry.attribute or ""):
                raise_kind_mismatch(entry, metric)
            entry.metric = metric
        if entry.on_step:
            entry.last = forward_value(entry.name, metric)
            entry.fresh = True
            entry.logged_at = self.progress.global_step
        if entry.on_epoch:
            self.objects.note_logged(entry.epoch_name, metric)

    def _get_or_create(
        self, name: str, value: Any, options: tuple[Any, ...], old: Entry | None, attribute: str | None
    ) -> Entry:
        if self.stage is None or self.stage == "predict":
            raise ConfigurationError(
                f"log({name!r}) was called {'in prediction' if self.stage else 'outside the loops'}.",
                "values belong to an epoch of training, validation or test.",
                "call self.log in a step, in a hook of an evaluation, or between on_train_start and on_train_end.",
            )
        on_step, on_epoch, prog_bar, logger, reduce_fx, sync_dist = options
        if old is not None and old.adopt_options(options, operation_of(reduce_fx)):
            old.metric = value if is_metric(value) else None
            return old
        if old is not None:
            raise_options_mismatch(name, old.options, options)
        operation = operation_of(reduce_fx)
        if operation is None:
            raise ConfigurationError(
                f"log({name!r}, reduce_fx={reduce_fx!r}).{nearest(str(reduce_fx), ['mean', 'sum', 'max', 'min'])}",
                "only reductions that give the same result over any split of the data are exact.",
                "use 'mean', 'sum', 'max' or 'min', or log a torchmetrics.Metric.",
            )
        metric = value if is_metric(value) else None
        if metric is None:
            number(name, value)  # checks the first value, also on a rank without data
        else:
            attribute = attribute or self.objects.attribute_of(name, metric)
        loader = f"/dataloader_idx_{self.dataloader_idx}"
        within_step = self.batch is not None and self.stage == "train"
        entry = Entry(
            name,
            options,
            on_step=within_step if on_step is None else on_step,
            on_epoch=not within_step if on_epoch is None else on_epoch,
            prog_bar=prog_bar,
            logger=logger,
            operation=operation,
            sync_dist=sync_dist,
            metric=metric,
            attribute=None if metric is None else attribute,
            loader=loader if name.endswith(loader) else "",
        )
        if entry.attribute is not None:
            self.objects.claim(entry.attribute, name if entry.on_epoch else None, self.stage)
        entry.loader_idx = self.dataloader_idx
        self.entries[name] = entry
        return entry

    # Stages and reductions, called by the loops

    def enter(self, stage: str | None, reset: bool = True) -> None:
        """Start or continue a stage: "train", "validate", "test", "predict", or None between stages."""
        self._had_data[self.stage] = self.had_data
        self.objects.begin_epoch()
        self.stage = stage
        self.batch = None
        self.samples = None
        self.dataloader_idx = None
        self.entries = {} if stage is None else self._stages.setdefault(stage, {})
        self.had_data = self._had_data.get(stage, False)
        if stage is not None and reset:
            self.had_data = False
            self._joined_late = self._joined_late and stage != "train"
            for entry in self.entries.values():
                entry.reset()

    @contextmanager
    def temporary(self, stage: str) -> Iterator[None]:
        """Drop the keys and values of a stage at the end of the context, for example those of the sanity check."""
        before = dict(self._values)  # a rank without samples has values of the other ranks, but no entries
        yield
        self._values = before
        for entry in self._stages.pop(stage, {}).values():
            if entry.metric is not None:
                reset(entry.metric)
        if self.stage == stage:
            self.entries = self._stages.setdefault(stage, {})

    def reduce_epoch(self, purpose: str, flag: bool = False) -> tuple[dict[str, Tensor], int]:
        """Return the stage's epoch values by name, reduced over all ranks, and the number of ranks with ``flag``.

        Collective. All ranks must agree whether to reduce, and this exchange can count a flag as well.

        Args:
            purpose: what the ranks agree on, for errors.
            flag: whether this rank is to be counted.
        """
        wants_reduction = any(entry.on_epoch and entry.sync_dist is not False for entry in self.entries.values())
        reducing_ranks, flagged_ranks = self.control.count_flags(purpose, wants_reduction, flag)
        return self._reduce_epoch(together=reducing_ranks > 0 and self.control.world_size > 1), flagged_ranks

    def _reduce_epoch(self, together: bool) -> dict[str, Tensor]:
        entries = sorted((entry for entry in self.entries.values() if entry.on_epoch), key=lambda entry: entry.name)
        numeric = [entry for entry in entries if entry.metric is None and not entry.idle]
        metrics = [entry for entry in entries if entry.metric is not None]
        shared = [entry for entry in numeric if together and entry.sync_dist is not False]
        local = [entry for entry in numeric if not together or entry.sync_dist is False]
        totals = [entry.epoch_total() for entry in (*shared, *local)]
        weights = [entry.weight for entry in (*shared, *local)]
        host_values = to_host([*(0.0 if total is None else total for total in totals), *weights])
        numbers = [part for pair in zip(host_values, host_values[len(totals) :], strict=False) for part in pair]
        results: dict[str, Tensor | None] = {}
        split = 2 * len(shared)
        if together:
            if not self.contributes:
                numbers[:split] = [0.0] * split
            keys = [_key(entry.epoch_name, entry) for entry in shared]
            synced_metrics = [entry for entry in metrics if entry.sync_dist is not False]
            keys += [f"{entry.epoch_name}\tmetric\t{entry.attribute}" for entry in synced_metrics]
            keys, table = gather_packed(self.control, keys, numbers[:split], self._knows_all_keys)
            for position, key in enumerate(keys):
                name, operation, attribute = key.split("\t")
                if operation == "metric":
                    check_list_states(self.control, name, attribute, self.objects.at(attribute))
                    results[name] = self.objects.epoch_value(name, name, self.objects.at(attribute), True)
                else:
                    results[name] = combine(operation, table[:, 2 * position], table[:, 2 * position + 1])
        for position, entry in enumerate(local):
            column = torch.tensor(numbers[split + 2 * position : split + 2 * position + 2], dtype=torch.float64)
            results[entry.epoch_name] = combine(entry.operation, column[:1], column[1:])
        for entry in metrics:
            name, across_ranks = entry.epoch_name, entry.sync_dist is not False
            if name not in results:
                results[name] = self.objects.epoch_value(entry.name, name, entry.metric, across_ranks)
        self.objects.mark_reduced()
        # A value that was logged in an earlier epoch but not in this one is kept.
        logged = {name: value for name, value in results.items() if value is not None}
        for entry in self.entries.values():
            if entry.epoch_name in logged and entry.on_epoch:
                entry.result = logged[entry.epoch_name]
                entry.reduced_at, entry.logged_at = self.progress.global_step, None
        self._values.update(logged)
        return logged

    def reset_metrics(self) -> None:
        """Reset the stage's torchmetrics objects at the end of its epoch."""
        self.objects.reset()
        for entry in self.entries.values():
            if entry.metric is not None and not entry.on_epoch:
                reset(entry.metric)

    def flush_steps(self) -> dict[str, Tensor | float]:
        """Return the step values to send to loggers, as far as they were logged since the last flush.

        The tensors stay on their devices.
        """
        values: dict[str, Tensor | float] = {}
        for entry in self.entries.values():
            if entry.fresh and entry.last is not None and entry.logger:
                entry.fresh = False
                values[entry.step_name] = entry.last if isinstance(entry.last, Tensor) else float(entry.last)
        return values

    def reduce_steps(self) -> None:
        """Reduce the step values with ``sync_dist=True`` over all ranks. Collective."""
        synced = sorted(
            (entry for entry in self.entries.values() if entry.on_step and entry.sync_dist and entry.metric is None),
            key=lambda entry: entry.name,
        )
        # All ranks must agree whether to reduce. A rank that logged none of the keys would otherwise continue with the
        # next step and block there.
        if self.control.world_size == 1 or self.control.count_flags("a flush of step values", bool(synced)) == (0,):
            return
        is_new = [entry.last is not entry.reduced for entry in synced]
        values = [entry.last if new else 0.0 for entry, new in zip(synced, is_new, strict=True)]
        host_values = to_host([*values, *(entry.has_weight for entry in synced)])  # type: ignore[list-item]
        pairs: list[float] = []
        for entry, value, has_weight, new in zip(synced, host_values, host_values[len(synced) :], is_new, strict=False):
            if new and has_weight > 0 and self.contributes:
                ranks = entry.ranks_of_last
                pairs += (value * ranks if entry.operation == "mean" else value), float(ranks)
            else:
                pairs += 0.0, 0.0
        keys = [_key(entry.name, entry) for entry in synced]
        keys, table = gather_packed(self.control, keys, pairs, self._knows_all_keys)
        for entry in synced:
            column = 2 * keys.index(_key(entry.name, entry))
            reduced = combine(entry.operation, table[:, column], table[:, column + 1])
            if reduced is not None:
                entry.last = entry.reduced = float(reduced)
                entry.fresh = True

    @property
    def _knows_all_keys(self) -> bool:
        return self.had_data and not self._joined_late

    # Access to the values, for users and callbacks

    def callback_metrics(self) -> dict[str, Tensor]:
        """Return all logged values under each of their names. Epoch values are included once they are reduced."""
        values: dict[str, Tensor | float] = dict(self._values)
        for entry in self._all_entries():
            values |= {name: value for name, (value, _, _) in entry.named_values().items()}
        return {name: copy_as_tensor(value) for name, value in values.items()}

    def known_names(self) -> set[str]:
        """Return every name that `callback_metrics` returns now or will return once all logged values are reduced."""
        names = {name for entry in self._all_entries() for name in (entry.name, entry.step_name, entry.epoch_name)}
        return names.union(self._values)

    def logged_metrics(self) -> dict[str, Tensor]:
        """Return the latest values for loggers."""
        return self._select("logger")

    def progress_bar_metrics(self) -> dict[str, Tensor]:
        """Return the latest values with ``prog_bar=True``. Converting these values to numbers waits for the device."""
        return self._select("prog_bar")

    def reduced_at(self, name: str) -> int | None:
        """Return the global step at which a value of `callback_metrics` was reduced, the same on all ranks. Collective.

        None means that the value has no age: it is a step's value, or it was not logged.
        """
        return self._age(name)[0]

    def logged_at(self, name: str) -> int | None:
        """Return the global step at which a value was reduced, or logged by a step; the same on all ranks. Collective.

        None means that it is not known, or that no step was made yet.
        """
        reduced_at, logged_at = self._age(name)
        return logged_at or reduced_at or None

    def _age(self, name: str) -> tuple[int | None, int | None]:
        """Return the global steps at which the value that `callback_metrics` returns was reduced and logged."""
        found = [values[name][1:] for entry in self._all_entries() if name in (values := entry.named_values())]
        return tuple(self.control.broadcast_object(list(found[-1] if found else (None, None))))

    def agreed(self, name: str) -> float | None:
        """Return a logged value, the same on all ranks, on which a decision depends; None if no rank logged it.

        A value that is equal on all ranks is returned unchanged. Other values (of a step, or with ``sync_dist=False``)
        are averaged over the ranks that have a value, because a rank without data may have logged nothing. Collective.

        Raises:
            DistributedError: other ranks made a different call, for example because a callback exists on some ranks
                only.
        """
        self.control.monitored_barrier(f"the value of {name!r}, on which a decision depends")
        value, local = self.callback_metrics().get(name), torch.zeros(2, dtype=torch.float64)
        if value is not None:
            local[0], local[1] = 1.0, value
        gathered = self.control.all_gather(local)
        values = gathered[gathered[:, 0] > 0, 1]
        if len(values) == 0:
            return None
        all_equal = bool((values == values[0]).all())
        return float(values[0] if all_equal else values.mean())

    # State for checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's logged keys with the epoch's accumulated values, and the states of metric objects."""
        return {
            "stages": {stage: _states_of(entries) for stage, entries in self._stages.items()},
            "objects": {name: metric_state(metric) for name, metric in self.objects.all().items()},
            "values": dict(self._values),
            "had_data": {**self._had_data, self.stage: self.had_data},
        }

    def capture(self, attributes: Sequence[str]) -> Callable[[], dict[str, Any]]:
        """Save the present state of training, and return a function that completes it to a `state_dict` later.

        The returned function adds the state of evaluations at the time of its call. This method computes
        no sums.

        Args:
            attributes: the attribute names of the metric objects to save.
        """
        entries = {name: entry.clone() for name, entry in self._stages.get("train", {}).items()}
        objects = {name: metric_state(self.objects.at(name)) for name in attributes}
        had_data = self.had_data if self.stage == "train" else self._had_data.get("train", False)
        return lambda: self._add_captured(entries, objects, had_data)

    def _add_captured(self, entries: Mapping[str, Entry], objects: dict[str, Any], had_data: bool) -> dict[str, Any]:
        state = self.state_dict()
        evaluated = {
            entry.attribute for stage, keys in self._stages.items() if stage != "train" for entry in keys.values()
        }
        trained = {entry.attribute for entry in entries.values()}
        state["stages"]["train"] = _states_of(entries)
        state["objects"] |= {name: saved for name, saved in objects.items() if name not in evaluated - trained}
        state["had_data"]["train"] = had_data
        return state

    def check_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Check that the metric objects in ``states`` can be merged, without changing anything.

        Raises:
            CheckpointError: the states of a metric object cannot be merged. The message names the metric object.
            KeyError, TypeError, ValueError, AttributeError: ``states`` are not results of `state_dict`.
        """
        self.objects.merge_states([state["objects"] for state in states])

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        """Load the results of `state_dict` from this rank, or from the several ranks that this rank replaces.

        All other logged values are dropped. The caller has to call `enter` afterwards.
        """
        self._stages, self.entries, self._values, self._had_data = {}, {}, {}, {}
        self.stage, self.had_data, self._joined_late = None, False, not states
        for name, saved in self.objects.merge_states([state["objects"] for state in states]).items():
            set_metric_state(self.objects.at(name), move_to(saved, device))
        for state in states:
            for stage, entries in state["stages"].items():
                known = self._stages.setdefault(stage, {})
                for name, saved in entries.items():
                    entry = Entry.of_state(name, saved, device)
                    if entry.attribute is not None:
                        entry.metric = self.objects.at(entry.attribute)
                    if name in known:
                        known[name].merge(entry)
                    else:
                        known[name] = entry
            for value in state["values"].values():
                copy_as_tensor(value)  # raises an error if the value is no number
            self._values |= state["values"]
            for stage, had_data in state["had_data"].items():
                self._had_data[stage] = self._had_data.get(stage, False) or had_data

    def restore(self, values: dict[str, float]) -> None:
        """Add values from another process or a checkpoint as if they had been logged here."""
        self._values.update({name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()})

    def _all_entries(self) -> Iterable[Entry]:
        return (entry for entries in self._stages.values() for entry in entries.values())

    def _select(self, flag: str) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        for entry in self._all_entries():
            if not getattr(entry, flag):
                continue
            if entry.on_step and entry.last is not None:
                values[entry.step_name] = copy_as_tensor(entry.last)
            if entry.result is not None:
                values[entry.epoch_name] = copy_as_tensor(entry.result)
        return values


def _states_of(entries: Mapping[str, Entry]) -> dict[str, Any]:
    return {name: entry.state_dict() for name, entry in entries.items()}


def _key(name: str, entry: Entry) -> str:
    return f"{name}\t{entry.operation}\t"
