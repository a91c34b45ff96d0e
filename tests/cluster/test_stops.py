"""Ordinary trouble: processes that stop, hang for a while, come late, or start all at once."""

from __future__ import annotations

import signal
import sqlite3
import time
from typing import TYPE_CHECKING

import pytest
from tests.eventually import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cluster.harness import Cluster

ALL_LAYOUTS = [("TRANSACTION_SCOPE", "one file"), ("SENDS_ATOMIC_WITH_RECEIVE", "two files")]


@pytest.mark.parametrize(("mode", "layout"), ALL_LAYOUTS, ids=lambda value: value)
@pytest.mark.sample(2)
def test_stopping_in_the_middle_of_a_backlog(make_cluster: Callable[..., Cluster], mode: str, layout: str) -> None:
    # Given a backlog
    cluster = make_cluster(mode, layout)
    cluster.send_all(600)
    # When pollers and receivers are asked to stop while they work, several times
    for _ in range(3):
        before = cluster.results().total()
        workers = [cluster.start(role, work=0.002) for role in ("poller", "receiver")]
        eventually(lambda seen=before: cluster.results().total() > seen + 40, "some work", PATIENCE)  # type: ignore[misc]
        for worker in workers:
            worker.stop()
    assert cluster.stored() or cluster.queued("orders"), "the backlog was too small"
    assert len(cluster.journal("stopped")) == 1 + 3 * 2
    # Then the next processes find the remaining messages: none lost or doubled, in any mode
    cluster.start("poller")
    cluster.start("receiver")
    cluster.finish()
    assert set(cluster.results()) == cluster.sent()
    assert max(cluster.results().values()) == 1
    assert max(cluster.handled().values()) == 1


@pytest.mark.parametrize(("mode", "layout"), ALL_LAYOUTS, ids=lambda value: value)
@pytest.mark.sample(2)
def test_a_poller_that_hangs_for_a_while(make_cluster: Callable[..., Cluster], mode: str, layout: str) -> None:
    # Given two pollers at work
    cluster = make_cluster(mode, layout)
    pollers = [cluster.start("poller") for _ in range(2)]
    cluster.start("receiver")
    cluster.running(3)
    sender = cluster.send(300, delays=(0.2, 2.0))
    eventually(lambda: len(cluster.handled()) > 20, "some work")
    # When one stands still for as long as its other finds work, and then goes on
    pollers[0].signal(signal.SIGSTOP)
    before = len(cluster.handled())
    time.sleep(1.0)
    after = len(cluster.handled())
    pollers[0].signal(signal.SIGCONT)
    assert sender.ended(PATIENCE)
    cluster.finish()
    # Then nothing is lost, doubled or early
    print(f"{after - before} handled while one poller stood still")  # noqa: T201
    assert set(cluster.results()) == cluster.sent()
    assert len(cluster.sent()) == 300
    assert max(cluster.results().values()) == 1
    assert cluster.early() == []


def test_a_receiver_that_hangs_keeps_its_messages_only(make_cluster: Callable[..., Cluster]) -> None:
    # Given a receiver with messages in its hands
    cluster = make_cluster()
    cluster.send_all(100, delays=None)
    slow = cluster.start("receiver", work=0.5)
    eventually(lambda: len(cluster.handled()) >= 4, "messages in hand")
    # When it stands still and another comes
    slow.signal(signal.SIGSTOP)
    cluster.start("receiver")
    # Then the other handles all but those
    eventually(lambda: len(cluster.queued("orders")) <= 4, "the others")
    slow.signal(signal.SIGCONT)
    cluster.finish()
    assert set(cluster.results()) == cluster.sent()
    assert max(cluster.handled().values()) == 1


def test_a_killed_receiver_gives_its_messages_back_at_once(make_cluster: Callable[..., Cluster]) -> None:
    # Given a receiver with messages in its hands, and another one that waits
    cluster = make_cluster()
    first = cluster.start("receiver", work=60)
    cluster.running(1)
    cluster.send_all(4, delays=None)
    eventually(lambda: len(cluster.handled()) == 4, "all in the first one's hands")
    cluster.start("receiver", poll_interval=0.5)
    cluster.running(2)
    time.sleep(0.2)
    assert cluster.handled().total() == 4, "nobody else gets what is being handled"
    # When the first is killed
    killed = time.time_ns() // 1000
    first.kill()
    # Then the other has all of them, at once
    eventually(lambda: cluster.results().total() == 4, "the other to handle them")
    taken = [int(words[3]) - killed for words in cluster.journal("handled")[4:]]
    assert len(taken) == 4
    assert max(taken) < 3_000_000
    cluster.finish()


def test_a_sender_that_commits_late(make_cluster: Callable[..., Cluster]) -> None:
    # Given a poller that has nothing to wait for, and another program in the middle of a transaction
    cluster = make_cluster()
    cluster.start("poller")
    cluster.start("receiver")
    go = cluster.folder / "go"
    sender = cluster.send(20, delays=(0.05, 0.1), go=str(go))
    cluster.running(3)
    other = sqlite3.connect(cluster.store_file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        # When messages are sent whose due time passes before they can be committed
        go.touch()
        eventually(lambda: len(cluster.journal("trying")) == 20, "the sends")
        time.sleep(0.3)
        assert cluster.journal("sent") == []
    finally:
        other.execute("ROLLBACK")
        other.close()
    # Then they arrive at once, by a notification
    assert sender.ended(PATIENCE)
    eventually(lambda: cluster.results().total() == 20, "the late messages", 5)
    cluster.finish()
    assert max(cluster.results().values()) == 1


def test_many_start_at_once(make_cluster: Callable[..., Cluster]) -> None:
    # Given messages that fall due together
    cluster = make_cluster()
    sender = cluster.send(300, delays=(0.8, 0.8))
    # When eight processes start at one moment
    for role in ("poller", "receiver") * 4:
        cluster.start(role)
    assert sender.ended(PATIENCE)
    cluster.finish()
    # Then each message is handled once, and no poller sent what another one had sent
    assert set(cluster.results()) == cluster.sent()
    assert max(cluster.handled().values()) == 1
    assert cluster.early() == []


@pytest.mark.parametrize("role", ["poller", "receiver"])
def test_pollers_of_other_processes_are_woken(make_cluster: Callable[..., Cluster], role: str) -> None:
    # Given processes at rest, the poller asleep for a message due in an hour; one of them was killed and replaced
    cluster = make_cluster()
    cluster.send(1, first=1000, delays=(3600, 3600))
    cluster.start("poller")
    cluster.start("receiver", poll_interval=60)
    cluster.running(2)
    killed = cluster.start(role)
    cluster.running(3)
    killed.kill()
    # When another process stores something earlier
    sender = cluster.send(1, delays=(0.3, 0.3))
    assert sender.ended(PATIENCE)
    # Then it arrives now, not when the poller's minute is over
    eventually(lambda: "0" in cluster.results(), "the notification", 10)
    [[_, _, due, arrival]] = cluster.journal("handled")
    assert 0 <= int(arrival) - int(due) < 2_000_000
