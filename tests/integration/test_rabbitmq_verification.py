"""Findings of `verify` on a real broker, and cases without findings."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import running
from tests.eventually import eventually_async
from tests.integration.rabbitmq_queues import declare_levels
from tests.integration.test_rabbitmq_infrastructure import a_channel
from tests.servers.rabbitmq import RabbitmqServer

from delayline.clock import SystemClock
from delayline.errors import BackendUnavailable, BackendUnusable
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.admin.limits import lift_levels
from delayline.rabbitmq.admin.management_api import ManagementApi, Policy, version_of
from delayline.rabbitmq.admin.verification import Check, blocked, check_version, destinations, examine, verify
from delayline.rabbitmq.infrastructure import DelayInfrastructure
from delayline.testing import ManualClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from aiormq.abc import AbstractChannel

V2 = DelayInfrastructure.v2()


@pytest.fixture
async def api(rabbitmq: RabbitmqServer, rabbitmq_url: str) -> AsyncIterator[ManagementApi]:
    async with ManagementApi(BrokerAddress.parse(rabbitmq_url), rabbitmq.management_url) as api:
        yield api


@pytest.fixture
async def channel(rabbitmq_url: str) -> AsyncIterator[AbstractChannel]:
    async with a_channel(rabbitmq_url) as channel:
        yield channel


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.what: check for check in checks}


async def due_messages(api: ManagementApi, *, ok: bool) -> Check:
    """Look until it is so."""
    for _ in range(300):
        found = by_name(await examine(api, V2))["due messages"]
        if found.ok is ok:
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(found)


@pytest.mark.parametrize("infrastructure", [V2, DelayInfrastructure.v1(), DelayInfrastructure.custom("acme")])
async def test_levels_that_were_declared_are_all_right(
    api: ManagementApi, channel: AbstractChannel, rabbitmq_url: str, infrastructure: DelayInfrastructure
) -> None:
    await declare_levels(rabbitmq_url, infrastructure)
    await lift_levels(api, version_of(await api.version()), infrastructure)
    checks = await verify(api, infrastructure)
    assert [check for check in checks if not check.ok] == []
    assert {"version", "exchanges", "queues", "bindings", "policies"} <= set(by_name(checks))


@pytest.mark.parametrize("theirs", [{}, {"x-queue-type": "classic"}])
async def test_lazy_levels_that_others_declared_are_all_right(
    api: ManagementApi, channel: AbstractChannel, rabbitmq_url: str, theirs: dict[str, Any]
) -> None:
    """Given a level whose declaration names no type, as .NET's, when ours is declared and verified, then they agree."""
    v1 = DelayInfrastructure.v1()
    arguments = {name: value for name, value in v1.queues[0].arguments.items() if name != "x-queue-type"} | theirs
    await channel.queue_declare(v1.queues[0].name, durable=True, arguments=arguments)
    await declare_levels(rabbitmq_url, v1)
    assert by_name(await verify(api, v1))["queues"].ok


async def test_quorum_levels_under_the_names_of_lazy_ones_differ(
    api: ManagementApi, channel: AbstractChannel, rabbitmq_url: str
) -> None:
    """Given a level of the other type, when the levels are verified, then its type is what differs."""
    v1 = DelayInfrastructure.v1()
    await declare_levels(rabbitmq_url, v1)
    await channel.queue_delete(v1.level(3))
    await channel.queue_declare(v1.level(3), durable=True, arguments={"x-queue-type": "quorum"})
    found = by_name(await verify(api, v1))["queues"]
    assert "queue 'nsb.delay-level-03' has x-queue-type quorum, and classic was asked for" in found.text


async def test_lazy_levels_of_a_virtual_host_of_quorum_queues(rabbitmq4: RabbitmqServer, rabbitmq4_url: str) -> None:
    """Given quorum as the default type, when lazy levels are declared, then they are classic, and all right."""
    rabbitmq4.api("PUT", f"vhosts/{rabbitmq4_url.rsplit('/', 1)[1]}", json={"default_queue_type": "quorum"})
    v1 = DelayInfrastructure.v1()
    await declare_levels(rabbitmq4_url, v1)
    async with ManagementApi(BrokerAddress.parse(rabbitmq4_url), rabbitmq4.management_url) as api:
        assert [check for check in await verify(api, v1) if not check.ok] == []
        assert {queue.type for queue in (await api.queues()).values()} == {"classic"}


async def test_a_broker_without_levels_misses_all_of_them(rabbitmq: RabbitmqServer, api: ManagementApi) -> None:
    found = by_name(await verify(api, V2))
    version = ".".join(map(str, rabbitmq.version(rabbitmq.programs)))
    assert found["version"] == Check("version", ok=True, text=version)
    assert found["feature flag"].ok
    assert found["exchanges"].text.startswith("29 of 29 differ: nsb.v2.delay-level-27 is missing; ")
    assert found["queues"].text.startswith("28 of 28 differ: ")
    assert found["bindings"].text.startswith("56 of 56 differ: ")
    assert found["bindings"].text.endswith("; and 51 more")


