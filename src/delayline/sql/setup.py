"""Creating the tables, upgrading them, and telling whether they are what this delayline needs.

The row of `delayline_schema` names two versions: `revision` is the tables' own, `version` the oldest that can use
them. So a delayline that is one version behind works beside a new one, and one that is further behind refuses.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import insert, inspect, null, select, update
from sqlalchemy.dialects import mssql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateIndex, CreateTable, ExecutableDDLElement
from sqlalchemy.types import TypeDecorator

from delayline.errors import BackendUnusable, NewerSchema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Column, Connection, Executable, Inspector, Table
    from sqlalchemy.sql.compiler import DDLCompiler
    from sqlalchemy.types import TypeEngine

    from delayline.sql.dialect import Dialect
    from delayline.sql.schema import QueueTables

SCHEMA_VERSION: Final = 2
#: Who knows this version can use the tables; raised only when an older delayline would do harm.
USABLE_FROM: Final = 1


class SchemaVersions(NamedTuple):
    """The catalog's description of existing tables."""

    usable_from: int
    revision: int


class AddColumn(ExecutableDDLElement):
    """ALTER TABLE, in the words that every product understands."""

    def __init__(self, column: Column[Any]) -> None:
        self.column = column


@compiles(AddColumn)
def _add_column(element: AddColumn, compiler: DDLCompiler, **_: object) -> str:
    table = compiler.preparer.format_table(element.column.table)
    return f"ALTER TABLE {table} ADD {compiler.get_column_specification(element.column)}"


def set_up(connection: Connection, dialect: Dialect, tables: QueueTables, *others: Table) -> None:
    """Create missing shared tables and `others`. Idempotent, also in several processes at once.

    Raises NewerSchema, and BackendUnusable for a table of another shape.
    """
    with dialect.setting_up(connection):
        for step in plan(connection, tables, *others):
            dialect.make(connection, step)


def plan(connection: Connection, tables: QueueTables, *others: Table) -> list[Executable]:
    """Return what `set_up` would run."""
    found, inspector = read_versions(connection, tables), inspect(connection)
    steps: list[Executable] = []
    for table in (*tables.of(connection.dialect.name), *others):
        if inspector.has_table(table.name, schema=table.schema):
            steps += map(AddColumn, _missing(inspector, table))
        else:
            steps += _creation(table)
    row = {"version": USABLE_FROM, "revision": SCHEMA_VERSION}
    if found is None:
        steps.append(insert(tables.versions).values(row))
    elif found.revision < SCHEMA_VERSION:
        steps.append(update(tables.versions).values(row))
    return steps


def whole(dialect: Dialect, tables: QueueTables, *others: Table) -> list[Executable]:
    """Return a script that creates everything, for a dialect with idempotent statements."""
    steps: list[Executable] = []
    for table in (*tables.of(dialect.sql.name), *others):
        steps += _creation(table)
    row = {"version": USABLE_FROM, "revision": SCHEMA_VERSION}
    return [*steps, dialect.insert_new(tables.versions, "version").values(row)]


def _creation(table: Table) -> list[Executable]:
    return [CreateTable(table), *map(CreateIndex, sorted(table.indexes, key=lambda index: str(index.name)))]


def texts(steps: list[Executable], dialect: Dialect) -> list[str]:
    """Return the SQL of the steps, for people."""
    compiled = [step.compile(dialect=dialect.sql, compile_kwargs={"literal_binds": True}) for step in steps]  # type: ignore[attr-defined]
    doubled = "%%" if dialect.sql.paramstyle in {"format", "pyformat"} else "%"  # drivers double it
    written = [str(one).replace(doubled, "%").strip().splitlines() for one in compiled]
    return ["\n".join(line.rstrip() for line in lines).expandtabs(4) for lines in written]


def check(connection: Connection, tables: QueueTables, *others: Table) -> None:
    """Refuse a database that was never set up for these tables, has them in another shape, or by a newer delayline."""
    found, inspector = read_versions(connection, tables), inspect(connection)
    for table in (*tables.of(connection.dialect.name), *others):
        if found is None or not inspector.has_table(table.name, schema=table.schema):
            raise BackendUnusable(f"table {table.fullname!r} does not exist: run `delayline setup` first")
    _check_shapes(inspector, *tables.of(connection.dialect.name), *others)


