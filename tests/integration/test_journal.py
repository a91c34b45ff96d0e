"""The journal: the database writes down what becomes of each message, in the transaction that does it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, text
from tests.eventually import eventually_async

from delayline import (
    ConfigurationError,
    DelayedMessage,
    Endpoint,
    Message,
    MessageContext,
    MessageFilter,
    Recoverability,
    SqlDelayedMessageStore,
    SqlTransport,
    StoredDelivery,
    TransactionMode,
)
from delayline.delayed.store import Outcome
from delayline.outgoing import copies_of
from delayline.searching import Search, open_places
from delayline.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

DUE = datetime(2026, 1, 1, tzinfo=UTC)
FAR = datetime(2090, 1, 1, tzinfo=UTC)
PLENTY = 1 << 20
#: A table's name with all that must be quoted.
NAME = "o'r%d\"e:rs.timeouts"


class JournaledStore:
    """A store that keeps a journal, and queues beside it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = SqlDelayedMessageStore(url, table_name=NAME, journal=True)
        self.transport = SqlTransport(url)

    async def hold(self, *names: str, due: datetime = DUE) -> None:
        await self.store.store_many([DelayedMessage(Message(one, {}, b"x"), "billing", due) for one in names])

    def entries(self) -> list[tuple[str, str]]:
        return [(row.event, row.id) for row in self.rows()]

    def rows(self) -> list[Any]:
        engine = create_engine(self.url.replace("postgresql:", "postgresql+psycopg:").replace("db:", "db+pymysql:"))
        with engine.connect() as connection:
            rows = list(connection.execute(text("SELECT * FROM delayline_journal ORDER BY seq")))
        engine.dispose()
        return rows


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
async def journaled(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[JournaledStore]:
    name = request.param
    url = f"sqlite:///{tmp_path / 'house.db'}" if name == "sqlite" else request.getfixturevalue(f"{name}_url")
    journaled = JournaledStore(url)
    await journaled.transport.setup_infrastructure(["billing"])
    await journaled.store.setup_infrastructure("orders")
    await journaled.store.initialize("orders", TransactionMode.TRANSACTION_SCOPE)
    await journaled.transport.start()
    yield journaled
    await journaled.transport.stop()
    await journaled.store.close()


async def test_every_way_out_of_the_store_has_its_entry(journaled: JournaledStore) -> None:
    # Given six messages
    await journaled.hold("moved", "removed", "retried", "failed")
    await journaled.hold("called off", "later", due=FAR)
    # When one is forwarded inside the database, and the others go the other ways
    assert (await journaled.store.forward_due(DUE, 1, max_bytes=PLENTY)).number == 1
    removed, retried, failed = await journaled.store.fetch_due(DUE, 10, max_bytes=PLENTY)
    await journaled.store.remove(removed)
    await journaled.store.retry_many([retried], FAR)
    journaled.store.journal.gave_up([failed])
    await journaled.store.remove(failed)
    assert await journaled.store.cancel("called off") is Outcome.DONE
    assert await journaled.store.reschedule("later", FAR + timedelta(hours=1)) is Outcome.DONE
    # Then the journal says which
    assert sorted(journaled.entries()[:6]) == sorted(
        ("scheduled", one) for one in ("moved", "removed", "retried", "failed", "called off", "later")
    )
    assert journaled.entries()[6:] == [
        ("dispatched", "moved"),
        ("dispatched", "removed"),
        ("retried", "retried"),
        ("failed", "failed"),
        ("cancelled", "called off"),
        ("rescheduled", "later"),
    ]
    assert {row.store for row in journaled.rows()} == {NAME}
    assert [row.retries for row in journaled.rows()[6:]] == [0, 0, 1, 0, 0, 0]


async def test_rolled_back_changes_are_not_journaled(journaled: JournaledStore) -> None:
    with pytest.raises(ZeroDivisionError):
        async with journaled.store.transaction() as transaction:
            await journaled.store.store(DelayedMessage(Message("undone", {}, b""), "billing", DUE), transaction)
            raise ZeroDivisionError
    await journaled.hold("twice")
    await journaled.hold("twice")
    assert journaled.entries() == [("scheduled", "twice")]


async def test_a_message_that_was_given_up_in_vain_is_dispatched_in_the_end(journaled: JournaledStore) -> None:
    # Given one that was to go to the error queue, which was undone
    await journaled.hold("m")
    (message,) = await journaled.store.fetch_due(DUE, 1, max_bytes=1)
    journaled.store.journal.gave_up([message])
    await journaled.store.release_many([message])
    # When it is fetched again and removed
    (message,) = await journaled.store.fetch_due(DUE, 1, max_bytes=1)
    await journaled.store.remove(message)
    # Then it counts as dispatched
    assert journaled.entries()[-1] == ("dispatched", "m")


async def test_the_journal_distinguishes_failed_from_dispatched_messages(journaled: JournaledStore) -> None:
    # Given messages for a queue and for none
    await journaled.hold("good", due=datetime.now(UTC))
    await journaled.store.store(DelayedMessage(Message("bad", {}, b""), "nowhere", datetime.now(UTC)))
    await journaled.store.close()
    delivery = StoredDelivery(SqlDelayedMessageStore(journaled.url, table_name=NAME))
    endpoint = Endpoint("orders", transport=SqlTransport(journaled.url), delayed_delivery=delivery, send_only=True)
    # When an endpoint that knows nothing of the journal deals with them
    async with asyncio.timeout(30), endpoint:
        while len(journaled.rows()) < 4:  # noqa: ASYNC110 - a trigger writes them, without a notification
            await asyncio.sleep(0.05)
    # Then both outcomes are written down, and neither is early
    assert sorted(journaled.entries()[2:]) == [("dispatched", "good"), ("failed", "bad")]
    assert all(row.at >= row.due for row in journaled.rows()[2:])


@pytest.mark.parametrize("mode", TransactionMode)
async def test_an_endpoint_records_which_delayed_messages_it_has_handled(
    journaled: JournaledStore, mode: TransactionMode
) -> None:
    # Given an endpoint with a journal, which handles some messages at its first attempt and one at its second
    await journaled.store.close()
    delivery = StoredDelivery(SqlDelayedMessageStore(journaled.url, table_name=NAME))
    transport = SqlTransport(journaled.url)
    endpoint = Endpoint("billing", transport=transport, delayed_delivery=delivery, transaction_mode=mode)
    attempts: list[str] = []

    @endpoint.handler
    async def bill(message: Message, context: MessageContext) -> None:
        attempts.append(message.id)
        if message.id == "again" and attempts.count("again") == 1 and mode is not TransactionMode.NONE:
            raise ValueError(message.id)
        if message.id == "chained":
            await context.send("billing", b"", message_id="next", delay=timedelta(milliseconds=1))

    ids = {"delayed", "again", "chained", "next"}
    # When it gets delayed messages, and one that has not waited
    async with asyncio.timeout(60), endpoint:
        await endpoint.send("billing", b"", message_id="at once")
        for message_id in sorted(ids - {"next"}):
            await endpoint.send("billing", b"", message_id=message_id, delay=timedelta(milliseconds=1))
        while not {("handled", each) for each in ids} <= {*journaled.entries()}:  # noqa: ASYNC110 - without a notification
            await asyncio.sleep(0.05)
    # Then the journal has each of the delayed ones once, after its dispatch
    entries = journaled.entries()
    assert sorted(name for event, name in entries if event == "handled") == sorted(ids)
    assert all(entries.index(("handled", name)) > entries.index(("dispatched", name)) for name in ids)
    assert {(row.store, row.destination) for row in journaled.rows() if row.event == "handled"} == {(NAME, "billing")}
    assert "at once" in attempts


@pytest.mark.parametrize("mode", [TransactionMode.RECEIVE_ONLY, TransactionMode.TRANSACTION_SCOPE])
async def test_a_message_that_fails_is_not_recorded_as_handled(
    journaled: JournaledStore, mode: TransactionMode
) -> None:
    # Given an endpoint that fails, and tries again once in an hour
    await journaled.store.close()
    endpoint = Endpoint(
        "billing",
        transport=SqlTransport(journaled.url),
        delayed_delivery=StoredDelivery(SqlDelayedMessageStore(journaled.url, table_name=NAME)),
        transaction_mode=mode,
        recoverability=Recoverability(immediate_retries=0, delayed_retries=1, time_increase=timedelta(hours=1)),
    )

    @endpoint.handler
    async def bill(message: Message, context: MessageContext) -> None:
        raise ValueError(message.id)

    async with endpoint:
        await endpoint.send("billing", b"", message_id="m", delay=timedelta(milliseconds=1))

        async def found() -> set[str]:
            settings = Settings(url=journaled.url, endpoint="billing", table_name=NAME)
            async with open_places(settings) as places:
                pages = Search(places, MessageFilter(message_id="m")).pages()
                return {f"{match.place.kind}: {match.state}" async for page in pages for match in page.matches}

        # When it has failed once, then the search finds the copy that waits
        await eventually_async(lambda: len(journaled.entries()) == 3)
        [copy] = copies_of("m")[:1]
        assert journaled.entries() == [("scheduled", "m"), ("dispatched", "m"), ("scheduled", copy)]
        assert await found() == {
            "pending: pending, tried before",
            "journal: dispatched",
            "journal: scheduled, tried before",
        }
        # And when it has failed again, it is in the error queue, and was never handled
        assert await endpoint.delayed.send_now(copy) is Outcome.DONE
        await eventually_async(lambda: ("dispatched", copy) in journaled.entries())

        async def in_error_queue() -> bool:
            return "errors: failed" in await found()

        await eventually_async(in_error_queue)
    assert "handled" not in {event for event, _ in journaled.entries()}


async def test_a_disabled_journal_keeps_its_entries(journaled: JournaledStore) -> None:
    await journaled.hold("one")
    await journaled.store.setup_infrastructure("orders")
    await SqlDelayedMessageStore(journaled.url, table_name=NAME, journal=False).setup_infrastructure("orders")
    await journaled.hold("two")
    assert journaled.entries() == [("scheduled", "one")]
    assert await journaled.store.planned_infrastructure("orders") != []


async def test_a_store_that_keeps_none_has_no_journal(tmp_path: Path) -> None:
    store = SqlDelayedMessageStore(f"sqlite:///{tmp_path / 'plain.db'}")
    assert not [one for one in await store.planned_infrastructure("orders") if "journal" in one]


async def test_a_product_without_a_journal_is_reported() -> None:
    from delayline.composition import store_of
    from delayline.settings import Settings

    with pytest.raises(ConfigurationError, match="leave it out"):
        store_of(Settings(url="memory:", journal=True))


async def test_a_journal_is_kept_in_a_separate_schema(postgresql_url: str) -> None:
    # Given a store in a schema that is not in the search path
    engine = create_engine(postgresql_url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(text('CREATE SCHEMA "My Shop"'))
    store = SqlDelayedMessageStore(postgresql_url, schema="My Shop", journal=True)
    await store.setup_infrastructure("orders")
    assert not [one for one in await store.planned_infrastructure("orders") if "journal" in one]
    await store.initialize("orders", TransactionMode.RECEIVE_ONLY)
    # When a message is stored and cancelled
    await store.store(DelayedMessage(Message("m", {}, b""), "billing", FAR))
    await store.cancel("m")
    await store.close()
    # Then its journal is there
    with engine.connect() as connection:
        rows = connection.execute(text('SELECT event FROM "My Shop".delayline_journal ORDER BY seq')).scalars().all()
    engine.dispose()
    assert rows == ["scheduled", "cancelled"]
