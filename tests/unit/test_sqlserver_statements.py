"""SQL Server's statements, compiled: compared with the document's and the reference's, as no server runs here."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select
from sqlalchemy.engine import make_url
from sqlalchemy.schema import CreateIndex, CreateTable

from delayline.bulk.scan import Condition, PendingScan, Span
from delayline.errors import ConfigurationError
from delayline.migration.journal import MigrationJournal
from delayline.sql.due_forecast import _count
from delayline.sql.prepared import Prepared
from delayline.sql.row_claims import LockStatements
from delayline.sql.schedules import ScheduleStatements, schedules_table
from delayline.sql.schema import queue_tables
from delayline.sql.setup import texts
from delayline.sql.sqlserver.dialect import LeaseTable, SqlServer
from delayline.sql.statements import QueueStatements, StoreStatements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Executable

NAME = "[dbo].[sales.timeouts]"
CREATE_TABLE = """
if not exists (select * from sys.objects where object_id = object_id('{0}') and type in ('U')) begin
create table {0} (
    Id nvarchar(250) not null primary key,
    Destination nvarchar(200),
    State varbinary(max),
    Time datetime,
    Headers varbinary(max) not null,
    RetryCount INT NOT NULL default(0)
)
end
"""


def dialect(url: str = "mssql://sa:s3cret@host/db") -> SqlServer:
    return SqlServer(make_url(url))


def plain(sql: str) -> str:
    """Return SQL as the document writes it: without brackets, the table before its columns, and line breaks."""
    sql = sql.replace(f"{NAME}.", "").replace(NAME, "{0}")
    sql = sql.replace("__[POSTCOMPILE_keys]", "@keys")
    return re.sub(r"\s+", " ", re.sub(r"\[(\w+)\]", r"\1", sql)).strip()


class Statements:
    """Everything that is run on a store's table and the queues."""

    def __init__(self, url: str = "mssql://sa:s3cret@host/db", name: str = "sales.timeouts") -> None:
        self.dialect = dialect(url)
        self.tables = queue_tables(self.dialect.catalog.schema_of(None))
        self.table = self.dialect.catalog.timeouts_table(name, None)
        self.store = StoreStatements(self.table, self.dialect)
        self.leases = LeaseTable(self.table, self.tables, self.dialect)
        self.locks = LockStatements(self.store, self.dialect, self.leases)
        self.forwarding = self.dialect.forwarding(self.store, self.tables)
        self.queues = QueueStatements(self.tables, self.dialect)
        self.schedules = ScheduleStatements(schedules_table(self.dialect.catalog.schema_of(None)), self.dialect)

    def all(self) -> dict[str, Prepared]:
        owners: list[Any] = [self.store, self.locks, self.leases, self.forwarding, self.queues]
        owners.append(self.schedules)
        return {
            f"{type(owner).__name__}.{name}": value
            for owner in owners
            for name, value in vars(owner).items()
            if isinstance(value, Prepared)
        }


def test_the_table_is_the_documents() -> None:
    # Given the document's columns
    inside = CREATE_TABLE.split("(\n", 1)[1].rsplit(")", 1)[0]
    wanted = {}
    for line in inside.strip().rstrip(")").split(",\n"):
        name, kind, rest = re.fullmatch(r"\s*(\w+) (\w+(?:\(\w+\))?)(.*?)\)?\s*", line.lower()).groups()  # type: ignore[union-attr]
        wanted[name] = (kind, "not null" in rest, "primary key" in rest, "default" in rest)
    # When ours is compiled
    table = Statements().table
    sql = dialect().sql
    found = {
        column.name.lower(): (
            re.sub("^integer$", "int", column.type.compile(dialect=sql).lower()),
            not column.nullable,
            column.primary_key,
            column.server_default is not None,
        )
        for column in table.columns
    }
    # Then they are the same, in the same order
    assert list(found) == list(wanted)
    assert found == wanted


def test_the_script_that_makes_it_can_run_again() -> None:
    made = Statements()
    steps: list[Executable] = [CreateTable(made.table), *map(CreateIndex, made.table.indexes)]
    assert texts(steps, made.dialect) == [
        "IF object_id(N'[dbo].[sales.timeouts]', N'U') IS NULL\n"
        "CREATE TABLE [dbo].[sales.timeouts] (\n"
        "    [Id] NVARCHAR(250) NOT NULL,\n"
        "    [Destination] NVARCHAR(200) NULL,\n"
        "    [State] VARBINARY(max) NULL,\n"
        "    [Time] DATETIME NULL,\n"
        "    [Headers] VARBINARY(max) NOT NULL,\n"
        "    [RetryCount] INTEGER NOT NULL DEFAULT (0),\n"
        "    PRIMARY KEY ([Id])\n)",
        "IF NOT EXISTS (SELECT * FROM sys.indexes WHERE name = N'Index_Time' AND "
        "object_id = object_id(N'[dbo].[sales.timeouts]'))\n"
        "CREATE INDEX [Index_Time] ON [dbo].[sales.timeouts] ([Time])",
    ]