async def _without_a_queue(channel: AbstractChannel) -> None:
    await channel.queue_delete(V2.level(9))


async def _without_a_binding(channel: AbstractChannel) -> None:
    await channel.exchange_unbind(destination=V2.delivery, source=V2.level(0), routing_key="*." * 27 + "0.#")


async def _with_a_binding_too_many(channel: AbstractChannel) -> None:
    await channel.queue_declare("spy", durable=True)
    await channel.queue_bind("spy", V2.level(5), routing_key="#")


async def _with_another_time(channel: AbstractChannel) -> None:
    arguments: dict[str, Any] = {**V2.queues[27].arguments, "x-message-ttl": 999, "x-max-length": 5}
    await channel.queue_delete(V2.level(0))
    await channel.queue_declare(V2.level(0), durable=True, arguments=arguments)
    await channel.queue_bind(V2.level(0), V2.level(0), routing_key="*." * 27 + "1.#")


async def _with_another_exchange(channel: AbstractChannel) -> None:
    await channel.exchange_delete(V2.delivery)
    await channel.exchange_declare(V2.delivery, exchange_type="fanout", durable=True)
    await channel.exchange_bind(destination=V2.delivery, source=V2.level(0), routing_key="*." * 27 + "0.#")


@pytest.mark.parametrize(
    ("harm", "what", "text"),
    [
        (_without_a_queue, "queues", "1 of 28 differ: nsb.v2.delay-level-09 is missing"),
        (
            _without_a_binding,
            "bindings",
            f"1 of 56 differ: nsb.v2.delay-level-00 to nsb.v2.delay-delivery with key {'*.' * 27}0.# is missing",
        ),
        (
            _with_a_binding_too_many,
            "bindings",
            "1 of 56 differ: nsb.v2.delay-level-05 to spy with key # is too many",
        ),
        (
            _with_another_time,
            "queues",
            "2 of 28 differ: queue 'nsb.v2.delay-level-00' has x-message-ttl 999, and 1000 was asked for; "
            "queue 'nsb.v2.delay-level-00' has x-max-length 5, and none was asked for",
        ),
        (
            _with_another_exchange,
            "exchanges",
            "1 of 29 differ: exchange 'nsb.v2.delay-delivery' has type fanout, and topic was asked for",
        ),
    ],
)
async def test_every_single_difference_is_found(
    api: ManagementApi,
    channel: AbstractChannel,
    rabbitmq_url: str,
    harm: Callable[[AbstractChannel], Awaitable[None]],
    what: str,
    text: str,
) -> None:
    await declare_levels(rabbitmq_url, V2)
    await harm(channel)
    assert by_name(await verify(api, V2))[what] == Check(what, ok=False, text=text)


async def test_a_policy_that_reaches_the_levels_is_found(
    api: ManagementApi, channel: AbstractChannel, rabbitmq_url: str
) -> None:
    # Given a policy for all queues, as people set them
    await declare_levels(rabbitmq_url, V2)
    await api.set_policy(Policy("short", ".*", {"message-ttl": 60_000}, apply_to="queues"))
    found = by_name(await verify(api, V2))["policies"]
    assert not found.ok
    assert "policy 'short' sets message-ttl=60000 on nsb.v2.delay-level-27; " in found.text

    # When it is gone, all is well
    assert await api.delete_policy("short")
    assert by_name(await verify(api, V2))["policies"].ok
    assert not await api.delete_policy("short")


@pytest.mark.slow
async def test_due_messages_without_a_destination_are_found_and_gone_once_there_is_one(
    api: ManagementApi, channel: AbstractChannel, rabbitmq_url: str
) -> None:
    # Given a level that works
    await declare_levels(rabbitmq_url, V2)
    assert by_name(await examine(api, V2))["due messages"].ok

    # When messages come due whose destination is not bound
    for _ in range(3):
        exchange, key = V2.route(1, "deleted")
        await channel.basic_publish(b"", exchange=exchange, routing_key=key)

    # Then they are counted
    found = await due_messages(api, ok=False)
    assert found.text.startswith("3 in nsb.v2.delay-level-00 have no destination")

    # And once it is there again, all is well
    await channel.queue_declare("deleted", durable=True)
    await channel.queue_bind("deleted", V2.delivery, routing_key="#.deleted")
    assert await due_messages(api, ok=True)


class BetweenLooks(SystemClock):
    """Does something instead of each sleep."""

    def __init__(self, act: Callable[[], Awaitable[None]]) -> None:
        self.slept: list[float] = []
        self._act = act

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self._act()


