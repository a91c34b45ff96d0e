"""Numbers of pending messages, for metrics."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from delayline.delayed.pauses import SupportsDispatchPauses
from delayline.delayed.store import SupportsDueForecast

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delayline.clock import Clock
    from delayline.delayed.store import DelayedMessageStore
    from delayline.observer import ObservedEndpoint
    from delayline.telemetry.remembered import Question

#: The ends of the buckets, from the present time on; the last bucket has none.
ENDS: Final = {"1m": timedelta(minutes=1), "1h": timedelta(hours=1), "1d": timedelta(days=1)}
BY_TIME: Final = ("overdue", *ENDS, "later")
#: Overdue messages that are paused are counted apart: somebody wants them to wait.
BUCKETS: Final = ("overdue", "paused", *ENDS, "later")


@dataclass(frozen=True, slots=True)
class Pending:
    """Pending messages by due bucket: `overdue` or `paused`, within `1m`, `1h`, `1d`, or `later`."""

    numbers: Mapping[str, int]
    """How many, by bucket."""
    estimated: frozenset[str]
    """The buckets whose number is an estimate."""
    oldest_overdue: float
    """Seconds since the earliest due time of what is not paused; 0 if it is not past."""
    paused: frozenset[str | None] = frozenset()
    """The destinations to which dispatching is paused; None for the whole endpoint."""


def pending_question(endpoint: ObservedEndpoint) -> Question[Pending] | None:
    """Return what counts the endpoint's pending messages; None where its store cannot without reading each."""
    store = endpoint.store
    return partial(_count, store, endpoint.clock) if isinstance(store, SupportsDueForecast) else None


async def _count(store: SupportsDueForecast, clock: Clock) -> Pending:
    now = clock.now()
    pauses = await store.dispatch_pauses.all() if isinstance(store, SupportsDispatchPauses) else ()
    edges = [now, *(now + end for end in ENDS.values())]
    forecast = await (store.due_forecast(edges, by_destination=True) if pauses else store.due_forecast(edges))
    named = dict(zip(BY_TIME, forecast.buckets, strict=True))
    numbers = {name: bucket.count for name, bucket in named.items()} | {"paused": 0}
    estimated = {name for name, bucket in named.items() if not bucket.exact}
    paused, earliest = frozenset(pause.destination for pause in pauses), forecast.earliest
    if None in paused:
        numbers |= {"overdue": 0, "paused": numbers["overdue"]}
        earliest = None
    elif paused:
        held = sum(number for name, number in named["overdue"].destinations.items() if name in paused)
        numbers |= {"overdue": numbers["overdue"] - held, "paused": held}
        earliest = await cast("DelayedMessageStore", store).next_due()  # passes over what is paused
    if paused and "overdue" in estimated:
        estimated.add("paused")
    overdue = 0.0 if earliest is None else (now - earliest).total_seconds()
    return Pending(numbers, frozenset(estimated), max(0.0, overdue), paused)
