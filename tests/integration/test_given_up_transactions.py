"""Transactions that the server has rolled back as a whole: nobody goes on in them and commits a part."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session
from tests.eventually import PATIENCE, eventually_async
from tests.integration.test_callers_elsewhere import raw_connection, shop_in
from tests.integration.test_handler_transactions import engine_at

from delayline import BackendUnavailable, Endpoint, Recoverability, TransactionAborted
from delayline.sql import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine

    from delayline import Message, MessageContext

LATER = timedelta(days=1)
ORDERS = "CREATE TABLE orders (id VARCHAR(50) PRIMARY KEY, number INT NOT NULL)"
NUMBER = "SELECT number FROM orders WHERE id = 'a'"
MESSAGES = 20


class Caller:
    """A user's connection of any kind to a database with a table of orders."""

    def __init__(self, kind: str, url: str) -> None:
        self.engine = engine_at(url)
        with self.engine.begin() as connection:
            connection.execute(text(ORDERS))
        kinds: dict[str, Callable[[], Any]] = {
            "Connection": self.engine.connect,
            "Session": lambda: Session(self.engine),
            "pymysql": lambda: raw_connection("pymysql", url),
        }
        self.connection = kinds[kind]()

    def execute(self, sql: str) -> list[Any]:
        if hasattr(self.connection, "execute"):
            result = self.connection.execute(text(sql))
            return list(result) if result.returns_rows else []
        with self.connection.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall())

    def kept(self) -> list[str]:
        with self.engine.connect() as connection:
            return sorted(connection.execute(text("SELECT id FROM orders")).scalars())

    def close(self) -> None:
        self.connection.close()
        self.engine.dispose()


@pytest.mark.parametrize("kind", ["Connection", "Session", "pymysql"])
async def test_a_caller_who_goes_on_after_a_conflict_commits_nothing(kind: str, mariadb118_url: str) -> None:
    """Given a snapshot that another send has overtaken, when a caller goes on after the error, then nothing is kept."""
    # Given
    async with shop_in(mariadb118_url) as shop:
        with contextlib.closing(Caller(kind, mariadb118_url)) as caller:
            caller.execute("INSERT INTO orders VALUES ('before', 1)")
            assert len(caller.execute("SELECT id FROM orders")) == 1
            await shop.send("shop", "", delay=LATER, message_id="same")
            with pytest.raises(BackendUnavailable, match="gave this transaction up"):
                await shop.send("shop", "", delay=LATER, message_id="same", transaction=caller.connection)
            # When
            with pytest.raises(Exception, match=r"(?i)read.only|rolled back"):
                caller.execute("INSERT INTO orders VALUES ('after', 1)")
            with contextlib.suppress(Exception):
                caller.connection.commit()
            # Then
            assert caller.kept() == []
            # And after a rollback the connection is as good as new
            caller.connection.rollback()
            caller.execute("INSERT INTO orders VALUES ('new', 1)")
            await shop.send("shop", "", delay=LATER, message_id="new", transaction=caller.connection)
            caller.connection.commit()
            assert caller.kept() == ["new"]
            assert sorted(message.id for message in await shop.delayed.pending()) == ["new", "same"]


async def test_a_send_in_a_transaction_that_was_rolled_back_is_refused(mariadb118_url: str) -> None:
    """Given a caller who has swallowed the error, when it sends again, then the transaction is said to be aborted."""
    async with shop_in(mariadb118_url) as shop:
        with contextlib.closing(Caller("Connection", mariadb118_url)) as caller:
            caller.execute("SELECT id FROM orders")
            await shop.send("shop", "", delay=LATER, message_id="same")
            with pytest.raises(BackendUnavailable):
                await shop.send("shop", "", delay=LATER, message_id="same", transaction=caller.connection)
            with pytest.raises(TransactionAborted):
                await shop.send("shop", "", delay=LATER, message_id="other", transaction=caller.connection)


