"""Fit: puts the parts together and runs them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from drivetrain._config.arguments import check_arguments
from drivetrain._config.precedence import Settings, resolved_settings
from drivetrain._engine.collective_calls import CollectiveCalls
from drivetrain._engine.defaults import default_callbacks, default_loggers
from drivetrain._engine.launch import Request, launch
from drivetrain._engine.resume_compatibility import check_allow
from drivetrain._engine.run_state import RunState
from drivetrain._engine.seeding import built_unseeded
from drivetrain._engine.stage_loaders import Given
from drivetrain._loops.hooks import is_overridden
from drivetrain._loops.manual_step import OptimizerHandle
from drivetrain._runtime.accelerators import check_devices
from drivetrain._runtime.seed import validate_seed
from drivetrain.callback import Callback
from drivetrain.data import DataModule
from drivetrain.environments import Environment, check_environment_name
from drivetrain.errors import ConfigurationError, shortened
from drivetrain.launchers import Launcher, check_launcher
from drivetrain.loggers import Logger
from drivetrain.module._run_handle import is_attached
from drivetrain.module.train_module import TrainModule
from drivetrain.precision import Precision
from drivetrain.precision.resolve import PrecisionName, canonical_name
from drivetrain.strategies.registry import StrategyName, strategy_by_name
from drivetrain.strategies.strategy import Strategy

if TYPE_CHECKING:
    from drivetrain._engine.log_queue import LogQueue
    from drivetrain.profilers import Profiler

logger = logging.getLogger("drivetrain")

Limit = int | float | None


class Fit(RunState):
    """Trains, validates, tests and predicts with a `TrainModule`. Building one has no side effect.

    What is read of it, in a run and afterwards, and what hooks call, is in `RunContext`.

    Args:
        strategy: where: a name ("auto", "ddp", ..., or one that a package has registered) or a `Strategy`.
        accelerator: "auto", "cpu", "gpu" ("cuda") or "mps".
        devices: of each node: a count, a list of indices, "auto", or -1 for all.
        num_nodes: over how many nodes.
        precision: how exact: "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true", the name
            that a package has registered, or a `Precision`.
        max_epochs: epochs to train; None is 1000 where nothing else limits the run; -1 is no limit.
        min_epochs: epochs before which nothing stops the run early.
        max_steps: optimizer steps to train; -1 is no limit.
        min_steps: optimizer steps before which nothing stops the run early.
        max_time: for how long: a timedelta, a dict of its arguments, or "DD:HH:MM:SS".
        accumulate_grad_batches: micro-batches of an optimizer step.
        gradient_clip_val: the largest norm (or magnitude) of gradients; None does not clip.
        gradient_clip_algorithm: "norm" (over all gradients together) or "value".
        limit_train_batches: micro-batches of an epoch: an int counts them, a float in [0, 1] is a part.
        limit_val_batches: likewise of each validation loader.
        limit_test_batches: likewise of each test loader.
        limit_predict_batches: likewise of each prediction loader.
        val_check_interval: validate every so many micro-batches (int) or parts of an epoch (float).
        check_val_every_n_epoch: validate in every n-th epoch; None lets ``val_check_interval`` count over epochs.
        num_sanity_val_steps: validation micro-batches to try before training; -1 for all.
        overfit_batches: train and validate on the first so many micro-batches, in the data's order.
        fast_dev_run: try everything with one micro-batch (True) or so many (int), without loggers.
        callbacks: one or a list; they join the default ones.
        logger: None and True are the default logger, False none; or one: "csv", "tensorboard", the name that a package
            has registered, or a `Logger`; or a list of them.
        log_every_n_steps: optimizer steps between two rows of step values; 0 for none.
        enable_progress_bar: show one, and as training ends its checkpoints and files.
        enable_checkpointing: save once an epoch, the newest being kept: a `Checkpoint` where none is given.
        enable_model_summary: print one.
        default_root_dir: where files go; the working directory by default.
        seed: of initialisation, order and every generator.
        deterministic: only deterministic algorithms; "warn" warns where there is none.
        benchmark: cudnn's benchmark mode; None leaves it as it is.
        inference_mode: evaluate in `torch.inference_mode`, else in `torch.no_grad`.
        detect_anomaly: let autograd look for NaN in every backward.
        compile: compile the steps; a dict is passed to `torch.compile`.
        use_distributed_sampler: deal data to the ranks; False leaves loaders as they are.
        sync_batchnorm: normalise over all ranks.
        reload_dataloaders_every_n_epochs: ask the module or the data module for its loaders again as every n-th epoch
            begins, for what changes from epoch to epoch: batch sizes, lengths, files; 0 keeps them.
        profiler: what measures where a run's time goes: "simple", "advanced", "pytorch", the name that a package has
            registered, or a `drivetrain.profilers.Profiler`.
        launcher: how processes start: "auto", "subprocess", "spawn", "forkserver", "fork", "ray"; the name
            that a package has registered, or a `drivetrain.launchers.Launcher`.
        environment: who started this process: "auto", "plain", "torchrun", "slurm", "mpi", "lsf", "kubeflow", the name
            that a package has registered, or an `Environment`.
        preemption_signals: on which of them, beside Ctrl-C, a run saves and ends so that it can go on later: "auto" is
            SIGTERM, and in a job of SLURM SIGUSR1 too; a name or a list of them; None takes none, Ctrl-C included.
        barebones: leave out everything but the loop.
        plugins: kept for a later version; refused.

    Raises:
        ConfigurationError: an argument is unknown, wrong, or contradicts another.
    """

    settings: Settings  # by `resolved_settings`

    @resolved_settings
    def __init__(
        self,
        *,
        strategy: StrategyName | str | Strategy = "auto",
        accelerator: str = "auto",
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        precision: PrecisionName | str | int | Precision = "32-true",
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | dict[str, float] | timedelta | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str = "norm",
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        val_check_interval: int | float | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int = 2,
        overfit_batches: int | float = 0,
        fast_dev_run: bool | int = False,
        callbacks: Callback | list[Callback] | None = None,
        logger: bool | str | Logger | Sequence[str | Logger] | None = None,
        log_every_n_steps: int = 50,
        enable_progress_bar: bool = True,
        enable_checkpointing: bool = True,
        enable_model_summary: bool = True,
        default_root_dir: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        detect_anomaly: bool = False,
        compile: bool | dict[str, Any] = False,
        use_distributed_sampler: bool = True,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        profiler: str | Profiler | None = None,
        launcher: str | Launcher = "auto",
        environment: str | Environment = "auto",
        preemption_signals: str | list[str] | None = "auto",
        barebones: bool = False,
        plugins: object | None = None,
    ) -> None:
        values = {name: setting.value for name, setting in self.settings.items()}
        chosen = frozenset(name for name, setting in self.settings.items() if setting.source != "default")
        check_devices(accelerator, devices)
        check_arguments(values, chosen)
        if fast_dev_run:
            batches = int(fast_dev_run)
            max_epochs, max_steps, num_sanity_val_steps = 1, batches, 0
            limit_train_batches = limit_val_batches = limit_test_batches = limit_predict_batches = batches
            val_check_interval, check_val_every_n_epoch, enable_checkpointing = None, 1, False
            overfit_batches = 0
        if barebones:
            enable_progress_bar = enable_checkpointing = enable_model_summary = False
            log_every_n_steps = num_sanity_val_steps = 0
        self.accelerator = accelerator
        self.devices = devices
        self.num_nodes = num_nodes
        self.max_epochs = max_epochs
        self.min_epochs = min_epochs
        self.max_steps = max_steps
        self.min_steps = min_steps
        self.max_time = max_time
        self.accumulate_grad_batches = accumulate_grad_batches
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = gradient_clip_algorithm
        self.limit_train_batches: Limit = limit_train_batches
        self.limit_val_batches: Limit = limit_val_batches
        self.limit_test_batches: Limit = limit_test_batches
        self.limit_predict_batches: Limit = limit_predict_batches
        self.val_check_interval: Limit = val_check_interval
        self.check_val_every_n_epoch = check_val_every_n_epoch
        self.num_sanity_val_steps = num_sanity_val_steps
        self.overfit_batches = overfit_batches
        self.fast_dev_run = fast_dev_run
        self.log_every_n_steps = log_every_n_steps
        self.enable_checkpointing = enable_checkpointing
        self.seed = None if seed is None else validate_seed(seed)
        self.deterministic = deterministic
        self.benchmark = benchmark
        self.inference_mode = inference_mode
        self.detect_anomaly = detect_anomaly
        self.compile = compile
        self.use_distributed_sampler = use_distributed_sampler
        self.sync_batchnorm = sync_batchnorm
        self.reload_dataloaders_every_n_epochs = reload_dataloaders_every_n_epochs
        self.launcher = launcher
        self.environment = environment
        self.preemption_signals = preemption_signals
        self.barebones = barebones
        self.default_root_dir = os.getcwd() if default_root_dir is None else os.path.expanduser(default_root_dir)
        self.strategy_setting: str | Strategy = strategy
        self.precision_setting = precision
        if not isinstance(precision, Precision):
            canonical_name(precision)  # what the device cannot do is refused once the device is known
        check_launcher(launcher)
        if not isinstance(environment, Environment):
            check_environment_name(environment)
        # Built now, so that an unknown name is refused now; "auto" waits for the number of processes.
        self.chosen_strategy = strategy if isinstance(strategy, Strategy) else None
        if isinstance(strategy, str) and strategy != "auto":
            self.chosen_strategy = strategy_by_name(strategy)
        elif not isinstance(strategy, str | Strategy):
            raise ConfigurationError(
                f"strategy={strategy!r}.", "it is a name or a Strategy.", "use strategy='ddp', or DDPStrategy(...)."
            )
        self.loggers: list[Logger] = default_loggers(logger, self.default_root_dir, off=bool(fast_dev_run) or barebones)
        self.callbacks: list[Callback] = default_callbacks(
            callbacks,
            progress_bar=enable_progress_bar,
            model_summary=enable_model_summary,
            checkpointing=enable_checkpointing,
        )
        self.given_profiler = None
        if profiler is not None:
            from drivetrain.profilers._profiler_names import profiler_of  # by who names one

            self.given_profiler = profiler_of(profiler)
        self.state = "idle"
        self.session = None
        self.searched = set()
        self.built_unseeded = False
        self._collective_calls = CollectiveCalls()
        self._log_queue: LogQueue | None = None

    # The four verbs

    def fit(
        self,
        module: TrainModule | None = None,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        allow: Sequence[str] = (),
        *,
        model: TrainModule | None = None,
    ) -> None:
        """Train ``module``.

        Args:
            module: what to train; afterwards it holds the trained weights.
            train_dataloaders: the training loader; several as a dict, a list or a `CombinedLoader`.
            val_dataloaders: one or several validation loaders.
            datamodule: where the loaders come from instead.
            ckpt_path: a checkpoint to go on from.
            allow: what may differ from the run that it goes on with: some of "data", "optimizer", "scheduler" and
                "module". What differs begins anew: an optimizer's and a scheduler's state, or the epoch on other data.
            model: ``module``, by Lightning's name.

        Raises:
            ConfigurationError: what was asked for cannot be done; before anything is changed.
        """
        if isinstance(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        given = Given(train_dataloaders, val_dataloaders, datamodule)
        self._launch("fit", _one_of("fit", module, model), given, ckpt_path, allow=check_allow(allow))

    def validate(
        self,
        module: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        *,
        model: TrainModule | None = None,
    ) -> list[dict[str, float]]:
        """Run ``validation_step`` over the validation loaders; returns each loader's reduced values.

        Args:
            module: what to validate. Without one it is the last run's, with the weights of its best checkpoint, if that
                run was a fit that keeps any.
            dataloaders: one or several loaders.
            datamodule: where the loaders come from instead.
            ckpt_path: a checkpoint whose weights are loaded first.
            verbose: print the values.
            model: ``module``, by Lightning's name.
        """
        return self._evaluate(
            "validate", _one_of("validate", module, model), dataloaders, datamodule, ckpt_path, verbose
        )

    def test(
        self,
        module: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        *,
        model: TrainModule | None = None,
    ) -> list[dict[str, float]]:
        """Run ``test_step`` over the test loaders; returns each loader's reduced values. Arguments are `validate`'s."""
        return self._evaluate("test", _one_of("test", module, model), dataloaders, datamodule, ckpt_path, verbose)

    @overload
    def predict(
        self,
        module: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        return_predictions: Literal[True] = True,
        *,
        model: TrainModule | None = None,
    ) -> list[Any]: ...

    @overload
    def predict(
        self,
        module: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        *,
        return_predictions: bool,
        model: TrainModule | None = None,
    ) -> list[Any] | None: ...

    def predict(
        self,
        module: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        return_predictions: bool = True,
        *,
        model: TrainModule | None = None,
    ) -> list[Any] | None:
        """Run ``predict_step``; returns each micro-batch's output in data-set order, on every rank.

        Args:
            module: what predicts; without one, as for `validate`.
            dataloaders: one or several loaders; with several, a list for each is returned.
            datamodule: where the loaders come from instead.
            ckpt_path: a checkpoint whose weights are loaded first.
            return_predictions: False keeps no output, exchanges none between ranks and returns None: for more than
                memory holds, which ``on_predict_batch_end`` writes as it comes.
            model: ``module``, by Lightning's name.

        Returns:
            The outputs, whose tensors are on the CPU, or None.
        """
        if isinstance(dataloaders, DataModule):
            dataloaders, datamodule = None, dataloaders
        one, ckpt_path = self._or_the_last("predict", _one_of("predict", module, model), ckpt_path)
        given = Given(None, dataloaders, datamodule)
        outputs: list[Any] | None = self._launch("predict", one, given, ckpt_path, return_predictions)
        return outputs

    def save_checkpoint(
        self, path: str | os.PathLike[str], weights_only: bool = False, trainable_only: bool = False
    ) -> None:
        session = self._running("save_checkpoint")
        self._collective_calls.check(self.strategy.control, "save_checkpoint", session.collect_stacks, every_time=True)
        session.checkpoints.save(os.fspath(path), weights_only, trainable_only)

    def defer_save(self, save: Callable[[], None]) -> None:
        self._running("defer_save").saves.ask(save)

    def write_checkpoint(
        self,
        path: str,
        weights_only: bool = False,
        background: bool = False,
        then: Callable[[], None] = lambda: None,
        identifier: str = "",
        digest: str | None = None,
        trainable_only: bool = False,
    ) -> None:
        checkpoints = self._running("write_checkpoint").checkpoints
        checkpoints.write(path, weights_only, background, then, identifier, digest, trainable_only)

    def save_after_failure(self, path: str, digest: str | None = None, trainable_only: bool = False) -> None:
        self._running("save_after_failure").checkpoints.write_after_failure(path, digest, trainable_only)

    def _evaluate(
        self,
        stage: str,
        module: TrainModule | None,
        loaders: Any,
        datamodule: DataModule | None,
        ckpt_path: Any,
        verbose: bool,
    ) -> list[dict[str, float]]:
        module, ckpt_path = self._or_the_last(stage, module, ckpt_path)
        if isinstance(loaders, DataModule):
            loaders, datamodule = None, loaders
        results: list[dict[str, float]] = self._launch(stage, module, Given(None, loaders, datamodule), ckpt_path)
        if verbose and self.is_global_zero:
            from drivetrain._runtime.terminal_output import write_output  # no import of drivetrain needs it

            for index, result in enumerate(results):
                head = stage if len(results) == 1 else f"{stage}, loader {index}"
                told = ", ".join(f"{name} {value:.6g}" for name, value in result.items())
                write_output(sys.stdout, f"{head}: {told}\n")
        return results

    def _or_the_last(self, stage: str, module: TrainModule | None, ckpt_path: Any) -> tuple[TrainModule | None, Any]:
        """``module``, or the last run's, whose best checkpoint then is what ``ckpt_path`` is by default."""
        if module is not None or self.session is None:
            return module, ckpt_path
        best = "" if self.checkpoint_callback is None else self.checkpoint_callback.best_model_path
        if ckpt_path is None and best and self.session.stage == "fit":
            logger.info("%s was given no module: it is the last run's, with the weights of %s.", stage, best)
            ckpt_path = best
        return self.session.module, ckpt_path

    def _launch(
        self,
        stage: str,
        module: Any,
        given: Given,
        ckpt_path: Any,
        return_predictions: bool = True,
        allow: tuple[str, ...] = (),
    ) -> Any:
        if module is None:
            raise ConfigurationError(
                f"{stage} was given no module.",
                "there was no run before it whose module it could be.",
                f"pass it, as Fit().{stage}(module, ...).",
            )
        if not isinstance(given.datamodule, DataModule | None):
            raise ConfigurationError(
                f"{stage} was given a {type(given.datamodule).__name__} as its datamodule.",
                "the arguments after the loaders are datamodule and ckpt_path, in this order.",
                "pass them by name: datamodule=..., ckpt_path=....",
            )
        if isinstance(module, type):
            raise ConfigurationError(
                f"{stage} was given the class {module.__name__}.",
                "it trains a TrainModule that is built, with its weights.",
                f"make one: Fit().{stage}({module.__name__}(...), ...).",
            )
        if isinstance(module, torch.utils.data.DataLoader | DataModule):
            raise ConfigurationError(
                f"{stage} was given a {type(module).__name__} in place of the module.",
                "the module comes first, the data after it.",
                f"swap them: Fit().{stage}(module, data).",
            )
        if not isinstance(module, TrainModule):
            raise ConfigurationError(
                f"{stage} was given a {type(module).__name__}.",
                "the engine drives a drivetrain.TrainModule: its steps, its optimizers, its hooks.",
                "subclass TrainModule, write training_step and configure_optimizers; to compile: Fit(compile=True).",
            )
        if is_attached(module):
            raise ConfigurationError(
                f"{stage} was called while a run of {type(module).__name__} is under way.",
                "it would take the module, its metrics and the processes away from that run.",
                "call it after the run, on every rank; validation within fit is val_check_interval's.",
            )
        self.built_unseeded = stage == "fit" and self.seed is not None and built_unseeded(module)
        path = None if ckpt_path is None else os.fspath(ckpt_path)
        self._log_queue = None  # what a run that failed has left is not the next one's
        try:
            if any(is_overridden("before_launch", one, Callback) for one in self.callbacks):
                from drivetrain._engine.trials import ask_before_launch  # by runs that try something out first

                ask_before_launch(self, stage, module, given, path)
            return launch(Request(self, stage, module, given, path, return_predictions, allow))
        except ConfigurationError as error:
            raise shortened(error)  # noqa: B904 - the same error

    # What modules and callbacks call

    def log_metrics(self, values: Mapping[str, torch.Tensor | float], step: int | None = None) -> None:
        if self.global_rank == 0 and self.loggers:
            from drivetrain._engine.log_queue import LogQueue  # by runs that log

            self._log_queue = self._log_queue or LogQueue()
            at = self.global_step if step is None else step
            self._log_queue.put(self.loggers, {"epoch": self.current_epoch, **values}, at)

    def log_histogram(self, name: str, value: Any, step: int | None = None, bins: int = 64) -> None:
        session = self._running("log_histogram")
        if self.loggers:
            from drivetrain._engine.histograms import log_histograms  # by runs that ask for them

            self._collective_calls.check(self.strategy.control, "log_histogram", session.collect_stacks)
            log_histograms(session, name, value, self.global_step if step is None else step, bins)

    def finish_logging(self) -> None:
        if self._log_queue is not None:
            self._log_queue.hand_on(wait=True)

    def print(self, *args: Any, **options: Any) -> None:
        if self.global_rank != 0:
            return
        text = " ".join(map(str, args))
        if options or not any(callback.write_line(text) for callback in self.callbacks):
            print(*args, **options)

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        session = self._running("all_gather")
        self._collective_calls.check(self.strategy.control, "all_gather", session.collect_stacks)
        return self._collective_calls.gather(self.strategy, data, sync_grads)

    def pass_over_training_data(self) -> None:
        session = self._running("pass_over_training_data")
        assert session.pass_over_training_data is not None
        session.pass_over_training_data()

    def manual_backward(self, loss: torch.Tensor) -> None:
        self.manual_step("manual_backward", "runs backward on").backward(loss)

    def clip_gradients(self, optimizer: Any, value: float, algorithm: str = "norm") -> None:
        session = self._running("clip_gradients")
        plain = optimizer.optimizer if isinstance(optimizer, OptimizerHandle) else optimizer
        session.gradient_norm = self.strategy.clip_gradients(plain, value, algorithm)


def _one_of(stage: str, module: TrainModule | None, model: TrainModule | None) -> TrainModule | None:
    if module is not None and model is not None:
        raise ConfigurationError(
            f"{stage} was given a module and a model.", "they are two names of one argument.", "pass one of them."
        )
    return module if model is None else model
