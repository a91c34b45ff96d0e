"""Database servers: processes killed, connections ended, the server crashed; nothing is lost, doubled or early."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.cluster.harness import LEAST_KILLS, new_seed
from tests.cluster.test_steps import IN_HANDLER, POLLER_ONE_FILE, POLLER_TWO_FILES, RECEIVER_ONE_FILE, waits_or_left
from tests.eventually import PATIENCE, eventually
from tests.servers.mariadb import MariadbServer
from tests.servers.postgresql import PostgresqlServer

from delayline import SqlDelayedMessageStore, TransactionMode
from delayline.message import Headers, to_wire_time
from delayline.testing.conformance.messages import delayed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.cluster.harness import Cluster

MESSAGES = 220
HALF = 5_000  # of what falls due around a crash and a restart
HAVOC = 2.0


@pytest.fixture
def two(postgresql: PostgresqlServer) -> Iterator[list[str]]:
    """Provide two databases of one server."""
    urls = [postgresql.new_database() for _ in range(2)]
    yield urls
    for url in urls:
        postgresql.drop_database(url)


@pytest.fixture(params=["postgresql", "mariadb"])
def server_url(request: pytest.FixtureRequest) -> str:
    """Provide an empty database on a server of either kind."""
    return str(request.getfixturevalue(f"{request.param}_url"))


def all_arrived_once(cluster: Cluster) -> None:
    assert set(cluster.results()) == cluster.sent()
    assert max(cluster.results().values()) == 1
    assert cluster.early() == []


@pytest.mark.sample(1)
def test_a_poller_killed_at_every_step(make_cluster: Callable[..., Cluster], server_url: str) -> None:
    # Given a backlog in one database
    cluster = make_cluster(databases=[server_url])
    cluster.send_all(MESSAGES)
    plan: list[dict[str, Any]] = [{"faults": [step]} for step in POLLER_ONE_FILE]
    plan += [{"die_in_move": step} for step in ("before move", "after move", "after commit")]
    for settings in plan:
        before = len(cluster.stored())
        # When a poller is killed at this step
        assert cluster.start("poller", **settings).ended(PATIENCE), f"was not killed: {settings}"
        # Then every message is in exactly one place
        assert waits_or_left(cluster) == (MESSAGES, MESSAGES), settings
        # And batches committed before the end have moved: whole ones, and two with this one
        if settings.get("die_in_move") == "after commit":
            assert before - len(cluster.stored()) == 2 * 10, settings
    assert cluster.stored(), "the backlog was too small for all these steps"
    # And another poller finishes the work
    cluster.start("poller")
    cluster.start("receiver")
    cluster.finish()
    all_arrived_once(cluster)


@pytest.mark.slow
def test_a_poller_killed_at_every_step_over_two_databases(make_cluster: Callable[..., Cluster], two: list[str]) -> None:
    cluster = make_cluster("RECEIVE_ONLY", "two databases", databases=two)
    cluster.send_all(MESSAGES)
    copies = MESSAGES
    for step in POLLER_TWO_FILES:
        assert cluster.start("poller", faults=[step]).ended(PATIENCE), f"was not killed: {step}"
        messages, now = waits_or_left(cluster)
        assert messages == MESSAGES, f"lost: {step}"
        assert now - copies <= 10, f"more than a batch doubled: {step}"
        copies = now
    cluster.start("poller")
    cluster.start("receiver")
    cluster.finish()
    assert set(cluster.results()) == cluster.sent()
    assert cluster.early() == []


@pytest.mark.sample(1)
def test_a_receiver_killed_at_every_step(make_cluster: Callable[..., Cluster], server_url: str) -> None:
    # Given messages in a queue
    cluster = make_cluster(databases=[server_url])
    cluster.send_all(MESSAGES, delays=None)
    for settings in [*({"faults": [step]} for step in RECEIVER_ONE_FILE), IN_HANDLER]:
        # When a receiver is killed at this step
        assert cluster.start("receiver", **settings).ended(PATIENCE), f"was not killed: {settings}"
        # Then each message is in its queue or has had its effect
        waiting, effects = cluster.queued("orders"), cluster.results()
        assert Counter(waiting) + effects == Counter(cluster.sent()), settings
    # And another receiver finishes the work
    cluster.start("receiver")
    cluster.finish()
    all_arrived_once(cluster)


@pytest.mark.sample(1)
def test_processes_killed_at_random(make_cluster: Callable[..., Cluster], server_url: str) -> None:
    cluster = make_cluster(databases=[server_url])
    chance = random.Random(new_seed())  # noqa: S311 - repeatable
    sender = cluster.send(MESSAGES, delays=(0.2, HAVOC))
    cluster.havoc(chance, ["poller", "poller", "receiver", "receiver"], HAVOC)
    assert sender.ended(PATIENCE)
    cluster.finish()
    assert cluster.kills.total() >= LEAST_KILLS
    all_arrived_once(cluster)


@pytest.mark.slow
def test_connections_ended_at_random(
    make_cluster: Callable[..., Cluster], postgresql: PostgresqlServer, postgresql_url: str
) -> None:
    # Given pollers, receivers and a sender
    cluster = make_cluster(databases=[postgresql_url])
    chance = random.Random(new_seed())  # noqa: S311 - repeatable
    for role in ("poller", "poller", "receiver", "receiver"):
        cluster.start(role)
    cluster.running(4)
    sender = cluster.send(600, delays=(0.2, 2 * HAVOC))
    eventually(lambda: cluster.journal("trying"))
    # When connections of any kind are ended, again and again
    ended, deadline = 0, time.monotonic() + 2 * HAVOC
    with postgresql.administrator(postgresql_url.rsplit("/", 1)[1]) as administrator:
        while time.monotonic() < deadline:
            time.sleep(0.05)
            found = administrator.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'delayline' "
                "AND datname = current_database() AND random() < %s",
                [chance.choice([0.1, 0.3, 1.0])],
            )
            ended += len(found.fetchall())
    assert sender.ended(PATIENCE)
    cluster.finish()
    # Then confirmed sends have arrived once, and sends with an unknown outcome once or never
    effects, sent, tried = cluster.results(), cluster.sent(), {words[1] for words in cluster.journal("trying")}
    print(f"{ended} connections ended, {len(sent)} of {len(tried)} sends returned")  # noqa: T201
    assert ended > 20
    assert sent
    assert sent <= set(effects) <= tried
    assert max(effects.values(), default=1) == 1
    assert cluster.early() == []


@pytest.mark.slow
def test_the_server_crashes_while_thousands_fall_due(
    make_cluster: Callable[..., Cluster], crashing: PostgresqlServer | MariadbServer
) -> None:
    # Given pollers and a receiver
    cluster = make_cluster(databases=[crashing.new_database()])
    for role in ("poller", "poller", "receiver"):
        cluster.start(role, batch_size=200)
    cluster.running(3)
    ends = crashes(crashing)
    for number, end in enumerate(ends):
        # When thousands of messages fall due together, and the server crashes in the middle of it, or is restarted
        store_many(cluster, range(number * HALF, number * HALF + HALF), seconds=0.3)
        eventually(lambda: len(cluster.stored()) < HALF - 200, "some to move")
        end()
        time.sleep(0.3)
        crashing.start()
        eventually(lambda: not cluster.stored(), "all to leave the store", 60)
    # Then every message has moved once, and the processes have continued without a restart
    assert all(not worker.ended() for worker in cluster.workers)
    arrived = cluster.arrived()
    assert len(arrived) == len(ends) * HALF
    assert max(arrived.values()) == 1
    assert cluster.early() == []


def crashes(server: PostgresqlServer | MariadbServer) -> list[Callable[[], None]]:
    """Return how to end the server: the hard way, and where that is quick, in order."""
    if isinstance(server, PostgresqlServer):
        return [partial(server.stop, "immediate"), partial(server.stop, "fast")]
    return [server.kill]


def store_many(cluster: Cluster, numbers: range, *, seconds: float) -> None:
    """Store messages that are due together, so many seconds from now."""
    due = datetime.now(UTC) + timedelta(seconds=seconds)

    async def store_them() -> None:
        store = SqlDelayedMessageStore(cluster.store_url)
        await store.initialize("orders", TransactionMode.RECEIVE_ONLY)
        headers = {Headers.DELIVER_AT: to_wire_time(due)}
        await store.store_many([delayed(str(number), due, destination="orders", headers=headers) for number in numbers])
        await store.close()

    asyncio.run(store_them())
