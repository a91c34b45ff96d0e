"""XA transactions of MariaDB and MySQL, which survive the connection and the server once they are prepared.

`XA START` begins what `XA END` ends; then it can be prepared, or committed in one phase. In MariaDB a prepared
transaction belongs to its connection until it is finished: the connection can do nothing else, and others are told that
there is no such transaction, although `XA RECOVER` lists it. When the connection ends, any other can finish it. MySQL
8.0.29 takes it from its connection at once.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from delayline.errors import BackendUnusable
from delayline.sql.mariadb.errors import RIGHT_TO_RECOVER, number_of
from delayline.sql.server import NOT_COMMITTED, ServerTransactions, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from delayline.sql.mariadb.connections import MariadbConnections

SERVER: Final = "SELECT @@hostname, @@port, @@datadir, DATABASE()"
#: MariaDB has the first since 10.5.26, 10.6.19 and 10.11.9, MySQL the second. The last is of Galera clusters.
SERVER_NUMBERS: Final = "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('server_uid', 'server_uuid', 'wsrep_on')"
FORMAT: Final = 1  # of xids that are given without one
UNKNOWN_XID: Final = 1397
ROLLED_BACK: Final = 1402
#: Refusals to end a transaction: it is ended already, or there is none, or it can only be rolled back.
NOT_ACTIVE: Final = frozenset({UNKNOWN_XID, 1399, ROLLED_BACK, 1613, 1614})


class XaTransactions(ServerTransactions):
    """How an XA transaction of a name begins and ends.

    Args:
        connections: The connections to the database.
        name: The name.
    """

    def __init__(self, connections: MariadbConnections, name: str) -> None:
        super().__init__(connections.errors)
        self._xid = xid_of(name)

    def begin(self, connection: Connection) -> None:
        """Begin a transaction."""
        run(connection, "XA START %s, %s", *self._xid)

    def commit(self, connection: Connection) -> None:
        """Commit without preparing; durable on return."""
        try:
            run(connection, "XA END %s, %s", *self._xid)
            run(connection, "XA COMMIT %s, %s ONE PHASE", *self._xid)
        except self._errors.kinds:
            connection.info[NOT_COMMITTED] = True
            raise

    def rollback(self, connection: Connection) -> None:
        """Roll back, in whichever state it is."""
        if self._errors.is_broken(connection):
            return
        for statement, harmless in (("XA END %s, %s", NOT_ACTIVE), ("XA ROLLBACK %s, %s", {UNKNOWN_XID})):
            try:
                run(connection, statement, *self._xid)
            except self._errors.kinds as error:
                if number_of(error) not in harmless:
                    raise


class MariadbTwoPhase:
    """Prepares transactions in a database and finishes them later, from any process.

    Args:
        connections: The connections to the database.
    """

    def __init__(self, connections: MariadbConnections) -> None:
        self._connections = connections

    def check(self, connection: Connection) -> str:
        """Return a short name of the database. Raises BackendUnusable where nothing can be prepared."""
        numbers = dict(run(connection, SERVER_NUMBERS))
        if numbers.pop("wsrep_on", "OFF") == "ON":
            raise BackendUnusable(
                f"{self._connections} is a node of a Galera cluster, which has no XA transactions, and so can prepare "
                "none: keep queues and store in one database, or the store in one that is not a cluster"
            )
        self.in_doubt(connection, "")
        identity = [*run(connection, SERVER)[0], *numbers.values()]
        return hashlib.sha256("\n".join(map(str, identity)).encode()).hexdigest()[:12]

    def control(self, name: str) -> XaTransactions:
        """Return how an XA transaction of that name begins and ends."""
        return XaTransactions(self._connections, name)

    def prepare(self, connection: Connection, name: str) -> None:
        """Prepare the open transaction."""
        run(connection, "XA END %s, %s", *xid_of(name))
        run(connection, "XA PREPARE %s, %s", *xid_of(name))

    def commit_prepared(self, connection: Connection, name: str) -> bool:
        """Commit the prepared transaction, unless it is finished; False while another connection has it."""
        return self._finish(connection, "XA COMMIT %s, %s", name)

    def roll_back_prepared(self, connection: Connection, name: str) -> bool:
        """Roll back the prepared transaction, unless it is finished; False while another connection has it."""
        return self._finish(connection, "XA ROLLBACK %s, %s", name)

    def in_doubt(self, connection: Connection, prefix: str) -> list[str]:
        """Return the names of prepared transactions, in every database of the server.

        Raises BackendUnusable where the user may not ask.
        """
        try:
            rows = run(connection, self._connections.recover)
        except self._connections.errors.kinds as error:
            if number_of(error) not in RIGHT_TO_RECOVER:
                raise
            raise BackendUnusable(
                f"{self._connections} does not let this user find prepared transactions. Run as an administrator: "
                "GRANT XA_RECOVER_ADMIN ON *.* TO the user"
            ) from error
        return names_of(rows, prefix)

    def _finish(self, connection: Connection, statement: str, name: str) -> bool:
        try:
            run(connection, statement, *xid_of(name))
        except self._connections.errors.kinds as error:
            number = number_of(error)
            if number == UNKNOWN_XID:
                return not self.in_doubt(connection, name)
            if number != ROLLED_BACK:  # which is of a transaction that has written nothing
                raise
        return True


def xid_of(name: str) -> tuple[str, str]:
    """Return a name's two parts, neither of which is longer than the 64 bytes that a part may have."""
    shared, _, number = name.rpartition("-")
    return shared, number


def names_of(rows: Sequence[tuple[int, int, int, bytes | str]], prefix: str) -> list[str]:
    """Return the names in a list of prepared transactions that begin with the prefix."""
    names = (_name_of(length, xid) for form, length, _, xid in rows if form == FORMAT)
    return [name for name in names if name.startswith(prefix)]


def _name_of(length: int, xid: bytes | str) -> str:
    """Return the name whose two parts make up an xid, the first of that length; others' may have any bytes."""
    data = bytes.fromhex(xid.removeprefix("0x")) if isinstance(xid, str) else xid
    return f"{data[:length].decode('ascii', 'replace')}-{data[length:].decode('ascii', 'replace')}"
