"""Fit: the arguments of a run, and the entry points that start one."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any

from drivetrain._config.argument_checks import check_arguments
from drivetrain._config.precedence import resolved_settings
from drivetrain._engine.assembly.defaults import default_callbacks, default_loggers, resolve_profiler
from drivetrain._engine.checkpoints.components import check_allow
from drivetrain._engine.ranks.run_entry_point import run_entry_point
from drivetrain._engine.ranks.seeding import built_unseeded
from drivetrain._engine.run_request import RunRequest
from drivetrain._module.run_handle import is_attached
from drivetrain._run_state import RunState
from drivetrain._runs.run_folder import CKPT_PATH_KEYWORDS
from drivetrain._runtime.accelerators import check_devices
from drivetrain._runtime.seed import validate_seed
from drivetrain._runtime.working_directory import resolved_path
from drivetrain.callback import Callback, SearchesBeforeLaunch
from drivetrain.data import DataModule
from drivetrain.environments import Environment, check_environment_name
from drivetrain.errors import ConfigurationError, shortened
from drivetrain.launchers import check_launcher
from drivetrain.loggers import Logger
from drivetrain.module.train_module import TrainModule
from drivetrain.precision import Precision
from drivetrain.precision.resolve import canonical_name
from drivetrain.run_context import RunContext
from drivetrain.strategies.registry import strategy_by_name
from drivetrain.strategies.strategy import Strategy

if TYPE_CHECKING:
    from drivetrain.profilers import Profiler

logger = logging.getLogger("drivetrain")


@resolved_settings
@dataclass(kw_only=True, eq=False, repr=False)
class Fit(RunContext):
    """Trains, validates, tests and predicts with a `TrainModule`. Building a `Fit` has no side effect.

    `RunContext` documents the attributes to read during and after a run, and the methods that hooks can call.

    Args:
        strategy: how the module runs on its devices: a name ("auto", "ddp", ..., or one that a package registers) or a
            `Strategy`.
        accelerator: "auto", "cpu", "gpu" ("cuda") or "mps".
        devices: the devices of each node: a count, a list of indices, "auto", or -1 for all.
        num_nodes: the number of nodes.
        precision: "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true", a name that a package
            registers, or a `Precision`.
        max_epochs: epochs to train; -1 for no limit. None means 1000 if nothing else limits the run.
        min_epochs: epochs to complete before the run may be stopped early.
        max_steps: optimizer steps to train; -1 for no limit.
        min_steps: optimizer steps to make before the run may be stopped early.
        max_time: the duration of training: a timedelta, a dict of the arguments of timedelta, or "DD:HH:MM:SS".
        accumulate_grad_batches: micro-batches per optimizer step.
        gradient_clip_val: the largest norm (or absolute value) of gradients; None for no clipping.
        gradient_clip_algorithm: "norm" (over all gradients together) or "value".
        limit_train_batches: micro-batches per epoch, as a number (int) or a fraction (float in [0, 1]).
        limit_val_batches: micro-batches of each validation loader, as a number or a fraction.
        limit_test_batches: micro-batches of each test loader, as a number or a fraction.
        limit_predict_batches: micro-batches of each prediction loader, as a number or a fraction.
        val_check_interval: micro-batches (int) or fraction of an epoch (float) between two validations.
        check_val_every_n_epoch: validate in every n-th epoch; None lets ``val_check_interval`` count across epochs.
        num_sanity_val_steps: validation micro-batches to run before training; -1 for all.
        overfit_batches: train and validate on this number (int) or fraction (float) of micro-batches, unshuffled.
        fast_dev_run: try the run with one micro-batch (True) or this many (int) per loader, without loggers.
        callbacks: a callback or a list of them, in addition to the default callbacks.
        logger: None or True for the default logger, False for none, or one or a list of "csv", "tensorboard", names
            that packages register, and `Logger` objects.
        log_every_n_steps: optimizer steps between two rows of step values; 0 for no rows.
        enable_progress_bar: show a progress bar, and list the written checkpoints and files after training.
        enable_checkpointing: add a `Checkpoint` that saves every epoch and keeps the newest, unless one is given.
        enable_model_summary: print a summary of the module.
        default_root_dir: the folder for files; the working directory by default.
        seed: the seed of initialization, sample order and every generator.
        deterministic: use deterministic algorithms only; "warn" warns about operations that have none.
        benchmark: whether cuDNN benchmarks its algorithms; None leaves torch's current setting.
        inference_mode: run `validate`, `test` and `predict` in `torch.inference_mode` instead of `torch.no_grad`.
            Validation within `fit` always uses `torch.no_grad`.
        detect_anomaly: let autograd check every backward for NaN.
        compile: compile the steps; a dict is passed to `torch.compile`.
        use_distributed_sampler: split the data over the ranks; False leaves the loaders as they are.
        sync_batchnorm: normalize over the samples of all ranks.
        reload_dataloaders_every_n_epochs: rebuild the loaders of the module or the data module every n epochs, for
            loaders whose batch size, length or files change; 0 keeps them.
        profiler: measures where a run's time goes: "simple", "advanced", "pytorch", a name that a package registers,
            or a `drivetrain.profilers.Profiler`.
        launcher: how processes are started: "auto", "subprocess", "spawn", "forkserver", "fork", "ray", a name that a
            package registers, or a `drivetrain.launchers.Launcher`.
        environment: what started this process: "auto", "plain", "torchrun", "slurm", "mpi", "lsf", "kubeflow", a name
            that a package registers, or an `Environment`.
        preemption_signals: signals that, like Ctrl-C, make a fit save and exit so that it can be resumed, and end
            `validate`, `test` and `predict` after a batch: a name or a list of names; "auto" for SIGTERM, and in a
            SLURM job also SIGUSR1; None for none, not even Ctrl-C.
        barebones: run the bare loop, without progress bar, summary, checkpoints and logging.
        plugins: a reserved name; any value except None is refused.

    Raises:
        ConfigurationError: an argument is unknown, invalid, or contradicts another.
    """

    callbacks: InitVar[Callback | list[Callback] | None] = None

    def __post_init__(
        self,
        strategy: str | Strategy,
        precision: str | int | Precision,
        logger: bool | str | Logger | Sequence[str | Logger] | None,
        default_root_dir: str | os.PathLike[str] | None,
        profiler: str | Profiler | None,
        callbacks: Callback | list[Callback] | None,
    ) -> None:
        values = {name: setting.value for name, setting in self.settings.items()}
        chosen = frozenset(name for name, setting in self.settings.items() if setting.source != "default")
        check_devices(self.accelerator, self.devices)
        check_arguments(values, chosen)
        if self.fast_dev_run:
            batches = int(self.fast_dev_run)
            self.max_epochs, self.max_steps, self.num_sanity_val_steps = 1, batches, 0
            self.limit_train_batches = self.limit_val_batches = batches
            self.limit_test_batches = self.limit_predict_batches = batches
            self.val_check_interval, self.check_val_every_n_epoch, self.enable_checkpointing = None, 1, False
            self.overfit_batches = 0
        if self.barebones:
            self.enable_progress_bar = self.enable_checkpointing = self.enable_model_summary = False
            self.log_every_n_steps = self.num_sanity_val_steps = 0
        if self.seed is not None:
            self.seed = validate_seed(self.seed)
        self.default_root_dir = resolved_path(
            os.curdir if default_root_dir is None else default_root_dir, "default_root_dir"
        )
        self.precision_setting = precision
        if not isinstance(precision, Precision):
            # This call refuses an unknown name. The support of the device is checked once the device is known.
            canonical_name(precision)
        check_launcher(self.launcher)
        if not isinstance(self.environment, Environment):
            check_environment_name(self.environment)
        # The strategy is built here to refuse an unknown name early. "auto" needs the number of processes, known later.
        self.chosen_strategy = strategy if isinstance(strategy, Strategy) else None
        if isinstance(strategy, str) and strategy != "auto":
            self.chosen_strategy = strategy_by_name(strategy)
        self.loggers = default_loggers(
            logger, self.default_root_dir, only_check=bool(self.fast_dev_run) or self.barebones
        )
        self.callbacks = default_callbacks(
            callbacks,
            progress_bar=self.enable_progress_bar,
            model_summary=self.enable_model_summary,
            checkpointing=self.enable_checkpointing,
        )
        self.given_profiler = None if profiler is None else resolve_profiler(profiler)
        self.state = "idle"
        self.run_state = RunState()
        self.searched = set()
        self.built_unseeded = False

    # Entry points: the methods that start a run

    def __repr__(self) -> str:
        return self.settings.format_call(type(self).__name__)

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
            module: the module to train, which holds the trained weights afterwards.
            train_dataloaders: the training loader, or several as a dict, a list or a `CombinedLoader`.
            val_dataloaders: one or several validation loaders.
            datamodule: a data module that provides the loaders, if none are passed.
            ckpt_path: the checkpoint to resume from: a path or URL, "last", "best" or "auto".
            allow: differences from the resumed run to accept: some of "data", "optimizer", "scheduler" and "module".
                State that no longer fits is reset: an optimizer's or a scheduler's, or the position in the epoch.
            model: another name of ``module``, as in Lightning.

        Raises:
            ConfigurationError: the call cannot be carried out. Nothing was changed.
        """
        if isinstance(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        data = train_dataloaders, val_dataloaders, datamodule
        self._launch("fit", _either("fit", module, model), *data, ckpt_path, allow=check_allow(allow))

    def validate(
        self,
        module: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        *,
        averaged: bool | None = None,
        model: TrainModule | None = None,
    ) -> list[dict[str, float]]:
        """Run ``validation_step`` over the validation loaders and return each loader's reduced values.

        Args:
            module: the module to validate; by default the module of the last run. If the last run was a fit that kept a
                best checkpoint, the default module gets the weights of this checkpoint.
            dataloaders: one or several loaders.
            datamodule: a data module that provides the loaders, if none are passed.
            ckpt_path: a checkpoint whose weights are loaded first.
            verbose: print the values.
            averaged: which weights of a checkpoint that has averages to load: True for the averages, False for the
                trained weights. None means those that the run evaluated with.
            model: another name of ``module``, as in Lightning.
        """
        module = _either("validate", module, model)
        return self._score("validate", verbose, module, dataloaders, datamodule, ckpt_path, averaged)

    def test(
        self,
        module: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        *,
        averaged: bool | None = None,
        model: TrainModule | None = None,
    ) -> list[dict[str, float]]:
        """Run ``test_step`` over the test loaders and return each loader's values. Arguments are as for `validate`."""
        module = _either("test", module, model)
        return self._score("test", verbose, module, dataloaders, datamodule, ckpt_path, averaged)

    def predict(
        self,
        module: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        return_predictions: bool = True,
        *,
        averaged: bool | None = None,
        model: TrainModule | None = None,
    ) -> list[Any] | Any:
        """Run ``predict_step`` and return each micro-batch's output in data-set order, on every rank.

        Args:
            module: the module that predicts; the default is that of `validate`.
            dataloaders: one or several loaders. With several loaders, the result contains a list for each loader.
            datamodule: a data module that provides the loaders, if none are passed.
            ckpt_path: a checkpoint whose weights are loaded first.
            return_predictions: whether to collect and return the outputs. False is meant for outputs that exceed memory
                and that ``on_predict_batch_end`` writes to disk: ranks exchange no outputs, and the result is None.
            averaged: see `validate`.
            model: another name of ``module``, as in Lightning.

        Returns:
            The outputs, with their tensors on the CPU; None if ``return_predictions`` is False.
        """
        module = _either("predict", module, model)
        return self._evaluate("predict", module, dataloaders, datamodule, ckpt_path, averaged, return_predictions)

    def _score(self, stage: str, verbose: bool, *call: Any) -> list[dict[str, float]]:
        results: list[dict[str, float]] = self._evaluate(stage, *call)
        if verbose and self.is_global_zero:
            from drivetrain._runtime.console import write_output  # only evaluations that print need it

            for index, result in enumerate(results):
                label = stage if len(results) == 1 else f"{stage}, loader {index}"
                values = ", ".join(f"{name} {value:.6g}" for name, value in result.items())
                write_output(sys.stdout, f"{label}: {values}\n")
        return results

    def _evaluate(
        self,
        stage: str,
        module: TrainModule | None,
        loaders: Any,
        datamodule: DataModule | None,
        ckpt_path: Any,
        averaged: bool | None,
        return_predictions: bool = True,
    ) -> Any:
        """Run a stage other than fit, by default with the last run's module and best checkpoint."""
        if isinstance(loaders, DataModule):
            loaders, datamodule = None, loaders
        if module is None:
            module = self.module
            best = "" if self.checkpoint_callback is None else self.checkpoint_callback.best_model_path
            if ckpt_path is None and best and self.run_state.stage == "fit":
                logger.info("%s was given no module: it uses the last run's, with the weights of %s.", stage, best)
                ckpt_path = best
        if averaged is not None and ckpt_path is None:
            raise ConfigurationError(
                f"{stage}(averaged={averaged}) without a checkpoint.",
                "averaged chooses between the weights of a checkpoint; without one, the module is used as it is.",
                "pass ckpt_path=..., or leave averaged out.",
            )
        options = {"averaged": averaged, "return_predictions": return_predictions}
        return self._launch(stage, module, None, loaders, datamodule, ckpt_path, **options)

    def _launch(
        self,
        stage: str,
        module: Any,
        train: Any,
        evaluate: Any,
        datamodule: DataModule | None,
        ckpt_path: Any,
        **options: Any,
    ) -> Any:
        """Carry out the `RunRequest` with these ``options``."""
        if not isinstance(datamodule, DataModule | None):
            raise ConfigurationError(
                f"{stage} was given a {type(datamodule).__name__} as its datamodule.",
                "the arguments after the loaders are datamodule and ckpt_path, in this order.",
                "pass them by name: datamodule=..., ckpt_path=....",
            )
        check_module(stage, module)
        if self.state.endswith("ing"):  # a hook calls it with another module
            raise _under_way(stage, self.module)
        self.built_unseeded = stage == "fit" and self.seed is not None and built_unseeded(module)
        path = None if ckpt_path is None else _checkpoint_path(ckpt_path)
        self._log_queue = None  # discards the rows that a failed run has not delivered
        request = RunRequest(self, stage, module, train, evaluate, datamodule, path, **options)
        try:
            if any(isinstance(callback, SearchesBeforeLaunch) for callback in self.callbacks):
                from drivetrain._engine.trials import run_before_launch_hooks  # only runs with trials need it

                run_before_launch_hooks(request)
            return run_entry_point(request)
        except ConfigurationError as error:
            raise shortened(error)  # noqa: B904 - `shortened` returns the same error


def check_module(call: str, module: Any) -> None:
    """Check that ``module`` can be run.

    Raises:
        ConfigurationError: it is None or no `TrainModule`, or it is in a run.
    """
    if not isinstance(module, TrainModule):
        is_class = isinstance(module, type)
        given = f"the class {module.__name__}" if is_class else f"a {type(module).__name__}"
        raise ConfigurationError(
            f"{call} was given no module." if module is None else f"{call} was given {given} in place of the module.",
            "the engine calls the steps and the hooks of a drivetrain.TrainModule; data is the second argument.",
            "subclass TrainModule, write training_step and configure_optimizers, and call "
            f"{call}({module.__name__ if is_class else 'Model'}(...), data); to compile: Fit(compile=True).",
        )
    if is_attached(module):
        raise _under_way(call, module)


def _under_way(call: str, module: TrainModule) -> ConfigurationError:
    return ConfigurationError(
        f"{call} was called while a run of {type(module).__name__} is under way.",
        "both runs would use the same module, metrics and processes.",
        f"call {call} after the run, on every rank; within fit, val_check_interval sets when to validate, "
        "and the callbacks LearningRateFinder and BatchSizeFinder search.",
    )


def _checkpoint_path(ckpt_path: str | os.PathLike[str]) -> str:
    """Return a keyword or URL unchanged, and a local path as an absolute one."""
    if ckpt_path in CKPT_PATH_KEYWORDS:
        return str(ckpt_path)
    return resolved_path(ckpt_path, "ckpt_path")


def _either(stage: str, module: TrainModule | None, model: TrainModule | None) -> TrainModule | None:
    if module is not None and model is not None:
        raise ConfigurationError(
            f"{stage} was given a module and a model.", "both names stand for one argument.", "pass one of them."
        )
    return module if model is None else model
