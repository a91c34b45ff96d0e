"""What a SQL URL leads to: which ones there are, whether there is a database, and how it is doing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from delayline.errors import BackendUnusable
from delayline.sql.database import Database
from delayline.sql.schema import SCHEMA_VERSION, read_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

#: URL schemes, without a driver's name: `postgresql+psycopg` is `postgresql`.
SCHEMES: Final = ("sqlite",)
#: SQLite's levels; below FULL a commit may be lost with the power.
SYNCHRONOUS: Final = {0: "OFF", 1: "NORMAL", 2: "FULL", 3: "EXTRA"}
#: What was looked at, whether it is as it should be, and what it is.
Finding = tuple[str, bool, str]


def must_exist(url: str) -> None:
    """Raise BackendUnusable where there is no database yet and opening it would make an empty one."""
    path = Database.at(url).dialect.path
    if not path.exists():
        raise BackendUnusable(
            f"there is no file {path.name} in {path.parent}. Check --url, or create it with: delayline setup"
        )


async def examine(url: str) -> Sequence[Finding]:
    """Return what can be told of the database itself. Raises BackendUnusable or BackendUnavailable."""
    database = Database.at(url)
    await database.open()
    try:
        return [*await database.read(_schema), *await database.read(_sqlite)]
    finally:
        await database.close()


def _schema(connection: Connection) -> list[Finding]:
    version = read_version(connection)
    found = "none: run `delayline setup`" if version is None else str(version)
    return [("schema version", version is not None, f"{found} (this delayline writes {SCHEMA_VERSION})")]


def _sqlite(connection: Connection) -> list[Finding]:
    journal = connection.exec_driver_sql("PRAGMA journal_mode").scalar()
    level = SYNCHRONOUS.get(connection.exec_driver_sql("PRAGMA synchronous").scalar() or 0, "unknown")
    durable = level in {"FULL", "EXTRA"}
    return [
        ("journal mode", journal == "wal", f"{journal}"),
        ("synchronous", durable, f"{level}{'' if durable else ': a power cut can lose messages'}"),
        ("clock", True, "this machine's own; SQLite has none that could differ"),
    ]
