"""Searches for messages on the databases: every condition and place, positions, outages, messages that move."""

from __future__ import annotations

import contextlib
from collections import Counter
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

import pytest

from delayline import DelayedMessage, Headers, Message, MessageFilter, TransactionMode
from delayline.actions import OperatorAction, SetRequest
from delayline.places import PlaceKind
from delayline.searching import Search, SearchPosition, open_places
from delayline.settings import Settings
from delayline.spi import TransportOperation
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.sql.searched_tables import SearchedTable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delayline.places import MessageMatch

NOW = datetime.now(UTC)
SOON = NOW + timedelta(hours=1)
HOSTILE = "'; DROP TABLE x --\"%_\\*,<script>é\U0001f600"


@pytest.fixture
async def kept(url: str) -> AsyncIterator[SqlDelayedMessageStore]:
    """The open store of endpoint `shop`, with a journal."""
    store = SqlDelayedMessageStore(url, journal=True)
    await store.setup_infrastructure("shop")
    await store.initialize("shop", TransactionMode.RECEIVE_ONLY)
    yield store
    await store.close()


def delayed(
    name: str, destination: str = "billing", headers: dict[str, str] | None = None, body: bytes = b"{}"
) -> DelayedMessage:
    return DelayedMessage(Message(name, headers or {}, body), destination, SOON)


async def put(transport: SqlTransport, *messages: Message, queue: str = "billing") -> None:
    await transport.dispatch([TransportOperation(message, queue) for message in messages])


def failed(name: str, why: str = "no answer", queue: str = "shipping", body: bytes = b"{}") -> Message:
    headers = {
        Headers.FAILED_QUEUE: queue,
        Headers.EXCEPTION_TYPE: "TimeoutError",
        Headers.EXCEPTION_MESSAGE: why,
        Headers.TIME_OF_FAILURE: "2026-11-27 05:00:00:000000 Z",
    }
    return Message(name, headers, body)


async def found(
    url: str, *where: str, kinds: tuple[PlaceKind, ...] = tuple(PlaceKind), limit: int | None = None
) -> list[MessageMatch]:
    async with open_places(Settings(url=url), kinds) as places:
        search = Search(places, MessageFilter.parse(where, NOW))
        matches = [match async for page in search.pages(limit) for match in page.matches]
        assert not search.unsearched
        return matches


async def ids(url: str, *where: str) -> list[str]:
    """The ids that are found where messages are, the journal apart."""
    present = (PlaceKind.PENDING, PlaceKind.QUEUES, PlaceKind.ERRORS)
    return sorted(match.id for match in await found(url, *where, kinds=present))


async def test_each_condition_finds_its_messages_wherever_they_are(
    url: str, kept: SqlDelayedMessageStore, queues: SqlTransport
) -> None:
    # Given a message in each place, which have something in common, and one in each that has not
    common = {
        Headers.ENCLOSED_MESSAGE_TYPES: "Shop.Reminder, Shop",
        Headers.CORRELATION_ID: "c-1",
        Headers.CONVERSATION_ID: "talk 1",
        "Tenant": "acme/ü",
    }
    await kept.store(delayed("p", headers=common, body='{"text": "Müller pays"}'.encode()))
    await put(queues, Message("q", common, b'{"text": "M\\u00fcller pays"}'))
    error = failed("e", queue="billing", body="\0\xffpays Müller pays".encode())
    await put(queues, Message("e", {**error.headers, **common}, error.body), queue="error")
    await kept.store(delayed("other-p", "shipping"))
    await put(queues, Message("other-q", {}, b"\xff\x00"), queue="shipping")
    await put(queues, failed("other-e"), queue="error")
    # Then each condition finds the three, or those that it can be asked of
    for where in (
        "type=Reminder",
        "type=Shop.R*",
        "correlation=c-1",
        "correlation=c*",
        "conversation=talk 1",
        "header=Tenant",
        "header=Tenant:acme/ü",
        "header=:*/ü",
        "body=Müller",
        "body=Mü*pays",
        "body=pays,destination=*ill*",
        "destination=billing",
    ):
        assert await ids(url, where) == ["e", "p", "q"], where
    assert await ids(url, "body=pays*Müller") == ["e"]
    assert await ids(url, "id=q") == ["q"]
    assert await ids(url, "id=*-q") == ["other-q"]
    assert await ids(url, "id-prefix=other") == ["other-e", "other-p", "other-q"]
    assert await ids(url, "exception=TimeoutError") == ["e", "other-e"]
    assert await ids(url, "due=<2h", "destination=shipping") == ["other-p"]
    assert await ids(url, "correlation=C-1") == []
    assert await ids(url, "body=müller") == []


