"""What is paused in a SQL store: a row for each destination, and one for the whole endpoint.

While nothing is paused, the statements on the way of each message know nothing of it. Once a poller has seen a pause,
it uses statements that pass over what is paused, and read the rows themselves: what is paused then is so at once.
"""

from __future__ import annotations

import math
import time
from datetime import timedelta
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Column, MetaData, PrimaryKeyConstraint, Table, bindparam, delete, select, update

from delayline.clock import EPOCH
from delayline.delayed.pauses import PAUSES_READ_EVERY, DispatchPause, Slots
from delayline.message import MAXIMUM_DESTINATION_LENGTH
from delayline.sql.deadlines import long_work
from delayline.sql.prepared import Prepared
from delayline.sql.schema import DUE, MAXIMUM_TABLE_NAME_LENGTH, TableGroup, in_order, register, text
from delayline.sql.statements import StoreStatements

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement, Connection

    from delayline.sql.database import Database
    from delayline.sql.dialect import Dialect
    from delayline.sql.row_claims import RowClaims

#: The destination in the row of the whole endpoint.
WHOLE: Final = ""
#: The first of them leave so long after the pause: later than what is overdue, in the coarsest due column too.
MOVED_FROM: Final = timedelta(milliseconds=10)
#: Overdue messages that get a later due time in one transaction.
MOVED_AT_ONCE: Final = 5000


@lru_cache(maxsize=64)
def pauses_table(schema: str | None = None) -> Table:
    """Return the table of pauses in that schema, the connection's own where None."""
    return Table(
        "delayline_pauses",
        MetaData(schema=schema),
        Column("store", text(MAXIMUM_TABLE_NAME_LENGTH), nullable=False),
        Column("destination", text(MAXIMUM_DESTINATION_LENGTH), nullable=False),
        Column("since", DUE, nullable=False),
        PrimaryKeyConstraint("store", "destination"),
    )


PAUSES: Final = register(TableGroup("pauses", lambda _, schema: [pauses_table(schema)]))


def not_paused(table: Table, dialect: Dialect) -> ColumnElement[bool]:
    """Return the condition for messages of a store's table whose destination is not paused."""
    columns = pauses_table(table.schema).c
    paused = select(columns.destination).where(columns.store == table.name)
    return dialect.words.exact(table.c.destination).not_in(paused)


