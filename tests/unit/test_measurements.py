"""What an endpoint reports to its observers, and what Measurements make of it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from delayline import (
    AzureStorageQueueTransport,
    ConfigurationError,
    Endpoint,
    Event,
    MemoryDelayedMessageStore,
    MemoryTransport,
    QueueNotFound,
    RabbitMQTransport,
    Recoverability,
    Send,
    SqlDelayedMessageStore,
    SqlTransport,
    StoredDelivery,
    TwoPhaseCommit,
)
from delayline.azure import AzureDelayedTable
from delayline.errors import BackendUnavailable
from delayline.message import Message
from delayline.observer import Action, Observers
from delayline.telemetry import Histogram, Measurements
from delayline.telemetry.measurements import LATENESS_BOUNDS, MOST_NAMES, OTHER, SEVERAL
from delayline.testing import ManualClock

if TYPE_CHECKING:
    from delayline import MessageContext
    from delayline.observer import Observer
    from delayline.transport import Transport

MESSAGE = Message("1", {}, b"")


class Watching(Measurements):
    """Measurements that a test can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.successes = asyncio.Semaphore(0)
        self.moved = asyncio.Event()

    async def settled(self) -> None:
        """Wait until a message has been handled."""
        async with asyncio.timeout(5):
            await self.successes.acquire()

    def handled(self, queue: str, message: Message, seconds: float, error: Exception | None) -> None:
        super().handled(queue, message, seconds, error)
        if error is None:
            self.successes.release()

    def recovered(self, action: Action, place: str, message: Message, error: Exception) -> None:
        super().recovered(action, place, message, error)
        if action is Action.MOVED:
            self.moved.set()


class Shop:
    """An endpoint on memory with measurements, whose handler fails or sends on request."""

    def __init__(self, *observers: Observer, recoverability: Recoverability | None = None) -> None:
        self.clock = ManualClock()
        self.measurements = Watching()
        self.endpoint = Endpoint(
            "sales",
            transport=MemoryTransport(self.clock),
            delayed_delivery=StoredDelivery(MemoryDelayedMessageStore()),
            clock=self.clock,
            observers=[self.measurements, *observers],
            recoverability=recoverability,
        )
        self.error: Exception | None = None
        self.endpoint.handler(self._handle)

    async def _handle(self, message: Message, context: MessageContext) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if message.text.startswith("forward to "):
            context.send(message.text.removeprefix("forward to "), b"")


async def test_a_delayed_message_is_counted_at_each_step_of_its_way() -> None:
    """Given a message delayed by a minute, when it is handled, then each step has counted it once, in time."""
    shop = Shop()
    async with shop.endpoint:
        await shop.endpoint.send("sales", "hello", delay=timedelta(minutes=1))
        await shop.clock.advance(timedelta(minutes=1))
        await shop.measurements.settled()
    found = shop.measurements.snapshot()
    assert found.endpoint == "sales"
    assert found.sent == {("schedule", "sales", ""): 1}
    assert found.send_seconds["schedule", "sales", ""].count == 1
    assert found.stored == {"sales": 1}
    assert found.dispatched == 1
    assert found.lateness["sales"].counts[0] == 1
    assert found.received == {"sales": 1}
    assert found.handled["sales", ""].count == 1
    assert not found.recovered
    assert found.poller.batches == found.poller.messages == 1
    assert found.poller.sleeps >= 1
    assert found.poller.failures == 0
    assert found.polling.last_success is not None
    assert found.receiving["sales"].failing_since is None
    names = ("DelayedDeliveryStore", "DelayedMessageFetch", "DelayedMessageDispatch", "DelayedMessageFailureHandling")
    assert found.breakers == dict.fromkeys((*names, "Receive"), 0)


