"""Which checkpoints are kept: the best by a value, and the newest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from drivetrain.checkpoint._folders import is_plain_name


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that this run wrote.

    Attributes:
        name: of its folder, directly within the callback's.
        identifier: its manifest's; "" where that is not known, and then it is never removed.
        score: the monitored value as it was saved; None where nothing is monitored.
        number: counts the run's checkpoints.
        step: the optimizer step that it was written after.
    """

    name: str
    identifier: str
    score: float | None = None
    number: int = 0
    step: int = 0

    @classmethod
    def from_state(cls, document: Any) -> SavedCheckpoint:
        """Read what `dataclasses.asdict` gave, or a version before identifiers were kept.

        Raises:
            ValueError: it is neither.
        """
        if not isinstance(document, Mapping):
            raise ValueError(f"{document!r} names no checkpoint")
        path = document.get("path")
        name = document.get("name", path.rpartition("/")[2] if isinstance(path, str) else None)
        identifier, score = document.get("identifier", ""), document.get("score")
        number, step = document.get("number", 0), document.get("step", 0)
        plain = isinstance(name, str) and is_plain_name(name) and isinstance(identifier, str)
        if not plain or type(number) is not int or type(step) is not int:
            raise ValueError(f"{document!r} names no checkpoint")
        if score is not None and not isinstance(score, int | float):
            raise ValueError(f"the score {score!r} is no number")
        return cls(name, identifier, score, number, step)


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
        self.kept: list[SavedCheckpoint] = []

    def would_keep(self, score: float | None) -> bool:
        """Whether a checkpoint with this score would be kept, be it for a while."""
        candidate = self._candidate(score)
        return candidate in self._select([*self.kept, candidate])

    def to_remove(self, score: float | None) -> list[SavedCheckpoint]:
        """What would go if a checkpoint with this score came: its name may take one of theirs."""
        staying = self._select([*self.kept, self._candidate(score)])
        return [one for one in self.kept if one not in staying]

    def add(self, name: str, identifier: str, score: float | None, step: int = 0) -> list[SavedCheckpoint]:
        """Take note of a checkpoint; return those that go once it is whole, the one that it replaces apart."""
        everything = [*self.kept, SavedCheckpoint(name, identifier, score, self._count, step)]
        self._count += 1
        self.kept = self._select(everything)
        return [one for one in everything if one not in self.kept and one.name != name]

    def drop_after(self, step: int) -> list[SavedCheckpoint]:
        """Forget what was written after a later step, and return it: the run has gone back to this one."""
        later = [one for one in self.kept if one.step > step]
        self.kept = [one for one in self.kept if one.step <= step]
        return later

    @property
    def best(self) -> SavedCheckpoint | None:
        """The best that is kept."""
        return min(self.kept, key=self._rank, default=None)

    @property
    def kth_best(self) -> SavedCheckpoint | None:
        """The next to go for a better one; None while there is room."""
        best = sorted(self.kept, key=self._rank)[: self._top_k if self._top_k > 0 else None]
        return best[-1] if best and len(best) >= self._top_k else None

    @property
    def newest(self) -> SavedCheckpoint | None:
        """The newest that is kept."""
        return max(self.kept, key=lambda one: one.number, default=None)

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept."""
        return {"count": self._count, "kept": [asdict(one) for one in self.kept]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned.

        Raises:
            ValueError: it is something else.
        """
        count, kept = state.get("count"), state.get("kept")
        if type(count) is not int or not isinstance(kept, Sequence):
            raise ValueError(f"count={count!r}, kept={kept!r}")
        self.kept = [SavedCheckpoint.from_state(one) for one in kept]
        self._count = max([count, *(one.number + 1 for one in self.kept)])

    def _candidate(self, score: float | None) -> SavedCheckpoint:
        return SavedCheckpoint("", "", score, self._count)

    def _select(self, everything: list[SavedCheckpoint]) -> list[SavedCheckpoint]:
        if self._top_k < 0:
            return everything
        best = sorted(everything, key=self._rank)[: self._top_k]
        newest = sorted(everything, key=lambda one: -one.number)[: self._keep_last]
        return [one for one in everything if one in best or one in newest]

    def _rank(self, one: SavedCheckpoint) -> tuple[float, int]:
        """Lower is better; of equals the newer one. What is no number is worse than any."""
        if one.score is None:
            return 0.0, -one.number
        return (math.inf if math.isnan(one.score) else self._sign * one.score), -one.number
