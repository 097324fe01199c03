"""Warnings about loaders whose ``len()`` differs from the number of batches that they yield."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain, count, islice
from operator import itemgetter

from drivetrain._distributed.control_plane import ControlPlane, spread
from drivetrain._loops.windows import Batches

logger = logging.getLogger("drivetrain")

_EXCESS_FACTOR = 4
"""A loader that yields more than this many times its length is reported at once, since it may never end."""


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


class BatchCount:
    """Counts the micro-batches of an epoch's data and detects the data's end, without a Python call for each batch.

    Args:
        loader: the loader's name.
        length: micro-batches of an epoch on this rank, from ``len(loader)``; None if the loader has no length.
        counts_reads: whether batches are counted as they are read, because ranks may have different numbers of batches.
        lengths: receives the length if it is wrong.
    """

    def __init__(self, loader: str, length: int | None, counts_reads: bool, lengths: Lengths) -> None:
        self._loader = loader
        self._length = length
        self._counts_reads = counts_reads
        self._lengths = lengths
        self._followed = False
        self._counter: Iterator[int] = count()
        self._ended = False

    def follow(self, batches: Batches, first: int) -> Batches:
        """Return ``batches``, an epoch's batches from number ``first`` on, and count them as they are read."""
        self._followed, self._ended = True, False
        if self._counts_reads:
            self._counter = count(first)
            batches = map(itemgetter(0), zip(batches, self._counter, strict=False))
        if self._length is not None and self._length * _EXCESS_FACTOR > first:
            expected = islice(batches, self._length * _EXCESS_FACTOR - first)
            batches = chain(expected, self._report_excess(batches), batches)
        return chain(batches, self._end())

    def compare_length(self, trained: int) -> None:
        """Compare the epoch's length with the batches read, or with ``trained``, the number trained on."""
        if not self._followed:
            return
        self._followed = False
        if self._ended or not self._counts_reads:
            yielded = next(self._counter) if self._counts_reads else trained
            self._lengths.note(self._loader, self._length, yielded, self._ended)

    def _end(self) -> Batches:
        yield from ()  # an empty generator, whose body runs at the end of the batches
        self._ended = True

    def _report_excess(self, batches: Batches) -> Batches:
        excess_batch = next(batches, None)
        if excess_batch is not None:
            assert self._length is not None
            self._lengths.report_now(self._loader, self._length, self._length * _EXCESS_FACTOR + 1)
            yield excess_batch
