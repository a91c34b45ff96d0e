"""Pauses of dispatching, followed by the pollers of several processes, on real servers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.eventually import eventually_async

from delayline import (
    DelayedMessage,
    Endpoint,
    Message,
    SqlDelayedMessageStore,
    SqlTransport,
    StoredDelivery,
    TransactionMode,
)
from delayline.dashboard.model import DueCounts
from delayline.dashboard.service import EndpointService
from delayline.delayed.pauses import PAUSES_READ_EVERY
from delayline.settings import Settings
from delayline.telemetry.prometheus import PrometheusMetrics

if TYPE_CHECKING:
    from pathlib import Path

PAST = datetime(2026, 1, 1, tzinfo=UTC)
#: A poller reads the pauses again so often, and no message leaves that it has not fetched before.
IN_FORCE = 2 * PAUSES_READ_EVERY
BACKLOG = 2000
POLLS = """
import asyncio, sys
from delayline import Endpoint, SqlDelayedMessageStore, SqlTransport, StoredDelivery

async def main() -> None:
    url = sys.argv[1]
    delivery = StoredDelivery(SqlDelayedMessageStore(url), batch_size=20)
    async with Endpoint("sales", transport=SqlTransport(url), delayed_delivery=delivery, send_only=True):
        print("polls", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'paused.db'}"
    return str(request.getfixturevalue(f"{request.param}_url"))


def endpoint_at(url: str, *, polling: bool) -> Endpoint:
    delivery = StoredDelivery(SqlDelayedMessageStore(url), polling=polling)
    return Endpoint("sales", transport=SqlTransport(url), delayed_delivery=delivery, send_only=True)


@pytest.fixture
async def operator(url: str) -> Endpoint:
    """Provide an endpoint that dispatches nothing, and its queues."""
    operator = endpoint_at(url, polling=False)
    await operator.setup()
    transport = SqlTransport(url)
    await transport.start()
    await transport.setup_infrastructure(["billing", "shipping"])
    await transport.stop()
    return operator


async def hold(url: str, number: int, destination: str, due: datetime = PAST) -> None:
    store = SqlDelayedMessageStore(url)
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    for first in range(0, number, 1000):
        numbers = range(first, min(number, first + 1000))
        await store.store_many(
            [DelayedMessage(Message(f"{destination}{each}", {}, b"x"), destination, due) for each in numbers]
        )
    await store.close()


async def arrived(url: str, queue: str) -> int:
    transport = SqlTransport(url)
    await transport.start()
    try:
        return await transport.count(queue)
    finally:
        await transport.stop()


async def test_a_paused_destination_waits_and_delays_no_other(url: str, operator: Endpoint) -> None:
    """Given more than a batch that is due for a paused destination, then what is for another leaves.

    The pause holds after a restart of the poller, for messages that come later too, and ends at once with a resume in
    another process, while the poller sleeps.
    """
    async with operator:
        assert await operator.delayed.pause("billing")
        await hold(url, BACKLOG, "billing")
        await hold(url, 10, "shipping", PAST + timedelta(days=1))
        for number in range(2):
            async with endpoint_at(url, polling=True) as poller:
                await poller.send("billing", "late", delay=timedelta(milliseconds=1))
                await poller.send("shipping", "in time", delay=timedelta(milliseconds=1))
                left = 11 + number

                async def has_left(wanted: int = left) -> bool:
                    return await arrived(url, "shipping") == wanted

                await eventually_async(has_left, "messages for the other destination")
                assert await arrived(url, "billing") == 0
        async with endpoint_at(url, polling=True):
            await asyncio.sleep(IN_FORCE)
            assert await operator.delayed.resume("billing")

            async def all_have_left() -> bool:
                return await arrived(url, "billing") == BACKLOG + 2

            await eventually_async(all_have_left, "the messages that were paused")
        assert await operator.delayed.pauses() == []


