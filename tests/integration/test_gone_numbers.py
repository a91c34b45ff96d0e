"""Looks into a queue on PostgreSQL begin behind the messages that are gone, and miss none that comes late."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from typing import TYPE_CHECKING

import psycopg
import pytest
from tests.cluster.harness import mariadb_at
from tests.eventually import PATIENCE

from delayline import SqlTransport
from delayline.sql import gone_numbers
from delayline.sql.databases import database_at
from delayline.testing.conformance.messages import operation
from delayline.testing.conformance.transport_fixtures import ids, received

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sqlalchemy import Connection

    from delayline.sql.receiver import SqlReceiver

PUT = "INSERT INTO delayline_messages (queue, id, headers, body) VALUES ('sales', %s, '{}', '')"


@pytest.fixture
async def transport(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SqlTransport]:
    monkeypatch.setattr(gone_numbers, "SETTLED_AFTER", 1)
    monkeypatch.setattr(gone_numbers, "SETTLED_EVERY", 0.0)
    transport = SqlTransport(postgresql_url)
    await transport.setup_infrastructure(["sales"])
    await transport.start()
    yield transport
    await transport.stop()


@pytest.fixture
async def receiver(transport: SqlTransport) -> AsyncIterator[SqlReceiver]:
    receiver = await transport.receiver("sales")
    yield receiver
    await receiver.stop()


async def handle(transport: SqlTransport, receiver: SqlReceiver, number: int) -> None:
    """Send messages and handle them."""
    await transport.dispatch([operation("sales", f"m{n}") for n in range(number)])
    await receiver.acknowledge_many(await received(receiver, number))


async def looks_begin_behind(receiver: SqlReceiver, number: int) -> None:
    """Wait until looks that find nothing have moved their beginning behind the number."""
    looking = asyncio.create_task(receiver.receive(1))
    async with asyncio.timeout(PATIENCE):
        while receiver._gone.last < number:  # noqa: ASYNC110 - a state without an event
            await asyncio.sleep(0.01)
    looking.cancel()
    await asyncio.wait([looking])


def last_number(connection: psycopg.Connection) -> int:
    row = connection.execute("SELECT last_value FROM delayline_messages_seq_seq").fetchone()
    assert row is not None
    return int(row[0])


async def test_looks_begin_behind_handled_messages_beside_an_old_snapshot(
    postgresql_url: str, transport: SqlTransport, receiver: SqlReceiver
) -> None:
    with psycopg.connect(postgresql_url) as report:
        # Given a transaction that only reads, and stays open
        report.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        report.execute("SELECT count(*) FROM delayline_messages")
        # When messages are handled meanwhile
        for _ in range(3):
            await handle(transport, receiver, 50)
        # Then further looks begin behind them
        with psycopg.connect(postgresql_url, autocommit=True) as connection:
            await looks_begin_behind(receiver, last_number(connection))
        # And messages that come then are received
        await handle(transport, receiver, 50)


async def test_a_message_that_is_committed_late_is_not_passed_over(
    postgresql_url: str, transport: SqlTransport, receiver: SqlReceiver
) -> None:
    with psycopg.connect(postgresql_url) as order, psycopg.connect(postgresql_url, autocommit=True) as other:
        # Given a message in a transaction that stays open while later ones are handled
        order.execute(PUT, ["late"])
        number = last_number(other)
        for _ in range(3):
            await handle(transport, receiver, 50)
            looking = asyncio.create_task(receiver.receive(1))
            await asyncio.wait([looking], timeout=0.7)  # a full look, each half second
            looking.cancel()
            await asyncio.wait([looking])
        assert receiver._gone.last < number
        # When it is committed, then it is received
        order.commit()
        assert ids(await received(receiver, 1)) == ["late"]


async def test_a_message_that_is_handled_for_long_does_not_get_lost(
    transport: SqlTransport, receiver: SqlReceiver
) -> None:
    # Given a message that is being handled while later ones are
    await transport.dispatch([operation("sales", "long")])
    [held] = await received(receiver, 1)
    for _ in range(3):
        await handle(transport, receiver, 50)
    # When it is given back, then it is received again
    await receiver.release(held)
    assert ids(await received(receiver, 1)) == ["long"]


async def test_numbers_that_begin_anew_are_found(
    postgresql_url: str, transport: SqlTransport, receiver: SqlReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given looks that begin behind handled messages
    for _ in range(2):
        await handle(transport, receiver, 50)
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        await looks_begin_behind(receiver, last_number(connection))
        # When the server gives low numbers again, as after a switch to a copy of it
        connection.execute("ALTER SEQUENCE delayline_messages_seq_seq RESTART")
        connection.execute(PUT, ["first"])
    # Then these messages are received, too
    receiver._gone._settled._beginning_at = 0.0
    assert ids(await asyncio.wait_for(received(receiver, 1), PATIENCE)) == ["first"]


async def test_a_receiver_gets_past_the_claims_of_another_process_in_few_looks(
    postgresql_url: str, transport: SqlTransport, receiver: SqlReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given another process that has claimed thousands of messages
    other = SqlTransport(f"{postgresql_url}?keepalives=1")  # which shares no connection with it
    await other.start()
    greedy = await other.receiver("sales")
    for _ in range(6):
        await transport.dispatch([operation("sales", f"m{n}") for n in range(500)])
    assert len(await received(greedy, 3000)) == 3000
    # When a receiver looks for a single one behind them
    await transport.dispatch([operation("sales", "free"), operation("sales", "next")])
    claims, pages = receiver._in_statements, 0
    assert claims is not None
    take_next = claims.take_next

    async def counted(*arguments: object) -> object:
        nonlocal pages
        pages += 1
        return await take_next(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(claims, "take_next", counted)
    assert ids(await received(receiver, 1)) == ["free"]
    # Then it has not read them one by one, and has claimed no more than it asked for
    assert pages <= 10
    assert ids(await received(greedy, 1)) == ["next"]
    await greedy.stop()
    await other.stop()


async def test_where_the_server_does_not_tell_of_transactions_late_messages_are_found_by_the_check(
    mariadb_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a message in a transaction that stays open for longer than those are taken to last
    monkeypatch.setattr(gone_numbers, "SETTLED_AFTER", 1)
    monkeypatch.setattr(gone_numbers, "SETTLED_EVERY", 0.0)
    monkeypatch.setattr(gone_numbers, "ENDED_WITHIN", 0.0)
    monkeypatch.setattr(gone_numbers, "CHEAP_LOOK", 0.0)
    transport = SqlTransport(mariadb_url)
    await transport.setup_infrastructure(["sales"])
    await transport.start()
    receiver = await transport.receiver("sales")
    with contextlib.closing(mariadb_at(mariadb_url)) as order, order.cursor() as cursor:
        cursor.execute(PUT, ["late"])
        number = cursor.lastrowid
        # When later ones are handled, then looks begin behind it
        for _ in range(2):
            await handle(transport, receiver, 50)
        await looks_begin_behind(receiver, number)
        # But when it is committed, the check from the first number on finds it
        order.commit()
        receiver._gone._settled._beginning_at = 0.0
        assert ids(await asyncio.wait_for(received(receiver, 1), PATIENCE)) == ["late"]
    await receiver.stop()
    await transport.stop()


@pytest.mark.parametrize("live", [0, 5, 500])
async def test_messages_are_read_and_removed_by_number_beside_an_old_snapshot(
    postgresql_url: str, transport: SqlTransport, live: int
) -> None:
    statements = transport._statements
    with psycopg.connect(postgresql_url) as report, psycopg.connect(postgresql_url, autocommit=True) as connection:
        # Given many index entries of handled messages beside few live ones, as the planner knows
        report.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        report.execute("SELECT count(*) FROM delayline_messages")
        connection.execute(
            "INSERT INTO delayline_messages (queue, id, headers, body) "
            "SELECT 'sales', 'm' || n, '{}', repeat('x', 500)::bytea FROM generate_series(1, 20000) AS n"
        )
        connection.execute("DELETE FROM delayline_messages WHERE seq <= %s", [last_number(connection) - live])
        connection.execute("ANALYZE delayline_messages")
        for statement in (statements.claimed, statements.delete, statements.delete_returning):
            assert statement is not None

            def pages(session: Connection, sql: str = statement.sql) -> int:
                """Return how many pages the statement reads in one of the transport's sessions, planned before."""
                cursor = session.connection.cursor()
                cursor.execute(f"PREPARE asked AS {sql.replace('%s', '$1', 1).replace('%s', '$2', 1)}")
                cursor.execute("EXECUTE asked ('sales', '{}')")
                # When live ones are read and removed by their numbers
                numbers = []
                for number in range(5):
                    connection.execute(PUT, [f"live{number}"])
                    numbers.append(last_number(connection))
                cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE asked ('sales', ARRAY{numbers})")
                [[[plan]]] = cursor.fetchall()
                cursor.execute("DEALLOCATE asked")
                return int(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"])

            # Then each takes a few steps down an index, and does not read one from end to end
            assert await database_at(postgresql_url).read(pages) < 80, statement.sql


@pytest.mark.parametrize(
    ("name", "values"),
    [("numbers", ("sales", 0, 100)), ("copies", ("sales", "m1")), ("page", ("sales", 100, 0))],
    ids=["numbers", "copies", "page"],
)
async def test_looks_into_one_queue_read_no_other(
    postgresql_url: str, transport: SqlTransport, name: str, values: tuple[object, ...]
) -> None:
    # Given a queue with all messages, as the planner knows, and another with a few
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO delayline_messages (queue, id, headers, body) "
            "SELECT 'error', 'm' || n, '{}', '' FROM generate_series(1, 20000) AS n"
        )
        connection.execute("ANALYZE delayline_messages")
        for number in range(3):
            connection.execute(PUT, [f"m{number}"])
    statement = getattr(transport._statements, name)

    def pages(session: Connection) -> int:
        cursor, places = session.connection.cursor(), itertools.count(1)
        cursor.execute(f"PREPARE asked AS {re.sub('%s', lambda _: f'${next(places)}', statement.sql)}")
        given = ", ".join(map(repr, statement.in_order(values)))
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE asked ({given})")
        [[[plan]]] = cursor.fetchall()
        return int(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"])

    # When the other one is looked through, then nothing of the first is read
    assert await database_at(postgresql_url).read(pages) < 20, statement.sql
