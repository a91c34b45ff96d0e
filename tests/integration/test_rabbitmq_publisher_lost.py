"""Brokers that die, block, fall silent or disconnect while messages are on their way: nothing confirmed is lost."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.eventually import eventually_async
from tests.integration.rabbitmq_queues import (
    a_channel,
    a_message,
    declare,
    drain,
    opened,
    to_queue,
    until_outstanding,
)
from tests.integration.wire_between import wire_to

from delayline import BackendUnavailable, Endpoint, Event
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.rabbitmq.encoding import Publication
from delayline.rabbitmq.publisher import Publisher
from delayline.testing import Signals
from delayline.testing.clock import settle
from delayline.testing.conformance.native_delivery import Arrivals

if TYPE_CHECKING:
    from tests.servers.rabbitmq import RabbitmqServer


async def arrived(rabbitmq: RabbitmqServer, url: str, queue: str, number: int) -> None:
    """Return when so many messages are in the queue."""
    path = f"queues/{url.rsplit('/', 1)[1]}/{queue}"

    def there() -> int:
        return int(rabbitmq.api("GET", path).json().get("messages", 0))

    async with asyncio.timeout(20):
        while await asyncio.to_thread(there) < number:  # noqa: ASYNC110 - there is no notification
            await asyncio.sleep(0.05)


async def test_a_wire_cut_between_publish_and_confirm(rabbitmq: RabbitmqServer, rabbitmq_url: str) -> None:
    """Given 200 messages that arrived, without confirms, when sent again, then their ids show the duplicates."""
    await declare(rabbitmq_url, "there")
    batch = [to_queue("there", a_message(f"m-{n}")) for n in range(200)]
    async with wire_to(rabbitmq_url) as (wire, url), opened(url) as publisher:
        assert await publisher.publish([to_queue("there", a_message("m-0"))]) == {}
        wire.hold_answers()
        sending = asyncio.ensure_future(publisher.publish(batch))
        await arrived(rabbitmq, rabbitmq_url, "there", 201)
        assert not sending.done()
        wire.cut()
        with pytest.raises(BackendUnavailable, match=r"connection to RabbitMQ at .* is lost"):
            await sending
        wire.let_through()
        assert publisher.outstanding == 0
        assert await publisher.publish(batch) == {}
        assert wire.connections == 2
    ids = Counter(message.message_id for message in await drain(rabbitmq_url, "there"))
    assert ids == Counter({f"m-{n}": 2 for n in range(200)}) + Counter({"m-0": 1})


async def test_a_connection_that_the_broker_closes_is_opened_again(rabbitmq: RabbitmqServer, rabbitmq_url: str) -> None:
    """Given a publisher at rest, when an administrator closes its connection, then the next message goes out."""
    await declare(rabbitmq_url, "there")
    async with opened(rabbitmq_url) as publisher:
        assert await publisher.publish([to_queue("there")]) == {}
        await asyncio.to_thread(rabbitmq.cut_connections, rabbitmq_url)
        assert await publisher.publish([to_queue("there")]) == {}
    assert len(await drain(rabbitmq_url, "there")) == 2


async def test_concurrent_callers_open_one_new_connection(rabbitmq_url: str) -> None:
    """Given a lost connection, when 50 callers publish at once, then one new connection serves them all."""
    await declare(rabbitmq_url, "there")
    async with wire_to(rabbitmq_url) as (wire, url), opened(url) as publisher:
        wire.cut()
        await eventually_async(lambda: publisher.lost)
        results = await asyncio.gather(*(publisher.publish([to_queue("there")]) for _ in range(50)))
        assert (results, wire.connections) == ([{}] * 50, 2)


async def test_a_broker_that_falls_silent_is_given_up(rabbitmq_url: str) -> None:
    """Given a heartbeat of a second, when nothing comes through, then callers get an error after two seconds."""
    await declare(rabbitmq_url, "there")
    async with wire_to(rabbitmq_url) as (wire, url), opened(f"{url}?heartbeat=1") as publisher:
        assert await publisher.publish([to_queue("there")]) == {}
        wire.hold()
        with pytest.raises(BackendUnavailable, match="silent for 2 s"):
            async with asyncio.timeout(10):
                await publisher.publish([to_queue("there")])
        wire.let_through()
        assert await publisher.publish([to_queue("there")]) == {}


@pytest.mark.slow
async def test_a_publisher_at_rest_keeps_its_connection(rabbitmq_url: str) -> None:
    """Given a heartbeat of a second, when nothing is published for four, then the connection is still there."""
    await declare(rabbitmq_url, "there")
    async with wire_to(rabbitmq_url) as (wire, url), opened(f"{url}?heartbeat=1") as publisher:
        await asyncio.sleep(4)
        assert await publisher.publish([to_queue("there")]) == {}
        assert wire.connections == 1


async def test_a_cancelled_caller_leaves_the_others_alone(rabbitmq_url: str) -> None:
    """Given two callers that wait for confirms, when one is cancelled, then the other gets its confirms."""
    await declare(rabbitmq_url, "there")
    async with wire_to(rabbitmq_url) as (wire, url), opened(url) as publisher:
        wire.hold_answers()
        one, other = (asyncio.ensure_future(publisher.publish([to_queue("there")] * 3)) for _ in range(2))
        await until_outstanding(publisher, 6)
        one.cancel()
        wire.let_through()
        assert await other == {}
        with pytest.raises(asyncio.CancelledError):
            await one
        assert await publisher.publish([to_queue("there")]) == {}
    assert len(await drain(rabbitmq_url, "there")) == 7


async def test_closing_waits_for_messages_of_a_cancelled_caller(rabbitmq_url: str) -> None:
    """Given a cancelled caller, when its message makes the broker close the channel, then the others arrive."""
    await declare(rabbitmq_url, "there")
    batch = [to_queue("there", a_message(f"m-{n}")) for n in range(3)]
    batch.insert(1, Publication(a_message("deleted"), "exchange", "key"))
    with Signals() as signals:
        async with wire_to(rabbitmq_url) as (wire, url), opened(url) as publisher, a_channel(rabbitmq_url) as channel:
            exchange = await channel.declare_exchange("exchange", durable=True)
            assert set(await publisher.publish(batch)) == {1}, "no queue is bound"
            await exchange.delete()
            wire.hold_answers()
            sending = asyncio.ensure_future(publisher.publish(batch))
            await until_outstanding(publisher, 4)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            wire.let_through()
        [record] = signals.records(Event.SEND_ABANDONED)
    assert "'exchange'" in record.getMessage()
    assert {message.message_id for message in await drain(rabbitmq_url, "there")} == {"m-0", "m-1", "m-2"}


async def test_a_lost_message_of_a_cancelled_caller_is_logged(rabbitmq_url: str) -> None:
    """Given a cancelled caller, when the connection is lost before the confirm, then the log names the message."""
    await declare(rabbitmq_url, "there")
    with Signals() as signals:
        async with wire_to(rabbitmq_url) as (wire, url), opened(url) as publisher:
            wire.hold_answers()
            sending = asyncio.ensure_future(publisher.publish([to_queue("there", a_message("m-7"))]))
            await until_outstanding(publisher, 1)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            wire.cut()
            [record] = await signals.wait_for(Event.SEND_ABANDONED, timeout=20)
    assert "cancelled send of message m-7 has failed: the connection to RabbitMQ" in record.getMessage()


async def test_a_message_arrives_that_was_cancelled_while_its_exchange_was_asked_for(rabbitmq_url: str) -> None:
    """Given an exchange that the publisher has not used, when its first message is cancelled, then it arrives."""
    async with wire_to(rabbitmq_url) as (wire, url), opened(url) as publisher, a_channel(rabbitmq_url) as channel:
        queue = await channel.declare_queue("there", durable=True)
        await queue.bind(await channel.declare_exchange("exchange", "fanout", durable=True))
        wire.hold_answers()
        sending = asyncio.ensure_future(publisher.publish([Publication(a_message("m-7"), "exchange", "")]))
        await settle()
        assert publisher.outstanding == 0
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        wire.let_through()
        assert await publisher.publish([Publication(a_message("m-8"), "exchange", "")]) == {}
    assert {message.message_id for message in await drain(rabbitmq_url, "there")} == {"m-7", "m-8"}


@pytest.mark.parametrize("delay", [None, timedelta(seconds=1)], ids=["immediate", "delayed"])
async def test_a_cancelled_send_returns_at_once_and_arrives(rabbitmq_url: str, delay: timedelta | None) -> None:
    async with wire_to(rabbitmq_url) as (wire, url):
        transport = RabbitMQTransport(url)
        endpoint = Endpoint("sales", transport=transport, delayed_delivery=DelayLevelDelivery())
        arrivals = Arrivals(endpoint)
        async with endpoint:
            # Given an endpoint that has sent before, and a broker whose confirms do not come
            await endpoint.send("sales", b"", message_id="before", delay=delay)
            assert await arrivals.number(1) == ["before"]
            wire.hold_answers()
            # When a send is cancelled
            sending = asyncio.create_task(endpoint.send("sales", b"", message_id="cancelled", delay=delay))
            await eventually_async(lambda: transport.publisher.outstanding == 1)
            sending.cancel()
            # Then it returns at once, and the message arrives
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(sending, 5)
            wire.let_through()
            assert await arrivals.number(2) == ["before", "cancelled"]


async def test_closing_gives_up_on_a_broker_that_does_not_confirm(
    rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a broker that falls silent, when the publisher is closed, then it waits that long and raises an error."""
    monkeypatch.setattr("delayline.rabbitmq.publisher.CLOSING_PATIENCE", 0.2)
    async with wire_to(rabbitmq_url) as (wire, url), opened(url) as publisher:
        wire.hold_answers()
        sending = asyncio.ensure_future(publisher.publish([to_queue("there")]))
        await until_outstanding(publisher, 1)
        await publisher.close()
        with pytest.raises(BackendUnavailable, match="is closed"):
            await sending