async def test_failures_and_their_outcomes_are_counted_by_exception() -> None:
    """Given a handler that fails once, when it is run again at once, then a failure, a retry and a success count."""
    shop = Shop()
    shop.error = KeyError("no such order")
    async with shop.endpoint:
        await shop.endpoint.send("sales", "hello")
        await shop.measurements.settled()
    found = shop.measurements.snapshot()
    assert {key: one.count for key, one in found.handled.items()} == {("sales", "KeyError"): 1, ("sales", ""): 1}
    assert found.recovered == {(Action.RETRIED, "sales"): 1}


async def test_a_message_moved_to_the_error_queue_counts() -> None:
    shop = Shop(recoverability=Recoverability(immediate_retries=0, delayed_retries=0))
    shop.error = KeyError("no such order")
    async with shop.endpoint, asyncio.timeout(5):
        await shop.endpoint.send("sales", "hello")
        await shop.measurements.moved.wait()
    assert shop.measurements.snapshot().recovered == {(Action.MOVED, "sales"): 1}


async def test_a_delayed_message_for_a_missing_queue_is_no_dispatch() -> None:
    """Given a due message whose queue does not exist, when it is moved to the error queue, then only that counts."""
    shop = Shop()
    async with shop.endpoint, asyncio.timeout(5):
        await shop.endpoint.send("nowhere", "hello", delay=timedelta(minutes=1), check_destination=False)
        await shop.clock.advance(timedelta(minutes=1))
        await shop.measurements.moved.wait()
    found = shop.measurements.snapshot()
    assert found.recovered == {(Action.MOVED, "nowhere"): 1}
    assert found.dispatched == 0


async def test_sends_of_handlers_count_when_they_have_left() -> None:
    shop = Shop()
    async with shop.endpoint:
        await shop.endpoint.send("sales", "forward to error")
        await shop.measurements.settled()
    assert shop.measurements.snapshot().sent == {("send", "sales", ""): 1, ("send", "error", ""): 1}


async def test_a_refused_send_counts_with_its_exception() -> None:
    shop = Shop()
    async with shop.endpoint:
        with pytest.raises(QueueNotFound):
            await shop.endpoint.send("nowhere", "hello")
    assert shop.measurements.snapshot().sent == {("send", "nowhere", "QueueNotFound"): 1}


async def test_send_many_is_one_operation_of_several_messages() -> None:
    shop = Shop()
    async with shop.endpoint:
        await shop.endpoint.send_many(Send(queue, b"") for queue in ("sales", "error", "sales"))
        await shop.measurements.settled()
    found = shop.measurements.snapshot()
    assert found.sent == {("send", "sales", ""): 2, ("send", "error", ""): 1}
    assert found.send_seconds["send", SEVERAL, ""].count == 1


def test_names_from_outside_are_bounded() -> None:
    """Given more destinations than are counted by name, when they are sent to, then the rest is counted together."""
    measurements = Measurements()
    for number in range(MOST_NAMES + 50):
        measurements.sent("send", [f"queue {number}"], 0.1, None)
    found = measurements.snapshot()
    assert len(found.sent) == MOST_NAMES + 1
    assert found.sent["send", OTHER, ""] == 50


def test_lateness_is_in_logarithmic_buckets_by_destination() -> None:
    """Given messages that were late by 0, 1.5 ms and two hours, then each is in its bucket, and none is negative."""
    at = datetime(2026, 1, 1, tzinfo=UTC)
    measurements = Measurements()
    for seconds in (-1.0, 0.0, 0.0015, 7200.0):
        measurements.dispatched({("sales", at - timedelta(seconds=seconds)): 2}, at)
    measurements.dispatched({("(unknown)", None): 5}, at)
    found = measurements.snapshot()
    late = found.lateness["sales"]
    assert (late.counts[0], late.counts[1], late.counts[-1], late.count) == (4, 2, 2, 8)
    assert late.total == pytest.approx(2 * 7200.0015)
    assert found.dispatched == 13
    assert (LATENESS_BOUNDS[0], LATENESS_BOUNDS[-1]) == (0.001, 3600)


