"""The forecast and the lateness heat map as SVG, drawn by the server; the style sheet has their colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from html import escape
from typing import Final

MOST_SERIES: Final = 6
"""The number of destinations with a separate colour; the others are drawn as one."""
MOST_COLOURED: Final = 1000
"""The number of names whose colours are remembered."""
NARROWER_THAN: Final = 500
"""Up to this width, labels are fewer."""
TOP: Final = 18
BOTTOM: Final = 36
RIGHT: Final = 12


@dataclass(frozen=True, slots=True)
class Column:
    """A bucket of due times."""

    label: str
    """Below the axis: `1 h`."""
    title: str
    """In full: `from 30 min to 1 h`."""
    counts: Sequence[int]
    """Messages by series, in the hot store."""
    cold: int = 0
    """Messages in the cold tier, drawn on top of the others."""
    capacity: float | None = None
    """Messages that the measured drain rate dispatches within the bucket; None if unknown or without an end."""
    exact: bool = True
    """Whether the counts are exact."""
    at_least: bool = False
    """Whether there may be more messages, uncounted."""

    @property
    def total(self) -> int:
        """Messages of the bucket in both tiers."""
        return sum(self.counts) + self.cold

    @property
    def exceeds(self) -> bool:
        """Whether more is due than the drain rate can dispatch in the bucket."""
        return self.capacity is not None and self.total > self.capacity


class Colours:
    """The colours of names: a name has the one it was given first, wherever it stands, until the dashboard ends."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}

    def of(self, names: Sequence[str]) -> list[int]:
        """Return a colour for each of up to MOST_SERIES names; only two names of the same colour get another."""
        chosen: dict[str, int] = {}
        for name in sorted(names, key=lambda name: name not in self._first):
            free = [colour for colour in range(MOST_SERIES) if colour not in chosen.values()]
            own = self._first.get(name)
            chosen[name] = own if own in free else min(free, key=list(self._first.values()).count)
            self._first.setdefault(name, chosen[name])
        while len(self._first) > MOST_COLOURED:
            del self._first[next(iter(self._first))]
        return [chosen[name] for name in names]


def forecast(
    columns: Sequence[Column],
    series: Sequence[str],
    colours: Sequence[int],
    *,
    width: int,
    height: int = 300,
    name: str,
) -> str:
    """Return the histogram of due times on a logarithmic scale, with the capacity of each bucket as a line.

    The height of a column is its total; its colours share the height as the destinations share the total.

    Args:
        columns: The buckets, earliest first.
        series: Names of the destinations, as the counts of the columns have them.
        colours: The colour of each.
        width: In pixels, at which the text has its own size.
        height: Likewise.
        name: Begins the ids within the drawing: unique on the page.
    """
    largest = max((max(bucket.total, bucket.capacity or 0) for bucket in columns), default=0)
    scale = _Logarithm(1, max(10.0, largest), height - BOTTOM, TOP)
    left = 46 if width > NARROWER_THAN else 36
    step = (width - left - RIGHT) / max(1, len(columns))
    parts = [_patterns(name), *_levels(scale, left, width - RIGHT)]
    label_each = _labelled([bucket.label for bucket in columns], step)
    for position, column in enumerate(columns):
        x = left + position * step
        parts.append(_column(column, series, colours, scale, x, step, name))
        if position % label_each == 0:
            parts.append(_text(x + step / 2, height - BOTTOM + 16, column.label, "tick"))
    parts += _capacity(columns, scale, left, step)
    return _svg(width, height, f"Messages by due time; {_summary(columns)}", parts)


def _summary(columns: Sequence[Column]) -> str:
    total = sum(bucket.total for bucket in columns)
    marked = sum(bucket.exceeds for bucket in columns)
    return f"{total:,} in {len(columns)} buckets, {marked} above the drain rate"


