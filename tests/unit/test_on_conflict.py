"""`on_conflict` of a send: what happens to a pending message with the same id."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sqlite3
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.eventually import eventually_async

from delayline import (
    ConfigurationError,
    DelayedMessage,
    DuplicateMessage,
    Endpoint,
    InvalidDueTime,
    InvalidMessage,
    Message,
    MessageContext,
    Send,
    SyncEndpoint,
    TransactionMode,
)
from delayline.memory import MemoryTransport
from delayline.message import Headers, to_wire_time
from delayline.spi import StoreResult
from delayline.sql import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from delayline.delayed.store import SendConflict

DAY = timedelta(days=1)
POLICIES: Final[tuple[SendConflict, ...]] = ("replace", "postpone")
MOMENT = timedelta(minutes=10)


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Endpoint]:
    url = f"sqlite:///{tmp_path}/shop.db"
    endpoint = Endpoint(
        "shop", transport=SqlTransport(url), delayed_delivery=SqlDelayedMessageStore(url), setup_infrastructure=True
    )
    async with endpoint:
        yield endpoint


async def bodies(shop: Endpoint) -> list[bytes]:
    return [one.message.body for one in await shop.delayed.pending()]


async def test_a_send_returns_its_result(shop: Endpoint) -> None:
    """Given a pending message, when its id is sent again, then the result says if it was stored, kept or replaced."""
    first = await shop.send("shop", b"1", delay=DAY, message_id="a", on_conflict="raise")
    kept = await shop.send("shop", b"2", delay=DAY, message_id="a", on_conflict="keep")
    assert (first, first.result, kept.result, await bodies(shop)) == ("a", "stored", "kept", [b"1"])
    replaced = await shop.send("shop", b"3", delay=2 * DAY, message_id="a", on_conflict="replace")
    assert (replaced.result, await bodies(shop)) == ("replaced", [b"3"])
    assert (await shop.send("shop", b"4", delay=DAY)).result is None


async def test_a_pending_id_is_an_error_on_request(shop: Endpoint) -> None:
    """Given a pending message, when its id is sent again with raise, then nothing is stored."""
    await shop.send("shop", b"1", delay=DAY, message_id="a")
    with pytest.raises(DuplicateMessage, match="'a' is pending already, and nothing was stored"):
        await shop.send("shop", b"2", delay=DAY, message_id="a", on_conflict="raise")
    assert await bodies(shop) == [b"1"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"delay": DAY}, "give message_id"),
        ({"message_id": "a"}, "a delay or time"),
        (
            {"delay": DAY, "message_id": "a", "on_conflict": "ignore"},
            "'keep', 'replace', 'postpone' or 'raise', not 'ignore'",
        ),
    ],
)
async def test_sends_that_cannot_conflict_are_refused(shop: Endpoint, given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidMessage, match=text):
        await shop.send("shop", b"", **{"on_conflict": "replace", **given})


async def test_a_transaction_of_the_user_has_it(shop: Endpoint, tmp_path: Path) -> None:
    """Given a pending message, when the user's transaction is rolled back, then it is as it was; else replaced."""
    await shop.send("shop", b"1", delay=DAY, message_id="a")
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        for policy, end in itertools.product(POLICIES, (connection.rollback, connection.commit)):
            connection.execute("BEGIN")
            sent = await shop.send(
                "shop", policy.encode(), delay=DAY, message_id="a", transaction=connection, on_conflict=policy
            )
            assert sent.result == "replaced"
            before = [b"1"] if policy == "replace" else [b"replace"]
            end()
            assert await bodies(shop) == ([policy.encode()] if end == connection.commit else before)


async def test_a_postponed_message_waits_anew_but_not_for_ever(shop: Endpoint) -> None:
    """Given a pending message, when it is postponed, then from its first send it waits `at_most` in all."""

    async def pending() -> tuple[bytes, timedelta]:
        (found,) = await shop.delayed.pending()
        assert found.message.headers[Headers.DELIVER_AT] == to_wire_time(found.due)
        return found.message.body, found.due - began

    began = datetime.now(UTC)
    limits: dict[str, Any] = {"message_id": "a", "on_conflict": "postpone", "at_most": 3 * DAY}
    first = await shop.send("shop", b"1", delay=2 * DAY, **limits)
    assert first.result == "stored"
    body, waits = await pending()
    assert body == b"1"
    assert 2 * DAY <= waits < 2 * DAY + MOMENT
    second = await shop.send("shop", b"2", delay=DAY, **limits)
    assert second.result == "replaced"
    body, waits = await pending()
    assert body == b"2"
    assert DAY <= waits < DAY + MOMENT
    for body_sent in (b"3", b"4"):
        await shop.send("shop", body_sent, delay=9 * DAY, **limits)
        body, waits = await pending()
        assert body == body_sent
        assert 3 * DAY <= waits < 3 * DAY + MOMENT
    await shop.send("shop", b"5", delay=9 * DAY, message_id="a", on_conflict="postpone")
    assert (await pending())[1] > 8 * DAY
    assert (await shop.delayed.cancel("a")) == "done"
    await shop.send("shop", b"6", delay=9 * DAY, **limits)
    assert (await pending())[1] >= 3 * DAY


