"""Pending messages cancelled, rescheduled and sent now inside the caller's own transaction."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool
from tests.eventually import eventually_async
from tests.integration.cold_rows import hold
from tests.integration.test_callers import LATER, RecordingEndpoint, RolledBack, endpoint_

from delayline import (
    ConfigurationError,
    Endpoint,
    MemoryDelayedMessageStore,
    MemoryTransport,
    Message,
    MessageContext,
    Outcome,
    Recoverability,
    SqlDelayedMessageStore,
    SqlTransport,
    StoredDelivery,
    SyncEndpoint,
)
from delayline.bulk import TwoTierStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

__all__ = ["endpoint_"]
REMINDER = "order-17-reminder"


async def remind(kept: RecordingEndpoint, delay: timedelta = LATER) -> None:
    await kept.endpoint.send("shop", "reminder", message_id=REMINDER, delay=delay)


async def pending(kept: RecordingEndpoint) -> list[str]:
    return [message.id for message in await kept.endpoint.delayed.pending()]


@pytest.mark.sample(3)
async def test_a_message_cancelled_in_a_transaction_is_gone_at_its_commit(endpoint_: RecordingEndpoint) -> None:
    # Given a reminder
    await remind(endpoint_)
    # When it is cancelled in the transaction that marks the order paid
    async with endpoint_.begin() as work:
        await work.do("INSERT INTO orders VALUES (17)")
        assert await endpoint_.endpoint.delayed.cancel(REMINDER, transaction=work.given) is Outcome.DONE
        # Then it waits until the commit, and not after it
        assert await pending(endpoint_) == [REMINDER]
    assert await pending(endpoint_) == []
    assert await endpoint_.endpoint.delayed.cancel(REMINDER) is Outcome.NOT_PENDING


@pytest.mark.sample(3)
@pytest.mark.parametrize("verb", ["cancel", "reschedule", "send_now"])
async def test_a_rollback_leaves_the_message_as_it_was(endpoint_: RecordingEndpoint, verb: str) -> None:
    await remind(endpoint_)
    [before] = await endpoint_.endpoint.delayed.pending()
    delayed = endpoint_.endpoint.delayed
    with contextlib.suppress(RolledBack):
        async with endpoint_.begin() as work:
            await work.do("INSERT INTO orders VALUES (17)")
            if verb == "reschedule":
                outcome = await delayed.reschedule(REMINDER, before.due + LATER, transaction=work.given)
            else:
                outcome = await getattr(delayed, verb)(REMINDER, transaction=work.given)
            assert outcome is Outcome.DONE
            raise RolledBack
    assert await delayed.pending() == [before]


@pytest.mark.sample(3)
async def test_a_message_sent_now_in_a_transaction_is_handled_at_its_commit(endpoint_: RecordingEndpoint) -> None:
    await remind(endpoint_)
    async with endpoint_.begin() as work:
        assert await endpoint_.endpoint.delayed.send_now(REMINDER, transaction=work.given) is Outcome.DONE
        await asyncio.sleep(0)
        assert endpoint_.handled == {}
    await endpoint_.handles("reminder")


@pytest.mark.sample(3)
async def test_unknown_ids_spoil_nothing(endpoint_: RecordingEndpoint) -> None:
    async with endpoint_.begin() as work:
        await work.do("INSERT INTO orders VALUES (17)")
        assert await endpoint_.endpoint.delayed.cancel("never", transaction=work.given) is Outcome.NOT_PENDING
        await endpoint_.endpoint.send("shop", "paid", transaction=work.given)
    await endpoint_.handles("paid")


@pytest.mark.sample(3)
async def test_a_message_that_falls_due_in_an_open_transaction_waits_for_its_end(
    endpoint_: RecordingEndpoint,
) -> None:
    # Given a message that is cancelled, in a transaction that is open when the message falls due
    await remind(endpoint_, timedelta(seconds=1))
    due = time.monotonic() + 1
    with contextlib.suppress(RolledBack):
        async with endpoint_.begin() as work:
            assert await endpoint_.endpoint.delayed.cancel(REMINDER, transaction=work.given) is Outcome.DONE
            if endpoint_.url.startswith("postgresql"):  # an SQLite file has one writer at a time
                # Then others are not held up
                await endpoint_.endpoint.send("shop", "other", delay=timedelta(seconds=1.1))
                await endpoint_.handles("other")
            else:
                await asyncio.sleep(due - time.monotonic() + 0.2)
            assert "reminder" not in endpoint_.handled
            raise RolledBack
    # And after the rollback it is handled
    await endpoint_.handles("reminder")


async def test_a_message_that_is_being_dispatched_cannot_be_cancelled(postgresql_url: str) -> None:
    # Given a message that another process of the endpoint has fetched
    store = SqlDelayedMessageStore(postgresql_url)
    delivery = StoredDelivery(SqlDelayedMessageStore(postgresql_url), polling=False)
    shop = Endpoint("shop", transport=SqlTransport(postgresql_url), delayed_delivery=delivery)
    async with shop:
        await shop.send("shop", "reminder", message_id=REMINDER, delay=timedelta(milliseconds=1))
        await store.initialize("shop", shop.transaction_mode)

        async def fetched() -> bool:
            return await store.fetch_next_due(shop.clock.now()) is not None

        await eventually_async(fetched, "the message is fetched")
        # When it is cancelled, then the caller learns that, and goes on
        with psycopg.connect(postgresql_url) as connection:
            assert await shop.delayed.cancel(REMINDER, transaction=connection) is Outcome.DISPATCHING
            await shop.send("shop", "paid", delay=LATER, transaction=connection)
        assert [message.message.text for message in await shop.delayed.pending()] == ["reminder", "paid"]
        await store.close()


@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_a_second_transaction_waits_for_the_end_of_the_first(postgresql_url: str, ending: str) -> None:
    # Given a transaction that has cancelled a message
    shop = Endpoint("shop", transport=SqlTransport(postgresql_url), delayed_delivery=stored(postgresql_url))
    async with shop:
        await shop.send("shop", "reminder", message_id=REMINDER, delay=LATER)
        first, second = psycopg.connect(postgresql_url), psycopg.connect(postgresql_url)
        with first, second:
            assert await shop.delayed.cancel(REMINDER, transaction=first) is Outcome.DONE
            # When another cancels it too
            cancelling = asyncio.create_task(shop.delayed.cancel(REMINDER, transaction=second))
            await asyncio.sleep(0.1)
            getattr(first, ending)()
            # Then it does so if the first has not
            assert await cancelling is (Outcome.DONE if ending == "rollback" else Outcome.NOT_PENDING)
        assert await shop.delayed.pending() == []


async def test_a_handler_cancels_what_another_transaction_has_not_cancelled_after_all(postgresql_url: str) -> None:
    # Given a transaction of the user's that has cancelled a message, and is open for longer than a change waits
    handled: list[int] = []
    failed = asyncio.Event()
    shop = Endpoint(
        "shop",
        transport=SqlTransport(postgresql_url),
        delayed_delivery=stored(postgresql_url),
        recoverability=Recoverability(immediate_retries=1, delayed_retries=3, time_increase=timedelta(seconds=1)),
    )

    @shop.handler
    async def paid(message: Message, context: MessageContext) -> None:
        handled.append(context.attempt)
        if len(handled) > 1:
            failed.set()
        context.cancel(REMINDER)

    async with shop:
        await shop.send("shop", "reminder", message_id=REMINDER, delay=LATER)
        with psycopg.connect(postgresql_url) as connection:
            assert await shop.delayed.cancel(REMINDER, transaction=connection) is Outcome.DONE
            # When a handler cancels it too, and the transaction is rolled back after the first attempt
            await shop.send("shop", "paid")
            async with asyncio.timeout(60):
                await failed.wait()
            connection.rollback()

        # Then the handler's cancel is not lost
        async def none() -> bool:
            return await shop.delayed.pending() == []

        await eventually_async(none, "the message is cancelled")
        assert await shop.transport.count("error") == 0  # type: ignore[attr-defined]


def stored(url: str) -> StoredDelivery:
    return StoredDelivery(SqlDelayedMessageStore(url))


async def test_a_store_elsewhere_is_refused_with_the_way_out(tmp_path: Path) -> None:
    delivery = StoredDelivery(MemoryDelayedMessageStore())
    async with Endpoint("shop", transport=MemoryTransport(), delayed_delivery=delivery) as shop:
        await shop.send("shop", "", message_id=REMINDER, delay=LATER)
        with contextlib.closing(sqlite3.connect(tmp_path / "orders.db")) as connection:
            with pytest.raises(
                ConfigurationError, match="keep them in a SqlDelayedMessageStore, or leave transaction="
            ):
                await shop.delayed.cancel(REMINDER, transaction=connection)
            with pytest.raises(ConfigurationError, match="transaction=None is not a transaction"):
                await shop.delayed.cancel(REMINDER, transaction=None)  # type: ignore[arg-type]
        assert await shop.delayed.cancel(REMINDER) is Outcome.DONE


async def test_a_transaction_on_another_database_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    endpoint = Endpoint("shop", transport=SqlTransport(url), delayed_delivery=SqlDelayedMessageStore(url))
    async with endpoint as shop:
        await shop.send("shop", "", message_id=REMINDER, delay=LATER)
        elsewhere = contextlib.closing(sqlite3.connect(tmp_path / "orders.db"))
        with elsewhere as connection, pytest.raises(ConfigurationError, match=r"orders\.db"):
            await shop.delayed.cancel(REMINDER, transaction=connection)
        assert len(await shop.delayed.pending()) == 1


def test_synchronous_code_cancels_on_its_own_thread(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    endpoint = Endpoint("shop", transport=SqlTransport(url), delayed_delivery=SqlDelayedMessageStore(url))
    with SyncEndpoint(endpoint) as shop, contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        shop.send("shop", "", message_id=REMINDER, delay=LATER)
        [before] = shop.delayed.pending()
        # When it is rescheduled in a transaction that rolls back, and then in one that commits
        assert shop.delayed.reschedule(REMINDER, before.due + LATER, transaction=connection) is Outcome.DONE
        connection.rollback()
        assert shop.delayed.pending() == [before]
        assert shop.delayed.reschedule(REMINDER, before.due + LATER, transaction=connection) is Outcome.DONE
        connection.commit()
        assert [message.due for message in shop.delayed.pending()] == [before.due + LATER]
        assert sum(entry.count for entry in shop.delayed.count_by_due(timedelta(days=1))) == 1
        assert shop.delayed.cancel(REMINDER, transaction=connection) is Outcome.DONE
        connection.commit()
        assert shop.delayed.send_now(REMINDER) is Outcome.NOT_PENDING


@pytest.mark.parametrize("kind", ["pymysql", "sqlalchemy", "asyncmy"])
async def test_on_mariadb(mariadb_url: str, kind: str) -> None:
    # Given a reminder, in a store with a journal
    store = SqlDelayedMessageStore(mariadb_url, journal=True)
    async with Endpoint("shop", transport=SqlTransport(mariadb_url), delayed_delivery=store) as shop:
        await shop.send("shop", "reminder", message_id=REMINDER, delay=LATER)
        [before] = await shop.delayed.pending()
        # When it is changed in a transaction that rolls back, and then in one that commits
        for ending in ("rollback", "commit"):
            async with on_mariadb(mariadb_url, kind) as connection:
                delayed = shop.delayed
                assert await delayed.reschedule(REMINDER, before.due + LATER, transaction=connection) is Outcome.DONE
                assert await delayed.cancel(REMINDER, transaction=connection) is Outcome.DONE
                assert await delayed.cancel(REMINDER, transaction=connection) is Outcome.NOT_PENDING
                assert await delayed.pending() == [before]
                end = getattr(connection, ending)()
                if end is not None:
                    await end
            assert await shop.delayed.pending() == ([before] if ending == "rollback" else [])


@contextlib.asynccontextmanager
async def on_mariadb(url: str, kind: str) -> AsyncIterator[Any]:
    if kind == "asyncmy":
        engine = create_async_engine(url.replace("mariadb:", "mariadb+asyncmy:"), poolclass=NullPool)
        async with engine.connect() as connection:
            yield connection
        return
    with create_engine(url.replace("mariadb:", "mariadb+pymysql:"), poolclass=NullPool).connect() as connection:
        yield connection.connection.dbapi_connection if kind == "pymysql" else connection


async def test_a_message_of_the_cold_tier_is_refused_with_the_way_out(tmp_path: Path) -> None:
    # Given a message in a file of the cold tier
    url = f"sqlite:///{tmp_path}/shop.db"
    store = TwoTierStore(url, cold_tier=str(tmp_path / "cold"))
    async with Endpoint("shop", transport=SqlTransport(url), delayed_delivery=store) as shop:
        await hold(store, (REMINDER, shop.clock.now() + 100 * LATER))
        with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
            with pytest.raises(ConfigurationError, match=r"waits in the cold tier.*leave transaction= out"):
                await shop.delayed.cancel(REMINDER, transaction=connection)
            connection.rollback()
        async with store.transaction() as transaction:
            assert await shop.delayed.cancel(REMINDER, transaction=transaction) is Outcome.DONE
        assert await shop.delayed.pending() == []


@pytest.mark.parametrize("verb", ["cancel", "reschedule"])
@pytest.mark.parametrize("product", ["sqlite", "postgresql"])
async def test_a_handler_that_fails_leaves_the_message_as_it_was(
    product: str, verb: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # Given a handler that cancels or reschedules a reminder, and fails the first time
    url = f"sqlite:///{tmp_path}/shop.db" if product == "sqlite" else request.getfixturevalue("postgresql_url")
    shop = Endpoint("shop", transport=SqlTransport(url), delayed_delivery=SqlDelayedMessageStore(url))
    seen: list[list[tuple[str, object]]] = []
    done = asyncio.Event()

    async def waiting() -> list[tuple[str, object]]:
        return [(message.id, message.due) for message in await shop.delayed.pending()]

    @shop.handler
    async def handle(message: Message, context: MessageContext) -> None:
        seen.append(await waiting())
        if verb == "cancel":
            context.cancel(REMINDER)
        else:
            context.reschedule(REMINDER, shop.clock.now() + 3 * LATER)
        if context.attempt == 1:
            raise RuntimeError("after the change")
        done.set()

    async with shop:
        await shop.send("shop", "reminder", message_id=REMINDER, delay=LATER)
        before = await waiting()
        # When it is run again
        await shop.send("shop", "paid")
        async with asyncio.timeout(20):
            await done.wait()
        # Then the failed attempt has changed nothing, and the other has
        assert seen == [before, before]

        async def changed() -> bool:
            return await waiting() != before

        await eventually_async(changed, "the message has changed")
        assert len(await waiting()) == (0 if verb == "cancel" else 1)
