"""Where a message is, and what happened to it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from delayline.dashboard.back_ends import PageQueries, within_limit
from delayline.dashboard.errors import error_row
from delayline.dashboard.model import LifeEvent, MessageLife, UnsearchedPlace
from delayline.dashboard.search import row_of
from delayline.errors import ConfigurationError, DelaylineError
from delayline.outgoing import copies_of

if TYPE_CHECKING:
    from delayline.dashboard.errors import FailedMessages
    from delayline.dashboard.finding import MessageFinder
    from delayline.dashboard.search import PendingSearch
    from delayline.delayed.store import FoundMessage
    from delayline.message import Message


class MessageLives(PageQueries):
    """Follows messages from their journal to the places where they are now."""

    def __init__(self, search: PendingSearch, failed: FailedMessages, finder: MessageFinder) -> None:
        super().__init__(search.back_ends)
        self._search = search
        self._failed = failed
        self._finder = finder

    @within_limit
    async def of(self, message_id: str) -> MessageLife:
        """Return a message's journal, and where it is now; where that is unknown, why."""
        unsearched: list[UnsearchedPlace] = []
        events: list[LifeEvent] = []
        no_journal: str | None = None
        waiting: FoundMessage | None = None
        failed: Message | None = None
        try:
            events, no_journal = await self._journal(message_id)
        except DelaylineError as error:
            unsearched.append(UnsearchedPlace("journal", str(error)))
        try:
            for each in (message_id, *copies_of(message_id)):
                waiting = waiting or await self._search.find(each)
        except DelaylineError as error:
            unsearched.append(UnsearchedPlace(f"pending messages of {self.back_ends.name}", str(error)))
        elsewhere, unknown = await self._finder.elsewhere(message_id)
        try:
            failed = await self._failed.find(message_id)
        except DelaylineError as error:
            unsearched.append(UnsearchedPlace(f"error queue {self.back_ends.error_queue}", str(error)))
        return MessageLife(
            message_id,
            events,
            None if waiting is None else row_of(waiting),
            None if failed is None else error_row(failed),
            elsewhere,
            [*unsearched, *unknown],
            no_journal,
        )

    async def _journal(self, message_id: str) -> tuple[list[LifeEvent], str | None]:
        """Return the events of a message in the journal, and why there are none where no journal is kept."""
        try:
            store = self.back_ends.sql_store("no journal is kept: journals are")
        except ConfigurationError as error:
            return [], str(error)
        from delayline.sql.journal import events_of

        ids = (message_id, *copies_of(message_id))
        entries = await store.read_tables(partial(events_of, ids=ids))
        if entries is None:
            return [], "no journal is kept: set journal = true and run delayline setup"
        return [LifeEvent(*entry) for entry in entries], None
