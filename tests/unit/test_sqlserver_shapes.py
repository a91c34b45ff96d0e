"""Whether tables as SQL Server shows them, in the types that SQLAlchemy makes of its catalog, are delayline's."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import MetaData, Table
from sqlalchemy.engine import make_url

from delayline.bulk import cold_catalog, dispatchers, job_tables, stream_claims  # noqa: F401 - register tables
from delayline.errors import BackendUnavailable, BackendUnusable, MissingExtra
from delayline.sql import setup
from delayline.sql.schema import EVERY_RIGHT, QUEUES, TO_READ, queue_tables, registered_groups, versions_table
from delayline.sql.setup import RequiredTables
from delayline.sql.sqlserver.catalog import ABOUT, UNSEEN, only_row
from delayline.sql.sqlserver.connections import OLDEST_SQL_SERVER, SqlServerConnections
from delayline.sql.sqlserver.dialect import ApplicationLocks, SqlServer
from delayline.sql.store import SqlDelayedMessageStore
from delayline.sql.transport import SqlTransport
from delayline.timeouts.nservicebus import timeout_table
from delayline.transaction import TransactionMode

if TYPE_CHECKING:
    from collections.abc import Callable


BYTES_EACH = {"nvarchar": 2, "varchar": 1, "varbinary": 1}


def server() -> SqlServer:
    return SqlServer(make_url("mssql://sa:s3cret@host/db"))


def in_catalog(dialect: SqlServer, name: str, kind: str) -> dict[str, Any]:
    """Return a column as SQLAlchemy reflects it, from the type as it stands in CREATE TABLE."""
    bare, size = re.fullmatch(r"(\w+)(?:\((\w+)\))?.*", kind.lower()).groups()  # type: ignore[union-attr]
    bare = {"integer": "int"}.get(bare, bare)
    length = -1 if size == "max" else int(size) * BYTES_EACH.get(bare, 1) if size else 8
    sql: Any = dialect.sql
    found: dict[str, Any] = sql._parse_column_info(
        name, bare, True, length, 0, 0, None, "Latin1_General_CI_AS", None, None, None, None, None, None
    )
    return found


def shown(dialect: SqlServer, table: Table, **kinds: str) -> Any:  # noqa: ANN401 - stands for an inspector
    """Return an inspector that shows the table as it was created; `kinds` are of another type, `fold` their names."""
    fold: Callable[[str], str] = str.upper if kinds.pop("names", None) == "upper" else str
    columns = [
        in_catalog(dialect, fold(one.name), kinds.get(one.name) or one.type.compile(dialect=dialect.sql))
        for one in table.columns
    ]
    return SimpleNamespace(dialect=dialect.sql, get_columns=lambda *_, **__: columns)


def every_table(dialect: SqlServer) -> list[Table]:
    own = [table for group in registered_groups() for table in group.tables(dialect.catalog, "dbo")]
    return [
        dialect.catalog.timeouts_table("t", None),
        timeout_table("Sales_", "dbo", dialect),
        versions_table("dbo"),
        *own,
    ]


def test_start_accepts_the_tables_of_setup() -> None:
    dialect = server()
    for table in every_table(dialect):
        assert setup._missing(shown(dialect, table), table, dialect) == [], table.name


def test_keys_are_as_short_as_the_server_takes_them() -> None:
    """A longer key is created with a warning, and fails for the first long value; a clustered one has fewer bytes."""
    dialect = server()
    for table in every_table(dialect):
        longest = 1700 if table.primary_key.dialect_options["mssql"]["clustered"] is False else 900
        keys: list[tuple[Any, int]] = [(table.primary_key, longest), *((index, 1700) for index in table.indexes)]
        for key, most in keys:
            kinds = [column.type.compile(dialect=dialect.sql).lower() for column in key.columns]
            sizes = [re.fullmatch(r"(\w+)(?:\((\w+)\))?.*", kind).groups() for kind in kinds]  # type: ignore[union-attr]
            assert sum(int(size or 8) * BYTES_EACH.get(bare, 1) for bare, size in sizes) <= most, (table.name, kinds)


@pytest.mark.parametrize("table_of", ["store", "timeouts"])
def test_due_times_of_another_type_are_refused(table_of: str) -> None:
    dialect = server()
    table = (
        dialect.catalog.timeouts_table("t", None) if table_of == "store" else timeout_table("Sales_", "dbo", dialect)
    )
    for kind in ("bigint", "date", "smalldatetime", "nvarchar(30)"):
        with pytest.raises(BackendUnusable, match="column 'Time' is"):
            setup._missing(shown(dialect, table, Time=kind), table, dialect)
    assert setup._missing(shown(dialect, table, Time="datetime2"), table, dialect) == []


def test_a_body_that_is_bounded_is_another_shape_and_no_type_error() -> None:
    dialect = server()
    table = dialect.catalog.timeouts_table("t", None)
    with pytest.raises(BackendUnusable, match=r"column 'State' is VARBINARY\(length=8000\)"):
        setup._missing(shown(dialect, table, State="varbinary(8000)"), table, dialect)


def test_names_of_columns_may_differ_in_case() -> None:
    dialect = server()
    for table in every_table(dialect):
        assert setup._missing(shown(dialect, table, names="upper"), table, dialect) == [], table.name


class Cursor:
    """Gives result sets as a driver does: those without rows have no description."""

    def __init__(self, results: list[list[tuple[Any, ...]] | None]) -> None:
        self._results = results

    def execute(self, sql: str, values: tuple[Any, ...] = ()) -> None:
        self.sql = sql

    @property
    def description(self) -> object:
        return None if self._results[0] is None else [("c",)]

    def fetchall(self) -> list[tuple[Any, ...]]:
        assert self._results[0] is not None
        return self._results[0]

    def nextset(self) -> bool:
        self._results.pop(0)
        return bool(self._results)

    def close(self) -> None:
        pass


def on(results: list[list[tuple[Any, ...]] | None]) -> Any:  # noqa: ANN401 - stands for a connection
    return SimpleNamespace(connection=SimpleNamespace(cursor=lambda: Cursor(results)))


@pytest.mark.parametrize("results", [[[(0, -1)]], [None, [(0, -1)]], [None, None, [(0, -1)], None]])
def test_locks_are_read_whatever_comes_before_them(results: list[list[tuple[Any, ...]] | None]) -> None:
    locks = ApplicationLocks(SimpleNamespace(session=lambda: None), 'it\'s [a] "table";--')
    assert locks.try_lock(on(results), [7, 8]) == {7}


def test_an_answer_without_a_row_is_an_error() -> None:
    with pytest.raises(BackendUnavailable, match="0 rows instead of one"):
        only_row(on([None]), "SELECT 1")


@pytest.mark.parametrize(
    ("product", "version", "old"),
    [
        ("Microsoft SQL Server 2014 - 12.0.2000.8 (X64)", "12.0.2000.8", True),
        ("Microsoft SQL Server 2016 (SP3) - 13.0.6300.2 (X64)", "13.0.6300.2", False),
        ("Microsoft SQL Server 2022 (RTM) - 16.0.1000.6 (X64)", "16.0.1000.6", False),
        ("Microsoft SQL Azure (RTM) - 12.0.2000.8", "12.0.2000.8", False),
    ],
)
def test_versions_before_2016_are_refused_except_of_azure(
    monkeypatch: pytest.MonkeyPatch, product: str, version: str, old: bool
) -> None:
    import contextlib

    one = server()
    connection = on([[(product, version)]])
    monkeypatch.setattr(one.connections, "connect", lambda: contextlib.nullcontext(connection))
    assert OLDEST_SQL_SERVER == 13
    if old:
        with pytest.raises(BackendUnusable, match="SQL Server 2016"):
            one.connections.check()
    else:
        one.connections.check()


@pytest.mark.parametrize(
    ("held", "grants"),
    [
        ([1, 1, 1, 1, 1], []),
        ([None, None, None, None, None], []),  # no table is seen: they were never set up
        ([1, 0, 1, 1, 0], ["GRANT SELECT, DELETE ON [dbo].[t] TO [it's ]]me];"]),
        ([None, 1, 1, 1, 1], ["GRANT SELECT ON dbo.delayline_schema TO [it's ]]me];" + UNSEEN]),
    ],
)
def test_missing_rights_are_one_block_of_grants(held: list[int | None], grants: list[str]) -> None:
    dialect = server()
    answers: list[Any] = [*held, "it's ]me"]
    asked: list[tuple[Any, ...]] = []

    class Asked(Cursor):
        def execute(self, sql: str, values: tuple[Any, ...] = ()) -> None:
            asked.append((sql, *values))
            self._results = [[(answers.pop(0),)]]

    connection: Any = SimpleNamespace(connection=SimpleNamespace(cursor=lambda: Asked([])))
    needed = {queue_tables("dbo").versions: TO_READ, dialect.catalog.timeouts_table("t", None): EVERY_RIGHT}
    assert dialect.catalog.missing_rights(connection, needed) == grants
    assert asked[0] == ("SELECT HAS_PERMS_BY_NAME(?, N'OBJECT', ?)", "dbo.delayline_schema", "SELECT")


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [
        ("mssql+mssqlpython://sa:s3cret@127.0.0.1:1/db", "mssql_python", "sqlserver"),
        ("mssql+pymssql://sa:s3cret@127.0.0.1:1/db", "pymssql", "pymssql"),
    ],
)
async def test_setup_can_be_planned_without_the_driver(
    url: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a driver that is not installed, when set-up is planned, then all of it comes; set-up itself names it."""
    planned = await SqlDelayedMessageStore(url).planned_infrastructure("sales")
    monkeypatch.setitem(sys.modules, package, None)  # then its import raises ModuleNotFoundError
    store = SqlDelayedMessageStore(url.replace("127.0.0.1", "127.0.0.2"))
    without = await store.planned_infrastructure("sales")
    assert without[0].startswith("-- the server was not asked")
    assert f"pip install 'delayline[{extra}]'" in without[0]
    assert without[1:] == planned[1:]
    with pytest.raises(MissingExtra, match=rf"delayline\[{extra}\]"):
        await store.setup_infrastructure("sales")
    with pytest.raises(MissingExtra):
        await store.initialize("sales", TransactionMode.RECEIVE_ONLY)


