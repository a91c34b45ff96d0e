"""In which way each product stages."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from sqlalchemy import func, select

from delayline.errors import ConfigurationError, MissingExtra

if TYPE_CHECKING:
    from sqlalchemy import Connection, Table

    from delayline.sql.database import Database
    from delayline.sql.dialects.sqlite import Sqlite
    from delayline.sql.server import Server
    from delayline.sql.staging import Stage


def stage_in(database: Database, store: Table, name: str) -> Stage:
    """Return the way in which that product stages. Raises ConfigurationError where none does, MissingExtra."""
    if find_spec("pyarrow") is None:
        raise MissingExtra("spark", "writing in bulk")
    server = cast("Server", database.dialect)
    match database.dialect.sql.name:
        case "postgresql":
            from delayline.sql.dialects.postgresql_staging import PostgresqlStage

            return PostgresqlStage(server, store, name)
        case "mariadb" | "mysql":
            from delayline.sql.dialects.mariadb_staging import MariadbStage

            return MariadbStage(server, store, name)
        case "sqlite":
            from delayline.sql.dialects.sqlite_staging import SqliteStage

            return SqliteStage(cast("Sqlite", database.dialect), store, name)
    raise ConfigurationError(f"bulk jobs cannot write to {database.dialect} yet: use PostgreSQL, MariaDB or SQLite")


def breaks_a_key(error: BaseException) -> bool:
    """Tell whether the driver's error says that a row has a key that another has."""
    return "IntegrityError" in {kind.__name__ for kind in type(error).__mro__}


def doubled_id(connection: Connection, staged: Table, stored: Table) -> str:
    """Return an id that is staged twice, or staged and stored."""
    both = select(staged.c.id).join(stored, stored.c.id == staged.c.id).limit(1)
    twice = select(staged.c.id).group_by(staged.c.id).having(func.count() > 1).limit(1)
    return connection.execute(both).scalar() or connection.execute(twice).scalar() or "?"
