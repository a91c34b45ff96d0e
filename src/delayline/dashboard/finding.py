"""Searches for messages in all places of an endpoint's back ends."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from delayline.composition import satellites_of
from delayline.dashboard.back_ends import PageQueries, within_limit
from delayline.dashboard.model import FoundPage, UnsearchedPlace
from delayline.errors import ConfigurationError, DelaylineError
from delayline.filters import MessageFilter, literal
from delayline.places import MessagePlace, PlaceKind, SupportsNeighbourSearch
from delayline.searching import ClosedPlace, Search, queue_of, queue_places, unlisted_places, waiting_places
from delayline.transport import SupportsQueuePass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline.places import MessageMatch, SearchablePlace
    from delayline.searching import PlaceNote, SearchPosition

#: Seconds of a search until its page is shown.
SEARCH_SECONDS: Final = 1.5
BY_COMMAND: Final = "its messages are searched by delayline find"
TAKES: Final = "its messages would be taken from receivers for a moment: use the page Find, or delayline find"


class MessageFinder(PageQueries):
    """Finds messages wherever they are."""

    @within_limit
    async def page(
        self, wanted: MessageFilter, kinds: tuple[PlaceKind, ...], position: SearchPosition | None, limit: int
    ) -> FoundPage:
        """Return what a search finds in a moment, and where it goes on.

        Args:
            wanted: Which messages.
            kinds: The kinds of places.
            position: Where to go on; its filter and kinds replace those that are given.
            limit: How many messages to find at most.
        """
        if position is not None:
            wanted, kinds = position.filter, position.kinds
        search = Search(await self._places(kinds, queue_of(wanted)), wanted, kinds=kinds, position=position)
        matches: list[MessageMatch] = []
        looked_at, share, time = 0, 0.0, asyncio.get_running_loop().time
        end = time() + SEARCH_SECONDS
        async with contextlib.aclosing(search.pages(limit)) as pages:
            async for page in pages:
                matches += page.matches
                looked_at, share = page.looked_at, page.share
                if time() >= end:
                    break
        return FoundPage(
            matches,
            looked_at,
            share,
            None if search.position is None else str(search.position),
            [str(place) for place in search.searched],
            _notes(search.left_out),
            _notes(search.unsearched),
            is_cut=time() >= end,
        )

    async def elsewhere(self, message_id: str) -> tuple[Sequence[MessageMatch], Sequence[UnsearchedPlace]]:
        """Return where a message is in queues and pending in other endpoints, and the places that were not searched."""
        own, kinds = MessagePlace(PlaceKind.PENDING, self.back_ends.name), (PlaceKind.PENDING, PlaceKind.QUEUES)
        places = [each for each in await self._places(kinds, None) if each.place != own]
        unsearched: list[UnsearchedPlace] = []
        with contextlib.suppress(DelaylineError):
            if isinstance(await self.back_ends.transport(), SupportsQueuePass):
                unsearched = [UnsearchedPlace(str(each.place), TAKES) for each in places if _is_queue(each)]
                places = [each for each in places if not _is_queue(each)]
        search = Search(places, MessageFilter(message_id=literal(message_id)), kinds=kinds)
        matches = [match async for page in search.pages(limit=50) for match in page.matches]
        return matches, [*unsearched, *_notes(search.unsearched)]

    async def _places(self, kinds: Sequence[PlaceKind], queue: str | None) -> list[SearchablePlace]:
        """Return the places, each to be searched once: searches keep in them how far they are."""
        back_ends = self.back_ends
        places: list[SearchablePlace] = []
        name, error_queue = back_ends.name, back_ends.error_queue
        if PlaceKind.PENDING in kinds or PlaceKind.JOURNAL in kinds:
            try:
                store = await back_ends.store()
                places += waiting_places(store, name)
                if isinstance(store, SupportsNeighbourSearch):
                    places += await store.neighbour_places()
            except DelaylineError as error:
                places.append(ClosedPlace(MessagePlace(PlaceKind.PENDING, name), error))
            if (settings := back_ends.settings) is not None:
                places += unlisted_places(settings)
                if settings.timeouts_url is not None and not settings.disable_timeout_manager:
                    old = MessagePlace(PlaceKind.PENDING, f"{name} in the old timeout manager")
                    places.append(ClosedPlace(old, ConfigurationError(BY_COMMAND)))
        if PlaceKind.QUEUES in kinds or PlaceKind.ERRORS in kinds:
            own = [name, *([] if back_ends.settings is None else satellites_of(back_ends.settings))]
            try:
                named = own if queue is None else [*own, queue]
                places += await queue_places(await back_ends.transport(), named, error_queue)
            except DelaylineError as error:
                places.append(ClosedPlace(MessagePlace(PlaceKind.QUEUES, name), error))
                places.append(ClosedPlace(MessagePlace(PlaceKind.ERRORS, error_queue), error))
        return [each for each in places if each.place.kind in kinds]


def _is_queue(searched: SearchablePlace) -> bool:
    return searched.place.kind is PlaceKind.QUEUES


def _notes(notes: Sequence[PlaceNote]) -> list[UnsearchedPlace]:
    return [UnsearchedPlace(str(note.place), note.reason) for note in notes]