@pytest.mark.sample(1, group="RabbitMQ kills")
async def test_a_killed_broker_keeps_confirmed_messages(crashing_rabbitmq: RabbitmqServer) -> None:
    """Given a stream of messages, when the broker is killed and started again, then all that were sent are there."""
    url = crashing_rabbitmq.new_vhost()
    await declare(url, "quorum", queue_type="quorum")
    await declare(url, "classic")
    await asyncio.to_thread(crashing_rabbitmq.settle)
    async with opened(url) as publisher:
        confirmed: list[str] = []
        sending = asyncio.gather(*(_send_all(publisher, name, confirmed) for name in ("quorum", "classic") * 4))
        await eventually_async(lambda: len(confirmed) > 500)
        before = len(confirmed)
        await asyncio.to_thread(crashing_rabbitmq.kill)
        assert not sending.done()
        await asyncio.to_thread(crashing_rabbitmq.start)
        await asyncio.wait_for(sending, 60)
    assert len(confirmed) == 8 * 500
    assert before < len(confirmed)
    there = [*await drain(url, "quorum"), *await drain(url, "classic")]
    assert {message.message_id for message in there} == set(confirmed)


async def _send_all(publisher: Publisher, queue: str, confirmed: list[str]) -> None:
    """Send 500 messages in batches of 10, each until it is confirmed."""
    task = asyncio.current_task()
    assert task is not None
    for first in range(0, 500, 10):
        batch = [to_queue(queue, a_message(f"{task.get_name()}-{n}")) for n in range(first, first + 10)]
        while batch:
            try:
                failures = await publisher.publish(batch)
            except BackendUnavailable:
                await asyncio.sleep(0.05)
                continue
            confirmed += [one.message.id for position, one in enumerate(batch) if position not in failures]
            batch = [batch[position] for position in sorted(failures)]


