"""Scenarios on RabbitMQ, each on a private node with quorum queues; the store is PostgreSQL."""

from __future__ import annotations

import asyncio
import statistics
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from benchmarks import bare_rabbitmq as bare
from benchmarks import peers_rabbitmq as peers
from benchmarks.bare import BODY
from benchmarks.common import (
    DESTINATION,
    NAME,
    ROUNDS,
    Figures,
    against,
    fill_far,
    headers_for,
    scaled,
    store_on,
)
from benchmarks.handled import Handled
from benchmarks.on_server import dispatch_rate
from benchmarks.processes import sending_meanwhile
from benchmarks.servers import postgresql
from benchmarks.servers_rabbitmq import rabbitmq
from delayline import DelayedMessage, Endpoint, Message, SqlDelayedMessageStore, StoredDelivery
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.encoding import Publication
from delayline.rabbitmq.publisher import Publisher

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from delayline.spi import DelayedDelivery

BATCH = 500
PUBLISHED = scaled(20_000)
BURST = scaled(50_000)
HOUR = 3600
CONSUMERS = 64


async def rmq_publish(folder: Path) -> Figures:
    """20 000 messages to a quorum queue, confirmed, in batches of 500, against frames encoded before; aio-pika."""
    del folder
    rates, theirs = [], []
    with rabbitmq() as url:
        await bare.declare(url, DESTINATION)
        frames = bare.to_queue(PUBLISHED, "", DESTINATION)
        for _ in range(ROUNDS):
            raw = await asyncio.to_thread(bare.encoded_rate, url, frames)
            await bare.purge(url, DESTINATION)
            messages = bare.messages(PUBLISHED)
            rates.append((await _published(url, [Publication(one, "", DESTINATION) for one in messages]), raw))
            await bare.purge(url, DESTINATION)
            theirs.append(await bare.aio_pika_rate(url, DESTINATION, PUBLISHED // 10))
            await bare.purge(url, DESTINATION)
    figures = against("frames encoded before", rates)
    return figures | {"times aio-pika": figures["delayline /s"] / statistics.median(theirs)}


async def rmq_levels(folder: Path) -> Figures:
    """Sends into the levels: 1 000 senders at once against encoded frames, one against Celery's native `countdown`.

    Both end with the broker's confirm; there is no handler.

    Then, on another broker, 1 000 a second for 20 s, as they reach a handler: delayed by 1 to 15 s each, by fractions
    of a second as well, and by those with a store in front of the levels.
    """
    rates, alone, one = [], [], []
    with rabbitmq() as url:
        endpoint = _endpoint(url, DelayLevelDelivery())
        await endpoint.setup()
        await endpoint.transport.setup_infrastructure([DESTINATION])
        exchange, key = bare.level_of(DESTINATION, HOUR)
        for _ in range(ROUNDS):
            raw = await asyncio.to_thread(bare.encoded_rate, url, bare.to_levels(PUBLISHED // 2, DESTINATION, HOUR))
            publications = [Publication(one, exchange, key, HOUR) for one in bare.messages(PUBLISHED // 2)]
            alone.append((await _published(url, publications), raw))
            rates.append((await _sent(endpoint, PUBLISHED // 2, senders=1000), raw))
            celery = await peers.celery_native_rate(url, scaled(1000))
            one.append((await _sent(endpoint, scaled(5000), senders=1), celery))
    with rabbitmq() as url:  # another broker: the messages sent before are still pending on that one
        late = await _levels_lateness(url, DelayLevelDelivery(), "1 to 15 s, ")
        late |= await _levels_lateness(url, DelayLevelDelivery(), "fractions, ", step=timedelta(seconds=0.3))
        front = DelayLevelDelivery(stored=StoredDelivery(SqlDelayedMessageStore(f"sqlite:///{folder}/front.db")))
        late |= await _levels_lateness(url, front, "fractions, store in front, ", step=timedelta(seconds=0.3))
    figures = against("frames encoded before", rates)
    return figures | {
        "publisher alone, ratio": statistics.median(ours / raw for ours, raw in alone),
        "one sender /s": statistics.median(ours for ours, _ in one),
        "one sender of Celery /s": statistics.median(theirs for _, theirs in one),
        "one sender, times Celery native": statistics.median(ours / theirs for ours, theirs in one),
        **late,
    }


async def rmq_burst(folder: Path) -> Figures:
    """50 000 due at one instant, from PostgreSQL until a quorum queue has confirmed the last; no handler.

    Against stored frames that take the same way, and the documented algorithm, one at a time.
    """
    del folder
    rates, singles = [], []
    with postgresql() as [database], rabbitmq() as url:
        await bare.declare(url, "bare")
        for _ in range(ROUNDS):
            frames = bare.to_queue(BURST, "", "bare")
            raw = await asyncio.to_thread(bare.wire_form_rate, database, url, frames, BATCH)
            await bare.purge(url, "bare")
            rates.append((await _drained(database, url, BURST), raw))
            await bare.purge(url, DESTINATION)
            singles.append(await bare.one_at_a_time_rate(database, url, "bare", 2000))
            await bare.purge(url, "bare")
    figures = against("stored frames", rates)
    return figures | {
        "one at a time /s": statistics.median(singles),
        "times one at a time": figures["delayline /s"] / statistics.median(singles),
    }


async def rmq_spread(folder: Path) -> Figures:
    """Due times 1 ms apart for 20 s, over RabbitMQ to a handler; a short delay behind 1 000 000 pending."""
    del folder
    pending = scaled(1_000_000)
    with postgresql() as [database], rabbitmq() as url:
        figures = await _stored_lateness(database, url, PUBLISHED, timedelta(milliseconds=1), "spread")
        few = timedelta(milliseconds=20)
        empty = (await _stored_lateness(database, url, 200, few, "empty"))["lateness p50 ms"]
        async with store_on(database) as store:
            await fill_far(store, pending)
        full = (await _stored_lateness(database, url, 200, few, "full"))["lateness p50 ms"]
    return figures | {
        "short delay, empty p50 ms": empty,
        "short delay, behind them p50 ms": full,
        "later by ms": full - empty,
    }


def _endpoint(url: str, delivery: DelayedDelivery, *, concurrency: int = CONSUMERS) -> Endpoint:
    return Endpoint(NAME, transport=RabbitMQTransport(url), delayed_delivery=delivery, concurrency=concurrency)


async def _published(url: str, publications: Sequence[Publication]) -> float:
    """Return messages a second, in batches whose confirms are not waited for one by one: eight are under way."""
    publisher = Publisher(BrokerAddress.parse(url))
    await publisher.open()
    under_way = asyncio.Semaphore(8)

    async def publish(first: int) -> None:
        async with under_way:
            assert not await publisher.publish(publications[first : first + BATCH])

    started = time.perf_counter()
    await asyncio.gather(*(publish(first) for first in range(0, len(publications), BATCH)))
    rate = len(publications) / (time.perf_counter() - started)
    await publisher.close()
    return rate


async def _sent(endpoint: Endpoint, number: int, *, senders: int) -> float:
    """Return messages a second of so many senders, each of which waits for its own."""

    async def send() -> None:
        for _ in range(number // senders):
            await endpoint.send(DESTINATION, BODY, delay=timedelta(seconds=HOUR))

    async with endpoint:
        started = time.perf_counter()
        await asyncio.gather(*(send() for _ in range(senders)))
        return number // senders * senders / (time.perf_counter() - started)


async def _drained(database: str, url: str, number: int) -> float:
    """Return messages a second from the instant all are due until the broker has the last one."""
    due = datetime.now(UTC) + timedelta(seconds=5 + number / 10_000)
    async with store_on(database) as store:
        kept = [DelayedMessage(one, DESTINATION, due) for one in bare.messages(number, f"{due:%M%S}")]
        for first in range(0, number, 1000):
            await store.store_many(kept[first : first + 1000])
    endpoint = _endpoint(url, StoredDelivery(SqlDelayedMessageStore(database)))
    await endpoint.setup()
    await endpoint.transport.setup_infrastructure([DESTINATION])
    return await dispatch_rate(endpoint, due, number)


async def _levels_lateness(
    url: str, delivery: DelayLevelDelivery, prefix: str, *, step: timedelta = timedelta(seconds=1)
) -> Figures:
    """Return the lateness of messages that are delayed by 1 s and up to 14 steps more."""
    number = PUBLISHED
    endpoint = _endpoint(url, delivery)
    handled = Handled(endpoint, number)
    async with endpoint:
        started = time.perf_counter()
        for position in range(0, number, 20):
            delays = (timedelta(seconds=1) + (position + one) % 15 * step for one in range(20))
            await asyncio.gather(*(endpoint.send(NAME, BODY, delay=delay) for delay in delays))
            await asyncio.sleep(max(0.0, started + position / 1000 - time.perf_counter()))
        await handled.wait()
    return handled.lateness(prefix)


async def _stored_lateness(database: str, url: str, number: int, gap: timedelta, prefix: str) -> Figures:
    endpoint = _endpoint(url, StoredDelivery(SqlDelayedMessageStore(database)))
    handled = Handled(endpoint, number)
    await endpoint.setup()
    start = datetime.now(UTC) + timedelta(seconds=2 + number / 10_000)
    async with store_on(database) as store:
        dues = [start + gap * position for position in range(number)]
        kept = [
            DelayedMessage(Message.from_encoded(f"{prefix}-{n:030d}", headers_for(due), BODY), NAME, due)
            for n, due in enumerate(dues)
        ]
        for first in range(0, number, 1000):
            await store.store_many(kept[first : first + 1000])
    with sending_meanwhile(f"{url} {database}"):
        async with endpoint:
            await handled.wait(180)
    return handled.lateness()
