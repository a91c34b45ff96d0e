"""One SQLite file, and endpoints on it; a store on PostgreSQL; databases of each product, with queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from delayline import Endpoint, StoredDelivery, TransactionMode
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.sql.databases import database_at
from delayline.sql.server_database import ServerDatabase

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "delayline.db"


@pytest.fixture
def make_endpoint(file: Path) -> Callable[..., Endpoint]:
    """Return a function that makes an endpoint with store and queues in one file."""

    def make(name: str = "orders", *, url: str | None = None, batch_bytes: int = 1 << 24, **settings: Any) -> Endpoint:  # noqa: ANN401
        address = url or f"sqlite:///{file}"
        delivery = StoredDelivery(SqlDelayedMessageStore(address), batch_bytes=batch_bytes)
        return Endpoint(name, transport=SqlTransport(address), delayed_delivery=delivery, **settings)

    return make


@pytest.fixture
async def store(postgresql_url: str) -> AsyncIterator[SqlDelayedMessageStore]:
    store = SqlDelayedMessageStore(postgresql_url)
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    yield store
    await store.close()


@pytest.fixture(params=["SQLite", "PostgreSQL", "MariaDB"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Provide an empty database of each product."""
    if request.param == "SQLite":
        return f"sqlite:///{tmp_path}/delayline.db"
    return str(request.getfixturevalue(f"{request.param.lower()}_url"))


@pytest.fixture
async def queues(url: str) -> AsyncIterator[SqlTransport]:
    """The started transport, with queues `billing`, `mail`, `shipping` and `error`."""
    transport = SqlTransport(url)
    await transport.start()
    await transport.setup_infrastructure(["billing", "mail", "shipping", "error"])
    yield transport
    await transport.stop()


@pytest.fixture
def database(postgresql_url: str) -> ServerDatabase:
    database = database_at(postgresql_url)
    assert isinstance(database, ServerDatabase)
    return database


async def waiting(store: SqlDelayedMessageStore) -> list[str]:
    return [message.id for message in await store.pending()]
