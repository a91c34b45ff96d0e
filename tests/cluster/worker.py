"""Processes to be killed: forks one for each line of JSON on its input and answers with its process id.

Forked from a process that has imported everything and opened nothing, a worker is there in milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import text

sys.path.append(str(Path(__file__).parents[2]))  # for `tests.cluster.inbox_worker`

from tests.cluster.inbox_worker import serve_once

from delayline import Endpoint, Event, StoredDelivery, TransactionMode
from delayline.azure import AzureDelayedTable, AzureStorageQueueTransport
from delayline.message import Headers, Message, from_wire_time
from delayline.rabbitmq import RabbitMQTransport
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.sql.locked_moves import LockedForwarding
from delayline.sql.moves import Moved
from delayline.sql.postgresql.moves import PostgresqlForwarding
from delayline.sql.sqlite.moves import FileForwarding
from delayline.testing import Fault, FaultyStore, FaultyTimeoutPersister, FaultyTransport
from delayline.timeouts import SqlTimeoutPersister, TimeoutManagerDelivery

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from delayline.receiving.context import MessageContext
    from delayline.receiving.handlers import Handler
    from delayline.spi import DelayedDelivery, DelayedMessageStore, Transport

Settings = dict[str, Any]
PR_SET_PDEATHSIG = 1


class Journal:
    """An append-only file: one write a line, so that lines of several processes never mix and no kill halves one."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def note(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def faults_of(settings: Settings, part: str) -> list[Fault]:
    """The steps at which this process kills itself."""
    if "completing" in settings:
        return in_completion(settings["completing"], settings["journal"]) if part == "transport" else []
    return [
        Fault(
            step["on"] if isinstance(step["on"], str) else tuple(step["on"]),
            calls=step.get("call", 1),
            when=(lambda at, limit: limit > 0) if step["on"] == "next_chunk" else None,  # 0: asks for the next due time
            before=die if step["at"] == "before" else None,
            after=die if step["at"] == "after" else None,
        )
        for step in settings.get("faults", [])
        if step["part"] == part
    ]


def in_completion(step: Settings, journal: str) -> list[Fault]:
    """Die before or after the step, `acknowledge` or `commit`, of the first completion of at least so many messages."""
    sizes: list[int] = []

    def is_large(received: object) -> bool:
        if isinstance(received, list) and len(received) >= step["at_least"] and not sizes:
            sizes.append(len(received))
            Journal(journal).note("completing", len(received))
        return False

    before, after = (die, None) if step["at"] == "before" else (None, die)
    fatal = Fault(step["on"], when=lambda *_: bool(sizes), before=before, after=after)
    return [Fault("acknowledge", when=is_large), fatal]


#: What moves messages inside a database, by SQLAlchemy's name of its dialect.
FORWARDINGS = {"sqlite": FileForwarding, "postgresql": PostgresqlForwarding, "mariadb": LockedForwarding}


def die_in_move(store: DelayedMessageStore, step: str) -> None:
    """Die at a step of the second move inside the database, where no verb is called that a fault could be put on."""
    assert isinstance(store, SqlDelayedMessageStore)
    dialect, moves = store._database.dialect, [0]
    forwarding: type[Any] = FORWARDINGS[dialect.sql.name]
    run, commit = forwarding.run, dialect.transactions.commit

    def counted(self: object, connection: Connection, until: object, **bounds: Any) -> Moved:  # noqa: ANN401
        moves[0] += 1
        if moves[0] == 2 and step == "before move":
            die()
        moved: Moved = run(self, connection, until, **bounds)
        alone = getattr(self, "one_statement", False)  # then it has committed when it ends
        if moves[0] == 2 and (step == "after move" or (alone and step == "after commit")):
            die()
        return moved

    def committed(connection: Connection) -> None:
        commit(connection)
        if moves[0] == 2 and step == "after commit":
            die()

    forwarding.run = counted
    dialect.transactions.commit = committed  # type: ignore[method-assign]


def delivery_of(settings: Settings) -> DelayedDelivery | None:
    if settings["store"] is None:
        return None
    polling = settings["role"] in {"poller", "both"}
    if settings["delivery"] == "timeouts":
        timeouts = FaultyTimeoutPersister(SqlTimeoutPersister(settings["store"]), *faults_of(settings, "store"))
        return TimeoutManagerDelivery(timeouts, batch_size=settings["batch_size"], polling=polling)
    store: DelayedMessageStore = store_at(settings["store"])
    if settings.get("faults"):
        store = FaultyStore(store, *faults_of(settings, "store"))
    if "die_in_move" in settings:
        die_in_move(store, settings["die_in_move"])
    return StoredDelivery(store, polling=polling, batch_size=settings["batch_size"])


def store_at(url: str) -> DelayedMessageStore:
    return AzureDelayedTable(url) if url.startswith("azure:") else SqlDelayedMessageStore(url)