async def test_a_coroutine_that_goes_on_after_a_conflict_commits_nothing(mariadb118_url: str) -> None:
    """Given a snapshot that another send has overtaken, when an AsyncConnection goes on, then nothing is kept."""
    source = create_async_engine(mariadb118_url.replace("mariadb:", "mariadb+asyncmy:"))
    async with shop_in(mariadb118_url) as shop, source.connect() as connection:
        await connection.execute(text(ORDERS))
        await connection.execute(text("INSERT INTO orders VALUES ('before', 1)"))
        await connection.execute(text("SELECT id FROM orders"))
        await shop.send("shop", "", delay=LATER, message_id="same")
        with pytest.raises(BackendUnavailable, match="gave this transaction up"):
            await shop.send("shop", "", delay=LATER, message_id="same", transaction=connection)
        with pytest.raises(Exception, match=r"(?i)read.only|rolled back"):
            await connection.execute(text("INSERT INTO orders VALUES ('after', 1)"))
        await connection.rollback()
        assert (await connection.execute(text("SELECT id FROM orders"))).all() == []
    await source.dispose()


@pytest.mark.parametrize("kind", ["Connection", "pymysql"])
async def test_a_caller_who_goes_on_after_a_deadlock_commits_nothing(kind: str, mariadb_url: str) -> None:
    """Given two transactions that wait for each other, when the loser goes on, then nothing of it is kept."""
    # Given another, who has more to lose, holds the message's id and waits for the caller's row
    async with shop_in(mariadb_url) as shop:
        with contextlib.closing(Caller(kind, mariadb_url)) as caller, caller.engine.connect() as other:
            with caller.engine.begin() as before:
                before.execute(text("INSERT INTO orders VALUES ('a', 0)"))
            for number in range(50):
                other.execute(text("INSERT INTO orders VALUES (:id, 0)"), {"id": f"other{number}"})
            await shop.send("shop", "", delay=LATER, message_id="same", transaction=other)
            caller.execute("UPDATE orders SET number = 1 WHERE id = 'a'")
            waiting = asyncio.create_task(
                asyncio.to_thread(other.execute, text("UPDATE orders SET number = 2 WHERE id = 'a'"))
            )
            with pytest.raises(BackendUnavailable, match="gave this transaction up"):
                await shop.send("shop", "", delay=LATER, message_id="same", transaction=caller.connection)
            # When
            with pytest.raises(Exception, match=r"(?i)read.only|rolled back"):
                caller.execute("INSERT INTO orders VALUES ('after', 1)")
            with contextlib.suppress(Exception):
                caller.connection.commit()
            # Then
            await waiting
            other.rollback()
            assert caller.kept() == ["a"]


@pytest.fixture(params=["postgresql", "mariadb118"])
def conflicts(request: pytest.FixtureRequest) -> Iterator[tuple[str, Engine]]:
    """Provide the URL of a database with an order, and an Engine on which transactions conflict that change it."""
    url = str(request.getfixturevalue(f"{request.param}_url"))
    level = "SERIALIZABLE" if request.param == "postgresql" else "REPEATABLE READ"
    parts = url.replace("postgresql:", "postgresql+psycopg:").replace("mariadb:", "mariadb+pymysql:")
    engine = create_engine(parts, isolation_level=level)
    with engine.begin() as connection:
        connection.execute(text(ORDERS))
        connection.execute(text("INSERT INTO orders VALUES ('a', 0)"))
    yield url, engine
    engine.dispose()


