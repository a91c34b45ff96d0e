"""Connections to SQL Server 2016 and newer, Azure SQL too, through Microsoft's driver mssql-python, or pymssql."""

from __future__ import annotations

import importlib.util
import math
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import __version__ as sqlalchemy_version
from sqlalchemy import event

from delayline.errors import BackendUnusable, ConfigurationError, MissingExtra
from delayline.sql.deadlines import FACTOR, JOB_WORK, LONG_WORK
from delayline.sql.server import IN_SESSION, ServerConnections, run
from delayline.sql.sqlserver.errors import NOT_LOADED, SqlServerErrors, text_of
from delayline.sql.sqlserver.statements import HintedSql, IdempotentDdl

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import URL, Connection

OLDEST_SQL_SERVER: Final = 13  # SQL Server 2016, the oldest that Microsoft supports
#: How @@VERSION begins on a server whose version counts; that of Azure SQL has been 12.0.2000.8 for ever.
BOXED: Final = "Microsoft SQL Server"
MICROSOFT, PYMSSQL = "mssql+mssqlpython", "mssql+pymssql"
MICROSOFT_DIALECT: Final = "sqlalchemy.dialects.mssql.mssqlpython"  # SQLAlchemy 2.1 brought it
DRIVER_ARGUMENTS: Final[dict[str, dict[str, object]]] = {MICROSOFT: {}, PYMSSQL: {"appname": "delayline"}}
NO_LIBRARY: Final = "Failed to load the driver"  # in mssql-python's error for a missing library
UNKNOWN_OPTION: Final = "unexpected keyword argument"  # in the TypeError that pymssql raises for it
CHECK_URL: Final = "Check the user, the password and the options in the URL"
#: English, because errors are matched by text where they have no number; and a limit for lock waits.
SET_UP_SESSION: Final = (
    "SET LANGUAGE us_english; SET XACT_ABORT OFF; SET TRANSACTION ISOLATION LEVEL READ COMMITTED; "
    "SET LOCK_TIMEOUT 10000;"
)
PRODUCT: Final = "SELECT CAST(@@VERSION AS nvarchar(400)), CAST(SERVERPROPERTY('ProductVersion') AS nvarchar(128))"


class NoDriver:
    """Stands in for a driver that is not installed, so that SQLAlchemy can compile; it runs nothing."""

    paramstyle = "qmark"

    class Error(Exception):
        """Never raised."""

    @staticmethod
    def pooling(*, enabled: bool) -> None:
        """Do nothing; SQLAlchemy asks Microsoft's driver for no pool."""