@pytest.mark.parametrize("url", ["mssql://sa:s3cret@127.0.0.1:1/db", "mssql+pymssql://sa:s3cret@127.0.0.1:1/db"])
async def test_setup_can_be_planned_without_a_server(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: SqlServerConnections) -> None:
        raise BackendUnavailable("cannot reach it:\n nothing listens")

    monkeypatch.setattr(SqlServerConnections, "connect", fail)
    # Given a server that does not answer, when the set-up of a store and of queues is planned
    store = await SqlDelayedMessageStore(url).planned_infrastructure("sales")
    queues = await SqlTransport(url).planned_infrastructure(["sales", "счёт"])
    # Then all of it comes, guarded, and its first line says why
    for plan in (store, queues):
        assert plan[0].startswith("-- the server was not asked")
        assert "s3cret" not in plan[0]
        assert "\n" not in plan[0]
        for statement in plan[1:]:
            assert statement.startswith(("IF ", "INSERT INTO ")), statement
            assert statement.startswith("IF ") or "WHERE NOT EXISTS" in statement, statement
    assert any("[dbo].[sales.timeouts]" in statement for statement in store)
    assert any("N'счёт'" in statement for statement in queues)
    version = next(one for one in store if one.startswith("INSERT INTO [dbo].delayline_schema"))
    assert version.endswith("DATALENGTH(old.feature) = DATALENGTH(new.feature))")


