"""The timeout manager's rows of the guarantees: what is promised is what is seen while processes are killed."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.cluster.harness import PATIENCE, eventually, new_seed
from tests.cluster.test_steps import name_of, steps

from delayline import Guarantee, TimeoutManagerDelivery, TransactionMode, guarantee
from delayline.sql import SqlTimeoutPersister, SqlTransport

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cluster.harness import Cluster

MESSAGES = 120
HAVOC = 1.6  # seconds of killing
POSTS = ["poller", "poller", "receiver", "receiver"]
#: The storing satellite takes a message off the queue and stores it.
STORING = steps(("transport", "receive"), ("transport", "acknowledge"), ("store", "add"), ("transport", "commit"))
#: The poller asks for it, and the dispatching satellite sends it.
DISPATCHING = steps(
    ("store", "next_chunk"), ("transport", "dispatch"), ("store", "commit"), ("store", "take"), ("transport", "commit")
)


def promised(layout: str, mode: str, folder: Path) -> Guarantee:
    queues, other = f"sqlite:///{folder}/delayline.db", f"sqlite:///{folder}/store.db"
    delivery = TimeoutManagerDelivery(SqlTimeoutPersister(queues if layout == "one file" else other))
    return guarantee(SqlTransport(queues), delivery, TransactionMode[mode])


ROWS = [
    (layout, mode.name)
    for layout in ("one file", "two files")
    for mode in TransactionMode
    if (layout, mode) != ("two files", TransactionMode.TRANSACTION_SCOPE)
]


@pytest.mark.parametrize(("layout", "mode"), ROWS)
def test_what_is_promised_is_what_is_seen(
    make_cluster: Callable[..., Cluster], layout: str, mode: str, tmp_path: Path
) -> None:
    # Given a sender, two timeout managers and receivers
    row = promised(layout, mode, tmp_path)
    cluster = make_cluster(mode, layout, delivery="timeouts")
    chance = random.Random(new_seed())  # noqa: S311 - repeatable
    sender = cluster.send(MESSAGES, delays=(0.2, HAVOC))
    # When all but the sender are killed, again and again
    cluster.havoc(chance, POSTS, HAVOC)
    assert sender.ended(PATIENCE)
    cluster.finish()
    # Then
    effects, sent = cluster.results(), cluster.sent()
    lost, doubled = len(sent - set(effects)), sum(effects.values()) - len(effects)
    print(f"{layout}, {mode}: {row}; killed {dict(cluster.kills)}; {lost} lost, {doubled} doubled")  # noqa: T201
    assert len(sent) == MESSAGES
    assert cluster.kills.total() >= 4
    assert cluster.early() == []
    assert set(effects) <= sent
    if row in (Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE):
        assert lost == 0, sorted(sent - set(effects))
    if row in (Guarantee.EXACTLY_ONCE, Guarantee.AT_MOST_ONCE):
        assert doubled == 0, effects.most_common(3)


def test_a_timeout_manager_killed_at_every_step(make_cluster: Callable[..., Cluster], postgresql_url: str) -> None:
    # Given messages on their way to the storage
    cluster = make_cluster(databases=[postgresql_url], delivery="timeouts")
    cluster.send_all(MESSAGES, delays=(30, 31))
    for step in STORING:
        # When a timeout manager is killed at this step
        assert cluster.start("poller", faults=[step]).ended(PATIENCE), f"was not killed {name_of(step)}"
        # Then each message is in one place
        assert Counter(cluster.stored()) == Counter(cluster.sent()), f"killed {name_of(step)}"
    for step in DISPATCHING:
        # Given some that are due
        before = len(cluster.sent())
        cluster.send(20, first=before, delays=(0.5, 0.6)).ended(PATIENCE)
        # When a timeout manager is killed at this step
        assert cluster.start("poller", faults=[step]).ended(PATIENCE), f"was not killed {name_of(step)}"
        # Then each message is still stored or in its queue, never both
        assert Counter(cluster.stored() + cluster.queued("orders")) == Counter(cluster.sent()), name_of(step)
    # And others finish the work
    cluster.start("poller")
    cluster.start("receiver")
    due = {str(number) for number in range(MESSAGES, len(cluster.sent()))}
    eventually(lambda: due <= set(cluster.results()), "what was due to arrive", 90)
    assert max(cluster.results().values()) == 1
    assert cluster.early() == []


@pytest.mark.parametrize("product", ["postgresql", "mariadb"])
def test_timeout_managers_killed_at_random_on_a_server(
    make_cluster: Callable[..., Cluster], product: str, request: pytest.FixtureRequest
) -> None:
    cluster = make_cluster(databases=[request.getfixturevalue(f"{product}_url")], delivery="timeouts")
    chance = random.Random(new_seed())  # noqa: S311 - repeatable
    sender = cluster.send(MESSAGES, delays=(0.2, HAVOC))
    cluster.havoc(chance, POSTS, HAVOC)
    assert sender.ended(PATIENCE)
    cluster.finish()
    assert set(cluster.results()) == cluster.sent()
    assert max(cluster.results().values()) == 1
    assert cluster.early() == []
