"""Warnings about loaders whose ``len()`` differs from the number of batches that they yield."""

from __future__ import annotations

import logging

from drivetrain._distributed.control_plane import ControlPlane, spread

logger = logging.getLogger("drivetrain")


class Lengths:
    """Collects the loaders whose length proved wrong, and warns about each loader once, on rank 0.

    Args:
        control: the control plane, by which ranks exchange lengths, since each rank may have another loader.
    """

    def __init__(self, control: ControlPlane) -> None:
        self.control = control
        self._reported: set[str] = set()
        # By a loader's name: its length, the number of batches that it yielded, and whether it ended.
        self._wrong_lengths: dict[str, tuple[int, int, bool]] = {}

    @property
    def has_mismatch(self) -> bool:
        """Whether this rank has a wrong length to report."""
        return bool(self._wrong_lengths)

    def note(self, loader: str, length: int | None, count: int, ended: bool) -> None:
        """Compare a loader's length with the batches that it yielded.

        Args:
            loader: the loader's name.
            length: the loader's length; None if the loader has none.
            count: the number of batches that the loader yielded.
            ended: whether the loader ended. Otherwise it has at least ``count`` batches.
        """
        if length is not None and loader not in self._reported and (count != length if ended else count > length):
            self._wrong_lengths[loader] = length, count, ended

    def warn_together(self, ranks: int) -> None:
        """Warn about the wrong lengths. Collective if ``ranks``, the number of ranks that noticed one, is not 0."""
        if not ranks:
            return
        wrong, self._wrong_lengths = self._wrong_lengths, {}
        by_rank = self.control.gather_objects(wrong)
        for loader in dict.fromkeys(name for rank_lengths in by_rank for name in rank_lengths):
            self._warn(loader, [rank_lengths.get(loader) for rank_lengths in by_rank])

    def report_now(self, loader: str, length: int, count: int) -> None:
        """Warn, on rank 0, that a loader has yielded far more than its length. Not collective."""
        if self.control.rank == 0:
            self._warn(loader, [(length, count, False)])

    def _warn(self, loader: str, by_rank: list[tuple[int, int, bool] | None]) -> None:
        if self.control.rank == 0 and loader not in self._reported:
            counts = {wrong: ranks for wrong, ranks in spread(by_rank).items() if wrong is not None}
            same_on_all_ranks = sum(map(len, counts.values())) == len(by_rank) and len(counts) == 1
            descriptions = [
                f"{length} micro-batches per epoch, but {'' if ended else 'at least '}{count} were read"
                + ("" if same_on_all_ranks else f" on rank(s) {ranks}")
                for (length, count, ended), ranks in counts.items()
            ]
            logger.warning(
                "The length of the %s proved wrong: it is %s. All batches are used, and no rank waits for missing "
                "batches, but values derived from that length (estimated_stepping_batches, fractions of an epoch such "
                "as val_check_interval=0.5) are wrong as well. Check __len__ of its sampler or data set. For an "
                "iterable data set, torch estimates the length without knowing how workers split the data. This "
                "warning is not repeated.",
                loader,
                "; ".join(descriptions),
            )
        self._reported.add(loader)
