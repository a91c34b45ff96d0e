"""When a message that was found in a delay level is due."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayline.message import Headers, to_wire_time
from delayline.rabbitmq.admin.drain import Unmovable, waiting
from delayline.rabbitmq.levels import DELAY_HEADER, MAXIMUM_DELAY, level_name, route

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def sent(ago: float, delay: object, **more: object) -> dict[str, Any]:
    return {DELAY_HEADER: delay, Headers.TIME_SENT: to_wire_time(after(-ago)), **more}


@given(st.integers(1, MAXIMUM_DELAY), st.data())
def test_a_message_has_the_same_due_time_at_each_level(delay: int, data: st.DataObject) -> None:
    # Given a message that has been on its way for a while, and so waits at some level
    level, key = route(delay, "sales")
    elapsed = data.draw(st.integers(0, delay - 1))
    reached = 0
    while reached + (1 << level) <= elapsed or not delay >> level & 1:
        reached += (1 << level) if delay >> level & 1 else 0
        level -= 1

    # Then its due time is the sender's, and it does not count as stale
    found = waiting(key, sent(elapsed, delay), level, NOW)
    assert (found.destination, found.due, found.stale) == ("sales", after(delay - elapsed), False)


@pytest.mark.parametrize("clock_ahead", [-50, -5, 5, 50, 4000])
def test_a_senders_clock_that_is_wrong_makes_it_neither_early_nor_later_than_its_level_would(
    clock_ahead: float,
) -> None:
    # Given a message of 10 s that has just been sent, or is just about to leave level 3
    _, key = route(10, "sales")
    for elapsed, first, last in ((0.5, 2, 10), (7.5, 2, 10)):
        found = waiting(key, sent(elapsed - clock_ahead, 10), 3, NOW)
        assert after(first) <= found.due <= after(last)
        assert not found.stale


def test_a_retry_is_due_by_its_own_time_and_not_by_that_of_the_first_attempt() -> None:
    # Given a message that was sent a day ago, and is being retried since 3 s with a delay of 10 s
    _, key = route(10, "sales")
    headers = sent(86_400, 10) | {Headers.RETRIES: "2", Headers.RETRIES_TIMESTAMP: to_wire_time(after(-3))}
    assert waiting(key, headers, 3, NOW).due == after(7)


def test_headers_that_do_not_fit_the_level_are_stale_and_the_level_decides() -> None:
    # Given a retry of 10 s that carries nothing but the time of a first attempt a day ago
    _, key = route(10, "sales")
    found = waiting(key, sent(86_400, 10), 3, NOW)
    assert (found.due, found.stale) == (after(10), True)


def test_a_message_that_came_from_a_store_is_due_by_its_due_time() -> None:
    # Given one that was sent a day ago, waited in a store, and is in the levels since 4 s for its last 10 s
    _, key = route(10, "sales")
    headers = sent(86_400, 10) | {Headers.DELIVER_AT: to_wire_time(after(6))}
    assert (waiting(key, headers, 3, NOW).due, waiting(key, headers, 3, NOW).stale) == (after(6), False)

    # And a retry has that header from its first attempt
    assert waiting(key, headers | {Headers.RETRIES: "1"}, 3, NOW).stale


def test_the_time_it_came_to_its_level_bounds_it_to_a_second() -> None:
    # Given stale headers at level 1 of a 10 s delay, and a broker that wrote when it came there: a second ago
    _, key = route(10, "sales")
    death = {"queue": level_name("nsb", 3), "reason": "expired", "time": after(-1)}
    found = waiting(key, sent(86_400, 10, **{"x-death": [death]}), 1, NOW)
    assert (found.due, found.stale) == (after(2), True)
    assert waiting(key, sent(9.4, 10, **{"x-death": [death]}), 1, NOW).due == after(1)


@pytest.mark.parametrize(
    "deaths",
    [
        None, [], "x", [1], [{}], [{"time": "now"}], [{"time": NOW}],
        [{"time": NOW, "queue": "sales"}],
        [{"time": NOW - timedelta(days=9), "queue": level_name("nsb", 9)}],
        [{"time": NOW + timedelta(days=9), "queue": level_name("nsb", 9)}],
        [{"time": NOW, "queue": level_name("nsb", 1)}],
        [{"time": datetime.max.replace(tzinfo=UTC), "queue": level_name("nsb", 9)}],
        [{"time": datetime.min.replace(tzinfo=UTC), "queue": level_name("nsb", 9)}],
        [{"time": NOW, "queue": "nsb.delay-level-" + "9" * 5000}],
        [{"time": NOW, "queue": b"nsb.delay-level-09"}],
    ],
)  # fmt: skip
def test_x_death_entries_of_other_queues_and_times_are_ignored(deaths: object) -> None:
    _, key = route(10, "sales")
    assert waiting(key, sent(86_400, 10, **{"x-death": deaths}), 3, NOW).due == after(10)


@pytest.mark.parametrize("delay", [10, -3, 2**40, 0, -(10**20)])
def test_a_delay_header_that_is_another_number_does_not_make_it_early(delay: int) -> None:
    _, key = route(10, "sales")
    assert after(2) <= waiting(key, sent(1, delay), 3, NOW).due <= after(10)


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({}, "DelayInSeconds is missing"),
        ({Headers.TIME_SENT: to_wire_time(NOW)}, "DelayInSeconds is missing"),
        (sent(1, "10"), "DelayInSeconds is '10', and not a number"),
        (sent(1, 10.0), "DelayInSeconds is 10.0, and"),
        (sent(1, True), "DelayInSeconds is True, and"),
        ({DELAY_HEADER: 10}, "TimeSent is missing"),
        (sent(1, 10) | {Headers.TIME_SENT: "yesterday"}, "TimeSent is 'yesterday', and not a time"),
        (sent(1, 10) | {Headers.TIME_SENT: b"\xff"}, "TimeSent is b"),
        (sent(1, 10) | {Headers.RETRIES_TIMESTAMP: "soon"}, r"Retries\.Timestamp is 'soon'"),
        (sent(1, 10) | {Headers.TIME_SENT: "9999-12-31 23:59:59:000000 Z"}, "TimeSent is '9999"),
    ],
)
def test_headers_that_cannot_be_read_make_it_unmovable(headers: dict[str, Any], why: str) -> None:
    _, key = route(10, "sales")
    with pytest.raises(Unmovable, match=why):
        waiting(key, headers, 3, NOW)


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("sales", "is none of the delay levels'"),
        ("", "is none of the delay levels'"),
        (route(7, "sales")[1], "has a delay of 7 s, which does not wait at level 03"),
        (route(10, "")[1], "has 0 bytes"),
        (route(10, "a.#")[1], "pattern"),
    ],
)
def test_a_routing_key_that_leads_nowhere_makes_it_unmovable(key: str, why: str) -> None:
    with pytest.raises(Unmovable, match=why):
        waiting(key, sent(1, 10), 3, NOW)
