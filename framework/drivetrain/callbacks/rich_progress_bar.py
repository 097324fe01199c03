"""RichProgressBar: the progress bar drawn with rich."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from drivetrain.callbacks.progress_bar import Phase, ProgressBar, clock, number, speed
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class RichProgressBar(ProgressBar):
    """A `ProgressBar` drawn with rich: colours, and printing from user code appears above the bar.

    rich's own refresh thread stays off: the bar is drawn by the run, on the same clock as the plain one.

    Args:
        refresh_rate: refreshes a second, above 0 and at most 10.
        stream: where to write; ``None`` is ``sys.stdout`` as it is when the run starts.
        leave: keep the bar of a finished epoch above its line.

    Raises:
        ConfigurationError: rich is not installed, or ``refresh_rate`` is out of range.
    """

    def __init__(self, refresh_rate: float = 10.0, stream: TextIO | None = None, leave: bool = False) -> None:
        if not rich_is_installed():
            raise ConfigurationError(
                "RichProgressBar needs rich, which is not installed",
                "it draws with that package",
                "pip install 'drivetrain[rich]' (or rich itself), or use ProgressBar",
            )
        super().__init__(refresh_rate, stream)
        self._leave = leave
        self._progress: Progress | None = None
        self._tasks: dict[int, TaskID] = {}

    def draw(self, phase: Phase, metrics: Mapping[str, float], now: float) -> None:
        """Show ``phase`` as a bar of its own; a validation stands below its epoch."""
        if self._progress is None:
            self._progress = self._start()
        progress, key = self._progress, id(phase)
        training = self._training
        kept = {id(each) for each in (phase, training) if each is not None}
        for old in [each for each in self._tasks if each not in kept]:
            progress.remove_task(self._tasks.pop(old))
        if key not in self._tasks:
            self._tasks[key] = progress.add_task(phase.title, total=phase.total, details="")
        rate = phase.rate(now)
        left = f"<{clock((phase.total - phase.done) / rate)}" if phase.total and rate > 0 else ""
        shown = " ".join(f"{name}={number(value)}" for name, value in metrics.items())
        details = f"[{clock(phase.elapsed(now))}{left}, {speed(rate)}] {shown}"
        progress.update(self._tasks[key], completed=phase.done, total=phase.total, details=details)
        progress.refresh()

    def close(self) -> None:
        """Take the bar down, or leave it standing with ``leave``."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._tasks = {}

    def write(self, text: str) -> None:
        """Print ``text`` above the bar."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            super().write(text)

    def _start(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[details]}", markup=False),
            console=Console(file=self.stream),
            auto_refresh=False,
            transient=not self._leave,
        )
        progress.start()
        return progress

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_progress": None, "_tasks": {}}


def rich_is_installed() -> bool:
    """True where rich can be imported; does not import it."""
    return importlib.util.find_spec("rich") is not None
