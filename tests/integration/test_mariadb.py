"""MariaDB's peculiarities: minimal locks, few statements at rest, and clear errors."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.engine import make_url
from tests.eventually import PATIENCE

from delayline import (
    BackendUnavailable,
    ConfigurationError,
    DelayedMessage,
    Endpoint,
    InvalidMessage,
    Message,
    MessageContext,
    StoredDelivery,
    TransactionMode,
)
from delayline.delayed.store import Outcome
from delayline.errors import BackendUnusable
from delayline.events import Event
from delayline.spi import TransportOperation
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.sql.databases import database_at
from delayline.sql.mariadb.catalog import HEADROOM
from delayline.sql.mariadb.dialect import Mariadb
from delayline.sql.prepared import LONGEST_LIST
from delayline.sql.server import run
from delayline.sql.server_database import ServerDatabase
from delayline.testing import Signals

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.servers.mariadb import MariadbServer

    from delayline.spi import Transaction

SECONDS = 3.0
MOST = 2  # statements a second
PAST = datetime(2026, 1, 1, tzinfo=UTC)
SEND = """
import asyncio, datetime, sys
from delayline import Endpoint, StoredDelivery
from delayline.sql import SqlDelayedMessageStore, SqlTransport
async def main():
    delivery = StoredDelivery(SqlDelayedMessageStore(sys.argv[1]), polling=False)
    async with Endpoint("orders", transport=SqlTransport(sys.argv[1]), delayed_delivery=delivery) as endpoint:
        await endpoint.send("orders", b"", message_id="sooner", delay=datetime.timedelta(seconds=0.2))
