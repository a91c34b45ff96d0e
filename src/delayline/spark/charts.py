"""Small charts as SVG."""

from __future__ import annotations

import html
from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

WIDTH: Final = 900
HEIGHT: Final = 220
LEFT: Final = 60
BOTTOM: Final = 40
TOP: Final = 20
COLORS: Final = ("var(--a)", "var(--b)", "var(--c)", "var(--d)")
OTHERS: Final = "var(--e)"
NOTHING: Final = '<p class="none">nothing to show</p>'
MOST_LABELS: Final = 12


def bars(values: Sequence[tuple[str, int]], title: str) -> str:
    """Return a bar for each value."""
    if not values:
        return NOTHING
    top = max(number for _, number in values) or 1
    step = (WIDTH - LEFT) / len(values)
    parts = [_axis(top)]
    for place, (name, number) in enumerate(values):
        x = LEFT + place * step
        parts.append(_rectangle(x, 0, number, top, step, COLORS[0], f"{name}: {number:,}"))
        parts.append(_text(x + step / 2, HEIGHT - BOTTOM + 16, name))
    return _svg(title, parts)


def stacked(values: Sequence[tuple[datetime, str, int]]) -> str:
    """Return a column for each hour: the three names with most of all, and the others together."""
    if not values:
        return NOTHING
    sums: Counter[str] = Counter()
    for _, name, number in values:
        sums[name] += number
    named = [name for name, _ in sums.most_common(len(COLORS))]
    columns: dict[datetime, Counter[str]] = {}
    for hour, name, number in values:
        columns.setdefault(hour, Counter())[name if name in named else ""] += number
    top = max(column.total() for column in columns.values())
    step = (WIDTH - LEFT) / len(columns)
    parts = [_axis(top)]
    for place, (hour, column) in enumerate(columns.items()):
        below = 0
        for name, number in column.items():
            color = COLORS[named.index(name)] if name in named else OTHERS
            told = f"{hour:%Y-%m-%d %H:00} {name or 'others'}: {number:,}"
            parts.append(_rectangle(LEFT + place * step, below, number, top, step, color, told))
            below += number
    parts += _hours(list(columns))
    colors = dict(zip(named, COLORS, strict=False)) | ({"others": OTHERS} if len(sums) > len(named) else {})
    return _svg("messages by due hour", [*parts, *_legend(colors)])


def lines(hours: Sequence[datetime], series: Mapping[str, Sequence[float | None]]) -> str:
    """Return a line for each name, over the hours."""
    top = max((value for values in series.values() for value in values if value is not None), default=None)
    if top is None:
        return NOTHING
    top, step, parts = top or 1.0, (WIDTH - LEFT) / len(hours), [_axis(top or 1.0)]
    colors = dict(zip(series, COLORS, strict=False))
    for name, values in series.items():
        points = [
            (f"{LEFT + (place + 0.5) * step:.1f}", f"{_height(value, top):.1f}")
            for place, value in enumerate(values)
            if value is not None
        ]
        path = " ".join(map(",".join, points))
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colors[name]}" stroke-width="2" stroke-linecap="round"/>'
        )
        parts += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colors[name]}"/>' for x, y in points]
    return _svg("seconds late", [*parts, *_hours(hours), *_legend(colors)])


def _svg(title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">'
        f"<title>{html.escape(title)}</title>{''.join(parts)}</svg>"
    )


def _height(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - BOTTOM - TOP)


def _rectangle(x: float, below: int, number: int, top: int, step: float, color: str, told: str) -> str:
    y = _height(below + number, top)
    height = _height(below, top) - y
    gap = min(step * 0.1, 4)
    return (
        f'<rect x="{x + gap:.1f}" y="{y:.1f}" width="{step - 2 * gap:.1f}" height="{height:.1f}" fill="{color}">'
        f"<title>{html.escape(told)}</title></rect>"
    )


def _axis(top: float) -> str:
    shown = f"{top:,}" if isinstance(top, int) else f"{top:,.3f}"
    floor = HEIGHT - BOTTOM
    return (
        f'<text x="{LEFT - 6}" y="{TOP + 4}" text-anchor="end">{shown}</text>'
        f'<text x="{LEFT - 6}" y="{floor}" text-anchor="end">0</text>'
        f'<line x1="{LEFT}" y1="{floor}" x2="{WIDTH}" y2="{floor}" stroke="currentColor" stroke-opacity=".4"/>'
    )


def _hours(hours: Sequence[datetime]) -> list[str]:
    step, each = (WIDTH - LEFT) / len(hours), -(-len(hours) // MOST_LABELS)
    form = "%H:00" if hours[0].date() == hours[-1].date() else "%m-%d %H:00"
    return [
        _text(LEFT + (place + 0.5) * step, HEIGHT - BOTTOM + 16, f"{hours[place]:{form}}")
        for place in range(0, len(hours), each)
    ]


def _legend(colors: Mapping[str, str]) -> list[str]:
    return [
        f'<rect x="{LEFT + place * 160}" y="{HEIGHT - 12}" width="10" height="10" fill="{color}"/>'
        f'<text x="{LEFT + place * 160 + 14}" y="{HEIGHT - 3}">{html.escape(name[:22])}</text>'
        for place, (name, color) in enumerate(colors.items())
    ]


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{html.escape(text)}</text>'
