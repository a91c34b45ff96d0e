"""Numbers of pending messages, for metrics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from delayline.delayed.pauses import SupportsDispatchPauses
from delayline.delayed.store import SupportsDueForecast

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from delayline.clock import Clock
    from delayline.delayed.pauses import DispatchPause
    from delayline.delayed.store import DueBucket
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


@dataclass(frozen=True, slots=True)
class DueApart:
    """Pending messages by the time until they are due, what is paused apart."""

    buckets: Mapping[str, DueBucket]
    """By the names of `BUCKETS`."""
    earliest: datetime | None
    """The earliest due time of what is not paused; None if there is none."""


async def pauses_of(store: object) -> Sequence[DispatchPause]:
    """Return the pauses of dispatching from a store; none of a store that knows none."""
    return await store.dispatch_pauses.all() if isinstance(store, SupportsDispatchPauses) else ()


async def due_apart(store: SupportsDueForecast, now: datetime, pauses: Sequence[DispatchPause]) -> DueApart:
    """Count the pending messages of a store."""
    edges = [now, *(now + end for end in ENDS.values())]
    forecast = await (store.due_forecast(edges, by_destination=True) if pauses else store.due_forecast(edges))
    named = dict(zip(BY_TIME, forecast.buckets, strict=True))
    paused, earliest, overdue = {pause.destination for pause in pauses}, forecast.earliest, named["overdue"]
    held = 0
    if isinstance(store, SupportsDispatchPauses) and paused:
        earliest = await store.dispatch_pauses.earliest()
        of_paused = (number for name, number in overdue.destinations.items() if name in paused)
        held = overdue.count if None in paused else sum(of_paused)
    named["paused"] = replace(overdue, count=held, exact=overdue.exact or not paused)
    named["overdue"] = replace(overdue, count=overdue.count - held)
    return DueApart(named, earliest)


async def _count(store: SupportsDueForecast, clock: Clock) -> Pending:
    now, pauses = clock.now(), await pauses_of(store)
    due = await due_apart(store, now, pauses)
    overdue = 0.0 if due.earliest is None else (now - due.earliest).total_seconds()
    return Pending(
        {name: bucket.count for name, bucket in due.buckets.items()},
        frozenset(name for name, bucket in due.buckets.items() if not bucket.exact),
        max(0.0, overdue),
        frozenset(pause.destination for pause in pauses),
    )
