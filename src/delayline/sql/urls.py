"""SQL URLs: whether the database exists, and its health."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayline.sql.databases import database_at
from delayline.sql.setup import RequiredTables, version_findings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline.sql.dialect import Finding
    from delayline.sql.schema import TableGroup


def must_exist(url: str) -> None:
    """Raise BackendUnusable if the database does not exist and opening it would create an empty one."""
    database_at(url).dialect.must_exist()


async def examine(url: str, *, schema: str | None = None) -> Sequence[Finding]:
    """Return the findings about the database. Raises BackendUnusable or BackendUnavailable."""
    database = database_at(url)
    await database.open()
    try:
        name = database.dialect.schema_of(schema)
        return [
            *await database.read(lambda connection: version_findings(connection, name)),
            *await database.read(database.dialect.findings),
        ]
    finally:
        await database.close()


async def set_up(url: str, groups: Sequence[TableGroup], *, schema: str | None = None) -> None:
    """Create the tables of the groups, or upgrade them. Raises the errors of `RequiredTables.set_up`."""
    database = database_at(url)
    await database.open()
    try:
        await database.write(RequiredTables(database.dialect, database.dialect.schema_of(schema), *groups).set_up)
    finally:
        await database.close()


async def planned(url: str, groups: Sequence[TableGroup], *, schema: str | None = None) -> Sequence[str]:
    """Return the SQL that `set_up` would run, without running it. Raises the same errors."""
    database = database_at(url)
    required = RequiredTables(database.dialect, database.dialect.schema_of(schema), *groups)
    return await database.plan(required.plan, required.script)
