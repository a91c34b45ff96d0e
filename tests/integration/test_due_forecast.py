"""Forecasts of stores with more messages than are counted one by one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from delayline import DelayedMessage, Message, TransactionMode
from delayline.sql import SqlDelayedMessageStore
from delayline.sql.databases import database_at
from delayline.sql.due_forecast import level

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NOON = datetime(2030, 1, 2, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
NUMBER = 20_000


@pytest.fixture(params=["sqlite", "postgresql", "mariadb", "mariadb118"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'delayline.db'}"
    return str(request.getfixturevalue(f"{request.param}_url"))


async def analyze(url: str) -> None:
    """Take statistics, as autovacuum does within a minute."""
    if url.startswith("postgresql"):
        await database_at(url).write(lambda connection: connection.exec_driver_sql("ANALYZE"))


@pytest.fixture
async def store(url: str) -> AsyncIterator[SqlDelayedMessageStore]:
    """Provide a store with a message every second from noon on, the last tenth of them for billing."""
    store = SqlDelayedMessageStore(url)
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    for first in range(0, NUMBER, 5000):
        await store.store_many(
            [
                DelayedMessage(
                    Message(f"m{number}", {}, b""),
                    "billing" if number >= NUMBER * 9 // 10 else "sales",
                    NOON + number * timedelta(seconds=1),
                )
                for number in range(first, first + 5000)
            ]
        )
    await analyze(url)
    yield store
    await store.close()


@pytest.fixture(autouse=True)
def counted_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayline.sql.due_forecast.COUNTED_EACH", 1000)


async def test_large_buckets_are_estimated_and_small_ones_exact(store: SqlDelayedMessageStore) -> None:
    # When twenty thousand messages are counted, a thousand of each bucket at most
    edges = [NOON, NOON + timedelta(minutes=10), NOON + HOUR, NOON + 3 * HOUR, NOON + 6 * HOUR]
    found = await store.due_forecast(edges)
    # Then small buckets are exact
    numbers = [one.count for one in found.buckets]
    assert [one.exact for one in found.buckets] == [True, True, False, False, False, True]
    assert [numbers[0], numbers[1], numbers[5]] == [0, 600, 0]
    # And estimates are about right
    assert numbers[2:5] == [pytest.approx(expected, rel=0.35) for expected in (3000, 7200, 9200)]
    assert found.earliest == NOON
    assert not any(one.at_least for one in found.buckets)


async def test_large_buckets_are_divided_by_their_first_messages(store: SqlDelayedMessageStore) -> None:
    # When large buckets are divided by destination
    found = await store.due_forecast([NOON + 5 * HOUR], by_destination=True)
    # Then the parts are the count in sum, in the proportions of the first messages
    before, after = found.buckets
    assert dict(before.destinations) == {"sales": before.count}
    assert dict(after.destinations) == {"billing": after.count}
    assert not before.exact
    assert before.count == pytest.approx(18_000, rel=0.35)


async def test_messages_that_left_are_not_estimated(store: SqlDelayedMessageStore, url: str) -> None:
    # Given a store whose first half was dispatched
    due = await store.fetch_due(NOON + timedelta(days=1), NUMBER // 2, max_bytes=2**30)
    assert await store.remove_many(due) == NUMBER // 2
    await analyze(url)
    # When the rest is counted
    found = await store.due_forecast([NOON, NOON + timedelta(days=1)])
    # Then about half is left
    assert [found.buckets[0].count, found.buckets[2].count] == [0, 0]
    assert found.buckets[1].count == pytest.approx(NUMBER / 2, rel=0.35)


@pytest.mark.parametrize(
    ("counts", "budget", "expected"),
    [
        ([3, 4], 100, 100),
        ([3, 1000], 100, 97),
        ([1000, 1000], 100, 50),
        ([0, 0, 500, 10, 500], 100, 45),
        ([9] * 50, 10, 1),
    ],
)
def test_small_buckets_leave_their_share_to_large_ones(counts: list[int], budget: int, expected: int) -> None:
    assert level(counts, budget) == expected


async def test_messages_that_are_stored_in_turns_are_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a store whose senders take turns, each with its own delay, as far apart as the windows that are sampled
    monkeypatch.setattr("delayline.sql.sqlite.dialect.SAMPLED_WINDOWS", 40)
    store = SqlDelayedMessageStore(f"sqlite:///{tmp_path / 'delayline.db'}")
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    for first in range(0, 40_000, 5000):
        await store.store_many(
            [
                DelayedMessage(Message(f"m{number}", {}, b""), "sales", NOON + HOUR * (number % 1000))
                for number in range(first, first + 5000)
            ]
        )
    # When they are counted
    found = await store.due_forecast([NOON, NOON + 500 * HOUR])
    await store.close()
    # Then the estimate does not depend on whose turn it was
    assert [one.count for one in found.buckets] == [0, *[pytest.approx(20_000, rel=0.35)] * 2]
