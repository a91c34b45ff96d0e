"""Write an audit as an HTML page with SVG charts, without scripts and external resources."""

from __future__ import annotations

import html
import secrets
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from delayline.spark.errors import translated_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql import DataFrame

    from delayline.spark.audit import Audit, Totals


#: Rows of a table on the page; the DataFrames have all of them.
LONGEST_TABLE: Final = 50
MOST_HOURS: Final = 24 * 14
STYLE: Final = """
:root { color-scheme: light dark; --a: #2f6fb0; --b: #c0622b; --c: #4b8f4b; --d: #8a5aa8; --e: #888; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100% }
td, th { padding: .2rem .6rem; border-bottom: 1px solid #8884; text-align: right } td:first-child, th:first-child
{ text-align: left; overflow-wrap: anywhere }
.numbers { display: flex; flex-wrap: wrap; gap: 1rem } .numbers div { border: 1px solid #8886; border-radius: .4rem;
padding: .5rem .9rem } .numbers b { display: block; font-size: 1.3rem } .bad { color: #c22 } .good { color: #283 }
svg { width: 100%; height: auto; font: 11px system-ui, sans-serif } svg text { fill: currentColor }
.none { opacity: .7 }
"""


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
        totals = audit.totals()
        page = _page(title, totals, _tables(audit, totals))
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
    frames = {
        "histogram": (totals.dispatched, audit.histogram),
        "lateness": (totals.dispatched, _by_hour(audit)),
        "destinations": (totals.scheduled, audit.by_destination.limit(LONGEST_TABLE)),
        "errors": (totals.retries + totals.failed, audit.errors.limit(LONGEST_TABLE)),
        "forecast": (totals.waiting + totals.overdue, audit.forecast.limit(MOST_HOURS * 10)),
        "lost": (totals.lost, audit.lost.select("id", "destination", "due").limit(LONGEST_TABLE)),
        "duplicated": (
            totals.duplicated,
            audit.duplicated.select("id", "destination", "due", "extra").limit(LONGEST_TABLE),
        ),
        "early": (totals.early, audit.early.select("id", "destination", "due", "left").limit(LONGEST_TABLE)),
    }
    return {name: frame.toArrow().to_pylist() if number else [] for name, (number, frame) in frames.items()}


def _by_hour(audit: Audit) -> DataFrame:
    return audit.lateness.groupBy("hour").max("p50", "p99").orderBy("hour").limit(MOST_HOURS)


def _page(title: str, totals: Totals, tables: Mapping[str, list[dict[str, Any]]]) -> str:
    parts = [
        f"<h1>{html.escape(title)}</h1><p>As of {_shown(totals.until)}, from {totals.entries:,} entries.</p>",
        *(f'<p class="bad">{html.escape(fault)}</p>' for fault in totals.faults),
        _numbers(totals),
        "<h2>Lateness</h2>",
        bars([(_bar(row["up_to"]), row["count"]) for row in tables["histogram"]], "messages by lateness"),
        "<h2>Lateness by due hour, of the worst destination, in seconds</h2>",
        lines(
            [row["hour"] for row in tables["lateness"]],
            {name: [row[f"max({name})"] for row in tables["lateness"]] for name in ("p50", "p99")},
        ),
        "<h2>By destination</h2>",
        _table(tables["destinations"]),
        "<h2>Still to come, by due hour</h2>",
        stacked([(row["hour"], row["destination"] or "", row["count"]) for row in tables["forecast"]]),
        "<h2>Retries and errors</h2>",
        _table(tables["errors"]),
    ]
    for name in ("lost", "duplicated", "early"):
        parts += [f"<h2>{name.capitalize()}</h2>", _table(tables[name])]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _numbers(totals: Totals) -> str:
    names = ("scheduled", "dispatched", "failed", "cancelled", "waiting", "overdue", "lost", "duplicated", "early")
    boxes = []
    for name in names:
        value, judged = getattr(totals, name), name in {"overdue", "lost", "duplicated", "early"}
        most = totals.maximum_overdue if name == "overdue" else 0
        kind = (' class="bad"' if value > most else ' class="good"') if judged else ""
        boxes.append(f"<div><b{kind}>{value:,}</b>{name}</div>")
    late = totals.lateness
    boxes += [f"<div><b>{_shown(late[name])}</b>{name} late, s</div>" for name in ("p50", "p99", "longest")]
    return f'<div class="numbers">{"".join(boxes)}</div>'


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return '<p class="none">none</p>'
    head = _row("th", rows[0])
    more = f'<p class="none">the first {LONGEST_TABLE}</p>' if len(rows) == LONGEST_TABLE else ""
    return f"<table>{head}{''.join(_row('td', row.values()) for row in rows)}</table>{more}"


