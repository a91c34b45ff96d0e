"""The publisher on a real broker: messages arrive, or their sender gets an error."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import quote

from tests.integration.rabbitmq_queues import (
    a_channel,
    a_message,
    declare,
    drain,
    opened,
    to_queue,
    until_outstanding,
)
from tests.integration.wire_between import wire_to

from delayline import Headers, Message
from delayline.message import encode_headers
from delayline.rabbitmq.encoding import Publication
from delayline.rabbitmq.publisher import Publisher

if TYPE_CHECKING:
    from tests.integration.wire_between import Wire
    from tests.servers.rabbitmq import RabbitmqServer


async def test_published_messages_arrive_with_id_headers_and_body(rabbitmq: RabbitmqServer, rabbitmq_url: str) -> None:
    """Given an exchange and a queue, when messages are published with Unicode everywhere, then they arrive as sent."""
    await declare(rabbitmq_url, "books")
    vhost = rabbitmq_url.rsplit("/", 1)[1]
    exchange = f"{vhost}/{quote('bücher 📚')}"
    rabbitmq.api("PUT", f"exchanges/{exchange}", json={"type": "topic"})
    rabbitmq.api("POST", f"bindings/{vhost}/e/{quote('bücher 📚')}/q/books", json={"routing_key": "größe.#"})
    headers = {"Größe": "ö" * 300, "empty": "", Headers.CORRELATION_ID: "c-1", Headers.CONTENT_TYPE: "text/plain"}
    sent = Message("id-ü", headers, "größe".encode())
    stored = Message.from_encoded("id-2", encode_headers({"a": "b"}), b"")
    async with opened(rabbitmq_url) as publisher:
        failures = await publisher.publish([Publication(one, "bücher 📚", "größe.1") for one in (sent, stored)])
    assert failures == {}
    first, second = await drain(rabbitmq_url, "books")
    assert (first.message_id, first.body) == ("id-ü", "größe".encode())
    assert first.headers == headers
    assert (first.correlation_id, first.content_type, first.delivery_mode) == ("c-1", "text/plain", 2)
    assert (second.message_id, second.body, second.headers) == ("id-2", b"", {"a": "b"})


async def test_many_in_one_call_arrive_in_order(rabbitmq_url: str) -> None:
    """Given 3000 messages, more than are encoded at once, when they are published, then all arrive in order."""
    await declare(rabbitmq_url, "many")
    async with opened(rabbitmq_url) as publisher:
        assert await publisher.publish([to_queue("many", a_message(f"m-{n}")) for n in range(3000)]) == {}
    assert [message.message_id for message in await drain(rabbitmq_url, "many")] == [f"m-{n}" for n in range(3000)]


async def test_concurrent_callers_share_the_pipeline(rabbitmq_url: str) -> None:
    """Given two queues, one of them missing, when 200 callers publish at once, then each gets its own result."""
    await declare(rabbitmq_url, "there")
    async with opened(rabbitmq_url) as publisher:
        calls = [publisher.publish([to_queue("there" if n % 2 else "absent")]) for n in range(200)]
        failures = await asyncio.gather(*calls)
    assert [len(failed) for failed in failures] == [0 if n % 2 else 1 for n in range(200)]
    assert len(await drain(rabbitmq_url, "there")) == 100


async def test_a_body_larger_than_a_frame_is_split(rabbitmq_url: str) -> None:
    """Given a broker with frames of 128 KiB, when 5 MB are published, then all of them arrive."""
    await declare(rabbitmq_url, "large")
    body = bytes(range(256)) * 20_000
    async with opened(rabbitmq_url) as publisher:
        assert await publisher.publish([to_queue("large", a_message(body=body))]) == {}
    [message] = await drain(rabbitmq_url, "large")
    assert message.body == body


async def test_its_connection_has_a_name(rabbitmq: RabbitmqServer, rabbitmq_url: str) -> None:
    """Given an endpoint's publisher, when the broker is asked, then it names it."""
    vhost = rabbitmq_url.rsplit("/", 1)[1]
    async with opened(rabbitmq_url, connection_name="sales Publish"):
        names: list[str] = []
        while not names:
            found = (await asyncio.to_thread(rabbitmq.api, "GET", f"vhosts/{vhost}/connections")).json()
            names = [one["client_properties"]["connection_name"] for one in found if "client_properties" in one]
        assert names == ["sales Publish"]


async def test_publishing_an_empty_sequence_does_nothing(rabbitmq_url: str) -> None:
    """Given no publications, when they are published, then nothing fails."""
    async with opened(rabbitmq_url) as publisher:
        assert await publisher.publish([]) == {}


async def test_closing_waits_for_outstanding_confirms(rabbitmq_url: str) -> None:
    """Given 500 publications that are not confirmed, when the publisher is closed, then all are confirmed first."""
    await declare(rabbitmq_url, "closing", queue_type="quorum")
    async with wire_to(rabbitmq_url) as (wire, url), opened(url) as publisher:
        wire.hold_answers()
        failures, _ = await asyncio.gather(
            publisher.publish([to_queue("closing") for _ in range(500)]), _closed_meanwhile(publisher, wire)
        )
        assert failures == {}
    assert len(await drain(rabbitmq_url, "closing")) == 500


async def _closed_meanwhile(publisher: Publisher, wire: Wire) -> None:
    await until_outstanding(publisher, 500)
    asyncio.get_running_loop().call_soon(wire.let_through)
    await publisher.close()


async def test_an_exchange_can_be_published_to(rabbitmq_url: str) -> None:
    """Given a topic exchange with a queue bound, when a message is published there, then the queue has it."""
    async with a_channel(rabbitmq_url) as channel, opened(rabbitmq_url) as publisher:
        queue = await channel.declare_queue("bound", durable=True)
        await queue.bind(await channel.declare_exchange("topics", "topic", durable=True), "#.bound")
        assert await publisher.publish([Publication(a_message(), "topics", "0.1.bound", delay=1)]) == {}
        message = await queue.get()
    assert message.headers["NServiceBus.Transport.RabbitMQ.DelayInSeconds"] == 1
