"""Timeouts in RavenDB's export files move to a store, and to delay levels; the files stay as they are."""

from __future__ import annotations

import base64
import gzip
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from examples.ravendb_source.ravendb_source import RavenDb
from tests.integration.test_rabbitmq_migration import V2
from tests.spark.arrivals import arrivals_at
from tests.spark.broker import in_levels, with_levels
from tests.spark.legacy import HEADERS, LATER
from tests.spark.stores import StoreAt

from delayline.delayed.delivery import StoredDelivery
from delayline.errors import BackendUnusable, ConfigurationError
from delayline.migration import Migration, Plan, preview, target_at
from delayline.migration.verify import verify
from delayline.sql import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ENDPOINT = "Sales.Orders"
PAST = datetime(2019, 5, 6, 7, 8, 9, tzinfo=UTC)


def timeout(number: int, time: datetime = LATER, **other: object) -> dict[str, Any]:
    """Return a document as the persistence stores it."""
    headers = {"NServiceBus.MessageId": f"message-{number}", "None": None, **HEADERS}
    return {
        "Destination": ENDPOINT, "SagaId": "00000000-0000-0000-0000-000000000000",
        "State": base64.b64encode(b"{}").decode(), "Time": f"{time:%Y-%m-%dT%H:%M:%S.%f}0Z", "Headers": headers,
        "OwningTimeoutManager": ENDPOINT,
        "@metadata": {"@collection": "TimeoutDatas", "@id": f"TimeoutDatas/{number}-A"}, **other,
    }  # fmt: skip


def export(path: Path, *timeouts: dict[str, Any]) -> Path:
    """Write a file as RavenDB's smuggler does: with other documents, and an attachment among them."""
    saga = {"Originator": "crm", "@metadata": {"@collection": "Sagas", "@id": "Sagas/1-A"}}
    attachment = {"@metadata": {"@export-type": "Attachment"}, "Hash": "x", "Size": 4, "Tag": "Attachment1"}
    pieces = [json.dumps(attachment).encode() + b'"]}{', *(json.dumps(one).encode() for one in (saga, *timeouts))]
    path.write_bytes(gzip.compress(b'{"BuildVersion":54000,"Docs":[' + b",".join(pieces) + b'],"Identities":[]}'))
    return path


@pytest.mark.sample(3, group="migration round trips")
def test_timeouts_move_to_a_store_whose_endpoint_delivers_them(
    spark: SparkSession, postgresql_url: str, tmp_path: Path
) -> None:
    # Given two files, with timeouts of all sorts, one in both
    store = StoreAt(postgresql_url, ENDPOINT)
    soon = datetime.now(UTC) + timedelta(seconds=20)
    export(
        tmp_path / "a.ravendbdump",
        timeout(1, PAST), timeout(2, soon, State=base64.b64encode("früh".encode()).decode()),
        timeout(3, State=None, Headers=None, OwningTimeoutManager=""), timeout(4, State="?"), timeout(5, Time="soon"),
        timeout(6, OwningTimeoutManager="crm"), timeout(7, OwningTimeoutManager=f"__hidden__{ENDPOINT}"),
        timeout(8, OwningTimeoutManager=f"__migrated__{ENDPOINT}"), timeout(9, Destination=None),
    )  # fmt: skip
    old = {"Queue": ENDPOINT, "Machine": None}
    export(
        tmp_path / "b.ravendbdump", timeout(1, PAST), timeout(10, Destination=old, Time="2031-05-06T07:08:09.0000001Z")
    )
    source = RavenDb(str(tmp_path / "*.ravendbdump"), postgresql_url)
    target = target_at(postgresql_url)
    assert target is not None
    plan = Plan(source, target, [ENDPOINT], batch_size=2)

    def work() -> None:
        # When they are looked at, and moved
        [shown] = preview(plan, spark)
        assert (shown.endpoint, shown.first, sum(n for _, n, _ in shown.unmovable)) == (ENDPOINT, PAST, 4)
        outcome = Migration(plan).run(spark)
        assert sorted(reason.partition(":")[0] for reason, _ in outcome.reasons) == [
            "another tool was moving it when the file was written",
            "destination must be a text of 1 to 200 characters", "its State is not base64", "its Time 'soon' is none",
        ]  # fmt: skip

    delivery = StoredDelivery(SqlDelayedMessageStore(postgresql_url))
    arrived = arrivals_at(ENDPOINT, SqlTransport(postgresql_url), delivery, 2, work)

    # Then each arrives once, when it is due
    assert [one.body for one in arrived] == [b"{}", "früh".encode()]
    assert arrived[1].on_time(soon)
    assert arrived[0].headers["Ключ 🔑"] == "Größe"
    assert "None" not in arrived[0].headers
    assert {one.id: (one.due, one.message.body) for one in store.messages()} == {
        "TimeoutDatas/3-A": (LATER, b""), "TimeoutDatas/10-A": (LATER + timedelta(microseconds=1), b"{}"),
    }  # fmt: skip
    assert verify(source, target, spark).ok
    # and moved timeouts do not move again
    again = Migration(plan).run(spark)
    assert again.progress is not None
    assert (again.progress.marked - again.progress.rejected, len(arrived)) == (0, 2)


def test_timeouts_move_to_levels_and_a_cut_off_file_moves_nothing(
    spark: SparkSession, rabbitmq_url: str, tmp_path: Path
) -> None:
    # Given a file of which the end is missing
    with_levels(rabbitmq_url, V2)
    journal = f"sqlite:///{tmp_path / 'journal.db'}"
    path = export(tmp_path / "dump", *(timeout(n, Destination="billing", N=str(hash(n)) * 99) for n in range(3000)))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    source = RavenDb(str(path), journal)
    plan = Plan(source, target_at(rabbitmq_url), [ENDPOINT], cutoff=LATER)
    # When it is moved, nothing is
    with pytest.raises(BackendUnusable, match="is not a complete RavenDB export"):
        Migration(plan).run(spark)
    Migration(plan).abort()
    assert in_levels(rabbitmq_url, V2) == []
    # and when it is complete, timeouts due after the cutoff are in the levels
    extra = [timeout(1, Destination="billing"), timeout(2, PAST, Destination="billing")]
    export(path, *extra)
    assert Migration(plan).run(spark).complete
    [found] = in_levels(rabbitmq_url, V2)
    assert found.header.properties.message_id == "message-1"
    assert found.header.properties.headers["Ключ 🔑"] == "Größe"
    with pytest.raises(ConfigurationError, match="there is no file"):
        preview(Plan(RavenDb(str(tmp_path / "none*"), journal), None), spark)
