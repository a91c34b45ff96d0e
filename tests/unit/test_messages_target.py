"""A back end of a third party as the target of a migration: with queues or without, with a store."""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from delayline import BackendUnavailable, DelayedMessage, MemoryDelayedMessageStore, MemoryTransport
from delayline.backends import Backend, BackendOptions
from delayline.bulk.batches import BatchName
from delayline.errors import InvalidMessage
from delayline.migration import target_at
from delayline.migration.rows import record_batch
from delayline.migration.target import Attempted
from delayline.migration.targets.messages import MessagesTarget

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delayline.spi import Transaction

DUE = datetime(2090, 1, 1, tzinfo=UTC)


class RefusingStore(MemoryDelayedMessageStore):
    """Takes no message with the id `bad`, and is away at the id `away`."""

    async def store(self, message: DelayedMessage, transaction: Transaction | None = None) -> None:
        if message.id == "bad":
            raise InvalidMessage("it is bad")
        if message.id == "away":
            raise BackendUnavailable("it is away")
        await super().store(message, transaction)


class StoreBackend(Backend):
    """A store alone; its queues are elsewhere."""

    kept = RefusingStore()

    def store(self, url: str, options: BackendOptions) -> RefusingStore:
        del url, options
        return self.kept


class QueuesBackend(StoreBackend):
    """The same with queues."""

    def transport(self, url: str, options: BackendOptions) -> MemoryTransport:
        del url, options
        return MemoryTransport()


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> MessagesTarget:
    monkeypatch.setattr(
        "delayline.backends._loaded", {"store": StoreBackend("store"), "queues": QueuesBackend("queues")}
    )
    monkeypatch.setattr(StoreBackend, "kept", RefusingStore())
    target = target_at("store://me:secret@host")
    assert isinstance(target, MessagesTarget)
    return target


async def deliver(target: MessagesTarget, *ids: str) -> Mapping[int, str]:
    async def record(refused: Mapping[int, str]) -> None: ...

    session = target.begin("sales")
    async with AsyncExitStack() as stack:
        await session.open(stack)
        rows = record_batch((message_id, "billing", DUE, '{"a": "1"}', b"body") for message_id in ids)
        return (await session.deliver(rows, Attempted(BatchName("r", 0, 0), 1, record))).refused


async def test_a_message_that_cannot_be_kept_is_refused_alone(target: MessagesTarget) -> None:
    many = [f"message-{number}" for number in range(250)]
    # When messages are delivered, one of which the store cannot keep
    assert await deliver(target, *many[:120], "bad", *many[120:]) == {120: "it is bad"}
    # Then it has all others as they were
    kept = {message.id: message for message in await StoreBackend.kept.pending(limit=1000)}
    assert set(kept) == set(many)
    found = kept["message-0"]
    assert (found.destination, found.due, dict(found.message.headers)) == ("billing", DUE, {"a": "1"})
    # and none twice after a repeated delivery
    await deliver(target, *many[:3])
    assert len(await StoreBackend.kept.pending(limit=1000)) == 250


async def test_a_back_end_that_is_away_fails_the_batch(target: MessagesTarget) -> None:
    with pytest.raises(BackendUnavailable, match="it is away"):
        await deliver(target, "a", "away", "b")


def test_destinations_are_looked_up_where_there_are_queues(target: MessagesTarget) -> None:
    assert (str(target), target.endpoint_named("sales")) == ("store://me:***@host", "sales")
    assert target.refusals(["nowhere"]) == {}
    with_queues = target_at("queues://host")
    assert with_queues is not None
    assert list(with_queues.refusals(["nowhere"])) == ["nowhere"]
