"""Profiling: wraps the parts of a run in timed phases, once, before the first step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from inspect import unwrap
from typing import Any, TypeVar, cast

from torch import Tensor

from drivetrain._engine.batches import BatchMover
from drivetrain._engine.run_folder import RunFolder
from drivetrain._engine.run_parts import NoProfiling, RunRequest
from drivetrain._loops.hooks import HookTable
from drivetrain._loops.manual_step import ManualStep
from drivetrain._loops.save_requests import SaveRequests
from drivetrain._loops.step import AutomaticStep, TrainStep
from drivetrain._loops.train import TrainLoop
from drivetrain._loops.windows import MicroBatch
from drivetrain.checkpoint._folders import child
from drivetrain.data._batch_source import BatchSource
from drivetrain.profilers import ProfiledRun, Profiler
from drivetrain.run_context import RunContext
from drivetrain.strategies.strategy import Strategy

logger = logging.getLogger("drivetrain")

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

FOLDER = "profile"
"""The profile's folder within a run's folder."""


class Profiling(NoProfiling):
    """Reports the phases of a run to a profiler.

    Args:
        request: the call that is measured.
        strategy: the run's strategy.
        folder: the run's folder, whose path is set later.
        profiler: the profiler. If it is measuring a run already, this run becomes one phase of the outer run.
    """

    _measuring: set[int] = set()  # noqa: RUF012 - shared by all runs of this process
    """The ids of the profilers that are measuring a run."""

    def __init__(
        self, request: RunRequest[RunContext], strategy: Strategy, folder: RunFolder, profiler: Profiler
    ) -> None:
        self._trainer = request.trainer
        self._strategy = strategy
        self._folder = folder
        self._profiler = profiler
        self._facts = ProfiledRun(
            request.stage,
            strategy.rank,
            strategy.world_size,
            strategy.device,
            self._trainer.log_every_n_steps,
            bool(self._trainer.compile),
        )
        before = folder.before  # an evaluation after a fit writes the profile to the fit's folder
        self._fit_folder = before.path if before is not None and before.is_of_fit and request.stage != "fit" else None
        self._is_nested = False
        self._has_begun = False
        self.train_loop = type("ProfiledLoop", (_ProfiledLoop,), {"span": self.span})

    # Measuring the run, and the profile's folder

    @property
    def wants_folder(self) -> bool:
        return self._profiler.dirpath is None

    def begin(self) -> None:
        self._is_nested = id(self._profiler) in Profiling._measuring
        if self._is_nested:
            self._profiler.start(self._facts.stage)
        else:
            self._profiler.begin(self._facts)
            Profiling._measuring.add(id(self._profiler))
        self._has_begun = True

    def compare_ranks(self) -> None:
        control = self._strategy.control
        if self._facts.world_size > 1 and not self._is_nested:
            self._profiler.receive_results(control.gather_objects(self._profiler.measured()))

    def end(self) -> None:
        if not self._has_begun:
            return
        self._has_begun = False
        if self._is_nested:
            self._profiler.stop(self._facts.stage)
            return
        Profiling._measuring.discard(id(self._profiler))
        for part in (self._profiler.end, self._show, self._write):
            try:
                part()
            except Exception as error:  # so that an error in the profiler does not fail the run
                logger.warning("A part of this run's profile is lost: %s: %s", type(error).__name__, error)

    def _show(self) -> None:
        text = self._profiler.summary() if self._facts.rank == 0 else ""
        if text:
            self._trainer.print(text)

    def _write(self) -> None:
        facts = self._facts
        if facts.folder is None:
            return
        written = self._profiler.write(facts.folder, facts.name)
        if written and facts.rank == 0:
            logger.info("The profile is in %s.", ", ".join(written))

    def _profile_folder(self) -> str | None:
        trainer = self._trainer
        if trainer.fast_dev_run:
            return None
        # An evaluation gets a folder when a logger first writes to one, which only rank 0 knows.
        run_folder = self._folder.path if self._facts.stage == "fit" else self._fit_folder
        return child(run_folder or trainer.default_root_dir, FOLDER)

    # Wrapping the parts of a run, and recording the settings of its loaders

    def span(self, phase: str) -> AbstractContextManager[Any]:
        return self._profiler.profile(phase)

    def call(self, phase: str, function: F) -> F:
        start, stop = self._profiler.start, self._profiler.stop

        def spanned(*args: Any, **options: Any) -> Any:
            start(phase)
            try:
                return function(*args, **options)
            finally:
                stop(phase)

        return cast(F, spanned)

    def hooks(self, table: HookTable) -> HookTable:
        for part in (table.early, table.late):
            for name, calls in part.items():
                part[name] = tuple(self.call(f"{_owner(hook)}.{name}", hook) for hook in calls)
        return table

    def save_requests(self) -> SaveRequests:
        return _ProfiledSaves(self.call)

    def mover(self, move: BatchMover | None) -> BatchMover | None:
        if move is not None:
            move.wrap(lambda function: self.call("transfer", function))
        return move

    def source(self, source: BatchSource) -> BatchSource:
        return cast(BatchSource, _ProfiledSource(source, lambda pairs: self._read("data", pairs)))

    def evaluated(self, source: BatchSource) -> BatchSource:
        return cast(BatchSource, _ProfiledSource(source, lambda pairs: self._steps(self._read("data", pairs))))

    def windows(self, micro_batches: Callable[[int, int], Iterator[MicroBatch]]) -> Callable[[int, int], Any]:
        single_rank = self._facts.world_size == 1

        def begin(epoch: int, first: int) -> Iterator[MicroBatch]:
            items = micro_batches(epoch, first)
            return self._steps(items if single_rank else self._read("windows", items))

        return begin

    def step(self, step: TrainStep) -> TrainStep:
        if isinstance(step, ManualStep):
            step.wrap(self.call)
        if not isinstance(step, AutomaticStep):
            return step
        step.wrap(self.call)
        return _ProfiledStep(step, self.call("optimizer", step.clip_and_step))

    def set_folder(self) -> None:
        profiler, facts = self._profiler, self._facts
        facts.folder = profiler.dirpath or self._profile_folder()
        facts.name = f"{profiler.filename or f'{facts.stage}-{profiler.kind}'}-rank-{facts.rank}"

    def set_loaders(self, loaders: Iterable[Any]) -> None:
        loaders = list(loaders)
        workers = [loader.num_workers for loader in loaders if isinstance(getattr(loader, "num_workers", None), int)]
        pinned = [loader.pin_memory for loader in loaders if isinstance(getattr(loader, "pin_memory", None), bool)]
        self._facts.num_workers = min(workers, default=None)
        self._facts.pin_memory = all(pinned) if pinned else None

    # Iterators that report reading and steps

    def _read(self, phase: str, items: Iterator[T]) -> Iterator[T]:
        """Yield the items, and time how long each item takes to arrive."""
        start, stop = self._profiler.start, self._profiler.stop
        while True:
            start(phase)
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                stop(phase)
            yield item

    def _steps(self, items: Iterator[T]) -> Iterator[T]:
        """Yield the items, and report the end of a step when the next item is requested."""
        step = self._profiler.step
        for item in items:
            yield item
            step()


class _ProfiledSource:
    """A source of batches that times how long the batches take to arrive."""

    def __init__(self, source: BatchSource, follow: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
        self._source = source
        self._follow = follow

    def epoch(self, *args: Any) -> Iterator[Any]:
        return self._follow(self._source.epoch(*args))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class _ProfiledStep:
    """An automatic step that times the optimizers' step as a phase."""

    def __init__(self, step: AutomaticStep, clip_and_step: Callable[[MicroBatch], bool]) -> None:
        self._step = step
        self.zero_grad = step.zero_grad
        self.forward_backward = step.forward_backward
        self.clip_and_step = clip_and_step
        self.drop_window = step.drop_window
        self.release = step.release

    @property
    def last_loss(self) -> Tensor | None:
        return self._step.last_loss

    @property
    def manual_step_missing(self) -> bool:
        return self._step.manual_step_missing


class _ProfiledLoop(TrainLoop):
    """A training loop that times training and logging."""

    span: Callable[[str], AbstractContextManager[Any]]

    def run(self) -> None:
        with self.span("training"):
            super().run()

    def _flush(self) -> None:
        with self.span("logging"):
            super()._flush()

    def _reduce_epoch(self) -> dict[str, Tensor]:
        with self.span("logging"):
            return super()._reduce_epoch()

    def _flush_epoch(self, results: dict[str, Tensor]) -> None:
        with self.span("logging"):
            super()._flush_epoch(results)


class _ProfiledSaves(SaveRequests):
    """A queue of requested checkpoints that times the saving of each."""

    def __init__(self, call: Callable[[str, Callable[[], None]], Callable[[], None]]) -> None:
        super().__init__()
        self._call = call

    def ask(self, save: Callable[[], None]) -> None:
        super().ask(self._call("checkpoint", save))


def _owner(hook: Any) -> str:
    """Return the name of the class that a hook belongs to."""
    bound_method = unwrap(getattr(hook, "func", hook))
    return type(bound_method.__self__).__name__ if hasattr(bound_method, "__self__") else "module"
