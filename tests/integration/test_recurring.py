"""Recurring messages on real servers: kills between two occurrences, several pollers, changes beside them."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.eventually import eventually_async
from tests.integration.recurring_worker import ENDPOINT, endpoint_at, transport_for

from delayline import (
    BackendUnavailable,
    ConfigurationError,
    Endpoint,
    SqlDelayedMessageStore,
    SqlTransport,
    SyncEndpoint,
    cron,
    interval,
)
from delayline.errors import BackendUnusable

if TYPE_CHECKING:
    from collections.abc import Sequence

WORKER = Path(__file__).with_name("recurring_worker.py")
PRODUCTS = ["sqlite", "postgresql", "mariadb"]
STEPS = ["dispatched", "followed", "removed"]
PATIENCE = 120
KILLED = -9


@pytest.fixture(params=PRODUCTS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Provide a database of each product."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/recurring.db"
    return str(request.getfixturevalue(f"{request.param}_url"))


async def set_up(store_url: str, queues_url: str) -> None:
    await endpoint_at(store_url, queues_url).setup()
    transport = transport_for(queues_url)
    await transport.start()
    try:
        await transport.setup_infrastructure(["reports", "error"])
    finally:
        await transport.stop()


async def ids_in(queues_url: str) -> list[str]:
    """Return the ids of the dispatched messages, in their order."""
    transport = transport_for(queues_url)
    await transport.start()
    try:
        return [message.id for message in await transport.browse("reports", 10_000)]
    finally:
        await transport.stop()


def ticks_of(ids: Sequence[str]) -> list[datetime]:
    """Return the instants of the occurrences, each once; a second is between two of them, and nothing is missed."""
    ticks = sorted({datetime.fromisoformat(one.partition("@")[2]) for one in ids})
    assert all(later - earlier == timedelta(seconds=1) for earlier, later in itertools.pairwise(ticks)), ticks
    return ticks


async def killed_at(step: str, store_url: str, queues_url: str) -> None:
    """Run a process until it has killed itself at the step."""
    command = [sys.executable, str(WORKER), step, store_url, queues_url]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    _, errors = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode == KILLED, errors.decode()


@pytest.mark.sample(3, group="recurring kills")
@pytest.mark.parametrize("step", STEPS)
async def test_a_kill_between_two_occurrences_misses_and_doubles_nothing(url: str, step: str) -> None:
    """Given queues in the store's database, when a process is killed between two steps, then each leaves once."""
    await set_up(url, url)
    for _ in range(2):
        await killed_at(step, url, url)
    async with endpoint_at(url, url):
        await eventually_async(lambda: enough(url, 3))
    ids = await ids_in(url)
    assert len(ticks_of(ids)) == len(ids), Counter(ids).most_common(3)


@pytest.mark.sample(3, group="recurring kills")
@pytest.mark.parametrize("step", STEPS)
async def test_queues_elsewhere_get_a_duplicate_at_most_with_the_same_id(
    url: str, rabbitmq_url: str, step: str
) -> None:
    """Given queues on RabbitMQ, when a process is killed between two steps, then nothing is missed, or has two ids."""
    await set_up(url, rabbitmq_url)
    for _ in range(2):
        await killed_at(step, url, rabbitmq_url)
    async with endpoint_at(url, rabbitmq_url):
        await eventually_async(lambda: enough(rabbitmq_url, 4))
    ids = await ids_in(rabbitmq_url)
    assert ticks_of(ids)
    assert max(Counter(ids).values()) <= 3, "two kills, and what was in the batch of each comes once more"
    if step == "removed":
        assert len(ids) == len(set(ids))


async def enough(queues_url: str, number: int) -> bool:
    return len(set(await ids_in(queues_url))) >= number


async def test_several_pollers_dispatch_each_occurrence_once(url: str) -> None:
    await set_up(url, url)
    async with endpoint_at(url, url), endpoint_at(url, url), endpoint_at(url, url) as last:
        await eventually_async(lambda: enough(url, 4))
        assert len(await last.schedules.list()) == 1
    ids = await ids_in(url)
    assert len(ticks_of(ids)) == len(ids)


async def test_processes_that_start_together_agree(url: str) -> None:
    """Given two versions whose processes start at the same time, then there is one schedule with one occurrence."""
    await set_up(url, url)
    processes = [endpoint_for(url) for _ in range(6)]
    for number, process in enumerate(processes):
        process.every("nightly", interval(hours=1 + number % 2), "reports", b"%d" % (number % 2))
    await asyncio.gather(*(process.start() for process in processes))
    try:
        (schedule,) = await processes[0].schedules.list()
        (pending,) = await processes[0].delayed.pending()
        assert (pending.message.body, pending.due) == (schedule.body, schedule.next_at)
    finally:
        await asyncio.gather(*(process.stop() for process in processes))


