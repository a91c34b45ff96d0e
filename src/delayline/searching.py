"""Searches for messages wherever they may be: pending, in queues, failed, and in the journal.

A search goes through the places in the order in which messages do, so that a message that moves on meanwhile is met
later. It changes nothing, and each page ends with a position from which another search can go on.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Self

from delayline.backends import backend_of
from delayline.composition import delays_url, options_of, satellites_of
from delayline.delayed.store import SupportsLookup, SupportsManagement, found_of, managed
from delayline.error_queue import browse, managed_queues
from delayline.errors import BackendUnavailable, BackendUnusable, ConfigurationError, DelaylineError
from delayline.failures import back_off
from delayline.filters import MessageFilter, pattern_of
from delayline.opening import open_pending, open_transport, open_waiting
from delayline.outgoing import copies_of
from delayline.places import (
    MessageMatch,
    MessagePlace,
    PlaceKind,
    PlacePage,
    SupportsSearch,
    cannot_have,
    pending_match,
    queued_match,
)
from delayline.transport import (
    SupportsPeek,
    SupportsQueueAddresses,
    SupportsQueueLookup,
    SupportsQueuePass,
    SupportsQueueStates,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence

    from delayline.delayed.store import FoundMessage
    from delayline.message import Message
    from delayline.places import Key, SearchablePlace
    from delayline.settings import Settings
    from delayline.transport import Transport

__all__ = [
    "MessageMatch",
    "MessagePlace",
    "PlaceKind",
    "PlaceNote",
    "Search",
    "SearchPage",
    "SearchPosition",
    "open_places",
]

#: Matches of a page.
MATCHES_AT_ONCE: Final = 100
#: Messages that are read at once where a back end has no tables to search.
READ_AT_ONCE: Final = 500
#: Seconds of a search without a rest; later it rests as long as it works, for those who do more urgent work.
UNRESTED: Final = 1.0
#: Seconds that a search waits for a back end that goes away.
OUTAGE_LIMIT: Final = 5.0
#: Messages of a queue that are looked at where looking takes them from receivers: with a receiver, and without.
TAKEN_FROM_RECEIVERS: Final = 1_000
TAKEN_AT_ONCE: Final = 20_000
LARGEST_QUEUE: Final = 100_000
LARGEST_BODY: Final = 1 << 40
LONGEST_POSITION: Final = 20_000
ORDER: Final = list(PlaceKind)


@dataclass(frozen=True, slots=True)
class SearchPosition:
    """How far a search is: what it looks for, and behind what it goes on. Valid while rows come and go."""

    filter: MessageFilter
    kinds: tuple[PlaceKind, ...]
    """The kinds of places that are searched."""
    place: MessagePlace
    after: Key | None
    """The key in that place; None for its beginning."""

    def __str__(self) -> str:
        kept = [str(self.filter), [kind.value for kind in self.kinds], self.place.kind.value, self.place.name]
        text = json.dumps([*kept, self.after], separators=(",", ":")).encode("utf-8", "surrogatepass")
        return base64.urlsafe_b64encode(_check_of(text) + text).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the position of a text. Raises ConfigurationError for another text."""
        try:
            kept = base64.b64decode(text[:LONGEST_POSITION] + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
            check, encoded = kept[:4], kept[4:]
            written, kinds, kind, name, after = json.loads(encoded.decode("utf-8", "surrogatepass"))
            wanted = MessageFilter.parse([written], datetime.now(UTC))
            position = cls(wanted, tuple(map(PlaceKind, kinds)), MessagePlace(PlaceKind(kind), name), after)
            is_whole = check == _check_of(encoded) and isinstance(name, str) and _is_key(after)
        except (ValueError, TypeError, AttributeError, ConfigurationError):
            is_whole = False
        if not is_whole:
            raise ConfigurationError(
                f"{text[:60]!r} is no position of a search: copy it whole from what the search has printed"
            )
        return position


def _check_of(encoded: bytes) -> bytes:
    return hashlib.sha256(encoded).digest()[:4]


def _is_key(after: object) -> bool:
    if not isinstance(after, list):
        return after is None or isinstance(after, int)
    due, _ = after
    return not due or datetime.fromisoformat(due).utcoffset() is not None


@dataclass(frozen=True, slots=True)
class SearchPage:
    """What a search has found since the page before."""

    matches: Sequence[MessageMatch]
    place: MessagePlace
    looked_at: int
    """About how many messages were looked through by now."""
    share: float
    """About how far through all places the search is, from 0 to 1."""
    position: SearchPosition | None
    """Where to go on; None when the search is through."""


@dataclass(frozen=True, slots=True)
class PlaceNote:
    """A place that was not searched, or not to its end."""

    place: MessagePlace
    reason: str


class Search:
    """A search through places, page by page.

    Args:
        places: The places, in any order.
        wanted: Which messages.
        kinds: The kinds of places to search.
        position: Where to go on; its filter and kinds replace those that are given.
        outage_limit: Seconds to wait for a back end that goes away, before its place counts as not searched.
    """

    def __init__(
        self,
        places: Sequence[SearchablePlace],
        wanted: MessageFilter | None = None,
        *,
        kinds: Collection[PlaceKind] = tuple(PlaceKind),
        position: SearchPosition | None = None,
        outage_limit: float = OUTAGE_LIMIT,
    ) -> None:
        self.filter: MessageFilter = (wanted or MessageFilter()) if position is None else position.filter
        chosen = kinds if position is None else position.kinds
        self.kinds: tuple[PlaceKind, ...] = tuple(sorted(chosen, key=ORDER.index))
        self._places = sorted(
            (each for each in places if each.place.kind in self.kinds), key=lambda each: _order_of(each.place)
        )
        for message_id in self.filter.ids[:1]:
            self.filter = replace(self.filter, copies=copies_of(message_id))
        self._start = position
        self._outage_limit = outage_limit
        self._began = time.monotonic()
        self._looked_at = 0
        self._failed: SearchPosition | None = None
        self.searched: list[MessagePlace] = []
        """The places that were searched to their end."""
        self.unsearched: list[PlaceNote] = []
        """The places that may have more messages that match: they could not be searched."""
        self.left_out: list[PlaceNote] = []
        """The places in which no message can match, whichever are there."""
        self.position: SearchPosition | None = None
        """Where to go on: behind the last page, or where a place could not be searched; None when it is through."""

    async def pages(self, limit: int | None = None) -> AsyncGenerator[SearchPage, None]:
        """Yield pages until all places are searched; close it to stop before.

        Args:
            limit: How many matches to return at most.
        """
        found = 0
        for number, each in enumerate(self._places):
            if self._start is not None and _order_of(each.place) < _order_of(self._start.place):
                continue
            if (reason := cannot_have(each.place.kind, self.filter)) is not None:
                self.left_out.append(PlaceNote(each.place, reason))
                continue
            left = None if limit is None else limit - found
            async with contextlib.aclosing(self._pages_of(number, each, left)) as pages:
                async for page in pages:
                    yield page
                    found += len(page.matches)
                    if limit is not None and found >= limit:
                        return
        self.position = self._failed

    async def _pages_of(
        self, number: int, searchable: SearchablePlace, limit: int | None
    ) -> AsyncGenerator[SearchPage, None]:
        place, found = searchable.place, 0
        after = self._start.after if self._start is not None and self._start.place == place else None
        while True:
            most = MATCHES_AT_ONCE if limit is None else min(MATCHES_AT_ONCE, limit - found)
            asked = time.monotonic()
            try:
                page = await self._through_outages(searchable, after, most)
            except DelaylineError as error:
                self.unsearched.append(PlaceNote(place, str(error)))
                self._failed = self._failed or self._at(place, after)
                self.position = self._failed
                return
            took = time.monotonic() - asked
            self._looked_at, found, after = self._looked_at + page.looked_at, found + len(page.matches), page.end
            if page.missed is not None:
                self.unsearched.append(PlaceNote(place, page.missed))
            elif after is None:
                self.searched.append(place)
            self.position = self._failed or (self._behind(number) if after is None else self._at(place, after))
            share = (number + (1.0 if after is None else page.share)) / len(self._places)
            yield SearchPage(page.matches, place, self._looked_at, share, self.position)
            if after is None:
                return
            if time.monotonic() - self._began > UNRESTED:
                await asyncio.sleep(took)

    def _at(self, place: MessagePlace, after: Key | None) -> SearchPosition:
        return SearchPosition(self.filter, self.kinds, place, after)

    def _behind(self, number: int) -> SearchPosition | None:
        """Return the beginning of the next place."""
        following = self._places[number + 1 :]
        return self._at(following[0].place, None) if following else None

    async def _through_outages(self, place: SearchablePlace, after: Key | None, most: int) -> PlacePage:
        attempts, since = 0, time.monotonic()
        while True:
            try:
                page = await place.page(self.filter, after, most)
            except BackendUnavailable:
                attempts += 1
                wait = back_off(attempts).total_seconds() / 4
                if time.monotonic() + wait - since > self._outage_limit:
                    raise
                await asyncio.sleep(wait)
            else:
                return replace(page, matches=list(map(self._told, page.matches)))

    def _told(self, match: MessageMatch) -> MessageMatch:
        """Return a match that says of a copy what it is."""
        return replace(match, state=f"{match.state}, tried before") if match.id in (self.filter.copies or ()) else match


def _order_of(place: MessagePlace) -> tuple[int, str]:
    return ORDER.index(place.kind), place.name


class ClosedPlace:
    """A place that could not be opened.

    Args:
        place: The place.
        error: Why.
    """

    def __init__(self, place: MessagePlace, error: DelaylineError) -> None:
        self.place = place
        self._error = error

    async def page(self, wanted: MessageFilter, after: Key | None, most: int) -> PlacePage:
        """Raise the error: it was waited for already, and a later search opens the place again."""
        del wanted, after, most
        raise BackendUnusable(str(self._error))


class ListedPending:
    """Pending messages that are listed by due time: of what has no table to be searched.

    Args:
        endpoint: The endpoint.
        management: Lists the messages.
    """

    def __init__(self, endpoint: str, management: SupportsManagement) -> None:
        self.place: MessagePlace = MessagePlace(PlaceKind.PENDING, endpoint)
        self._management = management

    async def page(self, wanted: MessageFilter, after: Key | None, most: int) -> PlacePage:
        """Look at the messages behind a due time and an id."""
        start, last_id = (None, "") if not isinstance(after, list) else (datetime.fromisoformat(after[0]), after[1])
        matches: list[MessageMatch] = []
        looked_at, behind = 0, after is None
        async with contextlib.aclosing(self._messages(wanted, start)) as messages:
            async for listed in _in_order(messages):
                delayed = listed.message
                if not behind:  # messages of the same due time are looked at in the order of their ids
                    behind = start is None or (delayed.due, delayed.id) > (start, last_id)
                if not behind:
                    continue
                looked_at += 1
                if wanted.matches(delayed.message, delayed.destination, delayed.due):
                    body_size = listed.size - len(delayed.message.encoded_headers)
                    matches.append(pending_match(self.place, delayed, body_size))
                if len(matches) == most or looked_at == READ_AT_ONCE:
                    return PlacePage(matches, [delayed.due.isoformat(), delayed.id], looked_at)
        return PlacePage(matches, None, looked_at, 1.0)

    async def _messages(self, wanted: MessageFilter, start: datetime | None) -> AsyncGenerator[FoundMessage, None]:
        """Yield messages, earliest due first, from a due time on."""
        lookup = self._management if isinstance(self._management, SupportsLookup) else None
        if lookup is not None and wanted.ids:
            for message_id in wanted.ids:
                found = await lookup.find(message_id, body_limit=0 if wanted.body is None else LARGEST_BODY)
                if found is not None:
                    yield found
            return
        offset = 0
        if lookup is None or wanted.body is not None:  # a lookup returns no bodies
            while messages := await self._management.pending(limit=READ_AT_ONCE, offset=offset):
                for message in messages:
                    if start is None or message.due >= start:
                        yield found_of(message, LARGEST_BODY)
                offset += len(messages)
            return
        start = max(filter(None, (start, wanted.due_from)), default=None)
        while page := await lookup.due_between(start, wanted.due_before, limit=READ_AT_ONCE, offset=offset):
            for found in page:
                yield found
            last = page[-1].message.due
            same = sum(found.message.due == last for found in page)
            offset = offset + same if last == start else same
            start = last


async def _in_order(messages: AsyncIterator[FoundMessage]) -> AsyncGenerator[FoundMessage, None]:
    """Yield messages that come by due time in the order of due time and id."""
    alike: list[FoundMessage] = []
    async for listed in messages:
        if alike and listed.message.due != alike[0].message.due:
            for each in sorted(alike, key=_id_of):
                yield each
            alike = []
        alike.append(listed)
    for each in sorted(alike, key=_id_of):
        yield each


def _id_of(listed: FoundMessage) -> str:
    return listed.message.id


class ListedQueue:
    """A queue of a transport that lists messages: the whole queue is looked at in a page, as far as that disturbs none.

    Where looking takes messages from receivers for a moment, only the first messages of a queue are looked at.

    Args:
        transport: The transport, started.
        queue: The queue.
        kind: Whether it is the error queue.
    """

    def __init__(self, transport: Transport, queue: str, kind: PlaceKind) -> None:
        self.place: MessagePlace = MessagePlace(kind, queue)
        self._transport = transport
        self._queues = managed_queues(transport)

    async def page(self, wanted: MessageFilter, after: Key | None, most: int) -> PlacePage:
        """Look at the messages behind the last match: behind its id, if it is there still."""
        queue, last_id = self.place.name, after[1] if isinstance(after, list) else None
        matches: list[MessageMatch] = []
        looked_at, allowed = 0, await self._allowed()
        missed: str | None = None
        async with contextlib.aclosing(self._messages(allowed)) as messages:
            async for message in messages:
                looked_at += 1
                match = queued_match(self.place, queue, message, len(message.body))
                if wanted.matches(message, match.destination):
                    matches.append(match)
                if looked_at == allowed:
                    missed = await self._missed(looked_at)
                    break
        ids = [match.id for match in matches]
        if last_id in ids:
            matches = matches[ids.index(last_id) + 1 :]
        if len(matches) > most:
            matches = matches[:most]
            return PlacePage(matches, ["", matches[-1].id], looked_at)
        return PlacePage(matches, None, looked_at, 1.0, missed)

    async def _messages(self, allowed: int) -> AsyncGenerator[Message, None]:
        if isinstance(self._transport, SupportsQueuePass):
            async with contextlib.aclosing(browse(self._queues, self.place.name)) as messages:
                async for message in messages:
                    yield message
            return
        for message in await self._queues.browse(self.place.name, allowed):
            yield message

    async def _allowed(self) -> int:
        """Return how many messages may be looked at."""
        if isinstance(self._transport, SupportsPeek) and self.place.kind is PlaceKind.QUEUES:
            return self._transport.peeked_at_most
        if not isinstance(self._transport, SupportsQueuePass):
            return LARGEST_QUEUE
        states = self._transport.queue_states if isinstance(self._transport, SupportsQueueStates) else None
        [*of_queue] = [] if states is None else await states([self.place.name])
        is_received = not of_queue or of_queue[0].received is not False
        return TAKEN_FROM_RECEIVERS if is_received else TAKEN_AT_ONCE

    async def _missed(self, looked_at: int) -> str | None:
        """Return why the rest of the queue was not looked at; None if there is no rest."""
        number = await self._queues.count(self.place.name)
        if isinstance(self._transport, SupportsQueuePass):  # what the pass has is not counted
            number += looked_at
        if number <= looked_at:
            return None
        return (
            f"only the first {looked_at:,} of about {number:,} messages were looked at: to look at more would keep "
            "them from receivers"
        )


@contextlib.asynccontextmanager
async def open_places(
    settings: Settings, kinds: Collection[PlaceKind] = tuple(PlaceKind), *, queue: str | None = None
) -> AsyncIterator[list[SearchablePlace]]:
    """Open the places of settings: of all endpoints and queues that can be listed, and of the named endpoint.

    A place that cannot be opened is among them, and says why when it is searched.

    Args:
        settings: The settings.
        kinds: The kinds of places to open.
        queue: A further queue, for back ends that cannot list them, such as that of a filter: `queue_of`.
    """
    places: dict[MessagePlace, SearchablePlace] = {}
    async with contextlib.AsyncExitStack() as stack:
        if PlaceKind.PENDING in kinds or PlaceKind.JOURNAL in kinds:
            for name in await _endpoints(settings):
                is_named = name == settings.endpoint
                of_endpoint = settings if is_named else replace(settings, endpoint=name, table_name=None)
                for each in await _open_waiting(stack, of_endpoint):
                    places.setdefault(each.place, each)
        if PlaceKind.QUEUES in kinds or PlaceKind.ERRORS in kinds:
            for each in await _open_queues(stack, settings, queue):
                places.setdefault(each.place, each)
        yield [each for each in places.values() if each.place.kind in kinds]


async def _endpoints(settings: Settings) -> Sequence[str]:
    """Return the named endpoint, and the others that can be listed."""
    url = settings.resolved_store_url
    named = [] if settings.endpoint is None else [settings.endpoint]
    listed: Sequence[str] = ()
    with contextlib.suppress(DelaylineError):  # opening it says why
        backend = backend_of(url)
        backend.must_exist(url)
        listed = await backend.endpoints(url, options_of(settings))
    return list(dict.fromkeys([*named, *listed]))


async def _open_waiting(stack: contextlib.AsyncExitStack, settings: Settings) -> list[SearchablePlace]:
    """Open the pending messages of an endpoint, and what its back end holds itself."""
    name = settings.named_endpoint
    places: list[SearchablePlace] = []
    try:
        places += waiting_places(await stack.enter_async_context(open_pending(settings)), name)
    except DelaylineError as error:
        places.append(ClosedPlace(MessagePlace(PlaceKind.PENDING, name), error))
    places += unlisted_places(settings)
    if settings.timeouts_url is not None and not settings.disable_timeout_manager:
        old = f"{name} in the old timeout manager"
        try:
            persister = await stack.enter_async_context(open_waiting(settings, timeouts=True))
            places += waiting_places(persister, old)
        except DelaylineError as error:
            places.append(ClosedPlace(MessagePlace(PlaceKind.PENDING, old), error))
    return places


async def _open_queues(
    stack: contextlib.AsyncExitStack, settings: Settings, queue: str | None
) -> list[SearchablePlace]:
    """Open the queues that can be listed, and those that are named."""
    queues = [] if settings.endpoint is None else [settings.endpoint, *satellites_of(settings)]
    queues += [] if queue is None else [queue]
    try:
        transport = await stack.enter_async_context(open_transport(settings))
        return await queue_places(transport, queues, settings.error_queue)
    except DelaylineError as error:
        return [
            *(ClosedPlace(MessagePlace(PlaceKind.QUEUES, queue), error) for queue in queues or [""]),
            ClosedPlace(MessagePlace(PlaceKind.ERRORS, settings.error_queue), error),
        ]


def unlisted_places(settings: Settings) -> list[SearchablePlace]:
    """Return what a broker holds of the endpoint's delayed messages beside its store, where none can be listed."""
    url = delays_url(settings)
    if url is None or url == settings.resolved_store_url:
        return []
    backend = backend_of(url)
    place = MessagePlace(PlaceKind.PENDING, f"{settings.named_endpoint} in {backend.native_delays}")
    return [ClosedPlace(place, BackendUnusable(backend.unlisted or "its messages cannot be listed"))]


def waiting_places(store: object, endpoint: str) -> list[SearchablePlace]:
    """Return the pending messages of an open store, and its journal. Raises ConfigurationError."""
    if isinstance(store, SupportsSearch):
        return list(store.searched_places(endpoint))
    return [ListedPending(endpoint, managed(store))]


async def queue_places(transport: Transport, queues: Sequence[str], error_queue: str) -> list[SearchablePlace]:
    """Return the queues of a started transport: all that it can list, and the given ones. Raises DelaylineError."""
    if isinstance(transport, SupportsSearch):
        return list(transport.searched_places(error_queue))
    listed = await transport.queues() if isinstance(transport, SupportsQueueLookup) else ()
    addressed = transport.address_of if isinstance(transport, SupportsQueueAddresses) else str
    names = {addressed(name): name for name in (*listed, *queues)}
    names.pop(addressed(error_queue), None)
    return [
        *(ListedQueue(transport, name, PlaceKind.QUEUES) for name in names.values()),
        ListedQueue(transport, error_queue, PlaceKind.ERRORS),
    ]


def queue_of(wanted: MessageFilter) -> str | None:
    """Return the queue that a filter names; None where it names none, or several."""
    return None if wanted.destination is None else pattern_of(wanted.destination).exact
