"""InnoDB's estimates of ranges that make up a whole table, some of which it has doubled."""

from __future__ import annotations

import pytest

from delayline.sql.mariadb.dialect import _adding_up


@pytest.mark.parametrize(
    ("estimates", "total", "right"),
    [
        pytest.param([0, 600, 3000, 7200, 18460, 0], 20_000, [0, 600, 3000, 7200, 9200, 0], id="11.8: one doubled"),
        pytest.param([0, 600, 3000, 7200, 10000, 0], 20_000, [0, 600, 3000, 7200, 9200, 0], id="10.11: a half"),
        pytest.param([2000, 12000, 11000, 13000], 20_000, [2000, 6000, 5500, 6500], id="11.8: three doubled"),
        pytest.param([2000, 10000, 10000, 10000], 20_000, [2000, 6000, 6000, 6000], id="10.11: three at half"),
        pytest.param([2000, 10000], 20_000, [2000, 18000], id="10.11: one that is more than half"),
        pytest.param([2000, 18000], 20_000, [2000, 18000], id="nothing doubled"),
        pytest.param([20000, 20000], 20_000, [10000, 10000], id="all doubled"),
        pytest.param([2000, 9000], 500, [2000, 9000], id="the table's number is far from its ranges"),
        pytest.param([0, 0], 0, [0, 0], id="empty"),
        pytest.param([0, 0], 10, [10, 0], id="not yet estimated"),
    ],
)
def test_they_are_corrected(estimates: list[float], total: int, right: list[float]) -> None:
    assert _adding_up(estimates, total) == pytest.approx(right, rel=0.02)


@pytest.mark.parametrize(("version", "off"), [("10.11", 1), ("11.8", 0.35)])  # what was cut off at half is not known
@pytest.mark.parametrize("numbers", [[40_000, 30_000, 20_000, 10_000], [96_000, 1000, 1000, 2000], [25_000] * 4])
def test_estimates_of_every_version_are_about_right(numbers: list[int], version: str, off: float) -> None:
    total = sum(numbers)
    doubled = [2 * number if number > 7500 else number for number in numbers]
    if version == "10.11":
        doubled = [min(number, total // 2) for number in doubled]
    found = _adding_up(list(map(float, doubled)), total)
    assert sum(found) == pytest.approx(total)
    assert found == pytest.approx(numbers, rel=off)
