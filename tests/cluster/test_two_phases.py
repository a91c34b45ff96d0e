"""One transaction over two PostgreSQL databases: processes and servers killed at every step, 0 lost, 0 doubled."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool
from tests.cluster.harness import new_seed
from tests.conftest import running
from tests.eventually import PATIENCE, eventually
from tests.servers.postgresql import PostgresqlServer

from delayline import Endpoint, StoredDelivery, TransactionMode
from delayline.events import Event
from delayline.sql import SqlDelayedMessageStore, SqlTransport, TwoPhaseCommit
from delayline.sql.postgresql.two_phase import PostgresqlTwoPhase
from delayline.testing import Signals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from sqlalchemy import Connection


pytestmark = pytest.mark.cluster
MESSAGES = 120
DRIVERS = {"postgresql": "+psycopg://", "mariadb": "+pymysql://"}
SETTINGS = ["fsync=off", "max_prepared_transactions=50"]

WORKER = """
import asyncio, ctypes, os, signal, sys
from datetime import timedelta
from delayline import Endpoint, StoredDelivery, TransactionMode
from delayline.sql import SqlDelayedMessageStore, SqlTransport, TwoPhaseCommit
from delayline.sql.postgresql.two_phase import PostgresqlTwoPhase as Phases

queues, waiting, role, step = sys.argv[1:]
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
STEPS = {"before prepare": ("prepare", "before"), "after prepare": ("prepare", "after"),
         "after the decision": ("commit_prepared", "before"), "after the commit": ("commit_prepared", "after")}
if step:
    method, at = STEPS[step]
    original, calls = getattr(Phases, method), []
    def dying(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2 and at == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if len(calls) == 2 and at == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(Phases, method, dying)

async def main():
    both = TwoPhaseCommit()
    store = SqlDelayedMessageStore(waiting, two_phase=both)
    delivery = StoredDelivery(store, batch_size=10, polling=role == "poller")
    endpoint = Endpoint("orders", transport=SqlTransport(queues, two_phase=both), delayed_delivery=delivery,
                        transaction_mode=TransactionMode.TRANSACTION_SCOPE, concurrency=1)
    if role == "receiver":
        @endpoint.handler
        async def handle(message, context):
            await context.send("results", message.body)
            await context.send("results", message.body, delay=timedelta(days=1))
    async with endpoint:
        await endpoint.wait_stopped()

asyncio.run(main())
"""


@dataclass
class TwoServers:
    """Two databases on two servers, and the processes of the endpoint `orders` over them."""

    queues: str
    waiting: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def endpoint(self, *, polling: bool = False) -> Endpoint:
        both = TwoPhaseCommit()
        delivery = StoredDelivery(SqlDelayedMessageStore(self.waiting, two_phase=both), polling=polling)
        transport = SqlTransport(self.queues, two_phase=both)
        mode = TransactionMode.TRANSACTION_SCOPE
        return Endpoint("orders", transport=transport, delayed_delivery=delivery, transaction_mode=mode)

    async def send(self, number: int, delay: timedelta | None) -> None:
        async with self.endpoint() as endpoint:
            await endpoint.transport.setup_infrastructure(["results"])
            await asyncio.gather(*(endpoint.send("orders", f"{one}", delay=delay) for one in range(number)))

    def start(self, role: str, step: str = "") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", WORKER, self.queues, self.waiting, role, step]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def stored(self) -> list[str]:
        return bodies(self.waiting, """SELECT body FROM "orders.timeouts" WHERE destination = 'orders'""")

    def queued(self, queue: str = "orders") -> list[str]:
        return bodies(self.queues, f"SELECT body FROM delayline_messages WHERE queue = '{queue}'")  # noqa: S608 - ours

    def reminders(self) -> list[str]:
        return bodies(self.waiting, """SELECT body FROM "orders.timeouts" WHERE destination = 'results'""")

    def in_doubt(self) -> list[str]:
        return [gid for (gid,) in rows(self.waiting, "SELECT gid FROM pg_prepared_xacts")]

    def decisions(self) -> list[str]:
        return [name for (name,) in rows(self.queues, "SELECT id FROM delayline_decisions WHERE id <> 'log'")]


def rows(url: str, sql: str) -> Sequence[Any]:
    """Ask, and ask again while the server is away."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            with create_engine(
                url.replace("://", DRIVERS[url.split(":")[0]], 1), poolclass=NullPool
            ).connect() as asked:
                return asked.execute(text(sql)).all()
        except OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def bodies(url: str, sql: str) -> list[str]:
    return [bytes(body).decode() for (body,) in rows(url, sql)]


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[PostgresqlServer, PostgresqlServer]]:
    with running(PostgresqlServer, *SETTINGS) as one, running(PostgresqlServer, *SETTINGS) as other:
        yield one, other


@pytest.fixture
def two(servers: tuple[PostgresqlServer, PostgresqlServer]) -> Iterator[TwoServers]:
    one, other = servers
    first, second = one.new_database(), other.new_database()
    two = TwoServers(first, second)
    yield two
    two.close()
    with contextlib.suppress(psycopg.Error):  # where a failing test has left something in doubt
        one.drop_database(first)
        other.drop_database(second)


