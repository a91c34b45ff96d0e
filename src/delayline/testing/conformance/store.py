"""The conformance suite of delayed message stores."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Final, Protocol

import pytest
import pytest_asyncio

from delayline.clock import ONE_HOUR
from delayline.delayed.fairness import FairBy, SupportsFairness
from delayline.delayed.pauses import DispatchPause, SupportsDispatchPauses
from delayline.delayed.store import (
    DelayedMessageStore,
    DueCount,
    Outcome,
    StoreResult,
    SupportsBatches,
    SupportsClose,
    SupportsDueForecast,
    SupportsLookup,
    SupportsManagement,
    SupportsNotifications,
    SupportsReplacement,
    SupportsSetup,
    SupportsTransactions,
)
from delayline.errors import ConfigurationError, InvalidDueTime, InvalidMessage, UnsupportedTransactionMode
from delayline.message import DelayedMessage, Headers, Message, to_wire_time
from delayline.testing.clock import settle
from delayline.testing.conformance.messages import (
    AT,
    AWKWARD_HEADERS,
    ENDPOINT,
    HOSTILE_NAMES,
    LOOKALIKES,
    PATIENCE,
    PLENTY,
    TICK,
    delayed,
    same,
)
from delayline.transaction import SupportsHighestMode, SupportsSavepoints, TransactionMode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path


class BatchingStore(DelayedMessageStore, SupportsBatches, Protocol):
    """A store that claims batches."""


class TransactionalStore(DelayedMessageStore, SupportsTransactions, Protocol):
    """A store that claims transactions."""


class ManagedStore(DelayedMessageStore, SupportsManagement, Protocol):
    """A store that claims management."""


class ForecastingStore(DelayedMessageStore, SupportsDueForecast, Protocol):
    """A store that claims forecasts."""


class SearchableStore(DelayedMessageStore, SupportsLookup, Protocol):
    """A store that claims lookups."""


class NotifyingStore(DelayedMessageStore, SupportsNotifications, Protocol):
    """A store that claims wake-ups."""


async def opened(store: DelayedMessageStore, endpoint_name: str = ENDPOINT) -> DelayedMessageStore:
    """Set the store up and initialize it in the strongest mode it accepts."""
    if isinstance(store, SupportsSetup):
        await store.setup_infrastructure(endpoint_name)
    for mode in sorted(TransactionMode, reverse=True):
        try:
            await store.initialize(endpoint_name, mode)
        except UnsupportedTransactionMode:
            continue
        return store
    raise AssertionError("initialize refused every transaction mode")


async def closed(store: DelayedMessageStore) -> None:
    """Close the store if it can be closed."""
    if isinstance(store, SupportsClose):
        await store.close()


class StoreFixtures:
    """Fixtures of the store suite."""

    pytestmark: pytest.MarkDecorator = pytest.mark.asyncio

    #: True if a second store over the same storage sees the first store's messages.
    durable: bool = False

    #: The steps in which the store keeps due times, where it is not the microsecond; it rounds them up.
    step: timedelta = TICK
    #: Whether messages that are due together are fetched as they were stored; otherwise in the order of their ids.
    keeps_order: bool = True
    #: How many bytes a body may have; a larger body is refused with InvalidMessage.
    largest_body: int = 5 * 1024 * 1024
    #: How many messages make a large batch: more than a statement or request may have.
    large_batch: int = 5000
    #: Whether the store compares ids loosely, as by case; then it refuses the second of two similar ids.
    folds_ids: bool = False

    async def make_store(self, tmp_path: Path) -> DelayedMessageStore:
        """Return a new store, neither set up nor initialized, over storage that is empty when a test begins.

        Override this. Called again within a test it returns another store, over the same storage where `durable`.
        """
        raise NotImplementedError("override make_store in your subclass of StoreConformance")

    def in_order(self, ids: Sequence[str]) -> list[str]:
        """Return the ids of messages that are due together, given as they were stored, as they are fetched."""
        return list(ids) if self.keeps_order else sorted(ids)

    @pytest_asyncio.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[DelayedMessageStore]:
        """Provide an open store."""
        store = await opened(await self.make_store(tmp_path))
        yield store
        await closed(store)

    @pytest.fixture
    def batches(self, store: DelayedMessageStore) -> BatchingStore:
        """Provide an open store that works in batches."""
        if not isinstance(store, SupportsBatches):
            pytest.skip("not claimed: SupportsBatches")
        return store

    @pytest.fixture
    def transactional(self, store: DelayedMessageStore) -> TransactionalStore:
        """Provide an open store with transactions."""
        if not isinstance(store, SupportsTransactions):
            pytest.skip("not claimed: SupportsTransactions")
        return store

    @pytest.fixture
    def managed(self, store: DelayedMessageStore) -> ManagedStore:
        """Provide an open store that people can look into."""
        if not isinstance(store, SupportsManagement):
            pytest.skip("not claimed: SupportsManagement")
        return store

    @pytest.fixture
    def forecasting(self, store: DelayedMessageStore) -> ForecastingStore:
        """Provide an open store that counts by due time in bounded time."""
        if not isinstance(store, SupportsDueForecast):
            pytest.skip("not claimed: SupportsDueForecast")
        return store

    @pytest.fixture
    def searchable(self, store: DelayedMessageStore) -> SearchableStore:
        """Provide an open store that finds messages by id and due time."""
        if not isinstance(store, SupportsLookup):
            pytest.skip("not claimed: SupportsLookup")
        return store

    @pytest.fixture
    def waking(self, store: DelayedMessageStore) -> NotifyingStore:
        """Provide an open store that notifies when a message was stored."""
        if not isinstance(store, SupportsNotifications):
            pytest.skip("not claimed: SupportsNotifications")
        return store


LATER = AT + timedelta(days=1)


class StoreVerbs(StoreFixtures):
    """Tests of the six required methods of stores."""

    async def test_a_stored_message_is_fetched_once_due(self, store: DelayedMessageStore) -> None:
        """Store, then fetch: the message comes back unchanged."""
        await store.store(delayed())
        same(await store.fetch_next_due(AT), delayed())

    async def test_an_empty_store_has_nothing_due(self, store: DelayedMessageStore) -> None:
        """Nothing stored: nothing fetched, no next due time."""
        assert await store.fetch_next_due(LATER) is None
        assert await store.next_due() is None

    async def test_a_message_due_after_at_is_not_fetched(self, store: DelayedMessageStore) -> None:
        """A microsecond too early is early; the very instant is due."""
        await store.store(delayed(due=AT + self.step))
        assert await store.fetch_next_due(AT) is None
        same(await store.fetch_next_due(AT + self.step), delayed(due=AT + self.step))

    async def test_messages_are_fetched_by_due_time(self, store: DelayedMessageStore) -> None:
        """The earliest due comes first, down to the microsecond, whatever the order of storing."""
        offsets = [5, 3, 9, 1, 7, 0, 8, 2, 6, 4]
        for offset in offsets:
            await store.store(delayed(f"m{offset}", AT + offset * self.step))
        fetched = [await store.fetch_next_due(LATER) for _ in offsets]
        assert [message.id for message in fetched if message] == [f"m{offset}" for offset in range(10)]

    async def test_messages_due_together_are_fetched_as_stored(self, store: DelayedMessageStore) -> None:
        """Ties keep the order of storing, not that of the ids."""
        if not self.keeps_order:
            pytest.skip("not claimed: ties in the order of storing")
        ids = ["m5", "m9", "m1", "M3", "m10", "a", "z", "m2"]
        for message_id in ids:
            await store.store(delayed(message_id))
        fetched = [await store.fetch_next_due(AT) for _ in ids]
        assert [message.id for message in fetched if message] == ids

    async def test_a_fetched_message_is_locked(self, store: DelayedMessageStore) -> None:
        """A fetched message is skipped by other fetches, which return the next."""
        await store.store(delayed("first"))
        await store.store(delayed("second", AT + self.step))
        same(await store.fetch_next_due(LATER), delayed("first"))
        same(await store.fetch_next_due(LATER), delayed("second", AT + self.step))
        assert await store.fetch_next_due(LATER) is None

    async def test_competing_fetches_never_share_a_message(self, store: DelayedMessageStore) -> None:
        """Concurrent fetches get different messages, and every message is got."""
        ids = {f"m{number}" for number in range(20)}
        for message_id in ids:
            await store.store(delayed(message_id))
        fetched = await asyncio.gather(*(store.fetch_next_due(AT) for _ in range(25)))
        fetched_ids = [message.id for message in fetched if message is not None]
        assert len(fetched_ids) == len(set(fetched_ids)), "a message was fetched twice"
        while (message := await store.fetch_next_due(AT)) is not None:
            fetched_ids.append(message.id)  # a competitor may have come away with nothing
        assert sorted(fetched_ids) == sorted(ids)

    async def test_next_due_is_the_earliest_of_all(self, store: DelayedMessageStore) -> None:
        """Past or future, the earliest due time is the next."""
        await store.store(delayed("later", LATER))
        assert await store.next_due() == LATER
        await store.store(delayed("past", AT - timedelta(days=9)))
        await store.store(delayed("now", AT))
        assert await store.next_due() == AT - timedelta(days=9)

    async def test_next_due_counts_locked_messages(self, store: DelayedMessageStore) -> None:
        """A locked message still waits: its holder may die, and another poller must look again soon."""
        await store.store(delayed())
        await store.store(delayed("later", LATER))
        await store.fetch_next_due(AT)
        assert await store.next_due() == AT

    async def test_remove_is_true_once(self, store: DelayedMessageStore) -> None:
        """The first remove deletes, the second finds nothing."""
        await store.store(delayed())
        message = await store.fetch_next_due(AT)
        assert message is not None
        assert await store.remove(message) is True
        assert await store.remove(message) is False
        assert await store.next_due() is None

    async def test_remove_takes_that_message_only(self, store: DelayedMessageStore) -> None:
        """Its neighbours stay."""
        await store.store(delayed("first"))
        await store.store(delayed("second"))
        await store.fetch_next_due(AT)
        assert await store.remove(delayed("first")) is True
        same(await store.fetch_next_due(AT), delayed("second"))

    async def test_competing_removes_have_one_winner(self, store: DelayedMessageStore) -> None:
        """Of concurrent removes of the same message exactly one is true."""
        await store.store(delayed())
        message = await store.fetch_next_due(AT)
        assert message is not None
        answers = await asyncio.gather(*(store.remove(message) for _ in range(8)))
        assert sorted(answers) == [False] * 7 + [True]

    async def test_counting_a_failure_unlocks(self, store: DelayedMessageStore) -> None:
        """A failed message is fetched again, its count 1 higher each time, nothing else changed."""
        await store.store(delayed())
        for failures in range(4):
            message = await store.fetch_next_due(AT)
            same(message, replace(delayed(), number_of_retries=failures))
            assert message is not None
            assert await store.increment_failure_count(message) is True

    async def test_counting_a_failure_of_a_message_that_is_gone(self, store: DelayedMessageStore) -> None:
        """False, and it does not come back."""
        await store.store(delayed())
        message = await store.fetch_next_due(AT)
        assert message is not None
        await store.remove(message)
        assert await store.increment_failure_count(message) is False
        assert await store.next_due() is None

    async def test_a_duplicate_id_changes_nothing(self, store: DelayedMessageStore) -> None:
        """Storing an id that waits succeeds: the first message stays as it is."""
        await store.store(delayed())
        await store.store(delayed(due=LATER, destination="elsewhere", body=b"other"))
        same(await store.fetch_next_due(LATER), delayed())
        assert await store.fetch_next_due(LATER) is None
        assert await store.remove(delayed()) is True
        assert await store.next_due() is None

    async def test_a_duplicate_id_does_not_unlock(self, store: DelayedMessageStore) -> None:
        """A message being dispatched is not dispatched again because its sender repeats itself."""
        await store.store(delayed())
        await store.fetch_next_due(AT)
        await store.store(delayed())
        assert await store.fetch_next_due(AT) is None

    async def test_an_id_can_be_used_again_when_its_message_is_gone(self, store: DelayedMessageStore) -> None:
        """Ids are unique among pending messages only."""
        await store.store(delayed())
        await store.remove(delayed())
        await store.store(delayed(due=LATER, body=b"again"))
        same(await store.fetch_next_due(LATER), delayed(due=LATER, body=b"again"))

    async def test_concurrent_stores_of_one_id_keep_one(self, store: DelayedMessageStore) -> None:
        """All succeed, a single message is kept."""
        await asyncio.gather(*(store.store(delayed()) for _ in range(8)))
        assert await store.remove(delayed()) is True
        assert await store.next_due() is None

    async def test_setup_may_run_again(self, tmp_path: Path, store: DelayedMessageStore) -> None:
        """Set up twice, in turn and at once, and nothing stored is lost."""
        if not isinstance(store, SupportsSetup):
            pytest.skip("not claimed: SupportsSetup")
        await store.store(delayed())
        await store.setup_infrastructure(ENDPOINT)
        await asyncio.gather(*(store.setup_infrastructure(ENDPOINT) for _ in range(4)))
        same(await store.fetch_next_due(AT), delayed())

    @pytest.mark.parametrize("mode", list(TransactionMode))
    async def test_a_mode_works_or_is_refused(self, tmp_path: Path, mode: TransactionMode) -> None:
        """Initialize accepts a mode and the store works, or raises UnsupportedTransactionMode."""
        store = await self.make_store(tmp_path)
        if isinstance(store, SupportsSetup):
            await store.setup_infrastructure(ENDPOINT)
        try:
            await store.initialize(ENDPOINT, mode)
        except UnsupportedTransactionMode:
            assert mode > TransactionMode.NONE, "the weakest mode asks nothing of a store"
            if isinstance(store, SupportsHighestMode):
                assert mode > store.highest_transaction_mode
            elif mode is not TransactionMode.TRANSACTION_SCOPE or isinstance(store, SupportsTransactions):
                raise
            pytest.skip(f"not claimed: {mode.name}")
        await store.store(delayed())
        same(await store.fetch_next_due(AT), delayed())
        await closed(store)

    async def test_messages_outlive_the_store_object(self, tmp_path: Path) -> None:
        """A new store over the same storage sees stored messages, with their failure counts."""
        if not self.durable:
            pytest.skip("not claimed: durable")
        first = await opened(await self.make_store(tmp_path))
        await first.store(delayed())
        message = await first.fetch_next_due(AT)
        assert message is not None
        await first.increment_failure_count(message)
        await closed(first)
        second = await opened(await self.make_store(tmp_path))
        same(await second.fetch_next_due(AT), replace(delayed(), number_of_retries=1))
        await closed(second)

    async def test_a_lock_holds_for_other_store_objects(self, tmp_path: Path) -> None:
        """Another process gets neither the message nor a second removal of it."""
        if not self.durable:
            pytest.skip("not claimed: durable")
        mine = await opened(await self.make_store(tmp_path))
        theirs = await opened(await self.make_store(tmp_path))
        await mine.store(delayed())
        fetched = await mine.fetch_next_due(AT)
        same(fetched, delayed())
        assert await theirs.fetch_next_due(AT) is None
        assert await theirs.next_due() == AT
        assert await mine.remove(delayed()) is True
        assert await theirs.remove(delayed()) is False
        await closed(theirs)
        await closed(mine)


MEGABYTE = 1024 * 1024
DUE_INSTANTS = {
    "one microsecond": datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC),
    "last microsecond": datetime(2026, 1, 1, 23, 59, 59, 999_999, tzinfo=UTC),
    "not a float": datetime(2255, 6, 5, 23, 47, 34, 740_993, tzinfo=UTC),
    "after 2038": datetime(2038, 1, 19, 3, 14, 8, tzinfo=UTC),
    "leap day": datetime(2028, 2, 29, 12, tzinfo=UTC),
    "the end of time": datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    "before 1970": datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    "far past": datetime(1900, 1, 1, tzinfo=UTC),
}
END_OF_TIME = DUE_INSTANTS["the end of time"]


#: Bytes that every back end has room for in an endpoint's name.
SHORT_NAME: Final = 50


class StoreContent(StoreFixtures):
    """Round trips."""

    @pytest.mark.parametrize(
        "body",
        [b"", b"\x00", bytes(range(256)) * 4, "größe 🚚".encode(), b"\xef\xbb\xbf{}", b"x" * (5 * MEGABYTE)],
        ids=["empty", "nul", "every byte", "text", "byte order mark", "5 MB"],
    )
    async def test_a_body_survives(self, store: DelayedMessageStore, body: bytes) -> None:
        """Any bytes, none to five megabytes, or to the store's limit, which its error names."""
        if len(body) > self.largest_body:
            with pytest.raises(InvalidMessage, match=str(len(body))):
                await store.store(delayed(body=body))
            assert await store.next_due() is None
            return
        await store.store(delayed(body=body))
        same(await store.fetch_next_due(AT), delayed(body=body))

    async def test_headers_survive(self, store: DelayedMessageStore) -> None:
        """Astral characters, control characters, empty names and values, quotes."""
        await store.store(delayed(headers=AWKWARD_HEADERS))
        fetched = await store.fetch_next_due(AT)
        same(fetched, delayed(headers=AWKWARD_HEADERS))
        assert fetched is not None
        assert dict(fetched.message.headers) == AWKWARD_HEADERS

    async def test_no_headers_survive(self, store: DelayedMessageStore) -> None:
        """A message without headers stays so."""
        await store.store(delayed(headers={}))
        fetched = await store.fetch_next_due(AT)
        assert fetched is not None
        assert dict(fetched.message.headers) == {}

    @pytest.mark.parametrize(
        "encoded",
        [b"", b"not json", b"\xff\xfe\x00\xd8", b"[1, 2]", b'{"a": null}', b'{"a" : "b"}  ', b'{"half": "'],
        ids=["empty", "not json", "not utf-8", "a list", "null", "spaces", "cut"],
    )
    async def test_damaged_headers_survive_untouched(self, store: DelayedMessageStore, encoded: bytes) -> None:
        """A store never parses headers: damaged headers reach the error queue unchanged."""
        damaged = DelayedMessage(Message.from_encoded("m", encoded, b"body"), "billing", AT)
        await store.store(damaged)
        fetched = await store.fetch_next_due(AT)
        same(fetched, damaged)
        assert fetched is not None
        assert fetched.message.encoded_headers == encoded
        assert await store.increment_failure_count(fetched) is True
        again = await store.fetch_next_due(AT)
        assert again is not None
        assert again.message.encoded_headers == encoded

    @pytest.mark.parametrize("due", DUE_INSTANTS.values(), ids=DUE_INSTANTS.keys())
    async def test_due_times_are_exact(self, store: DelayedMessageStore, due: datetime) -> None:
        """To the microsecond, or rounded up by less than a step; up to the year 9999 and back before 1970."""
        if END_OF_TIME - due < self.step - TICK:
            with pytest.raises(InvalidDueTime):
                await store.store(delayed(due=due))
            return
        await store.store(delayed(due=due))
        kept = await store.next_due()
        assert kept is not None
        assert timedelta(0) <= kept - due < self.step
        if due < END_OF_TIME:
            assert await store.fetch_next_due(due - timedelta(microseconds=1)) is None
        same(await store.fetch_next_due(kept), delayed(due=kept))

    async def test_due_times_are_ordered_over_the_centuries(self, store: DelayedMessageStore) -> None:
        """Instants compare as instants, not as text or floats."""
        instants = {name: due for name, due in DUE_INSTANTS.items() if END_OF_TIME - due >= self.step - TICK}
        for name, due in reversed(instants.items()):
            await store.store(delayed(name, due))
        fetched = [message for _ in instants if (message := await store.fetch_next_due(END_OF_TIME))]
        assert [message.id for message in fetched] == sorted(instants, key=lambda name: instants[name])
        assert all(timedelta(0) <= message.due - instants[message.id] < self.step for message in fetched)

    async def test_at_may_be_in_any_zone(self, store: DelayedMessageStore) -> None:
        """Aware datetimes are instants: the zone they are written in does not matter."""
        await store.store(delayed())
        zone = timezone(timedelta(hours=-9, minutes=-30))
        assert await store.fetch_next_due((AT - timedelta(seconds=1)).astimezone(zone)) is None
        same(await store.fetch_next_due(AT.astimezone(zone)), delayed())

    @pytest.mark.parametrize("name", HOSTILE_NAMES)
    async def test_hostile_ids_and_destinations(self, store: DelayedMessageStore, name: str) -> None:
        """Names are data: never quoted wrongly, folded, trimmed or cut."""
        message = delayed(name, destination=name)
        await store.store(message)
        await store.store(message)
        fetched = await store.fetch_next_due(AT)
        same(fetched, message)
        assert fetched is not None
        assert await store.fetch_next_due(AT) is None
        assert await store.increment_failure_count(fetched) is True
        assert await store.remove(fetched) is True
        assert await store.remove(fetched) is False

    async def test_the_longest_id_fits(self, store: DelayedMessageStore) -> None:
        """250 characters, and the last character counts."""
        for last in "ab":
            await store.store(delayed("i" * 249 + last))
        for last in "ab":
            same(await store.fetch_next_due(AT), delayed("i" * 249 + last))

    @pytest.mark.parametrize(("one", "other"), LOOKALIKES)
    async def test_lookalike_ids_are_different(self, store: DelayedMessageStore, one: str, other: str) -> None:
        """An id is equal to itself alone: no case folding, no accents dropped, no normal forms."""
        await store.store(delayed(one))
        if self.folds_ids:
            with contextlib.suppress(InvalidMessage):  # refused rather than dropped
                await store.store(delayed(other))
                assert await store.remove(delayed(other)) is True
            same(await store.fetch_next_due(AT), delayed(one))
            return
        await store.store(delayed(other))
        assert await store.remove(delayed(other)) is True
        same(await store.fetch_next_due(AT), delayed(one))

    @pytest.mark.parametrize("name", HOSTILE_NAMES)
    async def test_hostile_endpoint_names(self, tmp_path: Path, name: str) -> None:
        """Whatever the endpoint is called its store works: names are quoted, not pasted, or refused when too long."""
        try:
            store = await opened(await self.make_store(tmp_path), name)
        except ConfigurationError as error:
            assert len(name.encode()) > SHORT_NAME, f"{name!r} is not long"
            assert name in str(error)
            return
        await store.store(delayed(f"of {len(name)}"))
        fetched = await store.fetch_next_due(AT)
        same(fetched, delayed(f"of {len(name)}"))
        assert fetched is not None
        assert await store.remove(fetched) is True
        await closed(store)


