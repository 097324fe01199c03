"""ProfiledSession: a session that wraps the finished parts of its run, so that a profiler times them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, TypeVar

from drivetrain._engine.run_request import RunRequest
from drivetrain._engine.session import Session
from drivetrain._loops.batch_mover import BatchMover
from drivetrain._loops.hooks import HOOKS
from drivetrain._loops.step import AutomaticStep
from drivetrain._storage.paths import child
from drivetrain.launchers import LaunchedProcesses
from drivetrain.profilers import ProfiledRun
from drivetrain.strategies.strategy import Strategy

logger = logging.getLogger("drivetrain")

Call = Callable[..., Any]
T = TypeVar("T")

FOLDER = "profile"
"""The profile's folder within a run's folder."""


class ProfiledSession(Session):
    """Runs one stage, and times it with the profiler of `Fit`.

    Each part is wrapped when it is finished and before it is used first: hooks, sources of batches, the mover of
    batches, the runner of the module's steps, the training step and the training loop. Set-up, checkpoints and
    evaluations within fit open their phases themselves, through `RunCore.span`.

    Args:
        request: the entry point that was called, with its arguments. Its `Fit` has a profiler. If that profiler is
            measuring a run already, this run becomes one phase of the outer run.
        strategy: as for `Session`.
        processes: as for `Session`.
    """

    _measuring: ClassVar[set[int]] = set()
    """The ids of the profilers that are measuring a run."""

    def __init__(self, request: RunRequest, strategy: Strategy, processes: LaunchedProcesses) -> None:
        super().__init__(request, strategy, processes)
        self._profiler = request.trainer.profiler
        self._facts = ProfiledRun(request.stage, strategy.rank, strategy.world_size, strategy.device)
        self._is_nested: bool | None = None  # None unless the run is being measured
        self._replace(self.run.callbacks, "collect", lambda collect: partial(self._time_hooks, collect))
        self._replace(self.run.data, "load", lambda load: partial(self._time_reading, load))

    # Beginning and ending the measurement

    def _run_stage(self) -> Any:
        is_nested = id(self._profiler) in self._measuring
        if is_nested:
            self._profiler.start(self._facts.stage)
        else:
            self._profiler.begin(self._facts)
            self._measuring.add(id(self._profiler))
        self._is_nested = is_nested
        return super()._run_stage()

    def _detach(self) -> None:
        super()._detach()
        is_nested, self._is_nested = self._is_nested, None
        if is_nested:
            self._profiler.stop(self._facts.stage)
        elif is_nested is not None:
            self._measuring.discard(id(self._profiler))
            for part in (self._set_folder, self._profiler.end, self._show, self._write):
                try:
                    part()
                except Exception as error:  # so that an error in the profiler does not fail the run
                    logger.warning("A part of this run's profile is lost: %s: %s", type(error).__name__, error)

    def _show(self) -> None:
        text = self._profiler.summary() if self._facts.rank == 0 else ""
        if text:
            self.run.trainer.print(text)

    def _write(self) -> None:
        if self._facts.folder is not None:
            written = self._profiler.write(self._facts.folder, self._facts.name)
            if written and self._facts.rank == 0:
                logger.info("The profile is in %s.", ", ".join(written))

    def _set_folder(self) -> None:
        profiler, facts, trainer = self._profiler, self._facts, self.run.trainer
        facts.name = f"{profiler.filename or f'{facts.stage}-{profiler.kind}'}-rank-{facts.rank}"
        facts.folder = profiler.dirpath
        if profiler.dirpath is None and not trainer.fast_dev_run:
            run_folder = self.run.folder.path or (trainer.default_root_dir if facts.stage != "fit" else None)
            facts.folder = None if run_folder is None else child(run_folder, FOLDER)

    # Wrapping the parts of the run

    def _time_hooks(self, collect: Callable[[], None]) -> None:
        """Collect the callbacks, and time each hook."""
        collect()
        self.run.callbacks.hooks.wrap(HOOKS, lambda name, _, hook: self._timed(f"{_owner(hook)}.{name}", hook))

    def _time_reading(self, load: Callable[[], None]) -> None:
        """Load the data, and time each source of batches."""
        load()
        data = self.run.data
        if data.trains:
            self._replace(data.train, "epoch", lambda epoch: lambda *args: self._read("data", epoch(*args)))
        for source in (loader.source for loaders in data.evaluation.values() for loader in loaders):
            self._replace(source, "epoch", lambda epoch: lambda *args: self._steps(self._read("data", epoch(*args))))

    def _prepare(self) -> None:
        super()._prepare()
        self._set_folder()
        if self.run.move is not None:
            self._time_transfer(self.run.move)
        self._time(self.run, "forward", "runner")

    def _time_transfer(self, move: BatchMover) -> None:
        for name in ("before", "after"):
            self._replace(move, name, lambda calls: [self._timed("transfer", call) for call in calls])
        self._replace(move, "transfer", lambda call: call and self._timed("transfer", call))
        if move.prefetcher is not None:
            self._time(move.prefetcher, "transfer", "send", "receive")

    def _prepare_training(self) -> None:
        super()._prepare_training()
        loop = self.run.loop
        assert loop is not None
        step = loop.step
        self._time(loop, "training", "run")
        self._time(loop.log, "logging", "flush_steps", "reduce_epoch", "flush_epoch")
        self._replace(loop.reader, "read_epoch", lambda read: lambda *args: self._windows(read(*args)))
        self._time(step, "backward", "run_backward")
        if isinstance(step, AutomaticStep):
            self._replace(step, "clip", lambda call: call and self._timed("clipping", call))
            self._time(step, "optimizer", "clip_and_step")
        else:
            for handle in self.run.optimization.handles:
                self._time(handle, "optimizer", "step_optimizer")

    def _time(self, owner: object, phase: str, *names: str) -> None:
        """Time functions of an object."""
        for name in names:
            self._replace(owner, name, lambda call: self._timed(phase, call))

    def _replace(self, owner: object, name: str, wrap: Callable[[Any], Any]) -> None:
        setattr(owner, name, wrap(getattr(owner, name)))

    def _timed(self, phase: str, function: Call) -> Call:
        """Return a function that is timed as a phase."""
        start, stop = self._profiler.start, self._profiler.stop

        def timed(*args: Any, **options: Any) -> Any:
            start(phase)
            try:
                return function(*args, **options)
            finally:
                stop(phase)

        return timed

    # Iterators that report reading and steps

    def _windows(self, items: Iterator[T]) -> Iterator[T]:
        return self._steps(items if self._facts.world_size == 1 else self._read("windows", items))

    def _read(self, phase: str, items: Iterator[T]) -> Iterator[T]:
        """Yield the items, and time how long each item takes to arrive."""
        arrive = self._timed(phase, next)
        while True:
            try:
                item = arrive(items)
            except StopIteration:
                return
            yield item

    def _steps(self, items: Iterator[T]) -> Iterator[T]:
        """Yield the items, and report the end of a step when the next item is requested."""
        step = self._profiler.step
        for item in items:
            yield item
            step()


def _owner(hook: Any) -> str:
    """Return the name of the class that a hook belongs to; "callback" for the function of a `LambdaCallback`."""
    bound_method = getattr(hook, "func", hook)
    if hasattr(bound_method, "__self__"):
        return type(bound_method.__self__).__name__
    return "module" if bound_method is hook else "callback"