def _column(
    column: Column,
    series: Sequence[str],
    colours: Sequence[int],
    scale: _Logarithm,
    x: float,
    step: float,
    name: str,
) -> str:
    gap = min(3.0, step * 0.12)
    top, floor = scale.at(column.total), scale.floor
    about, more = "" if column.exact else "about ", " or more" if column.at_least else ""
    lines = [f"{column.title}: {about}{column.total:,}{more}"]
    lines += [f"{destination}: {number:,}" for destination, number in zip(series, column.counts, strict=True) if number]
    if column.cold:
        lines.append(f"cold tier: {column.cold:,}")
    if column.capacity is not None:
        lines.append(f"drain rate: {column.capacity:,.0f} in this time")
    if column.exceeds:
        lines.append("more than the drain rate")
    parts = [f"<title>{escape(chr(10).join(lines))}</title>"]
    parts.append(_rectangle(x, TOP, step, floor - TOP, "hover"))
    y = floor
    for position, number in enumerate([*column.counts, column.cold]):
        if not number:
            continue
        share = (floor - top) * number / column.total
        y -= share
        kind = "cold" if position == len(column.counts) else f"s{colours[position]}"
        parts.append(_rectangle(x + gap, y, step - 2 * gap, share, kind))
        if kind == "cold":
            parts.append(_rectangle(x + gap, y, step - 2 * gap, share, "hatch", f"url(#{name}-hatch)"))
    if column.exceeds:
        parts.append(_rectangle(x + gap, top, step - 2 * gap, floor - top, "over"))
        middle, tip = x + step / 2, top - 12
        parts.append(f'<path class="mark" d="M{middle:.1f} {tip:.1f}l5 9h-10z"/>')
    return f'<g class="column">{"".join(parts)}</g>'


def _capacity(columns: Sequence[Column], scale: _Logarithm, left: float, step: float) -> list[str]:
    """Return the drain rate as a line of stairs: wider buckets have room for more."""
    steps = [
        f"M{left + position * step:.1f} {scale.at(bucket.capacity):.1f}h{step:.1f}"
        for position, bucket in enumerate(columns)
        if bucket.capacity is not None
    ]
    return [f'<path class="capacity" d="{"".join(steps)}"/>'] if steps else []


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many messages are due by then."""

    label: str
    """The time from now: `1 h`."""
    at_least: int
    estimate: int
    at_most: int


def bounds(columns: Sequence[Bounds], *, width: int, height: int = 240, name: str) -> str:
    """Return what is due by each time: at least as a column, at most hatched above it, the estimate as a line.

    Args:
        columns: The times, earliest first.
        width: In pixels, at which the text has its own size.
        height: Likewise.
        name: Begins the ids within the drawing: unique on the page.
    """
    left, floor = (46 if width > NARROWER_THAN else 36), height - BOTTOM
    step = (width - left - RIGHT) / max(1, len(columns))
    largest = max((bucket.at_most for bucket in columns), default=0)
    parts = [_patterns(name), _line(left, floor, width - RIGHT, floor, "axis")]

    def at(number: float) -> float:
        return floor - (floor - TOP) * number / max(1, largest)

    for level in sorted({round(largest * quarter / 4) for quarter in range(5)}):
        parts.append(_line(left, at(level), width - RIGHT, at(level), "grid"))
        parts.append(f'<text class="tick end" x="{left - 6}" y="{at(level) + 4:.1f}">{compact(level)}</text>')
    each, gap = _labelled([bucket.label for bucket in columns], step), min(3.0, step * 0.12)
    for position, bucket in enumerate(columns):
        x, wide = left + position * step, step - 2 * gap
        least, most = at(bucket.at_least), at(bucket.at_most)
        title = f"within {bucket.label}: at least {bucket.at_least:,}, at most {bucket.at_most:,}"
        parts += [
            f'<g class="column"><title>{escape(title)}, probably {bucket.estimate:,}</title>',
            _rectangle(x, TOP, step, floor - TOP, "hover"),
            _rectangle(x + gap, most, wide, least - most, "cold"),
            _rectangle(x + gap, most, wide, least - most, "hatch", f"url(#{name}-hatch)"),
            _rectangle(x + gap, least, wide, floor - least, "s0"),
            "</g>",
        ]
        if position % each == 0:
            parts.append(_text(x + step / 2, floor + 16, bucket.label, "tick"))
    heights = [
        f"M{left + place * step:.1f} {at(bucket.estimate):.1f}h{step:.1f}" for place, bucket in enumerate(columns)
    ]
    parts.append(f'<path class="capacity" d="{"".join(heights)}"/>')
    return _svg(width, height, f"Messages that are due by then, of {largest:,}", parts)


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Dispatched messages by time and lateness."""

    times: Sequence[str]
    """The start of each column, as text."""
    bounds: Sequence[float]
    """Upper bounds of the rows in seconds, ascending; the last row has none."""
    counts: Sequence[Sequence[int]]
    """Of each column, the number in each row: one more than there are bounds."""
    medians: Sequence[float | None] = ()
    """In seconds by column, None where nothing was dispatched."""
    p99s: Sequence[float | None] = ()
    """Likewise."""

    @property
    def labels(self) -> list[str]:
        """What each row means."""
        return [*(f"up to {seconds(bound)} late" for bound in self.bounds), f"over {seconds(self.bounds[-1])} late"]


