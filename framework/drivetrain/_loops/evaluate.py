"""What validation, test and prediction have in common, and the loop of validation and test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch

from drivetrain._data.batch_copies import copy_containers
from drivetrain._data.batch_source import NO_BATCH, BatchSource, LimitedLoader
from drivetrain._data.sharding import BatchShare
from drivetrain._loops.batch_mover import Move
from drivetrain._loops.data_checks import compare_order
from drivetrain._loops.evaluation_interrupt import EarlyExit
from drivetrain._loops.hooks import HookTable, is_overridden
from drivetrain._loops.loop_log import LoopLog
from drivetrain._loops.step_calls import bind_step
from drivetrain._loops.uneven_inputs import LoggingPaused, without_side_effects
from drivetrain._loops.windows import Batches
from drivetrain._metrics import MetricStore
from drivetrain._module.module_hooks import ModuleHooks
from drivetrain._run_state import CurrentBatch
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule
from drivetrain.strategies.strategy import StepRunner, Strategy

HOOK_STAGE_NAMES = {"validate": "validation", "test": "test", "predict": "predict"}
"""Maps a stage to the word in its hook and step names (on_validation_start, validation_step)."""


@dataclass(eq=False)
class LoaderLoop:
    """Runs a step of the module over one or several loaders.

    Attributes:
        stage: "validate", "test" or "predict".
        module: the user's module.
        runner: the function that `Strategy.setup_module` returned, which calls a step of the module.
        strategy: the strategy that runs the module.
        hooks: the overridden hooks.
        current: the running loop and the batch being processed, which this loop sets.
        log: reduces the logged values and sends them to the loggers.
        sources: the source of the batches of each loader.
        get_limits: reads the sizes of the loaders' data again, and returns the maximal number of micro-batches of each
            loader; None for all. Collective. It is called after the hooks that begin an evaluation.
        move: ``move(batch, dataloader_idx)`` moves a batch to the device; None if batches are already on the device.
        sync_buffers: gives every rank the buffers of rank 0.
        no_gradient: returns the context without gradients: `torch.no_grad` or `torch.inference_mode`.
        early_exit: lets the ranks interrupt the loop; None if it always runs to its end.
    """

    stage: str
    module: TrainModule
    runner: StepRunner
    strategy: Strategy
    hooks: HookTable
    current: CurrentBatch
    log: LoopLog
    sources: Sequence[BatchSource]
    get_limits: Callable[[], Sequence[int | None]]
    move: Move | None
    sync_buffers: Callable[[], object]
    no_gradient: Callable[[], AbstractContextManager[Any]]
    early_exit: EarlyExit | None

    def __post_init__(self) -> None:
        self.metrics = self.log.metrics
        self._name = name = HOOK_STAGE_NAMES[self.stage]
        self._several = len(self.sources) > 1
        self._step = bind_step(self.runner, getattr(self.module, f"{name}_step"), self._several)
        self._batch_start = self._hooks("batch_start")
        self._batch_end = self._hooks("batch_end")
        self._batches_before = 0  # of the loaders that precede the current loader
        self._has_exited = False

    def _hooks(self, when: str) -> tuple[Callable[..., Any], ...]:
        calls: tuple[Callable[..., Any], ...] = getattr(self.hooks, f"on_{self._name}_{when}")
        return calls

    def _evaluating(self) -> AbstractContextManager[None]:
        self.sync_buffers()
        return evaluating(self.module, self._name, self.no_gradient())

    def _loaders(self) -> Iterator[tuple[int, BatchSource, int | None]]:
        """Yield the index, the source and the limit of each loader."""
        self._batches_before = 0
        limits = self.get_limits()
        for index, source in enumerate(self.sources):
            yield index, source, limits[index]

    def _batches(
        self, index: int, source: BatchSource, limit: int | None, *, first: int = 0, equal_counts: bool
    ) -> Iterator[tuple[int, Any, BatchShare]]:
        """Yield the batches of a loader from number ``first`` on, each with its number and share, or until ranks exit.

        Args:
            index: the loader's index.
            source: the loader's batches.
            limit: the number of micro-batches at which every rank stops; None for all.
            first: the number of the first micro-batch.
            equal_counts: whether all ranks have the same number of micro-batches.
        """
        current, early_exit, count = self.current, self.early_exit, first
        word = "prediction" if self.stage == "predict" else self._name
        title = f"{word} loader {index}" if self._several else f"{word} loader"
        previous = current.enter("prediction" if self.stage == "predict" else "evaluation")
        batches = evaluation_batches(source, self.strategy, title, limit, first)
        for batch_idx, (batch, share) in enumerate(batches, first):
            current.batch_idx = batch_idx
            if self.log.write_progress and batch_idx > first and (batch_idx - first) % self.log.every == 0:
                self.log.report(self._batches_before + batch_idx)
            # A rank without data repeats its last batch, with start < 0, to join collectives. This does not count.
            count += not share.joins or share.start >= 0
            yield batch_idx, batch, share
            if early_exit is not None and early_exit.stop.counts_points and early_exit.exits():
                break
        current.leave(previous)
        self._has_exited = early_exit is not None and early_exit.has_exited(equal_counts)
        if not self._has_exited:
            self._batches_before += count
            self.log.lengths.note(title, source.length, count, ended=limit is None or count < limit)

    def _run_step(self, host_batch: Any, batch_idx: int, index: int, samples: int | None) -> Any:
        """Run the step, and the hooks around it; return the step's output."""
        batch = host_batch if self.move is None else self.move(host_batch, index)
        self.metrics.batch, self.metrics.samples = batch, samples
        arguments = (batch, batch_idx, index) if self._several else (batch, batch_idx)
        for hook in self._batch_start:
            hook(*arguments)
        output = self._step(*arguments)
        for hook in self._batch_end:
            hook(output, *arguments)
        return output

    def _join(self, host_batch: Any, batch_idx: int, index: int) -> None:
        """Join the forwards of the other ranks with a batch that does not count: run the step without side effects."""
        batch = host_batch if self.move is None else self.move(host_batch, index)
        with without_side_effects(self.module, self.metrics):
            self._step(*((batch, batch_idx, index) if self._several else (batch, batch_idx)))