class Counter:
    """An endpoint each of whose messages reads a number in an own transaction, and writes the next one."""

    def __init__(self, url: str, source: Engine | None, *, wrapped: bool = False) -> None:
        self.attempts: list[int] = []
        runs, first_two = itertools.count(), threading.Barrier(2)
        self.transport = SqlTransport(url)
        self.endpoint = Endpoint(
            "shop",
            transport=self.transport,
            delayed_delivery=SqlDelayedMessageStore(url),
            concurrency=8,
            recoverability=Recoverability(immediate_retries=0, delayed_retries=0),
        )

        @self.endpoint.handler
        def handle(message: Message, context: MessageContext) -> None:
            run = next(runs)
            self.attempts.append(context.attempt)
            connection = context.transaction(source) if source is not None else context.transaction()
            try:
                number = connection.execute(text(NUMBER)).scalar_one()
                if source is not None and run in (0, 1):  # both have read before one writes: they conflict
                    first_two.wait(PATIENCE)
                connection.execute(text("UPDATE orders SET number = :next WHERE id = 'a'"), {"next": number + 1})
            except Exception as error:
                if wrapped:
                    raise LookupError("no order") from error
                raise

    async def count_to(self, number: int) -> None:
        async with self.endpoint:
            for _ in range(number):
                await self.endpoint.send("shop", b"")
            await eventually_async(self._is_empty)
            self.failed = await self.transport.count("error")

    async def _is_empty(self) -> bool:
        return await self.transport.count("shop") == 0


@pytest.mark.parametrize("wrapped", [False, True])
async def test_handlers_whose_own_transactions_conflict_run_again(
    conflicts: tuple[str, Engine], *, wrapped: bool
) -> None:
    """Given handlers that change what others have read, when they conflict, then they run again within the attempt."""
    url, engine = conflicts
    counter = Counter(url, engine, wrapped=wrapped)
    await counter.count_to(MESSAGES)
    with engine.connect() as connection:
        found = connection.execute(text(NUMBER)).scalar_one()
    assert (found, counter.failed) == (MESSAGES, 0)
    assert set(counter.attempts) == {1}
    assert len(counter.attempts) > MESSAGES, "no conflict came about"


@pytest.mark.parametrize("product", ["postgresql", "mariadb118"])
async def test_coroutines_whose_own_transactions_conflict_run_again(
    product: str, request: pytest.FixtureRequest
) -> None:
    """Given coroutine handlers on an AsyncEngine, when they conflict, then they run again within the attempt."""
    url = str(request.getfixturevalue(f"{product}_url"))
    named = url.replace("postgresql:", "postgresql+psycopg:").replace("mariadb:", "mariadb+asyncmy:")
    level = "SERIALIZABLE" if product == "postgresql" else "REPEATABLE READ"
    engine = engine_at(url)
    with engine.begin() as connection:
        connection.execute(text(ORDERS))
        connection.execute(text("INSERT INTO orders VALUES ('a', 0)"))
    engine.dispose()
    source, attempts = create_async_engine(named, isolation_level=level), list[int]()
    first_two, transport = asyncio.Barrier(2), SqlTransport(url)
    endpoint = Endpoint("shop", transport=transport, concurrency=4, recoverability=Recoverability(0, 0))

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        attempts.append(context.attempt)
        run = len(attempts)
        own = await context.transaction(source)
        number = (await own.execute(text(NUMBER))).scalar_one()
        if run in (1, 2):  # both have read before one writes: they conflict
            await asyncio.wait_for(first_two.wait(), PATIENCE)
        await own.execute(text("UPDATE orders SET number = :next WHERE id = 'a'"), {"next": number + 1})

    async with endpoint:
        for _ in range(8):
            await endpoint.send("shop", b"")

        async def handled() -> bool:
            return await transport.count("shop") == 0

        await eventually_async(handled)
        assert await transport.count("error") == 0
    await source.dispose()
    assert set(attempts) == {1}
    assert len(attempts) > 8, "no conflict came about"


