"""Timeouts move to the delayed messages table of an Azure endpoint."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.spark.arrivals import arrivals_at
from tests.spark.kills import KillingTarget, TaskKills
from tests.spark.legacy import LATER, Legacy, Timeout, some
from tests.spark.test_migrate_interrupted import dying

from delayline import DelayedMessage, Message, TransactionMode
from delayline.azure import AzureAccount, AzureDelayedTable, AzureStorageQueueTransport, DelayedTableDelivery
from delayline.errors import BackendUnusable, DelaylineError
from delayline.migration import Migration, Plan, preview, target_at
from delayline.migration.verify import verify

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from delayline.migration.target import Target

ENDPOINT = "sales"
FAR = datetime(9000, 1, 1, tzinfo=UTC)


@pytest.fixture
def legacy(postgresql_url: str) -> Legacy:
    return Legacy(postgresql_url, ENDPOINT)


def on_the_table(url: str, work: Callable[[AzureDelayedTable], Awaitable[Any]]) -> Any:  # noqa: ANN401 - what it returns
    """Run something on the endpoint's table, which is made if it is not there."""

    async def run() -> Any:  # noqa: ANN401
        table = AzureDelayedTable(url)
        await table.setup_infrastructure(ENDPOINT)
        await table.initialize(ENDPOINT, TransactionMode.RECEIVE_ONLY)
        try:
            return await work(table)
        finally:
            await table.close()

    return asyncio.run(run())


def waiting(url: str) -> Mapping[str, DelayedMessage]:
    found: Sequence[DelayedMessage] = on_the_table(url, lambda table: table.pending(limit=1000))
    assert len({one.id for one in found}) == len(found)
    return {one.id: one for one in found}


def azure(url: str) -> Target:
    found = target_at(url)
    assert found is not None
    return found


@pytest.mark.sample(3, group="migration round trips")
def test_timeouts_arrive_at_an_endpoint_on_azure_when_they_are_due(
    spark: SparkSession, legacy: Legacy, azure_url: str
) -> None:
    # Given timeouts of all sorts, and some that cannot move
    soon = datetime.now(UTC).replace(microsecond=300_000) + timedelta(seconds=20)
    legacy.add(
        ENDPOINT,
        Timeout(1, ENDPOINT, datetime(2020, 1, 1, tzinfo=UTC)), Timeout(2, ENDPOINT, soon, state="früh".encode()),
        Timeout(3, ENDPOINT, FAR, state=None, saga=None), Timeout(4, "Billing", LATER, headers=None),
        Timeout(5, "gone"), Timeout(6, "never_a_queue"), Timeout(7, ENDPOINT, state=b"x" * 60_000),
        Timeout(8, ENDPOINT), Timeout(9, ENDPOINT, headers="{"), Timeout(10, ENDPOINT, None),
    )  # fmt: skip
    target, account = azure(azure_url), AzureAccount(azure_url)
    transport = AzureStorageQueueTransport(account)
    plan = Plan(legacy.source, target, [ENDPOINT], batch_size=3)
    other = DelayedMessage(Message(Timeout(8).id, {}, b""), ENDPOINT, FAR)

    def work() -> None:
        asyncio.run(AzureStorageQueueTransport(azure_url).setup_infrastructure(["billing"]))
        on_the_table(azure_url, lambda table: table.store(other))
        # When they are looked at, nothing changes
        [shown] = preview(plan, spark)
        assert (shown.rows, sum(number for _, number, _ in shown.unmovable)) == (9, 4)
        assert set(waiting(azure_url)) == {Timeout(8).id}
        # and when they are moved, those that cannot go are back
        reasons = sorted(reason for reason, _ in Migration(plan).run(spark).reasons)
        expected = ["message with this id is pending", "headers and body have more", "headers are not JSON"]
        expected += ["it has no due time", "queue 'gone' does not exist", "queue 'never_a_queue' does not exist"]
        assert len(reasons) == len(expected)
        assert [why for why, reason in zip(expected, reasons, strict=True) if why not in reason] == []
        assert legacy.ids(ENDPOINT) == [Timeout(number).id for number in range(5, 11)]
        verified = verify(legacy.source, target, spark)
        assert (verified.ok, verified.moved, verified.waiting, verified.repeatable) == (True, 4, 4, [])

    arrived = arrivals_at(ENDPOINT, transport, DelayedTableDelivery(account), 2, work)

    # Then they arrive when they are due
    assert [one.body for one in arrived] == [b"{}", "früh".encode()]
    assert arrived[1].on_time(soon)
    assert arrived[0].headers["Ключ 🔑"] == "Größe"
    # the others wait for theirs, as they were
    found = waiting(azure_url)
    assert set(found) == {Timeout(number).id for number in (3, 4, 8)}
    assert (found[Timeout(3).id].due, found[Timeout(3).id].message.body) == (FAR, b"")
    assert (found[Timeout(4).id].destination, dict(found[Timeout(4).id].message.headers)) == ("Billing", {})
    verified = verify(legacy.source, target, spark)
    assert (verified.ok, verified.waiting, verified.gone) == (True, 2, 2)
    # and reports cancelled or rescheduled messages as missing
    on_the_table(azure_url, lambda table: table.cancel(Timeout(3).id))
    on_the_table(azure_url, lambda table: table.reschedule(Timeout(4).id, LATER + timedelta(seconds=1)))
    verified = verify(legacy.source, target, spark)
    assert (verified.ok, list(verified.missing), list(verified.changed)) == (False, [Timeout(3).id], [Timeout(4).id])


