"""What the scenarios run: one SQLite file with a store and queues, and messages put into it."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from benchmarks.bare import BODY, HEADERS
from delayline import (
    DelayedMessage,
    Endpoint,
    Headers,
    Message,
    SqlDelayedMessageStore,
    SqlTransport,
    StoredDelivery,
    TransactionMode,
)
from delayline.message import encode_headers, from_wire_time, to_wire_time

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

    from delayline import MessageContext

DESTINATION = "destination"
NAME = "bench"
Figures = dict[str, float]


def endpoint_on(place: Path | str, *, polling: bool = True, concurrency: int = 16) -> Endpoint:
    """Return an endpoint over one file or one database: exactly once."""
    url = url_of(place)
    delivery = StoredDelivery(SqlDelayedMessageStore(url), polling=polling)
    return Endpoint(NAME, transport=SqlTransport(url), delayed_delivery=delivery, concurrency=concurrency)


@contextlib.asynccontextmanager
async def store_on(place: Path | str) -> AsyncIterator[SqlDelayedMessageStore]:
    """Set the database up and open its store alone, to fill it."""
    endpoint = endpoint_on(place)
    await endpoint.setup()
    await endpoint.transport.setup_infrastructure([DESTINATION])
    store = SqlDelayedMessageStore(url_of(place))
    await store.initialize(NAME, TransactionMode.TRANSACTION_SCOPE)
    try:
        yield store
    finally:
        await store.close()


async def fill(store: SqlDelayedMessageStore, prefix: str, dues: Iterable[datetime], destination: str) -> None:
    """Store a message for each due time, a thousand to a transaction."""
    batch: list[DelayedMessage] = []
    for number, due in enumerate(dues):
        headers = encode_headers({Headers.DELIVER_AT: to_wire_time(due)}) if destination == NAME else HEADERS
        message = Message.from_encoded(f"{prefix}-{number:030d}", headers, BODY)
        batch.append(DelayedMessage(message, destination, due))
        if len(batch) == 1000:
            await store.store_many(batch)
            batch = []
    if batch:
        await store.store_many(batch)


async def fill_far(store: SqlDelayedMessageStore, number: int) -> None:
    """Store messages due from next year on, a second apart."""
    start = datetime.now(UTC) + timedelta(days=365)
    await fill(store, "far", (start + timedelta(seconds=second) for second in range(number)), DESTINATION)


def url_of(place: Path | str) -> str:
    """Return the URL of a file, or the URL itself."""
    return place if isinstance(place, str) else f"sqlite:///{place}"


def lateness_of(message: Message) -> float:
    """Return now minus due, in milliseconds."""
    due = from_wire_time(message.headers[Headers.DELIVER_AT])
    return (datetime.now(UTC) - due).total_seconds() * 1000


def percentile(values: list[float], share: float) -> float:
    """Return the value below which that share of the sorted values lies."""
    return values[min(len(values) - 1, int(len(values) * share))]


async def lateness(place: Path | str, *, number: int, gap: timedelta, prefix: str = "spread") -> Figures:
    """Return how late messages reach a handler of the process that dispatches them."""
    endpoint, late, done = endpoint_on(place), list[float](), asyncio.Event()

    async def handle(message: Message, context: MessageContext) -> None:
        del context
        late.append(lateness_of(message))
        if len(late) == number:
            done.set()

    endpoint.handler(handle)
    async with store_on(place) as store:
        start = datetime.now(UTC) + timedelta(seconds=2 + number / 20_000)
        await fill(store, prefix, (start + gap * position for position in range(number)), NAME)
    async with endpoint:
        await asyncio.wait_for(done.wait(), 120)
    late.sort()
    return {
        "lateness p50 ms": percentile(late, 0.5),
        "lateness p99 ms": percentile(late, 0.99),
        "lateness max ms": late[-1],
        "early": float(sum(value < 0 for value in late)),
    }


def against(name: str, rates: list[tuple[float, float]]) -> Figures:
    """Return our rate, the other's, and how many times theirs ours is: medians of rounds that alternate."""
    return {
        "delayline /s": statistics.median(ours for ours, _ in rates),
        f"{name} /s": statistics.median(raw for _, raw in rates),
        "ratio": statistics.median(ours / raw for ours, raw in rates),
    }
