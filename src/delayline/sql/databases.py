"""The databases of this process: stores and transports that name the same database share it, and its transactions."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final
from weakref import WeakValueDictionary

from sqlalchemy import create_engine, event
from sqlalchemy.engine import URL, Engine
from sqlalchemy.exc import DisconnectionError, InvalidatePoolError, InvalidRequestError

from delayline.errors import ConfigurationError, DelaylineError, MissingExtra
from delayline.sql import transaction_names
from delayline.sql.deadlines import checked_timeout
from delayline.sql.engine_limits import EngineLimits
from delayline.sql.schema import endpoint_names
from delayline.sql.server_database import ServerDatabase
from delayline.sql.sessions import PING_AFTER
from delayline.sql.setup import RequiredTables, version_findings
from delayline.sql.urls import read_url

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from sqlalchemy.engine import ExceptionContext
    from sqlalchemy.ext.asyncio import AsyncEngine

    from delayline.sql.database import Database
    from delayline.sql.dialect import Finding
    from delayline.sql.schema import TableGroup


@dataclass(frozen=True, slots=True)
class SqlDatabase:
    """A database and how it is connected to, for its transports, stores and persisters.

    Each of them may be given its plain URL instead; they share its connections, and the settings, either way.

    Args:
        url: The database, as `postgresql://user@host/name`; or an Engine of SQLAlchemy for a server, which makes the
            connections. They are delayline's own and do not return to the Engine's pool.
        pool_size: How many connections a server gets for statements and transactions, 2 to 1000; by default 4. Also a
            parameter of the URL. Notifications and claims need another connection each, and single inserts and deletes
            another.
        server_timeout: Seconds to wait for an answer of the server, above 0 and up to 3600; by default 15. Also a
            parameter of the URL, as in `?server_timeout=5`. Set-up and bulk work may take ten times as long.
        connect: Returns a new connection of the driver (psycopg, PyMySQL or pymssql), as for passwords that expire.

    Raises:
        ConfigurationError: `connect` and an Engine both make connections, or `url` is neither a text nor an Engine.
    """

    url: str | Engine = field(repr=False)
    pool_size: int | None = None
    server_timeout: float | None = None
    connect: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.url, str | Engine):
            raise ConfigurationError(
                f"the database is a URL or an Engine of SQLAlchemy, not {type(self.url).__name__}; for an AsyncEngine "
                "pass its sync_engine, or the URL"
            )
        if isinstance(self.url, Engine) and self.connect is not None:
            raise ConfigurationError("connect= and an Engine both make connections: pass one of them")

    @property
    def parsed_url(self) -> URL:
        """The URL, an Engine's too. Raises ConfigurationError."""
        if isinstance(self.url, Engine):
            return read_url(self.url.url.render_as_string(hide_password=False))
        return read_url(self.url)

    @property
    def connects(self) -> Callable[[], object] | None:
        """The function that makes connections; None where the URL says it all."""
        return partial(_connection_of, self.url) if isinstance(self.url, Engine) else self.connect


def must_exist(url: str) -> None:
    """Raise BackendUnusable if the database does not exist and opening it would create an empty database."""
    database_at(url).dialect.connections.must_exist()


async def examine(url: str, *, schema: str | None = None, prepares: bool = False) -> Sequence[Finding]:
    """Return the findings about the database. Raises BackendUnusable or BackendUnavailable.

    Args:
        url: The database.
        schema: The schema of its tables; None for the connection's own.
        prepares: Whether it prepares transactions of a two-phase commit.
    """
    database = database_at(url)
    await database.open()
    try:
        name = database.dialect.catalog.schema_of(schema)
        return [
            *await database.read(lambda connection: version_findings(connection, name)),
            *await database.read(database.dialect.catalog.findings),
            *await _prepared(database, prepares=prepares),
        ]
    finally:
        await database.close()


async def endpoints(url: str, *, schema: str | None = None) -> Sequence[str]:
    """Return the endpoints whose tables of delayed messages have their usual names. Raises as `examine` does.

    Args:
        url: The database.
        schema: The schema of its tables; None for the connection's own.
    """
    database = database_at(url)
    await database.open()
    try:
        name = database.dialect.catalog.schema_of(schema)
        return await database.read(lambda connection: endpoint_names(connection, name))
    finally:
        await database.close()


async def _prepared(database: Database, *, prepares: bool) -> Sequence[Finding]:
    """Return the finding about delayline's prepared transactions; none where there should be and are none."""
    two_phase = database.dialect.transactions.two_phase
    if two_phase is None:
        return ()
    try:
        if prepares:
            await database.read(two_phase.check)
        names = await database.read(partial(two_phase.in_doubt, prefix=transaction_names.PREFIX))
    except DelaylineError as error:
        return [(transaction_names.FINDING, False, str(error))] if prepares else ()
    return [transaction_names.finding(names, datetime.now(UTC))] if prepares or names else ()


