"""Servers that die at any moment: each public call of store and transport ends with an error of delayline's."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from sqlalchemy import event
from tests.conftest import running
from tests.eventually import PATIENCE
from tests.integration.wire_between import wire_to
from tests.servers.mariadb import MariadbServer
from tests.servers.postgresql import PostgresqlServer

from delayline import (
    BackendUnavailable,
    DelaylineError,
    Endpoint,
    SqlDelayedMessageStore,
    SqlTransport,
    StoredDelivery,
    TransactionMode,
)
from delayline.sql.databases import database_at
from delayline.sql.server_database import ServerDatabase
from delayline.testing.conformance.messages import delayed, operation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from tests.integration.wire_between import Wire

SOON: Final = timedelta(milliseconds=50)
DAY: Final = timedelta(days=1)
MEGABYTE: Final = 1 << 20


class StoreAndTransport:
    """A store and a transport in use, and every public call of theirs."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = SqlDelayedMessageStore(url, journal=True)
        self.transport = SqlTransport(url, poll_interval=SOON)
        self._receiver: Any = None
        self._received: Any = None

    async def begin(self) -> None:
        """Set up and open everything, and hold a message received and one fetched."""
        await self.store.setup_infrastructure("sales")
        await self.store.initialize("sales", TransactionMode.SENDS_ATOMIC_WITH_RECEIVE)
        await self.transport.start()
        await self.transport.setup_infrastructure(["billing"])
        self._receiver = await self.transport.receiver("billing")
        await self.transport.dispatch([operation("billing", str(number)) for number in range(3)])
        [self._received] = await self._receiver.receive(1)

    async def end(self) -> None:
        """Close everything, which never fails."""
        if self._receiver is not None:
            await self._receiver.stop()
        await self.transport.stop()
        await self.store.close()

    @property
    def calls(self) -> dict[str, Callable[[], Awaitable[object]]]:
        """Return each call by its name."""
        store, transport, message, now = self.store, self.transport, delayed("one"), datetime.now(UTC)
        many = [delayed(str(number)) for number in range(600)]
        return {
            "setup of a store": lambda: SqlDelayedMessageStore(self.url).setup_infrastructure("other"),
            "planned_infrastructure of a store": lambda: store.planned_infrastructure("other"),
            "missing_rights of a store": lambda: store.missing_rights("sales", takes=True),
            "initialize": self._initialize,
            "store": lambda: store.store(message),
            "store_many, few": lambda: store.store_many(many[:2]),
            "store_many, many": lambda: store.store_many(many),
            "store in a transaction": lambda: self._in_transaction(store, lambda tx: store.store_many(many, tx)),
            "fetch_due": lambda: store.fetch_due(now, 10, max_bytes=MEGABYTE),
            "fetch_due in a transaction": lambda: self._in_transaction(
                store, lambda tx: store.fetch_due(now, 10, max_bytes=MEGABYTE, transaction=tx)
            ),
            "fetch_next_due": lambda: store.fetch_next_due(now),
            "forward_due": lambda: store.forward_due(now, 10, max_bytes=MEGABYTE),
            "next_due": store.next_due,
            "remove": lambda: store.remove(message),
            "remove_many": lambda: store.remove_many(many),
            "increment_failure_count": lambda: store.increment_failure_count(message),
            "retry_many": lambda: store.retry_many(many[:3], now + DAY),
            "release_many": lambda: store.release_many(many[:3]),
            "cancel": lambda: store.cancel("one"),
            "reschedule": lambda: store.reschedule("one", now + DAY),
            "pending": lambda: store.pending(destination="billing"),
            "count_by_due": lambda: store.count_by_due(DAY),
            "start": self._start,
            "setup of a transport": lambda: transport.setup_infrastructure(["shipping"]),
            "planned_infrastructure of a transport": lambda: transport.planned_infrastructure(["shipping"]),
            "missing_rights of a transport": lambda: transport.missing_rights("billing", takes=True),
            "dispatch": lambda: transport.dispatch([operation("billing", "d")]),
            "dispatch of many": lambda: transport.dispatch([operation("billing", str(one)) for one in range(600)]),
            "dispatch in a transaction": lambda: self._in_transaction(
                transport, lambda tx: transport.dispatch([operation("billing", "t")], tx)
            ),
            "has_queue": lambda: transport.has_queue("nowhere"),
            "queues": transport.queues,
            "count": lambda: transport.count("billing"),
            "browse": lambda: transport.browse("billing", 10),
            "take": lambda: transport.take("billing", "2"),
            "purge": lambda: transport.purge("billing"),
            "receiver": self._another_receiver,
            "receive": lambda: self._receiver.receive(1),
            "acknowledge": lambda: self._receiver.acknowledge(self._received),
            "release": lambda: self._receiver.release(self._received),
        }

    async def _in_transaction(self, part: Any, work: Callable[[Any], Awaitable[object]]) -> None:  # noqa: ANN401
        async with part.transaction() as transaction:
            await work(transaction)

    async def _initialize(self) -> None:
        store = SqlDelayedMessageStore(self.url)
        await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
        await store.close()

    async def _start(self) -> None:
        transport = SqlTransport(self.url)
        await transport.start()
        await transport.stop()

    async def _another_receiver(self) -> None:
        receiver = await self.transport.receiver("billing")
        await receiver.stop()


