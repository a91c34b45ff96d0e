"""Wake-ups between processes on PostgreSQL: only to pollers that would sleep too long; by looking where they fail."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

import psycopg
import pytest
from tests.eventually import PATIENCE, eventually_async
from tests.integration.wire_between import wire_to

from delayline import Endpoint, StoredDelivery
from delayline.events import Event
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.sql.postgresql import notifications as postgresql_notifications
from delayline.sql.postgresql.notifications import channel_name
from delayline.sql.statements import queue_channel
from delayline.testing import Signals
from delayline.testing.conformance.messages import operation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delayline import Message, MessageContext

SEND = """
import asyncio, sys
from datetime import timedelta
from delayline import Endpoint, StoredDelivery
from delayline.sql import SqlDelayedMessageStore, SqlTransport

async def main(url, *delays):
    delivery = StoredDelivery(SqlDelayedMessageStore(url), polling=False)
    async with Endpoint("orders", transport=SqlTransport(url), delayed_delivery=delivery) as endpoint:
        for delay in delays:
            await endpoint.send("orders", b"", message_id=delay, delay=timedelta(seconds=float(delay)))

asyncio.run(main(*sys.argv[1:]))
"""


async def send(url: str, *delays: str) -> None:
    """Send from another process."""
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", SEND, url, *delays], check=True, timeout=60)


def endpoint_at(url: str) -> Endpoint:
    endpoint = Endpoint(
        "orders",
        transport=SqlTransport(url),
        delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url)),
    )

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        pass

    return endpoint


@pytest.fixture
async def notified(postgresql_url: str) -> AsyncIterator[list[str]]:
    """Provide the notifications that go over the channel of the store's pollers."""
    async with payloads_on("timeouts orders.timeouts", postgresql_url) as payloads:
        yield payloads


@contextlib.asynccontextmanager
async def payloads_on(channel: str, url: str) -> AsyncIterator[list[str]]:
    """Provide the notifications that go over the channel."""
    payloads: list[str] = []
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute(f'LISTEN "{channel_name(channel)}"')

        async def listen() -> None:
            async for notification in connection.notifies():
                payloads.append(notification.payload)  # noqa: PERF401 - it never ends

        listening = asyncio.create_task(listen())
        yield payloads
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def test_a_poller_is_woken_by_another_process(postgresql_url: str, notified: list[str]) -> None:
    # Given a poller that sleeps for a minute
    with Signals() as signals:
        async with endpoint_at(postgresql_url):
            await signals.wait_for(Event.SLEEPS)
            # When another process stores something for the next second
            await send(postgresql_url, "0.5")
            # Then it is woken by one notification, and in time
            [record] = await signals.wait_for(Event.HANDLED, timeout=PATIENCE)
            assert vars(record)["facts"]["message"].id == "0.5"
    assert len(notified) == 1


async def test_a_poller_that_wakes_in_time_is_not_notified(postgresql_url: str, notified: list[str]) -> None:
    # Given a poller that sleeps until its message is due
    endpoint = endpoint_at(postgresql_url)
    with Signals() as signals:
        async with endpoint:
            due = datetime.now(UTC) + timedelta(seconds=30)
            await endpoint.send("orders", b"", deliver_at=due)
            await signals.wait_for(Event.SLEEPS, where=lambda record: vars(record)["facts"]["until"] <= due)
            # When other processes store later messages, and finally an earlier one
            await send(postgresql_url, "40", "3600", "100000", "0.5")
            await signals.wait_for(Event.HANDLED, timeout=PATIENCE)
    # Then only that was worth a notification
    assert len(notified) == 1


@pytest.mark.slow
async def test_no_notification_is_sent_if_no_poller_sleeps(postgresql_url: str, notified: list[str]) -> None:
    # Given no poller at all, but the tables
    async with endpoint_at(postgresql_url):
        pass
    # When something is stored
    await send(postgresql_url, "100", "0.2")
    # Then nothing is sent that would serialise commits
    assert notified == []