def transport_at(url: str, poll_interval: timedelta) -> Transport:
    if url.startswith("amqp"):
        return RabbitMQTransport(url)
    if url.startswith("azure:"):
        return AzureStorageQueueTransport(url, visibility_timeout=timedelta(seconds=2))
    return SqlTransport(url, poll_interval=poll_interval)


class Dispatched(logging.Handler):
    """Notes in the journal which process dispatches."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", None) is Event.DISPATCHED:
            self._journal.note("dispatched", os.getpid(), vars(record)["facts"]["count"], time.monotonic())


def note_dispatches(journal: Journal) -> None:
    batches = logging.getLogger("delayline.delayed.mover")
    batches.setLevel(logging.DEBUG)
    batches.propagate = False
    batches.addHandler(Dispatched(journal))


def endpoint_of(settings: Settings, journal: Journal) -> Endpoint:
    transport = transport_at(settings["transport"], timedelta(seconds=settings.get("poll_interval", 1)))
    if (settings.get("faults") or "completing" in settings) and not settings.get("plain_transport"):
        transport = FaultyTransport(transport, *faults_of(settings, "transport"))
    endpoint = Endpoint(
        "orders",
        transport=transport,
        delayed_delivery=delivery_of(settings),
        transaction_mode=TransactionMode[settings["mode"]],
        concurrency=settings.get("concurrency", 4),
    )
    if settings["role"] in {"receiver", "both"}:
        endpoint.handler((writing_handler if settings.get("writes") else handler)(journal, settings))
    return endpoint


def handler(journal: Journal, settings: Settings) -> Handler:
    handled = 0

    async def handle(message: Message, context: MessageContext) -> None:
        nonlocal handled
        handled += 1
        wire = message.headers.get(Headers.DELIVER_AT)
        due = 0 if wire is None else round(from_wire_time(wire).timestamp() * 1_000_000)
        journal.note("handled", message.id, due, time.time_ns() // 1000)
        await context.send("results", message.id)
        if handled == settings.get("die_in_handler"):
            die()
        await asyncio.sleep(settings.get("work", 0))

    return handle


def writing_handler(journal: Journal, settings: Settings) -> Handler:
    """Return a handler that writes a row in a transaction of its own: a coroutine or a function."""

    def write(message: Message, context: MessageContext) -> None:
        journal.note("handled", message.id, 0, time.time_ns() // 1000)
        context.transaction().execute(text("INSERT INTO effects VALUES (:id)"), {"id": message.id})
        time.sleep(settings.get("work", 0))

    async def handle(message: Message, context: MessageContext) -> None:
        journal.note("handled", message.id, 0, time.time_ns() // 1000)
        connection = await context.transaction()
        await connection.execute(text("INSERT INTO effects VALUES (:id)"), {"id": message.id})
        await asyncio.sleep(settings.get("work", 0))

    return write if settings["writes"] == "function" else handle


async def serve(settings: Settings, journal: Journal) -> None:
    """Poll or receive until SIGTERM."""
    terminated = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
    if settings.get("notes_dispatches"):
        note_dispatches(journal)
    async with endpoint_of(settings, journal):
        journal.note("started", os.getpid())
        await terminated.wait()
    journal.note("stopped", os.getpid())


async def send(settings: Settings, journal: Journal) -> None:
    """Send the messages numbered `first` to `last`, a few at a time, and note each before and after."""
    chance = random.Random(settings["seed"])  # noqa: S311 - repeatable
    delays = settings["delays"]

    async def send_one(endpoint: Endpoint, number: int) -> None:
        delay = None if delays is None else timedelta(seconds=chance.uniform(*delays))
        journal.note("trying", number)
        await endpoint.send("orders", b"body", message_id=str(number), delay=delay)
        journal.note("sent", number)

    async with endpoint_of(settings, journal) as endpoint:
        journal.note("started", os.getpid())
        while "go" in settings and not Path(settings["go"]).exists():  # noqa: ASYNC110, ASYNC240 - another process's
            await asyncio.sleep(0.01)
        for first in range(settings["first"], settings["last"], 20):
            numbers = range(first, min(first + 20, settings["last"]))
            await asyncio.gather(*(send_one(endpoint, number) for number in numbers))
    journal.note("stopped", os.getpid())


def run(settings: Settings) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(Path(settings["journal"]).with_suffix(".log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    logging.basicConfig(level=logging.WARNING, format=f"{settings['role']} {os.getpid()} %(message)s", force=True)
    if settings["role"] == "once":
        asyncio.run(serve_once(settings, transport_at(settings["transport"], timedelta(seconds=1))))
        return
    job = send if settings["role"] == "sender" else serve
    asyncio.run(job(settings, Journal(settings["journal"])))


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                try:
                    run(json.loads(line))
                except Exception:
                    logging.exception("the worker failed")
            os._exit(0)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
