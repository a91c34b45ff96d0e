"""Connections to PostgreSQL 13 and newer, through psycopg 3: their settings, and how they begin."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from delayline.errors import BackendUnusable, ConfigurationError
from delayline.sql.postgresql import citus
from delayline.sql.postgresql.catalog import USUAL
from delayline.sql.postgresql.citus import CITUS_SCHEMA, OwnedSchema
from delayline.sql.postgresql.engines import check_engine
from delayline.sql.postgresql.errors import PostgresqlErrors
from delayline.sql.server import ServerConnections, run, watch_of
from delayline.sql.urls import Host, listed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import URL, Connection

OLDEST_POSTGRESQL: Final = 13
#: Every statement has its index. Without statistics, as in a table that was filled a moment ago, the planner may read
#: and sort all that is due for each batch instead; and planning a small batch takes as long as moving it. A table
#: without an index then looks so dear that its statements would be compiled, for 25 ms each.
SETTINGS: Final = {
    "timezone": "UTC",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "default_transaction_isolation": USUAL,
    "quote_all_identifiers": "off",  # which changes the names of types that the server tells
    "datestyle": "ISO",
}
#: Claims last as long as their session, however long that is idle.
SINCE_14: Final = {"idle_session_timeout": "0"}
SET: Final = "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS setting (name, value)"
#: Settings of a job's sessions: the server looks every five seconds whether the client of a running statement is still
#: there (since version 14, and not on every system), and asks machines that say nothing.
OUTLIVING: Final = {
    "client_connection_check_interval": "5s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
#: Where the system cannot make the first of these settings, its only allowed value is 0.
SET_KNOWN: Final = (
    "SELECT set_config(setting.name, value, false) FROM unnest(%s::text[], %s::text[]) AS setting (name, value) "
    "JOIN pg_settings AS known ON known.name = setting.name "
    "WHERE setting.name <> 'client_connection_check_interval' OR version() LIKE '%%-linux-%%'"
)
#: The least of what is left for all, for the database and for the user; -1 is no limit.
UNUSED: Final = """
SELECT least(
  current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
    - coalesce(current_setting('reserved_connections', true)::int, 0)
    - (SELECT count(*) FROM pg_stat_activity WHERE datid IS NOT NULL),
  (SELECT nullif(datconnlimit, -1) - (SELECT count(*) FROM pg_stat_activity WHERE datid = oid)
    FROM pg_database WHERE datname = current_database()),
  (SELECT nullif(rolconnlimit, -1) - (SELECT count(*) FROM pg_stat_activity WHERE usesysid = oid)
    FROM pg_roles WHERE rolname = current_user))
