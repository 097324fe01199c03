"""Session: runs one stage on one rank, from set-up to tear-down."""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from drivetrain._distributed.control_plane import check_ranks_agree
from drivetrain._distributed.failure import Failure
from drivetrain._engine.assembly.evaluation_setup import build_stage, run_sanity_check
from drivetrain._engine.assembly.optimizer_setup import set_up_optimizers
from drivetrain._engine.assembly.out_of_memory import explain_out_of_memory
from drivetrain._engine.assembly.run_core import RunCore
from drivetrain._engine.assembly.strategy_checks import check_control_plane, check_distinct_devices, set_up_module
from drivetrain._engine.assembly.training_setup import build_training, read_estimate
from drivetrain._engine.checkpoints.checkpoint_manager import CheckpointManager
from drivetrain._engine.checkpoints.components import class_name, data_facts
from drivetrain._engine.ranks.collective_calls import all_gather, check_collective
from drivetrain._engine.ranks.error_reporting import note_known_fixes, note_where
from drivetrain._engine.ranks.failure_propagation import error_to_report, publish_failure, resolve_cause
from drivetrain._engine.ranks.rank_facts import check_folder_agreement, module_facts, setting_facts
from drivetrain._engine.ranks.seeding import seed_data_rank, seed_rank, warn_unseeded
from drivetrain._engine.run_ending import RunEnding
from drivetrain._engine.run_request import RunRequest
from drivetrain._engine.signals import Signals, announce, as_interruption, handled_signals, interruption_error, requeue
from drivetrain._loops.batch_mover import build_batch_mover
from drivetrain._loops.evaluate import HOOK_STAGE_NAMES
from drivetrain._loops.stopping import StopRequest
from drivetrain._loops.trainables import Trainables
from drivetrain._module.run_handle import attach, detach
from drivetrain._parameters.module_lock import lock_module, unlock_module
from drivetrain._runtime.console import log_to_console
from drivetrain._runtime.process_state import ProcessState, apply_switches
from drivetrain._runtime.seed import order_seed
from drivetrain.callback import folders_of
from drivetrain.launchers import LaunchedProcesses
from drivetrain.module.train_module import TrainModule
from drivetrain.strategies.strategy import RunSettings, Strategy

if TYPE_CHECKING:
    from drivetrain._engine.assembly.compiled_steps import CompiledSteps
    from drivetrain._engine.checkpoints.resumed_run import ResumedRun
    from drivetrain._engine.ranks.rank_log import RankLog
    from drivetrain._engine.run_start import StartingPoint
    from drivetrain._loops.train import TrainLoop

logger = logging.getLogger("drivetrain")


