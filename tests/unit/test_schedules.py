"""Recurring messages of an endpoint in memory, on a manual clock."""

from __future__ import annotations

import asyncio
import logging
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from delayline import (
    ConfigurationError,
    Endpoint,
    InvalidMessage,
    MemoryDelayedMessageStore,
    MemoryTransport,
    Outcome,
    QueueNotFound,
    cron,
    interval,
)
from delayline.delayed.recurrence import Recurrence
from delayline.message import Headers
from delayline.testing.clock import settle

if TYPE_CHECKING:
    from delayline.testing.clock import ManualClock

HOURLY = interval(hours=1)


class Shop:
    """An endpoint whose queue is read, and whose processes of several versions are started in turn."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.store = MemoryDelayedMessageStore()
        self.transport = MemoryTransport()

    def process(self, recurrence: Recurrence | None = HOURLY, body: bytes = b"report", **settings: object) -> Endpoint:
        """Return a process of the version that declares this."""
        endpoint = Endpoint("shop", transport=self.transport, delayed_delivery=self.store, clock=self.clock)
        if recurrence is not None:
            given: dict[str, Any] = {"check_destination": False, **settings}
            endpoint.every("nightly", recurrence, "reports", body, **given)
        return endpoint

    async def dispatched(self) -> list[str]:
        """Return the ids in the queue of reports."""
        await settle()
        return [message.id for message in await self.transport.browse("reports", 1000)]

    async def pending(self, endpoint: Endpoint) -> list[str]:
        return [message.id for message in await endpoint.delayed.pending()]


@pytest.fixture
async def shop(clock: ManualClock) -> Shop:
    shop = Shop(clock)
    await shop.transport.setup_infrastructure(["reports"])
    return shop


def names(*hours: int) -> list[str]:
    return [f"nightly@2026-01-01T{hour:02}:00:00.000000Z" for hour in hours]


async def test_each_occurrence_is_followed_by_the_next(shop: Shop, clock: ManualClock) -> None:
    """Given two processes with one schedule, then each occurrence is dispatched once, as an ordinary message."""
    async with shop.process() as first, shop.process():
        assert await shop.pending(first) == names(1)
        for hour in (1, 2, 3):
            await clock.advance(timedelta(hours=1))
            assert await shop.dispatched() == names(*range(1, hour + 1))
            assert await shop.pending(first) == names(hour + 1)
    message = (await shop.transport.browse("reports", 1))[0]
    assert message.body == b"report"
    assert message.headers[Headers.SCHEDULE] == "nightly"
    assert message.headers[Headers.MESSAGE_ID] == message.id
    assert not any(name.startswith(Headers.DISPATCH_PROPERTIES) for name in message.headers)


@pytest.mark.parametrize(("missed", "then"), [("none", names(5)), ("one", names(1, 5)), ("all", names(1, 2, 3, 4, 5))])
async def test_missed_occurrences(shop: Shop, clock: ManualClock, missed: str, then: list[str]) -> None:
    """Given no process for four and a half hours, then none, one or all of the missed occurrences leave."""
    async with shop.process(missed=missed):
        pass
    clock.set(clock.now() + timedelta(hours=4, minutes=30))
    async with shop.process(missed=missed) as endpoint:
        await settle()
        await clock.advance(timedelta(minutes=30))
        assert await shop.dispatched() == then
        assert await shop.pending(endpoint) == names(6)


async def test_an_occurrence_that_is_rescheduled_is_not_missed(shop: Shop, clock: ManualClock) -> None:
    async with shop.process(missed="none") as endpoint:
        later = clock.now() + timedelta(minutes=90)
        assert await endpoint.delayed.reschedule(names(1)[0], later) is Outcome.DONE
        await clock.advance(timedelta(minutes=90))
        assert await shop.dispatched() == names(1)
        assert await shop.pending(endpoint) == names(2)


async def test_a_clock_that_is_set_back_repeats_nothing(shop: Shop, clock: ManualClock) -> None:
    async with shop.process() as endpoint:
        await clock.advance(timedelta(hours=1))
        clock.set(clock.now() - timedelta(minutes=30))
        await clock.advance(timedelta(hours=1))
        assert await shop.dispatched() == names(1)
        assert await shop.pending(endpoint) == names(2)


async def test_pause_resume_and_trigger(shop: Shop, clock: ManualClock) -> None:
    async with shop.process() as endpoint:
        paused = await endpoint.schedules.pause("nightly")
        assert (paused.paused, paused.next_at, await shop.pending(endpoint)) == (True, None, [])
        assert await endpoint.schedules.pause("nightly") == paused
        await clock.advance(timedelta(minutes=150))
        triggered = await endpoint.schedules.trigger("nightly")
        assert await shop.dispatched() == [triggered]
        resumed = await endpoint.schedules.resume("nightly")
        assert await endpoint.schedules.resume("nightly") == resumed
        assert await shop.pending(endpoint) == names(3)
        await endpoint.schedules.remove("nightly")
        assert (await shop.pending(endpoint), await endpoint.schedules.list()) == ([], [])
        for change in (endpoint.schedules.pause, endpoint.schedules.trigger, endpoint.schedules.remove):
            with pytest.raises(ConfigurationError, match="there is no schedule 'nightly'"):
                await change("nightly")


async def test_a_paused_schedule_stays_paused_over_starts(shop: Shop) -> None:
    async with shop.process() as endpoint:
        await endpoint.schedules.pause("nightly")
    async with shop.process(body=b"new") as endpoint:
        assert await shop.pending(endpoint) == []
        (schedule,) = await endpoint.schedules.list()
        assert (schedule.paused, schedule.body) == (True, b"new")


async def test_the_newer_declaration_wins(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """Given a rolling deployment, when a process of the older version restarts, then nothing flips back."""
    async with shop.process() as old, shop.process(interval(hours=2), b"new") as new:
        assert await shop.pending(old) == names(2)
        with caplog.at_level(logging.WARNING, "delayline"):
            async with shop.process() as restarted:
                assert await shop.pending(restarted) == names(2)
        assert "schedule nightly is declared here as it was before" in caplog.text
        async with shop.process(interval(hours=2), b"new"), shop.process():
            (schedule,) = await new.schedules.list()
            assert (schedule.recurrence, schedule.body) == ("every 7200 s", b"new")
        await new.schedules.remove("nightly")
        async with shop.process():
            assert await shop.pending(old) == names(1)


async def test_a_change_by_hand_holds_until_the_declaration_changes(shop: Shop) -> None:
    async with shop.process() as endpoint:
        changed = await endpoint.schedules.change("nightly", recurrence=interval(hours=5), body={"by": "hand"})
        assert changed.body == b'{"by":"hand"}'
        assert await shop.pending(endpoint) == names(5)
    async with shop.process() as endpoint:
        assert await shop.pending(endpoint) == names(5)
    async with shop.process(interval(hours=3)) as endpoint:
        assert await shop.pending(endpoint) == names(3)


async def test_a_changed_body_keeps_the_times(shop: Shop, clock: ManualClock) -> None:
    async with shop.process():
        await clock.advance(timedelta(minutes=90))
    async with shop.process(body=b"new") as endpoint:
        assert await shop.pending(endpoint) == names(2)
        await clock.advance(timedelta(minutes=30))
        assert [message.body for message in await shop.transport.browse("reports", 9)] == [b"report", b"new"]


async def test_a_cancelled_occurrence_does_not_end_the_schedule(shop: Shop, clock: ManualClock) -> None:
    async with shop.process() as endpoint:
        assert await endpoint.delayed.cancel(names(1)[0]) is Outcome.DONE
        await clock.advance(timedelta(minutes=65))
        assert await shop.dispatched() == []
        assert await shop.pending(endpoint) == names(2)


async def test_an_unreadable_schedule_is_tried_again(
    shop: Shop, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a poller that cannot tell what follows, then the occurrence leaves, and the rest follows once it can."""
    nine = cron("0 * * * *", tz="Europe/Berlin")
    async with shop.process(nine) as endpoint:
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "cronsim", None)
            await clock.advance(timedelta(minutes=61))
            assert await shop.dispatched() == names(1)
            assert await shop.pending(endpoint) == []
        await clock.advance(timedelta(minutes=2))
        assert await shop.pending(endpoint) == names(2)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"name": ""}, InvalidMessage, "1 to 200 characters"),
        ({"name": "x" * 250}, InvalidMessage, "1 to 200 characters, and has 250"),
        ({"name": "a\nb"}, InvalidMessage, "control characters"),
        ({"name": 7}, InvalidMessage, "schedule name must be a text"),
        ({"recurrence": "0 9 * * *"}, ConfigurationError, "give cron"),
        ({"destination": ""}, InvalidMessage, "destination must be a text"),
        ({"missed": "some"}, ConfigurationError, "missed must be 'none', 'one' or 'all', not 'some'"),
        ({"name": "nightly"}, ConfigurationError, "declared twice"),
        ({"headers": {"a": 1}}, InvalidMessage, "str to str"),
    ],
)
async def test_bad_declarations_are_refused(
    shop: Shop, given: dict[str, Any], error: type[Exception], text: str
) -> None:
    endpoint = shop.process()
    right: dict[str, Any] = {"name": "other", "recurrence": HOURLY, "destination": "reports", "body": b""}
    with pytest.raises(error, match=text):
        endpoint.every(**{**right, **given})


