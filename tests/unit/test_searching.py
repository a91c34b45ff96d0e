"""Positions of searches, and searches through what only lists its messages."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayline import (
    BackendUnavailable,
    ConfigurationError,
    DelayedMessage,
    MemoryDelayedMessageStore,
    MemoryTransport,
    Message,
    MessageFilter,
    TransactionMode,
)
from delayline.filters import literal
from delayline.places import MessagePlace, PlaceKind, PlacePage
from delayline.searching import Search, SearchPosition, queue_places, waiting_places
from delayline.spi import TransportOperation

if TYPE_CHECKING:
    from delayline.places import Key

NOW = datetime(2026, 11, 27, 5, tzinfo=UTC)
characters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
texts = st.text(characters, min_size=1, max_size=50).map(str.strip).filter(bool)
due_and_id = st.builds(lambda due, name: [due.isoformat(), name], st.datetimes(timezones=st.just(UTC)), st.text())
keys = st.none() | st.integers() | due_and_id


@given(texts, texts, keys, st.sampled_from(PlaceKind))
def test_a_position_reads_back_as_it_is_written(body: str, name: str, after: Key | None, kind: PlaceKind) -> None:
    wanted = MessageFilter(body=literal(body), message_id=literal(name))
    position = SearchPosition(wanted, (kind,), MessagePlace(kind, name), after)
    assert SearchPosition.parse(str(position)) == position


@given(st.text() | st.binary().map(lambda kept: base64.urlsafe_b64encode(kept).decode()))
def test_another_text_is_no_position(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is no position of a search"):
        SearchPosition.parse(text)


def test_a_damaged_position_is_refused() -> None:
    text = str(SearchPosition(MessageFilter(body="a"), (PlaceKind.QUEUES,), MessagePlace(PlaceKind.QUEUES, "q"), 7))
    for damaged in (text[:-4], text[1:], text[:10] + "AAAA" + text[14:]):
        with pytest.raises(ConfigurationError, match="copy it whole"):
            SearchPosition.parse(damaged)


async def test_what_only_lists_its_messages_is_searched_and_gone_on_with() -> None:
    # Given pending messages, some due at the same time, and messages in two queues
    store, transport = MemoryDelayedMessageStore(), MemoryTransport()
    await store.initialize("shop", TransactionMode.RECEIVE_ONLY)
    await transport.start()
    await transport.setup_infrastructure(["mail", "error"])
    for number in range(9):
        due = NOW + timedelta(hours=number // 3)
        await store.store(DelayedMessage(Message(f"p{8 - number}", {}, b"word"), "mail", due))
    for queue in ("mail", "error"):
        operations = [TransportOperation(Message(f"{queue}{number}", {}, b"word"), queue) for number in range(4)]
        await transport.dispatch(operations)
    places = [*waiting_places(store, "shop"), *await queue_places(transport, ["mail"], "error")]
    for wanted in (MessageFilter(body="w*d"), MessageFilter(message_id="*")):
        # When each search finds two, while what was found may go
        found: list[str] = []
        position, is_over = None, False
        while not is_over:
            search = Search(places, wanted, position=position)
            found += [match.id async for page in search.pages(2) for match in page.matches]
            position, is_over = search.position, search.position is None
        # Then each is found once
        pending = [f"p{number}" for number in range(9)]
        queued = [f"{queue}{number}" for queue in ("mail", "error") for number in range(4)]
        assert sorted(found) == sorted([*pending, *queued])
    [match] = [match async for page in Search(places, MessageFilter(message_id="p3")).pages() for match in page.matches]
    assert (match.id, match.state, match.size) == ("p3", "pending", 6)


class FailingPlace:
    """A place that fails after a page."""

    place = MessagePlace(PlaceKind.PENDING, "shop")

    def __init__(self, failures: int) -> None:
        self.failures = failures

    async def page(self, wanted: MessageFilter, after: Key | None, most: int) -> PlacePage:
        del wanted, most
        if after is None:
            return PlacePage([], 7, 1, 0.5)
        if self.failures:
            self.failures -= 1
            raise BackendUnavailable("gone")
        return PlacePage([], None, 1, 1.0)


class EmptyPlace:
    """A place behind it."""

    place = MessagePlace(PlaceKind.QUEUES, "mail")

    async def page(self, wanted: MessageFilter, after: Key | None, most: int) -> PlacePage:
        del wanted, after, most
        return PlacePage([], None, 3, 1.0)


async def test_a_place_that_goes_away_is_named_and_gone_on_with() -> None:
    # Given a place whose back end goes away after a page, and another behind it
    failing = FailingPlace(failures=1)
    search = Search([EmptyPlace(), failing], MessageFilter(), outage_limit=0)
    # When they are searched
    looked_at = [page.looked_at async for page in search.pages()]
    # Then the other is searched still, and the first one is not done
    assert looked_at == [1, 4]
    assert search.searched == [EmptyPlace.place]
    assert [(note.place, note.reason) for note in search.unsearched] == [(failing.place, "gone")]
    # And a search goes on where it was
    assert search.position is not None
    assert (search.position.place, search.position.after) == (failing.place, 7)
    again = Search([EmptyPlace(), failing], position=search.position)
    assert [page.looked_at async for page in again.pages()] == [1, 4]
    assert (again.searched, again.position) == ([failing.place, EmptyPlace.place], None)


async def test_a_short_outage_is_waited_out() -> None:
    search = Search([FailingPlace(failures=1)], MessageFilter(), outage_limit=60)
    assert [page.share async for page in search.pages()] == [0.5, 1.0]
    assert (search.unsearched, search.position) == ([], None)


async def test_conditions_that_a_place_cannot_have_leave_it_out() -> None:
    search = Search([FailingPlace(0), EmptyPlace()], MessageFilter(exception="ValueError"))
    assert [page.place async for page in search.pages()] == [EmptyPlace.place]
    assert [note.place for note in search.left_out] == [FailingPlace.place]
    search = Search([FailingPlace(0), EmptyPlace()], MessageFilter(due_from=NOW))
    assert {page.place async for page in search.pages()} == {FailingPlace.place}
