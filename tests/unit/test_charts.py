"""The charts of a report: whole documents whatever the figures, whose axes and columns say what they show."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree

import pytest

pytest.importorskip("pyspark")

from delayline.spark.report import UNITS, Buckets, Columns, _span, _span_lines, _stacked, bars, lines

HOUR = datetime(2026, 5, 1, 9, tzinfo=UTC)
LATE = datetime(2099, 12, 31, tzinfo=UTC)
ONE = Columns(["x"], [("x", "")], "x")


def shapes(svg: str, kind: str) -> list[ElementTree.Element]:
    return [shape for shape in ElementTree.fromstring(svg).iter() if shape.tag == kind]  # noqa: S314 - ours


def titles(svg: str) -> list[str | None]:
    return [shape.findtext("title") for shape in shapes(svg, "rect")]


def labels(buckets: Buckets) -> list[tuple[str, str]]:
    return [label for label in buckets.columns.labels if label is not None]


def test_bars_are_as_high_as_their_numbers_and_say_them() -> None:
    columns = Columns(["\u2264 1 ms", "<script>"], [("\u2264 1 ms", ""), ("<script>", "")], "late")
    svg = bars(columns, {"messages": [10, 5]}, "by lateness")
    first, second = shapes(svg, "rect")
    assert float(first.attrib["height"]) == pytest.approx(2 * float(second.attrib["height"]))
    assert titles(svg) == ["\u2264 1 ms: 10", "<script>: 5"]
    assert {"10", "5", "late"} <= {shape.text for shape in shapes(svg, "text")}


def test_columns_stack_the_busiest_destinations_and_the_others_together() -> None:
    buckets = Buckets.between(HOUR, HOUR, HOUR, HOUR)
    values = [(buckets.first, name, 10 - place) for place, name in enumerate("abcdef")]
    assert titles(_stacked(buckets, values))[:6] == [
        *(f"a minute from 2026-05-01 09:00 UTC: {10 - place} {name}" for place, name in enumerate("abcd")),
        "a minute from 2026-05-01 09:00 UTC: 11 others",
        None,  # of the legend
    ]


def test_lines_have_gaps_where_nothing_was_measured() -> None:
    columns = Buckets.between(HOUR, HOUR, HOUR + timedelta(minutes=4), HOUR + timedelta(minutes=4)).columns
    svg = lines(columns, {"p50": [0.1, 0.2, None, 0.3, 0.2], "p99": [0.2, None, 0.0, None, 1.0]}, "seconds")
    assert len(shapes(svg, "polyline")) == 2 and len(shapes(svg, "circle")) == 7


@pytest.mark.parametrize("chart", [bars(ONE, {"x": [0]}, "x"), lines(ONE, {"p50": [None]}, "x")])
def test_a_chart_without_data_shows_a_text(chart: str) -> None:
    assert "no data" in chart


def test_a_figure_that_is_zero_or_alone_is_drawn_too() -> None:
    assert len(shapes(lines(ONE, {"p50": [0.0]}, "x"), "circle")) == 1
    assert float(shapes(bars(ONE, {"x": [1]}, "x"), "rect")[0].attrib["width"]) == 80


def test_an_hour_fills_a_chart_though_one_message_is_due_in_2099() -> None:
    # Given messages of which nearly all are due within an hour
    buckets = Buckets.between(HOUR, HOUR, HOUR + timedelta(minutes=59), LATE)
    # Then the hour has a column for each minute, and the others share one that says until when
    assert len(buckets.keys) == 61
    assert buckets.columns.names[0] == "a minute from 2026-05-01 09:00 UTC"
    assert buckets.columns.names[-1] == "after that, until 2099-12-31"
    assert labels(buckets)[0] == ("09:00", "2026-05-01") and labels(buckets)[-1] == ("later", "")


def test_what_was_due_long_ago_has_a_column_of_its_own() -> None:
    buckets = Buckets.between(
        datetime(2020, 1, 1, tzinfo=UTC), HOUR, HOUR + timedelta(hours=5), HOUR + timedelta(hours=6)
    )
    assert (buckets.unit.name, len(buckets.keys)) == ("ten minutes", 38)
    assert buckets.columns.names[0] == "before that, from 2020-01-01"
    assert labels(buckets)[0] == ("earlier", "")


@pytest.mark.parametrize(
    ("span", "unit", "first", "last"),
    [
        (timedelta(0), "a minute", ("09:00", "2026-05-01"), ("09:00", "2026-05-01")),
        (timedelta(hours=20), "an hour", ("09:00", "2026-05-01"), ("03:00", "")),
        (timedelta(days=40), "a day", ("01 May", "2026"), ("10 Jun", "")),
        (timedelta(days=300), "a week", ("27 Apr", "2026"), ("01 Feb", "2027")),
        (timedelta(days=4 * 365), "a month", ("May", "2026"), ("Nov", "")),
        (timedelta(days=40 * 365), "a year", ("2026", ""), ("2066", "")),
    ],
)
def test_labels_have_dates_and_years(span: timedelta, unit: str, first: tuple[str, str], last: tuple[str, str]) -> None:
    buckets = Buckets.between(HOUR, HOUR, HOUR + span, HOUR + span)
    assert buckets.unit.name == unit
    found = labels(buckets)
    assert (found[0], found[-1], len(found) <= 9) == (first, last, True)


def test_bars_of_lateness_say_what_they_hold() -> None:
    spans = [(None, 0.005), (0.005, 0.01), (0.5, 1.0), (300.0, 3600.0), (3600.0, None)]
    assert [_span(*span) for span in spans] == [
        "\u2264 5 ms",
        "5 ms to 10 ms",
        "500 ms to 1 s",
        "5 min to 1 h",
        "> 1 h",
    ]
    assert [_span_lines(*span) for span in spans[1:3]] == [("5 to", "10 ms"), ("500 ms to", "1 s")]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_span_begins_at_or_before_its_times(unit: object) -> None:
    from delayline.spark.report import Unit

    assert isinstance(unit, Unit)
    for at in (HOUR, datetime(1969, 12, 31, 23, 59, tzinfo=UTC), LATE):
        key = unit.key_of(at)
        assert unit.begin_of(key) <= at < unit.begin_of(key + 1)