class EvaluateLoop(LoaderLoop):
    """Runs ``validation_step`` or ``test_step``, and reduces the values that they log."""

    def run(self) -> list[dict[str, float]]:
        """Evaluate all loaders; return each loader's reduced values, or [] if the ranks exit before the end."""
        metrics, name, early_exit = self.metrics, self._name, self.early_exit
        if early_exit is not None and early_exit.exits_immediately(name):
            return []
        with self._evaluating():
            metrics.enter(self.stage)
            if early_exit is not None:
                early_exit.begin()
            for hook in (*self._hooks("start"), *self._hooks("epoch_start")):
                hook()
            had_data = []
            for index, source, limit in self._loaders():
                metrics.dataloader_idx = index if self._several else None
                metrics.had_data = False
                self._evaluate(index, source, limit)
                if early_exit is not None and self._has_exited:
                    early_exit.undo()
                    early_exit.end()
                    return []
                had_data.append(metrics.had_data)
            metrics.had_data = all(had_data)
            metrics.dataloader_idx = None
            results = self.log.reduce_epoch("the reduction of an evaluation's values")
            epoch_end = self._hooks("epoch_end")
            for hook in epoch_end:
                hook()
            if epoch_end:
                results = self.log.reduce_epoch("the reduction of an evaluation's values")  # with those of the hooks
            metrics.reset_metrics()
            numbers = {key: float(value) for key, value in results.items()}
            loaders = {entry.epoch_name: entry.loader_idx for entry in metrics.entries.values()}
            self.log.flush_epoch(numbers)
            metrics.enter(None)  # refuses values logged from here on, which no logger would receive
            for hook in self._hooks("end"):
                hook()
            if early_exit is not None:
                early_exit.end()
        return _by_loader(numbers, len(self.sources), loaders)

    def _evaluate(self, index: int, source: BatchSource, limit: int | None) -> None:
        for batch_idx, batch, share in self._batches(index, source, limit, equal_counts=source.shares_known):
            if not share.joins:
                self.metrics.had_data = True
                self._run_step(batch, batch_idx, index, share.samples)
            elif self.strategy.collective_forward:
                # This rank has no samples in the batch, and only joins the forwards of the other ranks, as padding.
                self._join(batch, batch_idx, index)
        self.metrics.batch = None


