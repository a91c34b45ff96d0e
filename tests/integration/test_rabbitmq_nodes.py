"""Several nodes in a broker's URL: dead and silent ones are passed over, by connections and by the management API."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

import pytest
from tests.integration.rabbitmq_queues import a_channel, a_message, declare, drain, opened, to_queue
from tests.integration.wire_between import wire_to
from tests.servers.ports import free_port

from delayline import BackendUnavailable
from delayline.errors import BackendUnusable, MessageRejected
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.admin.management_api import ManagementApi
from delayline.rabbitmq.connection import BrokerConnection, node_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.rabbitmq import RabbitmqServer


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Provide a port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def behind(url: str, *ports: int, options: str = "") -> str:
    """Return the URL with nodes at these ports in front of its own."""
    login, _, place = url.rpartition("@")
    return f"{login}@{''.join(f'127.0.0.1:{port},' for port in ports)}{place}{options}"


async def test_dead_and_silent_nodes_are_passed_over(rabbitmq_url: str, silent_port: int) -> None:
    """Given a node that refuses connections and one that never answers, when opened, then the third one is used."""
    await declare(rabbitmq_url, "there")
    url = behind(rabbitmq_url, free_port(), silent_port, options="?connection_timeout=20000&hosts=127.0.0.1:1")
    async with opened(url) as publisher:
        assert await publisher.publish([to_queue("there")]) == {}
    connection = BrokerConnection(BrokerAddress.parse(url), "test")
    assert node_of(await connection.open()) == BrokerAddress.parse(rabbitmq_url).nodes[0]
    await connection.close()


async def test_nodes_of_which_none_answers_are_all_named(silent_port: int) -> None:
    """Given a dead node and a silent one, when opened, then the error has the reason of each, within the limit."""
    dead = free_port()
    address = BrokerAddress.parse(f"amqp://u:secret@127.0.0.1:{dead},127.0.0.1:{silent_port}/v?connection_timeout=500")
    with pytest.raises(BackendUnavailable, match=rf"none of 2 nodes.*:{dead}/v.*:{silent_port}/v.*no answer") as caught:
        await asyncio.wait_for(BrokerConnection(address, "test").open(), 20)
    assert "secret" not in str(caught.value)


async def test_a_login_that_all_nodes_refuse_cannot_work(rabbitmq_url: str) -> None:
    """Given a wrong password, when all nodes refuse it, then it is no outage; with a dead node beside it may be one."""
    wrong = rabbitmq_url.replace("guest:guest", "guest:sesame")
    own_port = BrokerAddress.parse(rabbitmq_url).port
    for port, kind in ((own_port, BackendUnusable), (free_port(), BackendUnavailable)):
        address = BrokerAddress.parse(behind(wrong.replace("127.0.0.1", "localhost"), port))
        with pytest.raises(kind, match=r"none of 2 nodes.*refuses user 'guest' or the password"):
            await BrokerConnection(address, "test").open()


async def test_a_lost_node_is_tried_last(rabbitmq_url: str) -> None:
    """Given a connection to the first node, when it is cut, then the next use goes to the second one."""
    await declare(rabbitmq_url, "there")
    async with wire_to(rabbitmq_url) as (wire, wired):
        port = BrokerAddress.parse(wired).port
        async with opened(behind(rabbitmq_url, port)) as publisher:
            assert await publisher.publish([to_queue("there", a_message("before"))]) == {}
            assert wire.connections == 1
            wire.cut()
            wire.let_through()
            while True:
                with contextlib.suppress(BackendUnavailable):
                    assert await publisher.publish([to_queue("there", a_message("after"))]) == {}
                    break
            assert wire.connections == 1
    assert {message.message_id for message in await drain(rabbitmq_url, "there")} == {"before", "after"}


async def test_a_refusal_after_a_failover_is_sent_again(rabbitmq_url: str) -> None:
    """Given a connection to the second node, when a queue refuses for a moment, then the message gets there.

    So does a quorum queue that elects a new leader. On a first connection a refusal is an error at once.
    """
    await declare(rabbitmq_url, "full", max_length=1, overflow="reject-publish")
    async with opened(rabbitmq_url) as publisher:
        failures = await publisher.publish([to_queue("full", a_message(f"m-{n}")) for n in range(2)])
        assert isinstance(failures[1], MessageRejected)

    async with opened(behind(rabbitmq_url, free_port())) as publisher, a_channel(rabbitmq_url) as channel:
        sending = asyncio.ensure_future(publisher.publish([to_queue("full", a_message("after"))]))
        await asyncio.sleep(1.0)
        assert not sending.done()
        await (await channel.get_queue("full")).purge()
        assert await asyncio.wait_for(sending, 60) == {}
    assert [message.message_id for message in await drain(rabbitmq_url, "full")] == ["after"]


async def test_the_management_api_of_another_node_answers(
    rabbitmq: RabbitmqServer, rabbitmq_url: str, silent_port: int
) -> None:
    """Given management APIs that are dead, silent, and there, when asked, then the last one answers, and is kept."""
    places = f"http://127.0.0.1:{free_port()},http://127.0.0.1:{silent_port},{rabbitmq.management_url}/"
    url = f"{rabbitmq_url}?server_timeout=0.5&management={places}"
    await declare(rabbitmq_url, "there")
    async with ManagementApi(BrokerAddress.parse(url)) as api:
        for _ in range(2):
            assert "there" in await api.queues()
    async with ManagementApi(BrokerAddress.parse(rabbitmq_url), places) as api:
        assert (await api.version())[0].isdigit()


async def test_the_management_api_is_asked_as_the_user_in_its_url(rabbitmq: RabbitmqServer, rabbitmq_url: str) -> None:
    """Given a user without rights at the broker's URL, when the management URL names another, then that one asks."""
    limited = rabbitmq.new_user(rabbitmq_url)
    place = rabbitmq.management_url.replace("//", "//guest:guest@")
    with pytest.raises(BackendUnusable, match="refuses user 'user_"):
        async with ManagementApi(BrokerAddress.parse(limited), rabbitmq.management_url) as api:
            await api.queues()
    async with ManagementApi(BrokerAddress.parse(f"{limited}?management={place}")) as api:
        assert await api.queues() == {}
