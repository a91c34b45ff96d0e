"""Tables and schemas whose names are full of what SQL, drivers and templates give a meaning to."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import psycopg
import pyarrow as pa
from tests.eventually import PATIENCE

from delayline import SqlDelayedMessageStore, SqlTransport, TransactionMode
from delayline.bulk.writer import BulkWriter
from delayline.external import ExternalTransaction
from delayline.sql.databases import database_at
from delayline.testing.conformance.messages import delayed, operation

SCHEMA = "50%s of {it} \"and\" 'more' %% VALUES ("
TABLE = "%% {0} \"b\" `c` 'd' %s;--"
LATER = datetime(2100, 1, 1, tzinfo=UTC)


async def everything_works(url: str, other_url: str, schema: str | None, due: datetime) -> None:
    """Store, stage, wake, journal and forward in tables of these names."""
    store = SqlDelayedMessageStore(url, table_name=TABLE, schema=schema, journal=True)
    other = SqlDelayedMessageStore(other_url, table_name=TABLE, schema=schema, poll_interval=timedelta(seconds=0.1))
    transport = SqlTransport(url, schema=schema)
    assert await store.planned_infrastructure("sales")
    await transport.setup_infrastructure([TABLE])
    for one in (store, other):
        await one.setup_infrastructure("sales")
        await one.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    await transport.start()
    try:
        # When another process stores something earlier than what this one sleeps towards, then it is notified
        notified = asyncio.Event()
        stop = other.on_stored(lambda _: notified.set())
        await store.store(delayed("far", LATER, destination=TABLE))
        while await other.next_due() is None:  # noqa: ASYNC110 - the other's snapshot
            await asyncio.sleep(0.01)
        notified.clear()
        await store.store_many([delayed(f"m{number}", due, destination=TABLE) for number in range(100)])
        async with asyncio.timeout(PATIENCE):
            await notified.wait()
        stop()
        # When rows are staged and moved, new ones and ones that are there already
        for on_conflict in ("keep", "replace"):
            staging = BulkWriter(url, TABLE, schema=schema)
            await asyncio.to_thread(staging.create)
            attempt = await asyncio.to_thread(staging.write, [staged("m0", f"new {on_conflict}")])
            await asyncio.to_thread(staging.commit, [attempt], on_conflict=on_conflict)
        assert len(await store.pending(limit=200)) == 103
        # When they are due, then they are in their queue
        moved = await store.forward_due(LATER, 200, max_bytes=1 << 20)
        assert (moved.number, await transport.count(TABLE)) == (103, 103)
        assert await store.pending() == []
    finally:
        await transport.stop()
        await other.close()
        await store.close()


def staged(*ids: str) -> pa.RecordBatch:
    columns = {
        "id": pa.array(ids, pa.string()),
        "destination": pa.array([TABLE] * len(ids), pa.string()),
        "due": pa.array([LATER] * len(ids), pa.timestamp("us", "UTC")),
        "headers": pa.array(["{}"] * len(ids), pa.string()),
        "body": pa.array([b""] * len(ids), pa.binary()),
    }
    return pa.RecordBatch.from_pydict(columns)


async def test_on_postgresql(postgresql_url: str) -> None:
    # Given a schema of that name, beside one in which a table has the same name
    with psycopg.connect(postgresql_url, autocommit=True) as owner:
        owner.execute(psycopg.sql.SQL("CREATE SCHEMA {}").format(psycopg.sql.Identifier(SCHEMA)))
    await everything_works(postgresql_url, f"{postgresql_url}?keepalives=1", SCHEMA, datetime.now(UTC))
    # When a caller's transaction is on it, then the table is found to be the same one, or another
    store = SqlDelayedMessageStore(postgresql_url, table_name=TABLE)
    transport = SqlTransport(postgresql_url, schema=SCHEMA)
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    await transport.start()
    try:
        with psycopg.connect(postgresql_url) as mine:
            await store.store_many([delayed("a"), delayed("b")], await store.enlist(ExternalTransaction(mine)))
            await transport.dispatch([operation(TABLE)], await transport.enlist(ExternalTransaction(mine)))
            database = database_at(postgresql_url)
            place = database.dialect.catalog.identify
            assert (await database.read(lambda connection: place(connection, store._statements.table))).table
        assert len(await store.pending()) == 2
    finally:
        await transport.stop()
        await store.close()


async def test_on_mariadb(mariadb_url: str) -> None:
    await everything_works(mariadb_url, f"{mariadb_url}?connect_timeout=9", None, datetime.now(UTC))
