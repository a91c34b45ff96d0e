"""`send_many`, `expires`, `correlation_id` and `forward`, in memory and on databases."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.eventually import eventually_async

from delayline import (
    BackendUnavailable,
    Endpoint,
    Headers,
    InvalidDueTime,
    InvalidMessage,
    MemoryDelayedMessageStore,
    MemoryTransport,
    Message,
    MessageContext,
    QueueNotFound,
    Send,
    SqlDelayedMessageStore,
    SqlTransport,
    SyncEndpoint,
)
from delayline.message import from_time_span, to_time_span
from delayline.testing import Fault, FaultyTransport

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

DAY = timedelta(days=1)


@dataclass
class Bill:
    number: int


@pytest.fixture(params=["memory", "sqlite", "postgresql_url", "mariadb_url"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Endpoint:
    """An endpoint that has not been started, with transport and store in one place."""
    if request.param == "memory":
        return Endpoint("sales", transport=MemoryTransport(), delayed_delivery=MemoryDelayedMessageStore())
    url = f"sqlite:///{tmp_path}/m.db" if request.param == "sqlite" else request.getfixturevalue(request.param)
    return Endpoint("sales", transport=SqlTransport(url), delayed_delivery=SqlDelayedMessageStore(url))


async def test_many_messages_are_sent_together(endpoint: Endpoint) -> None:
    async with endpoint:
        await endpoint.transport.setup_infrastructure(["billing", "crm"])
        # When messages are sent now and later, to several queues
        sends = [
            Send("billing", Bill(1), message_id="one", correlation_id="exchange"),
            Send("crm", "text", headers={"Größe": "🚀"}),
            Send("billing", Bill(2), delay=DAY, message_id="two"),
        ]
        ids = await endpoint.send_many(iter(sends))
        # Then their ids are returned in order, and each is where it belongs
        assert (ids[0], ids[2], len(ids)) == ("one", "two", 3)
        [billed] = await endpoint.transport.browse("billing", 10)  # type: ignore[attr-defined]
        [noted] = await endpoint.transport.browse("crm", 10)  # type: ignore[attr-defined]
        assert (billed.json(), billed.headers[Headers.CORRELATION_ID]) == ({"number": 1}, "exchange")
        assert (noted.text, noted.headers["Größe"], noted.id) == ("text", "🚀", ids[1])
        assert [message.id for message in await endpoint.delayed.pending()] == ["two"]
        assert await endpoint.send_many([]) == []


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (Send("nowhere", b""), QueueNotFound),
        (Send("nowhere", b"", delay=DAY), QueueNotFound),
        (Send("billing", object()), InvalidMessage),
        (Send("billing", b"", delay=-DAY), InvalidDueTime),
        (Send("", b""), InvalidMessage),
        ("billing", InvalidMessage),
    ],
)
async def test_all_messages_are_sent_or_none(endpoint: Endpoint, bad: Send, error: type[Exception]) -> None:
    async with endpoint:
        await endpoint.transport.setup_infrastructure(["billing"])
        # When one of them cannot be sent
        with pytest.raises(error):
            await endpoint.send_many([Send("billing", b"now"), Send("billing", b"later", delay=DAY), bad])
        # Then nothing was sent
        assert await endpoint.transport.count("billing") == 0  # type: ignore[attr-defined]
        assert await endpoint.delayed.pending() == []


async def test_ten_thousand_messages(endpoint: Endpoint) -> None:
    async with endpoint:
        await endpoint.transport.setup_infrastructure(["billing"])
        sends = [Send("billing", b"x", delay=DAY if number % 2 else None) for number in range(10_000)]
        ids = await endpoint.send_many(sends)
        assert len(set(ids)) == 10_000
        assert await endpoint.transport.count("billing") == 5_000  # type: ignore[attr-defined]
        assert sum(one.count for one in await endpoint.delayed.count_by_due(DAY)) == 5_000


async def test_many_messages_in_a_transaction_of_the_callers(tmp_path: Path) -> None:
    import sqlalchemy

    url = f"sqlite:///{tmp_path}/m.db"
    endpoint = Endpoint("sales", transport=SqlTransport(url), delayed_delivery=SqlDelayedMessageStore(url))
    engine = sqlalchemy.create_engine(url)
    async with endpoint:
        await endpoint.transport.setup_infrastructure(["billing"])
        for ends in ("rollback", "commit"):
            with engine.connect() as connection:
                transaction = connection.begin()
                await endpoint.send_many(
                    [Send("billing", b"now"), Send("billing", b"later", delay=DAY)], transaction=connection
                )
                getattr(transaction, ends)()
            number = int(ends == "commit")
            assert await endpoint.transport.count("billing") == number  # type: ignore[attr-defined]
            assert len(await endpoint.delayed.pending()) == number


async def test_a_handler_sends_many_and_forwards(endpoint: Endpoint) -> None:
    # Given a handler that sends messages and forwards the received one
    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        context.send_many([Send("billing", Bill(number)) for number in range(3)])
        context.forward("crm")
        context.forward("archive", delay=DAY)

    async with endpoint:
        await endpoint.transport.setup_infrastructure(["billing", "crm", "archive"])
        # When a message comes
        await endpoint.send("sales", {"a": 1}, message_id="original", headers={"x": "y"}, correlation_id="exchange")
        await eventually_async(lambda: _count(endpoint, "crm", 1))
        # Then the forwarded ones are the same message
        [forwarded] = await endpoint.transport.browse("crm", 10)  # type: ignore[attr-defined]
        assert (forwarded.id, forwarded.headers["x"], forwarded.json()) == ("original", "y", {"a": 1})
        [later] = await endpoint.delayed.pending()
        assert (later.id, later.destination) == ("original", "archive")
        billed = await endpoint.transport.browse("billing", 10)  # type: ignore[attr-defined]
        assert [message.json()["number"] for message in billed] == [0, 1, 2]
        assert {message.headers[Headers.RELATED_TO] for message in billed} == {"original"}


async def test_a_message_that_expires_is_not_handled(endpoint: Endpoint) -> None:
    handled: list[str] = []
    async with endpoint:
        await endpoint.transport.setup_infrastructure(["billing"])
        await endpoint.send("billing", b"", expires=timedelta(milliseconds=1), message_id="expired")
        await endpoint.send("billing", b"", expires=DAY, message_id="good")
        [_, good] = await endpoint.transport.browse("billing", 10)  # type: ignore[attr-defined]
        assert good.headers[Headers.TIME_TO_BE_RECEIVED] == "1.00:00:00"
        await asyncio.sleep(0.005)  # the expiry is by the server's clock
    billing = Endpoint("billing", transport=endpoint.transport)

    @billing.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled.append(message.id)

    async with billing:
        await eventually_async(lambda: handled)
    assert handled == ["good"]


async def test_an_outage_leaves_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/m.db"
    transport = FaultyTransport(SqlTransport(url))
    endpoint = Endpoint("sales", transport=transport, delayed_delivery=SqlDelayedMessageStore(url))
    async with endpoint:
        await transport.setup_infrastructure(["billing"])
        transport.inject(Fault("commit", BackendUnavailable("down"), calls=1))
        with pytest.raises(BackendUnavailable):
            await endpoint.send_many([Send("billing", b""), Send("billing", b"", delay=DAY)])
        assert (await transport.count("billing"), await endpoint.delayed.pending()) == (0, [])


def test_a_synchronous_endpoint_sends_many(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/m.db"
    with SyncEndpoint(
        Endpoint("sales", transport=SqlTransport(url), delayed_delivery=SqlDelayedMessageStore(url))
    ) as sync:
        ids = sync.send_many([Send("sales", b"", expires=DAY), Send("sales", b"", delay=DAY)])
        assert len(ids) == 2
        assert len(sync.run(sync.endpoint.delayed.pending())) == 1


@pytest.mark.parametrize("expires", [timedelta(0), -DAY, 5, "1m"])
async def test_an_expiry_that_cannot_be_is_refused(expires: timedelta) -> None:
    async with Endpoint("sales", transport=MemoryTransport()) as endpoint:
        with pytest.raises(InvalidMessage, match="expires must be a timedelta above zero"):
            await endpoint.send("sales", b"", expires=expires)
        with pytest.raises(InvalidMessage, match="correlation_id"):
            await endpoint.send("sales", b"", correlation_id="")


@pytest.mark.parametrize(
    "span",
    [
        timedelta(0),
        timedelta(days=10_675_198),
        timedelta(microseconds=1),
        timedelta(days=3, hours=23, minutes=59, seconds=59),
    ],
)
def test_time_spans_are_written_as_dotnet_reads_them(span: timedelta) -> None:
    assert from_time_span(to_time_span(span)) == span


def _count(endpoint: Endpoint, queue: str, number: int) -> Awaitable[bool]:
    async def counted() -> bool:
        count: Callable[[str], Awaitable[int]] = endpoint.transport.count  # type: ignore[attr-defined]
        return await count(queue) == number

    return counted()
