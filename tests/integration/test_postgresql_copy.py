"""COPY of many messages into PostgreSQL keeps all promises for any ids and texts."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest

from delayline import (
    DelayedMessage,
    Endpoint,
    InvalidMessage,
    Message,
    QueueNotFound,
    SqlDelayedMessageStore,
    SqlTransport,
    TransactionMode,
)
from delayline.external import ExternalTransaction
from delayline.sql.postgresql.binary import HELD_OFF, LEAST
from delayline.testing.conformance.messages import delayed, same

if TYPE_CHECKING:
    pass

LATER = datetime(2100, 1, 1, tzinfo=UTC)
MANY = 2 * LEAST
#: Adds up how many rows each command has brought.
COUNTED = """
CREATE TABLE commands (way text, rows int);
CREATE FUNCTION add_up() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  INSERT INTO commands SELECT split_part(current_query(), ' ', 1), count(*) FROM fresh; RETURN NULL;
END $$;
CREATE TRIGGER counted AFTER INSERT ON "sales.timeouts"
  REFERENCING NEW TABLE AS fresh FOR EACH STATEMENT EXECUTE FUNCTION add_up();
"""


def batch(prefix: str, number: int = MANY) -> list[DelayedMessage]:
    return [delayed(f"{prefix}-{position:04d}", LATER) for position in range(number)]


async def kept(store: SqlDelayedMessageStore) -> dict[str, DelayedMessage]:
    return {message.id: message for message in await store.pending(limit=10_000)}


async def test_existing_objects_are_unchanged(store: SqlDelayedMessageStore, postgresql_url: str) -> None:
    # Given messages that were copied, as the server reports
    with psycopg.connect(postgresql_url, autocommit=True) as watch:
        watch.execute(COUNTED)
        old = DelayedMessage(Message("new-0007", {"which": "old"}, b"old"), "billing", LATER, 3)
        await store.store_many([*batch("old"), old])
        assert watch.execute("SELECT DISTINCT way FROM commands").fetchall() == [("COPY",)]
        # When others come, of which one is there already and two are the same, alone and in a transaction
        await store.store_many([*batch("new"), *batch("new", 1)])
        async with store.transaction() as transaction:
            await store.store(delayed("before", LATER), transaction)
            await store.store_many([*batch("more"), *batch("new", 9)], transaction)
            await store.store(delayed("after", LATER), transaction)
        # Then existing messages are unchanged, and each of the others is stored once
        found = await kept(store)
        same(found["new-0007"], old)
        wanted = {message.id for prefix in ("old", "new", "more") for message in batch(prefix)} | {"before", "after"}
        assert found.keys() == wanted
        assert len(await store.pending(limit=10_000)) == len(wanted)
        # And who repeats some is taken to repeat more, for a while
        watch.execute("TRUNCATE commands")
        for number in range(HELD_OFF + 1):
            await store.store_many(batch(f"again-{number}", LEAST))
        ways = "SELECT way, count(*) FROM commands GROUP BY way ORDER BY way"
        assert watch.execute(ways).fetchall() == [("COPY", 1), ("INSERT", HELD_OFF)]


async def test_every_value_comes_back(store: SqlDelayedMessageStore) -> None:
    # Given the shortest and the longest of everything
    first, last = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
    strange = [
        DelayedMessage(Message("ü" * 250, {"ключ": "😀\\N\t\n"}, os.urandom(3_000_000)), "\\." * 100, first, 2**31 - 1),
        DelayedMessage(Message("\\N", {}, b""), "", last),
        DelayedMessage(Message("%s %% %", {}, b"\0\xff"), "'\"", LATER + timedelta(microseconds=1), 7),
    ]
    # When they are among many
    await store.store_many([*batch("m"), *strange])
    # Then they come back as they were
    found = await kept(store)
    assert len(found) == MANY + len(strange)
    for message in strange:
        same(found[message.id], message)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (delayed("nul\0", LATER), "0x00"),
        (delayed("half \ud800", LATER), "surrogates"),
        (delayed("long", LATER, destination="d" * 201), "too long"),
    ],
)
async def test_a_text_that_cannot_be_kept(store: SqlDelayedMessageStore, bad: DelayedMessage, reason: str) -> None:
    with pytest.raises(InvalidMessage, match=reason):
        await store.store_many([*batch("m"), bad])
    with pytest.raises(InvalidMessage, match=reason):
        async with store.transaction() as transaction:
            await store.store_many([*batch("m"), bad], transaction)
    assert await kept(store) == {}
    await store.store_many(batch("m"))
    assert len(await kept(store)) == MANY


async def test_many_in_a_callers_transaction(store: SqlDelayedMessageStore, postgresql_url: str) -> None:
    with psycopg.connect(postgresql_url) as mine:
        await store.store_many(batch("mine", 1000), await store.enlist(ExternalTransaction(mine)))
        assert await kept(store) == {}
    assert len(await kept(store)) == 1000


async def test_other_encodings_names_and_shapes(postgresql_url: str) -> None:
    # Given a connection that does not use UTF-8, and an existing table whose name needs quotes
    name = '100% (of) "it" VALUES ('
    store = SqlDelayedMessageStore(f"{postgresql_url}?client_encoding=latin1", table_name=name)
    plain = SqlDelayedMessageStore(postgresql_url, table_name=name)
    await store.setup_infrastructure("sales")
    with psycopg.connect(postgresql_url, autocommit=True) as owner:
        quoted = name.replace('"', '""')
        owner.execute(f'ALTER TABLE "{quoted}" ALTER retry_count TYPE bigint'.encode())
    for one, prefix in ((store, "é"), (plain, "😀")):
        await one.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
        await one.store_many(batch(prefix))
    # Then everything is there
    assert len(await kept(plain)) == 2 * MANY
    await store.close()
    await plain.close()


async def test_immediate_sends_are_copied_and_a_missing_queue_fails_alone(postgresql_url: str) -> None:
    # Given a queue, and a server that counts how rows come into it
    transport = SqlTransport(postgresql_url)
    await transport.setup_infrastructure(["billing"])
    async with Endpoint("sales", transport=transport, send_only=True) as endpoint:
        await endpoint.send("billing", b"first")
        with psycopg.connect(postgresql_url, autocommit=True) as watch:
            watch.execute(COUNTED.replace('"sales.timeouts"', "delayline_messages"))
            # When many are sent together, some to a queue that does not exist
            sends = [
                endpoint.send("billing" if number % 10 else "nowhere", "ünïcode", message_id=f"m-{number:04d}")
                for number in range(MANY * 2)
            ]
            results = await asyncio.gather(*sends, return_exceptions=True)
            # Then those fail, and the others are there, copied, in the order of their sends
            refused = [number for number, result in enumerate(results) if isinstance(result, QueueNotFound)]
            assert refused == list(range(0, MANY * 2, 10))
            assert ("COPY",) in watch.execute("SELECT DISTINCT way FROM commands").fetchall()
        found = [message.id for message in await transport.browse("billing", MANY * 2, offset=1)]
        assert found == [f"m-{number:04d}" for number in range(MANY * 2) if number % 10]
