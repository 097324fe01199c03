"""Whether a run that goes on is the one that was saved: the same module, data, optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.sampler import BatchSampler

from drivetrain.data._batch_source import BatchSource
from drivetrain.data.combined import CombinedLoader
from drivetrain.errors import ConfigurationError, nearest

CONSENTS = ("data", "optimizer", "scheduler", "module")
"""What `fit(..., allow=)` may name: what may differ from the run that was saved."""


class Difference(NamedTuple):
    """What differs, as the one who is to consent reads it.

    Attributes:
        consent: what `allow` must name.
        saved: as it was.
        now: as it is.
    """

    consent: str
    saved: str
    now: str


def check_allow(allow: Sequence[str]) -> tuple[str, ...]:
    """Return what may differ.

    Raises:
        ConfigurationError: it names something else.
    """
    named = (allow,) if isinstance(allow, str) else tuple(allow)
    for name in named:
        if name not in CONSENTS:
            raise ConfigurationError(
                f"fit(allow={name!r}) is unknown.{nearest(str(name), CONSENTS)}",
                "it names what may differ from the run that ckpt_path goes on with.",
                f"give some of {', '.join(CONSENTS)}.",
            )
    return named


def class_name(one: object) -> str:
    """A class by its module and name; a script's own by its name, for it may be imported the next time."""
    kind = type(one)
    return kind.__qualname__ if kind.__module__ == "__main__" else f"{kind.__module__}.{kind.__qualname__}"


def names_of(optimizers: Sequence[Any]) -> list[str]:
    """The classes of optimizers or schedulers, as the user returned them."""
    return [class_name(one) for one in optimizers]


def data_facts(source: BatchSource | None, loaders: Sequence[Any]) -> dict[str, Any]:
    """What a checkpoint says of the training data: how many samples, and in what kind of order. Batch sizes may differ.

    Args:
        source: of the batches.
        loaders: as the user gave them.
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
        return [order for one in several for order in _orders(one)]  # else it is a list of batches
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


def differences(saved: Any, now: dict[str, Any]) -> list[Difference]:
    """Compare what a checkpoint says of its run with what is here; what it does not say is no difference."""
    if not isinstance(saved, dict):
        return []
    found = []
    for key, consent in (("module", "module"), ("optimizers", "optimizer"), ("schedulers", "scheduler")):
        if key in saved and key in now and not _same(saved[key], now[key]):
            found.append(Difference(consent, _said(saved[key]), _said(now[key])))
    before, here = saved.get("data"), now.get("data")
    if isinstance(before, dict) and isinstance(here, dict):
        samples, count = before.get("samples"), here["samples"]
        if None not in (samples, count) and samples != count:
            found.append(Difference("data", f"{samples} training samples", str(count)))
        elif before.get("order", here["order"]) != here["order"]:
            found.append(
                Difference("data", f"training data {', '.join(before['order'])}", ", ".join(here["order"]) or "none")
            )
    return found


def refuse(path: str, found: Sequence[Difference], allow: Sequence[str]) -> None:
    """Refuse differences that nobody has consented to.

    Raises:
        ConfigurationError: names them, and the consent.
    """
    left = [one for one in found if one.consent not in allow]
    if left:
        consents = ", ".join(f'"{one}"' for one in dict.fromkeys(one.consent for one in left))
        raise ConfigurationError(
            f"The run of {path!r} had {'; '.join(f'{one.saved}, and this one {one.now}' for one in left)}.",
            "what was saved would go on as something else: samples seen twice or never, or state that means another "
            "thing.",
            f"make them the same, or consent: fit(..., allow=({consents},)). Weights alone are loaded by "
            "load_from_checkpoint.",
        )


def _same(saved: Any, now: Any) -> bool:
    if isinstance(saved, list) and isinstance(now, list):
        return len(saved) == len(now) and all(map(_same, saved, now))
    if saved == now:
        return True
    # A script's class has a module once it is imported.
    names = str(saved).rpartition("."), str(now).rpartition(".")
    return names[0][2] == names[1][2] and "" in (names[0][0], names[1][0])


def _said(names: Any) -> str:
    return ", ".join(str(one).rpartition(".")[2] for one in names) or "none" if isinstance(names, list) else str(names)
