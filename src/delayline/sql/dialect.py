"""The interfaces of a database product; a package implements them for each."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol, TypeVar, runtime_checkable

from sqlalchemy import bindparam, delete

from delayline.sql.schema import TO_PUT, timeouts_table

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from datetime import datetime

    import pyarrow as pa
    import sqlalchemy
    from sqlalchemy import ColumnElement, Connection, Executable, Insert, Table

    from delayline.message import Message
    from delayline.sql.deadlines import StopLimit
    from delayline.sql.moves import ClaimingMove, Forwarding, Moved, WaitingReceiver
    from delayline.sql.notifications import ServerNotifications
    from delayline.sql.prepared import Prepared, StatementResult
    from delayline.sql.schema import QueueTables
    from delayline.sql.server_clock import ServerClock
    from delayline.sql.timeouts import TimeoutShape


Result = TypeVar("Result")
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

    def number_claimed_after(self, row: int) -> int:
        """Return how many rows this process holds whose numbers are higher."""
        ...

    def holds(self, row: int) -> bool:
        """Return whether this process holds the row, as of its last request."""
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
        """Return a short name that no other database has. Raises BackendUnusable where it cannot."""
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


class Leases(Protocol):
    """The leases on one store's messages."""

    in_row: ClassVar[bool]
    """Whether leases are columns of the row: then they end with it, and a transaction that locks it sees the latest."""
    free: ColumnElement[bool]
    """The condition that the row is not leased."""

    def take(self, connection: Connection, ids: Sequence[str]) -> Sequence[str]:
        """Lease messages whose rows are locked; return the ones that no other process leased at the same moment."""
        ...

    def end(self, connection: Connection, ids: Sequence[str]) -> None:
        """End the leases on these messages."""
        ...


class OnConflict(StrEnum):
    """The treatment of a message whose id exists already."""

    FAIL = "fail"
    IGNORE = "ignore"
    REPLACE = "replace"


class Stage(Protocol):
    """A staging area in one database. `write` is called in tasks, the others on the driver."""

    table: Table
    """Where the rows are when `move` is called."""

    def create(self, connection: Connection) -> None:
        """Make it, unless it is there."""
        ...

    def write(self, attempt: int, batches: Iterable[pa.RecordBatch]) -> None:
        """Stage the rows on a separate connection; raises if the staging area is gone."""
        ...

    def gather(self, connection: Connection, attempts: Sequence[int]) -> int:
        """Make the attempts' rows ready to be moved and return how many there are."""
        ...

    def move(self, connection: Connection, attempts: Sequence[int], on_conflict: OnConflict) -> int:
        """Put the gathered rows into the store and return how many it took; raises the driver's IntegrityError."""
        ...

    def append(self, connection: Connection, batch: pa.RecordBatch) -> None:
        """Put rows into the store that were not staged, as they are; raises the driver's IntegrityError."""
        ...

    def clear(self, connection: Connection, attempts: Sequence[int], before: int) -> None:
        """Delete the rows of the attempts, and of those with a number below `before`."""
        ...

    def drop(self, connection: Connection) -> None:
        """Remove it."""
        ...

    def found(self, connection: Connection) -> Sequence[str]:
        """Return the names of all staging areas beside this one."""
        ...

    def named(self, name: str) -> Stage:
        """Return another one."""
        ...


#: Set on a connection whose commit failed: if the connection is lost as well, the outcome is unknown.
NOT_COMMITTED: Final = "delayline not committed"


#: Noted of a connection whose session limits its waits.
IN_SESSION: Final = "delayline session"


@dataclass(frozen=True, slots=True)
class JournalTriggers:
    """Templates of the statements about the triggers that write a store's journal.

    Names in braces are those of tables, quoted, and `store`, a literal.
    """

    create: Mapping[str, str]
    drop: str
    found: str
    """The query for the names of a table's triggers."""
    needs_rights: bool = False
    """Whether triggers run with the rights of the user that changes a row, not with their owner's."""


