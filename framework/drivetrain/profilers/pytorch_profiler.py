"""PyTorchProfiler: a trace of some steps for Perfetto, by torch.profiler, with the engine's phases as spans."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule, supported_activities

from drivetrain.errors import ConfigurationError, nearest
from drivetrain.profilers._atomic_publish import publish
from drivetrain.profilers._phase_times import PhaseTimes
from drivetrain.profilers._recommendations import LOOPS, SHORT_US, SmallOperations, next_steps
from drivetrain.profilers.profiler import ProfiledRun, Profiler

logger = logging.getLogger("drivetrain")

_RECORDS = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
_SNAPSHOT_ENTRIES = 100_000  # allocations and frees, the newest; about 100 MB of snapshot

_SORT_KEYS = (
    *("count", "cpu_time", "cpu_time_total", "self_cpu_time_total", "cpu_memory_usage", "self_cpu_memory_usage"),
    *("device_time", "device_time_total", "self_device_time_total", "device_memory_usage", "self_device_memory_usage"),
)


def default_schedule() -> Callable[[int], ProfilerAction]:
    """Return when to trace where nobody says: three micro-batches after the first two, once a run."""
    return schedule(wait=1, warmup=1, active=3, repeat=1)


class PyTorchProfiler(Profiler):
    """Traces operations and kernels of some micro-batches, on every rank, into files that ui.perfetto.dev opens.

    In the trace each phase of the engine's is a span, and so is each micro-batch: ``ProfilerStep#7`` is the eighth that
    the run's loop came to, those of a validation within `fit` included. The try of validation before training is not
    traced.

    Args:
        dirpath: a folder or fsspec URL for its files; None for ``profile/`` in the run's folder.
        filename: what their names begin with; None for ``<stage>-pytorch``.
        schedule: takes the number of a micro-batch and says what to do, as `torch.profiler.schedule` makes it; None for
            three micro-batches after the first two, so that a long run writes no more than a short one.
        activities: what to trace; None for the CPU, and CUDA where the run computes on it.
        record_shapes: keep the shapes of operations' inputs.
        profile_memory: keep each allocation.
        with_stack: keep where in the source each operation was called.
        group_by_input_shapes: list operations by the shapes of their inputs as well; sets ``record_shapes``.
        sort_by_key: by which column the table of operations is sorted; None for their own time on the device.
        row_limit: rows of that table.
        export_to_chrome: write traces; False leaves the table alone.
        memory_snapshot: on CUDA, write a snapshot of the allocator as the run ends, for pytorch.org/memory_viz.
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
        if schedule is not None and not callable(schedule):
            raise ConfigurationError(
                f"PyTorchProfiler(schedule={schedule!r}).",
                "it is called with the number of a micro-batch, and says what to do.",
                "use torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1), or None.",
            )
        # Devices have columns by their names as well: cuda_time_total.
        column = sort_by_key and sort_by_key.replace("cuda", "device").replace("xpu", "device")
        if column and column not in _SORT_KEYS:
            raise ConfigurationError(
                f"PyTorchProfiler(sort_by_key={sort_by_key!r}).{nearest(column, _SORT_KEYS)}",
                "it is the column by which the table of operations is sorted.",
                f"use one of {', '.join(map(repr, _SORT_KEYS))}, or None.",
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
        self._times: PhaseTimes | None = None
        self._torch: Any = None
        self._spans: list[tuple[str, Any]] = []
        self._steps = 0
        self._written: list[str] = []
        self._tables: list[str] = []
        self._small: SmallOperations | None = None

    def begin(self, run: ProfiledRun) -> None:
        """Forget what was measured before, and begin.

        Raises:
            ConfigurationError: it is to take a snapshot of memory that is not CUDA's.
        """
        if self.memory_snapshot:
            if run.device.type != "cuda":
                raise ConfigurationError(
                    f"PyTorchProfiler(memory_snapshot=True) on {run.device}.",
                    "a snapshot is of the allocator of a CUDA device.",
                    "drop it; profile_memory=True notes allocations on every device.",
                )
            torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_ENTRIES)
        self._run = run
        self._times = PhaseTimes(run.stage)
        self._spans, self._written, self._tables, self._small, self._steps = [], [], [], None, 0

    def start(self, phase: str) -> None:
        """Begin a phase, a span of the trace."""
        times = self._times
        if times is None or times.ended is not None or not times.is_own_thread:
            return
        if self._torch is None and phase in LOOPS and times.depth == 1:
            with times.own_time():
                self._start_torch()
        times.start(phase)
        self._spans.append((phase, self._span(phase)))

    def stop(self, phase: str) -> None:
        """End a phase.

        Raises:
            ConfigurationError: it was not begun.
        """
        times = self._times
        if times is None or times.ended is not None or not times.is_own_thread:
            return
        times.stop(phase)
        while len(self._spans) >= times.depth:
            self._leave(self._spans.pop()[1])
        if self._torch is not None and times.depth == 1 and phase in LOOPS:
            with times.own_time():
                self._stop_torch()

    def step(self) -> None:
        """End a micro-batch's span and begin the next one's."""
        if self._torch is None or self._times is None:
            return
        self._steps += 1
        with self._times.own_time():
            # What is open goes on in the next span: spans that only overlap are none to a viewer.
            for _, span in reversed(self._spans):
                self._leave(span)
            self._torch.step()
            self._spans = [(phase, self._span(phase)) for phase, _ in self._spans]

    def end(self) -> None:
        """End the trace, also of a run that failed, and take the snapshot of memory."""
        while self._spans:
            self._leave(self._spans.pop()[1])
        self._stop_torch()
        if self._times is not None:
            self._times.end()
        if self.memory_snapshot and self._run.device.type == "cuda":
            self._take_snapshot()

    def summary(self) -> str:
        """Return the operations that took longest, where the traces are, and what to do next."""
        if self._times is None:
            return ""
        lines = self._tables[-1:]
        if not self._tables:
            lines.append(
                f"Nothing was traced: the loop ended after {self._steps} micro-batches, before the schedule records."
            )
        lines += [f"Open it at https://ui.perfetto.dev: {path}" for path in self._written if path.endswith(".json")]
        lines += [f"- {line}" for line in next_steps(self._times.root, self._run, self._small)]
        return "\n".join(lines)

    def write(self, folder: str, name: str) -> list[str]:
        """Write the summary; traces were written as they came."""
        return [*self._written, *super().write(folder, name)]

    # torch.profiler

    def _start_torch(self) -> None:
        activities = self.activities
        if activities is None:
            known = supported_activities()  # type: ignore[no-untyped-call]
            cuda = self._run.device.type == "cuda" and ProfilerActivity.CUDA in known
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        if torch.autograd.profiler._is_profiler_enabled:
            raise ConfigurationError(
                "profiler='pytorch' while torch's profiler is on already.",
                "torch traces for one profiler at a time.",
                "end the other one, or use profiler='simple'.",
            )
        started = profile(
            activities=activities,
            schedule=self.schedule or default_schedule(),
            on_trace_ready=self._keep,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
        )
        started.start()
        self._torch = started

    def _stop_torch(self) -> None:
        if self._torch is not None:
            stopping, self._torch = self._torch, None
            stopping.stop()

    def _span(self, phase: str) -> Any:
        if self._torch is None or self._torch.current_action not in _RECORDS:
            return None
        span: Any = record_function(phase)
        span.__enter__()
        return span

    def _leave(self, span: Any) -> None:
        if span is not None:
            span.__exit__(None, None, None)

    def _keep(self, traced: profile) -> None:
        """Take what one cycle of the schedule has traced."""
        events: Any = traced.events() or []  # type: ignore[no-untyped-call]
        self._small = _small_operations(events)
        sort_by = self.sort_by_key or (
            "self_cpu_time_total" if self._run.device.type == "cpu" else "self_device_time_total"
        )
        try:
            self._write_trace(traced)
        except OSError as error:  # a run does not fail for its profile
            logger.warning("Of this run's profile a trace is lost: %s: %s", type(error).__name__, error)
        averages = traced.key_averages(group_by_input_shape=self.group_by_input_shapes)
        table = averages.table(sort_by=sort_by, row_limit=self.row_limit, max_name_column_width=48)
        lines = [line.rstrip() for line in table.strip("\n").splitlines()]
        self._tables.append("\n".join([f"Operations of the traced micro-batches of {self._run.stage}", *lines]))

    def _write_trace(self, traced: profile) -> None:
        if not self.export_to_chrome or self._run.folder is None:
            return
        cycle = "" if not self._written else f"-{len(self._written) + 1}"
        with tempfile.TemporaryDirectory() as place:
            path = Path(place, "trace.json")
            traced.export_chrome_trace(str(path))
            self._written.append(publish(self._run.folder, f"{self._run.name}{cycle}.trace.json", path))

    def _take_snapshot(self) -> None:
        folder = self._run.folder
        try:
            if folder is not None:
                with tempfile.TemporaryDirectory() as place:
                    path = Path(place, "memory.pickle")
                    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
                    self._written.append(publish(folder, f"{self._run.name}.memory.pickle", path))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_torch": None, "_spans": []}