@pytest.mark.slow
async def test_a_blocked_broker_makes_senders_wait(
    rabbitmq: RabbitmqServer, rabbitmq_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Given a memory alarm, when messages are published, then they wait, are logged, can be cancelled, and arrive."""
    await declare(rabbitmq_url, "there")
    caplog.set_level(logging.WARNING, "delayline.rabbitmq")
    # ... and a connection that waits longer than the alarm lasts on a busy machine
    async with opened(f"{rabbitmq_url}?heartbeat=1&server_timeout=240") as publisher:
        await asyncio.to_thread(rabbitmq.raise_memory_alarm)
        try:
            first = asyncio.ensure_future(publisher.publish([to_queue("there", a_message("first"))]))
            await eventually_async(lambda: publisher.blocked)
            cancelled = asyncio.ensure_future(publisher.publish([to_queue("there", a_message("cancelled"))]))
            nine = [to_queue("there", a_message(f"m-{n}")) for n in range(9)]
            waiting = asyncio.ensure_future(publisher.publish(nine))
            await asyncio.sleep(3)  # longer than the heartbeats of a dead broker
            assert not waiting.done()
            cancelled.cancel()
        finally:
            await asyncio.to_thread(rabbitmq.clear_memory_alarm)
        assert (await first, await waiting) == ({}, {})
        assert publisher.blocked is None
    ids = [message.message_id for message in await drain(rabbitmq_url, "there")]
    assert ids == ["first", *(f"m-{n}" for n in range(9))]
    events = [vars(record)["event"] for record in caplog.records]
    assert events == [Event.PUBLISHING_BLOCKED, Event.PUBLISHING_UNBLOCKED]
    assert "low on memory" in caplog.text
