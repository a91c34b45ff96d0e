"""The charts of a report: whole documents whatever the figures."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree

import pytest

pytest.importorskip("pyspark")

from delayline.spark.report import bars, lines, stacked

HOUR = datetime(2026, 5, 1, 9, tzinfo=UTC)


def shapes(svg: str, kind: str) -> list[ElementTree.Element]:
    return [one for one in ElementTree.fromstring(svg).iter() if one.tag == kind]  # noqa: S314 - ours


def test_bars_are_as_high_as_their_numbers() -> None:
    first, second = shapes(bars([("< 1 ms", 10), ("<script>", 5)], "by lateness"), "rect")
    assert float(first.attrib["height"]) == pytest.approx(2 * float(second.attrib["height"]))
    assert [one.text for one in (first[0], second[0])] == ["< 1 ms: 10", "<script>: 5"]


def test_columns_stack_the_busiest_destinations_and_the_others_together() -> None:
    names = ["a", "b", "c", "d", "e", "f"]
    values = [(HOUR, name, 10 - place) for place, name in enumerate(names)]
    titles = [one.findtext("title") for one in shapes(stacked(values), "rect")]
    assert titles[:6] == [
        "2026-05-01 09:00 a: 10",
        "2026-05-01 09:00 b: 9",
        "2026-05-01 09:00 c: 8",
        "2026-05-01 09:00 d: 7",
        "2026-05-01 09:00 others: 11",
        None,  # of the legend
    ]


def test_lines_leave_out_hours_without_data() -> None:
    hours = [HOUR + timedelta(hours=place) for place in range(3)]
    svg = lines(hours, {"p50": [0.1, None, 0.3], "p99": [0.2, None, 0.0]})
    assert len(shapes(svg, "polyline")) == 2 and len(shapes(svg, "circle")) == 4


@pytest.mark.parametrize("chart", [bars([], "x"), stacked([]), lines([], {"p50": []}), lines([HOUR], {"p50": [None]})])
def test_a_chart_without_data_shows_a_text(chart: str) -> None:
    assert "no data" in chart


def test_a_figure_that_is_all_zeros_is_drawn_too() -> None:
    assert len(shapes(lines([HOUR], {"p50": [0.0]}), "circle")) == 1
    assert len(shapes(bars([("x", 0)], "x"), "rect")) == 1
