"""Base classes of transports, stores and persisters on a SQL database: its lifecycle and its transactions."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from delayline.errors import BackendUnavailable, ConfigurationError, NotStarted
from delayline.sql.actions import SqlActionLog
from delayline.sql.databases import SqlDatabase, database_at, engine_at
from delayline.sql.schema import EVERY_RIGHT, TO_READ, queue_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from sqlalchemy import Connection, Engine, Table
    from sqlalchemy.ext.asyncio import AsyncEngine

    from delayline.clock import Clock
    from delayline.sql.dialect import Dialect
    from delayline.sql.transactions import SqlTransaction
    from delayline.sql.two_phase import TwoPhaseCommit, TwoPhaseTransaction

Result = TypeVar("Result")


class OnDatabase:
    """A database, alone or as either of the two of a two-phase commit."""

    def __init__(
        self,
        database: str | Engine | SqlDatabase,
        schema: str | None,
        two_phase: TwoPhaseCommit | None,
    ) -> None:
        self._given = database if isinstance(database, SqlDatabase) else SqlDatabase(database)
        self._database = database_at(self._given)
        self._schema = self._database.dialect.catalog.schema_of(schema)
        self._tables = queue_tables(self._schema)
        self._two_phase = two_phase
        self._opened = 0
        self._stops = 0

    @property
    def external_domain(self) -> Hashable:
        """The domain of external transactions, which reach this database only."""
        return self._database.domain

    def gave_way(self, error: BaseException) -> bool:
        """Return whether the error comes from a transaction's end in favour of another, so that it can be repeated."""
        return self._database.dialect.errors.gave_way(error)

    def new_engine(self, size: int, *, asynchronous: bool) -> Engine | AsyncEngine:
        """Return an Engine of SQLAlchemy on the database. Raises ConfigurationError for connections of the user's."""
        if self._given.connects is not None:
            raise ConfigurationError(
                "the connections to this database are made by connect= or by an Engine: pass an Engine, as in "
                "context.transaction(engine)"
            )
        return engine_at(self._given, size, asynchronous=asynchronous)

    def lost_connection(self, error: BaseException) -> BackendUnavailable | None:
        """Return the outage that an error of a connection to the database says; None for any other error."""
        dialect = self._database.dialect
        lost = isinstance(error, dialect.errors.kinds) and dialect.errors.is_disconnect(error)
        return BackendUnavailable(f"the connection to {dialect} was lost: {error}") if lost else None

    @property
    def transaction_domain(self) -> Hashable:
        """The database, or the two-phase commit that joins two."""
        return self._two_phase or self._database.domain

    @property
    def server_timeout(self) -> float:
        """Seconds to wait for an answer of the database's server."""
        return self._database.dialect.connections.server_timeout

    def stop_soon(self) -> None:
        """Limit the waits of open connections, so that an endpoint with a silent server stops within 20 seconds."""
        if self._stops < self._opened:
            self._stops += 1
            self._database.begin_stop()

    def action_log(self, endpoint_name: str) -> SqlActionLog:
        """Return the record of what people did to the endpoint's messages, in this database."""
        return SqlActionLog(self._database, self._schema, endpoint_name)

    async def _missing_rights(self, needed: Mapping[Table, Sequence[str]], *, takes: bool | None = None) -> list[str]:
        """Return the GRANT statements for missing rights on existing tables.

        Args:
            needed: the rights that each table needs.
            takes: whether messages are removed from a store; None for parts that do not use its shared tables.
        """
        dialect, every = self._database.dialect, {self._tables.versions: TO_READ, **needed}
        if takes is not None:
            every |= dict.fromkeys(dialect.catalog.further_tables(self._tables), EVERY_RIGHT if takes else TO_READ)
        return await self._database.look(lambda connection: dialect.catalog.missing_rights(connection, every))

    async def _open_database(self) -> None:
        """Open the database; `_close_database` undoes it."""
        self._opened += 1
        try:
            await self._database.open()
        except BaseException:
            self._is_closed()
            raise

    async def _close_database(self) -> None:
        """Undo an `_open_database`, and a `stop_soon` that came meanwhile."""
        try:
            await self._database.close()
        finally:
            self._is_closed()

    def _is_closed(self) -> None:
        self._opened -= 1
        if self._stops:
            self._stops -= 1
            self._database.end_stop()

    def transaction(self) -> SqlTransaction | TwoPhaseTransaction:
        """Return a transaction that another part of the same domain can join."""
        return (self._two_phase or self._database).transaction()


class StoreOnDatabase(OnDatabase):
    """The database of a store or a timeout persister, alone or as the part of a two-phase commit that prepares."""

    @property
    def locks_rows(self) -> bool:
        """True on servers; in SQLite a transaction locks the whole file."""
        return self._database.locks_rows

    def clock(self) -> Clock:
        """Return the server's clock; for SQLite, which has none, this machine's."""
        return self._database.clock

    async def read_tables(self, work: Callable[[Connection, Dialect, str | None], Result]) -> Result:
        """Run a read-only work with the dialect and the schema, on an open connection if there is any."""
        dialect, schema = self._database.dialect, self._schema

        def bound(connection: Connection) -> Result:
            return work(connection, dialect, schema)

        try:
            return await self._database.read(bound)
        except NotStarted:
            return await self._database.look(bound)

    def _take_part(self) -> None:
        """Join the two-phase commit, if there is any: last, when nothing else can be refused any more."""
        if self._two_phase is not None:
            self._two_phase.take_part(self._database)
