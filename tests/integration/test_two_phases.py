"""Transactions over two databases without crashes, and refused combinations."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool
from tests.conftest import not_installed, running
from tests.eventually import PATIENCE, eventually, eventually_async
from tests.servers.mariadb import MariadbServer
from tests.servers.ports import free_port
from tests.servers.postgresql import PostgresqlServer
from tests.servers.programs import Programs

from delayline import (
    BackendUnavailable,
    ConfigurationError,
    DelayedMessage,
    Endpoint,
    Guarantee,
    Message,
    StoredDelivery,
    TransactionMode,
)
from delayline.errors import BackendUnusable, UnsupportedTransactionMode
from delayline.events import Event
from delayline.spi import TransportOperation
from delayline.sql import SqlDelayedMessageStore, SqlTransport, TwoPhaseCommit, two_phase
from delayline.sql.databases import database_at, examine
from delayline.sql.server import run
from delayline.sql.two_phase import TwoPhaseTransaction
from delayline.testing import Signals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from sqlalchemy import Connection

    from delayline.sql.dialect import PreparedTransactions

    AtPrepare = Callable[[Connection, str], object]

pytestmark = pytest.mark.sample(3)  # of five pairs of databases, for most tests
DUE = datetime(2100, 1, 1, tzinfo=UTC)


def nothing(connection: Connection, name: str) -> None:
    """Do nothing."""


@pytest.fixture
def second_mariadb_url(mariadb: MariadbServer) -> Iterator[str]:
    url = mariadb.new_database()
    yield url
    mariadb.drop_database(url)


@pytest.fixture
def second_url(postgresql: PostgresqlServer) -> Iterator[str]:
    url = postgresql.new_database()
    yield url
    postgresql.drop_database(url)


def delayed(number: int) -> DelayedMessage:
    return DelayedMessage(Message(f"{number}", {}, b""), "shop", DUE)


def sent(number: int) -> TransportOperation:
    return TransportOperation(Message(f"{number}", {}, b""), "shop")


@pytest.fixture
def second_mariadb118_url(mariadb118: MariadbServer) -> Iterator[str]:
    url = mariadb118.new_database()
    yield url
    mariadb118.drop_database(url)


def driven(url: str) -> str:
    """Return the URL with the driver that we have."""
    return url.replace("postgresql:", "postgresql+psycopg:").replace("mariadb:", "mariadb+pymysql:")


def shut(driver: Any) -> None:  # noqa: ANN401 - a connection of either driver
    """Cut a connection's socket, as a network that is gone does."""
    descriptor = driver.fileno() if hasattr(driver, "fileno") else driver._sock.fileno()
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        copy.shutdown(socket.SHUT_RDWR)


