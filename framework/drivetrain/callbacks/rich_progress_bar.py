"""RichProgressBar: a progress bar drawn with rich."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from drivetrain._runtime.lazy_names import import_optional
from drivetrain.callbacks._progress import BarLine, Phase, fit_line
from drivetrain.callbacks.progress_bar import ProgressBar


class RichProgressBar(ProgressBar):
    """A `ProgressBar` drawn with rich, in color, and with the bar of a validation below the bar of the epoch.

    The bar uses no thread. The training loop draws the bar, as often as a plain `ProgressBar`.

    Args:
        refresh_rate: refreshes per second, above 0 and at most 10.
        stream: the stream to write to; None is ``sys.stdout`` at the start of the run.
        leave: whether to keep the bar of a finished epoch above its final line.

    Raises:
        ConfigurationError: rich is not installed, or ``refresh_rate`` is out of range.
    """

    def __init__(self, refresh_rate: float = 10.0, stream: TextIO | None = None, leave: bool = False) -> None:
        import_optional("rich", "RichProgressBar", "pip install 'drivetrain[rich]' (or only rich), or use ProgressBar")
        super().__init__(refresh_rate, stream)
        self._leave = leave
        self._epoch_line: BarLine | None = None  # the epoch's bar as it was drawn last
        self._last_lines: list[str] = []

    def draw(self, phase: Phase, metrics: Mapping[str, float], now: float) -> None:
        """Draw the bar of ``phase``. The bar of a validation is drawn below the bar of its epoch."""
        if self._lines is None:
            return
        width = self._lines.width
        line = fit_line(phase, metrics, now, self.remaining_time_text, width)
        lines = [line]
        if phase is self._training:
            self._epoch_line = line
        elif self._training is not None and self._epoch_line is not None:
            lines = [self._epoch_line, line]
        self._last_lines = self._styled(lines, width)
        self._lines.show(self._last_lines)

    def close(self) -> None:
        """Clear the bar or, with ``leave``, keep the bar of a finished epoch."""
        if self._leave and self._lines is not None and self._last_lines and self._phase is None:
            self._lines.print("\n".join(self._last_lines))
        self._last_lines = []
        super().close()

    def _styled(self, lines: Sequence[BarLine], width: int) -> list[str]:
        from rich.console import Console
        from rich.text import Text

        # rich does not write to the stream directly, because it exits the process if the stream is closed.
        console = Console(file=io.StringIO(), force_terminal=True, width=width, legacy_windows=False)
        has_colors = console.color_system is not None
        styled_lines = []
        for line in lines:
            text = Text(f"{line.title} ")
            text.append("━" * line.filled, "bar.finished" if line.filled == line.width else "bar.complete")
            text.append(("━" if has_colors else " ") * (line.width - line.filled), "bar.back")
            text.append(f" {line.rest}" if line.width else line.rest)
            with console.capture() as captured:
                console.print(text, end="", no_wrap=True, overflow="crop", crop=True, highlight=False)
            styled_lines.append(captured.get())
        return styled_lines

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_epoch_line": None, "_last_lines": []}
