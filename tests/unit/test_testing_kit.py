"""The kit that other tests trust: time, signals, faults."""

import asyncio
import logging
import threading
from datetime import UTC, datetime, timedelta

import pytest

import delayline.testing
from delayline import (
    BackendUnavailable,
    DelayedMessage,
    MemoryDelayedMessageStore,
    MemoryTransport,
    Message,
    StoredDelivery,
    TransactionMode,
    guarantee,
)
from delayline.events import LOGGER_NAME, Event, emit
from delayline.spi import (
    SupportsBatches,
    SupportsManagement,
    SupportsNotifications,
    SupportsQueueManagement,
    SupportsTransactions,
    SupportsTransportTransactions,
    TransportOperation,
)
from delayline.testing import Fault, Faults, FaultyStore, FaultyTimeoutPersister, FaultyTransport, ManualClock, Signals
from delayline.testing.clock import settle
from delayline.testing.faults import STORE
from delayline.timeouts import MemoryTimeoutPersister, Timeout
from delayline.timeouts.persister import SupportsCount, SupportsTimeoutLocks
from delayline.transaction import Guarantee

START = datetime(2026, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
WAITING = DelayedMessage(Message("m", {}, b"body"), "billing", START)
OTHER = DelayedMessage(Message("other", {}, b"body"), "billing", START)
DOWN = BackendUnavailable("down")


def test_the_public_names() -> None:
    assert delayline.testing.__all__ == sorted(delayline.testing.__all__)
    assert all(hasattr(delayline.testing, name) for name in delayline.testing.__all__)


class TestManualClock:
    async def test_sleepers_wake_in_order_each_at_its_instant(self) -> None:
        clock, woken = ManualClock(START), []

        async def sleep(seconds: float) -> None:
            await clock.sleep(seconds)
            woken.append((seconds, clock.now()))

        tasks = [asyncio.create_task(sleep(seconds)) for seconds in (3, 1, 2, 9)]
        await clock.advance(5)
        assert woken == [(seconds, START + seconds * SECOND) for seconds in (1, 2, 3)]
        assert clock.now() == START + 5 * SECOND
        await clock.advance(timedelta(seconds=4))
        await asyncio.gather(*tasks)

    async def test_a_sleeper_may_sleep_again_within_the_window(self) -> None:
        clock, ticks = ManualClock(START), []

        async def tick() -> None:
            while True:
                await clock.sleep(1)
                ticks.append(clock.now())

        ticking = asyncio.create_task(tick())
        await clock.advance(3)
        assert ticks == [START + number * SECOND for number in (1, 2, 3)]
        ticking.cancel()

    async def test_a_sleep_never_ends_a_microsecond_early(self) -> None:
        clock = ManualClock(START)
        sleeping = asyncio.create_task(clock.sleep(5))
        await clock.advance(timedelta(seconds=5) - timedelta(microseconds=1))
        assert not sleeping.done()
        await clock.advance(timedelta(microseconds=1))
        assert sleeping.done()

    @pytest.mark.parametrize("jump", [timedelta(hours=-1), timedelta(hours=1)])
    async def test_a_step_of_the_wall_clock_wakes_no_poller(self, jump: timedelta) -> None:
        clock = ManualClock(START)
        sleeping = asyncio.create_task(clock.sleep(5))
        await settle()
        clock.set(START + jump)
        await clock.advance(4)
        assert not sleeping.done()
        await clock.advance(1)
        assert sleeping.done()
        assert clock.now() == START + jump + 5 * SECOND

    async def test_a_cancelled_sleeper_is_forgotten(self) -> None:
        clock = ManualClock(START)
        sleeping = asyncio.create_task(clock.sleep(1))
        await settle()
        sleeping.cancel()
        await settle()
        await clock.advance(2)
        assert sleeping.cancelled()

    async def test_run_until_moves_time_as_far_as_needed(self) -> None:
        clock = ManualClock(START)

        async def work() -> datetime:
            for _ in range(3):
                await clock.sleep(10)
            return clock.now()

        assert await clock.run_until(work()) == START + 30 * SECOND
        assert clock.now() == START + 30 * SECOND

    async def test_run_until_waits_for_work_in_threads(self) -> None:
        clock, release = ManualClock(START), threading.Event()

        async def work() -> None:
            await asyncio.to_thread(release.wait)
            await clock.sleep(1)

        asyncio.get_running_loop().call_soon(release.set)
        await clock.run_until(work())
        assert clock.now() == START + SECOND

    async def test_time_does_not_run_back(self) -> None:
        with pytest.raises(ValueError, match=r"set\(\)"):
            await ManualClock().advance(-1)

    def test_naive_instants_are_refused(self) -> None:
        with pytest.raises(ValueError, match="time zone"):
            ManualClock(datetime(2026, 1, 1))  # noqa: DTZ001 - the point of the test
        with pytest.raises(ValueError, match="time zone"):
            ManualClock().set(datetime(2026, 1, 1))  # noqa: DTZ001 - the point of the test


def say(event: Event, number: int = 0) -> None:
    emit(logging.getLogger("delayline.somewhere"), logging.DEBUG, event, "said", number=number)


class TestSignals:
    async def test_past_events_are_returned_at_once(self) -> None:
        with Signals() as signals:
            say(Event.STORED, number=1)
            say(Event.FETCHED)
            say(Event.STORED, number=2)
            records = await signals.wait_for(Event.STORED, 2)
        assert [vars(record)["facts"]["number"] for record in records] == [1, 2]
        assert (signals.count(Event.STORED), signals.count(Event.REMOVED)) == (2, 0)

    async def test_a_signal_from_another_thread_ends_the_wait(self) -> None:
        with Signals() as signals:
            waiting = asyncio.create_task(signals.wait_for(Event.STORED, 2))
            await settle()
            await asyncio.to_thread(say, Event.STORED)
            await settle()
            assert not waiting.done()
            await asyncio.to_thread(say, Event.STORED)
            assert len(await waiting) == 2

    async def test_where_filters_the_counted_events(self) -> None:
        with Signals() as signals:
            waiting = asyncio.create_task(
                signals.wait_for(Event.STORED, where=lambda record: vars(record)["facts"]["number"] == 2)
            )
            await settle()
            say(Event.STORED, number=1)
            await settle()
            assert not waiting.done()
            say(Event.STORED, number=2)
            assert len(await waiting) == 1

    async def test_a_wait_that_times_out_reports_the_number_of_events(self) -> None:
        with Signals() as signals:
            say(Event.STORED)
            with pytest.raises(TimeoutError, match=r"delayed\.stored happened 1 times, not 2"):
                await signals.wait_for(Event.STORED, 2, timeout=0)

    def test_the_logger_is_left_as_it_was(self) -> None:
        logger = logging.getLogger(LOGGER_NAME)
        before = (logger.level, list(logger.handlers))
        with Signals() as signals:
            logger.info("no event: not a signal")
        say(Event.STORED)
        assert signals.count(Event.STORED) == 0
        assert (logger.level, logger.handlers) == before


class TestFaults:
    async def test_the_call_that_was_named_fails(self) -> None:
        store = FaultyStore(MemoryDelayedMessageStore(), Fault("store", error=DOWN, calls=2))
        await store.store(WAITING)
        with pytest.raises(BackendUnavailable, match="down"):
            await store.store(OTHER)
        await store.store(OTHER)
        assert store.calls("store") == 3

    async def test_a_range_of_calls_fails(self) -> None:
        store = FaultyStore(MemoryDelayedMessageStore(), Fault("next_due", error=DOWN, calls=range(2, 4)))
        outcomes = await asyncio.gather(*(store.next_due() for _ in range(5)), return_exceptions=True)
        assert outcomes == [None, DOWN, DOWN, None, None]

    async def test_every_call_fails_until_healed(self) -> None:
        store = FaultyStore(MemoryDelayedMessageStore(), Fault("next_due", error=DOWN))
        for _ in range(3):
            with pytest.raises(BackendUnavailable):
                await store.next_due()
        store.heal()
        assert await store.next_due() is None

    async def test_a_call_can_take_effect_and_fail(self) -> None:
        store = FaultyStore(MemoryDelayedMessageStore(), Fault("store", error=DOWN, takes_effect=True))
        with pytest.raises(BackendUnavailable):
            await store.store(WAITING)
        assert await store.next_due() == START

    async def test_calls_are_counted_from_the_injection_on(self) -> None:
        store = FaultyStore(MemoryDelayedMessageStore())
        await store.next_due()
        store.inject(Fault("next_due", error=DOWN, calls=1))
        with pytest.raises(BackendUnavailable):
            await store.next_due()

    async def test_when_chooses_by_arguments(self) -> None:
        store = FaultyStore(
            MemoryDelayedMessageStore(), Fault("store", error=DOWN, when=lambda message: message.id == "other")
        )
        await store.store(WAITING)
        with pytest.raises(BackendUnavailable):
            await store.store(OTHER)

    async def test_a_message_id_chooses_by_the_messages_of_a_call(self) -> None:
        store = FaultyStore(MemoryDelayedMessageStore(), Fault(STORE, DOWN, message_id="other"))
        await store.store(WAITING)
        for call in (store.store(OTHER), store.store_many([WAITING, OTHER])):
            with pytest.raises(BackendUnavailable):
                await call

    async def test_an_error_can_depend_on_the_arguments(self) -> None:
        fault = Fault("store", lambda message: ValueError(message.id) if message.id == "other" else None)
        store = FaultyStore(MemoryDelayedMessageStore(), fault)
        await store.store(WAITING)
        with pytest.raises(ValueError, match="other"):
            await store.store(OTHER)

    async def test_shared_faults_record_the_calls_of_all_in_order(self) -> None:
        # Given a store, a transport and a persister with the same faults
        faults = Faults()
        store = FaultyStore(MemoryDelayedMessageStore(), shared=faults)
        transport = FaultyTransport(MemoryTransport(), shared=faults)
        persister = FaultyTimeoutPersister(MemoryTimeoutPersister(), shared=faults)
        # When each is called
        await transport.setup_infrastructure(["billing"])
        await store.store_many([WAITING, OTHER])
        await transport.dispatch([TransportOperation(OTHER.message, "billing")])
        await persister.add(Timeout("t", WAITING.message, "billing", START))
        # Then their calls are in one record, with the ids of the messages
        assert faults.recorded("store_many", "dispatch", "add") == [
            ("store_many", ("m", "other")), ("dispatch", ("other",)), ("add", ("m",))
        ]  # fmt: skip
        # And a fault applies to each
        faults.inject(Fault(("next_due", "peek"), DOWN))
        for call in (store.next_due(), persister.peek("t")):
            with pytest.raises(BackendUnavailable):
                await call
        faults.clear_record()
        assert faults.recorded() == []

    def test_a_faulty_persister_claims_the_capabilities_of_the_persister(self) -> None:
        class Plain(MemoryTimeoutPersister):
            lock_due = None  # type: ignore[assignment]

        rich, poor = FaultyTimeoutPersister(MemoryTimeoutPersister()), FaultyTimeoutPersister(Plain())
        assert [isinstance(one, SupportsTimeoutLocks) for one in (rich, poor)] == [True, False]
        assert [isinstance(one, SupportsCount) for one in (rich, poor)] == [True, True]

    async def test_before_and_after_surround_the_call(self) -> None:
        inner, seen = MemoryDelayedMessageStore(), []
        store = FaultyStore(
            inner,
            Fault(
                "store",
                before=lambda: seen.append(len(inner._messages)),
                after=lambda: seen.append(len(inner._messages)),
            ),
        )
        await store.store(WAITING)
        assert seen == [0, 1]

    async def test_a_call_can_be_held(self) -> None:
        gate, inner = asyncio.Event(), MemoryDelayedMessageStore()
        store = FaultyStore(inner, Fault("store", until=gate))
        storing = asyncio.create_task(store.store(WAITING))
        await settle()
        assert await inner.next_due() is None
        gate.set()
        await storing
        assert await inner.next_due() == START

    async def test_a_dropped_commit_is_rolled_back(self) -> None:
        store = FaultyStore(MemoryDelayedMessageStore(), Fault("commit", error=DOWN, calls=1))
        assert isinstance(store, SupportsTransactions)
        committed: list[bool] = []
        with pytest.raises(BackendUnavailable):
            async with store.transaction() as transaction:
                transaction.after_commit(lambda: committed.append(True))
                await store.store(WAITING, transaction)
        assert await store.next_due() is None
        assert committed == []
        async with store.transaction() as transaction:
            await store.store(WAITING, transaction)
        assert await store.next_due() == START

    async def test_a_dropped_commit_unlocks(self) -> None:
        store = FaultyStore(MemoryDelayedMessageStore(), Fault("commit", error=DOWN, calls=1))
        assert isinstance(store, SupportsTransactions)
        await store.store(WAITING)
        with pytest.raises(BackendUnavailable):
            async with store.transaction() as transaction:
                await store.fetch_next_due(START, transaction)
        assert await store.fetch_next_due(START) is not None

    async def test_a_commit_can_happen_and_be_reported_as_failed(self) -> None:
        store = FaultyStore(MemoryDelayedMessageStore(), Fault("commit", error=DOWN, takes_effect=True))
        assert isinstance(store, SupportsTransactions)
        with pytest.raises(BackendUnavailable):
            async with store.transaction() as transaction:
                await store.store(WAITING, transaction)
        assert await store.next_due() == START

    async def test_wrapped_and_plain_parts_share_a_transaction(self) -> None:
        plain, wrapped = MemoryTransport(), FaultyTransport(MemoryTransport())
        store = FaultyStore(MemoryDelayedMessageStore())
        for transport in (plain, wrapped):
            await transport.setup_infrastructure(["billing"])
            assert guarantee(transport, StoredDelivery(store), TransactionMode.TRANSACTION_SCOPE) is (
                Guarantee.EXACTLY_ONCE
            )
        assert isinstance(wrapped, SupportsTransportTransactions)
        assert isinstance(wrapped, SupportsQueueManagement)
        async with wrapped.transaction() as transaction:
            await store.store(WAITING, transaction)
            for transport in (plain, wrapped):
                await transport.dispatch([TransportOperation(OTHER.message, "billing")], transaction)
        assert (await plain.count("billing"), await wrapped.count("billing")) == (1, 1)
        assert await store.next_due() == START

    def test_a_wrapper_has_the_capabilities_of_the_store(self) -> None:
        capabilities = (SupportsTransactions, SupportsBatches, SupportsManagement, SupportsNotifications)
        rich, poor = FaultyStore(MemoryDelayedMessageStore()), FaultyStore(MemoryDelayedMessageStore(), verbs_only=True)
        assert [isinstance(rich, capability) for capability in capabilities] == [True] * 4
        assert [isinstance(poor, capability) for capability in capabilities] == [False] * 4
        assert [isinstance(FaultyStore(poor), capability) for capability in capabilities] == [False] * 4

    async def test_receivers_have_faults_too(self) -> None:
        transport = FaultyTransport(MemoryTransport(), Fault("acknowledge", error=DOWN, calls=1))
        await transport.setup_infrastructure(["billing"])
        await transport.dispatch([TransportOperation(WAITING.message, "billing")])
        receiver = await transport.receiver("billing")
        [message] = await receiver.receive(1)
        with pytest.raises(BackendUnavailable):
            await receiver.acknowledge(message)
        assert await receiver.acknowledge(message) is True

    async def test_quiet_waits_for_calls_under_way(self) -> None:
        arrived, release = asyncio.Event(), asyncio.Event()

        class Slow(MemoryDelayedMessageStore):
            async def next_due(self) -> datetime | None:
                arrived.set()
                await release.wait()
                return None

        store = FaultyStore(Slow())
        asking = asyncio.create_task(store.next_due())
        await arrived.wait()
        quiet = asyncio.create_task(store.quiet())
        await settle()
        assert store.busy
        assert not quiet.done()
        release.set()
        await quiet
        assert await asking is None