async def set_up(url: str, groups: Sequence[TableGroup], *, schema: str | None = None) -> None:
    """Create the tables of the groups, or upgrade them. Raises the errors of `RequiredTables.set_up`."""
    database = database_at(url)
    await database.open()
    try:
        required = RequiredTables(database.dialect, database.dialect.catalog.schema_of(schema), *groups)
        await database.set_up(required.plan, required.set_up)
    finally:
        await database.close()


async def planned(url: str, groups: Sequence[TableGroup], *, schema: str | None = None) -> Sequence[str]:
    """Return the SQL that `set_up` would run, without running it. Raises the same errors."""
    database = database_at(url)
    required = RequiredTables(database.dialect, database.dialect.catalog.schema_of(schema), *groups)
    return await database.plan(required.plan, required.script)


_shared: Final[WeakValueDictionary[Hashable, Database]] = WeakValueDictionary()
#: Identities of servers by URL: to make an object only to find its identity takes milliseconds. A file's depends on
#: more.
_servers: Final[WeakValueDictionary[URL, Database]] = WeakValueDictionary()
_sharing: Final = threading.Lock()
#: A parameter of the URLs of jobs: the seconds that they wait for a full server. They share no connections with others.
JOB_PATIENCE: Final = "job_patience"
LARGEST_POOL: Final = 1000


def database_at(given: str | Engine | SqlDatabase) -> Database:
    """Return this process's database, without opening it. Raises ConfigurationError.

    Users that name the same database share it: the shortest of their timeouts applies, the largest of their pools, and
    the latest way to connect.
    """
    value = given if isinstance(given, SqlDatabase) else SqlDatabase(given)
    parsed = value.parsed_url
    timeout = parsed.query.get("server_timeout") if value.server_timeout is None else value.server_timeout
    size = parsed.query.get("pool_size") if value.pool_size is None else value.pool_size
    parsed = parsed.difference_update_query(["server_timeout", "pool_size"])
    with _sharing:
        known = _servers.get(parsed)
    patience = parsed.query.get(JOB_PATIENCE)
    database = known or _new(parsed.difference_update_query([JOB_PATIENCE]))
    # Sessions of a job have other settings than those of an endpoint in this process; a file has no sessions.
    of_job = patience is not None and isinstance(database, ServerDatabase)
    with _sharing:
        shared = _shared.setdefault((database.domain, of_job), database)
        if of_job and isinstance(shared, ServerDatabase):
            shared.dialect.connections.job_patience = float(str(patience))
        if isinstance(shared.domain, URL):
            _servers[parsed] = shared
        if timeout is not None:
            shared.limit_waits(checked_timeout(timeout))
        if size is not None:
            shared.resize_pool(_checked_size(size))
        if value.connects is not None:
            shared.connect_with(value.connects)
        return shared


#: Drivers for asyncio, by SQLAlchemy's name of the product, which is that of the extra too. For MariaDB not aiomysql,
#: which cannot be imported, or fails on numbers or bytes, with some versions of PyMySQL, and excludes none of them.
ASYNCHRONOUS_DRIVERS: Final = {
    "postgresql": "postgresql+psycopg",
    "sqlite": "sqlite+aiosqlite",
    "mariadb": "mariadb+asyncmy",
    "mysql": "mysql+asyncmy",
}


def engine_at(given: SqlDatabase, size: int, *, asynchronous: bool) -> Engine | AsyncEngine:
    """Return a new Engine on the URL's database, with the settings that its user would have, at READ COMMITTED.

    Args:
        given: The database.
        size: The most connections that it opens; 1 or more.
        asynchronous: Whether to return an AsyncEngine.

    Raises:
        MissingExtra: The driver for asyncio, or what SQLAlchemy needs for it, is not installed.
        ConfigurationError: The product has no driver for asyncio.
    """
    parsed = given.parsed_url.difference_update_query(["server_timeout", "pool_size", "pgbouncer"])
    product = parsed.get_backend_name()
    pool: dict[str, Any] = {"pool_size": size, "max_overflow": 0, "hide_parameters": True, "pool_use_lifo": True}
    database = database_at(given)
    if isinstance(database, ServerDatabase):  # as our own connections, whatever the server's default is
        pool["isolation_level"] = "READ COMMITTED"
        parsed = database.dialect.connections.url_of_engine(parsed)
    if not asynchronous:
        dialect = database.dialect.sql
        engine = create_engine(parsed.set(drivername=f"{dialect.name}+{dialect.driver}"), **pool)
        _watch_over(engine, database)
        return engine
    if product not in ASYNCHRONOUS_DRIVERS:
        raise ConfigurationError(
            f"context.transaction() in a coroutine handler has no driver for asyncio on {product}: make the handler a "
            "`def` function, or pass an AsyncEngine"
        )
    try:
        from sqlalchemy.ext.asyncio import create_async_engine  # which needs greenlet

        asynchronous_engine = create_async_engine(parsed.set(drivername=ASYNCHRONOUS_DRIVERS[product]), **pool)
    except (ImportError, InvalidRequestError) as error:
        raise MissingExtra(product, "context.transaction() in a coroutine handler") from error
    _watch_over(asynchronous_engine.sync_engine, database)
    return asynchronous_engine


