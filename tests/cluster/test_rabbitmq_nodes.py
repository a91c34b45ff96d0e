"""A cluster of three RabbitMQ nodes: the client's node is killed, and the client goes on at another one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cluster.test_rabbitmq import Handled, sales, send_surely
from tests.conftest import newer, not_installed
from tests.servers.programs import CONFIGURED
from tests.servers.rabbitmq import RabbitmqCluster, RabbitmqServer

from delayline import BackendUnavailable
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.admin.management_api import ManagementApi
from delayline.rabbitmq.admin.verification import SENDS_ON_AFTER_A_LOSS, Check, examine
from delayline.rabbitmq.infrastructure import DelayInfrastructure

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Seconds in which sends go on. A busy machine takes longer to elect the queues' new leaders.
GOES_ON = 25.0
PATIENCE = 120.0
LEVEL = DelayInfrastructure.v2().level(0)


@pytest.fixture(params=[3, pytest.param(4, marks=pytest.mark.newer_server)])
def cluster(request: pytest.FixtureRequest) -> Iterator[RabbitmqCluster]:
    """Provide a cluster of the configured programs, and one of RabbitMQ 4 or newer."""
    if request.param == 3 and not RabbitmqServer.installed():
        not_installed(f"RabbitMQ of {CONFIGURED}", RabbitmqServer.install)
    with contextlib.closing(RabbitmqCluster(CONFIGURED if request.param == 3 else newer(RabbitmqServer, 4))) as cluster:
        yield cluster


def sends_on_after_a_loss(cluster: RabbitmqCluster) -> bool:
    """Return whether levels of this version may hang until the lost node runs again."""
    return RabbitmqServer.version(cluster.nodes[0].programs) < SENDS_ON_AFTER_A_LOSS


def leader_here(url: str, queue: str) -> str:
    """Return what moves a quorum queue's leader to the node that evaluates it, as the administration page has it."""
    page = (Path(__file__).parents[2] / "docs/how-to/rabbitmq-administration.md").read_text()
    command = next(line for line in page.splitlines() if "transfer_leadership" in line)
    erlang = command.removeprefix("$ rabbitmqctl eval '").removesuffix("'")
    return erlang.replace("orders", BrokerAddress.parse(url).vhost).replace("nsb.v2.delay-level-00", queue)


async def due_messages_that_hang(url: str) -> Check:
    """Look until there are due messages that stay in their level, and return what is said of them."""
    async with asyncio.timeout(PATIENCE), ManagementApi(BrokerAddress.parse(url)) as api:
        while True:
            checks = {check.what: check for check in await examine(api, DelayInfrastructure.v2())}
            if not checks["due messages"].ok:
                return checks["due messages"]


@pytest.mark.server
@pytest.mark.slow
async def test_the_clients_node_is_killed(cluster: RabbitmqCluster) -> None:
    """Given messages that wait and are sent, when the node of all connections dies, then none is lost or early."""
    endpoint = sales(cluster.url)
    handled = Handled(endpoint)
    ids = {f"m{number}": number % 8 for number in range(200)}
    async with endpoint:
        await asyncio.gather(*(send_surely(endpoint, *one) for one in list(ids.items())[:100]))
        sends = asyncio.gather(*(send_surely(endpoint, *one) for one in list(ids.items())[100:]))
        await asyncio.to_thread(cluster.nodes[0].kill)
        killed = time.monotonic()
        while True:
            with contextlib.suppress(BackendUnavailable):
                await endpoint.send("sales", b"", message_id="after", delay=timedelta(seconds=1))
                break
            await asyncio.sleep(0.05)
        went_on = time.monotonic() - killed
        await sends
        if sends_on_after_a_loss(cluster):
            await asyncio.to_thread(cluster.nodes[0].start)
        await handled.all_of({"after", *ids}, within=PATIENCE)
    assert min(handled.lateness) >= 0
    assert went_on < GOES_ON

    async with ManagementApi(BrokerAddress.parse(cluster.url)) as api:
        assert "sales" in await api.queues()


@pytest.mark.server
@pytest.mark.slow
async def test_a_destination_elects_its_leader_after_the_levels(cluster: RabbitmqCluster) -> None:
    """Given due messages whose destination has no leader yet, when it has one, then all arrive, none early.

    Before RabbitMQ 4 they hang in their level, and the finding says why, until the level has another leader.
    """
    endpoint = sales(cluster.url)
    handled = Handled(endpoint)
    lost, *others = cluster.nodes
    ids = {f"m{number}" for number in range(20)}
    async with endpoint:
        for node in others:
            await asyncio.to_thread(node.halt_replica, cluster.url, "sales")
        await asyncio.gather(*(send_surely(endpoint, message_id, 1) for message_id in ids))
        await asyncio.to_thread(lost.kill)
        await due_messages_that_hang(cluster.url)
        for node in others:
            await asyncio.to_thread(node.resume_replica, cluster.url, "sales")
        await send_surely(endpoint, "at once", 0)
        await handled.all_of({"at once"}, within=PATIENCE)

        if sends_on_after_a_loss(cluster):
            assert f"hang, and {lost.node} does not run" in (await due_messages_that_hang(cluster.url)).text
            moved = [await asyncio.to_thread(node.control, "eval", leader_here(cluster.url, LEVEL)) for node in others]
            assert any("{migrated," in answer for answer in moved), moved
        await handled.all_of(ids, within=PATIENCE)
    assert min(handled.lateness) >= 0
