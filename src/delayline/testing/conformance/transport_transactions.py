"""Capability SupportsTransportTransactions: receives and sends together, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from delayline.errors import DispatchFailed, QueueNotFound
from delayline.testing.conformance.messages import operation
from delayline.testing.conformance.store_transactions import RolledBackError
from delayline.testing.conformance.transport_queues import ids
from delayline.testing.conformance.transport_room import TransportRoom, nothing_left, received
from delayline.transaction import SupportsSavepoints

if TYPE_CHECKING:
    from delayline.testing.conformance.transport_room import Transacting


class TransportTransactionality(TransportRoom):
    """Commit and rollback."""

    async def test_a_commit_acknowledges_and_sends(self, transacting: Transacting) -> None:
        """The message is gone and its consequences are there, in order."""
        await transacting.dispatch([operation("billing", "in")])
        receiver = await transacting.receiver("billing")
        [message] = await received(receiver)
        async with transacting.transaction() as transaction:
            assert await receiver.acknowledge(message, transaction) is True
            await transacting.dispatch([operation("sales", "out1"), operation("sales", "out2")], transaction)
            await transacting.dispatch([operation("sales", "out3")], transaction)
        assert ids(await received(await transacting.receiver("sales"), 3)) == ["out1", "out2", "out3"]
        assert await receiver.acknowledge(message) is False
        await receiver.release(message)
        await nothing_left(transacting, "billing")

    async def test_a_rollback_leaves_all_as_before(self, transacting: Transacting) -> None:
        """Nothing was sent, and the message is its receiver's still: to release or to try again."""
        await transacting.dispatch([operation("billing", "in")])
        receiver = await transacting.receiver("billing")
        [message] = await received(receiver)
        with pytest.raises(RolledBackError):
            async with transacting.transaction() as transaction:
                await receiver.acknowledge(message, transaction)
                await transacting.dispatch([operation("sales", "out")], transaction)
                raise RolledBackError
        await nothing_left(transacting, "sales")
        await receiver.release(message)
        assert ids(await received(receiver)) == ["in"]

    async def test_a_savepoint_undoes_its_sends_only(self, transacting: Transacting) -> None:
        """Sends inside it are undone; sends before and after it are not."""
        async with transacting.transaction() as transaction:
            if not isinstance(transaction, SupportsSavepoints):
                pytest.skip("not claimed: SupportsSavepoints")
            await transacting.dispatch([operation("sales", "before")], transaction)
            with pytest.raises(RolledBackError):
                async with transaction.savepoint():
                    await transacting.dispatch([operation("sales", "inside")], transaction)
                    raise RolledBackError
            await transacting.dispatch([operation("sales", "after")], transaction)
        assert ids(await received(await transacting.receiver("sales"), 2)) == ["before", "after"]
        await nothing_left(transacting, "sales")

    async def test_nothing_is_received_before_the_commit(self, transacting: Transacting) -> None:
        """A send in a transaction is seen at its commit."""
        receiver = await transacting.receiver("sales")
        async with transacting.transaction() as transaction:
            await transacting.dispatch([operation("sales", "second")], transaction)
            await receiver.stop()
        assert list(await receiver.receive(1)) == []
        assert ids(await received(await transacting.receiver("sales"))) == ["second"]

    async def test_a_missing_queue_in_a_transaction(self, transacting: Transacting) -> None:
        """It is known before the commit, and the others are sent if the transaction goes on."""
        async with transacting.transaction() as transaction:
            with pytest.raises(DispatchFailed) as failed:
                await transacting.dispatch([operation("nowhere", "lost"), operation("sales", "sent")], transaction)
            assert {position: type(error) for position, error in failed.value.failures.items()} == {0: QueueNotFound}
            await transacting.dispatch([operation("error", "lost")], transaction)
        assert ids(await received(await transacting.receiver("sales"))) == ["sent"]
        assert ids(await received(await transacting.receiver("error"))) == ["lost"]

    async def test_a_rollback_after_a_missing_queue(self, transacting: Transacting) -> None:
        """Then nothing is sent at all."""
        with pytest.raises(DispatchFailed):
            async with transacting.transaction() as transaction:
                await transacting.dispatch([operation("sales", "sent"), operation("nowhere")], transaction)
        await nothing_left(transacting, "sales")

    async def test_an_acknowledge_in_a_transaction_answers_at_once(self, transacting: Transacting) -> None:
        """False for a removed message: the caller rolls back instead of handling twice."""
        await transacting.dispatch([operation("billing")])
        receiver = await transacting.receiver("billing")
        [message] = await received(receiver)
        assert await receiver.acknowledge(message) is True
        async with transacting.transaction() as transaction:
            assert await receiver.acknowledge(message, transaction) is False

    async def test_a_transaction_can_be_tried_again(self, transacting: Transacting) -> None:
        """Rolled back, then done: the message is handled once."""
        await transacting.dispatch([operation("billing", "in")])
        receiver = await transacting.receiver("billing")
        [message] = await received(receiver)
        with pytest.raises(RolledBackError):
            async with transacting.transaction() as transaction:
                await receiver.acknowledge(message, transaction)
                raise RolledBackError
        async with transacting.transaction() as transaction:
            assert await receiver.acknowledge(message, transaction) is True
        assert await receiver.acknowledge(message) is False
        await nothing_left(transacting, "billing")

    async def test_after_commit_runs_after_the_commit(self, transacting: Transacting) -> None:
        """And not after a rollback."""
        called: list[str] = []
        async with transacting.transaction() as transaction:
            transaction.after_commit(lambda: called.append("committed"))
            await transacting.dispatch([operation("sales")], transaction)
            assert called == []
        with pytest.raises(RolledBackError):
            async with transacting.transaction() as transaction:
                transaction.after_commit(lambda: called.append("rolled back"))
                raise RolledBackError
        assert called == ["committed"]
