"""The forecast and the heat map as drawings: well-formed whatever the figures and names."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from delayline.dashboard.charts import Bounds, Colours, Column, HeatMap, bounds, compact, forecast, heat_map, seconds
from delayline.dashboard.contents import body_of
from delayline.dashboard.rendering import visible

HOSTILE = '"><script>alert(1)</script>'


def parts(svg: str, kind: str) -> list[ElementTree.Element]:
    return [one for one in ElementTree.fromstring(svg).iter() if one.get("class") == kind]  # noqa: S314 - ours


def columns(*counts: list[int], capacity: float | None = None) -> list[Column]:
    return [Column(f"{place} min", f"minute {place}", one, capacity=capacity) for place, one in enumerate(counts)]


def test_a_column_is_as_high_as_the_logarithm_of_its_total() -> None:
    svg = forecast(columns([10], [1000], [100_000]), ["a"], range(7), width=800, name="f")
    low, middle, high = (float(one.attrib["height"]) for one in parts(svg, "s0"))
    assert high - middle == pytest.approx(middle - low, abs=0.2)


def test_destinations_share_a_column_as_they_share_its_total() -> None:
    svg = forecast(columns([75, 25]), ["a", "b"], range(7), width=800, name="f")
    (first,), (second,) = parts(svg, "s0"), parts(svg, "s1")
    assert float(first.attrib["height"]) == pytest.approx(3 * float(second.attrib["height"]), rel=0.02)


def test_buckets_above_the_drain_rate_are_marked_by_more_than_a_colour() -> None:
    svg = forecast(columns([10], [99], capacity=50), ["a"], range(7), width=800, name="f")
    assert len(parts(svg, "mark")) == 1
    assert len(parts(svg, "capacity")) == 1
    assert "more than the drain rate" in svg
    assert "1 above the drain rate" in svg


def test_the_cold_tier_is_hatched_on_top() -> None:
    svg = forecast([Column("1 y", "a year", [5], cold=5)], ["a"], range(7), width=800, name="f")
    (hatch,) = parts(svg, "hatch")
    assert hatch.attrib["fill"] == "url(#f-hatch)"
    assert float(hatch.attrib["y"]) < float(parts(svg, "s0")[0].attrib["y"])


@pytest.mark.parametrize("width", [320, 1040])
def test_names_of_strangers_are_text_in_a_drawing(width: int) -> None:
    hostile = Column(HOSTILE, HOSTILE, [1], exact=False)
    svg = forecast([hostile], [HOSTILE], range(7), width=width, name="f")
    assert "<script" not in svg
    assert "about 1" in svg
    ElementTree.fromstring(svg)  # noqa: S314 - ours
    ElementTree.fromstring(heat_map(HeatMap([HOSTILE], [1.0], [[1, 2]]), width=width))  # noqa: S314 - ours


@pytest.mark.parametrize("counts", [[], [[0]], [[0], [1]], [[10**15]]])
def test_a_forecast_of_any_figures_is_drawn(counts: list[list[int]]) -> None:
    ElementTree.fromstring(forecast(columns(*counts), ["a"], range(7), width=500, name="f"))  # noqa: S314 - ours


def test_a_heat_map_shows_each_number_once_and_the_percentiles_as_lines() -> None:
    svg = heat_map(
        HeatMap(["09:00", "09:15"], [0.001, 1.0], [[1, 0, 3], [0, 100, 0]], [0.0005, 0.5], [None, 5.0]), width=800
    )
    cells = list(ElementTree.fromstring(svg).iter("rect"))  # noqa: S314 - ours
    assert [one.findtext("title") for one in cells] == [
        "09:00, up to 1 ms late: 1",
        "09:00, over 1 s late: 3",
        "09:15, up to 1 s late: 100",
    ]
    assert [one.attrib["class"] for one in cells] == ["h1", "h3", "h8"]
    assert len(parts(svg, "p50")[0].attrib["points"].split()) == 2
    # And a single column is a line too
    assert len(parts(svg, "p99")[0].attrib["points"].split()) == 2


@pytest.mark.parametrize("data", [HeatMap([], [1.0], []), HeatMap(["09:00"], [1.0], [[0, 0]], [0.0], [0.0])])
def test_a_heat_map_of_nothing_is_drawn(data: HeatMap) -> None:
    ElementTree.fromstring(heat_map(data, width=400))  # noqa: S314 - ours


def test_what_is_due_by_then_is_drawn_between_its_bounds() -> None:
    levels = [Bounds("1 min", 0, 2, 8), Bounds("1 h", 6, 7, 8), Bounds("1 d", 8, 8, 8)]
    drawn = bounds(levels, width=1040, name="a")
    assert "within 1 h: at least 6, at most 8, probably 7" in drawn
    hatched, certain = ([float(one.get("height", "")) for one in parts(drawn, kind)] for kind in ("hatch", "s0"))
    assert [round(8 * low / (high + low)) for high, low in zip(hatched, certain, strict=True)] == [0, 6, 8]
    assert bounds([], width=320, name="a")


def test_names_keep_their_colours() -> None:
    # Given three destinations, when one goes, the order changes, and another comes
    colours = Colours()
    before = dict(zip(names := ["billing", "shipping", "mail"], colours.of(names), strict=True))
    after = dict(zip(names := ["shipping", "archive", "billing"], colours.of(names), strict=True))
    # Then the others have the colours they had, and the new one has that of none
    assert (after["shipping"], after["billing"]) == (before["shipping"], before["billing"])
    assert after["archive"] not in before.values()
    assert dict(zip(names, colours.of(names), strict=True)) == after


def test_no_two_names_of_a_drawing_share_a_colour() -> None:
    colours = Colours()
    for first in range(0, 3000, 5):
        assert sorted(colours.of([f"queue{number}" for number in range(first, first + 6)])) == list(range(6))


def test_numbers_and_times_are_short() -> None:
    assert [compact(one) for one in (0, 999, 1000, 12_345, 3e6, 7e9)] == [
        "0",
        "999",
        "1\xa0k",
        "12.3\xa0k",
        "3\xa0M",
        "7\xa0G",
    ]
    assert [seconds(one) for one in (0.001, 0.25, 2, 90, 3600)] == ["1 ms", "250 ms", "2 s", "1.5 min", "1 h"]


def test_a_body_is_shown_in_the_form_that_is_asked_for() -> None:
    body = b'{"a":[1]}'
    assert [body_of(body, len(body), form).text for form in (None, "json", "text", "hex")] == [
        '{\n  "a": [\n    1\n  ]\n}',
        '{\n  "a": [\n    1\n  ]\n}',
        '{"a":[1]}',
        '00000000  7b 22 61 22 3a 5b 31 5d 7d                       {"a":[1]}',
    ]


def test_characters_that_hide_or_reorder_others_are_written_out() -> None:
    assert visible("a\u202eb\x00c\u200bd\ne\tf") == "a\\u202eb\\u0000c\\u200bd\ne\tf"
