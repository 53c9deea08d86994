"""The comparison as bars: one panel per quantity, one bar per system, each with its figure. SVG written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol
from xml.sax.saxutils import escape

COLUMNS = 2
PANEL_WIDTH, BAR_HEIGHT, GAP, MARGIN = 440, 20, 6, 24
NAME_WIDTH, FIGURE_WIDTH = 118, 86
COLOURS = ("#0b6e99", "#b8860b", "#7b4b94", "#5f7f3b", "#8c5a4a")
"""Sterna's first. Each has a contrast of at least 3 against white."""


class Row(Protocol):
    """What is drawn of `tables.Row`."""

    @property
    def title(self) -> str: ...
    @property
    def unit(self) -> str: ...
    @property
    def more_is_better(self) -> bool: ...
    @property
    def values(self) -> dict[str, float]: ...


def figure(value: float) -> str:
    """As it stands at the end of a bar: three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def bars(rows: Mapping[str, Row], systems: Sequence[str], caption: str) -> str:
    """An SVG document. A system that lacks a quantity keeps its place, with a dash."""
    height = 44 + len(systems) * (BAR_HEIGHT + GAP)
    lines = -(-len(rows) // COLUMNS)
    width, total = MARGIN + COLUMNS * (PANEL_WIDTH + MARGIN), 2 * MARGIN + 20 + lines * (height + MARGIN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" width="{width}" height="{total}" role="img"'
        ' font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{escape(', '.join(systems))} compared</title>",
        f"<desc>{escape(caption)}</desc>",
        f'<rect width="{width}" height="{total}" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="{MARGIN + 4}" fill="#555555">{escape(caption)}</text>',
    ]
    for place, row in enumerate(rows.values()):
        left = MARGIN + (place % COLUMNS) * (PANEL_WIDTH + MARGIN)
        top = 2 * MARGIN + 20 + (place // COLUMNS) * (height + MARGIN)
        parts += _panel(row, systems, left, top)
    return "\n".join([*parts, "</svg>", ""])


def _panel(row: Row, systems: Sequence[str], left: int, top: int) -> list[str]:
    sense = "more is better" if row.more_is_better else "less is better"
    longest = max(row.values.values())
    room = PANEL_WIDTH - NAME_WIDTH - FIGURE_WIDTH
    parts = [
        f'<text x="{left}" y="{top}" font-weight="600" fill="#111111">{escape(row.title)}</text>',
        f'<text x="{left}" y="{top + 17}" font-size="11" fill="#555555">{escape(row.unit)}, {sense}</text>',
    ]
    for i, system in enumerate(systems):
        y = top + 28 + i * (BAR_HEIGHT + GAP)
        value = row.values.get(system)
        length = 0.0 if value is None else max(1.0, room * value / longest)
        text = "–" if value is None else figure(value)
        weight = ' font-weight="600"' if i == 0 else ""
        parts += [
            f'<text x="{left}" y="{y + 15}" fill="#111111"{weight}>{escape(system)}</text>',
            f'<rect x="{left + NAME_WIDTH}" y="{y}" width="{length:.1f}" height="{BAR_HEIGHT}" fill="{COLOURS[i % len(COLOURS)]}"/>',
            f'<text x="{left + NAME_WIDTH + length + 6:.1f}" y="{y + 15}" fill="#111111"{weight}>{escape(text)}</text>',
        ]
    return parts
