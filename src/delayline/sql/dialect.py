"""A database product in parts by subject: what all have in common, and what each product has to say.

The parts of a server are in `server`; the packages of the products have the rest.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

from sqlalchemy import and_, bindparam, delete, inspect, literal, or_, tuple_
from sqlalchemy.exc import DBAPIError

from delayline.delayed.outbox import LONGEST_ROW_PREFIX
from delayline.errors import ConfigurationError
from delayline.message import MAXIMUM_ID_LENGTH
from delayline.sql.schema import TO_PUT, timeouts_table

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from datetime import datetime

    import sqlalchemy
    from sqlalchemy import ClauseElement, Column, ColumnElement, Connection, Executable, Insert, Select, Table

    from delayline.message import Message
    from delayline.sql.deadlines import StopLimit
    from delayline.sql.journal_triggers import JournalTriggers
    from delayline.sql.prepared import Prepared
    from delayline.sql.schema import QueueTables
    from delayline.sql.staging import Stage
    from delayline.sql.timeouts import TimeoutShape


Result = TypeVar("Result")
#: A finding of `doctor`: its subject, whether it is as it should be, and its value.
Finding = tuple[str, bool, str]


class TableIdentity(NamedTuple):
    """Identity of a table on a connection."""

    name: str
    """The database, for people."""
    database: Hashable
    """Equal on two connections to one database, and only there."""
    table: Hashable
    """Which of the database's tables it is; None for none."""


class DecisionReader(Protocol):
    """How a database is asked for a decision that may be being taken."""

    def wait_briefly(self, connection: Connection) -> None:
        """Let statements of the open transaction raise BackendUnavailable that would have to wait for others'."""
        ...

    def wait_as_usual(self, connection: Connection) -> None:
        """Undo that, where the end of the transaction does not."""
        ...


