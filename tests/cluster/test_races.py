"""One process cancels or reschedules while another one dispatches: each message has exactly one outcome."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from delayline import TransactionMode
from delayline.spi import Outcome
from delayline.sql import SqlDelayedMessageStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cluster.harness import Cluster

MESSAGES = 80
LATER = timedelta(seconds=0.5)
Answers = dict[str, tuple[Outcome, datetime | None]]


async def change_minds(store: SqlDelayedMessageStore) -> Answers:
    """Cancel each message, or move every other one to a later time, at the very moment it is due."""
    answers: Answers = {}
    await store.initialize("orders", TransactionMode.RECEIVE_ONLY)
    try:
        while waiting := [message for message in await store.pending(limit=MESSAGES) if message.id not in answers]:
            message = waiting[0]
            await asyncio.sleep((message.due - datetime.now(UTC)).total_seconds())
            if int(message.id) % 2:
                answers[message.id] = await store.cancel(message.id), None
            else:
                due = message.due + LATER
                answers[message.id] = await store.reschedule(message.id, due), due
    finally:
        await store.close()
    return answers


@pytest.mark.parametrize("layout", ["one file", "two files"])
def test_results_are_right_under_concurrency(make_cluster: Callable[..., Cluster], layout: str) -> None:
    # Given pollers and a receiver at work on messages that fall due one after another
    cluster = make_cluster("SENDS_ATOMIC_WITH_RECEIVE", layout)
    for role in ("poller", "poller", "receiver"):
        cluster.start(role)
    cluster.running(3)
    cluster.send_all(MESSAGES, delays=(0.5, 1.5))
    # When another process cancels or reschedules them as they fall due
    answers = asyncio.run(change_minds(SqlDelayedMessageStore(f"sqlite:///{cluster.store_file}")))
    cluster.finish()
    # Then cancelled messages never arrived, all others did once, and rescheduled ones not before their new time
    cancelled = {id for id, (outcome, due) in answers.items() if outcome is Outcome.DONE and due is None}
    moved = {id: due for id, (outcome, due) in answers.items() if outcome is Outcome.DONE and due is not None}
    print(f"{layout}: {len(cancelled)} cancelled, {len(moved)} moved, of {len(answers)} asked for")  # noqa: T201
    assert set(cluster.results()) == cluster.sent() - cancelled
    assert max(cluster.results().values()) == 1
    handled = {words[1]: datetime.fromtimestamp(int(words[3]) / 1e6, UTC) for words in cluster.journal("handled")}
    assert [id for id, due in moved.items() if handled[id] < due] == []