class StoreBatches(StoreFixtures):
    """Batches are the single verbs, faster."""

    async def test_a_batch_comes_back_in_order(self, batches: BatchingStore) -> None:
        """By due time, ties in the order stored, content untouched."""
        messages = [
            delayed(f"m{n}", AT + (n % 3) * self.step, headers=AWKWARD_HEADERS, body=bytes([n])) for n in range(9)
        ]
        await batches.store_many(messages)
        fetched = await batches.fetch_due(LATER, 100, max_bytes=PLENTY)
        expected = sorted(messages, key=lambda message: message.due)
        assert [message.id for message in fetched] == [message.id for message in expected]
        for actual, message in zip(fetched, expected, strict=True):
            same(actual, message)

    async def test_an_empty_batch_is_nothing(self, batches: BatchingStore) -> None:
        """No messages, no work, no error."""
        await batches.store_many([])
        assert await batches.remove_many([]) == 0
        assert await batches.retry_many([], LATER) == 0
        await batches.release_many([])
        assert list(await batches.fetch_due(LATER, 10, max_bytes=PLENTY)) == []

    async def test_a_large_batch(self, batches: BatchingStore) -> None:
        """More rows than a statement may have parameters."""
        messages = [delayed(f"m{number:04}") for number in range(self.large_batch)]
        await batches.store_many(messages)
        fetched = await batches.fetch_due(AT, self.large_batch, max_bytes=PLENTY)
        assert [message.id for message in fetched] == [message.id for message in messages]
        assert await batches.remove_many(fetched) == self.large_batch
        assert await batches.next_due() is None

    async def test_the_limit_holds(self, batches: BatchingStore) -> None:
        """At most `limit`, the earliest, and the rest stays unlocked."""
        await batches.store_many([delayed(f"m{number}") for number in range(5)])
        first = await batches.fetch_due(AT, 3, max_bytes=PLENTY)
        second = await batches.fetch_due(AT, 3, max_bytes=PLENTY)
        assert [message.id for message in (*first, *second)] == ["m0", "m1", "m2", "m3", "m4"]
        assert len(first) == 3

    async def test_nothing_due_after_at_is_in_a_batch(self, batches: BatchingStore) -> None:
        """The very instant is due, a microsecond later is not."""
        await batches.store_many([delayed("due", AT), delayed("not due", AT + self.step)])
        assert [message.id for message in await batches.fetch_due(AT, 10, max_bytes=PLENTY)] == ["due"]

    async def test_max_bytes_bounds_a_batch(self, batches: BatchingStore) -> None:
        """Three of 10 000 bytes fit into 35 000, a fourth does not, and is not locked."""
        messages = [delayed(f"m{number}", headers={}, body=b"x" * 10_000) for number in range(5)]
        await batches.store_many(messages)
        assert len(await batches.fetch_due(AT, 10, max_bytes=35_000)) == 3
        assert len(await batches.fetch_due(AT, 10, max_bytes=35_000)) == 2

    async def test_max_bytes_counts_headers(self, batches: BatchingStore) -> None:
        """Headers take memory as bodies do."""
        messages = [delayed(f"m{number}", headers={"h": "x" * 10_000}, body=b"") for number in range(3)]
        await batches.store_many(messages)
        assert len(await batches.fetch_due(AT, 10, max_bytes=25_000)) == 2

    async def test_one_message_larger_than_max_bytes_is_returned(self, batches: BatchingStore) -> None:
        """Alone: a large message must not wait for ever."""
        await batches.store_many([delayed("large", body=b"x" * min(100_000, self.largest_body)), delayed("small")])
        assert [message.id for message in await batches.fetch_due(AT, 10, max_bytes=1)] == ["large"]
        assert [message.id for message in await batches.fetch_due(AT, 10, max_bytes=1)] == ["small"]

    async def test_duplicates_in_a_batch_change_nothing(self, batches: BatchingStore) -> None:
        """Neither ids that wait already nor ids twice in the batch are an error."""
        await batches.store(delayed("old"))
        again = delayed("old", LATER, body=b"other")
        await batches.store_many([again, delayed("new"), delayed("new", LATER, body=b"other")])
        fetched = await batches.fetch_due(LATER, 10, max_bytes=PLENTY)
        assert [message.id for message in fetched] == self.in_order(["old", "new"])
        for message in fetched:
            same(message, delayed(message.id))

    async def test_remove_many_counts_removed_messages(self, batches: BatchingStore) -> None:
        """Messages that were gone already are not counted."""
        await batches.store_many([delayed("a"), delayed("b"), delayed("c")])
        fetched = await batches.fetch_due(AT, 10, max_bytes=PLENTY)
        assert await batches.remove(delayed("b")) is True
        assert await batches.remove_many(fetched) == 2
        assert await batches.next_due() is None

    async def test_retry_many_counts_moves_and_unlocks(self, batches: BatchingStore) -> None:
        """The failed message waits inside the store, without delaying later ones."""
        await batches.store_many([delayed("bad"), delayed("good", AT + self.step), delayed("gone")])
        fetched = await batches.fetch_due(AT, 10, max_bytes=PLENTY)
        await batches.remove(delayed("gone"))
        again = AT + timedelta(seconds=10)
        assert await batches.retry_many(fetched, again) == 1
        assert await batches.next_due() == AT + self.step
        same(await batches.fetch_next_due(AT + self.step), delayed("good", AT + self.step))
        assert await batches.fetch_next_due(AT + self.step) is None
        same(await batches.fetch_next_due(again), replace(delayed("bad", again), number_of_retries=1))

    async def test_release_many_unlocks_uncounted(self, batches: BatchingStore) -> None:
        """Released messages are fetched again unchanged; releasing twice, or a removed message, is not an error."""
        await batches.store_many([delayed("a"), delayed("b")])
        fetched = await batches.fetch_due(AT, 10, max_bytes=PLENTY)
        await batches.remove(delayed("b"))
        await batches.release_many(fetched)
        await batches.release_many(fetched)
        same(await batches.fetch_next_due(AT), delayed("a"))
        assert await batches.fetch_next_due(AT) is None

    async def test_competing_batches_never_share_a_message(self, batches: BatchingStore) -> None:
        """Concurrent fetches get different messages."""
        await batches.store_many([delayed(f"m{number}") for number in range(50)])
        fetched = await asyncio.gather(*(batches.fetch_due(AT, 10, max_bytes=PLENTY) for _ in range(5)))
        ids = [message.id for batch in fetched for message in batch]
        assert len(ids) == len(set(ids))
        ids += [message.id for message in await batches.fetch_due(AT, 100, max_bytes=PLENTY)]
        assert sorted(ids) == sorted(f"m{number}" for number in range(50))


