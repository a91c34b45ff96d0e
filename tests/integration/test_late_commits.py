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
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.testing import Signals

if TYPE_CHECKING:
    from collections.abc import Callable
    from logging import LogRecord

    from delayline import Message, MessageContext

LOCKED = 2.0  # seconds for which a look is held up
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
