"""Leases in a separate table, because NServiceBus' table has no column for them.

Application locks would do as well, and end with their connection; but every fetch would have to lock each message
separately. A lease is a row, which the query for due messages joins. A .NET endpoint ignores both kinds: messages that
it dispatches meanwhile are found missing when they are removed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sqlalchemy import bindparam, delete, exists, insert, not_

from delayline.sql.dialects.sqlserver_errors import DUPLICATE_KEY, number_of
from delayline.sql.leases import LEASE
from delayline.sql.prepared import Prepared
from delayline.sql.schema import BINARY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Table

    from delayline.sql.dialects.sqlserver import SqlServer
    from delayline.sql.schema import QueueTables


class LeaseTable:
    """The leases on one store's messages."""

    in_row: ClassVar[bool] = False

    def __init__(self, table: Table, tables: QueueTables, dialect: SqlServer) -> None:
        leases, sql, self._dialect, self._store = tables.leases, dialect.sql, dialect, table.name
        now, of_store = dialect.in_seconds(0), leases.c.store == bindparam("store")
        ours = leases.c.store == bindparam("this_store", table.name)
        self.free = not_(exists().where(ours, leases.c.id == table.c.id.collate(BINARY), leases.c.until >= now))
        of_ids = delete(leases).where(of_store, dialect.one_of(leases.c.id, "keys"))
        take = insert(leases).values(until=dialect.in_seconds(LEASE))
        self._take = Prepared(take, sql, ["store", "id"])
        self._sweep = Prepared(of_ids.where(leases.c.until < now), sql, ["store", "keys"])
        self._end = Prepared(of_ids, sql, ["store", "keys"])

    def take(self, connection: Connection, ids: Sequence[str]) -> Sequence[str]:
        """Lease the messages; if the server ignored the row locks, those that no other process leased."""
        self._sweep.change_each(connection, self._store, keys=ids)
        return [message_id for message_id in ids if self._take_one(connection, message_id)]

    def end(self, connection: Connection, ids: Sequence[str]) -> None:
        """End the leases."""
        self._end.change_each(connection, self._store, keys=ids)

    def _take_one(self, connection: Connection, message_id: str) -> bool:
        try:
            self._take.change(connection, self._store, message_id)
        except self._dialect.errors as error:
            if number_of(error) not in DUPLICATE_KEY:
                raise
            return False
        return True
