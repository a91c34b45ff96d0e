"""Minute rows: written each minute by every process, read by the dashboard, and deleted after 30 days."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import func, select, update
from tests.eventually import eventually_async

import delayline.telemetry.history
from delayline import DelayedMessage, Endpoint, Message, StoredDelivery
from delayline.composition import endpoint_from, set_up_features
from delayline.dashboard.model import Unavailable
from delayline.dashboard.service import EndpointService
from delayline.doctor import Finding, State, Thresholds, examine_endpoint
from delayline.errors import ConfigurationError
from delayline.memory import MemoryDelayedMessageStore, MemoryTransport
from delayline.settings import Settings
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.sql.databases import database_at
from delayline.telemetry.history import MINUTES, MinuteHistory, MinuteRow, decoded, encoded, minutes_table, read_minutes
from delayline.telemetry.measurements import LATENESS_BOUNDS
from delayline.testing import ManualClock

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Connection

    from delayline import MessageContext

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'delayline.db'}"


async def passes(clock: ManualClock, time: timedelta, *, sleepers: int = 1) -> None:
    """Let time pass once the histories wait for the end of their minutes."""
    await eventually_async(lambda: len(clock._sleepers) >= sleepers)
    await clock.advance(time)


async def rows_of(url: str, *, scale: int = 1) -> list[MinuteRow]:
    def read(connection: Connection) -> list[MinuteRow] | None:
        return read_minutes(connection, None, "sales", NOON - 31 * 24 * HOUR, NOON + 100 * HOUR, scale=scale)

    return await database_at(url).look(read) or []


def sending(history: MinuteHistory) -> Endpoint:
    delivery = StoredDelivery(MemoryDelayedMessageStore(), polling=False)
    return Endpoint("sales", transport=MemoryTransport(), delayed_delivery=delivery, observers=[history])


async def test_each_minute_row_counts_the_work_of_its_minute(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an endpoint that counts, at half past a minute
    monkeypatch.setattr(delayline.telemetry.history, "LAST_ROW_WITHIN", 60.0)
    clock = ManualClock(NOON + MINUTE / 2)
    history = MinuteHistory(url, clock=clock)
    async with sending(history):
        # When two messages are dispatched late in the first minute, and one in the second
        history.dispatched({("billing", clock.now() - timedelta(seconds=3)): 2}, clock.now())
        await passes(clock, MINUTE / 2)
        await eventually_async(lambda: count_is(url, 1))
        history.dispatched({("billing", clock.now()): 1}, clock.now())
        await passes(clock, MINUTE)
        third = (NOON + 2 * MINUTE).timestamp() // 60
        await eventually_async(lambda: history._bases[1][0] == third)  # else its stop writes the second row again
    # Then each minute has its numbers and its lateness
    first, second, *last = await rows_of(url)
    assert [(one.start, one.dispatched) for one in (first, second)] == [(NOON, 2), (NOON + MINUTE, 1)]
    assert sum(first.lateness["billing"]) == 2
    assert first.lateness["billing"].index(2) > second.lateness["billing"].index(1)
    # And the end of the process left a row of the minute it ended in, and one of the hour
    assert [one.dispatched for one in last] == [0]
    [hour] = await rows_of(url, scale=60)
    assert (hour.start, hour.minutes, hour.dispatched) == (NOON, 60, 3)


async def count_is(url: str, number: int) -> bool:
    return len(await rows_of(url)) >= number


async def test_several_processes_have_separate_rows(url: str) -> None:
    # Given two processes of one endpoint
    clock = ManualClock(NOON)
    one, other = MinuteHistory(url, clock=clock), MinuteHistory(url, clock=clock)
    async with sending(one), sending(other):
        await passes(clock, MINUTE, sleepers=2)
        await eventually_async(lambda: count_is(url, 2))
    # Then each has its row of the minute
    rows = [row for row in await rows_of(url) if row.start == NOON]
    assert {row.process for row in rows} == {one.process, other.process}


async def test_old_rows_are_deleted_a_few_at_a_time(url: str) -> None:
    # Given rows of two days
    clock = ManualClock(NOON)
    history = MinuteHistory(url, clock=clock, kept_for=timedelta(days=1))
    async with sending(history):
        for _ in range(3):
            await passes(clock, MINUTE)
            await eventually_async(lambda: count_is(url, 1))
        # When more than a day has passed
        await passes(clock, timedelta(days=1, hours=5))

        async def gone() -> bool:
            return all(row.start > NOON + HOUR for row in await rows_of(url))

        for _ in range(5):
            await passes(clock, MINUTE)
        # Then the old ones are gone
        await eventually_async(gone)


async def test_damaged_rows_are_left_out(url: str) -> None:
    # Given a row that cannot be read
    clock = ManualClock(NOON)
    async with sending(MinuteHistory(url, clock=clock)):
        await passes(clock, MINUTE)
        await eventually_async(lambda: count_is(url, 1))
    database, table = database_at(url), minutes_table()
    await database.open()
    await database.write(lambda connection: connection.execute(update(table).values(content=b"nonsense")))
    assert await database.read(lambda connection: connection.execute(select(func.count()).select_from(table)).scalar())
    await database.close()
    # Then reading leaves it out
    assert await rows_of(url) == []


def test_rows_round_trip() -> None:
    row = MinuteRow(
        process="machine:1",
        start=NOON,
        minutes=1,
        written=NOON + MINUTE,
        sent=1,
        dispatched=2,
        handled=3,
        failed=4,
        moved=5,
        uncounted=6,
        lateness={"bill\ning": [0] * 20 + [7]},
        poller=NOON,
        receivers={"sales": None},
        running_handlers=8,
        breakers={"store": 2},
        measures={"lease.held": 1.0},
    )
    again = decoded("machine:1", 29_627_280, 1, encoded(row))
    assert again is not None
    assert again == MinuteRow(**{name: getattr(row, name) for name in MinuteRow.__slots__} | {"start": again.start})
    for damaged in (b"", b"x", encoded(row)[:-9], encoded(row)[:20]):
        assert decoded("machine:1", 1, 1, damaged) is None


async def test_the_doctor_tells_for_how_long_handlers_run(url: str) -> None:
    # Given an endpoint with minute rows, and a handler that does not end
    settings = Settings(endpoint="sales", url=url, history=True)
    assert [finding.state for finding in await examine_endpoint(settings) if finding.what == "handlers"] == []
    clock, running, end = ManualClock(datetime.now(UTC) - MINUTE), asyncio.Event(), asyncio.Event()
    endpoint = Endpoint("sales", url=url, observers=[MinuteHistory(url, clock=clock)])

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        running.set()
        await end.wait()

    async def handlers(limits: Thresholds | None = None) -> Finding:
        found = await examine_endpoint(settings, limits)
        return next(finding for finding in found if finding.what == "handlers")

    async with endpoint:
        # When no row is there yet, then that is said
        assert (await handlers()).state is State.NOT_CHECKED
        # When a row is written while it runs
        await endpoint.send("sales", "x")
        await running.wait()
        await passes(clock, MINUTE)
        await eventually_async(lambda: written(url, clock.now() - MINUTE, 1))
        short, stuck = await handlers(), await handlers(Thresholds(handler=timedelta(0)))
        end.set()
    # Then its age is there, and a problem above the limit
    assert short.text.startswith("1 messages are handled, in 1 processes; the oldest for ")
    assert short.state is State.OK
    assert stuck.state is State.PROBLEM
    assert short.numbers["oldest_seconds"] > 0


async def test_the_dashboard_shows_rates_lateness_and_processes(tmp_path: Path) -> None:
    # Given an endpoint with the setting, whose process dispatches a backlog for two minutes
    settings = Settings(endpoint="sales", url=f"sqlite:///{tmp_path / 'delayline.db'}", history=True)
    now = datetime.now(UTC)
    clock = ManualClock(now - MINUTE)
    history = MinuteHistory(settings.url, clock=clock)
    store = SqlDelayedMessageStore(settings.url)
    endpoint = Endpoint(
        "sales",
        transport=SqlTransport(settings.url),
        delayed_delivery=StoredDelivery(store, polling=False),
        observers=[history],
    )
    async with endpoint:
        for minute in range(2):
            history.dispatched({("billing", clock.now() - timedelta(seconds=7)): 600}, clock.now())
            await passes(clock, MINUTE)
            await eventually_async(partial(written, settings.url, now, minute + 1))
        await store.store(DelayedMessage(Message("m", {}, b""), "billing", datetime.now(UTC) + HOUR))
        async with EndpointService(settings) as service:
            # When the pages are asked for
            page, lateness, forecast = (
                await service.overview.now(),
                await service.overview.lateness("hour"),
                await service.overview.forecast("day"),
            )
    # Then they show what the rows have
    assert not isinstance(page.throughput, Unavailable)
    assert page.throughput.dispatched_a_second == pytest.approx(10)
    assert page.throughput.lateness_p99 == 10
    assert not isinstance(page.processes, Unavailable)
    assert [(process.row.process, process.alive) for process in page.processes] == [(history.process, True)]
    assert not isinstance(lateness, Unavailable)
    assert sum(map(sum, lateness.counts)) == 1200
    assert lateness.destinations == ["billing"]
    assert len(lateness.counts) == len(lateness.p50) == 60
    assert not isinstance(forecast, Unavailable)
    assert forecast.drain_rate == 10.0
    assert [bar.capacity for bar in forecast.bars][1] == 18_000
    assert not any(bar.exceeds for bar in forecast.bars)


async def test_rows_of_a_hundred_processes_are_all_in_the_pictures(tmp_path: Path) -> None:
    # Given a hundred processes that have dispatched 10 messages each, 3 of them late, in each minute of four hours
    settings = Settings(endpoint="sales", url=f"sqlite:///{tmp_path / 'delayline.db'}")
    await set_up_features(settings, [MINUTES])
    async with endpoint_from(settings, polling=False):
        pass
    start = datetime.now(UTC).replace(second=0, microsecond=0) - 4 * HOUR
    late = [7, *([0] * (len(LATENESS_BOUNDS) - 1)), 3]
    minute = MinuteRow("", start, 1, start, dispatched=10, handled=9, failed=1, lateness={"billing": late})
    content, first = encoded(minute), int(start.timestamp()) // 60
    rows = [
        {"endpoint": "sales", "scale": 1, "minute": first + passed, "process": f"p{process}", "content": content}
        for passed in range(240)
        for process in range(100)
    ]

    def put(connection: Connection) -> None:
        connection.execute(minutes_table().insert(), rows)

    database = database_at(settings.url)
    await database.open()
    await database.write(put)
    await database.close()
    # When the pictures are asked for, twice
    async with EndpointService(settings, time_limit=600) as service:
        for _ in range(2):
            rates, lateness = await service.overview.rates(), await service.overview.lateness("6 hours")
            # Then each minute has the work of all processes
            assert not isinstance(rates, Unavailable)
            assert [number for number in rates.dispatched if number is not None] == [1000] * 240
            assert [number for number in rates.failed if number is not None] == [100] * 240
            assert not isinstance(lateness, Unavailable)
            assert sum(map(sum, lateness.counts)) == 240_000
            assert sum(column[-1] for column in lateness.counts) == 72_000


async def written(url: str, now: datetime, minutes: int) -> bool:
    def read(connection: Connection) -> list[MinuteRow] | None:
        return read_minutes(connection, None, "sales", now - HOUR, now + HOUR)

    rows = await database_at(url).look(read)
    return len(rows or []) == minutes


def test_history_needs_a_sql_store() -> None:
    with pytest.raises(ConfigurationError, match="minute rows"):
        endpoint_from(Settings(endpoint="sales", url="memory:", history=True))
