"""Azure Storage with real processes: the lease of one that is killed passes on, and nothing is lost on the way."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from azure.data.tables import TableClient
from azure.storage.queue import QueueClient
from tests.cluster.harness import LEAST_KILLS, Cluster, new_seed
from tests.eventually import PATIENCE, eventually

from delayline import Endpoint, Message, TransactionMode
from delayline.azure import AzureAccount, AzureDelayedTable, AzureStorageQueueTransport, DelayedTableDelivery
from delayline.azure.envelope import unwrap
from delayline.azure.names import delays_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.cluster.harness import WorkerFactory

BURST = 5000
FAILOVER = 20.0  # seconds: a lease of 15, and the delays of a busy machine


@pytest.fixture
def cluster(factory: WorkerFactory, tmp_path: Path, azure_url: str) -> Iterator[Cluster]:
    cluster = Cluster(factory, tmp_path, TransactionMode.RECEIVE_ONLY.name, databases=[azure_url])
    asyncio.run(set_up(azure_url))
    yield cluster
    cluster.close()


async def set_up(url: str) -> None:
    account = AzureAccount(url)
    transport = AzureStorageQueueTransport(account)
    await Endpoint("orders", transport=transport, delayed_delivery=DelayedTableDelivery(account)).setup()
    await transport.setup_infrastructure(["results"])


def fill(url: str, number: int, due: datetime) -> None:
    """Store messages as a .NET instance of the endpoint does."""
    rows = [
        {
            "PartitionKey": f"{due:%Y%m%d%H}",
            "RowKey": f"{due:%Y%m%d%H%M%S}_{n:032x}",
            "Destination": "orders",
            "Body": b"body",
            "MessageId": str(n),
            "Headers": "{}",
        }
        for n in range(number)
    ]
    with TableClient.from_connection_string(url.partition(":")[2], delays_name("orders")) as table:
        for first in range(0, number, 100):
            table.submit_transaction([("create", row) for row in rows[first : first + 100]])


async def waiting(url: str) -> int:
    store = AzureDelayedTable(url)
    await store.initialize("orders", TransactionMode.RECEIVE_ONLY)
    number = sum(one.count for one in await store.count_by_due(timedelta(days=1)))
    await store.close()
    return number


def drained(url: str, queue: str, identify: Callable[[Message], str]) -> Counter[str]:
    """Take everything out of a queue."""
    with QueueClient.from_connection_string(url.partition(":")[2], queue) as client:
        pages = client.receive_messages(messages_per_page=32, visibility_timeout=600)
        return Counter(identify(unwrap(one.id, one.content)) for one in pages)


def dispatched(cluster: Cluster) -> int:
    return sum(int(words[2]) for words in cluster.journal("dispatched"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.long
def test_the_lease_of_a_killed_poller_passes_on_in_the_middle_of_a_burst(cluster: Cluster, azure_url: str) -> None:
    # Given more messages due at once than fit into a page, and two pollers
    fill(azure_url, BURST, datetime.now(UTC))
    pollers = [cluster.start("poller", notes_dispatches=True, batch_size=100) for _ in range(2)]
    by_pid = {worker.pid: worker for worker in pollers}
    eventually(lambda: len(cluster.journal("dispatched")) >= 5, f"dispatches; {cluster.log()}")
    # When the one that dispatches is killed
    holder = int(cluster.journal("dispatched")[-1][1])
    by_pid[holder].kill()
    killed = time.monotonic()
    # Then the other one takes over, and alone
    eventually(lambda: int(cluster.journal("dispatched")[-1][1]) != holder, f"a takeover; {cluster.log()}")
    taken_over = float(cluster.journal("dispatched")[-1][3]) - killed
    print(f"taken over after {taken_over:.1f} s")  # noqa: T201
    assert taken_over < FAILOVER
    turns = [words[1] for words in cluster.journal("dispatched")]
    assert turns == sorted(turns, key=lambda pid: int(pid) != holder), "two dispatched at the same time"
    eventually(lambda: dispatched(cluster) >= BURST, f"all to leave; {cluster.log()}", patience=200)
    eventually(lambda: asyncio.run(waiting(azure_url)) == 0, f"the rest to leave; {cluster.log()}")
    arrived = drained(azure_url, "orders", lambda message: message.id)
    assert set(arrived) == {str(number) for number in range(BURST)}
    doubled = arrived.total() - len(arrived)
    assert doubled <= 100, "more than the batch that the killed one had in hand"


@pytest.mark.slow
def test_nothing_is_lost_and_nothing_early_while_processes_are_killed(cluster: Cluster, azure_url: str) -> None:
    # Given a sender, pollers and receivers
    chance = random.Random(new_seed())  # noqa: S311 - repeatable
    sender = cluster.send(60, delays=(0.2, 2.0))
    # When all but the sender are killed, again and again
    cluster.havoc(chance, ["poller", "receiver", "receiver"], 4.0)
    assert sender.ended(PATIENCE), cluster.log()
    # Then each has its effect: one whose process was killed after it was handled comes again when it is visible again
    sent = cluster.sent()
    effects: Counter[str] = Counter()

    def all_have_effects() -> bool:
        effects.update(drained(azure_url, "results", lambda message: message.body.decode()))
        return set(effects) >= sent

    try:
        eventually(all_have_effects, f"all to be handled; {cluster.log()}", patience=60)
    finally:
        failed = drained(azure_url, "error", lambda message: message.body.decode())
        print(f"without effect: {sent - set(effects)}, in the error queue: {dict(failed)}")  # noqa: T201
    for worker in cluster.workers:
        if not worker.ended():
            worker.stop()
    assert len(sent) == 60
    assert set(effects) == sent
    assert cluster.early() == []
    assert cluster.kills.total() >= LEAST_KILLS


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["poller", "receiver"])
@pytest.mark.sample(1)
def test_best_effort_loses_nothing_on_its_way_and_doubles_nothing_in_its_handler(
    cluster: Cluster, azure_url: str, killed: str
) -> None:
    # Given no guarantee while a message is handled
    cluster.mode = TransactionMode.NONE.name
    chance = random.Random(new_seed())  # noqa: S311 - repeatable
    cluster.start("receiver" if killed == "poller" else "poller")
    sender = cluster.send(40, delays=(0.2, 5.0))  # some fall due when the killing is over
    # When only the one kind of process is killed
    cluster.havoc(chance, [killed], 3.0, work=0.005)
    assert sender.ended(PATIENCE), cluster.log()
    # Then
    eventually(lambda: asyncio.run(waiting(azure_url)) == 0, f"all to leave; {cluster.log()}", patience=60)
    if killed == "poller":
        eventually(lambda: set(cluster.handled()) == cluster.sent(), f"all to be handled; {cluster.log()}")
    else:
        eventually(lambda: len(cluster.handled()) > 0, f"some to be handled; {cluster.log()}")
        assert max(cluster.handled().values()) == 1
    assert cluster.early() == []
