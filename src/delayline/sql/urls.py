"""SQL URLs: whether the database exists, and its health."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayline.sql.databases import database_at
from delayline.sql.schema import queue_tables
from delayline.sql.setup import SCHEMA_VERSION, read_versions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from delayline.sql.dialect import Finding
    from delayline.sql.schema import QueueTables


def must_exist(url: str) -> None:
    """Raise BackendUnusable if the database does not exist and opening it would create an empty one."""
    database_at(url).dialect.must_exist()


async def examine(url: str, *, schema: str | None = None) -> Sequence[Finding]:
    """Return what can be told of the database itself. Raises BackendUnusable or BackendUnavailable."""
    database = database_at(url)
    await database.open()
    try:
        tables = queue_tables(database.dialect.schema_of(schema))
        return [
            *await database.read(lambda connection: _schema(connection, tables)),
            *await database.read(database.dialect.findings),
        ]
    finally:
        await database.close()


def _schema(connection: Connection, tables: QueueTables) -> list[Finding]:
    found = read_versions(connection, tables)
    if found is None:
        text, good = "none: run `delayline setup`", False
    else:
        text, good = str(found.revision), found.revision >= SCHEMA_VERSION
        text += "" if good else ": run `delayline setup`"
    return [("schema version", good, f"{text} (this delayline writes {SCHEMA_VERSION})")]
