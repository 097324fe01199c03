"""Checks that a resumed run has the module, data, optimizers and schedulers of the run that was saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.sampler import BatchSampler

from drivetrain.data._batch_source import BatchSource
from drivetrain.data.combined import CombinedLoader
from drivetrain.errors import ConfigurationError, listed, nearest

ALLOWABLE_DIFFERENCES = ("data", "optimizer", "scheduler", "module")
"""The differences from the saved run that `fit(..., allow=)` may permit."""


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


def class_name(instance: object) -> str:
    """Return the full name of the object's class, without the module if it is ``__main__``.

    The next run may import a script that was ``__main__``, so that its classes get another module.
    """
    kind = type(instance)
    return kind.__qualname__ if kind.__module__ == "__main__" else f"{kind.__module__}.{kind.__qualname__}"


def class_names(optimizers: Sequence[Any]) -> list[str]:
    """Return the class names of the optimizers or schedulers that the user returned."""
    return [class_name(optimizer) for optimizer in optimizers]


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


def find_differences(saved: Any, now: dict[str, Any], epoch_samples: int | None = None) -> list[Difference]:
    """Return the differences between a checkpoint's record of its run and this run. Missing entries do not count.

    Args:
        saved: the checkpoint's record.
        now: the record of this run.
        epoch_samples: the number of training samples of the saved epoch, which may differ from the number at the start
            of the saved run. This run may start with either; None if it is unknown.
    """
    if not isinstance(saved, dict):
        return []
    result = []
    for key, kind in (("module", "module"), ("schedulers", "scheduler")):
        if key in saved and key in now and not _same(saved[key], now[key]):
            result.append(Difference(kind, _describe(saved[key]), _describe(now[key])))
    same_schedulers = all(difference.kind != "scheduler" for difference in result)
    if same_schedulers and "scheduler_settings" in saved and "scheduler_settings" in now:
        result += _scheduler_differences(saved, now)
    if "optimizers" in saved and "optimizers" in now:
        result += _optimizer_differences(saved, now)
    saved_data, data = saved.get("data"), now.get("data")
    if isinstance(saved_data, dict) and isinstance(data, dict):
        samples, count = saved_data.get("samples"), data["samples"]
        order = data["order"]
        if None not in (samples, count) and count not in (samples, epoch_samples):
            result.append(Difference("data", f"{samples} training samples", str(count)))
        elif saved_data.get("order", order) != order:
            saved_order = ", ".join(saved_data["order"])
            result.append(Difference("data", f"training data {saved_order}", ", ".join(order) or "none"))
    return result


def _scheduler_differences(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[Difference]:
    from drivetrain._engine.optimizer_settings import compare_schedulers  # only a run that resumes needs it

    for name, before, after in zip(
        now["schedulers"], saved["scheduler_settings"], now["scheduler_settings"], strict=True
    ):
        for each in compare_schedulers(before, after, _describe([name])):
            yield Difference("scheduler", each.saved, each.now, None, each.is_number)


def _optimizer_differences(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[Difference]:
    from drivetrain._engine.optimizer_settings import compare_groups  # only a run that resumes needs it

    classes, current = saved["optimizers"], now["optimizers"]
    if len(classes) != len(current):
        yield Difference("optimizer", _describe(classes), _describe(current))
        return
    saved_groups = saved.get("optimizer_groups")
    frozen = {*saved.get("frozen_parameters", ()), *now["frozen_parameters"]}
    for index, (saved_class, own_class) in enumerate(zip(classes, current, strict=True)):
        name = _describe([own_class])
        if not _same(saved_class, own_class):
            yield Difference("optimizer", _describe([saved_class]), name, index)
        elif saved_groups is not None:
            optimizer = name if len(classes) == 1 else f"optimizer {index}, {name}"
            for each in compare_groups(saved_groups[index], now["optimizer_groups"][index], frozen, optimizer):
                yield Difference("optimizer", each.saved, each.now, index, each.is_number)


def immovable_optimizers(
    flattened: Mapping[str, Any],
    saved: tuple[str, int],
    now: tuple[str, int],
    shards: bool,
    found: Sequence[Difference],
) -> list[Difference]:
    """Return a difference for each optimizer whose state this run would have to cut, although it is stored in blocks.

    Args:
        flattened: what the checkpoint says about state of tensor subclasses.
        saved: the strategy and the number of ranks of the saved run.
        now: the strategy and the number of ranks of this run.
        shards: whether this run's strategy shards parameters.
        found: the other differences. Optimizers that differ anyway are left out.
    """
    differing = {each.optimizer for each in found if each.kind == "optimizer" and not each.is_number}
    return [
        Difference(
            "optimizer",
            f"block-wise optimizer state ({listed(entry['names'])}) on {_layout(saved)}",
            _layout(now),
            int(index),
        )
        for index, entry in flattened.items()
        if saved != now and (entry["per_rank"] or shards) and not differing & {int(index), None}
    ]


def _layout(layout: tuple[str, int]) -> str:
    return f"{layout[1]} rank{'s' * (layout[1] > 1)} of {layout[0]}"


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


def _same(saved: Any, now: Any) -> bool:
    if isinstance(saved, list) and isinstance(now, list):
        return len(saved) == len(now) and all(map(_same, saved, now))
    if saved == now:
        return True
    # A class of a script is recorded without its module, but with its module if the script is imported later.
    names = str(saved).rpartition("."), str(now).rpartition(".")
    return names[0][2] == names[1][2] and "" in (names[0][0], names[1][0])


def _describe(names: Any) -> str:
    return (
        ", ".join(str(name).rpartition(".")[2] for name in names) or "none" if isinstance(names, list) else str(names)
    )