class SqlServerConnections(ServerConnections):
    """The connections to an SQL Server database."""

    product = "SQL Server"
    extra: str = "sqlserver"
    default_port = 1433

    def __init__(self, url: URL) -> None:
        self.driver: str = _driver_of(url)
        if self.driver == MICROSOFT and not _installed(MICROSOFT_DIALECT):
            raise ConfigurationError(
                f"SQLAlchemy {sqlalchemy_version} cannot use mssql-python: run pip install 'sqlalchemy>=2.1', or "
                f"install delayline[pymssql] and write {PYMSSQL}:// in the URL"
            )
        self.uses_pymssql: bool = self.driver == PYMSSQL
        if self.uses_pymssql:
            self.extra = "pymssql"
        style = {"paramstyle": "format", "supports_comments": False} if self.uses_pymssql else {"paramstyle": "qmark"}
        self.missing: MissingExtra | None = None
        self.errors: SqlServerErrors = SqlServerErrors(self)
        try:
            try:
                super().__init__(url, connect_args=DRIVER_ARGUMENTS[self.driver], **style)
            except MissingExtra as error:  # SQL can be shown without a driver: connecting raises it
                self.missing = error
                super().__init__(url, connect_args=DRIVER_ARGUMENTS[self.driver], module=NoDriver, **style)
        except (ImportError, OSError, RuntimeError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(NOT_LOADED.format(error=error)) from error
        sql: Any = self.engine.dialect
        sql.statement_compiler, sql.ddl_compiler = HintedSql, IdempotentDdl
        sql._supports_offset_fetch = True  # also before the first connection
        sql.insert_returning = False  # row counts are not used
        event.listen(self.engine, "do_connect", self._connect_driver)

    def check(self) -> None:
        """Connect once. Raises BackendUnusable for a version that is too old."""
        with self.connect() as connection:
            [(product, version)] = run(connection, PRODUCT)
        if str(product).startswith(BOXED) and int(str(version).split(".")[0]) < OLDEST_SQL_SERVER:
            raise BackendUnusable(
                f"{self} is version {version}; delayline needs {OLDEST_SQL_SERVER} (SQL Server 2016) or newer"
            )

    def connect(self) -> Connection:
        """Return a new connection in autocommit, at READ COMMITTED: READPAST works at no other level."""
        if self.missing is not None:
            raise self.missing
        try:
            connection = self.connect_driver()
        except RuntimeError as error:  # from mssql-python where a library that it needs is missing
            raise ConfigurationError(NOT_LOADED.format(error=error)) from error
        except TypeError as error:
            if UNKNOWN_OPTION not in str(error):
                raise
            raise ConfigurationError(f"the URL of {self} has an option unknown to the driver: {error}") from error
        except self.errors.kinds as error:
            if NO_LIBRARY in str(error):
                raise ConfigurationError(NOT_LOADED.format(error=text_of(error))) from error
            if (
                self.errors.translated(error) is error
            ):  # of a class that means a mistake in a statement, and there was none
                raise BackendUnusable(f"cannot connect to {self}: {text_of(error)}. {CHECK_URL}") from error
            raise
        run(connection, SET_UP_SESSION)
        return connection

    @property
    def mark(self) -> str:
        """The placeholder of a parameter in the driver's words."""
        return "%s" if self.uses_pymssql else "?"

    def limit_connect(self, arguments: dict[str, Any]) -> None:
        """Limit connecting and, with pymssql, whose limit is the whole process's, statements by the longest limit."""
        login = max(1, math.ceil(self.connect_timeout))
        if self.uses_pymssql:
            arguments.setdefault("login_timeout", login)
            arguments.setdefault("timeout", math.ceil(self.server_timeout * JOB_WORK))
        elif "timeout" not in self.url.query:
            arguments.setdefault("timeout", login)

    def adopt(self, driver: Any) -> object:  # noqa: ANN401 - the drivers are extras
        """Return pymssql's connection so that it binds bytes as varbinary; Microsoft's driver cannot be adopted."""
        if not self.uses_pymssql:
            raise ConfigurationError(
                "connect= and Engines are not supported with mssql-python: write Authentication=... in the URL, or use "
                "pymssql"
            )
        return VarbinaryConnection(driver)

    def _connect_driver(self, _: object, record: Any, arguments: Sequence[Any], options: dict[str, Any]) -> Any:  # noqa: ANN401
        if self.uses_pymssql:
            return VarbinaryConnection(self.engine.dialect.loaded_dbapi.connect(*arguments, **options))
        from delayline.sql.sqlserver.microsoft import DeclaringConnection

        def seconds() -> int:
            factor = FACTOR.get() if record.info.get(IN_SESSION) else LONG_WORK
            return math.ceil(self.server_timeout * factor)

        connection = DeclaringConnection(*arguments, **options)
        connection.limit = seconds
        return connection


def _driver_of(url: URL) -> str:
    """Return the driver that the URL names, or the installed driver; Microsoft's wins."""
    if url.drivername in {MICROSOFT, PYMSSQL}:
        return url.drivername
    if url.drivername != "mssql":
        raise ConfigurationError(
            f"delayline does not support the driver of {url.drivername}:// URLs: write mssql://user@host/database, or "
            f"{PYMSSQL}://user@host/database for pymssql"
        )
    if _installed("pymssql") and not (_installed("mssql_python") and _installed(MICROSOFT_DIALECT)):
        return PYMSSQL
    return MICROSOFT


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


class VarbinaryConnection:
    """A pymssql connection whose cursors bind bytes as varbinary."""

    def __init__(self, connection: Any) -> None:  # noqa: ANN401 - the driver's
        self._connection = connection

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Return the attribute of the driver's connection."""
        return getattr(self._connection, name)

    def cursor(self) -> VarbinaryCursor:
        """Return a new cursor."""
        return VarbinaryCursor(self._connection.cursor())


class VarbinaryCursor:
    """A cursor of pymssql that does not send bytes as text."""

    def __init__(self, cursor: Any) -> None:  # noqa: ANN401 - the driver's
        self._cursor = cursor

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Return the attribute of the driver's cursor."""
        return getattr(self._cursor, name)

    def __iter__(self) -> Iterator[Any]:
        """Return the rows."""
        return iter(self._cursor)

    def execute(self, operation: str, parameters: Sequence[Any] = ()) -> Any:  # noqa: ANN401
        """Run the statement once."""
        return self._cursor.execute(operation, literal(parameters))

    def executemany(self, operation: str, seq_of_parameters: Sequence[Sequence[Any]]) -> None:
        """Run the statement for each row."""
        self._cursor.executemany(operation, [literal(row) for row in seq_of_parameters])


def literal(parameters: Sequence[Any]) -> tuple[Any, ...]:
    """Return the parameters in the types that pymssql writes as they are meant."""
    return tuple(bytearray(value) if isinstance(value, bytes | memoryview) else value for value in parameters)
