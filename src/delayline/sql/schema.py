"""The tables of queues and stores, and the register of the tables that other features create.

Every feature that creates tables declares them as a `TableGroup`. `delayline.sql.setup` creates and upgrades a group
under its version, checks its shape and shows its SQL.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol

from sqlalchemy import (
    BigInteger,
    Column,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    inspect,
)
from sqlalchemy.dialects import mssql, mysql, postgresql

from delayline.delayed.columns import BULK_COLUMNS, STORED_COLUMNS, ColumnKind
from delayline.delayed.fairness import LONGEST_GROUP, NO_GROUP
from delayline.errors import ConfigurationError
from delayline.message import MAXIMUM_DESTINATION_LENGTH, MAXIMUM_ID_LENGTH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sqlalchemy import Connection, Executable
    from sqlalchemy.types import TypeEngine

    from delayline.delayed.columns import StoredColumn


untyped: Final[Any] = mssql  # some of its types have constructors without annotations
#: Row numbers: on SQLite only INTEGER counts up by itself.
SEQUENCE: Final = BigInteger().with_variant(Integer, "sqlite")
#: Due times are microseconds since 1970 where no type keeps both the instant and the microsecond.
DUE: Final = (
    BigInteger()
    .with_variant(postgresql.TIMESTAMP(timezone=True), "postgresql")
    .with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
    .with_variant(untyped.DATETIME2(6), "mssql")
)
CONTENT: Final = (
    LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb").with_variant(untyped.VARBINARY("max"), "mssql")
)
JSON_TEXT: Final = (
    Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb").with_variant(untyped.NVARCHAR("max"), "mssql")
)
MAXIMUM_CHANNEL_LENGTH: Final = 64
MAXIMUM_TABLE_NAME_LENGTH: Final = 128
BINARY: Final = "Latin1_General_100_BIN2"  # SQL Server's collation of names that are equal only when the same
MAXIMUM_NAME_LENGTH: Final = 120
LONGEST_INDEX_NAME: Final = 63  # bytes, PostgreSQL's
#: Rights on a table for reading, storing, taking out and changing.
TO_READ: Final = ("SELECT",)
TO_WRITE: Final = ("INSERT",)
TO_PUT: Final = ("SELECT", "INSERT")
TO_TAKE: Final = ("SELECT", "INSERT", "DELETE")
#: Beside TO_READ, which publishing needs too.
TO_SUBSCRIBE: Final = ("INSERT", "DELETE")
EVERY_RIGHT: Final = ("SELECT", "INSERT", "UPDATE", "DELETE")


def text(length: int) -> TypeEngine[str]:
    """Return a type for names that are equal only when they are the same, character for character."""
    return (
        String(length)
        .with_variant(String(length, collation="C"), "postgresql")
        .with_variant(mysql.VARCHAR(length, collation="utf8mb4_0900_bin"), "mysql")
        .with_variant(mysql.VARCHAR(length, collation="utf8mb4_nopad_bin"), "mariadb")
        .with_variant(mssql.NVARCHAR(length, collation=BINARY), "mssql")
    )


#: Prefix of the tables that delayline creates for itself; it is refused for tables of users.
OWN_PREFIX: Final = "delayline_"
#: The table of the files of cold tiers, in which messages wait, too.
COLD_FILES: Final = f"{OWN_PREFIX}cold_files"
#: The state of a file whose messages wait in it.
FILE_HELD: Final = "held"
#: How the default table name of a delayed message store ends, after the endpoint's name; a timeout manager's likewise.
STORE_SUFFIX: Final = ".timeouts"


def endpoint_names(connection: Connection, schema: str | None) -> list[str]:
    """Return the endpoints whose tables of delayed messages have their usual names.

    Args:
        connection: A connection.
        schema: The schema as the product has it; None for the connection's own.
    """
    tables = inspect(connection).get_table_names(schema=schema)
    return sorted(table.removesuffix(STORE_SUFFIX) for table in tables if table.endswith(STORE_SUFFIX))


class ProductTables(Protocol):
    """The tables of a dialect that depend on the product."""

    def further_tables(self, tables: QueueTables) -> Sequence[Table]:
        """Return the shared tables that this product has besides the queues' tables."""
        ...


def no_statements(schema: str | None) -> Sequence[Executable]:
    """Return none: to upgrade most tables, their shape alone is changed."""
    del schema
    return ()


@dataclass(frozen=True, slots=True)
class TableGroup:
    """Tables that a feature creates and upgrades together.

    To change a column or table, change its declaration and raise `revision`. A new column must be nullable, or a part
    of the primary key with a `server_default`.
    """

    feature: str
    """The name of its row in `delayline_schema`."""
    tables: Callable[[ProductTables, str | None], Sequence[Table]]
    """The tables in a schema of a product, the connection's own schema for None."""
    revision: int = 1
    usable_from: int = 1
    """The oldest revision whose code can use the tables; raise it only if older code would do harm."""
    convert_rows: Callable[[str | None], Sequence[Executable]] = no_statements
    """The statements that convert the rows of older revisions, in a schema; harmless when they run twice.

    Where a group has tables that are no longer made, they are run if these exist.
    """


