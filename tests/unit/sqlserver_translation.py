"""A connection that runs delayline's statements for SQL Server on SQLite, after a translation: no server runs here."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from typing import TYPE_CHECKING, Any, Final, Self

from mssql_python.exceptions import IntegrityError
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import IteratorResult, make_url
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.schema import CreateTable

from delayline.sql.sqlserver.dialect import SqlServer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from sqlalchemy import Executable, Table

STORE: Final = """
CREATE TABLE [sales.timeouts] ([Id] TEXT PRIMARY KEY, [Destination], [State], [Time], [Headers], [RetryCount]);
CREATE TABLE delayline_leases (store, id, until);
"""
#: What SQLite writes in another way.
WORDS: Final = {
    r"\[dbo\]\.": "",
    r"CAST\(\? AS DATETIME\)": "?",
    r" COLLATE Latin1_General_100_BIN2": "",
    " WITH \\(UPDLOCK, ROWLOCK\\)": "",
    "DATALENGTH": "length",
    r"DATEADD\(second, (-?\d+), SYSUTCDATETIME\(\)\)": r"datetime('now', '\1 seconds')",
    r"SYSUTCDATETIME\(\)": "datetime('now')",
    "SAVE TRANSACTION": "SAVEPOINT",
    "ROLLBACK TRANSACTION": "ROLLBACK TO",
}
NEW_ROW: Final = re.compile(r"\(VALUES \(([?, ]+)\)\) AS new \(([^)]+)\)")


def dialect() -> SqlServer:
    return SqlServer(make_url("mssql://sa:s3cret@host/db"))


class TranslatedCursor(sqlite3.Cursor):
    """A cursor whose statements are in the words of SQL Server, and its errors those of the driver."""

    def execute(self, sql: str, values: Any = ()) -> Self:  # noqa: ANN401 - what SQLite takes
        """Run a statement."""
        with violations():
            return super().execute(translated(sql), values)

    def executemany(self, sql: str, rows: Any) -> Self:  # noqa: ANN401 - what SQLite takes
        """Run a statement for each row."""
        with violations():
            return super().executemany(translated(sql), rows)


@contextlib.contextmanager
def violations() -> Iterator[None]:
    """Raise the driver's error for a key that is there already."""
    try:
        yield
    except sqlite3.IntegrityError as error:
        if "UNIQUE" not in str(error):
            raise
        raise IntegrityError("", f"Violation of PRIMARY KEY constraint: {error}") from error


class Translated:
    """A connection to the store of `sales`, and to other tables."""

    def __init__(self, tables: Iterable[Table] = ()) -> None:
        self.database = sqlite3.connect(":memory:", isolation_level=None)
        self.database.executescript(STORE)
        for table in tables:
            self.database.execute(str(CreateTable(table).compile(dialect=sqlite.dialect())).replace('"dbo".', ""))
        self.info: dict[str, Any] = {"savepoints": 0}
        self._sql: Any = dialect().sql

    @property
    def connection(self) -> Translated:
        return self

    def cursor(self) -> Any:  # noqa: ANN401 - SQLite's, translating
        return self.database.cursor(TranslatedCursor)

    def execute(self, statement: Executable, rows: Sequence[Mapping[str, Any]] = ()) -> IteratorResult[Any]:
        """Run a statement of SQLAlchemy, as SQL Server's words have it, for each row if there are some."""
        names = list(rows[0]) if rows else None
        compiled = statement.compile(dialect=self._sql, column_keys=names, compile_kwargs={"render_postcompile": True})  # type: ignore[attr-defined]
        cursor = self.cursor()
        for values in [compiled.construct_params(row) for row in rows] or [compiled.params]:
            cursor.execute(str(compiled), [values[name] for name in compiled.positiontup])
        shown = [column[0] for column in cursor.description or ()]
        return IteratorResult(SimpleResultMetaData(shown), iter(map(tuple, cursor.fetchall())))

    def rows(self) -> dict[str, tuple[Any, ...]]:
        """Return the store's rows by id."""
        found = self.database.execute("SELECT [Id], [Destination], [Headers], [State] FROM [sales.timeouts]")
        return {row[0]: row[1:] for row in found}


def translated(sql: str) -> str:
    """Return SQLite's words."""
    for words, other in WORDS.items():
        sql = re.sub(words, other, sql)

    def as_select(match: re.Match[str]) -> str:
        pairs = zip(match[1].split(", "), match[2].split(", "), strict=True)
        return f"(SELECT {', '.join(f'{value} AS {name}' for value, name in pairs)}) AS new"

    return NEW_ROW.sub(as_select, sql)
