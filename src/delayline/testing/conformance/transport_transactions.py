"""Capability SupportsTransportTransactions: receives and sends together, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from delayline.errors import DispatchFailed, QueueNotFound
from delayline.testing.conformance.messages import operation
from delayline.testing.conformance.store_transactions import RolledBackError
from delayline.testing.conformance.transport_fixtures import TransportFixtures, nothing_left, received
from delayline.testing.conformance.transport_queues import ids
from delayline.transaction import SupportsSavepoints

if TYPE_CHECKING:
    from delayline.testing.conformance.transport_fixtures import TransactionalTransport


class TransportTransactionality(TransportFixtures):
    """Commit and rollback."""

    async def test_a_commit_acknowledges_and_sends(self, transactional: TransactionalTransport) -> None:
        """The message is gone and its consequences are there, in order."""
        await transactional.dispatch([operation("billing", "in")])
        receiver = await transactional.receiver("billing")
        [message] = await received(receiver)
        async with transactional.transaction() as transaction:
            assert await receiver.acknowledge(message, transaction) is True
            await transactional.dispatch([operation("sales", "out1"), operation("sales", "out2")], transaction)
            await transactional.dispatch([operation("sales", "out3")], transaction)
        assert ids(await received(await transactional.receiver("sales"), 3)) == ["out1", "out2", "out3"]
        assert await receiver.acknowledge(message) is False
        await receiver.release(message)
        await nothing_left(transactional, "billing")

    async def test_a_rollback_leaves_all_as_before(self, transactional: TransactionalTransport) -> None:
        """Nothing was sent, and the message is its receiver's still: to release or to try again."""
        await transactional.dispatch([operation("billing", "in")])
        receiver = await transactional.receiver("billing")
        [message] = await received(receiver)
        with pytest.raises(RolledBackError):
            async with transactional.transaction() as transaction:
                await receiver.acknowledge(message, transaction)
                await transactional.dispatch([operation("sales", "out")], transaction)
                raise RolledBackError
        await nothing_left(transactional, "sales")
        await receiver.release(message)
        assert ids(await received(receiver)) == ["in"]

    async def test_a_savepoint_undoes_its_sends_only(self, transactional: TransactionalTransport) -> None:
        """Sends inside it are undone; sends before and after it are not."""
        async with transactional.transaction() as transaction:
            if not isinstance(transaction, SupportsSavepoints):
                pytest.skip("not claimed: SupportsSavepoints")
            await transactional.dispatch([operation("sales", "before")], transaction)
            with pytest.raises(RolledBackError):
                async with transaction.savepoint():
                    await transactional.dispatch([operation("sales", "inside")], transaction)
                    raise RolledBackError
            await transactional.dispatch([operation("sales", "after")], transaction)
        assert ids(await received(await transactional.receiver("sales"), 2)) == ["before", "after"]
        await nothing_left(transactional, "sales")

    async def test_nothing_is_received_before_the_commit(self, transactional: TransactionalTransport) -> None:
        """A send in a transaction is seen at its commit."""
        receiver = await transactional.receiver("sales")
        async with transactional.transaction() as transaction:
            await transactional.dispatch([operation("sales", "second")], transaction)
            await receiver.stop()
        assert list(await receiver.receive(1)) == []
        assert ids(await received(await transactional.receiver("sales"))) == ["second"]

    async def test_a_missing_queue_in_a_transaction(self, transactional: TransactionalTransport) -> None:
        """It is known before the commit, and the others are sent if the transaction goes on."""
        async with transactional.transaction() as transaction:
            with pytest.raises(DispatchFailed) as failed:
                await transactional.dispatch([operation("nowhere", "lost"), operation("sales", "sent")], transaction)
            assert {position: type(error) for position, error in failed.value.failures.items()} == {0: QueueNotFound}
            await transactional.dispatch([operation("error", "lost")], transaction)
        assert ids(await received(await transactional.receiver("sales"))) == ["sent"]
        assert ids(await received(await transactional.receiver("error"))) == ["lost"]

    async def test_a_rollback_after_a_missing_queue(self, transactional: TransactionalTransport) -> None:
        """Then nothing is sent at all."""
        with pytest.raises(DispatchFailed):
            async with transactional.transaction() as transaction:
                await transactional.dispatch([operation("sales", "sent"), operation("nowhere")], transaction)
        await nothing_left(transactional, "sales")

    async def test_an_acknowledge_in_a_transaction_answers_at_once(self, transactional: TransactionalTransport) -> None:
        """False for a removed message: the caller rolls back instead of handling twice."""
        await transactional.dispatch([operation("billing")])
        receiver = await transactional.receiver("billing")
        [message] = await received(receiver)
        assert await receiver.acknowledge(message) is True
        async with transactional.transaction() as transaction:
            assert await receiver.acknowledge(message, transaction) is False

    async def test_a_transaction_can_be_tried_again(self, transactional: TransactionalTransport) -> None:
        """Rolled back, then done: the message is handled once."""
        await transactional.dispatch([operation("billing", "in")])
        receiver = await transactional.receiver("billing")
        [message] = await received(receiver)
        with pytest.raises(RolledBackError):
            async with transactional.transaction() as transaction:
                await receiver.acknowledge(message, transaction)
                raise RolledBackError
        async with transactional.transaction() as transaction:
            assert await receiver.acknowledge(message, transaction) is True
        assert await receiver.acknowledge(message) is False
        await nothing_left(transactional, "billing")

    async def test_after_commit_runs_after_the_commit(self, transactional: TransactionalTransport) -> None:
        """And not after a rollback."""
        called: list[str] = []
        async with transactional.transaction() as transaction:
            transaction.after_commit(lambda: called.append("committed"))
            await transactional.dispatch([operation("sales")], transaction)
            assert called == []
        with pytest.raises(RolledBackError):
            async with transactional.transaction() as transaction:
                transaction.after_commit(lambda: called.append("rolled back"))
                raise RolledBackError
        assert called == ["committed"]
