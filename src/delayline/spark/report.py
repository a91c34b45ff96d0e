"""Write an audit as an HTML page with SVG charts, without scripts and external resources.

A chart over time has at most sixty columns, of a minute, an hour, a day or more, so that one hour fills it as well as a
year. Columns are chosen for all but the first and last hundredth of the messages; what lies far before or after is in a
column of its own.
"""

from __future__ import annotations

import html
import math
import secrets
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F  # noqa: N812 - the usual name

from delayline.spark.audit import ACCURACY, BARS, SHARD, bar_of
from delayline.spark.errors import translated_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql import Column

    from delayline.spark.audit import Audit, Totals


#: Rows of a table on the page; the DataFrames have all of them.
LONGEST_TABLE: Final = 50
MOST_BUCKETS: Final = 60
OTHERS: Final = "others"
STYLE: Final = """
:root { color-scheme: light dark; --a: #2f6fb0; --b: #c0622b; --c: #4b8f4b; --d: #8a5aa8; --e: #888; --bad: #b11;
--good: #186a2c }
@media (prefers-color-scheme: dark) { :root { --a: #6ca9e6; --b: #ec9a64; --c: #82c482; --d: #c19bdc; --e: #aaa;
--bad: #ff8078; --good: #7fd391 } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100% }
td, th { padding: .2rem .6rem; border-bottom: 1px solid #8884; text-align: right } td:first-child, th:first-child
{ text-align: left; overflow-wrap: anywhere }
.numbers { display: flex; flex-wrap: wrap; gap: 1rem } .numbers div { border: 1px solid #8886; border-radius: .4rem;
padding: .5rem .9rem } .numbers b { display: block; font-size: 1.3rem } .bad { color: var(--bad) }
.good { color: var(--good) }
svg { width: 100%; height: auto; font: 11px system-ui, sans-serif } svg text { fill: currentColor }
.none { opacity: .75 }
@media print { :root { color-scheme: light; --a: #2f6fb0; --b: #c0622b; --c: #4b8f4b; --d: #8a5aa8; --e: #888;
--bad: #b11; --good: #186a2c } body { color: #000; background: #fff; margin: 0; max-width: none; font-size: 11pt;
print-color-adjust: exact; -webkit-print-color-adjust: exact } h2 { break-after: avoid }
svg, tr, .numbers div { break-inside: avoid } thead { display: table-header-group } }
"""