def _by_loader(numbers: dict[str, float], count: int, loaders: Mapping[str, int | None]) -> list[dict[str, float]]:
    """Return the values by loader; a value logged outside of any loader's batches is returned for every loader."""
    results: list[dict[str, float]] = [{} for _ in range(count)]
    for key, number in numbers.items():
        loader = loaders.get(key)
        for index, result in enumerate(results):
            if loader is None or loader == index:
                result[key] = number
    return results


# The module in evaluation

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


# The batches that a rank evaluates, predicts or passes over without training


def evaluation_batches(
    source: BatchSource, strategy: Strategy, name: str, limit: int | None, first: int = 0
) -> Batches:
    """Return a rank's batches from number ``first`` on.

    If forwards are collective and ranks may have different numbers of batches, a rank that has no batch left repeats
    its last one until all ranks have finished. It only joins in that batch, whose share has ``start == -1``.

    Args:
        source: yields this rank's batches.
        strategy: the strategy.
        name: the loader's name, for errors.
        limit: the number of micro-batches at which every rank stops; None for all.
        first: the number of the first micro-batch.
    """
    batches = source.epoch(0, first)
    if source.needs_order_check:
        batches = chain(_compared(batches, source, name, strategy), batches)
    if not source.shares_known and strategy.collective_forward and strategy.world_size > 1:
        batches = _until_all_ranks_finish(batches, strategy)
    return batches if limit is None else islice(batches, limit - first)


def _compared(batches: Batches, source: BatchSource, name: str, strategy: Strategy) -> Batches:
    """Yield the first batch, after the ranks have compared what they read."""
    first_batch = next(batches, None)
    compare_order(source, name, strategy)
    if first_batch is not None:
        yield first_batch


def _until_all_ranks_finish(batches: Batches, strategy: Strategy) -> Batches:
    """Yield ``batches``, then repeat the last one while any rank has data. Each batch costs one small all-reduce."""
    control, last = strategy.control, NO_BATCH
    while True:
        batch_and_share = next(batches, None)
        (ranks,) = control.all_reduce_async(torch.tensor([float(batch_and_share is not None)]))().tolist()
        if not ranks:
            return
        if batch_and_share is not None:
            last = copy_containers(batch_and_share[0])  # a step may modify the original
            yield batch_and_share
        elif last is not NO_BATCH:
            yield copy_containers(last), BatchShare(0, None, True, start=-1)
        else:
            raise ConfigurationError(
                f"Rank {control.rank} got no batch from a loader that yields batches on other ranks.",
                "under this strategy every rank takes part in each forward, for which it needs a batch.",
                "split the data so that every rank gets at least one batch.",
            )


def pass_over_training_data(
    data: LimitedLoader,
    module: TrainModule,
    runner: StepRunner,
    strategy: Strategy,
    metrics: MetricStore,
    move: Move | None,
) -> None:
    """Call ``training_step`` on an epoch's micro-batches, without gradients, hooks or logging. Collective.

    This recomputes statistics such as those of batch norm.

    Args:
        data: the training batches.
        module: the module, in train mode.
        runner: calls a step of the module.
        strategy: the strategy that runs the module.
        metrics: the logged values, to which nothing is added.
        move: moves a batch to the device; None if batches are already on the device.
    """
    step = bind_step(runner, module.training_step)
    metrics.enter("train", reset=False)
    paused = LoggingPaused(metrics)
    try:
        with torch.no_grad():
            batches = evaluation_batches(data.source, strategy, "training loader", data.limit)
            for batch_idx, (host_batch, share) in enumerate(batches):
                if share.joins and not strategy.collective_forward:
                    continue
                batch = host_batch if move is None else move(host_batch, 0)
                with without_side_effects(module, metrics) if share.joins else nullcontext():
                    step(batch, batch_idx)
    finally:
        paused.end()
        metrics.enter(None)
