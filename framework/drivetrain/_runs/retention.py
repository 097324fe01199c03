"""Which checkpoints of a run are kept, the best by a monitored value and the newest, and which are to be removed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from drivetrain._runs.checkpoint_folders import is_plain_name


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """A checkpoint that this run wrote.

    Attributes:
        name: the name of the checkpoint's folder, which is directly inside the callback's folder.
        identifier: the identifier in the checkpoint's manifest; "" if unknown, in which case the checkpoint is never
            removed.
        score: the monitored value at the save; None if nothing is monitored, or no value was logged yet.
        number: index of the save within the run.
        step: the optimizer step after which the checkpoint was written.
    """

    name: str
    identifier: str
    score: float | None = None
    number: int = 0
    step: int = 0

    @classmethod
    def from_state(cls, document: Any) -> KeptCheckpoint:
        """Build an instance from a dict that `dataclasses.asdict` returned.

        Raises:
            ValueError: the document has another form.
        """
        if not isinstance(document, Mapping):
            raise ValueError(f"{document!r} does not describe a checkpoint")
        values: list[Any] = [document.get(each.name) for each in fields(cls)]
        name, identifier, score, number, step = values
        valid_name = isinstance(name, str) and is_plain_name(name) and isinstance(identifier, str)
        if not valid_name or type(number) is not int or type(step) is not int:
            raise ValueError(f"{document!r} does not describe a checkpoint")
        if score is not None and not isinstance(score, int | float):
            raise ValueError(f"the score {score!r} is not a number")
        return cls(name, identifier, score, number, step)


class Retention:
    """Selects which of the added checkpoints to keep and which to remove.

    Attributes:
        kept: the checkpoints that are kept.
        interrupt_checkpoint: a further one, written as the run was interrupted; None if there is none. It is to be
            removed once a later one from which a run can resume is added.
        to_remove: the checkpoints to remove once a later one is complete.

    Args:
        top_k: number of best checkpoints to keep; -1 keeps all. Without scores, the newest is the best; a checkpoint
            with a score is better than one without.
        keep_last: number of newest checkpoints to keep in addition.
        mode: "min" if lower scores are better, "max" if higher scores are better.
    """

    def __init__(self, top_k: int, keep_last: int, mode: str) -> None:
        self._top_k = top_k
        self._keep_last = keep_last
        self._sign = 1.0 if mode == "min" else -1.0
        self._count = 0
        self.kept: list[KeptCheckpoint] = []
        self.interrupt_checkpoint: KeptCheckpoint | None = None
        self.to_remove: list[KeptCheckpoint] = []

    def would_keep(self, score: float | None) -> bool:
        """Return whether a new checkpoint with this score would be kept."""
        candidate = self._candidate(score)
        return candidate in self._select([*self.kept, candidate])

    def displaced_by(self, score: float | None) -> list[KeptCheckpoint]:
        """Return the checkpoints that a new checkpoint with this score would displace.

        The new checkpoint may take the name of one of the displaced checkpoints.
        """
        kept = self._select([*self.kept, self._candidate(score)])
        return [checkpoint for checkpoint in self.kept if checkpoint not in kept]

    def add(self, name: str, identifier: str, score: float | None, step: int, resumable: bool) -> None:
        """Add a checkpoint, from which a run can resume if it is ``resumable``.

        A checkpoint with the same name need not be removed, because the new checkpoint replaces it.
        """
        candidates = [*self.kept, KeptCheckpoint(name, identifier, score, self._count, step)]
        self._count += 1
        self.kept = self._select(candidates)
        self.to_remove += [each for each in candidates if each not in self.kept and each.name != name]
        if resumable and self.interrupt_checkpoint is not None and self.interrupt_checkpoint.step < step:
            self.to_remove.append(self.interrupt_checkpoint)
            self.interrupt_checkpoint = None

    def add_interrupt_checkpoint(self, name: str, identifier: str, step: int) -> list[KeptCheckpoint]:
        """Add a checkpoint that is written as the run is interrupted, and return the earlier one if there is one."""
        earlier = self.interrupt_checkpoint
        self.interrupt_checkpoint = KeptCheckpoint(name, identifier, step=step)
        replaced = [] if earlier is None or earlier.name == name else [earlier]
        self.to_remove += replaced
        return replaced

    def rescore(self, step: int, score: float | None) -> bool:
        """Return whether a checkpoint of this step is kept. If so, give it a new score, unless that is None."""
        for index, checkpoint in enumerate(self.kept):
            if checkpoint.step == step:
                self.kept[index] = checkpoint if score is None else replace(checkpoint, score=score)
                return True
        return False

    def drop_after(self, step: int) -> bool:
        """Drop the checkpoints after ``step``, which the run has rolled back to; return whether there were any."""
        later = [checkpoint for checkpoint in self.kept if checkpoint.step > step]
        self.kept = [checkpoint for checkpoint in self.kept if checkpoint.step <= step]
        self.to_remove += later
        return bool(later)

    @property
    def best(self) -> KeptCheckpoint | None:
        """The best kept checkpoint."""
        return min(self.kept, key=self._rank, default=None)

    @property
    def kth_best(self) -> KeptCheckpoint | None:
        """The worst of the ``top_k`` best checkpoints, which a better one would replace; None if fewer are kept."""
        best = sorted(self.kept, key=self._rank)[: self._top_k if self._top_k > 0 else None]
        return best[-1] if best and len(best) >= self._top_k else None

    @property
    def newest(self) -> KeptCheckpoint | None:
        """The newest kept checkpoint."""
        return max(self.kept, key=lambda checkpoint: checkpoint.number, default=None)

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoints and the save counter, and the name of the best checkpoint."""
        interrupt, best = self.interrupt_checkpoint, self.best
        return {
            "best": "" if best is None else best.name,
            "count": self._count,
            "kept": [asdict(checkpoint) for checkpoint in self.kept],
            "interrupt_checkpoint": None if interrupt is None else asdict(interrupt),
            "to_remove": [asdict(checkpoint) for checkpoint in self.to_remove],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            ValueError: the state has another form.
        """
        count, kept, to_remove = (state.get(name) for name in ("count", "kept", "to_remove"))
        if type(count) is not int or not isinstance(kept, Sequence) or not isinstance(to_remove, Sequence):
            raise ValueError(f"count={count!r}, kept={kept!r}, to_remove={to_remove!r}")
        interrupt = state.get("interrupt_checkpoint")
        self.kept = [KeptCheckpoint.from_state(checkpoint) for checkpoint in kept]
        self.interrupt_checkpoint = None if interrupt is None else KeptCheckpoint.from_state(interrupt)
        self.to_remove = [KeptCheckpoint.from_state(checkpoint) for checkpoint in to_remove]
        self._count = max([count, *(checkpoint.number + 1 for checkpoint in self.kept)])

    def _candidate(self, score: float | None) -> KeptCheckpoint:
        return KeptCheckpoint("", "", score, self._count)

    def _select(self, candidates: list[KeptCheckpoint]) -> list[KeptCheckpoint]:
        if self._top_k < 0:
            return candidates
        best = sorted(candidates, key=self._rank)[: self._top_k]
        newest = sorted(candidates, key=lambda checkpoint: -checkpoint.number)[: self._keep_last]
        return [checkpoint for checkpoint in candidates if checkpoint in best or checkpoint in newest]

    def _rank(self, checkpoint: KeptCheckpoint) -> tuple[bool, float, int]:
        """Return the sort key: better scores come first, then NaN, then no score.

        Of equal scores the earlier comes first, so that a score that stands still replaces nothing. Of checkpoints
        without a score the newer comes first.
        """
        score, number = checkpoint.score, checkpoint.number
        if score is None:
            return True, 0.0, -number
        return False, math.inf if math.isnan(score) else self._sign * score, number
