"""The timeout manager's rows of the guarantees hold while processes are killed."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from tests.cluster.harness import new_seed
from tests.cluster.test_guarantees import must_keep
from tests.cluster.test_steps import name_of, steps
from tests.eventually import PATIENCE, eventually

from delayline import Guarantee, Headers, Message, TransactionMode, guarantee
from delayline.message import to_wire_time
from delayline.sql import SqlTransport
from delayline.timeouts import SqlTimeoutPersister, Timeout, TimeoutManagerDelivery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.cluster.harness import Cluster, Step
    from tests.servers.postgresql import PostgresqlServer

MESSAGES = 120
HAVOC = 1.6  # seconds of killing
POSTS = ["poller", "poller", "receiver", "receiver"]
#: The storing satellite takes a message off the queue and stores it.
STORING_APART = steps(("transport", "receive"), ("transport", "acknowledge"), ("store", "add"))
STORING = STORING_APART + steps(("transport", "commit"))
#: Where queues and storage are in one database the poller sends and removes it: by itself, or the server does.
SENDING = steps(("store", "lock_due"), ("transport", "dispatch"), ("store", "remove_many"), ("store", "commit"))
MOVING = steps(("store", "forward_due"))
#: Where that cannot be, the poller asks for it, and the dispatching satellite sends and removes it.
ASKING = steps(
    ("store", "next_chunk"),
    ("transport", "dispatch"),
    ("store", "commit"),
    ("store", "take"),
    ("transport", "acknowledge"),
)


def promised(layout: str, mode: str, folder: Path) -> Guarantee:
    queues, other = f"sqlite:///{folder}/delayline.db", f"sqlite:///{folder}/store.db"
    delivery = TimeoutManagerDelivery(SqlTimeoutPersister(queues if layout == "one file" else other))
    return guarantee(SqlTransport(queues), delivery, TransactionMode[mode])


ROWS = [
    (layout, mode.name)
    for layout in ("one file", "two files")
    for mode in TransactionMode
    if (layout, mode) != ("two files", TransactionMode.TRANSACTION_SCOPE)
]


@pytest.mark.parametrize(("layout", "mode"), ROWS)
@pytest.mark.sample(3)
def test_the_guarantees_hold(make_cluster: Callable[..., Cluster], layout: str, mode: str, tmp_path: Path) -> None:
    # Given a sender, two timeout managers and receivers
    row = promised(layout, mode, tmp_path)
    cluster = make_cluster(mode, layout, delivery="timeouts")
    chance = random.Random(new_seed())  # noqa: S311 - repeatable
    sender = cluster.send(MESSAGES, delays=(0.2, HAVOC))
    # When all but the sender are killed, again and again
    cluster.havoc(chance, POSTS, HAVOC)
    assert sender.ended(PATIENCE)
    cluster.finish()
    # Then
    must_keep(row, cluster, MESSAGES)


@pytest.fixture
def another_postgresql_url(postgresql: PostgresqlServer) -> Iterator[str]:
    url = postgresql.new_database()
    yield url
    postgresql.drop_database(url)


def killed_at(cluster: Cluster, step: Step, *, exactly_once: bool) -> None:
    """Kill a timeout manager; each message is stored or in its queue then, in both only where that was promised."""
    inside = step in MOVING  # where only the transport's own class will do
    killed = cluster.start("poller", faults=[step], batch_size=5, plain_transport=inside)
    assert killed.ended(PATIENCE), f"was not killed {name_of(step)}"
    # The server may still commit requests of the process between two checks.
    eventually(lambda: set(places_of(cluster)) == cluster.sent(), f"all to be somewhere; killed {name_of(step)}")
    assert not exactly_once or max(places_of(cluster).values()) == 1, f"killed {name_of(step)}"


def places_of(cluster: Cluster) -> Counter[str]:
    """In how many places each message is that has not arrived."""
    return Counter(cluster.stored() + cluster.queued("orders"))


async def store_due(cluster: Cluster, numbers: range) -> None:
    """Store messages that are due already, as if they had been sent before."""
    persister, due = SqlTimeoutPersister(cluster.store_url), datetime.now(UTC)
    await persister.open("orders")
    async with persister.transaction() as transaction:
        for name in map(str, numbers):
            message = Message(name, {Headers.MESSAGE_ID: name, Headers.DELIVER_AT: to_wire_time(due)}, b"body")
            await persister.add(Timeout(str(uuid.uuid4()), message, "orders", due), transaction)
    await persister.close()
    with (cluster.folder / "journal").open("a") as journal:
        journal.writelines(f"sent {number}\n" for number in numbers)


@pytest.mark.parametrize(
    ("product", "databases", "storing", "leaving"),
    [("postgresql", 1, STORING, MOVING), ("mariadb", 1, [], SENDING), ("postgresql", 2, STORING_APART, ASKING)],
    ids=["one database of PostgreSQL", "one database of MariaDB", "two databases"],
)
@pytest.mark.sample(1)
def test_a_timeout_manager_killed_at_every_step(
    make_cluster: Callable[..., Cluster],
    product: str,
    databases: int,
    storing: list[Step],
    leaving: list[Step],
    request: pytest.FixtureRequest,
) -> None:
    # Given messages on their way to the storage, in the database of the queues or in another one
    urls = [request.getfixturevalue(name) for name in (f"{product}_url", "another_postgresql_url")[:databases]]
    mode = "TRANSACTION_SCOPE" if databases == 1 else "SENDS_ATOMIC_WITH_RECEIVE"
    cluster = make_cluster(mode, databases=urls, delivery="timeouts")
    cluster.send_all(MESSAGES, delays=(600, 601))
    for step in storing:
        # When a timeout manager is killed at this step
        killed_at(cluster, step, exactly_once=databases == 1)
    # Given as many that are stored, and due
    due = range(MESSAGES, 2 * MESSAGES)
    asyncio.run(store_due(cluster, due))
    for step in leaving:
        # When a timeout manager is killed at this step
        killed_at(cluster, step, exactly_once=databases == 1)
    # And others finish the work
    cluster.start("poller")
    cluster.start("receiver")
    eventually(lambda: set(map(str, due)) <= set(cluster.results()), "what was due to arrive", 90)
    assert databases == 2 or max(cluster.results().values()) == 1
    assert cluster.early() == []


@pytest.mark.parametrize("product", ["postgresql", "mariadb"])
@pytest.mark.sample(1)
def test_timeout_managers_killed_at_random_on_a_server(
    make_cluster: Callable[..., Cluster], product: str, request: pytest.FixtureRequest
) -> None:
    cluster = make_cluster(databases=[request.getfixturevalue(f"{product}_url")], delivery="timeouts")
    chance = random.Random(new_seed())  # noqa: S311 - repeatable
    sender = cluster.send(MESSAGES, delays=(0.2, HAVOC))
    cluster.havoc(chance, POSTS, HAVOC)
    assert sender.ended(PATIENCE)
    cluster.finish()
    assert set(cluster.results()) == cluster.sent()
    assert max(cluster.results().values()) == 1
    assert cluster.early() == []
