"""What the scenarios run: a store and queues in one file or one database, and messages put into them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
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
#: Which part of the full numbers is run: small ones show that a scenario works, and no figure that counts.
SCALE = float(os.environ.get("BENCHMARK_SCALE", "1"))
ROUNDS = int(os.environ.get("BENCHMARK_ROUNDS", "3"))


def scaled(number: int) -> int:
    """Return the number at this run's scale, in whole thousands."""
    return max(1000, int(number * SCALE) // 1000 * 1000)


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


async def single_rate(place: Path | str, number: int) -> float:
    """Return messages a second of one awaited `send(delay=)` after another."""
    async with endpoint_on(place, polling=False) as endpoint:
        started = time.perf_counter()
        for _ in range(number):
            await endpoint.send(DESTINATION, BODY, delay=timedelta(days=365))
        return number / (time.perf_counter() - started)


async def together_rate(place: Path | str, number: int) -> float:
    """Return messages a second of `send(delay=)`, a thousand awaited together."""
    async with endpoint_on(place, polling=False) as endpoint:
        started = time.perf_counter()
        for _ in range(0, number, 1000):
            sends = (endpoint.send(DESTINATION, BODY, delay=timedelta(days=365)) for _ in range(1000))
            await asyncio.gather(*sends)
        return number / (time.perf_counter() - started)


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
    async with endpoint:
        async with store_on(place) as store:
            start = datetime.now(UTC) + timedelta(seconds=2 + number / 20_000)
            await fill(store, prefix, (start + gap * position for position in range(number)), NAME)
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
