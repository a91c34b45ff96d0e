"""The tables, and the version that says which delayline made them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import (
    BigInteger,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    insert,
    inspect,
    select,
)

from delayline.errors import BackendUnusable, NewerSchema
from delayline.message import MAXIMUM_DESTINATION_LENGTH, MAXIMUM_ID_LENGTH

if TYPE_CHECKING:
    from sqlalchemy import Connection

SCHEMA_VERSION: Final = 1
#: Row numbers: on SQLite only INTEGER counts up by itself.
SEQUENCE: Final = BigInteger().with_variant(Integer, "sqlite")

shared = MetaData()

versions = Table("delayline_schema", shared, Column("version", Integer, primary_key=True, autoincrement=False))

queues = Table("delayline_queues", shared, Column("name", String(MAXIMUM_DESTINATION_LENGTH), primary_key=True))

queued = Table(
    "delayline_messages",
    shared,
    Column("seq", SEQUENCE, primary_key=True, autoincrement=True),
    Column("queue", String(MAXIMUM_DESTINATION_LENGTH), nullable=False),
    Column("id", String(MAXIMUM_ID_LENGTH), nullable=False),
    Column("headers", LargeBinary, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index("delayline_messages_order", "queue", "seq"),
    sqlite_autoincrement=True,  # a number that was claimed once is never given to another row
)


def timeouts_table(name: str) -> Table:
    """Return the logical table of a delayed message store (reference 1.12) under that name."""
    return Table(
        name,
        MetaData(),
        Column("seq", SEQUENCE, primary_key=True, autoincrement=True),
        Column("id", String(MAXIMUM_ID_LENGTH), nullable=False, unique=True),
        Column("destination", String(MAXIMUM_DESTINATION_LENGTH), nullable=False),
        Column("due", BigInteger, nullable=False),  # microseconds since 1970 UTC
        Column("headers", LargeBinary, nullable=False),
        Column("body", LargeBinary, nullable=False),
        Column("retry_count", Integer, nullable=False, default=0),
        Index(f"{name}.Index_Time", "due", "seq"),
        sqlite_autoincrement=True,
    )


def set_up(connection: Connection, *tables: Table) -> None:
    """Create what is missing of the shared tables and `tables`. Idempotent. Raises NewerSchema."""
    found = read_version(connection)
    for table in (*shared.sorted_tables, *tables):
        table.create(connection, checkfirst=True)
    if found is None:
        connection.execute(insert(versions).values(version=SCHEMA_VERSION))


def check(connection: Connection, *tables: Table) -> None:
    """Refuse a database that was never set up for these tables, or by a newer delayline."""
    found = read_version(connection)
    names = inspect(connection).get_table_names()
    missing = next((table.name for table in (*shared.sorted_tables, *tables) if table.name not in names), None)
    if found is None or missing is not None:
        raise BackendUnusable(f"table {missing or versions.name!r} does not exist: run `delayline setup` first")


def read_version(connection: Connection) -> int | None:
    """Return the schema's version, None where there is none. Raises NewerSchema."""
    if not inspect(connection).has_table(versions.name):
        return None
    found = connection.execute(select(versions.c.version)).scalar()
    if found is not None and found > SCHEMA_VERSION:
        raise NewerSchema(
            f"the database has schema version {found}, this delayline knows up to {SCHEMA_VERSION}: "
            "upgrade it with `pip install --upgrade delayline`"
        )
    return found
