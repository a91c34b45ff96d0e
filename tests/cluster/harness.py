"""Helpers of the cluster tests: start, kill and count."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pymysql
from sqlalchemy import make_url
from tests.eventually import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Sequence


Step = dict[str, Any]
#: So many processes are killed at least in a round of havoc, however slow the machine starts others.
LEAST_KILLS: Final = 4


def new_seed() -> int:
    """A seed, printed so that a failing round can be repeated with DELAYLINE_SEED."""
    seed = int(os.environ.get("DELAYLINE_SEED", secrets.randbelow(1_000_000)))
    print(f"DELAYLINE_SEED={seed}")  # noqa: T201 - pytest shows it beside a failure
    return seed


class Worker:
    """One process, held by a descriptor: no other process can be hit by mistake, even if its number is used again."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)

    def signal(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._handle, number)

    def ended(self, patience: float = 0) -> bool:
        return bool(select.select([self._handle], [], [], patience)[0])

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.ended(PATIENCE)

    def stop(self) -> None:
        self.signal(signal.SIGTERM)
        assert self.ended(PATIENCE), "SIGTERM did not end it"

    def close(self) -> None:
        if not self.ended():
            self.kill()
        os.close(self._handle)


class WorkerFactory:
    """Forks workers on request."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def fork(self, settings: dict[str, Any]) -> Worker:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(settings) + "\n")
        self._process.stdin.flush()
        return Worker(int(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate(timeout=PATIENCE)


def mariadb_at(url: str) -> pymysql.Connection[Any]:
    """Connect, with names in the quotes that every database understands."""
    place = make_url(url)
    return pymysql.connect(
        host=place.host or "localhost",
        port=place.port or 3306,
        user=place.username,
        database=place.database,
        sql_mode="ANSI_QUOTES",
    )


@dataclass
class Cluster:
    """Several processes of the endpoint `orders`, on one SQLite file or two, or on one or two databases of a server."""

    factory: WorkerFactory
    folder: Path
    mode: str = "TRANSACTION_SCOPE"
    layout: str = "one file"
    workers: list[Worker] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    databases: Sequence[str] = ()
    """URLs of a server's databases: of the queues, and of the store where that is another one."""
    delivery: str = "store"
    """The delayed delivery: `store`, or `timeouts` for the timeout manager."""

    @property
    def transport_file(self) -> Path:
        return self.folder / "delayline.db"

    @property
    def store_file(self) -> Path:
        return self.folder / ("store.db" if self.layout == "two files" else "delayline.db")

    @property
    def queues_url(self) -> str:
        return self.databases[0] if self.databases else f"sqlite:///{self.transport_file}"

    @property
    def store_url(self) -> str:
        return self.databases[-1] if self.databases else f"sqlite:///{self.store_file}"

    def start(self, role: str, **settings: object) -> Worker:
        """Start a process; roles: sender, poller, receiver, and both of these."""
        common = {
            "role": role,
            "transport": self.queues_url,
            "store": None if self.layout == "no store" else self.store_url,
            "mode": self.mode,
            "delivery": self.delivery,
            "journal": str(self.folder / "journal"),
            "batch_size": 10,
            "seed": 0,
        }
        worker = self.factory.fork(common | settings)
        self.workers.append(worker)
        return worker

    def send(
        self, number: int, *, first: int = 0, delays: tuple[float, float] | None = (0.2, 1.5), **settings: object
    ) -> Worker:
        """Start a sender of that many messages, due after delays between the two."""
        return self.start("sender", first=first, last=first + number, delays=delays, **settings)

    def send_all(self, number: int, *, delays: tuple[float, float] | None = (0.01, 0.02)) -> None:
        """Have that many messages sent, and wait for it."""
        assert self.send(number, delays=delays).ended(PATIENCE)
        assert len(self.sent()) == number, self.log()

    def havoc(self, chance: random.Random, posts: Sequence[str], seconds: float, **settings: object) -> None:
        """Keep these posts manned for a while, and for some kills at least, and kill now one, now another."""
        manned = [(role, self.start(role, **settings)) for role in posts]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or self.kills.total() < LEAST_KILLS:
            time.sleep(chance.uniform(0.05, 0.25))
            number = chance.randrange(len(manned))
            role, worker = manned[number]
            worker.kill()
            self.kills[role] += 1
            manned[number] = (role, self.start(role, **settings))

    def finish(self) -> None:
        """Wait until no message is pending or queued, then stop every process."""
        queues = ["orders", "orders.TimeoutsDispatcher"]
        eventually(lambda: not self.stored() and not any(map(self.queued, queues)), f"all to arrive; {self.log()}")
        for worker in self.workers:
            if not worker.ended():
                worker.stop()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def stored(self) -> list[str]:
        """The ids that wait in the store; with a timeout manager, those on the way to it and from it too."""
        if self.layout == "no store":
            return []
        if self.delivery == "timeouts":
            kept = self._rows(self.store_url, 'SELECT "Headers" FROM "orders_TimeoutData"')
            stored = [json.loads(row[0])["NServiceBus.MessageId"] for row in kept]
            return stored + self.queued("orders.Timeouts")
        return [row[0] for row in self._rows(self.store_url, 'SELECT id FROM "orders.timeouts"')]

    def queued(self, queue: str) -> list[str]:
        """The ids in a queue."""
        query = "SELECT id, queue FROM delayline_messages"
        return [row[0] for row in self._rows(self.queues_url, query) if row[1] == queue]

    def results(self) -> Counter[str]:
        """How often each message has taken effect: what its handler's transaction has sent."""
        query = "SELECT body FROM delayline_messages WHERE queue = 'results'"
        return Counter(bytes(row[0]).decode() for row in self._rows(self.queues_url, query))

    def make_effects(self) -> None:
        """Create the table of the handlers' own rows."""
        url = self.queues_url
        with contextlib.closing(mariadb_at(url) if url.startswith("mariadb") else psycopg.connect(url)) as connection:
            connection.cursor().execute("CREATE TABLE effects (id VARCHAR(20))")
            connection.commit()

    def effects(self) -> list[str]:
        """The ids of which a handler has written a row in a transaction of its own."""
        return [row[0] for row in self._rows(self.queues_url, "SELECT id FROM effects")]

    def arrived(self) -> Counter[str]:
        """How often each message has come to its queue, whether it has taken effect since or not."""
        rows = self._rows(self.queues_url, "SELECT id, queue, body FROM delayline_messages")  # at one moment
        return Counter(bytes(body).decode() if queue == "results" else name for name, queue, body in rows)

    def sent(self) -> set[str]:
        """The ids whose send returned: those the sender may rely on."""
        return {words[1] for words in self.journal("sent")}

    def handled(self) -> Counter[str]:
        """How often each message was given to the handler."""
        return Counter(words[1] for words in self.journal("handled"))

    def early(self) -> list[str]:
        """The ids that were handled before they were due."""
        return [words[1] for words in self.journal("handled") if int(words[3]) < int(words[2])]

    def journal(self, kind: str) -> list[list[str]]:
        path = self.folder / "journal"
        lines = path.read_text().splitlines() if path.exists() else []
        return [words for line in lines if (words := line.split())[0] == kind]

    def log(self) -> str:
        """The logs of the workers, for a failing test."""
        path = self.folder / "journal.log"
        return path.read_text()[-4000:] if path.exists() else ""

    def running(self, number: int) -> None:
        """Wait until that many endpoints have started."""
        eventually(lambda: len(self.journal("started")) >= number, f"{number} to start; {self.log()}")

    def _rows(self, url: str, query: str) -> list[tuple[Any, ...]]:
        if url.startswith("mariadb"):
            with contextlib.closing(mariadb_at(url)) as connection, connection.cursor() as cursor:
                cursor.execute(query)
                return list(cursor.fetchall())
        if not url.startswith("sqlite"):
            with psycopg.connect(url) as server:
                return server.execute(query.encode()).fetchall()
        file = sqlite3.connect(f"file:{url.removeprefix('sqlite:///')}?mode=ro", uri=True, timeout=PATIENCE)
        try:
            return file.execute(query).fetchall()
        finally:
            file.close()