async def test_a_match_says_where_it_is_and_what_is_known(
    url: str, kept: SqlDelayedMessageStore, queues: SqlTransport
) -> None:
    # Given a message that waits, one in a queue, a failed one, and one that has gone
    await kept.store(delayed("waits"))
    await put(queues, Message("queued", {}, b"12345"))
    await put(queues, failed("failed", "x" * 9999), queue="error")
    await kept.store(delayed("gone"))
    await kept.cancel("gone")
    # Then each is found with its place
    by_id = {match.id: match for match in await found(url, kinds=(PlaceKind.QUEUES, PlaceKind.ERRORS))}
    assert (str(by_id["queued"].place), by_id["queued"].state, by_id["queued"].size) == (
        "queue billing",
        "in its queue",
        7,
    )
    error = by_id["failed"]
    assert (error.destination, error.at) == ("shipping", datetime(2026, 11, 27, 5, tzinfo=UTC))
    assert error.reason.startswith("TimeoutError: xxx")
    assert len(error.reason) == 300
    [waits, known] = await found(url, "id=waits")
    assert (waits.endpoint, waits.state, waits.due, known.state) == ("shop", "pending", SOON, "scheduled")
    [gone] = await found(url, "id=gone")
    assert (gone.place.kind, gone.state, gone.endpoint, gone.destination) == (
        PlaceKind.JOURNAL,
        "cancelled",
        "shop",
        "billing",
    )
    # And the journal has one line for each message that matches
    assert [match.state for match in await found(url, "destination=bill*", kinds=(PlaceKind.JOURNAL,))] == [
        "scheduled",
        "cancelled",
    ]


async def test_hostile_names_are_found_and_stay_names(
    url: str, kept: SqlDelayedMessageStore, queues: SqlTransport
) -> None:
    # Given names and contents that mean something to SQL, HTML and patterns
    await queues.setup_infrastructure([HOSTILE])
    await kept.store(delayed(HOSTILE, HOSTILE, {"x": HOSTILE}, HOSTILE.encode()))
    await put(queues, Message(HOSTILE, {"x": HOSTILE}, HOSTILE.encode()), queue=HOSTILE)
    await put(queues, Message("plain", {}, b"\xff\xfe%_"))
    # Then each is found by its exact text only
    plain = str(MessageFilter(message_id=HOSTILE.replace("\\", r"\\").replace("*", r"\*"))).removeprefix("id=")
    for condition in ("id", "destination", "body", "header"):
        where = f"{condition}={'x:' if condition == 'header' else ''}{plain}"
        assert await ids(url, where) == [HOSTILE, HOSTILE], where
    assert await ids(url, "body=%_", "id=plain") == ["plain"]
    assert await ids(url, r"body=%*\*") == [HOSTILE, HOSTILE]