_groups: dict[str, TableGroup] = {}


def register(group: TableGroup) -> TableGroup:
    """Register the group, for upgrades of databases that have its tables, and return it."""
    _groups[group.feature] = group
    return group


def registered_groups() -> Sequence[TableGroup]:
    """Return the groups of all imported modules, by feature."""
    return [_groups[feature] for feature in sorted(_groups)]


@lru_cache(maxsize=64)
def versions_table(schema: str | None = None) -> Table:
    """Return the table of versions, with a row for each feature, in that schema; the connection's own for None."""
    return Table(
        "delayline_schema",
        MetaData(schema=schema),
        Column("feature", text(MAXIMUM_NAME_LENGTH), primary_key=True),
        Column("version", Integer, nullable=False),  # TableGroup.usable_from
        Column("revision", Integer, nullable=False),
    )


#: The column of messages' groups, where they are served fairly by a header.
FAIR_GROUP: Final = "fair_group"
#: Key in the `info` of an index that set-up adds to existing tables: the setting that needs it.
ADDED_LATER: Final = "delayline added later"
#: Key in the `info` of a table that older versions have made: set-up upgrades it where it is, and makes none.
NO_LONGER_MADE: Final = "delayline no longer made"
#: Key in the `info` of tables of messages: whoever reads them may pass over rows that others have locked.
HOLDS_MESSAGES: Final = "delayline holds messages"


class QueueTables:
    """The transport's tables: a registry of queue names, and a table with the messages of all queues.

    Args:
        schema: The schema's name; None for the connection's own.
        fair: Whether messages have groups, which receivers serve in turn.
    """

    def __init__(self, schema: str | None, *, fair: bool = False) -> None:
        metadata = MetaData(schema=schema)
        self.versions: Table = versions_table(schema)
        self.queues: Table = Table(
            "delayline_queues",
            metadata,
            Column("name", text(MAXIMUM_DESTINATION_LENGTH), primary_key=True),
            # Since revision 4: limits, NULL for none.
            Column("paused", Integer),
            Column("concurrency", Integer),
            Column("period", BigInteger),  # microseconds between messages
            Column("next_at", BigInteger),  # when the next may be received, in microseconds since 1970
            # Since revision 5: the limits of types of messages, as JSON.
            Column("handlers", JSON_TEXT),
        )
        self.queued: Table = _queued_table(metadata)
        if fair:
            self.queued.append_column(group_column())
            grouped = (self.queued.c[name] for name in ("queue", FAIR_GROUP, "seq"))
            Index("delayline_messages_groups", *grouped, info={ADDED_LATER: "fair_by of the transport"})
        #: Which prepared transactions are to be committed, and, as `log`, the table's own name.
        self.decisions: Table = Table(
            "delayline_decisions",
            metadata,
            Column("id", text(MAXIMUM_NAME_LENGTH), primary_key=True),
            Column("value", text(MAXIMUM_NAME_LENGTH), nullable=False),
        )
        self.sleeping: Table = Table(
            "delayline_sleeping",
            metadata,
            Column("channel", text(MAXIMUM_CHANNEL_LENGTH), primary_key=True),
            Column("listener", text(MAXIMUM_CHANNEL_LENGTH), primary_key=True),
            Column("until", DUE, nullable=False),
            prefixes=["UNLOGGED"],  # worth nothing after a crash
        )
        #: The receivers that run: number, which is claimed, and how many messages they handle at once.
        self.receivers: Table = Table(
            "delayline_receivers",
            metadata,
            Column("number", BigInteger, primary_key=True, autoincrement=False),
            Column("queue", text(MAXIMUM_DESTINATION_LENGTH), nullable=False),
            Column("concurrency", Integer, nullable=False),
        )
        #: Messages whose deliveries have ended without an outcome, and the receiver that handles the message now; 0 for
        #: none.
        self.suspects: Table = Table(
            "delayline_suspects",
            metadata,
            Column("seq", BigInteger, primary_key=True, autoincrement=False),
            Column("queue", text(MAXIMUM_DESTINATION_LENGTH), nullable=False),
            Column("crashes", Integer, nullable=False),
            Column("receiver", BigInteger, nullable=False),
        )
        #: Which queues get copies of events, by the name of the event's type.
        self.subscriptions: Table = Table(
            "delayline_subscriptions",
            metadata,
            Column("topic", text(MAXIMUM_DESTINATION_LENGTH), primary_key=True),
            Column("queue", text(MAXIMUM_DESTINATION_LENGTH), primary_key=True),
        )
        self.leases: Table = Table(
            "delayline_leases",
            metadata,
            Column("store", text(MAXIMUM_TABLE_NAME_LENGTH), primary_key=True),
            Column("id", text(MAXIMUM_ID_LENGTH), primary_key=True),
            Column("until", DUE, nullable=False),
        )