def _small_operations(events: Iterable[Any]) -> SmallOperations | None:
    """Return what there is of short operations in a trace; None where there is no whole step in it."""
    known = list(events)
    steps = [one for one in known if one.name.startswith("ProfilerStep") and one.device_type == DeviceType.CPU]
    if not steps:
        return None
    kernels = [one for one in known if one.device_type == DeviceType.CUDA and not one.is_user_annotation]
    if kernels:
        return _kernels(kernels, sum(one.time_range.elapsed_us() for one in steps), len(steps))
    times: dict[str, list[float]] = {}
    for one in known:
        if one.device_type == DeviceType.CPU and not one.is_user_annotation:
            times.setdefault(one.name, []).append(one.self_cpu_time_total)
    own = [time for of_kind in times.values() for time in of_kind]
    if not own:
        return None
    # By medians, which are the same where the machine has other things to do meanwhile.
    usual = {name: (median(of_kind), len(of_kind)) for name, of_kind in times.items()}
    whole = sum(one * count for one, count in usual.values())
    short = sum(one * count for one, count in usual.values() if one < SHORT_US)
    return SmallOperations("operations", len(own) / len(steps), median(own), short / whole) if whole else None


def _kernels(kernels: list[Any], whole_us: float, steps: int) -> SmallOperations | None:
    middle = median(one.time_range.elapsed_us() for one in kernels)
    if middle >= SHORT_US or not whole_us:
        return None  # a device that idles between long kernels waits for something else
    busy, until = 0.0, float("-inf")
    for one in sorted(kernels, key=lambda one: one.time_range.start):
        begin, end = max(one.time_range.start, until), one.time_range.end
        busy += max(0.0, end - begin)
        until = max(until, end)
    return SmallOperations("kernels", len(kernels) / steps, middle, max(0.0, 1 - busy / whole_us))