def test_a_name_is_quoted_in_sql_and_in_the_literal_that_asks_for_it() -> None:
    made = Statements(name="it's [odd].timeouts")
    table, index = texts([CreateTable(made.table), *map(CreateIndex, made.table.indexes)], made.dialect)
    assert "object_id(N'[dbo].[it''s [odd]].timeouts]', N'U')" in table
    assert "CREATE TABLE [dbo].[it's [odd]].timeouts] (" in table
    assert "object_id(N'[dbo].[it''s [odd]].timeouts]'))" in index


def test_a_schema_with_a_dot_is_one_name() -> None:
    table = dialect().catalog.timeouts_table("t", "my.own")
    assert "CREATE TABLE [my.own].[t] (" in texts([CreateTable(table)], dialect())[0]


def test_a_claim_has_the_documents_hints() -> None:
    due = plain(Statements().locks.due.sql)
    assert due.startswith("SELECT TOP (?) Id, COALESCE(DATALENGTH(Headers), 0) + COALESCE(DATALENGTH(State), 0)")
    claim = "FROM {0} WITH (READPAST, UPDLOCK, ROWLOCK, READCOMMITTEDLOCK)"
    assert f"{claim} WHERE Time <= CAST(? AS DATETIME) AND NOT (EXISTS" in due
    assert due.endswith(" ORDER BY Time, Id")


def test_the_verbs_are_the_documents() -> None:
    store = Statements().store
    keys = "WHERE Id IN (@keys)"
    assert plain(store.delete.sql) == f"DELETE FROM {{0}} {keys}"  # noqa: S608
    assert plain(store.count_failure.sql) == f"UPDATE {{0}} SET RetryCount=(RetryCount + 1) {keys}"  # noqa: S608
    assert plain(store.next_due.sql) == "SELECT min(Time) AS min_1 FROM {0} WITH (NOLOCK)"
    columns = "(Id, Destination, State, Time, Headers, RetryCount)"
    assert plain(store.insert.sql) == (
        f"INSERT INTO {{0}} {columns} SELECT * FROM (VALUES (?, ?, ?, CAST(? AS DATETIME), ?, ?)) AS new {columns} "  # noqa: S608
        "WHERE NOT EXISTS (SELECT * FROM {0} AS old WHERE old.Id = new.Id "
        "AND old.Id = new.Id COLLATE Latin1_General_100_BIN2 AND DATALENGTH(old.Id) = DATALENGTH(new.Id))"
    )


def test_moving_keeps_the_order_and_takes_a_missing_body_for_an_empty_one() -> None:
    forwarding = Statements().forwarding
    move = plain(forwarding._move.sql)
    assert move.startswith(
        "INSERT INTO dbo.delayline_messages (queue, id, headers, body) SELECT Destination, Id, Headers"
    )
    assert "coalesce(State, 0x)" in move
    assert move.endswith("WHERE Id IN (@keys) ORDER BY Time, Id")
    heads = plain(forwarding._heads.sql)
    assert "WITH (READPAST, UPDLOCK, ROWLOCK, READCOMMITTEDLOCK)" in heads
    assert "dbo.delayline_queues.name = (Destination COLLATE Latin1_General_100_BIN2)" in heads
    assert "charindex('NServiceBus.Timeouts.Properties.', CAST(Headers AS VARCHAR(max))" in heads


@pytest.mark.parametrize("url", ["mssql://sa@host/db", "mssql+pymssql://sa@host/db"])
def test_locked_messages_are_passed_over_and_locked_rows_of_other_tables_are_waited_for(url: str) -> None:
    messages = ("delayline_messages]", "delayline_messages", "sales.timeouts]", "TimeoutData]")
    for name, statement in Statements(url).all().items():
        assert "FOR UPDATE" not in statement.sql
        if not statement.sql.startswith("SELECT"):
            assert "READPAST" not in statement.sql, f"{name}: a row that is locked would stay as it is"
            continue
        tables = re.findall(r"FROM (\S+)(?: WITH \(([A-Z, ]+)\))?", statement.sql)
        for table, hints in tables:
            if table.endswith(messages):
                assert hints, f"{name} would wait for a message that is being moved: {statement.sql}"
            else:
                assert "READPAST" not in hints, f"{name}: a locked row would be taken for a missing one"


def test_a_lock_is_waited_for_unless_locked_rows_are_to_be_skipped() -> None:
    runs = MigrationJournal(dialect(), dialect().catalog.schema_of(None)).runs
    query = select(runs.c.state).where(runs.c.run == "r")
    hints = {
        query: "",
        query.with_for_update(): " WITH (UPDLOCK, ROWLOCK)",
        query.with_for_update(skip_locked=True): " WITH (READPAST, UPDLOCK, ROWLOCK, READCOMMITTEDLOCK)",
    }
    for statement, expected in hints.items():
        text = str(statement.compile(dialect=dialect().sql)).replace("\n", "")
        assert f"delayline_migrations{expected} WHERE" in text


