"""The timeout manager on PostgreSQL, on a private server with its default settings."""

from __future__ import annotations

import asyncio
import time
import uuid
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg

from benchmarks.bare import BODY
from benchmarks.common import NAME, Figures
from benchmarks.handled import Handled
from benchmarks.servers import postgresql
from delayline import Endpoint, Headers, Message, SqlDelayedMessageStore, SqlTransport, StoredDelivery
from delayline.message import to_wire_time
from delayline.timeouts import SqlTimeoutPersister, Timeout, TimeoutManagerDelivery

if TYPE_CHECKING:
    from pathlib import Path

    from delayline import MessageContext
    from delayline.spi import DelayedDelivery

RATE = 200  # messages a second
SECONDS = 20
DELAY = timedelta(seconds=5)


def endpoint_on(url: str) -> Endpoint:
    """Return an endpoint whose queues and timeouts are in one database: exactly once."""
    delivery = TimeoutManagerDelivery(SqlTimeoutPersister(url))
    return Endpoint(NAME, transport=SqlTransport(url), delayed_delivery=delivery, concurrency=16)


async def pg_timeouts(folder: Path) -> Figures:
    """4 000 timeouts stored before, due 5 ms apart, to a handler of the same process."""
    del folder
    number = RATE * SECONDS
    with postgresql() as [url]:
        start = datetime.now(UTC) + timedelta(seconds=8)
        await _fill(url, [start + position * timedelta(seconds=1) / RATE for position in range(number)])
        endpoint = endpoint_on(url)
        handled = Handled(endpoint, number)
        async with endpoint:
            await handled.wait()
    return handled.lateness()


async def pg_timeouts_whole(folder: Path) -> Figures:
    """200 sends a second, each delayed by 5 s, all the way through both satellites to a handler of the same process."""
    del folder
    number = RATE * SECONDS
    with postgresql() as [url]:
        endpoint = endpoint_on(url)
        handled = Handled(endpoint, number)
        async with endpoint:
            cpu, started = time.process_time(), time.perf_counter()
            for position in range(number):
                await asyncio.sleep(started + position / RATE - time.perf_counter())
                await endpoint.send(NAME, BODY, delay=DELAY)
            await handled.wait()
            busy = (time.process_time() - cpu) / (time.perf_counter() - started)
    return handled.lateness() | {"share of one core %": busy * 100}


async def pg_timeouts_rest(folder: Path) -> Figures:
    """A timeout manager and a receiver, nothing due for a year, watched for 20 s; then the same with a store."""
    del folder
    with postgresql() as [url]:
        share, number = await _at_rest(url, TimeoutManagerDelivery(SqlTimeoutPersister(url)))
        stored_share, stored = await _at_rest(url, StoredDelivery(SqlDelayedMessageStore(url)))
    return {
        "share of one core %": share,
        "statements a minute": number,
        "share with a store %": stored_share,
        "statements a minute with a store": stored,
        "times a store's": number / stored,
    }


async def _at_rest(url: str, delivery: DelayedDelivery) -> tuple[float, float]:
    """Return which share of a core an endpoint with nothing to do takes, and how many statements a minute it runs."""
    endpoint = Endpoint(NAME, transport=SqlTransport(url), delayed_delivery=delivery, concurrency=16)
    endpoint.handler(_ignore)
    with psycopg.connect(url, autocommit=True) as watch:
        async with endpoint:
            await endpoint.send(NAME, BODY, delay=timedelta(days=365))
            await asyncio.sleep(5)
            before = _transactions(watch)
            cpu, started = time.process_time(), time.perf_counter()
            await asyncio.sleep(SECONDS)
            seconds = time.perf_counter() - started
            share = (time.process_time() - cpu) / seconds * 100
            return share, (_transactions(watch) - before) / seconds * 60


async def _fill(url: str, dues: list[datetime]) -> None:
    """Store a timeout for each due time, before anybody polls."""
    await endpoint_on(url).setup()
    persister = SqlTimeoutPersister(url)
    await persister.open(NAME)
    async with persister.transaction() as transaction:
        for due in dues:
            message_id = str(uuid.uuid4())
            headers = {Headers.MESSAGE_ID: message_id, Headers.DELIVER_AT: to_wire_time(due)}
            await persister.add(Timeout(message_id, Message(message_id, headers, BODY), NAME, due), transaction)
    await persister.close()


def _transactions(watch: psycopg.Connection) -> int:
    """Return how many transactions the database has ended, a statement outside one being one itself."""
    query = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
    row = watch.execute(query).fetchone()
    assert row is not None
    return int(row[0])


async def _ignore(message: Message, context: MessageContext) -> None:
    del message, context
