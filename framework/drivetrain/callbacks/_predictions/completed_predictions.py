"""Index of the samples that an earlier run has predicted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from drivetrain.data._prediction_files import Entry


class CompletedPredictions:
    """Answers which samples of a batch an earlier run has predicted and written.

    Args:
        entries: the outputs that the earlier run has written.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        # For each loader, the ranges (first, end) of consecutive sample indices that were written.
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        # The number of samples of each written batch without indices, by loader, batch and rank.
        self._batches: dict[tuple[int, int, int], int] = {}
        for entry in entries:
            if entry.runs is None:
                self._batches[entry.loader, entry.batch, entry.rank] = entry.samples
            else:
                ends = ((first, first + count) for first, count in entry.runs)
                self._ranges.setdefault(entry.loader, []).extend(ends)
        self._ranges = {loader: _merged(ranges) for loader, ranges in self._ranges.items()}

    def has(self, loader: int, batch: int, rank: int, indices: Sequence[int] | None) -> bool:
        """Return whether all samples of a batch were written."""
        if indices is None:
            return (loader, batch, rank) in self._batches
        return all(self._has(loader, index) for index in indices)

    def samples(self, loader: int, batch: int, rank: int, indices: Sequence[int] | None) -> int:
        """Return the number of samples of a batch, all of which were written."""
        return self._batches[loader, batch, rank] if indices is None else len(indices)

    def missing(self, loader: int, batch: int, rank: int, indices: Sequence[int] | None, samples: int) -> Sequence[int]:
        """Return the positions in the batch of the samples that were not written."""
        if indices is None:
            return () if (loader, batch, rank) in self._batches else range(samples)
        if loader not in self._ranges:
            return range(samples)
        return [row for row, index in enumerate(indices) if not self._has(loader, index)]

    def _has(self, loader: int, index: int) -> bool:
        ranges = self._ranges.get(loader, [])
        number = bisect_right(ranges, index, key=lambda index_range: index_range[0]) - 1
        return number >= 0 and index < ranges[number][1]


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge ranges that overlap or follow each other."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((first, end))
    return merged