MADE: Final = "delayline made"  # the key in the pool's `info`: for which generation of connections
USED: Final = "delayline used"  # likewise: when the connection was given back


def _watch_over(engine: Engine, database: Database) -> None:
    """Give up connections that are outdated, or on which the server has rolled a whole transaction back.

    After the latter a handler that goes on would commit a part of its work. A connection is tried after it was idle for
    a while, as our own are: before each transaction that would cost as much as one of its statements.
    """

    def failed(context: ExceptionContext) -> None:
        error = context.original_exception
        if isinstance(error, Exception) and database.dialect.errors.has_rolled_back(error):
            context.is_disconnect, context.invalidate_pool_on_disconnect = True, False

    def made(driver: object, record: Any) -> None:  # noqa: ANN401 - SQLAlchemy's
        del driver
        record.info[MADE] = database.usable_since

    def taken(driver: Any, record: Any, proxy: object) -> None:  # noqa: ANN401 - SQLAlchemy's
        del proxy
        if record.info.get(MADE, 0) < database.usable_since:
            raise DisconnectionError
        if time.monotonic() - record.info.get(USED, math.inf) > PING_AFTER and not engine.dialect.do_ping(driver):
            raise InvalidatePoolError

    def given_back(driver: object, record: Any) -> None:  # noqa: ANN401 - SQLAlchemy's
        del driver
        record.info[USED] = time.monotonic()

    event.listen(engine, "connect", made)
    event.listen(engine, "checkout", taken)
    event.listen(engine, "checkin", given_back)
    event.listen(engine, "handle_error", failed)
    if isinstance(database, ServerDatabase):
        EngineLimits(engine, database.dialect.connections)


def _checked_size(size: object) -> int:
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(size, bool | float) and 2 <= (number := int(size)) <= LARGEST_POOL:  # type: ignore[call-overload]
            return int(number)
    raise ConfigurationError(f"pool_size must be a whole number from 2 to {LARGEST_POOL}, not {size!r}")


def _connection_of(engine: Engine) -> object:
    """Return a new connection of the Engine that its pool does not count."""
    pooled = engine.raw_connection()
    driver = pooled.driver_connection
    pooled.detach()
    return driver


def _new(url: URL) -> Database:
    """Return a database object; a product's driver is loaded only when a URL names it."""
    match url.get_backend_name():
        case "sqlite":
            try:
                from delayline.sql.file_database import FileDatabase  # which needs fcntl
            except ModuleNotFoundError as error:
                if error.name != "fcntl":
                    raise
                raise ConfigurationError(
                    "delayline on SQLite needs POSIX file locks, which Windows does not have: run it in WSL, or on "
                    "Linux or macOS"
                ) from error
            return FileDatabase(url)
        case "postgresql":
            from delayline.sql.postgresql.dialect import Postgresql

            return ServerDatabase(Postgresql(url))
        case "mssql":
            from delayline.sql.sqlserver.dialect import SqlServer

            return ServerDatabase(SqlServer(url))
        case "mariadb" | "mysql" as product:
            from delayline.sql.mariadb.dialect import Mariadb, Mysql

            return ServerDatabase(Mariadb(url) if product == "mariadb" else Mysql(url))
        case other:
            raise ConfigurationError(
                f"no SQL dialect for {other!r} URLs; supported: sqlite:///file.db, postgresql://user@host/database, "
                "and mariadb:, mysql: and mssql: likewise"
            )


class _Fork:
    """Closes inherited databases when the process forks."""

    databases: ClassVar[list[Database]] = []

    @classmethod
    def before(cls) -> None:
        _sharing.acquire()  # a child must not inherit it from another thread's hands
        cls.databases = list(_shared.values())
        for database in cls.databases:
            database.before_fork()

    @classmethod
    def in_parent(cls) -> None:
        for database in cls.databases:
            database.after_fork()
        cls._end()

    @classmethod
    def in_child(cls) -> None:
        for database in cls.databases:
            database.after_fork_in_child()
        cls._end()

    @classmethod
    def _end(cls) -> None:
        cls.databases = []
        _sharing.release()


os.register_at_fork(before=_Fork.before, after_in_parent=_Fork.in_parent, after_in_child=_Fork.in_child)
