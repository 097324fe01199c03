"""The training loop. `TrainLoop._train_epoch` shows the order of operations in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

import torch

from drivetrain._loops.epoch_reader import EpochReader
from drivetrain._loops.hooks import HookTable
from drivetrain._loops.loop_log import LoopLog
from drivetrain._loops.loss_checks import EpochChecks
from drivetrain._loops.schedulers import Schedulers
from drivetrain._loops.step import TrainStep
from drivetrain._loops.stopping import StopRequest, limit_reached
from drivetrain._loops.uneven_inputs import LoggingPaused
from drivetrain._loops.validation import ValidationPlan
from drivetrain._loops.window_snapshot import WindowSnapshot
from drivetrain._loops.windows import MicroBatch
from drivetrain._run_state import CheckpointsOfRun, CurrentBatch, Progress
from drivetrain._runtime.generators import preserved_generators
from drivetrain._runtime.transfer import map_tensors

_SKIP_TIMEOUT = timedelta(seconds=30)


class EpochEnd(Enum):
    """Why the loop over an epoch's micro-batches ended."""

    DATA = "the data ended"
    LIMIT = "max_steps is reached"
    STOPPED = "a stop was requested"
    PREEMPTED = "a preemption signal was received"
    ROLLBACK = "a return to an earlier checkpoint was requested"


@dataclass(frozen=True, slots=True)
class LoopState:
    """Where training goes on after a save, besides the counters.

    Attributes:
        data_is_over: whether the epoch's last micro-batch was trained on.
        has_begun: whether the hooks that begin the epoch were called, although no micro-batch was trained on.
        left_after_last_step: whether a preemption came after ``max_steps`` but before the epoch's end.
        asked_to_stop: the reason of a stop that was requested before a preemption; None for none.
        validated_at: the number of the run's micro-batches after which validation last ran.
        validation_is_due: whether a validation comes next.
    """

    data_is_over: bool
    has_begun: bool
    left_after_last_step: bool
    asked_to_stop: str | None
    validated_at: int
    validation_is_due: bool


