"""Every row of guarantee() holds while processes are killed at random."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from tests.cluster.harness import LEAST_KILLS, new_seed
from tests.eventually import PATIENCE

from delayline import Guarantee, StoredDelivery, TransactionMode, guarantee
from delayline.errors import UnsupportedTransactionMode
from delayline.sql import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cluster.harness import Cluster

MESSAGES = 150
HAVOC = 1.6  # seconds of killing
LAYOUTS = ["one file", "two files", "no store"]


def promised(layout: str, mode: str, folder: Path) -> Guarantee:
    """What guarantee() says of the parts the cluster is made of."""
    queues, other = f"sqlite:///{folder}/delayline.db", f"sqlite:///{folder}/store.db"
    delivery = None
    if layout != "no store":
        delivery = StoredDelivery(SqlDelayedMessageStore(queues if layout == "one file" else other))
    return guarantee(SqlTransport(queues), delivery, TransactionMode[mode])


def must_keep(row: Guarantee, cluster: Cluster, number: int) -> None:
    """Assert that `number` messages were sent, and arrived as the row promises while processes were killed."""
    effects, sent = cluster.results(), cluster.sent()
    lost, doubled = len(sent - set(effects)), sum(effects.values()) - len(effects)
    print(f"{row}; killed {dict(cluster.kills)}; {lost} lost, {doubled} doubled")  # noqa: T201
    assert len(sent) == number
    assert cluster.kills.total() >= LEAST_KILLS
    assert cluster.early() == []
    assert set(effects) <= sent
    if row in (Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE):
        assert lost == 0, sorted(sent - set(effects))
    if row in (Guarantee.EXACTLY_ONCE, Guarantee.AT_MOST_ONCE):
        assert doubled == 0, effects.most_common(3)


ROWS = [
    (layout, mode.name)
    for layout in LAYOUTS
    for mode in TransactionMode
    if (layout, mode) != ("two files", TransactionMode.TRANSACTION_SCOPE)
]


@pytest.mark.parametrize(("layout", "mode"), ROWS)
@pytest.mark.sample(4)
def test_the_guarantees_hold(make_cluster: Callable[..., Cluster], layout: str, mode: str, tmp_path: Path) -> None:
    # Given a sender, pollers and receivers
    row = promised(layout, mode, tmp_path)
    cluster = make_cluster(mode, layout)
    chance = random.Random(new_seed())  # noqa: S311 - repeatable
    sender = cluster.send(MESSAGES, delays=None if layout == "no store" else (0.2, HAVOC))
    posts = ["receiver", "receiver"] if layout == "no store" else ["poller", "poller", "receiver", "receiver"]
    # When all but the sender are killed, again and again
    cluster.havoc(chance, posts, HAVOC)
    assert sender.ended(PATIENCE)
    cluster.finish()
    # Then
    must_keep(row, cluster, MESSAGES)
    if row is Guarantee.AT_MOST_ONCE:
        assert max(cluster.handled().values()) == 1, "a handler saw a message twice"


def test_best_effort_dispatches_at_least_once(make_cluster: Callable[..., Cluster]) -> None:
    # Given a store and queues that share no transaction, and no transactions at all
    cluster = make_cluster("NONE", "two files")
    chance = random.Random(new_seed())  # noqa: S311
    cluster.start("receiver")
    sender = cluster.send(MESSAGES, delays=(0.2, HAVOC))
    # When only pollers are killed
    cluster.havoc(chance, ["poller", "poller"], HAVOC)
    assert sender.ended(PATIENCE)
    cluster.finish()
    # Then nothing is lost
    assert set(cluster.handled()) == cluster.sent()
    assert set(cluster.results()) == cluster.sent()
    assert cluster.early() == []


def test_best_effort_handles_at_most_once(make_cluster: Callable[..., Cluster]) -> None:
    # Given the same
    cluster = make_cluster("NONE", "two files")
    chance = random.Random(new_seed())  # noqa: S311
    cluster.start("poller")
    sender = cluster.send(MESSAGES, delays=(0.2, HAVOC))
    # When only receivers are killed
    cluster.havoc(chance, ["receiver", "receiver"], HAVOC, work=0.005)
    assert sender.ended(PATIENCE)
    cluster.finish()
    # Then nothing is handled twice
    assert max(cluster.handled().values()) == 1
    assert max(cluster.results().values()) == 1


def test_a_pair_that_cannot_honour_a_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTransactionMode, match="same database"):
        promised("two files", "TRANSACTION_SCOPE", tmp_path)


@pytest.mark.parametrize("layout", ["one file", "two files"])
def test_killed_senders_keep_their_word(make_cluster: Callable[..., Cluster], layout: str) -> None:
    # Given a poller and a receiver
    mode = "TRANSACTION_SCOPE" if layout == "one file" else "SENDS_ATOMIC_WITH_RECEIVE"
    cluster = make_cluster(mode, layout)
    chance = random.Random(new_seed())  # noqa: S311
    cluster.start("poller")
    cluster.start("receiver")
    # When senders are killed while they send
    for first in range(0, 6000, 1000):
        before = len(cluster.sent())
        sender = cluster.send(1000, first=first, delays=(0.01, 0.5))
        while len(cluster.sent()) < before + chance.randrange(10, 80) and not sender.ended(0.005):
            pass
        sender.kill()
    cluster.finish()
    # Then every send that returned was kept, and of the others each arrived whole or not at all
    effects, sent = cluster.results(), cluster.sent()
    tried = {words[1] for words in cluster.journal("trying")}
    assert len(sent) >= 60
    assert sent <= set(effects) <= tried
    assert max(effects.values()) == 1
    assert cluster.early() == []
