"""Trials: run a few steps on copies of the caller's objects before a run begins, and restore all state."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from drivetrain._data.loader_generators import collect_generators
from drivetrain._engine.assembly.out_of_memory import ran_out_of_memory
from drivetrain._engine.ranks.run_entry_point import run_entry_point
from drivetrain._engine.run_request import RunRequest
from drivetrain._runtime.accelerators import resolve_devices
from drivetrain._runtime.console import log_to_console
from drivetrain._runtime.generators import preserved_generators
from drivetrain._runtime.process_state import ProcessState
from drivetrain.callback import SearchesBeforeLaunch
from drivetrain.environments import resolve_environment
from drivetrain.errors import ConfigurationError
from drivetrain.loggers.silence import NullLogger
from drivetrain.precision import Precision
from drivetrain.run_context import RunContext

logger = logging.getLogger("drivetrain")

_HOST = torch.device("cpu")

Prepare = Callable[[Any, Any, Any], Any]


def run_before_launch_hooks(request: RunRequest) -> None:
    """Call ``before_launch`` of the callbacks, which may run trials."""
    trials = EngineTrials(request)
    for callback in sorted(request.trainer.callbacks, key=lambda each: -each.priority):
        if isinstance(callback, SearchesBeforeLaunch):
            callback.before_launch(trials)


class EngineTrials:
    """Runs trials for finders such as `LearningRateFinder`. The class implements `drivetrain.callback.Trials`.

    A trial runs copies of the `Fit`, the module and the data module. It runs in the existing processes, or in processes
    that are started for it. If a rank fails, the other ranks end as in any run. Data sets are not copied.

    Args:
        request: the call of `Fit` for which trials are run.
    """

    def __init__(self, request: RunRequest) -> None:
        self._request = request
        self._trainer = request.trainer
        self.stage = request.stage
        self.module = request.module
        self.datamodule = request.datamodule
        self.loaders = request.train if request.stage == "fit" else request.evaluate
        self.is_dry_run = bool(request.trainer.fast_dev_run)

    def run(self, callback: Any, steps: int, prepare: Prepare | None = None) -> None:
        _refuse_iterators(self.loaders)
        module, datamodule = copy.deepcopy(self.module), _copied_data(self.datamodule)
        with self._restored():
            loaders = self.loaders if prepare is None else prepare(module, datamodule, self.loaders)
            train, evaluate = (loaders, None) if self.stage == "fit" else (None, loaders)
            trainer = _trial_trainer(self._trainer, self.stage, callback, steps)
            run_entry_point(
                RunRequest(
                    trainer, self.stage, module, train, evaluate, datamodule, return_predictions=False, trial=True
                )
            )

    def fits(self, callback: Any, steps: int, prepare: Prepare | None = None) -> bool:
        try:
            self.run(callback, steps, prepare)
            fits = True
        except Exception as error:
            if not (ran_out_of_memory(error) or _has_no_batch(error)):
                raise
            fits = False
        cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if cuda or not fits:  # tracebacks and reference cycles hold memory that the next trial needs
            gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        return fits

    def declare_tuned(self, name: str) -> None:
        self._trainer.searched.add(name)

    def log_info(self, text: str, *values: Any) -> None:
        is_rank_0 = self._trainer.is_global_zero
        with log_to_console(is_rank_0 and not self._trainer.barebones):
            if is_rank_0:
                logger.info(text, *values)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Restore, after the block, the generators and loader state that copies share with the user's objects."""
        trainer = self._trainer
        sources = (self._request.train, self._request.evaluate, self.datamodule)
        shared = [source for source in sources if source is not None]
        # The generators of a device are created at the first use of the device, which may be in the trial.
        cuda = torch.cuda.is_initialized() or resolve_devices(trainer.accelerator, trainer.devices).type == "cuda"  # type: ignore[no-untyped-call]
        process = ProcessState(generators=True, cuda_generators=cuda and not _starts_processes(trainer))
        with process, preserved_generators(_HOST, collect_generators(*shared)), _restored_states(shared):
            yield


