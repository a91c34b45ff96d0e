"""Ranges of a store's messages for the tasks of a job: of about the same size, however due times and ids are spread."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import pytest
from sqlalchemy import event

from delayline import DelayedMessage, Message, SqlDelayedMessageStore, TransactionMode
from delayline.bulk.scan import SAMPLED_EACH, TRIED_EACH, Condition, Order, PendingScan
from delayline.sql.databases import database_at

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TASKS: Final = 4
#: More than are read whole for so many ranges.
MANY: Final = SAMPLED_EACH * TRIED_EACH * TASKS + 500
FEW: Final = 2000
START: Final = datetime(2030, 1, 1, tzinfo=UTC)
LATE: Final = datetime(2099, 12, 31, tzinfo=UTC)
TABLE: Final = "sales.timeouts"


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Provide an empty database of each product."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'delayline.db'}"
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


def in_one_hour(number: int) -> datetime:
    """Return due times of which 99 of 100 are in the first hour, and the last is in 2099."""
    if number == 0:
        return LATE
    spread = timedelta(days=number) if number % 100 == 0 else timedelta(seconds=number * 7 % 3600)
    return START + spread


def at_one_instant(number: int) -> datetime:
    """Return due times of which 99 of 100 are the same."""
    return LATE if number == 0 else START + timedelta(days=number if number % 100 == 0 else 0)


def fill(url: str, number: int, due: Callable[[int], datetime]) -> None:
    """Store so many messages, and no more than one in twenty before them that has left."""

    async def store() -> None:
        await SqlDelayedMessageStore(url).setup_infrastructure("sales")
        opened = SqlDelayedMessageStore(url)
        await opened.initialize("sales", TransactionMode.RECEIVE_ONLY)
        messages = [
            DelayedMessage(Message(f"{place * 7919 % 100_003:06}", {}, b""), f"queue{place % 2}", due(place))
            for place in range(number)
        ]
        await opened.store_many(messages)
        await opened.close()

    asyncio.run(store())


def sizes(scan: PendingScan, tasks: int) -> list[int]:
    """Return the sizes of the ranges, which together have each message once."""
    parts = [[row[0] for rows in scan.rows(["id"], span, 1000) for row in rows] for span in scan.spans(tasks)]
    assert max(Counter(key for part in parts for key in part).values()) == 1
    return [len(part) for part in parts]


@pytest.mark.parametrize("order", ["due", "id"])
@pytest.mark.parametrize("due", [in_one_hour, at_one_instant])
@pytest.mark.parametrize("number", [FEW, MANY])
def test_the_largest_range_has_at_most_1_3_times_the_mean(
    url: str, number: int, due: Callable[[int], datetime], order: Order
) -> None:
    # Given messages of which 99 in a hundred are due in one hour, or at one instant, and one is due in 2099
    fill(url, number, due)
    # When they are cut into ranges
    found = sizes(PendingScan(url, TABLE, None, [], order=order), TASKS)
    # Then each has its share
    assert len(found) == TASKS and sum(found) == number
    assert max(found) <= 1.3 * number / TASKS


def test_ranges_are_of_the_messages_that_are_asked_for(url: str) -> None:
    fill(url, FEW, in_one_hour)
    conditions = [Condition("destination", "=", "queue0"), Condition("due", ">=", START + timedelta(minutes=30))]
    found = sizes(PendingScan(url, TABLE, None, conditions), TASKS)
    expected = sum(1 for place in range(0, FEW, 2) if in_one_hour(place) >= START + timedelta(minutes=30))
    assert sum(found) == expected
    assert max(found) <= expected / TASKS + 1


def test_a_table_that_has_lost_most_of_its_messages_is_cut_evenly_too(url: str) -> None:
    # Given a table whose numbers are nearly all of messages that have left
    fill(url, MANY, in_one_hour)
    left = asyncio.run(_only_late_messages(url))
    assert 0 < left < MANY / TRIED_EACH
    # When what is left is cut into ranges
    found = sizes(PendingScan(url, TABLE, None, []), TASKS)
    # Then they are even
    assert sum(found) == left
    assert max(found) - min(found) <= 1


async def _only_late_messages(url: str) -> int:
    """Remove what is due within the first hour, and return the number of the rest."""
    store = SqlDelayedMessageStore(url)
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    try:
        while messages := await store.fetch_due(START + timedelta(hours=1), 5000, max_bytes=1 << 30):
            await store.remove_many(messages)
        return len(await store.pending(limit=MANY))
    finally:
        await store.close()


def test_there_are_no_more_ranges_than_messages_fill(url: str) -> None:
    fill(url, FEW, in_one_hour)
    scan = PendingScan(url, TABLE, None, [])
    assert len(scan.spans(TASKS, FEW)) == 1
    assert len(scan.spans(TASKS, FEW // 2)) == 2
    assert len(PendingScan(url, TABLE, None, [Condition("destination", "=", "nowhere")]).spans(TASKS)) == 1


def test_ranges_of_a_large_table_are_cut_without_reading_it(postgresql_url: str) -> None:
    # Given a table with more messages than are read whole
    fill(postgresql_url, MANY, in_one_hour)
    statements: list[str] = []
    engine = database_at(postgresql_url).dialect.connections.engine  # type: ignore[attr-defined]
    event.listen(engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
    # When it is cut
    PendingScan(postgresql_url, TABLE, None, []).spans(TASKS)
    # Then rows are looked up by the primary key only
    assert statements and all("seq IN" in statement or "min(" in statement for statement in statements), statements
