"""The tables of an SQL Server database: set-up, checks, rights, and what `doctor` finds."""

from __future__ import annotations

import contextlib
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn

from sqlalchemy import Column, Index, Integer, MetaData, Table
from sqlalchemy import text as text_of_sql
from sqlalchemy.dialects import mssql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import quoted_name

from delayline.delayed.columns import STORED_COLUMNS, ColumnKind, PublishedColumn
from delayline.errors import BackendUnavailable, BackendUnusable, ConfigurationError
from delayline.sql import journal_triggers
from delayline.sql.dialect import Catalog
from delayline.sql.schema import CONTENT, HOLDS_MESSAGES, must_fit
from delayline.sql.server import run
from delayline.sql.sqlserver.errors import ALREADY_THERE, number_of
from delayline.sql.sqlserver.statements import DueTime

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sqlalchemy import Connection, Executable
    from sqlalchemy.types import TypeEngine

    from delayline.delayed.columns import StoredColumn
    from delayline.sql.dialect import Finding, TableIdentity
    from delayline.sql.schema import QueueTables
    from delayline.sql.sqlserver.dialect import SqlServer

DEFAULT_SCHEMA: Final = "dbo"
LONGEST_SQL_SERVER_NAME: Final = 128  # UTF-16 units
HAS_RIGHT: Final = "SELECT HAS_PERMS_BY_NAME({mark}, N'OBJECT', {mark})"  # NULL if the user lacks the right to see it
UNSEEN: Final = " -- if there is no such table, run `delayline setup` instead"
TAKE_SETUP_LOCK: Final = (
    "DECLARE @result int; EXEC @result = sp_getapplock @Resource = N'delayline setup', @LockMode = N'Exclusive', "
    "@LockOwner = N'Transaction', @LockTimeout = 60000; SELECT @result"
)
ABOUT: Final = (
    "SELECT CAST(SERVERPROPERTY('ProductVersion') AS nvarchar(128)), CAST(SERVERPROPERTY('Edition') AS nvarchar(128)), "
    "delayed_durability_desc, is_read_committed_snapshot_on, collation_name, SYSUTCDATETIME() "
    "FROM sys.databases WHERE name = DB_NAME()"  # its id there is not DB_ID() on Azure SQL Database
)


