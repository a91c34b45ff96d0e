"""Outages of every kind, at random and beside one another: afterwards no process stands still."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pymysql
import pytest
from tests.cluster.harness import new_seed
from tests.eventually import PATIENCE, eventually
from tests.servers.mariadb import MariadbServer
from tests.servers.postgresql import PostgresqlServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.cluster.harness import Cluster, Worker

#: More of them, as in `DELAYLINE_ROUNDS=200 pytest tests/cluster/test_mixed_outages.py`, find rarer faults.
ROUNDS: Final = int(os.environ.get("DELAYLINE_ROUNDS", "2"))
OUTAGES_A_ROUND: Final = 4
MESSAGES_A_ROUND: Final = 150
PROCESSES: Final = 3
SERVER_TIMEOUT: Final = 3


def processes_of(server: PostgresqlServer | MariadbServer) -> list[int]:
    if isinstance(server, MariadbServer):
        return [server.pid]
    postmaster = int((server.data / "postmaster.pid").read_text().splitlines()[0])
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    return [postmaster, *map(int, children)]


@contextmanager
def halted(server: PostgresqlServer | MariadbServer) -> Iterator[None]:
    """Let the server answer nothing, with its connections open."""
    halted = processes_of(server)
    send_all(halted, signal.SIGSTOP)
    try:
        yield
    finally:
        send_all(halted, signal.SIGCONT)


def send_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # a session's process that has ended meanwhile
            os.kill(pid, number)


class Outages:
    """Brings outages to a cluster and its server."""

    def __init__(self, cluster: Cluster, server: PostgresqlServer | MariadbServer, chance: random.Random) -> None:
        self._cluster, self._server, self._chance = cluster, server, chance
        self._started = 0
        self._workers = [self._start() for _ in range(PROCESSES)]

    def bring(self) -> None:
        """Bring one of any kind."""
        kinds = (self._kill, self._halt, self._end_connections, self._halt_server, self._crash_server)
        self._chance.choice(kinds)()

    def _start(self) -> Worker:
        """Start a process, and wait until it has: it would end if the server crashed meanwhile."""
        url = f"{self._cluster.queues_url}?server_timeout={SERVER_TIMEOUT}"
        kind = ["coroutine", "function"][self._started % 2]
        worker = self._cluster.start("both", transport=url, store=url, writes=kind, concurrency=32, work=0.05)
        self._started += 1
        self._cluster.running(self._started)
        return worker

    def _kill(self) -> None:
        number = self._chance.randrange(PROCESSES)
        self._workers[number].kill()
        self._workers[number] = self._start()

    def _halt(self) -> None:
        worker = self._chance.choice(self._workers)
        worker.signal(signal.SIGSTOP)
        time.sleep(self._chance.uniform(0.1, 1.5 * SERVER_TIMEOUT))
        worker.signal(signal.SIGCONT)

    def _end_connections(self) -> None:
        share = self._chance.choice([0.2, 0.5, 1.0])
        if isinstance(self._server, PostgresqlServer):
            with self._server.administrator() as administrator:
                administrator.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE backend_type = 'client backend' AND pid != pg_backend_pid() AND random() < %s",
                    [share],
                )
            return
        with self._server.administrator() as cursor:
            cursor.execute("SELECT id FROM information_schema.processlist WHERE id != connection_id()")
            for (connection,) in cursor.fetchall():
                if self._chance.random() < share:
                    with suppress(pymysql.Error):  # it has ended by itself
                        cursor.execute(f"KILL CONNECTION {connection}")

    def _halt_server(self) -> None:
        with halted(self._server):
            time.sleep(self._chance.uniform(0.1, 1.5 * SERVER_TIMEOUT))

    def _crash_server(self) -> None:
        self._server.kill()
        self._server.start()


@pytest.mark.sample(1)
@pytest.mark.timeout(2 * PATIENCE * (ROUNDS + 1))
def test_no_process_stands_still_after_outages(
    make_cluster: Callable[..., Cluster], crashing: PostgresqlServer | MariadbServer
) -> None:
    # Given processes that poll and handle, many messages at once, with a transaction of each handler's own
    cluster = make_cluster(databases=[crashing.new_database()])
    cluster.make_effects()
    chance = random.Random(new_seed())  # noqa: S311 - repeatable
    outages = Outages(cluster, crashing, chance)
    for number in range(ROUNDS):
        # When connections, processes and the server end and fall silent while messages fall due
        sender = cluster.send(MESSAGES_A_ROUND, first=number * MESSAGES_A_ROUND, delays=(0.2, 4))
        assert sender.ended(PATIENCE)
        for _ in range(OUTAGES_A_ROUND):
            time.sleep(chance.uniform(0, 1))
            outages.bring()
        # Then every message is handled soon after the last of it, by processes that nobody has restarted
        eventually(lambda: cluster.sent() <= set(cluster.effects()), f"effects of all; {cluster.log()}")
    cluster.finish()
    assert set(cluster.effects()) == cluster.sent()
    assert len(cluster.effects()) == ROUNDS * MESSAGES_A_ROUND
