"""The tables of a PostgreSQL database: set-up, checks, rights, and what `doctor` finds."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar, Final

from sqlalchemy.schema import CreateTable

from delayline.errors import BackendUnusable
from delayline.sql import journal_triggers
from delayline.sql.dialect import Catalog, TableIdentity
from delayline.sql.postgresql import citus, numbers, rights
from delayline.sql.schema import must_fit
from delayline.sql.server import run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sqlalchemy import Connection, Executable, Table

    from delayline.sql.dialect import Finding
    from delayline.sql.postgresql.dialect import Postgresql
    from delayline.sql.schema import QueueTables

LONGEST_POSTGRESQL_NAME: Final = 63  # bytes of UTF-8
SETUP_LOCK: Final = 0x64656C61796C696E  # "delaylin"
#: The isolation level of delayline's own transactions.
USUAL: Final = "read committed"
#: A copy of a server has its identifier, but was not started at the same microsecond.
SERVER_IDENTITY: Final = """
SELECT current_database(), to_regclass(%s)::oid::bigint, d.oid::text, c.system_identifier::text,
  extract(epoch FROM pg_postmaster_start_time())::text
FROM pg_database AS d, pg_control_system() AS c WHERE d.datname = current_database()
"""


TABLE: Final = "SELECT to_regclass(%s)::oid::bigint"
FINDINGS: Final = """
SELECT current_setting('server_version'), current_setting('synchronous_commit'), now(),
  (SELECT reset_val FROM pg_settings WHERE name = 'default_transaction_isolation')
"""
OF_OTHERS: Final = (
    f": delayline's own transactions are {USUAL} all the same; yours, as in context.transaction(), may be given up in "
    "favour of others and have to be repeated"
)
#: Citus' list of tables that it has distributed, reference tables included.
LIST_OF_DISTRIBUTED: Final = "SELECT to_regclass('pg_dist_partition') IS NOT NULL"
DISTRIBUTED_TABLE: Final = "SELECT logicalrelid::text FROM pg_dist_partition WHERE logicalrelid = to_regclass(%s)"
OF_SCHEMAS: Final = """
SELECT logicalrelid::text FROM pg_dist_partition JOIN pg_class AS c ON c.oid = logicalrelid
WHERE c.relname LIKE 'delayline\\_%%' OR EXISTS (
  SELECT FROM pg_attribute AS a WHERE a.attrelid = c.oid AND a.attname = 'seq' AND EXISTS (
    SELECT FROM pg_class AS q WHERE q.relnamespace = c.relnamespace AND q.relname = 'delayline_messages'))
ORDER BY 1
"""
DISTRIBUTED: Final = (
    "{place} has distributed {tables} over several servers, as Citus does: claims would exclude nobody there, and "
    "notifications arrive nowhere. Keep delayline's tables local (SELECT undistribute_table(...)), name a server that "
    "is not distributed or, if a whole schema is distributed, add ?citus_schema=NAME to the URL of the coordinator"
)


def distributed(connection: Connection, query: str, *values: str) -> list[str]:
    """Return the distributed tables that a query of Citus' list finds; none where there is no such list."""
    if not run(connection, LIST_OF_DISTRIBUTED)[0][0]:
        return []
    return [name for (name,) in run(connection, query, *values)]


class PostgresqlCatalog(Catalog):
    """The tables of a PostgreSQL database."""

    journal: ClassVar[journal_triggers.JournalTriggers] = journal_triggers.POSTGRESQL
    folds_column_case = False

    def __init__(self, dialect: Postgresql) -> None:
        self._dialect = dialect

    def kept_name(self, table: str) -> str:
        """Return the name as it is."""
        must_fit(table, len(table.encode()), LONGEST_POSTGRESQL_NAME, "bytes", self._dialect)
        return table

    def further_tables(self, tables: QueueTables) -> Sequence[Table]:
        """Return the table of sleeping pollers, which NOTIFY uses."""
        return (tables.sleeping,)

    def mending(self, connection: Connection, table: Table) -> Sequence[Executable]:
        """Return the statements that set sequences behind their rows: replication does not copy sequences.

        Raises BackendUnusable for a table that Citus has distributed, unless the URL names its schema.
        """
        name = self._dialect.sql.identifier_preparer.format_table(table).replace(
            "%%", "%"
        )  # a value, no part of a statement
        owned = self._dialect.connections.owned
        if owned is not None:
            owned.check_table(connection, name)
            return citus.logged(connection, name)
        if distributed(connection, DISTRIBUTED_TABLE, name):
            raise BackendUnusable(DISTRIBUTED.format(place=self._dialect, tables=repr(table.name)))
        return numbers.catching_up(connection, name)

    def make(self, connection: Connection, step: Executable) -> None:
        """Run a DDL statement; in a schema of Citus every table is logged, as only those can be moved."""
        if self._dialect.connections.owned is not None and isinstance(step, CreateTable):
            step = CreateTable(citus.logged_copy(step.element))
        super().make(connection, step)

    @contextlib.contextmanager
    def setting_up(self, connection: Connection) -> Iterator[None]:
        """Let a single process at a time create tables: IF NOT EXISTS alone still collides in the catalogs."""
        run(connection, f"SET LOCAL lock_timeout = '{round(self._dialect.connections.setup_patience * 1000)}'")
        run(connection, "SELECT pg_advisory_xact_lock(%s)", SETUP_LOCK)
        yield

    def missing_rights(self, connection: Connection, needed: Mapping[Table, Sequence[str]]) -> list[str]:
        """Return the GRANT statements for missing rights on existing tables."""
        return rights.missing_rights(connection, needed)

    def findings(self, connection: Connection) -> list[Finding]:
        """Return the version, how durable a commit is, and how far this machine's clock is off."""
        version, durable, now, isolation = run(connection, FINDINGS)[0]
        off = (datetime.now(UTC) - now).total_seconds()
        return [
            ("server", True, f"PostgreSQL {version}"),
            ("synchronous_commit", durable != "off", f"{durable}"),
            ("default_transaction_isolation", True, isolation + ("" if isolation == USUAL else OF_OTHERS)),
            numbers.numbers_finding(connection),
            *self._distributed_findings(connection),
            ("clock", abs(off) < 1, f"this machine is {off:+.3f} s off; the server's clock decides"),
        ]

    def identify(self, connection: Connection, table: Table, known: TableIdentity | None = None) -> TableIdentity:
        """Return the server, the database, which stay, and the table that the search path leads to."""
        if known is not None:
            return known._replace(table=run(connection, TABLE, self._value_of(table))[0][0])
        database, relation, *server = run(connection, SERVER_IDENTITY, self._value_of(table))[0]
        return TableIdentity(f"PostgreSQL database {database}", tuple(server), relation)

    def _value_of(self, table: Table) -> str:
        """Return the table's name as a value, no part of a statement."""
        return self._dialect.sql.identifier_preparer.format_table(table).replace("%%", "%")

    def _distributed_findings(self, connection: Connection) -> list[Finding]:
        owned = self._dialect.connections.owned
        if owned is not None:
            return owned.findings(connection)
        names = ", ".join(distributed(connection, OF_SCHEMAS))
        return [("distributed tables", False, DISTRIBUTED.format(place=self._dialect, tables=names))] if names else []
