"""Searches through the pending messages of an endpoint."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from delayline.dashboard.back_ends import PageQueries, within_limit
from delayline.dashboard.model import PendingPage, PendingRow, Preview
from delayline.delayed.store import DueBucket, FoundMessage, SupportsDueForecast, SupportsLookup, found_of
from delayline.errors import ConfigurationError
from delayline.failure_groups import headers_of, message_type
from delayline.filters import MessageFilter, pattern_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from datetime import datetime

    from delayline.dashboard.back_ends import BackEnds

#: Messages that are looked through for an id where a back end has no index of ids.
LOOKED_AT: Final = 20_000
#: Messages that are read in a statement.
READ_AT_ONCE: Final = 500
#: Ids that a preview shows.
PREVIEWED_IDS: Final = 5
#: From a minute to ten years, each about twice the limit before, in round hours.
GROWING: Final = (
    *(timedelta(minutes=count) for count in (1, 2, 5, 10, 20, 30)),
    *(timedelta(hours=count) for count in (1, 2, 4, 8, 12)),
    *(timedelta(days=count) for count in (1, 2, 4, 7, 14, 30, 60, 90, 180, 365, 730, 1825, 3650)),
)


class PendingSearch(PageQueries):
    """Finds pending messages, and tells how many match.

    Args:
        back_ends: The endpoint's back ends.
        search_time: Seconds that a search or a preview may look through message by message.
    """

    def __init__(self, back_ends: BackEnds, search_time: float) -> None:
        super().__init__(back_ends)
        self._search_time = search_time

    @within_limit
    async def page(
        self, wanted: MessageFilter | None = None, *, limit: int = 50, after: datetime | None = None, offset: int = 0
    ) -> PendingPage:
        """Return pending messages that match, earliest due first.

        An id and due times are searched by index. Other conditions are checked message by message until the page is
        full or the search time is used up; then the result is `cut`, and a search with `next_after` goes on from there.

        Args:
            wanted: What to find; everything by default.
            limit: How many to return at most, 1 to 500.
            after: The due time to go on from, `next_after` of the page before.
            offset: How many messages of that due time to skip, `next_offset` of the page before.
        """
        if not 1 <= limit <= READ_AT_ONCE:
            raise ConfigurationError(f"limit must be 1 to {READ_AT_ONCE}, not {limit}")
        wanted = wanted or MessageFilter()
        rows, looked_at, is_over = [], 0, await self._search_timer()
        at_once = READ_AT_ONCE if _checks_each(wanted) else limit
        start, skipped = after or wanted.due_from, offset
        async with contextlib.aclosing(self._pages(wanted, after, offset, at_once)) as pages:
            async for page in pages:
                for candidate in page:
                    looked_at += 1
                    due = candidate.message.due
                    start, skipped = due, skipped + 1 if due == start else 1
                    if _matches(wanted, candidate):
                        rows.append(row_of(candidate))
                        if len(rows) == limit:
                            return PendingPage(rows, looked_at, False, skipped, start)
                if len(page) == at_once and is_over():
                    total = await self._expected(after or wanted.due_from, wanted.due_before)
                    if total is not None:  # without the skipped messages at its beginning
                        total = replace(total, count=max(total.count - offset, looked_at))
                    return PendingPage(rows, looked_at, False, skipped, start, cut=True, total=total)
        return PendingPage(rows, looked_at, True, None, None)

    @within_limit
    async def preview(self, wanted: MessageFilter) -> Preview:
        """Return how many pending messages match, for an action on all of them.

        The number is counted within the search time, or estimated: from the due forecast for due times and a
        destination, else from the share of matches among the messages that were looked through.
        """
        number, looked_at, is_over = 0, 0, await self._search_timer()
        examples: list[str] = []
        by_due = not _checks_each(wanted) and wanted.message_id is None
        # The index or statistics count them.
        total = await self._expected(wanted.due_from, wanted.due_before) if by_due else None
        at_once = READ_AT_ONCE if total is None else PREVIEWED_IDS
        async with contextlib.aclosing(self._pages(wanted, None, 0, at_once)) as pages:
            async for page in pages:
                matching = [candidate for candidate in page if _matches(wanted, candidate)]
                examples += [match.message.id for match in matching[: PREVIEWED_IDS - len(examples)]]
                if total is not None:
                    return Preview(total.count, total.exact, total.at_least, examples)
                number, looked_at = number + len(matching), looked_at + len(page)
                if len(page) == at_once and is_over():
                    return await self._estimated(wanted, number, looked_at, examples)
        return Preview(number, exact=True, at_least=False, example=examples)

    async def find(self, message_id: str, *, body_limit: int = 0) -> FoundMessage | None:
        """Return a pending message with the first bytes of its body, or None."""
        store = await self.back_ends.store()
        if isinstance(store, SupportsLookup):
            return await store.find(message_id, body_limit=body_limit)
        managed, offset = await self.back_ends.managed_store(), 0
        while offset < LOOKED_AT and (page := await managed.pending(limit=READ_AT_ONCE, offset=offset)):
            for message in page:
                if message.id == message_id:
                    return found_of(message, body_limit)
            offset += len(page)
        return None

    async def _pages(
        self, wanted: MessageFilter, after: datetime | None, offset: int, at_once: int
    ) -> AsyncGenerator[Sequence[FoundMessage], None]:
        """Yield pages of messages in order of due time, by the indexes that there are."""
        if (message_id := _exact(wanted.message_id)) is not None:
            message = await self.find(message_id)
            yield [message] if message is not None else []
            return
        store = await self.back_ends.store()
        if not isinstance(store, SupportsLookup):
            managed = await self.back_ends.managed_store()
            destination = _exact(wanted.destination)
            while messages := await managed.pending(destination=destination, limit=at_once, offset=offset):
                yield [found_of(message, 0) for message in messages]
                offset += len(messages)
            return
        start = after or wanted.due_from
        while page := await store.due_between(start, wanted.due_before, limit=at_once, offset=offset):
            yield page
            if len(page) < at_once:
                return
            last = page[-1].message.due
            same = sum(1 for match in page if match.message.due == last)
            offset = offset + same if last == start else same
            start = last

    async def _search_timer(self) -> Callable[[], bool]:
        """Return a function that returns whether the search time is used up; it begins when the store is open."""
        await self.back_ends.store()
        time = asyncio.get_running_loop().time
        end = time() + self._search_time
        return lambda: time() >= end

    async def _estimated(self, wanted: MessageFilter, number: int, looked_at: int, examples: Sequence[str]) -> Preview:
        """Return the preview of a filter after `number` matches among the first `looked_at` messages."""
        name = _exact(wanted.destination)
        by_share = name is None or wanted.checks_headers
        total = await self._expected(wanted.due_from, wanted.due_before, None if by_share else name)
        if total is None:
            return Preview(number, exact=False, at_least=True, example=examples)
        about = round(total.count * number / looked_at) if by_share else total.count
        return Preview(max(about, number), exact=False, at_least=total.at_least, example=examples)

    async def _expected(
        self, start: datetime | None, end: datetime | None, destination: str | None = None
    ) -> DueBucket | None:
        """Return how many messages have these due times and this destination, by the due forecast.

        None where the store has no forecast.
        """
        store = await self.back_ends.store()
        if not isinstance(store, SupportsDueForecast):
            return None
        now = await self.back_ends.time()
        times = {time for time in (start, end) if time is not None}
        if destination is not None:  # shares of destinations come from the first messages of each bucket: more buckets
            times.update(now + span for span in GROWING)
        edges = sorted(
            time for time in times or {now} if (start is None or time >= start) and (end is None or time <= end)
        )
        forecast = await store.due_forecast(edges, by_destination=destination is not None)
        buckets = forecast.buckets[0 if start is None else 1 : None if end is None else -1]
        return DueBucket(
            start,
            end,
            sum(bucket.count if destination is None else bucket.destinations.get(destination, 0) for bucket in buckets),
            exact=all(bucket.exact for bucket in buckets),
            at_least=any(bucket.at_least for bucket in buckets),
        )


def _matches(wanted: MessageFilter, found: FoundMessage) -> bool:
    message = found.message
    return wanted.matches(message.message, message.destination, message.due)


def _exact(pattern: str | None) -> str | None:
    """Return the text that a pattern without stars means; None for another pattern."""
    return None if pattern is None else pattern_of(pattern).exact


def _checks_each(wanted: MessageFilter) -> bool:
    """Return whether messages have to be looked at each."""
    has_stars = wanted.message_id is not None and _exact(wanted.message_id) is None
    return wanted.destination is not None or has_stars or wanted.checks_headers


def row_of(found: FoundMessage) -> PendingRow:
    """Return a pending message as it is listed."""
    message = found.message
    headers, _ = headers_of(message.message)
    kind = message_type(headers)
    return PendingRow(message.id, message.destination, message.due, message.number_of_retries, kind, found.size)


async def forecasting(back_ends: BackEnds) -> SupportsDueForecast:
    """Return the open store if it counts its messages by due time; raises ConfigurationError."""
    store = await back_ends.store()
    if not isinstance(store, SupportsDueForecast):
        raise ConfigurationError(f"{type(store).__name__} cannot count its messages without reading all of them")
    return store
