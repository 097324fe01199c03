"""Draws stacked bars as a small SVG (a few KB) that is legible on light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

WIDTH, LEFT, RIGHT = 920, 160, 70
TOP, ROW, BAR = 52, 40, 26
SWATCH = 180  # between two entries of the legend
COLOURS = (
    *("#c3cad6", "#9fb0c9", "#7b93b8", "#5a779f"),  # muted colour for the part that every loop has
    *("#2a9d8f", "#8ab17d", "#e9c46a", "#f4a261", "#e76f51", "#c08bf0"),
)
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2430 }
  .title { font-size: 15px; font-weight: 600 } .faint { fill: #5b6474 } .inside { font-size: 11px; fill: #10131a }
  .page { fill: #fbfbfd; stroke: #d5d9e2 } .line { stroke: #d5d9e2 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e9f0 } .faint { fill: #a4adbd } .inside { fill: #10131a }
    .page { fill: #1b1f2a; stroke: #3a4152 } .line { stroke: #3a4152 }
  }
"""


class Bar(NamedTuple):
    """A row: its label, and the length of each part."""

    label: str
    parts: Mapping[str, float]


def drawn(title: str, bars: Sequence[Bar], order: Sequence[str], left: int = LEFT) -> str:
    """The picture, with the parts in this order, and labels in the first ``left`` of its units.

    It brings its own background, for a page whose colours are switched by hand.
    """
    longest = max(sum(bar.parts.values()) for bar in bars)
    scale = (WIDTH - left - RIGHT) / longest
    columns = (WIDTH - 40) // SWATCH
    bottom = TOP + ROW * len(bars)
    height = bottom + 34 + 24 * -(-len(order) // columns) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="title" x="20" y="30">{escape(title)}</text>',
        *_scale(longest, scale, bottom, left),
    ]
    for number, bar in enumerate(bars):
        lines += _bar(bar, order, TOP + ROW * number, scale, left)
    for number, part in enumerate(order):
        x, y = 20 + SWATCH * (number % columns), bottom + 34 + 24 * (number // columns)
        lines.append(f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{COLOURS[number]}"/>')
        lines.append(f'<text x="{x + 20}" y="{y + 12}">{escape(part)}</text>')
    return "\n".join([*lines, "</svg>\n"])


def _scale(longest: float, scale: float, bottom: int, left: int) -> list[str]:
    """Lines at round numbers, with the numbers below."""
    step = next(size for power in range(9) for size in (10**power, 2 * 10**power, 5 * 10**power) if longest / size <= 8)
    lines = []
    for value in range(0, int(longest) + 1, step):
        x = left + value * scale
        lines.append(f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{bottom}"/>')
        lines.append(f'<text class="faint" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value}</text>')
    return lines


def _bar(bar: Bar, order: Sequence[str], y: int, scale: float, left: int) -> list[str]:
    middle = y + BAR / 2 + 4.5
    lines = [f'<text x="{left - 10}" y="{middle}" text-anchor="end">{escape(bar.label)}</text>']
    values = [bar.parts.get(part, 0.0) for part in order]
    edges = [sum(values[:number]) for number in range(len(values) + 1)]
    for (begin, end), part, colour in zip(pairwise(edges), order, COLOURS, strict=False):
        x, width = left + begin * scale, (end - begin) * scale
        if not width:
            continue
        told = f"<title>{escape(part)}: {end - begin:.1f}</title>"
        lines.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}">{told}</rect>')
        if width > 26:
            inside = f'class="inside" x="{x + width / 2:.1f}" y="{middle}" text-anchor="middle"'
            lines.append(f"<text {inside}>{end - begin:.0f}</text>")
    lines.append(f'<text class="faint" x="{left + edges[-1] * scale + 8:.1f}" y="{middle}">{edges[-1]:.0f}</text>')
    return lines
