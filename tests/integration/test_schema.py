"""Schema versions: created, upgraded in place, shown by a dry run, refused when newer; on each product."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sqlite3
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from click.testing import CliRunner

from delayline import SqlDelayedMessageStore, SqlTransport, TransactionMode
from delayline.bulk import cold_catalog, dispatchers, job_tables, stream_claims
from delayline.bulk.fingerprint import Fingerprint
from delayline.bulk.jobs import JobName, JobState, PieceParameters
from delayline.bulk.pieces import PieceWriter
from delayline.bulk.whole_jobs import WholeJob
from delayline.bulk.writer import BulkWriter
from delayline.cli import main
from delayline.errors import BackendUnusable, DifferentInput, NewerSchema
from delayline.migration import journal as migrations
from delayline.sql.actions import ACTIONS
from delayline.sql.databases import database_at
from delayline.sql.dispatch_pauses import PAUSES
from delayline.sql.inbox import INBOX
from delayline.sql.journal import JOURNAL
from delayline.sql.schedules import SCHEDULES
from delayline.sql.schema import CRASHES, DECISIONS, QUEUES, SUBSCRIPTIONS, registered_groups
from delayline.sql.setup import RequiredTables
from delayline.sql.shards.versions import SHARD_MAPS
from delayline.telemetry.history import MINUTES
from delayline.testing.conformance.messages import AT, delayed, operation

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.servers.postgresql import PostgresqlServer

    from delayline.sql.schema import TableGroup

#: Statements that revision 2 ran for the tables of all features, by product.
REVISION_2 = Path(__file__).parent / "schema_2"
#: Schema version 1, with a delayed message and a message in its queue.
VERSION_1 = """
CREATE TABLE delayline_schema (version INTEGER NOT NULL, PRIMARY KEY (version));
CREATE TABLE delayline_queues (name VARCHAR(200) NOT NULL, PRIMARY KEY (name));
CREATE TABLE delayline_messages (
    seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, queue VARCHAR(200) NOT NULL, id VARCHAR(250) NOT NULL,
    headers BLOB NOT NULL, body BLOB NOT NULL
);
CREATE INDEX delayline_messages_order ON delayline_messages (queue, seq);
CREATE TABLE "sales.timeouts" (
    seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, id VARCHAR(250) NOT NULL, destination VARCHAR(200) NOT NULL,
    due INTEGER NOT NULL, headers BLOB NOT NULL, body BLOB NOT NULL, retry_count INTEGER NOT NULL, UNIQUE (id)
);
CREATE INDEX "sales.timeouts.Index_Time" ON "sales.timeouts" (due, seq);
INSERT INTO delayline_schema VALUES (1);
INSERT INTO delayline_queues VALUES ('sales');
INSERT INTO delayline_messages (queue, id, headers, body) VALUES ('sales', 'in queue', x'7b7d', x'01');
INSERT INTO "sales.timeouts" (id, destination, due, headers, body, retry_count)
    VALUES ('waits', 'sales', 1700000000000000, x'7b7d', x'02', 3);
