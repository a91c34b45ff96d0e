"""A stop limits the waits for a database's server, and leaves work behind that does not end."""

from __future__ import annotations

import asyncio
import math
import threading
import time

import pytest

from delayline.errors import BackendUnavailable
from delayline.sql.deadlines import STOPPING, STOPPING_EACH, AnswerDeadline, StopLimit
from delayline.sql.workers import Workers

SILENT = BackendUnavailable("silent")


def test_a_stop_limits_waits_under_way_together_and_later_ones_each() -> None:
    stops = StopLimit()
    assert stops.end_of(100.0, 0.0) == 100.0
    stops.begin()
    at = stops.at
    assert at is not None
    assert at <= time.monotonic() + STOPPING
    assert stops.end_of(math.inf, at - 60) == at
    assert stops.end_of(math.inf, at + 60) == at + 60 + STOPPING_EACH
    assert stops.end_of(at - 1, at - 60) == at - 1
    assert 0 < stops.left(60) <= STOPPING
    stops.begin()  # another endpoint on the same database
    assert stops.at == at
    stops.end()
    assert stops.at == at
    stops.end()
    assert stops.end_of(math.inf, 0.0) == math.inf
    assert stops.left(60) == pytest.approx(60)


def test_a_connection_is_overdue_earlier_during_a_stop() -> None:
    stops = StopLimit()
    watch = AnswerDeadline(None, 60, stops)
    watch.begin(60)
    soon = time.monotonic() + STOPPING + 1
    assert not watch.is_overdue(soon)
    stops.begin()
    assert watch.is_overdue(soon)
    watch.end()
    assert not watch.is_overdue(soon)


async def test_work_that_does_not_end_is_left_behind() -> None:
    workers, ends, begun = Workers("test", 1), threading.Event(), threading.Event()
    done: list[str] = []

    def hang() -> None:
        begun.set()
        ends.wait()
        done.append("hung")

    under_way = asyncio.create_task(workers.run(hang))
    queued = asyncio.create_task(workers.run(lambda: done.append("queued")))
    await asyncio.to_thread(begun.wait)
    workers.abandon(lambda given: given > time.monotonic(), SILENT)
    await asyncio.sleep(0)
    assert not under_way.done()
    workers.abandon(lambda given: given <= time.monotonic(), SILENT)
    for task in (under_way, queued):
        with pytest.raises(BackendUnavailable, match="silent"):
            await task
    workers.stop(lambda: 0.0)
    ends.set()
    workers.stop()  # all threads have ended; work that had not begun was not done
    assert done == ["hung"]
