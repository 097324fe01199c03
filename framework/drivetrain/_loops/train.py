"""The training loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import torch

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._loops.epoch_checks import EpochWatch
from drivetrain._loops.hooks import HookTable
from drivetrain._loops.loader_lengths import Lengths, Tally
from drivetrain._loops.progress import Position, Progress
from drivetrain._loops.save_requests import SaveRequests
from drivetrain._loops.schedulers import Schedulers
from drivetrain._loops.step import TrainStep
from drivetrain._loops.stopping import StopRequest, limit_reached
from drivetrain._loops.uneven_inputs import Joining
from drivetrain._loops.validation import ValidationPlan
from drivetrain._loops.windows import MicroBatch
from drivetrain._metrics import MetricStore
from drivetrain._runtime.generators import preserved_generators
from drivetrain._runtime.transfer import map_tensors
from drivetrain.data._rng_replay import ReadAhead

if TYPE_CHECKING:
    from drivetrain._loops.progress_reports import Pacing

logger = logging.getLogger("drivetrain")

_SKIP_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class TrainLimits:
    """How long to train. Whatever is reached first ends the run.

    Attributes:
        max_epochs: None or -1 for no limit.
        max_steps: optimizer steps; -1 for no limit.
        log_every_n_steps: optimizer steps between two flushes to the loggers; 0 for never.
    """

    max_epochs: int | None
    max_steps: int
    log_every_n_steps: int


@dataclass(frozen=True, slots=True)
class EpochData:
    """What an epoch is trained on.

    Attributes:
        micro_batches: begins an epoch: ``micro_batches(epoch, first)`` iterates from micro-batch ``first``.
        exhausted: says whether the epoch's data came to its end, which a loader that keeps its place may have passed.
        length: micro-batches that an epoch should have; None where nothing says.
        certain: whether it has exactly as many.
        tally: of an epoch's batches.
    """

    micro_batches: Callable[[int, int], Iterator[MicroBatch]]
    exhausted: Callable[[], bool]
    length: int | None
    certain: bool
    tally: Tally


class Opening(Protocol):
    """What a window begins with, where a run may leave within one."""

    def begin_epoch(self) -> bool:
        """Take note of it before an epoch's first window; False where windows of this epoch have one micro-batch."""

    def take(self) -> None:
        """Take note of it before the next window."""

    def go_back(self) -> None:
        """Let what is saved from here on be as it was at the last opening."""

    @property
    def in_force(self) -> bool:
        """Whether the run went back to it."""

    @property
    def has_begun_the_epoch(self) -> bool:
        """Whether the run went back to the opening of an epoch's first window."""


class EpochEnd(Enum):
    """Why an epoch's loop came to its end."""

    DATA = "no data left"
    LIMIT = "max_steps"
    STOPPED = "somebody asked to stop"
    LEFT = "a signal asked to save and leave"
    BACK = "somebody asked to go back to a checkpoint"


