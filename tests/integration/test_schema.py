"""Schema versions: made, upgraded in place, shown by a dry run, refused when newer; each on the products there are."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING

import psycopg
import pytest
from click.testing import CliRunner

from delayline import BackendUnusable, NewerSchema, SqlDelayedMessageStore, SqlTransport, TransactionMode
from delayline.cli import main
from delayline.testing.conformance.messages import AT, delayed, operation

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers.postgresql import PostgresqlServer

#: What schema version 1 looked like, with a message waiting and one in its queue.
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
    # Then its messages are there, and whoever knows version 1 can go on with it
    assert rows(old, "SELECT version, revision FROM delayline_schema") == [(1, 2)]
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
        with pytest.raises(BackendUnusable, match=r"'revision'.*older delayline.*`delayline setup`"):
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
    # Given a database of a delayline to come, which no one before it can use
    store, transport = SqlDelayedMessageStore(url), SqlTransport(url)
    await store.setup_infrastructure("sales")
    await change(url, "UPDATE delayline_schema SET version = 3, revision = 4")
    # Then everything says so
    await transport.start()
    for start in (
        transport.dispatch([operation("sales")]),
        transport.receiver("sales"),
        transport.setup_infrastructure(["billing"]),
        transport.planned_infrastructure(["billing"]),
        store.setup_infrastructure("sales"),
        store.initialize("sales", TransactionMode.RECEIVE_ONLY),
    ):
        with pytest.raises(NewerSchema, match=r"version 4.*up to 2.*pip install --upgrade"):
            await start
    await transport.stop()


async def test_a_newer_schema_that_this_version_can_use_is_used(url: str) -> None:
    # Given the schema of the next version, with a column more
    store = SqlDelayedMessageStore(url)
    await store.setup_infrastructure("sales")
    await change(url, "UPDATE delayline_schema SET version = 2, revision = 3")
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


def test_a_dry_run_over_two_databases_says_whose_statement_it_is(tmp_path: Path) -> None:
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
    assert "UPDATE delayline_schema SET version=1, revision=2" in shown
    assert "CREATE" not in shown
    assert old.read_bytes() == before


async def test_what_a_dry_run_shows_is_what_is_needed(postgresql: PostgresqlServer, postgresql_url: str) -> None:
    # Given the statements of a dry run, with names that drivers give a meaning to
    transport = SqlTransport(postgresql_url)
    store = SqlDelayedMessageStore(postgresql_url, table_name='50%% "off" %s', journal=True)
    statements = [*await store.planned_infrastructure("sales"), *await transport.planned_infrastructure(["100%"])]
    with postgresql.administrator(postgresql_url.rsplit("/", 1)[1]) as connection:
        # When somebody who may runs them by hand
        for statement in dict.fromkeys(statements):
            connection.execute(statement.encode())
    # Then endpoints can start without the right to create
    await transport.start()
    await transport.dispatch([operation("100%")])
    await transport.stop()
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    await store.store(delayed())
    await store.close()


def test_several_processes_set_up_at_once(url: str) -> None:
    # When several processes set the same endpoint up at one moment
    command = [sys.executable, "-m", "delayline", "setup", "--endpoint", "sales", "--queue", "billing", "--url", url]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    # Then none of them fails
    errors = [process.communicate(timeout=60)[1] for process in running]
    assert [process.returncode for process in running] == [0] * len(running), errors


async def change(url: str, statement: str) -> None:
    """Change what is in the database, as nobody should."""
    if url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file, file:
            file.execute(statement)
    else:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(statement.encode())
