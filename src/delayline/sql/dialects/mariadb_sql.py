"""SQL for MariaDB and MySQL that forces an index on locking reads.

InnoDB locks every row that it scans. On a small table the optimizer prefers a full scan, which waits for rows locked by
other transactions, or locks all rows where a few are wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import BinaryExpression, Table, UniqueConstraint
from sqlalchemy.dialects.mysql.base import MySQLCompiler
from sqlalchemy.sql.operators import in_op
from sqlalchemy.sql.visitors import iterate

if TYPE_CHECKING:
    from sqlalchemy import Delete, FromClause, Select, Update
    from sqlalchemy.sql.dml import _DMLTableElement


class IndexedSql(MySQLCompiler):
    """Forces an index wherever rows are locked."""

    def visit_select(self, select_stmt: Select[Any], *arguments: object, **options: object) -> str:
        """Force an index in SELECT ... FOR UPDATE."""
        if select_stmt._for_update_arg is not None:
            for table in select_stmt.get_final_froms():
                hint = self._by_index(table).strip().replace("%", "%%")  # hints are templates
                select_stmt = select_stmt.with_hint(table, hint)
        text: str = super().visit_select(select_stmt, *arguments, **options)  # type: ignore[no-untyped-call]
        return text

    def update_tables_clause(
        self, update_stmt: Update, from_table: _DMLTableElement, extra_froms: list[FromClause], **options: object
    ) -> str:
        """Force an index in UPDATE."""
        return super().update_tables_clause(update_stmt, from_table, extra_froms, **options) + self._by_index(
            from_table
        )

    def visit_delete(self, delete_stmt: Delete, *arguments: object, **options: object) -> str:
        """Go through a list in the order it has, and delete each row by its index.

        With as many ids in the list as there are rows left, the optimizer would read the table, whichever index is
        forced: pollers would wait for each other's rows, and deadlock.
        """
        table, where = delete_stmt.table, delete_stmt.whereclause
        if not (isinstance(table, Table) and isinstance(where, BinaryExpression) and where.operator is in_op):
            text: str = super().visit_delete(delete_stmt, *arguments, **options)  # type: ignore[no-untyped-call]
            return text
        name, column = self.preparer.format_table(table), where.left
        kind = self.dialect.type_compiler_instance.process(column.type)
        listed = f"JSON_TABLE(JSON_ARRAY{self.process(where.right)}, '$[*]' COLUMNS (one {kind} PATH '$')) AS listed"
        joined = f"{name}{self._by_index(table)} ON {self.process(column)} = listed.one"
        return f"DELETE {name} FROM {listed} STRAIGHT_JOIN {joined}"

    def delete_table_clause(
        self, delete_stmt: Delete, from_table: _DMLTableElement, extra_froms: list[FromClause], **options: object
    ) -> str:
        """Force an index in DELETE, whose form for several tables allows it, unless rows go by their number.

        The optimizer takes the primary key for the table itself: forced to use it, it reads all of it.
        """
        name = super().delete_table_clause(delete_stmt, from_table, extra_froms, **options)
        key = list(from_table.primary_key) if isinstance(from_table, Table) else []
        if delete_stmt.whereclause is None or any(one in key for one in iterate(delete_stmt.whereclause)):
            return name
        return f"{name} USING {name}{self._by_index(from_table)}"

    def _by_index(self, table: object) -> str:
        if not isinstance(table, Table):
            return ""
        unique = [next(iter(one.columns)).name for one in table.constraints if isinstance(one, UniqueConstraint)]
        names = ["PRIMARY", *sorted(unique), *sorted(str(index.name) for index in table.indexes)]
        return f" FORCE INDEX ({', '.join(map(self.preparer.quote, names))})"
