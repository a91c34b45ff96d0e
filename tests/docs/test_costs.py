"""The statement counts of docs/reference/costs.md, counted."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.eventually import eventually_async

from delayline import Endpoint, Message, MessageContext, SqlDelayedMessageStore, SqlTransport, StoredDelivery
from delayline.events import Event
from delayline.sql import crashes, queue_limits, receiver
from delayline.testing import ManualClock, Signals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

SOON = timedelta(seconds=1)
CONNECTING = ("PRAGMA",)
LOOKS = 50
LOOKS_AT_INTERVALS = {
    receiver: "QUEUE_LOOK_EVERY",
    queue_limits: "LIMITS_READ_EVERY",
    crashes: "CRASHES_READ_EVERY",
}


class Statements:
    """Every statement that SQLite ran since the last look, by its first word."""

    def __init__(self) -> None:
        self._seen: list[str] = []

    def note(self, statement: str) -> None:
        if not statement.startswith(CONNECTING):
            self._seen.append(statement)

    def have_ended(self) -> Callable[[], bool]:
        """Return a condition: that there was no other statement while it was asked fifty times, so all are waiting."""
        asked: list[int] = []

        def is_quiet() -> bool:
            asked.append(len(self._seen))
            return len(asked) > LOOKS and asked[-LOOKS] == asked[-1]

        return is_quiet

    def taken(self) -> dict[str, int]:
        counts = Counter(statement.split()[0] for statement in self._seen)
        self._seen.clear()
        return dict(counts)


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> Statements:
    counted = Statements()
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect

    def connect_and_count(*arguments: object, **options: object) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.set_trace_callback(counted.note)
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_and_count)
    return counted


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'costs.db'}"


@pytest.fixture
async def signals() -> AsyncIterator[Signals]:
    with Signals() as signals:
        yield signals


def sales(url: str, clock: ManualClock, *, polling: bool = True) -> Endpoint:
    return Endpoint(
        "sales",
        transport=SqlTransport(url),
        delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url), polling=polling),
        send_only=True,
        clock=clock,
    )


async def make_billing(url: str) -> None:
    transport = SqlTransport(url)
    await transport.setup_infrastructure(["billing"])


async def test_sends(url: str, statements: Statements) -> None:
    await make_billing(url)
    async with sales(url, ManualClock(), polling=False) as endpoint:
        statements.taken()

        await endpoint.send("billing", "the first to this queue: it looks whether it is there", delay=SOON)
        assert statements.taken() == {"SELECT": 1, "BEGIN": 1, "INSERT": 1, "COMMIT": 1}

        await endpoint.send("billing", "later", delay=SOON)
        assert statements.taken() == {"BEGIN": 1, "INSERT": 1, "COMMIT": 1}

        await asyncio.gather(*(endpoint.send("billing", "later", delay=SOON) for _ in range(10)))
        assert statements.taken() == {"BEGIN": 1, "INSERT": 10, "COMMIT": 1}

        await endpoint.send("billing", "the first of its process: it looks at the tables' version as well")
        statements.taken()
        await endpoint.send("billing", "now")
        assert statements.taken() == {"BEGIN": 1, "INSERT": 1, "COMMIT": 1}

        await asyncio.gather(*(endpoint.send("billing", "now") for _ in range(10)))
        assert statements.taken() == {"BEGIN": 1, "SELECT": 1, "INSERT": 10, "COMMIT": 1}


async def test_the_poller(url: str, statements: Statements, signals: Signals) -> None:
    await make_billing(url)
    clock = ManualClock()
    async with sales(url, clock, polling=False) as sender:
        await asyncio.gather(*(sender.send("billing", "later", delay=SOON) for _ in range(10)))
    async with sales(url, clock):
        await signals.wait_for(Event.SLEEPS)
        statements.taken()
        await clock.advance(SOON)
        await signals.wait_for(Event.SLEEPS, 2)

        moved = statements.taken()
        assert moved == {"BEGIN": 1, "SELECT": 1 + 1 + 1, "INSERT": 1, "DELETE": 1, "COMMIT": 1}

        await clock.advance(timedelta(seconds=60))
        await signals.wait_for(Event.SLEEPS, 3)
        assert statements.taken() == {"SELECT": 1}


async def test_a_receiver(url: str, statements: Statements, signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, interval in LOOKS_AT_INTERVALS.items():  # a slow machine would count some of these looks too
        monkeypatch.setattr(module, interval, 3600.0)
    billing = Endpoint("billing", transport=SqlTransport(url, poll_interval=timedelta(hours=1)))

    @billing.handler
    async def handle(message: Message, context: MessageContext) -> None:
        pass

    await billing.setup()
    async with billing, sales(url, ManualClock(), polling=False) as sender:
        await sender.send("billing", "the first of its process: it looks at the tables' version as well")
        await signals.wait_for(Event.HANDLED)
        await eventually_async(statements.have_ended())  # the receiver has looked once more
        statements.taken()
        await sender.send("billing", "now")
        await signals.wait_for(Event.HANDLED, 2)
        await eventually_async(statements.have_ended())

        sent = Counter({"BEGIN": 1, "INSERT": 1, "COMMIT": 1})
        rounds = 1  # it finds the message, and the receiver waits for the next notification
        assert Counter(statements.taken()) - sent == {"SELECT": rounds + 1, "BEGIN": 1, "DELETE": 1, "COMMIT": 1}
