"""One transaction over two databases: processes and servers killed at every step, 0 lost, 0 doubled."""

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
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pymysql
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool
from tests.cluster.harness import new_seed
from tests.conftest import newer, running
from tests.eventually import PATIENCE, eventually, eventually_async
from tests.servers.mariadb import MariadbServer
from tests.servers.postgresql import PostgresqlServer
from tests.servers.programs import CONFIGURED

from delayline import Endpoint, StoredDelivery, TransactionMode
from delayline.events import Event
from delayline.sql import SqlDelayedMessageStore, SqlTransport, TwoPhaseCommit
from delayline.sql.databases import database_at
from delayline.sql.server import run
from delayline.testing import Signals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from sqlalchemy import Connection

    Server = PostgresqlServer | MariadbServer

pytestmark = pytest.mark.cluster
MESSAGES = 120
DRIVERS = {"postgresql": "+psycopg://", "mariadb": "+pymysql://"}
SETTINGS = ["fsync=off", "max_prepared_transactions=50"]
MARIADB_SETTINGS = ["innodb_flush_log_at_trx_commit=2", "log_bin=binlog", "server_id=7"]
#: What the store is in. Debian 12 has MariaDB 10.11.
PRODUCTS = ["PostgreSQL", "MariaDB", "MariaDB 11.8"]

WORKER = """
import asyncio, ctypes, os, signal, sys, time
from datetime import timedelta
from delayline import Endpoint, StoredDelivery, TransactionMode
from delayline.sql import SqlDelayedMessageStore, SqlTransport, TwoPhaseCommit
from delayline.sql.databases import database_at

queues, waiting, role, step, ends_by = sys.argv[1:]
Phases = type(database_at(waiting).dialect.transactions.two_phase)
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
STEPS = {"before prepare": ("prepare", "before"), "after prepare": ("prepare", "after"),
         "after the decision": ("commit_prepared", "before"), "after the commit": ("commit_prepared", "after")}
def end():
    os.kill(os.getpid(), int(ends_by))
    time.sleep(0.2)  # a thread may run on for a moment before a signal freezes its process
if step:
    method, at = STEPS[step]
    original, calls = getattr(Phases, method), []
    def dying(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2 and at == "before":
            end()
        result = original(*args, **kwargs)
        if len(calls) == 2 and at == "after":
            end()
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

    def start(self, role: str, step: str = "", ends_by: int = signal.SIGKILL) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", WORKER, self.queues, self.waiting, role, step, f"{ends_by}"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def stored(self) -> list[str]:
        return self.waiting_for("orders")

    def queued(self, queue: str = "orders") -> list[str]:
        return bodies(self.queues, f"SELECT body FROM delayline_messages WHERE queue = '{queue}'")  # noqa: S608 - ours

    def reminders(self) -> list[str]:
        return self.waiting_for("results")

    def waiting_for(self, destination: str) -> list[str]:
        return bodies(self.waiting, f"SELECT body FROM {self.table} WHERE destination = '{destination}'")  # noqa: S608 - ours

    @property
    def table(self) -> str:
        return "`orders.timeouts`" if self.waiting.startswith("mariadb") else '"orders.timeouts"'

    def in_doubt(self) -> list[str]:
        if self.waiting.startswith("mariadb"):
            return [row[-1].decode() for row in rows(self.waiting, "XA RECOVER")]
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


class Servers:
    """Servers of this module's own, to be crashed: two of PostgreSQL, and for stores MariaDB, with a binary log."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._started: dict[str, Server] = {}

    def __getitem__(self, name: str) -> Server:
        if name not in self._started:
            self._started[name] = self._stack.enter_context(self._server(name))
        return self._started[name]

    def _server(self, name: str) -> contextlib.AbstractContextManager[Server]:
        if "MariaDB" not in name:
            return running(PostgresqlServer, *SETTINGS)
        programs = newer(MariadbServer, 11, 8) if "11.8" in name else CONFIGURED
        return running(MariadbServer, *MARIADB_SETTINGS, programs=programs)


def crash(server: Server) -> None:
    """End it the hard way, and start it again."""
    server.stop("immediate") if isinstance(server, PostgresqlServer) else server.kill()
    server.start()


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with contextlib.ExitStack() as stack:
        yield Servers(stack)


@pytest.fixture
def store_in() -> str:
    """Return the product that the store is in, unless a test says otherwise."""
    return "PostgreSQL"


@pytest.fixture
def two(servers: Servers, store_in: str) -> Iterator[TwoServers]:
    one, other = servers["queues in PostgreSQL"], servers[f"store in {store_in}"]
    first, second = one.new_database(), other.new_database()
    two = TwoServers(first, second)
    yield two
    two.close()
    with contextlib.suppress(psycopg.Error, pymysql.Error):  # where a failing test has left something in doubt
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
@pytest.mark.parametrize("store_in", PRODUCTS)
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
            await asyncio.to_thread(eventually, lambda: not two.in_doubt(), f"all to be settled {step}")
            assert sorted(two.stored() + two.queued() + two.queued("results")) == everybody, step
            assert sorted(two.queued("results")) == sorted(two.reminders()), step
    assert two.decisions() == []
    for one in ("poller", "receiver"):
        two.start(one)
    await asyncio.to_thread(eventually, lambda: not two.stored() and not two.queued(), "all to arrive")
    assert sorted(two.queued("results")) == sorted(two.reminders()) == everybody


