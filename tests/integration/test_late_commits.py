"""Messages that are committed below the poller's watermark are found soon, however slow a look has been."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg
import pymysql
import pytest
from sqlalchemy import create_engine, make_url

from delayline import Endpoint, StoredDelivery
from delayline.events import Event
from delayline.external import ExternalTransaction
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.sql.databases import database_at
from delayline.sql.receiver import OUT_OF_ORDER, RecentNumbers
from delayline.sql.statements import queue_channel
from delayline.testing import Signals
from delayline.testing.conformance.messages import operation
from delayline.testing.conformance.transport_fixtures import ids, received

if TYPE_CHECKING:
    from collections.abc import Callable
    from logging import LogRecord

    from delayline import Message, MessageContext

LOCKED = 2.0  # seconds for which a look is held up
HOUR = 3600.0
WITHIN = 15.0  # seconds, far below the 40 that a look of 2 s once postponed the next full one


def endpoint_at(url: str) -> Endpoint:
    endpoint = Endpoint(
        "shop", transport=SqlTransport(url), delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url))
    )

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        pass

    return endpoint


def is_message(message_id: str) -> Callable[[LogRecord], bool]:
    return lambda record: bool(vars(record)["facts"]["message"].id == message_id)


@pytest.fixture(params=["postgresql_url", "mariadb_url"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


def connect(url: str) -> psycopg.Connection | pymysql.Connection[pymysql.cursors.Cursor]:
    if url.startswith("postgresql"):
        return psycopg.connect(url)
    parts = make_url(url)
    return pymysql.connect(
        host=parts.host, port=parts.port or 3306, user=parts.username, password=parts.password or "",
        database=parts.database,
    )  # fmt: skip


async def hold_up_a_look(url: str, endpoint: Endpoint, signals: Signals) -> None:
    """Lock the store's table for two seconds, in which the poller tries to look."""
    lock, unlock = {
        True: ('LOCK TABLE "shop.timeouts" IN ACCESS EXCLUSIVE MODE', "COMMIT"),
        False: ("LOCK TABLES `shop.timeouts` WRITE", "UNLOCK TABLES"),
    }[url.startswith("postgresql")]
    await endpoint.send("shop", b"", message_id="held up", delay=timedelta(seconds=0.3))

    def hold() -> None:
        connection = connect(url)
        with connection.cursor() as cursor:
            cursor.execute(lock)
            cursor.execute("SELECT pg_sleep(%s)" if url.startswith("postgresql") else "SELECT SLEEP(%s)", [LOCKED])
            cursor.execute(unlock)
        connection.close()

    await asyncio.to_thread(hold)
    await signals.wait_for(Event.HANDLED, where=is_message("held up"), timeout=WITHIN)


@pytest.mark.slow
async def test_a_message_committed_below_the_watermark_is_found_within_seconds(url: str) -> None:
    with Signals() as signals:
        async with endpoint_at(url) as endpoint:
            # Given a poller whose last look was held up by a lock, and that has dispatched since
            await endpoint.send("shop", b"", message_id="below", delay=timedelta(hours=1))
            await hold_up_a_look(url, endpoint, signals)
            await endpoint.send("shop", b"", message_id="above", delay=timedelta(seconds=0.1))
            await signals.wait_for(Event.HANDLED, where=is_message("above"), timeout=WITHIN)
            # When a message with an earlier due time appears in the table, without a notification
            connection = connect(url)
            with connection.cursor() as cursor:
                earlier = "now() - interval '1 minute'", "UTC_TIMESTAMP(6) - INTERVAL 1 MINUTE"
                cursor.execute(update_of(url).format(earlier[0] if url.startswith("postgresql") else earlier[1]))
                assert cursor.rowcount == 1
            connection.commit()
            connection.close()
            # Then the next look finds it, or a full one soon after
            await endpoint.send("shop", b"", message_id="later", delay=timedelta(seconds=0.1))
            await signals.wait_for(Event.HANDLED, where=is_message("below"), timeout=WITHIN)


def update_of(url: str) -> str:
    if url.startswith("postgresql"):
        return "UPDATE \"shop.timeouts\" SET due = {} WHERE id = 'below'"
    return "UPDATE `shop.timeouts` SET due = {} WHERE id = 'below'"


