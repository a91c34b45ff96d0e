"""External transactions: connections and sessions of the user that statements of stores and queues run on."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

from sqlalchemy.exc import DBAPIError

from delayline.errors import ConfigurationError, TransactionAborted
from delayline.external import django_connection
from delayline.sql.workers import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence
    from contextlib import AbstractContextManager

    from psycopg import AsyncConnection, AsyncCursor
    from sqlalchemy import Connection

    from delayline.external import ExternalTransaction

Result = TypeVar("Result")
#: Notes about connections that have no place for them.
_notes: Final[WeakKeyDictionary[Any, dict[Any, Any]]] = WeakKeyDictionary()
#: Before 3.12 sqlite3 knew nothing else.
LEGACY_AUTOCOMMIT: Final = getattr(sqlite3, "LEGACY_TRANSACTION_CONTROL", -1)


class ConnectionAdapter(Protocol):
    """A user's connection, with the transaction that is open on it, or that its first statement begins."""

    async def run(self, work: Callable[[Connection], Result], *, ends: bool = False) -> Result:
        """Run `work` on the connection, where its thread rules allow.

        Args:
            work: The work.
            ends: Whether the transaction's `end` follows at once, if it has one and the work returns something.
        """
        ...


class BorrowedConnection:
    """The part of a user's connection that statements need: cursors that return tuples, and the product's name.

    abort: makes the transaction refuse statements until it is rolled back; None for a driver that cannot.
    info: notes that last as long as the driver's connection; None where there is no place for them.
    """

    def __init__(
        self,
        product: str,
        cursor: Callable[[], Any],
        abort: Callable[[], None] | None = None,
        info: dict[Any, Any] | None = None,
    ) -> None:
        self.product = product
        self.cursor = cursor
        self.info: dict[Any, Any] = {} if info is None else info
        self._abort = abort

    @property
    def connection(self) -> BorrowedConnection:
        """Where SQLAlchemy's connections keep the driver's."""
        return self

    def abort(self) -> None:
        """Have the transaction write nothing more: the server has rolled back what it wrote before.

        Otherwise a user who goes on after an error would commit a part of it.
        """
        if self._abort is not None:
            self._abort()
            return
        cursor = self.cursor()
        try:
            cursor.execute("START TRANSACTION READ ONLY")  # until the user ends it
        finally:
            cursor.close()


async def hold_of(external: ExternalTransaction) -> ConnectionAdapter:
    """Return the connection that `external` names, ready for statements. Raises ConfigurationError."""
    given: Any = external.connection
    if _is(given, "sqlalchemy.orm", "scoped_session") or _is(given, "sqlalchemy.ext.asyncio", "async_scoped_session"):
        given = given() if external.thread is None else await external.thread.run(given)
    return adapter_of(external, given)


def adapter_of(external: ExternalTransaction, given: Any) -> ConnectionAdapter:  # noqa: ANN401 - the connection
    """Return a connection, ready for statements. Raises ConfigurationError."""
    if isinstance(given, str) or any(_is(given, module, name) for module, name in OF_DJANGO):
        return SyncConnectionAdapter(external, given, borrow_django, bound=True)
    for module, name, borrow in SYNCHRONOUS_CONNECTIONS:
        if _is(given, module, name):
            return SyncConnectionAdapter(external, given, borrow)
    for module, name, kind in ASYNCHRONOUS_CONNECTIONS:
        if _is(given, module, name):
            if external.thread is not None:
                raise ConfigurationError(
                    f"transaction= is an {name}, which belongs to its event loop: await Endpoint.send(...) there, "
                    "or give SyncEndpoint a synchronous connection"
                )
            return kind(external, given)
    for module, name, instead in REFUSED_CONNECTIONS:
        if _is(given, module, name):
            raise ConfigurationError(
                f"transaction= is {module}'s {name}, in which messages cannot be stored: {instead}"
            )
    raise ConfigurationError(
        "transaction= takes a SQLAlchemy Connection, AsyncConnection, Session or AsyncSession, a psycopg Connection or "
        "AsyncConnection, a connection of psycopg2, sqlite3 or PyMySQL, Django's connection or its alias, or a "
        f"delayline Transaction; not a {type(given).__name__}"
    )


