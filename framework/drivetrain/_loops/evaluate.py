"""The evaluation loop of validation and test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drivetrain._data.batch_source import BatchSource
from drivetrain._loops.evaluation_batches import evaluation_batches
from drivetrain._loops.evaluation_interrupt import EarlyExit
from drivetrain._loops.hooks import HookTable, is_overridden
from drivetrain._loops.progress_reports import Reporting
from drivetrain._loops.step_arguments import StepArguments, WrappedModule
from drivetrain._loops.uneven_inputs import without_side_effects
from drivetrain._module.module_hooks import ModuleHooks
from drivetrain._run_state import Position
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule

HOOK_STAGE_NAMES = {"validate": "validation", "test": "test", "predict": "predict"}
"""Maps a stage to the word in its hook and step names (on_validation_start, validation_step)."""


@dataclass(frozen=True, slots=True)
class EvaluationData:
    """The data of an evaluation.

    Attributes:
        sources: the source of the batches of each loader.
        limits: reads the sizes of the loaders' data again, and returns the maximal number of micro-batches of each
            loader; None for all. Collective. It is called after the hooks that begin an evaluation.
        move: ``move(batch, dataloader_idx)`` moves a batch to the device; None if batches are already on the device.
    """

    sources: Sequence[BatchSource]
    limits: Callable[[], Sequence[int | None]]
    move: Callable[[Any, int], Any] | None


@dataclass(frozen=True, slots=True)
class EvaluationMode:
    """How the module is prepared for an evaluation, and how the evaluation can be interrupted.

    Attributes:
        sync_buffers: gives every rank the buffers of rank 0.
        inference_mode: whether to run in `torch.inference_mode` rather than `torch.no_grad`.
        early_exit: lets the ranks interrupt the evaluation; None if the evaluation always runs to its end.
    """

    sync_buffers: Callable[[], object]
    inference_mode: bool
    early_exit: EarlyExit | None = None


_NO_GRADIENT_MESSAGE = "does not require grad and does not have a grad_fn"
"""Text of torch's error for a backward of a tensor that was computed without gradients."""


@contextmanager
def evaluating(module: TrainModule, name: str, no_gradient: AbstractContextManager[Any]) -> Iterator[None]:
    """Put the module into eval mode, without gradients; restore the training flag of every child at the end.

    Args:
        module: the module, whose overrides of ``on_<name>_model_eval`` and ``on_<name>_model_train`` set the modes.
        name: the stage's name in hooks: "validation", "test" or "predict".
        no_gradient: the context without gradients.
    """
    training_flags = [(child, child.training) for child in module.modules()]
    sets_modes_after = is_overridden(f"on_{name}_model_train", module, ModuleHooks)
    try:
        with no_gradient:
            getattr(module, f"on_{name}_model_eval")()
            yield
            if sets_modes_after:
                getattr(module, f"on_{name}_model_train")()
    except BaseException as error:
        sets_modes_after = False  # the hook may not have been called
        if isinstance(error, RuntimeError) and _NO_GRADIENT_MESSAGE in str(error):
            setting = ", and give Fit(inference_mode=False)" if isinstance(no_gradient, torch.inference_mode) else ""
            raise ConfigurationError(
                f"{type(module).__name__} ran a backward in {name}.",
                "evaluations run without gradients, so the loss requires none.",
                f"compute the loss within 'with torch.enable_grad():'{setting}; or move the backward to training_step.",
            ) from error
        raise
    finally:
        for child, training in training_flags:
            if not sets_modes_after:
                child.training = training
            # A buffer that a step created in inference mode could not be written to after the evaluation.
            for buffer_name, buffer in child._buffers.items():
                if buffer is not None and buffer.is_inference():
                    child._buffers[buffer_name] = buffer.clone()


class LoaderLoop:
    """What validation, test and prediction have in common: they run a step of the module over one or several loaders.

    Args:
        stage: "validate", "test" or "predict".
        wrapped: the module and the strategy that runs it.
        hooks: the overridden hooks.
        position: the running loop and the batch being processed, which this loop sets.
        data: the loaders, their limits and the move to the device.
        reporting: the objects to which values and progress are reported.
        mode: how the module is prepared, and how the loop can be interrupted.
    """

    def __init__(
        self,
        stage: str,
        wrapped: WrappedModule,
        *,
        hooks: HookTable,
        position: Position,
        data: EvaluationData,
        reporting: Reporting,
        mode: EvaluationMode,
    ) -> None:
        self._stage = stage
        self._name = name = HOOK_STAGE_NAMES[stage]
        self._module = module = wrapped.module
        self._runner = wrapped.runner
        self._strategy = wrapped.strategy
        self._metrics = reporting.metrics
        self._position = position
        self._data = data
        self._several = len(data.sources) > 1
        self._reporting = reporting
        self._mode = mode
        self._step = getattr(module, f"{name}_step")
        # The default predict_step is not passed the loader's index, since its result does not depend on the loader.
        takes_index = self._several and is_overridden(f"{name}_step", module, TrainModule)
        self._arguments = StepArguments(self._step, takes_index)
        self._hooks = hooks
        self._batch_start = getattr(hooks, f"on_{name}_batch_start")
        self._batch_end = getattr(hooks, f"on_{name}_batch_end")

    def _evaluating(self) -> AbstractContextManager[None]:
        self._mode.sync_buffers()
        no_gradient = torch.inference_mode() if self._mode.inference_mode else torch.no_grad()
        return evaluating(self._module, self._name, no_gradient)

    def _title(self, word: str, index: int) -> str:
        """Return the name of a loader in messages."""
        return f"{word} loader {index}" if self._several else f"{word} loader"

    def _join(self, host_batch: Any, batch_idx: int, index: int) -> None:
        """Join the forwards of the other ranks with a batch that does not count: run the step without side effects."""
        batch = host_batch if self._data.move is None else self._data.move(host_batch, index)
        with without_side_effects(self._module, self._metrics):
            self._runner(self._step, *self._arguments(batch, batch_idx, index))