asyncio.run(main())
"""


def delayed(message_id: str, body: bytes = b"") -> DelayedMessage:
    return DelayedMessage(Message(message_id, {}, body), "orders", PAST)


async def opened(url: str, endpoint: str = "orders") -> SqlDelayedMessageStore:
    store = SqlDelayedMessageStore(url)
    await store.setup_infrastructure(endpoint)
    await store.initialize(endpoint, TransactionMode.TRANSACTION_SCOPE)
    return store


def server_database(url: str) -> ServerDatabase:
    database = database_at(url)
    assert isinstance(database, ServerDatabase)
    return database


@pytest.mark.parametrize("half", [2, 500])
async def test_transactions_lock_no_more_than_they_touch(mariadb_url: str, half: int) -> None:
    # Given two transactions that have half of the table each, and removed it
    store = await opened(mariadb_url)
    await store.store_many([delayed(f"m{number}") for number in range(2 * half)])
    async with asyncio.timeout(PATIENCE), store.transaction() as one, store.transaction() as other:
        held = [
            (transaction, await store.fetch_due(PAST, half, max_bytes=10**9, transaction=transaction))
            for transaction in (one, other)
        ]
        for transaction, mine in held:
            assert await store.remove_many(mine, transaction) == half
        # When other transactions store messages meanwhile, then they do not wait
        await store.store(delayed("later"))
        assert await store.next_due() == PAST
    left = await store.fetch_due(PAST, 10, max_bytes=100)
    assert [message.id for message in left] == ["later"]
    await store.close()


async def test_a_message_that_is_being_acknowledged_does_not_block(mariadb_url: str) -> None:
    # Given a message whose handling has not been committed
    transport = SqlTransport(mariadb_url)
    await transport.setup_infrastructure(["orders"])
    await transport.start()
    await transport.dispatch([TransportOperation(Message(name, {}, b""), "orders") for name in "abc"])
    receiver = await transport.receiver("orders")
    first, second, third = await receiver.receive(3)
    async with asyncio.timeout(PATIENCE), transport.transaction() as transaction:
        assert await receiver.acknowledge(second, transaction)
        # When its neighbours are acknowledged, then at once
        assert await receiver.acknowledge(first)
        assert await receiver.acknowledge(third)
    assert await transport.count("orders") == 0
    await receiver.stop()
    await transport.stop()


async def test_the_loser_of_a_deadlock_does_nothing_more_in_its_transaction(mariadb_url: str) -> None:
    # Given two transactions that will touch each other's rows
    store = await opened(mariadb_url)
    await store.store_many([delayed("a"), delayed("b")])
    one, other = store.transaction(), store.transaction()

    async def cross(transaction: Transaction, first: str, second: str, meet: asyncio.Barrier) -> None:
        async with transaction:
            await store.remove(delayed(first), transaction)
            await meet.wait()
            try:
                await store.remove(delayed(second), transaction)
            except BackendUnavailable:
                await store.store(delayed("outside"), transaction)  # as if nothing had happened

    # When they do
    meet = asyncio.Barrier(2)
    async with asyncio.timeout(PATIENCE):
        outcomes = await asyncio.gather(
            cross(one, "a", "b", meet), cross(other, "b", "a", meet), return_exceptions=True
        )
    # Then one has committed, and the other has no effect, also not after the deadlock
    assert [type(outcome) for outcome in outcomes if outcome is not None] == [BackendUnavailable]
    assert await store.next_due() is None
    await store.close()


async def test_a_deadlock_in_a_transaction_of_our_own_is_tried_again(mariadb_url: str) -> None:
    store = await opened(mariadb_url)
    database, tries = server_database(mariadb_url), list[int]()

    def work(connection: Any) -> str:  # noqa: ANN401
        tries.append(1)
        if len(tries) < 3:
            run(connection, "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213")
        return "done"

    assert await database.write(work) == "done"
    assert await database.write(work, one_statement=True) == "done"
    tries.clear()
    with pytest.raises(BackendUnavailable, match=r"MariaDB database .* gave this transaction up"):
        await database.write(lambda connection: run(connection, "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213"))
    await store.close()


async def test_claims_come_back_with_a_new_connection(mariadb: MariadbServer, mariadb_url: str) -> None:
    # Given a receiver that has a message, and loses every connection
    transport = SqlTransport(mariadb_url)
    await transport.setup_infrastructure(["orders"])
    await transport.start()
    await transport.dispatch([TransportOperation(Message(name, {}, b""), "orders") for name in "ab"])
    receiver = await transport.receiver("orders")
    [first] = await receiver.receive(1)
    with mariadb.administrator() as cursor:
        cursor.execute("SELECT id FROM information_schema.processlist WHERE db = %s", (make_url(mariadb_url).database,))
        for (connection,) in cursor.fetchall():
            cursor.execute(f"KILL {connection}")
    # When it receives again
    second: list[Any] = []
    while not second:
        try:
            second = list(await receiver.receive(1))
        except BackendUnavailable:
            continue
    # Then the first message is still hidden, from itself and from others
    assert [received.message.id for received in second] == ["b"]
    claims = server_database(mariadb_url).dialect.claims(server_database(mariadb_url), "delayline_messages")
    numbers = [first.receipt, second[0].receipt]
    assert await server_database(mariadb_url).run(lambda: claims.take(numbers, 2)) == []
    claims.close()
    await receiver.stop()
    await transport.stop()


async def test_several_processes_set_up_at_once(mariadb_url: str) -> None:
    stores = [SqlDelayedMessageStore(mariadb_url) for _ in range(4)]
    await asyncio.gather(*(store.setup_infrastructure("orders") for store in stores))
    await (await opened(mariadb_url)).close()


async def test_a_poller_finds_messages_of_other_processes_within_a_second(
    mariadb_url: str, make_endpoint: Callable[..., Endpoint]
) -> None:
    # Given a poller that sleeps until its cap, a minute from now
    endpoint = make_endpoint(url=mariadb_url)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        pass

    with Signals() as signals:
        async with endpoint:
            await endpoint.send("orders", b"", delay=timedelta(hours=1))
            await signals.wait_for(Event.SLEEPS)
            # When another process stores something earlier
            await asyncio.to_thread(subprocess.run, [sys.executable, "-c", SEND, mariadb_url], check=True, timeout=30)
            # Then it arrives
            [record] = await signals.wait_for(Event.HANDLED, timeout=PATIENCE)
            assert vars(record)["facts"]["message"].id == "sooner"


@pytest.mark.slow
async def test_an_idle_endpoint_is_quiet(
    mariadb: MariadbServer, mariadb_url: str, make_endpoint: Callable[..., Endpoint]
) -> None:
    # Given an endpoint that has worked, with its poller asleep and its receiver waiting
    endpoint = make_endpoint(url=mariadb_url)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        pass

    def questions() -> int:
        with mariadb.administrator() as cursor:
            cursor.execute("SHOW GLOBAL STATUS LIKE 'Questions'")
            return int(cursor.fetchone()[1])

    with Signals() as signals:
        async with endpoint:
            await endpoint.send("orders", b"", delay=timedelta(seconds=0.1))
            await endpoint.send("orders", b"", delay=timedelta(hours=1))
            await signals.wait_for(Event.HANDLED)
            await asyncio.sleep(1.0)
            # When nothing happens
            ours = -questions() + questions()
            before = questions()
            await asyncio.sleep(SECONDS)
            after = questions()
    # Then it asks for little
    assert after - before - ours <= MOST * SECONDS + 1


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"username": "stranger", "password": "s3cret"}, BackendUnusable, "refuses this user.*Check the user"),
        (
            {"username": "nobody", "password": "s3cret"},
            BackendUnusable,
            "refuses this user.*Check the user and the password",
        ),
        ({"database": "missing"}, BackendUnusable, "missing' *.*CREATE DATABASE"),
        ({"port": 1}, BackendUnavailable, "cannot reach MariaDB database .*Check that the server runs"),
        ({"host": "no.such.host.invalid"}, BackendUnavailable, "cannot reach MariaDB database .*no.such.host"),
        ({"drivername": "mysql"}, BackendUnusable, "is version .*MariaDB: write mariadb:// in its URL"),
        ({"query": {"ssl_ca": "/missing.pem"}}, BackendUnusable, "certificate .*cannot be read.*ssl_ca"),
    ],
    ids=["user", "password", "database", "port", "host", "product", "certificate"],
)
async def test_an_unreachable_server_is_reported_with_the_reason(
    mariadb: MariadbServer, mariadb_url: str, change: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with mariadb.administrator() as cursor:
        cursor.execute("CREATE OR REPLACE USER nobody@'127.0.0.1' IDENTIFIED BY 'other'")
    url = make_url(mariadb_url).set(**change)
    with pytest.raises(kind, match=text) as caught:
        await SqlTransport(url.render_as_string(hide_password=False)).start()
    assert "s3cret" not in str(caught.value)


def certificate_authorities() -> str:
    file = ssl.get_default_verify_paths().cafile
    if file is None or not Path(file).exists():
        pytest.skip("this machine knows no certificate authorities")
    return file


async def test_connections_read_this_machines_certificates_once(
    mariadb_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading certificates takes a tenth of a second and verifies no server."""
    load, reads = ssl.SSLContext.load_default_certs, []

    def counted(self: ssl.SSLContext, *arguments: ssl.Purpose) -> None:
        reads.append(arguments)
        load(self, *arguments)

    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", counted)
    for _ in range(3):
        Mariadb(make_url(mariadb_url)).connections.connect().close()
    assert len(reads) <= 1


