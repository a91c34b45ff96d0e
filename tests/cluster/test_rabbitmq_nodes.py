"""A cluster of three RabbitMQ nodes: the client's node is killed, and the client goes on at another one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.cluster.test_rabbitmq import Handled, sales, send_surely
from tests.conftest import newer, not_installed
from tests.servers.programs import CONFIGURED
from tests.servers.rabbitmq import RabbitmqCluster, RabbitmqServer

from delayline import BackendUnavailable
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.admin.management_api import ManagementApi

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Seconds in which sends go on. A busy machine takes longer to elect the queues' new leaders.
GOES_ON = 25.0
PATIENCE = 120.0


@pytest.fixture(params=[3, pytest.param(4, marks=pytest.mark.newer_server)])
def cluster(request: pytest.FixtureRequest) -> Iterator[RabbitmqCluster]:
    """Provide a cluster of the configured programs, and one of RabbitMQ 4 or newer."""
    if request.param == 3 and not RabbitmqServer.installed():
        not_installed(f"RabbitMQ of {CONFIGURED}", RabbitmqServer.install)
    with contextlib.closing(RabbitmqCluster(CONFIGURED if request.param == 3 else newer(RabbitmqServer, 4))) as cluster:
        yield cluster


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
        await handled.all_of({"after", *ids}, within=PATIENCE)
    assert min(handled.lateness) >= 0
    assert went_on < GOES_ON

    async with ManagementApi(BrokerAddress.parse(cluster.url)) as api:
        assert "sales" in await api.queues()