async def test_a_conflict_that_never_ends_is_a_failure(postgresql_url: str) -> None:
    """Given a handler that always conflicts, when it has run so often, then its message is in the error queue."""
    engine, runs = engine_at(postgresql_url), []
    transport = SqlTransport(postgresql_url)
    endpoint = Endpoint("shop", transport=transport, recoverability=Recoverability(0, 0))

    @endpoint.handler
    def handle(message: Message, context: MessageContext) -> None:
        runs.append(context.attempt)
        context.transaction(engine).execute(text("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$"))

    async with endpoint:
        await endpoint.send("shop", b"")

        async def failed() -> bool:
            return await transport.count("error") == 1

        await eventually_async(failed)
    engine.dispose()
    assert runs == [1] * 21


async def test_transactions_of_the_endpoint_do_not_conflict(mariadb118_url: str) -> None:
    """Given no Engine of the user's, when handlers change one row at once, then each runs once: at READ COMMITTED."""
    engine = engine_at(mariadb118_url)
    with engine.begin() as connection:
        connection.execute(text(ORDERS))
        connection.execute(text("INSERT INTO orders VALUES ('a', 0)"))
    transport, runs = SqlTransport(mariadb118_url), []
    endpoint = Endpoint(
        "shop", transport=transport, delayed_delivery=SqlDelayedMessageStore(mariadb118_url), concurrency=8
    )

    @endpoint.handler
    def handle(message: Message, context: MessageContext) -> None:
        runs.append(message.id)
        own = context.transaction()
        own.execute(text(NUMBER)).scalar_one()
        own.execute(text("UPDATE orders SET number = number + 1 WHERE id = 'a'"))

    async with endpoint:
        for _ in range(MESSAGES):
            await endpoint.send("shop", b"")

        async def handled() -> bool:
            return await transport.count("shop") == 0

        await eventually_async(handled)
    with engine.connect() as connection:
        assert connection.execute(text(NUMBER)).scalar_one() == MESSAGES
    engine.dispose()
    assert len(runs) == MESSAGES


async def test_a_handler_that_swallows_a_deadlock_commits_nothing(mariadb_url: str) -> None:
    """Given a handler that goes on after a deadlock, when it returns, then it runs again, and its rows are whole."""
    engine = engine_at(mariadb_url)
    with engine.begin() as connection:
        connection.execute(text(ORDERS))
        connection.execute(text("INSERT INTO orders VALUES ('a', 0), ('b', 0)"))
    transport, runs = SqlTransport(mariadb_url), []
    endpoint = Endpoint("shop", transport=transport, recoverability=Recoverability(0, 0))

    @endpoint.handler
    def handle(message: Message, context: MessageContext) -> None:
        runs.append(context.attempt)
        own = context.transaction()
        own.execute(text("INSERT INTO orders VALUES ('before', 0)"))
        own.execute(text("UPDATE orders SET number = 1 WHERE id = 'a'"))
        if len(runs) == 1:
            with engine.connect() as other, contextlib.suppress(Exception):
                lose(own, other)
        own.execute(text("INSERT INTO orders VALUES ('after', 0)"))

    async with endpoint:
        await endpoint.send("shop", b"")

        async def over() -> bool:
            return await transport.count("shop") == 0

        await eventually_async(over)
    with engine.connect() as connection:
        kept = set(connection.execute(text("SELECT id FROM orders")).scalars())
    engine.dispose()
    assert {"before", "after"} <= kept or not {"before", "after"} & kept, f"runs {runs}: {kept}"


def lose(own: Any, other: Any) -> None:  # noqa: ANN401 - connections of SQLAlchemy
    """Have `own`, which has the row a, wait for `other`, which has done more, has the row b and waits for a."""
    for number in range(50):
        other.execute(text("INSERT INTO orders VALUES (:id, 0)"), {"id": f"other{number}"})
    other.execute(text("UPDATE orders SET number = 2 WHERE id = 'b'"))
    thread = threading.Thread(target=lambda: other.execute(text("UPDATE orders SET number = 2 WHERE id = 'a'")))
    thread.start()
    try:
        own.execute(text("UPDATE orders SET number = 1 WHERE id = 'b'"))
    finally:
        thread.join()
        other.rollback()