async def test_notifications_of_messages_due_later_are_sent_together(
    postgresql_url: str, notified: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a poller in another process that sleeps for a minute, and a sender that notifies it once an hour of messages
    # that are due later
    monkeypatch.setattr(postgresql_notifications, "SEND_LATER_EVERY", 3600.0)
    endpoint = Endpoint(
        "orders",
        transport=SqlTransport(postgresql_url),
        delayed_delivery=StoredDelivery(SqlDelayedMessageStore(postgresql_url), polling=False),
    )
    async with endpoint:
        with psycopg.connect(postgresql_url) as other:
            sleeping = "INSERT INTO delayline_sleeping (channel, listener, until) VALUES (%s, 'other', %s)"
            until = datetime.now(UTC) + timedelta(seconds=60)
            other.execute(sleeping, [channel_name("timeouts orders.timeouts"), until])
        # When it sends messages that are due later, then it notifies of the first at once and not of the next
        for seconds in (30, 29, 28):
            await endpoint.send("orders", b"", delay=timedelta(seconds=seconds))
        await eventually_async(partial(_has, notified, 1))
        # When it sends one that is due at once, then it notifies of that at once
        await endpoint.send("orders", b"", delay=timedelta(milliseconds=1))
        await eventually_async(partial(_has, notified, 2))
        # When it sends one that is due later and stops
        await endpoint.send("orders", b"", delay=timedelta(seconds=27))
        assert len(notified) == 2
    # Then it has notified of that one
    await eventually_async(partial(_has, notified, 3))


@pytest.mark.parametrize("receives", [True, False])
async def test_a_queue_that_is_received_from_here_is_notified_to_others_at_intervals(
    postgresql_url: str, receives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a sender in a process that receives from the queue, or does not
    monkeypatch.setattr(postgresql_notifications, "SEND_LATER_EVERY", 2.0)
    transport = SqlTransport(postgresql_url)
    await transport.setup_infrastructure(["orders"])
    await transport.start()
    if receives:
        await transport.receiver("orders")
    async with payloads_on("queue orders", postgresql_url) as payloads:
        # When it sends messages one after another
        for number in range(5):
            await transport.dispatch([operation("orders", str(number))])
            await eventually_async(partial(_has, payloads, 1 if receives else number + 1))
        # Then others are notified of the first at once and of the rest together, or of each
        await eventually_async(partial(_has, payloads, 2 if receives else 5))
        assert len(payloads) < 5 or not receives
    await transport.stop()


async def _has(payloads: list[str], number: int) -> bool:
    return len(payloads) >= number


async def test_where_listening_ends_it_begins_again(postgresql_url: str, caplog: pytest.LogCaptureFixture) -> None:
    # Given a poller asleep
    caplog.set_level(logging.WARNING)
    with Signals() as signals:
        async with endpoint_at(postgresql_url):
            await signals.wait_for(Event.SLEEPS)
            # When the connection that listens is ended
            async with await psycopg.AsyncConnection.connect(postgresql_url, autocommit=True) as other:
                await other.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE query LIKE 'LISTEN%' AND pid <> pg_backend_pid()"
                )
            await signals.wait_for(Event.LISTENING_LOST, timeout=PATIENCE)
            # Then messages of other processes arrive all the same
            await send(postgresql_url, "0.1")
            await signals.wait_for(Event.HANDLED, timeout=PATIENCE)


@pytest.mark.slow
async def test_the_poller_queries_if_notifications_silently_stop(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a poller asleep, whose listening connection goes deaf: it is open, and nothing comes
    monkeypatch.setattr(postgresql_notifications, "PROBE_EVERY", 0.2)
    monkeypatch.setattr(postgresql_notifications, "POLL_EVERY", 0.2)
    async with wire_to(postgresql_url) as (wire, url):
        with Signals() as signals:
            async with endpoint_at(url):
                await signals.wait_for(Event.SLEEPS)
                await asyncio.sleep(1)  # the probes of a listener whose connection works
                assert wire.hold_answers_to(b"LISTEN") == 1
                # When other processes store messages, then the poller finds them without a notification
                await send(postgresql_url, "0.1")
                await signals.wait_for(Event.HANDLED, timeout=PATIENCE)


async def test_sends_that_follow_each_other_are_notified_together(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a process that listens for messages of a queue, and a sender that notifies once an hour
    monkeypatch.setattr(postgresql_notifications, "SEND_EVERY", 3600.0)
    transport = SqlTransport(postgresql_url)
    await transport.setup_infrastructure(["billing"])
    with psycopg.connect(postgresql_url, autocommit=True) as other:
        other.execute(f'LISTEN "{channel_name(queue_channel("billing"))}"'.encode())
        async with Endpoint("sales", transport=transport, send_only=True) as endpoint:
            # When it sends, then the other process is notified at once
            await endpoint.send("billing", b"first")
            assert await asyncio.to_thread(lambda: len(list(other.notifies(timeout=PATIENCE, stop_after=1)))) == 1
            # When it sends more, then these are not notified one by one
            for _ in range(20):
                await endpoint.send("billing", b"more")
            assert not await asyncio.to_thread(lambda: list(other.notifies(timeout=0.1)))
        # Then a notification of them has come when it has stopped
        assert len(list(other.notifies(timeout=PATIENCE, stop_after=1))) == 1
