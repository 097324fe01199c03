"""Counts the data that a step sends to other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NAMES = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "broadcast_": "broadcast",
    "barrier": "barrier",
}


class Traffic(TorchDispatchMode):
    """Counts every collective of this process within the context.

    Attributes:
        collectives: how many of each kind.
        sent: bytes that a ring algorithm sends from each rank: of n bytes over W ranks (W-1)/W * n for an all-gather or
            a reduce-scatter, twice that for an all-reduce. Backends use other algorithms; the data to be exchanged is
            the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            kind = _NAMES.get(name, name)
            self.collectives[kind] += 1
            self.sent += self._bytes(kind, tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))

    def _bytes(self, kind: str, arguments: list[Any]) -> float:
        size = next(
            dist.ProcessGroup.unbox(each).size()
            for each in arguments
            if isinstance(each, torch.ScriptObject) and "ProcessGroup" in each._type().qualified_name()
        )
        whole = max((each.nbytes for each in arguments if isinstance(each, torch.Tensor)), default=0)
        return whole * (size - 1) / size * (2 if kind == "all-reduce" else 1)


def a_step(run: Callable[[int], Any]) -> tuple[dict[str, float], float]:
    """Return collectives by kind, and bytes sent, of one step of ``run(steps)``; start-up and end are removed."""
    counted = []
    for steps in (2, 6):
        with Traffic() as traffic:
            run(steps)
        counted.append(traffic)
    short, long = counted
    kinds = sorted(long.collectives)
    collectives = {kind: (long.collectives[kind] - short.collectives[kind]) / 4 for kind in kinds}
    return {kind: count for kind, count in collectives.items() if count}, (long.sent - short.sent) / 4


def in_words(collectives: dict[str, float]) -> str:
    """Format as ``3 all-gather, 1 reduce-scatter``."""
    return ", ".join(f"{count:g} {kind}" for kind, count in collectives.items()) or "none"
