"""The interfaces of a database product; each module in `dialects/` implements them for one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from datetime import datetime, timedelta

    import sqlalchemy
    from sqlalchemy import ColumnElement, Connection, Executable, Insert, Table

    from delayline.message import Message
    from delayline.sql.deadlines import StopLimit
    from delayline.sql.dialects.staging import Stage
    from delayline.sql.forwarding import Forwarding, TimeoutForwarding
    from delayline.sql.leases import Leases
    from delayline.sql.notifications import ServerNotifications
    from delayline.sql.prepared import Prepared
    from delayline.sql.schema import QueueTables
    from delayline.sql.server_database import ServerDatabase
    from delayline.sql.statements import StoreStatements


#: A finding of `doctor`: its subject, whether it is as it should be, and its value.
Finding = tuple[str, bool, str]


class TableIdentity(NamedTuple):
    """Identity of a table on one connection."""

    name: str
    """The database, for people."""
    database: Hashable
    """Equal on two connections to one database, and only there."""
    table: Hashable
    """Which of the database's tables it is; None for none."""


class Claims(Protocol):
    """This process's claims on rows of one table, which end with the process. Safe to call from any thread."""

    def take(self, rows: Iterable[int], limit: int) -> list[int]:
        """Claim up to `limit` of the rows, in their order, and return them; skips rows with other claims."""
        ...

    def release(self, rows: Iterable[int]) -> None:
        """Give up claims. Idempotent; never blocks for long."""
        ...

    def forget(self, rows: Iterable[int]) -> None:
        """Drop claims on deleted rows, without notifying other processes."""
        ...

    def flush(self) -> None:
        """Make released rows available to other processes; may block for a round trip."""
        ...

    @property
    def number_held(self) -> int:
        """How many rows this process holds."""
        ...


class DecisionReader(Protocol):
    """How one database is asked for a decision that may be being taken."""

    def wait_briefly(self, connection: Connection) -> None:
        """Let statements of the open transaction raise BackendUnavailable that would have to wait for others'."""
        ...

    def wait_as_usual(self, connection: Connection) -> None:
        """Undo that, where the end of the transaction does not."""
        ...


class PreparedTransactions(Protocol):
    """Prepared transactions of one database, which any process can finish later."""

    def check(self, connection: Connection) -> str:
        """Return a short name that tells the database from every other. Raises BackendUnusable where it cannot."""
        ...

    def prepare(self, connection: Connection, name: str) -> None:
        """Prepare the open transaction under that name; the connection is free afterwards."""
        ...

    def commit_prepared(self, connection: Connection, name: str) -> None:
        """Commit it; nothing when it is not there."""
        ...

    def roll_back_prepared(self, connection: Connection, name: str) -> None:
        """Roll it back; nothing when it is not there."""
        ...

    def in_doubt(self, connection: Connection, prefix: str) -> list[str]:
        """Return the names of prepared transactions that begin with the prefix."""
        ...