HEAT_LEVELS: Final = 8


def heat_map(data: HeatMap, *, width: int, height: int = 320) -> str:
    """Return the map: time from left to right, lateness upwards on a logarithmic scale, p50 and p99 as lines."""
    left, rows = (58 if width > NARROWER_THAN else 50), len(data.bounds) + 1
    step = (width - left - RIGHT) / max(1, len(data.times))
    row = (height - TOP - BOTTOM) / rows
    floor = height - BOTTOM
    largest = max((max(column, default=0) for column in data.counts), default=0)
    labels, meanings = [seconds(bound) for bound in data.bounds], data.labels
    parts = []
    for position, label in enumerate(labels):
        if position % max(1, math.ceil(18 / row)) == 0:
            y = floor - (position + 1) * row
            parts.append(_line(left, y, width - RIGHT, y, "grid"))
            parts.append(f'<text class="tick end" x="{left - 6}" y="{y + 4:.1f}">{escape(label)}</text>')
    parts.append(_line(left, floor, width - RIGHT, floor, "axis"))
    each = _labelled(data.times, step)
    for position, (time, column) in enumerate(zip(data.times, data.counts, strict=True)):
        x = left + position * step
        parts += [
            f'<rect class="h{_level(number, largest)}" x="{x:.1f}" y="{floor - (index + 1) * row:.1f}" '
            f'width="{step + 0.3:.1f}" height="{row + 0.3:.1f}">'
            f"<title>{escape(time)}, {meanings[index]}: {number:,}</title></rect>"
            for index, number in enumerate(column)
            if number
        ]
        if position % each == 0 and x + 20 < width:
            parts.append(_text(x + step / 2, floor + 16, time, "tick"))
    for kind, values in (("p50", data.medians), ("p99", data.p99s)):
        heights = [
            (position, floor - _row_of(value, data.bounds) * row)
            for position, value in enumerate(values)
            if value is not None
        ]
        ends = (0.5,) if len(heights) > 1 else (0.1, 0.9)  # a single column has a line of its own
        points = [f"{left + (position + end) * step:.1f},{y:.1f}" for position, y in heights for end in ends]
        if points:  # twice: on an edge of the panel's colour it is seen on every cell
            path = f'points="{" ".join(points)}"'
            parts += [f'<polyline class="edge" {path}/>', f'<polyline class="{kind}" {path}/>']
    total = sum(map(sum, data.counts))
    return _svg(width, height, f"Lateness of {total:,} dispatched messages over time", parts)


