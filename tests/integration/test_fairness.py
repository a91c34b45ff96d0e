"""A backlog of one destination or tenant beside others: set-up, plans, and endpoints on real servers."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

import pytest

from delayline import (
    DelayedMessage,
    Endpoint,
    Message,
    SqlDelayedMessageStore,
    SqlTransport,
    StoredDelivery,
    TransactionMode,
)
from delayline.delayed.fairness import FairBy
from delayline.errors import BackendUnusable
from delayline.rabbitmq import RabbitMQTransport
from delayline.sql.databases import database_at
from delayline.sql.fair_groups import LAST_NAME, DueGroups, QueuedGroups
from delayline.sql.postgresql.moves import PostgresqlForwarding
from delayline.sql.row_claims import LockStatements
from delayline.sql.schema import queue_tables
from delayline.sql.statements import EXPIRY_MARKER, MARKER, StoreStatements
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from sqlalchemy import Connection

PAST = datetime(2026, 1, 1, tzinfo=UTC)
BACKLOG = 20_000
PATIENCE = 120.0
Result = TypeVar("Result")
PRODUCTS = ["sqlite", "postgresql", "mariadb"]


@pytest.fixture(params=PRODUCTS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'fair.db'}"
    return str(request.getfixturevalue(f"{request.param}_url"))


def messages(
    prefix: str, number: int, destination: str, due: datetime = PAST, tenant: str | None = None
) -> list[DelayedMessage]:
    headers = {} if tenant is None else {"Tenant": tenant}
    return [DelayedMessage(Message(f"{prefix}{each:06}", headers, b"x"), destination, due) for each in range(number)]


async def filled(store: SqlDelayedMessageStore, *groups: Sequence[DelayedMessage]) -> None:
    for group in groups:
        for first in range(0, len(group), 1000):
            await store.store_many(group[first : first + 1000])


def read(url: str, work: Callable[[Connection], Result]) -> Result:
    with database_at(url).dialect.connections.look() as connection:
        return work(connection)


def number_before(url: str, queue: str, other: str, prefix: str) -> int:
    """Return how many messages of a queue came before the last of another, whose ids begin with the prefix."""
    sql = (
        f"SELECT count(*) FROM delayline_messages WHERE queue = '{queue}' AND seq < "  # noqa: S608
        f"(SELECT max(seq) FROM delayline_messages WHERE queue = '{other}' AND id LIKE '{prefix}%%')"
    )
    return int(read(url, lambda connection: connection.exec_driver_sql(sql).scalar_one()))


async def until_empty(store: SqlDelayedMessageStore) -> None:
    async with asyncio.timeout(PATIENCE):
        while await store.next_due() is not None:  # noqa: ASYNC110 - there is no notification of that
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("fair_by", ["destination", "header:Tenant", None])
async def test_a_poller_moves_few_messages_past_a_backlog(url: str, fair_by: str | None) -> None:
    # Given a backlog for one queue and tenant, and a few messages for another, due later
    transport, store = SqlTransport(url), SqlDelayedMessageStore(url)
    endpoint = Endpoint("sales", transport=transport, delayed_delivery=StoredDelivery(store, fair_by=fair_by))
    await endpoint.setup()
    await transport.setup_infrastructure(["busy", "other"])
    await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    later = PAST + timedelta(days=1)
    await filled(store, messages("a", BACKLOG, "busy", PAST, "big"), messages("b", 5, "other", later, "small"))
    await store.close()
    # When an endpoint moves them all
    async with endpoint:
        await until_empty(store)
    # Then nearly all of the backlog has left after the few; without fairness, before them
    before = number_before(url, "busy", "other", "b")
    assert before == BACKLOG if fair_by is None else before < BACKLOG / 5
    assert read(url, lambda used: used.exec_driver_sql("SELECT count(*) FROM delayline_messages").scalar_one()) == (
        BACKLOG + 5
    )


POLLS = """
import asyncio, sys
from delayline import Endpoint, SqlDelayedMessageStore, SqlTransport, StoredDelivery
async def main(url):
    delivery = StoredDelivery(SqlDelayedMessageStore(url), fair_by="destination", batch_size=50)
    async with Endpoint("sales", transport=SqlTransport(url), delayed_delivery=delivery, send_only=True):
        print("polls", flush=True)
        await asyncio.sleep(600)