class PreparedTransactions(Protocol):
    """Prepared transactions of a database, which any process can finish later."""

    def check(self, connection: Connection) -> str:
        """Return a short name that no other database has. Raises BackendUnusable where it cannot."""
        ...

    def control(self, name: str) -> TransactionControl:
        """Return how a transaction begins and ends that may be prepared under that name."""
        ...

    def prepare(self, connection: Connection, name: str) -> None:
        """Prepare the open transaction under its name; the connection may do nothing but finish it afterwards."""
        ...

    def commit_prepared(self, connection: Connection, name: str) -> bool:
        """Commit it, if it is there; return whether it is over: not while another connection still has it."""
        ...

    def roll_back_prepared(self, connection: Connection, name: str) -> bool:
        """Roll it back, if it is there; return whether it is over: not while another connection still has it."""
        ...

    def in_doubt(self, connection: Connection, prefix: str) -> list[str]:
        """Return the names of prepared transactions that begin with the prefix."""
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

    def containing(self, column: ColumnElement[bytes], part: ColumnElement[bytes]) -> ColumnElement[bool] | None:
        """Return the condition that a column of bytes has the part; None where the product cannot look for it."""
        del column, part
        return None

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
    #: The column of every row that says which table it is in, as `TableIdentity.table` does; None for no such column.
    table_of_row: ClassVar[str | None] = None
    """Whether a delete returns the rows that it has deleted."""
    fails_for_duplicates: ClassVar[bool] = False
    """Whether `insert_counted` fails for a row that is there already, and inserts no other either."""
    sees_whole_commits: ClassVar[bool] = False
    """Whether a query that passes over locked rows sees every row of a commit or none: locks may end one by one."""
    transactions_in_progress: ClassVar[Sequence[ColumnElement[int]]] = ()
    """The columns that show the oldest transaction in progress and the number of the next; none where nothing does."""

    def one_of(self, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
        """Return the condition that the column is in the list bound as `name`."""
        return column.in_(bindparam(name, expanding=True))

    def by_key(
        self, column: ColumnElement[Any], name: str, within: ColumnElement[bool] | None = None
    ) -> ColumnElement[bool]:
        """Return the condition that the unique column is in the list, for rows that no other transaction changes.

        Args:
            column: The column.
            name: The list's parameter.
            within: What is true of the rows anyway, for a planner that needs it to find them in few steps.
        """
        del within
        return self.one_of(column, name)

    def queued_after(self, queued: Table, after: ColumnElement[int]) -> ColumnElement[bool]:
        """Return the condition that a message is in the queue bound as `name`, and after a number in its order."""
        return and_(queued.c.queue == bindparam("name"), queued.c.seq > after)

    def exact(self, column: ColumnElement[str]) -> ColumnElement[str]:
        """Return a destination's column such that it equals a text only character for character."""
        return column

    @abstractmethod
    def insert_new(self, table: Table, key: str) -> Insert:
        """Return an insert that leaves a row with the same key, or primary key that includes it, as it is."""

    def insert_counted(self, table: Table, key: str) -> Insert:
        """Return an insert that says how many rows are new: it leaves the others, or `fails_for_duplicates`."""
        return self.insert_new(table, key)

    def known_lists(
        self, table: Table, lists: Sequence[str], others: Mapping[str, ColumnElement[Any]]
    ) -> ClauseElement | None:
        """Return a query for those of many keys that have a row, each looked up alone.

        None for a product that plans a query for a list by its values.

        Args:
            table: The table.
            lists: Columns of its key that have a list of values each, which is bound under the column's name.
            others: The values of the key's other columns, the same in each row.
        """
        del table, lists, others
        return None

    def insert_lists(
        self, table: Table, key: str, lists: Sequence[str], others: Mapping[str, ColumnElement[Any]]
    ) -> ClauseElement | None:
        """Return an insert of many rows that leaves those that are there and returns the lists' columns of the others.

        None for a product that inserts row by row.

        Args:
            table: The table.
            key: A column of its key.
            lists: Columns that have a list of values each, which is bound under the column's name.
            others: The values of the other columns, the same in each row.
        """
        del table, key, lists, others
        return None


class GroupQueries:
    """Queries by the index of groups, which have to use it whatever statistics say: here because they name it."""

    def order(self, *columns: ColumnElement[Any], constant: int) -> Sequence[ColumnElement[Any]]:
        """Return the order of the index's columns without the first, which are constant: MariaDB would sort by them."""
        return columns[constant:]

    def of_turn(self, group: ColumnElement[str], due: ColumnElement[Any]) -> ColumnElement[bool]:
        """Return the condition that a message is in the bound `group`, and due `since` then and `until` then."""
        return and_(group == bindparam("group"), due >= bindparam("since"), due <= bindparam("until"))

    def due_groups(self, group: Column[str], due: Column[Any]) -> Select[str, Any] | None:
        """Return the query for groups with messages due by `until`, and their earliest due times.

        Their names are between those bound as the lists `after` and `before`. None where it takes a query for each.
        """
        del group, due
        return None

    def groups_between(self, queue: Column[str], group: Column[str]) -> ColumnElement[bool]:
        """Return the condition that a message in the bound `queue` has a group between `after` and `before`."""
        return and_(queue == bindparam("queue"), group > bindparam("after"), group < bindparam("before"))

    def group_after(self, queue: Column[str], group: Column[str], number: Column[int]) -> ColumnElement[bool]:
        """Return the condition that a message in the bound `queue` and `group` has a number above `since`."""
        return and_(queue == bindparam("queue"), group == bindparam("group"), number > bindparam("since"))

    def index_names(self, connection: Connection, table: Table) -> set[str]:
        """Return the names of the indexes that a table has and that can be used."""
        indexes = inspect(connection).get_indexes(table.name, schema=table.schema)
        return {str(index["name"]) for index in indexes}


class RowValueGroups(GroupQueries):
    """Conditions on row values, which only the index of groups fulfils.

    By the group alone the planner may read another index in the order that is asked for: other groups' messages too.
    """

    def order(self, *columns: ColumnElement[Any], constant: int) -> Sequence[ColumnElement[Any]]:
        """Return the order that only the index of groups has."""
        del constant
        return columns

    def of_turn(self, group: ColumnElement[str], due: ColumnElement[Any]) -> ColumnElement[bool]:
        """Return the condition that only the index of groups fulfils.

        By the group and due times alone the planner may read the index of due times: other groups' messages too.
        """
        name, since, until = (
            bindparam(key, type_=column.type) for key, column in (("group", group), ("since", due), ("until", due))
        )
        return and_(tuple_(group, due) >= tuple_(name, since), tuple_(group, due) <= tuple_(name, until))

    def groups_between(self, queue: Column[str], group: Column[str]) -> ColumnElement[bool]:
        """Return the condition that only the index of groups fulfils."""
        name, after, before = (
            bindparam(key, type_=column.type) for key, column in (("queue", queue), ("after", group), ("before", group))
        )
        return and_(tuple_(queue, group) > tuple_(name, after), tuple_(queue, group) < tuple_(name, before))

    def group_after(self, queue: Column[str], group: Column[str], number: Column[int]) -> ColumnElement[bool]:
        """Return the condition that only the index of groups fulfils."""
        name, of, since = (
            bindparam(key, type_=column.type) for key, column in (("queue", queue), ("group", group), ("since", number))
        )
        return and_(tuple_(queue, group, number) > tuple_(name, of, since), tuple_(queue, group) <= tuple_(name, of))


class BulkStatements(ABC):
    """Statements on many rows at once, or on whole tables."""

    locks_tables: ClassVar[bool] = False
    """Whether other writers are excluded from a table that `lock_table` has locked."""

    def insert_rows(self, connection: Connection, insert: Prepared, rows: Sequence[tuple[Any, ...]]) -> None:
        """Run the insert for every row."""
        insert.change_many(connection, rows)

    def inserts_at_once(self, connection: Connection, insert: Prepared, rows: Sequence[tuple[Any, ...]]) -> bool:
        """Insert many rows by a statement that commits by itself; False for another way, and nothing was done."""
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
        """Begin a transaction if a cursor on the server, or a setting for a statement, needs it."""

    def plan_for_scans(self, connection: Connection) -> None:  # noqa: B027 - optional
        """Let the server plan the transaction's statements for whole tables, where connections plan for few rows."""

    @abstractmethod
    def estimate_due(self, connection: Connection, table: Table, edges: Sequence[Any]) -> Sequence[float]:
        """Return about how many rows of a store are due before, between and from the edges on.

        Reads a bounded number of rows, or the database's statistics; there is no open transaction.
        """

    def from_key(self, columns: Sequence[Column[Any]], key: Sequence[Any]) -> ColumnElement[bool]:
        """Return the condition that a row is at the key or after it in the order of the columns, which are an index."""
        return tuple_(*columns) >= tuple_(*map(literal, key, (column.type for column in columns)))

    def before_key(self, columns: Sequence[Column[Any]], key: Sequence[Any]) -> ColumnElement[bool]:
        """Return the condition that a row is before the key in the order of the columns, which are an index."""
        return tuple_(*columns) < tuple_(*map(literal, key, (column.type for column in columns)))

    def delete_copied(self, connection: Connection, table: Table, copy: Table, key: str) -> int:
        """Delete the rows whose keys are in `copy`, and return their number."""
        return connection.execute(delete(table).where(table.c[key] == copy.c[key])).rowcount


class Catalog(ABC):
    """The tables of a database: names, set-up, checks and rights."""

    rights_to_store: ClassVar[Sequence[str]] = TO_PUT
    """The rights on its table that storing messages needs."""
    folds_column_case: ClassVar[bool] = True
    """Whether a column may be found under a name that differs only in case."""
    journal: ClassVar[JournalTriggers | None] = None
    """The triggers that write a store's journal; None where none can be kept."""

    @abstractmethod
    def kept_name(self, table: str) -> str:
        """Return the name under which the database keeps a table; raises ConfigurationError for a name too long."""

    def schema_of(self, schema: str | None) -> str | None:
        """Return the schema that the user has named, or the schema to use, None for the connection's own."""
        return schema

    def timeouts_table(self, name: str, schema: str | None) -> Table:
        """Return the table of a delayed message store, whose columns have the names that `schema` gives them."""
        return timeouts_table(name, schema, leases=True)

    def store_table(self, name: str, schema: str | None) -> Table:
        """Return the table of a store by the name and schema that the user has given."""
        return self.timeouts_table(self.kept_name(name), self.schema_of(schema))

    def outbox_table(self, name: str, schema: str | None) -> Table:
        """Return the table of an outbox, whose rows have longer ids than their messages."""
        longest = LONGEST_ROW_PREFIX + MAXIMUM_ID_LENGTH
        return timeouts_table(self.kept_name(name), self.schema_of(schema), leases=True, id_length=longest)

    def further_tables(self, tables: QueueTables) -> Sequence[Table]:
        """Return the shared tables that this product has besides the queues' tables: by default none."""
        del tables
        return ()

    def make(self, connection: Connection, step: Executable) -> None:
        """Run a DDL statement; ignores an object that another process has just created."""
        connection.execute(step)

    def mending(self, connection: Connection, table: Table) -> Sequence[Executable]:
        """Return the statements that mend a table that is there: they number new rows behind those of existing rows.

        Raises BackendUnusable for a table that cannot be used, such as a table that another engine has distributed.
        """
        del connection, table
        return ()

    def setting_up(self, connection: Connection) -> AbstractContextManager[None]:
        """Let a single process at a time create tables, in the transaction that is open."""
        del connection
        return contextlib.nullcontext()

    @abstractmethod
    def identify(self, connection: Connection, table: Table, known: TableIdentity | None = None) -> TableIdentity:
        """Return the table's identity, the same on any connection to this product; uses cursors only.

        `known` was its identity on this connection before: what cannot have changed need not be asked for again. Raises
        ConfigurationError where the product has no external transactions.
        """

    @abstractmethod
    def findings(self, connection: Connection) -> list[Finding]:
        """Return the findings about the database for `delayline doctor`."""

    @abstractmethod
    def missing_rights(self, connection: Connection, needed: Mapping[Table, Sequence[str]]) -> list[str]:
        """Return the GRANT statements for missing rights on existing tables."""


class TransactionControl(ABC):
    """How transactions begin and end."""

    decides: DecisionReader | None = None
    """How a decision about transactions prepared elsewhere is kept here; None where it cannot be."""
    two_phase: PreparedTransactions | None = None
    """How transactions are prepared; None where they cannot be."""
    prepares_nothing: ClassVar[str] = "prepares no transactions"
    """Why, where they cannot be."""

    @abstractmethod
    def begin(self, connection: Connection) -> None:
        """Begin a transaction."""

    @abstractmethod
    def commit(self, connection: Connection) -> None:
        """Commit; durable on return."""

    @abstractmethod
    def rollback(self, connection: Connection) -> None:
        """Roll back, unless the database has done so by itself."""

    @abstractmethod
    def set_savepoint(self, connection: Connection) -> None:
        """Mark where `roll_back_to_savepoint` goes back to."""

    @abstractmethod
    def roll_back_to_savepoint(self, connection: Connection) -> None:
        """Roll back to the savepoint, which stays set."""

    @abstractmethod
    def release_savepoint(self, connection: Connection) -> None:
        """Release the savepoint and keep the work since."""

    @contextlib.contextmanager
    def waiting_briefly(self, connection: Connection) -> Iterator[None]:
        """Let the statements of the open transaction give up soon where they would have to wait for others' locks.

        Without effect on products that cannot do that.
        """
        waits = self.decides
        if waits is None:
            yield
            return
        waits.wait_briefly(connection)
        try:
            yield
        finally:
            with contextlib.suppress(Exception):  # the transaction may have failed, or the connection
                waits.wait_as_usual(connection)

    def run_briefly(self, work: Callable[[Connection], Result], connection: Connection) -> Result:
        """Run `work` in a transaction of its own that gives up soon where it would have to wait for others' locks.

        For what only helps, such as a receiver's note that it stops: a session that builds an index holds up no stop.
        """
        self.begin(connection)
        try:
            with self.waiting_briefly(connection):
                result = work(connection)
            self.commit(connection)
        except BaseException:
            with contextlib.suppress(Exception):  # the error that is raised says more
                self.rollback(connection)
            raise
        return result


class DriverErrors(ABC):
    """The errors of a database's driver, and what they mean."""

    @property
    @abstractmethod
    def kinds(self) -> tuple[type[Exception], ...]:
        """The driver's exceptions, raw and wrapped by SQLAlchemy."""

    @abstractmethod
    def translated(self, error: Exception) -> Exception:
        """Return the delayline error for a driver's error, or the error itself when it is a programming mistake."""

    def plans_without(self, error: Exception) -> bool:
        """Return whether set-up can be planned in spite of the error, which kept the server from being asked."""
        del error
        return False

    def is_disconnect(self, error: Exception) -> bool:
        """Return whether the error means that the connection is of no use any more."""
        del error
        return False

    def is_full(self, error: Exception) -> bool:
        """Return whether the server had no connection left, so that connecting may succeed when another has ended."""
        del error
        return False

    def has_rolled_back(self, error: Exception) -> bool:
        """Return whether the whole transaction has been rolled back; later work would be outside it."""
        del error
        return False

    def is_duplicate(self, error: Exception) -> bool:
        """Return whether a statement of `insert_counted` has inserted nothing, because a row is there already."""
        del error
        return False

    def is_deadlock(self, error: Exception) -> bool:
        """Return whether the transaction was given up in favour of another, so that it can be repeated as a whole."""
        return self.has_rolled_back(error)

    def gave_way(self, error: BaseException) -> bool:
        """Return whether the error, or one of its causes, gave the transaction up in favour of another."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, Exception) and _is_of_driver(cause) and self.is_deadlock(cause):
                return True
            cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
        return False


class Connections(ABC):
    """The connections to a database."""

    identity: Hashable
    """Equal for URLs that can share a transaction; its str shows no password."""
    stops: StopLimit
    """The limit of waits while an endpoint stops."""
    server_timeout: float
    """Seconds to wait for an answer of the server."""

    def connect_with(self, connect: Callable[[], object]) -> None:
        """Make connections by a function of the user's. Raises ConfigurationError for a file."""
        raise ConfigurationError(f"connect= and Engines are for servers: name {self} by its URL")

    @property
    def server_address(self) -> tuple[str, int | None] | None:
        """Host and port of the server; None for a file."""
        return None

    def unused(self, connection: Connection) -> int | None:
        """Return how many more connections the server would give this user; None where it has no limit."""
        del connection
        return None

    def must_exist(self) -> None:  # noqa: B027 - connecting to a server makes no database
        """Raise BackendUnusable if the database does not exist and connecting would create an empty database."""

    @abstractmethod
    def look(self) -> AbstractContextManager[Connection]:
        """Return a connection for reading: nothing is made or changed, not even by opening it."""

    def takes_writes(self, connection: Connection) -> bool:
        """Return whether the session of any connection to this product may write; uses cursors only."""
        del connection
        return True


class Dialect(ABC):
    """A database of a product: a part for each subject."""

    sql: sqlalchemy.Dialect
    """SQLAlchemy's dialect, which statements are compiled for."""
    values: ColumnValues
    words: StatementWords
    groups: GroupQueries = GroupQueries()
    bulk: BulkStatements
    catalog: Catalog
    timeouts: TimeoutShape
    transactions: TransactionControl
    errors: DriverErrors
    connections: Connections

    def __str__(self) -> str:
        return str(self.connections)


def from_key_by_columns(columns: Sequence[Column[Any]], key: Sequence[Any]) -> ColumnElement[bool]:
    """Return `BulkStatements.from_key` without row values, by which some products find no rows in an index."""
    (column, *others), (value, *rest) = columns, key
    if not others:
        last: ColumnElement[bool] = column >= value
        return last
    return or_(column > value, and_(column == value, from_key_by_columns(others, rest)))


def before_key_by_columns(columns: Sequence[Column[Any]], key: Sequence[Any]) -> ColumnElement[bool]:
    """Return `BulkStatements.before_key` without row values."""
    (column, *others), (value, *rest) = columns, key
    if not others:
        last: ColumnElement[bool] = column < value
        return last
    return or_(column < value, and_(column == value, before_key_by_columns(others, rest)))


def conflict_columns(table: Table, key: str) -> Sequence[str]:
    """Return the columns that are unique together and include `key`: the primary key, or the column itself."""
    primary = tuple(table.primary_key.columns.keys())
    return primary if key in primary else (key,)


def _is_of_driver(error: Exception) -> bool:
    """Return whether a driver, SQLAlchemy or Django has raised it: PEP 249 names the base class of theirs."""
    return isinstance(error, DBAPIError) or any(kind.__name__ == "Error" for kind in type(error).__mro__)
