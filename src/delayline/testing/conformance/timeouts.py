"""Conformance suite for timeout persisters: subclass, override a factory, run pytest."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Protocol, cast

import pytest
import pytest_asyncio

from delayline.clock import ONE_MINUTE, ONE_SECOND
from delayline.delayed.store import SupportsSetup, SupportsTransactions
from delayline.message import Message
from delayline.testing.conformance.messages import AT, AWKWARD_HEADERS, ENDPOINT
from delayline.timeouts.persister import (
    NO_SAGA,
    SupportsCount,
    SupportsOpen,
    SupportsTake,
    SupportsTimeoutLocks,
    Timeout,
    TimeoutCount,
    TimeoutPersister,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from delayline.transaction import Transaction


class TransactionalPersister(TimeoutPersister, SupportsTransactions, Protocol):
    """A persister that claims transactions."""


class LockingTimeouts(TransactionalPersister, SupportsTimeoutLocks, Protocol):
    """A persister whose transactions can lock expired timeouts."""


class RolledBack(Exception):
    """Ends a transaction that must leave nothing behind."""


def a_timeout(
    number: int = 1,
    due: datetime = AT,
    *,
    destination: str | None = "billing",
    saga_id: uuid.UUID = NO_SAGA,
    body: bytes = b"body",
) -> Timeout:
    """Return a timeout."""
    return Timeout(str(uuid.UUID(int=number)), Message("m", AWKWARD_HEADERS, body), destination, due, saga_id)


async def opened(persister: TimeoutPersister, endpoint_name: str = ENDPOINT) -> TimeoutPersister:
    """Set the persister up and open it."""
    if isinstance(persister, SupportsSetup):
        await persister.setup_infrastructure(endpoint_name)
    if isinstance(persister, SupportsOpen):
        await persister.open(endpoint_name)
    return persister


async def closed(persister: TimeoutPersister) -> None:
    """Close it if it can be closed."""
    if isinstance(persister, SupportsOpen):
        await persister.close()


async def taken(
    persister: TimeoutPersister,
    at: datetime,
    limit: int = 100,
    *,
    hold: timedelta = ONE_MINUTE,
    transaction: Transaction | None = None,
) -> list[str]:
    """Lease due timeouts for this long, and return their ids."""
    chunk = await persister.next_chunk(at, limit, lease_until=at + hold, transaction=transaction)
    return [timeout.id for timeout in chunk.due]


class TimeoutPersisterConformance:
    """The conformance suite of timeout persisters: subclass it, override `make_persister`, run pytest."""

    pytestmark: pytest.MarkDecorator = pytest.mark.asyncio
    #: True if a second persister over the same storage sees the first persister's timeouts.
    durable: bool = False
    #: The steps in which due times are kept; they are rounded up.
    step: timedelta = timedelta(microseconds=1)

    async def make_persister(self, tmp_path: Path) -> TimeoutPersister:
        """Return a new persister, neither set up nor open, over storage that is empty when a test begins."""
        raise NotImplementedError("override make_persister in your subclass of TimeoutPersisterConformance")

    @pytest_asyncio.fixture
    async def persister(self, tmp_path: Path) -> AsyncIterator[TimeoutPersister]:
        """Provide an open persister."""
        persister = await opened(await self.make_persister(tmp_path))
        yield persister
        await closed(persister)

    @pytest.fixture
    def transactional(self, persister: TimeoutPersister) -> TransactionalPersister:
        """Provide an open persister with transactions."""
        if not isinstance(persister, SupportsTransactions):
            pytest.skip("not claimed: SupportsTransactions")
        return persister

    @pytest.fixture
    def locking(self, transactional: TransactionalPersister) -> LockingTimeouts:
        """Provide an open persister whose transactions can lock expired timeouts."""
        if not isinstance(transactional, SupportsTimeoutLocks):
            pytest.skip("not claimed: SupportsTimeoutLocks")
        return cast("LockingTimeouts", transactional)

    async def test_added_messages_are_returned_unchanged(self, persister: TimeoutPersister) -> None:
        """Headers, body, destination, saga and due time; the time rounded up where the storage is coarser."""
        saga, due = uuid.uuid4(), datetime(2026, 3, 1, 12, 30, 15, 123_456, tzinfo=UTC)
        timeout = a_timeout(due=due, saga_id=saga, body=bytes(range(256)))
        await persister.add(timeout)
        kept = await persister.peek(timeout.id)
        assert kept is not None
        assert (kept.id, kept.destination, kept.saga_id) == (timeout.id, "billing", saga)
        assert (kept.message.headers, kept.message.body) == (AWKWARD_HEADERS, bytes(range(256)))
        assert timedelta(0) <= kept.due - due < self.step
        assert kept.due.utcoffset() == timedelta(0)

    async def test_an_empty_body_and_no_destination_are_kept(self, persister: TimeoutPersister) -> None:
        """Nothing stands for nothing."""
        await persister.add(a_timeout(destination=None, body=b""))
        kept = await persister.peek(a_timeout().id)
        assert kept is not None
        assert (kept.destination, kept.message.body, kept.saga_id) == (None, b"", NO_SAGA)

    async def test_adding_an_id_again_changes_nothing(self, persister: TimeoutPersister) -> None:
        """A redelivered message is stored once."""
        await persister.add(a_timeout())
        await persister.add(a_timeout(due=AT + ONE_MINUTE, destination="elsewhere"))
        kept = await persister.peek(a_timeout().id)
        assert kept is not None
        assert (kept.due, kept.destination) == (AT, "billing")

    async def test_peek_removes_nothing_and_remove_succeeds_once(self, persister: TimeoutPersister) -> None:
        """The same answer at every look; True, then False."""
        await persister.add(a_timeout())
        assert [await persister.peek(a_timeout().id) is not None for _ in range(2)] == [True, True]
        assert [await persister.remove(a_timeout().id) for _ in range(2)] == [True, False]
        assert await persister.peek(a_timeout().id) is None

    async def test_a_saga_is_cleared_and_no_other(self, persister: TimeoutPersister) -> None:
        """Its timeouts are gone, held timeouts too."""
        saga = uuid.uuid4()
        for number, owner in enumerate([saga, saga, uuid.uuid4(), NO_SAGA]):
            await persister.add(a_timeout(number, saga_id=owner))
        await taken(persister, AT, 1)
        assert await persister.remove_by_saga(saga) == 2
        assert [await persister.peek(a_timeout(number).id) is not None for number in range(4)] == [
            False,
            False,
            True,
            True,
        ]

    async def test_nothing_is_next_in_an_empty_storage(self, persister: TimeoutPersister) -> None:
        """No due timeouts, and nothing to wait for."""
        chunk = await persister.next_chunk(AT, 10, lease_until=AT + ONE_MINUTE)
        assert (list(chunk.due), chunk.next_due) == ([], None)

    async def test_due_messages_are_fetched_earliest_first_and_once(self, persister: TimeoutPersister) -> None:
        """However long ago it was due; the next look gets the rest."""
        for number, seconds in ((1, 0), (2, -300_000_000), (3, -5), (4, 1)):
            await persister.add(a_timeout(number, AT + seconds * ONE_SECOND))
        ids = [a_timeout(number).id for number in (2, 3, 1)]
        assert await taken(persister, AT, 2) == ids[:2]
        assert await taken(persister, AT, 2) == ids[2:]
        assert await taken(persister, AT, 2) == []

    async def test_a_fetch_without_due_messages_returns_the_next_due_time(self, persister: TimeoutPersister) -> None:
        """The earliest future due time, or that of the remaining due timeouts."""
        await persister.add(a_timeout(1, AT + 5 * ONE_SECOND))
        await persister.add(a_timeout(2, AT + 9 * ONE_SECOND))
        chunk = await persister.next_chunk(AT, 10, lease_until=AT + ONE_MINUTE)
        assert (list(chunk.due), chunk.next_due) == ([], AT + 5 * ONE_SECOND)
        chunk = await persister.next_chunk(AT + 20 * ONE_SECOND, 1, lease_until=AT + 2 * ONE_MINUTE)
        assert ([timeout.due for timeout in chunk.due], chunk.next_due) == ([AT + 5 * ONE_SECOND], AT + 9 * ONE_SECOND)

    async def test_a_look_with_a_limit_of_nothing_holds_nothing(self, persister: TimeoutPersister) -> None:
        """It returns when the first is due."""
        await persister.add(a_timeout())
        chunk = await persister.next_chunk(AT, 0, lease_until=AT + ONE_MINUTE)
        assert (list(chunk.due), chunk.next_due) == ([], AT)
        assert await taken(persister, AT) == [a_timeout().id]

    async def test_leases_expire_in_time(self, persister: TimeoutPersister) -> None:
        """The lease has ended without a removal."""
        await persister.add(a_timeout())
        await taken(persister, AT)
        chunk = await persister.next_chunk(AT + ONE_SECOND, 0, lease_until=AT)
        assert chunk.next_due == AT + ONE_MINUTE
        assert await taken(persister, AT + ONE_MINUTE - ONE_SECOND) == []
        assert await taken(persister, AT + ONE_MINUTE) == [a_timeout().id]

    async def test_a_lease_is_extended_or_ended_by_others(self, persister: TimeoutPersister) -> None:
        """The last word counts."""
        await persister.add(a_timeout())
        await taken(persister, AT)
        await persister.lease([a_timeout().id], AT + timedelta(days=1))
        assert await taken(persister, AT + timedelta(hours=23)) == []
        await persister.lease([a_timeout().id], AT)
        assert await taken(persister, AT) == [a_timeout().id]

    async def test_missing_and_unclaimed_rows_are_not_held(self, persister: TimeoutPersister) -> None:
        """Only a look begins a hold."""
        await persister.add(a_timeout(1))
        await persister.lease([a_timeout(1).id, a_timeout(2).id], AT + ONE_MINUTE)
        assert await taken(persister, AT) == [a_timeout(1).id]
        await persister.remove(a_timeout(1).id)
        await persister.lease([a_timeout(1).id], AT + ONE_MINUTE)
        assert (await persister.next_chunk(AT, 0, lease_until=AT)).next_due is None

    async def test_late_commits_are_found(self, persister: TimeoutPersister) -> None:
        """Its due time lies before that of a timeout which was taken and removed already."""
        await persister.add(a_timeout(1, AT))
        await taken(persister, AT)
        await persister.remove(a_timeout(1).id)
        await persister.add(a_timeout(2, AT - ONE_MINUTE))
        assert await taken(persister, AT) == [a_timeout(2).id]

    async def test_takers_at_the_same_time_share(self, persister: TimeoutPersister, tmp_path: Path) -> None:
        """No timeout is given to two of them."""
        for number in range(60):
            await persister.add(a_timeout(number, AT))
        others = [await opened(await self.make_persister(tmp_path)) for _ in range(3)] if self.durable else []
        taken_ids: list[str] = []
        for _ in range(20):
            batches = await asyncio.gather(*(taken(taker, AT, 5) for taker in [persister, *others]))
            taken_ids += [timeout_id for batch in batches for timeout_id in batch]
        assert sorted(taken_ids) == sorted(a_timeout(number).id for number in range(60))
        for taker in others:
            await closed(taker)

    async def test_a_removal_takes_its_hold_along(self, persister: TimeoutPersister) -> None:
        """No wake-up for removed timeouts."""
        await persister.add(a_timeout())
        await taken(persister, AT)
        await persister.remove(a_timeout().id)
        assert (await persister.next_chunk(AT, 0, lease_until=AT)).next_due is None

    async def test_pending_messages_are_counted(self, persister: TimeoutPersister) -> None:
        """With the first and the last due time."""
        if not isinstance(persister, SupportsCount):
            pytest.skip("not claimed: SupportsCount")
        assert await persister.count() == TimeoutCount(0, None, None)
        for number in range(3):
            await persister.add(a_timeout(number, AT + number * ONE_SECOND))
        await taken(persister, AT)
        assert await persister.count() == TimeoutCount(3, AT, AT + 2 * ONE_SECOND)

    async def test_other_instances_see_stored_messages(self, persister: TimeoutPersister, tmp_path: Path) -> None:
        """A second persister over the same storage."""
        if not self.durable:
            pytest.skip("not claimed: durable")
        await persister.add(a_timeout())
        other = await opened(await self.make_persister(tmp_path))
        assert await taken(other, AT) == [a_timeout().id]
        assert await taken(persister, AT) == []
        await closed(other)

    async def test_endpoints_do_not_see_each_others(self, persister: TimeoutPersister, tmp_path: Path) -> None:
        """A persister belongs to a single endpoint."""
        if not self.durable:
            pytest.skip("not claimed: durable")
        await persister.add(a_timeout())
        other = await opened(await self.make_persister(tmp_path), "conformance.other")
        assert await taken(other, AT) == []
        await closed(other)

    async def test_a_rollback_undoes_everything(self, transactional: TransactionalPersister) -> None:
        """Added, removed, cleared and leased timeouts."""
        saga = uuid.uuid4()
        await transactional.add(a_timeout(1))
        await transactional.add(a_timeout(2, saga_id=saga))
        with pytest.raises(RolledBack):
            async with transactional.transaction() as transaction:
                await transactional.add(a_timeout(3), transaction)
                assert len(await taken(transactional, AT, 2, transaction=transaction)) == 2
                assert await transactional.remove(a_timeout(1).id, transaction)
                assert await transactional.remove_by_saga(saga, transaction) == 1
                raise RolledBack
        assert sorted(await taken(transactional, AT)) == [a_timeout(1).id, a_timeout(2).id]

    async def test_a_commit_keeps_everything(self, transactional: TransactionalPersister) -> None:
        """And invisible before."""
        await transactional.add(a_timeout(1))
        async with transactional.transaction() as transaction:
            await transactional.add(a_timeout(2), transaction)
            kept = await transactional.peek(a_timeout(1).id, transaction)
            assert kept is not None
            assert await transactional.remove(a_timeout(1).id, transaction)
        assert await taken(transactional, AT) == [a_timeout(2).id]

    async def test_taking_is_peeking_and_removing(self, transactional: TransactionalPersister) -> None:
        """Undone with its transaction; nothing where nothing is."""
        if not isinstance(transactional, SupportsTake):
            pytest.skip("not claimed: SupportsTake")
        await transactional.add(a_timeout())
        with pytest.raises(RolledBack):
            async with transactional.transaction() as transaction:
                assert await transactional.take(a_timeout().id, transaction) is not None
                raise RolledBack
        async with transactional.transaction() as transaction:
            taken_timeout = await transactional.take(a_timeout().id, transaction)
            assert taken_timeout is not None
            assert taken_timeout.message.headers == AWKWARD_HEADERS
            assert await transactional.take(a_timeout().id, transaction) is None
        assert await transactional.peek(a_timeout().id) is None

    async def test_one_dispatcher_has_a_timeout_at_a_time(self, transactional: TransactionalPersister) -> None:
        """Who peeks at the same moment finds it gone when the first has removed it."""
        await transactional.add(a_timeout())

        async def dispatch() -> bool:
            async with transactional.transaction() as transaction:
                if await transactional.peek(a_timeout().id, transaction) is None:
                    return False
                await asyncio.sleep(0)
                return await transactional.remove(a_timeout().id, transaction)

        assert sorted(await asyncio.gather(*(dispatch() for _ in range(4)))) == [False, False, False, True]

    async def test_expired_timeouts_are_locked_earliest_first_and_removed(self, locking: LockingTimeouts) -> None:
        """As many as fit, but at least one; leased timeouts and timeouts not due are excluded."""
        for number, seconds in ((1, 0), (2, -300_000_000), (3, -5), (4, -1), (5, 7), (6, -400_000_000)):
            await locking.add(a_timeout(number, AT + seconds * ONE_SECOND, body=bytes(range(256)) * 4))
        assert await taken(locking, AT, 1, hold=timedelta(hours=1)) == [a_timeout(6).id]
        for limit, room, wanted, left in (
            (2, 1 << 20, (2, 3), AT - ONE_SECOND),
            (9, 1, (4,), AT),
            (9, 1500, (1,), AT + 7 * ONE_SECOND),
        ):
            async with locking.transaction() as transaction:
                locked = await locking.lock_due(AT, limit, max_bytes=room, transaction=transaction)
                ids = [timeout.id for timeout in locked.due]
                assert (ids, locked.next_due) == ([a_timeout(number).id for number in wanted], left)
                assert (locked.due[0].destination, locked.due[0].message.headers) == ("billing", AWKWARD_HEADERS)
                assert len(locked.due[0].message.body) == 1024
                assert await locking.remove_many(ids, transaction) == len(ids)
        async with locking.transaction() as transaction:
            locked = await locking.lock_due(AT, 9, max_bytes=1 << 20, transaction=transaction)
        assert (list(locked.due), locked.next_due) == ([], AT + 7 * ONE_SECOND)

    async def test_locked_timeouts_are_free_after_a_rollback(self, locking: LockingTimeouts) -> None:
        """Set aside it is held, even where it was held before and forgotten; a rollback forgets that too."""
        await locking.add(a_timeout())
        await taken(locking, AT, hold=ONE_SECOND)

        async def lock(at: datetime, *, aside_until: datetime, fails: bool = False) -> int:
            async with locking.transaction() as transaction:
                locked = await locking.lock_due(at, 9, max_bytes=1 << 20, transaction=transaction)
                await locking.lease_locked([timeout.id for timeout in locked.due], aside_until, transaction)
                if fails:
                    raise RolledBack
            return len(locked.due)

        later = AT + ONE_MINUTE
        with pytest.raises(RolledBack):
            await lock(AT + ONE_SECOND, aside_until=later, fails=True)
        assert await lock(AT + ONE_SECOND, aside_until=later) == 1
        assert await lock(later - ONE_SECOND, aside_until=later) == 0
        assert (await locking.next_chunk(AT, 0, lease_until=AT)).next_due == later
        assert await taken(locking, later) == [a_timeout().id]

    async def test_transactions_share_expired_timeouts(self, locking: LockingTimeouts, tmp_path: Path) -> None:
        """None of it is given to two of them, and none is left."""
        for number in range(60):
            await locking.add(a_timeout(number, AT))
        sent_ids: list[str] = []

        async def send(persister: LockingTimeouts) -> None:
            async with persister.transaction() as transaction:
                locked = await persister.lock_due(AT, 5, max_bytes=1 << 20, transaction=transaction)
                await asyncio.sleep(0)
                ids = [timeout.id for timeout in locked.due]
                assert await persister.remove_many(ids, transaction) == len(ids)
                sent_ids.extend(ids)

        others = [await opened(await self.make_persister(tmp_path)) for _ in range(3)] if self.durable else []
        for _ in range(12):
            await asyncio.gather(*(send(cast("LockingTimeouts", sender)) for sender in [locking, *others]))
        for taker in others:
            await closed(taker)
        assert sorted(sent_ids) == sorted(a_timeout(number).id for number in range(60))
        assert (await locking.next_chunk(AT, 0, lease_until=AT)).next_due is None