class SyncConnectionAdapter:
    """A blocking connection: used on its caller's waiting thread, or else on a dedicated thread.

    An SQLite connection bound to the event loop's thread is used on that thread, and so is a connection of Django's.
    """

    def __init__(
        self,
        external: ExternalTransaction,
        connection: object,
        borrow: Callable[[Any], AbstractContextManager[BorrowedConnection]],
        *,
        bound: bool = False,
    ) -> None:
        self._thread = external.thread
        self._end = external.end
        self._connection = connection
        self._borrow = borrow
        self._bound = bound

    async def run(self, work: Callable[[Connection], Result], *, ends: bool = False) -> Result:
        """Run `work`."""
        if self._thread is not None:
            return await self._thread.run(lambda: self.work(work, ends=ends))
        if not self._bound:
            try:
                return await in_thread(lambda: self.work(work, ends=ends))
            except sqlite3.ProgrammingError as error:
                if "thread" not in str(error):
                    raise
                self._bound = True
        return self.work(work, ends=ends)

    def work(self, work: Callable[[Connection], Result], *, ends: bool) -> Result:
        """Run `work` as `run` does, on the thread of the connection."""
        with self._borrow(self._connection) as borrowed:
            result = work(cast("Connection", borrowed))  # of a connection, work uses the cursors only
        if ends and self._end is not None and result:
            self._end(self._connection)
        return result


class SqlAlchemyAsyncAdapter:
    """An AsyncConnection or AsyncSession, on its event loop."""

    def __init__(self, external: ExternalTransaction, connection: Any) -> None:  # noqa: ANN401 - either of two
        self._connection = connection
        self._end = external.end

    async def run(self, work: Callable[[Connection], Result], *, ends: bool = False) -> Result:
        """Run `work` as SQLAlchemy runs synchronous code on asynchronous drivers."""
        result: Result = await self._connection.run_sync(self._work, work, ends=ends)
        return result

    def _work(self, connection: Any, work: Callable[[Connection], Result], *, ends: bool) -> Result:  # noqa: ANN401
        borrow = borrow_session if hasattr(connection, "get_bind") else borrow_connection
        with borrow(connection) as borrowed:
            result = work(cast("Connection", borrowed))
        if ends and self._end is not None and result:
            self._end(connection)
        return result


class PsycopgAsyncAdapter:
    """A psycopg AsyncConnection: its statements are awaited in a greenlet, as SQLAlchemy does, or else by a thread."""

    def __init__(self, external: ExternalTransaction, connection: AsyncConnection[Any]) -> None:
        del external
        self._connection = connection

    async def run(self, work: Callable[[Connection], Result], *, ends: bool = False) -> Result:
        """Run `work`; its end has to be awaited."""
        del ends
        _refuse_psycopg_autocommit(self._connection)
        if _has_greenlets():
            from sqlalchemy.util.concurrency import await_only, greenlet_spawn

            result: Result = await greenlet_spawn(work, self._borrowed(await_only))
            return result
        loop = asyncio.get_running_loop()
        borrowed = self._borrowed(lambda answer: asyncio.run_coroutine_threadsafe(answer, loop).result())
        return await in_thread(lambda: work(borrowed))

    def _borrowed(self, wait: Callable[[Coroutine[Any, Any, Any]], Any]) -> Connection:
        from psycopg import AsyncCursor
        from psycopg.rows import tuple_row

        connection = self._connection
        borrowed = BorrowedConnection(
            "postgresql",
            lambda: AwaitedCursor(AsyncCursor(connection, row_factory=tuple_row), wait),
            info=_notes.setdefault(connection, {}),
        )
        return cast("Connection", borrowed)


@lru_cache(maxsize=1)
def _has_greenlets() -> bool:
    return find_spec("greenlet") is not None