class Session:
    """Runs one stage: sets it up, executes it and tears it down.

    Args:
        request: the entry point that was called, with its arguments.
        strategy: runs the module, and is bound to this process already.
        processes: the processes of the run, of which this process is one.
    """

    def __init__(self, request: RunRequest, strategy: Strategy, processes: LaunchedProcesses) -> None:
        self.run = RunCore(request=request, strategy=strategy)
        self.checkpoints = CheckpointManager(self.run)
        self._start: StartingPoint | None = None  # None for a run without files that starts from no checkpoint
        self._resumed: ResumedRun | None = None
        self.last_line: str | None = None
        """The line to print instead of this rank's error if a lower rank failed the same way and prints its own."""
        self.run.checkpoints = self.checkpoints
        self.run.estimate_steps = partial(read_estimate, self.run)
        self.run.check_collective = partial(check_collective, self.run)
        self.run.all_gather = partial(all_gather, self.run)
        self.run.log_histograms = self._log_histograms
        self._processes = processes
        self._compiled: CompiledSteps | None = None
        self._teardowns: list[Callable[[str], None]] = []  # the hooks to call; empty before set-up hooks are called
        self._handled_signals = handled_signals(request.trainer.preemption_signals, os.environ, request.stage)
        self._signals = Signals(self._handled_signals, self._on_signal)
        self._log: RankLog | None = None
        if strategy.world_size > 1:
            from drivetrain._engine.ranks.rank_log import RankLog  # only runs on several ranks need it

            self._log = RankLog(self.run.folder, strategy.rank)
        self._ending = RunEnding(self.run)

    def execute(self) -> Any:
        """Run the stage and return the result. All process state is restored afterwards, also after a failure.

        Raises:
            Exception: this rank's error, or `RankFailedError` if another rank failed first.
        """
        run = self.run
        seed = run.trainer.seed
        flags = [(child, child.training) for child in run.module.modules()]
        shows_messages = run.strategy.rank == 0 and not run.trainer.barebones
        state = ProcessState(generators=seed is not None, cuda_generators=torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
        from drivetrain._data.splitting import use_data_rank  # importing Fit does not need it

        to_console, to_file = log_to_console(shows_messages), self._log or nullcontext()
        with self._signals, state, to_console, to_file, use_data_rank(self._data_rank):
            try:
                result = self._run_stage()
            except BaseException as error:
                explain_out_of_memory(error, run)
                with run.span("failure"):
                    cause = self._fail(error)
                if self._signals.raised:
                    self._requeue(self._signals.raised)
                try:
                    if cause is error:
                        raise
                    raise cause from error
                finally:
                    del cause  # breaks the reference cycle between the error and this frame
            finally:
                for child, training in flags:
                    child.training = training
                self._detach()
        if self._ending.exit_error is not None:
            self._requeue(run.stop.preempted)
            raise self._ending.exit_error
        return result

    # What hooks can ask of the run, by `RunState`

    def _log_histograms(self, name: str, value: Any, step: int, bins: int) -> None:
        from drivetrain._engine.histograms import log_histograms  # only runs that call this need it

        log_histograms(self.run, name, value, step, bins)

    # The stages

    def _run_stage(self) -> Any:
        run = self.run
        with run.span("set-up"):
            self._prepare()
        result = None
        if run.stage == "fit":
            self._fit()
        else:
            result = self._evaluate()
        with run.span("taking down"):
            self._tear_down()
        return result

    def _prepare(self) -> None:
        """Do the part of set-up that all stages share."""
        run, data = self.run, self.run.data
        trainer, strategy = run.trainer, run.strategy
        apply_switches(trainer.deterministic, trainer.benchmark, trainer.detect_anomaly)
        if trainer.seed is not None:
            seed_rank(trainer.seed, 0)  # every rank initializes the module with the same seed
        with run.span("setup_environment"):
            strategy.setup_environment()
        if trainer.loggers:
            from drivetrain.loggers.silence import silence_loggers  # only runs that log need it

            silence_loggers(trainer.loggers, strategy.rank > 0)
        self._adopt_control_plane()
        self._attach()
        if run.datamodule is not None:
            attach(run.datamodule, trainer)
        if not run.request.trial:
            run.module_callbacks = run.callbacks.configure()
        run.callbacks.collect()
        self._choose_start()
        if self._log is not None:
            strategy.control.set_record_folder(self._log.folder)
        with run.span("prepare_data"):
            self._prepare_data()
        self._call_setup_hooks()
        self._check_folders()
        self._open()
        if any(parameter.is_meta for parameter in run.module.parameters()):
            from drivetrain._engine.assembly.missing_weights import give_storage  # only modules without values need it

            give_storage(run.module, self.checkpoints.opened is not None)
        is_fresh = self.checkpoints.opened is None
        if trainer.built_unseeded and trainer.seed is not None and is_fresh and strategy.rank == 0:
            warn_unseeded(run.module, trainer.seed)
        if strategy.rank == 0 and not run.request.trial:
            from drivetrain._engine.assembly.class_checks import warn_of_similar_names  # importing Fit does not need it

            warn_of_similar_names(run.module, run.datamodule, *run.callbacks)
        self._load_data()
        if run.stage == "fit":
            facts = data_facts(data.train, data.loaders)
            run.components |= {"module": class_name(run.module), "data": facts}
        if self._resumed is not None:
            self._resumed.compare()
        with run.span("setup_module"):
            self._set_up_module()
        if strategy.world_size > 1:
            run.callbacks.early_draws = seed_data_rank(trainer.seed, data.seed, strategy)
        run.move = build_batch_mover(run.module, run.datamodule, strategy)

    def _fit(self) -> None:
        with self.run.span("set-up"):
            self._prepare_training()
        assert self.run.loop is not None
        self._train(self.run.loop)

    def _prepare_training(self) -> None:
        run = self.run
        with run.span("configure_optimizers"):
            run.optimization = set_up_optimizers(run, self._resumed)
        build_training(run)
        if self._resumed is not None:
            self._resumed.load()
        if not run.request.trial:
            logger.info(run.strategy.precision.describe())

    def _train(self, loop: TrainLoop) -> None:
        run, checkpoints, ending = self.run, self.checkpoints, self._ending
        hooks, strategy, progress = run.callbacks.hooks, run.strategy, run.progress
        already_ended = None if self._resumed is None else self._resumed.already_ended
        if strategy.rank == 0 and already_ended is None:
            self._prepare_loggers()
        for hook in hooks.on_fit_start:
            hook()
        if run.data.validates and run.trainer.num_sanity_val_steps and checkpoints.opened is None:
            run_sanity_check(run)
        run.metrics.enter("train", reset=checkpoints.opened is None)
        self._signals.defer_to_run()
        for hook in hooks.on_train_start:
            hook()
        if self._resumed is not None:
            self._resumed.end()
        if already_ended is None:
            with run.span("set-up"):
                checkpoints.rehearse_saves()
            self._record_beginning()
            ending.has_trained = True
            loop.run()
        run.metrics.enter(None)
        leaving = run.stop.preempted
        progress.cut_short = progress.batch_idx > 0 and not leaving
        if leaving:
            self._leave(leaving)
            return
        for hook in (*hooks.on_train_end, *hooks.on_fit_end):
            hook()
        run.data.rng_replay.end()
        checkpoints.carry_out_requests()
        checkpoints.finish()
        if strategy.rank == 0 and not run.request.trial:
            reasons = [already_ended, "nothing was left to train"] if already_ended is not None else loop.why_it_ended()
            ending.set_reasons(reasons)

    def _prepare_loggers(self) -> None:
        """Rewind the loggers to the step that the run resumes from, and log the hyper-parameters."""
        loggers, step = self.run.trainer.loggers, self.run.folder.rewinds_to
        hyper_parameters = self.run.logged_hyper_parameters() if loggers else {}
        for each in loggers:
            if step is not None:
                each.rewind(step)
            if hyper_parameters:
                each.log_hyperparams(hyper_parameters)

    def _record_beginning(self) -> None:
        data, batches = self.run.data, self.run.trainer.num_training_batches
        facts = {**self.run.components.get("data", {}), "batches": batches if batches != math.inf else None}
        self.run.folder.notes.note_training({**facts, "batch_size": data.batch_size}, data.seed, data.batch_size)

    def _evaluate(self) -> Any:
        run = self.run
        run.strategy.setup_optimizers([])
        if run.strategy.world_size > 1:
            run.strategy.broadcast_module(run.module)
        if self.checkpoints.opened is not None:
            with run.span("checkpoint"):
                self.checkpoints.saved_state.load_weights(self.checkpoints.opened, run.request.averaged)
        run.stop = StopRequest(run.strategy.control, None, None, None)
        evaluate = build_stage(run)
        self._signals.defer_to_run()
        with run.span(HOOK_STAGE_NAMES[run.stage]):
            result = evaluate()
        if run.stop.preempted:
            self._leave(run.stop.preempted)
        return result

    # Signals

    def _on_signal(self, number: int) -> None:
        if self.run.stop.signal:
            return  # the other thread has reported it
        self.run.stop.leave_after(number)
        if self.run.strategy.rank == 0:
            announce(number, self.run.stage, self.run.request.trial)

    def _leave(self, number: int) -> None:
        """End a run that a signal stopped early, without the hooks of its end. A fit is saved already."""
        self._signals.handled = True
        self._ending.exit_error = error = interruption_error(number)
        if self.run.stage != "fit":
            self._ending.set_failure(error)
        else:
            self.run.data.rng_replay.end()
            self.checkpoints.finish()
            if not self.run.request.trial:
                self._ending.set_reasons([f"{signal.Signals(number).name} asked it to save and leave"])
        for hook in self._exception_hooks():
            hook(error)

    def _requeue(self, number: int) -> None:
        if self.run.strategy.rank == 0 and self.run.stage == "fit":
            requeue(number, os.environ)

    # Set-up

    def _adopt_control_plane(self) -> None:
        """Pass the strategy's control plane, created by `setup_environment`, to the parts of the run that use it."""
        run, strategy = self.run, self.run.strategy
        check_control_plane(strategy, self._processes.placement)
        check_distinct_devices(strategy)
        if strategy.control.failures is not None:
            strategy.control.failures.external = self._processes.failures
        run.data.rng_replay.device = strategy.device
        run.metrics.control = run.data.lengths.control = strategy.control
        run.metrics.contributes = strategy.is_data_leader
        run.metrics.objects.group = partial(getattr, strategy, "data_group")

    def _prepare_data(self) -> None:
        run = self.run
        if run.strategy.local_rank == 0:
            if run.datamodule is not None:
                run.datamodule.prepare_data()
            run.module.prepare_data()
        run.strategy.control.monitored_barrier("the end of prepare_data")

    def _choose_start(self) -> None:
        """Choose the run's folder and the checkpoint that it starts from, if it needs any. Collective."""
        run = self.run
        needed_by = [type(user).__name__ for user in (*run.trainer.loggers, *run.folder_users())]
        needed_by += [] if run.request.ckpt_path is None else ["ckpt_path"]
        if run.strategy.world_size > 1:
            check_folder_agreement(run.strategy.control, needed_by)
        if needed_by:
            self._begin()

    def _begin(self) -> None:
        from drivetrain._engine.run_start import StartingPoint  # only runs with files need it

        self._start = StartingPoint(self.run)
        self._start.choose()

    def _begin_for_late_callbacks(self) -> None:
        """Choose a folder, if the run has none, for callbacks that were appended in `setup`. Collective."""
        if self.run.stage == "fit" and self.run.folder.path is None:
            self._begin()

    def _call_setup_hooks(self) -> None:
        run, datamodule = self.run, self.run.datamodule
        self._plan_teardowns()
        if datamodule is not None:
            with run.span(f"{type(datamodule).__name__}.setup"):
                datamodule.setup(run.stage)
        for setup in run.callbacks.hooks.setup:
            setup(run.stage)
        run.callbacks.set_up_appended(run.stage, self._begin_for_late_callbacks)
        self._plan_teardowns()

    def _open(self) -> None:
        """Open the checkpoint that the run starts from, if there is one. Collective."""
        run, opened = self.run, None if self._start is None else self._start.open()
        self.checkpoints.opened = opened
        if opened is None or run.stage != "fit":
            control = run.strategy.control  # all ranks have rank 0's seed
            run.data.seed = control.broadcast_object(order_seed(run.trainer.seed) if control.rank == 0 else None)
            return
        from drivetrain._engine.checkpoints.resumed_run import ResumedRun  # only runs that resume need it

        resumed = self._resumed = ResumedRun(run, self.checkpoints.saved_state, opened)
        run.data.seed = int(resumed.state["data"]["seed"])
        self.checkpoints.continue_lineage(opened.manifest.metadata)
        resumed.check_remaining_training()

    def _plan_teardowns(self) -> None:
        datamodule = self.run.datamodule
        self._teardowns = [*([] if datamodule is None else [datamodule.teardown]), *self.run.callbacks.hooks.teardown]

    def _check_folders(self) -> None:
        """Check that the folders of the callbacks can be written to."""
        run = self.run
        if run.stage == "fit" and folders_of(run.callbacks):
            from drivetrain._engine.write_checks import check_writable_folders

            check_writable_folders(run.strategy, run.callbacks)

    def _load_data(self) -> None:
        """Build the loaders, and the object that rebuilds them if they are to be rebuilt."""
        run, data = self.run, self.run.data
        with run.span("loaders"):
            if run.stage != "fit" or not run.trainer.reload_dataloaders_every_n_epochs:
                data.load()
                return
            from drivetrain._engine.data_setup.reloading import Reloading  # only runs that reload need it

            Reloading(run).begin(self._resumed)

    def _set_up_module(self) -> None:
        run, module, strategy = self.run, self.run.module, self.run.strategy
        strategy.set_run_settings(
            RunSettings(
                stage=run.stage,
                accumulate_grad_batches=run.trainer.accumulate_grad_batches,
                gradient_clip_val=run.trainer.gradient_clip_val,
                gradient_clip_algorithm=run.trainer.gradient_clip_algorithm,
                batch_size=run.data.batch_size,
                automatic_optimization=module.automatic_optimization,
            )
        )
        with strategy.module_init_context(), run.span("configure_model"):
            module.configure_model()
        self._attach()  # attaches the modules that configure_model has built
        if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
            from drivetrain._engine.assembly.missing_weights import refuse_lazy_layers

            refuse_lazy_layers(module)
        if self._resumed is not None:
            self._resumed.freeze()  # must come before the strategy wraps the parameters that train
        strategy.check(module)
        if strategy.world_size > 1:
            facts = {"stage": run.stage, **setting_facts(run.trainer), **run.data.facts(), **module_facts(module)}
            check_ranks_agree(strategy.control, facts)  # must come before wrapping, which would hang if ranks differed
        if run.trainer.compile:
            from drivetrain._engine.assembly.compiled_steps import CompiledSteps  # only runs that compile need it

            self._compiled = CompiledSteps(module, run.trainer.compile, run)
        run.runner = set_up_module(strategy, module)
        lock_module(module)
        if run.stage == "fit":
            run.trainables = Trainables(module, strategy)

    def _attach(self) -> None:
        """Give the module, and every `TrainModule` within it, access to the run."""
        for child in self.run.module.modules():
            if isinstance(child, TrainModule):
                attach(child, self.run.trainer)

    def _data_rank(self) -> tuple[int, int]:
        return self.run.strategy.data_rank, self.run.strategy.data_world_size

    # Tear-down, after success and after a failure

    def _tear_down(self) -> None:
        run, strategy = self.run, self.run.strategy
        unlock_module(run.module)
        strategy.restore_module()
        while self._teardowns:
            self._teardowns.pop(0)(run.stage)
        self._finish("success" if self._ending.exit_error is None else "interrupted")
        self._ending.log(self.checkpoints.written)
        strategy.control.leave()
        strategy.teardown()

    def _finish(self, status: str) -> None:
        """Close the loaders, and on rank 0 the loggers and the run's record."""
        self.run.data.close()
        if self.run.strategy.rank == 0:
            self._ending.record(status)

    def _detach(self) -> None:
        run = self.run
        if run.loop is not None:
            run.loop.step.release()
        if run.trainables is not None:
            run.trainables.end()
        unlock_module(run.module)
        for child in run.module.modules():
            if isinstance(child, TrainModule):
                detach(child)
        run.callbacks.detach()
        run.strategy.precision.on_minimum_scale = None
        if self._compiled is not None:
            self._compiled.undo()
        if run.datamodule is not None:
            detach(run.datamodule)

    def _exception_hooks(self) -> list[Callable[[BaseException], None]]:
        datamodule = self.run.datamodule
        return [*([] if datamodule is None else [datamodule.on_exception]), *self.run.callbacks.hooks.on_exception]

    def _fail(self, error: BaseException) -> BaseException:
        """Report a failure to the hooks and the other ranks, tear down the run, and return the error to raise."""
        run, ending = self.run, self._ending
        strategy, control = run.strategy, run.strategy.control
        error = error_to_report(control, error)
        note_where(error, run, run.loop is not None)
        note_known_fixes(error)
        failure = Failure.of_exception(strategy.rank, error)
        publish_failure(control, failure)
        if self._log is not None:
            self._log.add_failure(error, failure.traceback)
        unlock_module(run.module)
        self.checkpoints.run_failed = True
        calls: list[Callable[[], Any]] = []
        if run.callbacks.collected:
            calls += [partial(hook, error) for hook in self._exception_hooks()]
            calls += [partial(hook, run.stage) for hook in self._teardowns]
        status = "interrupted" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed"
        ending.set_failure(error)
        calls += [self.checkpoints.abandon, partial(self._finish, status)]
        # `written` is final only when `abandon` has waited, so the lambda reads it later.
        calls += [lambda: ending.log(self.checkpoints.written), strategy.teardown]
        for call in calls:
            try:
                call()
            except Exception:
                logger.exception("Tearing down the failed run raised another error:")
        cause, reported_by = resolve_cause(control, failure, error, self._processes.kind == "function")
        cause = as_interruption(cause, self._handled_signals)
        if reported_by is not None:
            summary = failure.one_line_summary()
            self.last_line = f"{summary}; rank {reported_by} failed the same way and shows the traceback"
        if cause is not error and self._log is not None:
            self._log.add_cause(cause)
        return cause