@dataclass(eq=False)
class TrainLoop:
    """Trains on micro-batches and calls the hooks. `run` and the methods below it show the order.

    Attributes:
        step: trains on a micro-batch and steps the optimizers.
        reader: reads the data of an epoch.
        hooks: the overridden hooks.
        progress: the counters that a checkpoint stores.
        current: the micro-batch being processed.
        stop: collects requests to end training early.
        max_epochs: the epochs after which training ends; None or -1 for no limit.
        max_steps: the optimizer steps after which training ends; -1 for no limit.
        log: reduces the logged values and sends them to the loggers.
        checkpoints: writes the checkpoints of the run.
        snapshot: the state at the start of the open window; None if the run is never saved within a window.
        schedulers: steps the learning rates.
        validation: decides when to validate, and does.
        checks: warns about problems that are visible only over a whole epoch.
        reload: ``reload(epoch)`` makes the reader and the validation use an epoch's own loaders; None if epochs share
            loaders.
        apply_trainable_changes: applies the changes that the hooks at the beginning of an epoch have made.
        resize: ``resize(epoch_begins)`` reads the size of the training data again, after these hooks; returns whether
            it has changed. Collective.
    """

    step: TrainStep
    reader: EpochReader
    hooks: HookTable
    progress: Progress
    current: CurrentBatch
    stop: StopRequest
    max_epochs: int | None
    max_steps: int
    log: LoopLog
    checkpoints: CheckpointsOfRun
    snapshot: WindowSnapshot | None
    schedulers: Schedulers
    validation: ValidationPlan
    checks: EpochChecks
    reload: Callable[[int], None] | None
    apply_trainable_changes: Callable[[], None]
    resize: Callable[[bool], bool]

    def __post_init__(self) -> None:
        self.metrics, self.rng_replay = self.log.metrics, self.reader.rng_replay
        self._resumed: LoopState | None = None
        self._data_is_over = False
        self._left_after_last_step = False  # whether a preemption came after max_steps but before the epoch's end
        self._asked_to_stop: str | None = None  # the reason of a stop that was requested before a preemption

    # The loop's state in a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return the part of the loop's position that the counters do not contain, e.g. whether the data is over."""
        saved = LoopState(
            data_is_over=self._data_is_over or self._is_data_over(),
            # The snapshot of an epoch's first window was taken after the hooks of the epoch's start.
            has_begun=self.snapshot is not None and self.snapshot.is_active and self.progress.batch_idx == 0,
            left_after_last_step=self._left_after_last_step,
            asked_to_stop=self._asked_to_stop,
            validated_at=self.validation.last_run_at,
            validation_is_due=self.validation.next_at == self.progress.batch_idx,
        )
        plateaus = self.schedulers.used_at
        return {**asdict(saved), "flushed_at": self.log.flushed_at, "plateaus": dict(plateaus)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make `run` resume with the state that `state_dict` returned."""
        saved = dict(state)
        self.log.flushed_at = int(saved.pop("flushed_at"))
        plateaus = saved.pop("plateaus")
        self.schedulers.used_at = {index: int(step) for index, step in plateaus.items()}
        self._resumed = LoopState(**{**saved, "validated_at": int(saved["validated_at"])})

    # The operations of a run, an epoch and a step, in their order

    def run(self) -> None:
        """Train until a limit is reached or a stop is requested."""
        if self.reader.length == 0:  # because of limit_train_batches=0
            return
        resumed, self._resumed = self._resumed, None
        reset_metrics = resumed is not None  # in a new run, on_train_start has logged values of the first epoch
        if resumed is not None and resumed.asked_to_stop is not None:
            self.stop.ask(str(resumed.asked_to_stop))
        while not self._is_finished() or (resumed is not None and resumed.left_after_last_step):
            self._begin_epoch(resumed, reset_metrics)
            data_is_over = resumed is not None and resumed.data_is_over
            reset_metrics, resumed = True, None
            snapshot = self.snapshot
            if snapshot is not None and not snapshot.begin_epoch(self.reader.source, self.reader.get_window_size()):
                snapshot = None
            previous = self.current.enter("training")
            self.checkpoints.in_epoch = True
            ended = self._train_epoch(snapshot, data_is_over)
            self.current.leave(previous)
            self.current.micro_batch = None
            run_ends = ended is not EpochEnd.ROLLBACK and self._end_epoch(ended)
            self.checkpoints.in_epoch = False
            if self.checkpoints.rollback is not None and not self.stop.preempted:
                resumed = self._roll_back(self.checkpoints.rollback)
            elif run_ends:
                return

    def _begin_epoch(self, resumed: LoopState | None, reset_metrics: bool) -> None:
        """Load the epoch's data and call the hooks that begin it, unless they were called before a resume.

        Args:
            resumed: the position at which a run is resumed in this epoch; None in other epochs.
            reset_metrics: whether the values logged so far are discarded.
        """
        if self.reload is not None:
            self.reload(self.progress.epoch)
        self.validation.begin_epoch()
        epoch_begins = self.progress.batch_idx == 0
        if epoch_begins:
            self.rng_replay.start_epoch()
        epoch_begins = epoch_begins and not (resumed is not None and resumed.has_begun)
        self.checks.begin_epoch(is_resumed=not epoch_begins)
        if epoch_begins:
            self.metrics.enter("train", reset=reset_metrics)
            for hook in self.hooks.on_train_epoch_start:
                hook()
            self.apply_trainable_changes()
        else:
            self.metrics.enter("train", reset=False)
        if self.resize(epoch_begins):
            self.validation.resize(self.reader.length)
        if not epoch_begins and resumed is not None:
            self.validation.resume(resumed.validated_at, resumed.validation_is_due)

    def _train_epoch(self, snapshot: WindowSnapshot | None, data_is_over: bool) -> EpochEnd:
        """Train on the remaining micro-batches of an epoch.

        Args:
            snapshot: the state at the start of a window; None if the epoch is never left within a window.
            data_is_over: whether the epoch's last micro-batch was trained on before the run was saved and resumed.
        """
        progress, current, stop, step = self.progress, self.current, self.stop, self.step
        metrics, validation, requests = self.metrics, self.validation, self.checkpoints.waiting
        batch_start, batch_end = self.hooks.on_train_batch_start, self.hooks.on_train_batch_end
        max_steps, log_every = self.max_steps, self.log.every
        step_schedulers = self.schedulers.after_step if self.schedulers.has_step_schedulers else None
        if progress.batch_idx == validation.next_at:  # the run was saved just before the validation that is due here
            ended = self._resume_with_validation(data_is_over)
            if ended is not None:
                return ended
        if data_is_over:
            return EpochEnd.DATA
        micro_batches = self.reader.read_epoch(progress.epoch, progress.batch_idx)
        checks_first = self.checks.warns
        if self._is_at_max_steps():
            return self._end_at(EpochEnd.LIMIT, micro_batches)

        # The batch of each micro-batch is on the device. A window is the micro-batches of one optimizer step.
        for micro_batch in micro_batches:
            batch, batch_idx, samples = micro_batch.batch, progress.batch_idx, micro_batch.samples
            current.batch_idx, current.micro_batch = batch_idx, micro_batch
            metrics.batch, metrics.samples = batch, samples
            metrics.had_data = metrics.had_data or samples > 0
            joining = None if samples else LoggingPaused(metrics, joins=True)
            if batch_start and self._skips_rest_of_epoch(batch_start, batch, batch_idx):
                return self._drop_window(joining)
            if micro_batch.opens:
                progress.window = batch_idx, progress.samples_seen
                step.zero_grad()
            run = step.forward_backward if micro_batch.weight else step.run_weightless
            output = run(micro_batch, batch_idx)
            stepped = micro_batch.closes and step.clip_and_step(micro_batch)
            progress.batch_idx = batch_idx + 1
            progress.micro_batches += 1
            progress.samples_seen += micro_batch.total
            progress.epoch_samples += micro_batch.total
            progress.within_window = not micro_batch.closes
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
            if stepped and log_every and progress.global_step % log_every == 0:
                self.log.flush_steps(progress)
            if requests and micro_batch.closes and self._save_or_roll_back():
                return EpochEnd.ROLLBACK
            if progress.batch_idx == validation.next_at and (ended := self._validate(micro_batch.closes)):
                return ended
            if stepped and progress.global_step == max_steps:
                return self._end_at(EpochEnd.LIMIT, micro_batches)
            if micro_batch.closes:  # whether or not a step was made, since a run may never make a step
                if stop.after_window(progress.global_step, progress.epoch):
                    return self._stop_within_epoch(micro_batches)
                if snapshot is not None:
                    snapshot.take()
            elif snapshot is not None and stop.exits_at_point():
                return self._leave()
            if checks_first:
                self.checks.after_first_micro_batch()
                checks_first = False
        return EpochEnd.DATA

    def _end_epoch(self, ended: EpochEnd) -> bool:
        """Validate if validation is due, reduce the epoch's values and call the hooks; return whether the run ends."""
        if ended is EpochEnd.PREEMPTED:
            return True
        progress, metrics, hooks = self.progress, self.metrics, self.hooks
        self.checks.check_steps()
        self.reader.compare_length()
        self.rng_replay.start_epoch()
        self._data_is_over = ended is EpochEnd.DATA
        if ended is not EpochEnd.LIMIT:
            self.checks.before_validation()
            self.validation.run_at_epoch_end(ended is EpochEnd.STOPPED)
            if self.stop.preempted:
                self._leave()
                return True
            self.checkpoints.carry_out_requests()
        results = self.log.reduce_epoch("the reduction of an epoch's values")
        for hook in hooks.early["on_train_epoch_end"]:
            hook()
        if hooks.early["on_train_epoch_end"]:
            results = self.log.reduce_epoch("the reduction of an epoch's values")  # with what the early hooks logged
        metrics.reset_metrics()
        if self.log.every and progress.micro_batches != self.log.flushed_at:
            self.log.reduce_steps(progress)
        self.log.flush_epoch(results)
        for hook in hooks.late["on_train_epoch_end"]:
            hook()
        self.checks.end_epoch()
        if ended is EpochEnd.DATA:
            self.schedulers.after_epoch(progress.epoch + 1)  # `current_epoch` is still the epoch that ends
            progress.epoch += 1
            progress.batch_idx = progress.epoch_samples = 0
        self._data_is_over = False
        self.checkpoints.carry_out_requests()
        stop = self.stop
        stop.agree("the end of a training epoch")
        stopping = stop.after_epoch(progress.global_step, progress.epoch)
        finished = ended is not EpochEnd.DATA or self._is_finished()
        if stop.preempted or (stopping and not finished and stop.saves_to_resume):
            self.checkpoints.save_before_leaving()
        return stopping or finished

    # The reasons for which an epoch or a run ends, and what is done for each

    def _limit_reached(self) -> str | None:
        return limit_reached(self.max_epochs, self.max_steps, self.progress.epoch, self.progress.global_step)

    def _is_finished(self) -> bool:
        return self._limit_reached() is not None

    def _is_at_max_steps(self) -> bool:
        return 0 <= self.max_steps <= self.progress.global_step

    def why_it_ended(self) -> list[str]:
        """Return the reasons why `run` ended: a limit, or a requested stop."""
        reasons = ["limit_train_batches=0 leaves nothing to train on"] if self.reader.length == 0 else []
        requested = self.stop.reason if self.stop.requested else None
        return reasons + [reason for reason in (self._limit_reached(), requested) if reason is not None]

    def _is_data_over(self) -> bool:
        progress, snapshot = self.progress, self.snapshot
        went_back = snapshot is not None and snapshot.is_active
        return progress.batch_idx > 0 and not progress.within_window and not went_back and self.reader.is_exhausted

    def _skips_rest_of_epoch(self, hooks: Sequence[Callable[..., Any]], batch: Any, batch_idx: int) -> bool:
        """Call ``on_train_batch_start``; return whether a hook returned -1, which has to be the same on every rank."""
        answers = [hook(batch, batch_idx) for hook in hooks]
        if not any(isinstance(answer, int) and answer == -1 for answer in answers):
            return False
        # A rank on which no hook returned -1 waits in a collective of its step. After the timeout, the agreement raises
        # an error that names this rank.
        purpose = f"the end of epoch {self.progress.epoch}: on_train_batch_start returned -1 for batch {batch_idx}"
        self.step.strategy.control.monitored_barrier(purpose, timeout=_SKIP_TIMEOUT)
        return True

    def _drop_window(self, joining: LoggingPaused | None) -> EpochEnd:
        self.step.drop_window()
        self.progress.within_window = False
        self.metrics.batch = None
        self.log.flushed_at = -1  # the hook that ended the epoch may have logged values, which no step reduces
        if joining is not None:
            joining.end()
        return EpochEnd.DATA

    def _save_or_roll_back(self) -> bool:
        """Write the requested checkpoints; return whether a return to an earlier checkpoint was requested instead."""
        self.checkpoints.carry_out_requests()
        return self.checkpoints.rollback is not None

    def _validate(self, window_closed: bool) -> EpochEnd | None:
        """Validate within the epoch; return why the epoch ends after the validation, or None if the epoch continues."""
        self.checks.before_validation()
        self.validation.run()
        if self.stop.preempted:
            return self._leave()
        if window_closed and self.checkpoints.waiting and self._save_or_roll_back():
            return EpochEnd.ROLLBACK
        return None

    def _resume_with_validation(self, data_is_over: bool) -> EpochEnd | None:
        """Run the validation that was due when the run was saved.

        Returns:
            Why the epoch ends after the validation; None if the epoch continues.
        """
        progress, stop = self.progress, self.stop
        self.rng_replay.call_before_replay(self.validation.run)
        if not stop.preempted:
            if self._save_or_roll_back():
                return EpochEnd.ROLLBACK
            if self._is_at_max_steps() or not stop.after_window(progress.global_step, progress.epoch):
                return None
        if stop.preempted:
            return self._leave()
        if stop.saves_to_resume:
            self.checkpoints.save_before_leaving()
        if data_is_over:
            return EpochEnd.DATA
        return self._end_at(EpochEnd.STOPPED, self.reader.read_epoch(progress.epoch, progress.batch_idx))

    def _stop_within_epoch(self, micro_batches: Iterator[MicroBatch]) -> EpochEnd:
        """End the epoch after a window because a stop or a preemption was requested."""
        if self.stop.preempted:
            return self._leave()
        if self.stop.saves_to_resume:
            self.checkpoints.save_before_leaving()
        return self._end_at(EpochEnd.STOPPED, micro_batches)

    def _end_at(self, reason: EpochEnd, micro_batches: Iterator[MicroBatch]) -> EpochEnd:
        """Return ``reason``, or `EpochEnd.DATA` if the epoch's data has ended as well."""
        return EpochEnd.DATA if self._is_last(micro_batches) else reason

    def _is_last(self, micro_batches: Iterator[MicroBatch]) -> bool:
        if self.progress.batch_idx != self.reader.length or self.reader.length_is_known:
            return self.progress.batch_idx == self.reader.length
        with preserved_generators(self.rng_replay.device):  # a resumed run reads the next batch again
            return next(micro_batches, None) is None

    def _leave(self) -> EpochEnd:
        """Save the run in the state after the last completed window, because of a preemption."""
        if self.progress.within_window and self.snapshot is not None:
            self.step.drop_window()
            self.snapshot.go_back()
        self._left_after_last_step = self._is_at_max_steps()
        self.stop.agree("leaving")  # so that a stop that another rank has requested is saved too
        if self.stop.requested:
            self._asked_to_stop = self.stop.reason or ""
        self.checkpoints.save_before_leaving()
        return EpochEnd.PREEMPTED

    def _roll_back(self, load: Callable[[], None]) -> LoopState | None:
        """Restore an earlier checkpoint by ``load``; return the position of the loop that the checkpoint contains."""
        self.checkpoints.rollback = None
        load()
        self.stop.agree("going back to an earlier checkpoint")
        resumed, self._resumed = self._resumed, None
        return resumed


def detached(output: Any) -> Any:
    """Return the outputs that ``on_train_batch_end`` receives: the result of ``training_step``, detached."""
    if isinstance(output, torch.Tensor):
        return {"loss": output.detach()}
    return {} if output is None else map_tensors(output, _detach)


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