class AwaitedCursor:
    """An asynchronous cursor for synchronous code, each of whose answers `wait` waits for."""

    def __init__(self, cursor: AsyncCursor[Any], wait: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._cursor = cursor
        self._wait = wait

    @property
    def rowcount(self) -> int:
        """How many rows were affected."""
        return self._cursor.rowcount

    @property
    def description(self) -> object:
        """None where there are no rows to fetch."""
        return self._cursor.description

    def execute(self, sql: str, values: Sequence[Any] = ()) -> None:
        """Execute once."""
        self._wait(self._execute(sql, values))

    def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Execute for each row."""
        self._wait(self._cursor.executemany(cast("Any", sql), rows))

    def fetchone(self) -> Any:  # noqa: ANN401 - what the columns hold
        """Return the next row, or None."""
        return self._wait(self._cursor.fetchone())

    def fetchall(self) -> list[Any]:
        """Return the rows that are left."""
        rows: list[Any] = self._wait(self._cursor.fetchall())
        return rows

    def close(self) -> None:
        """Let go of the result."""
        self._wait(self._cursor.close())

    async def _execute(self, sql: str, values: Sequence[Any]) -> None:
        await self._cursor.execute(cast("Any", sql), values)  # psycopg's type is a literal str; the SQL is SQLAlchemy's


class NumberedCursor:
    """A cursor of a driver that numbers its parameters, asyncpg, given statements that mark them with %s."""

    def __init__(self, cursor: Any) -> None:  # noqa: ANN401 - SQLAlchemy's adapter of the driver
        self._cursor = cursor

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._cursor, name)

    def execute(self, sql: str, values: Sequence[Any] = ()) -> None:
        """Execute once."""
        first, *others = sql.replace("%b", "%s").split("%s")
        numbered = first + "".join(f"${number}{part}" for number, part in enumerate(others, 1))
        self._cursor.execute(numbered.replace("%%", "%"), values)


@contextlib.contextmanager
def borrow_sqlite(connection: sqlite3.Connection) -> Iterator[BorrowedConnection]:
    """Borrow a sqlite3 connection, whatever its rows and texts look like."""
    if not connection.in_transaction and not _begins_by_itself(connection):
        raise _autocommit("open it without isolation_level=None and autocommit=True, or execute BEGIN first")

    def cursor() -> sqlite3.Cursor:
        plain = connection.cursor(sqlite3.Cursor)
        plain.row_factory = None
        return plain

    texts, connection.text_factory = connection.text_factory, str
    try:
        yield BorrowedConnection("sqlite", cursor)
    finally:
        connection.text_factory = texts


@contextlib.contextmanager
def borrow_psycopg(connection: Any) -> Iterator[BorrowedConnection]:  # noqa: ANN401 - psycopg is an extra
    """Borrow a psycopg connection, whatever its rows look like."""
    from psycopg import Cursor
    from psycopg.rows import tuple_row

    _refuse_psycopg_autocommit(connection)
    info = _notes.setdefault(connection, {})
    yield BorrowedConnection("postgresql", lambda: Cursor(connection, row_factory=tuple_row), info=info)


@contextlib.contextmanager
def borrow_psycopg2(connection: Any) -> Iterator[BorrowedConnection]:  # noqa: ANN401 - psycopg2 belongs to its user
    """Borrow a psycopg2 connection, whatever its rows look like; its errors become SQLAlchemy's."""
    import psycopg2
    from psycopg2.extensions import TRANSACTION_STATUS_IDLE, cursor

    if connection.autocommit and connection.info.transaction_status == TRANSACTION_STATUS_IDLE:
        raise _autocommit("set autocommit = False")
    if connection.status == psycopg2.extensions.STATUS_PREPARED:
        raise ConfigurationError("transaction= is a two-phase transaction that is prepared: send before you prepare it")
    try:
        yield BorrowedConnection("postgresql", lambda: PlainCursor(connection.cursor(cursor_factory=cursor)))
    except psycopg2.Error as error:
        raise DBAPIError(None, None, error) from error


@contextlib.contextmanager
def borrow_pymysql(connection: Any) -> Iterator[BorrowedConnection]:  # noqa: ANN401 - pymysql is an extra
    """Borrow a PyMySQL connection, whatever its rows look like."""
    from pymysql.constants.SERVER_STATUS import SERVER_STATUS_IN_TRANS
    from pymysql.cursors import Cursor

    if connection.get_autocommit() and not connection.server_status & SERVER_STATUS_IN_TRANS:
        raise _autocommit("connect with autocommit=False, or call connection.begin() first")
    yield BorrowedConnection(_product_of_mysql(connection.get_server_info()), lambda: connection.cursor(Cursor))


@contextlib.contextmanager
def borrow_mysqlclient(connection: Any) -> Iterator[BorrowedConnection]:  # noqa: ANN401 - mysqlclient belongs to its user
    """Borrow a connection of mysqlclient, as Django uses; its errors become SQLAlchemy's."""
    import MySQLdb
    from MySQLdb.cursors import Cursor

    if connection.get_autocommit():
        raise _autocommit("call connection.autocommit(False) first")
    try:
        yield BorrowedConnection(_product_of_mysql(connection.get_server_info()), lambda: connection.cursor(Cursor))
    except MySQLdb.Error as error:
        raise DBAPIError(None, None, error) from error


@contextlib.contextmanager
def borrow_django(given: Any) -> Iterator[BorrowedConnection]:  # noqa: ANN401 - Django belongs to its user
    """Borrow the driver's connection of Django's `connection`, a member of `connections`, or an alias of DATABASES."""
    wrapper = _wrapper_of(given)
    if wrapper.connection is None:
        _connect(wrapper)
    if wrapper.needs_rollback:
        raise TransactionAborted(
            f"the transaction on Django's connection {wrapper.alias!r} is aborted, as something in it has failed "
            "before: roll it back by leaving its atomic() block, and send in a new transaction"
        )
    if wrapper.autocommit and not wrapper.in_atomic_block:
        raise _autocommit("send inside `with transaction.atomic():` of Django")
    for module, name, borrow in SYNCHRONOUS_CONNECTIONS:
        if _is(wrapper.connection, module, name):
            with borrow(wrapper.connection) as borrowed:
                abort = partial(setattr, wrapper, "needs_rollback", True)
                yield BorrowedConnection(borrowed.product, borrowed.cursor, abort, borrowed.info)
            return
    raise ConfigurationError(
        f"transaction= is Django's connection {wrapper.alias!r} to {wrapper.vendor}, and messages can be stored beside "
        "data in SQLite, PostgreSQL (psycopg or psycopg2), MariaDB and MySQL (mysqlclient or PyMySQL)"
    )


def _wrapper_of(given: Any) -> Any:  # noqa: ANN401
    """Return Django's connection of the thread that this runs on."""
    if not isinstance(given, str):
        if not _is(given, *OF_DJANGO[0]):
            return given
        given = given._alias
    return django_connection(given, "transaction=")


def _product_of_mysql(version: str) -> str:
    return "mariadb" if "mariadb" in version.lower() else "mysql"


def _connect(wrapper: Any) -> None:  # noqa: ANN401
    from django.core.exceptions import SynchronousOnlyOperation

    try:
        wrapper.ensure_connection()
    except SynchronousOnlyOperation as error:
        raise ConfigurationError(
            "transaction= is Django's connection, which cannot connect on an event loop: send with SyncEndpoint, in "
            "synchronous code, inside `with transaction.atomic():`"
        ) from error


class PlainCursor:
    """A cursor of a driver that has only a single form of parameters, %s."""

    def __init__(self, cursor: Any) -> None:  # noqa: ANN401 - the driver's
        self._cursor = cursor

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._cursor, name)

    def execute(self, sql: str, values: Sequence[Any] = ()) -> None:
        """Execute once."""
        self._cursor.execute(sql.replace("%b", "%s"), values)

    def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Execute for each row."""
        self._cursor.executemany(sql.replace("%b", "%s"), rows)


@contextlib.contextmanager
def borrow_session(session: Any) -> Iterator[BorrowedConnection]:  # noqa: ANN401 - sqlalchemy.orm is not imported here
    """Borrow the connection of a SQLAlchemy session, which begins where it has not."""
    with borrow_connection(session.connection()) as borrowed:
        yield borrowed


@contextlib.contextmanager
def borrow_connection(connection: Connection) -> Iterator[BorrowedConnection]:
    """Borrow a SQLAlchemy connection, which begins where it has not, as with its first statement."""
    begun = None if connection.in_transaction() else connection.begin()
    try:
        _refuse_unusable(connection)
    except ConfigurationError:
        if begun is not None:
            begun.rollback()
        raise
    plain: Callable[[], object] = connection.connection.cursor
    cursor = plain
    if connection.dialect.paramstyle == "numeric_dollar":
        cursor = lambda: NumberedCursor(plain())  # noqa: E731
    elif connection.dialect.driver == "psycopg2":
        cursor = lambda: PlainCursor(plain())  # noqa: E731
    try:
        yield BorrowedConnection(connection.dialect.name, cursor, connection.invalidate, connection.info)
    except connection.dialect.loaded_dbapi.Error as error:
        if isinstance(error, sqlite3.Error):
            raise
        raise DBAPIError(None, None, error) from error  # dialects translate this class for every driver


def _refuse_unusable(connection: Connection) -> None:
    if getattr(connection.get_transaction(), "xid", None) is not None:
        raise ConfigurationError(
            "transaction= is a two-phase transaction, whose commit cannot be observed: "
            "send in a transaction without two phases"
        )
    dbapi, driver = connection.connection.dbapi_connection, connection.connection.driver_connection
    with contextlib.suppress(NotImplementedError):  # SQLAlchemy cannot read this driver's autocommit
        open_already = getattr(driver, "in_transaction", False)
        if dbapi is not None and connection.dialect.detect_autocommit_setting(dbapi) and not open_already:
            raise _autocommit('use an engine or connection without isolation_level="AUTOCOMMIT"')


def _begins_by_itself(connection: sqlite3.Connection) -> bool:
    mode = getattr(connection, "autocommit", LEGACY_AUTOCOMMIT)
    return connection.isolation_level is not None if mode == LEGACY_AUTOCOMMIT else not mode


def _refuse_psycopg_autocommit(connection: Any) -> None:  # noqa: ANN401
    if connection.autocommit and connection.info.transaction_status == 0:  # psycopg.pq.TransactionStatus.IDLE
        raise _autocommit("set autocommit = False, or send inside `with connection.transaction():`")


def _autocommit(remedy: str) -> ConfigurationError:
    return ConfigurationError(
        f"transaction= is a connection in autocommit, on which every statement commits by itself: {remedy}"
    )


def _is(connection: object, module: str, name: str) -> bool:
    """Return whether the connection is of that class, without importing its module."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(connection, getattr(loaded, name))


