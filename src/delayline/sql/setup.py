"""Creates tables, upgrades them in place, checks their shape, and shows the SQL that it would run.

The table `delayline_schema` has a row for each feature: `revision` is the version of its tables, `version` the oldest
revision whose code can use them. So the previous delayline works beside a new one, and a version that is too old
refuses.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import DDL, DefaultClause, Float, Inspector, MetaData, insert, inspect, literal, null, select, update
from sqlalchemy.dialects import mssql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateIndex, CreateTable, DropTable, ExecutableDDLElement
from sqlalchemy.types import TypeDecorator

from delayline.errors import BackendUnusable, NewerSchema
from delayline.sql.schema import ADDED_LATER, NO_LONGER_MADE, QUEUES, registered_groups, versions_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Column, Connection, Executable, Index, Table
    from sqlalchemy.sql.compiler import DDLCompiler
    from sqlalchemy.types import TypeEngine

    from delayline.sql.dialect import Dialect, Finding
    from delayline.sql.schema import TableGroup

#: The only feature of schemas whose table of versions has no column for it, up to revision 2.
FIRST_FEATURE: Final = QUEUES.feature


class SchemaVersions(NamedTuple):
    """The row of a feature in `delayline_schema`."""

    usable_from: int
    revision: int


class AddColumn(ExecutableDDLElement):
    """ALTER TABLE, in the syntax that every product has."""

    def __init__(self, column: Column[Any]) -> None:
        self.column = column


@compiles(AddColumn)
def _add_column(element: AddColumn, compiler: DDLCompiler, **_: object) -> str:
    table = compiler.preparer.format_table(element.column.table)
    return f"ALTER TABLE {table} ADD {compiler.get_column_specification(element.column)}"


class ReplaceKey(ExecutableDDLElement):
    """Make the declared columns of a table its primary key, in place of others.

    Args:
        table: The declaration; the table has all of its columns.
        name: The name of the present key's constraint.
    """

    def __init__(self, table: Table, name: str | None) -> None:
        self.table = table
        self.name = name

    def rebuild(self) -> list[Executable]:
        """Return statements that do the same where a key cannot be altered: they copy the table, in a transaction."""
        new = self.table.to_metadata(MetaData(), name=f"{self.table.name}_new")
        names = [column.name for column in self.table.columns]
        copied = insert(new).from_select(names, select(self.table))
        renamed = DDL(f"ALTER TABLE {new.name} RENAME TO {self.table.name}")  # type: ignore[no-untyped-call]
        return [CreateTable(new), copied, DropTable(self.table), renamed]


@compiles(ReplaceKey)
def _replace_key(element: ReplaceKey, compiler: DDLCompiler, **_: object) -> str:
    return (
        f"{_of_key(element, compiler)} DROP CONSTRAINT {_named_key(element, compiler)}, {_new_key(element, compiler)}"
    )


@compiles(ReplaceKey, "mysql", "mariadb")
def _replace_key_mysql(element: ReplaceKey, compiler: DDLCompiler, **_: object) -> str:
    return f"{_of_key(element, compiler)} DROP PRIMARY KEY, {_new_key(element, compiler)}"


@compiles(ReplaceKey, "mssql")
def _replace_key_mssql(element: ReplaceKey, compiler: DDLCompiler, **_: object) -> str:
    table = _of_key(element, compiler)
    return f"{table} DROP CONSTRAINT {_named_key(element, compiler)}; {table} {_new_key(element, compiler)}"


@compiles(ReplaceKey, "sqlite")
def _replace_key_sqlite(element: ReplaceKey, compiler: DDLCompiler, **_: object) -> str:
    return ";\n".join(str(step.compile(dialect=compiler.dialect)).strip() for step in element.rebuild())  # type: ignore[attr-defined]


def _of_key(element: ReplaceKey, compiler: DDLCompiler) -> str:
    return f"ALTER TABLE {compiler.preparer.format_table(element.table)}"


def _named_key(element: ReplaceKey, compiler: DDLCompiler) -> str:
    return compiler.preparer.quote(element.name or "")


def _new_key(element: ReplaceKey, compiler: DDLCompiler) -> str:
    columns = ", ".join(map(compiler.preparer.format_column, element.table.primary_key.columns))
    return f"ADD PRIMARY KEY ({columns})"


class RequiredTables:
    """The tables that a part of delayline needs in a schema of a database.

    Args:
        dialect: The database's dialect.
        schema: The schema's name; None for the connection's own.
        groups: Tables of features.
        others: Tables with names of the user's choice, which have no version.
    """

    def __init__(self, dialect: Dialect, schema: str | None, *groups: TableGroup, others: Sequence[Table] = ()) -> None:
        self._dialect = dialect
        self._schema = schema
        self._groups = groups
        self._others = others
        self._versions = versions_table(schema)

    def set_up(self, connection: Connection) -> None:
        """Create missing tables, and upgrade existing tables. Idempotent, also in several processes at once.

        Raises:
            NewerSchema: A newer delayline has upgraded the tables, and this delayline cannot use them.
            BackendUnusable: A table has another shape.
        """
        with self._dialect.catalog.setting_up(connection):
            for step in self.plan(connection):
                self._dialect.catalog.make(connection, step)

    def plan(self, connection: Connection) -> list[Executable]:
        """Return the statements that `set_up` would run. Raises the same errors.

        Tables of other registered features are upgraded too if they exist.
        """
        inspector, versions = inspect(connection), self._versions
        recorded = read_versions(connection, self._schema)
        steps: list[Executable] = []
        if not _has_table(inspector, versions):
            steps += _creation(versions)
        elif not _has_features(inspector, versions):  # its primary key differs
            steps += [DropTable(versions), *_creation(versions)]
            steps += [_version_row(versions, feature, *row) for feature, row in recorded.items()]
        groups = [*self._groups, *self._others_in_use(inspector)]
        for table in self._tables(groups):
            if _has_table(inspector, table):
                steps += map(AddColumn, _missing(inspector, table, self._dialect))
                steps += map(CreateIndex, _missing_indexes(connection, table, self._dialect))
                steps += _rekeying(inspector, table)
                steps += self._dialect.catalog.mending(connection, table)
            elif NO_LONGER_MADE not in table.info:
                steps += _creation(table)
        for group in groups:
            tables = self._tables([group])
            earlier = [table for table in tables if NO_LONGER_MADE in table.info]
            exists = any(_has_table(inspector, table) for table in earlier or tables)
            if exists and (group.feature not in recorded or recorded[group.feature].revision < group.revision):
                steps += group.convert_rows(self._schema)
            if group.feature not in recorded:
                steps.append(_version_row(versions, group.feature, group.usable_from, group.revision))
            elif recorded[group.feature].revision < group.revision:
                row = update(versions).where(versions.c.feature == group.feature)
                steps.append(row.values(version=group.usable_from, revision=group.revision))
        return steps

    def script(self) -> list[Executable]:
        """Return a script that creates everything, for a dialect with idempotent statements."""
        versions = self._versions
        steps = _creation(versions)
        for table in self._tables(self._groups):
            steps += [] if NO_LONGER_MADE in table.info else _creation(table)
        for group in self._groups:
            row = {"feature": group.feature, "version": group.usable_from, "revision": group.revision}
            steps.append(self._dialect.words.insert_new(versions, "feature").values(row))
        return steps

    def check(self, connection: Connection) -> None:
        """Raise BackendUnusable for missing tables and for tables of another shape, and NewerSchema."""
        recorded, inspector = read_versions(connection, self._schema), inspect(connection)
        if FIRST_FEATURE in recorded:
            self._check_shapes(connection, inspector)
        for table in self._tables(self._groups):
            if NO_LONGER_MADE in table.info:
                continue
            if FIRST_FEATURE not in recorded or not _has_table(inspector, table):
                raise BackendUnusable(f"table {table.fullname!r} does not exist: run `delayline setup` first")

    def check_upgraded(self, connection: Connection) -> None:
        """Raise BackendUnusable for existing tables of an older delayline, and NewerSchema."""
        if read_versions(connection, self._schema):
            self._check_shapes(connection, inspect(connection))

    def _check_shapes(self, connection: Connection, inspector: Inspector) -> None:
        if not _has_features(inspector, self._versions):
            raise _older(self._versions, "feature")
        for table in self._tables(self._groups):
            if _has_table(inspector, table):
                self._dialect.catalog.mending(connection, table)
                for column in _missing(inspector, table, self._dialect):
                    raise _older(table, column.name)
                for index in _missing_indexes(connection, table, self._dialect):
                    raise BackendUnusable(
                        f"table {table.fullname!r} has no index {index.name!r}, which {index.info[ADDED_LATER]} needs: "
                        "run `delayline setup` with the same setting"
                    )

    def _tables(self, groups: Sequence[TableGroup]) -> list[Table]:
        grouped = [table for group in groups for table in group.tables(self._dialect.catalog, self._schema)]
        return list({table.fullname: table for table in [*grouped, *self._others]}.values())  # others may have more

    def _others_in_use(self, inspector: Inspector) -> list[TableGroup]:
        existing = set(inspector.get_table_names(schema=self._schema))
        return [
            group
            for group in registered_groups()
            if group not in self._groups
            and any(table.name in existing for table in group.tables(self._dialect.catalog, self._schema))
        ]


def read_versions(connection: Connection, schema: str | None) -> Mapping[str, SchemaVersions]:
    """Return the versions of the features whose tables were created in the schema.

    Raises:
        NewerSchema: This delayline is too old for any of them.
    """
    table, inspector = versions_table(schema), inspect(connection)
    if not _has_table(inspector, table):
        return {}
    names = {column["name"] for column in inspector.get_columns(table.name, schema=schema)}
    feature = table.c.feature if "feature" in names else literal(FIRST_FEATURE)
    revision = table.c.revision if "revision" in names else null()
    rows = connection.execute(select(feature, table.c.version, revision))
    recorded = {str(row[0]): SchemaVersions(row[1], row[2] or row[1]) for row in rows}
    for group in registered_groups():
        versions = recorded.get(group.feature)
        if versions is not None and versions.usable_from > group.revision:
            raise NewerSchema(
                f"the database has schema version {versions.revision} of {group.feature!r}, which a delayline with "
                f"version {versions.usable_from} or newer can use; this delayline has {group.revision}: "
                "upgrade it with `pip install --upgrade delayline`"
            )
    return recorded


def version_findings(connection: Connection, schema: str | None) -> list[Finding]:
    """Return the schema versions that the database has, for `delayline doctor`. Raises NewerSchema."""
    recorded, findings = read_versions(connection, schema), []
    if FIRST_FEATURE not in recorded:
        findings.append(("schema version", False, "none: run `delayline setup`"))
    for group in registered_groups():
        versions = recorded.get(group.feature)
        if versions is not None:
            good = versions.revision >= group.revision
            name = "schema version" if group is QUEUES else f"schema version of {group.feature}"
            finding = f"{versions.revision}{'' if good else ': run `delayline setup`'}"
            findings.append((name, good, f"{finding} (this delayline writes {group.revision})"))
    return findings


def _older(table: Table, column: str) -> BackendUnusable:
    return BackendUnusable(
        f"table {table.fullname!r} has no column {column!r}: it was made by an older delayline. Run `delayline setup`"
    )


def _has_table(inspector: Inspector, table: Table) -> bool:
    return inspector.has_table(table.name, schema=table.schema)


def _has_features(inspector: Inspector, versions: Table) -> bool:
    return any(column["name"] == "feature" for column in inspector.get_columns(versions.name, schema=versions.schema))


def _version_row(versions: Table, feature: str, usable_from: int, revision: int) -> Executable:
    return insert(versions).values(feature=feature, version=usable_from, revision=revision)


def _creation(table: Table) -> list[Executable]:
    return [CreateTable(table), *map(CreateIndex, sorted(table.indexes, key=lambda index: str(index.name)))]


def texts(steps: list[Executable], dialect: Dialect) -> list[str]:
    """Return the SQL of the steps, for people."""
    compiled = [step.compile(dialect=dialect.sql, compile_kwargs={"literal_binds": True}) for step in steps]  # type: ignore[attr-defined]
    doubled = "%%" if dialect.sql.paramstyle in {"format", "pyformat"} else "%"  # drivers double it
    written = [str(statement).replace(doubled, "%").strip().splitlines() for statement in compiled]
    return ["\n".join(line.rstrip() for line in lines).expandtabs(4) for lines in written]


def _missing(inspector: Inspector, table: Table, dialect: Dialect) -> list[Column[Any]]:
    """Return the columns that an older delayline did not make; raises BackendUnusable for a table of another shape."""
    columns = inspector.get_columns(table.name, schema=table.schema)
    missing = []
    for column in table.columns:
        actual = _named(column.name, columns, folds_case=dialect.catalog.folds_column_case)
        if actual is not None:
            fault = _fault(inspector, column, actual)
        else:
            missing.append(column)
            addable = column.nullable or _has_default(column)
            fault = None if addable else "is missing"
        if fault is not None:
            raise BackendUnusable(
                f"table {table.fullname!r} has another shape than delayline's: column {column.name!r} {fault}. "
                "Use another table_name, schema or database"
            )
    return missing


def _missing_indexes(connection: Connection, table: Table, dialect: Dialect) -> list[Index]:
    """Return the indexes of a setting that the table was made without."""
    wanted = [index for index in table.indexes if ADDED_LATER in index.info]
    names = dialect.groups.index_names(connection, table) if wanted else set()
    return [index for index in wanted if index.name not in names]


def _rekeying(inspector: Inspector, table: Table) -> list[Executable]:
    """Return the replacement of a primary key that lacks a column; a column that came later has a default."""
    wanted = table.primary_key.columns
    if not any(map(_has_default, wanted)):
        return []
    key = inspector.get_pk_constraint(table.name, schema=table.schema)
    return [] if set(wanted.keys()) <= set(key["constrained_columns"]) else [ReplaceKey(table, key["name"])]


def _has_default(column: Column[Any]) -> bool:
    return isinstance(column.server_default, DefaultClause)  # and not an Identity


def _named(name: str, columns: Sequence[Mapping[str, Any]], *, folds_case: bool) -> Mapping[str, Any] | None:
    """Return the column of that name; where case may not matter, a column that differs only in case.

    If case does matter in a SQL Server database, its statements are refused with an error that names the column.
    """
    exact = next((column for column in columns if column["name"] == name), None)
    if exact is not None or not folds_case:
        return exact
    return next((column for column in columns if column["name"].casefold() == name.casefold()), None)


def _fault(inspector: Inspector, column: Column[Any], actual: Mapping[str, Any]) -> str | None:
    wanted = column.type.dialect_impl(inspector.dialect)
    if isinstance(wanted, TypeDecorator):  # which has no Python type
        wanted = wanted.load_dialect_impl(inspector.dialect)
    if _fits(actual["type"], wanted):
        return None
    return f"is {actual['type']!r}, not {wanted!r}"


def _fits(actual: TypeEngine[Any], wanted: TypeEngine[Any]) -> bool:
    try:
        if isinstance(actual, Float) != isinstance(wanted, Float):
            return False
        # MariaDB's DOUBLE is reflected as a type that returns Decimal
        if not isinstance(wanted, Float) and actual.python_type is not wanted.python_type:
            return False
    except NotImplementedError:
        return False
    if isinstance(actual, mssql.SMALLDATETIME):  # in whole minutes, which would make messages early
        return False
    precision = getattr(actual, "fsp", None) or 0
    return (
        _length(actual) >= _length(wanted, unlimited=0)
        and precision >= (getattr(wanted, "fsp", None) or 0)
        and getattr(actual, "timezone", False) == getattr(wanted, "timezone", False)
    )


def _length(of: TypeEngine[Any], *, unlimited: float = math.inf) -> float:
    """Return how long a value may be; `unlimited` where the type has no length, which in a declaration means any."""
    length = getattr(of, "length", None)
    return math.inf if length == "max" else unlimited if length is None else float(length)
