"""Locks of other transactions: waiting statements block no others, and give up in time."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import psycopg
import pytest
from tests.eventually import PATIENCE
from tests.integration.conftest import waiting

from delayline import BackendUnavailable, SqlDelayedMessageStore, TransactionMode
from delayline.sql.databases import database_at
from delayline.sql.prepared import LONGEST_LIST
from delayline.sql.server import run
from delayline.sql.server_database import POOL_SIZE, ServerDatabase, workers_of
from delayline.testing.conformance.messages import AT, delayed

if TYPE_CHECKING:
    pass

TRANSACTIONS = POOL_SIZE - workers_of(POOL_SIZE)


async def test_who_waits_for_a_lock_does_not_keep_its_holder_out(store: SqlDelayedMessageStore) -> None:
    # Given a transaction that has stored an id
    async with store.transaction() as transaction:
        await store.store(delayed("same"), transaction)

        async def again() -> None:
            async with store.transaction() as other:
                await store.store(delayed("same"), other)

        # When more wait for its outcome than there are threads
        others = [asyncio.create_task(again()) for _ in range(TRANSACTIONS - 1)]
        alone = [asyncio.create_task(store.store(delayed("same"))) for _ in range(20)]
        await asyncio.sleep(0.3)
    # Then it can end, and so can they
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*others, *alone)
    assert await waiting(store) == ["same"]


async def test_too_many_transactions(
    store: SqlDelayedMessageStore, database: ServerDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(database.dialect.connections), "patience", 0.2)
    async with contextlib.AsyncExitStack() as stack:
        for number in range(TRANSACTIONS):
            transaction = await stack.enter_async_context(store.transaction())
            await store.store(delayed(f"m{number}"), transaction)
        with pytest.raises(
            BackendUnavailable, match=rf"all {TRANSACTIONS} transactions .* busy for 0.2 s.*end them sooner"
        ):
            async with store.transaction() as another:
                await store.store(delayed("another"), another)
    async with store.transaction() as another:
        await store.store(delayed("another"), another)
    assert len(await waiting(store)) == TRANSACTIONS + 1


@pytest.mark.parametrize("held", ['LOCK TABLE "sales.timeouts"', 'UPDATE "sales.timeouts" SET retry_count = 1'])
async def test_a_lock_that_is_not_given_in_time(postgresql_url: str, held: str) -> None:
    # Given another program in the middle of something
    url = f"{postgresql_url}?options=-c%20lock_timeout%3D200ms"
    store = SqlDelayedMessageStore(url)
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    try:
        await store.store(delayed("first"))
        with psycopg.connect(postgresql_url) as other:
            other.execute(held.encode())
            # When we need the rows that it has locked
            with pytest.raises(BackendUnavailable, match="did not get a lock in time"):
                await store.remove(delayed("first"))
            with pytest.raises(BackendUnavailable, match="did not get a lock in time"):
                async with store.transaction() as transaction:
                    await store.remove(delayed("first"), transaction)
            # Then claims do not wait for it, where it has locked rows only
            if "UPDATE" in held:
                assert await store.fetch_due(AT, 9, max_bytes=100) == []
            other.rollback()
        assert await waiting(store) == ["first"]
        assert await store.remove(delayed("first")) is True
    finally:
        await store.close()


async def test_a_removal_of_very_many_that_fails_has_removed_none(postgresql_url: str) -> None:
    # Given more messages than a list in a statement holds, of which the last one is locked by another program
    store = SqlDelayedMessageStore(f"{postgresql_url}?options=-c%20lock_timeout%3D200ms")
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    try:
        messages = [delayed(f"{number:04d}") for number in range(2 * LONGEST_LIST + 1)]
        await store.store_many(messages)
        with psycopg.connect(postgresql_url) as other:
            other.execute("""UPDATE "sales.timeouts" SET retry_count = 1 WHERE id = '1000'""")
            # When all are removed, or counted as failed, without a transaction
            with pytest.raises(BackendUnavailable, match="did not get a lock in time"):
                await store.remove_many(messages)
            with pytest.raises(BackendUnavailable, match="did not get a lock in time"):
                await store.retry_many(messages, AT)
            other.rollback()
        # Then all are as they were
        assert {message.number_of_retries for message in await store.pending(limit=2000)} == {0}
        assert await store.remove_many(messages) == len(messages)
    finally:
        await store.close()


async def test_options_of_the_url_are_added_to_ours(postgresql_url: str) -> None:
    # Given a URL whose options name a setting that we set too, and one that we do not
    database = database_at(f"{postgresql_url}?options=-c%20lock_timeout%3D200ms%20-c%20work_mem%3D5MB")
    await database.open()
    try:
        # When a connection is made, then theirs win, and ours stay
        asked = "SELECT current_setting('lock_timeout'), current_setting('work_mem'), current_setting('timezone')"
        assert await database.read(lambda connection: run(connection, asked)) == [("200ms", "5MB", "UTC")]
        shown = "SELECT current_setting('enable_seqscan'), current_setting('plan_cache_mode')"
        assert await database.read(lambda connection: run(connection, shown)) == [("off", "force_generic_plan")]
    finally:
        await database.close()


async def test_a_deadlock(postgresql_url: str) -> None:
    # Given two transactions that have locked a row each
    store = SqlDelayedMessageStore(f"{postgresql_url}?options=-c%20deadlock_timeout%3D50ms")
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    met = asyncio.Barrier(2)

    async def remove(first: str, second: str) -> bool:
        try:
            async with store.transaction() as transaction:
                await store.remove(delayed(first), transaction)
                await met.wait()
                await store.remove(delayed(second), transaction)
        except BackendUnavailable as error:
            assert "gave this transaction up in favour of another" in str(error)
            return False
        return True

    try:
        await store.store_many([delayed("a"), delayed("b"), delayed("c")])
        # When each wants the other's
        async with asyncio.timeout(PATIENCE):
            done = await asyncio.gather(remove("a", "b"), remove("b", "a"))
        # Then one gives way, and the other one has done all of its work
        assert sorted(done) == [False, True]
        assert await waiting(store) == ["c"]
    finally:
        await store.close()


async def test_work_that_a_deadlock_has_rolled_back_is_repeated(postgresql_url: str) -> None:
    # Given another program that has an id, and lets others notice a deadlock first
    # A wait is looked at once, after this time: the other program has to wait by then.
    store = SqlDelayedMessageStore(f"{postgresql_url}?options=-c%20deadlock_timeout%3D5s")
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    insert = """INSERT INTO "sales.timeouts" (id, destination, due, headers, body, retry_count)
        VALUES (%s, 'billing', now(), '', '', 0)"""
    try:
        async with await psycopg.AsyncConnection.connect(postgresql_url) as other:
            await other.execute("SET deadlock_timeout = '100s'")
            await other.execute(insert, ["b"])
            # When messages are stored that have to wait for it, and it then wants one of them
            storing = asyncio.create_task(store.store_many([delayed("a"), delayed("b")]))
            held = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'INSERT%'"
            async with await psycopg.AsyncConnection.connect(postgresql_url, autocommit=True) as watch:
                async with asyncio.timeout(PATIENCE):
                    while (await watch.execute(held)).rowcount == 0:  # noqa: ASYNC110 - there is no notification
                        await asyncio.sleep(0.01)
            await other.execute(insert, ["a"])
            await other.rollback()
        # Then they are stored all the same, by a second attempt
        async with asyncio.timeout(PATIENCE):
            await storing
        assert sorted(await waiting(store)) == ["a", "b"]
    finally:
        await store.close()