CALLS: Final = sorted(StoreAndTransport("sqlite:///none.db").calls)
PRODUCTS: Final = ["postgresql", "mariadb"]


async def outcome(work: Awaitable[object]) -> DelaylineError | None:
    """Return the error that `work` ends with; anything that is not delayline's fails the test."""
    async with asyncio.timeout(PATIENCE):
        try:
            await work
        except DelaylineError as error:
            return error
    return None


@contextlib.asynccontextmanager
async def behind_a_wire(url: str) -> AsyncIterator[tuple[Wire, StoreAndTransport]]:
    async with wire_to(url) as (wire, far_url):
        pair = StoreAndTransport(far_url)
        await pair.begin()
        try:
            yield wire, pair
        finally:
            wire.refuses, wire.requests_left = False, None
            await pair.end()


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("requests", [0, 1, 2, 3])
@pytest.mark.sample(4)
async def test_a_call_whose_server_dies_raises_an_error_of_delaylines(
    product: str, requests: int, request: pytest.FixtureRequest
) -> None:
    """Given open connections, when the server dies before or in each call, then it raises nothing of a driver's."""
    failed = []
    async with behind_a_wire(request.getfixturevalue(f"{product}_url")) as (wire, pair):
        for name in CALLS:
            await outcome(pair.transport.dispatch([operation("billing", name)]))  # connects again
            if requests == 0:
                wire.refuses = True
                wire.cut()
            else:
                wire.requests_left = requests
            error = await outcome(pair.calls[name]())
            if error is not None:
                assert isinstance(error, BackendUnavailable), f"{name}: {error!r}"
                failed.append(name)
            wire.refuses, wire.requests_left = False, None
    assert len(failed) > len(CALLS) // 2, failed


@pytest.mark.parametrize("product", PRODUCTS)
async def test_each_call_while_no_server_runs_raises_an_error_of_delaylines(product: str) -> None:
    """Given a server that was killed, when each call is made, then it raises BackendUnavailable, or does nothing."""
    with running(PostgresqlServer) if product == "postgresql" else running(MariadbServer) as server:
        pair = StoreAndTransport(server.new_database())
        await pair.begin()
        try:
            server.kill()
            outcomes = {name: await outcome(pair.calls[name]()) for name in CALLS}
        finally:
            await pair.end()
    assert {type(error) for error in outcomes.values()} <= {BackendUnavailable, type(None)}, outcomes
    # Starting shares open connections; row locks are released with their connection.
    assert [name for name, error in outcomes.items() if error is None] == ["release", "release_many", "start"]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.sample(1)
async def test_a_start_whose_set_up_loses_the_server_raises_backend_unavailable(
    product: str, request: pytest.FixtureRequest
) -> None:
    """Given an empty database, when its server dies at any packet of the set-up, then start() raises that only."""
    url, requests, failures, ended = request.getfixturevalue(f"{product}_url"), 0, 0, False
    while not ended:
        requests += 1
        async with wire_to(url) as (wire, far_url):
            wire.requests_left = requests
            delivery = StoredDelivery(SqlDelayedMessageStore(far_url, journal=True))
            endpoint = Endpoint(f"shop{requests}", transport=SqlTransport(far_url), delayed_delivery=delivery)
            error = await outcome(endpoint.setup())
            ended = not wire.refuses
            assert error is None or isinstance(error, BackendUnavailable), f"packet {requests}: {error!r}"
            failures += error is not None
    assert failures > 20


