"""Describes the parts of a run that a resumed run must have as well, for the ``components`` in its checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.sampler import BatchSampler

from drivetrain._data.batch_source import BatchSource
from drivetrain._data.combined import CombinedLoader
from drivetrain._parameters.optimizer_state import IMPLEMENTATION_OPTIONS
from drivetrain.errors import ConfigurationError, nearest

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
