"""Timeouts of Azure Storage persistence move to a store, and to delay levels."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from azure.data.tables import TableServiceClient, UpdateMode
from azure.storage.blob import BlobServiceClient
from tests.integration.azure_parts import connection
from tests.integration.test_rabbitmq_migration import V2
from tests.spark.arrivals import arrivals_at
from tests.spark.broker import in_levels, with_levels
from tests.spark.legacy import HEADERS, LATER
from tests.spark.stores import StoreAt

from delayline.delayed.delivery import StoredDelivery
from delayline.errors import BackendUnavailable, BackendUnusable
from delayline.migration import Migration, Plan, preview, source_at, target_at
from delayline.migration.sources.azure_storage import CONTAINER, TABLE, AzureStorage
from delayline.migration.verify import verify
from delayline.sql import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

ENDPOINT = "Sales.Orders"
PAST = datetime(2019, 5, 6, 7, 8, 9, tzinfo=UTC)


@dataclass(frozen=True)
class Timeout:
    """A timeout as the persistence writes it: three rows and a blob."""

    number: int
    time: datetime | None = LATER
    destination: str | None = ENDPOINT
    owner: str | None = ENDPOINT
    body: bytes | None = b"{}"
    headers: str | None = ""

    @property
    def id(self) -> str:
        return str(uuid.UUID(int=self.number))

    @property
    def row(self) -> dict[str, Any]:
        headers = json.dumps({"NServiceBus.MessageId": f"message-{self.number}", **HEADERS})
        row = {
            "Destination": self.destination, "SagaId": uuid.UUID(int=7), "StateAddress": self.id, "Time": self.time,
            "OwningTimeoutManager": self.owner, "Headers": headers if self.headers == "" else self.headers,
        }  # fmt: skip
        return {name: value for name, value in row.items() if value is not None}


class Storage:
    """The table and the container."""

    def __init__(self, url: str) -> None:
        self.url = url
        service = TableServiceClient.from_connection_string(connection(url))
        self.table = service.create_table_if_not_exists(TABLE)
        self.blobs = BlobServiceClient.from_connection_string(connection(url)).create_container(CONTAINER)

    def add(self, *timeouts: Timeout) -> None:
        for one in timeouts:
            hour = f"{one.time or PAST:%Y%m%d%H}"
            for partition, row in ((hour, one.id), (str(uuid.UUID(int=7)), one.id), (one.id, "")):
                self.table.create_entity({"PartitionKey": partition, "RowKey": row, **one.row})
            if one.body is not None:
                self.blobs.upload_blob(one.id, one.body)

    def owners(self) -> dict[int, str]:
        """Return whose the rows are that are kept by their times."""
        rows = [one for one in self.table.list_entities() if len(one["PartitionKey"]) == len("yyyyMMddHH")]
        return {uuid.UUID(one["RowKey"]).int: one.get("OwningTimeoutManager", "") for one in rows}


@pytest.fixture
def storage(azure_url: str) -> Storage:
    return Storage(azure_url)


@pytest.mark.sample(3, group="migration round trips")
def test_timeouts_move_to_a_store_whose_endpoint_delivers_them(
    spark: SparkSession, storage: Storage, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given timeouts of a dotted endpoint, overdue, soon due and far off, and some that cannot move
    store = StoreAt(postgresql_url, ENDPOINT)
    soon = datetime.now(UTC) + timedelta(seconds=20)
    storage.add(
        Timeout(1, PAST), Timeout(2, soon, body="früh".encode()), Timeout(3, body=b""), Timeout(4, body=None),
        Timeout(5, destination=None), Timeout(6, None), Timeout(7, owner="crm"), Timeout(8, owner="__hidden__x__crm"),
        Timeout(9, headers=None), Timeout(10, owner=None), Timeout(11, headers="{"),
    )  # fmt: skip
    source = source_at("azure-storage", storage.url, journal=postgresql_url)
    target = target_at(postgresql_url)
    assert target is not None
    plan = Plan(source, target, [ENDPOINT], batch_size=2)

    def work() -> None:
        # When they are looked at, nothing changes
        before = storage.owners()
        [shown] = preview(plan, spark)
        assert (shown.rows, shown.first, shown.overdue) == (8, PAST, 1)
        assert sum(number for _, number, _ in shown.unmovable) == 3
        dry = Migration(Plan(source, None, [ENDPOINT])).run(spark)
        assert sum(number for _, number in dry.reasons) == 4
        assert storage.owners() == before
        # and when they are moved, what cannot go is its endpoint's again
        outcome = Migration(plan).run(spark)
        assert sorted(reason.partition(":")[0] for reason, _ in outcome.reasons) == [
            "destination must be a text of 1 to 200 characters", "due is missing", "headers are not JSON",
            "its body is missing",
        ]  # fmt: skip
        after = storage.owners()
        assert {number for number, owner in after.items() if owner == ENDPOINT} == {4, 5, 6, 11}
        assert {number: after[number] for number in (7, 8, 10)} == {7: "crm", 8: "__hidden__x__crm", 10: ""}

    delivery = StoredDelivery(SqlDelayedMessageStore(postgresql_url))
    arrived = arrivals_at(ENDPOINT, SqlTransport(postgresql_url), delivery, 2, work)

    # Then they arrive when they are due, with their headers and bodies
    assert [one.body for one in arrived] == [b"{}", "früh".encode()]
    assert arrived[1].on_time(soon)
    assert arrived[0].headers["Ключ 🔑"] == "Größe"
    assert {one.id: (one.due, one.message.body) for one in store.messages()} == {
        Timeout(3).id: (LATER, b""), Timeout(9).id: (LATER, b"{}"),
    }  # fmt: skip
    assert verify(source, target, spark).ok


def test_messages_that_an_endpoint_takes_meanwhile_are_left_to_it(
    spark: SparkSession, storage: Storage, rabbitmq_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an endpoint that still runs: it dispatches a timeout while it is read
    with_levels(rabbitmq_url, V2)
    storage.add(*(Timeout(number, destination="billing") for number in (1, 2, 3)))
    source = source_at("azure-storage", storage.url, journal=f"sqlite:///{tmp_path / 'journal.db'}")
    plan = Plan(source, target_at(rabbitmq_url), None)
    hide = AzureStorage._hide

    async def late(self: AzureStorage, *arguments: Any) -> list[str]:  # noqa: ANN401 - its own
        storage.table.delete_entity(f"{LATER:%Y%m%d%H}", Timeout(2).id)
        storage.table.update_entity(
            {"PartitionKey": f"{LATER:%Y%m%d%H}", "RowKey": Timeout(3).id, "Destination": "crm"}, mode=UpdateMode.MERGE
        )
        return await hide(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(AzureStorage, "_hide", late)
        with pytest.raises(BackendUnavailable, match=r"2 timeouts in table .* changed while they were read"):
            Migration(plan).run(spark)
    # When it is aborted, everything is as it was
    Migration(plan).abort()
    assert storage.owners() == {1: ENDPOINT, 3: ENDPOINT}
    # and when the migration runs again, the remaining timeouts move, with bodies and headers
    storage.table.update_entity(
        {"PartitionKey": f"{LATER:%Y%m%d%H}", "RowKey": Timeout(3).id, "Destination": "billing"}, mode=UpdateMode.MERGE
    )
    assert Migration(plan).run(spark).complete
    found = {one.header.properties.message_id: one for one in in_levels(rabbitmq_url, V2)}
    assert set(found) == {"message-1", "message-3"}
    assert found["message-1"].header.properties.headers["Ключ 🔑"] == "Größe"
    assert bytes(found["message-3"].body) == b"{}"


def test_a_table_that_is_not_there_is_reported(storage: Storage, tmp_path: Path, spark: SparkSession) -> None:
    journal = f"sqlite:///{tmp_path / 'journal.db'}"
    source = source_at("azure-storage", storage.url, journal=journal, table="NoSuchTable")
    with pytest.raises(BackendUnusable, match="Name the endpoints' table with --table"):
        preview(Plan(source, None), spark)


def test_an_abort_shows_only_unmoved_rows(
    spark: SparkSession, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a run that fails after its first round, of timeouts due long ago, soon and in years
    store = StoreAt(f"sqlite:///{tmp_path / 'store.db'}", ENDPOINT)
    storage.add(Timeout(1, PAST), Timeout(2), Timeout(3, LATER + timedelta(days=1)))
    source = source_at("azure-storage", storage.url, journal=store.url)
    plan = Plan(source, target_at(store.url), None, batch_size=1)
    monkeypatch.setattr("delayline.migration.run.ROUND_ROWS", 1)
    deliver, rounds = Migration._deliver, []

    def fail_at_second(self: Migration, *arguments: Any) -> None:  # noqa: ANN401 - its own
        rounds.append(arguments)
        if len(rounds) == 2:
            raise BackendUnavailable("on purpose")
        deliver(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Migration, "_deliver", fail_at_second)
        with pytest.raises(BackendUnavailable):
            Migration(plan).run(spark)
    # When it is aborted
    progress = Migration(plan).abort().progress
    # Then moved rows stay hidden, and the others are visible to their endpoint
    assert progress is not None
    assert (progress.marked, progress.restored) == (1, 2)
    assert storage.owners() == {1: f"__hidden__delayline__{ENDPOINT}", 2: ENDPOINT, 3: ENDPOINT}
    assert store.ids() == [Timeout(1).id]
    # and moves with the next run
    assert Migration(plan).run(spark).complete
    assert len(store.ids()) == 3
