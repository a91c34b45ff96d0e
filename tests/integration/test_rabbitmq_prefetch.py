"""Messages that a receiver holds for handlers that are not free yet: few, and not for long."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import aio_pika
import pytest
from tests.conftest import running
from tests.eventually import eventually_async
from tests.integration.rabbitmq_queues import a_channel
from tests.servers.rabbitmq import RabbitmqServer

from delayline import Endpoint
from delayline.events import Event
from delayline.rabbitmq import RabbitMQTransport
from delayline.rabbitmq.encoding import CRASHES_HEADER
from delayline.testing.conformance.messages import operation
from delayline.testing.conformance.transport_fixtures import received

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delayline import Message, MessageContext


@pytest.fixture(params=["", "?queue_type=classic"], ids=["quorum", "classic"])
def url(request: pytest.FixtureRequest, rabbitmq_url: str) -> str:
    return f"{rabbitmq_url}{request.param}"


async def test_messages_behind_handlers_that_hang_go_back_to_the_queue(url: str) -> None:
    """Given quick handlers, when one hangs, then the messages behind it are in the queue, for others, and come once."""
    transport, hangs, handled = RabbitMQTransport(url), asyncio.Event(), Counter[str]()
    endpoint = Endpoint("sales", transport=transport, concurrency=1)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        if message.id == "hangs":
            await hangs.wait()
        handled[message.id] += 1

    async with endpoint:
        for number in range(100):
            await endpoint.send("sales", b"", message_id=f"quick{number}")
        await eventually_async(lambda: len(handled) == 100)
        for name in ("hangs", "m1", "m2", "m3", "m4"):
            await endpoint.send("sales", b"", message_id=name)

        async def the_others_are_in_the_queue() -> bool:
            return await transport.count("sales") == 4

        await eventually_async(the_others_are_in_the_queue)
        # And when the handler ends, each is handled
        hangs.set()
        await eventually_async(lambda: len(handled) == 105)
        # And quick handlers have messages ahead again
        for number in range(100):
            await endpoint.send("sales", b"", message_id=f"again{number}")
        await eventually_async(lambda: len(handled) == 205)
    assert set(handled.values()) == {1}


async def test_a_slow_handler_holds_no_further_message(url: str) -> None:
    """Given a handler that takes seconds, when it has handled one message, then it holds one at a time."""
    transport, began, go_on = RabbitMQTransport(url), asyncio.Queue[str](), asyncio.Semaphore(0)
    endpoint = Endpoint("sales", transport=transport, concurrency=1)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        began.put_nowait(message.id)
        await go_on.acquire()

    async with endpoint:
        for number in range(4):
            await endpoint.send("sales", b"", message_id=f"m{number}")
        for left in (3, 2, 1):
            await asyncio.wait_for(began.get(), 60)

            async def others_are_in_the_queue(number: int = left) -> bool:
                return await transport.count("sales") == number

            await eventually_async(others_are_in_the_queue)
            go_on.release()
        go_on.release()
        await asyncio.wait_for(began.get(), 60)


class ImpatientServer(RabbitmqServer):
    """A broker that takes a message back which is not acknowledged within six seconds."""

    advanced: ClassVar[str] = (
        "[{rabbit, [{dead_letter_worker_publisher_confirm_timeout, 1000}, {quorum_tick_interval, 1000},"
        " {consumer_timeout, 6000}, {channel_tick_interval, 1000}]}].\n"
    )


@pytest.fixture(scope="module")
def impatient() -> Iterator[RabbitmqServer]:
    with running(ImpatientServer) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 3])
async def test_messages_that_only_wait_do_not_reach_the_consumer_timeout(
    impatient: RabbitmqServer, concurrency: int
) -> None:
    """Given a consumer timeout of twice a handler's time, when handlers slow down, then no message comes twice."""
    handled, seconds = Counter[str](), {"quick": 0.0, "slow": 3.0}
    transport = RabbitMQTransport(impatient.new_vhost())
    endpoint = Endpoint("sales", transport=transport, concurrency=concurrency)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled[message.id] += 1
        await asyncio.sleep(seconds[message.text])

    async with endpoint:
        for number in range(50):
            await endpoint.send("sales", "quick", message_id=f"quick{number}")
        await eventually_async(lambda: len(handled) == 50)
        for number in range(5 * concurrency):
            await endpoint.send("sales", "slow", message_id=f"slow{number}")
        await eventually_async(lambda: len(handled) == 50 + 5 * concurrency, patience=120)
    assert set(handled.values()) == {1}