class SqlServerCatalog(Catalog):
    """The tables of an SQL Server database."""

    journal: ClassVar[journal_triggers.JournalTriggers] = journal_triggers.SQL_SERVER

    def __init__(self, dialect: SqlServer) -> None:
        self._dialect = dialect

    def missing_rights(self, connection: Connection, needed: Mapping[Table, Sequence[str]]) -> list[str]:
        """Return the GRANT statements for missing rights on tables.

        A table on which the user has no right at all looks like a missing table; it is counted if other tables are
        visible.
        """
        missing: dict[Table, tuple[list[str], bool]] = {}
        for table, needs in needed.items():
            name = self._dialect.sql.identifier_preparer.format_table(table)
            granted = [
                run(connection, HAS_RIGHT.format(mark=self._dialect.connections.mark), name, need)[0][0]
                for need in needs
            ]
            missing[table] = [need for need, has in zip(needs, granted, strict=True) if not has], None in granted
        if all(unseen for _, unseen in missing.values()):
            return []
        user = self._dialect.sql.identifier_preparer.quote_identifier(run(connection, "SELECT USER_NAME()")[0][0])
        return [
            f"GRANT {', '.join(lacking)} ON {self._dialect.sql.identifier_preparer.format_table(table)} TO {user};"
            + (UNSEEN if unseen else "")
            for table, (lacking, unseen) in missing.items()
            if lacking
        ]

    def identify(self, connection: Connection, table: Table, known: TableIdentity | None = None) -> NoReturn:
        """Raise ConfigurationError: this product cannot limit a statement."""
        raise ConfigurationError(
            f"{self._dialect} cannot take part in an external transaction yet: send without transaction="
        )

    def findings(self, connection: Connection) -> list[Finding]:
        """Return the version, the driver, how durable commits are, which ids are equal, how far this clock is off."""
        version, edition, durability, snapshot, collation, now = run(connection, ABOUT)[0]
        off = (datetime.now(UTC) - self._dialect.values.from_due(now)).total_seconds()
        return [
            ("server", True, f"SQL Server {version} {edition}"),
            ("driver", True, "pymssql" if self._dialect.connections.uses_pymssql else "mssql-python"),
            ("delayed durability", durability != "FORCED", f"{durability}: commits are {_durable(durability)}"),
            ("read committed snapshot", True, "on" if snapshot else "off"),
            ("collation", True, f"{collation}: ids that it takes for equal cannot wait at the same time"),
            ("clock", abs(off) < 1, f"this machine is {off:+.3f} s off; the server's clock decides"),
        ]

    def schema_of(self, schema: str | None) -> str:
        """Return the schema, `dbo` where none is named; quoted, as a dot in it means nothing."""
        schema = schema or DEFAULT_SCHEMA
        if _units(schema) > LONGEST_SQL_SERVER_NAME:
            raise ConfigurationError(
                f"schema={schema!r} is longer than the {LONGEST_SQL_SERVER_NAME} characters of {self._dialect}"
            )
        return quoted_name(schema, quote=True)

    def kept_name(self, table: str) -> str:
        """Return the name as it is; raises ConfigurationError also for a name that pymssql would misread."""
        must_fit(table, _units(table), LONGEST_SQL_SERVER_NAME, "characters", self._dialect)
        if self._dialect.connections.uses_pymssql and re.search(r"%[sd(]", table):
            raise ConfigurationError(
                f"pymssql would take a part of the table name {table!r} for a parameter: install mssql-python, "
                "or give the store a table_name"
            )
        return table

    def timeouts_table(self, name: str, schema: str | None) -> Table:
        """Return the document's table, which a .NET endpoint may share."""
        return Table(
            quoted_name(name, quote=True),
            MetaData(schema=self.schema_of(schema)),
            *map(_published, sorted(STORED_COLUMNS, key=_position)),
            Index("Index_Time", "due"),
            info={HOLDS_MESSAGES: True},
        )

    def further_tables(self, tables: QueueTables) -> Sequence[Table]:
        """Return the table of leases: .NET's table of a store has no column for them."""
        return (tables.leases,)

    @contextlib.contextmanager
    def setting_up(self, connection: Connection) -> Iterator[None]:
        """Let a single process at a time create tables."""
        if only_row(connection, TAKE_SETUP_LOCK)[0] < 0:
            raise BackendUnusable(f"another process has been setting up {self._dialect} for a minute: try again")
        yield

    def make(self, connection: Connection, step: Executable) -> None:
        """Run the statement; a .NET endpoint that sets up at the same moment does not ask for our lock."""
        try:
            connection.execute(step)
        except DBAPIError as error:
            if number_of(error) not in ALREADY_THERE:
                raise


def _position(column: StoredColumn) -> int:
    """Return where the column stands in the document's table: our own stand behind."""
    return len(STORED_COLUMNS) if column.published is None else column.published.position


def _published(column: StoredColumn) -> Column[Any]:
    """Return the column as the document has it."""
    published = column.published or PublishedColumn(0)
    types: Mapping[ColumnKind, TypeEngine[Any]] = {
        ColumnKind.NAME: mssql.NVARCHAR(column.length),
        ColumnKind.INSTANT: DueTime(),
        ColumnKind.HEADERS: CONTENT,
        ColumnKind.BYTES: CONTENT,
        ColumnKind.COUNT: Integer(),
    }
    counts = column.kind is ColumnKind.COUNT and not published.nullable
    return Column(
        column.published_name,
        types[column.kind],
        key=column.name,
        primary_key=column.name == "id",
        nullable=published.nullable,
        server_default=text_of_sql("(0)") if counts else None,
    )


def _units(name: str) -> int:
    return len(name.encode("utf-16-le", "surrogatepass")) // 2


def _durable(setting: str) -> str:
    return "lost with the server: set it to DISABLED or ALLOWED" if setting == "FORCED" else "durable"


def only_row(connection: Connection, batch: str) -> tuple[Any, ...]:
    """Run the statements and return the row of the only statement that gives rows; others give counts, or nothing.

    Raises BackendUnavailable where the server gives none.
    """
    cursor: Any = connection.connection.cursor()
    cursor.execute(batch)
    rows: list[Any] = []
    while True:
        if cursor.description:
            rows += cursor.fetchall()
        if not cursor.nextset():  # an error of a later statement is raised here
            break
    cursor.close()
    if len(rows) != 1:
        raise BackendUnavailable(f"SQL Server gave {len(rows)} rows instead of one for: {batch[:200]}")
    return tuple(rows[0])
