"""Describes the parts of a run that a resumed run must have as well, and compares those of both runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.sampler import BatchSampler

from drivetrain._data.batch_source import BatchSource
from drivetrain._data.combined import CombinedLoader
from drivetrain._parameters.optimizer_state import IMPLEMENTATION_OPTIONS
from drivetrain.errors import ConfigurationError, listed, nearest
from drivetrain.strategies.strategy import Strategy

if TYPE_CHECKING:
    from drivetrain._format import CheckpointReader

ALLOWABLE_DIFFERENCES = ("data", "optimizer", "scheduler", "module")
"""The differences from the saved run that `fit(..., allow=)` may permit."""

GROUP_MEMBERS = ("params", "param_names", "name")
"""Entries of a group that are no options: its parameters, their names, and a label that some users give groups."""

_RATES = ("base_lrs", "_last_lr")
"""Attributes of a scheduler that repeat the learning rates of its optimizer's groups."""


def check_allow(allow: Sequence[str]) -> tuple[str, ...]:
    """Return ``allow`` as a tuple.

    Raises:
        ConfigurationError: ``allow`` contains an unknown name.
    """
    named = (allow,) if isinstance(allow, str) else tuple(allow)
    for name in named:
        if name not in ALLOWABLE_DIFFERENCES:
            raise ConfigurationError(
                f"fit(allow={name!r}) is unknown.{nearest(str(name), ALLOWABLE_DIFFERENCES)}",
                "allow names the parts that may differ from the run that ckpt_path resumes.",
                f"give some of {', '.join(ALLOWABLE_DIFFERENCES)}.",
            )
    return named


# The description of a run's parts, which its checkpoints hold as ``components``


def class_name(instance: object) -> str:
    """Return the full name of the object's class, without the module if it is ``__main__``.

    The next run may import a script that was ``__main__``, so that its classes get another module.
    """
    kind = type(instance)
    return kind.__qualname__ if kind.__module__ == "__main__" else f"{kind.__module__}.{kind.__qualname__}"


def data_facts(source: BatchSource | None, loaders: Sequence[Any]) -> dict[str, Any]:
    """Return the description of the training data in a checkpoint: the number of samples and the kind of order.

    Batch sizes are not recorded: they may differ between runs.

    Args:
        source: the source of the batches.
        loaders: the loaders, as the user gave them.
    """
    return {
        "samples": None if source is None else source.samples,
        "order": [order for loader in loaders for order in _orders(loader)],
    }


def _orders(loader: Any) -> list[str]:
    if isinstance(loader, CombinedLoader):
        return _orders(loader.iterables)
    several = list(loader.values()) if isinstance(loader, dict) else loader
    if isinstance(several, list | tuple) and several and isinstance(several[0], DataLoader | CombinedLoader):
        return [order for each in several for order in _orders(each)]
    # A list of anything else is a list of batches.
    if not isinstance(loader, DataLoader):
        return ["as it comes"]
    if isinstance(loader.dataset, IterableDataset):
        return ["as it comes"]
    sampler = loader.sampler
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return [f"of {type(loader.batch_sampler).__qualname__}"]
    if isinstance(sampler, RandomSampler):
        return ["shuffled"]
    if isinstance(sampler, SequentialSampler):
        return ["in order"]
    return [f"of {type(sampler).__qualname__}"]


def describe_groups(optimizers: Sequence[Optimizer], named: Mapping[str, nn.Parameter]) -> list[list[dict[str, Any]]]:
    """Return a description of each group of each optimizer, which a JSON document can hold.

    Options of other types than numbers, booleans, strings, None and lists of them are left out. A tensor with one
    element is described by its number, which waits for the tensor's device.

    Args:
        optimizers: the optimizers that ``configure_optimizers`` returned.
        named: the module's parameters by name.
    """
    names = {id(parameter): name for name, parameter in named.items()}
    return [
        [
            {
                "params": [names.get(id(parameter), "?") for parameter in group["params"]],
                **_plain_entries(group, (*GROUP_MEMBERS, *IMPLEMENTATION_OPTIONS)),
            }
            for group in optimizer.param_groups
        ]
        for optimizer in optimizers
    ]


