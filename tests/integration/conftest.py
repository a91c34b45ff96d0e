"""One SQLite file, and endpoints on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from delayline import Endpoint, StoredDelivery
from delayline.sql import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from collections.abc import Callable
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