class EvaluateLoop(LoaderLoop):
    """Runs ``validation_step`` or ``test_step``, and reduces the values that they log."""

    def run(self) -> list[dict[str, float]]:
        """Evaluate all loaders; return each loader's reduced values, or [] if the ranks exit before the end."""
        metrics, hooks, name, reporter = self._metrics, self._hooks, self._name, self._reporting.progress_reporter
        early_exit = self._mode.early_exit
        if early_exit is not None and early_exit.exits_immediately(name):
            return []
        with self._evaluating():
            metrics.enter(self._stage)
            if early_exit is not None:
                early_exit.begin()
            for hook in getattr(hooks, f"on_{name}_start"):
                hook()
            for hook in getattr(hooks, f"on_{name}_epoch_start"):
                hook()
            if early_exit is not None:
                early_exit.mark_start_hooks_done()
            had_data = []
            if reporter is not None:
                reporter.before = 0
            for index, (source, limit) in enumerate(zip(self._data.sources, self._data.limits(), strict=True)):
                metrics.dataloader_idx = index if self._several else None
                metrics.had_data = False
                if not self._evaluate(index, source, limit):
                    return []
                had_data.append(metrics.had_data)
            metrics.had_data = all(had_data)
            metrics.dataloader_idx = None
            results = self._reduce()
            epoch_end = getattr(hooks, f"on_{name}_epoch_end")
            for hook in epoch_end:
                hook()
            if epoch_end:
                results = self._reduce()  # includes the values that the epoch_end hooks logged
            metrics.reset_metrics()
            numbers = {key: float(value) for key, value in results.items()}
            loaders = {entry.epoch_name: entry.loader_idx for entry in metrics.entries.values()}
            self._log_values(numbers)
            metrics.enter(None)  # refuses values logged from here on, which no logger would receive
            for hook in getattr(hooks, f"on_{name}_end"):
                hook()
            if early_exit is not None:
                early_exit.end()
        return _by_loader(numbers, len(self._data.sources), loaders)

    def _evaluate(self, index: int, source: BatchSource, limit: int | None) -> bool:
        """Evaluate one loader; return False if the ranks exit early, after undoing the effects of the evaluation."""
        metrics, arguments, runner, step = self._metrics, self._arguments, self._runner, self._step
        early_exit, reporter, move = self._mode.early_exit, self._reporting.progress_reporter, self._data.move
        name, count, position = self._title(self._name, index), 0, self._position
        previous = position.enter("evaluation")
        for batch_idx, (host_batch, shard) in enumerate(evaluation_batches(source, self._strategy, name, limit)):
            position.batch_idx = batch_idx
            if reporter is not None and batch_idx and batch_idx % reporter.every == 0:
                reporter.report(batch_idx)
            if shard.joins:
                # This rank has no samples in the batch, and only joins the forwards of the other ranks, as padding.
                # Repeated batches of a joining rank have start == -1 and do not count.
                count += shard.start >= 0
                if self._strategy.collective_forward:
                    self._join(host_batch, batch_idx, index)
                if early_exit is not None and early_exit.stop.counts_points and early_exit.exits():
                    break
                continue
            count += 1
            batch = host_batch if move is None else move(host_batch, index)
            metrics.batch = batch
            metrics.samples = shard.samples
            metrics.had_data = True
            hook_arguments = (batch, batch_idx, index) if self._several else (batch, batch_idx)
            for hook in self._batch_start:
                hook(*hook_arguments)
            outputs = runner(step, *arguments(batch, batch_idx, index))
            for hook in self._batch_end:
                hook(outputs, *hook_arguments)
            if early_exit is not None and early_exit.stop.counts_points and early_exit.exits():
                break
        metrics.batch = None
        position.leave(previous)
        if early_exit is not None and early_exit.has_exited(source.shards_known):
            early_exit.undo()
            early_exit.end()
            return False
        if reporter is not None:
            reporter.before += count
        self._reporting.lengths.note(name, source.length, count, ended=limit is None or count < limit)
        return True

    def _reduce(self) -> dict[str, Tensor]:
        return self._reporting.reduce_epoch(self._strategy.control, "the reduction of an evaluation's values")

    def _log_values(self, numbers: dict[str, float]) -> None:
        log = self._reporting.log
        if log is None:
            return
        names = {entry.epoch_name for entry in self._metrics.entries.values() if entry.logger}
        values: dict[str, Tensor | float] = {key: number for key, number in numbers.items() if key in names}
        values.update(self._metrics.flush_steps())
        if values:
            log(values)


def _by_loader(numbers: dict[str, float], count: int, loaders: Mapping[str, int | None]) -> list[dict[str, float]]:
    """Return the values by loader; a value logged outside of any loader's batches is returned for every loader."""
    results: list[dict[str, float]] = [{} for _ in range(count)]
    for key, number in numbers.items():
        loader = loaders.get(key)
        for index, result in enumerate(results):
            if loader is None or loader == index:
                result[key] = number
    return results