def _row(cell: str, values: Iterable[object]) -> str:
    return f"<tr>{''.join(f'<{cell}>{html.escape(_shown(value))}</{cell}>' for value in values)}</tr>"


def _bar(end: float | None) -> str:
    if end is None:
        return "longer"
    return f"{end * 1000:g} ms" if end < 1 else f"{end:g} s"


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
HEIGHT: Final = 220
LEFT: Final = 60
CHART_BOTTOM: Final = 40
CHART_TOP: Final = 20
COLORS: Final = ("var(--a)", "var(--b)", "var(--c)", "var(--d)")
COLOR_OF_OTHERS: Final = "var(--e)"
NOTHING: Final = '<p class="none">no data</p>'
MOST_LABELS: Final = 12


def bars(values: Sequence[tuple[str, int]], title: str) -> str:
    """Return a bar chart."""
    if not values:
        return NOTHING
    top = max(number for _, number in values) or 1
    step = (WIDTH - LEFT) / len(values)
    parts = [_axis(top)]
    for position, (name, number) in enumerate(values):
        x = LEFT + position * step
        parts.append(_rectangle(x, 0, number, top, step, COLORS[0], f"{name}: {number:,}"))
        parts.append(_text(x + step / 2, HEIGHT - CHART_BOTTOM + 16, name))
    return _svg(title, parts)


def stacked(values: Sequence[tuple[datetime, str, int]]) -> str:
    """Return a column for each hour, with the four most frequent names and the sum of the others."""
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
    for position, (hour, column) in enumerate(columns.items()):
        below = 0
        for name, number in column.items():
            color = COLORS[named.index(name)] if name in named else COLOR_OF_OTHERS
            tooltip = f"{hour:%Y-%m-%d %H:00} {name or 'others'}: {number:,}"
            parts.append(_rectangle(LEFT + position * step, below, number, top, step, color, tooltip))
            below += number
    parts += _hours(list(columns))
    colors = dict(zip(named, COLORS, strict=False)) | ({"others": COLOR_OF_OTHERS} if len(sums) > len(named) else {})
    return _svg("messages by due hour", [*parts, *_legend(colors)])


def lines(hours: Sequence[datetime], series: Mapping[str, Sequence[float | None]]) -> str:
    """Return a line chart over the hours, a line for each name."""
    top = max((value for values in series.values() for value in values if value is not None), default=None)
    if top is None:
        return NOTHING
    top, step, parts = top or 1.0, (WIDTH - LEFT) / len(hours), [_axis(top or 1.0)]
    colors = dict(zip(series, COLORS, strict=False))
    for name, values in series.items():
        points = [
            (f"{LEFT + (position + 0.5) * step:.1f}", f"{_height(value, top):.1f}")
            for position, value in enumerate(values)
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
    return HEIGHT - CHART_BOTTOM - value / top * (HEIGHT - CHART_BOTTOM - CHART_TOP)


def _rectangle(x: float, below: int, number: int, top: int, step: float, color: str, tooltip: str) -> str:
    y = _height(below + number, top)
    height = _height(below, top) - y
    gap = min(step * 0.1, 4)
    return (
        f'<rect x="{x + gap:.1f}" y="{y:.1f}" width="{step - 2 * gap:.1f}" height="{height:.1f}" fill="{color}">'
        f"<title>{html.escape(tooltip)}</title></rect>"
    )


def _axis(top: float) -> str:
    shown = f"{top:,}" if isinstance(top, int) else f"{top:,.3f}"
    floor = HEIGHT - CHART_BOTTOM
    return (
        f'<text x="{LEFT - 6}" y="{CHART_TOP + 4}" text-anchor="end">{shown}</text>'
        f'<text x="{LEFT - 6}" y="{floor}" text-anchor="end">0</text>'
        f'<line x1="{LEFT}" y1="{floor}" x2="{WIDTH}" y2="{floor}" stroke="currentColor" stroke-opacity=".4"/>'
    )


def _hours(hours: Sequence[datetime]) -> list[str]:
    step, each = (WIDTH - LEFT) / len(hours), -(-len(hours) // MOST_LABELS)
    form = "%H:00" if hours[0].date() == hours[-1].date() else "%m-%d %H:00"
    return [
        _text(LEFT + (position + 0.5) * step, HEIGHT - CHART_BOTTOM + 16, f"{hours[position]:{form}}")
        for position in range(0, len(hours), each)
    ]


def _legend(colors: Mapping[str, str]) -> list[str]:
    return [
        f'<rect x="{LEFT + position * 160}" y="{HEIGHT - 12}" width="10" height="10" fill="{color}"/>'
        f'<text x="{LEFT + position * 160 + 14}" y="{HEIGHT - 3}">{html.escape(name[:22])}</text>'
        for position, (name, color) in enumerate(colors.items())
    ]


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{html.escape(text)}</text>'