def test_quantiles_are_bounds_of_buckets() -> None:
    histogram = Histogram((1.0, 2.0), (1, 8, 1), 20.0)
    assert [histogram.quantile(share) for share in (0.05, 0.5, 0.9, 1.0)] == [1.0, 2.0, 2.0, 2.0]
    assert Histogram((1.0,), (0, 0), 0.0).quantile(0.5) is None


def test_failures_of_poller_and_receivers_last_until_a_success() -> None:
    measurements = Measurements()
    measurements.polled(0, BackendUnavailable("away"))
    measurements.received("sales", 0, BackendUnavailable("away"))
    found = measurements.snapshot()
    assert found.polling.failing_since is not None
    assert found.polling.last_success is None
    assert found.receiving["sales"].failing_since is not None
    measurements.polled(0, None)
    measurements.polled(0, BackendUnavailable("away"))
    since = measurements.snapshot().polling.failing_since
    measurements.polled(0, BackendUnavailable("away"))
    found = measurements.snapshot()
    assert found.polling.failing_since == since
    assert found.polling.last_success_utc is not None
    assert found.polling.last_success_utc <= found.taken
    assert found.poller.failures == 3


async def test_measurements_belong_to_one_endpoint() -> None:
    shop, other = Shop(), Endpoint("billing", transport=MemoryTransport())
    other.observe(shop.measurements)
    async with shop.endpoint:
        with pytest.raises(ConfigurationError, match="belong to endpoint 'sales': create others for 'billing'"):
            await other.start()


async def test_observers_are_added_before_the_start() -> None:
    shop = Shop()
    async with shop.endpoint:
        with pytest.raises(ConfigurationError, match="add observers before start"):
            shop.endpoint.observe(Measurements())


async def test_an_observer_that_fails_disturbs_no_delivery(caplog: pytest.LogCaptureFixture) -> None:
    """Given an observer whose method raises, when messages are handled, then they are, and one warning says so."""

    class Broken(Measurements):
        def handled(self, *args: object) -> None:
            raise RuntimeError("broken")

    shop = Shop(Broken())
    async with shop.endpoint:
        for _ in range(3):
            await shop.endpoint.send("sales", "hello")
            await shop.measurements.settled()
    warned = [one for one in caplog.records if getattr(one, "event", None) is Event.OBSERVER_FAILED]
    assert [one.getMessage() for one in warned if one.levelname == "WARNING"] == [
        "An observer's method 'handled' failed, and may go on to fail: broken"
    ]
    assert shop.measurements.snapshot().handled["sales", ""].count == 3


def test_without_observers_nothing_is_called() -> None:
    assert Observers().all is None


def test_transports_name_their_system_and_server() -> None:
    """Given transports on servers, a file and memory, when an endpoint is asked, then it names where its queues are."""
    places: dict[Transport, tuple[str, tuple[str, int] | None]] = {
        SqlTransport("postgresql://me@db.example:5433/shop"): ("delayline", ("db.example", 5433)),
        SqlTransport("mariadb://me@db.example/shop"): ("delayline", ("db.example", 3306)),
        SqlTransport("sqlite:///shop.db"): ("delayline", None),
        RabbitMQTransport("amqp://broker.example"): ("rabbitmq", ("broker.example", 5672)),
        AzureStorageQueueTransport("azure://shop"): ("azure_storage_queues", None),
        MemoryTransport(): ("delayline", None),
    }
    for transport, (system, server) in places.items():
        endpoint = Endpoint("sales", transport=transport)
        assert (endpoint.messaging_system, endpoint.server_address) == (system, server)


def test_stores_report_leases_and_transactions_in_doubt() -> None:
    url = "postgresql://me@db.example/shop"
    store = SqlDelayedMessageStore(url, two_phase=TwoPhaseCommit())
    endpoint = Endpoint("sales", transport=MemoryTransport(), delayed_delivery=StoredDelivery(store))
    assert endpoint.measures() == {"two_phase.in_doubt": 0}
    assert SqlDelayedMessageStore(url).measures() == {}
    assert AzureDelayedTable("azure://shop").measures() == {"lease.held": 0}
