"""What a SQL URL leads to: which ones there are, whether there is a database, and how it is doing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from delayline.sql.database import Database
from delayline.sql.schema import SCHEMA_VERSION, queue_tables, read_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from delayline.sql.dialect import Finding

#: URL schemes, without a driver's name: `postgresql+psycopg` is `postgresql`.
SCHEMES: Final = ("sqlite", "postgresql")


def must_exist(url: str) -> None:
    """Raise BackendUnusable where there is no database yet and opening it would make an empty one."""
    Database.at(url).dialect.must_exist()


async def examine(url: str) -> Sequence[Finding]:
    """Return what can be told of the database itself. Raises BackendUnusable or BackendUnavailable."""
    database = Database.at(url)
    await database.open()
    try:
        return [*await database.read(_schema), *await database.read(database.dialect.findings)]
    finally:
        await database.close()


def _schema(connection: Connection) -> list[Finding]:
    version = read_version(connection, queue_tables())
    found = "none: run `delayline setup`" if version is None else str(version)
    return [("schema version", version is not None, f"{found} (this delayline writes {SCHEMA_VERSION})")]
