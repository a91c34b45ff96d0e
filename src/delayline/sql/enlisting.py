"""Lets external transactions take part in those of a database, if they are on it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeVar

from delayline.errors import BackendUnavailable, ConfigurationError
from delayline.sql.external import adapter_of, hold_of
from delayline.sql.transactions import ElsewhereError, EnlistedTransaction

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from sqlalchemy import Connection, Table

    from delayline.external import ExternalTransaction
    from delayline.sql.dialect import Dialect, TableIdentity
    from delayline.sql.external import ConnectionAdapter

Result = TypeVar("Result")
PLACE: Final = "delayline place"  # the key, with the table's name, in a connection's notes


class OwnConnections(Protocol):
    """A database, and its own connections."""

    dialect: Dialect
    locks_rows: ClassVar[bool]

    @property
    def domain(self) -> Hashable:
        """Equal for parts that can share a transaction."""
        ...

    @property
    def usable_since(self) -> int:
        """The oldest generation of connections that are used."""
        ...

    async def read(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` on a reading connection."""
        ...

    async def look(self, work: Callable[[Connection], Result]) -> Result:
        """Run a read-only `work` on a new connection."""
        ...


class Enlisting:
    """Finds out where the connections of external transactions lead.

    A handler's transaction is checked together with the first statement in it, against the place of the table that was
    found before; both sides are asked again where the connection leads to another, and after a failover.
    """

    def __init__(self, database: OwnConnections) -> None:
        self._database = database
        self._found: dict[str, tuple[int, TableIdentity]] = {}
        """The places of tables on the database's own connections, with the generation of those."""

    async def enlist(self, external: ExternalTransaction, table: Table) -> EnlistedTransaction:
        """Return the external transaction if it is on this database; see `Database.enlist`."""
        enlisted = self._enlisted(external, await hold_of(external), table)
        if not external.of_handler:
            await self._examine(table, enlisted)
        return enlisted

    def enlist_early(self, external: ExternalTransaction, table: Table) -> EnlistedTransaction:
        """Return a handler's transaction, on the thread of its connection."""
        given: Any = external.connection
        if hasattr(given, "registry") and callable(given):  # a scoped session, of this thread
            given = given()
        return self._enlisted(external, adapter_of(external, given), table)

    def _enlisted(self, external: ExternalTransaction, hold: ConnectionAdapter, table: Table) -> EnlistedTransaction:
        database, of_handler = self._database, external.of_handler
        enlisted = EnlistedTransaction(
            database.domain,
            hold,
            database.dialect,
            of_handler=of_handler,
            limits=of_handler and database.locks_rows,
        )
        if of_handler:
            enlisted.check_with_first_work(partial(self._check, table=table), partial(self._examine, table))
        return enlisted

    def _check(self, connection: Connection, table: Table, *, rows_tell: bool = False) -> TableIdentity | None:
        """Raise ElsewhereError unless the connection leads to the table; see `Check`.

        The database that it leads to is noted of it; the table that a name means can change with each statement.
        """
        known = self._found.get(table.fullname)
        if known is None or known[0] != self._database.usable_since:
            raise ElsewhereError
        place, key = known[1], (PLACE, table.fullname)
        noted: object = connection.info.get(key)
        was_there = noted is place
        if was_there and rows_tell and self._database.dialect.words.table_of_row is not None:
            return place
        found = self._theirs(connection, table, place if was_there else None)
        if (found.database, found.table) != (place.database, place.table):
            raise ElsewhereError
        connection.info[key] = place
        return None

    async def _examine(self, table: Table, enlisted: EnlistedTransaction) -> None:
        """Ask both sides where they are. Raises the errors of `enlist`."""
        database, since = self._database, self._database.usable_since
        ask_ours: Callable[[Connection], Any] = partial(database.dialect.catalog.identify, table=table)
        theirs = await enlisted.look(partial(self._theirs, table=table))
        ours = await database.read(ask_ours)
        if theirs.database != ours.database:
            # The server may have been restarted, or another have become the primary, since either of the two connected.
            theirs = await enlisted.look(partial(self._theirs, table=table))
            ours = await database.look(ask_ours)
        if theirs.database != ours.database:
            if not await enlisted.look(database.dialect.connections.takes_writes):
                raise BackendUnavailable(
                    f"transaction= is on the {theirs.name}, which takes no writes, as a server that is not the primary "
                    "any more: begin it on a new connection"
                )
            raise ConfigurationError(
                f"transaction= is on the {theirs.name}, and the messages are in the {database.dialect}: "
                "begin it on a connection to that database"
            )
        if theirs.table != ours.table:
            raise ConfigurationError(
                f"on the connection of transaction= the name {table.fullname!r} does not mean delayline's table: "
                "begin it with the same search_path, or name the schema to delayline's parts, as in schema='public'"
            )
        self._found[table.fullname] = since, ours

    def _theirs(self, connection: Connection, table: Table, known: TableIdentity | None = None) -> TableIdentity:
        product, dialect = getattr(connection, "product", ""), self._database.dialect
        # Applications name MariaDB's servers mysql:// too; `place` shows whether it is the same server.
        if product != dialect.sql.name and not {product, dialect.sql.name} <= {"mysql", "mariadb"}:
            raise ConfigurationError(
                f"transaction= is a connection to {product}, and the messages are in the {dialect}: "
                "begin it on a connection to that database"
            )
        return dialect.catalog.identify(connection, table, *(() if known is None else (known,)))
