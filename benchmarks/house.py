"""What the scenarios run: one SQLite file with a store and queues, and messages put into it."""

from __future__ import annotations

import contextlib
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

DESTINATION = "destination"
NAME = "bench"


def endpoint_on(path: Path, *, polling: bool = True, concurrency: int = 16) -> Endpoint:
    """Return an endpoint over one file: exactly once."""
    url = f"sqlite:///{path}"
    delivery = StoredDelivery(SqlDelayedMessageStore(url), polling=polling)
    return Endpoint(NAME, transport=SqlTransport(url), delayed_delivery=delivery, concurrency=concurrency)


@contextlib.asynccontextmanager
async def store_on(path: Path) -> AsyncIterator[SqlDelayedMessageStore]:
    """Set the file up and open its store alone, to fill it."""
    endpoint = endpoint_on(path)
    await endpoint.setup()
    await endpoint.transport.setup_infrastructure([DESTINATION])
    store = SqlDelayedMessageStore(f"sqlite:///{path}")
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


def lateness_of(message: Message) -> float:
    """Return now minus due, in milliseconds."""
    due = from_wire_time(message.headers[Headers.DELIVER_AT])
    return (datetime.now(UTC) - due).total_seconds() * 1000


def percentile(values: list[float], share: float) -> float:
    """Return the value below which that share of the sorted values lies."""
    return values[min(len(values) - 1, int(len(values) * share))]