asyncio.run(main(sys.argv[1]))
"""


async def test_pollers_one_of_which_is_killed_move_every_message_once(url: str) -> None:
    # Given a backlog for several queues, and two processes that move it
    transport, store = SqlTransport(url), SqlDelayedMessageStore(url)
    endpoint = Endpoint(
        "sales", transport=transport, delayed_delivery=StoredDelivery(store, fair_by="destination", polling=False)
    )
    await endpoint.setup()
    queues = [f"queue{number}" for number in range(5)]
    await transport.setup_infrastructure(queues)
    await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    for number, queue in enumerate(queues):
        await filled(store, messages(f"{queue}-", 1000 * (number + 1), queue))
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-c", POLLS, url]
        processes = [stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE)) for _ in range(2)]  # noqa: ASYNC220
        try:
            for process in processes:
                assert process.stdout is not None
                assert await asyncio.to_thread(process.stdout.readline) == b"polls\n"
            # When one is killed, and the other goes on
            processes[0].kill()
            await until_empty(store)
        finally:
            for process in processes:
                process.kill()
    await store.close()
    # Then every message is in its queue, once
    ids = read(url, lambda used: used.exec_driver_sql("SELECT queue, id FROM delayline_messages").all())
    assert len(ids) == len(set(ids)) == 15_000
    assert all(id.startswith(f"{queue}-") for queue, id in ids)


async def test_a_backlog_in_rabbitmq_delays_no_other(postgresql_url: str, rabbitmq_url: str) -> None:
    # Given a backlog for one queue of a broker, and a message for the endpoint's own, due later
    store, transport = SqlDelayedMessageStore(postgresql_url), RabbitMQTransport(rabbitmq_url)
    endpoint = Endpoint("sales", transport=transport, delayed_delivery=StoredDelivery(store, fair_by="destination"))
    left: list[int] = []
    handled = asyncio.Event()

    @endpoint.handler
    async def handle(message: Message, context: object) -> None:
        left.append(len(await store.pending(destination="busy", limit=10)))
        handled.set()

    await endpoint.setup()
    await transport.setup_infrastructure(["busy"])
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    await filled(store, messages("a", BACKLOG, "busy"), messages("b", 1, "sales", PAST + timedelta(days=1)))
    await store.close()
    # When the endpoint runs, then it handles its message while others wait
    async with endpoint:
        await asyncio.wait_for(handled.wait(), PATIENCE)
        await until_empty(store)
    assert left == [10]


async def test_a_store_without_its_index_says_what_to_do(url: str) -> None:
    # Given a table that was made without fairness
    plain = SqlDelayedMessageStore(url)
    await plain.setup_infrastructure("sales")
    for fair_by in ("destination", "header:Tenant"):
        # When it is opened with it, then it is refused
        store = SqlDelayedMessageStore(url)
        store.be_fair(FairBy.of(fair_by))
        with pytest.raises(BackendUnusable, match=r"has no (index|column) .*[Rr]un `delayline setup`"):
            await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
        # Until set-up has run, which shows what it will do, and does it once
        planned = await store.planned_infrastructure("sales")
        assert [re.split(r"[ (]", step)[:2] for step in planned][-1] == ["CREATE", "INDEX"]
        await store.setup_infrastructure("sales")
        assert not await store.planned_infrastructure("sales")
        await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
        await store.store(messages("m", 1, "billing")[0])
        await store.close()
    # And a process without fairness goes on using the table
    await plain.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    await plain.store(messages("n", 1, "billing")[0])
    assert [message.id for message in await plain.pending()] == ["m000000", "n000000"]
    await plain.close()


async def filled_queue(url: str) -> QueuedGroups:
    """Fill a queue with a backlog of one tenant and a message of another, and return the statements of its groups."""
    transport = SqlTransport(url, fair_by="header:Tenant")
    await transport.start()
    await transport.setup_infrastructure(["work"])
    operations = [
        TransportOperation(Message(f"{tenant}{each}", {"Tenant": tenant}, b"x"), "work")
        for tenant, number in (("busy", 5000), ("quiet", 1))
        for each in range(number)
    ]
    for first in range(0, len(operations), 500):
        await transport.dispatch(operations[first : first + 500])
    await transport.stop()
    return QueuedGroups(queue_tables(fair=True).queued, database_at(url).dialect, "work")


@pytest.fixture
def connection(postgresql_url: str) -> Iterator[Connection]:
    with database_at(postgresql_url).dialect.connections.look() as connection:
        yield connection


@pytest.mark.parametrize("fair_by", ["destination", "header:Tenant"])
async def test_the_plans_on_postgresql_read_one_group_alone(
    postgresql_url: str, connection: Connection, fair_by: str
) -> None:
    # Given statistics that know of a single group, the backlog's
    store, transport = SqlDelayedMessageStore(postgresql_url), SqlTransport(postgresql_url)
    store.be_fair(FairBy.of(fair_by))
    await transport.setup_infrastructure(["busy"])
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    await filled(store, messages("a", BACKLOG, "busy", PAST, "busy"))
    connection.exec_driver_sql('ANALYZE "sales.timeouts"')
    await filled(store, messages("b", 1, "quiet", PAST, "quiet"))
    table = store.table_of("sales")
    await store.close()
    # When the statements for another group are run
    dialect, tables, now = database_at(postgresql_url).dialect, queue_tables(None), datetime.now(UTC)
    locks = LockStatements(StoreStatements(table, dialect), dialect, dialect.leases(table, tables))  # type: ignore[attr-defined, arg-type]
    groups, queued = DueGroups(table, dialect), await filled_queue(postgresql_url)
    connection.exec_driver_sql("ANALYZE delayline_messages")
    assert groups.found is not None
    move = PostgresqlForwarding(StoreStatements(table, dialect), tables, dialect).fair_statements[False][0]  # type: ignore[arg-type]
    statements = {
        locks.due_in_turn: ("quiet", PAST, now, 100),
        groups.found: ([""], [LAST_NAME], now),
        queued.first: ("work", "busy", LAST_NAME),
        queued.numbers: ("work", "quiet", 0, 100),
        move: (["quiet"], [PAST], [100], MARKER, EXPIRY_MARKER, now, 100, 1 << 20),
    }
    for statement, values in statements.items():
        connection.exec_driver_sql("BEGIN")
        cursor = connection.connection.cursor()
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS) {statement.sql}", statement.in_order(values))
        plan = "\n".join(line for (line,) in cursor.fetchall())
        connection.exec_driver_sql("ROLLBACK")
        # Then each reads the index of groups, and a few of its pages
        assert "Index_Time" not in plan, plan
        assert 'Seq Scan on "sales.timeouts"' not in plan, plan
        assert "Seq Scan on delayline_messages" not in plan, plan
        read_pages = int(re.findall(r"Buffers: shared hit=(\d+)", plan)[0])
        assert read_pages < 100, plan


async def test_the_plans_on_mariadb_read_one_group_alone(mariadb_url: str) -> None:
    # Given a backlog of one group
    store = SqlDelayedMessageStore(mariadb_url)
    store.be_fair(FairBy.of("destination"))
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    await filled(store, messages("a", BACKLOG, "busy"), messages("b", 1, "quiet"))
    table, dialect = store.table_of("sales"), database_at(mariadb_url).dialect
    locks = LockStatements(StoreStatements(table, dialect), dialect, dialect.leases(table, queue_tables(None)))  # type: ignore[attr-defined, arg-type]
    await store.close()
    queued, past, now = await filled_queue(mariadb_url), PAST.replace(tzinfo=None), datetime(2030, 1, 1)  # noqa: DTZ001
    statements = {
        (locks.due_in_turn, 1): ("quiet", past, now, 100),
        (locks.due_in_turn, 50): ("busy", past, now, 50),
        (DueGroups(table, dialect).first, 1): ("busy", LAST_NAME),
        (queued.first, 1): ("work", "busy", LAST_NAME),
        (queued.numbers, 1): ("work", "quiet", 0, 100),
        (queued.numbers, 50): ("work", "busy", 0, 50),
    }

    def rows_read(used: Connection) -> int:
        counted = used.exec_driver_sql("SHOW SESSION STATUS LIKE 'Handler_read%%'").all()
        return sum(int(number) for _, number in counted)

    def work(used: Connection) -> None:
        for (statement, number), values in statements.items():
            # When the statements of a group are run, then they read a few rows
            before = rows_read(used)
            used.exec_driver_sql("BEGIN")
            assert len(statement.rows(used, *values)) == number
            used.exec_driver_sql("ROLLBACK")
            assert rows_read(used) - before < 100, statement.sql

    read(mariadb_url, work)
