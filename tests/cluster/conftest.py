"""Clusters of real processes, every one of which ends with its test."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # for `tests.cluster.harness`, however pytest was started

from tests.cluster.harness import Cluster, WorkerFactory
from tests.conftest import running
from tests.servers.mariadb import MariadbServer
from tests.servers.postgresql import PostgresqlServer

from delayline import Endpoint, StoredDelivery
from delayline.spi import DelayedDelivery
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.timeouts import SqlTimeoutPersister, TimeoutManagerDelivery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def factory() -> Iterator[WorkerFactory]:
    factory = WorkerFactory()
    yield factory
    factory.close()


@pytest.fixture
def make_cluster(factory: WorkerFactory, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Return a function that sets a cluster up: `make_cluster(mode, layout, databases=[...])`."""
    made: list[Cluster] = []

    def make(
        mode: str = "TRANSACTION_SCOPE",
        layout: str = "one file",
        databases: Sequence[str] = (),
        delivery: str = "store",
    ) -> Cluster:
        cluster = Cluster(factory, tmp_path, mode, layout, databases=databases, delivery=delivery)
        made.append(cluster)
        asyncio.run(set_up(cluster))
        return cluster

    yield make
    for cluster in made:
        cluster.close()


async def set_up(cluster: Cluster) -> None:
    transport = SqlTransport(cluster.queues_url)
    delivery: DelayedDelivery | None = None
    if cluster.delivery == "timeouts":
        delivery = TimeoutManagerDelivery(SqlTimeoutPersister(cluster.store_url))
    elif cluster.layout != "no store":
        delivery = StoredDelivery(SqlDelayedMessageStore(cluster.store_url))
    await Endpoint("orders", transport=transport, delayed_delivery=delivery).setup()
    await transport.setup_infrastructure(["results"])


@pytest.fixture(params=["postgresql", "mariadb"])
def crashing(request: pytest.FixtureRequest) -> Iterator[PostgresqlServer | MariadbServer]:
    """Provide a server of one's own of either kind, to be crashed."""
    if request.param == "postgresql":
        with running(PostgresqlServer, "fsync=off") as server:
            yield server
    else:
        with running(MariadbServer, "innodb_flush_log_at_trx_commit=2") as other:
            yield other