async def test_pollers_of_other_processes_follow(url: str, operator: Endpoint) -> None:
    """Given two processes that dispatch a backlog in small batches, one of them killed, when all is paused, then no
    message leaves any more; each leaves once in the end.
    """
    await hold(url, BACKLOG, "billing")
    processes = [
        subprocess.Popen([sys.executable, "-c", POLLS, url], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
        for _ in range(2)
    ]
    try:
        async with operator:
            assert await operator.delayed.pause()
            for process in processes:
                assert process.stdout is not None
                assert await asyncio.to_thread(process.stdout.readline) == "polls\n"
            before = await arrived(url, "billing")
            await asyncio.sleep(IN_FORCE)
            assert await arrived(url, "billing") == before == 0
            os.kill(processes[0].pid, signal.SIGKILL)
            assert await operator.delayed.resume()

            async def all_have_left() -> bool:
                return await arrived(url, "billing") == BACKLOG

            await eventually_async(all_have_left, "the backlog")
    finally:
        for process in processes:
            process.kill()
            process.communicate()


async def test_a_resumed_backlog_leaves_at_the_asked_rate(url: str, operator: Endpoint) -> None:
    """Given 300 that are overdue, when they are resumed at 100 a second, then others leave before the last of them."""
    async with operator:
        await operator.delayed.pause("billing")
        await hold(url, 300, "billing")
        began = datetime.now(UTC)
        assert await operator.delayed.resume("billing", rate=100)
        dues = [message.due for message in await operator.delayed.pending(limit=300)]
        assert dues[99] < dues[100] - timedelta(seconds=0.9)
        assert dues[-1] - dues[0] == timedelta(seconds=2)
        assert dues[0] > began - timedelta(seconds=5)
        async with endpoint_at(url, polling=True):

            async def all_have_left() -> bool:
                return await arrived(url, "billing") == 300

            await eventually_async(all_have_left, "the backlog")


async def test_metrics_count_what_is_paused_apart_from_what_is_overdue(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given overdue messages for two destinations, when one is paused, then it is a gauge, and no alarm."""
    async with endpoint_at(url, polling=False) as setting_up:
        await setting_up.transport.setup_infrastructure(["billing", "shipping"])
        store: Any = setting_up.store
        for number in range(3):
            await store.store(DelayedMessage(Message(f"b{number}", {}, b""), "billing", PAST))
        later = datetime.now(UTC) + timedelta(hours=2)
        await store.store(DelayedMessage(Message("later", {}, b""), "shipping", later))
        await setting_up.delayed.pause("billing")
    monkeypatch.setattr("delayline.telemetry.remembered.USABLE_FOR", 0.1)
    endpoint = endpoint_at(url, polling=True)
    metrics = PrometheusMetrics()
    metrics.watch(endpoint)

    async def scraped() -> dict[str, float]:
        text, _ = await asyncio.to_thread(metrics.text)
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        labels = ("delayline_due", "messaging_destination_name")
        return {
            " ".join([sample.name, *(sample.labels[label] for label in labels if label in sample.labels)]): sample.value
            for sample in samples
        }

    async def counted(name: str, value: float) -> bool:
        return (await scraped()).get(name) == value

    # When a process polls beside the pause
    async with endpoint:
        await eventually_async(lambda: counted("delayline_messages_pending paused", 3), "they are counted")
        await eventually_async(lambda: counted("delayline_messages_oldest_overdue_seconds", 0), "none is late")
        found = await scraped()
        assert found["delayline_messages_pending overdue"] == 0
        assert found["delayline_messages_pending 1d"] == 1
        assert found["delayline_dispatch_paused billing"] == 1
        assert found["delayline_dispatch_paused (all)"] == 0
        # When it is resumed
        await endpoint.delayed.resume("billing")
        await eventually_async(lambda: counted("delayline_messages_pending paused", 0), "they have gone")
        assert (await scraped()).get("delayline_dispatch_paused billing", 0) == 0


async def test_the_dashboard_counts_what_is_paused_apart_from_what_is_overdue(url: str, operator: Endpoint) -> None:
    """Given overdue messages of which those for a destination are paused, then the others alone are overdue."""
    an_hour_ago = datetime.now(UTC) - timedelta(hours=1)
    await hold(url, 3, "billing")
    await hold(url, 2, "shipping", an_hour_ago)
    async with (
        operator,
        EndpointService(Settings(endpoint="sales", url=url)) as apart,
        EndpointService(operator) as own,
    ):

        async def counted(service: EndpointService) -> tuple[int, int, datetime | None]:
            now = await service.overview.now()
            assert isinstance(now.due, DueCounts)
            return now.due.overdue.count, now.due.paused.count, now.due.earliest

        async def eventually_counted(*counts: object) -> None:
            async def is_so() -> bool:
                return await counted(apart) == counts

            await eventually_async(is_so, f"{counts}")

        assert await counted(apart) == (5, 0, PAST)
        await operator.delayed.pause("billing")
        await eventually_counted(2, 3, an_hour_ago)
        assert await counted(own) == (2, 3, an_hour_ago)
        await operator.delayed.pause()
        await eventually_counted(0, 5, None)
        await operator.delayed.resume()
        await operator.delayed.resume("billing")
        await eventually_counted(5, 0, PAST)
