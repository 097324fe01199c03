"""Session: one run of one stage on one rank, from set-up to putting everything back."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from drivetrain._distributed.failure import Failure
from drivetrain._engine.batches import BatchMover, batch_mover
from drivetrain._engine.checkpoints import RunCheckpoints
from drivetrain._engine.compiled_steps import CompiledSteps
from drivetrain._engine.console_logging import log_to_console, say_once
from drivetrain._engine.defaults import checked_callbacks, with_own
from drivetrain._engine.error_reporting import note_inference_tensors, note_where
from drivetrain._engine.evaluation_setup import build_evaluation, build_prediction, build_validation, try_validation
from drivetrain._engine.failure_propagation import cause_of, error_to_report, tell_others
from drivetrain._engine.fused_optimizers import suggest_fused_optimizers
from drivetrain._engine.handshake import check_ranks_agree, facts_about, settings_alike
from drivetrain._engine.optimizer_setup import set_up_optimizers
from drivetrain._engine.out_of_memory import explain_out_of_memory
from drivetrain._engine.process_switches import apply_switches
from drivetrain._engine.rank_log import RankLog
from drivetrain._engine.run_folder import RunFolder
from drivetrain._engine.seeding import seed_rank, tell_of_unseeded
from drivetrain._engine.session_state import SessionState
from drivetrain._engine.signals import Signals, as_asked, awaited_signals, interruption
from drivetrain._engine.stage_data import StageData
from drivetrain._engine.stage_loaders import Dealing, Given
from drivetrain._engine.topology import Topology, check_control_plane, check_devices_apart, check_set_up
from drivetrain._engine.training_setup import (
    build_training,
    build_training_pass,
    estimated_before_data,
    estimated_steps,
    set_up_stopping,
    under_context,
)
from drivetrain._loops.evaluate import NAMES
from drivetrain._loops.hooks import HookTable
from drivetrain._loops.stopping import how_it_ended
from drivetrain._loops.train import TrainLoop
from drivetrain._loops.trainables import Trainables
from drivetrain._runtime.process_state import ProcessState
from drivetrain.callback import Callback, let_log
from drivetrain.errors import ConfigurationError
from drivetrain.module._run_handle import attach, detach
from drivetrain.module.train_module import TrainModule
from drivetrain.run_context import RunContext
from drivetrain.strategies._module_lock import hold, release
from drivetrain.strategies.run_settings import RunSettings
from drivetrain.strategies.strategy import StepRunner, Strategy

if TYPE_CHECKING:
    from drivetrain._engine.monitors import Monitors
    from drivetrain._engine.reloading import Reloading

logger = logging.getLogger("drivetrain")

_LONGEST_LINE = 200  # of them that are said as the run ends

_LONGEST_REASON = 2000  # characters of an error that the run's record keeps


class Session(SessionState):
    """One run of one stage: its state, and the course of it.

    Args:
        trainer: whose settings hold; handed to callbacks.
        stage: "fit", "validate", "test" or "predict".
        module: what is run.
        given: the loaders or the data module.
        ckpt_path: what to start from, or None.
        return_predictions: keep what ``predict_step`` returns.
        allow: what may differ from the run that it goes on with.
        trial: nobody keeps what it trains.
        strategy: where.
        place: this process among all.
        before: the folder of the last run of the same `Fit`.
    """

    def __init__(
        self,
        trainer: RunContext,
        stage: str,
        module: TrainModule,
        given: Given,
        ckpt_path: str | None,
        return_predictions: bool,
        allow: tuple[str, ...],
        trial: bool,
        strategy: Strategy,
        place: Topology,
        before: RunFolder | None = None,
    ) -> None:
        super().__init__(trainer, stage, module, given, return_predictions, strategy, trial)
        self.place = place
        self.folder.before = before
        self.checkpoints = RunCheckpoints(self, ckpt_path, allow)
        self.last_line: str | None = None
        """Said in place of this rank's error, where a lower rank ran into the same and shows it."""
        self.own: list[Callback] = []  # what configure_callbacks returned
        self._given_callbacks: list[Callback] = []  # trainer.callbacks as they were when they were taken
        self._monitors: Monitors | None = None
        self._teardowns: list[Callable[[str], None]] = []
        """Those still to be called, from when the first set-up is."""
        self._compiled: CompiledSteps | None = None
        self._reloading: Reloading | None = None
        awaited = awaited_signals(trainer.preemption_signals, os.environ) if stage == "fit" else ()
        self._awaited = awaited
        self._signals = Signals(awaited, self._asked_to_leave)
        writes = not (trainer.fast_dev_run or trainer.barebones)
        named = writes and trainer.settings["default_root_dir"].source != "default"
        root = trainer.default_root_dir if named else None
        self._log = RankLog(self.folder, strategy.rank, strategy.world_size, otherwise=root)
        if trainer.profiles:
            from drivetrain._engine.profiling import Profiling  # by runs that somebody profiles

            self.profiling = Profiling(self, trainer.profiler, before)
        self._why = ""  # in words, it ended
        self._began = time.monotonic()
        self._trained = False  # training has begun
        self._ended_by: tuple[list[str], bool] | None = None  # the reasons, and whether nothing was left to train
        self._left_with: BaseException | None = None  # raised at the end of a run that a signal has cut short

    def execute(self) -> Any:
        """Run the stage; returns what it returns. Everything that is not ours is as before afterwards.

        Raises:
            Exception: whatever failed, or `RankFailedError` where another rank did.
        """
        seed = self.trainer.seed
        flags = [(child, child.training) for child in self.module.modules()]
        listen = self.strategy.rank == 0 and not self.trainer.barebones
        state = ProcessState(generators=seed is not None, cuda_generators=torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
        from drivetrain.data.splitting import read_from

        with self._signals, state, log_to_console(listen), self._log, read_from(self._place_in_the_data):
            try:
                result = self._run()
            except BaseException as error:
                explain_out_of_memory(error, self)
                cause = self._fail(error)
                if self._signals.raised:
                    self._requeue(self._signals.raised)
                try:
                    if cause is error:
                        raise
                    raise cause from error
                finally:
                    del cause  # the error would hold this frame, and the frame the error
            finally:
                for child, training in flags:
                    child.training = training
                self._detach()
                self.profiling.end()
        if self._left_with is not None:
            self._requeue(self.stop.leaving)
            raise self._left_with
        return result

    def _requeue(self, number: int) -> None:
        if self.strategy.rank == 0:
            from drivetrain._engine.requeue import requeue  # by whoever is asked to leave

            requeue(number, os.environ)

    # The course of a run

    def _run(self) -> Any:
        self.profiling.begin()
        with self.profiling.span("set-up"):
            runner, move = self._prepare()
        result = self._stage_result(runner, move)
        with self.profiling.span("taking down"):
            self._take_down()
        return result

    def _prepare(self) -> tuple[StepRunner, BatchMover | None]:
        """Set up everything that all stages have."""
        trainer, strategy, profiling = self.trainer, self.strategy, self.profiling
        apply_switches(trainer.deterministic, trainer.benchmark, trainer.detect_anomaly)
        if trainer.seed is not None:
            seed_rank(trainer.seed, 0)  # alike everywhere, for what is initialised
        with profiling.span("setup_environment"):
            strategy.setup_environment()
        if trainer.loggers:
            from drivetrain.loggers._other_ranks import quieten  # by runs that log

            quieten(trainer.loggers, strategy.rank > 0)
        check_control_plane(strategy, self.place.placement)
        check_devices_apart(strategy)
        if self.place.world is not None and strategy.world_size > 1:
            strategy.control.external_failures = self.place.world.failures
        self.draws.device = strategy.device
        self.metrics.control = self.lengths.control = strategy.control
        self.metrics.speaks = strategy.is_data_leader
        self.metrics.objects.group = partial(getattr, strategy, "data_group")
        self._attach()
        if self.given.datamodule is not None:
            attach(self.given.datamodule, trainer)
        self._assemble()
        self.checkpoints.begin()
        profiling.knows_folder()
        strategy.control.set_record_folder(self._log.folder)
        with profiling.span("prepare_data"):
            self._prepare_data()
        self._set_up()
        if self._keeps_files:
            from drivetrain._engine.write_checks import check_folders

            writing = self.callbacks if self.stage == "fit" else []
            check_folders(strategy, writing, [] if self.stage == "predict" else trainer.loggers)  # which log nothing
        self.seed = self.checkpoints.open()
        if self.stage == "fit":
            self.checkpoints.see_what_is_left()
        if (
            trainer.built_unseeded
            and trainer.seed is not None
            and self.checkpoints.opened is None
            and strategy.rank == 0
        ):
            tell_of_unseeded(self.module, trainer.seed)
        self.cursor.world_size = strategy.data_world_size
        dealing = Dealing(strategy.data_rank, strategy.data_world_size, self.seed, trainer.use_distributed_sampler)
        load = partial(StageData, trainer, self.stage, self.module, self.given, dealing, strategy.control)
        with profiling.span("loaders"):
            if self.stage == "fit" and trainer.reload_dataloaders_every_n_epochs:
                from drivetrain._engine.reloading import Reloading  # by whoever has loaders that change

                self._reloading = Reloading(self, trainer.reload_dataloaders_every_n_epochs, load)
                self._reloading.begin(self.checkpoints.opened)
            else:
                self.data = load()
        profiling.knows_data(self._data().loaders or self._data().evaluated)
        self.checkpoints.check_data()
        with profiling.span("setup_module"):
            runner = profiling.call("forward", self._set_up_module(self._data()))
        if trainer.seed is not None and strategy.data_rank > 0:
            seed_rank(trainer.seed, strategy.data_rank)
        return runner, profiling.mover(batch_mover(self.module, self.given.datamodule, strategy))

    def _take_down(self) -> None:
        strategy = self.strategy
        release(self.module)
        strategy.restore_module()
        while self._teardowns:
            self._teardowns.pop(0)(self.stage)
        self._finish("success" if self._left_with is None else "interrupted")
        self.profiling.compare_ranks()
        self._say_ending()
        strategy.control.leave()
        strategy.teardown()

    def _place_in_the_data(self) -> tuple[int, int]:
        return self.strategy.data_rank, self.strategy.data_world_size

    def collect_stacks(self) -> str:
        """Where the run is, in words that are alike on every rank."""
        progress, position = self.progress, self.position
        at = "between loops" if position.loop is None else f"{position.loop} batch {position.batch_idx}"
        return f"{at}, epoch {progress.epoch}, global step {progress.global_step}"

    @property
    def _keeps_files(self) -> bool:
        saves = self.stage == "fit" and any(callback.writes_to for callback in self.callbacks)
        return saves or bool(self.trainer.loggers)

    def _stage_result(self, runner: StepRunner, move: BatchMover | None) -> Any:
        if self.stage != "fit":
            return self._evaluate(runner, move)
        self._fit(runner, move)
        return None

    def _fit(self, runner: StepRunner, move: BatchMover | None) -> None:
        with self.profiling.span("set-up"):
            loop = self._prepare_training(runner, move)
        self._train(runner, move, loop)

    def _prepare_training(self, runner: StepRunner, move: BatchMover | None) -> TrainLoop:
        with self.profiling.span("configure_optimizers"):
            set_up_optimizers(self, self.checkpoints.regroup)
        set_up_stopping(self)
        if self._data().sources.get("validate"):
            self.validate = build_validation(self, runner, move)
        self.pass_over_training_data = build_training_pass(self, runner, move)
        loop = self.loop = build_training(
            self,
            runner,
            move,
            settle=self.settle,
            save=self.checkpoints.save_before_leaving,
            after_first_batch=self.monitors.after_first_batch,
        )
        if self._reloading is not None:
            self._reloading.feed(loop, runner, move)
        self.checkpoints.load()
        if not self.trial:
            say_once(self.strategy.precision.describe())
        advice = None if self.trial else suggest_fused_optimizers(self.optimizers)
        if advice is not None:
            say_once(advice)
        return loop

    def _train(self, runner: StepRunner, move: BatchMover | None, loop: TrainLoop) -> None:
        hooks = self.hooks
        ended_before = self.checkpoints.ended_before
        if self.strategy.rank == 0 and ended_before is None and self.trainer.loggers:
            from drivetrain._engine.run_loggers import begin_logging  # by runs that log

            begin_logging(self.trainer.loggers, self.folder.rewinds_to, self.hyper_parameters())
        for hook in hooks.on_fit_start:
            hook()
        if self.validate is not None and self.trainer.num_sanity_val_steps and self.checkpoints.opened is None:
            try_validation(self, runner, move, self.monitors.note_validation)
        self.metrics.enter("train", reset=self.checkpoints.opened is None)
        self._signals.wait_for_the_run()
        for hook in hooks.on_train_start:
            hook()
        self.checkpoints.keep_trainables()
        if ended_before is None:
            with self.profiling.span("set-up"):
                self.checkpoints.rehearse()
            self._note_beginning()
            self._trained = True
            loop.run()
        self.metrics.enter(None)
        self.progress.cut_short = self.progress.batch_idx > 0 and not self.stop.leaving
        if self.stop.leaving:
            self._leave(self.stop.leaving)
            return
        for hook in (*hooks.on_train_end, *hooks.on_fit_end):
            hook()
        self.draws.end()
        self.saves.run()
        self.checkpoints.finish()
        if self.strategy.rank == 0 and not self.trial:
            reasons = loop.why_it_ended() if ended_before is None else [ended_before]
            self._why = "; ".join(reasons)
            self._ended_by = reasons, ended_before is not None

    def _note_beginning(self) -> None:
        data, batches = self._data(), self.trainer.num_training_batches
        facts = {**self.made_of.get("data", {}), "batches": batches if batches != math.inf else None}
        self.folder.trains({**facts, "batch_size": data.batch_size}, self.seed, data.batch_size)

    def _asked_to_leave(self, number: int) -> None:
        self.stop.signal = number
        if self.strategy.rank == 0:
            name = signal.Signals(number).name
            does = "the trial ends after this step" if self.trial else "the run saves its last whole step and ends"
            logger.warning("%s: %s; once more, and it ends at once.", name, does)

    def _leave(self, number: int) -> None:
        """End what a signal has cut short: it is saved, and neither the epoch nor the training is over."""
        self._signals.answered = True
        self._left_with = interruption(number)
        self.draws.end()
        self.checkpoints.finish()
        if self.strategy.rank == 0 and not self.trial:
            reason = self._why = f"{signal.Signals(number).name} asked it to save and leave"
            self._ended_by = [reason], False
        for hook in self._on_exception():
            hook(self._left_with)

    def _evaluate(self, runner: StepRunner, move: BatchMover | None) -> Any:
        self.strategy.setup_optimizers([])
        if self.strategy.world_size > 1:
            self.strategy.broadcast_module(self.module)
        self.checkpoints.load_weights()
        if self.stage == "predict":
            evaluate: Callable[[], Any] = build_prediction(self, runner, move)
        else:
            evaluate = build_evaluation(self, self.stage, runner, move)
        with self.profiling.span(NAMES[self.stage]):
            return evaluate()

    # Set-up

    def _prepare_data(self) -> None:
        if self.strategy.local_rank == 0:
            if self.given.datamodule is not None:
                self.given.datamodule.prepare_data()
            self.module.prepare_data()
        self.strategy.control.agree("the end of prepare_data")

    def _assemble(self) -> None:
        if not self.trial:
            self.own = checked_callbacks(self.module.configure_callbacks(), "configure_callbacks returned")
        self._take_callbacks()

    def _take_callbacks(self) -> None:
        given = self._given_callbacks = checked_callbacks(self.trainer.callbacks, "trainer.callbacks holds")
        self.callbacks = with_own(given, self.own)
        self._hooks = self.profiling.hooks(HookTable(self.trainer, self.module, self.callbacks))
        for callback in self.callbacks:
            let_log(callback, self.module)

    def _come_since(self) -> list[Callback]:
        """The callbacks that somebody has appended to ``trainer.callbacks`` since they were taken."""
        taken = {id(callback) for callback in self._given_callbacks}
        return [callback for callback in self.trainer.callbacks if id(callback) not in taken]

    def settle(self) -> None:
        """Look, as an epoch begins, what its hooks have changed."""
        late = self._come_since()
        if late:
            raise ConfigurationError(
                f"{type(late[0]).__name__} was appended to trainer.callbacks after the set-up.",
                "who hears of what is looked up once, before training: it would never be called.",
                "append it in setup, return it from configure_callbacks, or pass it as Fit(callbacks=...).",
            )
        self.trainables.settle()

    def _set_up_module(self, data: StageData) -> StepRunner:
        module, strategy = self.module, self.strategy
        strategy.take_settings(self._settings(data))
        with strategy.module_init_context(), self.profiling.span("configure_model"):
            module.configure_model()
        self._attach()  # what it has built, too
        if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
            from drivetrain._engine.lazy_parameters import refuse_lazy

            refuse_lazy(module)
        if self.stage == "fit":
            self.checkpoints.restore_trainables()  # a strategy wraps what trains
        strategy.check(module)
        facts = {"stage": self.stage, **settings_alike(self.trainer), **data.facts(), **facts_about(module)}
        check_ranks_agree(strategy.control, facts)  # before anything is wrapped, which would only hang
        self._compiled = CompiledSteps(module, self.trainer.compile, self.metrics)
        run_step = strategy.setup_module(module)
        check_set_up(strategy, module, run_step)
        runner = under_context(run_step, strategy.precision)
        hold(module)
        if self.stage == "fit":
            self._trainables = Trainables(module, strategy)
        return runner

    def _attach(self) -> None:
        """Let the module, and every module within it that logs and reads as well, reach the run."""
        for one in self.module.modules():
            if isinstance(one, TrainModule):
                attach(one, self.trainer)

    def _settings(self, data: StageData) -> RunSettings:
        trainer = self.trainer
        return RunSettings(
            self.stage,
            trainer.accumulate_grad_batches,
            trainer.gradient_clip_val,
            trainer.gradient_clip_algorithm,
            data.batch_size,
            self.module.automatic_optimization,
        )

    # Reads

    @property
    def monitors(self) -> Monitors:
        """Compares what is monitored with what is logged."""
        if self._monitors is None:
            from drivetrain._engine.monitors import Monitors  # for training

            self._monitors = Monitors(self)
        return self._monitors

    @property
    def estimated_steps(self) -> int | float:
        """Optimizer steps of the whole run; infinite where neither data nor limits bound it.

        In `setup` of a fit the training loader is asked for, which the run then reads. Collective there.
        """
        self.estimate_was_read = True
        if self.data is None and self.stage == "fit":
            return estimated_before_data(self)
        return estimated_steps(self, self.data)

    def _data(self) -> StageData:
        assert self.data is not None
        return self.data

    def _set_up(self) -> None:
        datamodule, hooks = self.given.datamodule, self.hooks
        setups: list[Callable[[str], None]] = [*hooks.setup]
        if datamodule is not None:
            setups.insert(0, self.profiling.call(f"{type(datamodule).__name__}.setup", datamodule.setup))
        self._plan_teardowns()
        for setup in setups:
            setup(self.stage)
        while late := self._come_since():
            self._take_callbacks()
            self.checkpoints.claim_for_late()
            for callback in late:
                callback.setup(self.trainer, self.module, self.stage)
        if len(self.trainer.callbacks) < len(self._given_callbacks):  # some were taken out
            self._take_callbacks()
        self._plan_teardowns()

    def _on_exception(self) -> list[Callable[[BaseException], None]]:
        datamodule = self.given.datamodule
        return [*([] if datamodule is None else [datamodule.on_exception]), *self.hooks.on_exception]

    def _plan_teardowns(self) -> None:
        datamodule = self.given.datamodule
        self._teardowns = [*([] if datamodule is None else [datamodule.teardown]), *self.hooks.teardown]

    # The end

    def _finish(self, status: str) -> None:
        if self.data is not None:
            self.data.close()
        if self.strategy.rank > 0:
            return
        problem = None
        if self.trainer.loggers:
            from drivetrain._engine.run_loggers import finish_logging  # by runs that log

            with self.profiling.span("logging"):
                problem = finish_logging(self.trainer, status)
        if problem is not None:
            status, self._why = "failed", _in_short(problem)
        self.folder.end({"success": "finished"}.get(status, status), self._why, self.progress.global_step)
        if problem is not None:
            raise problem

    def _say_ending(self) -> None:
        if self._ended_by is not None and self.strategy.rank == 0:
            reasons, nothing_left = self._ended_by
            lines = [how_it_ended(reasons, self.progress, nothing_left, time.monotonic() - self._began)]
            if self.trainer.settings["enable_progress_bar"].value and not self.trainer.barebones:
                from drivetrain._engine.run_summary import left_behind

                lines += left_behind(self, self.checkpoints.written)
            logger.info("\n".join(lines))

    def _detach(self) -> None:
        if self._trainables is not None:
            self._trainables.end()
        release(self.module)
        for one in self.module.modules():
            if isinstance(one, TrainModule):
                detach(one)
        for callback in self.callbacks:
            let_log(callback, None)
        self.strategy.precision.at_floor = None
        if self._compiled is not None:
            self._compiled.undo()
        if self.given.datamodule is not None:
            detach(self.given.datamodule)

    def _fail(self, error: BaseException) -> BaseException:
        """Tell hooks and ranks, let go of everything, and return what to raise."""
        with self.profiling.span("failure"):
            return self._let_go(error)

    def _let_go(self, error: BaseException) -> BaseException:
        control = self.strategy.control
        error = error_to_report(control, error)
        note_where(error, self)
        note_inference_tensors(error)
        failure = Failure.of_exception(self.strategy.rank, error)
        tell_others(control, failure)
        self._log.add_failure(error, failure.traceback)
        release(self.module)
        calls: list[Callable[[], Any]] = []
        if self._hooks is not None:
            calls += [lambda hook=hook: hook(error) for hook in self._on_exception()]  # type: ignore[misc]
            calls += [lambda hook=hook: hook(self.stage) for hook in self._teardowns]  # type: ignore[misc]
        status = "interrupted" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed"
        self._why = _in_short(error)
        self._ended_by = ([self._why.partition("\n")[0][:_LONGEST_LINE]], False) if self._trained else None
        calls += [self.checkpoints.abandon, lambda: self._finish(status), self._say_ending, self.strategy.teardown]
        for call in calls:
            try:
                call()
            except Exception:
                logger.exception("While a failed run was taken down, this failed too:")
        cause, told_by = cause_of(control, self.place.world, failure, error)
        cause = as_asked(cause, self._awaited)
        if told_by is not None:
            self.last_line = f"{failure.one_line_summary()}; rank {told_by} failed alike, and shows where"
        if cause is not error:
            self._log.add_cause(cause)
        return cause


def _in_short(error: BaseException) -> str:
    text = str(error)  # Ctrl-C and an assert have none
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__)[:_LONGEST_REASON]