"""
#: What a schema's name may have, as a value of `search_path` in quotes.
SCHEMA_NAME: Final = re.compile(r'[^\s"\\,\0]{1,63}')
#: Is refused by poolers in transaction mode, whose other clients would get a session with the settings.
SERVER_OPTIONS: Final = "-c jit=off"
#: Names of settings in the options of a URL.
NAMED: Final = re.compile(r"(?:-c\s*|--)([\w.-]+)=")
PREPARE_THRESHOLD: Final = 2  # times that a statement runs before the server prepares it
#: A machine that is gone is noticed by the system, also where nothing is asked of it.
PSYCOPG_ARGUMENTS: Final[Mapping[str, str | int | None]] = {
    "application_name": "delayline",
    "client_encoding": "UTF8",
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "prepare_threshold": PREPARE_THRESHOLD,
}


class PostgresqlConnections(ServerConnections):
    """The connections to a PostgreSQL database."""

    product = "PostgreSQL"
    driver = "postgresql+psycopg"
    extra = "postgresql"
    default_port = 5432

    def __init__(self, url: URL) -> None:
        self.pgbouncer: bool = _flag("pgbouncer", url.query.get("pgbouncer", "false"))
        self.owned: OwnedSchema | None = _owned_schema(url, pgbouncer=self.pgbouncer)
        url, arguments = url.difference_update_query(["pgbouncer", CITUS_SCHEMA]), PSYCOPG_ARGUMENTS
        self._given: frozenset[str] = frozenset()
        self.errors: PostgresqlErrors = PostgresqlErrors(self)
        self.notifies: bool = True
        """Whether the engine has LISTEN and NOTIFY, as far as is known."""
        if self.pgbouncer:
            arguments = {**PSYCOPG_ARGUMENTS, "prepare_threshold": None}
        else:
            theirs = url.query.get("options", ())
            options = theirs if isinstance(theirs, str) else " ".join(theirs)
            self._given = frozenset(name.lower().replace("-", "_") for name in NAMED.findall(options))
            url = url.set(query={**url.query, "options": f"{SERVER_OPTIONS} {options}".strip()})
        super().__init__(url, connect_args=arguments, paramstyle="format", use_native_hstore=False)
        if self.owned is not None:
            self.identity: URL = self.identity.update_query_dict({CITUS_SCHEMA: self.owned.name})
        one_writes = self.url.query.get("target_session_attrs") in ("read-write", "primary")
        self._any_order = one_writes and len(self.hosts) > 1 and "hostaddr" not in self.url.query
        self._reached: Host | None = None

    def limit_connect(self, arguments: dict[str, Any]) -> None:
        """Limit connecting, for which several hosts share the time, and unacknowledged bytes.

        Where only a single host takes writes, the host that did so last is tried first: each connection would wait for
        one in front of it whose machine is gone.
        """
        hosts = self.hosts
        arguments.setdefault("connect_timeout", max(1, round(self.connect_timeout / len(hosts))))
        if self.owned is not None:
            if (server := self.owned.server(self.connect)) is not None:
                arguments |= listed([server])
        elif self._any_order and self._reached in hosts:
            arguments |= listed(sorted(hosts, key=lambda host: host != self._reached))
        arguments.setdefault("tcp_user_timeout", round(self.server_timeout * 1000))

    def url_of_engine(self, url: URL) -> URL:
        """Return the URL of an Engine, whose connections find the tables in the schema of Citus, too."""
        if self.owned is None:
            return url
        theirs = url.query.get("options", ())
        options = theirs if isinstance(theirs, str) else " ".join(theirs)
        url = url.difference_update_query([CITUS_SCHEMA])
        return url.update_query_dict({"options": f"{options} -c search_path={self.owned.quoted}".strip()})

    def adopt(self, driver: Any) -> object:  # noqa: ANN401 - psycopg is an extra
        """Return the connection in autocommit; `connect` does the rest."""
        from psycopg import Connection as Driver

        if not isinstance(driver, Driver):
            raise self.not_a_connection(driver, "psycopg.Connection objects, as of postgresql+psycopg:// Engines")
        driver.rollback()
        driver.autocommit = True
        driver.prepare_threshold = None if self.pgbouncer else PREPARE_THRESHOLD
        driver.execute("SET client_encoding TO UTF8")
        return driver

    def descriptor(self, driver: Any) -> int | None:  # noqa: ANN401 - psycopg is an extra
        """Return libpq's socket."""
        return int(driver.fileno())

    def connect(self) -> Connection:
        """Return a new connection in autocommit, with the settings that statements need."""
        return self._connect_once() if self.owned is None else self.owned.connect(self._connect_once)

    @property
    def sets_up_elsewhere(self) -> bool:
        """Whether the tables are in a schema of Citus, whose coordinator creates them."""
        return self.owned is not None

    def connect_to_set_up(self) -> Connection:
        """Return a new connection to the server that creates tables."""
        return self._connect_once() if self.owned is None else self.owned.connect_to_set_up(self._connect_once)

    def _connect_once(self) -> Connection:
        from delayline.sql.postgresql.binary import use_binary

        connection = self.connect_driver()
        try:
            if self._any_order:
                info = driver_of(connection).info
                self._reached = Host(info.host, info.port)
            use_binary(driver_of(connection))
            if not self.pgbouncer:  # which gives the session to another client after each transaction
                self._set_up_session(connection)
                if self.job_patience is not None:
                    self._set_up_job(connection)
        except BaseException:
            connection.close()
            raise
        watch_of(connection).end()
        return connection

    def _set_up_session(self, connection: Connection) -> None:
        """Make the settings, but for settings that the URL has made."""
        settings = {"lock_timeout": str(max(1, round(self.lock_timeout * 1000))), **SETTINGS}
        if driver_of(connection).info.server_version >= 14_00_00:
            settings |= SINCE_14
        if self.owned is not None:
            settings |= {**citus.SETTINGS, "search_path": self.owned.quoted}
        ours = {name: value for name, value in settings.items() if name not in self._given}
        run(connection, SET, list(ours), list(ours.values()))

    def _set_up_job(self, connection: Connection) -> None:
        """Have the server end the session soon after the task or driver that it works for has gone."""
        idle = {"idle_in_transaction_session_timeout": str(round(self.idle_transaction_timeout * 1000))}
        settings = {**OUTLIVING, **idle}
        ours = {name: value for name, value in settings.items() if name not in self._given}
        run(connection, SET_KNOWN, list(ours), list(ours.values()))

    def unused(self, connection: Connection) -> int:
        """Return how many more connections the server would give this user."""
        return max(0, int(run(connection, UNUSED)[0][0]))

    def check(self) -> None:
        """Connect once. Raises BackendUnusable for a version that is too old, and for an engine that cannot be used."""
        with self.connect() as connection:
            watch_of(connection).begin(self.server_timeout)
            version = int(run(connection, "SHOW server_version_num")[0][0])
            if not self.pgbouncer:  # where nothing is claimed
                check_engine(self, connection)
        if version // 10_000 < OLDEST_POSTGRESQL:
            raise BackendUnusable(
                f"{self} is version {version // 10_000}; delayline needs {OLDEST_POSTGRESQL} or newer"
            )

    def takes_writes(self, connection: Connection) -> bool:
        """Return whether the session is not read-only."""
        return bool(run(connection, "SHOW transaction_read_only")[0][0] == "off")

    def ping(self, connection: Connection) -> bool:
        """Ask whether the session has become read-only, or Citus has moved the schema to another server."""
        return self.takes_writes(connection) and (self.owned is None or self.owned.is_owner(connection))


def driver_of(connection: Connection) -> Any:  # noqa: ANN401 - psycopg is an extra
    """Return psycopg's connection."""
    return connection.connection.driver_connection


def _flag(name: str, value: object) -> bool:
    """Return the value of a parameter of the URL. Raises ConfigurationError unless it is true or false."""
    if value not in ("true", "false"):
        raise ConfigurationError(f"{name} must be true or false, not {value!r}")
    return value == "true"


def _owned_schema(url: URL, *, pgbouncer: bool) -> OwnedSchema | None:
    """Return the schema of Citus that the URL names. Raises ConfigurationError."""
    name = url.query.get(CITUS_SCHEMA)
    if name is None:
        return None
    if not isinstance(name, str) or not SCHEMA_NAME.fullmatch(name):
        raise ConfigurationError(
            f"{CITUS_SCHEMA} must be the name of one schema, without blanks, quotes or commas, not {name!r}"
        )
    if pgbouncer:
        raise ConfigurationError(
            f"{CITUS_SCHEMA} and pgbouncer=true exclude each other: which server a pooler leads to is not known. Name "
            "the coordinator itself"
        )
    return OwnedSchema(name)
