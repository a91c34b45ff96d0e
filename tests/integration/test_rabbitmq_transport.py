"""RabbitMQ's faults: lost connections, deleted queues, unreadable messages, existing objects that differ."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING

import aio_pika
import pytest
from click.testing import CliRunner
from pamqp import commands
from tests.eventually import PATIENCE

from delayline import (
    BackendUnavailable,
    ConfigurationError,
    Endpoint,
    Event,
    InvalidMessage,
    Message,
    MessageContext,
    QueueNotFound,
    Recoverability,
    TransactionMode,
)
from delayline.cli import main
from delayline.errors import BackendUnusable, DispatchFailed, UnsupportedTransactionMode
from delayline.rabbitmq import RabbitMQTransport
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.connection import BrokerConnection
from delayline.rabbitmq.delivery_limits import NACK_IS_NOT_COUNTED
from delayline.rabbitmq.encoding import Publication
from delayline.rabbitmq.receiver import RabbitMQReceiver
from delayline.testing import Signals
from delayline.testing.conformance.messages import operation
from delayline.testing.conformance.native_delivery import Arrivals
from delayline.testing.conformance.transport_fixtures import ids, received

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.servers.rabbitmq import RabbitmqServer

    from delayline.transport import ReceivedMessage, Receiver

NOBODY_LISTENS = "amqp://127.0.0.1:1"


@pytest.fixture
async def transport(rabbitmq_url: str) -> AsyncIterator[RabbitMQTransport]:
    transport = RabbitMQTransport(rabbitmq_url)
    await transport.start()
    await transport.setup_infrastructure(["billing", "error"])
    yield transport
    await transport.stop()


def vhost_of(url: str) -> str:
    return url.rsplit("/", 1)[1]


async def received_at_last(receiver: Receiver, number: int = 1) -> list[ReceivedMessage]:
    """Receive as the pipeline does: a failure is followed by another try."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await received(receiver, number)
            except BackendUnavailable:
                await asyncio.sleep(0.2)


