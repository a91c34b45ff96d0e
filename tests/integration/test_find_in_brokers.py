"""Searches where there are no tables of queues: RabbitMQ and Azure Storage Queues."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

import pytest
from tests.eventually import eventually_async
from tests.integration.rabbitmq_queues import a_channel

from delayline import DelayedMessage, Headers, Message, MessageFilter, TransactionMode
from delayline.azure import AzureDelayedTable, AzureStorageQueueTransport
from delayline.places import PlaceKind
from delayline.rabbitmq import RabbitMQTransport
from delayline.searching import Search, open_places
from delayline.settings import Settings
from delayline.spi import TransportOperation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aio_pika.abc import AbstractIncomingMessage

    from delayline.places import MessageMatch

SOON = datetime.now(UTC) + timedelta(hours=1)
QUEUES = (PlaceKind.QUEUES, PlaceKind.ERRORS)


async def found(
    settings: Settings, wanted: MessageFilter, kinds: tuple[PlaceKind, ...] = QUEUES, limit: int | None = None
) -> tuple[list[MessageMatch], Search]:
    async with open_places(settings, kinds) as places:
        search = Search(places, wanted, kinds=kinds)
        return [match async for page in search.pages(limit) for match in page.matches], search


async def put(transport: RabbitMQTransport | AzureStorageQueueTransport, queue: str, ids: list[str]) -> None:
    headers = {Headers.CORRELATION_ID: "c-1", Headers.FAILED_QUEUE: "billing"}
    await transport.dispatch([TransportOperation(Message(each, headers, b"the word"), queue) for each in ids])


@pytest.fixture
async def broker(rabbitmq_url: str) -> AsyncIterator[RabbitMQTransport]:
    """A started transport with the queues of endpoint `sales`."""
    transport = RabbitMQTransport(rabbitmq_url)
    await transport.setup_infrastructure(["sales", "error"])
    await transport.start()
    yield transport
    await transport.stop()


async def test_queues_of_a_broker_are_searched_and_stay_as_they_are(
    broker: RabbitMQTransport, rabbitmq_url: str
) -> None:
    # Given messages in the endpoint's queue, and failed ones
    await put(broker, "sales", ["q1", "q2", "q3"])
    await put(broker, "error", ["e1", "e2"])
    settings = Settings(url=rabbitmq_url, endpoint="sales")
    # When they are searched by what is in them
    for wanted in (MessageFilter(body="wo*d"), MessageFilter(correlation="c-1")):
        matches, search = await found(settings, wanted)
        assert sorted(match.id for match in matches) == ["e1", "e2", "q1", "q2", "q3"]
        assert search.unsearched == []
    matches, _ = await found(settings, MessageFilter(destination="billing"))
    assert [(match.id, match.state) for match in matches] == [("e1", "failed"), ("e2", "failed")]
    # And a search goes on behind its last match
    matches, search = await found(settings, MessageFilter(message_id="*"), limit=2)
    async with open_places(settings, QUEUES) as places:
        again = Search(places, position=search.position)
        matches += [match async for page in again.pages() for match in page.matches]
    assert [match.id for match in matches] == ["q1", "q2", "q3", "e1", "e2"]

    # Then all are in their queues still
    async def are_back() -> bool:
        return [await broker.count(queue) for queue in ("sales", "error")] == [3, 2]

    await eventually_async(are_back)


async def test_messages_in_delay_levels_are_unknown_not_absent(broker: RabbitMQTransport, rabbitmq_url: str) -> None:
    settings = Settings(url=rabbitmq_url, endpoint="sales")
    matches, search = await found(settings, MessageFilter(message_id="nowhere"), tuple(PlaceKind))
    assert matches == []
    [note] = search.unsearched
    assert str(note.place) == "pending messages of sales"
    assert "delay levels" in note.reason


async def test_few_messages_are_taken_from_receivers(
    broker: RabbitMQTransport, rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a queue whose receiver has two messages, with more than a search may take from it
    monkeypatch.setattr("delayline.searching.TAKEN_FROM_RECEIVERS", 3)
    ids = [f"q{number}" for number in range(9)]
    await put(broker, "sales", ids)
    received: list[AbstractIncomingMessage] = []

    async def keep(message: AbstractIncomingMessage) -> None:
        received.append(message)

    async with a_channel(rabbitmq_url) as channel:
        await channel.set_qos(prefetch_count=2)
        await (await channel.get_queue("sales")).consume(keep)
        await eventually_async(lambda: len(received) == 2)
        # When it is searched for the last one
        matches, search = await found(Settings(url=rabbitmq_url, endpoint="sales"), MessageFilter(message_id="q8"))
        # Then it is said to be searched in part
        assert matches == []
        [note] = search.unsearched
        assert "only the first 3 of about 7 messages" in note.reason
        # And the receiver gets all of them still
        await eventually_async(partial(drained, received))


async def drained(received: list[AbstractIncomingMessage]) -> bool:
    """Acknowledge what was received; return whether these are all messages."""
    for message in received:
        if not message.processed:
            await message.ack()
    return {message.message_id for message in received} == {f"q{number}" for number in range(9)}


async def test_queues_and_the_table_of_an_account_are_searched(azure_url: str) -> None:
    # Given messages that wait, in two queues, and failed ones
    transport, table = AzureStorageQueueTransport(azure_url), AzureDelayedTable(azure_url)
    await transport.setup_infrastructure(["sales", "billing", "error"])
    await transport.start()
    await table.setup_infrastructure("sales")
    await table.initialize("sales", TransactionMode.RECEIVE_ONLY)
    settings = Settings(url=azure_url, endpoint="sales")
    try:
        for number in range(5):
            due = SOON + timedelta(seconds=number // 2)
            await table.store(
                DelayedMessage(Message(f"p{number}", {Headers.CORRELATION_ID: "c-1"}, b"the word"), "billing", due)
            )
        await put(transport, "billing", ["q1", "q2"])
        await put(transport, "error", [f"e{number}" for number in range(40)])
        # Then each condition finds them
        failed = [f"e{number}" for number in range(40)]
        expected = sorted([*failed, *(f"p{number}" for number in range(5)), "q1", "q2"])
        for wanted in (MessageFilter(body="wo*d"), MessageFilter(correlation="c*"), MessageFilter(destination="bill*")):
            matches, search = await found(settings, wanted, tuple(PlaceKind))
            assert sorted(match.id for match in matches) == expected
            assert search.unsearched == []
        for message_id in ("p3", "q2", "e39"):
            [match] = (await found(settings, MessageFilter(message_id=message_id), tuple(PlaceKind)))[0]
            assert match.id == message_id
        # And a search goes on from each match
        ids: list[str] = []
        position, is_over = None, False
        async with open_places(settings, (PlaceKind.PENDING,)) as places:
            while not is_over:
                search = Search(places, MessageFilter(message_id="p*"), position=position)
                ids += [match.id async for page in search.pages(2) for match in page.matches]
                position, is_over = search.position, search.position is None
        assert sorted(ids) == [f"p{number}" for number in range(5)]
        # And of a queue with more than it shows at once the rest is unknown
        await put(transport, "billing", [f"q{number}" for number in range(3, 50)])
        _, search = await found(settings, MessageFilter(message_id="nowhere"))
        [note] = search.unsearched
        assert (str(note.place), "only the first 32 of about 49" in note.reason) == ("queue billing", True)
    finally:
        await table.close()
        await transport.stop()
