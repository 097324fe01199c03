"""PyTorchProfiler: trace some steps with torch.profiler for Perfetto, with the engine's phases as spans."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from threading import get_ident
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule, supported_activities

from drivetrain._storage.paths import publish_export
from drivetrain.errors import ConfigurationError
from drivetrain.profilers.profiler import ProfiledRun, Profiler

logger = logging.getLogger("drivetrain")

_LOOPS = ("training", "validation", "test", "predict")  # the possible names of the phase that is a run's main loop
_RECORDING_ACTIONS = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
_MAX_SNAPSHOT_ENTRIES = 100_000  # the newest allocations and frees to keep, for a snapshot of about 100 MB


class PyTorchProfiler(Profiler):
    """Traces operations and kernels of some micro-batches on every rank, into files for ui.perfetto.dev.

    Each phase of the engine and each micro-batch is a span in the trace. ``ProfilerStep#7`` is the eighth micro-batch
    of the run's main loop. Micro-batches of a validation within `fit` count too. The sanity check is not traced.

    Args:
        dirpath: a folder or fsspec URL for the profiler's files; None for ``profile/`` in the run's folder.
        filename: the prefix of the files' names; None for ``<stage>-pytorch``.
        schedule: a function from the number of a micro-batch to an action, as made by `torch.profiler.schedule`; None
            traces three micro-batches after the first two, so that the trace does not grow with the run.
        activities: the activities to trace; None for the CPU and, if the run uses CUDA, also CUDA.
        record_shapes: whether to record the shapes of operations' inputs.
        profile_memory: whether to record each allocation.
        with_stack: whether to record the source location of each operation.
        group_by_input_shapes: whether to also group operations by the shapes of their inputs; implies
            ``record_shapes``.
        sort_by_key: the column by which the table of operations is sorted; None for the operations' own time on the
            device.
        row_limit: the number of rows in the table of operations.
        export_to_chrome: whether to write traces. If False, only the table of operations is made.
        memory_snapshot: whether to write a snapshot of the CUDA allocator when the run ends, for
            pytorch.org/memory_viz.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        schedule: Callable[[int], ProfilerAction] | None = None,
        activities: Iterable[ProfilerActivity] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        group_by_input_shapes: bool = False,
        sort_by_key: str | None = None,
        row_limit: int = 20,
        export_to_chrome: bool = True,
        memory_snapshot: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        # The table is made once the run is over. torch also accepts names with the kind of device: cuda_time_total.
        if sort_by_key and not hasattr(FunctionEventAvg(), sort_by_key.replace("cuda", "device")):
            raise ConfigurationError(
                f"PyTorchProfiler(sort_by_key={sort_by_key!r}).",
                "torch's table of operations has no such column.",
                "use one of its columns, such as 'self_cpu_time_total' or 'device_time_total', or None.",
            )
        self.schedule = schedule
        self.activities = None if activities is None else list(activities)
        self.record_shapes = record_shapes or group_by_input_shapes
        self.profile_memory = profile_memory
        self.with_stack = with_stack
        self.group_by_input_shapes = group_by_input_shapes
        self.sort_by_key = sort_by_key
        self.row_limit = row_limit
        self.export_to_chrome = export_to_chrome
        self.memory_snapshot = memory_snapshot
        self._run = ProfiledRun("fit")
        self._thread: int | None = None  # the thread of the run that is being measured
        self._torch_profiler: Any = None
        self._spans: list[tuple[str, Any]] = []  # the open phases, each with its span in the trace
        self._steps = 0
        self._written: list[str] = []  # the paths of written traces and snapshots
        self._tables: list[str] = []  # the table of operations of each cycle of the schedule

    def begin(self, run: ProfiledRun) -> None:
        """Discard earlier measurements and start to measure a run.

        Raises:
            ConfigurationError: ``memory_snapshot`` is set for another device than CUDA.
        """
        if self.memory_snapshot:
            if run.device.type != "cuda":
                raise ConfigurationError(
                    f"PyTorchProfiler(memory_snapshot=True) on {run.device}.",
                    "a snapshot shows the allocator of a CUDA device.",
                    "remove the argument; profile_memory=True records allocations on every device.",
                )
            torch.cuda.memory._record_memory_history(max_entries=_MAX_SNAPSHOT_ENTRIES)
        self._run = run
        self._thread = get_ident()
        self._spans, self._written, self._tables, self._steps = [], [], [], 0

    def start(self, phase: str) -> None:
        """Begin a phase, which is a span in the trace."""
        if get_ident() == self._thread:
            if phase in _LOOPS and not self._spans:
                self._start_torch()
            self._open_span(phase)

    def stop(self, phase: str) -> None:
        """End a phase and all open phases within it. A phase that is not open is ignored."""
        if get_ident() == self._thread and any(name == phase for name, _ in self._spans):
            while self._close_span() != phase:
                pass
            if phase in _LOOPS and not self._spans:
                self._stop_torch()

    def step(self) -> None:
        """End the span of a micro-batch and begin the span of the next micro-batch."""
        if self._torch_profiler is None:
            return
        self._steps += 1
        # Open spans are split here, because viewers do not support spans that overlap without nesting.
        phases = [self._close_span() for _ in range(len(self._spans))]
        self._torch_profiler.step()
        for phase in reversed(phases):
            self._open_span(phase)

    def end(self) -> None:
        """End the trace, also of a run that failed, and write the memory snapshot."""
        while self._spans:
            self._close_span()
        self._stop_torch()
        self._thread = None
        if self.memory_snapshot and self._run.device.type == "cuda":
            try:
                self._export(".memory.pickle", torch.cuda.memory._dump_snapshot)
            finally:
                torch.cuda.memory._record_memory_history(enabled=None)

    def summary(self) -> str:
        """Return the longest operations and the paths of the traces."""
        lines = self._tables[-1:]
        if self._steps and not self._tables:
            lines.append(
                f"Nothing was traced: the loop ended after {self._steps} micro-batches, before the schedule starts to "
                "record."
            )
        lines += [f"Trace for https://ui.perfetto.dev: {path}" for path in self._written if path.endswith(".json")]
        return "\n".join(lines)

    def write(self, folder: str, name: str) -> list[str]:
        """Write the summary. Return the paths of the traces, which were written during the run, and of the summary."""
        return [*self._written, *super().write(folder, name)]

    # Start and stop torch.profiler, and write its traces

    def _start_torch(self) -> None:
        activities = self.activities
        if activities is None:
            supported = supported_activities()  # type: ignore[no-untyped-call]
            cuda = self._run.device.type == "cuda" and ProfilerActivity.CUDA in supported
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        if torch.autograd.profiler._is_profiler_enabled:
            raise ConfigurationError(
                "profiler='pytorch' while torch's profiler is already active.",
                "torch supports one profiler at a time.",
                "stop the other profiler, or use profiler='simple'.",
            )
        started = profile(
            activities=activities,
            schedule=self.schedule or schedule(wait=1, warmup=1, active=3, repeat=1),
            on_trace_ready=self._on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
        )
        started.start()
        self._torch_profiler = started

    def _stop_torch(self) -> None:
        if self._torch_profiler is not None:
            stopping, self._torch_profiler = self._torch_profiler, None
            stopping.stop()

    def _open_span(self, phase: str) -> None:
        span: Any = nullcontext()
        if self._torch_profiler is not None and self._torch_profiler.current_action in _RECORDING_ACTIONS:
            span = record_function(phase)
        span.__enter__()
        self._spans.append((phase, span))

    def _close_span(self) -> str:
        """Close the innermost span, and return the name of its phase."""
        phase, span = self._spans.pop()
        span.__exit__(None, None, None)
        return phase

    def _on_trace_ready(self, traced: profile) -> None:
        """Write the trace of one cycle of the schedule, and make the table of its operations."""
        sort_by = self.sort_by_key or (
            "self_cpu_time_total" if self._run.device.type == "cpu" else "self_device_time_total"
        )
        cycle = f"-{len(self._written) + 1}" if self._written else ""
        try:
            if self.export_to_chrome:
                self._export(f"{cycle}.trace.json", traced.export_chrome_trace)
        except OSError as error:  # A failed write of a trace must not fail the run.
            logger.warning("A trace of this run's profile could not be written: %s: %s", type(error).__name__, error)
        averages = traced.key_averages(group_by_input_shape=self.group_by_input_shapes)
        table = averages.table(sort_by=sort_by, row_limit=self.row_limit, max_name_column_width=48)
        lines = [line.rstrip() for line in table.strip("\n").splitlines()]
        self._tables.append("\n".join([f"Operations of the traced micro-batches of {self._run.stage}", *lines]))

    def _export(self, suffix: str, export: Callable[[str], object]) -> None:
        """Write a file, if the run writes any."""
        if self._run.folder is not None:
            self._written.append(publish_export(self._run.folder, f"{self._run.name}{suffix}", export))
