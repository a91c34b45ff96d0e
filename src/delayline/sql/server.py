"""The interface of a database server, beyond that of every dialect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from delayline.sql import dialect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from delayline.sql.deadlines import StopLimit
    from delayline.sql.forwarding import Forwarding
    from delayline.sql.leases import Leases
    from delayline.sql.notifications import ServerNotifications
    from delayline.sql.prepared import Prepared
    from delayline.sql.schema import QueueTables
    from delayline.sql.server_database import ServerDatabase
    from delayline.sql.statements import StoreStatements


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


class ServerClaims(dialect.Claims, Protocol):
    """Claims on the rows of one table, held by a connection."""

    def close(self) -> None:
        """Give up every claim."""
        ...


class Server(dialect.Dialect, Protocol):
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
