"""Run with a delayline whose stored messages have more columns: keep messages with and without values everywhere."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from sqlalchemy.schema import CreateTable

from delayline.azure.rows import from_entity, row_of, to_entity
from delayline.bulk import TwoTierStore
from delayline.bulk.cold_folder import ColdFolder, HourWriter
from delayline.bulk.fingerprint import Fingerprint
from delayline.bulk.journal_export import JournalExport
from delayline.bulk.scan import PendingScan, Span
from delayline.bulk.writer import BulkWriter
from delayline.delayed.arrow import MESSAGE_SCHEMA, completed
from delayline.message import DelayedMessage, Message
from delayline.migration.sources.delayline_store import DelaylineStore
from delayline.spark.options import SOURCE_COLUMNS
from delayline.spark.schedule import JobTarget, schedule
from delayline.spark.session import spark_session
from delayline.sql import SqlDelayedMessageStore
from delayline.sql.databases import database_at
from delayline.transaction import TransactionMode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TABLE = "sales.timeouts"
DUE = datetime(2040, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
VALUES: dict[str, Any] = {"priority": 7, "tenant": "Ä", "until": DUE + timedelta(days=1), "note": b"\0\xff"}
MANY = 150  # enough for COPY


def message(id: str, due: datetime = DUE, **values: Any) -> DelayedMessage:  # noqa: ANN401 - of four types
    return DelayedMessage(Message(id, {"n": "ü"}, b"body"), "billing", due, **values)


def batch_of(columns: Mapping[str, Sequence[Any]]) -> pa.RecordBatch:
    schema = pa.schema([MESSAGE_SCHEMA.field(name) for name in columns])
    return pa.RecordBatch.from_pydict(dict(columns), schema)


def values_of(kept: DelayedMessage) -> dict[str, Any]:
    return {name: value for name, value in asdict(kept).items() if name in VALUES}


async def keep_in_store(url: str) -> None:
    # Given a table that an older delayline has made, with a message
    store = SqlDelayedMessageStore(url, journal=True)
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    [older] = await store.pending()
    assert values_of(older) == dict.fromkeys(VALUES), older
    await store.cancel(older.id)
    # When messages are stored one by one and together, replaced and fetched
    await store.store(message("full", **VALUES))
    await store.store_many([message("empty"), *(message(f"{number}", **VALUES) for number in range(MANY))])
    await store.store_or_replace(message("full", **VALUES | {"priority": 8}), replace=True)
    # Then they have what was stored
    fetched = {kept.id: kept for kept in await store.fetch_due(DUE, 2 * MANY, max_bytes=1 << 30)}
    assert len(fetched) == MANY + 2
    assert fetched["empty"] == message("empty")
    assert fetched["0"] == message("0", **VALUES)
    assert fetched["full"] == message("full", **VALUES | {"priority": 8})
    await store.remove_many(list(fetched.values()))
    await store.close()
    # And the journal has the column that is journaled
    export = JournalExport(url)
    entries = [entry for run in export.runs(10_000) for some in export.entries(run) for entry in some]
    assert {entry[6] for entry in entries if entry[3] == "full"} == {"Ä"}, entries[:5]


def keep_in_bulk(url: str) -> None:
    # Given rows of a job, some without values
    columns: dict[str, list[Any]] = {
        "id": ["a", "b"],
        "destination": ["billing"] * 2,
        "due": [DUE] * 2,
        "headers": ['{"n":"ü"}'] * 2,
    }
    columns |= {"body": [b"body"] * 2} | {name: [value, None] for name, value in VALUES.items()}
    batch = batch_of(columns)
    staging = BulkWriter(url, TABLE)
    staging.create()
    unaware = batch_of({name: ["c"] if name == "id" else columns[name][:1] for name in columns if name not in VALUES})
    staging.commit([staging.write([batch, unaware])], on_conflict="replace")
    # When they are read by a store, a scan and a migration
    found = asyncio.run(pending(url))
    [scanned] = PendingScan(url, TABLE, None, []).rows(list(columns), Span(None, None), 10)
    source = DelaylineStore(url)
    table = source.table(TABLE)
    with source.dialect.connections.look() as connection:
        moved = source.messages(connection.execute(table.select().with_only_columns(*source.selected(table))).all())
    # Then each has the values
    assert found == {"a": message("a", **VALUES), "b": message("b"), "c": message("c")}, found
    rows = [*zip(*columns.values(), strict=True), (*unaware.to_pylist()[0].values(), *[None] * len(VALUES))]
    assert sorted(map(tuple, scanned)) == rows, scanned
    assert sorted(tuple(row.values()) for row in moved.select(list(columns)).to_pylist()) == rows, moved


async def pending(url: str) -> dict[str, DelayedMessage]:
    store = SqlDelayedMessageStore(url)
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    try:
        return {kept.id: kept for kept in await store.pending()}
    finally:
        await store.close()


def keep_by_spark(url: str) -> None:
    # Given rows of a DataFrame that knows no such columns
    spark = spark_session(master="local[1]")
    rows = spark.range(1).selectExpr("'d' AS id", "'billing' AS destination", "TIMESTAMP '2040-01-01 00:00:00' AS due")
    # When a job schedules them
    schedule(rows, JobTarget(url, endpoint="sales"), run="once", spark=spark)
    spark.stop()
    # Then their messages have no values
    assert values_of(asyncio.run(pending(url))["d"]) == dict.fromkeys(VALUES)


async def keep_in_files(url: str, folder: Path) -> None:
    # Given a file that an older delayline has written, and a new one
    store = TwoTierStore(url, cold_tier=str(folder))
    await store.setup_infrastructure("cold")
    await store.initialize("cold", TransactionMode.RECEIVE_ONLY)
    [older] = await store.pending()
    assert values_of(older) == dict.fromkeys(VALUES), older
    tier = await store._database.write(store._catalog.create)
    writer = HourWriter(ColdFolder(str(folder), tier))
    columns: dict[str, list[Any]] = {
        "id": ["new"],
        "destination": ["billing"],
        "due": [DUE],
        "headers": ['{"n":"ü"}'],
        "body": [b"body"],
    }
    writer.write(completed(batch_of(columns | {name: [value] for name, value in VALUES.items()})))
    files = writer.close()
    await store._database.write(lambda connection: store._catalog.register(connection, files))
    # When the message of each is found
    new = await store.find("new", body_limit=100)
    assert await store.find(older.id, body_limit=100)
    # Then it has the values
    assert new is not None
    assert new.message == message("new", **VALUES)
    await store.reschedule("new", DUE + timedelta(hours=1))
    assert {kept.id: kept for kept in await store.pending()}["new"] == replace(
        new.message, due=DUE + timedelta(hours=1)
    )
    await store.close()


def keep_elsewhere(before: str) -> None:
    # Azure's rows
    full = message("a", DUE.replace(microsecond=0), **VALUES)
    assert from_entity(to_entity(row_of(full))).message == full
    assert "Tenant" not in to_entity(row_of(message("a")))
    # SQL Server's table
    dialect = database_at("mssql+pymssql://user@host/name").dialect
    made = str(CreateTable(dialect.catalog.timeouts_table(TABLE, None)).compile(dialect=dialect.sql))
    assert all(f"[{name}]" in made or f"{name} " in made for name in ("Priority", "Tenant", "Until", "Note")), made
    # Spark's columns
    assert set(VALUES) < set(SOURCE_COLUMNS.names)
    # A job that was begun before there were such columns is the same afterwards
    plain: dict[str, list[Any]] = {"id": ["a"], "destination": ["b"], "due": [DUE], "headers": [None], "body": [b"c"]}
    assert str(Fingerprint.of(batch_of(plain))) == before
    assert str(Fingerprint.of(batch_of(plain | {"priority": [1]}))) != before


if __name__ == "__main__":
    address, cold, fingerprint = sys.argv[1:]
    asyncio.run(keep_in_store(address))
    keep_in_bulk(address)
    if address.startswith("sqlite"):
        keep_by_spark(address)
    asyncio.run(keep_in_files(address, Path(cold)))
    keep_elsewhere(fingerprint)