class Dialect(Protocol):
    """One database of one product: its SQL, its errors, its ways to begin and end."""

    clock_tick: timedelta
    """The resolution of the clock that `in_seconds` reads: it may be read that much too early."""

    server_timeout: float
    """Seconds to wait for an answer of the server."""

    largest_message: int
    """How many bytes the headers and the body of a message may have together, so that it can also be read again."""

    forces_indexes: bool
    """Whether statements name the indexes to use, which then have to exist."""

    @property
    def identity(self) -> Hashable:
        """Equal for URLs that can share a transaction; its str shows no password."""
        ...

    @property
    def decides(self) -> DecisionReader | None:
        """How a decision about transactions prepared elsewhere is kept here; None where it cannot be."""
        ...

    @property
    def two_phase(self) -> PreparedTransactions | None:
        """How transactions are prepared; None where they cannot be."""
        ...

    @property
    def sql(self) -> sqlalchemy.Dialect:
        """SQLAlchemy's dialect, which statements are compiled for."""
        ...

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The driver's exceptions, raw and wrapped by SQLAlchemy."""
        ...

    def kept_name(self, table: str) -> str:
        """Return the name under which the database keeps a table; raises ConfigurationError for one too long."""
        ...

    def schema_of(self, schema: str | None) -> str | None:
        """Return the schema that the user has named, or the one to use, None for the connection's own."""
        ...

    def timeouts_table(self, name: str, schema: str | None) -> Table:
        """Return the table of a delayed message store, whose columns have the names that `schema` gives them."""
        ...

    def must_exist(self) -> None:
        """Raise BackendUnusable if the database does not exist and connecting would create an empty one."""
        ...

    def look(self) -> AbstractContextManager[Connection]:
        """Return a connection to look around with: nothing is made or changed, not even by opening it."""
        ...

    def make(self, connection: Connection, step: Executable) -> None:
        """Run a DDL statement; ignores an object that another process has just created."""
        ...

    def setting_up(self, connection: Connection) -> AbstractContextManager[None]:
        """Let one process at a time create tables, in the transaction that is open."""
        ...

    def findings(self, connection: Connection) -> list[Finding]:
        """Return what can be told of the database, for `delayline doctor`."""
        ...

    def translated(self, error: Exception) -> Exception:
        """Return the delayline error for a driver's error, or the error itself when it is a programming mistake."""
        ...

    def in_seconds(self, seconds: int) -> ColumnElement[Any]:
        """Return the database's time so many seconds from now, as the due column keeps times."""
        ...

    def place(self, connection: Connection, table: Table) -> TableIdentity:
        """Return where the table is, seen from any connection to this product; uses cursors only."""
        ...

    def to_due(self, due: datetime) -> Any:  # noqa: ANN401 - what the driver takes
        """Return the due column's value for `due`, rounded up to its precision."""
        ...

    def to_until(self, at: datetime) -> Any:  # noqa: ANN401 - as above
        """Return what due times are compared with: never later than `at`."""
        ...

    def headers_of(self, message: Message) -> bytes:
        """Return a message's headers as the store's table keeps them."""
        ...

    def from_due(self, kept: Any) -> datetime:  # noqa: ANN401 - what the driver gives
        """Return the due time that the column keeps."""
        ...

    def microseconds(self, due: ColumnElement[Any]) -> ColumnElement[int]:
        """Return the due column as microseconds since 1970 UTC."""
        ...

    def one_of(self, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
        """Return the condition that the column is one of the list bound as `name`."""
        ...

    def plans_without(self, error: Exception) -> bool:
        """Tell whether set-up can be planned in spite of the error, which kept the server from being asked."""
        ...

    def missing_rights(self, connection: Connection, needed: Mapping[Table, Sequence[str]]) -> list[str]:
        """Return the GRANT statements for missing rights on existing tables."""
        ...

    def exact(self, column: ColumnElement[str]) -> ColumnElement[str]:
        """Return a destination's column such that it equals a text only character for character."""
        ...

    def insert_new(self, table: Table, key: str) -> Insert:
        """Return an insert that leaves a row with the same key as it is."""
        ...

    def insert_rows(self, connection: Connection, insert: Prepared, rows: Sequence[tuple[Any, ...]]) -> None:
        """Run the insert for every row."""
        ...

    def stage(self, store: Table, name: str) -> Stage:
        """Return the staging area of that name for bulk writes to `store`.

        Raises ConfigurationError where the product has none, and MissingExtra without pyarrow.
        """
        ...

    def timeout_forwarding(self, table: Table, tables: QueueTables) -> TimeoutForwarding | None:
        """Return how expired timeouts move inside the server, or None where they do not."""
        ...

    def begin(self, connection: Connection) -> None:
        """Begin a transaction."""
        ...

    def commit(self, connection: Connection) -> None:
        """Commit; durable on return."""
        ...

    def rollback(self, connection: Connection) -> None:
        """Roll back, unless the database has done so by itself."""
        ...

    def set_savepoint(self, connection: Connection) -> None:
        """Mark where `roll_back_to_savepoint` goes back to."""
        ...

    def roll_back_to_savepoint(self, connection: Connection) -> None:
        """Roll back to the savepoint, which stays set."""
        ...

    def release_savepoint(self, connection: Connection) -> None:
        """Release the savepoint and keep the work since."""
        ...


#: Set on a connection whose commit failed: if the connection is lost as well, the outcome is unknown.
NOT_COMMITTED: Final = "delayline not committed"


#: Noted of a connection whose session limits its waits.
IN_SESSION: Final = "delayline session"


class Inserts(Protocol):
    """A short way for the insert of a single message, outside transactions."""

    async def insert(self, statement: Prepared, row: tuple[Any, ...]) -> bool:
        """Insert the row; False when it has to go the ordinary way, and nothing was done."""
        ...

    def close(self) -> None:
        """Finish the work in progress and accept no more; blocks."""
        ...


class ServerClaims(Claims, Protocol):
    """Claims on the rows of one table, held by a connection."""

    def close(self) -> None:
        """Give up every claim."""
        ...


class Server(Dialect, Protocol):
    """One database of a server."""

    stops: StopLimit
    """The limit of waits while an endpoint stops."""

    @property
    def patience(self) -> float:
        """Seconds to wait for a connection."""
        ...

    @property
    def connect_timeout(self) -> float:
        """Seconds that connecting may take."""
        ...

    def is_broken(self, connection: Connection) -> bool:
        """Tell whether SQLAlchemy or the driver has found the connection's end, whatever the error says."""
        ...

    def check(self) -> None:
        """Connect once and refuse what cannot work: an old version, missing rights. Raises BackendUnusable."""
        ...

    def connect(self) -> Connection:
        """Return a new connection in autocommit."""
        ...

    def ping(self, connection: Connection) -> None:
        """Ask the server for a sign of life; raises one of `errors`."""
        ...

    def has_rolled_back(self, error: Exception) -> bool:
        """Tell whether the server has rolled back the whole transaction, so that what follows would be outside it."""
        ...

    def is_deadlock(self, error: Exception) -> bool:
        """Tell whether the transaction was given up in favour of another, so that it can be done again as a whole."""
        ...

    def is_disconnect(self, error: Exception) -> bool:
        """Tell whether the error means that the connection is of no use any more."""
        ...

    def inserts(self, database: ServerDatabase) -> Inserts | None:
        """Return the fast route for inserting single messages; None if there is none."""
        ...

    def inserts_at_once(self, connection: Connection, insert: Prepared, rows: Sequence[tuple[Any, ...]]) -> bool:
        """Insert many rows by one statement that commits by itself; False for another way, and nothing was done."""
        ...

    def notifications(self, database: ServerDatabase) -> ServerNotifications:
        """Return the notifications of this server."""
        ...

    def claims(self, database: ServerDatabase, table: str) -> ServerClaims:
        """Return claims on the rows of that table."""
        ...

    def leases(self, statements: StoreStatements, tables: QueueTables) -> Leases:
        """Return how messages are leased that are fetched without a transaction."""
        ...

    def forwarding(self, statements: StoreStatements, tables: QueueTables) -> Forwarding:
        """Return how due messages move inside the server."""
        ...
