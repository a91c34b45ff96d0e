"""Killed at every step: before and after each thing that a poller or a receiver does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.eventually import PATIENCE

from delayline.testing.faults import FETCH, REMOVE

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cluster.harness import Cluster, Step

MESSAGES = 200
ONE_FILE = ("TRANSACTION_SCOPE", "one file")
TWO_FILES = ("RECEIVE_ONLY", "two files")


def steps(*named: tuple[str, Any]) -> list[Step]:
    """Before and after each; in the middle of the work, not at its first call."""
    return [
        {"part": part, "on": method, "at": at, "call": call}
        for call, (part, method) in enumerate(named, start=1)
        for at in ("before", "after")
    ]


POLLER_ONE_FILE = steps(("store", FETCH), ("transport", "dispatch"), ("store", REMOVE), ("store", "commit"))
POLLER_TWO_FILES = steps(("store", FETCH), ("transport", "dispatch"), ("store", REMOVE))
RECEIVER_ONE_FILE = steps(
    ("transport", "receive"), ("transport", "acknowledge"), ("transport", "dispatch"), ("transport", "commit")
)
RECEIVER_TWO_FILES = steps(("transport", "receive"), ("transport", "dispatch"), ("transport", "acknowledge"))
IN_HANDLER: Step = {"die_in_handler": 2}


def name_of(step: Step) -> str:
    return f"{step['at']} {step['on']}"


def waits_or_left(cluster: Cluster) -> tuple[int, int]:
    """How many messages are still somewhere, and how many copies of them there are."""
    places = cluster.stored() + cluster.queued("orders")
    return len(set(places)), len(places)


@pytest.mark.parametrize(("mode", "layout"), [ONE_FILE, TWO_FILES], ids=lambda value: value)
@pytest.mark.sample(1)
def test_a_poller_killed_at_every_step(make_cluster: Callable[..., Cluster], mode: str, layout: str) -> None:
    # Given a backlog
    cluster = make_cluster(mode, layout)
    cluster.send_all(MESSAGES)
    plan = POLLER_ONE_FILE if layout == "one file" else POLLER_TWO_FILES
    copies = MESSAGES
    for step in plan:
        # When a poller is killed at this step
        assert cluster.start("poller", faults=[step]).ended(PATIENCE), f"was not killed {name_of(step)}"
        # Then every message is still in the store, or in its queue, and in both only where there are two files
        messages, now = waits_or_left(cluster)
        assert messages == MESSAGES, f"lost when killed {name_of(step)}"
        if layout == "one file":
            assert now == MESSAGES, f"doubled when killed {name_of(step)}"
        else:
            assert now - copies <= 10, f"more than a batch doubled when killed {name_of(step)}"
        copies = now
    # And another poller finishes the work
    assert cluster.stored(), "the backlog was too small for all these steps"
    cluster.start("poller")
    cluster.start("receiver")
    cluster.finish()
    assert set(cluster.results()) == cluster.sent()
    assert cluster.early() == []
    if layout == "one file":
        assert max(cluster.results().values()) == 1
    print(f"{layout}: {cluster.results().total() - MESSAGES} doubled by {len(plan)} kills")  # noqa: T201


def test_a_poller_killed_while_messages_move_inside_the_database(make_cluster: Callable[..., Cluster]) -> None:
    # Given a backlog in one file, and pollers that let the database move it
    cluster = make_cluster(*ONE_FILE)
    cluster.send_all(MESSAGES)
    for step in ("before move", "after move", "after commit"):
        # When a poller is killed at this step of its second batch
        assert cluster.start("poller", die_in_move=step).ended(PATIENCE), f"was not killed {step}"
        # Then every message is in exactly one place
        assert waits_or_left(cluster) == (MESSAGES, MESSAGES), step
    # And another poller finishes the work
    assert cluster.stored(), "the backlog was too small for all these steps"
    cluster.start("poller")
    cluster.start("receiver")
    cluster.finish()
    assert (set(cluster.results()), max(cluster.results().values())) == (cluster.sent(), 1)
    assert cluster.early() == []


@pytest.mark.parametrize(("mode", "layout"), [ONE_FILE, TWO_FILES], ids=lambda value: value)
@pytest.mark.sample(1)
def test_a_receiver_killed_at_every_step(make_cluster: Callable[..., Cluster], mode: str, layout: str) -> None:
    # Given messages in a queue
    cluster = make_cluster(mode, layout)
    cluster.send_all(MESSAGES, delays=None)
    plan = RECEIVER_ONE_FILE if layout == "one file" else RECEIVER_TWO_FILES
    for settings in [*({"faults": [step]} for step in plan), IN_HANDLER]:
        # When a receiver is killed at this step
        assert cluster.start("receiver", **settings).ended(PATIENCE), f"was not killed: {settings}"
        # Then each message is in its queue or has had its effect, not both in one transaction
        waiting, effects = cluster.queued("orders"), cluster.results()
        assert set(waiting) | set(effects) == cluster.sent(), f"lost: {settings}"
        if layout == "one file":
            assert len(waiting) + effects.total() == MESSAGES, f"doubled: {settings}"
    # And another receiver finishes the work
    assert cluster.queued("orders"), "there were too few messages for all these steps"
    cluster.start("receiver")
    cluster.finish()
    assert set(cluster.results()) == cluster.sent()
    if layout == "one file":
        assert max(cluster.results().values()) == 1
    print(f"{layout}: {cluster.results().total() - MESSAGES} doubled by {len(plan) + 1} kills")  # noqa: T201


def test_nothing_is_handled_twice_without_transactions(make_cluster: Callable[..., Cluster]) -> None:
    # Given mode NONE
    cluster = make_cluster("NONE", "one file")
    cluster.send_all(MESSAGES, delays=None)
    # When receivers are killed at every step
    for settings in [*({"faults": [step]} for step in RECEIVER_TWO_FILES), IN_HANDLER]:
        assert cluster.start("receiver", **settings).ended(PATIENCE), f"was not killed: {settings}"
    cluster.start("receiver")
    cluster.finish()
    # Then no handler has seen a message twice, and at most the messages in handlers are lost
    assert max(cluster.handled().values()) == 1
    kills, concurrency = len(RECEIVER_TWO_FILES) + 1, 4
    assert 0 <= MESSAGES - len(cluster.results()) <= kills * concurrency
