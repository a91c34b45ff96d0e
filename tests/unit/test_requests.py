"""Requests and their replies, in memory: what the sender is told, and what becomes of late and second replies."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.eventually import eventually_async

from delayline import (
    ConfigurationError,
    Endpoint,
    Headers,
    InvalidMessage,
    MemoryTransport,
    Message,
    MessageContext,
    NoReply,
    NotStarted,
    QueueNotFound,
    SyncEndpoint,
)
from delayline.errors import InvalidPayload
from delayline.events import Event

if TYPE_CHECKING:
    from collections.abc import Callable

LONG = timedelta(seconds=100)
MOMENT = timedelta(milliseconds=50)


@dataclass
class Quote:
    article: str


@dataclass
class Price:
    cents: int


class Shop:
    """An endpoint that asks, and one that answers, in one memory."""

    def __init__(self, answer: Callable[[Quote, MessageContext], Any]) -> None:
        self.transport = MemoryTransport()
        self.shop = Endpoint("shop", transport=self.transport, send_only=True)
        self.pricing = Endpoint("pricing", transport=self.transport)
        self.pricing.handles(Quote)(answer)

    async def __aenter__(self) -> Endpoint:
        await self.pricing.start()
        await self.shop.start()
        return self.shop

    async def __aexit__(self, *_: object) -> None:
        await self.shop.stop()
        await self.pricing.stop()

    def queues(self) -> list[str]:
        return sorted(self.transport._queues)


async def answer(quote: Quote, context: MessageContext) -> None:
    context.reply(Price(len(quote.article)))


async def test_the_reply_is_returned_and_the_queue_is_gone_after_the_stop() -> None:
    scenario = Shop(answer)
    async with scenario as shop:
        # When it asks, several times at once
        asked = [shop.request("pricing", Quote("x" * n), timeout=LONG, reply_type=Price) for n in range(10)]
        prices = await asyncio.gather(*asked)
        reply = await shop.request("pricing", Quote("abc"), timeout=LONG, message_id="q1")
        # Then each has its own reply, through one queue
        assert prices == [Price(n) for n in range(10)]
        assert isinstance(reply, Message)
        assert reply.json() == {"cents": 3}
        assert reply.headers[Headers.CORRELATION_ID] == "q1"
        [queue] = [name for name in scenario.queues() if "replies" in name]
        assert queue.startswith("shop.replies-")
    assert [name for name in scenario.queues() if "replies" in name] == []


async def test_a_request_without_an_answer_ends_in_time_and_a_late_reply_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    go_on = asyncio.Event()

    async def late(quote: Quote, context: MessageContext) -> None:
        await go_on.wait()
        context.reply(Price(1))

    async with Shop(late) as shop:
        with pytest.raises(NoReply, match=r"no reply to message 'q1' has come from pricing within 0.05 s"):
            await shop.request("pricing", Quote("abc"), timeout=MOMENT, message_id="q1")
        go_on.set()
        await eventually_async(lambda: dropped(caplog) == 1)


async def test_the_first_of_two_replies_counts(caplog: pytest.LogCaptureFixture) -> None:
    async def twice(quote: Quote, context: MessageContext) -> None:
        context.reply(Price(1))
        context.reply(Price(2))

    async with Shop(twice) as shop:
        assert await shop.request("pricing", Quote("abc"), timeout=LONG, reply_type=Price) == Price(1)
        await eventually_async(lambda: dropped(caplog) == 1)


async def test_a_reply_of_another_type_is_refused() -> None:
    async def wrong(quote: Quote, context: MessageContext) -> None:
        context.reply("no price")

    async with Shop(wrong) as shop:
        with pytest.raises(InvalidPayload, match="from pricing cannot be read as"):
            await shop.request("pricing", Quote("abc"), timeout=LONG, reply_type=Price)


async def test_a_stop_ends_requests() -> None:
    asked = asyncio.Event()

    async def hang(quote: Quote, context: MessageContext) -> None:
        asked.set()

    scenario = Shop(hang)
    async with scenario as shop:
        request = asyncio.create_task(shop.request("pricing", Quote("abc"), timeout=LONG))
        await asked.wait()
    with pytest.raises(NotStarted, match="stopped before the reply came"):
        await request


async def test_requests_that_cannot_be_sent() -> None:
    asked = asyncio.Event()

    async def hang(quote: Quote, context: MessageContext) -> None:
        asked.set()

    async with Shop(hang) as shop:
        with pytest.raises(QueueNotFound):
            await shop.request("prizing", Quote("abc"), timeout=LONG)
        for timeout in (timedelta(0), 5):
            with pytest.raises(ConfigurationError, match="timeout"):
                await shop.request("pricing", Quote("abc"), timeout=timeout)  # type: ignore[arg-type]
        first = asyncio.create_task(shop.request("pricing", Quote("abc"), timeout=LONG, message_id="q1"))
        await asked.wait()
        with pytest.raises(InvalidMessage, match="'q1' waits for its reply already"):
            await shop.request("pricing", Quote("abc"), timeout=LONG, message_id="q1")
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first


def test_a_synchronous_endpoint_asks() -> None:
    transport = MemoryTransport()
    pricing = Endpoint("pricing", transport=transport)
    pricing.handles(Quote)(answer)
    with SyncEndpoint(pricing) as sync:
        price = sync.request("pricing", Quote("abcd"), timeout=LONG, reply_type=Price)
        reply = sync.request("pricing", Quote("ab"), timeout=LONG)
    assert (price, reply.json()) == (Price(4), {"cents": 2})


def dropped(caplog: pytest.LogCaptureFixture) -> int:
    return [getattr(record, "event", None) for record in caplog.records].count(Event.REPLY_DROPPED)
