"""PlainStore: each batch is stored as an endpoint stores it, in a transaction; for products that cannot stage."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Final

from delayline.backends import DUPLICATE_ID, UNKNOWN_QUEUE
from delayline.bulk.scan import Condition, PendingScan, Span
from delayline.delayed.arrow import rows_in
from delayline.errors import InvalidDueTime, InvalidMessage
from delayline.migration.rows import checked_message
from delayline.migration.sources.delayline_store import TIMEOUTS_SUFFIX
from delayline.migration.target import Delivered, DeliverySession, WithoutLedger
from delayline.migration.targets.sql_store import SqlStore
from delayline.sql.databases import database_at
from delayline.sql.store import SqlDelayedMessageStore
from delayline.transaction import TransactionMode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AsyncExitStack
    from datetime import datetime

    import pyarrow as pa

    from delayline.message import DelayedMessage
    from delayline.migration.target import Attempted

#: Ids in a query; a statement of SQL Server has at most 2100 parameters.
ASKED_AT_ONCE: Final = 1000
COMPARED: Final = ("id", "destination", "due")


class PlainStore(WithoutLedger, SqlStore):
    """The stores of a database, as in SQL Server's table of the document: `delayline setup` has made them."""

    kind: ClassVar[str] = "plain-store"
    exactly_once: ClassVar[bool] = False
    #: SQL Server's `datetime` has steps of a three-hundredth of a second.
    grain: ClassVar[timedelta] = timedelta(milliseconds=4)

    def begin(self, endpoint: str) -> PlainSession:
        """Return a session; nothing is staged."""
        return PlainSession(self, endpoint)


class PlainSession(DeliverySession):
    """Stores batches of an endpoint."""

    _store: SqlDelayedMessageStore

    def __init__(self, target: PlainStore, endpoint: str) -> None:
        self.url: str = target.url
        self.schema: str | None = target.schema
        self.endpoint = endpoint
        self.queues: frozenset[str] | None = target.queues()
        self.largest_message: int = target.largest_message

    async def open(self, stack: AsyncExitStack) -> None:
        """Open the store."""
        self._store = SqlDelayedMessageStore(self.url, schema=self.schema)
        await self._store.initialize(self.endpoint, TransactionMode.RECEIVE_ONLY)
        stack.push_async_callback(self._store.close)

    async def deliver(self, messages: pa.RecordBatch, attempt: Attempted) -> Delivered:
        """Store the messages; a message that an earlier attempt has stored is not stored twice."""
        refused: dict[int, str] = {}
        sound: dict[int, DelayedMessage] = {}
        for position, row in enumerate(rows_in(messages)):
            if self.queues is not None and row.destination not in self.queues:
                refused[position] = UNKNOWN_QUEUE.format(row.destination)
                continue
            try:
                sound[position] = checked_message(row, self._kept)
            except (InvalidMessage, InvalidDueTime) as error:
                refused[position] = str(error)
        refused |= await self._stored(sound)
        return Delivered(attempt.number, refused | self._duplicates(sound))

    def _duplicates(self, messages: Mapping[int, DelayedMessage]) -> dict[int, str]:
        """Return the reasons of messages whose id another pending message has, which storing left unchanged."""
        pending = self.pending([message.id for message in messages.values()])
        ours = {position: (message.destination, message.due) for position, message in messages.items()}
        return {at: DUPLICATE_ID for at, message in messages.items() if pending.get(message.id, ours[at]) != ours[at]}

    def _kept(self, due: datetime) -> datetime:
        """Return the time that the database keeps for it, not before it. Raises InvalidDueTime."""
        dialect = database_at(self.url).dialect
        return dialect.values.from_due(dialect.values.to_due(due))

    async def _stored(self, messages: Mapping[int, DelayedMessage]) -> dict[int, str]:
        """Store all of them, or each that can be where some cannot; return why some cannot."""
        try:
            await self._store.store_many(list(messages.values()))
        except (InvalidMessage, InvalidDueTime) as error:
            if len(messages) == 1:
                return dict.fromkeys(messages, str(error))
            refused: dict[int, str] = {}
            for position, message in messages.items():
                refused |= await self._stored({position: message})
            return refused
        return {}

    def pending(self, ids: Sequence[str]) -> Mapping[str, tuple[str, datetime]]:
        """Return destination and due time of the pending messages among the ids."""
        waiting_by_id: dict[str, tuple[str, datetime]] = {}
        for first in range(0, len(ids), ASKED_AT_ONCE):
            asked = [Condition("id", "in", ids[first : first + ASKED_AT_ONCE])]
            waiting = PendingScan(self.url, f"{self.endpoint}{TIMEOUTS_SUFFIX}", self.schema, asked)
            for rows in waiting.rows(COMPARED, Span(), ASKED_AT_ONCE):
                waiting_by_id |= {message_id: (destination, due) for message_id, destination, due in rows}
        return waiting_by_id
