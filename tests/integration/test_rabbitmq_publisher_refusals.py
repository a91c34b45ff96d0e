"""Refusals of a broker are reported to the callers concerned, and to no others."""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING

import pytest
from tests.integration.rabbitmq_queues import a_channel, a_message, declare, drain, opened, to_queue
from tests.integration.wire_between import a_server
from tests.servers.ports import free_port

from delayline import (
    BackendUnavailable,
    Headers,
    InvalidMessage,
    Message,
    NotStarted,
    QueueNotFound,
)
from delayline.errors import BackendUnusable, MessageRejected
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.encoding import Publication
from delayline.rabbitmq.publisher import Publisher
from delayline.rabbitmq.refusals import Unroutable

if TYPE_CHECKING:
    from tests.servers.rabbitmq import RabbitmqServer


async def test_unroutable_messages_are_returned(rabbitmq_url: str) -> None:
    """Given one queue of three, when messages with one id go to all, then exactly the two others fail."""
    await declare(rabbitmq_url, "there")
    async with opened(rabbitmq_url) as publisher:
        failures = await publisher.publish([to_queue("absent"), to_queue("there"), to_queue("away")])
    assert failures.keys() == {0, 2}
    error = failures[2]
    assert isinstance(error, Unroutable)
    assert isinstance(error, QueueNotFound)
    assert (error.exchange, error.routing_key, error.queue) == ("", "away", "away")
    assert "312 NO_ROUTE" in str(error)
    assert len(await drain(rabbitmq_url, "there")) == 1


async def test_many_returns_are_distinguished(rabbitmq_url: str) -> None:
    """Given every third queue missing, when 3000 messages go out, then exactly those fail."""
    await declare(rabbitmq_url, "there")
    publications = [to_queue("there" if n % 3 else "absent", a_message(f"m-{n}")) for n in range(3000)]
    async with opened(rabbitmq_url) as publisher:
        failures = await publisher.publish(publications)
    assert sorted(failures) == list(range(0, 3000, 3))


async def test_rejections_of_a_full_queue_are_reported(rabbitmq_url: str) -> None:
    """Given a queue for one message that rejects more, when three are published, then two fail."""
    await declare(rabbitmq_url, "full", max_length=1, overflow="reject-publish")
    async with opened(rabbitmq_url) as publisher:
        failures = await publisher.publish([to_queue("full", a_message(f"m-{n}")) for n in range(3)])
    assert failures.keys() == {1, 2}
    assert isinstance(failures[1], MessageRejected)
    assert "did not take message 'm-1'" in str(failures[1])
    assert [message.message_id for message in await drain(rabbitmq_url, "full")] == ["m-0"]


async def test_a_missing_exchange_fails_its_own_messages_once_each(rabbitmq_url: str) -> None:
    """Given no such exchange, when a batch has messages for it and others, then the others arrive once."""
    await declare(rabbitmq_url, "there")
    batch = [to_queue("there", a_message("a")), Publication(a_message("b"), "none", ""), to_queue("there")]
    async with opened(rabbitmq_url) as publisher:
        for _ in range(2):
            failures = await publisher.publish(batch)
            assert failures.keys() == {1}
            assert isinstance(failures[1], Unroutable)
            assert "no exchange 'none'" in str(failures[1])
    assert len(await drain(rabbitmq_url, "there")) == 4


async def test_an_exchange_that_was_made_meanwhile_is_found(rabbitmq_url: str) -> None:
    """Given an exchange that was missing, when it is made, then the next message arrives."""
    async with a_channel(rabbitmq_url) as channel, opened(rabbitmq_url) as publisher:
        assert (await publisher.publish([Publication(a_message(), "late", "")])).keys() == {0}
        queue = await channel.declare_queue("late", durable=True)
        await queue.bind(await channel.declare_exchange("late", "fanout", durable=True))
        assert await publisher.publish([Publication(a_message(), "late", "")]) == {}


async def test_an_exchange_that_is_deleted_fails_its_own_messages_only(rabbitmq_url: str) -> None:
    """Given an exchange in use, when it is deleted, then its messages fail and those beside them still arrive."""
    await declare(rabbitmq_url, "there")
    async with a_channel(rabbitmq_url) as channel, opened(rabbitmq_url) as publisher:
        queue = await channel.declare_queue("other", durable=True)
        exchange = await channel.declare_exchange("gone", "fanout", durable=True)
        await queue.bind(exchange)
        assert await publisher.publish([Publication(a_message(), "gone", "")]) == {}
        await exchange.delete()
        mixed = [to_queue("there", a_message(f"m-{n}")) for n in range(40)]
        mixed[7:7] = [Publication(a_message(), "gone", "")] * 2
        failures, alone = await asyncio.gather(publisher.publish(mixed), publisher.publish([to_queue("there")]))
        assert (set(failures), alone) == ({7, 8}, {})
        assert isinstance(failures[7], Unroutable)
    assert {one.message_id for one in await drain(rabbitmq_url, "there")} == {f"m-{n}" for n in range(40)} | {"m-1"}


async def test_an_exchange_one_may_not_write_to_is_reported(rabbitmq: RabbitmqServer, rabbitmq_url: str) -> None:
    """Given a user with the right to write to one of two exchanges, when publishing to both, then the error has a
    remedy.
    """
    url = rabbitmq.new_user(rabbitmq_url, configure="", write="^allowed$", read="")
    async with a_channel(rabbitmq_url) as channel:
        for name in ("allowed", "forbidden"):
            queue = await channel.declare_queue(name, durable=True)
            await queue.bind(await channel.declare_exchange(name, "fanout", durable=True))
    async with opened(url) as publisher:
        failures = await publisher.publish([Publication(a_message(), name, "") for name in ("allowed", "forbidden")])
        assert failures.keys() == {1}
        assert isinstance(failures[1], BackendUnusable)
        user = BrokerAddress.parse(url).user
        assert f"user {user!r} may not write to exchange 'forbidden'" in str(failures[1])
        assert "rabbitmqctl set_permissions" in str(failures[1])
        assert await publisher.publish([Publication(a_message(), "allowed", "")]) == {}
    assert await drain(rabbitmq_url, "forbidden") == []


