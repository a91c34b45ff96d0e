"""The journal's entries of handled messages, beside what the database itself writes down of waiting messages."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Final

from delayline.delayed.delivery import storage_of
from delayline.delayed.store import SupportsJournal
from delayline.errors import CorruptHeaders, DelaylineError
from delayline.events import Event, emit
from delayline.grouping import Grouping
from delayline.message import DelayedMessage, Headers, from_wire_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delayline.delayed.delivery import DelayedDelivery
    from delayline.delayed.store import MessageJournal
    from delayline.message import Message
    from delayline.transaction import Transaction
    from delayline.transport import Transport

logger: logging.Logger = logging.getLogger(__name__)

UNKNOWN: Final = "The journal may lack that %d messages were handled in %s: %s"


class HandledEntries:
    """Writes in the journal of an endpoint's store which delayed messages of a queue were handled.

    Args:
        journal: The journal.
        queue: The queue.
        joins: Whether the entries can be part of the transactions that remove messages from the queue.
    """

    def __init__(self, journal: MessageJournal, queue: str, *, joins: bool) -> None:
        self._journal = journal
        self._queue = queue
        self._joins = joins
        self._alone: Grouping[DelayedMessage, None] = Grouping(self._write_group, maximum=sys.maxsize)

    @classmethod
    def of(cls, delivery: DelayedDelivery | None, transport: Transport, queue: str) -> HandledEntries | None:
        """Return the entries of a queue's messages; None where the delivery's store can keep no journal."""
        store = None if delivery is None else storage_of(delivery)
        if delivery is None or not isinstance(store, SupportsJournal):
            return None
        domain = delivery.transaction_domain
        return cls(store.journal, queue, joins=domain is not None and domain == transport.transaction_domain)

    def of_removal(self, messages: Iterable[Message]) -> Sequence[DelayedMessage]:
        """Return the entries that are to be written in the transaction that removes the messages."""
        return [entry for message in messages if (entry := self._entry(message))] if self._is_joined else ()

    async def write(self, entries: Sequence[DelayedMessage], transaction: Transaction) -> None:
        """Write entries in the transaction that removes their messages."""
        await self._journal.handled(entries, transaction)

    async def write_after(self, message: Message, *, removed_alone: bool) -> None:
        """Write the entry of a message that was removed; a failure is logged.

        Args:
            message: The message.
            removed_alone: Whether no entry was written in the transaction that has removed it, even where one can be.
        """
        if (removed_alone or not self._is_joined) and self._journal.is_kept and (entry := self._entry(message)):
            await self._alone.run(entry)

    @property
    def _is_joined(self) -> bool:
        return self._joins and self._journal.is_kept

    async def _write_group(self, entries: Sequence[DelayedMessage]) -> Sequence[None]:
        try:
            await self._journal.handled(entries)
        except DelaylineError as error:
            emit(logger, logging.WARNING, Event.HANDLED_UNRECORDED, UNKNOWN, len(entries), self._queue, error)
        return [None] * len(entries)

    def _entry(self, message: Message) -> DelayedMessage | None:
        """Return the entry of a message that has waited for its due time; None for others."""
        try:
            due = message.headers.get(Headers.DELIVER_AT)
            return None if due is None else DelayedMessage(message.logical, self._queue, from_wire_time(due))
        except (CorruptHeaders, ValueError, OverflowError):  # a stranger's
            return None