async def test_a_message_that_is_leaving_is_waited_for(
    shop: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a poller that has the pending message, when it is postponed, then the new one waits until it has left."""
    looked, store_or_replace = asyncio.Event(), SqlDelayedMessageStore.store_or_replace

    async def noted(store: SqlDelayedMessageStore, message: DelayedMessage, **given: Any) -> StoreResult:  # noqa: ANN401
        result = await store_or_replace(store, message, **given)
        if result is StoreResult.DISPATCHING:
            looked.set()
        return result

    monkeypatch.setattr(SqlDelayedMessageStore, "store_or_replace", noted)
    poller = SqlDelayedMessageStore(f"sqlite:///{tmp_path}/shop.db")
    await poller.initialize("shop", TransactionMode.RECEIVE_ONLY)
    await shop.send("shop", b"1", delay=DAY, message_id="a")
    (taken,) = await poller.fetch_due(datetime.now(UTC) + 2 * DAY, 1, max_bytes=1000)
    sending = asyncio.create_task(shop.send("shop", b"2", delay=DAY, message_id="a", on_conflict="postpone"))
    await asyncio.wait_for(looked.wait(), 30)
    assert not sending.done()
    assert await poller.remove_many([taken]) == 1
    assert (await asyncio.wait_for(sending, 30)).result == "stored"
    assert await bodies(shop) == [b"2"]
    await poller.close()


async def test_several_are_postponed_together(shop: Endpoint) -> None:
    """Given `send_many`, when messages have pending ids, then each does what its arguments say."""
    await shop.send("shop", b"1", delay=DAY, message_id="a")
    await shop.send("shop", b"1", delay=DAY, message_id="b")
    messages = [
        Send("shop", b"2", message_id="a", delay=DAY, on_conflict="postpone", at_most=2 * DAY),
        Send("shop", b"2", message_id="b", delay=DAY),
        Send("shop", b"2", message_id="c", delay=DAY, on_conflict="postpone"),
        Send("shop", b"3", message_id="c", delay=2 * DAY, on_conflict="postpone"),
    ]
    assert await shop.send_many(messages) == ["a", "b", "c", "c"]
    assert await bodies(shop) == [b"1", b"2", b"3"]
    with pytest.raises(DuplicateMessage):
        await shop.send_many(
            [
                Send("shop", b"9", message_id="a", delay=DAY, on_conflict="replace"),
                Send("shop", b"9", message_id="b", delay=DAY, on_conflict="raise"),
            ]
        )
    assert await bodies(shop) == [b"1", b"2", b"3"], "all or none"


async def test_handlers_postpone_with_their_other_sends(tmp_path: Path) -> None:
    """Given a handler that postpones a message and fails once, then it is postponed by the attempt that succeeds."""
    url = f"sqlite:///{tmp_path}/shop.db"
    shop = Endpoint(
        "shop", transport=SqlTransport(url), delayed_delivery=SqlDelayedMessageStore(url), setup_infrastructure=True
    )
    attempts, done = 0, asyncio.Event()

    @shop.handler
    async def touch(message: Message, context: MessageContext) -> None:
        nonlocal attempts
        attempts += 1
        await context.send(
            "shop", b"%d" % attempts, message_id="cart", delay=DAY, on_conflict="postpone", at_most=2 * DAY
        )
        if attempts == 1:
            raise ValueError
        done.set()

    async with shop:
        await shop.send("shop", b"first", delay=2 * DAY, message_id="cart")
        await shop.send("shop", b"touch")
        await asyncio.wait_for(done.wait(), 30)

        async def postponed_once() -> bool:
            return await bodies(shop) == [b"2"]

        await eventually_async(postponed_once)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"on_conflict": "replace", "at_most": DAY}, InvalidMessage, "at_most=.* is for on_conflict='postpone'"),
        ({"at_most": DAY}, InvalidMessage, "at_most=.* is for on_conflict='postpone'"),
        ({"on_conflict": "postpone", "at_most": 0 * DAY}, InvalidDueTime, "above zero"),
        ({"on_conflict": "postpone", "at_most": 3600}, InvalidDueTime, "timedelta"),
        ({"on_conflict": "postpone", "at_most": timedelta.max}, InvalidDueTime, "at_most=.* beyond year 9999"),
        ({"on_conflict": "postpone", "delay": timedelta.max}, InvalidDueTime, "delay=.* beyond year 9999"),
    ],
)
async def test_limits_that_cannot_be_kept_are_refused(
    shop: Endpoint, given: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        await shop.send("shop", b"", **{"delay": DAY, "message_id": "a", **given})


async def test_delay_levels_refuse_it() -> None:
    async with Endpoint("shop", transport=MemoryTransport(), setup_infrastructure=True) as shop:
        with pytest.raises(ConfigurationError, match="on_conflict needs a delayed message store"):
            await shop.send("shop", b"", delay=DAY, message_id="a", on_conflict="postpone")


def test_blocking_senders_report_it_too(tmp_path: Path) -> None:
    """Given SyncEndpoint, when an id is replaced, then the result says so."""
    url = f"sqlite:///{tmp_path}/shop.db"
    with SyncEndpoint(
        Endpoint("shop", transport=SqlTransport(url), delayed_delivery=SqlDelayedMessageStore(url))
    ) as shop:
        shop.send("shop", b"1", delay=DAY, message_id="a")
        assert shop.send("shop", b"2", delay=DAY, message_id="a", on_conflict="replace").result == "replaced"