def test_counts_and_forecasts_do_not_wait_for_messages_that_are_moved() -> None:
    store = Statements().store
    counted = str(store.by_due(60_000_000).compile(dialect=dialect().sql))
    assert counted.count("WITH (READPAST, READCOMMITTEDLOCK)") == 1
    forecast = _count(store, 3, by_destination=True).sql
    assert forecast.count("FROM [dbo].[sales.timeouts] WITH (READPAST, READCOMMITTEDLOCK)") == 4


def test_marks_of_the_forecast_are_the_drivers() -> None:
    """`?` is a syntax error with pymssql."""
    for url, mark in (("mssql://sa@host/db", "?"), ("mssql+pymssql://sa@host/db", "%s")):
        asked: list[tuple[str, Sequence[object]]] = []

        class Cursor:
            description = ()

            def execute(self, sql: str, parameters: Sequence[object] = (), asked: list[Any] = asked) -> None:
                asked.append((sql, parameters))

            def fetchall(self) -> list[tuple[int]]:
                return []

            def close(self) -> None: ...

        connection: Any = SimpleNamespace(connection=SimpleNamespace(cursor=Cursor))
        server = SqlServer(make_url(url))
        with pytest.raises(ValueError, match="unpack"):  # this server knows no rows
            server.bulk.estimate_due(connection, server.catalog.timeouts_table("t", None), [])
        for sql, parameters in asked:
            assert sql.count(mark) == len(parameters) > 0


@pytest.mark.parametrize("url", ["mssql://sa@host/db", "mssql+pymssql://sa@host/db"])
def test_statements_return_no_unread_rows(url: str) -> None:
    for name, statement in Statements(url).all().items():
        assert "OUTPUT" not in statement.sql or name == "QueueStatements.delete_returning", name


def test_a_page_begins_where_the_last_one_ended() -> None:
    page = plain(Statements().queues.page.sql)
    in_order = "ORDER BY dbo.delayline_messages.queue, dbo.delayline_messages.seq"
    assert page.endswith(f"{in_order} OFFSET ? ROWS FETCH FIRST ? ROWS ONLY")


def test_the_full_query_does_not_block_the_poller() -> None:
    assert plain(Statements().store.earliest(3).sql).count("WITH (READPAST, READCOMMITTEDLOCK)") == 2


def test_a_migration_asks_which_ids_wait() -> None:
    there = PendingScan("mssql://sa:s3cret@host/db", "sales.timeouts", None, [Condition("id", "in", ["a", "b"])])
    query = there.query(("id", "destination", "due"), Span(None, None)).compile(dialect=dialect().sql)
    asked = re.sub(r"__\[POSTCOMPILE_\w+\]", "@ids", str(query))
    assert plain(asked) == (
        "SELECT Id, Destination, Time FROM {0} WITH (READPAST, READCOMMITTEDLOCK) WHERE Id IN (@ids) ORDER BY Time, Id"
    )


def test_receivers_lock_by_session() -> None:
    # Given the claims of a table; no connection is made before they are used
    from delayline.sql.sqlserver.dialect import ApplicationLocks

    class Nobody:
        def session(self) -> None:
            return None

    sql = ApplicationLocks(Nobody(), "delayline_messages").lock_sql([7, 12])  # type: ignore[arg-type]
    # Then one batch tries for each and answers in one row
    assert sql.startswith("DECLARE @r0 int, @r1 int; EXEC @r0 = sp_getapplock @Resource = N'delayline ")
    assert sql.count("@LockMode = N'Exclusive', @LockOwner = N'Session', @LockTimeout = 0;") == 2
    assert sql.endswith("SELECT @r0, @r1")


def test_the_schema_is_dbo_unless_named() -> None:
    assert dialect().catalog.schema_of(None) == "dbo"
    assert dialect().catalog.schema_of("sales") == "sales"


@pytest.mark.parametrize(
    ("name", "fits"), [("x" * 128, True), ("x" * 129, False), ("🚚" * 64, True), ("🚚" * 65, False)]
)
def test_names_have_128_utf_16_units(name: str, fits: bool) -> None:
    if fits:
        assert dialect().catalog.kept_name(name) == name
    else:
        with pytest.raises(ConfigurationError, match="longer than the 128 characters"):
            dialect().catalog.kept_name(name)


def test_pymssql_would_take_a_name_for_parameters() -> None:
    with pytest.raises(ConfigurationError, match="install mssql-python"):
        dialect("mssql+pymssql://sa@host/db").catalog.kept_name("100%s")
    assert dialect().catalog.kept_name("100%s") == "100%s"


def test_other_drivers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"write mssql://user@host/database"):
        dialect("mssql+pyodbc://sa@host/db")


def test_the_password_is_nowhere() -> None:
    one = dialect("mssql://sa:s3cret@host/db")
    assert str(one) == "SQL Server database sa@host:1433/db"
    assert "s3cret" not in f"{one.connections.identity}"


def test_a_search_reads_the_beginning_of_a_body_and_counts_its_bytes() -> None:
    made = Statements()
    found = plain(str(made.store.found(100).compile(dialect=made.dialect.sql)))
    assert found.startswith(
        "SELECT Id, Destination, Time, Headers, SUBSTRING(State, 1, 100) AS body, RetryCount, "
        "COALESCE(DATALENGTH(State), 0) AS size FROM {0}"
    )
