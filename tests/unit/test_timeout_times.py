"""The exact due time of rows in .NET's timeout tables whose column has lost a part of it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy.engine import make_url

from delayline.message import TimeoutHeaders, to_wire_time
from delayline.sql.mariadb.dialect import Mariadb
from delayline.sql.postgresql.dialect import Postgresql
from delayline.timeouts.nservicebus import PERSISTENCE_VERSION, TimeoutTimes

KEPT = datetime(2026, 11, 23, 5, 51, 38)  # noqa: DTZ001 - as the column keeps it
TIME = KEPT.replace(tzinfo=UTC)
LOST = timedelta(seconds=1)


@pytest.fixture
def times() -> TimeoutTimes:
    return TimeoutTimes(Mariadb(make_url("mariadb://server/shop")))


def headers(expire: object) -> str:
    return json.dumps({"NServiceBus.MessageId": "m", TimeoutHeaders.EXPIRE: expire}, indent=2)


@pytest.mark.parametrize(
    ("lost", "due"),
    [
        (timedelta(milliseconds=873), timedelta(milliseconds=873)),
        (timedelta(milliseconds=-400), timedelta(0)),  # MySQL rounds up as well
        (timedelta(milliseconds=1999), timedelta(milliseconds=1999)),
        (timedelta(seconds=-1), timedelta(0)),
        (timedelta(seconds=-1.1), LOST),  # of another time
        (timedelta(seconds=2), LOST),
        (timedelta(days=-3000), LOST),
        (timedelta(days=25_000), LOST),
    ],
)
def test_the_later_of_both_times_counts_where_they_are_close(
    times: TimeoutTimes, lost: timedelta, due: timedelta
) -> None:
    expire = to_wire_time(TIME + lost)
    assert times.exact(KEPT, headers(expire)) == TIME + due
    assert times.exact(KEPT, headers(expire).encode()) == TIME + due


@pytest.mark.parametrize(
    "odd",
    ["", "soon", "2026-11-23 05:51:38,99999", "2026-11-23 05:51:38:99999 Z", "9999-99-99 99:99:99:999999 Z", "\0" * 28],
)
def test_a_damaged_header_is_no_header(times: TimeoutTimes, odd: str) -> None:
    assert times.exact(KEPT, headers(odd)) == TIME + LOST


@pytest.mark.parametrize("found", [None, "", "{}", "no json", b"\xff\xfe", headers(17), headers(None)])
def test_without_the_header_the_most_that_may_be_lost_is_added(times: TimeoutTimes, found: str | bytes | None) -> None:
    assert times.exact(KEPT, found) == TIME + LOST


def test_own_rows_and_exact_columns_are_taken_as_they_are(times: TimeoutTimes) -> None:
    assert times.exact(KEPT, None, PERSISTENCE_VERSION) == TIME
    exact = TimeoutTimes(Postgresql(make_url("postgresql://server/shop")))
    assert exact.exact(KEPT, headers(to_wire_time(TIME + LOST / 2))) == TIME