def check_upgraded(connection: Connection, tables: QueueTables) -> None:
    """Refuse tables of an older or newer delayline; those that are not there yet are no fault."""
    if read_versions(connection, tables) is not None:
        inspector = inspect(connection)
        every = tables.of(connection.dialect.name)
        _check_shapes(inspector, *(one for one in every if inspector.has_table(one.name, schema=one.schema)))


def read_versions(connection: Connection, tables: QueueTables) -> SchemaVersions | None:
    """Return the schema's versions, None where there is none. Raises NewerSchema."""
    table, inspector = tables.versions, inspect(connection)
    if not inspector.has_table(table.name, schema=table.schema):
        return None
    names = {column["name"] for column in inspector.get_columns(table.name, schema=table.schema)}
    revision = table.c.revision if "revision" in names else null()
    row = connection.execute(select(table.c.version, revision)).first()
    if row is None:
        return None
    found = SchemaVersions(row[0], row[1] or row[0])
    if found.usable_from > SCHEMA_VERSION:
        raise NewerSchema(
            f"the database has schema version {found.revision}, which a delayline that knows version "
            f"{found.usable_from} can use; this one knows up to {SCHEMA_VERSION}: "
            "upgrade it with `pip install --upgrade delayline`"
        )
    return found


def _check_shapes(inspector: Inspector, *tables: Table) -> None:
    for table in tables:
        for column in _missing(inspector, table):
            raise BackendUnusable(
                f"table {table.fullname!r} has no column {column.name!r}: it was made by an older delayline. "
                "Run `delayline setup`"
            )


def _missing(inspector: Inspector, table: Table) -> list[Column[Any]]:
    """Return the columns that an older delayline did not make; raises BackendUnusable for a table of another shape."""
    found = inspector.get_columns(table.name, schema=table.schema)
    missing = []
    for column in table.columns:
        there = _named(inspector, column.name, found)
        if there is not None:
            fault = _fault(inspector, column, there)
        else:
            missing.append(column)
            fault = None if column.nullable else "is missing"
        if fault is not None:
            raise BackendUnusable(
                f"table {table.fullname!r} has another shape than delayline's: column {column.name!r} {fault}. "
                "Use another table_name, schema or database"
            )
    return missing


def _named(inspector: Inspector, name: str, found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the column of that name; where case may mean nothing, one that differs in nothing else.

    Where it does mean something in a SQL Server database, its statements are refused with an error that names it.
    """
    exact = next((column for column in found if column["name"] == name), None)
    if exact is not None or inspector.dialect.name == "postgresql":
        return exact
    return next((column for column in found if column["name"].casefold() == name.casefold()), None)


def _fault(inspector: Inspector, column: Column[Any], found: Mapping[str, Any]) -> str | None:
    wanted = column.type.dialect_impl(inspector.dialect)
    if isinstance(wanted, TypeDecorator):  # which has no Python type
        wanted = wanted.load_dialect_impl(inspector.dialect)
    if _fits(found["type"], wanted):
        return None
    return f"is {found['type']!r}, not {wanted!r}"


def _fits(found: TypeEngine[Any], wanted: TypeEngine[Any]) -> bool:
    try:
        if found.python_type is not wanted.python_type:
            return False
    except NotImplementedError:
        return False
    if isinstance(found, mssql.SMALLDATETIME):  # in whole minutes, which would make messages early
        return False
    precision = getattr(found, "fsp", None) or 0
    return (
        _length(found) >= _length(wanted, unlimited=0)
        and precision >= (getattr(wanted, "fsp", None) or 0)
        and getattr(found, "timezone", False) == getattr(wanted, "timezone", False)
    )


def _length(of: TypeEngine[Any], *, unlimited: float = math.inf) -> float:
    """Return how long a value may be; `unlimited` where the type says nothing, which as a wish means any length."""
    length = getattr(of, "length", None)
    return math.inf if length == "max" else unlimited if length is None else float(length)
