"""EpochReader: reads the batches of training epochs, and takes notes of what it reads.

A batch goes from `BatchSource.epoch` through these generators to `TrainLoop`:

1. `EpochReader._read`, if something is to be noted of the epoch's batches.
2. A generator of `windows`, which gives the batch its weight in the optimizer step.
   - `allreduced_windows`: several ranks, with ``batch_weight`` or if a rank knows only the shares of its own batches.
   - `single_windows`: otherwise, if the data is not split over ranks and each window is one batch without
     ``batch_weight``.
   - `precomputed_windows`: in all other cases, in which no rank has to ask the others.
3. `BatchMover.move_all`, which moves the batch to the device, if batches need a move, a cast or a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from drivetrain._data.batch_copies import copy_batch
from drivetrain._data.batch_source import BatchSource, LimitedLoader
from drivetrain._data.rng_replay import RngReplay
from drivetrain._data.sharding import EpochOffset
from drivetrain._loops.batch_mover import BatchMover
from drivetrain._loops.data_checks import Lengths, compare_order
from drivetrain._loops.windows import (
    Batches,
    BatchWeight,
    MicroBatch,
    allreduced_windows,
    precomputed_windows,
    single_windows,
)
from drivetrain._run_state import Progress
from drivetrain.strategies.strategy import Strategy

_NAME = "training loader"


@dataclass(eq=False)
class EpochReader:
    """Reads training data epoch by epoch, from any micro-batch on.

    Attributes:
        data: the batches, and how many of them an epoch reads. `use` replaces it.
        get_window_size: returns the number of micro-batches of a window, which a callback may change between epochs.
        repeats_order: whether all epochs have the order of the first.
        strategy: the strategy.
        weigh: the module's ``batch_weight``; None to weight by samples.
        move: moves batches to the device; None if batches stay where they are.
        progress: the counters, which say how many of the micro-batches that were read are trained on.
        rng_replay: records and restores the random generators of data sets in this process.
        lengths: receives the length of the loader if it proves wrong.
        origin_of: returns the position from which an epoch is sharded.
    """

    data: LimitedLoader
    get_window_size: Callable[[], int]
    repeats_order: bool
    strategy: Strategy
    weigh: BatchWeight | None
    move: BatchMover | None
    progress: Progress
    rng_replay: RngReplay
    lengths: Lengths
    origin_of: Callable[[int], EpochOffset]

    def __post_init__(self) -> None:
        self.use(self.data)

    def use(self, data: LimitedLoader) -> None:
        """Read ``data`` from the next epoch on."""
        self.data, source = data, data.source
        self._exchanges = self.strategy.data_world_size > 1 and (self.weigh is not None or not source.shares_known)
        on_cuda = self.strategy.device.type == "cuda"
        self._reads_ahead = source.in_process and (self._exchanges or on_cuda)
        self._counts = False  # whether the length is to be compared with the number of batches
        self._number_read = 0
        self._has_ended = self._has_ended_on_all_ranks = False

    @property
    def source(self) -> BatchSource:
        """The source of this rank's batches."""
        return self.data.source

    @property
    def length(self) -> int | None:
        """The expected number of micro-batches of an epoch; None if it is unknown."""
        return self.data.length

    @property
    def length_is_known(self) -> bool:
        """Whether an epoch ends after `length` micro-batches, or its end must not be searched by reading on."""
        return self.data.length_is_exact or self.data.source.stateful

    @property
    def is_exhausted(self) -> bool:
        """Whether a source that saves its position has reached the end of the epoch's data.

        Such a source may restart at its end, and its state is then that of the next epoch.
        """
        return self.data.source.stateful and (self._has_ended_on_all_ranks if self._exchanges else self._has_ended)

    def compare_length(self) -> None:
        """Compare the loader's length with the number of batches that the epoch, which is over, has read."""
        source = self.data.source
        if self._counts:
            self.lengths.note(_NAME, source.length, self._number_read, self._has_ended)
        self._counts = False

    def read_epoch(self, epoch: int, first: int) -> Iterator[MicroBatch]:
        """Start an epoch, and return its micro-batches from number ``first`` on. Workers begin to read immediately."""
        source, strategy, weigh = self.data.source, self.strategy, self.weigh
        size = self.get_window_size()
        origin = self.origin_of(epoch)
        order = 0 if self.repeats_order else epoch
        limit = None if self.data.limit is None else max(0, self.data.limit - first)
        if origin.samples and self.data.limit == source.length:
            limit = None  # an epoch that began with another world size ends with its data
        batches = source.epoch(order, first, origin)
        shares = None if self._exchanges or weigh is not None else source.shares(order, first, origin)
        # All batches of a window are read before the first is trained on, and the loader may overwrite them.
        reads_window = shares is None and (size > 1 or (self._exchanges and not source.stateful))
        copies = reads_window and not source.fresh_memory
        self._number_read, self._has_ended, self._has_ended_on_all_ranks = first, False, False
        self._counts = source.length is not None and not (source.length_is_exact or origin.samples)
        self.rng_replay.begin_reading(first, self._reads_ahead)
        if self._counts or self._reads_ahead or source.needs_order_check or source.stateful or copies:
            batches = self._read(batches, copies)
        if limit is not None:
            batches = islice(batches, limit)
            shares = shares and islice(shares, limit)
        if self._exchanges:
            micro_batches = allreduced_windows(
                batches,
                size,
                strategy,
                weigh,
                limit,
                source.joining_batch if first else None,
                read_ahead=not source.stateful,
                on_end=self._note_end_on_all_ranks,
            )
        elif strategy.data_world_size == 1 and size == 1 and weigh is None:
            micro_batches = single_windows(batches)
        else:
            micro_batches = precomputed_windows(batches, size, strategy.data_world_size, weigh, shares)
        if self.move is None:
            return micro_batches
        return self.move.move_all(micro_batches, ahead=not source.stateful, fresh_memory=copies or source.fresh_memory)

    def _read(self, batches: Batches, copies: bool) -> Batches:
        """Yield the batches of an epoch, and take notes of each: this is what happens whenever a batch is read.

        A source whose batches need no notes is read without this generator.
        """
        source, rng_replay = self.data.source, self.rng_replay if self._reads_ahead else None
        compares_order = source.needs_order_check
        while True:
            if rng_replay is not None:
                rng_replay.before_read(self.progress.batch_idx)
            pair = next(batches, None)
            if pair is not None and rng_replay is not None:
                rng_replay.after_read()
            if compares_order:
                compare_order(source, _NAME, self.strategy)
                compares_order = False
            if pair is None:
                self._has_ended = True
                return
            self._number_read += 1
            yield (copy_batch(pair[0]), pair[1]) if copies else pair

    def _note_end_on_all_ranks(self) -> None:
        self._has_ended_on_all_ranks = True