SYNCHRONOUS_CONNECTIONS: Final[
    tuple[tuple[str, str, Callable[[Any], AbstractContextManager[BorrowedConnection]]], ...]
] = (
    ("sqlite3", "Connection", borrow_sqlite),
    ("psycopg", "Connection", borrow_psycopg),
    ("psycopg2.extensions", "connection", borrow_psycopg2),
    ("pymysql.connections", "Connection", borrow_pymysql),
    ("MySQLdb.connections", "Connection", borrow_mysqlclient),
    ("sqlalchemy", "Connection", borrow_connection),
    ("sqlalchemy.orm", "Session", borrow_session),
)
OF_DJANGO: Final = (
    ("django.utils.connection", "ConnectionProxy"),
    ("django.db.backends.base.base", "BaseDatabaseWrapper"),
)
REFUSED_CONNECTIONS: Final = (
    ("asyncpg", "Connection", "pass SQLAlchemy's AsyncConnection on postgresql+asyncpg, or psycopg's AsyncConnection"),
    ("asyncpg.pool", "PoolConnectionProxy", "pass SQLAlchemy's AsyncConnection on postgresql+asyncpg, or psycopg's"),
    ("asyncmy.connection", "Connection", "pass SQLAlchemy's AsyncConnection on mariadb+asyncmy or mysql+asyncmy"),
    ("aiosqlite", "Connection", "pass SQLAlchemy's AsyncConnection on sqlite+aiosqlite, or a sqlite3.Connection"),
)
ASYNCHRONOUS_CONNECTIONS: Final[
    tuple[tuple[str, str, Callable[[ExternalTransaction, Any], ConnectionAdapter]], ...]
] = (
    ("sqlalchemy.ext.asyncio", "AsyncConnection", SqlAlchemyAsyncAdapter),
    ("sqlalchemy.ext.asyncio", "AsyncSession", SqlAlchemyAsyncAdapter),
    ("psycopg", "AsyncConnection", PsycopgAsyncAdapter),
)
