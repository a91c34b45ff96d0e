"""Due messages move to their queues inside the database, except those that need the poller's own hands."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from tests.servers.sqlite import database_of

from delayline import (
    BackendUnavailable,
    DelayedMessage,
    Endpoint,
    Headers,
    MemoryTransport,
    Message,
    SqlDelayedMessageStore,
    SqlTransport,
    StoredDelivery,
    TransactionMode,
)
from delayline.events import Event
from delayline.testing import Signals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

DUE = datetime(2026, 1, 1, tzinfo=UTC)
LATER = DUE + timedelta(hours=1)
PLENTY = 1 << 20


class SqliteBackend:
    """One file, its store and its transport, both open."""

    def __init__(self, path: Path) -> None:
        self.url = f"sqlite:///{path}"
        self.store = SqlDelayedMessageStore(self.url)
        self.transport = SqlTransport(self.url)

    async def hold(
        self, *names: str, due: datetime = DUE, to: str = "billing", headers: dict[str, str] | None = None
    ) -> None:
        messages = [DelayedMessage(Message(name, headers or {}, name.encode()), to, due) for name in names]
        await self.store.store_many(messages)

    async def forward(self, limit: int = 100, max_bytes: int = PLENTY) -> int:
        return (await self.store.forward_due(DUE, limit, max_bytes=max_bytes)).number

    async def waiting(self) -> list[str]:
        return [message.id for message in await self.store.pending()]

    async def queued(self, queue: str = "billing") -> list[str]:
        return [message.id for message in await self.transport.browse(queue, 1000)]


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[SqliteBackend]:
    backend = SqliteBackend(tmp_path / "house.db")
    await backend.transport.setup_infrastructure(["billing", "shipping", "sales", "error"])
    await backend.store.setup_infrastructure("sales")
    await backend.store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    await backend.transport.start()
    yield backend
    await backend.transport.stop()
    await backend.store.close()


async def test_only_due_messages_move_in_the_order_of_due_times(backend: SqliteBackend) -> None:
    await backend.hold("second", "third")
    await backend.hold("first", due=DUE - timedelta(microseconds=1))
    await backend.hold("early", due=DUE + timedelta(microseconds=1))
    forwarded = await backend.store.forward_due(DUE, 100, max_bytes=PLENTY)
    assert (forwarded.number, forwarded.next_due) == (3, DUE + timedelta(microseconds=1))
    assert await backend.queued() == ["first", "second", "third"]
    assert await backend.waiting() == ["early"]


async def test_every_destination_gets_its_own_with_headers_and_bodies(backend: SqliteBackend) -> None:
    await backend.hold("a", to="billing", headers={"kéy 😀": 'v"al\\ue'})
    await backend.hold("b", to="shipping")
    assert await backend.forward() == 2
    (message,) = await backend.transport.browse("billing", 10)
    assert (message.headers, message.body) == ({"kéy 😀": 'v"al\\ue'}, b"a")
    assert await backend.queued("shipping") == ["b"]
    assert (await backend.store.forward_due(DUE, 100, max_bytes=PLENTY)).next_due is None


async def test_batches_are_bounded_by_count_and_by_bytes(backend: SqliteBackend) -> None:
    await backend.hold("a", "b", "c", "d", "e")
    assert await backend.forward(limit=2) == 2
    assert await backend.forward(max_bytes=1) == 1
    assert await backend.forward(max_bytes=2 * len(b"{}d")) == 2


async def test_it_stops_before_a_queue_that_does_not_exist(backend: SqliteBackend) -> None:
    await backend.hold("a")
    await backend.hold("lost", to="nowhere")
    await backend.hold("b")
    assert await backend.forward() == 1
    assert await backend.forward() == 0
    assert await backend.waiting() == ["lost", "b"]


async def test_it_stops_before_properties_that_no_receiver_may_see(backend: SqliteBackend) -> None:
    await backend.hold("marked", headers={Headers.DISPATCH_PROPERTIES + "DeliverAt": "x"})
    assert await backend.forward() == 0


async def test_messages_leased_by_another_process_stay(backend: SqliteBackend) -> None:
    await backend.hold("held", "free")
    assert await backend.store.fetch_next_due(DUE) is not None
    assert await backend.forward() == 0


async def test_a_failed_commit_moves_nothing(backend: SqliteBackend, tmp_path: Path) -> None:
    await backend.hold("a")
    other = sqlite3.connect(tmp_path / "house.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    database_of(tmp_path / "house.db").dialect.connections.server_timeout = 0
    with pytest.raises(BackendUnavailable):
        await backend.forward()
    other.close()
    assert (await backend.waiting(), await backend.queued()) == (["a"], [])
    assert await backend.forward() == 1


async def test_only_to_queues_in_the_same_file(backend: SqliteBackend, tmp_path: Path) -> None:
    assert backend.store.forwards_to(SqlTransport(backend.url))
    assert not backend.store.forwards_to(SqlTransport(f"sqlite:///{tmp_path / 'other.db'}"))
    assert not backend.store.forwards_to(MemoryTransport())


async def test_the_poller_forwards_movable_messages_and_dispatches_the_rest(backend: SqliteBackend) -> None:
    # Given plain messages around two that need more than moving
    await backend.hold("a")
    await backend.hold("marked", headers={Headers.DISPATCH_PROPERTIES + "DeliverAt": "x", "kept": "yes"})
    await backend.hold("lost", to="nowhere")
    await backend.hold("b")
    endpoint = Endpoint("sales", transport=backend.transport, delayed_delivery=StoredDelivery(backend.store))
    # When the poller runs
    with Signals() as signals:
        async with endpoint:
            await signals.wait_for(Event.SLEEPS)
    # Then all have left, in order, and each as it should
    await backend.store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    assert await backend.waiting() == []
    assert await backend.queued() == ["a", "marked", "b"]
    assert (await backend.transport.browse("billing", 1, offset=1))[0].headers == {"kept": "yes"}
    (failed,) = await backend.transport.browse("error", 10)
    assert (failed.id, failed.headers[Headers.FAILED_QUEUE]) == ("lost", "nowhere")


async def test_a_move_that_fails_for_an_unknown_reason_is_tried_one_by_one(
    backend: SqliteBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.hold("a", "b")

    async def broken(at: datetime, limit: int, *, max_bytes: int) -> None:
        raise RuntimeError("2 messages were due, 1 were moved and 2 removed")

    monkeypatch.setattr(backend.store, "forward_due", broken)
    endpoint = Endpoint("sales", transport=backend.transport, delayed_delivery=StoredDelivery(backend.store))
    with Signals() as signals:
        async with endpoint:
            await signals.wait_for(Event.SLEEPS)
            assert await backend.queued() == ["a", "b"]
            # And later messages are still moved in batches
            monkeypatch.undo()
            await backend.hold("c", "d")
            await signals.wait_for(Event.SLEEPS, 2)
            assert vars(signals.records(Event.DISPATCHED)[-1])["facts"]["count"] == 2
    assert await backend.queued() == ["a", "b", "c", "d"]


async def test_a_short_delay_stored_while_the_poller_looks_ahead_is_not_overslept(backend: SqliteBackend) -> None:
    # Given a poller that knows from its last move that the next message is due in an hour
    now = datetime.now(UTC)
    await backend.hold("now", due=now)
    await backend.hold("hour", due=now + timedelta(hours=1))
    endpoint = Endpoint("sales", transport=backend.transport, delayed_delivery=StoredDelivery(backend.store))
    with Signals() as signals:
        async with endpoint:
            await signals.wait_for(Event.SLEEPS)
            # When something earlier is stored
            await endpoint.send("billing", b"", message_id="soon", delay=timedelta(milliseconds=50))
            # Then it leaves long before the hour
            await signals.wait_for(Event.DISPATCHED, count=2)
    assert await backend.queued() == ["now", "soon"]