async def test_an_error_of_the_broker_fails_only_its_message(rabbitmq_url: str) -> None:
    """Given properties in the name of another user, when published, then that message fails and no other."""
    await declare(rabbitmq_url, "there")
    forged = struct.pack(">H", (1 << 7) | (1 << 4)) + b"\x02id" + b"\x06nobody"
    batch = [to_queue("there"), Publication(a_message("forged"), "", "there", properties=forged), to_queue("there")]
    async with opened(rabbitmq_url) as publisher:
        failures = await publisher.publish(batch)
    assert failures.keys() == {1}
    assert isinstance(failures[1], InvalidMessage)
    assert "refuses message 'forged': 406" in str(failures[1])
    assert len(await drain(rabbitmq_url, "there")) >= 2


async def test_messages_that_amqp_cannot_encode_are_not_sent(rabbitmq_url: str) -> None:
    """Given a header that is not text in one of three messages, when published, then the two others arrive."""
    await declare(rabbitmq_url, "there")
    wrong = to_queue("there", Message("wrong", {"number": 5}, b""))  # type: ignore[dict-item]
    async with opened(rabbitmq_url) as publisher:
        failures = await publisher.publish([to_queue("there"), wrong, to_queue("there", a_message("m-2"))])
    assert {position: type(error) for position, error in failures.items()} == {1: InvalidMessage}
    assert [message.message_id for message in await drain(rabbitmq_url, "there")] == ["m-1", "m-2"]


@pytest.mark.parametrize("span", ["3650.00:00:00", "3650.00:00:00.0000001"])
async def test_a_time_to_be_received_of_any_length_is_taken(rabbitmq_url: str, span: str) -> None:
    """Given as long a time as brokers take and a longer one, when published, then both arrive."""
    await declare(rabbitmq_url, "there")
    message = Message("m", {Headers.TIME_TO_BE_RECEIVED: span}, b"")
    async with opened(rabbitmq_url) as publisher:
        assert await publisher.publish([to_queue("there", message)]) == {}
    assert [one.headers for one in await drain(rabbitmq_url, "there")] == [message.headers]


async def test_a_wrong_password_is_reported_without_it(rabbitmq_url: str) -> None:
    """Given a wrong password, when connecting, then the error names the user and not the password."""
    with pytest.raises(BackendUnusable, match="refuses user 'guest' or the password") as caught:
        await Publisher(BrokerAddress.parse(rabbitmq_url.replace("guest:guest", "guest:sesame"))).open()
    assert "sesame" not in str(caught.value)


async def test_a_virtual_host_that_is_not_there_is_reported(rabbitmq_url: str) -> None:
    """Given no such virtual host, when connecting, then the error says how to make it."""
    with pytest.raises(BackendUnusable, match=r"has no virtual host 'none'\. Create it with: .* add_vhost none"):
        await Publisher(BrokerAddress.parse(rabbitmq_url.rpartition("/")[0] + "/none")).open()


async def test_a_virtual_host_one_may_not_use_is_reported(rabbitmq: RabbitmqServer, rabbitmq_url: str) -> None:
    """Given a user of another virtual host, when connecting, then the error says how to let the user in."""
    user = rabbitmq.new_user(rabbitmq_url)
    other = rabbitmq.new_vhost()
    with pytest.raises(BackendUnusable, match=r"may not use virtual host 'test_\w+' .* rabbitmqctl set_permissions"):
        await Publisher(BrokerAddress.parse(user.rpartition("/")[0] + "/" + other.rpartition("/")[2])).open()
    rabbitmq.drop_vhost(other)


async def test_a_missing_server_is_unavailable_at_once_and_for_a_while() -> None:
    """Given a port without a listener, when connecting twice, then the second attempt fails without connecting."""
    publisher = Publisher(BrokerAddress("127.0.0.1", free_port()))
    with pytest.raises(BackendUnavailable, match="does not answer"):
        await publisher.open()
    with pytest.raises(BackendUnavailable, match=r"does not answer.*tried again in 0\.\d s"):
        await publisher.publish([to_queue("q")])


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak AMQP 0-9-1: .* Check host and port"),
        (b"AMQP\0\1\0\0", "does not speak AMQP 0-9-1: it asks for another version of the protocol"),
        (b"", "does not answer: no answer in time"),
    ],
)
async def test_a_server_of_something_else_is_reported(said: bytes, error: str) -> None:
    """Given a server that is not RabbitMQ, when connecting, then the error says so, after connection_timeout."""
    async with a_server(said) as port:
        with pytest.raises(BackendUnavailable, match=error):
            await Publisher(BrokerAddress("127.0.0.1", port, connection_timeout=0.3)).open()


async def test_a_closed_publisher_publishes_nothing(rabbitmq_url: str) -> None:
    """Given a publisher that is not open, closed, and opened again, when used, then it works when it is open."""
    await declare(rabbitmq_url, "there")
    publisher = Publisher(BrokerAddress.parse(rabbitmq_url))
    with pytest.raises(NotStarted):
        await publisher.publish([to_queue("there")])
    await publisher.open()
    await publisher.close()
    await publisher.close()
    with pytest.raises(NotStarted):
        await publisher.publish([to_queue("there")])
    await publisher.open()
    assert await publisher.publish([to_queue("there")]) == {}
    await publisher.close()
