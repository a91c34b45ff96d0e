"""Other tables that messages move from: NHibernate's, and delayline's own stores, from any product to any other."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import select, text
from tests.spark.legacy import LATER
from tests.spark.stores import DUE, ENDPOINT, StoreAt

from delayline.bulk.writer import blocking
from delayline.errors import BackendUnavailable, BackendUnusable
from delayline.migration import Migration, Plan, preview, source_at, target_at
from delayline.migration.journal import MigrationJournal
from delayline.migration.verify import verify

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession
    from sqlalchemy import Connection

    from delayline.migration.source import TableSource

NHIBERNATE = {
    "postgresql": """create table "TimeoutEntity" ("Id" uuid primary key, "Destination" varchar(1024), "SagaId" uuid,
        "State" bytea, "Endpoint" varchar(440), "Time" timestamp, "Headers" text)""",
    "mariadb": """create table TimeoutEntity (Id varchar(40) primary key, Destination varchar(1024), SagaId varchar(40),
        State longblob, Endpoint varchar(440), Time datetime, Headers longtext)
        default charset=utf8mb4""",
}


@pytest.mark.parametrize("product", ["postgresql", "mariadb"])
def test_endpoints_that_share_a_table_move_one_by_one(
    spark: SparkSession, product: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    # Given NHibernate's table with the timeouts of two endpoints
    url = request.getfixturevalue(f"{product}_url")
    source = source_at("nhibernate", url)
    fill_nhibernate(source, product, (ENDPOINT, ENDPOINT, "crm"))
    store = StoreAt(f"sqlite:///{tmp_path / 'delayline.db'}")

    # When one of them is moved
    outcome = Migration(Plan(source, target_at(store.url), [ENDPOINT])).run(spark)

    # Then the other one's stay, and rows without the exact time are due when their column's second is over
    assert outcome.complete
    due = LATER if product == "postgresql" else LATER + timedelta(seconds=1)
    assert [(one.destination, one.due, one.message.headers) for one in store.messages()] == 2 * [
        ("billing", due, {"Größe": "🚀"})
    ]
    left = blocking(source.database.look(source.partitions))
    assert [partition.endpoint for partition in left] == ["crm"]


@pytest.mark.slow
@pytest.mark.parametrize("product", ["postgresql", "mariadb"])
def test_rows_that_name_no_endpoint_are_counted_and_named(
    spark: SparkSession, product: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    # Given a shared table in which a row has no endpoint
    source = source_at("nhibernate", request.getfixturevalue(f"{product}_url"))
    fill_nhibernate(source, product, (None, ENDPOINT))
    store = StoreAt(f"sqlite:///{tmp_path / 'delayline.db'}")
    plan = Plan(source, target_at(store.url))
    # When all endpoints are looked at, then that row is reported by itself
    looked = preview(plan, spark)
    assert [(one.endpoint, one.rows, one.skipped) for one in looked] == [(ENDPOINT, 1, 0), ("(no endpoint)", 0, 1)]
    [(reason, number, name)] = looked[-1].unmovable
    assert (reason, number) == (source.ownerless, 1)
    assert name is not None
    assert name.endswith("0")
    assert Migration(Plan(source, None)).run(spark).skipped == 1
    # When all are moved, then it stays, and the outcome and the verification say so
    outcome = Migration(plan).run(spark)
    assert not outcome.complete
    assert (outcome.skipped, outcome.reasons) == (1, [(source.ownerless, 1)])
    assert outcome.examples == [(name, source.ownerless)]
    target = target_at(store.url)
    assert target is not None
    assert verify(source, target, spark).skipped == 1
    assert len(store.messages()) == 1


def fill_nhibernate(source: TableSource, product: str, endpoints: Sequence[str | None]) -> None:
    """Make NHibernate's table, with a timeout of each of these endpoints."""
    quote = source.dialect.sql.identifier_preparer.quote
    names = ("Id", "Destination", "SagaId", "State", "Endpoint", "Time", "Headers")
    columns = ", ".join(map(quote, names))
    at = LATER.replace(tzinfo=None)

    def fill(connection: Connection) -> None:
        connection.execute(text(NHIBERNATE[product]))
        for number, endpoint in enumerate(endpoints):
            row = f"INSERT INTO {quote('TimeoutEntity')} ({columns}) VALUES (:id, 'billing', NULL, :state, :owner, :at, :headers)"  # noqa: E501, S608 - ours
            if product == "postgresql":
                row = row.replace(":id", "CAST(:id AS uuid)")
            key = f"00000000-0000-0000-0000-00000000000{number}"
            values = {"id": key, "state": b"x", "owner": endpoint, "at": at, "headers": '{"Größe":"🚀"}'}
            connection.execute(text(row), values)

    async def opened() -> None:
        await source.database.open()
        await source.database.write(fill)
        await source.database.close()

    asyncio.run(opened())