@dataclass(frozen=True)
class Unit:
    """A span of time that a column of a chart stands for."""

    name: str
    seconds: int
    """Its length; of a month and of a year the least, for calendars decide."""
    time: str
    date: str
    """The two lines of its label."""

    def key_of(self, at: datetime) -> int:
        """Return the number of the span that a time is in."""
        at = at.astimezone(UTC)
        if self.name == "a month":
            return at.year * 12 + at.month - 1
        return at.year if self.name == "a year" else (int(at.timestamp() // 1) - MONDAY) // self.seconds

    @property
    def key(self) -> Column:
        """The number of the span that the column `due` is in, whatever the session's time zone."""
        in_utc = "to_utc_timestamp(due, current_timezone())"
        if self.name == "a month":
            return F.expr(f"CAST(year({in_utc}) * 12 + month({in_utc}) - 1 AS BIGINT)")
        if self.name == "a year":
            return F.expr(f"CAST(year({in_utc}) AS BIGINT)")
        return F.expr(f"CAST(floor((unix_seconds(due) - {MONDAY}) / {self.seconds}) AS BIGINT)")

    def begin_of(self, key: int) -> datetime:
        """Return when a span begins."""
        if self.name == "a month":
            return datetime(key // 12, key % 12 + 1, 1, tzinfo=UTC)
        if self.name == "a year":
            return datetime(key, 1, 1, tzinfo=UTC)
        return datetime.fromtimestamp(key * self.seconds + MONDAY, UTC)

    def label(self, begin: datetime) -> tuple[str, str]:
        """Return the two lines of a span's label."""
        return f"{begin:{self.time}}", f"{begin:{self.date}}" if self.date else ""

    def name_of(self, begin: datetime) -> str:
        """Return a span's name."""
        return f"{self.name} from {begin:%Y-%m-%d}" + (f" {begin:%H:%M} UTC" if self.seconds < ONE_DAY else "")


#: A Monday, with which weeks begin, and at whose midnight the shorter spans begin too; in seconds since 1970.
MONDAY: Final = 4 * 24 * 3600
ONE_DAY: Final = 24 * 3600
UNITS: Final = (
    Unit("a minute", 60, "%H:%M", "%Y-%m-%d"),
    Unit("ten minutes", 600, "%H:%M", "%Y-%m-%d"),
    Unit("an hour", 3600, "%H:%M", "%Y-%m-%d"),
    Unit("six hours", 6 * 3600, "%H:%M", "%Y-%m-%d"),
    Unit("a day", ONE_DAY, "%d %b", "%Y"),
    Unit("a week", 7 * ONE_DAY, "%d %b", "%Y"),
    Unit("a month", 28 * ONE_DAY, "%b", "%Y"),
    Unit("a year", 365 * ONE_DAY, "%Y", ""),
)


@dataclass(frozen=True)
class Buckets:
    """The columns of a chart over time."""

    unit: Unit
    first: int
    last: int
    earliest: datetime
    latest: datetime

    @classmethod
    def between(cls, earliest: datetime, low: datetime, high: datetime, latest: datetime) -> Buckets:
        """Return columns that hold all times between `low` and `high`, and as many others as there is room for."""
        unit = next((unit for unit in UNITS if unit.key_of(high) - unit.key_of(low) < MOST_BUCKETS), UNITS[-1])
        first, last = unit.key_of(low), unit.key_of(high)
        first = max(first, last - MOST_BUCKETS + 1)
        if unit.key_of(latest) - first < MOST_BUCKETS:
            last = unit.key_of(latest)
        if last - unit.key_of(earliest) < MOST_BUCKETS:
            first = unit.key_of(earliest)
        return cls(unit, first, last, earliest, latest)

    @property
    def key(self) -> Column:
        """The number of a message's column: one before the first for what is earlier, one after the last for later."""
        return F.greatest(F.lit(self.first - 1), F.least(F.lit(self.last + 1), self.unit.key))

    @property
    def keys(self) -> list[int]:
        """The numbers of all columns, in order."""
        first = self.first - 1 if self.unit.key_of(self.earliest) < self.first else self.first
        last = self.last + 1 if self.unit.key_of(self.latest) > self.last else self.last
        return list(range(first, last + 1))

    @property
    def columns(self) -> Columns:
        """The columns with their names and labels."""
        keys, names, labels = self.keys, list[str](), list[tuple[str, str] | None]()
        each, before = -(-(self.last - self.first + 1) // MOST_LABELS), ""
        ends = (keys[0] < self.first, keys[-1] > self.last)
        for key in keys:
            if key < self.first:
                names.append(f"before that, from {self.earliest:%Y-%m-%d}")
                labels.append(("earlier", ""))
            elif key > self.last:
                names.append(f"after that, until {self.latest:%Y-%m-%d}")
                labels.append(("later", ""))
            else:
                begin = self.unit.begin_of(key)
                names.append(self.unit.name_of(begin))
                beside = (key - keys[0], keys[-1] - key)
                is_free = all(distance * 2 >= each for distance, end in zip(beside, ends, strict=True) if end)
                if (key - self.first) % each == 0 and is_free:  # else it would be over `earlier` or `later`
                    time, date = self.unit.label(begin)
                    labels.append((time, "" if date == before else date))
                    before = date
                else:
                    labels.append(None)
        return Columns(names, labels, f"due, in UTC; a column is {self.unit.name}")


def write_report(audit: Audit, path: str | Path, *, title: str = "Delayed messages") -> Totals:
    """Write an audit as an HTML page, atomically. Blocks.

    Args:
        audit: The audit.
        path: File on this machine.
        title: Title of the page.

    Returns:
        The totals of the audit.

    Raises:
        OSError: The file cannot be written.
    """
    with translated_errors():
        totals, figures = audit.totals_with(*_figures())
        page = _page(title, totals, _tables(audit, totals), _charts(audit, totals, figures))
    write_whole(Path(path), page)
    return totals


def write_whole(path: Path, page: str) -> None:
    """Write the page atomically, through a new file of a random name so that no link is followed. Raises OSError."""
    beside = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with beside.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(page)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _tables(audit: Audit, totals: Totals) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each table; skips tables whose totals are zero."""
    by_shard = audit.by_shard
    message = ("id", *(() if by_shard is None else (SHARD,)), "destination", "due")
    frames = {
        "destinations": (totals.scheduled, audit.by_destination.limit(LONGEST_TABLE)),
        "errors": (totals.retries + totals.failed, audit.errors.limit(LONGEST_TABLE)),
        "lost": (totals.lost, audit.lost.select(*message).limit(LONGEST_TABLE)),
        "duplicated": (
            totals.duplicated,
            audit.duplicated.select(*message, "extra").limit(LONGEST_TABLE),
        ),
        "early": (totals.early, audit.early.select(*message, "left").limit(LONGEST_TABLE)),
    }
    if by_shard is not None:
        frames["by_shard"] = (totals.scheduled, by_shard.limit(LONGEST_TABLE))
    return {name: frame.toArrow().to_pylist() if number else [] for name, (number, frame) in frames.items()}


#: Messages of which a chart is drawn: those that left in time or late, and those that wait.
LEFT_LATE: Final = "late IS NOT NULL AND NOT behind"
WAITING: Final = "verdict IN ('waiting', 'overdue')"


@dataclass(frozen=True)
class Charts:
    """The charts of a page, and the figures of its lateness."""

    histogram: str
    lateness: str
    forecast: str
    late: Mapping[str, float | None]
    behind: int
    longest_behind: float | None


def _figures() -> list[Column]:
    """Return what charts are drawn by: the ranges of their messages, and the lateness of those that left in time."""
    left_late, behind = F.when(F.expr(LEFT_LATE), F.col("late")), F.when(F.col("behind"), F.col("late"))
    return [
        *(column for name, rows in (("late", LEFT_LATE), ("wait", WAITING)) for column in _range_of(name, rows)),
        *(figure.alias(f"all_{name}") for name, figure in _percentiles(left_late).items()),
        F.count(behind).alias("behind"),
        F.max(behind).alias("longest_behind"),
    ]


def _percentiles(late: Column) -> dict[str, Column]:
    points: Any = F.array(F.lit(0.5), F.lit(0.99))
    together = F.percentile_approx(late, points, ACCURACY)
    return {"p50": together[0], "p99": together[1], "longest": F.max(late)}


def _charts(audit: Audit, totals: Totals, figures: Mapping[str, Any]) -> Charts:
    over_time, forecast = NOTHING, NOTHING
    lateness = {name: column.alias(name) for name, column in _percentiles(F.col("late")).items()}
    if (buckets := _buckets(figures, "late")) is not None:
        late = audit.messages.where(LEFT_LATE).groupBy(buckets.key.alias("key")).agg(*lateness.values())
        by_key = {row["key"]: row for row in late.toArrow().to_pylist()}
        series = {name: [by_key.get(key, {}).get(name) for key in buckets.keys] for name in lateness}
        over_time = lines(buckets.columns, series, "seconds late")
    if (buckets := _buckets(figures, "wait")) is not None:
        counted = audit.messages.where(WAITING).groupBy(buckets.key.alias("key"), "destination").count()
        numbers = [(row["key"], row["destination"] or "", row["count"]) for row in counted.toArrow().to_pylist()]
        forecast = _stacked(buckets, numbers)
    return Charts(
        _histogram(audit, totals),
        over_time,
        forecast,
        {name: figures[f"all_{name}"] for name in lateness},
        figures["behind"],
        figures["longest_behind"],
    )


def _range_of(name: str, rows: str) -> list[Column]:
    due = F.when(F.expr(rows), F.col("due"))
    seconds: Any = F.array(F.lit(0.01), F.lit(0.99))
    middle = F.percentile_approx(F.unix_seconds(due), seconds, ACCURACY).alias(f"{name}_middle")
    return [F.min(due).alias(f"{name}_first"), middle, F.max(due).alias(f"{name}_last")]


def _buckets(figures: Mapping[str, Any], name: str) -> Buckets | None:
    """Return the columns for a range of due times; None where there are no messages."""
    first, last = figures[f"{name}_first"], figures[f"{name}_last"]
    if first is None:
        return None
    low, high = (datetime.fromtimestamp(seconds, UTC) for seconds in figures[f"{name}_middle"])
    return Buckets.between(first.astimezone(UTC), low, high, last.astimezone(UTC))


def _histogram(audit: Audit, totals: Totals) -> str:
    """Return a chart of all departures by their lateness, from the first to the last bar that is not empty."""
    if not totals.dispatched:
        return NOTHING
    late = audit.messages.where("late IS NOT NULL")
    counts: dict[bool, Counter[float | None]] = defaultdict(Counter)
    for row in late.groupBy(bar_of().alias("up_to"), "behind").count().toArrow().to_pylist():
        counts[row["behind"]][row["up_to"]] += row["count"]
    ends: list[float | None] = [*map(float, BARS), None]
    filled = [position for position, end in enumerate(ends) if any(number[end] for number in counts.values())]
    if not filled:
        return NOTHING
    shown = ends[filled[0] : filled[-1] + 1]
    starts = [None, *ends][filled[0] : filled[-1] + 1]
    names = [_span(start, end) for start, end in zip(starts, shown, strict=True)]
    series = {"due while messages left": [counts[False][end] for end in shown]}
    if counts[True]:
        series["due before that, or before they were stored"] = [counts[True][end] for end in shown]
    labels = [_span_lines(start, end) for start, end in zip(starts, shown, strict=True)]
    return bars(Columns(names, labels, "late"), series, "messages")


def _stacked(buckets: Buckets, counts: Sequence[tuple[int, str, int]]) -> str:
    """Return a chart with the four most frequent destinations, and the sum of the others."""
    sums: Counter[str] = Counter()
    for _, name, number in counts:
        sums[name] += number
    named = [name for name, _ in sums.most_common(len(COLORS))]
    series = {name: [0] * len(buckets.keys) for name in (*named, *([OTHERS] if len(sums) > len(named) else []))}
    for key, name, number in counts:
        series[name if name in named else OTHERS][key - buckets.keys[0]] += number
    return bars(buckets.columns, series, "messages")


def _page(title: str, totals: Totals, tables: Mapping[str, list[dict[str, Any]]], charts: Charts) -> str:
    parts = [
        f"<h1>{html.escape(title)}</h1><p>As of {_shown(totals.until)}, from {totals.entries:,} entries.</p>",
        *(f'<p class="bad">{html.escape(fault)}</p>' for fault in totals.faults),
        _numbers(totals, charts),
        f"<h2>How late messages left</h2>{charts.histogram}",
        f"<h2>Lateness over time</h2>{charts.lateness}",
        "<h2>By destination</h2>",
        _table(tables["destinations"]),
        *_shards(tables),
        f"<h2>Still to come</h2>{charts.forecast}",
        "<h2>Retries and errors</h2>",
        _table(tables["errors"]),
    ]
    for name in ("lost", "duplicated", "early"):
        parts += [f"<h2>{name.capitalize()}</h2>", _table(tables[name])]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


#: What an audit of several shards says, and does not.
OF_SHARDS: Final = (
    "Counts are those of all shards. Order and lateness hold in each shard for itself, by the clock of its database."
)


def _shards(tables: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    if "by_shard" not in tables:
        return []
    return ["<h2>By shard</h2>", f'<p class="none">{OF_SHARDS}</p>', _table(tables["by_shard"])]


def _numbers(totals: Totals, charts: Charts) -> str:
    names = ("scheduled", "dispatched", "failed", "cancelled", "waiting", "overdue", "lost", "duplicated", "early")
    boxes = []
    for name in names:
        value, judged = getattr(totals, name), name in {"overdue", "lost", "duplicated", "early"}
        most = totals.maximum_overdue if name == "overdue" else 0
        kind = (' class="bad"' if value > most else ' class="good"') if judged else ""
        boxes.append(f"<div><b{kind}>{value:,}</b>{name}</div>")
    boxes += [f"<div><b>{_duration(charts.late[name])}</b>{name} late</div>" for name in ("p50", "p99", "longest")]
    note = ""
    if charts.behind:
        note = (
            f'<p class="none">Not in these figures: {charts.behind:,} messages that were due before the first message '
            "of the journal left, or before they were stored. The longest of them was "
            f"{_duration(charts.longest_behind)} late.</p>"
        )
    return f'<div class="numbers">{"".join(boxes)}</div>{note}'


#: What the columns of tables are called.
HEADINGS: Final = {name: f"{name}, s" for name in ("p50", "p90", "p99", "p999", "longest")}


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return '<p class="none">none</p>'
    head = _row("th", [HEADINGS.get(name, name) for name in rows[0]])
    more = f'<p class="none">the first {LONGEST_TABLE}</p>' if len(rows) == LONGEST_TABLE else ""
    body = "".join(_row("td", row.values()) for row in rows)
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>{more}"


def _row(cell: str, values: Iterable[object]) -> str:
    return f"<tr>{''.join(f'<{cell}>{html.escape(_shown(value))}</{cell}>' for value in values)}</tr>"


def _span(start: float | None, end: float | None) -> str:
    """Return the name of a bar: what it holds."""
    if start is None:
        return f"≤ {_duration(end)}"
    return f"> {_duration(start)}" if end is None else f"{_duration(start)} to {_duration(end)}"


def _span_lines(start: float | None, end: float | None) -> tuple[str, str]:
    """Return the name of a bar in two lines that are as narrow as it is."""
    if start is None or end is None:
        return _span(start, end), ""
    begin, until = _duration(start), _duration(end)
    same_unit = begin.split()[1] == until.split()[1]
    return f"{begin.split()[0] if same_unit else begin} to", until


def _duration(seconds: float | None) -> str:
    """Return a time in the unit that reads best."""
    if seconds is None:
        return "-"
    for least, unit in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if abs(seconds) >= least:
            return f"{seconds / least:.3g} {unit}"
    return f"{seconds * 1000:.3g} ms"


def _shown(value: object) -> str:
    match value:
        case None:
            return "-"
        case datetime():
            return value.strftime("%Y-%m-%d %H:%M:%S UTC")
        case float():
            return f"{value:,.3f}"
        case int():
            return f"{value:,}"
    return str(value)


WIDTH: Final = 900
HEIGHT: Final = 250
LEFT: Final = 70
RIGHT: Final = 36
#: Below a chart: a line of times, a line of dates, the name of the axis and the legend.
CHART_BOTTOM: Final = 72
CHART_TOP: Final = 26
WIDEST_BAR: Final = 80
COLORS: Final = ("var(--a)", "var(--b)", "var(--c)", "var(--d)")
COLOR_OF_OTHERS: Final = "var(--e)"
NOTHING: Final = '<p class="none">no data</p>'
MOST_LABELS: Final = 9
#: Bars up to which each has its number above it.
MOST_NUMBERED: Final = 16
#: About the width of a character, and that of an entry of a legend besides its name.
CHARACTER: Final = 6.2
LEGEND_GAP: Final = 34


@dataclass(frozen=True)
class Columns:
    """The places of a chart's columns, with the name of each for its tooltip and, of some, two lines below the axis."""

    names: Sequence[str]
    labels: Sequence[tuple[str, str] | None]
    axis: str

    @property
    def step(self) -> float:
        """The width of a column."""
        return (WIDTH - LEFT - RIGHT) / len(self.names)

    def middle(self, position: int) -> float:
        """Return where a column is."""
        return LEFT + (position + 0.5) * self.step

    def drawn(self) -> list[str]:
        """Return the labels, and the name of the axis."""
        floor = HEIGHT - CHART_BOTTOM
        parts = []
        for position, label in enumerate(self.labels):
            if label is not None:
                parts += [
                    _text(self.middle(position), floor + 15 * (line + 1), text)
                    for line, text in enumerate(label)
                    if text
                ]
        return [*parts, _text(LEFT + (WIDTH - LEFT - RIGHT) / 2, floor + 46, self.axis)]


def bars(columns: Columns, series: Mapping[str, Sequence[int]], title: str) -> str:
    """Return a chart with a column of one bar upon another for each place; a series for each name."""
    sums = [sum(values) for values in zip(*series.values(), strict=True)]
    if not any(sums):
        return NOTHING
    top = _round_top(max(sums))
    colors = dict(zip(series, (*COLORS, COLOR_OF_OTHERS), strict=False))
    parts = [*_axis(top, title), *columns.drawn()]
    for position, total in enumerate(sums):
        below = 0
        for name, values in series.items():
            number = values[position]
            if number:
                told = f"{columns.names[position]}: {number:,}{f' {name}' if len(series) > 1 else ''}"
                parts.append(_rectangle(columns, position, below, number, top, colors[name], told))
            below += number
        if total and len(sums) <= MOST_NUMBERED:
            parts.append(_text(columns.middle(position), _height(total, top) - 4, f"{total:,}"))
    return _svg(title, [*parts, *(_legend(colors) if len(series) > 1 else [])])


def lines(columns: Columns, series: Mapping[str, Sequence[float | None]], title: str) -> str:
    """Return a line chart, a line for each name; a line has gaps where nothing was measured."""
    longest = max((value for values in series.values() for value in values if value is not None), default=None)
    if longest is None:
        return NOTHING
    top = _round_top(longest)
    parts, colors = [*_axis(top, title), *columns.drawn()], dict(zip(series, COLORS, strict=False))
    for name, values in series.items():
        points: list[tuple[str, str]] = []
        for position, value in enumerate([*values, None]):
            if value is not None:
                points.append((f"{columns.middle(position):.1f}", f"{_height(value, top):.1f}"))
                continue
            if len(points) > 1:
                path = " ".join(map(",".join, points))
                parts.append(f'<polyline points="{path}" fill="none" stroke="{colors[name]}" stroke-width="2"/>')
            points = []
        for position, value in enumerate(values):
            if value is not None:
                told = html.escape(f"{columns.names[position]}: {name} {_duration(value)}")
                x, y = f"{columns.middle(position):.1f}", f"{_height(value, top):.1f}"
                parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colors[name]}"><title>{told}</title></circle>')
    return _svg(title, [*parts, *_legend(colors)])


def _svg(title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">'
        f"<title>{html.escape(title)}</title>{''.join(parts)}</svg>"
    )


def _height(value: float, top: float) -> float:
    return HEIGHT - CHART_BOTTOM - max(value, 0) / top * (HEIGHT - CHART_BOTTOM - CHART_TOP)


def _rectangle(columns: Columns, position: int, below: int, number: int, top: float, color: str, tooltip: str) -> str:
    y = _height(below + number, top)
    height = max(_height(below, top) - y, 1)
    width = min(columns.step * 0.84, WIDEST_BAR)
    return (
        f'<rect x="{columns.middle(position) - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{color}"><title>{html.escape(tooltip)}</title></rect>'
    )


def _round_top(longest: float) -> float:
    """Return a round number, not less than the value; of messages an even number, so that its half is whole."""
    if longest <= 0:
        return 1
    power = 10.0 ** math.floor(math.log10(longest))
    tops = (factor * power for factor in (1, 2, 3, 4, 5, 6, 8, 10, 20))
    counts = isinstance(longest, int)
    return next(top for top in tops if top >= longest * 0.999_999 and not (counts and top % 2))


def _axis(top: float, title: str) -> list[str]:
    parts = [f'<text x="{LEFT - 60}" y="12">{html.escape(title)}</text>']
    for part in (0, 0.5, 1):
        y = _height(top * part, top)
        shade = ".5" if part == 0 else ".15"
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{top * part:,.10g}</text>')
        ends = f'x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"'
        parts.append(f'<line {ends} stroke="currentColor" stroke-opacity="{shade}"/>')
    return parts


def _legend(colors: Mapping[str, str]) -> list[str]:
    parts, x = [], float(LEFT)
    longest = int(((WIDTH - LEFT) / len(colors) - LEGEND_GAP) / CHARACTER)
    for name, color in colors.items():
        shown = name if len(name) <= longest else f"{name[: longest - 1]}…"
        parts.append(f'<rect x="{x:.0f}" y="{HEIGHT - 12}" width="10" height="10" fill="{color}"/>')
        parts.append(
            f'<text x="{x + 14:.0f}" y="{HEIGHT - 3}">{html.escape(shown)}<title>{html.escape(name)}</title></text>'
        )
        x += len(shown) * CHARACTER + LEGEND_GAP
    return parts


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{html.escape(text)}</text>'