async def test_a_server_without_tls_is_refused_when_the_url_asks_for_it(mariadb_url: str) -> None:
    with pytest.raises(BackendUnusable, match=r"agree on no encryption.*ssl_"):
        await SqlTransport(f"{mariadb_url}?ssl_ca={certificate_authorities()}").start()


@pytest.mark.parametrize(
    ("rest", "text"),
    [
        ("/shop?conect_timeout=5", "no option 'conect_timeout'. The options are connect_timeout, "),
        ("/shop?connect_timeout=soon", "has an option that cannot be used"),
        ("/shop?charset=latin1", "no option 'charset'"),
        ("/", "names no database"),
    ],
)
async def test_a_url_with_a_typing_error_is_refused(rest: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        await SqlTransport(f"mariadb://localhost{rest}").start()


async def test_missing_rights_are_named(mariadb: MariadbServer, mariadb_url: str) -> None:
    # Given a user with only the right to read
    await (await opened(mariadb_url)).close()
    url = make_url(mariadb_url)
    with mariadb.administrator() as cursor:
        cursor.execute("CREATE OR REPLACE USER reader@'127.0.0.1'")
        cursor.execute(f"GRANT SELECT ON {url.database}.* TO reader@'127.0.0.1'")
    store = SqlDelayedMessageStore(url.set(username="reader").render_as_string())
    await store.initialize("orders", TransactionMode.NONE)
    # When they store something
    with pytest.raises(
        BackendUnusable, match=r"INSERT.* command denied .*orders.timeouts.*GRANT INSERT, UPDATE ON [`a-z0-9_.]+$"
    ):
        await store.store(delayed("m"))
    await store.close()


async def test_every_missing_right_is_named_at_start_in_one_block_of_grants(
    mariadb: MariadbServer, mariadb_url: str
) -> None:
    # Given tables, and a user with only the right to create views, so that it can name the database
    def at(url: str) -> Endpoint:
        delivery = StoredDelivery(SqlDelayedMessageStore(url))
        return Endpoint("orders", transport=SqlTransport(url), delayed_delivery=delivery, setup_infrastructure=False)

    await at(mariadb_url).setup()
    url = make_url(mariadb_url)
    limited = url.set(username="limited").render_as_string()
    with mariadb.administrator() as cursor:
        cursor.execute("CREATE OR REPLACE USER limited@'127.0.0.1'")
        cursor.execute(f"GRANT CREATE VIEW ON {url.database}.* TO limited@'127.0.0.1'")
        refused, allowed, handled = at(limited), at(limited), asyncio.Event()

        @allowed.handler
        async def handle(message: Message, context: MessageContext) -> None:
            handled.set()

        refused.handler(handle)
        # When an endpoint that handles starts
        with pytest.raises(BackendUnusable) as raised:
            await refused.start()
        # Then every right is in one block
        grants = str(raised.value).splitlines()[1:]
        place, user = f"`{url.database}`", "TO 'limited'@'127.0.0.1';"
        assert grants == [
            f"GRANT SELECT ON {place}.delayline_schema {user}",
            f"GRANT SELECT ON {place}.delayline_queues {user}",
            f"GRANT SELECT, INSERT, DELETE ON {place}.delayline_messages {user}",
            f"GRANT SELECT ON {place}.delayline_subscriptions {user}",
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON {place}.delayline_receivers {user}",
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON {place}.delayline_suspects {user}",
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON {place}.`orders.timeouts` {user}",
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON {place}.delayline_pauses {user}",
        ]
        # And the granted rights suffice
        for grant in grants:
            cursor.execute(grant)
        async with allowed, asyncio.timeout(PATIENCE):
            await allowed.send("orders", b"", delay=timedelta(milliseconds=1))
            await handled.wait()


async def test_a_removal_of_very_many_that_fails_has_removed_none(
    mariadb: MariadbServer, mariadb_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given more messages than a list in a statement holds, of which the last one is locked by another program
    monkeypatch.setattr(
        "delayline.sql.mariadb.connections.SESSION_SETTINGS", "SET SESSION innodb_lock_wait_timeout = 1"
    )
    store = await opened(mariadb_url)
    messages = [delayed(f"{number:04d}") for number in range(LONGEST_LIST + 1)]
    await store.store_many(messages)
    table = f"{make_url(mariadb_url).database}.`orders.timeouts`"
    with mariadb.administrator() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(f"UPDATE {table} SET retry_count = 1 WHERE id = '0500'")  # noqa: S608 - our own name
        # When all are removed, or counted as failed, without a transaction
        with pytest.raises(BackendUnavailable, match="lock"):
            await store.remove_many(messages)
        with pytest.raises(BackendUnavailable, match="lock"):
            await store.retry_many(messages, PAST)
        cursor.execute("ROLLBACK")
    # Then all are as they were
    assert {message.number_of_retries for message in await store.pending(limit=1000)} == {0}
    assert await store.remove_many(messages) == len(messages)
    await store.close()


async def test_missing_messages_are_reported(mariadb: MariadbServer, mariadb_url: str) -> None:
    store = await opened(mariadb_url)
    with mariadb.administrator() as cursor:
        cursor.execute(f"DROP TABLE {make_url(mariadb_url).database}.`orders.timeouts`")
    with pytest.raises(BackendUnusable, match="delayline setup"):
        await store.store(delayed("m"))
    await store.close()


async def test_a_message_that_the_server_would_not_take_is_refused_before_it_is_stored(
    mariadb: MariadbServer, mariadb_url: str
) -> None:
    # Given a server that takes a megabyte at once
    packet = 1024 * 1024
    with mariadb.administrator() as cursor:
        cursor.execute(f"SET GLOBAL max_allowed_packet = {packet}")
    try:
        store = await opened(mariadb_url)
        # When messages are as large as can be, then each and all together are stored
        largest = packet // 2 - HEADROOM - 100
        await store.store_many([delayed(name, b"\0" * largest) for name in "abc"])
        # And one that is larger is refused
        with pytest.raises(InvalidMessage, match=f"message of {packet} bytes is too large.*max_allowed_packet above"):
            await store.store(delayed("d", b"x" * (packet - 2)))
        assert len(await store.fetch_due(PAST, 10, max_bytes=10 * packet)) == 3
        await store.close()
    finally:
        with mariadb.administrator() as cursor:
            cursor.execute("SET GLOBAL max_allowed_packet = DEFAULT")


async def test_texts_that_are_not_unicode_are_refused(mariadb_url: str) -> None:
    store = await opened(mariadb_url)
    with pytest.raises(InvalidMessage, match="cannot keep this text"):
        await store.store(delayed("\ud800"))
    await store.close()


def test_names_are_kept_as_they_are_where_that_is_possible() -> None:
    dialect = Mariadb(make_url("mariadb://localhost/shop"))
    assert dialect.catalog.kept_name("Größe.timeouts") == "Größe.timeouts"
    trucks, birds = dialect.catalog.kept_name("🚚.timeouts"), dialect.catalog.kept_name("🐦.timeouts")
    assert trucks != birds
    assert trucks.startswith("_.timeouts~")
    assert len(dialect.catalog.kept_name("🚚" * 40)) <= 64
    with pytest.raises(ConfigurationError, match="longer than the 64 characters"):
        dialect.catalog.kept_name("x" * 65)
    with pytest.raises(ConfigurationError, match="longer than the 250 bytes of a file's name"):
        dialect.catalog.kept_name("送" * 60)


@pytest.mark.parametrize(("version", "fits"), [("10.5.9-MariaDB", False), ("10.6.0-MariaDB", True)])
async def test_an_old_server_is_refused(
    monkeypatch: pytest.MonkeyPatch, mariadb_url: str, version: str, fits: bool
) -> None:
    monkeypatch.setattr("delayline.sql.mariadb.connections.run", lambda *_: [(version, 1024 * 1024)])
    if fits:
        Mariadb(make_url(mariadb_url)).connections.check()
    else:
        with pytest.raises(BackendUnusable, match=r"version 10\.5\.9-MariaDB; delayline needs 10.6 or newer"):
            Mariadb(make_url(mariadb_url)).connections.check()


async def test_ids_that_the_collation_takes_for_the_same_are_different_messages(mariadb_url: str) -> None:
    """Given a table whose ids ignore case, as those of .NET may be, and a pending message, then another id is no copy
    of it."""
    store = await opened(mariadb_url)
    table = store._statements.table.name
    with database_at(mariadb_url).dialect.connections.connect() as connection:  # type: ignore[attr-defined]
        run(
            connection, f"ALTER TABLE `{table}` MODIFY id VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci"
        )
    try:
        await store.store(delayed("conf", b"ours"))
        # When one with another case is replaced, looked for, cancelled or rescheduled
        with pytest.raises(InvalidMessage, match=r"message 'CONF' cannot wait beside 'conf'.*another id"):
            await store.store_or_replace(delayed("CONF", b"another"), replace=True)
        assert await store.find("CONF", body_limit=10) is None
        assert await store.cancel("CONF") is Outcome.NOT_PENDING
        assert await store.reschedule("CONF", PAST) is Outcome.NOT_PENDING
        # Then the pending one is as it was
        found = await store.find("conf", body_limit=10)
        assert found is not None
        assert (found.message.message.body, found.message.due) == (b"ours", delayed("conf").due)
    finally:
        await store.close()
