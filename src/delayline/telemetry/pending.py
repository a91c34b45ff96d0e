"""Numbers of pending messages, for metrics."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from delayline.delayed.store import SupportsDueForecast

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delayline.clock import Clock
    from delayline.observer import ObservedEndpoint
    from delayline.telemetry.remembered import Question

#: The ends of the buckets, from the present time on; the last bucket has none.
ENDS: Final = {"1m": timedelta(minutes=1), "1h": timedelta(hours=1), "1d": timedelta(days=1)}
BUCKETS: Final = ("overdue", *ENDS, "later")


@dataclass(frozen=True, slots=True)
class Pending:
    """Pending messages by due bucket: `overdue`, within `1m`, `1h`, `1d`, or `later`."""

    numbers: Mapping[str, int]
    """How many, by bucket."""
    estimated: frozenset[str]
    """The buckets whose number is an estimate."""
    oldest_overdue: float
    """Seconds since the earliest due time; 0 if it is not past."""


def pending_question(endpoint: ObservedEndpoint) -> Question[Pending] | None:
    """Return what counts the endpoint's pending messages; None where its store cannot without reading each."""
    store = endpoint.store
    return partial(_count, store, endpoint.clock) if isinstance(store, SupportsDueForecast) else None


async def _count(store: SupportsDueForecast, clock: Clock) -> Pending:
    now = clock.now()
    forecast = await store.due_forecast([now, *(now + end for end in ENDS.values())])
    named = dict(zip(BUCKETS, forecast.buckets, strict=True))
    overdue = 0.0 if forecast.earliest is None else (now - forecast.earliest).total_seconds()
    return Pending(
        {name: bucket.count for name, bucket in named.items()},
        frozenset(name for name, bucket in named.items() if not bucket.exact),
        max(0.0, overdue),
    )
