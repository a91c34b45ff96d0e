"""Receivers killed while dozens of messages are completed together: lost and doubled only as guarantee() says."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.eventually import PATIENCE

from delayline import Guarantee, TransactionMode, guarantee
from delayline.sql import SqlTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cluster.harness import Cluster

MESSAGES = 600
TOGETHER = 24
CONCURRENCY = 64
STEPS = [("acknowledge", "before"), ("acknowledge", "after"), ("commit", "before"), ("commit", "after")]


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def databases(request: pytest.FixtureRequest) -> list[str]:
    """Provide the URL of an empty database on a server, or none for a file."""
    return [] if request.param == "sqlite" else [str(request.getfixturevalue(f"{request.param}_url"))]


@pytest.mark.parametrize("mode", [mode.name for mode in TransactionMode])
@pytest.mark.sample(4)
def test_receivers_killed_while_many_messages_are_completed(
    make_cluster: Callable[..., Cluster], databases: list[str], mode: str
) -> None:
    # Given messages in a queue
    cluster = make_cluster(mode, "no store", databases=databases)
    row = guarantee(SqlTransport(cluster.queues_url), None, TransactionMode[mode])
    cluster.send_all(MESSAGES, delays=None)
    sent, kills = cluster.sent(), 0
    for on, at in STEPS:
        if on == "commit" and mode in ("NONE", "RECEIVE_ONLY"):
            continue  # the acknowledgement commits itself
        # When a receiver is killed at this step of a completion of dozens
        step = {"on": on, "at": at, "at_least": TOGETHER}
        receiver = cluster.start("receiver", completing=step, concurrency=CONCURRENCY)
        assert receiver.ended(PATIENCE), f"was not killed {at} {on}; {cluster.log()}"
        kills += 1
        # Then each message is in its queue or has had its effect, or both or neither where its row says so
        waiting, effects = Counter(cluster.queued("orders")), cluster.results()
        if row is not Guarantee.AT_MOST_ONCE:
            assert set(waiting + effects) == sent, f"lost {at} {on}"
        if row is Guarantee.EXACTLY_ONCE:
            assert waiting + effects == Counter(sent), f"doubled {at} {on}"
        if row is Guarantee.AT_MOST_ONCE:
            assert not set(waiting) & set(cluster.handled()), f"handled and still there {at} {on}"
    sizes = [int(words[1]) for words in cluster.journal("completing")]
    assert len(sizes) == kills
    assert min(sizes) >= TOGETHER
    # And another receiver finishes the work
    cluster.start("receiver")
    cluster.finish()
    effects = cluster.results()
    lost, doubled = len(sent - set(effects)), sum(effects.values()) - len(effects)
    print(f"{mode}: {row}; {kills} killed completing {sizes}; {lost} lost, {doubled} doubled")  # noqa: T201
    assert len(cluster.queued("orders")) == 0
    assert set(effects) <= sent
    if row is Guarantee.AT_MOST_ONCE:
        assert max(cluster.handled().values()) == 1
        assert lost <= kills * CONCURRENCY
    else:
        assert lost == 0
        assert doubled == 0 or row is Guarantee.AT_LEAST_ONCE
        assert doubled <= kills * CONCURRENCY
