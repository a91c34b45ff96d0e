"""Looks begin where the last one ended, and at the very beginning from time to time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from delayline.sql.watermark import FULL_LOOK_EVERY, FULL_LOOK_SHARE, Watermark

DUE = datetime(2030, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Provide the monotonic clock's time, to be set."""
    now = [1000.0]
    monkeypatch.setattr("delayline.sql.watermark.time.monotonic", lambda: now[0])
    return now


def test_the_first_look_is_at_everything(steady: list[float]) -> None:
    assert Watermark().since() is None


def test_it_rises_and_is_lowered_by_what_is_stored(steady: list[float]) -> None:
    watermark = Watermark()
    watermark.looked(0)
    watermark.reached(DUE)
    watermark.lower(DUE + HOUR)
    assert watermark.since() == DUE
    watermark.lower(DUE - HOUR)
    assert watermark.since() == DUE - HOUR


@pytest.mark.parametrize(("cost", "pause"), [(0.0, FULL_LOOK_EVERY), (2.0, 2.0 * FULL_LOOK_SHARE)])
def test_a_full_look_comes_again_more_seldom_the_more_it_costs(steady: list[float], cost: float, pause: float) -> None:
    # Given a look at everything
    watermark = Watermark()
    watermark.looked(cost)
    watermark.reached(DUE)
    # When its pause is nearly over, and over
    steady[0] += pause - 0.01
    assert watermark.since() == DUE
    steady[0] += 0.02
    # Then it is due
    assert watermark.since() is None
    watermark.looked(cost)
    assert watermark.since() == DUE, "what was reached is not forgotten by it"


def test_when_nobody_knows_what_was_stored_everything_is_looked_at(steady: list[float]) -> None:
    watermark = Watermark()
    watermark.looked(0)
    watermark.reached(DUE)
    watermark.forget()
    assert watermark.since() is None