@pytest.mark.server
@pytest.mark.parametrize("statement", ["CREATE TABLE", "CREATE INDEX"])
async def test_a_start_in_which_mariadb_is_killed_raises_backend_unavailable(statement: str) -> None:
    """Given an empty database, when the server is killed between two statements of the set-up, then start() says so."""
    with running(MariadbServer) as server:
        url = server.new_database()
        endpoint = Endpoint(
            "shop", transport=SqlTransport(url), delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url))
        )
        database = database_at(url)
        assert isinstance(database, ServerDatabase)
        with killing_at(statement, database, server.kill), pytest.raises(BackendUnavailable, match="lost"):
            await endpoint.start()


@pytest.mark.parametrize("how", ["alone", "in a transaction"])
async def test_a_connection_that_ends_amid_many_inserts_is_an_error_of_delaylines(
    postgresql_url: str, how: str
) -> None:
    """Given 600 rows on their way, in a pipeline or a copy, when the server ends the session, then none is stored."""
    store = await opened(postgresql_url)
    try:
        with psycopg.connect(postgresql_url, autocommit=True) as other:
            other.execute(ENDS_ITS_SESSION)
            with pytest.raises(BackendUnavailable, match=r"ended|lost|closed the connection"):
                await stored_many(store, how)
            other.execute('DROP TRIGGER ends ON "sales.timeouts"')
        assert await store.pending() == []
        await stored_many(store, how)
        assert len(await store.pending(limit=1000)) == 600
    finally:
        await store.close()


@pytest.mark.parametrize("how", ["alone", "in a transaction"])
async def test_a_connection_that_mariadb_kills_amid_many_inserts_is_an_error_of_delaylines(
    mariadb: MariadbServer, mariadb_url: str, how: str
) -> None:
    """Given 600 rows on their way, when an administrator kills the connection, then none is stored."""
    store = await opened(mariadb_url)
    name = mariadb_url.rsplit("/", 1)[1]
    try:
        with mariadb.administrator() as other:
            other.execute(f"USE {name}")
            other.execute(SLEEPS)
            storing = asyncio.ensure_future(stored_many(store, how))
            number: int | None = None
            while number is None:
                await asyncio.sleep(0.01)
                other.execute(
                    "SELECT id FROM information_schema.processlist WHERE db = %s AND state = 'User sleep'", (name,)
                )
                number = next((row[0] for row in other.fetchall()), None)
            other.execute(f"KILL {number}")
            with pytest.raises(BackendUnavailable, match=r"lost|ended"):
                await storing
            other.execute("DROP TRIGGER sleeps")
        assert await store.pending() == []
        await stored_many(store, how)
        assert len(await store.pending(limit=1000)) == 600
    finally:
        await store.close()


async def opened(url: str) -> SqlDelayedMessageStore:
    store = SqlDelayedMessageStore(url)
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    return store


async def stored_many(store: SqlDelayedMessageStore, how: str) -> None:
    messages = [delayed(str(number)) for number in range(600)]
    if how == "alone":
        await store.store_many(messages)
    else:
        async with store.transaction() as transaction:
            await store.store_many(messages, transaction)


#: The backend that inserts the 400th row ends itself.
ENDS_ITS_SESSION: Final = """
CREATE FUNCTION ends() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF NEW.id = '400' THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF;
  RETURN NEW;
END $$;
CREATE TRIGGER ends BEFORE INSERT ON "sales.timeouts" FOR EACH ROW EXECUTE FUNCTION ends()
"""
SLEEPS: Final = """
CREATE TRIGGER sleeps BEFORE INSERT ON `sales.timeouts` FOR EACH ROW
BEGIN
  IF NEW.id = '400' THEN DO SLEEP(10); END IF;
END
"""


@contextlib.contextmanager
def killing_at(statement: str, database: ServerDatabase, kill: Callable[[], None]) -> Iterator[None]:
    """Kill the server when that statement is about to be executed for the first time."""

    def before(connection: object, cursor: object, sql: str, *_: object) -> None:
        if sql.lstrip().startswith(statement):
            kill()

    event.listen(database.dialect.connections.engine, "before_cursor_execute", before)
    try:
        yield
    finally:
        event.remove(database.dialect.connections.engine, "before_cursor_execute", before)
