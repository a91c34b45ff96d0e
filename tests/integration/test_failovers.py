"""Failovers that leave connections open: their server takes no writes any more, and new connections reach another."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from tests.eventually import PATIENCE, eventually, eventually_async

from delayline import BackendUnavailable, Endpoint, Message, MessageContext, StoredDelivery
from delayline.sql import SqlDelayedMessageStore, SqlTransport, TwoPhaseCommit, sessions
from delayline.testing.conformance.messages import delayed
from delayline.timeouts import SqlTimeoutPersister, TimeoutManagerDelivery
from delayline.transaction import TransactionMode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    import psycopg
    from tests.servers.mariadb import MariadbServer
    from tests.servers.postgresql import PostgresqlServer

A_MOMENT = timedelta(milliseconds=100)
IDS_OF_POSTGRESQL = "SELECT pid, backend_start FROM pg_stat_activity WHERE application_name = 'delayline'"
IDS_OF_MARIADB = "SELECT id FROM information_schema.processlist WHERE user = 'failing'"


class Failover(Protocol):
    """A server whose open sessions become read-only, as those of a demoted primary; new ones can write."""

    url: str

    def fail_over(self) -> None: ...

    def connections(self) -> set[Any]: ...

    def close(self) -> None: ...


class PostgresqlFailover:
    def __init__(self, server: PostgresqlServer) -> None:
        self.server = server
        self.url = server.new_database()
        self._sessions = contextlib.ExitStack()
        self._oldest = self._sessions.enter_context(server.administrator())

    def fail_over(self) -> None:
        with self.server.administrator() as newest, self.server.administrator() as connection:
            connection.execute("ALTER ROLE delayline SET default_transaction_read_only = off")
            connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            connection.execute("SELECT pg_reload_conf()")

            def is_read_only(session: psycopg.Connection) -> bool:
                return session.execute("SHOW default_transaction_read_only").fetchone() == ("on",)

            # The server tells its sessions one after the other, by their age: all know it once first and last do.
            for session in (self._oldest, newest):
                eventually(partial(is_read_only, session), "open sessions are read-only")

    def connections(self) -> set[Any]:
        with self.server.administrator() as connection:
            return set(connection.execute(IDS_OF_POSTGRESQL).fetchall())

    def close(self) -> None:
        with self.server.administrator() as connection:
            connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
            connection.execute("ALTER ROLE delayline RESET default_transaction_read_only")
            connection.execute("SELECT pg_reload_conf()")
        self._sessions.close()
        self.server.drop_database(self.url)


class MariadbFailover:
    def __init__(self, server: MariadbServer) -> None:
        self.server = server
        url = server.new_database()
        self.url = url.replace("delayline@", "failing@")
        with server.administrator() as cursor:
            cursor.execute("CREATE OR REPLACE USER failing@'127.0.0.1'")
            cursor.execute(f"GRANT ALL ON {url.rsplit('/', 1)[1]}.* TO failing@'127.0.0.1'")

    def fail_over(self) -> None:
        with self.server.administrator() as cursor:
            cursor.execute("SET GLOBAL read_only = 1")
            cursor.execute("GRANT READ ONLY ADMIN ON *.* TO failing@'127.0.0.1'")  # to new sessions

    def connections(self) -> set[Any]:
        with self.server.administrator() as cursor:
            cursor.execute(IDS_OF_MARIADB)
            return set(cursor.fetchall())

    def close(self) -> None:
        with self.server.administrator() as cursor:
            cursor.execute("SET GLOBAL read_only = 0")
            cursor.execute("DROP USER failing@'127.0.0.1'")
        self.server.drop_database(self.url)


@pytest.fixture(params=["postgresql", "mariadb"])
def server(request: pytest.FixtureRequest) -> Iterator[Failover]:
    kind = PostgresqlFailover if request.param == "postgresql" else MariadbFailover
    failover = kind(request.getfixturevalue(request.param))
    yield failover
    failover.close()


def stored(url: str, waiting: str) -> Endpoint:
    delivery = StoredDelivery(SqlDelayedMessageStore(url))
    return Endpoint("sales", transport=SqlTransport(url), delayed_delivery=delivery)


def with_timeouts(url: str, waiting: str) -> Endpoint:
    return Endpoint(
        "sales", transport=SqlTransport(url), delayed_delivery=TimeoutManagerDelivery(SqlTimeoutPersister(url))
    )


def over_two_databases(url: str, waiting: str) -> Endpoint:
    both = TwoPhaseCommit()
    return Endpoint(
        "sales",
        transport=SqlTransport(url, two_phase=both),
        delayed_delivery=StoredDelivery(SqlDelayedMessageStore(waiting, two_phase=both)),
    )


def with_the_store_there(url: str, waiting: str) -> Endpoint:
    both = TwoPhaseCommit()
    return Endpoint(
        "sales",
        transport=SqlTransport(waiting, two_phase=both),
        delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url, two_phase=both)),
    )


@pytest.mark.parametrize("make", [stored, with_timeouts, over_two_databases, with_the_store_there])
async def test_an_endpoint_goes_on_with_new_connections(
    server: Failover, postgresql_url: str, make: Callable[[str, str], Endpoint]
) -> None:
    # Given an endpoint with connections of every kind
    endpoint, handled = make(server.url, postgresql_url), set[str]()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled.add(message.id)

    async with asyncio.timeout(PATIENCE), endpoint:
        await asyncio.gather(*(endpoint.send("sales", b"", message_id=f"d{n}", delay=A_MOMENT) for n in range(8)))
        await asyncio.gather(*(endpoint.send("sales", b"", message_id=f"s{n}") for n in range(8)))
        await eventually_async(lambda: len(handled) == 16, "messages arrive")
        # When they take no writes any more
        old, sent = server.connections(), set[str]()  # seen before: some are replaced while it fails over
        server.fail_over()

        async def is_replaced() -> bool:
            for delay in (None, A_MOMENT):
                name = f"after{len(sent)}"
                with contextlib.suppress(BackendUnavailable):
                    await endpoint.send("sales", b"", message_id=name, delay=delay)
                    sent.add(name)
            return not old & server.connections()

        # Then it replaces them, one and all, and what was sent meanwhile is handled
        await eventually_async(is_replaced, "every connection is replaced")
        assert endpoint.started
        await endpoint.send("sales", b"", message_id="last", delay=A_MOMENT)
        await eventually_async(lambda: handled >= {*sent, "last"}, "messages arrive after the failover")


@pytest.fixture
async def store(server: Failover) -> AsyncIterator[SqlDelayedMessageStore]:
    store = SqlDelayedMessageStore(server.url)
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    yield store
    await store.close()


async def waiting(store: SqlDelayedMessageStore) -> list[str]:
    return sorted(message.id for message in await store.pending())


async def test_one_statement_fails_however_many_connections_there_are(
    server: Failover, store: SqlDelayedMessageStore
) -> None:
    await asyncio.gather(*(store.store(delayed(f"a{number}")) for number in range(40)))
    server.fail_over()
    failed = 0
    for number in range(20):
        try:
            await store.store(delayed(f"b{number}"))
        except BackendUnavailable as error:
            assert "read-only" in str(error)
            assert "outcome is unknown" not in str(error)  # nothing was written
            failed += 1
    assert failed <= 1
    assert len(await waiting(store)) == 60 - failed


async def test_a_transaction_ends_with_its_connection(server: Failover, store: SqlDelayedMessageStore) -> None:
    await store.store(delayed("before"))
    async with store.transaction() as transaction:
        await store.store(delayed("first"), transaction)
    server.fail_over()
    # When a transaction writes, and its user ignores the error
    with pytest.raises(BackendUnavailable, match="middle of a transaction"):
        async with store.transaction() as transaction:
            with pytest.raises(BackendUnavailable, match="read-only"):
                await store.store(delayed("second"), transaction)
            await store.store(delayed("third"), transaction)
    # Then nothing is written outside it, and the next one has another connection
    async with store.transaction() as transaction:
        await store.store(delayed("fourth"), transaction)
    assert await waiting(store) == ["before", "first", "fourth"]


async def test_a_connection_that_only_reads_is_replaced_too(
    server: Failover, store: SqlDelayedMessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica answers reads for ever, perhaps without what is written to the new primary."""
    await store.store(delayed("before"))
    old = server.connections()
    server.fail_over()
    monkeypatch.setattr(sessions, "PING_EVERY", 0.0)

    async def is_replaced() -> bool:  # once it is read on, which another connection may be while it notifies others
        assert await waiting(store) == ["before"]
        return len(old & server.connections()) < len(old)

    await eventually_async(is_replaced, "a connection is replaced")


async def test_connections_of_handlers_transactions_are_replaced_too(server: Failover) -> None:
    # Given an endpoint whose messages end in transactions of their handlers
    endpoint, handled = stored(server.url, ""), set[str]()

    @endpoint.handler
    def handle(message: Message, context: MessageContext) -> None:
        with contextlib.closing(context.transaction().connection.cursor()) as cursor:
            cursor.execute("SELECT 1")
        handled.add(message.id)

    async with asyncio.timeout(PATIENCE), endpoint:
        await endpoint.send("sales", b"", message_id="before")
        await eventually_async(lambda: handled, "a message arrives")
        # When the server takes no writes on them any more, and a send has found that
        old = server.connections()
        server.fail_over()

        async def is_found() -> bool:
            with contextlib.suppress(BackendUnavailable):
                await endpoint.send("sales", b"", message_id="after")
            return not old & server.connections()

        # Then they are replaced
        await eventually_async(is_found, "every connection is replaced")
        await endpoint.send("sales", b"", message_id="last")
        await eventually_async(lambda: "last" in handled, "messages arrive after the failover")
