"""The choice between `make test`, which runs a sample of the long suites, and `make test-all`, which runs everything.

`make test` sets DELAYLINE_TEST_SAMPLE to the commit. Other commits run other samples, so that over time each case is
run. Without the variable, as in `pytest tests/cluster`, every case runs.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Final, TypeVar

from delayline.testing import DeliveryConformance
from delayline.testing.conformance.delivery import DeliveryFailures

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

Case = TypeVar("Case")

#: One in so many of the cases marked `slow` is run.
SLOW_SHARE: Final = 4
SEED: Final = os.environ.get("DELAYLINE_TEST_SAMPLE", "")


def select(items: list[pytest.Item], config: pytest.Config) -> None:
    """In `make test`, deselect tests marked `long`, and sample those marked `sample` and `slow`.

    Of a test or group marked `sample(N)` N cases are kept, of the cases of all tests marked `slow` a quarter.
    """
    if not SEED:
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        marker = item.get_closest_marker("sample")
        group = marker.kwargs.get("group") if marker else None
        cases.setdefault(group or item.nodeid.partition("[")[0], []).append(item)
    selected: set[pytest.Item] = set()
    for alike in cases.values():
        marker = alike[0].get_closest_marker("sample")
        selected.update(sampled(alike, marker.args[0]) if marker else alike)
    selected -= {item for item in items if item.get_closest_marker("long")}
    slow = [item for item in items if item in selected and item.get_closest_marker("slow")]
    selected -= {*slow} - {*sampled(slow, len(slow) // SLOW_SHARE)}
    config.hook.pytest_deselected(items=[item for item in items if item not in selected])
    items[:] = [item for item in items if item in selected]


def sampled(cases: Sequence[Case], number: int) -> Sequence[Case]:
    """Return `number` of the cases in their order, chosen by the commit; all of them in `make test-all`."""
    if not SEED or number >= len(cases):
        return cases
    chosen = random.Random(SEED + repr(cases[0])).sample(range(len(cases)), number)  # noqa: S311 - repeatable
    return [cases[position] for position in sorted(chosen)]


if TYPE_CHECKING or SEED:

    class OtherLayout(DeliveryFailures):
        """The delivery suite for a layout whose mechanism another class tests whole; in `make test-all` all of it."""

else:

    class OtherLayout(DeliveryConformance):
        """The whole delivery suite."""