class FairStore(BatchingStore, SupportsFairness, Protocol):
    """A store that claims fairness, and batches."""


class StoreFairness(StoreFixtures):
    """Tests of a backlog of one destination or tenant beside messages of others."""

    #: How many messages make a backlog, and how many a batch.
    backlog: int = 1000
    batch: int = 50

    async def fair_store(self, tmp_path: Path, fair_by: str) -> FairStore:
        """Return a store that is fair, set up and open."""
        store = await self.make_store(tmp_path)
        if not isinstance(store, SupportsFairness) or not isinstance(store, SupportsBatches):
            pytest.skip("not claimed: SupportsFairness")
        store.be_fair(FairBy.of(fair_by))
        await opened(store)
        return store

    async def drained(self, store: FairStore, batches: int | None = None) -> list[DelayedMessage]:
        """Fetch and remove so many batches, or all of them, and return their messages in order."""
        drained: list[DelayedMessage] = []
        while batches is None or batches:
            fetched = await store.fetch_due(LATER, self.batch, max_bytes=PLENTY)
            if not fetched:
                break
            assert await store.remove_many(fetched) == len(fetched)
            drained += fetched
            batches = None if batches is None else batches - 1
        return drained

    async def test_a_backlog_of_one_destination_delays_no_other(self, tmp_path: Path) -> None:
        """Given many due for one destination before a few for others, then three batches have the few.

        In the end every message has left once, those of each destination by due time.
        """
        store = await self.fair_store(tmp_path, "destination")
        busy = [delayed(f"a{number:05}", destination="busy") for number in range(self.backlog)]
        others = [delayed(f"{name}{number}", LATER, destination=name) for name in ("b", "c") for number in range(5)]
        await store.store_many([*busy, *others])
        first = await self.drained(store, 3)
        assert {message.id for message in others} <= {message.id for message in first}
        left = [message.id for message in first + await self.drained(store)]
        for name in ("a", "b", "c"):
            ids = [message.id for message in [*busy, *others] if message.id.startswith(name)]
            assert [id for id in left if id.startswith(name)] == ids
        assert len(left) == len(busy) + len(others)
        await closed(store)

    async def test_a_backlog_of_one_tenant_delays_no_other(self, tmp_path: Path) -> None:
        """Fair by a header: other values, long and strange ones, and messages without it are groups of their own."""
        store = await self.fair_store(tmp_path, "header:Tenant")
        values = ["", "small", " small", "x" * 5000, "x" * 5001, "a\x00b", "Größe 🚚", "\ud800"]
        busy = [delayed(f"a{number:05}", headers={"Tenant": "busy"}) for number in range(self.backlog)]
        others = [
            delayed(f"b{number}", LATER, headers={"Tenant": value}) for number, value in enumerate(values) if value
        ]
        others.append(delayed("without", LATER))
        await store.store_many(busy)
        for message in others:  # alone, as a send does
            await store.store(message)
        first = await self.drained(store, 3)
        assert {message.id for message in others} <= {message.id for message in first}
        assert len(first + await self.drained(store)) == len(busy) + len(others)
        await closed(store)

    async def test_messages_that_were_stored_before_are_a_group(self, tmp_path: Path) -> None:
        """Given a store that is made fair by a header once it has messages, then these delay no others."""
        if not self.durable:
            pytest.skip("not claimed: durable")
        plain = await self.make_store(tmp_path)
        if not isinstance(plain, SupportsFairness) or not isinstance(plain, SupportsBatches):
            pytest.skip("not claimed: SupportsFairness")
        await opened(plain)
        before = [delayed(f"a{number:05}", headers={"Tenant": "small"}) for number in range(self.backlog)]
        await plain.store_many(before)
        await closed(plain)
        store = await self.fair_store(tmp_path, "header:Tenant")
        await store.store_many([delayed(f"b{number}", LATER, headers={"Tenant": "small"}) for number in range(5)])
        first = await self.drained(store, 3)
        assert [message.id for message in first if message.id.startswith("b")] == [f"b{number}" for number in range(5)]
        left = [message.id for message in first + await self.drained(store)]
        assert [id for id in left if id.startswith("a")] == [message.id for message in before]
        await closed(store)

    async def test_a_destination_that_comes_during_a_backlog_has_its_turn(self, tmp_path: Path) -> None:
        """Given a backlog that never gets smaller, when another gets a message, then it is fetched."""
        store = await self.fair_store(tmp_path, "destination")
        await store.store_many([delayed(f"a{number:05}", destination="busy") for number in range(self.backlog)])
        await store.release_many(await store.fetch_due(LATER, self.batch, max_bytes=PLENTY))
        await store.store(delayed("b", LATER, destination="other"))
        async with asyncio.timeout(PATIENCE):
            while True:
                fetched = await store.fetch_due(LATER, self.batch, max_bytes=PLENTY)
                await store.release_many(fetched)
                if "b" in {message.id for message in fetched}:
                    break
        assert len(await self.drained(store)) == self.backlog + 1
        await closed(store)

    async def test_without_a_backlog_messages_leave_by_due_time(self, tmp_path: Path) -> None:
        """Given fewer messages than a batch takes, of two destinations in turn, then they are fetched by due time."""
        store = await self.fair_store(tmp_path, "destination")
        messages = [
            delayed(f"m{number}", AT + number * self.step, destination=f"d{number % 2}") for number in range(10)
        ]
        await store.store_many(messages[::-1])
        assert [message.id for message in await self.drained(store)] == [message.id for message in messages]
        await closed(store)

    async def test_large_messages_of_one_destination_delay_no_other(self, tmp_path: Path) -> None:
        """Given a batch that has room for few of the busy destination's messages, then others have their turns."""
        store = await self.fair_store(tmp_path, "destination")
        body = b"x" * 1000
        await store.store_many([delayed(f"a{number:05}", destination="busy", body=body) for number in range(100)])
        await store.store_many([delayed(f"b{number}", LATER, destination="other") for number in range(3)])
        fetched: list[str] = []
        for _ in range(5):
            some = await store.fetch_due(LATER, self.batch, max_bytes=3500)
            await store.remove_many(some)
            fetched += [message.id for message in some]
        assert {"b0", "b1", "b2"} <= set(fetched)
        assert len(fetched) + len(await self.drained(store)) == 103
        await closed(store)

    async def test_a_batch_that_is_rolled_back_comes_again(self, tmp_path: Path) -> None:
        """Given a backlog of two destinations, when batches are rolled back, then their messages leave all the same."""
        store = await self.fair_store(tmp_path, "destination")
        if not isinstance(store, SupportsTransactions):
            pytest.skip("not claimed: SupportsTransactions")
        messages = [delayed(f"m{number:05}", destination=f"d{number % 2}") for number in range(self.backlog)]
        await store.store_many(messages)
        for _ in range(4):
            with pytest.raises(_RolledBack):
                async with store.transaction() as transaction:
                    fetched = await store.fetch_due(LATER, self.batch, max_bytes=PLENTY, transaction=transaction)
                    assert await store.remove_many(fetched, transaction) == len(fetched) > 0
                    raise _RolledBack
        left = [message.id for message in await self.drained(store)]
        assert sorted(left) == [message.id for message in messages]
        await closed(store)

    async def test_several_fetchers_share_a_backlog(self, tmp_path: Path) -> None:
        """Given two stores over the same messages, when both fetch in turn, then each message is fetched once."""
        if not self.durable:
            pytest.skip("not claimed: durable")
        stores = [await self.fair_store(tmp_path, "destination") for _ in range(2)]
        await stores[0].store_many([delayed(f"a{number:05}", destination="busy") for number in range(self.backlog)])
        await stores[0].store_many([delayed(f"b{number}", LATER, destination="other") for number in range(5)])
        held, fetched = [], Counter[str]()
        while True:
            batches = [await store.fetch_due(LATER, self.batch, max_bytes=PLENTY) for store in stores]
            if not any(batches):
                break
            held.append(batches)
            fetched.update(message.id for batch in batches for message in batch)
            if len(held) == 3:
                assert {f"b{number}" for number in range(5)} <= set(fetched)
        assert (len(fetched), set(fetched.values())) == (self.backlog + 5, {1})
        for store in stores:
            await closed(store)


