"""Messages that Spark schedules carry the headers of messages that an endpoint sends."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pyarrow as pa
from tests.spark.stores import DUE, ENDPOINT, frame

from delayline import Endpoint, Headers, SqlTransport, StoredDelivery
from delayline.message import from_wire_time
from delayline.spark import JobTarget, schedule
from delayline.spark.headers import SendHeaders
from delayline.sql import SqlDelayedMessageStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession
    from tests.spark.stores import StoreAt
    from tests.spark.tiers import Tiers

OTHERS = {"Zürich": 'ß " \\', Headers.CORRELATION_ID: "order-7", Headers.MESSAGE_ID: "not this one"}
IDS = {"plain": None, 'odd "\\" ü': None, "given": OTHERS}


def by_an_endpoint(url: str) -> None:
    async def send() -> None:
        store = StoredDelivery(SqlDelayedMessageStore(url), polling=False)
        async with Endpoint(ENDPOINT, transport=SqlTransport(url), delayed_delivery=store, send_only=True) as endpoint:
            for one, headers in IDS.items():
                await endpoint.send(
                    "billing", "text", headers=headers, message_id=one, deliver_at=DUE, check_destination=False
                )

    asyncio.run(send())


def taken(store: StoreAt) -> dict[str, Mapping[str, str]]:
    """Return the headers that wait, and empty the store."""
    found = {message.id: message.message.headers for message in store.messages()}

    async def cancel(opened: SqlDelayedMessageStore) -> None:
        for one in found:
            await opened.cancel(one)

    store.run(cancel)
    return found


def test_headers_match_those_of_a_send(spark: SparkSession, tiers: Tiers) -> None:
    # Given what an endpoint sends
    store, began = tiers.hot, datetime.now(UTC)
    by_an_endpoint(store.url)
    expected = taken(store)
    # When Spark schedules the same, once into the store and once into files
    maps = pa.array([list((one or {}).items()) for one in IDS.values()], pa.map_(pa.string(), pa.string()))
    data = frame(spark, *IDS, headers=maps, body=["text"] * len(IDS))
    schedule(data, JobTarget(store.url, endpoint=ENDPOINT))
    hot = taken(store)
    assert tiers.schedule(data).cold == len(IDS)
    tiers.promote(DUE + timedelta(hours=1))
    cold = taken(store)
    # Then they differ only in the time of sending
    for found in (hot, cold):
        assert {one: {**headers, Headers.TIME_SENT: ""} for one, headers in found.items()} == {
            one: {**headers, Headers.TIME_SENT: ""} for one, headers in expected.items()
        }
        assert all(from_wire_time(headers[Headers.TIME_SENT]) >= began for headers in found.values())
    assert hot["plain"][Headers.CONTENT_TYPE] == "text/plain; charset=utf-8"


def test_the_data_source_writes_rows_unchanged(spark: SparkSession, store: StoreAt) -> None:
    writer = frame(spark, "a").write.format("delayed_messages").mode("append").options(**store.options)
    writer.save()
    assert taken(store) == {"a": {"n": "1"}}
    # Unless it is asked for
    writer.options(**SendHeaders("shop", "application/json", None).options).save()
    headers = taken(store)["a"]
    assert (headers["n"], headers[Headers.ORIGINATING_ENDPOINT], headers[Headers.CONTENT_TYPE]) == (
        "1",
        "shop",
        "application/json",
    )
    assert headers[Headers.DELIVER_AT] == "2030-01-02 03:04:05:678901 Z"
