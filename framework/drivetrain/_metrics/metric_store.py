"""MetricStore: what `TrainModule.log` writes to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain._distributed.control_plane import ControlPlane, LocalControl
from drivetrain._metrics.agreed_value import agreed_value
from drivetrain._metrics.metric_entry import Entry, check_value, operation_of, refuse_another_kind, refuse_other_options
from drivetrain._metrics.metric_objects import (
    MetricObjects,
    forward_value,
    is_metric,
    metric_state,
    reset,
    set_metric_state,
)
from drivetrain._metrics.packing import Part, combined, gather_packed, to_host
from drivetrain._metrics.values import for_reading, number, weight
from drivetrain._runtime.transfer import first_dimension, move_to
from drivetrain.errors import ConfigurationError, nearest


class MetricStore:
    """Holds every logged key of a run, by stage.

    The loops say where they are (`stage`, `batch`, `samples`, `dataloader_idx`); `record` is all that a step calls.
    """

    def __init__(self, module: nn.Module) -> None:
        self.objects = MetricObjects(module)
        self.control: ControlPlane = LocalControl()
        self.speaks = True  # of several ranks that read the same data, one does
        self._stages: dict[str, dict[str, Entry]] = {}
        self.entries: dict[str, Entry] = {}
        self.stage: str | None = None
        self.joining = False
        """True while this rank has no data of its own and only keeps the others company."""
        self.muted = False
        """True while what is logged does not exist: while this rank joins, or a closure runs a step once more."""
        self.batch: Any = None
        """The micro-batch under way, or None between micro-batches."""
        self.samples: int | None = None
        """Its samples, where the sampler knows them."""
        self.dataloader_idx: int | None = None
        self.had_data = False
        """Whether this rank had a sample of its own in the stage's epoch; of every loader, where there are several."""
        self._had_data: dict[str | None, bool] = {}
        self._came_late = False  # it was not there as the epoch began, and need not know what was logged until then
        self._values: dict[str, Tensor | float] = {}

    # What a step calls

    def record(
        self,
        name: str,
        value: Any,
        on_step: bool | None,
        on_epoch: bool | None,
        prog_bar: bool,
        logger: bool,
        reduce_fx: Any,
        batch_size: int | None,
        sync_dist: bool | None,
        add_dataloader_idx: bool,
        metric_attribute: str | None,
    ) -> None:
        """Take one value; see `TrainModule.log`."""
        if self.dataloader_idx is not None and add_dataloader_idx:
            name = f"{name}/dataloader_idx_{self.dataloader_idx}"
        options = (on_step, on_epoch, prog_bar, logger, reduce_fx, sync_dist)
        entry = self.entries.get(name)
        if entry is None or entry.options != options:
            entry = self._open(name, value, options, entry, metric_attribute)
        if self.muted:
            return  # the key is known all the same: ranks with data will reduce it together with this one
        if entry.metric is not None:
            self._record_metric(entry, value)
            return
        if type(value) is Tensor and value.numel() == 1:
            # A copy even so: ``loss += penalty`` comes after, and a view would keep all that it is a view of.
            value = value.detach().clone() if value.requires_grad else value.clone()
            if value.dim():
                value = value.reshape(())
        elif type(value) is not float and type(value) is not int:
            if is_metric(value):
                refuse_another_kind(entry, value)
            value = number(name, value)
        if entry.on_step:
            entry.last = value
            entry.fresh = True
        if entry.on_epoch:
            if entry.operation != "mean":
                entry.accumulate(value, 1)
            elif batch_size is None:
                entry.accumulate(value, self._weight())
            else:
                plain = type(batch_size) is int and batch_size >= 0
                entry.accumulate(value, batch_size if plain else weight(name, batch_size))

    def _weight(self) -> float:
        if self.batch is None:
            return 1  # logged between micro-batches: what the last one held has nothing to do with it
        if self.samples is None:
            self.samples = first_dimension(self.batch)
        return self.samples

    def _record_metric(self, entry: Entry, metric: Any) -> None:
        if metric is not entry.metric:
            # One that is made anew in each epoch, under its name, is the same one.
            if not is_metric(metric) or metric is not self.objects.at(entry.attribute or ""):
                refuse_another_kind(entry, metric)
            entry.metric = metric
        if entry.on_step:
            entry.last = forward_value(entry.name, metric)
            entry.fresh = True
        if entry.on_epoch:
            self.objects.logged(entry.epoch_name, metric)

    def _open(self, name: str, value: Any, options: tuple[Any, ...], old: Entry | None, attribute: str | None) -> Entry:
        if self.stage is None or self.stage == "predict":
            raise ConfigurationError(
                f"log({name!r}) was called {'in prediction' if self.stage else 'outside the loops'}.",
                "values are kept by epoch of training, validation or test.",
                "call it from a step or from a hook between on_train_start and on_train_end, or of an evaluation.",
            )
        on_step, on_epoch, prog_bar, logger, reduce_fx, sync_dist = options
        if old is not None and old.goes_on_with(options, operation_of(reduce_fx)):
            old.metric = value if is_metric(value) else None
            return old
        if old is not None:
            refuse_other_options(name, old.options, options)
        operation = operation_of(reduce_fx)
        if operation is None:
            raise ConfigurationError(
                f"log({name!r}, reduce_fx={reduce_fx!r}).{nearest(str(reduce_fx), ['mean', 'sum', 'max', 'min'])}",
                "only reductions that give the same result over any split of the data are exact.",
                "use 'mean', 'sum', 'max' or 'min', or log a torchmetrics.Metric.",
            )
        metric = value if is_metric(value) else None
        if metric is None:
            number(name, value)  # refused by its first value, a rank without data included
        loader = f"/dataloader_idx_{self.dataloader_idx}"
        in_step = self.batch is not None and self.stage == "train"
        entry = Entry(
            name,
            options,
            on_step=in_step if on_step is None else on_step,
            on_epoch=not in_step if on_epoch is None else on_epoch,
            prog_bar=prog_bar,
            logger=logger,
            operation=operation,
            sync_dist=sync_dist,
            metric=metric,
            attribute=None if metric is None else attribute or self.objects.attribute_of(name, metric),
            loader=loader if name.endswith(loader) else "",
        )
        entry.of_loader = self.dataloader_idx
        self.entries[name] = entry
        return entry

    # What the loops call

    def enter(self, stage: str | None, reset: bool = True) -> None:
        """Begin (or go on with) a stage: "train", "validate", "test", "predict", or None between them."""
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
            self._came_late = self._came_late and stage != "train"
            for entry in self.entries.values():
                entry.reset()

    def forget(self, stage: str) -> None:
        """Drop a stage's keys and values, as after a sanity check."""
        for entry in self._stages.pop(stage, {}).values():
            for name in (entry.name, entry.epoch_name, entry.step_name):
                self._values.pop(name, None)
            if entry.metric is not None:
                reset(entry.metric)
        if self.stage == stage:
            self.entries = self._stages.setdefault(stage, {})

    def wants_reduction(self) -> bool:
        """Whether this rank has an epoch's values that the other ranks must hear of."""
        return any(entry.on_epoch and entry.sync_dist is not False for entry in self.entries.values())

    def reduce_epoch(self, together: bool) -> dict[str, Tensor]:
        """Reduce the stage's epoch values: one packed collective where ``together``. Returns them by epoch name."""
        plain = sorted(
            (entry for entry in self.entries.values() if entry.on_epoch and entry.metric is None and not entry.idle),
            key=lambda entry: entry.name,
        )
        shared = [entry for entry in plain if entry.sync_dist is not False]
        local = [entry for entry in plain if entry.sync_dist is False]
        metrics = sorted(
            (entry for entry in self.entries.values() if entry.on_epoch and entry.metric is not None),
            key=lambda entry: entry.name,
        )
        totals = [entry.epoch_total() for entry in [*shared, *local]]
        weights = [entry.weight for entry in (*shared, *local)]
        known = to_host([*(0.0 if total is None else total for total in totals), *weights])
        numbers = [part for pair in zip(known[: len(totals)], known[len(totals) :], strict=True) for part in pair]
        results: dict[str, Tensor | None] = {}
        split = 2 * len(shared)
        if together:
            if not self.speaks:
                numbers[:split] = [0.0] * split
            keys = [
                *(_key(entry.epoch_name, entry) for entry in shared),
                *(
                    f"{entry.epoch_name}\tmetric\t{entry.attribute}"
                    for entry in metrics
                    if entry.sync_dist is not False
                ),
            ]
            keys, table = gather_packed(self.control, keys, numbers[:split], self._part(keys))
            for position, key in enumerate(keys):
                name, operation, attribute = key.split("\t")
                if operation == "metric":
                    results[name] = self.objects.computed(name, name, self.objects.at(attribute), True)
                else:
                    results[name] = combined(operation, table[:, 2 * position], table[:, 2 * position + 1])
        else:
            local = [*shared, *local]
            split = 0
        for position, entry in enumerate(local):
            column = torch.tensor(numbers[split + 2 * position : split + 2 * position + 2], dtype=torch.float64)
            results[entry.epoch_name] = combined(entry.operation, column[:1], column[1:])
        for entry in metrics:
            if entry.epoch_name not in results:
                together = entry.sync_dist is not False
                results[entry.epoch_name] = self.objects.computed(entry.name, entry.epoch_name, entry.metric, together)
        self.objects.end_epoch()
        # What was logged in an earlier epoch and not in this one keeps its value.
        logged = {name: value for name, value in results.items() if value is not None}
        for entry in self.entries.values():
            if entry.epoch_name in logged and entry.on_epoch:
                entry.result = logged[entry.epoch_name]
        self._values.update(logged)
        return logged

    def reset_metrics(self) -> None:
        """Reset the stage's torchmetrics objects: their epoch is over."""
        self.objects.reset()
        for entry in self.entries.values():
            if entry.metric is not None and not entry.on_epoch:
                reset(entry.metric)

    def flush_steps(self) -> dict[str, Tensor | float]:
        """Return the step values that loggers want and that came since the last flush, where they are."""
        values: dict[str, Tensor | float] = {}
        for entry in self.entries.values():
            if entry.fresh and entry.last is not None and entry.logger:
                entry.fresh = False
                values[entry.step_name] = entry.last if isinstance(entry.last, Tensor) else float(entry.last)
        return values

    def reduce_steps(self) -> None:
        """Reduce the step values that asked for it (``sync_dist=True``) over all ranks. Collective."""
        synced = sorted(
            (entry for entry in self.entries.values() if entry.on_step and entry.sync_dist and entry.metric is None),
            key=lambda entry: entry.name,
        )
        # Asked of all: a rank that logged none of them would go on into the next step, and wait there.
        if self.control.world_size == 1 or self.control.agree("a flush of step values", bool(synced)) == (0,):
            return
        came = [entry.last is not entry.reduced for entry in synced]
        values = [entry.last if here else 0.0 for entry, here in zip(synced, came, strict=True)]
        numbers = zip(to_host(values), came, strict=True)  # type: ignore[arg-type]
        keys = [_key(entry.name, entry) for entry in synced]
        keys, table = gather_packed(
            self.control,
            keys,
            [part for number, here in numbers for part in (number, float(here and self.speaks))],
            self._part(keys),
        )
        for entry in synced:
            column = 2 * keys.index(_key(entry.name, entry))
            reduced = combined(entry.operation, table[:, column], table[:, column + 1])
            if reduced is not None:
                entry.last = entry.reduced = float(reduced)
                entry.fresh = True

    def _part(self, keys: Sequence[str]) -> Part:
        if self.had_data and not self._came_late:
            return Part.WHOLE
        return Part.SOME if keys else Part.NONE

    # What users read

    def callback_metrics(self) -> dict[str, Tensor]:
        """Everything logged, under every name it is known by; epoch values once they are reduced."""
        values: dict[str, Tensor | float] = dict(self._values)
        for entry in self._all():
            if entry.on_step and entry.last is not None:
                values[entry.step_name] = entry.last
                if entry.result is None:
                    values[entry.name] = entry.last
            if entry.result is not None:
                values[entry.name] = entry.result
        return {name: for_reading(value) for name, value in values.items()}

    def known_names(self) -> set[str]:
        """Every name that `callback_metrics` has, or will have once what was logged is reduced."""
        names = {name for entry in self._all() for name in (entry.name, entry.step_name, entry.epoch_name)}
        return names.union(self._values)

    def logged_metrics(self) -> dict[str, Tensor]:
        """The latest values that loggers get."""
        return self._chosen("logger")

    def progress_bar_metrics(self) -> dict[str, Tensor]:
        """The latest values with ``prog_bar=True``; reading them as numbers waits for the device."""
        return self._chosen("prog_bar")

    def evaluation_so_far(self) -> dict[str, Tensor]:
        """Of the evaluation under way, the values with ``prog_bar=True`` as they are on this rank by now.

        Nothing is reduced, and nothing changes: the evaluation's own results are what they would be anyhow.
        """
        values: dict[str, Tensor] = {}
        for entry in self.entries.values():
            if not entry.prog_bar or entry.metric is not None:
                continue
            if entry.on_step and entry.last is not None and (entry.waiting or entry.total is not None):
                values[entry.step_name] = for_reading(entry.last)
            elif entry.on_epoch:
                total, weight = entry.clone().epoch_total(), entry.weight
                if total is not None and (isinstance(weight, Tensor) or weight > 0):
                    values[entry.epoch_name] = for_reading(total / weight if entry.operation == "mean" else total)
        return values

    def agreed(self, name: str) -> float | None:
        """Return a logged value, the same on every rank, for a decision; None where nobody logged it. Collective."""
        return agreed_value(self.control, name, self.callback_metrics().get(name))

    # What a checkpoint keeps

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has logged: every key with what its epoch has accumulated, and the metric objects."""
        return {
            "stages": {stage: _states_of(entries) for stage, entries in self._stages.items()},
            "objects": {name: metric_state(metric) for name, metric in self.objects.all().items()},
            "values": dict(self._values),
            "had_data": {**self._had_data, self.stage: self.had_data},
        }

    def noted(self, attributes: Sequence[str]) -> Callable[[], dict[str, Any]]:
        """Take note of what training has logged in its epoch, and return what gives, later, a `state_dict` with that.

        What an evaluation has come to since is as it is then. Nothing is summed up before.

        Args:
            attributes: of the module's metric objects.
        """
        entries = {name: entry.clone() for name, entry in self._stages.get("train", {}).items()}
        objects = {name: metric_state(self.objects.at(name)) for name in attributes}
        had_data = self.had_data if self.stage == "train" else self._had_data.get("train", False)
        return lambda: self._as_noted(entries, objects, had_data)

    def _as_noted(self, entries: Mapping[str, Entry], objects: dict[str, Any], had_data: bool) -> dict[str, Any]:
        state = self.state_dict()
        evaluated = {
            entry.attribute for stage, of_it in self._stages.items() if stage != "train" for entry in of_it.values()
        }
        trained = {entry.attribute for entry in entries.values()}
        state["stages"]["train"] = _states_of(entries)
        state["objects"] |= {name: kept for name, kept in objects.items() if name not in evaluated - trained}
        state["had_data"]["train"] = had_data
        return state

    def check_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Find out, before anything changes, whether `load_state_dict` can take them.

        Raises:
            CheckpointError: it cannot; says which metric object is in the way.
            KeyError, TypeError, ValueError, AttributeError: they are not what `state_dict` returns.
        """
        for state in states:
            for entries in state["stages"].values():
                for name, kept in entries.items():
                    Entry.of_state(name, kept, torch.device("cpu"))
            for name, value in state["values"].items():
                check_value(name, value)
            if not all(type(had) is bool for had in state["had_data"].values()):
                raise ValueError(f"had_data is {state['had_data']!r}")
        self.objects.merged([state["objects"] for state in states])

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        """Take back what `state_dict` returned, on this rank or on several that it stands in for from here on.

        A stage has to be entered after it. Whatever else was logged is forgotten.
        """
        self._stages, self.entries, self._values, self._had_data = {}, {}, {}, {}
        self.stage, self.had_data, self._came_late = None, False, not states
        for name, saved in self.objects.merged([state["objects"] for state in states]).items():
            set_metric_state(self.objects.at(name), move_to(saved, device))
        for state in states:
            for stage, entries in state["stages"].items():
                known = self._stages.setdefault(stage, {})
                for name, kept in entries.items():
                    entry = Entry.of_state(name, kept, device)
                    if entry.attribute is not None:
                        entry.metric = self.objects.at(entry.attribute)
                    if name in known:
                        known[name].merge(entry)
                    else:
                        known[name] = entry
            self._values |= state["values"]
            for stage, had in state["had_data"].items():
                self._had_data[stage] = self._had_data.get(stage, False) or had

    def restore(self, values: dict[str, float]) -> None:
        """Take values from another process or a checkpoint as if they had been logged here."""
        self._values.update({name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()})

    def _all(self) -> Iterable[Entry]:
        return (entry for entries in self._stages.values() for entry in entries.values())

    def _chosen(self, flag: str) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        for entry in self._all():
            if not getattr(entry, flag):
                continue
            if entry.on_step and entry.last is not None:
                values[entry.step_name] = for_reading(entry.last)
            if entry.result is not None:
                values[entry.epoch_name] = for_reading(entry.result)
        return values


def _states_of(entries: Mapping[str, Entry]) -> dict[str, Any]:
    return {name: entry.state_dict() for name, entry in entries.items()}


def _key(name: str, entry: Entry) -> str:
    return f"{name}\t{entry.operation}\t"