def _copied_data(datamodule: Any) -> Any:
    """Return a shallow copy of a data module, with shallow copies of its collections and with the same data sets."""
    if datamodule is None:
        return None
    duplicate = copy.copy(datamodule)
    for name, value in vars(duplicate).items():
        if isinstance(value, dict | list | set):
            vars(duplicate)[name] = copy.copy(value)
    return duplicate


def _trial_trainer(trainer: RunContext, stage: str, callback: Any, steps: int) -> Any:
    """Return a copy of a `Fit`, without its session, that runs ``steps`` with ``callback`` only."""
    trial: Any = copy.copy(trainer)
    trial.callbacks, trial.loggers = [callback], [NullLogger() for _ in trainer.loggers]
    trial.given_profiler = None
    trial.enable_checkpointing, trial.barebones, trial.fast_dev_run = False, True, False
    trial.log_every_n_steps = trial.num_sanity_val_steps = 0
    # Each epoch has at least one step, so ``steps`` epochs suffice. configure_optimizers may read max_epochs.
    trial.max_epochs, trial.max_steps, trial.max_time = max(steps, trainer.max_epochs or 0), steps, None
    trial.min_epochs = trial.min_steps = None
    trial.reload_dataloaders_every_n_epochs = 0
    if isinstance(trial.precision_setting, Precision):  # the trial changes the loss scale
        trial.precision_setting = copy.deepcopy(trial.precision_setting)
    if stage == "fit":
        trial.limit_val_batches, trial.val_check_interval, trial.check_val_every_n_epoch = 0, None, 1
    else:
        limit = {"validate": "limit_val_batches"}.get(stage, f"limit_{stage}_batches")
        setattr(trial, limit, steps)
    return trial


def _starts_processes(trainer: RunContext) -> bool:
    """Return whether this process may start other processes. It must not use the device before it starts them."""
    strategy = trainer.chosen_strategy
    if resolve_environment(trainer.environment).started_processes or (strategy is not None and strategy.single_process):
        return False
    return len(resolve_devices(trainer.accelerator, trainer.devices).indices) * trainer.num_nodes > 1


def _refuse_iterators(loaders: Any) -> None:
    """Raise an error if a loader can be iterated only once."""
    for part in _loader_parts(loaders):
        if hasattr(part, "__next__"):
            raise ConfigurationError(
                f"A {type(part).__name__} was given as a loader, and a trial reads batches before the run.",
                "an iterator yields each batch once, so the run would miss the batches that the trial read.",
                "pass a loader that can be iterated repeatedly: each call of its __iter__ must start again.",
            )


def _has_no_batch(error: BaseException) -> bool:
    """Return whether a loader has no batch, or a fractional limit leaves none."""
    messages = ("has no batch", "rounds down to 0")
    return isinstance(error, ConfigurationError) and any(message in error.what for message in messages)


@contextmanager
def _restored_states(shared: list[Any]) -> Iterator[None]:
    """Restore the state of loaders and data sets that have a ``state_dict``."""
    stateful = [part for loaders in shared for part in _loader_parts(loaders) if _is_stateful(part)]
    states = [copy.deepcopy(part.state_dict()) for part in stateful]
    try:
        yield
    finally:
        for part, state in zip(stateful, states, strict=True):
            part.load_state_dict(state)


def _loader_parts(loaders: Any) -> list[Any]:
    """Return the loaders, one or several, with their data sets and samplers."""
    values = list(loaders.values()) if isinstance(loaders, Mapping) else loaders
    loader_list = values if isinstance(values, list | tuple) else [values]
    names = ("dataset", "sampler", "batch_sampler")
    parts = [part for loader in loader_list for part in (loader, *(getattr(loader, name, None) for name in names))]
    return [part for part in parts if part is not None]


def _is_stateful(part: Any) -> bool:
    return all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict"))
