"""Which checkpoints are kept: the best by a value, and the newest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint that this run wrote.

    Attributes:
        path: where.
        score: the monitored value as it was saved; None where nothing is monitored.
        number: counts the run's checkpoints.
        step: the optimizer step that it was written after.
    """

    path: str
    score: float | None
    number: int
    step: int = 0


class Retention:
    """Decides what is kept and what goes. Knows of nothing but what it was told of: only that is ever removed.

    Args:
        top_k: how many of the best are kept; -1 for all. Where nothing is monitored the newest is the best.
        keep_last: how many of the newest are kept besides.
        mode: "min" where less is better, "max" where more is.
    """

    def __init__(self, top_k: int, keep_last: int, mode: str) -> None:
        self._top_k = top_k
        self._keep_last = keep_last
        self._sign = 1.0 if mode == "min" else -1.0
        self._count = 0
        self._going: list[str] = []
        self.kept: list[Kept] = []

    def wants(self, score: float | None) -> bool:
        """Whether a checkpoint with this score would be kept, be it for a while."""
        coming = Kept("", score, self._count)
        return coming in self._chosen([*self.kept, coming])

    def add(self, path: str, score: float | None, step: int = 0) -> list[str]:
        """Take note of a checkpoint; return the paths of those that go once it is whole."""
        everything = [*(one for one in self.kept if one.path != path), Kept(path, score, self._count, step)]
        self._count += 1
        self.kept = self._chosen(everything)
        self._going = [one.path for one in everything if one not in self.kept]
        return self._going

    def drop_after(self, step: int) -> list[str]:
        """Forget what was written after a later step, and return the paths: the run has gone back to this one."""
        later = [one for one in self.kept if one.step > step]
        self.kept = [one for one in self.kept if one.step <= step]
        return [one.path for one in later]

    @property
    def best(self) -> Kept | None:
        """The best that is kept."""
        return min(self.kept, key=self._rank, default=None)

    @property
    def newest(self) -> Kept | None:
        """The newest that is kept."""
        return max(self.kept, key=lambda one: one.number, default=None)

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept, and what goes once this is saved: killed just then, a run has not removed it yet."""
        return {"count": self._count, "kept": [asdict(one) for one in self.kept], "going": self._going}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self._count = state["count"]
        self.kept = [Kept(**one) for one in state["kept"]]

    def _chosen(self, everything: list[Kept]) -> list[Kept]:
        if self._top_k < 0:
            return everything
        best = sorted(everything, key=self._rank)[: self._top_k]
        newest = sorted(everything, key=lambda one: -one.number)[: self._keep_last]
        return [one for one in everything if one in best or one in newest]

    def _rank(self, one: Kept) -> tuple[float, int]:
        """Lower is better; of equals the newer one. What is no number is worse than any."""
        if one.score is None:
            return 0.0, -one.number
        return (math.inf if math.isnan(one.score) else self._sign * one.score), -one.number