"""


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, list(arguments), prog_name="delayline", catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def rows(file: Path, query: str) -> list[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(file)) as connection:
        return connection.execute(query).fetchall()


@pytest.fixture
def old(file: Path) -> Path:
    """Provide a file that version 1 made."""
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.executescript(VERSION_1)
    return file


@pytest.fixture(params=["SQLite", "PostgreSQL"])
def url(request: pytest.FixtureRequest, file: Path) -> str:
    """Provide an empty database of each product."""
    if request.param == "PostgreSQL":
        return str(request.getfixturevalue("postgresql_url"))
    return f"sqlite:///{file}"


def test_a_file_of_version_1_is_upgraded_in_place(old: Path) -> None:
    # When
    run("setup", "--endpoint", "sales", "--url", f"sqlite:///{old}")
    run("setup", "--endpoint", "sales", "--url", f"sqlite:///{old}")
    # Then its messages are there, and version 1 can still use it
    assert rows(old, "SELECT * FROM delayline_schema") == [
        ("queues", 1, QUEUES.revision),
        ("crashes", 1, 1),
        ("subscriptions", 1, 1),
        ("pauses", 1, 1),
    ]
    assert rows(old, "SELECT id, body, expires FROM delayline_messages") == [("in queue", b"\x01", None)]
    assert rows(old, 'SELECT id, due, retry_count FROM "sales.timeouts"') == [("waits", 1700000000000000, 3)]


async def test_an_upgraded_file_works(old: Path) -> None:
    url = f"sqlite:///{old}"
    store, transport = SqlDelayedMessageStore(url), SqlTransport(url)
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    await transport.start()
    try:
        moved = await store.forward_due(AT.replace(year=2100), 10, max_bytes=1000)
        assert moved.number == 1
        assert [message.id for message in await transport.browse("sales", 9)] == ["in queue", "waits"]
    finally:
        await transport.stop()
        await store.close()


async def test_a_file_of_version_1_is_not_used_as_it_is(old: Path) -> None:
    store, transport = SqlDelayedMessageStore(f"sqlite:///{old}"), SqlTransport(f"sqlite:///{old}")
    await transport.start()
    for start in (
        transport.receiver("sales"),
        transport.dispatch([operation("sales")]),
        store.initialize("sales", TransactionMode.RECEIVE_ONLY),
    ):
        with pytest.raises(BackendUnusable, match=r"'feature'.*older delayline.*`delayline setup`"):
            await start
    await transport.stop()


def test_old_statements_work_on_the_new_schema(file: Path) -> None:
    # Given a file that this version made
    run("setup", "--endpoint", "sales", "--url", f"sqlite:///{file}")
    # When version 1 looks at the schema, sends and stores, as it did
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        assert connection.execute("SELECT delayline_schema.version FROM delayline_schema").fetchone() == (1,)
        statements = [one for one in VERSION_1.split(";") if "INTO delayline_messages" in one or "sales.t" in one]
        for statement in statements:
            if "INSERT" in statement:
                connection.execute(statement)
    # Then both are there
    assert rows(file, "SELECT id, expires FROM delayline_messages") == [("in queue", None)]


async def test_a_newer_schema_is_refused(url: str) -> None:
    # Given a database that a future delayline has upgraded, and no older one can use
    store, transport = SqlDelayedMessageStore(url), SqlTransport(url)
    await store.setup_infrastructure("sales")
    await change(url, "UPDATE delayline_schema SET version = 6, revision = 7 WHERE feature = 'queues'")
    # Then every part refuses it
    await transport.start()
    for start in (
        transport.dispatch([operation("sales")]),
        transport.receiver("sales"),
        transport.setup_infrastructure(["billing"]),
        transport.planned_infrastructure(["billing"]),
        store.setup_infrastructure("sales"),
        store.initialize("sales", TransactionMode.RECEIVE_ONLY),
    ):
        with pytest.raises(
            NewerSchema, match=r"version 7 of 'queues'.*version 6.*this delayline has 5.*pip install --upgrade"
        ):
            await start
    await transport.stop()


async def test_a_newer_schema_that_this_version_can_use_is_used(url: str) -> None:
    # Given the schema of the next version, with a column more
    store = SqlDelayedMessageStore(url)
    await store.setup_infrastructure("sales")
    await change(url, "UPDATE delayline_schema SET version = 5, revision = 6 WHERE feature = 'queues'")
    await change(url, 'ALTER TABLE "sales.timeouts" ADD priority INTEGER')
    # When this version starts
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    try:
        await store.store(delayed())
        assert [message.id for message in await store.pending()] == ["m"]
    finally:
        await store.close()
    # Then it has left the version as it was
    assert await store.planned_infrastructure("sales") == []


@pytest.mark.parametrize(
    ("statement", "fault"),
    [
        ('ALTER TABLE "sales.timeouts" RENAME COLUMN due TO at', "'sales.timeouts'.*'due' is missing"),
        ("ALTER TABLE delayline_messages RENAME COLUMN body TO content", "'delayline_messages'.*'body' is missing"),
    ],
)
async def test_a_table_without_a_column_is_refused(url: str, statement: str, fault: str) -> None:
    store = SqlDelayedMessageStore(url)
    await store.setup_infrastructure("sales")
    await change(url, statement)
    for start in (
        store.initialize("sales", TransactionMode.RECEIVE_ONLY),
        store.setup_infrastructure("sales"),
        store.planned_infrastructure("sales"),
    ):
        with pytest.raises(BackendUnusable, match=fault + ".*another table_name"):
            await start


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ("due", "timestamp USING due::timestamp"),
        ("due", "text USING due::text"),
        ("id", "varchar(100)"),
        ("headers", "text USING ''"),
        ("retry_count", "text"),
    ],
)
async def test_a_column_of_another_type_is_refused(postgresql_url: str, column: str, kind: str) -> None:
    store = SqlDelayedMessageStore(postgresql_url)
    await store.setup_infrastructure("sales")
    await change(postgresql_url, f'ALTER TABLE "sales.timeouts" ALTER COLUMN {column} TYPE {kind}')
    with pytest.raises(BackendUnusable, match=f"column '{column}' is .*, not "):
        await store.initialize("sales", TransactionMode.RECEIVE_ONLY)


def test_a_dry_run_shows_and_changes_nothing(url: str, tmp_path: Path) -> None:
    # When
    arguments = ["setup", "--endpoint", "sales", "--queue", "o'clock", "--url", url]
    shown = run(*arguments, "--dry-run")
    # Then it is all there, and nothing was made
    for name in ("delayline_schema", "delayline_queues", "delayline_messages", '"sales.timeouts"'):
        assert f"CREATE TABLE {name}" in shown
    assert "o''clock" in shown
    assert list(tmp_path.iterdir()) == []
    assert run(*arguments, "--dry-run") == shown
    # And when it has run, nothing is left to do
    run(*arguments)
    assert run(*arguments, "--dry-run") == "nothing to do\n"


#: The tables of each feature, and a column that its code needs.
COLUMNS = {
    QUEUES: "delayline_messages.body",
    DECISIONS: "delayline_decisions.value",
    CRASHES: "delayline_suspects.crashes",
    SUBSCRIPTIONS: "delayline_subscriptions.queue",
    JOURNAL: "delayline_journal.destination",
    cold_catalog.COLD_TIER: "delayline_cold_files.messages",
    dispatchers.DISPATCHERS: "delayline_dispatchers.owner",
    job_tables.JOBS: "delayline_jobs.stored",
    stream_claims.STREAM_CLAIMS: "delayline_spark_taken.destination",
    migrations.MIGRATIONS: "delayline_migration_parts.endpoint",
    MINUTES: "delayline_minutes.content",
    INBOX: "delayline_inbox.expires",
    SCHEDULES: "delayline_schedules.missed",
    ACTIONS: "delayline_actions.position",
    PAUSES: "delayline_pauses.since",
    SHARD_MAPS: "delayline_shard_maps.states",
}
#: The features whose tables revision 2 had.
CAME_SINCE = (MINUTES, CRASHES, SUBSCRIPTIONS, INBOX, SCHEDULES, ACTIONS, PAUSES, SHARD_MAPS)
OF_REVISION_2 = [group for group in COLUMNS if group not in CAME_SINCE]


def test_every_feature_is_listed() -> None:
    assert set(COLUMNS) == set(registered_groups())


@pytest.fixture(params=["SQLite", "PostgreSQL", "MariaDB"])
async def revision_2(request: pytest.FixtureRequest, file: Path) -> str:
    """Provide a database that revision 2 has set up for all features, with a delayed message and a journal entry."""
    product = request.param.lower()
    url = f"sqlite:///{file}" if product == "sqlite" else str(request.getfixturevalue(f"{product}_url"))
    for statement in (REVISION_2 / f"{product}.sql").read_text(encoding="utf-8").split(";\n"):
        if statement.strip():
            await change(url, statement)
    await change(url, "INSERT INTO delayline_schema (version, revision) VALUES (1, 2)")
    await change(url, "INSERT INTO delayline_queues VALUES ('sales')")
    await change(url, "INSERT INTO delayline_decisions VALUES ('one', 'commit')")
    await change(
        url,
        "INSERT INTO delayline_spark_runs (run, batch, stored, duplicates, rejected) VALUES ('nightly', 0, 7, 0, 0)",
    )
    return url


async def test_tables_of_revision_2_are_upgraded_in_place(revision_2: str) -> None:
    # When
    await asyncio.to_thread(run, "setup", "--endpoint", "sales", "--url", revision_2, "--feature", "migrations")
    # Then each feature has a row with its version, and the rows of the tables are there
    dialect = database_at(revision_2).dialect
    with dialect.connections.look() as connection:
        rows = connection.exec_driver_sql("SELECT feature, version, revision FROM delayline_schema").fetchall()
        assert sorted(map(tuple, rows)) == sorted(
            (one.feature, one.usable_from, one.revision) for one in [*OF_REVISION_2, CRASHES, SUBSCRIPTIONS, PAUSES]
        )
        assert tuple(connection.exec_driver_sql("SELECT run, stored FROM delayline_spark_runs").one()) == ("nightly", 7)
        assert connection.exec_driver_sql("SELECT value FROM delayline_decisions").scalar_one() == "commit"
        # And nothing is left to do for any feature
        assert RequiredTables(dialect, dialect.catalog.schema_of(None), *OF_REVISION_2, CRASHES).plan(connection) == []
    # And an endpoint works with it
    store = SqlDelayedMessageStore(revision_2)
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    await store.store(delayed())
    assert [message.id for message in await store.pending()] == ["m"]
    await store.close()


async def in_thread(work: Callable[..., Any], *arguments: object, **named: object) -> Any:  # noqa: ANN401 - its result
    return await asyncio.to_thread(work, *arguments, **named)


async def test_the_names_of_runs_are_taken_apart_in_place(revision_2: str) -> None:
    # Given the ledger of an older delayline, in which the names of runs begin with their sinks and kinds
    query = "0b0f5f6e-7f0f-4d8e-9a55-9a2f6c3f7c11"
    rows = {
        "cold nightly": (0, 5),
        "cold weekly": (0, 3),  # no sink of a run "weekly"
        f"stream  {query}": (7, 20),
        f"levels stream  {query}": (7, 30),
        "migration spring 0 4": (987654321, 50),
        "migration spring 0 5": (0, 0),  # closed
        "migration of the stream": (0, 9),  # the name of a job
    }
    for name, (batch, stored) in rows.items():
        into = "INSERT INTO delayline_spark_runs (run, batch, stored, duplicates, rejected) VALUES"
        await change(revision_2, f"{into} ('{name}', {batch}, {stored}, 0, 0)")
    # When it is upgraded, twice, as after a kill before the version was recorded
    arguments = ("setup", "--endpoint", "sales", "--url", revision_2)
    await asyncio.to_thread(run, *arguments)
    await change(revision_2, "UPDATE delayline_schema SET version = 1, revision = 1 WHERE feature = 'jobs'")
    await asyncio.to_thread(run, *arguments)
    # Then every row has its key, and one that may be of two runs is kept under both
    query_of_key = "SELECT run, sink, kind, batch, stored FROM delayline_spark_runs"
    with database_at(revision_2).dialect.connections.look() as connection:
        found = {tuple(row[:3]): tuple(row[3:]) for row in connection.exec_driver_sql(query_of_key)}
    assert found == {
        ("nightly", "store", "job"): (0, 7),
        ("nightly", "cold", "job"): (0, 5),
        ("cold nightly", "store", "job"): (0, 5),
        ("cold weekly", "store", "job"): (0, 3),
        (f"stream  {query}", "store", "stream"): (7, 20),
        (f"stream  {query}", "levels", "stream"): (7, 30),
        (f"levels stream  {query}", "store", "job"): (7, 30),
        ("migration spring 0 4", "store", "migration"): (987654321, 50),
        ("migration spring 0 5", "store", "migration"): (0, 0),
        ("migration of the stream", "store", "job"): (0, 9),
    }
    # And the store's run is found, but refused for an input with another number of rows
    writer = BulkWriter(revision_2, "sales.timeouts")
    await asyncio.to_thread(writer.create)
    whole = WholeJob(JobName("nightly"), PieceParameters(0, 0, "raise", at_once=True))
    commit = partial(in_thread, writer.commit, [])
    repeated = await commit(job=whole._replace(fingerprint=Fingerprint(12)))
    assert (repeated.stored, repeated.cold, repeated.repeated) == (7, 5, True)
    with pytest.raises(
        DifferentInput, match="'nightly' was used for another input: it had 12 rows, and this input has 8"
    ):
        await commit(job=whole._replace(fingerprint=Fingerprint(8)))
    # And its streams go on after the last batch, with what a broker has got of it
    stream = JobName(f"stream  {query}", 7)
    pieces = PieceWriter(revision_2, "sales.timeouts")
    entry = await in_thread(pieces.begun, stream, stream=True)
    assert entry is not None
    assert (entry.state, entry.committed.stored, entry.committed.sent) == (JobState.DONE, 20, 30)
    with pytest.raises(DifferentInput, match="comes after batch 7 was stored"):
        await commit(job=WholeJob(JobName(stream.name, 6), PieceParameters(0, 0, "raise", stream=True, at_once=True)))
    # And all of that is listed, as what an older delayline has not done is not there
    listed = await asyncio.to_thread(pieces.jobs, 10)
    assert sorted(str(job.name) for job in listed) == ["nightly", str(stream)]
    assert await in_thread(pieces.begun, JobName("yearly")) is None


async def test_an_upgrade_that_was_killed_after_dropping_the_versions_is_completed(revision_2: str) -> None:
    await change(revision_2, "DROP TABLE delayline_schema")
    await asyncio.to_thread(run, "setup", "--endpoint", "sales", "--url", revision_2)
    with database_at(revision_2).dialect.connections.look() as connection:
        assert len(connection.exec_driver_sql("SELECT feature FROM delayline_schema").fetchall()) == len(
            [*OF_REVISION_2, CRASHES, SUBSCRIPTIONS, PAUSES]
        )


@pytest.mark.parametrize("group", COLUMNS, ids=lambda group: group.feature)
async def test_a_table_of_a_feature_that_lacks_a_column_is_refused(group: TableGroup, file: Path) -> None:
    # Given the feature's tables, one of which has another shape
    url, (table, _, column) = f"sqlite:///{file}", COLUMNS[group].partition(".")
    database = database_at(url)
    required = RequiredTables(database.dialect, None, group)
    await database.open()
    try:
        await database.write(required.set_up)
        await change(url, f"ALTER TABLE {table} RENAME COLUMN {column} TO other")
        # When its feature sets up, then the error names table and column
        with pytest.raises(BackendUnusable, match=f"'{table}'.*'{column}' is missing"):
            await database.write(required.set_up)
    finally:
        await database.close()


def test_a_newer_version_of_a_feature_is_refused_by_that_feature(file: Path) -> None:
    # Given a cold tier that a future delayline has upgraded
    url = f"sqlite:///{file}"
    run("setup", "--endpoint", "sales", "--url", url, "--feature", "cold_tier")
    asyncio.run(change(url, "UPDATE delayline_schema SET version = 7, revision = 9 WHERE feature = 'cold_tier'"))
    # Then set-up refuses it
    shown = CliRunner().invoke(main, ["setup", "--url", url, "--feature", "cold_tier"], prog_name="delayline")
    assert shown.exit_code != 0
    assert "version 9 of 'cold_tier'" in shown.output


def test_a_dry_run_shows_the_tables_of_features(url: str) -> None:
    arguments = ["setup", "--url", url, "--feature", "jobs", "--feature", "dispatchers"]
    shown = run(*arguments, "--dry-run")
    assert re.findall(r"CREATE TABLE (\w+)", shown) == [
        "delayline_schema",
        "delayline_jobs",
        "delayline_job_pieces",
        "delayline_dispatchers",
        "delayline_dispatcher_shards",
    ]
    run(*arguments)
    assert run(*arguments, "--dry-run") == "nothing to do\n"


def test_a_dry_run_over_two_databases_names_the_database_of_each_statement(tmp_path: Path) -> None:
    # Given queues that are set up already, in another file than the delayed messages
    queues, store = (f"sqlite:///{tmp_path / name}.db" for name in ("queues", "store"))
    places = ["--transport-url", queues, "--store-url", store]
    run("setup", "--queue", "sales", *places)
    arguments = ["setup", "--endpoint", "sales", *places, "--dry-run"]
    # When
    document = json.loads(run(*arguments, "--json"))
    # Then each statement stands under its database's name
    assert set(document["databases"]) == {queues, store}
    assert any("sales.timeouts" in statement for statement in document["databases"][store])
    assert not any("CREATE TABLE" in statement for statement in document["databases"][queues])
    # And what people read is SQL as a whole, with the names in comments
    shown = run(*arguments)
    assert shown.index(f"-- {store}\n") < shown.index("CREATE TABLE") < shown.index(f"-- {queues}\n")
    assert shown.replace(f"-- {store}\n", "").replace(f"-- {queues}\n", "") == "".join(
        f"{statement};\n" for statement in document["statements"]
    )


def test_a_dry_run_of_an_upgrade(old: Path) -> None:
    before = old.read_bytes()
    shown = run("setup", "--endpoint", "sales", "--url", f"sqlite:///{old}", "--dry-run")
    assert "ALTER TABLE delayline_messages ADD expires BIGINT" in shown
    assert "UPDATE delayline_schema SET version=1, revision=5" in shown
    assert re.findall(r"CREATE TABLE (\w+)", shown) == [
        "delayline_schema",
        "delayline_pauses",
        "delayline_receivers",
        "delayline_suspects",
        "delayline_subscriptions",
    ]
    assert old.read_bytes() == before


async def test_the_dry_run_is_complete(postgresql: PostgresqlServer, postgresql_url: str) -> None:
    # Given the statements of a dry run, with names that drivers give a meaning to
    transport = SqlTransport(postgresql_url)
    store = SqlDelayedMessageStore(postgresql_url, table_name='50%% "off" %s', journal=True)
    statements = [*await store.planned_infrastructure("sales"), *await transport.planned_infrastructure(["100%"])]
    with postgresql.administrator(postgresql_url.rsplit("/", 1)[1]) as connection:
        # When an administrator runs them
        for statement in dict.fromkeys(statements):
            connection.execute(statement.encode())
    # Then endpoints can start without the right to create
    await transport.start()
    await transport.dispatch([operation("100%")])
    await transport.stop()
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    await store.store(delayed())
    await store.close()


@pytest.mark.sample(1)
def test_several_processes_set_up_at_once(url: str) -> None:
    # When several processes set the same endpoint up at one moment
    command = [sys.executable, "-m", "delayline", "setup", "--endpoint", "sales", "--queue", "billing", "--url", url]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    # Then none of them fails
    errors = [process.communicate(timeout=60)[1] for process in running]
    assert [process.returncode for process in running] == [0] * len(running), errors


async def change(url: str, statement: str) -> None:
    """Run a statement past delayline."""
    if url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file, file:
            file.execute(statement)
    elif url.startswith("mariadb"):
        with database_at(url).dialect.connections.look() as connection:
            connection.exec_driver_sql(statement.replace("%", "%%"))
            connection.commit()
    else:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(statement.encode())
