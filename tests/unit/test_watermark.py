"""Looks begin at the watermark; a message committed below it lowers it, also during a look."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

from delayline.errors import BackendUnavailable
from delayline.sql.settled_bound import BEGINNING_EVERY
from delayline.sql.watermark import (
    FULL_LOOK_EVERY,
    FULL_LOOK_SHARE,
    FULL_LOOK_WITHIN,
    OVERDUE_WITHIN,
    FullLooks,
    Seen,
    Watermark,
)

DUE = datetime(2030, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
NOW = DUE - 2 * HOUR


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Provide the monotonic clock's time, to be set."""
    now = [1000.0]
    monkeypatch.setattr("delayline.sql.watermark.time.monotonic", lambda: now[0])
    return now


def reached(due: datetime) -> Watermark:
    """Return a watermark at `due`."""
    watermark = Watermark()
    watermark.end(watermark.begin(), due)
    return watermark


def is_unchecked(watermark: Watermark, steady: list[float], at: float) -> bool:
    steady[0] = at
    return watermark.is_unchecked


def test_the_first_look_is_a_full_one() -> None:
    assert Watermark().begin().since is None


def test_a_stored_message_lowers_the_watermark_and_a_later_one_does_not() -> None:
    watermark = reached(DUE)
    assert not watermark.lower(DUE + HOUR)
    assert watermark.begin().since == DUE
    assert watermark.lower(DUE - HOUR)
    assert watermark.begin().since == DUE - HOUR


def test_a_message_stored_during_a_look_is_not_passed_over() -> None:
    # Given a look in progress
    watermark = reached(DUE)
    look = watermark.begin()
    # When a message below it is stored before the look ends further up
    watermark.lower(DUE - HOUR)
    watermark.end(look, DUE + HOUR)
    # Then the next look begins at that message
    assert watermark.begin().since == DUE - HOUR


def test_an_unknown_message_stored_during_a_look_makes_the_next_one_full() -> None:
    watermark = reached(DUE)
    look = watermark.begin()
    watermark.forget()
    watermark.end(look, DUE + HOUR)
    assert watermark.begin().since is None


def test_a_failed_look_changes_nothing() -> None:
    watermark = reached(DUE)
    watermark.abandon(watermark.begin(full=True))
    assert watermark.begin().since == DUE


@pytest.mark.parametrize(
    ("cost", "pause"),
    [(0.0, FULL_LOOK_EVERY), (0.1, 0.1 * FULL_LOOK_SHARE), (2.0, FULL_LOOK_WITHIN), (60.0, FULL_LOOK_WITHIN)],
)
def test_full_looks_pause_longer_the_more_they_cost_but_never_without_a_bound(
    steady: list[float], cost: float, pause: float
) -> None:
    # Given a full look that took so long
    watermark = reached(DUE)
    look = watermark.begin(full=True)
    steady[0] += cost
    watermark.end(look)
    # Then the next one is due after its pause
    assert watermark.pause == pytest.approx(pause)
    before, after = steady[0] + pause - 0.01, steady[0] + pause + 0.01
    assert [is_unchecked(watermark, steady, at) for at in (before, after)] == [False, True]
    assert watermark.begin().since == DUE, "a full look from the side does not move the watermark"


def looked(watermark: Watermark, earliest: datetime | None, *, oldest: int, following: int) -> datetime | None:
    """Take a full look at `NOW` and return where it began."""
    look = watermark.begin(full=True)
    watermark.end(look, None, Seen(earliest, NOW, oldest, following))
    return look.since


def test_full_looks_begin_where_no_transaction_in_progress_can_store(steady: list[float]) -> None:
    # Given a full look beside a transaction in progress, and nothing due before DUE
    watermark, settled = Watermark(), NOW - OVERDUE_WITHIN
    assert looked(watermark, DUE, oldest=7, following=9) is None
    # When further ones see that transaction still, then they begin at the beginning
    assert looked(watermark, DUE, oldest=7, following=10) is None
    # And when it has ended, the one after that begins behind what is settled
    assert looked(watermark, DUE, oldest=9, following=11) is None
    assert looked(watermark, DUE, oldest=11, following=12) == settled
    # But now and then one looks from the beginning
    steady[0] += BEGINNING_EVERY
    assert looked(watermark, DUE, oldest=12, following=12) is None


def test_full_looks_pass_over_no_message_that_was_there() -> None:
    # Given full looks that see a message which stays, as one that is claimed for long
    watermark, due = Watermark(), NOW - HOUR
    for transaction in range(3):
        looked(watermark, due, oldest=transaction, following=transaction)
    # Then they begin at it
    assert looked(watermark, due, oldest=3, following=3) == due


@pytest.mark.parametrize("stored", [lambda watermark: watermark.lower(NOW - HOUR), Watermark.forget])
def test_full_looks_begin_no_later_than_a_message_stored_since(stored: Callable[[Watermark], object]) -> None:
    # Given full looks that begin behind what is settled
    watermark = Watermark()
    for transaction in range(3):
        looked(watermark, None, oldest=transaction, following=transaction)
    # When an earlier message is stored
    stored(watermark)
    # Then the next full look sees it
    began = looked(watermark, NOW - HOUR, oldest=3, following=3)
    assert began is None or began <= NOW - HOUR


async def test_full_looks_report_messages_and_survive_an_outage() -> None:
    # Given full looks whose first attempt meets an outage
    outcomes: list[datetime | Exception] = [BackendUnavailable("gone"), DUE]
    found: asyncio.Future[datetime] = asyncio.get_running_loop().create_future()

    async def look() -> datetime | None:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    watermark = Watermark()
    watermark._pause = 0.0
    looks = FullLooks(watermark, look, found.set_result)
    try:
        # When a look from the watermark on has ended
        looks.schedule()
        # Then the second attempt's result is reported, and no further query runs
        assert await asyncio.wait_for(found, 10) == DUE
        assert outcomes == []
    finally:
        looks.stop()
