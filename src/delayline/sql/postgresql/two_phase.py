"""PostgreSQL's prepared transactions, which survive the connection and the server."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

from delayline.errors import BackendUnavailable, BackendUnusable
from delayline.sql.server import cause_of, run

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from delayline.sql.dialect import TransactionControl
    from delayline.sql.postgresql.connections import PostgresqlConnections

IN_DOUBT: Final = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND starts_with(gid, %s)"
IDENTITY: Final = """
SELECT c.system_identifier::text, d.oid::text FROM pg_control_system() AS c, pg_database AS d
WHERE d.datname = current_database()
"""
#: A transaction that decides holds its row for a few milliseconds.
WAIT_BRIEFLY: Final = "SET LOCAL lock_timeout = '200ms'"
UNDEFINED: Final = "42704"


class PostgresqlTwoPhase:
    """Prepares transactions in a database and finishes them later, from any process.

    Args:
        connections: The connections to the database.
        control: How transactions begin and end, whether they may be prepared or not.
    """

    def __init__(self, connections: PostgresqlConnections, control: TransactionControl) -> None:
        self._connections = connections
        self._control = control

    def check(self, connection: Connection) -> str:
        """Return a short name of the database. Raises BackendUnusable where nothing can be prepared."""
        if run(connection, "SHOW max_prepared_transactions")[0][0] == "0":
            raise BackendUnusable(
                f"{self._connections} cannot prepare transactions: set max_prepared_transactions in postgresql.conf to "
                "the number of messages handled at once and pollers, 100 for example, and restart the server"
            )
        return hashlib.sha256(":".join(run(connection, IDENTITY)[0]).encode()).hexdigest()[:12]

    def control(self, name: str) -> TransactionControl:
        """Return how every transaction begins and ends."""
        del name
        return self._control

    def prepare(self, connection: Connection, name: str) -> None:
        """Prepare the open transaction; the connection has none afterwards, also when that fails."""
        cursor: Any = connection.connection.cursor()
        cursor.execute(f"PREPARE TRANSACTION '{name}'")
        done = cursor.statusmessage
        cursor.close()
        if done != "PREPARE TRANSACTION":  # of a transaction that has failed PostgreSQL makes a rollback, and no fuss
            raise BackendUnavailable(f"{self._connections} has rolled the transaction back instead of preparing it")

    def commit_prepared(self, connection: Connection, name: str) -> bool:
        """Commit the prepared transaction, unless it is finished; it is over then."""
        return self._finish(connection, f"COMMIT PREPARED '{name}'")

    def roll_back_prepared(self, connection: Connection, name: str) -> bool:
        """Roll back the prepared transaction, unless it is finished or was never prepared; it is over then."""
        return self._finish(connection, f"ROLLBACK PREPARED '{name}'")

    def in_doubt(self, connection: Connection, prefix: str) -> list[str]:
        """Return the names of prepared transactions."""
        return [name for (name,) in run(connection, IN_DOUBT, prefix)]

    def wait_briefly(self, connection: Connection) -> None:
        """Let the transaction's statements fail that would have to wait for others'."""
        run(connection, WAIT_BRIEFLY)

    def wait_as_usual(self, connection: Connection) -> None:
        """Do nothing: it was for the transaction only."""

    def _finish(self, connection: Connection, sql: str) -> bool:
        try:
            run(connection, sql)
        except self._connections.errors.kinds as error:
            cause: Any = cause_of(error)
            if getattr(cause, "sqlstate", None) != UNDEFINED:
                raise
        return True