async def test_a_search_goes_on_from_each_position(
    url: str, kept: SqlDelayedMessageStore, queues: SqlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given messages in all places, and pages of a few rows
    monkeypatch.setattr("delayline.sql.searched_tables.LARGEST_PAGE", 3)
    monkeypatch.setattr("delayline.sql.searched_tables.FIRST_PAGE", 3)
    await kept.store_many([delayed(f"p{number}", body=b"word") for number in range(10)])
    await put(queues, *(Message(f"q{number}", {}, b"word") for number in range(10)))
    await put(queues, *(failed(f"e{number}", body=b"word") for number in range(10)), queue="error")
    # When each search finds three, and the next goes on from the text of its position
    matches: list[str] = []
    position: SearchPosition | None = None
    wanted = MessageFilter(body="w*d")
    rounds = 0
    async with open_places(Settings(url=url)) as places:
        while rounds == 0 or position is not None:
            search = Search(places, wanted if position is None else None, position=position)
            some = [match.id async for page in search.pages(3) for match in page.matches]
            assert len(some) == 3 or search.position is None
            matches += some
            position = None if search.position is None else SearchPosition.parse(str(search.position))
            # And rows come and go meanwhile: one that was found, and one for the next round
            if rounds == 0:
                await kept.cancel(some[-1])
                await put(queues, Message("q-new", {}, b"word"))
            rounds += 1
    # Then each message was found once
    assert Counter(matches) == Counter([f"{kind}{number}" for kind in "pqe" for number in range(10)] + ["q-new"])


async def test_a_message_that_moves_on_is_met(
    url: str, kept: SqlDelayedMessageStore, queues: SqlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a message behind the first page of the pending ones
    monkeypatch.setattr("delayline.sql.searched_tables.FIRST_PAGE", 1)
    monkeypatch.setattr("delayline.sql.searched_tables.LARGEST_PAGE", 1)
    await kept.store_many([delayed("first"), delayed("moves", body=b"word")])
    # When it leaves for its queue after a page
    matches: list[MessageMatch] = []
    async with open_places(Settings(url=url)) as places:
        search = Search(places, MessageFilter(body="word"))
        async with contextlib.aclosing(search.pages()) as pages:
            async for page in pages:
                if "moves" in {message.id for message in await kept.pending()}:
                    await put(queues, Message("moves", {}, b"word"))
                    await kept.cancel("moves")
                matches += page.matches
    # Then it is found in the queue
    assert [(match.id, match.state) for match in matches] == [("moves", "in its queue")]


async def test_messages_that_come_meanwhile_do_not_keep_a_search_going(url: str, queues: SqlTransport) -> None:
    # Given a queue that gets a message for each page that is read
    await put(queues, Message("0", {}, b""))
    number = 0
    async with open_places(Settings(url=url)) as places:
        for place in places:
            assert isinstance(place, SearchedTable)
            place._at_once = 1
        search = Search(places, MessageFilter())
        async for _ in search.pages():
            number += 1
            assert number < 20
            await put(queues, Message(str(number), {}, b""))


async def test_other_endpoints_without_tables_are_said_to_be_unsearched(
    url: str, kept: SqlDelayedMessageStore, queues: SqlTransport
) -> None:
    # Given a message in a queue, and an endpoint that was never set up
    await put(queues, Message("q", {}, b""))
    async with open_places(Settings(url=url, endpoint="nowhere")) as places:
        search = Search(places, MessageFilter(message_id="q"))
        matches = [match.id async for page in search.pages() for match in page.matches]
    # Then the message is found, and the place is named
    assert matches == ["q"]
    [note] = search.unsearched
    assert "pending messages of nowhere" in str(note.place)
    # And the search goes on there
    assert search.position is not None
    assert search.position.place == note.place


async def test_sets_take_the_new_conditions(url: str, kept: SqlDelayedMessageStore, queues: SqlTransport) -> None:
    # Given messages that differ in body and correlation id
    await kept.store_many(
        [
            delayed("a", headers={Headers.CORRELATION_ID: "c"}, body=b"word"),
            delayed("b", headers={Headers.CORRELATION_ID: "c"}, body=b"other"),
            delayed("c", body=b"word"),
        ]
    )
    await put(queues, failed("d", body=b"word"), failed("e"), queue="error")
    wanted = MessageFilter(body="w*rd", correlation="c")
    # Then previews count those that match
    pending, errors = kept.message_set("shop"), queues.message_set("error")
    assert pending is not None
    assert (await pending.preview(SetRequest(OperatorAction.CANCEL, wanted))).examples == ["a"]
    preview = partial(errors.preview, SetRequest(OperatorAction.PURGE, MessageFilter(body="ord"), queue="error"))
    assert (await preview()).examples == ["d"]
