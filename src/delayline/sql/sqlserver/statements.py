"""SQL for SQL Server: hints where other servers have clauses, TOP where they have LIMIT, and due times in steps."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import SelectBase, String, Table, TypeDecorator, cast
from sqlalchemy.dialects import mssql
from sqlalchemy.dialects.mssql.base import MSDDLCompiler, MSSQLCompiler
from sqlalchemy.sql.compiler import SQLCompiler

from delayline.errors import InvalidDueTime
from delayline.sql.schema import BINARY, HOLDS_MESSAGES

if TYPE_CHECKING:
    from sqlalchemy import BindParameter, Column, ColumnElement, FromClause, Index, Insert, Select
    from sqlalchemy.schema import CreateIndex, CreateTable
    from sqlalchemy.sql.selectable import GenerativeSelect

#: NServiceBus' hints for claiming rows: skip locked rows, and lock the rows that are read. Databases with snapshot
#: isolation, as on Azure, take READPAST beside the last hint only.
CLAIM: Final = "WITH (READPAST, UPDLOCK, ROWLOCK, READCOMMITTEDLOCK)"
#: Hints for locking rows, after waiting for locked rows.
LOCK: Final = "WITH (UPDLOCK, ROWLOCK)"
#: Hints for locking rows that others may lock so too, and nobody may change.
SHARE: Final = "WITH (REPEATABLEREAD, ROWLOCK)"
#: Hints for reading messages: locked messages are being moved or handled, and are passed over.
LOOK: Final = "WITH (READPAST, READCOMMITTEDLOCK)"
#: The option of an insert that leaves a row with the same key as it is; it names the key's columns.
NEW_ROWS_OPTION: Final = "delayline_new"

EARLIEST: Final = datetime(1753, 1, 1, tzinfo=UTC)
LATEST: Final = datetime(9999, 12, 31, 23, 59, 59, 997_000, tzinfo=UTC)
CENTISECOND: Final = 10_000  # microseconds
#: How `datetime` rounds hundredths of a second: it counts in 1/300 s.
STEPS: Final = (0, 3_000, 7_000)


def rounded_up(due: datetime) -> datetime:
    """Return the first instant that `datetime` can keep and that is not before `due`. Raises InvalidDueTime."""
    if not EARLIEST <= due <= LATEST:
        raise InvalidDueTime(
            f"SQL Server keeps due times from {EARLIEST:%Y-%m-%d} to {LATEST.isoformat(' ')}, not {due.isoformat(' ')}"
        )
    start, rest = _centisecond(due)
    return start + timedelta(microseconds=next((step for step in STEPS if step >= rest), CENTISECOND))


def rounded_down(at: datetime) -> datetime:
    """Return the last instant that `datetime` can keep and that is not after `at`, as far as it reaches."""
    start, rest = _centisecond(min(max(at, EARLIEST), LATEST))
    return start + timedelta(microseconds=max(step for step in STEPS if step <= rest))


def _centisecond(instant: datetime) -> tuple[datetime, int]:
    instant = instant.astimezone(UTC)
    rest = instant.microsecond % CENTISECOND
    return instant - timedelta(microseconds=rest), rest


class DueTime(TypeDecorator[datetime]):
    """`datetime`, also for compared values: the server would compare datetime2 with more digits than it stores."""

    impl: type[mssql.DATETIME] = mssql.DATETIME
    cache_ok: bool | None = True

    def bind_expression(self, bindvalue: BindParameter[datetime]) -> ColumnElement[datetime]:
        """Return the parameter as the column's own type."""
        return cast(bindvalue, mssql.DATETIME())