def _labelled(labels: Sequence[str], step: float) -> int:
    """Return how many labels are left out for one to be shown, plus 1, so that none covers another."""
    return max(1, math.ceil((6.4 * max(map(len, labels), default=0) + 8) / step))


def _level(number: int, largest: int) -> int:
    """Return 1 for few to HEAT_LEVELS for most, on a logarithmic scale."""
    if largest <= 1:
        return HEAT_LEVELS
    return 1 + round((HEAT_LEVELS - 1) * math.log(number) / math.log(largest))


def _row_of(value: float, bounds: Sequence[float]) -> float:
    """Return the height of a lateness in rows, between the heights of the bounds."""
    lower = 0.0
    for position, upper in enumerate(bounds):
        if value <= upper:
            if lower <= 0:
                return position + min(1.0, value / upper)
            return position + math.log(max(value, lower) / lower) / math.log(upper / lower)
        lower = upper
    return len(bounds) + 0.5


def seconds(value: float) -> str:
    """Return a lateness bound as people write it: 5 ms, 2 s, 10 min, 1 h."""
    for unit, length in (("h", 3600), ("min", 60), ("s", 1)):
        if value >= length:
            return f"{value / length:.3g} {unit}"
    return f"{value * 1000:.3g} ms"


def short(span: timedelta) -> str:
    """Return a span as an axis has it, in its largest unit: 5 min, 12 h, 2 w, 3 mo, 1 y."""
    value = span.total_seconds()
    for unit, length in (("y", 31_536_000), ("mo", 2_592_000), ("w", 604_800), ("d", 86_400), ("h", 3600), ("min", 60)):
        if value >= length * 0.999:
            return f"{value / length:.2g} {unit}"
    return f"{value:.2g} s"


def sparkline(values: Sequence[int], title: str) -> str:
    """Return small bars for a trend."""
    width, height, largest = 96, 24, max(values, default=0)
    step = width / max(1, len(values))
    parts = []
    for position, value in enumerate(values):
        tall = max(1.5, height * value / largest) if value else 1
        kind = "bar" if value else "none"
        parts.append(_rectangle(position * step, height - tall, max(1.0, step - 1), tall, kind))
    return (
        f'<svg class="spark" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


@dataclass(frozen=True, slots=True)
class _Logarithm:
    """Heights of numbers between two powers of ten; zero is on the floor, 1 a little above it."""

    lowest: float
    largest: float
    floor: float
    top: float

    @property
    def decades(self) -> int:
        return max(1, math.ceil(math.log10(self.largest * 1.0001)))

    def at(self, value: float | None) -> float:
        if not value or value < self.lowest:
            return self.floor
        # A single message must be seen: a twentieth of a decade is below the first line.
        share = (math.log10(value) + 0.35) / (self.decades + 0.35)
        return self.floor - (self.floor - self.top) * min(1.0, share)


def _levels(scale: _Logarithm, left: float, right: float) -> list[str]:
    parts = [_line(left, scale.floor, right, scale.floor, "axis")]
    for power in range(scale.decades + 1):
        y = scale.at(10**power)
        parts.append(_line(left, y, right, y, "grid"))
        parts.append(f'<text class="tick end" x="{left - 6}" y="{y + 4:.1f}">{compact(10**power)}</text>')
    return parts


def compact(number: float) -> str:
    """Return a number in few characters: 900, 12 k, 3 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}\N{NO-BREAK SPACE}{unit}"
    return f"{number:.3g}"


def _patterns(name: str) -> str:
    return (
        f'<defs><pattern id="{name}-hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><line class="hatching" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>'
    )


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
    return f"{head}{''.join(parts)}</svg>"


def _rectangle(x: float, y: float, width: float, height: float, kind: str, fill: str | None = None) -> str:
    painted = f' fill="{fill}"' if fill else ""
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(height, 0):.1f}"{painted}/>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
