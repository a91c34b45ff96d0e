"""The delay levels on a real broker: exactly what .NET declares, as the reference has it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

import aiormq
import pytest
from tests.integration.rabbitmq_queues import declare_levels, own_channel

from delayline.errors import BackendUnusable
from delayline.rabbitmq.infrastructure import DelayInfrastructure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiormq.abc import AbstractChannel
    from tests.servers.rabbitmq import RabbitmqServer

#: Milliseconds of each level, from 0 to 27.
TIMES: Final = (
    1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 256000, 512000, 1024000, 2048000, 4096000, 8192000,
    16384000, 32768000, 65536000, 131072000, 262144000, 524288000, 1048576000, 2097152000, 4194304000, 8388608000,
    16777216000, 33554432000, 67108864000, 134217728000,
)  # fmt: skip
V1: Final = {"x-queue-type": "classic", "x-queue-mode": "lazy"}
V2: Final = {"x-queue-type": "quorum", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
MADE: Final = [
    (DelayInfrastructure.v1(), "nsb.", V1, "classic"),
    (DelayInfrastructure.v2(), "nsb.v2.", V2, "quorum"),
    (DelayInfrastructure.custom("acme:1"), "acme:1.", V2, "quorum"),
]


@contextlib.asynccontextmanager
async def a_channel(url: str) -> AsyncIterator[AbstractChannel]:
    connection = await aiormq.connect(url)
    try:
        yield await connection.channel()
    finally:
        await connection.close()


def seen(server: RabbitmqServer, url: str, what: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.api("GET", f"{what}/{url.rsplit('/', 1)[1]}").json()
    return found


def below(prefix: str, level: int) -> str:
    return f"{prefix}delay-level-{level - 1:02}" if level else f"{prefix}delay-delivery"


@pytest.mark.parametrize(("infrastructure", "prefix", "arguments", "kind"), MADE)
async def test_everything_is_declared_as_the_reference_has_it(
    rabbitmq: RabbitmqServer,
    rabbitmq_url: str,
    infrastructure: DelayInfrastructure,
    prefix: str,
    arguments: dict[str, str],
    kind: str,
) -> None:
    # When the levels are declared, twice and at once
    async with own_channel(rabbitmq_url) as one, own_channel(rabbitmq_url) as other:
        await asyncio.gather(infrastructure.declare(one), infrastructure.declare(other))
        await infrastructure.declare(one)

    # Then the broker has every exchange
    exchanges = {one["name"]: one for one in seen(rabbitmq, rabbitmq_url, "exchanges") if one["name"][:4] != "amq."}
    del exchanges[""]
    assert set(exchanges) == {f"{prefix}delay-level-{level:02}" for level in range(28)} | {f"{prefix}delay-delivery"}
    for exchange in exchanges.values():
        assert (exchange["type"], exchange["durable"], exchange["auto_delete"]) == ("topic", True, False)
        assert (exchange["internal"], exchange["arguments"]) == (False, {})

    # And every queue
    queues = {one["name"]: one for one in seen(rabbitmq, rabbitmq_url, "queues")}
    assert len(queues) == 28
    for level, milliseconds in enumerate(TIMES):
        queue = queues[f"{prefix}delay-level-{level:02}"]
        assert (queue["type"], queue["durable"], queue["auto_delete"], queue["exclusive"]) == (kind, True, False, False)
        own = {"x-message-ttl": milliseconds, "x-dead-letter-exchange": below(prefix, level)}
        assert queue["arguments"] == arguments | own

    # And every binding
    bindings = {
        (one["source"], one["destination_type"], one["destination"], one["routing_key"], len(one["arguments"]))
        for one in seen(rabbitmq, rabbitmq_url, "bindings")
        if one["source"]
    }
    expected: set[tuple[str, str, str, str, int]] = set()
    for level in range(28):
        name, stars = f"{prefix}delay-level-{level:02}", "*." * (27 - level)
        expected.add((name, "queue", name, f"{stars}1.#", 0))
        expected.add((name, "exchange", below(prefix, level), f"{stars}0.#", 0))
    assert bindings == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("theirs", "complaint"),
    [
        (
            {**V2, "x-message-ttl": 4001, "x-dead-letter-exchange": "nsb.v2.delay-level-01"},
            "x-message-ttl 4001, and 4000",
        ),
        ({"x-queue-type": "quorum"}, "x-dead-letter-exchange none, and nsb.v2.delay-level-01"),
        ({"x-queue-mode": "lazy"}, "x-message-ttl none, and 4000"),
    ],
)
async def test_levels_made_otherwise_are_refused_with_the_differences(
    rabbitmq_url: str, theirs: dict[str, Any], complaint: str
) -> None:
    # Given a level's queue with other arguments
    infrastructure = DelayInfrastructure.v2()
    async with a_channel(rabbitmq_url) as channel:
        await channel.queue_declare(infrastructure.level(2), durable=True, arguments=theirs)

        # Then ours is refused, with the argument that differs
        with pytest.raises(BackendUnusable, match=f"queue 'nsb.v2.delay-level-02' has {complaint} was"):
            await declare_levels(rabbitmq_url, infrastructure)


async def test_an_exchange_of_another_type_is_refused(rabbitmq_url: str) -> None:
    async with a_channel(rabbitmq_url) as channel:
        await channel.exchange_declare("nsb.v2.delay-delivery", exchange_type="fanout", durable=True)
        with pytest.raises(
            BackendUnusable, match=r"'nsb\.v2\.delay-delivery' has type fanout, and topic was asked for"
        ):
            await declare_levels(rabbitmq_url, DelayInfrastructure.v2())


@pytest.mark.slow
async def test_levels_can_be_deleted_and_made_again(rabbitmq: RabbitmqServer, rabbitmq_url: str) -> None:
    infrastructure = DelayInfrastructure.v2()
    async with own_channel(rabbitmq_url) as channel:
        await infrastructure.declare(channel)
        await infrastructure.delete(channel)
        await infrastructure.delete(channel)
        assert not seen(rabbitmq, rabbitmq_url, "queues")
        await infrastructure.declare(channel)
    assert len(seen(rabbitmq, rabbitmq_url, "queues")) == 28


@pytest.mark.slow
async def test_three_seconds_wait_two_and_one_and_arrive_once(rabbitmq_url: str) -> None:
    infrastructure = DelayInfrastructure.v2()
    await declare_levels(rabbitmq_url, infrastructure)
    async with a_channel(rabbitmq_url) as channel:
        await channel.queue_declare("sales", durable=True)
        await channel.queue_bind("sales", infrastructure.delivery, routing_key="#.sales")
        arrived: asyncio.Queue[aiormq.abc.DeliveredMessage] = asyncio.Queue()
        await channel.basic_consume("sales", arrived.put, no_ack=True)
        exchange, key = infrastructure.route(3, "sales")
        sent = asyncio.get_running_loop().time()
        await channel.basic_publish(b"3 s", exchange=exchange, routing_key=key)
        message = await asyncio.wait_for(arrived.get(), 30)
    assert asyncio.get_running_loop().time() - sent >= 3
    assert (message.body, message.routing_key) == (b"3 s", key)
    deaths = message.header.properties.headers["x-death"]  # type: ignore[index]
    assert [death["queue"] for death in deaths] == [infrastructure.level(0), infrastructure.level(1)]  # type: ignore[union-attr,index,call-overload]
    assert arrived.empty()