@pytest.mark.slow
async def test_a_transaction_that_commits_two_seconds_late_delays_its_message_only_by_that(url: str) -> None:
    with Signals() as signals:
        async with endpoint_at(url) as endpoint:
            # Given a poller whose last look was held up by a lock
            await hold_up_a_look(url, endpoint, signals)
            # When a transaction stores a message and commits two seconds later, and others are dispatched meanwhile
            driver = "postgresql+psycopg" if url.startswith("postgresql") else "mariadb+pymysql"
            engine = create_engine(make_url(url).set(drivername=driver))
            with engine.begin() as transaction:
                await endpoint.send(
                    "shop", b"", message_id="late", delay=timedelta(seconds=0.2), transaction=transaction
                )
                for number in range(20):
                    await endpoint.send("shop", b"", message_id=f"other {number}", delay=timedelta(seconds=0.1))
                    await signals.wait_for(Event.HANDLED, where=is_message(f"other {number}"), timeout=WITHIN)
                assert signals.count(Event.HANDLED, is_message("late")) == 0
            engine.dispose()
            # Then it is handled soon after the commit
            await signals.wait_for(Event.HANDLED, where=is_message("late"), timeout=WITHIN)


async def test_a_queued_message_that_is_committed_late_is_received_at_once(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a receiver that has received a message, and before that one another was sent in an open transaction
    monkeypatch.setattr("delayline.sql.receiver.QUEUE_LOOK_EVERY", HOUR)
    transport = SqlTransport(postgresql_url)
    await transport.setup_infrastructure(["sales"])
    await transport.start()
    notified = asyncio.Event()
    with psycopg.connect(postgresql_url) as connection:
        transaction = await transport.enlist(ExternalTransaction(connection))
        await transport.dispatch([operation("sales", "late")], transaction)
        receiver = await transport.receiver("sales")
        await transport.dispatch([operation("sales", "first")])
        assert ids(await received(receiver)) == ["first"]
        stop = database_at(postgresql_url).notifications.subscribe(
            queue_channel("sales"), lambda at: notified.set() if at == OUT_OF_ORDER else None
        )
        # When it is committed, and further ones are sent
        connection.commit()
    await asyncio.wait_for(notified.wait(), WITHIN)
    await transport.dispatch([operation("sales", "second")])
    # Then all are received
    assert sorted(ids(await received(receiver, 2))) == ["late", "second"]
    stop()
    await receiver.stop()
    await transport.stop()


async def test_a_queued_message_of_a_concurrent_sender_is_received_at_once(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a receiver that has received a message a moment ago, while one with a lower number was not yet committed
    monkeypatch.setattr("delayline.sql.receiver.QUEUE_LOOK_EVERY", HOUR)
    monkeypatch.setattr("delayline.sql.receiver.OVERLAP", HOUR)
    transport = SqlTransport(url)
    await transport.setup_infrastructure(["sales"])
    await transport.start()
    receiver = await transport.receiver("sales")
    await transport.dispatch([operation("sales", "looked for")])
    await receiver.acknowledge_many(await received(receiver))
    connection = connect(url)
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO delayline_messages (queue, id, headers, body) VALUES ('sales', 'slow', '{}', '')")
    await transport.dispatch([operation("sales", "first")])
    assert ids(await received(receiver)) == ["first"]
    # When it is committed, and another one is sent
    connection.commit()
    connection.close()
    await transport.dispatch([operation("sales", "second")])
    # Then both are received
    assert sorted(ids(await received(receiver, 2))) == ["second", "slow"]
    await receiver.stop()
    await transport.stop()


def test_numbers_are_recent_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("delayline.sql.receiver.time.monotonic", lambda: now)
    recent, of_a_file = RecentNumbers(0.02), RecentNumbers(0.0)
    found = []
    for _ in range(4):
        now += 0.015
        recent.reach(round(now * 1000))
        of_a_file.reach(7)
        found.append(recent.before())
    assert found == [0, 0, 100_015, 100_015]
    assert of_a_file.before() == 7
    # When messages are given back, then they are not behind the recent ones any more
    recent.lower(42)
    assert recent.before() == 42


async def test_messages_of_another_process_follow_each_other_without_notifications(mariadb_url: str) -> None:
    # Given a receiver that looks once an hour while its queue is empty, and has just received a message
    transport = SqlTransport(mariadb_url, poll_interval=timedelta(hours=1))
    other = SqlTransport(f"{mariadb_url}?connect_timeout=9")  # of a database of its own, as in another process
    await transport.setup_infrastructure(["sales"])
    await transport.start()
    await other.start()
    receiver = await transport.receiver("sales")
    await transport.dispatch([operation("sales", "first")])
    assert ids(await received(receiver)) == ["first"]
    for name in ("second", "third"):
        # When another process sends one, then it is received without waiting for the hour
        receiving = asyncio.create_task(received(receiver))
        await other.dispatch([operation("sales", name)])
        assert ids(await receiving) == [name]
    await receiver.stop()
    await other.stop()
    await transport.stop()