def describe_schedulers(schedulers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the attributes of each scheduler that are numbers, strings or lists, except the optimizer's rates.

    The positions of new schedulers are among them, and are alike in all runs.
    """
    return [_plain_entries(getattr(scheduler, "__dict__", {}), _RATES) for scheduler in schedulers]


def _is_plain(value: Any) -> bool:
    """Return whether a value is of a type that a description contains."""
    parts = value if isinstance(value, list) else [value]
    return all(part is None or isinstance(part, bool | int | float | str) for part in parts)


def _plain_entries(values: Mapping[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    """Return the entries that a description contains, without ``left_out``."""
    plain = {name: _plain(value) for name, value in values.items() if name not in left_out}
    return {name: value for name, value in plain.items() if _is_plain(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        return value.item()
    if isinstance(value, float):
        return float(value)  # NumPy's floats are floats too, and are shown as such
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


# The comparison of a resumed run with the saved one

Group = Mapping[str, Any]
"""The names of a group's parameters as ``params``, and the group's options that are numbers, strings or lists."""


class Difference(NamedTuple):
    """A difference between the saved run and this one.

    Attributes:
        kind: the name that `allow` must contain to permit the difference.
        saved: a description of the part of the saved run that differs.
        now: a description of the same part of this run.
        optimizer: the index of the optimizer that differs; None if the difference does not concern a single optimizer.
        is_number: whether only a number of an optimizer's settings differs, or a setting of a scheduler. Unless
            ``allow`` permits the difference, the saved value goes on.
    """

    kind: str
    saved: str
    now: str
    optimizer: int | None = None
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class StartsAnew:
    """The parts of a resumed run that start from their initial state, because they differ from those of the saved run.

    Attributes:
        optimizers: the indices of optimizers; None for all optimizers, because their number differs.
        schedulers: whether all schedulers start anew. Otherwise only those of the optimizers that start anew do.
        data: whether the current epoch starts anew.
    """

    optimizers: frozenset[int] | None = frozenset()
    schedulers: bool = False
    data: bool = False

    @classmethod
    def after(cls, differences: Sequence[Difference]) -> StartsAnew:
        """Return the parts that start anew because of permitted differences."""
        kinds = {difference.kind for difference in differences}
        optimizers = [difference.optimizer for difference in differences if difference.kind == "optimizer"]
        known = frozenset(index for index in optimizers if index is not None)
        return cls(None if None in optimizers else known, "scheduler" in kinds, "data" in kinds)

    def optimizer(self, index: int) -> bool:
        """Return whether the optimizer with this index starts anew."""
        return self.optimizers is None or index in self.optimizers

    def scheduler(self, scheduler: Any, optimizers: Sequence[Any]) -> bool:
        """Return whether a scheduler starts anew: its position and its base rates belong to its optimizer's groups."""
        anew = [optimizer for index, optimizer in enumerate(optimizers) if self.optimizer(index)]
        # A strategy may wrap the optimizer that a scheduler was built with, or build the scheduler itself.
        its_own = any(getattr(scheduler, "optimizer", None) is optimizer for optimizer in anew)
        return self.schedulers or its_own or (bool(anew) and len(anew) == len(optimizers))


def differences_from(
    checkpoint: CheckpointReader, state: Mapping[str, Any], components: dict[str, Any], strategy: Strategy
) -> list[Difference]:
    """Return the differences between the run of a checkpoint and this run, as far as its components are known.

    Args:
        checkpoint: the checkpoint.
        state: its document of the run's state.
        components: the record of this run.
        strategy: the strategy of this run.

    Raises:
        CheckpointError: the record in the checkpoint is malformed.
    """
    with checkpoint.reading("components"):
        found = list(_differences(state["components"], components, state["data"].get("samples")))
        if "optimizers" in components:
            found += _immovable_optimizers(checkpoint, state, strategy, found)
    return found


def refuse_differences(path: str, differences: Sequence[Difference], allow: Sequence[str]) -> None:
    """Raise an error for differences that ``allow`` does not permit.

    Raises:
        ConfigurationError: a difference is not permitted. The error names it, and what to pass as ``allow``.
    """
    refused = [each for each in differences if each.kind not in allow and not each.is_number]
    if refused:
        kinds = ", ".join(f'"{kind}"' for kind in dict.fromkeys(each.kind for each in refused))
        raise ConfigurationError(
            f"The run of {path!r} had {'; '.join(f'{each.saved}, and this one {each.now}' for each in refused)}.",
            "the saved state does not belong to these parts: samples would be used twice or never, or an optimizer "
            "would continue with the state of another.",
            f"make the parts the same, or allow the difference: fit(..., allow=({kinds},)). To load only the "
            "weights, use load_from_checkpoint.",
        )


def _differences(saved: Any, now: dict[str, Any], epoch_samples: int | None) -> Iterator[Difference]:
    """Yield the differences between two records of components. Entries that this run does not have yet do not count.

    Args:
        saved: the checkpoint's record.
        now: the record of this run.
        epoch_samples: the number of training samples of the saved epoch, which may differ from the number at the start
            of the saved run. This run may start with either; None if it is unknown.
    """
    for key, kind in (("module", "module"), ("schedulers", "scheduler")):
        if key in now and not _same_classes(saved[key], now[key]):
            yield Difference(kind, _describe(saved[key]), _describe(now[key]))
    if "optimizers" in now:
        if _same_classes(saved["schedulers"], now["schedulers"]):
            pairs = zip(saved["scheduler_settings"], now["scheduler_settings"], strict=True)
            for scheduler, (before, after) in zip(now["schedulers"], pairs, strict=True):
                yield from _scheduler_differences(_describe([scheduler]), before, after)
        yield from _optimizer_differences(saved, now)
    if "data" in now:
        before, after = saved["data"], now["data"]
        samples, count = before["samples"], after["samples"]
        if None not in (samples, count) and count not in (samples, epoch_samples):
            yield Difference("data", f"{samples} training samples", str(count))
        elif before["order"] != after["order"]:
            saved_order = ", ".join(before["order"])
            yield Difference("data", f"training data {saved_order}", ", ".join(after["order"]) or "none")


def _scheduler_differences(scheduler: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    for name in saved:
        if name in now and not _same_values(saved[name], now[name]):
            yield Difference("scheduler", f"{name}={saved[name]!r} of {scheduler}", f"{name}={now[name]!r}", None, True)


def _optimizer_differences(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[Difference]:
    classes, current = saved["optimizers"], now["optimizers"]
    if len(classes) != len(current):
        yield Difference("optimizer", _describe(classes), _describe(current))
        return
    # A function that passes only trainable parameters to the optimizer gives a parameter that is frozen in one of the
    # runs to one of the optimizers.
    frozen = {*saved["frozen_parameters"], *now["frozen_parameters"]}
    for index, (saved_class, own_class) in enumerate(zip(classes, current, strict=True)):
        name = _describe([own_class])
        if not _same_classes(saved_class, own_class):
            yield Difference("optimizer", _describe([saved_class]), name, index)
        else:
            optimizer = name if len(classes) == 1 else f"optimizer {index}, {name}"
            before_groups, after_groups = saved["optimizer_groups"][index], now["optimizer_groups"][index]
            groups = _without(before_groups, frozen), _without(after_groups, frozen)
            for before, after, is_number in _group_differences(*groups, optimizer):
                yield Difference("optimizer", before, after, index, is_number)


def _without(groups: Sequence[Group], names: Collection[str]) -> list[tuple[int, Group]]:
    """Return the groups with their numbers, without the parameters ``names`` and without groups of only these."""
    remaining = [
        (number, {**group, "params": [name for name in group["params"] if name not in names]})
        for number, group in enumerate(groups)
    ]
    return [(number, group) for number, group in remaining if group["params"] or not groups[number]["params"]]


def _group_differences(
    saved: Sequence[tuple[int, Group]], now: Sequence[tuple[int, Group]], optimizer: str
) -> Iterator[tuple[str, str, bool]]:
    """Yield what the saved run had and what this run has, and whether only a number differs.

    Options are compared only if the same parameters are in the same groups.
    """
    moved = list(_moved(saved, now))
    for names, before, after in moved:
        yield f"{listed(names)} in {before} of {optimizer}", f"in {after}", False
    if moved:
        return
    for (number, group), (_, other) in zip(saved, now, strict=False):  # they differ at most by empty groups
        for name, value in group.items():
            # An option that only one of the runs has was added by a version of torch, or by another scheduler.
            if name in other and name not in GROUP_MEMBERS and not _same_values(value, other[name]):
                text = f"{name}={value!r} in group {number} of {optimizer}"
                yield text, f"{name}={other[name]!r}", _differs_in_number(value, other[name])


def _moved(
    saved: Sequence[tuple[int, Group]], now: Sequence[tuple[int, Group]]
) -> Iterator[tuple[list[str], str, str]]:
    """Yield parameters that are in another group, or only in one of the runs, with the names of both groups."""
    places = [
        {name: (index, number) for index, (number, group) in enumerate(groups) for name in group["params"]}
        for groups in (saved, now)
    ]
    moves: dict[tuple[str, str], list[str]] = {}
    for name in {**places[0], **places[1]}:
        before, after = places[0].get(name), places[1].get(name)
        if (before and before[0]) != (after and after[0]):
            moves.setdefault((_group_name(before), _group_name(after)), []).append(name)
    for (before_name, after_name), names in moves.items():
        yield names, before_name, after_name


def _group_name(place: tuple[int, int] | None) -> str:
    return "no group" if place is None else f"group {place[1]}"


def _immovable_optimizers(
    checkpoint: CheckpointReader, state: Mapping[str, Any], strategy: Strategy, found: Sequence[Difference]
) -> list[Difference]:
    """Return a difference for each optimizer whose state this run would have to cut, although it is stored in blocks.

    Optimizers that differ anyway are left out.
    """
    manifest = checkpoint.manifest
    saved = _layout(manifest.metadata.strategy, manifest.world_size)
    now = _layout(type(strategy).__name__, strategy.world_size)
    differing = {each.optimizer for each in found if each.kind == "optimizer" and not each.is_number}
    return [
        Difference("optimizer", f"block-wise optimizer state ({listed(entry['names'])}) on {saved}", now, int(index))
        for index, entry in (state.get("flattened_optimizer_state") or {}).items()
        if saved != now and (entry["per_rank"] or strategy.shards_parameters) and not differing & {int(index), None}
    ]


def _layout(strategy: str, ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)} of {strategy}"


def _same_classes(saved: Any, now: Any) -> bool:
    if isinstance(saved, list) and isinstance(now, list):
        return len(saved) == len(now) and all(map(_same_classes, saved, now))
    if saved == now:
        return True
    # A class of a script is recorded without its module, but with its module if the script is imported later.
    names = str(saved).rpartition("."), str(now).rpartition(".")
    return names[0][2] == names[1][2] and "" in (names[0][0], names[1][0])


def _same_values(saved: Any, now: Any) -> bool:
    """Return whether two values are equal, up to the precision of a learning rate in a float32 tensor."""
    if isinstance(saved, list) and isinstance(now, list):
        return len(saved) == len(now) and all(map(_same_values, saved, now))
    if isinstance(saved, float) and isinstance(now, float):
        return math.isclose(saved, now, rel_tol=1e-6) or (math.isnan(saved) and math.isnan(now))
    return bool(saved == now)


def _differs_in_number(saved: Any, now: Any) -> bool:
    """Return whether two different values differ only in numbers. A boolean is not a number."""
    if isinstance(saved, list) and isinstance(now, list):
        return len(saved) == len(now) and all(
            part == other or _differs_in_number(part, other) for part, other in zip(saved, now, strict=True)
        )
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in (saved, now))


def _describe(names: Any) -> str:
    return (
        ", ".join(str(name).rpartition(".")[2] for name in names) or "none" if isinstance(names, list) else str(names)
    )