#: Columns of the ledger that revision 2 of the schema did not have.
LATER_IN_RUNS = {"sink", "kind", "fingerprint"}


def test_the_upgrade_from_revision_2_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a catalog that shows the tables of revision 2
    dialect, groups = server(), registered_groups()
    schema = dialect.catalog.schema_of(None)
    tables = {table.name: table for group in groups for table in group.tables(dialect.catalog, schema)}
    columns = {name: shown(dialect, table).get_columns() for name, table in tables.items()}
    columns["delayline_schema"] = [in_catalog(dialect, name, "INTEGER") for name in ("version", "revision")]
    columns["delayline_spark_runs"] = [
        one for one in columns["delayline_spark_runs"] if one["name"] not in LATER_IN_RUNS
    ]
    catalog = SimpleNamespace(
        dialect=dialect.sql,
        has_table=lambda *_, **__: True,
        get_table_names=lambda **_: [*columns],
        get_columns=lambda name, **_: columns[name],
        get_pk_constraint=lambda *_, **__: {"name": "PK__delaylin__C2B5", "constrained_columns": ["run"]},
    )
    monkeypatch.setattr(setup, "inspect", lambda _: catalog)
    monkeypatch.setattr(type(dialect.groups), "index_names", lambda *_: set())
    connection: Any = SimpleNamespace(execute=lambda _: [("queues", 1, 2)])
    # When
    statements = setup.texts(RequiredTables(dialect, schema, QUEUES).plan(connection), dialect)
    # Then the table of versions alone is replaced, the ledger gets its new key, and every feature gets its row
    rekeyed = [statement for statement in statements if "delayline_spark_runs" in statement]
    indexed = [statement for statement in statements if "CREATE INDEX" in statement]
    statements = [statement for statement in statements if statement not in rekeyed + indexed]
    added = [statement.split(" ADD ")[1].split()[0] for statement in rekeyed[:3]]
    assert added == ["sink", "kind", "fingerprint"]
    assert rekeyed[0].endswith("COLLATE Latin1_General_100_BIN2 NOT NULL DEFAULT 'store'")
    table = "ALTER TABLE [dbo].delayline_spark_runs"
    assert rekeyed[3] == f"{table} DROP CONSTRAINT [PK__delaylin__C2B5]; {table} ADD PRIMARY KEY (run, sink, kind)"
    assert [statement.split()[0] for statement in rekeyed[4:]] == ["UPDATE", "UPDATE", "INSERT", "INSERT"]
    assert [statement.split("CREATE INDEX ")[1].split(" ON ")[0] for statement in indexed] == ["delayline_journal_ids"]
    assert statements[0].strip() == "DROP TABLE [dbo].delayline_schema"
    assert statements[1].startswith("IF object_id(N'[dbo].delayline_schema', N'U') IS NULL\nCREATE TABLE")
    rows = [
        f"INSERT INTO [dbo].delayline_schema (feature, version, revision) VALUES (N'{feature}', {version}, {revision})"  # noqa: S608
        for feature, version, revision in [
            ("queues", 1, 2),
            *((one.feature, one.usable_from, one.revision) for one in groups if one is not QUEUES),
        ]
    ]
    update = "UPDATE [dbo].delayline_schema SET version=1, revision=5 WHERE [dbo].delayline_schema.feature = N'queues'"
    assert sorted(statements[2:]) == sorted([*rows, update])


