"""Creating and counting delay levels, and removing undeliverable messages from them."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.integration.test_rabbitmq_infrastructure import a_channel

from delayline.backends import DueBy, due_by
from delayline.errors import BackendUnusable
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.admin.limits import lift_levels
from delayline.rabbitmq.admin.management_api import ManagementApi, Policy, version_of
from delayline.rabbitmq.admin.operations import (
    WINDOWS,
    catch_all_off,
    catch_all_on,
    create,
    due_within,
    pending,
)
from delayline.rabbitmq.admin.verification import examine, verify
from delayline.rabbitmq.infrastructure import DelayInfrastructure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.servers.rabbitmq import RabbitmqServer

V2 = DelayInfrastructure.v2()


@pytest.fixture
def address(rabbitmq_url: str) -> BrokerAddress:
    return BrokerAddress.parse(rabbitmq_url)


@pytest.fixture
async def api(rabbitmq: RabbitmqServer, address: BrokerAddress) -> AsyncIterator[ManagementApi]:
    async with ManagementApi(address, rabbitmq.management_url) as api:
        yield api


async def test_levels_are_created_and_then_nothing_is_pending(address: BrokerAddress, api: ManagementApi) -> None:
    for _ in range(2):
        await create(address, V2)
        await lift_levels(api, version_of(await api.version()), V2)
    assert all(check.ok for check in await verify(api, V2))
    assert await pending(address, V2) == [0] * 28


async def test_pending_messages_are_counted_by_level(address: BrokerAddress, rabbitmq_url: str) -> None:
    await create(address, V2)
    async with a_channel(rabbitmq_url) as channel:
        for delay in (64, 100, 127, 128, 1 << 27):
            exchange, key = V2.route(delay, "sales")
            await channel.basic_publish(b"", exchange=exchange, routing_key=key)
    counts = await pending(address, V2)
    assert {level: number for level, number in enumerate(counts) if number} == {6: 3, 7: 1, 27: 1}


async def test_a_broker_without_levels_has_nothing_to_count(address: BrokerAddress) -> None:
    with pytest.raises(BackendUnusable, match=r"no complete delay levels nsb\.v2\*.*Create them with: delayline"):
        await pending(address, V2)


async def test_levels_made_otherwise_are_reported_by_argument(address: BrokerAddress, rabbitmq_url: str) -> None:
    async with a_channel(rabbitmq_url) as channel:
        await channel.queue_declare(V2.level(0), durable=True, arguments={"x-message-ttl": 1000})
    with pytest.raises(BackendUnusable, match="has x-dead-letter-exchange none, and"):
        await create(address, V2)


async def test_a_user_without_the_permission_to_configure_gets_an_error(
    rabbitmq: RabbitmqServer, rabbitmq_url: str
) -> None:
    user = BrokerAddress.parse(rabbitmq.new_user(rabbitmq_url, configure="^$"))
    with pytest.raises(BackendUnusable, match=r"has no configure permission on exchange 'nsb\.v2\.delay-level-27'"):
        await create(user, V2)


@pytest.mark.slow
async def test_a_blocked_level_continues_after_undeliverable_messages_are_caught(
    address: BrokerAddress, api: ManagementApi, rabbitmq_url: str
) -> None:
    # Given more due messages for a deleted destination than a level holds
    await create(address, V2)
    async with a_channel(rabbitmq_url) as channel:
        await channel.queue_declare("sales", durable=True)
        await channel.queue_bind("sales", V2.delivery, routing_key="#.sales")
        for _ in range(40):
            exchange, key = V2.route(1, "deleted")
            await channel.basic_publish(b"", exchange=exchange, routing_key=key)
        for _ in range(300):  # the counts of the management API lag behind
            if (jam := (await examine(api, V2))[0]).text.startswith("40 in"):
                break
            await asyncio.sleep(0.1)
        assert jam.text.startswith("40 in nsb.v2.delay-level-00 have no destination")

        # When one for sales comes due, it stays behind them
        exchange, key = V2.route(1, "sales")
        await channel.basic_publish(b"", exchange=exchange, routing_key=key)
        await asyncio.sleep(3)
        assert (await channel.queue_declare("sales", passive=True)).message_count == 0

        # And once a queue catches them, it arrives
        for _ in range(2):
            name = await catch_all_on(address, V2, api)
        for _ in range(1500):
            caught = (await channel.queue_declare(name, passive=True)).message_count
            if (caught, (await channel.queue_declare("sales", passive=True)).message_count) == (40, 1):
                break
            await asyncio.sleep(0.02)
        else:
            pytest.fail(f"{caught} were caught")

    # And the levels are still what .NET declares; switched off, the policy is gone
    await lift_levels(api, version_of(await api.version()), V2)
    assert all(check.ok for check in await verify(api, V2))
    assert await catch_all_off(V2, api)
    assert not await catch_all_off(V2, api)


async def test_an_existing_policy_is_not_overridden(address: BrokerAddress, api: ManagementApi) -> None:
    await create(address, V2)
    await api.set_policy(Policy("ours", "^nsb", {"alternate-exchange": "amq.fanout"}))
    with pytest.raises(BackendUnusable, match=r"policy 'ours' is in force.*alternate-exchange"):
        await catch_all_on(address, V2, api)


def test_due_times_in_levels_are_bounded_and_estimated() -> None:
    # Given 100 messages that have up to 63 s left, and 10 up to a day and a half
    counts = [0] * 28
    counts[5], counts[16] = 100, 10
    found = {int(due.span.total_seconds()): due for due in due_by(due_within(counts), WINDOWS)}

    # Then most of the first are due within a minute, all within an hour; the others within a week
    assert (found[60].at_least, found[60].at_most) == (0, 110)
    assert 95 <= found[60].estimate < 100
    assert (found[3600].at_least, found[3600].estimate) == (100, 100)
    assert 100 < found[86_400].estimate < 110
    assert found[7 * 86_400] == DueBy(timedelta(days=7), at_least=110, estimate=110, at_most=110)
    assert found[2**28 - 1].at_least == 110
