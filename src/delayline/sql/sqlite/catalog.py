"""The tables of an SQLite file: set-up, checks, and what `doctor` finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from delayline.errors import ConfigurationError
from delayline.sql import journal_triggers
from delayline.sql.dialect import Catalog, TableIdentity
from delayline.sql.schema import must_fit, timeouts_table
from delayline.sql.setup import ReplaceKey
from delayline.sql.sqlite.errors import file_identity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection, Executable, Table

    from delayline.sql.dialect import Finding

LONGEST_SQLITE_NAME: Final = 1000  # bytes; SQLite itself has no such limit
#: SQLite's levels; below FULL a commit may be lost with the power.
SYNCHRONOUS: Final = {0: "OFF", 1: "NORMAL", 2: "FULL", 3: "EXTRA"}


class SqliteCatalog(Catalog):
    """The tables of an SQLite file."""

    journal: ClassVar[journal_triggers.JournalTriggers] = journal_triggers.SQLITE

    def identify(self, connection: Connection, table: Table, known: TableIdentity | None = None) -> TableIdentity:
        """Return the main file, whatever its path is called."""
        del known
        cursor = connection.connection.cursor()
        cursor.execute("PRAGMA database_list")
        file = next((path for _, name, path in cursor.fetchall() if name == "main"), "")
        cursor.close()
        return TableIdentity(
            f"SQLite file {file}" if file else "SQLite in memory", file and file_identity(file), table.name
        )

    def missing_rights(self, connection: Connection, needed: Mapping[Table, Sequence[str]]) -> list[str]:
        """Return nothing: SQLite has no rights on tables."""
        del connection, needed
        return []

    def kept_name(self, table: str) -> str:
        """Return the name as it is."""
        must_fit(table, len(table.encode()), LONGEST_SQLITE_NAME, "bytes", "SQLite")
        if table.casefold().startswith("sqlite_"):  # https://sqlite.org/lang_createtable.html
            raise ConfigurationError(
                f"SQLite reserves names that begin with 'sqlite_', and the table would be {table!r}: "
                "name the endpoint, or table_name=, otherwise"
            )
        return table

    def schema_of(self, schema: str | None) -> str | None:
        """Return the schema, which can only be the file itself: delayline attaches no other."""
        if schema not in (None, "main"):
            raise ConfigurationError(
                f"schema={schema!r}: SQLite has no schemas. Leave it out, or use a separate file for these tables"
            )
        return schema

    def timeouts_table(self, name: str, schema: str | None) -> Table:
        """Return the logical table."""
        return timeouts_table(name, schema)

    def make(self, connection: Connection, step: Executable) -> None:
        """Run the statement."""
        for statement in step.rebuild() if isinstance(step, ReplaceKey) else [step]:
            connection.execute(statement)

    def findings(self, connection: Connection) -> list[Finding]:
        """Return how durable the file is."""
        journal = connection.exec_driver_sql("PRAGMA journal_mode").scalar()
        level = SYNCHRONOUS.get(connection.exec_driver_sql("PRAGMA synchronous").scalar() or 0, "unknown")
        durable = level in {"FULL", "EXTRA"}
        return [
            ("journal mode", journal == "wal", f"{journal}"),
            ("synchronous", durable, f"{level}{'' if durable else ': a power cut can lose messages'}"),
            ("clock", True, "this machine's own; SQLite has none that could differ"),
        ]