STEPS = {
    "before prepare": False,
    "after prepare": True,
    "after the decision": True,
    "after the commit": False,
}


@pytest.mark.parametrize("role", ["poller", "receiver"])
@pytest.mark.parametrize("queues_in", ["PostgreSQL", "MariaDB"])
@pytest.mark.sample(1)
async def test_killed_at_every_step(two: TwoServers, role: str, queues_in: str, request: pytest.FixtureRequest) -> None:
    """Given messages, when a process is killed at a step of a transaction, then an endpoint's start mends it."""
    if queues_in == "MariaDB":
        two.queues = request.getfixturevalue("mariadb_url")
    await two.send(MESSAGES, timedelta(seconds=1) if role == "poller" else None)
    everybody = sorted(f"{number}" for number in range(MESSAGES))
    for step, doubtful in STEPS.items():
        killed = two.start(role, step)
        assert await asyncio.to_thread(killed.wait, PATIENCE) == -signal.SIGKILL, killed.stderr and killed.stderr.read()
        assert bool(two.in_doubt()) == doubtful, step
        # When an endpoint starts
        async with two.endpoint():
            # Then nothing is in doubt any more, and everything is in exactly one place
            assert two.in_doubt() == [], step
            assert sorted(two.stored() + two.queued() + two.queued("results")) == everybody, step
            assert sorted(two.queued("results")) == sorted(two.reminders()), step
    assert two.decisions() == []
    for one in ("poller", "receiver"):
        two.start(one)
    await asyncio.to_thread(eventually, lambda: not two.stored() and not two.queued(), "all to arrive")
    assert sorted(two.queued("results")) == sorted(two.reminders()) == everybody


@pytest.mark.slow
async def test_a_running_endpoint_settles_transactions_of_a_killed_process(two: TwoServers) -> None:
    """Given a running endpoint, when another process is killed with a transaction prepared, then it is settled soon."""
    await two.send(MESSAGES, timedelta(seconds=1))
    async with two.endpoint():
        with Signals() as signals:
            assert await asyncio.to_thread(two.start("poller", "after the decision").wait, PATIENCE)
            assert two.in_doubt()
            await signals.wait_for(Event.SETTLED, timeout=PATIENCE)
        assert two.in_doubt() == []
        assert len(set(two.stored() + two.queued())) == len(two.stored() + two.queued()) == MESSAGES


@pytest.mark.long
async def test_killed_at_random(two: TwoServers) -> None:
    """Given pollers and receivers, when they are killed again and again, then each message has its effect once."""
    chance = random.Random(new_seed())  # noqa: S311 - no secret
    await two.send(MESSAGES * 5, timedelta(seconds=1))
    posts = [(role, two.start(role)) for role in ("poller", "poller", "receiver", "receiver")]
    deadline = time.monotonic() + 12
    while time.monotonic() < deadline and (two.stored() or two.queued()):
        await asyncio.sleep(chance.uniform(0.4, 1.2))
        number = chance.randrange(len(posts))
        role, process = posts[number]
        process.kill()
        posts[number] = (role, two.start(role))
    await asyncio.to_thread(eventually, lambda: not two.stored() and not two.queued(), "all to arrive", 90)
    await asyncio.to_thread(eventually, lambda: not two.in_doubt(), "all to be settled")
    once = Counter(f"{number}" for number in range(MESSAGES * 5))
    assert Counter(two.queued("results")) == Counter(two.reminders()) == once


@pytest.mark.parametrize("crashes", ["store", "queues"])
@pytest.mark.parametrize("step", ["prepare", "commit_prepared"])
@pytest.mark.sample(1)
async def test_a_server_crashes_between_the_steps(
    servers: tuple[PostgresqlServer, PostgresqlServer],
    two: TwoServers,
    monkeypatch: pytest.MonkeyPatch,
    crashes: str,
    step: str,
) -> None:
    """Given a poller at work, when one server crashes after a step, then all is settled once it is back."""
    server = servers[0 if crashes == "queues" else 1]
    await two.send(MESSAGES, timedelta(seconds=1))
    original, calls = getattr(PostgresqlTwoPhase, step), []

    def crashing(self: PostgresqlTwoPhase, connection: Connection, name: str) -> None:
        calls.append(name)
        if len(calls) > 1:
            original(self, connection, name)
            return
        if step == "prepare":
            original(self, connection, name)
        server.stop("immediate")
        server.start()
        if step == "commit_prepared":
            original(self, connection, name)

    monkeypatch.setattr(PostgresqlTwoPhase, step, crashing)
    async with two.endpoint(polling=True):
        await asyncio.to_thread(eventually, lambda: len(two.queued()) == MESSAGES, "all to be queued", 60)
        await asyncio.to_thread(eventually, lambda: not two.in_doubt(), "all to be settled")
        assert two.stored() == []
        assert len(set(two.queued())) == MESSAGES
    assert calls
