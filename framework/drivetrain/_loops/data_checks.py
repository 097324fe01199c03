"""Checks of what loaders yield: as many batches as their ``len()`` says, and the right data on each rank."""

from __future__ import annotations

import logging

from drivetrain._data.batch_source import BatchSource
from drivetrain._data.order_fingerprint import OrderFingerprint
from drivetrain._distributed.control_plane import ControlPlane, refuse_differences
from drivetrain.errors import ConfigurationError
from drivetrain.strategies.strategy import Strategy

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
            rank = next(rank for rank, rank_lengths in enumerate(by_rank) if loader in rank_lengths)
            length, count, ended = by_rank[rank][loader]
            self._reported.add(loader)
            if self.control.rank == 0:
                logger.warning(
                    "The length of the %s proved wrong: it is %d micro-batches per epoch, but %s%d were read on rank "
                    "%d. All batches are used, and no rank waits for missing batches, but values derived from that "
                    "length (estimated_stepping_batches, fractions of an epoch such as val_check_interval=0.5) are "
                    "wrong as well. Check __len__ of its sampler or data set. For an iterable data set, torch "
                    "estimates the length without knowing how workers split the data. This warning is not repeated.",
                    loader,
                    length,
                    "" if ended else "at least ",
                    count,
                    rank,
                )


# The same order of a data set on all ranks, and different parts of a stream

_WHY_ONE_ORDER = (
    "each rank iterates over the whole order and takes its part, so with different orders some samples would be read "
    "twice and others not at all."
)
_FIX_ORDER = (
    "let the sampler draw from the global generator of torch, Python or NumPy, which is the same on all ranks while "
    "the sampler draws, or from a generator that has the same seed on all ranks; or set "
    "use_distributed_sampler=False, with which each rank keeps its own order."
)


def compare_order(source: BatchSource, name: str, strategy: Strategy) -> None:
    """Compare the data that the ranks have read first. Called after the first batch was read, before it is used.

    The comparison costs one small exchange per run for each source whose order the engine does not determine.

    Args:
        source: the source of the batches, whose ``needs_order_check`` is true.
        name: the loader's name.
        strategy: the strategy, whose control plane connects the ranks.

    Raises:
        ConfigurationError: the ranks read different orders. Raised on every rank.
    """
    by_rank = strategy.control.gather_objects(
        (strategy.data_rank, [tuple(fingerprint) for fingerprint in source.order_fingerprints()])
    )
    data_ranks = [data_rank for data_rank, _ in by_rank]
    for fields_by_rank in zip(*(rank_fields for _, rank_fields in by_rank), strict=True):
        fingerprints = [OrderFingerprint(*fields) for fields in fields_by_rank]
        digests = [fingerprint.digest for fingerprint in fingerprints]
        if None in digests:
            continue
        if fingerprints[0].common:
            refuse_differences(
                [{f"the order of {fingerprints[0].name}, the sampler of the {name}": digest} for digest in digests],
                _WHY_ONE_ORDER,
                _FIX_ORDER,
                ConfigurationError,
            )
        elif strategy.rank == 0 and len(set(data_ranks)) > 1 and len(set(digests)) == 1:
            data, ranks = fingerprints[0].name, len(set(data_ranks))
            logger.warning(
                "The first batch of the %s is the same on all ranks. Each rank seems to read the whole of %s, so that "
                "every sample counts %d times: give each rank its own part, for example by "
                "drivetrain.data.split_by_rank(%s(...)). This warning is not repeated.",
                name,
                data,
                ranks,
                data,
            )
