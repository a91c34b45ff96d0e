"""Timeouts move to stores without staging, such as SQL Server's table of NServiceBus: one transaction per batch.

The tests run on other products; on SQL Server if DELAYLINE_TEST_SQLSERVER_URL names a server.
"""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from tests.servers.sqlserver import drop_database, new_database
from tests.spark.arrivals import arrivals_at
from tests.spark.kills import KillingTarget, TaskKills
from tests.spark.legacy import LATER, Legacy, Timeout, some
from tests.spark.stores import StoreAt

from delayline import SqlTransport, TransactionMode
from delayline.bulk.batches import BatchName
from delayline.delayed.delivery import StoredDelivery
from delayline.errors import BackendUnavailable, BackendUnusable, DelaylineError, InvalidMessage
from delayline.migration import Migration, Plan, target_at
from delayline.migration.rows import record_batch
from delayline.migration.target import Attempted
from delayline.migration.targets.plain_store import PlainSession, PlainStore
from delayline.migration.verify import verify
from delayline.sql import SqlDelayedMessageStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from delayline import DelayedMessage
    from delayline.migration.target import Delivered
    from delayline.transaction import Transaction

ENDPOINT = "sales"


@pytest.fixture
def legacy(postgresql_url: str) -> Legacy:
    return Legacy(postgresql_url, ENDPOINT)


@pytest.fixture(params=["mariadb", "sqlserver"])
def plain(request: pytest.FixtureRequest) -> Iterator[StoreAt]:
    """Provide a store on each product."""
    if request.param != "sqlserver":
        yield StoreAt(request.getfixturevalue(f"{request.param}_url"))
        return
    if not os.environ.get("DELAYLINE_TEST_SQLSERVER_URL"):
        pytest.skip("DELAYLINE_TEST_SQLSERVER_URL names no SQL Server")
    url = new_database()
    yield StoreAt(url)
    drop_database(url)


@pytest.mark.sample(3, group="migration round trips")
def test_timeouts_arrive_when_they_are_due(spark: SparkSession, legacy: Legacy, plain: StoreAt) -> None:
    # Given timeouts of all sorts, and some that cannot move
    soon = (datetime.now(UTC) + timedelta(seconds=20)).replace(microsecond=123_457)
    target = PlainStore(plain.url)
    plain.put(Timeout(6).id)
    legacy.add(
        ENDPOINT,
        Timeout(1, ENDPOINT, datetime(2020, 1, 1, tzinfo=UTC)), Timeout(2, ENDPOINT, soon, state="früh".encode()),
        Timeout(3, state=None, saga=None), Timeout(4, time=datetime(9000, 1, 1, 1, tzinfo=UTC), headers=None),
        Timeout(5, "gone"), Timeout(6), Timeout(7, None), Timeout(8, ENDPOINT, headers="{"),
    )  # fmt: skip
    asyncio.run(SqlTransport(plain.url).setup_infrastructure(["billing"]))

    def work() -> None:
        # When they are moved, those that cannot go are back
        outcome = Migration(Plan(legacy.source, target, [ENDPOINT], batch_size=3)).run(spark)
        reasons = sorted(reason for reason, _ in outcome.reasons)
        assert [why in reason for why, reason in zip(
            ["message with this id is pending", "destination must be", "headers are not JSON", "queue 'gone' does not"],
            reasons, strict=True)] == [True] * 4  # fmt: skip
        assert legacy.ids(ENDPOINT) == [Timeout(number).id for number in (5, 6, 7, 8)]
        verified = verify(legacy.source, target, spark)
        assert (verified.ok, verified.moved, verified.waiting, verified.repeatable) == (True, 4, 4, [])

    arrived = arrivals_at(ENDPOINT, SqlTransport(plain.url), StoredDelivery(SqlDelayedMessageStore(plain.url)), 2, work)

    # Then they arrive when they are due
    assert [one.body for one in arrived] == [b"{}", "früh".encode()]
    assert arrived[1].on_time(soon)
    assert arrived[0].headers["Ключ 🔑"] == "Größe"
    # the others wait for theirs, as they were
    waiting = {one.id: one for one in plain.messages()}
    assert set(waiting) == {Timeout(number).id for number in (3, 4, 6)}
    assert (waiting[Timeout(3).id].due, waiting[Timeout(3).id].message.body) == (LATER, b"")
    assert waiting[Timeout(3).id].message.headers["NServiceBus.MessageId"] == "message-3"
    assert dict(waiting[Timeout(4).id].message.headers) == {}


