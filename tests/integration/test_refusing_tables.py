"""Tables that refuse rows for a reason that nobody knows: all rows, those of one queue, or one row."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg
import pymysql
import pytest
from sqlalchemy.engine import make_url
from tests.eventually import PATIENCE, eventually_async

from delayline import Endpoint, Message, MessageContext, StoredDelivery
from delayline.events import Event
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.testing import Signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

DUE = timedelta(seconds=1)
IDS = [f"m{number}" for number in range(6)]
ROWS = {"every row": "1 = 1", "one queue": "NEW.queue = 'sales'", "one row": "NEW.id = 'm2' AND NEW.queue = 'sales'"}


@dataclass
class Refusing:
    """A database whose administrator can make the table of queued messages refuse rows."""

    url: str
    run: Callable[[str], None]
    create: tuple[str, ...]
    drop: str

    def refuse(self, rows: str) -> None:
        """Refuse each row for which the condition holds."""
        for statement in self.create:
            self.run(statement % rows if "%s" in statement else statement)

    def accept(self) -> None:
        """Accept all rows again."""
        self.run(self.drop)


def sqlite_file(path: Path) -> Refusing:
    def run(statement: str) -> None:
        with closing(sqlite3.connect(path, timeout=PATIENCE)) as connection:
            connection.execute(statement)
            connection.commit()

    create = (
        "CREATE TRIGGER refuses BEFORE INSERT ON delayline_messages WHEN %s "
        "BEGIN SELECT RAISE(ABORT, 'not on a Thursday'); END",
    )
    return Refusing(f"sqlite:///{path}", run, create, "DROP TRIGGER refuses")


def postgresql_database(url: str) -> Refusing:
    def run(statement: str) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(statement.encode())

    create = (
        "CREATE OR REPLACE FUNCTION refuses() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION '%% not on a Thursday', NEW.id; END $$".replace("%%", "%"),
        "CREATE TRIGGER refuses BEFORE INSERT ON delayline_messages FOR EACH ROW WHEN (%s) EXECUTE FUNCTION refuses()",
    )
    return Refusing(url, run, create, "DROP TRIGGER refuses ON delayline_messages")


def mariadb_database(url: str) -> Refusing:
    def run(statement: str) -> None:
        parsed = make_url(url)
        with closing(
            pymysql.connect(
                host=parsed.host,
                port=parsed.port or 3306,
                user=parsed.username,
                password=parsed.password or "",
                database=parsed.database,
                autocommit=True,
            )
        ) as connection:
            connection.cursor().execute(statement)

    create = (
        "CREATE TRIGGER refuses BEFORE INSERT ON delayline_messages FOR EACH ROW "
        "IF %s THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not on a Thursday'; END IF",
    )
    return Refusing(url, run, create, "DROP TRIGGER refuses")


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def refusing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Refusing]:
    if request.param == "sqlite":
        yield sqlite_file(tmp_path / "queues.db")
        return
    url = request.getfixturevalue(f"{request.param}_url")
    yield postgresql_database(url) if request.param == "postgresql" else mariadb_database(url)


def endpoint_on(url: str, handled: list[str]) -> Endpoint:
    delivery = StoredDelivery(SqlDelayedMessageStore(url), number_of_retries=0)
    endpoint = Endpoint("sales", transport=SqlTransport(url), delayed_delivery=delivery)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled.append(message.id)

    return endpoint


async def test_a_table_that_refuses_rows_counts_against_no_message(refusing: Refusing) -> None:
    """Whatever their number and the moments at which they are due: none is moved, and all arrive in the end."""
    handled: list[str] = []
    for rows in ("every row", "one queue"):
        handled.clear()
        async with asyncio.timeout(3 * PATIENCE):
            await endpoint_on(refusing.url, handled).setup()
            with Signals() as signals:
                async with endpoint_on(refusing.url, handled) as endpoint:
                    await asyncio.to_thread(refusing.refuse, ROWS[rows])
                    for message_id in IDS:
                        await endpoint.send("sales", b"", message_id=message_id, delay=DUE)
                    await eventually_async(lambda: signals.count(Event.BREAKER_ARMED), "the breaker is armed")
                    await asyncio.sleep(2)  # three rounds
                    uncounted = (Event.BACKED_OFF, Event.ERROR_MOVE_FAILED, Event.MOVED_TO_ERROR)
                    assert [signals.count(event) for event in uncounted] == [0, 0, 0], rows
                    assert handled == []
                    await asyncio.to_thread(refusing.accept)
                    await eventually_async(lambda: sorted(handled) == IDS, "all are handled")
                    assert signals.count(Event.MOVED_TO_ERROR) == 0


async def test_a_row_that_is_refused_alone_is_the_messages_fault(refusing: Refusing) -> None:
    handled: list[str] = []
    async with asyncio.timeout(2 * PATIENCE):
        await endpoint_on(refusing.url, handled).setup()
        with Signals() as signals:
            async with endpoint_on(refusing.url, handled) as endpoint:
                await asyncio.to_thread(refusing.refuse, ROWS["one row"])
                for message_id in IDS:
                    await endpoint.send("sales", b"", message_id=message_id, delay=DUE)
                await eventually_async(lambda: signals.count(Event.MOVED_TO_ERROR), "it is in the error queue")
                await eventually_async(lambda: len(handled) == len(IDS) - 1, "the others are handled")
                assert sorted(handled) == [message_id for message_id in IDS if message_id != "m2"]
                assert isinstance(endpoint.transport, SqlTransport)
                [failed] = await endpoint.transport.browse("error", 10)
                assert failed.id == "m2"


async def test_a_row_that_is_refused_while_nothing_else_is_due_is_the_messages_fault(refusing: Refusing) -> None:
    handled: list[str] = []
    async with asyncio.timeout(2 * PATIENCE):
        await endpoint_on(refusing.url, handled).setup()
        with Signals() as signals:
            async with endpoint_on(refusing.url, handled) as endpoint:
                await asyncio.to_thread(refusing.refuse, ROWS["one row"])
                await endpoint.send("sales", b"", message_id="m2", delay=DUE)
                await eventually_async(lambda: signals.count(Event.MOVED_TO_ERROR), "it is in the error queue")
                assert signals.count(Event.BREAKER_ARMED) == 0
