"""Timeouts of .NET move to delayline's stores and to RabbitMQ's levels: all of them, as they were, on time."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from tests.spark.legacy import LATER, Legacy, Timeout, some
from tests.spark.stores import StoreAt

from delayline.errors import BackendUnusable, ConfigurationError
from delayline.migration import Migration, Plan, preview, target_at
from delayline.migration.run import MigrationResult
from delayline.migration.verify import run_named, verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from delayline.migration.target import Target

ENDPOINT = "sales"


@pytest.fixture(params=["postgresql", "mariadb"])
def legacy(request: pytest.FixtureRequest) -> Legacy:
    """Tables of .NET for one endpoint."""
    return Legacy(request.getfixturevalue(f"{request.param}_url"), ENDPOINT)


@pytest.fixture
def target(store: StoreAt) -> Target:
    found = target_at(store.url)
    assert found is not None
    return found


def move(spark: SparkSession, legacy: Legacy, target: Target | None, **how: object) -> MigrationResult:
    return Migration(Plan(legacy.source, target, **{"endpoints": [ENDPOINT], **how})).run(spark)  # type: ignore[arg-type]


def test_everything_arrives_as_it_was(spark: SparkSession, legacy: Legacy, store: StoreAt) -> None:
    # Given timeouts of every kind that .NET writes
    timeouts = [
        Timeout(1, state="Größe 🚀".encode()),
        Timeout(2, state=None, saga=None),
        Timeout(3, state=b""),
        Timeout(4, time=datetime(2020, 1, 1, tzinfo=UTC)),
        Timeout(5, time=datetime(9000, 1, 1, tzinfo=UTC), destination="crm"),
    ]
    legacy.add(ENDPOINT, *timeouts)
    target = target_at(store.url)
    assert target is not None

    # When they are moved
    outcome = move(spark, legacy, target)

    # Then the store has them, each for its own destination, and the old table is empty
    assert outcome.complete
    assert legacy.rows(ENDPOINT) == []
    moved = {one.id: one for one in store.messages()}
    assert sorted(moved) == [one.id for one in timeouts]
    for timeout in timeouts:
        found = moved[timeout.id]
        assert (found.destination, found.due) == (timeout.destination, timeout.time)
        assert found.message.body == (timeout.state or b"")
        assert found.message.headers["Ключ 🔑"] == "Größe"
        assert found.message.headers["NServiceBus.MessageId"] == f"message-{timeout.number}"
    # And a poller would fetch the overdue messages
    assert store.due() == [timeouts[3].id]
    # And source, target and journal agree
    verified = verify(legacy.source, target, spark)
    assert verified.ok
    assert (verified.moved, verified.waiting, verified.gone) == (5, 5, 0)
    assert verified.repeatable == []


def test_rows_that_cannot_move_stay_with_their_reasons(
    spark: SparkSession, postgresql_url: str, any_store: StoreAt
) -> None:
    legacy = Legacy(postgresql_url, ENDPOINT)
    bad = [
        Timeout(1, headers="{broken"),
        Timeout(2, headers='{"n": 1}'),
        Timeout(3, destination=None),
        Timeout(4, destination="x\x01y"),
        Timeout(5, headers="[]"),
    ]
    legacy.add(ENDPOINT, *bad, Timeout(6), Timeout(7, headers=None), Timeout(8, time=None))
    before = [row for row in legacy.rows(ENDPOINT) if str(row[0]) not in (Timeout(6).id, Timeout(7).id)]
    target = target_at(any_store.url)

    outcome = move(spark, legacy, target, batch_size=2)

    assert not outcome.complete
    assert any_store.ids() == [Timeout(6).id, Timeout(7).id]
    assert legacy.rows(ENDPOINT) == before
    assert outcome.skipped == 1  # the one without a due time
    assert sum(number for _, number in outcome.reasons) == len(bad) + outcome.skipped
    assert any("headers are not JSON" in reason for reason, _ in outcome.reasons)
    assert any("destination must be" in reason for reason, _ in outcome.reasons)
    assert target is not None
    verified = verify(legacy.source, target, spark)
    assert verified.ok
    assert (verified.moved, verified.rejected, verified.waiting) == (2, 5, 2)


def test_a_preview_reports_everything_and_changes_nothing(
    spark: SparkSession, postgresql_url: str, store: StoreAt
) -> None:
    legacy = Legacy(postgresql_url, ENDPOINT, "Sales.Orders")
    past = datetime(2020, 1, 1, tzinfo=UTC)
    legacy.add(ENDPOINT, Timeout(1, time=past), Timeout(2), Timeout(3, headers="{"), Timeout(4, time=None))
    legacy.add("Sales.Orders", Timeout(5, destination="crm"), Timeout(6))
    tables, rows = legacy.everything(), [legacy.rows(one) for one in (ENDPOINT, "Sales.Orders")]

    found = preview(Plan(legacy.source, target_at(store.url)), spark)

    orders, sales = found
    assert (sales.endpoint, sales.rows, sales.first, sales.last) == (ENDPOINT, 3, past, LATER)
    assert (sales.overdue, sales.destinations, sales.problems) == (1, [("billing", 3)], [])
    assert [(number, key) for _, number, key in sales.unmovable] == [(1, Timeout(4).id), (1, Timeout(3).id)]
    assert sales.skipped == 1
    assert (orders.endpoint, orders.rows) == ("Sales_Orders", 2)
    assert "has no store for endpoint 'Sales_Orders'" in orders.problems[0]
    assert "--endpoint Sales.Orders if that is the endpoint's own name" in orders.problems[0]
    assert (legacy.everything(), [legacy.rows(one) for one in (ENDPOINT, "Sales.Orders")]) == (tables, rows)


def test_a_dry_run_reads_everything_and_marks_nothing(spark: SparkSession, legacy: Legacy) -> None:
    legacy.add(ENDPOINT, *some(10), Timeout(11, destination=None))
    tables, rows = legacy.everything(), legacy.rows(ENDPOINT)
    outcome = move(spark, legacy, None)
    assert outcome.progress is not None
    assert (outcome.progress.rows, outcome.progress.rejected, outcome.progress.marked) == (11, 1, 0)
    assert (legacy.everything(), legacy.rows(ENDPOINT)) == (tables, rows)


def test_an_endpoint_with_dots_is_found_under_its_own_name(
    spark: SparkSession, postgresql_url: str, mariadb_url: str
) -> None:
    import asyncio

    from delayline.sql import SqlDelayedMessageStore

    legacy = Legacy(postgresql_url, "Sales.Orders")
    legacy.add("Sales.Orders", *some(3))
    asyncio.run(SqlDelayedMessageStore(mariadb_url).setup_infrastructure("Sales.Orders"))
    target = target_at(mariadb_url)
    # Named, or with all the others: the target knows how it is spelt
    outcome = move(spark, legacy, target, endpoints=None)
    assert outcome.complete
    assert target is not None
    assert target.endpoint_named("Sales_Orders") == "Sales.Orders"
    assert verify(legacy.source, target, spark).waiting == 3


def test_only_rows_due_after_the_cutoff_move(spark: SparkSession, legacy: Legacy, target: Target) -> None:
    legacy.add(ENDPOINT, *some(10))
    outcome = move(spark, legacy, target, cutoff=LATER + timedelta(seconds=6))
    assert outcome.progress is not None
    assert outcome.progress.marked == 5
    assert legacy.ids(ENDPOINT) == [Timeout(number).id for number in range(1, 6)]


def test_a_message_for_a_queue_that_is_not_there_stays(
    spark: SparkSession, postgresql_url: str, store: StoreAt
) -> None:
    import asyncio

    from delayline import SqlTransport

    # Given a target whose queues are in its own database
    asyncio.run(SqlTransport(store.url).setup_infrastructure(["billing"]))
    legacy = Legacy(postgresql_url, ENDPOINT)
    legacy.add(ENDPOINT, Timeout(1), Timeout(2, destination="gone"))
    outcome = move(spark, legacy, target_at(store.url))
    assert (store.ids(), legacy.ids(ENDPOINT)) == ([Timeout(1).id], [Timeout(2).id])
    assert "queue 'gone' does not exist" in outcome.reasons[0][0]


def test_a_table_of_another_shape_is_refused_and_nothing_moves(
    spark: SparkSession, postgresql_url: str, target: Target
) -> None:
    from sqlalchemy import text

    legacy = Legacy(postgresql_url, ENDPOINT)
    legacy.add(ENDPOINT, Timeout(1))
    legacy.change(lambda connection: connection.execute(text('ALTER TABLE "sales_TimeoutData" ADD "Extra" int')))
    with pytest.raises(BackendUnusable, match="unknown version: its column 'Extra'"):
        move(spark, legacy, target)
    assert not [name for name in legacy.everything() if name.startswith("delayline_holding")]


def test_a_target_that_was_not_set_up_is_refused_before_anything_moves(
    spark: SparkSession, legacy: Legacy, rabbitmq_url: str
) -> None:
    legacy.add(ENDPOINT, Timeout(1))
    tables = legacy.everything()
    with pytest.raises(BackendUnusable, match="no complete delay levels"):
        move(spark, legacy, target_at(rabbitmq_url))
    assert legacy.everything() == tables


def test_an_endpoint_that_has_nothing_is_named(spark: SparkSession, legacy: Legacy, target: Target) -> None:
    with pytest.raises(ConfigurationError, match=r"no endpoint 'slaes' has timeouts.*'sales'"):
        move(spark, legacy, target, endpoints=["slaes"])


def test_the_journal_keeps_no_password(spark: SparkSession, legacy: Legacy, target: Target) -> None:
    legacy.add(ENDPOINT, Timeout(1))
    move(spark, legacy, target)
    kept = run_named(legacy.source, None).parameters
    assert kept["endpoints"] == ENDPOINT
    assert kept["batch_size"] == "10000"
    hidden = Plan(legacy.source, target_at("amqp://me:hunter2@host/orders"), None).parameters
    assert "hunter2" not in str(hidden)
    assert hidden["batch_size"] == "1000"


def test_a_second_run_moves_new_messages(spark: SparkSession, legacy: Legacy, store: StoreAt) -> None:
    legacy.add(ENDPOINT, *some(3))
    move(spark, legacy, target_at(store.url))
    legacy.add(ENDPOINT, *(replace(one, state=b"new") for one in some(2, first=10)))
    outcome = move(spark, legacy, target_at(store.url))
    assert outcome.progress is not None
    assert outcome.progress.marked == 2
    assert len(store.ids()) == 5