@pytest.mark.slow
@pytest.mark.parametrize("store_in", PRODUCTS)
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


@pytest.mark.slow
@pytest.mark.parametrize("store_in", PRODUCTS)
@pytest.mark.parametrize("step", ["after prepare", "after the decision"])
async def test_a_process_that_is_frozen_in_a_transaction_goes_on(two: TwoServers, step: str) -> None:
    """Given a process that is frozen with a transaction prepared, when it goes on, then the transaction is whole."""
    await two.send(MESSAGES, timedelta(seconds=1))
    frozen = two.start("poller", step, signal.SIGSTOP)
    await asyncio.to_thread(eventually, lambda: is_stopped(frozen), "it to be frozen")
    assert two.in_doubt()
    moved = 10  # a batch
    async with two.endpoint(polling=True) as endpoint:
        # Then the others' messages go on meanwhile
        await asyncio.to_thread(eventually, lambda: len(two.queued()) >= MESSAGES - moved, "the others to be queued")
        decided = step == "after the decision"
        if two.waiting.startswith("mariadb") or not decided:  # a transaction belongs to its connection, or is undecided
            await eventually_async(lambda: endpoint.measures()["two_phase.in_doubt"] == 1, "it to be in doubt")
        frozen.send_signal(signal.SIGCONT)
        await asyncio.to_thread(eventually, lambda: len(two.queued()) == MESSAGES, "all to be queued")
        await asyncio.to_thread(eventually, lambda: not two.in_doubt(), "all to be settled")
        await asyncio.to_thread(eventually, lambda: not two.stored(), "nothing to be left")
    assert len(set(two.queued())) == MESSAGES


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a signal has frozen the process."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.slow
@pytest.mark.parametrize("store_in", PRODUCTS)
async def test_the_rows_of_a_prepared_transaction_hold_up_no_others(
    servers: Servers, two: TwoServers, store_in: str
) -> None:
    """Given due messages in a transaction in doubt, when their server has crashed, then the others go out."""
    await two.send(MESSAGES, timedelta(seconds=1))
    database, name, stuck = database_at(two.waiting), "delayline-of-other-queues-1", {"3", "14", "15"}
    two_phase = database.dialect.transactions.two_phase
    assert two_phase is not None
    with database.dialect.connections.look() as connection:
        two_phase.control(name).begin(connection)
        taken = f"DELETE FROM {two.table} WHERE body IN (%s, %s, %s)"  # noqa: S608 - ours
        run(connection, taken, *(body.encode() for body in stuck))
        two_phase.prepare(connection, name)
        crash(servers[f"store in {store_in}"])
    assert len(two.in_doubt()) == 1
    async with two.endpoint(polling=True):
        await asyncio.to_thread(
            eventually, lambda: len(two.queued()) == MESSAGES - len(stuck), "the others to be queued"
        )
        assert set(two.stored()) == stuck
        assert await database.read(lambda at: two_phase.roll_back_prepared(at, name))
        await asyncio.to_thread(eventually, lambda: len(two.queued()) == MESSAGES, "all to be queued")
    assert len(set(two.queued())) == MESSAGES


@pytest.mark.long
@pytest.mark.parametrize("store_in", PRODUCTS)
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
@pytest.mark.parametrize("store_in", PRODUCTS)
@pytest.mark.sample(2)
async def test_a_server_crashes_between_the_steps(
    servers: Servers, two: TwoServers, store_in: str, monkeypatch: pytest.MonkeyPatch, crashes: str, step: str
) -> None:
    """Given a poller at work, when one server crashes after a step, then all is settled once it is back."""
    server = servers["queues in PostgreSQL" if crashes == "queues" else f"store in {store_in}"]
    await two.send(MESSAGES, timedelta(seconds=1))
    phases = database_at(two.waiting).dialect.transactions.two_phase
    original, calls = getattr(phases, step), []

    def crashing(connection: Connection, name: str) -> Any:  # noqa: ANN401 - what the step returns
        calls.append(name)
        if len(calls) > 1:
            return original(connection, name)
        if step == "prepare":
            original(connection, name)
        crash(server)
        return original(connection, name) if step == "commit_prepared" else None

    monkeypatch.setattr(phases, step, crashing)
    async with two.endpoint(polling=True):
        await asyncio.to_thread(eventually, lambda: len(two.queued()) == MESSAGES, "all to be queued", 60)
        await asyncio.to_thread(eventually, lambda: not two.in_doubt(), "all to be settled")
        assert two.stored() == []
        assert len(set(two.queued())) == MESSAGES
    assert calls