@pytest.mark.slow
async def test_due_messages_on_their_way_are_not_taken_for_hanging(
    api: ManagementApi, channel: AbstractChannel, rabbitmq_url: str
) -> None:
    """Given due messages in each look, when some of them have left in between, then they do not hang.

    But whoever is about to give the level up is told of those that were there all the time.
    """
    await declare_levels(rabbitmq_url, V2)
    await channel.queue_declare("sales", durable=True)
    exchange, key = V2.route(1, "sales")

    async def due(number: int) -> None:
        for _ in range(number):
            await channel.basic_publish(b"", exchange=exchange, routing_key=key)
        await until(number)

    async def until(number: int) -> None:
        async def are_due() -> bool:
            return (await api.queues())[V2.level(0)].undeliverable == number

        await eventually_async(are_due, f"{number} due messages")

    async def replace_them() -> None:
        await channel.queue_bind("sales", V2.delivery, routing_key="#.sales")
        await until(0)
        await channel.queue_unbind("sales", V2.delivery, routing_key="#.sales")
        await due(1)

    await due(3)
    clock = BetweenLooks(replace_them)
    assert by_name(await examine(api, V2, clock))["due messages"].ok
    # RabbitMQ counts them every five seconds by default
    assert len(clock.slept) == 1
    assert clock.slept[0] > 5
    assert await blocked(api, V2, clock) == {V2.level(0): 1}


async def test_messages_that_wait_are_not_taken_for_stuck(
    api: ManagementApi, channel: AbstractChannel, rabbitmq_url: str
) -> None:
    await declare_levels(rabbitmq_url, V2)
    exchange, key = V2.route(1000, "sales")
    await channel.basic_publish(b"", exchange=exchange, routing_key=key)
    assert by_name(await examine(api, V2, ManualClock()))["due messages"].ok


async def test_names_that_cross_are_found(api: ManagementApi, channel: AbstractChannel, rabbitmq_url: str) -> None:
    await declare_levels(rabbitmq_url, V2)
    for name in ("Sales", "Contoso.Sales", "Billing"):
        await channel.queue_declare(name, durable=True)
        await channel.queue_bind(name, V2.delivery, routing_key=f"#.{name}")
    assert destinations(V2, await api.bindings()) == ["Billing", "Contoso.Sales", "Sales"]
    found = by_name(await examine(api, V2))["names"]
    assert not found.ok
    assert "'Sales' also gets those for 'Contoso.Sales'." in found.text


async def test_without_the_plugin_the_error_names_the_command_that_enables_it(rabbitmq_url: str) -> None:
    async with ManagementApi(BrokerAddress.parse(rabbitmq_url), "http://127.0.0.1:1") as api:
        with pytest.raises(BackendUnavailable, match="rabbitmq-plugins enable rabbitmq_management"):
            await api.version()


async def test_a_wrong_password_is_reported_with_the_user_only(rabbitmq: RabbitmqServer, rabbitmq_url: str) -> None:
    address = replace(BrokerAddress.parse(rabbitmq_url), password="wrong-secret")  # noqa: S106 - it is wrong
    async with ManagementApi(address, rabbitmq.management_url) as api:
        with pytest.raises(BackendUnusable, match="refuses user 'guest'") as caught:
            await api.version()
    assert "wrong-secret" not in str(caught.value)


async def test_a_user_without_the_tag_gets_the_missing_right(rabbitmq: RabbitmqServer, rabbitmq_url: str) -> None:
    address = BrokerAddress.parse(rabbitmq.new_user(rabbitmq_url))
    async with ManagementApi(address, rabbitmq.management_url) as api:
        with pytest.raises(BackendUnusable, match="needs the tag management, to set policies policymaker"):
            await api.version()


async def test_a_virtual_host_that_is_not_there_is_named(rabbitmq: RabbitmqServer, rabbitmq_url: str) -> None:
    address = replace(BrokerAddress.parse(rabbitmq_url), vhost="nowhere/at all")
    async with ManagementApi(address, rabbitmq.management_url) as api:
        with pytest.raises(BackendUnusable, match="no virtual host 'nowhere/at all'"):
            await api.queues()


@pytest.mark.parametrize(
    ("text", "version"), [("3.10.8", (3, 10, 8)), ("4.1.0-rc.2", (4, 1, 0)), ("3.9", (3, 9, 0)), ("", (0, 0, 0))]
)
def test_versions_are_compared_as_numbers(text: str, version: tuple[int, int, int]) -> None:
    assert version_of(text) == version


@pytest.mark.parametrize("version", ["3.9.27", "2.8", "unknown"])
def test_a_broker_that_is_too_old_is_reported(version: str) -> None:
    assert check_version(version) == Check(
        "version",
        ok=False,
        text=f"An unsupported broker version was detected: {version}. The broker must be at least version 3.10.0.",
    )


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.skipif("RabbitmqServer.version() >= (4,)", reason="RabbitMQ 4 cannot be without these feature flags")
async def test_a_feature_flag_that_is_off_is_reported() -> None:
    # Given an upgraded broker without the feature flags
    with running(RabbitmqServer, feature_flags="quorum_queue,virtual_host_metadata") as server:
        async with ManagementApi(BrokerAddress.parse(server.new_vhost()), server.management_url) as api:
            found = by_name(await verify(api, V2))["feature flag"]
            assert not found.ok
            assert "The 'stream_queue' feature flag needs to be enabled." in found.text

            # When it is enabled as the text says, all is well
            await asyncio.to_thread(server.control, *found.text.rpartition("rabbitmqctl ")[2].split())
            assert by_name(await verify(api, V2))["feature flag"].ok