class TrainLoop:
    """Takes micro-batches, trains on them, and tells the hooks.

    Args:
        step: what happens to a micro-batch and to a closed window.
        data: what an epoch is trained on.
        hooks: who overrode what.
        metrics: where steps log.
        progress: the counters.
        position: told the batch that it has come to.
        limits: how long.
        stop: who asks to end early.
        schedulers: of learning rates.
        validation: when to validate, and how.
        control: the way to the other ranks.
        lengths: says which length proved wrong.
        log: sends a dict of numbers to the loggers; None where there is none.
        pacing: tells callbacks, with each flush, how far the epoch has come; None where none wants to know.
        saves: the checkpoints that were asked for.
        draws: brings the random generators back to where they stood when a resumed run was saved.
        save: writes what a later run goes on from, where this one ends before its time.
        settle: looks what trains, once the hooks that begin an epoch have been called.
        watch: says what only an epoch as a whole shows.
        opening: what windows of several micro-batches begin with; None where a run never leaves within one.
        reload: called with an epoch that begins or goes on; brings its data by `use`, where they change. None where
            they do not.
    """

    def __init__(
        self,
        *,
        step: TrainStep,
        data: EpochData,
        hooks: HookTable,
        metrics: MetricStore,
        progress: Progress,
        position: Position,
        limits: TrainLimits,
        stop: StopRequest,
        schedulers: Schedulers,
        validation: ValidationPlan,
        control: ControlPlane,
        lengths: Lengths,
        log: Callable[[Mapping[str, torch.Tensor | float]], None] | None,
        pacing: Pacing | None,
        saves: SaveRequests,
        draws: ReadAhead,
        save: Callable[[], None],
        settle: Callable[[], None],
        watch: EpochWatch,
        opening: Opening | None,
        reload: Callable[[int], None] | None,
    ) -> None:
        self._step = step
        self._hooks = hooks
        self._metrics = metrics
        self._progress = progress
        self._position = position
        self._limits = limits
        self._stop = stop
        self._schedulers = schedulers
        self._validation = validation
        self._control = control
        self._lengths = lengths
        self._log = log
        self._log_every = limits.log_every_n_steps if limits.log_every_n_steps > 0 else 0
        self._flushed_at = 0
        self._steps_before: int | None = None  # the epoch; None where it was begun by another run
        self._said_idle = False
        self._pacing = pacing
        self._saves = saves
        self._draws = draws
        self._save = save
        self._settle = settle
        self._watch = watch
        self._opening = opening
        self._reload = reload
        self._take(data)
        self._resumed: Mapping[str, Any] | None = None
        self._data_is_over = False
        self._left_after_last_step = False  # for a signal's sake, before the epoch had come to its end
        self._asked_to_stop: str | None = None  # why, where it was left before it could stop

    def _take(self, data: EpochData) -> None:
        self._micro_batches = data.micro_batches
        self._exhausted = data.exhausted
        self._length = data.length
        self._certain = data.certain
        self._tally = data.tally

    def use(self, data: EpochData, validate: Callable[[], object] | None) -> None:
        """Train and validate on other data from here on, between two epochs."""
        self._take(data)
        self._validation.renew(validate, data.length)

    # What a checkpoint keeps

    def state_dict(self) -> dict[str, Any]:
        """Return where between an epoch's data and its end the loop stands."""
        return {
            "data_is_over": self._data_is_over or self._all_is_trained_on(),
            "has_begun": self._opening is not None and self._opening.has_begun_the_epoch,
            "left_after_last_step": self._left_after_last_step,
            "asked_to_stop": self._asked_to_stop,
            "validation": self._validation.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on, with `run`, where a run stood when `state_dict` was called."""
        self._resumed = state

    def run(self) -> None:
        """Train until a limit is reached or somebody asks to stop."""
        if self._length == 0:  # limit_train_batches=0
            return
        self._flushed_at = self._progress.micro_batches
        resumed, self._resumed = self._resumed, None
        fresh = resumed is not None  # else what on_train_start logged belongs to the first epoch
        if resumed is not None and resumed.get("asked_to_stop") is not None:
            self._stop.ask(resumed["asked_to_stop"])
        while not self._finished() or (resumed is not None and resumed.get("left_after_last_step")):
            if self._reload is not None:
                self._reload(self._progress.epoch)
            self._validation.begin_epoch(self._progress)
            begins = self._progress.batch_idx == 0
            if begins:
                self._draws.settle()
            begins = begins and not (resumed is not None and resumed.get("has_begun"))  # which earlier versions lack
            self._steps_before = self._progress.global_step if begins else None
            if begins:
                self._metrics.enter("train", reset=fresh)
                for hook in self._hooks.on_train_epoch_start:
                    hook()
                self._settle()
            else:
                self._metrics.enter("train", reset=False)  # resumed within an epoch
                if resumed is not None and resumed["validation"] is not None:
                    self._validation.load_state_dict(resumed["validation"], self._progress)
            over = resumed is not None and resumed["data_is_over"]
            fresh, resumed = True, None
            opening = self._opening if self._opening is not None and self._opening.begin_epoch() else None
            before = self._position.enter("training")
            ended = self._train_epoch(opening, over)
            self._position.leave(before)
            over = ended is not EpochEnd.BACK and self._end_epoch(ended)
            if self._saves.back is not None and not self._stop.leaving:
                resumed = self._go_back(self._saves.back)
            elif over:
                return

    def _go_back(self, load: Callable[[], None]) -> Mapping[str, Any] | None:
        """Let ``load`` put everything where it was at a checkpoint; return where the loop stood then."""
        self._saves.back = None
        load()
        self._flushed_at = self._progress.micro_batches
        self._stop.agree_anew("going back to an earlier checkpoint")
        resumed, self._resumed = self._resumed, None
        return resumed

    def _finished(self) -> bool:
        return self._limit_reached() is not None

    def _limit_reached(self) -> str | None:
        limits, progress = self._limits, self._progress
        return limit_reached(limits.max_epochs, limits.max_steps, progress.epoch, progress.global_step)

    def why_it_ended(self) -> list[str]:
        """Return what ended `run`, in words: a limit, and who asked for it."""
        reasons = ["limit_train_batches=0 leaves nothing to train on"] if self._length == 0 else []
        asked = self._stop.reason if self._stop.requested else None
        return reasons + [one for one in (self._limit_reached(), asked) if one is not None]

    def _all_is_trained_on(self) -> bool:
        progress, opening = self._progress, self._opening
        went_back = opening is not None and opening.in_force
        return self._exhausted() and progress.batch_idx > 0 and not progress.within_window and not went_back

    def _train_epoch(self, opening: Opening | None, over: bool) -> EpochEnd:
        """Train on one epoch's micro-batches.

        Args:
            opening: of its windows, where they have several.
            over: another run has trained on all of them.
        """
        progress, metrics, step, stop = self._progress, self._metrics, self._step, self._stop
        batch_start, batch_end = self._hooks.on_train_batch_start, self._hooks.on_train_batch_end
        max_steps, log_every = self._limits.max_steps, self._log_every
        step_schedulers = self._schedulers.after_step if self._schedulers.has_step_schedulers else None
        validation, waiting, position = self._validation, self._saves.waiting, self._position
        joining: Joining | None = None
        if progress.batch_idx == validation.next_at:  # saved just before it
            self._draws.before_reading(validation.run)
            ended = self._after_resumed_validation(over)
            if ended is not None:
                return ended
        if over:
            return EpochEnd.DATA
        micro_batches = self._watch.follow(self._micro_batches(progress.epoch, progress.batch_idx))
        if self._made_its_last_step():
            return EpochEnd.DATA if self._is_last(micro_batches) else EpochEnd.LIMIT
        for micro in micro_batches:
            batch, batch_idx = micro.batch, progress.batch_idx
            position.batch_idx = batch_idx
            position.weight = micro.weight
            if micro.opens:
                progress.window = batch_idx, progress.samples_seen
            metrics.batch = batch
            metrics.samples = samples = micro.samples
            if samples:
                metrics.had_data = True
            else:
                joining = Joining(metrics)
            if batch_start and self._told_to_skip(batch_start, batch, batch_idx):
                step.drop_window()
                progress.within_window = False
                metrics.batch = None
                if joining is not None:
                    joining.end()
                return EpochEnd.DATA
            output = step.micro_batch(micro, batch_idx)
            stepped = micro.closes and step.close_window(micro)
            progress.batch_idx = batch_idx + 1
            progress.micro_batches += 1
            progress.samples_seen += micro.total
            progress.epoch_samples += micro.total
            progress.within_window = not micro.closes
            if stepped:
                progress.global_step += 1
                if step_schedulers is not None:
                    step_schedulers(progress.global_step)
            if batch_end:
                outputs = detached(output)
                for hook in batch_end:
                    hook(outputs, batch, batch_idx)
            metrics.batch = None
            if joining is not None:
                joining.end()
                joining = None
            if stepped and log_every and progress.global_step % log_every == 0:
                self._flush()
            if waiting and micro.closes:
                self._saves.run()
                if self._saves.back is not None:
                    return EpochEnd.BACK
            if progress.batch_idx == validation.next_at:
                self._watch.before_validation()
                validation.run()
                if stop.leaving:
                    return self._leave()
                if waiting and micro.closes:
                    self._saves.run()
                    if self._saves.back is not None:
                        return EpochEnd.BACK
            if stepped and progress.global_step == max_steps:
                return EpochEnd.DATA if self._is_last(micro_batches) else EpochEnd.LIMIT
            if not micro.closes:
                if opening is not None and stop.leaves_here():
                    return self._leave()
                continue
            # Asked after a window that made no step too: a run may never make one.
            if stop.after_window(progress.global_step, progress.epoch):
                if stop.leaving:
                    return self._leave()
                if stop.goes_on_later:
                    self._save()
                return EpochEnd.DATA if self._is_last(micro_batches) else EpochEnd.STOPPED
            if opening is not None:
                opening.take()
        return EpochEnd.DATA

    def _after_resumed_validation(self, over: bool) -> EpochEnd | None:
        """Do what comes between a validation and the next window; None where the epoch goes on."""
        progress, stop = self._progress, self._stop
        if not stop.leaving:
            self._saves.run()
            if self._saves.back is not None:
                return EpochEnd.BACK
            if self._made_its_last_step() or not stop.after_window(progress.global_step, progress.epoch):
                return None
        if stop.leaving:
            return self._leave()
        if stop.goes_on_later:
            self._save()
        over = over or self._is_last(self._micro_batches(progress.epoch, progress.batch_idx))
        return EpochEnd.DATA if over else EpochEnd.STOPPED

    def _made_its_last_step(self) -> bool:
        return 0 <= self._limits.max_steps <= self._progress.global_step

    def _leave(self) -> EpochEnd:
        """Save the last whole step, and where the run stands within the epoch."""
        if self._progress.within_window and self._opening is not None:
            self._step.drop_window()
            self._opening.go_back()
        self._left_after_last_step = self._made_its_last_step()
        self._stop.agree("leaving")  # a stop that another rank has asked for is not to be forgotten
        if self._stop.requested:
            self._asked_to_stop = self._stop.reason or ""
        self._save()
        return EpochEnd.LEFT

    def _is_last(self, micro_batches: Iterator[MicroBatch]) -> bool:
        """Whether the run, which ends here, has come to the end of the epoch's data as well."""
        if self._progress.batch_idx != self._length or self._certain:
            return self._progress.batch_idx == self._length
        with preserved_generators(self._draws.device):  # a run that goes on from here reads that batch again
            return next(micro_batches, None) is None

    def _told_to_skip(self, hooks: Sequence[Callable[..., Any]], batch: Any, batch_idx: int) -> bool:
        answers = [hook(batch, batch_idx) for hook in hooks]
        if not any(isinstance(answer, int) and answer == -1 for answer in answers):
            return False
        # Nobody else would learn of it in time: those who go on wait in a collective, and are named.
        purpose = f"the end of epoch {self._progress.epoch}: on_train_batch_start returned -1 for batch {batch_idx}"
        self._control.agree(purpose, timeout=_SKIP_TIMEOUT)
        return True

    def _end_epoch(self, ended: EpochEnd) -> bool:
        """Validate where due, reduce what the epoch logged, tell the hooks; True ends the run."""
        if ended is EpochEnd.LEFT:
            return True
        progress, metrics, hooks = self._progress, self._metrics, self._hooks
        if self._steps_before == progress.global_step:
            self._say_idle()
        self._tally.settle(progress.batch_idx)
        self._draws.settle()
        self._data_is_over = ended is EpochEnd.DATA
        if ended is not EpochEnd.LIMIT:
            self._watch.before_validation()
            self._validation.run_at_epoch_end(ended is EpochEnd.STOPPED, self._data_is_over)
            if self._stop.leaving:
                self._leave()
                return True
            self._saves.run()
        results = self._reduce_epoch()
        for hook in hooks.early["on_train_epoch_end"]:
            hook()
        if hooks.early["on_train_epoch_end"]:
            results = self._reduce_epoch()  # with what these hooks logged
        metrics.reset_metrics()
        if self._log_every and progress.micro_batches != self._flushed_at:
            self._reduce_steps()
        if self._log is not None:
            self._flush_epoch(results)
        for hook in hooks.late["on_train_epoch_end"]:
            hook()
        self._watch.end(progress.epoch)
        if ended is EpochEnd.DATA:
            progress.epoch += 1
            progress.batch_idx = progress.epoch_samples = 0
            self._schedulers.after_epoch(progress.epoch)
        self._data_is_over = False
        self._saves.run()
        stop = self._stop
        stop.agree("the end of a training epoch")
        stopping = stop.after_epoch(progress.global_step, progress.epoch)
        over = ended is not EpochEnd.DATA or self._finished()
        if stop.leaving or (stopping and not over and stop.goes_on_later):
            self._save()
        return stopping or over

    def _say_idle(self) -> None:
        if not self._said_idle and self._control.rank == 0:
            logger.warning(
                "Training went through epoch %d without one optimizer step: every window's losses were None, its "
                "weights zero, its gradients in fp16 not finite, or the step was left out by a hook. Said once.",
                self._progress.epoch,
            )
        self._said_idle = True

    def _reduce_epoch(self) -> dict[str, torch.Tensor]:
        wanting, noticed = self._control.agree(
            "the reduction of an epoch's values", self._metrics.wants_reduction(), self._lengths.noticed
        )
        self._lengths.settle(noticed)
        return self._metrics.reduce_epoch(together=wanting > 0 and self._control.world_size > 1)

    def _reduce_steps(self) -> None:
        self._flushed_at = self._progress.micro_batches
        self._metrics.reduce_steps()

    def _flush(self) -> None:
        self._reduce_steps()
        if self._log is not None:
            self._log(self._metrics.flush_steps())
        if self._pacing is not None:
            self._pacing.tell(self._progress.batch_idx)

    def _flush_epoch(self, results: dict[str, torch.Tensor]) -> None:
        assert self._log is not None
        values: dict[str, torch.Tensor | float] = self._metrics.flush_steps() if self._log_every else {}
        wanted = {entry.epoch_name for entry in self._metrics.entries.values() if entry.logger and entry.on_epoch}
        values.update({name: float(value) for name, value in results.items() if name in wanted})
        if values:
            self._log(values)


def detached(output: Any) -> Any:
    """What ``on_train_batch_end`` gets of what ``training_step`` returned: nothing in it holds on to the graph."""
    if isinstance(output, torch.Tensor):
        return {"loss": output.detach()}
    return {} if output is None else map_tensors(output, _without_graph)


def _without_graph(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
