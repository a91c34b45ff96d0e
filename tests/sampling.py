"""The choice between `make test`, which runs a sample of the long suites, and `make test-all`, which runs everything.

`make test` sets DELAYLINE_TEST_SAMPLE to the commit. Other commits run other samples, so that over time each case is
run. Without the variable, as in `pytest tests/cluster`, every case runs.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Final, TypeVar

from delayline.testing import DeliveryConformance
from delayline.testing.conformance.delivery_failures import DeliveryFailures

if TYPE_CHECKING:
    from collections.abc import Sequence

Case = TypeVar("Case")

SEED: Final = os.environ.get("DELAYLINE_TEST_SAMPLE", "")


def sampled(cases: Sequence[Case], number: int) -> Sequence[Case]:
    """Return `number` of the cases in their order, chosen by the commit; all of them in `make test-all`."""
    if not SEED or number >= len(cases):
        return cases
    chosen = random.Random(SEED + repr(cases)).sample(range(len(cases)), number)  # noqa: S311 - repeatable
    return [cases[position] for position in sorted(chosen)]


if TYPE_CHECKING or SEED:

    class OtherLayout(DeliveryFailures):
        """The delivery suite for a layout whose mechanism another class tests whole; in `make test-all` all of it."""

else:

    class OtherLayout(DeliveryConformance):
        """The whole delivery suite."""
