"""Row numbers in PostgreSQL: logical replication copies rows, and not the sequences that number them.

After a cutover, as of a blue/green deployment or an upgrade, identities begin again at 1, behind rows that are there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import cast, column, func, literal, select
from sqlalchemy import table as table_named
from sqlalchemy.dialects.postgresql import REGCLASS

from delayline.sql.server import run

if TYPE_CHECKING:
    from sqlalchemy import Connection, Executable, Function

    from delayline.sql.dialect import Finding

#: A number that no row has got yet is NULL, as is a number that this user may not see.
SEQUENCES: Final = """
SELECT s.seqrelid::regclass::text, n.nspname, c.relname, a.attname,
  CASE WHEN has_sequence_privilege(s.seqrelid, 'USAGE, SELECT')
    THEN coalesce(pg_sequence_last_value(s.seqrelid), s.seqstart - 1) END
FROM pg_sequence AS s
JOIN pg_depend AS d ON d.objid = s.seqrelid AND d.classid = 'pg_class'::regclass
  AND d.refclassid = 'pg_class'::regclass AND d.deptype IN ('a', 'i') AND d.refobjsubid > 0
JOIN pg_class AS c ON c.oid = d.refobjid
JOIN pg_namespace AS n ON n.oid = c.relnamespace
JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = d.refobjsubid
WHERE a.attname = 'seq' AND has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')
"""
OF_TABLE: Final = f"{SEQUENCES} AND c.oid = to_regclass(%s)"
#: Queues, journals and stores, whatever their names are.
OF_DELAYLINE: Final = f"""{SEQUENCES} AND s.seqincrement > 0 AND EXISTS (
  SELECT FROM pg_class AS q WHERE q.relnamespace = n.oid AND q.relname = 'delayline_messages')
ORDER BY n.nspname, c.relname
"""


class NumberedTable(NamedTuple):
    """A table whose rows are numbered by a sequence."""

    sequence: str
    """Its name, quoted where it has to be."""
    schema: str
    name: str
    column: str
    last: int | None
    """The last number that it has given; None if this user may not know."""

    def is_behind(self, connection: Connection) -> bool:
        """Return whether new rows would get numbers that rows have."""
        return self.last is not None and self.last < (connection.execute(select(self._highest)).scalar() or 0)

    @property
    def catching_up(self) -> Executable:
        """The statement that sets the sequence behind the rows."""
        sequence = cast(literal(self.sequence), REGCLASS)
        reached = func.greatest(select(self._highest).scalar_subquery(), func.pg_sequence_last_value(sequence))
        return select(func.setval(sequence, reached))

    @property
    def _highest(self) -> Function[int]:
        return func.max(table_named(self.name, column(self.column), schema=self.schema).c[self.column])


def catching_up(connection: Connection, table: str) -> list[Executable]:
    """Return the statements that set a table's sequence behind its rows, none where it is there."""
    tables = map(NumberedTable._make, run(connection, OF_TABLE, table))
    return [numbered.catching_up for numbered in tables if numbered.is_behind(connection)]


def numbers_finding(connection: Connection) -> Finding:
    """Return whether the sequences of delayline's tables are behind their rows, for `delayline doctor`."""
    tables = list(map(NumberedTable._make, run(connection, OF_DELAYLINE)))
    behind = [numbered.name for numbered in tables if numbered.is_behind(connection)]
    unknown = [numbered.name for numbered in tables if numbered.last is None]
    if behind:
        names = ", ".join(map(repr, behind))
        return (
            "identities",
            False,
            f"behind the rows of {names}, as after a replication's cutover: run `delayline setup`",
        )
    if unknown:
        names = ", ".join(map(repr, unknown))
        return "identities", True, f"not known of {names}: run `delayline doctor` as the tables' owner to see them"
    return "identities", True, "behind no row"


BEHIND: Final = (
    "numbers new rows of a table behind rows that are there, as after a replication's cutover: run `delayline setup` "
    "as the table's owner"
)
CAUGHT_UP: Final = (
    "has numbered new rows of a table behind rows that were there, as after a replication's cutover, and does so no "
    "more: repeat it"
)


def is_number_taken(error: BaseException) -> bool:
    """Return whether a violation of a unique key is about the number of a row."""
    detail = str(getattr(getattr(error, "diag", None), "message_detail", None))
    return "(seq)=(" in detail  # around it is the server's language


def catch_up(connection: Connection, error: Any) -> str:  # noqa: ANN401 - psycopg's or psycopg2's
    """Set the sequence of the table that the error names behind its rows; return what was done, as text."""
    [name] = run(
        connection, "SELECT format('%%I.%%I', %s::text, %s::text)", error.diag.schema_name, error.diag.table_name
    )[0]
    for numbered in map(NumberedTable._make, run(connection, OF_TABLE, name)):
        if numbered.last is None:
            return BEHIND
        if numbered.is_behind(connection):
            connection.execute(numbered.catching_up)
    return CAUGHT_UP