def test_the_upgraded_tables_match_the_current_ones() -> None:
    dialect = server()
    schema = dialect.catalog.schema_of(None)
    made = (Path(__file__).parents[1] / "integration" / "schema_2" / "sqlserver.sql").read_text(encoding="utf-8")
    # What setup creates by itself
    since = {"history", "crashes", "inbox", "subscriptions", "schedules", "actions", "pauses", "shards"}
    tables_since = {"delayline_jobs", "delayline_job_pieces", "delayline_cold_ids", "delayline_cold_promotions"}
    for group in registered_groups():
        for table in group.tables(dialect.catalog, schema) if group.feature not in since else ():
            if table.name in tables_since:
                continue
            columns = [column for column in table.columns if table.name != "delayline_queues" or column.name == "name"]
            if table.name == "delayline_spark_runs":
                columns = [column for column in table.columns if column.name not in LATER_IN_RUNS]
            if table.name == "delayline_cold_files":
                columns = [column for column in table.columns if column.name != "indexed"]
            if (
                len(columns) < len(table.columns) or table.name == "delayline_journal"
            ):  # an upgrade adds what came since
                table = Table(table.name, MetaData(schema=schema), *(column._copy() for column in columns))
            for statement in setup.texts(setup._creation(table), dialect):
                assert statement in made


def test_the_database_is_found_by_its_name() -> None:
    assert ABOUT.endswith("FROM sys.databases WHERE name = DB_NAME()")


def test_destinations_are_distinguished_by_case() -> None:
    dialect = server()
    store = SqlDelayedMessageStore("mssql://sa:s3cret@host/db")
    from delayline.sql.statements import StoreStatements

    statements = StoreStatements(store.table_of("sales"), dialect)
    counted = str(statements.by_due(1000).compile(dialect=dialect.sql))
    assert "[Destination] COLLATE Latin1_General_100_BIN2" in counted
    exact = dialect.words.exact(statements.table.c.destination) == "id"
    assert "COLLATE Latin1_General_100_BIN2) = " in str(exact.compile(dialect=dialect.sql))