async def counted(transport: RabbitMQTransport, queue: str, number: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while await transport.count(queue) != number:  # noqa: ASYNC110 - there is no notification
            await asyncio.sleep(0.05)


async def publish_raw(transport: RabbitMQTransport, properties: commands.Basic.Properties) -> None:
    message = Message("", {}, b"\x00native")
    assert not await transport.publisher.publish(
        [Publication(message, *transport.topology.address_of("billing"), properties=properties.marshal())]
    )


async def test_a_cut_connection_is_reported_once_and_then_replaced(
    rabbitmq: RabbitmqServer, rabbitmq_url: str, transport: RabbitMQTransport
) -> None:
    """Given a message in hand, when the connection is cut, then it comes again, under a new receipt."""
    await transport.dispatch([operation("billing")])
    receiver = await transport.receiver("billing")
    [held] = await received(receiver)
    waiting = asyncio.create_task(receiver.receive(1))
    await asyncio.sleep(0.1)
    await asyncio.to_thread(rabbitmq.cut_connections, rabbitmq_url)
    with pytest.raises(BackendUnavailable):
        await asyncio.wait_for(waiting, PATIENCE)
    assert await receiver.acknowledge(held) is False
    await receiver.release(held)
    [again] = await received_at_last(receiver)
    assert again.message == held.message
    assert await receiver.acknowledge(again) is True
    await receiver.stop()
    await counted(transport, "billing", 0)


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_a_received_message_knows_its_earlier_deliveries(rabbitmq_url: str, queue_type: str) -> None:
    # Given a message whose sender claims that it was delivered before
    transport = RabbitMQTransport(rabbitmq_url, queue_type=queue_type)
    await transport.start()
    counted_to = [0, 1, 1, 1]
    if queue_type == "quorum":
        counted_to = [0, 1, 2, 3] if await transport.connection.version() < NACK_IS_NOT_COUNTED else [0, 0, 0, 0]
    await transport.setup_infrastructure(["billing"])
    forged = commands.Basic.Properties(
        message_id="m1", headers={"x-delivery-count": 77, "x-acquired-count": 99, "kept": "yes"}
    )
    await publish_raw(transport, forged)
    receiver = await transport.receiver("billing")
    # When it is given back by releases and by stops
    seen = []
    for end in ("release", "release", "stop", "stop"):
        [message] = await received(receiver)
        seen.append(message.earlier_deliveries)
        if end == "stop":
            await receiver.stop()
        await receiver.release(message)
        if end == "stop":
            receiver = await transport.receiver("billing")
    # Then it knows how often, as far as its queue counts
    assert seen == counted_to
    assert message.message.headers == {"kept": "yes"}
    await receiver.stop()
    await transport.stop()


async def test_the_last_acknowledgement_after_a_stop_is_flushed(transport: RabbitMQTransport) -> None:
    # Given messages that are handled when their receiver stops, in a mode that acknowledges them before
    await transport.setup_infrastructure(["sales"])
    await transport.dispatch([operation("sales", f"m{number}") for number in range(3)])
    receiver = await transport.receiver("sales")
    found = await received(receiver, 3)
    await receiver.stop()
    # When they are acknowledged, the last of which closes the channel
    for one in found:
        assert await receiver.acknowledge(one)
    # Then each acknowledgement is confirmed, so that its handler can start
    await asyncio.gather(*(receiver.flush(one) for one in found))
    # But not one of a channel that the broker has ended
    other = await transport.receiver("sales")
    await transport.dispatch([operation("sales", "lost")])
    [lost] = await received(other, 1)
    other._forget()
    with pytest.raises(BackendUnavailable, match="ended before an acknowledgement was processed"):
        await other.flush(lost)
    await other.stop()


async def test_a_channel_is_closed_after_its_consumers_have_ended(
    transport: RabbitMQTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a stopping receiver with one message received, others prefetched, and no answer yet to its consumer's end
    await transport.setup_infrastructure(["sales"])
    await transport.dispatch([operation("sales", f"m{number}") for number in range(3)])
    receiver = await transport.receiver("sales")
    assert isinstance(receiver, RabbitMQReceiver)
    [found] = await received(receiver, 1)
    channel, answered, cancelling, steps = receiver._channel, asyncio.Event(), asyncio.Event(), []
    assert channel is not None
    cancel, close = channel.cancel, channel.close

    async def cancel_late(consumer: str) -> None:
        cancelling.set()
        await answered.wait()
        await cancel(consumer)
        steps.append("cancelled")

    async def close_noted() -> None:
        steps.append("closed")
        await close()

    monkeypatch.setattr(channel, "cancel", cancel_late)
    monkeypatch.setattr(channel, "close", close_noted)
    stopping = asyncio.create_task(receiver.stop())
    await asyncio.wait_for(cancelling.wait(), PATIENCE)
    # When the received message is acknowledged meanwhile
    assert await receiver.acknowledge(found)
    answered.set()
    await stopping
    # Then the channel is closed after that, and the prefetched messages are in the queue again
    assert steps == ["cancelled", "closed"]
    await counted(transport, "sales", 2)


@pytest.mark.slow
async def test_an_endpoint_lives_through_cut_connections(rabbitmq: RabbitmqServer, rabbitmq_url: str) -> None:
    """Given messages being handled, when connections are cut again and again, then none is lost."""
    endpoint = Endpoint("sales", transport=RabbitMQTransport(rabbitmq_url), concurrency=4)
    arrivals = Arrivals(endpoint)
    sent: set[str] = set()

    async def send_all() -> None:
        for number in range(60):
            while True:
                try:
                    await endpoint.send("sales", b"", message_id=f"m{number}")
                    break
                except BackendUnavailable:
                    await asyncio.sleep(0.1)
            sent.add(f"m{number}")
            await asyncio.sleep(0.05)

    async with endpoint:
        sending = asyncio.create_task(send_all())
        for _ in range(2):
            await asyncio.sleep(0.5)
            await asyncio.to_thread(rabbitmq.cut_connections, rabbitmq_url)
        await sending
        async with asyncio.timeout(PATIENCE):
            while sent - {message.id for message in arrivals.messages}:  # noqa: ASYNC110 - there is no notification
                await asyncio.sleep(0.05)
    assert len(sent) == 60


async def test_a_queue_deleted_under_its_receiver_is_made_again(
    rabbitmq: RabbitmqServer, rabbitmq_url: str, transport: RabbitMQTransport
) -> None:
    """Given a queue of this process, when it is deleted, then it is created again, and receives."""
    receiver = await transport.receiver("billing")
    receiving = asyncio.create_task(received_at_last(receiver))
    await asyncio.sleep(0.1)
    rabbitmq.api("DELETE", f"queues/{vhost_of(rabbitmq_url)}/billing")
    async with asyncio.timeout(PATIENCE):
        while not receiving.done():
            try:
                await transport.dispatch([operation("billing")])
            except DispatchFailed:
                await asyncio.sleep(0.05)
            else:
                break
    assert ids(await receiving) == ["m"]


async def test_a_deleted_queue_of_another_process_is_missing(
    rabbitmq: RabbitmqServer, rabbitmq_url: str, transport: RabbitMQTransport
) -> None:
    """Given a queue that another process set up, when it is deleted, then this one says so, and makes none."""
    theirs = RabbitMQTransport(rabbitmq_url)
    await theirs.start()
    receiver = await theirs.receiver("billing")
    receiving = asyncio.create_task(receiver.receive(1))
    await asyncio.sleep(0.1)
    rabbitmq.api("DELETE", f"queues/{vhost_of(rabbitmq_url)}/billing")
    with pytest.raises(QueueNotFound, match="billing"):
        await asyncio.wait_for(receiving, PATIENCE)
    await theirs.stop()
    with pytest.raises(QueueNotFound):
        await transport.count("billing")


async def test_a_message_without_an_id_goes_to_the_error_queue_as_it_is(
    rabbitmq_url: str, transport: RabbitMQTransport
) -> None:
    """Given a message that nothing can name, when it is received, then it is moved whole, and the next one arrives."""
    native = commands.Basic.Properties(headers={"n": 5, "kind": "test"}, message_type="Native", content_type="text/x")
    await publish_raw(transport, native)
    await transport.dispatch([operation("billing", "readable")])
    receiver = await transport.receiver("billing")
    with Signals() as signals:
        [found] = await received(receiver)
    assert found.message.id == "readable"
    assert signals.count(Event.POISON_MESSAGE) == 1
    await receiver.acknowledge(found)
    connection = await aio_pika.connect(rabbitmq_url)
    channel = await connection.channel()
    moved = await (await channel.get_queue("error")).get(timeout=5)
    headers = {name: value for name, value in moved.headers.items() if name != "x-delivery-count"}
    assert (moved.body, headers, moved.type) == (b"\x00native", {"n": 5, "kind": "test"}, "Native")
    assert (moved.content_type, moved.message_id) == ("text/x", None)
    await moved.ack()
    await connection.close()
    await receiver.stop()
    await counted(transport, "billing", 0)


async def test_a_failed_message_that_was_not_durable_survives_in_the_error_queue(
    rabbitmq_url: str, transport: RabbitMQTransport
) -> None:
    """Given messages that are not durable, one of them unreadable, when they have failed, then both are durable."""
    endpoint = Endpoint("billing", transport=transport, recoverability=Recoverability(immediate_retries=0))

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        raise ValueError(message.id)

    await publish_raw(transport, commands.Basic.Properties(message_id="express", delivery_mode=1))
    await publish_raw(transport, commands.Basic.Properties(delivery_mode=1))
    async with endpoint:
        await counted(transport, "error", 2)
    connection = await aio_pika.connect(rabbitmq_url)
    queue = await (await connection.channel()).get_queue("error")
    assert [(await queue.get(timeout=5, no_ack=True)).delivery_mode for _ in range(2)] == [2, 2]
    await connection.close()


async def test_a_message_without_an_id_stays_where_there_is_no_error_queue(rabbitmq_url: str) -> None:
    transport = RabbitMQTransport(rabbitmq_url, error_queue="nowhere")
    await transport.start()
    await transport.setup_infrastructure(["billing"])
    await publish_raw(transport, commands.Basic.Properties())
    receiver = await transport.receiver("billing")
    with pytest.raises(QueueNotFound, match="nowhere"):
        await asyncio.wait_for(receiver.receive(1), PATIENCE)
    await receiver.stop()
    await counted(transport, "billing", 1)
    await transport.stop()


async def test_a_stop_returns_only_unacknowledged_messages(rabbitmq_url: str) -> None:
    """Given 100 received of 300, the first 60 acknowledged, when the transport stops at once, then 240 are there."""
    transport = RabbitMQTransport(rabbitmq_url)
    await transport.start()
    await transport.setup_infrastructure(["billing"])
    await transport.dispatch([operation("billing", f"m{number}") for number in range(300)])
    receiver = await transport.receiver("billing")
    batch = await received(receiver, 100)
    acknowledged = batch[:60]
    await asyncio.gather(*(receiver.acknowledge(one) for one in acknowledged))
    await transport.stop()
    await transport.start()
    await counted(transport, "billing", 240)
    rest = await received(await transport.receiver("billing"), 240)
    assert not set(ids(acknowledged)) & set(ids(rest))
    await transport.stop()


async def test_a_stop_finishes_messages_in_flight(rabbitmq_url: str) -> None:
    """Given more messages than are handled at once, when the endpoint stops, then none is lost or handled twice."""
    transport = RabbitMQTransport(rabbitmq_url)
    handled: list[str] = []
    some = asyncio.Event()
    endpoint = Endpoint("sales", transport=transport, concurrency=5)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        await asyncio.sleep(0.01)
        handled.append(message.id)
        if len(handled) > 20:
            some.set()

    await transport.start()
    await transport.setup_infrastructure(["sales"])
    await transport.dispatch([operation("sales", f"m{number}") for number in range(200)])
    async with endpoint:
        await asyncio.wait_for(some.wait(), PATIENCE)
    await counted(transport, "sales", 200 - len(handled))
    assert len(handled) == len(set(handled)) < 200
    await transport.stop()


async def test_a_queue_of_the_other_type_is_used_as_it_is(rabbitmq_url: str, transport: RabbitMQTransport) -> None:
    """Given queues of another type, as .NET 7 makes them, when an endpoint sets up and runs, then it uses them."""
    endpoint = Endpoint("billing", transport=RabbitMQTransport(rabbitmq_url, queue_type="classic"))
    handled = asyncio.Event()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled.set()

    with Signals() as signals:
        async with endpoint:
            await transport.dispatch([operation("billing")])
            await asyncio.wait_for(handled.wait(), PATIENCE)
    texts = [record.getMessage() for record in signals.records(Event.QUEUE_DIFFERS)]
    assert len(texts) == 2
    assert "'billing' exists and is no classic queue as this endpoint would create it: using it as it is" in texts[0]
    # And doctor reports it
    url = f"{rabbitmq_url}?queue_type=classic"
    ran = await asyncio.to_thread(CliRunner().invoke, main, ["doctor", "--url", url, "--endpoint", "billing", "--json"])
    [found] = [one for one in json.loads(ran.stdout)["findings"] if one["what"] == "queue billing"]
    assert found["text"].startswith("0 messages; no process receives from it; no classic queue as this endpoint would")
    same = await asyncio.to_thread(CliRunner().invoke, main, ["doctor", "--url", rabbitmq_url, "--endpoint", "billing"])
    assert "as this endpoint would create it" not in same.output


async def test_an_exchange_of_another_kind_is_refused(rabbitmq_url: str, transport: RabbitMQTransport) -> None:
    """Given an exchange of a queue's name that leads elsewhere, when the queue is set up, then that is refused."""
    connection = await aio_pika.connect(rabbitmq_url)
    await (await connection.channel()).declare_exchange("odd", aio_pika.ExchangeType.TOPIC, durable=True)
    await connection.close()
    with pytest.raises(BackendUnusable, match=r"queue 'odd' and its exchange are there already, but not as"):
        await transport.setup_infrastructure(["odd"])


@pytest.mark.parametrize("refused", ["configure", "write", "read"])
async def test_a_missing_permission_is_named(
    rabbitmq: RabbitmqServer, rabbitmq_url: str, transport: RabbitMQTransport, refused: str
) -> None:
    user = RabbitMQTransport(rabbitmq.new_user(rabbitmq_url, **{refused: "^$"}))
    await user.start()
    with pytest.raises(BackendUnusable, match=rf"no {refused} permission on .*set_permissions"):
        if refused == "read":
            await (await user.receiver("billing")).receive(1)
        else:
            await user.setup_infrastructure(["new"] if refused == "configure" else ["billing"])
    await user.stop()


async def test_a_user_without_access_gets_the_reason(rabbitmq_url: str) -> None:
    for url, why in (
        (rabbitmq_url.replace("guest:guest", "guest:secret"), r"refuses user 'guest' or the password"),
        (f"{rabbitmq_url}x", r"no virtual host 'test_\w+x'.*rabbitmqctl add_vhost"),
    ):
        with pytest.raises(BackendUnusable, match=why) as refused:
            await RabbitMQTransport(url).start()
        assert "secret" not in str(refused.value)
    with pytest.raises(BackendUnavailable, match=r"127\.0\.0\.1:1 does not answer"):
        await RabbitMQTransport(NOBODY_LISTENS).start()


async def test_a_queue_name_too_long_for_amqp_is_refused(transport: RabbitMQTransport) -> None:
    for use in (transport.count("ü" * 200), transport.setup_infrastructure(["ü" * 200]), transport.receiver("ü" * 200)):
        with pytest.raises(InvalidMessage, match="400 bytes in UTF-8, RabbitMQ takes 255"):
            await use


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="queue_type='stream' must be one of quorum, classic"):
        RabbitMQTransport("amqp://localhost", queue_type="stream")
    with pytest.raises(ConfigurationError, match="topology='fanout' must be one of conventional, direct"):
        RabbitMQTransport("amqp://localhost", topology="fanout")
    with pytest.raises(UnsupportedTransactionMode, match="up to RECEIVE_ONLY"):
        Endpoint(
            "s",
            transport=RabbitMQTransport("amqp://localhost"),
            transaction_mode=TransactionMode.SENDS_ATOMIC_WITH_RECEIVE,
        )


async def test_acknowledgements_leave_in_batches(rabbitmq_url: str) -> None:
    """Given a queue, when an endpoint empties it, then nothing is left unacknowledged behind."""
    transport = RabbitMQTransport(rabbitmq_url, queue_type="classic")
    await transport.start()
    await transport.setup_infrastructure(["sales"])
    await transport.dispatch([operation("sales", f"m{number}") for number in range(2000)])
    endpoint = Endpoint("sales", transport=transport, concurrency=50)
    arrivals = Arrivals(endpoint)
    began = time.monotonic()
    async with endpoint:
        await arrivals.number(2000)
    assert time.monotonic() - began < PATIENCE
    await counted(transport, "sales", 0)
    await transport.stop()


async def test_a_channel_that_is_closed_twice_at_once_frees_its_number(rabbitmq_url: str) -> None:
    """Given two callers that close one channel, when another one takes its number, then that one is answered."""
    connection = BrokerConnection(BrokerAddress.parse(rabbitmq_url), "test")
    try:
        for _ in range(20):
            channel = await connection.channel()
            first, second = asyncio.create_task(channel.close()), asyncio.create_task(channel.close())
            await first
            another = await connection.channel()
            assert another.number == channel.number
            await second
            await another.close()
    finally:
        await connection.close()