class SqlDispatchPauses:
    """The pauses of a store.

    Args:
        database: Its database, which the store opens.
        schema: The schema of its tables.
        statements: Returns the statements that pass over nothing; raises NotStarted until the store is open.
        rows: Returns what fetches and moves its messages, and is told what statements to use.
        resumed: Notifies the pollers of all processes.
    """

    def __init__(
        self,
        database: Database,
        schema: str | None,
        *,
        statements: Callable[[], StoreStatements],
        rows: Callable[[], RowClaims],
        resumed: Callable[[], Awaitable[None]],
    ) -> None:
        self._database = database
        self._statements = statements
        self._rows = rows
        self._resumed = resumed
        self.table: Table = pauses_table(schema)
        self._paused: frozenset[str] = frozenset()
        self._read_at = -math.inf

    async def all(self) -> Sequence[DispatchPause]:
        """Return the pauses: that of the whole endpoint first, then by destination."""
        columns, from_due = self.table.c, self._database.dialect.values.from_due
        query = select(columns.destination, columns.since).where(columns.store == self._statements().table.name)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return [DispatchPause(destination or None, from_due(since)) for destination, since in sorted(rows)]

    async def pause(self, destination: str | None, at: datetime) -> bool:
        """Dispatch no more messages for the destination, or of the endpoint."""
        insert = Prepared(
            self._database.dialect.words.insert_counted(self.table, "destination"),
            self._database.dialect.sql,
            ["store", "destination", "since"],
        )
        row = (self._statements().table.name, destination or WHOLE, self._database.dialect.values.to_due(at))

        def paused(connection: Connection) -> bool:
            try:
                return insert.change(connection, *row) > 0
            except self._database.dialect.errors.kinds as error:
                if self._database.dialect.errors.is_duplicate(error):
                    return False
                raise

        self._read_at = -math.inf
        return await self._database.write(paused)

    async def resume(self, destination: str | None, at: datetime, rate: float | None = None) -> bool:
        """Dispatch them again, those that are overdue at a bounded rate if one is given."""
        slots = None if rate is None else Slots(at + MOVED_FROM, rate)
        if all(pause.destination != destination for pause in await self.all()):
            return False
        if slots is not None:
            await self._spread(destination, at, slots)
        columns = self.table.c
        row = columns.store == self._statements().table.name, columns.destination == (destination or WHOLE)
        await self._database.write(lambda connection: connection.execute(delete(self.table).where(*row)))
        self._read_at = -math.inf
        await self._resumed()
        return True

    async def earliest(self) -> datetime | None:
        """Return the earliest due time of what is not paused now, whatever a poller has seen."""
        pauses = await self.all()
        if any(pause.destination is None for pause in pauses):
            return None
        statements = self._passing if pauses else self._statements()
        due = await self._database.read(statements.next_due.one)
        return None if due is None else self._database.dialect.values.from_due(due)

    async def look(self) -> bool:
        """Read the pauses if it is time for that, and return whether they have changed."""
        if time.monotonic() - self._read_at < PAUSES_READ_EVERY:
            return False
        name = self._statements().table.name
        rows = await self._database.read(lambda connection: self._read.rows(connection, name))
        self._read_at = time.monotonic()
        paused = frozenset(destination for (destination,) in rows)
        if paused == self._paused:
            return False
        self._paused = paused
        claims = self._rows()
        claims.use(self._passing if paused else self._statements())
        claims.stored(EPOCH)  # look from the beginning
        return True

    @cached_property
    def _passing(self) -> StoreStatements:
        """The statements that pass over what is paused."""
        table, dialect = self._statements().table, self._database.dialect
        return StoreStatements(table, dialect, not_paused(table, dialect))

    @cached_property
    def _read(self) -> Prepared:
        columns = self.table.c
        of_store = select(columns.destination).where(columns.store == bindparam("of"))
        return Prepared(of_store, self._database.dialect.sql, ["of"])

    @property
    def is_any(self) -> bool:
        """Whether there was a pause at the last look."""
        return bool(self._paused)

    @property
    def is_whole(self) -> bool:
        """Whether the whole endpoint was paused at the last look."""
        return WHOLE in self._paused

    @long_work
    async def _spread(self, destination: str | None, at: datetime, slots: Slots) -> None:
        """Give overdue messages later due times, in their order, in transactions of some each."""
        table, dialect = self._statements().table, self._database.dialect
        columns, order, to_due = table.c, in_order(table), dialect.values.to_due
        due, tie = order
        of_pause = (
            not_paused(table, dialect)
            if destination is None
            else dialect.words.exact(columns.destination) == destination
        )
        query = select(columns.id, due, tie).where(due <= dialect.values.to_until(at), of_pause)
        query = query.order_by(*order).limit(MOVED_AT_ONCE)
        keys = dialect.words.one_of(columns.id, "keys")
        move = Prepared(update(table).where(keys).values(due=bindparam("at")), dialect.sql, ["at", "keys"])
        after: Any = None
        slot: object = None
        left = 0

        def moved(connection: Connection) -> tuple[object, object] | None:
            nonlocal left, slot
            page = query if after is None else query.where((due > after[0]) | ((due == after[0]) & (tie > after[1])))
            rows = connection.execute(page).all()
            first = 0
            while first < len(rows):
                if not left:
                    left, slot = slots.size, to_due(slots.next())
                some = rows[first : first + left]
                move.change_each(connection, slot, keys=[row[0] for row in some])
                first, left = first + len(some), left - len(some)
            return (rows[-1][1], rows[-1][2]) if len(rows) == MOVED_AT_ONCE else None

        while (after := await self._database.write(moved)) is not None:
            pass