class HintedSql(MSSQLCompiler):
    """Locks by hints: FOR UPDATE locks rows, with SKIP LOCKED free rows; reading messages skips locked messages.

    Other tables are read without a hint: there a missing row means that there is none.
    """

    def visit_select(self, select_stmt: Select[Any], *arguments: Any, **options: Any) -> str:  # noqa: ANN401
        """Add the hints, unless the query has some."""
        for table in () if select_stmt._hints else select_stmt.get_final_froms():
            if isinstance(table, Table) and (hints := self._hints_for(table, select_stmt)):
                select_stmt = select_stmt.with_hint(table, hints)
        parent: Any = super()
        return str(parent.visit_select(select_stmt, *arguments, **options))

    def _hints_for(self, table: Table, query: Select[Any]) -> str | None:
        locking = query._for_update_arg
        if locking is not None:
            return SHARE if locking.read else CLAIM if locking.skip_locked else LOCK
        only_reads = isinstance(self.statement, SelectBase)
        return LOOK if only_reads and HOLDS_MESSAGES in table.info else None

    def get_select_precolumns(self, select: Select[Any], **options: Any) -> str:  # noqa: ANN401
        """Write a limit as TOP, which takes a parameter in parentheses."""
        columns = SQLCompiler.get_select_precolumns(self, select, **options)
        if select._limit_clause is not None and self._use_top(select):
            columns += f"TOP ({self.process(select._limit_clause, **options)}) "
        return columns

    def order_by_clause(self, select: Select[Any], **options: Any) -> str:  # noqa: ANN401
        """Keep the order of rows that are inserted: numbers are given in it. In subqueries it means nothing."""
        if self.isinsert and len(self.stack) == 2:
            plain: Any = SQLCompiler.order_by_clause
            return str(plain(self, select, **options))
        parent: Any = super()
        return str(parent.order_by_clause(select, **options))

    def visit_insert(self, insert_stmt: Insert, *arguments: Any, **options: Any) -> str:  # noqa: ANN401
        """Compile `insert_new`: insert rows whose key, character for character, no row has."""
        parent: Any = super()
        statement = str(parent.visit_insert(insert_stmt, *arguments, **options))
        keys = insert_stmt.get_execution_options().get(NEW_ROWS_OPTION)
        if keys is None:
            return statement
        table = self.preparer.format_table(insert_stmt.table)
        start = statement.index("(", len("INSERT INTO ") + len(table))
        end = statement.index(") VALUES (", start)
        columns, values = statement[start + 1 : end], statement[end + len(") ") :]
        columns_of_key = [insert_stmt.table.c[key] for key in keys]
        same = " AND ".join(_same(self.preparer.quote(column.name), column) for column in columns_of_key)
        existing = f"SELECT * FROM {table} AS old WHERE {same}"  # noqa: S608 - quoted names
        return (
            f"{statement[:start]}({columns}) SELECT * FROM ({values}) AS new ({columns}) WHERE NOT EXISTS ({existing})"  # noqa: S608
        )

    def visit_length_func(self, fn: Any, **kw: Any) -> str:  # noqa: ANN401
        """Count bytes; LEN would count characters, and leave out blanks at the end. NULL has none."""
        return f"COALESCE(DATALENGTH({self.process(next(iter(fn.clauses)), **kw)}), 0)"

    def visit_substr_func(self, fn: Any, **kw: Any) -> str:  # noqa: ANN401
        """Use its other name."""
        return f"SUBSTRING{self.function_argspec(fn, **kw)}"

    def _use_top(self, select: GenerativeSelect) -> bool:
        return select._limit_clause is not None and select._offset_clause is None


def _same(name: str, column: Column[Any]) -> str:
    """Return the condition, for which the server can use the key's index, that a value is the same, to the byte."""
    if not isinstance(column.type, String):
        return f"old.{name} = new.{name}"
    exactly = f"old.{name} = new.{name} COLLATE {BINARY} AND DATALENGTH(old.{name}) = DATALENGTH(new.{name})"
    return f"old.{name} = new.{name} AND {exactly}"


class IdempotentDdl(MSDDLCompiler):
    """CREATE TABLE that ignores an existing table, as NServiceBus' script."""

    def visit_create_table(self, create: CreateTable, **options: Any) -> str:  # noqa: ANN401
        """Create the table unless it exists."""
        parent: Any = super()
        statement = str(parent.visit_create_table(create, **options)).strip()
        return f"IF object_id({self._literal(create.element)}, N'U') IS NULL\n{statement}"

    def visit_create_index(self, create: CreateIndex, *arguments: Any, **options: Any) -> str:  # noqa: ANN401
        """Create the index unless the table has an index of that name."""
        parent: Any = super()
        statement = parent.visit_create_index(create, *arguments, **options)
        index: Index = create.element
        name = str(index.name).replace("'", "''")
        table = self._literal(index.table)
        existing = f"SELECT * FROM sys.indexes WHERE name = N'{name}' AND object_id = object_id({table})"  # noqa: S608
        return f"IF NOT EXISTS ({existing})\n{statement}"

    def _literal(self, table: FromClause | None) -> str:
        """Return the table's quoted name as a string literal."""
        name = "" if table is None else self.preparer.format_table(table)
        return "N'" + name.replace("'", "''") + "'"