class LoopStatements(Protocol):
    """A short way for single statements outside transactions, without a worker thread."""

    async def run(self, statement: Prepared, values: tuple[Any, ...]) -> StatementResult | None:
        """Run the statement, which commits by itself; None if it has to go the ordinary way, and nothing was done."""
        ...

    def rest(self) -> None:
        """Give a connection that has not been used for a while back to the pool. Never blocks."""
        ...

    def close(self) -> None:
        """Finish the work in progress and accept no more; blocks."""
        ...


class ServerClaims(Claims, Protocol):
    """Claims on the rows of one table, held by a connection."""

    def close(self) -> None:
        """Give up every claim."""
        ...


class Page(NamedTuple):
    """The numbers that one look into a queue has found."""

    claimed: list[int]
    last: int
    """The last number found, claimed or not."""
    more: bool
    """Whether as many were found as were asked for."""


class TransactionsInProgress(NamedTuple):
    """Which transactions are in progress, of those that can put messages into a queue."""

    oldest: int
    """The number of the oldest one; all with lower numbers have ended."""
    following: int
    """The number of the next one to begin."""
    first: int | None
    """The number of the first message that was looked for, in the same snapshot; None for none."""


@runtime_checkable
class ClaimsInStatements(ServerClaims, Protocol):
    """Claims that are made in the statement that moves the messages to their queue, or that looks into the queue."""

    def register(self, receiver: WaitingReceiver) -> Callable[[], None]:
        """Claim moved messages for the receiver while it waits for some; return how to stop."""
        ...

    def waiting_receiver(self) -> WaitingReceiver | None:
        """Return a receiver that waits for messages, if there is one."""
        ...

    async def move(self, move: ClaimingMove) -> Moved:
        """Run the move on the claims' connection, and claim the rows that it has locked."""
        ...

    async def take_next(self, queued: Table, queue: str, after: int, limit: int, among: int = 0) -> Page:
        """Claim up to `limit` messages of a queue after the number `after`; skips messages with other claims.

        `among`: how many messages to look at, `limit` of them if that is more.
        """
        ...

    def in_progress(self, connection: Connection, queued: Table, queue: str, after: int) -> TransactionsInProgress:
        """Return which transactions are in progress, and the queue's first message after the number `after`."""
        ...


class ColumnValues(ABC):
    """How a product's columns keep values, and its clock."""

    clock_tick: ClassVar[timedelta] = timedelta(microseconds=1)
    """The resolution of the clock that `in_seconds` reads: it may be read that much too early."""
    largest_message: ClassVar[int] = 500_000_000
    """How many bytes the headers and the body of a message may have together, so that it can also be read again."""

    @abstractmethod
    def in_seconds(self, seconds: int) -> ColumnElement[Any]:
        """Return the database's time so many seconds from now, as the due column keeps times."""

    def to_due(self, due: datetime) -> Any:  # noqa: ANN401 - what the driver takes
        """Return the due column's value for `due`, rounded up to its precision: by default as it is."""
        return due

    def to_until(self, at: datetime) -> Any:  # noqa: ANN401 - as above
        """Return the value that due times are compared with: never later than `at`."""
        return self.to_due(at)

    @abstractmethod
    def from_due(self, kept: Any) -> datetime:  # noqa: ANN401 - what the driver gives
        """Return the due time that the column keeps, in UTC."""

    @abstractmethod
    def microseconds(self, due: ColumnElement[Any]) -> ColumnElement[int]:
        """Return the due column as microseconds since 1970 UTC."""

    def headers_of(self, message: Message) -> bytes:
        """Return a message's headers as the store's table keeps them: by default as they travel."""
        return message.encoded_headers


