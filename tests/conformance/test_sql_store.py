"""Conformance of the documents' sample store, whose lock is its transaction, and two instances of it on one table."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.conformance.test_custom_store import load
from tests.eventually import eventually_async
from tests.sampling import OtherLayout

from delayline import DelayedMessage, Endpoint, MemoryTransport, Message, StoredDelivery, TransactionMode
from delayline.testing import Fault, FaultyTransport, StoreConformance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline.spi import DelayedMessageStore, Transport

example = load(Path(__file__).parents[2] / "examples/sql_store/sql_store.py")


class OnPostgresql:
    """A database for every test."""

    @pytest.fixture(autouse=True)
    def database(self, postgresql_url: str) -> None:
        self.url = postgresql_url


class TestSqlStore(OnPostgresql, StoreConformance):
    durable = True

    async def make_store(self, tmp_path: Path) -> DelayedMessageStore:
        store: DelayedMessageStore = example.PostgresqlStore(self.url)
        return store


class TestSqlStoreDelivery(OnPostgresql, OtherLayout):
    burst = 100  # six verbs: a few statements for each message

    async def make_backends(self, tmp_path: Path) -> tuple[Transport, DelayedMessageStore]:
        return MemoryTransport(), example.PostgresqlStore(self.url)


class InTransactions(example.PostgresqlStore):  # type: ignore[name-defined, misc]
    """The store without its leases: nothing locks a message but its transaction."""

    async def fetch_next_due(self, at: datetime, transaction: Any = None) -> DelayedMessage | None:  # noqa: ANN401
        assert transaction is not None
        found: DelayedMessage | None = await super().fetch_next_due(at, transaction)
        return found

    async def remove(self, message: DelayedMessage, transaction: Any = None) -> bool:  # noqa: ANN401
        assert transaction is not None
        removed: bool = await super().remove(message, transaction)
        return removed


@pytest.mark.parametrize("failing", [False, True], ids=["all sent", "some fail"])
async def test_two_instances_on_one_table_double_nothing(postgresql_url: str, failing: bool) -> None:
    # Given two instances of an endpoint, each with a store of its own, and sends that take a while
    transport, retries = FaultyTransport(MemoryTransport()), 2
    dispatch, bad = transport.dispatch, {"3", "4"} if failing else set()

    async def slow(operations: Sequence[Any], transaction: Any = None) -> None:  # noqa: ANN401
        await asyncio.sleep(0.02)
        await dispatch(operations, transaction)

    transport.dispatch = slow  # type: ignore[method-assign]
    for message_id in bad:
        to_destination = lambda operations: operations[0].destination == "out"  # noqa: E731
        transport.inject(Fault("dispatch", RuntimeError("boom"), message_id=message_id, when=to_destination))
    await transport.setup_infrastructure(["out", "error"])
    endpoints = [
        Endpoint(
            "sales",
            transport=transport,
            delayed_delivery=StoredDelivery(InTransactions(postgresql_url), number_of_retries=retries),
        )
        for _ in range(2)
    ]
    assert {endpoint.transaction_mode for endpoint in endpoints} == {TransactionMode.SENDS_ATOMIC_WITH_RECEIVE}
    # When 30 messages are due at once
    due = datetime.now(UTC) + timedelta(seconds=2)
    store = example.PostgresqlStore(postgresql_url)

    async def empty() -> bool:
        return await store.next_due() is None

    async with contextlib.AsyncExitStack() as running:
        running.push_async_callback(store.close)
        await store.setup_infrastructure("sales")
        await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
        for number in range(30):
            await store.store(DelayedMessage(Message(str(number), {}, b""), "out", due))
        for endpoint in endpoints:
            await running.enter_async_context(endpoint)
        await eventually_async(empty, "every message has left")
    # Then each was sent once, or tried as often as it should be
    sent = [message.id for message in await transport.browse("out", 100)]
    assert sorted(sent) == sorted({str(number) for number in range(30)} - bad)
    assert sorted(message.id for message in await transport.browse("error", 100)) == sorted(bad)
    tried = Counter(call.ids[0] for call in transport.faults.recorded("dispatch"))
    # A failure is counted when the transaction that locks the message has ended: the other instance may fetch the
    # message before that, and then tries it once more. The dispatch to the error queue is counted in.
    assert {tried[message_id] for message_id in bad} <= {retries + 2, retries + 3}
