"""Leases of messages that are fetched without a transaction: for a minute, by the server's clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from sqlalchemy import null, or_, update

from delayline.sql.prepared import Prepared

if TYPE_CHECKING:
    from collections.abc import Sequence

    import sqlalchemy
    from sqlalchemy import ColumnElement, Connection, Table

    from delayline.sql.dialect import Dialect

LEASE: Final = 60  # seconds; a dispatch takes less


class Leases(Protocol):
    """The leases on one store's messages."""

    in_row: ClassVar[bool]
    """Whether leases are columns of the row: then they end with it, and a transaction that locks it sees the latest."""
    free: ColumnElement[bool]
    """The condition that nobody has leased the row."""

    def take(self, connection: Connection, ids: Sequence[str]) -> Sequence[str]:
        """Lease messages whose rows are locked; return the ones that no other process leased at the same moment."""
        ...

    def end(self, connection: Connection, ids: Sequence[str]) -> None:
        """End the leases on these messages."""
        ...


class LeaseColumn:
    """Leases in a column of the store's table."""

    in_row: ClassVar[bool] = True

    def __init__(self, table: Table, sql: sqlalchemy.Dialect, dialect: Dialect) -> None:
        until, by_ids = table.c.leased_until, dialect.one_of(table.c.id, "keys")
        self.free = or_(until.is_(None), until < dialect.in_seconds(0))
        self._take = Prepared(update(table).where(by_ids).values(leased_until=dialect.in_seconds(LEASE)), sql, ["keys"])
        self._end = Prepared(update(table).where(by_ids).values(leased_until=null()), sql, ["keys"])

    def take(self, connection: Connection, ids: Sequence[str]) -> Sequence[str]:
        """Lease the messages."""
        self._take.change_each(connection, keys=ids)
        return ids

    def end(self, connection: Connection, ids: Sequence[str]) -> None:
        """End the leases."""
        self._end.change_each(connection, keys=ids)