def test_a_message_whose_id_waits_at_the_target_already_stays(
    spark: SparkSession, postgresql_url: str, tmp_path: Path
) -> None:
    # Given two stores that have an id in common
    before, after = StoreAt(postgresql_url), StoreAt(f"sqlite:///{tmp_path / 'new.db'}")
    before.put("a", "b", destination="billing")
    after.put("b", destination="crm")
    # When one moves into the other
    outcome = Migration(Plan(source_at("delayline", before.url), target_at(after.url), [ENDPOINT])).run(spark)
    # Then neither of the two messages is lost
    assert [(one.id, one.destination) for one in before.messages()] == [("b", "billing")]
    assert {one.id: one.destination for one in after.messages()} == {"a": "billing", "b": "crm"}
    assert "is pending in the target's store already" in outcome.reasons[0][0]


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [("sqlite", "postgresql"), ("postgresql", "mariadb"), ("mariadb", "sqlite")])
def test_delayline_stores_move_from_product_to_product(
    spark: SparkSession, old: str, new: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    def at(product: str) -> str:
        if product == "sqlite":
            return f"sqlite:///{tmp_path / 'old.db'}"
        return str(request.getfixturevalue(f"{product}_url"))

    # Given a store with messages to the microsecond, of ids of every kind
    before, after = StoreAt(at(old)), StoreAt(at(new))
    before.put("a", "naïve 日本 🚀", "A")
    before.put("now", due=DUE.replace(year=2020))
    messages = before.messages()

    # When it moves
    source, target = source_at("delayline", before.url), target_at(after.url)
    assert target is not None
    outcome = Migration(Plan(source, target, [ENDPOINT], batch_size=2)).run(spark)

    # Then everything is there as it was, and nothing here
    assert outcome.complete
    assert before.messages() == []
    by_id = {one.id: one for one in messages}
    assert {one.id: one for one in after.messages()} == by_id
    assert verify(source, target, spark).ok


@pytest.mark.parametrize("product", ["sqlite", "postgresql", "mariadb"])
def test_a_batch_of_large_messages_has_fewer_of_them(
    spark: SparkSession,
    product: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given messages whose bodies are as long as their ids, in a source whose tasks have room for ten bytes or so
    monkeypatch.setattr("delayline.migration.holding_table.LARGEST_BATCH", 10)
    url = f"sqlite:///{tmp_path / 'old.db'}" if product == "sqlite" else str(request.getfixturevalue(f"{product}_url"))
    before, after = StoreAt(url), StoreAt(f"sqlite:///{tmp_path / 'new.db'}")
    ids = ["a" * 4, "b" * 4, "c" * 35, "d" * 2, *(f"e{number}" for number in range(6))]
    before.put(*ids)

    # When they move
    source = source_at("delayline", before.url)
    assert Migration(Plan(source, target_at(after.url), [ENDPOINT], batch_size=4)).run(spark).complete

    # Then a batch has ten bytes besides its first row's, and four rows, at most
    assert after.ids() == ids
    batches = MigrationJournal(source.dialect, source.schema).batches
    query = select(batches.c.rows, batches.c.state).order_by(batches.c.batch)
    kept = blocking(source.database.look(lambda connection: connection.execute(query).fetchall()))
    assert [tuple(row) for row in kept] == [(2, "marked")] * 5


def failing(*_: object) -> None:
    raise BackendUnavailable("on purpose")


def test_scheduled_jobs_of_procrastinate_become_messages(
    spark: SparkSession, postgresql_url: str, mariadb_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    procrastinate = pytest.importorskip("procrastinate")

    # Given jobs that Procrastinate has scheduled, one with a lock, and one for now
    async def schedule() -> list[int]:
        app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=postgresql_url))
        async with app.open_async():
            await app.schema_manager.apply_schema_async()

            def task(**how: Any) -> Any:  # noqa: ANN401 - Procrastinate's own
                return app.configure_task("remind", queue=ENDPOINT, **how)

            return [
                await task(schedule_at=LATER).defer_async(who="Größe 🚀"),
                await task(schedule_at=LATER, lock="one").defer_async(),
                await task().defer_async(),
            ]

    ids = asyncio.run(schedule())
    source, store = source_at("procrastinate", postgresql_url), StoreAt(mariadb_url)

    def jobs() -> list[Any]:
        with psycopg.connect(postgresql_url) as connection:
            return connection.execute("SELECT * FROM procrastinate_jobs ORDER BY id").fetchall()

    # When they are aside, and the migration is aborted, then they are jobs as they were
    before = jobs()
    migration = Migration(Plan(source, target_at(store.url), [ENDPOINT]))
    with monkeypatch.context() as patched:
        patched.setattr(Migration, "_deliver", failing)
        with pytest.raises(BackendUnavailable):
            migration.run(spark)
    assert [job[0] for job in jobs()] == ids[2:]
    restored = migration.abort().progress
    assert restored is not None
    assert (restored.restored, jobs()) == (2, before)

    # When they are moved
    outcome = migration.run(spark)

    # Then the first is a message, and the others are jobs still
    [message] = store.messages()
    assert (message.id, message.destination, message.due) == (f"procrastinate-{ids[0]}", ENDPOINT, LATER)
    assert message.message.json() == {"who": "Größe 🚀"}
    assert message.message.headers["Procrastinate.Task"] == "remind"
    assert [reason for reason, _ in outcome.reasons] == [
        "it has a lock, which no message can have: let Procrastinate run it"
    ]
    with psycopg.connect(postgresql_url) as connection:
        left = connection.execute("SELECT id, status::text, lock FROM procrastinate_jobs ORDER BY id").fetchall()
        connection.execute("ALTER TABLE procrastinate_jobs DROP COLUMN abort_requested CASCADE")
    assert left == [(ids[1], "todo", "one"), (ids[2], "todo", None)]
    # and a schema of another version is left alone
    with pytest.raises(BackendUnusable, match="of an unknown version: it has no column 'abort_requested'"):
        migration.run(spark)