async def test_a_message_on_its_way_back_is_there_once_after_a_stop(
    rabbitmq: RabbitmqServer, rabbitmq_url: str
) -> None:
    # Given a message that counts its crashes, which returns to its queue as a copy
    # ... by a connection that waits for the copy's confirm longer than the alarm lasts on a busy machine
    transport = RabbitMQTransport(f"{rabbitmq_url}?server_timeout=240")
    await transport.start()
    await transport.setup_infrastructure(["sales"])
    await transport.dispatch([operation("sales", "m1")])
    channel = await transport.connection.channel()
    assert await channel.get("sales") is not None
    await transport.connection.release(channel)
    receiver = await transport.receiver("sales")
    [message] = await received(receiver, 1)
    await receiver.count_surely(message, 2)
    [message] = await received(receiver, 1)
    assert message.earlier_deliveries == 2
    # When the receiver stops while the broker takes no copy yet
    await asyncio.to_thread(rabbitmq.raise_memory_alarm)
    try:
        release = asyncio.create_task(receiver.release(message))
        await asyncio.sleep(0)
        await receiver.stop()
        assert not release.done()
    finally:
        await asyncio.to_thread(rabbitmq.clear_memory_alarm)
    await release
    # Then it is in the queue once
    await eventually_async(partial(is_counted, transport, 1))
    receiver = await transport.receiver("sales")
    [message] = await received(receiver, 1)
    assert await receiver.acknowledge(message)
    await receiver.stop()
    assert await transport.count("sales") == 0
    await transport.stop()


@pytest.mark.parametrize("broker", ["rabbitmq_url", "rabbitmq4_url"])
async def test_no_message_is_on_its_way_beside_one_that_counts_its_crashes(
    request: pytest.FixtureRequest, broker: str
) -> None:
    # Given messages that count their crashes: a queue counts one, too, where the end of a consumer meets a delivery
    url = request.getfixturevalue(broker)
    transport = RabbitMQTransport(url)
    await transport.start()
    await transport.setup_infrastructure(["sales"])
    async with a_channel(url) as channel:
        for name in ("m0", "m1", "m2", "m3"):
            copy = aio_pika.Message(b"", message_id=name, headers={CRASHES_HEADER: 2})
            await channel.default_exchange.publish(copy, "sales")
    # When they are received and handled one after the other
    receiver = await transport.receiver("sales")
    receiving = asyncio.create_task(receiver.receive(10))
    for left in (3, 2, 1, 0):
        [message] = await receiving
        assert message.earlier_deliveries == 2
        receiving = asyncio.create_task(receiver.receive(10))
        # Then the others stay in the queue meanwhile
        await asyncio.wait([receiving], timeout=0.2)
        assert not receiving.done()
        assert await transport.count("sales") == left
        await receiver.hold_only(message)
        assert await receiver.acknowledge(message)
    await receiver.stop()
    assert await receiving == []
    await transport.stop()


@pytest.mark.parametrize("broker", ["rabbitmq_url", "rabbitmq4_url"])
async def test_many_messages_that_count_their_crashes_are_handled_one_after_the_other(
    request: pytest.FixtureRequest, broker: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Given many messages that may have crashed their process, and some that come between
    url = request.getfixturevalue(broker)
    endpoint, handled = Endpoint("sales", transport=RabbitMQTransport(url), concurrency=4), Counter[str]()
    await endpoint.setup()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled[message.id] += 1

    async with a_channel(url) as channel:
        for number in range(60):
            crashes = 0 if number % 10 == 9 else 2
            copy = aio_pika.Message(b"", message_id=f"m{number}", headers={CRASHES_HEADER: crashes})
            await channel.default_exchange.publish(copy, "sales")
    # When an endpoint handles them
    async with endpoint:
        await eventually_async(lambda: len(handled) == 60)
    # Then each is handled once, and none of them seems to have crashed too often
    assert set(handled.values()) == {1}
    assert [getattr(record, "event", None) for record in caplog.records].count(Event.HANDLED_ALONE) == 54


async def test_a_stop_returns_many_messages_without_a_failure(rabbitmq_url: str) -> None:
    # Given a receiver that was sent more messages ahead than a quorum queue takes back at a time
    transport = RabbitMQTransport(rabbitmq_url)
    await transport.start()
    await transport.setup_infrastructure(["sales"])
    receiver = await transport.receiver("sales")
    await transport.dispatch([operation("sales", f"m{number}") for number in range(100)])
    for message in await received(receiver, 100):
        assert await receiver.acknowledge(message)
    await receiver.flushed()
    await transport.dispatch([operation("sales", f"m{number}") for number in range(300)])
    [message, *others] = await received(receiver, 1)

    async def many_are_ahead() -> bool:
        return await transport.count("sales") < 300 - len(others) - 60

    await eventually_async(many_are_ahead)
    # When it stops, one message later than the others
    for other in others:
        await receiver.release(other)
    assert await receiver.acknowledge(message)
    await receiver.stop()
    # Then the queue has the others again, and counts no failure where it counts no returns
    await eventually_async(partial(is_counted, transport, 299))
    channel = await transport.connection.channel()
    failures = [(await channel.get("sales")).failures for _ in range(299)]  # type: ignore[union-attr]
    assert set(failures) == {0}
    await transport.connection.release(channel)
    await transport.stop()


async def is_counted(transport: RabbitMQTransport, number: int) -> bool:
    return await transport.count("sales") == number
