"""Trials: a few steps of what a call asks for, run on copies before it begins, and everything put back."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from drivetrain._engine.collective_calls import CollectiveCalls
from drivetrain._engine.console_logging import log_to_console
from drivetrain._engine.launch import Request, launch
from drivetrain._engine.out_of_memory import failed_for_memory
from drivetrain._engine.run_state import RunState
from drivetrain._engine.stage_loaders import Given
from drivetrain._engine.topology import environment_of
from drivetrain._loops.hooks import is_overridden
from drivetrain._runtime.accelerators import resolve_devices
from drivetrain._runtime.generators import preserved_generators
from drivetrain._runtime.process_state import ProcessState
from drivetrain.callback import Callback
from drivetrain.data._loader_generators import own_generators
from drivetrain.errors import ConfigurationError
from drivetrain.loggers._null_logger import SilentLogger
from drivetrain.module.train_module import TrainModule
from drivetrain.precision import Precision

logger = logging.getLogger("drivetrain")

_HOST = torch.device("cpu")

Prepare = Callable[[Any, Any, Any], Any]


def ask_before_launch(
    trainer: RunState, stage: str, module: TrainModule, given: Given, ckpt_path: str | None = None
) -> None:
    """Let callbacks try out what they want to know before a run begins."""
    trials = EngineTrials(trainer, stage, module, given, ckpt_path)
    for callback in sorted(trainer.callbacks, key=lambda one: -one.priority):
        if is_overridden("before_launch", callback, Callback):
            callback.before_launch(trials)


class EngineTrials:
    """Runs trials; `drivetrain.run_context.Trials` says what a finder may ask of it.

    A trial is a run of a copy of the `Fit`, of the module and of the data module, in the processes that are there or in
    ones that are started for it, so that a rank that fails takes the others along as in any run. Tensors of data sets
    are not copied.

    Args:
        trainer: whose settings hold.
        stage: "fit", "validate", "test" or "predict".
        module: what the call was given.
        given: its loaders or data module.
        ckpt_path: what it was to go on from.
    """

    def __init__(
        self, trainer: RunState, stage: str, module: TrainModule, given: Given, ckpt_path: str | None = None
    ) -> None:
        self._trainer = trainer
        self._given = given
        self.stage = stage
        self.module = module
        self.datamodule = given.datamodule
        self.loaders = given.train if stage == "fit" else given.evaluate
        self.ckpt_path = ckpt_path
        self.is_dry_run = bool(trainer.fast_dev_run)

    def run(self, callback: Any, steps: int, prepare: Prepare | None = None) -> None:
        _refuse_one_shot(self.loaders)
        module, datamodule = copied(self.module), _apart(self.datamodule)
        with self._kept():
            loaders = self.loaders if prepare is None else prepare(module, datamodule, self.loaders)
            fits = self.stage == "fit"
            given = Given(loaders if fits else None, None if fits else loaders, datamodule)
            trainer = _trial_of(self._trainer, self.stage, callback, steps)
            launch(Request(trainer, self.stage, module, given, None, return_predictions=False, trial=True))

    def fits(self, callback: Any, steps: int, prepare: Prepare | None = None) -> bool:
        try:
            self.run(callback, steps, prepare)
            fits = True
        except Exception as error:
            if not (failed_for_memory(error) or _has_no_batch(error)):
                raise
            fits = False
        cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if cuda or not fits:  # frames of what failed, and circles in what did not, hold memory that the next one needs
            gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        return fits

    def searches(self, name: str) -> None:
        self._trainer.searched.add(name)

    def say(self, text: str, *values: Any) -> None:
        first = self._trainer.is_global_zero
        with log_to_console(first and not self._trainer.barebones):
            if first:
                logger.info(text, *values)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep what the copies share with the user's objects: generators, and where stateful objects stand."""
        trainer = self._trainer
        shared = [one for one in (self._given.train, self._given.evaluate, self.datamodule) if one is not None]
        # A device's generators start with the process's first use of it, which would be the trial's.
        cuda = torch.cuda.is_initialized() or resolve_devices(trainer.accelerator, trainer.devices).type == "cuda"  # type: ignore[no-untyped-call]
        process = ProcessState(generators=True, cuda_generators=cuda and not _starts_processes(trainer))
        with process, preserved_generators(_HOST, own_generators(*shared)), _kept_states(shared):
            yield


