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
from drivetrain._engine.assembly.evaluation_setup import (
    build_stage,
    goes_on_when_repeated,
    run_sanity_check,
)
from drivetrain._engine.assembly.optimizer_setup import set_up_optimizers
from drivetrain._engine.assembly.out_of_memory import explain_out_of_memory
from drivetrain._engine.assembly.run_callbacks import RunCallbacks
from drivetrain._engine.assembly.run_core import RunCore
from drivetrain._engine.assembly.strategy_checks import check_control_plane, check_distinct_devices, check_module_setup
from drivetrain._engine.assembly.training_setup import (
    build_training,
    read_estimate,
    under_context,
)
from drivetrain._engine.checkpoints.checkpoint_manager import CheckpointManager
from drivetrain._engine.checkpoints.components import class_name, data_facts
from drivetrain._engine.data_setup.run_data import RunData
from drivetrain._engine.ranks.collective_calls import all_gather, check_collective
from drivetrain._engine.ranks.error_reporting import note_known_fixes, note_where
from drivetrain._engine.ranks.failure_propagation import error_to_report, publish_failure, resolve_cause
from drivetrain._engine.ranks.rank_facts import check_folder_agreement, module_facts, setting_facts
from drivetrain._engine.ranks.rank_log import RankLog
from drivetrain._engine.ranks.seeding import seed_data_rank, seed_rank, warn_unseeded
from drivetrain._engine.run_ending import RunEnding
from drivetrain._engine.run_request import RunRequest
from drivetrain._engine.signals import Signals, announce, as_interruption, handled_signals, interruption_error, requeue
from drivetrain._loops.batch_mover import build_batch_mover
from drivetrain._loops.evaluate import HOOK_STAGE_NAMES
from drivetrain._loops.hooks import is_overridden
from drivetrain._loops.stopping import StopRequest
from drivetrain._loops.trainables import Trainables
from drivetrain._metrics import MetricStore
from drivetrain._module.run_handle import attach, detach
from drivetrain._parameters.module_lock import lock_module, unlock_module
from drivetrain._run_state import Progress
from drivetrain._runtime.console import log_to_console
from drivetrain._runtime.process_state import ProcessState, apply_switches
from drivetrain._runtime.seed import order_seed
from drivetrain.callback import WantsRunFolder, folders_of
from drivetrain.launchers import LaunchedProcesses
from drivetrain.module.train_module import TrainModule
from drivetrain.strategies.strategy import RunSettings, Strategy