def test_an_endpoint_without_a_table_is_refused_before_anything_moves(
    spark: SparkSession, legacy: Legacy, azure_url: str
) -> None:
    legacy.add(ENDPOINT, Timeout(1))
    tables, plan = legacy.everything(), Plan(legacy.source, azure(azure_url), [ENDPOINT])
    [shown] = preview(plan, spark)
    assert "have no table of endpoint 'sales'" in shown.problems[0]
    with pytest.raises(BackendUnusable, match="have no table of endpoint 'sales'"):
        Migration(plan).run(spark)
    assert legacy.everything() == tables


@pytest.mark.parametrize("then", ["retried", "resumed", "aborted"])
@pytest.mark.sample(1)
def test_killed_tasks_lose_nothing_and_possible_doubles_are_listed(
    spark: SparkSession, legacy: Legacy, azure_url: str, tmp_path: Path, then: str
) -> None:
    # Given a task that is killed behind its batch: once, or as often as Spark tries
    on_the_table(azure_url, lambda table: table.next_due())
    asyncio.run(AzureStorageQueueTransport(azure_url).setup_infrastructure(["billing"]))
    legacy.add(ENDPOINT, *some(9), Timeout(10, "gone", LATER))
    ids, again = [one.id for one in some(9)], [one.id for one in some(3, first=4)]
    plan = Plan(legacy.source, azure(azure_url), [ENDPOINT], batch_size=4)
    kills = TaskKills(tmp_path, 1 if then == "retried" else 3, Timeout(5).id)
    killing = Plan(legacy.source, KillingTarget(azure(azure_url), kills), [ENDPOINT], batch_size=4)  # type: ignore[arg-type]
    # When the migration runs, and is resumed or aborted
    if then == "retried":
        outcome = Migration(killing).run(spark)
    else:
        with pytest.raises(DelaylineError):
            Migration(killing).run(spark)
        outcome = Migration(plan).resume(spark) if then == "resumed" else Migration(plan).abort()
    # Then everything is there once, or back, and what may come twice is among what verify names
    found, left = set(waiting(azure_url)), set(legacy.ids(ENDPOINT))
    assert found | left == {*ids, Timeout(10).id}
    verified = verify(legacy.source, plan.target, spark)  # type: ignore[arg-type]
    assert found & left <= set(verified.repeatable)
    assert set(again) <= set(verified.repeatable)
    assert verified.ok
    if then != "aborted":
        assert (found, left) == (set(ids), {Timeout(10).id})
        assert [number for _, number in outcome.reasons] == [1]


@pytest.mark.slow
def test_a_driver_that_dies_at_the_end_is_resumed(
    spark: SparkSession, legacy: Legacy, azure_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_table(azure_url, lambda table: table.next_due())
    asyncio.run(AzureStorageQueueTransport(azure_url).setup_infrastructure(["billing"]))
    legacy.add(ENDPOINT, *some(5))
    plan = Plan(legacy.source, azure(azure_url), [ENDPOINT], batch_size=2)
    with dying(monkeypatch, Migration, "_end", after=False):
        Migration(plan).run(spark)
    assert Migration(plan).resume(spark).complete
    assert sorted(waiting(azure_url)) == [one.id for one in some(5)]
    assert verify(legacy.source, azure(azure_url), spark).repeatable == []
