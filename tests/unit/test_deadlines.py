"""Answers that are overdue are seen in time, whenever their connections were made."""

from __future__ import annotations

import socket

from tests.eventually import eventually

from delayline.sql.deadlines import AnswerDeadline, StopLimit


def test_a_short_limit_is_seen_beside_long_ones() -> None:
    """Given a watchdog that looks once a second, when a connection with a short limit comes, then it looks oftener."""
    ends = [socket.socketpair() for _ in range(2)]
    stops = StopLimit()
    long = AnswerDeadline(ends[0][0].fileno(), 15.0, stops)
    short = AnswerDeadline(ends[1][0].fileno(), 0.2, stops)
    try:
        long.begin(15.0)
        short.begin(0.2)
        eventually(lambda: short.missed, "the connection is cut")
        assert not long.missed
    finally:
        for watch in (long, short):
            watch.close()
        for pair in ends:
            for end in pair:
                end.close()


def test_a_connection_that_comes_while_the_watchdog_sleeps_is_looked_at() -> None:
    """Given a watchdog that is not woken for a further connection of a usual limit, then its overdue answer is seen."""
    ends = [socket.socketpair() for _ in range(2)]
    stops = StopLimit()
    watches = [AnswerDeadline(ends[0][0].fileno(), 15.0, stops)]
    try:
        watches.append(AnswerDeadline(ends[1][0].fileno(), 15.0, stops))
        watches[1].begin(0.0)
        eventually(lambda: watches[1].missed, "the connection is cut")
        assert not watches[0].missed
    finally:
        for watch in watches:
            watch.close()
        for pair in ends:
            for end in pair:
                end.close()