class _RolledBack(Exception):
    """The error with which a transaction is left."""


class StoreManagement(StoreFixtures):
    """Listing, cancelling and rescheduling pending messages."""

    async def test_a_cancelled_message_is_gone(self, managed: ManagedStore) -> None:
        """DONE once, then NOT_PENDING."""
        await managed.store(delayed())
        await managed.store(delayed("other"))
        assert await managed.cancel("m") is Outcome.DONE
        assert await managed.cancel("m") is Outcome.NOT_PENDING
        same(await managed.fetch_next_due(AT), delayed("other"))
        assert await managed.fetch_next_due(LATER) is None

    async def test_a_rescheduled_message_is_due_at_its_new_time_only(self, managed: ManagedStore) -> None:
        """Later and earlier, nothing else about it changes."""
        await managed.store(delayed())
        assert await managed.reschedule("m", LATER) is Outcome.DONE
        assert await managed.next_due() == LATER
        assert await managed.fetch_next_due(LATER - self.step) is None
        assert await managed.reschedule("m", AT - ONE_HOUR) is Outcome.DONE
        same(await managed.fetch_next_due(AT - ONE_HOUR), delayed(due=AT - ONE_HOUR))

    async def test_unknown_ids_are_not_pending(self, managed: ManagedStore) -> None:
        """Unknown ids change nothing."""
        assert await managed.cancel("never") is Outcome.NOT_PENDING
        assert await managed.reschedule("never", LATER) is Outcome.NOT_PENDING
        assert await managed.next_due() is None

    async def test_a_message_with_a_pending_id_is_kept_or_replaced(self, store: DelayedMessageStore) -> None:
        """Stored, then kept with nothing changed, then replaced as a whole, then stored anew once it is gone."""
        if not isinstance(store, SupportsReplacement):
            pytest.skip("not claimed: SupportsReplacement")
        new = Message("m", {"h": "1"}, b"new")
        first, other = delayed(), replace(delayed(due=LATER), destination="other", message=new)
        assert await store.store_or_replace(first, replace=True) is StoreResult.STORED
        assert await store.store_or_replace(other, replace=False) is StoreResult.KEPT
        assert await store.next_due() == first.due
        assert await store.store_or_replace(other, replace=True) is StoreResult.REPLACED
        assert await store.fetch_next_due(LATER - self.step) is None
        fetched = await store.fetch_next_due(LATER)
        same(fetched, other)
        assert fetched is not None
        async with asyncio.timeout(PATIENCE):
            assert await store.store_or_replace(first, replace=True) is StoreResult.DISPATCHING
            assert await store.store_or_replace(first, replace=False) is StoreResult.KEPT
        assert await store.remove(fetched) is True
        assert await store.store_or_replace(first, replace=False) is StoreResult.STORED

    async def test_a_pending_message_is_postponed_within_its_limit(self, store: DelayedMessageStore) -> None:
        """With the new body, to the new due time, but no later than the limit after the first send."""
        if not isinstance(store, SupportsReplacement):
            pytest.skip("not claimed: SupportsReplacement")

        def sent(body: bytes, at: datetime, delay: timedelta) -> DelayedMessage:
            headers = {Headers.TIME_SENT: to_wire_time(at), Headers.DELIVER_AT: to_wire_time(at + delay)}
            return replace(delayed(due=at + delay), message=Message("m", headers, body))

        limit, minute = timedelta(minutes=10), timedelta(minutes=1)
        first, second = sent(b"1", AT, minute), sent(b"2", AT + minute, 2 * minute)
        third = sent(b"3", AT + 2 * minute, ONE_HOUR)
        assert await store.store_or_replace(first, replace=True, at_most=limit) is StoreResult.STORED
        assert await store.store_or_replace(second, replace=True, at_most=limit) is StoreResult.REPLACED
        assert await store.next_due() == second.due
        assert await store.store_or_replace(third, replace=True, at_most=limit) is StoreResult.REPLACED
        assert await store.next_due() == AT + limit
        assert await store.fetch_next_due(AT + limit - self.step) is None
        fetched = await store.fetch_next_due(AT + limit)
        assert fetched is not None
        assert fetched.message.body == b"3"
        assert fetched.message.headers[Headers.DELIVER_AT] == to_wire_time(AT + limit)
        async with asyncio.timeout(PATIENCE):
            assert await store.store_or_replace(third, replace=True, at_most=limit) is StoreResult.DISPATCHING

    async def test_a_pending_message_is_replaced_in_a_transaction(self, store: DelayedMessageStore) -> None:
        """Stored and replaced at the commit, and not after a rollback; twice in a transaction too."""
        if not isinstance(store, SupportsReplacement) or not isinstance(store, SupportsTransactions):
            pytest.skip("not claimed: SupportsReplacement and SupportsTransactions")

        async def change(body: bytes) -> StoreResult:
            changed = replace(delayed(), message=Message("m", {}, body))
            return await store.store_or_replace(changed, replace=True, transaction=transaction)

        with contextlib.suppress(ZeroDivisionError):
            async with store.transaction() as transaction:
                assert await change(b"undone") is StoreResult.STORED
                raise ZeroDivisionError
        assert await store.next_due() is None
        async with store.transaction() as transaction:
            assert await change(b"1") is StoreResult.STORED
            assert await change(b"2") is StoreResult.REPLACED
        with contextlib.suppress(ZeroDivisionError):
            async with store.transaction() as transaction:
                assert await change(b"undone") is StoreResult.REPLACED
                raise ZeroDivisionError
        async with store.transaction() as transaction:
            assert await change(b"3") is StoreResult.REPLACED
            assert await change(b"4") is StoreResult.REPLACED
        fetched = await store.fetch_next_due(AT)
        assert fetched is not None
        assert fetched.message.body == b"4"

    async def test_one_of_many_senders_stores_a_message(self, store: DelayedMessageStore) -> None:
        """Concurrent senders of the same id: one has stored it, the others have kept it."""
        if not isinstance(store, SupportsReplacement):
            pytest.skip("not claimed: SupportsReplacement")
        results = await asyncio.gather(*(store.store_or_replace(delayed(), replace=False) for _ in range(20)))
        assert sorted(results) == [StoreResult.KEPT] * 19 + [StoreResult.STORED]

    async def test_a_fetched_message_is_dispatching(self, managed: ManagedStore) -> None:
        """Too late: the outcome is DISPATCHING, and the holder keeps the message."""
        await managed.store(delayed())
        fetched = await managed.fetch_next_due(AT)
        assert fetched is not None
        async with asyncio.timeout(PATIENCE):
            assert await managed.cancel("m") is Outcome.DISPATCHING
            assert await managed.reschedule("m", LATER) is Outcome.DISPATCHING
        assert await managed.remove(fetched) is True
        assert await managed.cancel("m") is Outcome.NOT_PENDING

    @pytest.mark.parametrize("verb", ["cancel", "reschedule"])
    async def test_a_message_that_leaves_meanwhile(self, managed: ManagedStore, verb: str) -> None:
        """In a race with a transaction that removes the message the answer is never DONE."""
        if not isinstance(managed, SupportsTransactions):
            pytest.skip("not claimed: SupportsTransactions")
        await managed.store(delayed())
        async with managed.transaction() as transaction:
            fetched = await managed.fetch_next_due(AT, transaction)
            assert fetched is not None
            answer = asyncio.create_task(managed.cancel("m") if verb == "cancel" else managed.reschedule("m", LATER))
            await settle()
            assert await managed.remove(fetched, transaction) is True
        async with asyncio.timeout(PATIENCE):
            assert await answer in {Outcome.DISPATCHING, Outcome.NOT_PENDING}
        assert await managed.next_due() is None

    @pytest.mark.parametrize("verb", ["cancel", "reschedule"])
    @pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
    async def test_a_change_in_a_transaction_is_seen_at_its_commit(
        self, managed: ManagedStore, verb: str, commits: bool
    ) -> None:
        """Until then the message is not dispatched, and holds up no others; a rollback leaves it as it was."""
        if not isinstance(managed, SupportsTransactions):
            pytest.skip("not claimed: SupportsTransactions")
        await managed.store(delayed())
        await managed.store(delayed("other"))
        fetched: list[str] = []
        with contextlib.suppress(_RolledBack):
            async with asyncio.timeout(PATIENCE), managed.transaction() as transaction:
                if verb == "cancel":
                    outcome = await managed.cancel("m", transaction)
                else:
                    outcome = await managed.reschedule("m", LATER, transaction)
                assert outcome is Outcome.DONE
                if managed.locks_rows:
                    while (message := await managed.fetch_next_due(AT)) is not None:
                        fetched.append(message.id)
                    assert fetched == ["other"]
                if not commits:
                    raise _RolledBack
        while (message := await managed.fetch_next_due(AT)) is not None:
            fetched.append(message.id)
        assert sorted(fetched) == ([] if commits else ["m"]) + ["other"]
        later = await managed.fetch_next_due(LATER)
        assert (later is not None) == (commits and verb == "reschedule")

    async def test_an_answer_holds_whatever_the_race(self, managed: ManagedStore) -> None:
        """Of cancel and fetch at the same moment only one has the message, never both, never neither."""
        for number in range(20):
            await managed.store(delayed(f"m{number}"))
            outcome, fetched = await asyncio.gather(managed.cancel(f"m{number}"), managed.fetch_next_due(AT))
            assert (outcome is Outcome.DONE) == (fetched is None), f"{outcome} and {fetched}"
            if fetched is not None:
                assert await managed.remove(fetched) is True

    async def test_a_failed_message_can_be_cancelled(self, managed: ManagedStore) -> None:
        """Unlocked by its failure it is pending again."""
        await managed.store(delayed())
        fetched = await managed.fetch_next_due(AT)
        assert fetched is not None
        await managed.increment_failure_count(fetched)
        assert await managed.cancel("m") is Outcome.DONE

    @pytest.mark.parametrize("name", HOSTILE_NAMES)
    async def test_hostile_names_are_managed(self, managed: ManagedStore, name: str) -> None:
        """Names are data here too."""
        await managed.store(delayed(name, destination=name))
        await managed.store(delayed("other"))
        assert [message.id for message in await managed.pending(destination=name)] == [name]
        assert await managed.reschedule(name, LATER) is Outcome.DONE
        assert await managed.cancel(name) is Outcome.DONE
        assert [message.id for message in await managed.pending()] == ["other"]

    @pytest.mark.parametrize(("one", "other"), LOOKALIKES)
    async def test_lookalike_destinations_are_different(self, managed: ManagedStore, one: str, other: str) -> None:
        """A destination is equal to itself alone."""
        await managed.store(delayed("1", destination=one))
        await managed.store(delayed("2", destination=other))
        assert [message.id for message in await managed.pending(destination=one)] == ["1"]
        assert sum(entry.count for entry in await managed.count_by_due(ONE_HOUR) if entry.destination == other) == 1

    async def test_pending_lists_by_due_time(self, managed: ManagedStore) -> None:
        """Earliest first, complete, a single destination where asked, without locking."""
        for number in (3, 1, 2):
            destination = "billing" if number % 2 else "sales"
            await managed.store(delayed(f"m{number}", AT + number * self.step, destination=destination))
        pending = await managed.pending()
        assert [message.id for message in pending] == ["m1", "m2", "m3"]
        same(pending[0], delayed("m1", AT + self.step))
        assert [message.id for message in await managed.pending(destination="billing")] == ["m1", "m3"]
        assert list(await managed.pending(destination="nowhere")) == []
        same(await managed.fetch_next_due(LATER), delayed("m1", AT + self.step))

    async def test_pending_shows_fetched_messages(self, managed: ManagedStore) -> None:
        """A message that is being dispatched is still pending."""
        await managed.store(delayed())
        await managed.fetch_next_due(AT)
        async with asyncio.timeout(PATIENCE):
            assert [message.id for message in await managed.pending()] == ["m"]

    async def test_pages_of_pending_are_complete(self, managed: ManagedStore) -> None:
        """Page by page every message is seen once, ties included."""
        for number in range(25):
            await managed.store(delayed(f"m{number:02}", AT + (number // 10) * self.step))
        pages = [await managed.pending(limit=10, offset=offset) for offset in (0, 10, 20, 30)]
        assert [len(page) for page in pages] == [10, 10, 5, 0]
        assert [message.id for page in pages for message in page] == [f"m{number:02}" for number in range(25)]

    async def test_counts_by_due_time(self, managed: ManagedStore) -> None:
        """Buckets are aligned to 1970, their start belongs to them, their end to the next; earliest first."""
        dues = {"a": AT, "b": AT + ONE_HOUR - self.step, "c": AT + ONE_HOUR, "d": AT - self.step}
        for message_id, due in dues.items():
            await managed.store(delayed(message_id, due))
        await managed.store(delayed("e", AT, destination="sales"))
        counts = await managed.count_by_due(ONE_HOUR)
        assert [entry.start for entry in counts] == sorted(entry.start for entry in counts)
        assert sorted(counts, key=lambda entry: (entry.start, entry.destination)) == [
            DueCount(AT - ONE_HOUR, "billing", 1),
            DueCount(AT, "billing", 2),
            DueCount(AT, "sales", 1),
            DueCount(AT + ONE_HOUR, "billing", 1),
        ]

    @pytest.mark.parametrize("bucket", [timedelta(seconds=1), timedelta(minutes=7), timedelta(days=1)])
    async def test_buckets_of_any_size(self, managed: ManagedStore, bucket: timedelta) -> None:
        """Every message is in the bucket that holds its due time, before 1970 and in the far future too."""
        epoch = datetime(1970, 1, 1, tzinfo=AT.tzinfo)
        dues = [epoch - self.step, epoch, AT + self.step, AT + timedelta(days=365 * 500)]
        for number, due in enumerate(dues):
            await managed.store(delayed(f"m{number}", due))
        counts = await managed.count_by_due(bucket)
        assert [entry.start for entry in counts] == [epoch + (due - epoch) // bucket * bucket for due in dues]

    async def test_an_empty_store_has_no_counts(self, managed: ManagedStore) -> None:
        """Nothing waits, nothing is listed."""
        assert list(await managed.count_by_due(ONE_HOUR)) == []
        assert list(await managed.pending()) == []


class StoreForecasts(StoreFixtures):
    """Counting pending messages by due time in bounded time."""

    async def test_few_messages_are_counted_exactly(self, forecasting: ForecastingStore) -> None:
        """A bucket has its start and not its end; the first and the last have all that is before and after."""
        dues = {
            "a": AT - ONE_HOUR,
            "b": AT,
            "c": AT + ONE_HOUR - self.step,
            "d": AT + ONE_HOUR,
            "e": LATER + timedelta(days=9999),
        }
        for message_id, due in dues.items():
            await forecasting.store(delayed(message_id, due))
        forecast = await forecasting.due_forecast([AT, AT + ONE_HOUR, LATER])
        assert [(bucket.start, bucket.end) for bucket in forecast.buckets] == [
            (None, AT),
            (AT, AT + ONE_HOUR),
            (AT + ONE_HOUR, LATER),
            (LATER, None),
        ]
        assert [bucket.count for bucket in forecast.buckets] == [1, 2, 1, 1]
        assert forecast.exact
        assert not any(bucket.at_least or bucket.destinations for bucket in forecast.buckets)
        assert forecast.earliest == AT - ONE_HOUR

    async def test_counts_are_divided_by_destination(self, forecasting: ForecastingStore) -> None:
        """Each bucket has its destinations, the largest first, lookalikes apart."""
        for number, destination in enumerate(["billing", "sales", "sales", "Sales", "sales"]):
            await forecasting.store(delayed(f"m{number}", AT + number * self.step, destination=destination))
        forecast = await forecasting.due_forecast([AT, AT + 4 * self.step], by_destination=True)
        assert [dict(bucket.destinations) for bucket in forecast.buckets] == [
            {},
            {"sales": 2, "billing": 1, "Sales": 1},
            {"sales": 1},
        ]
        assert next(iter(forecast.buckets[1].destinations)) == "sales"

    async def test_fetched_messages_are_counted(self, forecasting: ForecastingStore) -> None:
        """A message that is being dispatched is pending, and being removed it is not."""
        await forecasting.store(delayed())
        fetched = await forecasting.fetch_next_due(AT)
        assert fetched is not None
        async with asyncio.timeout(PATIENCE):
            assert [bucket.count for bucket in (await forecasting.due_forecast([LATER])).buckets] == [1, 0]
        assert await forecasting.remove(fetched)
        emptied = await forecasting.due_forecast([LATER], by_destination=True)
        assert ([bucket.count for bucket in emptied.buckets], emptied.earliest) == ([0, 0], None)

    async def test_edges_that_cannot_be_are_refused(self, forecasting: ForecastingStore) -> None:
        """Edges rise, have a time zone, and are never missing."""
        for edges in ([], [AT, AT], [LATER, AT], [AT + number * self.step for number in range(201)]):
            with pytest.raises(ConfigurationError, match="edges must"):
                await forecasting.due_forecast(edges)
        with pytest.raises(InvalidDueTime, match="no time zone"):
            await forecasting.due_forecast([AT.replace(tzinfo=None)])


class StoreLookups(StoreFixtures):
    """Finding pending messages by id and by due time."""

    async def test_a_message_is_found_by_its_id(self, searchable: SearchableStore) -> None:
        """With headers and as much of its body as asked for; a message that left is not found."""
        message = DelayedMessage(Message("m", AWKWARD_HEADERS, b"\x00\xff" * 500), "billing", AT)
        await searchable.store(message)
        whole = await searchable.find("m", body_limit=10_000)
        assert whole is not None
        same(whole.message, message)
        assert whole.size >= 1000
        part = await searchable.find("m", body_limit=3)
        assert part is not None
        assert (part.message.message.body, part.size) == (b"\x00\xff\x00", whole.size)
        assert await searchable.remove(message)
        assert await searchable.find("m", body_limit=3) is None

    async def test_messages_are_found_by_due_time(self, searchable: SearchableStore) -> None:
        """From the start on and before the end, earliest first, without bodies, page by page."""
        for number in range(6):
            await searchable.store(delayed(f"m{number}", AT + number // 2 * self.step))
        middle = await searchable.due_between(AT + self.step, AT + 2 * self.step, limit=10)
        second_page = await searchable.due_between(None, None, limit=2, offset=1)
        last = await searchable.due_between(AT + self.step, None, limit=9, offset=3)
        ids = [[listed.message.id for listed in page] for page in (middle, second_page, last)]
        assert ids == [["m2", "m3"], ["m1", "m2"], ["m5"]]
        assert all(listed.message.message.body == b"" for listed in middle)


class StoreSignals(StoreFixtures):
    """Notifications that a message was stored."""

    async def test_a_store_wakes(self, waking: NotifyingStore) -> None:
        """The callback gets the due time, once the message can be fetched."""
        woken, dues = asyncio.Event(), []

        def wake(due: datetime) -> None:
            dues.append(due)
            woken.set()

        stop = waking.on_stored(wake)
        await waking.store(delayed())
        async with asyncio.timeout(PATIENCE):
            await woken.wait()
        stop()
        assert min(dues) <= AT
        same(await waking.fetch_next_due(AT), delayed())

    async def test_a_transaction_wakes_after_its_commit(self, waking: NotifyingStore) -> None:
        """Not before: the poller would look, find nothing and sleep."""
        if not isinstance(waking, SupportsTransactions):
            pytest.skip("not claimed: SupportsTransactions")
        woken, message = asyncio.Event(), delayed()
        stop = waking.on_stored(lambda due: woken.set() if due == message.due else None)
        async with waking.transaction() as transaction:
            await waking.store(message, transaction)
            await settle()
            assert not woken.is_set(), "woken before the commit"
        async with asyncio.timeout(PATIENCE):
            await woken.wait()
        stop()

    async def test_no_listener_is_notified_after_stop(self, waking: NotifyingStore) -> None:
        """A callback that was taken back is not called; the others still are."""
        called: list[str] = []
        woken = asyncio.Event()
        stop_first = waking.on_stored(lambda due: called.append("first"))
        stop_second = waking.on_stored(lambda due: woken.set())
        stop_first()
        await waking.store(delayed())
        async with asyncio.timeout(PATIENCE):
            await woken.wait()
        stop_second()
        assert called == []


class RolledBackError(Exception):
    """Raised by a test inside a transaction, to roll it back."""


class PausableStore(BatchingStore, SupportsDispatchPauses, Protocol):
    """A store that claims pauses of dispatching, and batches."""


class StorePauses(StoreFixtures):
    """Messages whose dispatching is paused: they stay, and delay no others."""

    @pytest.fixture
    def pausable(self, batches: BatchingStore) -> PausableStore:
        """Provide an open store whose dispatching can be paused."""
        if not isinstance(batches, SupportsDispatchPauses):
            pytest.skip("not claimed: SupportsDispatchPauses")
        return batches

    @pytest.mark.parametrize("name", ["billing", 'it\'s 100 % \\ "ours"', *HOSTILE_NAMES])
    async def test_paused_messages_delay_no_others(self, pausable: PausableStore, name: str) -> None:
        """Given more than a batch for a paused destination, then others are fetched, and the paused once resumed."""
        paused = [delayed(f"a{number:03}", destination=name) for number in range(30)]
        await pausable.store_many(paused)
        await pausable.store_many(
            [delayed("b", LATER, destination=f"{name[:-1]}~"), delayed("c", LATER, destination="c")]
        )
        pauses = pausable.dispatch_pauses
        assert await pauses.earliest() == AT
        assert await pauses.pause(name, AT)
        assert not await pauses.pause(name, LATER)
        assert await pauses.earliest() == LATER
        assert await pauses.look()
        assert (pauses.is_any, pauses.is_whole) == (True, False)
        assert await pauses.all() == [DispatchPause(name, AT)]
        assert await pausable.next_due() == LATER
        fetched = await pausable.fetch_due(LATER, 10, max_bytes=PLENTY)
        assert sorted(message.id for message in fetched) == ["b", "c"]
        await pausable.remove_many(fetched)
        assert await pausable.next_due() is None
        assert not await pauses.resume(None, LATER)
        assert await pauses.resume(name, LATER)
        assert not await pauses.resume(name, LATER)
        assert await pauses.look()
        assert (pauses.is_any, pauses.is_whole) == (False, False)
        assert await pausable.next_due() == AT
        ids = [message.id for message in await pausable.fetch_due(AT, 100, max_bytes=PLENTY)]
        assert ids == self.in_order([message.id for message in paused])

    async def test_the_whole_endpoint_can_be_paused(self, pausable: PausableStore) -> None:
        """Beside a destination: each pause ends alone."""
        pauses = pausable.dispatch_pauses
        await pauses.pause("billing", LATER)
        await pauses.pause(None, AT)
        assert await pauses.earliest() is None
        assert await pauses.look()
        assert (pauses.is_any, pauses.is_whole) == (True, True)
        assert await pauses.all() == [DispatchPause(None, AT), DispatchPause("billing", LATER)]
        assert await pauses.resume(None, LATER)
        assert await pauses.look()
        assert (pauses.is_any, pauses.is_whole) == (True, False)

    async def test_overdue_messages_leave_at_a_rate(self, pausable: PausableStore) -> None:
        """Given 25 overdue messages of a pause, when it ends at 10 a second, then 10 leave each second, in order.

        Messages for others, and those that are not due yet, keep their due times.
        """
        overdue = [delayed(f"a{number:03}", AT + number * self.step, destination="billing") for number in range(25)]
        now, tomorrow = AT + ONE_HOUR, AT + timedelta(days=1)
        await pausable.store_many(
            [*overdue[::-1], delayed("b", destination="b"), delayed("later", tomorrow, destination="billing")]
        )
        pauses = pausable.dispatch_pauses
        await pauses.pause("billing", AT)
        with pytest.raises(ConfigurationError, match="rate must be above 0"):
            await pauses.resume("billing", now, 0)
        assert [pause.destination for pause in await pauses.all()] == ["billing"]
        assert await pauses.resume("billing", now, 10)
        await pauses.look()
        left = []
        for second in range(4):
            at = now + timedelta(seconds=second + 0.5)
            fetched = await pausable.fetch_due(at, 100, max_bytes=PLENTY)
            await pausable.remove_many(fetched)
            left.append(sorted(message.id for message in fetched))
        ids = [message.id for message in overdue]
        assert left == [[*ids[:10], "b"], ids[10:20], ids[20:], []]
        assert await pausable.next_due() == tomorrow

    async def test_pauses_outlast_the_store(self, tmp_path: Path) -> None:
        """Another store over the same storage sees them; for another endpoint they do not count."""
        if not self.durable:
            pytest.skip("not claimed: durable")
        first, second, other = [await self.make_store(tmp_path) for _ in range(3)]
        if not isinstance(first, SupportsDispatchPauses):
            pytest.skip("not claimed: SupportsDispatchPauses")
        await opened(first)
        await first.dispatch_pauses.pause("billing", AT)
        await closed(first)
        await opened(second)
        await opened(other, "another")
        assert isinstance(second, SupportsDispatchPauses)
        assert isinstance(other, SupportsDispatchPauses)
        assert await second.dispatch_pauses.all() == [DispatchPause("billing", AT)]
        assert await other.dispatch_pauses.all() == []
        await second.dispatch_pauses.resume("billing", AT)
        await closed(second)
        await closed(other)


class StoreTransactionality(StoreFixtures):
    """Commit and rollback."""

    async def test_a_commit_applies_everything(self, transactional: TransactionalStore) -> None:
        """Fetch, remove and store in a single transaction."""
        store = transactional
        await store.store(delayed("old"))
        async with store.transaction() as transaction:
            fetched = await store.fetch_next_due(AT, transaction)
            same(fetched, delayed("old"))
            assert await store.remove(delayed("old"), transaction) is True
            await store.store(delayed("new", LATER), transaction)
        assert await store.next_due() == LATER
        same(await store.fetch_next_due(LATER), delayed("new", LATER))
        assert await store.fetch_next_due(LATER) is None

    async def test_a_rollback_leaves_all_as_before(self, transactional: TransactionalStore) -> None:
        """Removed messages are back, stored messages are gone, fetched messages are unlocked and not counted."""
        store = transactional
        await store.store(delayed("old"))
        with pytest.raises(RolledBackError):
            async with store.transaction() as transaction:
                same(await store.fetch_next_due(AT, transaction), delayed("old"))
                assert await store.remove(delayed("old"), transaction) is True
                await store.store(delayed("new"), transaction)
                raise RolledBackError
        same(await store.fetch_next_due(AT), delayed("old"))
        assert await store.fetch_next_due(LATER) is None

    async def test_a_cancelled_transaction_is_rolled_back(self, transactional: TransactionalStore) -> None:
        """Cancelling the task that holds it leaves no lock and no trace."""
        store, fetched = transactional, asyncio.Event()
        await store.store(delayed("old"))

        async def hold() -> None:
            async with store.transaction() as transaction:
                await store.fetch_next_due(AT, transaction)
                await store.store(delayed("new"), transaction)
                fetched.set()
                await asyncio.Event().wait()

        holder = asyncio.create_task(hold())
        await fetched.wait()
        holder.cancel()
        await asyncio.gather(holder, return_exceptions=True)
        same(await store.fetch_next_due(AT), delayed("old"))
        assert await store.fetch_next_due(AT) is None

    async def test_a_message_fetched_in_a_transaction_is_locked(self, transactional: TransactionalStore) -> None:
        """Until the transaction ends no other fetch returns the message; after its removal none ever does."""
        store = transactional
        await store.store(delayed())
        async with store.transaction() as transaction:
            fetched = await store.fetch_next_due(AT, transaction)
            other = asyncio.create_task(store.fetch_next_due(AT))
            await settle()
            assert fetched is not None
            await store.remove(fetched, transaction)
        assert await other is None

    async def test_a_lock_without_a_transaction_holds_for_transactions(self, transactional: TransactionalStore) -> None:
        """Pollers that use transactions and pollers that do not can work on the same store."""
        store = transactional
        await store.store(delayed())
        fetched = await store.fetch_next_due(AT)
        assert fetched is not None
        async with store.transaction() as transaction:
            assert await store.fetch_next_due(AT, transaction) is None
        assert await store.increment_failure_count(fetched) is True
        async with store.transaction() as transaction:
            assert await store.fetch_next_due(AT, transaction) is not None

    async def test_an_uncommitted_store_is_not_seen(self, transactional: TransactionalStore) -> None:
        """Nor is a message that is rolled back, ever."""
        store = transactional
        other: asyncio.Task[object]
        with pytest.raises(RolledBackError):
            async with store.transaction() as transaction:
                await store.store(delayed(), transaction)
                other = asyncio.create_task(store.fetch_next_due(AT))
                await settle()
                raise RolledBackError
        assert await other is None
        assert await store.next_due() is None

    async def test_a_fetch_committed_without_a_remove_unlocks(self, transactional: TransactionalStore) -> None:
        """The lock ends with the transaction, however it ends."""
        store = transactional
        await store.store(delayed())
        async with store.transaction() as transaction:
            same(await store.fetch_next_due(AT, transaction), delayed())
        same(await store.fetch_next_due(AT), delayed())

    async def test_a_remove_in_a_transaction_answers_at_once(self, transactional: TransactionalStore) -> None:
        """False for a missing message: the caller rolls back instead of sending twice."""
        store = transactional
        async with store.transaction() as transaction:
            assert await store.remove(delayed(), transaction) is False

    async def test_a_duplicate_in_a_transaction_does_not_spoil_it(self, transactional: TransactionalStore) -> None:
        """The rest of the transaction still commits."""
        store = transactional
        await store.store(delayed("old"))
        async with store.transaction() as transaction:
            await store.store(delayed("old", LATER), transaction)
            await store.store(delayed("new"), transaction)
        for message_id in self.in_order(["old", "new"]):
            same(await store.fetch_next_due(AT), delayed(message_id))

    async def test_a_failure_is_counted_after_a_rollback(self, transactional: TransactionalStore) -> None:
        """The poller's way: roll back, then count, durably."""
        store = transactional
        await store.store(delayed())
        fetched = None
        with pytest.raises(RolledBackError):
            async with store.transaction() as transaction:
                fetched = await store.fetch_next_due(AT, transaction)
                raise RolledBackError
        assert fetched is not None
        assert await store.increment_failure_count(fetched) is True
        again = await store.fetch_next_due(AT)
        assert again is not None
        assert again.number_of_retries == 1

    async def test_failures_are_counted_in_a_transaction(self, transactional: TransactionalStore) -> None:
        """At its commit, with the new due time; after a rollback they are as they were."""
        store = transactional
        if not isinstance(store, SupportsBatches):
            pytest.skip("not claimed: SupportsBatches")
        await store.store_many([delayed("a"), delayed("b")])
        with pytest.raises(RolledBackError):
            async with store.transaction() as transaction:
                fetched = await store.fetch_due(AT, 10, max_bytes=PLENTY, transaction=transaction)
                assert await store.retry_many(fetched, LATER, transaction) == 2
                raise RolledBackError
        async with store.transaction() as transaction:
            fetched = await store.fetch_due(AT, 10, max_bytes=PLENTY, transaction=transaction)
            assert [(message.id, message.number_of_retries) for message in fetched] == [("a", 0), ("b", 0)]
            assert await store.retry_many(fetched[:1], LATER, transaction) == 1
            assert await store.remove_many(fetched[1:], transaction) == 1
        assert await store.next_due() == LATER
        again = await store.fetch_due(LATER, 10, max_bytes=PLENTY)
        assert [(message.id, message.number_of_retries) for message in again] == [("a", 1)]

    async def test_a_savepoint_undoes_a_part_and_the_rest_goes_on(self, transactional: TransactionalStore) -> None:
        """Work inside it is undone, with callbacks for the commit; callbacks for the end run at once."""
        store, called = transactional, list[str]()
        await store.store(delayed("old"))
        async with store.transaction() as transaction:
            if not isinstance(transaction, SupportsSavepoints):
                pytest.skip("not claimed: SupportsSavepoints")
            await store.store(delayed("before", LATER), transaction)
            with pytest.raises(RolledBackError):
                async with transaction.savepoint():
                    same(await store.fetch_next_due(AT, transaction), delayed("old"))
                    await store.remove(delayed("old"), transaction)
                    await store.store(delayed("inside"), transaction)
                    transaction.after_commit(lambda: called.append("committed"))
                    transaction.after_end(lambda: called.append("ended"))
                    raise RolledBackError
            assert called == ["ended"]
            async with transaction.savepoint():
                await store.store(delayed("after", LATER), transaction)
                transaction.after_commit(lambda: called.append("notified"))
        assert called == ["ended", "notified"]
        messages = [await store.fetch_next_due(LATER) for _ in range(4)]
        assert [message.id for message in messages if message] == ["old", *self.in_order(["before", "after"])]

    async def test_others_go_on_beside_a_transaction_that_locks_rows(self, transactional: TransactionalStore) -> None:
        """Others store, fetch unlocked messages, count and remove, without waiting for the transaction's end."""
        store = transactional
        if not store.locks_rows:
            pytest.skip("not claimed: locks_rows")
        await store.store(delayed("mine"))
        await store.store(delayed("theirs"))
        async with store.transaction() as transaction:
            mine = await store.fetch_next_due(AT, transaction)
            same(mine, delayed("mine"))
            assert mine is not None
            async with asyncio.timeout(PATIENCE):
                theirs = await store.fetch_next_due(AT)
                same(theirs, delayed("theirs"))
                assert theirs is not None
                assert await store.fetch_next_due(AT) is None
                assert await store.next_due() == AT
                assert await store.increment_failure_count(theirs) is True
                await store.store(delayed("new", LATER))
                async with store.transaction() as other:
                    assert await store.remove(delayed("theirs"), other) is True
            assert await store.remove(mine, transaction) is True
        assert await store.next_due() == LATER

    async def test_after_commit_runs_after_the_commit(self, transactional: TransactionalStore) -> None:
        """Never before it, once, and not at all after a rollback."""
        store = transactional
        called: list[str] = []
        async with store.transaction() as transaction:
            transaction.after_commit(lambda: called.append("committed"))
            await store.store(delayed(), transaction)
            assert called == []
        assert called == ["committed"]
        with pytest.raises(RolledBackError):
            async with store.transaction() as transaction:
                transaction.after_commit(lambda: called.append("rolled back"))
                raise RolledBackError
        assert called == ["committed"]

    async def test_an_empty_transaction_is_fine(self, transactional: TransactionalStore) -> None:
        """Entered and left, with nothing in it."""
        async with transactional.transaction():
            pass
        with pytest.raises(RolledBackError):
            async with transactional.transaction():
                raise RolledBackError
        assert await transactional.next_due() is None

    async def test_batches_in_a_transaction(self, transactional: TransactionalStore) -> None:
        """Fetch, remove and store many: rolled back, then committed."""
        store = transactional
        if not isinstance(store, SupportsBatches):
            pytest.skip("not claimed: SupportsBatches")
        await store.store_many([delayed(f"m{number}") for number in range(10)])
        with pytest.raises(RolledBackError):
            async with store.transaction() as transaction:
                fetched = await store.fetch_due(AT, 10, max_bytes=PLENTY, transaction=transaction)
                assert await store.remove_many(fetched, transaction) == 10
                await store.store_many([delayed("new")], transaction)
                raise RolledBackError
        async with store.transaction() as transaction:
            fetched = await store.fetch_due(AT, 4, max_bytes=PLENTY, transaction=transaction)
            assert [message.id for message in fetched] == ["m0", "m1", "m2", "m3"]
            assert await store.remove_many(fetched, transaction) == 4
        left = await store.fetch_due(AT, 100, max_bytes=PLENTY)
        assert [message.id for message in left] == [f"m{number}" for number in range(4, 10)]


class StoreConformance(
    StoreVerbs,
    StoreContent,
    StoreBatches,
    StoreFairness,
    StorePauses,
    StoreTransactionality,
    StoreManagement,
    StoreForecasts,
    StoreLookups,
    StoreSignals,
):
    """The conformance suite of delayed message stores: subclass it, override `make_store`, run pytest.

    Capabilities are found as the endpoint finds them, with `isinstance`; tests of a capability that the store does not
    have are reported as `not claimed`.
    """
