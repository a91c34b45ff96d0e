"""Connections to MariaDB 10.6 and newer, and MySQL 8, through PyMySQL: their settings, and how they begin."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Final

from sqlalchemy import event
from sqlalchemy.exc import InvalidRequestError

from delayline.errors import BackendUnusable, ConfigurationError, DelaylineError, MissingExtra
from delayline.sql.mariadb.errors import STATEMENT_LOG, MariadbErrors
from delayline.sql.server import ServerConnections, run, watch_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import URL, Connection

DRIVER_OPTIONS: Final = (
    "connect_timeout", "read_timeout", "write_timeout", "unix_socket", "ssl_ca", "ssl_cert", "ssl_key",
    "ssl_check_hostname",
)  # fmt: skip
PYMYSQL_ARGUMENTS: Final = {
    "charset": "utf8mb4",
    "sql_mode": "STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION",
    "init_command": "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    "program_name": "delayline",
}
SESSION_SETTINGS: Final = (
    "SET SESSION time_zone = '+00:00', default_storage_engine = 'InnoDB', wait_timeout = 2147483, "
    "innodb_lock_wait_timeout = {patience}, lock_wait_timeout = {patience}, "
    "sql_safe_updates = 0, sql_big_selects = 1, sql_select_limit = DEFAULT"
)
#: Both are there in each version, or none.
BINARY_LOG: Final = "SHOW VARIABLES WHERE Variable_name IN ('log_bin', 'binlog_format')"
#: The server's limit, the user's (0 is none), and the user's connections.
LIMITS: Final = (
    "SELECT @@GLOBAL.max_connections, @@max_user_connections, (SELECT count(*) FROM information_schema.processlist "
    "WHERE user = SUBSTRING_INDEX(USER(), '@', 1))"
)
WAS_READ_ONLY: Final = "delayline read-only"  # the key in SQLAlchemy's `Connection.info`


class MariadbConnections(ServerConnections):
    """The connections to a MariaDB database."""

    product = "MariaDB"
    driver = "mariadb+pymysql"
    extra = "mariadb"
    default_port = 3306
    oldest: ClassVar[tuple[int, ...]] = (10, 6)
    recover: ClassVar[str] = "XA RECOVER"
    """The statement that lists prepared transactions, whose names may have any bytes."""
    ends_idle_transactions: ClassVar[str | None] = "SET SESSION idle_transaction_timeout = %s"
    """The statement that has the server end a session whose transaction is idle; None where it has no such setting."""

    def __init__(self, url: URL) -> None:
        unknown = sorted(set(url.query) - set(DRIVER_OPTIONS))
        if unknown:
            raise ConfigurationError(
                f"a {url.get_backend_name()}:// URL has no option {unknown[0]!r}. "
                f"The options are {', '.join(DRIVER_OPTIONS)}"
            )
        arguments: dict[str, object] = dict(PYMYSQL_ARGUMENTS)
        if url.password is not None:
            arguments["password"] = url.password.encode()  # PyMySQL would make Latin-1 of it
        self.errors: MariadbErrors = MariadbErrors(self)
        super().__init__(url, connect_args=arguments, paramstyle="format")
        event.listen(self.engine, "do_connect", _connected)
        self.room: int = 0
        """Bytes that a statement may have; unknown before `check`."""

    def connect(self) -> Connection:
        """Return a new connection: autocommit, UTC, strict mode, READ COMMITTED."""
        try:
            connection = self.connect_driver()
        except DelaylineError:  # from the user's function
            raise
        except InvalidRequestError as error:  # SQLAlchemy has asked for the version
            raise BackendUnusable(f"{self} is MySQL: write mysql:// in its URL") from error
        except RuntimeError as error:
            raise MissingExtra("mysql", f"the way in which {self} checks passwords") from error
        except OSError as error:
            raise BackendUnusable(
                f"a certificate in the URL of {self} cannot be read: {error}. Check ssl_ca"
            ) from error
        run(connection, SESSION_SETTINGS.format(patience=self.lock_patience))
        if self.job_patience is not None and self.ends_idle_transactions is not None:
            run(connection, self.ends_idle_transactions, int(self.idle_transaction_timeout))
        connection.info[WAS_READ_ONLY] = not self.takes_writes(connection)
        driver: Any = connection.connection.driver_connection
        if "read_timeout" not in self.url.query:
            driver._read_timeout = None  # the watch limits each wait, and long work's differently
        if "write_timeout" not in self.url.query:
            driver._write_timeout = None
        watch_of(connection).end()
        return connection

    @property
    def lock_patience(self) -> int:
        """Whole seconds that a statement waits for a lock."""
        return max(1, int(self.lock_timeout))

    def limit_connect(self, arguments: dict[str, Any]) -> None:
        """Limit connecting, in which the driver's socket cannot be watched yet."""
        arguments.setdefault("connect_timeout", max(1, round(self.connect_timeout)))
        arguments.setdefault("read_timeout", max(1, round(self.connect_timeout)))
        arguments.setdefault("write_timeout", max(1, round(self.connect_timeout)))

    def adopt(self, driver: Any) -> object:  # noqa: ANN401 - PyMySQL is an extra
        """Return the connection in strict mode, at READ COMMITTED; `connect` does the rest."""
        from pymysql.connections import Connection as Driver

        if not isinstance(driver, Driver):
            raise self.not_a_connection(driver, "pymysql.connections.Connection objects, as of +pymysql:// Engines")
        driver.rollback()
        driver.set_character_set(PYMYSQL_ARGUMENTS["charset"])
        with driver.cursor() as cursor:
            cursor.execute("SET SESSION sql_mode = %s", (PYMYSQL_ARGUMENTS["sql_mode"],))
            cursor.execute(PYMYSQL_ARGUMENTS["init_command"])
        return driver

    def descriptor(self, driver: Any) -> int | None:  # noqa: ANN401 - PyMySQL is an extra
        """Return PyMySQL's socket."""
        return int(driver._sock.fileno())

    def check(self) -> None:
        """Connect once. Raises BackendUnusable for another product, or a version that is too old."""
        with self.connect() as connection:
            watch_of(connection).begin(self.server_timeout)
            written, packet = run(connection, "SELECT VERSION(), @@max_allowed_packet")[0]
            log = dict(run(connection, BINARY_LOG))
        if ("mariadb" in written.lower()) != (self.product == "MariaDB"):
            raise BackendUnusable(f"{self} is version {written}, which is MariaDB: write mariadb:// in its URL")
        version = tuple(int(part) for part in re.findall(r"\d+", written)[:3])
        if version < self.oldest:
            oldest = ".".join(map(str, self.oldest))
            raise BackendUnusable(f"{self} is version {written}; delayline needs {oldest} or newer")
        if log == {"log_bin": "ON", "binlog_format": "STATEMENT"}:
            raise BackendUnusable(STATEMENT_LOG.format(place=self, cause="binlog_format=STATEMENT"))
        self.room = int(packet)

    def unused(self, connection: Connection) -> int:
        """Return how many more connections the server would give this user."""
        most, of_user, own = run(connection, LIMITS)[0]
        left = int(most) - int(run(connection, "SHOW GLOBAL STATUS LIKE 'Threads_connected'")[0][1])
        return max(0, min(left, int(of_user) - int(own)) if int(of_user) else left)

    def ping(self, connection: Connection) -> bool:
        """Ask whether the server has become read-only: administrators may write to such a server."""
        return connection.info.get(WAS_READ_ONLY, False) or self.takes_writes(connection)

    def takes_writes(self, connection: Connection) -> bool:
        """Return whether the server is not read-only."""
        [values] = run(connection, "SELECT @@GLOBAL.read_only, @@GLOBAL.innodb_read_only")
        return all(str(value) in {"0", "OFF"} for value in values)  # MariaDB 12 has words for the first


class MysqlConnections(MariadbConnections):
    """The connections to a MySQL database."""

    product = "MySQL"
    driver = "mysql+pymysql"
    extra = "mysql"
    # The first with a collation for names that are equal only when they are the same.
    oldest: ClassVar[tuple[int, ...]] = (8, 0, 17)
    ends_idle_transactions: ClassVar[str | None] = None
    recover = "XA RECOVER CONVERT XID"  # in hexadecimal: its names are sent as text otherwise, which bytes may not be


def _connected(dialect: object, record: object, arguments: Sequence[Any], options: Mapping[str, Any]) -> object:
    """Return a connection of the driver's, for SQLAlchemy."""
    from delayline.sql.mariadb.tls import SharingConnection

    del dialect, record
    return SharingConnection(*arguments, **options)