@pytest.mark.slow
@pytest.mark.parametrize("then", ["retried", "resumed", "aborted"])
def test_killed_tasks_lose_nothing_and_possible_doubles_are_listed(
    spark: SparkSession, legacy: Legacy, plain: StoreAt, tmp_path: Path, then: str
) -> None:
    # Given a task that is killed behind its batch: once, or as often as Spark tries
    asyncio.run(SqlTransport(plain.url).setup_infrastructure(["billing"]))
    legacy.add(ENDPOINT, *some(9), Timeout(10, "gone", some(5)[4].time))
    ids, again = [one.id for one in some(9)], [one.id for one in some(3, first=5)]
    target = PlainStore(plain.url)
    kills = TaskKills(tmp_path, 1 if then == "retried" else 3, Timeout(6).id)
    killing = Plan(legacy.source, KillingTarget(target, kills), [ENDPOINT], batch_size=4)  # type: ignore[arg-type]
    plan = Plan(legacy.source, target, [ENDPOINT], batch_size=4)
    # When the migration runs, and is resumed or aborted
    if then == "retried":
        Migration(killing).run(spark)
    else:
        with pytest.raises(DelaylineError):
            Migration(killing).run(spark)
        Migration(plan).resume(spark) if then == "resumed" else Migration(plan).abort()
    # Then everything is there once, or back, and what may come twice is among what verify names
    found, left = set(plain.ids()), set(legacy.ids(ENDPOINT))
    assert len(found) == len(plain.ids())
    assert found | left == {*ids, Timeout(10).id}
    verified = verify(legacy.source, target, spark)
    assert verified.ok
    assert found & left <= set(verified.repeatable)
    assert set(again) <= set(verified.repeatable)
    if then != "aborted":
        assert (found, left) == (set(ids), {Timeout(10).id})


class Folding(SqlDelayedMessageStore):
    """Refuses ids that only look the same, as SQL Server's collations do."""

    async def store_many(self, messages: Sequence[DelayedMessage], transaction: Transaction | None = None) -> None:
        known = [*(one.id for one in await self.pending()), *(one.id for one in messages)]
        if len({one.casefold() for one in known}) < len(set(known)):
            raise InvalidMessage("an id like that waits already")
        await super().store_many(messages, transaction)


def test_a_message_that_the_store_refuses_keeps_no_other_from_it(tmp_path: Path) -> None:
    store = StoreAt(f"sqlite:///{tmp_path / 'store.db'}")

    async def nothing(refused: Mapping[int, str]) -> None:
        del refused

    async def deliver() -> Delivered:
        folding = Folding(store.url)
        await folding.initialize(ENDPOINT, TransactionMode.RECEIVE_ONLY)
        session = PlainSession(PlainStore(store.url), ENDPOINT)
        session._store = folding
        try:
            messages = record_batch((one, "billing", LATER, None, b"") for one in ("a", "A", "b"))
            return await session.deliver(messages, Attempted(BatchName("r", 0, 0), 1, nothing))
        finally:
            await folding.close()

    assert asyncio.run(deliver()).refused == {1: "an id like that waits already"}
    assert store.ids() == ["a", "b"]


@pytest.mark.slow
def test_sql_server_s_stores_are_such_and_one_that_does_not_answer_moves_nothing(
    spark: SparkSession, legacy: Legacy
) -> None:
    target = target_at("mssql://me:hunter2@127.0.0.1:1/shop")
    assert isinstance(target, PlainStore)
    assert "hunter2" not in str(target)
    legacy.add(ENDPOINT, Timeout(1))
    tables = legacy.everything()
    with pytest.raises((BackendUnusable, BackendUnavailable)):
        Migration(Plan(legacy.source, target, [ENDPOINT])).run(spark)
    assert legacy.everything() == tables
