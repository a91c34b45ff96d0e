"""The origin of a stored message is kept by every store and in bulk."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from sqlalchemy.schema import CreateTable

from delayline import TransactionMode
from delayline.azure.rows import from_entity, row_of, to_entity
from delayline.bulk.writer import BulkWriter
from delayline.delayed.arrow import MESSAGE_SCHEMA
from delayline.message import DelayedMessage, Message
from delayline.sql import SqlDelayedMessageStore
from delayline.sql.databases import database_at

if TYPE_CHECKING:
    from pathlib import Path

DUE = datetime(2040, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'delayline.db'}"
    return str(request.getfixturevalue(f"{request.param}_url"))


def message(id: str, origin: str | None) -> DelayedMessage:
    return DelayedMessage(Message(id, {}, b""), "billing", DUE, origin=origin)


async def test_stored_messages_have_their_origin(url: str) -> None:
    store = SqlDelayedMessageStore(url)
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    await store.store_many([message("a", "sales"), message("b", None)])
    batch = {"id": ["c"], "destination": ["billing"], "due": [DUE], "headers": ["{}"], "body": [b""], "origin": ["job"]}
    staging = BulkWriter(url, "sales.timeouts")
    staging.create()
    staging.commit([staging.write([pa.RecordBatch.from_pydict(batch, MESSAGE_SCHEMA)])])
    assert {waiting.id: waiting.origin for waiting in await store.pending()} == {"a": "sales", "b": None, "c": "job"}
    assert {due.id: due.origin for due in await store.fetch_due(DUE, 3, max_bytes=1000)}["a"] == "sales"
    await store.close()


def test_rows_in_azure_have_their_origin() -> None:
    assert from_entity(to_entity(row_of(message("a", "sales")))).message.origin == "sales"
    assert from_entity(to_entity(row_of(message("a", None)))).message.origin is None


def test_the_table_in_sql_server_has_a_column_for_it() -> None:
    dialect = database_at("mssql+pymssql://user@host/name").dialect
    made = CreateTable(dialect.catalog.timeouts_table("sales.timeouts", None))
    assert "Origin] NVARCHAR(200) NULL" in str(made.compile(dialect=dialect.sql)).replace("[[", "[")
