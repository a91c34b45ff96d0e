"""Where a message is, and what happened to it."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from delayline.dashboard.back_ends import PageQueries, within_limit
from delayline.dashboard.errors import error_row
from delayline.dashboard.model import ErrorRow, LifeEvent, MessageLife, PendingRow
from delayline.dashboard.search import row_of
from delayline.errors import ConfigurationError

if TYPE_CHECKING:
    from delayline.dashboard.errors import FailedMessages
    from delayline.dashboard.search import PendingSearch


class MessageLives(PageQueries):
    """Follows messages from their journal to the places where they are now."""

    def __init__(self, search: PendingSearch, failed: FailedMessages) -> None:
        super().__init__(search.back_ends)
        self._search = search
        self._failed = failed

    @within_limit
    async def of(self, message_id: str) -> MessageLife:
        """Return a message's journal, and where it is now."""
        events, no_journal = await self._journal(message_id)
        pending: PendingRow | None = None
        failed: ErrorRow | None = None
        with contextlib.suppress(ConfigurationError):
            waiting = await self._search.find(message_id)
            pending = None if waiting is None else row_of(waiting)
        with contextlib.suppress(ConfigurationError):
            message = await self._failed.find(message_id)
            failed = None if message is None else error_row(message)
        return MessageLife(message_id, events, pending, failed, no_journal)

    async def _journal(self, message_id: str) -> tuple[list[LifeEvent], str | None]:
        """Return the events of a message in the journal, and why there are none where no journal is kept."""
        try:
            store = self.back_ends.sql_store("no journal is kept: journals are")
        except ConfigurationError as error:
            return [], str(error)
        from delayline.sql.journal import events_of

        name = store.table_of(self.back_ends.name).name
        entries = await store.read_tables(partial(events_of, store=name, message_id=message_id))
        if entries is None:
            return [], "no journal is kept: set journal = true and run delayline setup"
        return [LifeEvent(*entry) for entry in entries], None