def endpoint_for(url: str) -> Endpoint:
    return Endpoint(ENDPOINT, transport=SqlTransport(url), delayed_delivery=SqlDelayedMessageStore(url), send_only=True)


async def has_pending(endpoint: Endpoint, number: int) -> bool:
    return len(await endpoint.delayed.pending()) == number


async def test_changes_beside_the_poller_leave_one_occurrence(url: str) -> None:
    """Given a schedule of each second, when it is changed, paused and resumed all the time, then one is pending."""
    await set_up(url, url)
    async with endpoint_at(url, url) as endpoint, endpoint_at(url, url) as other:
        for number in range(12):
            schedules = (endpoint if number % 2 else other).schedules
            await schedules.change("tick", body=b"%d" % number)
            await schedules.pause("tick")
            await eventually_async(lambda: has_pending(endpoint, 0), "an occurrence that was leaving has left")
            await schedules.resume("tick")
        await eventually_async(lambda: has_pending(endpoint, 1))
        before = await ids_in(url)
        await eventually_async(lambda: enough(url, len(before) + 2))
    ids = await ids_in(url)
    assert len(ids) == len(set(ids))


async def test_a_schedule_is_kept_as_it_was_declared(url: str) -> None:
    """Given hostile names and contents, then the row has them, in every product, and each endpoint its own."""
    await set_up(url, url)
    endpoint, names = endpoint_for(url), ["'; DROP TABLE x; --", "naïve 日本 🚀", "x" * 200, "%s {0} \\"]
    for name in names:
        endpoint.every(
            name, cron("0 9 * * MON-FRI", tz="Europe/Berlin"), "reports", bytes(range(256)), headers={"k": "🚀"}
        )
    async with endpoint:
        schedules = {schedule.name: schedule for schedule in await endpoint.schedules.list()}
        assert set(schedules) == set(names)
        for schedule in schedules.values():
            assert schedule.body == bytes(range(256))
            assert schedule.headers["k"] == "🚀"
            assert schedule.recurrence == "0 9 * * MON-FRI Europe/Berlin"
            assert schedule.next_at == schedule.following(schedule.since)
        pending = {message.id: message.due for message in await endpoint.delayed.pending()}
        assert pending == {
            schedule.occurrence_id(due): due for schedule in schedules.values() if (due := schedule.next_at)
        }
        await endpoint.schedules.trigger(names[0])
        await eventually_async(lambda: enough(url, 1))
        await endpoint.schedules.remove(names[0])
        with pytest.raises(ConfigurationError, match="there is no schedule"):
            await endpoint.schedules.pause(names[0])


async def test_without_set_up_the_error_says_what_to_do(url: str) -> None:
    """Given a database without the table of schedules, then a start without set-up says to set up; a list is empty."""
    async with endpoint_for(url) as endpoint:
        assert await endpoint.schedules.list() == ()
        with pytest.raises(ConfigurationError, match="there is no schedule 'x'"):
            await endpoint.schedules.pause("x")
    endpoint = Endpoint(
        ENDPOINT,
        transport=SqlTransport(url),
        delayed_delivery=SqlDelayedMessageStore(url),
        send_only=True,
        setup_infrastructure=False,
    )
    endpoint.every("x", interval(hours=1), "reports", b"", check_destination=False)
    with pytest.raises((BackendUnusable, BackendUnavailable), match="delayline setup"):
        await endpoint.start()


def test_blocking_programs_have_schedules_too(tmp_path: Path) -> None:
    endpoint = endpoint_for(f"sqlite:///{tmp_path}/recurring.db")
    endpoint.every("nightly", interval(hours=1), "reports", b"", check_destination=False)
    with SyncEndpoint(endpoint) as sync:
        (schedule,) = sync.schedules.list()
        assert schedule.name == "nightly"
        assert sync.schedules.pause("nightly").paused
        assert not sync.schedules.resume("nightly").paused
        assert sync.schedules.change("nightly", recurrence=interval(hours=2)).recurrence == "every 7200 s"
        assert sync.schedules.trigger("nightly").startswith("nightly@")
        sync.schedules.remove("nightly")
        assert sync.schedules.list() == []