class StatementWords(ABC):
    """The parts of statements that differ between products."""

    forces_indexes: ClassVar[bool] = False
    """Whether statements name the indexes to use, which then have to exist."""
    deletes_by_list: ClassVar[bool] = False
    """Whether a delete of a list of keys locks no other rows."""
    returns_deleted: ClassVar[bool] = False
    """Whether a delete returns the rows that it has deleted."""

    def one_of(self, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
        """Return the condition that the column is one of the list bound as `name`."""
        return column.in_(bindparam(name, expanding=True))

    def exact(self, column: ColumnElement[str]) -> ColumnElement[str]:
        """Return a destination's column such that it equals a text only character for character."""
        return column

    @abstractmethod
    def insert_new(self, table: Table, key: str) -> Insert:
        """Return an insert that leaves a row with the same key, or primary key that includes it, as it is."""


class BulkStatements(ABC):
    """Statements on many rows at once, or on whole tables."""

    locks_tables: ClassVar[bool] = False
    """Whether other writers are excluded from a table that `lock_table` has locked."""

    def insert_rows(self, connection: Connection, insert: Prepared, rows: Sequence[tuple[Any, ...]]) -> None:
        """Run the insert for every row."""
        insert.change_many(connection, rows)

    def inserts_at_once(self, connection: Connection, insert: Prepared, rows: Sequence[tuple[Any, ...]]) -> bool:
        """Insert many rows by one statement that commits by itself; False for another way, and nothing was done."""
        del connection, insert, rows
        return False

    @abstractmethod
    def stage(self, store: Table, name: str) -> Stage:
        """Return the staging area of that name for bulk writes to `store`.

        Raises ConfigurationError where the product has none, and MissingExtra without pyarrow.
        """

    def lock_table(self, connection: Connection, table: Table, *, readers: bool = False) -> None:  # noqa: B027 - optional
        """Lock the table against writers, or readers too, until the transaction ends; some products do nothing."""

    def begin_scan(self, connection: Connection) -> None:  # noqa: B027 - optional
        """Begin a transaction if a cursor on the server, or a setting for a statement, needs one."""

    def plan_for_scans(self, connection: Connection) -> None:  # noqa: B027 - optional
        """Let the server plan the transaction's statements for whole tables, where connections plan for few rows."""

    @abstractmethod
    def estimate_due(self, connection: Connection, table: Table, edges: Sequence[Any]) -> Sequence[float]:
        """Return about how many rows of a store are due before, between and from the edges on.

        Reads a bounded number of rows, or the database's statistics; there is no open transaction.
        """

    def delete_copied(self, connection: Connection, table: Table, copy: Table, key: str) -> int:
        """Delete the rows whose keys are in `copy`, and return their number."""
        return connection.execute(delete(table).where(table.c[key] == copy.c[key])).rowcount


class Catalog(ABC):
    """The tables of one database: names, set-up, checks and rights."""

    rights_to_store: ClassVar[Sequence[str]] = TO_PUT
    """The rights on its table that storing messages needs."""
    folds_column_case: ClassVar[bool] = True
    """Whether a column may be found under a name that differs only in case."""
    journal: ClassVar[JournalTriggers | None] = None
    """The triggers that write a store's journal; None where none can be kept."""

    @abstractmethod
    def kept_name(self, table: str) -> str:
        """Return the name under which the database keeps a table; raises ConfigurationError for one too long."""

    def schema_of(self, schema: str | None) -> str | None:
        """Return the schema that the user has named, or the one to use, None for the connection's own."""
        return schema

    def timeouts_table(self, name: str, schema: str | None) -> Table:
        """Return the table of a delayed message store, whose columns have the names that `schema` gives them."""
        return timeouts_table(name, schema, leases=True)

    def store_table(self, name: str, schema: str | None) -> Table:
        """Return the table of a store by the name and schema that the user has given."""
        return self.timeouts_table(self.kept_name(name), self.schema_of(schema))

    def further_tables(self, tables: QueueTables) -> Sequence[Table]:
        """Return the shared tables that this product has besides those of the queues: by default none."""
        del tables
        return ()

    def make(self, connection: Connection, step: Executable) -> None:
        """Run a DDL statement; ignores an object that another process has just created."""
        connection.execute(step)

    def mending(self, connection: Connection, table: Table) -> Sequence[Executable]:
        """Return the statements that mend a table that is there: they number new rows behind those of existing ones.

        Raises BackendUnusable for a table that cannot be used, as one that another engine has distributed.
        """
        del connection, table
        return ()

    def setting_up(self, connection: Connection) -> AbstractContextManager[None]:
        """Let one process at a time create tables, in the transaction that is open."""
        del connection
        return contextlib.nullcontext()

    @abstractmethod
    def identify(self, connection: Connection, table: Table) -> TableIdentity:
        """Return the table's identity, the same on any connection to this product; uses cursors only.

        Raises ConfigurationError where the product has no external transactions.
        """

    @abstractmethod
    def findings(self, connection: Connection) -> list[Finding]:
        """Return the findings about the database for `delayline doctor`."""

    @abstractmethod
    def missing_rights(self, connection: Connection, needed: Mapping[Table, Sequence[str]]) -> list[str]:
        """Return the GRANT statements for missing rights on existing tables."""


class TransactionControl(Protocol):
    """How transactions begin and end."""

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


class DatabaseAccess(Protocol):
    """Connections outside the database's own, and the errors of its driver."""

    server_timeout: float
    """Seconds to wait for an answer of the server."""

    @property
    def server_address(self) -> tuple[str, int | None] | None:
        """Host and port of the server; None for a file."""
        ...

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The driver's exceptions, raw and wrapped by SQLAlchemy."""
        ...

    def takes_writes(self, connection: Connection) -> bool:
        """Return whether the session of any connection to this product may write; uses cursors only."""
        ...

    def translated(self, error: Exception) -> Exception:
        """Return the delayline error for a driver's error, or the error itself when it is a programming mistake."""
        ...

    def plans_without(self, error: Exception) -> bool:
        """Return whether set-up can be planned in spite of the error, which kept the server from being asked."""
        ...

    def must_exist(self) -> None:
        """Raise BackendUnusable if the database does not exist and connecting would create an empty one."""
        ...

    def look(self) -> AbstractContextManager[Connection]:
        """Return a connection for reading: nothing is made or changed, not even by opening it."""
        ...


class Dialect(TransactionControl, DatabaseAccess, Protocol):
    """One database of one product."""

    values: ColumnValues
    words: StatementWords
    bulk: BulkStatements
    catalog: Catalog
    timeouts: TimeoutShape

    @property
    def sql(self) -> sqlalchemy.Dialect:
        """SQLAlchemy's dialect, which statements are compiled for."""
        ...

    def __hash__(self) -> int:
        """Return a hash by identity."""
        ...


def conflict_columns(table: Table, key: str) -> Sequence[str]:
    """Return the columns that are unique together and include `key`: the primary key, or the column itself."""
    primary = tuple(table.primary_key.columns.keys())
    return primary if key in primary else (key,)


class ServerSession(Protocol):
    """A connection to a server that is made anew when it was lost. Used by one thread at a time."""

    driver: Any
    """The driver's connection; None while there is none."""

    @property
    def trusted(self) -> bool:
        """Whether the connection can be used without trying it first."""
        ...

    def run(self, work: Callable[[Connection], Result], *, commits: bool = False) -> Result:
        """Run `work` while no transaction is open; driver errors are raised as delayline's.

        Args:
            work: the function to run.
            commits: whether the statement commits by itself, so that a lost answer leaves its outcome unknown.
        """
        ...

    def waits(self) -> None:
        """Expect an answer within the limit."""
        ...

    def answered(self) -> None:
        """Note that the connection was alive a moment ago."""
        ...

    def failed(self, error: Exception, *, commits: bool) -> Exception:
        """Return delayline's error for a driver's, having given the connection up if that was its end."""
        ...

    def give_back(self) -> None:
        """Let others use the connection."""
        ...

    def close(self) -> None:
        """Disconnect. Idempotent."""
        ...


class ServerSessions(Protocol):
    """The sessions and worker threads of a server's database."""

    dialect: Server

    @property
    def clock(self) -> ServerClock:
        """The server's."""
        ...

    def session(self) -> ServerSession:
        """Return an idle connection, or a new one; on a worker thread."""
        ...

    def use_session(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` on an idle connection, or on a new one; on a worker thread."""
        ...

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` on a worker thread."""
        ...

    def spawn(self, work: Callable[[], object]) -> None:
        """Schedule `work` on a worker thread without waiting for it. No-op once closed."""
        ...

    def close_unused(self) -> None:
        """Close the connection that was used longest ago, if that is a while ago. Never blocks."""
        ...


class ServerConnections(Protocol):
    """Connections to a server."""

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

    def connect_with(self, connect: Callable[[], object]) -> None:
        """Make connections by a function of the user's."""
        ...

    def check(self) -> None:
        """Connect once and refuse unusable servers: an old version, missing rights. Raises BackendUnusable."""
        ...

    def connect(self) -> Connection:
        """Return a new connection in autocommit."""
        ...

    def ping(self, connection: Connection) -> bool:
        """Ask the server for a sign of life; raises one of `errors`.

        Returns False if it has given the connection's writes up since it was made: it is a primary no more.
        """
        ...


class ServerErrors(Protocol):
    """The meaning of a server's errors."""

    def is_broken(self, connection: Connection) -> bool:
        """Return whether SQLAlchemy or the driver has found the connection's end, whatever the error is."""
        ...

    def is_disconnect(self, error: Exception) -> bool:
        """Return whether the error means that the connection is of no use any more."""
        ...

    def outdates_sessions(self, error: Exception) -> bool:
        """Return whether open sessions are of no use any more, though a new one may be; the statement had no effect.

        So after a failover that leaves them open, read-only, and where tables have changed under prepared statements.
        """
        ...

    def is_deadlock(self, error: Exception) -> bool:
        """Return whether the transaction was given up in favour of another, so that it can be repeated as a whole."""
        ...

    def has_rolled_back(self, error: Exception) -> bool:
        """Return whether the server has rolled back the whole transaction; later work would be outside it."""
        ...


class ServerFeatures(Protocol):
    """The implementations that a server's product has for claims, notifications, inserts and forwarding."""

    def loop_statements(self, database: ServerSessions) -> LoopStatements | None:
        """Return the fast route for inserting single messages; None if there is none."""
        ...

    def notifications(self, database: ServerSessions) -> ServerNotifications:
        """Return the notifications of this server."""
        ...

    def claims(self, database: ServerSessions, table: str) -> ServerClaims:
        """Return claims on the rows of that table."""
        ...

    def leases(self, table: Table, tables: QueueTables) -> Leases:
        """Return the leases on a store's messages that are fetched without a transaction."""
        ...

    def forwarding(self, table: Table, tables: QueueTables) -> Forwarding:
        """Return how due messages of a store move inside the server."""
        ...


class Server(Dialect, ServerConnections, ServerErrors, ServerFeatures, Protocol):
    """One database of a server."""


def in_brief_transaction(dialect: Server, work: Callable[[Connection], Result], connection: Connection) -> Result:
    """Run `work` in a transaction of its own that gives up soon where it would have to wait for others' locks.

    For what only helps, such as a receiver's note that it stops: a session that builds an index holds up no stop.
    """
    dialect.begin(connection)
    try:
        with waiting_briefly(dialect, connection):
            result = work(connection)
        dialect.commit(connection)
    except BaseException:
        with contextlib.suppress(*dialect.errors):
            dialect.rollback(connection)
        raise
    return result


@contextlib.contextmanager
def waiting_briefly(dialect: Dialect, connection: Connection) -> Iterator[None]:
    """Let the statements of the open transaction give up soon where they would have to wait for others' locks.

    Without effect on products that cannot do that.
    """
    waits = dialect.decides
    if waits is None:
        yield
        return
    waits.wait_briefly(connection)
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # the transaction may have failed, or the connection
            waits.wait_as_usual(connection)
