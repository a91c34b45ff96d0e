"""What the scenarios run: a store and queues in one file or one database, and messages put into them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from benchmarks.bare import BODY, HEADERS, SENT_HEADERS
from benchmarks.handled import Handled
from benchmarks.processes import sending_meanwhile
from delayline import (
    DelayedMessage,
    Endpoint,
    Headers,
    Message,
    Send,
    SqlDelayedMessageStore,
    SqlTransport,
    StoredDelivery,
    TransactionMode,
)
from delayline.message import encode_headers, to_wire_time

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path


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


def headers_for(due: datetime) -> bytes:
    """Return the eight headers that an endpoint sends, with this due time."""
    return encode_headers(SENT_HEADERS | {Headers.DELIVER_AT: to_wire_time(due)})


async def fill(store: SqlDelayedMessageStore, prefix: str, dues: Iterable[datetime], destination: str) -> None:
    """Store a message for each due time, a thousand to a transaction."""
    batch: list[DelayedMessage] = []
    for number, due in enumerate(dues):
        headers = headers_for(due) if destination == NAME else HEADERS
        message = Message.from_encoded(f"{prefix}-{number:030d}", headers, BODY)
        batch.append(DelayedMessage(message, destination, due))
        if len(batch) == 1000:
            await store.store_many(batch)
            batch = []
    if batch:
        await store.store_many(batch)


YEAR = timedelta(days=365)


async def single_rate(place: Path | str, number: int, delay: timedelta | None = YEAR) -> float:
    """Return messages a second of one awaited `send` after another."""
    async with endpoint_on(place, polling=False) as endpoint:
        await endpoint.transport.setup_infrastructure([DESTINATION])
        await endpoint.send(DESTINATION, BODY, delay=delay)
        started = time.perf_counter()
        for _ in range(number):
            await endpoint.send(DESTINATION, BODY, delay=delay)
        return number / (time.perf_counter() - started)


async def together_rate(place: Path | str, number: int, delay: timedelta | None = YEAR) -> float:
    """Return messages a second of `send`, a thousand awaited together."""
    async with endpoint_on(place, polling=False) as endpoint:
        await endpoint.transport.setup_infrastructure([DESTINATION])
        await endpoint.send(DESTINATION, BODY, delay=delay)
        started = time.perf_counter()
        for _ in range(0, number, 1000):
            await asyncio.gather(*(endpoint.send(DESTINATION, BODY, delay=delay) for _ in range(1000)))
        return number / (time.perf_counter() - started)


async def send_many_rate(place: Path | str, number: int) -> float:
    """Return messages a second of `send_many`, a thousand a call."""
    async with endpoint_on(place, polling=False) as endpoint:
        await endpoint.transport.setup_infrastructure([DESTINATION])
        await endpoint.send(DESTINATION, BODY, delay=YEAR)
        started = time.perf_counter()
        for _ in range(0, number, 1000):
            await endpoint.send_many(Send(DESTINATION, BODY, delay=YEAR) for _ in range(1000))
        return number / (time.perf_counter() - started)


async def fill_far(store: SqlDelayedMessageStore, number: int) -> None:
    """Store messages due from next year on, a second apart."""
    start = datetime.now(UTC) + timedelta(days=365)
    await fill(store, "far", (start + timedelta(seconds=second) for second in range(number)), DESTINATION)


def url_of(place: Path | str) -> str:
    """Return the URL of a file, or the URL itself."""
    return place if isinstance(place, str) else f"sqlite:///{place}"


async def lateness(place: Path | str, *, number: int, gap: timedelta, prefix: str = "spread") -> Figures:
    """Return how late messages reach a handler of the process that dispatches them, while another process sends."""
    endpoint = endpoint_on(place)
    handled = Handled(endpoint, number)
    await endpoint.setup()
    with sending_meanwhile(url_of(place)):
        async with endpoint:
            async with store_on(place) as store:
                start = datetime.now(UTC) + timedelta(seconds=2 + number / 20_000)
                await fill(store, prefix, (start + gap * position for position in range(number)), NAME)
            await handled.wait()
    return handled.lateness()


def against(name: str, rates: list[tuple[float, float]]) -> Figures:
    """Return our rate, the other's, and how many times theirs ours is: medians of rounds that alternate."""
    return {
        "delayline /s": statistics.median(ours for ours, _ in rates),
        f"{name} /s": statistics.median(raw for _, raw in rates),
        "ratio": statistics.median(ours / raw for ours, raw in rates),
    }
