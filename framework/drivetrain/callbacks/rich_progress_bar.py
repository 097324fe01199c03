"""RichProgressBar: the progress bar drawn with rich."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from drivetrain._runtime.lazy_names import is_installed
from drivetrain.callbacks._bar_line import BarLine, Phase, fitted
from drivetrain.callbacks.progress_bar import ProgressBar
from drivetrain.errors import ConfigurationError


class RichProgressBar(ProgressBar):
    """A `ProgressBar` drawn with rich: in colours, and a validation's bar below its epoch's.

    No thread refreshes it: the bar is drawn by the run, on the same clock as the plain one.

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
        self._epoch: tuple[Mapping[str, float], float, str] | None = None  # as the epoch's bar was last drawn
        self._last: list[str] = []

    def draw(self, phase: Phase, metrics: Mapping[str, float], now: float) -> None:
        """Show ``phase`` as a bar of its own; a validation stands below its epoch."""
        if self._lines is None:
            return
        width = self._lines.width
        shown = [fitted(phase, metrics, now, self.run_left, width)]
        if phase is self._training:
            self._epoch = metrics, now, self.run_left
        elif self._training is not None and self._epoch is not None:
            shown.insert(0, fitted(self._training, *self._epoch, width))
        self._last = self._styled(shown, width)
        self._lines.show(self._last)

    def close(self) -> None:
        """Take the bar down, or leave it standing with ``leave``."""
        if self._leave and self._lines is not None and self._last and self._phase is None:
            self._lines.print("\n".join(self._last))
        self._last = []
        super().close()

    def _styled(self, lines: Sequence[BarLine], width: int) -> list[str]:
        from rich.console import Console
        from rich.text import Text

        # Not on the stream: where that is gone, rich ends the process.
        console = Console(file=io.StringIO(), force_terminal=True, width=width, legacy_windows=False)
        coloured = console.color_system is not None
        drawn = []
        for line in lines:
            text = Text(f"{line.title} ")
            text.append("━" * line.filled, "bar.finished" if line.filled == line.width else "bar.complete")
            text.append(("━" if coloured else " ") * (line.width - line.filled), "bar.back")
            text.append(f" {line.rest}" if line.width else line.rest)
            with console.capture() as captured:
                console.print(text, end="", no_wrap=True, overflow="crop", crop=True, highlight=False)
            drawn.append(captured.get())
        return drawn

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_epoch": None, "_last": []}


def rich_is_installed() -> bool:
    """True where rich can be imported; does not import it."""
    return is_installed("rich")