if TYPE_CHECKING:
    from drivetrain._engine.assembly.compiled_steps import CompiledSteps
    from drivetrain._engine.checkpoints.resumed_run import ResumedRun
    from drivetrain._engine.run_start import StartingPoint
    from drivetrain._loops.step import TrainStep
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
        trainer, module, control = request.trainer, request.module, strategy.control
        self.data = RunData(request, strategy)
        self.core = RunCore(
            request=request,
            stage=request.stage,
            module=module,
            datamodule=request.datamodule,
            strategy=strategy,
            metrics=MetricStore(module),
            progress=request.counters or Progress(),
            stop=StopRequest(control, None, None, None),
            has_validation_step=is_overridden("validation_step", module, TrainModule),
            data=self.data,
            callbacks=RunCallbacks(trainer, module),
        )
        self.checkpoints = CheckpointManager(self.core)
        self._start: StartingPoint | None = None  # None for a run without files that starts from no checkpoint
        self._resumed: ResumedRun | None = None
        self.last_line: str | None = None
        """The line to print instead of this rank's error if a lower rank failed the same way and prints its own."""
        self.core.checkpoints = self.checkpoints
        self.core.estimate_steps = partial(read_estimate, self.core)
        self.core.check_collective = partial(check_collective, self.core)
        self.core.all_gather = partial(all_gather, self.core)
        self.core.log_histograms = self._log_histograms
        self._processes = processes
        self._compiled: CompiledSteps | None = None
        self._teardowns: list[Callable[[str], None]] = []  # the hooks to call; empty before set-up hooks are called
        handled = handled_signals(trainer.preemption_signals, os.environ, request.stage)
        self._handled_signals = handled
        self._signals = Signals(handled, self._on_signal)
        writes_files = not (trainer.fast_dev_run or trainer.barebones)
        root_is_chosen = trainer.settings["default_root_dir"].source != "default"
        fallback = trainer.default_root_dir if writes_files and root_is_chosen else None
        self._log = RankLog(self.core.folder, strategy.rank, fallback) if strategy.world_size > 1 else None
        self._ending = RunEnding(self.core)

    def execute(self) -> Any:
        """Run the stage and return the result. All process state is restored afterwards, also after a failure.

        Raises:
            Exception: this rank's error, or `RankFailedError` if another rank failed first.
        """
        core = self.core
        seed = core.trainer.seed
        flags = [(child, child.training) for child in core.module.modules()]
        shows_messages = core.strategy.rank == 0 and not core.trainer.barebones
        state = ProcessState(generators=seed is not None, cuda_generators=torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
        from drivetrain._data.splitting import use_data_rank

        to_console, to_file = log_to_console(shows_messages), self._log or nullcontext()
        with self._signals, state, to_console, to_file, use_data_rank(self._data_rank):
            try:
                result = self._run()
            except BaseException as error:
                explain_out_of_memory(error, core)
                with core.span("failure"):
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
            self._requeue(core.stop.preempted)
            raise self._ending.exit_error
        return result

    # What hooks can ask of the run, by `RunState`

    def _log_histograms(self, name: str, value: Any, step: int, bins: int) -> None:
        from drivetrain._engine.histograms import log_histograms  # only runs that call this need it

        log_histograms(self.core, name, value, step, bins)

    # The stages

    def _run(self) -> Any:
        core = self.core
        with core.span("set-up"):
            self._prepare()
        result = None
        if core.stage == "fit":
            self._fit()
        else:
            result = self._evaluate()
        with core.span("taking down"):
            self._tear_down()
        return result

    def _prepare(self) -> None:
        """Do the part of set-up that all stages share."""
        core, data = self.core, self.data
        trainer, strategy = core.trainer, core.strategy
        apply_switches(trainer.deterministic, trainer.benchmark, trainer.detect_anomaly)
        if trainer.seed is not None:
            seed_rank(trainer.seed, 0)  # every rank initializes the module with the same seed
        with core.span("setup_environment"):
            strategy.setup_environment()
        if trainer.loggers:
            from drivetrain.loggers.silence import silence_loggers  # only runs that log need it

            silence_loggers(trainer.loggers, strategy.rank > 0)
        self._connect_ranks()
        self._attach()
        if core.datamodule is not None:
            attach(core.datamodule, trainer)
        if not core.request.trial:
            core.callbacks.configure()
            core.module_callbacks = core.callbacks.from_module
        core.callbacks.collect()
        self._choose_start()
        if self._log is not None:
            strategy.control.set_record_folder(self._log.folder)
        with core.span("prepare_data"):
            self._prepare_data()
        self._call_setup_hooks()
        self._check_folders()
        self._open()
        if any(parameter.is_meta for parameter in core.module.parameters()):
            from drivetrain._engine.assembly.missing_weights import give_storage  # only modules without values need it

            give_storage(core.module, self.checkpoints.opened is not None)
        is_fresh = self.checkpoints.opened is None
        if trainer.built_unseeded and trainer.seed is not None and is_fresh and strategy.rank == 0:
            warn_unseeded(core.module, trainer.seed)
        if strategy.rank == 0 and not core.request.trial:
            from drivetrain._engine.assembly.class_checks import warn_of_similar_names  # importing Fit does not need it

            warn_of_similar_names(core.module, core.datamodule, *core.callbacks)
        self._load_data()
        if core.stage == "fit":
            facts = data_facts(data.train, data.loaders)
            core.components |= {"module": class_name(core.module), "data": facts}
        if self._resumed is not None:
            self._resumed.compare()
        with core.span("setup_module"):
            self._set_up_module()
        if strategy.world_size > 1:
            core.callbacks.early_draws = seed_data_rank(trainer.seed, data.seed, strategy)
        core.move = build_batch_mover(core.module, core.datamodule, strategy)

    def _fit(self) -> None:
        with self.core.span("set-up"):
            self._prepare_training()
        assert self.core.loop is not None
        self._train(self.core.loop)

    def _prepare_training(self) -> TrainStep:
        core = self.core
        with core.span("configure_optimizers"):
            core.optimization = set_up_optimizers(core, self._resumed)
        step = build_training(core)
        if self._resumed is not None:
            self._resumed.load()
        if not core.request.trial:
            logger.info(core.strategy.precision.describe())
        return step

    def _train(self, loop: TrainLoop) -> None:
        core, checkpoints, ending = self.core, self.checkpoints, self._ending
        hooks, strategy, progress = core.callbacks.hooks, core.strategy, core.progress
        already_ended = None if self._resumed is None else self._resumed.already_ended
        if strategy.rank == 0 and already_ended is None:
            self._prepare_loggers()
        for hook in hooks.on_fit_start:
            hook()
        if self.data.validates and core.trainer.num_sanity_val_steps and checkpoints.opened is None:
            run_sanity_check(core)
        core.metrics.enter("train", reset=checkpoints.opened is None)
        self._signals.defer_to_run()
        for hook in hooks.on_train_start:
            hook()
        if self._resumed is not None:
            self._resumed.end()
        if already_ended is None:
            with core.span("set-up"):
                checkpoints.rehearse_saves()
            self._record_beginning()
            ending.has_trained = True
            loop.run()
        core.metrics.enter(None)
        leaving = core.stop.preempted
        progress.cut_short = progress.batch_idx > 0 and not leaving
        if leaving:
            self._leave(leaving)
            return
        for hook in (*hooks.on_train_end, *hooks.on_fit_end):
            hook()
        self.data.rng_replay.end()
        checkpoints.carry_out_requests()
        checkpoints.finish()
        if strategy.rank == 0 and not core.request.trial:
            reasons = loop.why_it_ended() if already_ended is None else [already_ended]
            ending.set_reasons(reasons, nothing_left=already_ended is not None)

    def _prepare_loggers(self) -> None:
        """Rewind the loggers to the step that the run resumes from, and log the hyper-parameters."""
        loggers, step = self.core.trainer.loggers, self.core.folder.rewinds_to
        hyper_parameters = self.core.logged_hyper_parameters() if loggers else {}
        for each in loggers:
            if step is not None:
                each.rewind(step)
            if hyper_parameters:
                each.log_hyperparams(hyper_parameters)

    def _record_beginning(self) -> None:
        data, batches = self.data, self.core.trainer.num_training_batches
        facts = {**self.core.components.get("data", {}), "batches": batches if batches != math.inf else None}
        self.core.folder.notes.note_training({**facts, "batch_size": data.batch_size}, data.seed, data.batch_size)

    def _evaluate(self) -> Any:
        core = self.core
        core.strategy.setup_optimizers([])
        if core.strategy.world_size > 1:
            core.strategy.broadcast_module(core.module)
        if self.checkpoints.opened is not None:
            with core.span("checkpoint"):
                self.checkpoints.saved_state.load_weights(self.checkpoints.opened, core.request.averaged)
        core.stop = StopRequest(core.strategy.control, None, None, None)
        evaluate = build_stage(core)
        self._signals.defer_to_run()
        with core.span(HOOK_STAGE_NAMES[core.stage]):
            result = evaluate()
        if core.stop.preempted:
            self._leave(core.stop.preempted)
        return result

    # Signals

    def _on_signal(self, number: int) -> None:
        if self.core.stop.signal:
            return  # the other thread has reported it
        self.core.stop.leave_after(number)
        if self.core.strategy.rank == 0:
            announce(number, self.core.stage, self.core.request.trial)

    def _leave(self, number: int) -> None:
        """End a run that a signal stopped early, without the hooks of its end. A fit is saved already."""
        self._signals.handled = True
        self._ending.exit_error = error = interruption_error(number)
        if self.core.stage != "fit":
            self._ending.set_failure(error)
        else:
            self.data.rng_replay.end()
            self.checkpoints.finish()
            if not self.core.request.trial:
                self._ending.set_reasons([f"{signal.Signals(number).name} asked it to save and leave"])
        for hook in self._exception_hooks():
            hook(error)

    def _requeue(self, number: int) -> None:
        if self.core.strategy.rank == 0 and goes_on_when_repeated(self.core):
            requeue(number, os.environ)

    # Set-up

    def _connect_ranks(self) -> None:
        """Pass the strategy's control plane, created by `setup_environment`, to the parts of the run that use it."""
        core, strategy = self.core, self.core.strategy
        check_control_plane(strategy, self._processes.placement)
        check_distinct_devices(strategy)
        if strategy.control.failures is not None:
            strategy.control.failures.external = self._processes.failures
        self.data.rng_replay.device = strategy.device
        core.metrics.control = self.data.lengths.control = strategy.control
        core.metrics.contributes = strategy.is_data_leader
        core.metrics.objects.group = partial(getattr, strategy, "data_group")

    def _prepare_data(self) -> None:
        core = self.core
        if core.strategy.local_rank == 0:
            if core.datamodule is not None:
                core.datamodule.prepare_data()
            core.module.prepare_data()
        core.strategy.control.monitored_barrier("the end of prepare_data")

    def _choose_start(self) -> None:
        """Choose the run's folder and the checkpoint that it starts from, if it needs any. Collective."""
        core = self.core
        users: list[object] = [*core.trainer.loggers]
        users += [each for each in core.callbacks if isinstance(each, WantsRunFolder) and each.wants_run_folder]
        users += [core.trainer.profiler] if core.profile_needs_folder else []
        needed_by = [type(user).__name__ for user in users]
        needed_by += [] if core.request.ckpt_path is None else ["ckpt_path"]
        if core.strategy.world_size > 1:
            check_folder_agreement(core.strategy.control, needed_by)
        if needed_by:
            self._begin()

    def _begin(self) -> None:
        from drivetrain._engine.run_start import StartingPoint  # only runs with files need it

        self._start = StartingPoint(self.core)
        self._start.choose()

    def _begin_for_late_callbacks(self) -> None:
        """Choose a folder, if the run has none, for callbacks that were appended in `setup`. Collective."""
        if self.core.stage == "fit" and self.core.folder.path is None:
            self._begin()

    def _call_setup_hooks(self) -> None:
        core, datamodule = self.core, self.core.datamodule
        self._plan_teardowns()
        if datamodule is not None:
            with core.span(f"{type(datamodule).__name__}.setup"):
                datamodule.setup(core.stage)
        for setup in core.callbacks.hooks.setup:
            setup(core.stage)
        core.callbacks.set_up_appended(core.stage, self._begin_for_late_callbacks)
        self._plan_teardowns()

    def _open(self) -> None:
        """Open the checkpoint that the run starts from, if there is one. Collective."""
        core, opened = self.core, None if self._start is None else self._start.open()
        self.checkpoints.opened = opened
        if opened is None or core.stage != "fit":
            control = core.strategy.control  # all ranks have rank 0's seed
            self.data.seed = control.broadcast_object(order_seed(core.trainer.seed) if control.rank == 0 else None)
            return
        from drivetrain._engine.checkpoints.resumed_run import ResumedRun  # only runs that resume need it

        resumed = self._resumed = ResumedRun(core, self.checkpoints.saved_state, opened)
        self.data.seed = int(resumed.state["data"]["seed"])
        self.checkpoints.continue_lineage(opened.manifest.metadata)
        resumed.check_remaining_training()

    def _plan_teardowns(self) -> None:
        datamodule = self.core.datamodule
        self._teardowns = [*([] if datamodule is None else [datamodule.teardown]), *self.core.callbacks.hooks.teardown]

    def _check_folders(self) -> None:
        """Check that the folders of the callbacks can be written to."""
        core = self.core
        if core.stage == "fit" and folders_of(core.callbacks):
            from drivetrain._engine.write_checks import check_writable_folders

            check_writable_folders(core.strategy, core.callbacks)

    def _load_data(self) -> None:
        """Build the loaders, and the object that rebuilds them if they are to be rebuilt."""
        core, data = self.core, self.data
        with core.span("loaders"):
            if core.stage != "fit" or not core.trainer.reload_dataloaders_every_n_epochs:
                data.load()
                return
            from drivetrain._engine.data_setup.reloading import Reloading  # only runs that reload need it

            Reloading(core).begin(self._resumed)

    def _set_up_module(self) -> None:
        core, module, strategy = self.core, self.core.module, self.core.strategy
        strategy.set_run_settings(self._settings())
        with strategy.module_init_context(), core.span("configure_model"):
            module.configure_model()
        self._attach()  # attaches the modules that configure_model has built
        if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
            from drivetrain._engine.assembly.missing_weights import refuse_lazy_layers

            refuse_lazy_layers(module)
        if self._resumed is not None:
            self._resumed.freeze()  # must come before the strategy wraps the parameters that train
        strategy.check(module)
        if strategy.world_size > 1:
            facts = {"stage": core.stage, **setting_facts(core.trainer), **self.data.facts(), **module_facts(module)}
            check_ranks_agree(strategy.control, facts)  # must come before wrapping, which would hang if ranks differed
        if core.trainer.compile:
            from drivetrain._engine.assembly.compiled_steps import CompiledSteps  # only runs that compile need it

            self._compiled = CompiledSteps(module, core.trainer.compile, core)
        run_step = strategy.setup_module(module)
        check_module_setup(strategy, module, run_step)
        core.runner = under_context(run_step, strategy.precision)
        lock_module(module)
        if core.stage == "fit":
            self.core.trainables = Trainables(module, strategy)

    def _settings(self) -> RunSettings:
        trainer = self.core.trainer
        return RunSettings(
            self.core.stage,
            trainer.accumulate_grad_batches,
            trainer.gradient_clip_val,
            trainer.gradient_clip_algorithm,
            self.data.batch_size,
            self.core.module.automatic_optimization,
        )

    def _attach(self) -> None:
        """Give the module, and every `TrainModule` within it, access to the run."""
        for child in self.core.module.modules():
            if isinstance(child, TrainModule):
                attach(child, self.core.trainer)

    def _data_rank(self) -> tuple[int, int]:
        return self.core.strategy.data_rank, self.core.strategy.data_world_size

    # Tear-down, after success and after a failure

    def _tear_down(self) -> None:
        core, strategy = self.core, self.core.strategy
        unlock_module(core.module)
        strategy.restore_module()
        while self._teardowns:
            self._teardowns.pop(0)(core.stage)
        self._finish("success" if self._ending.exit_error is None else "interrupted")
        self._ending.log(self.checkpoints.written)
        strategy.control.leave()
        strategy.teardown()

    def _finish(self, status: str) -> None:
        """Close the loaders, and on rank 0 the loggers and the run's record."""
        self.data.close()
        if self.core.strategy.rank == 0:
            self._ending.record(status)

    def _detach(self) -> None:
        core = self.core
        if core.loop is not None:
            core.loop.step.release()
        if self.core.trainables is not None:
            self.core.trainables.end()
        unlock_module(core.module)
        for child in core.module.modules():
            if isinstance(child, TrainModule):
                detach(child)
        core.callbacks.detach()
        core.strategy.precision.on_minimum_scale = None
        if self._compiled is not None:
            self._compiled.undo()
        if core.datamodule is not None:
            detach(core.datamodule)

    def _exception_hooks(self) -> list[Callable[[BaseException], None]]:
        datamodule = self.core.datamodule
        return [*([] if datamodule is None else [datamodule.on_exception]), *self.core.callbacks.hooks.on_exception]

    def _fail(self, error: BaseException) -> BaseException:
        """Report a failure to the hooks and the other ranks, tear down the run, and return the error to raise."""
        core, ending = self.core, self._ending
        strategy, control = core.strategy, core.strategy.control
        error = error_to_report(control, error)
        note_where(error, core, core.loop is not None)
        note_known_fixes(error)
        failure = Failure.of_exception(strategy.rank, error)
        publish_failure(control, failure)
        if self._log is not None:
            self._log.add_failure(error, failure.traceback)
        unlock_module(core.module)
        self.checkpoints.run_failed = True
        calls: list[Callable[[], Any]] = []
        if core.callbacks.collected:
            calls += [partial(hook, error) for hook in self._exception_hooks()]
            calls += [partial(hook, core.stage) for hook in self._teardowns]
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
