"""The outbox in SQL: a table per endpoint, beside the rows of the user, read in the order in which it was written."""

from __future__ import annotations

import os
import time
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from sqlalchemy import bindparam, insert, select

from delayline.clock import ONE_SECOND
from delayline.delayed.columns import StoredRow
from delayline.errors import NotStarted
from delayline.sql.prepared import Prepared
from delayline.sql.schema import in_order
from delayline.sql.statements import check_size
from delayline.sql.store import SqlDelayedMessageStore
from delayline.sql.workers import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from datetime import datetime, timedelta

    from sqlalchemy import Connection, Engine, Table

    from delayline.message import DelayedMessage
    from delayline.sql.claims import Claims
    from delayline.sql.databases import SqlDatabase
    from delayline.transaction import Transaction, TransactionMode

#: The columns that the server does not set itself, and their values of a row.
NAMES_WITHOUT_DUE: Final = tuple(name for name in StoredRow._fields if name != "due")
WITHOUT_DUE: Final[Callable[[StoredRow], tuple[Any, ...]]] = attrgetter(*NAMES_WITHOUT_DUE)
#: The number whose claim has the process that forwards ...
FORWARDER: Final = 1
#: ... and another, whose claim shows that the connection of the claims is there.
ANY_OTHER: Final = 2
#: Where the database cannot notify other processes the one that forwards looks so often.
LOOKS_EVERY: Final = ONE_SECOND / 20
#: Seconds that the locks of a commit may last: a row that is locked for longer is passed by others.
COMMITS_END_WITHIN: Final = 0.2
#: Rows are due by the server's clock, and notifications by what this process knows of it: they say so much less.
CLOCKS_DIFFER_BY: Final = 5 * ONE_SECOND


class SqlOutbox(SqlDelayedMessageStore):
    """Outbox in a SQL database: `Endpoint(outbox=SqlOutbox(url))`.

    What is sent with `transaction=` on that database is stored there, in the table `{endpoint}.outbox`, where neither
    the queues nor the delayed messages are in it, and forwarded after the commit.

    Args:
        database: A URL, as `postgresql://user@host/name` or `sqlite:///file.db`; or a `SqlDatabase`, or an Engine of
            SQLAlchemy for a server, which say how connections are made.
        schema: Schema of the table; by default the connection's, on SQL Server `dbo`.
        poll_interval: How often to look for messages of other processes, where the database has no notifications.

    Raises:
        ConfigurationError: The URL or another argument is invalid.
        MissingExtra: The database's driver is not installed.
    """

    def __init__(
        self,
        database: str | Engine | SqlDatabase,
        *,
        schema: str | None = None,
        poll_interval: timedelta = LOOKS_EVERY,
    ) -> None:
        super().__init__(database, schema=schema, poll_interval=poll_interval)
        self._insert_now: Prepared | None = None
        self._committed: Prepared | None = None
        self._passed: dict[str, float] = {}
        """Rows that were locked when those behind them were fetched, with the time when that was first seen."""
        self._turns: Claims | None = None

    def table_of(self, endpoint_name: str) -> Table:
        """Return the table of the endpoint."""
        return self._database.dialect.catalog.outbox_table(f"{endpoint_name}.outbox", self._schema)

    async def initialize(self, endpoint_name: str, mode: TransactionMode) -> None:
        """Open the database and check that the endpoint's table is there."""
        await super().initialize(endpoint_name, mode)
        statements, dialect = self._statements, self._database.dialect
        columns = statements.table.c
        given = {name: bindparam(name, type_=columns[name].type) for name in NAMES_WITHOUT_DUE}
        now = dialect.values.in_seconds(0)
        self._insert_now = Prepared(
            insert(statements.table).values({**given, "due": now}), dialect.sql, NAMES_WITHOUT_DUE
        )
        until, order = bindparam("until", type_=columns.due.type), in_order(statements.table)
        committed = select(columns.id).where(columns.due <= until).order_by(*order).limit(bindparam("number"))
        self._committed = Prepared(committed, dialect.sql, ["until", "number"])
        self._turns = self._database.claims(f"{statements.table.fullname} forwarded")

    async def store_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> None:
        """Keep the messages, due at once: the server's clock and the rows' numbers put transactions in order."""
        statements, insert_now = self._statements, self._insert_now
        assert insert_now is not None  # noqa: S101 - opened together
        for message in messages:
            check_size(message.message, self._database.dialect)
        rows = [WITHOUT_DUE(statements.row_of(message)) for message in messages]

        def put(connection: Connection) -> None:
            insert_now.change_many(connection, rows)

        await self._database.write(put, transaction, one_statement=len(rows) == 1)
        await self._notify(self._database.clock.now() - CLOCKS_DIFFER_BY, transaction)

    async def fetch_due(
        self, at: datetime, limit: int, *, max_bytes: int, transaction: Transaction | None = None
    ) -> Sequence[DelayedMessage]:
        """Lock and return the earliest messages, up to the first that is locked by the end of its own commit."""
        messages = await super().fetch_due(at, limit, max_bytes=max_bytes, transaction=transaction)
        if not messages or transaction is None or self._database.dialect.words.sees_whole_commits:
            return messages
        until, query = self._database.dialect.values.to_until(messages[-1].due), self._committed
        assert query is not None  # noqa: S101 - opened together
        rows = await self._database.write(lambda connection: query.rows(connection, until, limit), transaction)
        now, fetched = time.monotonic(), {message.id for message in messages}
        committed = [row_id for (row_id,) in rows]
        self._passed = {row_id: self._passed.get(row_id, now) for row_id in committed if row_id not in fetched}
        behind = 0
        for row_id in committed:
            if row_id in fetched:
                behind += 1
            elif now - self._passed[row_id] < COMMITS_END_WITHIN:
                return messages[:behind]
        return messages

    async def take_turn(self) -> bool:
        """Return whether this outbox forwards: whether it has the claim, and no other outbox of this process has it."""
        claims, key = self._turns, self._turn
        if claims is None:
            raise NotStarted("the outbox is not open: start its endpoint")
        if _forwarding.setdefault(key, self) is not self:
            return False
        has_turn = await in_thread(partial(_has_turn, claims))
        if not has_turn:
            _forwarding.pop(key, None)
        return has_turn

    async def end_turn(self) -> None:
        """Give the claim up."""
        if self._turns is not None and _forwarding.get(self._turn) is self:
            self._turns.release([FORWARDER])
            await in_thread(self._turns.flush)
            _forwarding.pop(self._turn, None)

    @property
    def _turn(self) -> Hashable:
        return os.getpid(), self._database.domain, self._statements.table.fullname


#: The outboxes of this process that forward: a claim is the whole process's.
_forwarding: Final[WeakValueDictionary[Hashable, SqlOutbox]] = WeakValueDictionary()


def _has_turn(claims: Claims) -> bool:
    if not claims.holds(FORWARDER):
        return bool(claims.take([FORWARDER], 1))
    claims.release(claims.take([ANY_OTHER], 1))  # a claim is known to be lost only at the next request
    return claims.holds(FORWARDER)
