"""Several pollers of one endpoint on one store make exactly 1 + number_of_retries attempts together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.conftest import SCOPES, MemoryStore, delayed

from delayline import Endpoint, MemoryTransport, StoredDelivery
from delayline.errors import DispatchFailed
from delayline.testing import Fault, FaultyTransport
from delayline.testing.clock import settle

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from delayline import DelayedMessage
    from delayline.spi import Transaction, TransportOperation
    from delayline.testing.clock import ManualClock

BOOM = RuntimeError("boom")


class SlowStore(MemoryStore):
    """A store whose failure counts take a moment, in which others run."""

    async def retry_many(
        self, messages: Sequence[DelayedMessage], at: datetime, transaction: Transaction | None = None
    ) -> int:
        await settle()
        return await super().retry_many(messages, at, transaction)

    async def remove_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> int:
        await settle()
        return await super().remove_many(messages, transaction)


@pytest.mark.parametrize("way", [way for way in SCOPES if way != "six verbs"])
@pytest.mark.parametrize("retries", [0, 1, 3])
@pytest.mark.parametrize("error", [BOOM, DispatchFailed({0: BOOM})], ids=["unattributed", "attributed"])
async def test_a_failing_message_is_attempted_once_more_than_its_retries(
    clock: ManualClock, way: str, retries: int, error: Exception
) -> None:
    # Given two pollers on one store, and a destination that fails
    settings: dict[str, Any] = SCOPES[way]
    store, transport = SlowStore(**settings), FaultyTransport(MemoryTransport())
    attempts: list[int] = []

    def fail(operations: Sequence[TransportOperation]) -> Exception | None:
        if operations[0].destination != "out":
            return None
        attempts.append(len(operations))
        return error

    transport.inject(Fault("dispatch", fail))
    endpoints = [
        Endpoint(
            "sales",
            transport=transport,
            delayed_delivery=StoredDelivery(store, number_of_retries=retries),
            clock=clock,
        )
        for _ in range(2)
    ]
    await transport.setup_infrastructure(["out"])
    await asyncio.gather(*(endpoint.start() for endpoint in endpoints))
    # When a message is due
    await store.store(delayed())
    await clock.advance(60)
    # Then the two of them tried it as often as one would have
    assert attempts == [1] * (1 + retries)
    assert [message.id for message in await transport.browse("error", 10)] == ["m"]
    assert await store.next_due() is None
    for endpoint in endpoints:
        await endpoint.stop()