class TwoDatabases:
    """Queues in one database, a store in another, and a count of prepared transactions."""

    def __init__(self, queues: str, waiting: str, *, setup: bool = True) -> None:
        self.queues, self.waiting = queues, waiting
        self.both = TwoPhaseCommit()
        self.transport = SqlTransport(queues, two_phase=self.both)
        self.store = SqlDelayedMessageStore(waiting, two_phase=self.both)
        delivery = StoredDelivery(self.store, polling=False)
        self.endpoint = Endpoint(
            "shop", transport=self.transport, delayed_delivery=delivery, setup_infrastructure=setup
        )
        self.prepared: list[str] = []

    @property
    def two_phase(self) -> PreparedTransactions:
        """How the store's database prepares."""
        two_phase = database_at(self.waiting).dialect.transactions.two_phase
        assert two_phase is not None
        return two_phase

    @contextlib.contextmanager
    def at_prepare(self, *, before: AtPrepare = nothing, after: AtPrepare = nothing) -> Iterator[None]:
        """Run something on the connection before a transaction is prepared, or after it."""
        two_phase, original = self.two_phase, self.two_phase.prepare

        def prepare(connection: Connection, name: str) -> None:
            before(connection, name)
            original(connection, name)
            after(connection, name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(two_phase, "prepare", prepare)
            yield

    @property
    def on_postgresql(self) -> bool:
        """Whether the store is in PostgreSQL."""
        return self.waiting.startswith("postgresql:")

    def in_doubt(self) -> list[str]:
        """Return what is prepared, asked for on a connection of its own."""
        with database_at(self.waiting).dialect.connections.look() as connection:
            return self.two_phase.in_doubt(connection, "delayline-")

    async def exist(self) -> tuple[list[str], list[str]]:
        queued = [message.id for message in await self.transport.browse("shop", 10)]
        return queued, [message.id for message in await self.store.pending()]


#: The databases of the queues and of the store.
PAIRS = [
    ("postgresql_url", "second_url"),
    ("mariadb_url", "second_url"),
    ("postgresql_url", "second_mariadb_url"),
    ("mariadb_url", "second_mariadb_url"),
    ("mariadb118_url", "second_mariadb118_url"),
]


@pytest.fixture(params=PAIRS, ids="-".join)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[TwoDatabases]:
    """Queues in either product, the store in either."""
    queues, waiting = request.param
    pair = TwoDatabases(request.getfixturevalue(queues), request.getfixturevalue(waiting))
    with pair.at_prepare(after=lambda _, name: pair.prepared.append(name)):
        async with pair.endpoint:
            yield pair


async def test_both_or_neither(pair: TwoDatabases) -> None:
    """Given work in both databases, when the transaction ends, then both have it or neither has."""
    assert pair.endpoint.guarantee is Guarantee.EXACTLY_ONCE
    assert pair.endpoint.transaction_mode is TransactionMode.TRANSACTION_SCOPE
    async with pair.transport.transaction() as transaction:
        await pair.transport.dispatch([sent(1)], transaction)
        await pair.store.store(delayed(1), transaction)
        assert await pair.exist() == ([], [])
    assert await pair.exist() == (["1"], ["1"])
    with pytest.raises(KeyError):
        async with pair.store.transaction() as transaction:
            await pair.store.store(delayed(2), transaction)
            await pair.transport.dispatch([sent(2)], transaction)
            raise KeyError
    assert await pair.exist() == (["1"], ["1"])
    assert len(pair.prepared) == 1


async def test_work_in_one_database_is_an_ordinary_commit(pair: TwoDatabases) -> None:
    """Given a transaction that touches one database only, when it commits, then nothing is prepared."""
    async with pair.transport.transaction() as transaction:
        await pair.store.store(delayed(1), transaction)
    async with pair.transport.transaction() as transaction:
        await pair.transport.dispatch([sent(1)], transaction)
    async with pair.transport.transaction():
        pass
    assert await pair.exist() == (["1"], ["1"])
    assert pair.prepared == []


async def test_a_savepoint_spans_both(pair: TwoDatabases) -> None:
    """Given a part of a transaction that fails, when it is undone, then it is in both databases."""
    async with pair.transport.transaction() as transaction:
        await pair.store.store(delayed(1), transaction)
        with pytest.raises(KeyError):
            async with transaction.savepoint():
                await pair.store.store(delayed(2), transaction)
                await pair.transport.dispatch([sent(2)], transaction)
                raise KeyError
        await pair.transport.dispatch([sent(3)], transaction)
    assert await pair.exist() == (["3"], ["1"])


async def test_a_cancelled_commit_is_finished_first(pair: TwoDatabases) -> None:
    """Given a commit in progress, when its task is cancelled, then both have committed, and waiting callers get the
    result.
    """
    called: list[str] = []
    tasks: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()

    async def work() -> None:
        async with pair.transport.transaction() as transaction:
            transaction.after_commit(lambda: called.append("committed"))
            await pair.transport.dispatch([sent(1)], transaction)
            await pair.store.store(delayed(1), transaction)

    with pair.at_prepare(before=lambda *_: loop.call_soon_threadsafe(tasks[0].cancel)):
        tasks.append(asyncio.create_task(work()))
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
    assert await pair.exist() == (["1"], ["1"])
    assert called == ["committed"]


async def both(pair: TwoDatabases, number: int = 1) -> None:
    """Send a message and store one, in a transaction over both databases."""
    async with pair.transport.transaction() as transaction:
        await pair.transport.dispatch([sent(number)], transaction)
        await pair.store.store(delayed(number), transaction)


async def test_a_failed_transaction_is_not_prepared(pair: TwoDatabases) -> None:
    """Given a branch that its server has rolled back, when it is prepared, then nothing is committed."""

    def fail(connection: Connection, name: str) -> None:
        if pair.on_postgresql:  # which then prepares nothing, without an error
            with pytest.raises(psycopg.Error):
                run(connection, "SELECT nonsense")
        else:
            pair.two_phase.control(name).rollback(connection)

    refusal = "rolled the transaction back instead of preparing it" if pair.on_postgresql else "XAER_RMFAIL"
    with pair.at_prepare(before=fail), pytest.raises(BackendUnavailable, match=refusal):
        await both(pair)
    assert await pair.exist() == ([], [])
    await both(pair, 2)
    assert await pair.exist() == (["2"], ["2"])


@pytest.mark.parametrize("step", ["before", "after"])
async def test_a_connection_lost_at_the_prepare(pair: TwoDatabases, step: str) -> None:
    """Given a branch whose connection is lost around its prepare, then neither database has it, and nothing is left."""

    def cut(connection: Connection, name: str) -> None:
        driver: Any = connection.connection.driver_connection
        shut(driver)
        if step == "after":
            run(connection, "SELECT 1")

    with pair.at_prepare(**{step: cut}), pytest.raises(BackendUnavailable):
        await both(pair)
    await eventually_async(lambda: not pair.in_doubt(), "the transaction is rolled back")
    assert await pair.exist() == ([], [])
    await both(pair, 2)
    assert await pair.exist() == (["2"], ["2"])


async def test_a_connection_lost_before_the_end(pair: TwoDatabases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a decision to commit, when the branch's connection is lost, then another commits it."""
    cut: list[str] = []
    original = pair.two_phase.commit_prepared

    def cutting(connection: Connection, name: str) -> bool:
        if not cut:
            cut.append(name)
            shut(connection.connection.driver_connection)
        return original(connection, name)

    monkeypatch.setattr(pair.two_phase, "commit_prepared", cutting)
    await both(pair)
    assert cut
    await eventually_async(lambda: not pair.in_doubt(), "the transaction is committed")
    assert await pair.exist() == (["1"], ["1"])


@pytest.mark.parametrize("answers", ["a refusal", "nothing"])
@pytest.mark.parametrize("step", ["prepare", "commit_prepared"])
@pytest.mark.slow
async def test_a_server_that_is_blocked_at_a_step(
    mariadb: MariadbServer,
    mariadb_url: str,
    postgresql_url: str,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    answers: str,
) -> None:
    """Given a server that does a step later than an answer may take, or refuses it, then both have it or neither."""
    monkeypatch.setattr(two_phase, "LOOK_EVERY", 0.5)
    pair = TwoDatabases(postgresql_url, f"{mariadb_url}?server_timeout=2")
    blocked: list[str] = []
    original = getattr(pair.two_phase, step)
    raised = pytest.raises(BackendUnavailable) if step == "prepare" else contextlib.nullcontext()
    async with pair.endpoint:
        with mariadb.administrator() as administrator, Signals() as signals:

            def block(connection: Connection, name: str) -> Any:  # noqa: ANN401 - what the step returns
                if not blocked:
                    blocked.append(name)
                    administrator.execute("FLUSH TABLES WITH READ LOCK")
                    if answers == "nothing":
                        run(connection, "SET SESSION lock_wait_timeout = 600")
                return original(connection, name)

            monkeypatch.setattr(pair.two_phase, step, block)
            try:
                with raised:
                    await both(pair)
            finally:
                administrator.execute("UNLOCK TABLES")
            if (step, answers) == ("prepare", "nothing"):  # it is prepared only now
                await signals.wait_for(Event.SETTLED, timeout=PATIENCE)
        await eventually_async(lambda: not pair.in_doubt(), "the transaction is settled")
        expected = [] if step == "prepare" else ["1"]

        async def is_whole() -> bool:
            with contextlib.suppress(BackendUnavailable):
                return await pair.exist() == (expected, expected)
            return False

        await eventually_async(is_whole, "both databases agree")
    assert blocked


async def test_a_transaction_in_progress_is_left_alone(pair: TwoDatabases) -> None:
    """Given a transaction that is prepared, when another process recovers, then it waits for the decision."""
    other = TwoDatabases(pair.queues, pair.waiting)
    recovered: list[int] = []
    loop = asyncio.get_running_loop()

    def recover(connection: Connection, name: str) -> None:
        asyncio.run_coroutine_threadsafe(pair.both.recover(), loop).result(PATIENCE)
        recovered.append(pair.both.in_doubt)

    with pair.at_prepare(after=recover):
        await both(pair)
    assert recovered == [1]
    assert await pair.exist() == (["1"], ["1"])
    async with other.endpoint:
        assert other.both.in_doubt == 0


async def test_a_decided_transaction_is_finished_by_its_own_connection(
    pair: TwoDatabases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a decision that is not carried out yet, when another process recovers, then it is carried out once."""
    recovered: list[str] = []
    original = pair.two_phase.commit_prepared
    loop = asyncio.get_running_loop()

    def recovering(connection: Connection, name: str) -> bool:
        if not recovered:
            recovered.append(name)
            asyncio.run_coroutine_threadsafe(pair.both.recover(), loop).result(PATIENCE)
        return original(connection, name)

    monkeypatch.setattr(pair.two_phase, "commit_prepared", recovering)
    await both(pair)
    assert recovered
    await pair.both.recover()
    assert (pair.both.in_doubt, pair.in_doubt()) == (0, [])
    assert await pair.exist() == (["1"], ["1"])


async def test_a_deadlock_ends_the_transaction_in_both(pair: TwoDatabases) -> None:
    """Given a branch in a deadlock, when either side has given way, then ours is in both databases or neither."""
    database, touch = database_at(pair.waiting), "UPDATE delayline_queues SET paused = 1 WHERE name = %s"
    await database.write(lambda at: run(at, "INSERT INTO delayline_queues (name) VALUES ('a'), ('b')"))
    theirs = database.transaction()

    async def ours() -> None:
        async with pair.transport.transaction() as transaction:
            await pair.transport.dispatch([sent(1)], transaction)
            assert isinstance(transaction, TwoPhaseTransaction)
            branch = transaction.branch(database)
            await branch.run(lambda at: run(at, touch, "a"))
            await theirs.run(lambda at: run(at, touch, "b"))
            crossing = asyncio.create_task(theirs.run(lambda at: run(at, touch, "a")))
            try:
                await branch.run(lambda at: run(at, touch, "b"))
            finally:
                await asyncio.wait([crossing])
                await theirs.roll_back()
                gave_way.append(crossing.exception() is not None)
            await pair.store.store(delayed(1), transaction)

    gave_way: list[bool] = []
    with contextlib.suppress(BackendUnavailable):
        await ours()
    assert pair.in_doubt() == []
    assert await pair.exist() == ((["1"], ["1"]) if gave_way == [True] else ([], []))
    await both(pair, 2)
    assert (await pair.exist())[0][-1] == "2"


async def test_decisions_are_forgotten(pair: TwoDatabases) -> None:
    """Given transactions that are finished, when the endpoint stops, then no decision is left."""
    for number in range(3):
        async with pair.transport.transaction() as transaction:
            await pair.transport.dispatch([sent(number)], transaction)
            await pair.store.store(delayed(number), transaction)
    await pair.endpoint.stop()
    with create_engine(driven(pair.queues), poolclass=NullPool).connect() as connection:
        assert connection.execute(text("SELECT id FROM delayline_decisions")).all() == [("log",)]


async def test_other_pairs_are_left_alone(pair: TwoDatabases) -> None:
    """Given something prepared by a pair with the same store and other queues, when we recover, then it stays."""
    name, mine = "delayline-0123456789abcdef-x-1", pair.two_phase
    with database_at(pair.waiting).dialect.connections.look() as connection:
        mine.control(name).begin(connection)
        run(connection, "DELETE FROM delayline_queues WHERE name = 'none'")
        mine.prepare(connection, name)
        await pair.both.recover()
        assert pair.in_doubt() == [name]
        assert mine.roll_back_prepared(connection, name)


async def test_xids_of_others_are_left_alone(postgresql_url: str, mariadb: MariadbServer, mariadb_url: str) -> None:
    """Given prepared transactions of other programs with any bytes as a name, when we recover, then they stay."""
    pair = TwoDatabases(postgresql_url, mariadb_url)
    others = ["X'ff00fe', X'80'", "'delayline-', 'x', 7", "'delayline-'", "'é'"]
    connections = []
    async with pair.endpoint:
        with contextlib.ExitStack() as stack:
            for xid in others:
                connection = stack.enter_context(database_at(mariadb_url).dialect.connections.look())
                connections.append(connection)
                for statement in (f"XA START {xid}", "SELECT 1", f"XA END {xid}", f"XA PREPARE {xid}"):
                    run(connection, statement)
            await both(pair)
            await pair.both.recover()
            with mariadb.administrator() as administrator:
                administrator.execute("XA RECOVER")
                assert len(administrator.fetchall()) == len(others)
            for connection, xid in zip(connections, others, strict=True):
                run(connection, f"XA ROLLBACK {xid}")
        assert await pair.exist() == (["1"], ["1"])


async def unhealthy(url: str) -> str:
    """Return what `doctor` says against prepared transactions in a store's database."""
    findings = {what: text for what, ok, text in await examine(url, prepares=True) if not ok}
    assert "prepared transactions" not in {what for what, *_ in await examine(url)}
    return findings["prepared transactions"]


@pytest.mark.server
async def test_a_server_that_prepares_nothing_is_refused(postgresql_url: str) -> None:
    """Given a server as it is installed, when an endpoint starts that needs prepared transactions, then it says so."""
    with running(PostgresqlServer, "fsync=off", "max_prepared_transactions=0") as server:
        pair = TwoDatabases(postgresql_url, server.new_database())
        with pytest.raises(BackendUnusable, match=r"set max_prepared_transactions in postgresql\.conf .* restart"):
            await pair.endpoint.start()
        assert "set max_prepared_transactions" in await unhealthy(pair.waiting)
        other = TwoDatabases(server.new_database(), postgresql_url)  # the queues' database prepares nothing
        async with other.endpoint:
            pass


GALERA = Path("/usr/lib/galera/libgalera_smm.so")


@pytest.fixture
def galera() -> Iterator[MariadbServer]:
    """Provide a cluster with a single node."""
    if not GALERA.exists():
        not_installed("Galera", "apt-get install galera-4")
    listening = f"gmcast.listen_addr=tcp://127.0.0.1:{free_port()}"
    settings = [
        *("wsrep_on=ON", f"wsrep_provider={GALERA}", "wsrep_cluster_address=gcomm://", "wsrep_node_address=127.0.0.1"),
        *(f"wsrep_provider_options={listening}", "innodb_autoinc_lock_mode=2", "log_bin=binlog", "binlog_format=ROW"),
    ]
    with running(MariadbServer, *settings, programs=Programs()) as server:
        eventually(lambda: is_ready(server), "the node to be ready")
        yield server


def is_ready(node: MariadbServer) -> bool:
    """Return whether a node of a cluster takes statements."""
    with node.administrator() as administrator:
        administrator.execute("SHOW STATUS LIKE 'wsrep_ready'")
        return bool(administrator.fetchone()[1] == "ON")


@pytest.mark.server
async def test_a_node_of_a_galera_cluster_is_refused(galera: MariadbServer, postgresql_url: str) -> None:
    """Given a cluster, which has no XA transactions, when an endpoint starts that needs them, then it says so."""
    pair = TwoDatabases(postgresql_url, galera.new_database())
    with pytest.raises(BackendUnusable, match="is a node of a Galera cluster, which has no XA transactions"):
        await pair.endpoint.start()
    assert "is a node of a Galera cluster" in await unhealthy(pair.waiting)
    other = TwoDatabases(galera.new_database(), postgresql_url)  # the queues' database prepares nothing
    async with other.endpoint:
        await both(other)


async def test_a_user_with_rights_on_the_tables_only(
    mariadb: MariadbServer, mariadb_url: str, postgresql_url: str
) -> None:
    """Given a user who may use the tables and nothing else, then it prepares and finishes transactions."""
    await TwoDatabases(postgresql_url, mariadb_url).endpoint.setup()
    database = mariadb_url.rpartition("/")[2]
    with mariadb.administrator() as administrator:
        administrator.execute("CREATE OR REPLACE USER of_tables@'127.0.0.1'")
        administrator.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {database}.* TO of_tables@'127.0.0.1'")
        try:
            pair = TwoDatabases(postgresql_url, mariadb_url.replace("delayline@", "of_tables@"), setup=False)
            async with pair.endpoint:
                await both(pair)
                assert await pair.exist() == (["1"], ["1"])
        finally:
            administrator.execute("DROP USER of_tables@'127.0.0.1'")


def test_sql_server_is_refused_with_the_reason() -> None:
    """Given a store in SQL Server, when it is to prepare, then the reason and the ways out are told at once."""
    pytest.importorskip("mssql_python")
    with pytest.raises(UnsupportedTransactionMode, match="distributed transaction coordinator only") as refusal:
        SqlDelayedMessageStore("mssql://sa@db.example/shop", two_phase=TwoPhaseCommit())
    assert "Keep the store in PostgreSQL, MariaDB or MySQL, keep queues and store in one database" in str(refusal.value)


def test_databases_that_cannot_prepare_are_refused(tmp_path: Path) -> None:
    """Given SQLite, when it is to take part, then that is refused at once, with what to do instead."""
    remedy = re.escape("keep queues and store in one database, or leave out two_phase and use")
    with pytest.raises(UnsupportedTransactionMode, match=remedy):
        SqlTransport(f"sqlite:///{tmp_path}/one.db", two_phase=TwoPhaseCommit())
    with pytest.raises(UnsupportedTransactionMode, match=remedy):
        SqlDelayedMessageStore(f"sqlite:///{tmp_path}/two.db", two_phase=TwoPhaseCommit())


async def test_a_pair_is_a_pair(postgresql_url: str, second_url: str, pair: TwoDatabases) -> None:
    """Given a TwoPhaseCommit, when it is used with two transports, or with none, then the error says so."""
    with pytest.raises(ConfigurationError, match="one transport's database"):
        SqlTransport(second_url, two_phase=pair.both)
    alone = SqlDelayedMessageStore(second_url, two_phase=TwoPhaseCommit())
    await alone.setup_infrastructure("alone")
    with pytest.raises(ConfigurationError, match=r"has no transport: pass it to SqlTransport\(two_phase=...\) too"):
        await alone.initialize("alone", TransactionMode.NONE)
    stranger = SqlDelayedMessageStore(postgresql_url)
    await stranger.setup_infrastructure("stranger")
    await stranger.initialize("stranger", TransactionMode.NONE)
    async with TwoPhaseCommit().transaction() as transaction:
        with pytest.raises(TypeError, match="cannot span"):
            await stranger.store(delayed(1), transaction)
        await asyncio.sleep(0)
    await stranger.close()