def copied(module: TrainModule) -> TrainModule:
    """Return a copy of a module that shares nothing with it.

    Raises:
        ConfigurationError: something in it cannot be copied.
    """
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise ConfigurationError(
            f"{type(module).__name__} cannot be copied: {type(error).__name__}: {error}.",
            "a trial trains a copy, so that the module stays as it is to the last bit.",
            "build in setup or configure_model what cannot be copied (locks, files, tensors of a graph).",
        ) from error


def _apart(datamodule: Any) -> Any:
    """Return a copy of a data module: what is assigned to it is its own, its data sets are the same objects."""
    if datamodule is None:
        return None
    apart = copy.copy(datamodule)
    for name, value in vars(apart).items():
        if isinstance(value, dict | list | set):
            vars(apart)[name] = copy.copy(value)
    return apart


def _trial_of(trainer: RunState, stage: str, callback: Any, steps: int) -> Any:
    """Return a copy of a `Fit` that runs ``steps``, and tells nobody of it but ``callback``."""
    trial: Any = copy.copy(trainer)
    trial.callbacks, trial.loggers = [callback], [SilentLogger() for _ in trainer.loggers]
    trial.session, trial.state = None, "idle"
    trial._log_queue, trial._collective_calls = None, CollectiveCalls()
    trial.given_profiler = None
    trial.enable_checkpointing, trial.barebones, trial.fast_dev_run = False, True, False
    trial.log_every_n_steps = trial.num_sanity_val_steps = 0
    # An epoch has a step at least, or none ever comes; configure_optimizers may read it, to build a schedule.
    trial.max_epochs, trial.max_steps, trial.max_time = max(steps, trainer.max_epochs or 0), steps, None
    trial.min_epochs = trial.min_steps = None
    trial.reload_dataloaders_every_n_epochs = 0
    if isinstance(trial.precision_setting, Precision):  # whose loss scale moves
        trial.precision_setting = copy.deepcopy(trial.precision_setting)
    if stage == "fit":
        trial.limit_val_batches, trial.val_check_interval, trial.check_val_every_n_epoch = 0, None, 1
    else:
        limit = {"validate": "limit_val_batches"}.get(stage, f"limit_{stage}_batches")
        setattr(trial, limit, steps)
    return trial


def _starts_processes(trainer: RunState) -> bool:
    """Whether this process may start others, by forking it too, and is not to use the device before it does."""
    strategy = trainer.chosen_strategy
    if environment_of(trainer.environment).started_us or (strategy is not None and strategy.single_process):
        return False
    return len(resolve_devices(trainer.accelerator, trainer.devices).indices) * trainer.num_nodes > 1


def _refuse_one_shot(loaders: Any) -> None:
    for one in _parts(loaders):
        if hasattr(one, "__next__"):
            raise ConfigurationError(
                f"A {type(one).__name__} was given as a loader, and batches are to be tried out first.",
                "an iterator gives each batch once: those of the trial would be missing from the run.",
                "give a loader that can be gone through again: an object whose __iter__ begins anew.",
            )


def _has_no_batch(error: BaseException) -> bool:
    """Whether a loader has no batch, or a limit that is a part of it takes none."""
    return isinstance(error, ConfigurationError) and any(
        said in error.what for said in ("has no batch", "is none at all")
    )


@contextmanager
def _kept_states(shared: list[Any]) -> Iterator[None]:
    """Put objects with a ``state_dict`` back: loaders and data sets that know where they stand."""
    stateful = [one for each in shared for one in _parts(each) if _keeps_place(one)]
    states = [copy.deepcopy(one.state_dict()) for one in stateful]
    try:
        yield
    finally:
        for one, state in zip(stateful, states, strict=True):
            one.load_state_dict(state)


def _parts(shared: Any) -> list[Any]:
    several = list(shared.values()) if isinstance(shared, Mapping) else shared
    several = several if isinstance(several, list | tuple) else [several]
    names = ("dataset", "sampler", "batch_sampler")
    found = [one for each in several for one in (each, *(getattr(each, name, None) for name in names))]
    return [one for one in found if one is not None]


def _keeps_place(one: Any) -> bool:
    return all(callable(getattr(one, name, None)) for name in ("state_dict", "load_state_dict"))