async def test_hostile_names_are_kept(shop: Shop) -> None:
    endpoint = shop.process(None)
    hostile = ["'; DROP TABLE delayline_schedules; --", "naïve 日本 🚀", "a@b@2026", "x" * 200, "%s {0} \\"]
    for name in hostile:
        endpoint.every(name, HOURLY, "reports", b"")
    async with endpoint:
        assert [schedule.name for schedule in await endpoint.schedules.list()] == sorted(hostile)
        assert len(await endpoint.delayed.pending()) == len(hostile)


async def test_declarations_come_before_the_start(shop: Shop) -> None:
    async with shop.process() as endpoint:
        with pytest.raises(ConfigurationError, match="is started already: declare 'late' before"):
            endpoint.every("late", HOURLY, "reports", b"")


async def test_a_destination_that_does_not_exist_is_refused(shop: Shop) -> None:
    endpoint = shop.process(None)
    endpoint.every("wrong", HOURLY, "rports", b"")
    with pytest.raises(QueueNotFound, match="rports"):
        await endpoint.start()


async def test_endpoints_without_a_store_refuse(shop: Shop) -> None:
    endpoint = Endpoint("shop", transport=shop.transport)
    with pytest.raises(ConfigurationError, match="recurring messages need a store"):
        endpoint.every("nightly", HOURLY, "reports", b"")
    with pytest.raises(ConfigurationError, match="recurring messages need a store"):
        _ = endpoint.schedules


async def test_changes_at_the_same_time_happen_in_turn(shop: Shop, clock: ManualClock) -> None:
    """Given many changes beside the poller, then there is one pending occurrence at the end."""
    async with shop.process() as endpoint:
        schedules = endpoint.schedules
        changes = [schedules.pause("nightly"), schedules.resume("nightly"), clock.advance(timedelta(hours=1))]
        changes += [schedules.change("nightly", body=b"%d" % number) for number in range(5)]
        await asyncio.gather(*changes, schedules.resume("nightly"))
        assert len(await shop.pending(endpoint)) == 1