def _queued_table(metadata: MetaData) -> Table:
    return Table(
        "delayline_messages",
        metadata,
        _sequence(primary_key=True),
        Column("queue", text(MAXIMUM_DESTINATION_LENGTH), nullable=False),
        Column("id", text(MAXIMUM_ID_LENGTH), nullable=False),
        Column("headers", CONTENT, nullable=False),
        Column("body", CONTENT, nullable=False),
        Column("expires", DUE),  # since version 2
        Index("delayline_messages_order", "queue", "seq"),
        info={HOLDS_MESSAGES: True},
        sqlite_autoincrement=True,  # a number that was claimed once is never given to another row
    )


def group_column() -> Column[str]:
    """Return the column of messages' groups."""
    return Column(FAIR_GROUP, text(LONGEST_GROUP), nullable=False, server_default=NO_GROUP)


@lru_cache(maxsize=64)
def queue_tables(schema: str | None = None, *, fair: bool = False) -> QueueTables:
    """Return the transport's tables in that schema, the connection's own where None; fair: with groups."""
    return QueueTables(schema, fair=fair)


def _shared_tables(product: ProductTables, schema: str | None) -> list[Table]:
    tables = queue_tables(schema)
    return [tables.queues, tables.queued, *product.further_tables(tables)]


#: The tables of every transport and store.
QUEUES: Final = register(TableGroup("queues", _shared_tables, revision=5))
CRASHES: Final = register(
    TableGroup("crashes", lambda _, schema: [queue_tables(schema).receivers, queue_tables(schema).suspects])
)
SUBSCRIPTIONS: Final = register(TableGroup("subscriptions", lambda _, schema: [queue_tables(schema).subscriptions]))
DECISIONS: Final = register(TableGroup("two_phase", lambda _, schema: [queue_tables(schema).decisions]))


def message_columns(columns: Iterable[StoredColumn] = BULK_COLUMNS, *, unique: bool = False) -> list[Column[Any]]:
    """Return columns of a delayed message, by default those of jobs; unique: no two rows have the same id."""
    return [
        Column(column.name, _type_of(column), nullable=column.nullable, unique=(unique and column.name == "id") or None)
        for column in columns
    ]


def _type_of(column: StoredColumn) -> TypeEngine[Any]:
    match column.kind:
        case ColumnKind.NAME:
            return text(column.length)
        case ColumnKind.INSTANT:
            return DUE
        case ColumnKind.COUNT:
            return Integer()
        case ColumnKind.HEADERS | ColumnKind.BYTES:
            return CONTENT


@lru_cache(maxsize=64)
def timeouts_table(
    name: str, schema: str | None = None, *, leases: bool = False, id_length: int = MAXIMUM_ID_LENGTH
) -> Table:
    """Return the logical table of a delayed message store under that name.

    Args:
        name: the table's name.
        schema: the database schema; the connection's default if None.
        leases: whether to add the column with the end of a message's lease.
        id_length: the most characters of an id.
    """
    columns = [replace(column, length=id_length) if column.name == "id" else column for column in STORED_COLUMNS]
    return Table(
        name,
        MetaData(schema=schema),
        _sequence(primary_key=True),
        *message_columns(columns, unique=True),
        *([Column("leased_until", DUE)] if leases else []),
        Index(index_name(name, "Index_Time"), "due", "seq"),
        sqlite_autoincrement=True,
    )


def in_order(table: Table) -> tuple[Column[Any], Column[Any]]:
    """Return the order of a store's messages; without row numbers, ties are ordered by id."""
    return table.c.due, table.c.seq if "seq" in table.c else table.c.id


def _sequence(*, primary_key: bool) -> Column[int]:
    return Column("seq", SEQUENCE, Identity(), primary_key=primary_key, autoincrement=True)


def index_name(table: str, index: str) -> str:
    """Return a name that is the table's own: in PostgreSQL and SQLite indexes share the tables' names."""
    name = f"{table}.{index}"
    if len(name.encode()) <= LONGEST_INDEX_NAME:
        return name
    return f"{hashlib.sha256(table.encode()).hexdigest()[:16]}.{index}"


def must_fit(table: str, length: int, longest: int, unit: str, place: object) -> None:
    """Raise ConfigurationError for a table's name that the database would cut or refuse."""
    if length > longest:
        raise ConfigurationError(
            f"the table name {table!r} is longer than the {longest} {unit} that {place} allows: "
            "give the endpoint a shorter name, or the store a table_name"
        )
