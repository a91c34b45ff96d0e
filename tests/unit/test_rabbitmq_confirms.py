"""Answers to publications, in whatever order and grouping a broker gives them."""

from __future__ import annotations

import asyncio

import pytest

from delayline import BackendUnavailable, Message
from delayline.errors import MessageRejected, QueueNotFound
from delayline.rabbitmq.amqp.confirms import Confirms, PublishBatch
from delayline.rabbitmq.amqp.errors import NotTaken, Returned
from delayline.rabbitmq.encoding import Publication
from delayline.rabbitmq.refusals import unconfirmed


def batch_of(number: int, *, prefix: str = "m") -> PublishBatch[Publication]:
    return PublishBatch([Publication(Message(f"{prefix}-{n}", {}, b""), "", "q") for n in range(number)])


def wrote(confirms: Confirms, number: int, *, prefix: str = "m") -> PublishBatch[Publication]:
    batch = batch_of(number, prefix=prefix)
    confirms.wrote(batch, range(number))
    return batch


async def test_a_batch_is_settled_by_its_last_answer() -> None:
    """Given three publications, when confirmed one by one and out of order, then the batch waits for the last."""
    confirms = Confirms()
    batch = wrote(confirms, 3)
    for tag in (3, 1):
        confirms.settle(tag, multiple=False, acknowledged=True)
        assert not batch.settled.done()
    confirms.settle(2, multiple=False, acknowledged=True)
    await batch.settled
    assert (batch.failures, len(confirms)) == ({}, 0)


async def test_one_answer_may_settle_several_batches() -> None:
    """Given two batches, when an answer is for all up to the middle of the second, then the first is settled."""
    confirms = Confirms()
    first, second = wrote(confirms, 3), wrote(confirms, 3)
    confirms.settle(2, multiple=False, acknowledged=True)
    confirms.settle(5, multiple=True, acknowledged=True)
    assert (first.settled.done(), second.settled.done(), len(confirms)) == (True, False, 1)
    confirms.settle(6, multiple=True, acknowledged=True)
    assert second.settled.done()


async def test_a_rejection_of_several_names_each() -> None:
    """Given a batch written with gaps, when two are rejected at once, then their positions have the errors."""
    confirms, batch = Confirms(), batch_of(4)
    batch.settle(1)  # one that was never written
    confirms.wrote(batch, [0, 2, 3])
    confirms.settle(1, multiple=False, acknowledged=True)
    confirms.settle(3, multiple=True, acknowledged=False)
    await batch.settled
    assert {position: type(error) for position, error in batch.failures.items()} == {
        2: NotTaken,
        3: NotTaken,
    }
    told = unconfirmed(batch.publications[3], batch.failures[3])
    assert isinstance(told, MessageRejected)
    assert "'m-3'" in str(told)


async def test_an_answer_to_nothing_is_ignored() -> None:
    """Given no such publication, when an answer comes twice or too late, then nothing happens."""
    confirms = Confirms()
    batch = wrote(confirms, 1)
    for _ in range(2):
        confirms.settle(1, multiple=True, acknowledged=True)
        confirms.settle(1, multiple=False, acknowledged=False)
    assert batch.failures == {}


@pytest.mark.parametrize("multiple", [True, False])
@pytest.mark.parametrize("tag", [0, 4, 2**30, 2**63, 2**64 - 1])
async def test_an_answer_to_what_was_never_published_is_refused(tag: int, multiple: bool) -> None:
    """Given three publications, when the broker confirms another number, then that is an error, and settles none."""
    confirms = Confirms()
    batch = wrote(confirms, 3)
    with pytest.raises(ValueError, match=f"confirms message {tag} of 3"):
        confirms.settle(tag, multiple=multiple, acknowledged=True)
    assert (batch.settled.done(), len(confirms)) == (False, 3)


async def test_what_is_settled_one_by_one_is_not_looked_at_again() -> None:
    """Given many single confirms, when a message returns, then only what is outstanding is searched for it."""
    confirms = Confirms()
    wrote(confirms, 1000)
    for tag in range(1, 1001):
        confirms.settle(tag, multiple=False, acknowledged=True)
    batch = wrote(confirms, 1, prefix="later")
    assert confirms._lowest == 1001
    assert confirms.returned("", "q", "later-0", "312 NO_ROUTE")
    confirms.settle(1001, multiple=True, acknowledged=True)
    assert isinstance(batch.failures[0], Returned)
    assert isinstance(unconfirmed(batch.publications[0], batch.failures[0]), QueueNotFound)


async def test_returns_find_copies_of_one_message_one_after_the_other() -> None:
    """Given the same message three times, when it comes back twice, then two of its positions fail."""
    confirms, same = Confirms(), Publication(Message("same", {}, b""), "", "q")
    batch = PublishBatch([same] * 3)
    confirms.wrote(batch, range(3))
    assert confirms.returned("", "q", "same", "312 NO_ROUTE")
    assert confirms.returned("", "q", "same", "312 NO_ROUTE")
    confirms.settle(3, multiple=True, acknowledged=True)
    assert {position: type(error) for position, error in batch.failures.items()} == {0: Returned, 1: Returned}


async def test_an_unknown_returned_message_fails_no_caller() -> None:
    """Given a message that came back with another id, when looked for, then no publication is blamed."""
    confirms = Confirms()
    batch = wrote(confirms, 2)
    assert not confirms.returned("", "q", "another", "312 NO_ROUTE")
    assert not confirms.returned("other", "q", "m-0", "312 NO_ROUTE")
    assert batch.failures == {}


async def test_a_closed_channel_returns_unsettled_publications_to_their_senders() -> None:
    """Given one confirmed and one returned of four, when the channel is closed, then the two others are over."""
    confirms = Confirms()
    batch = wrote(confirms, 4)
    confirms.settle(1, multiple=False, acknowledged=True)
    confirms.returned("", "q", "m-1", "312 NO_ROUTE")
    confirms.abandon()
    await batch.settled
    assert (batch.over, list(batch.failures), len(confirms)) == ([2, 3], [1], 0)
    await confirms.empty()


async def test_a_lost_connection_fails_every_batch() -> None:
    """Given two batches, one of them settled, when the connection is lost, then the other one fails."""
    confirms = Confirms()
    settled, open_one = wrote(confirms, 1), wrote(confirms, 2)
    confirms.settle(1, multiple=False, acknowledged=True)
    confirms.lose(BackendUnavailable("gone"))
    await settled.settled
    with pytest.raises(BackendUnavailable, match="gone"):
        await open_one.settled
    await confirms.empty()


async def test_answers_for_a_caller_that_left_do_no_harm() -> None:
    """Given a cancelled caller, when its answers come or its connection is lost, then nothing is raised."""
    confirms = Confirms()
    gone, lost = wrote(confirms, 1), wrote(confirms, 1)
    for batch in (gone, lost):
        waiting = asyncio.ensure_future(batch.settled)
        waiting.cancel()
    confirms.settle(1, multiple=False, acknowledged=True)
    confirms.lose(BackendUnavailable("gone"))
    assert gone.settled.cancelled()
    assert lost.settled.cancelled()
