"""Conformance on SQLite: one file, and the store in one file and the queues in another."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from tests.sampling import OtherLayout

from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.testing import DeliveryConformance, FaultyStore, StoreConformance, TransportConformance
from delayline.testing.conformance.messages import ENDPOINT


def url(folder: Path, name: str = "delayline") -> str:
    return f"sqlite:///{folder}/{name}.db"


class TestSqliteStore(StoreConformance):
    durable = True

    async def make_store(self, tmp_path: Path) -> SqlDelayedMessageStore:
        return SqlDelayedMessageStore(url(tmp_path))


class TestSqliteTransport(TransportConformance):
    async def make_transport(self, tmp_path: Path) -> SqlTransport:
        return SqlTransport(url(tmp_path))


class TestSqliteDelivery(DeliveryConformance):
    """One file: every transaction mode up to TRANSACTION_SCOPE."""

    async def make_backends(self, tmp_path: Path) -> tuple[SqlTransport, SqlDelayedMessageStore]:
        return SqlTransport(url(tmp_path)), SqlDelayedMessageStore(url(tmp_path))

    def urls(self, tmp_path: Path) -> tuple[str, str]:
        return url(tmp_path), url(tmp_path)


class TestSqliteDeliveryOverTwoFiles(OtherLayout):
    """The store in one file, the queues in another: no common transaction, so the lower modes only."""

    async def make_backends(self, tmp_path: Path) -> tuple[SqlTransport, SqlDelayedMessageStore]:
        return SqlTransport(url(tmp_path, "queues")), SqlDelayedMessageStore(url(tmp_path, "store"))

    def urls(self, tmp_path: Path) -> tuple[str, str]:
        return url(tmp_path, "queues"), url(tmp_path, "store")


class TestSqliteSixVerbDelivery(OtherLayout):
    """The least of stores, on a real back end: one message at a time, locked by claims."""

    burst = 100

    async def make_backends(self, tmp_path: Path) -> tuple[SqlTransport, FaultyStore]:
        self.store = SqlDelayedMessageStore(url(tmp_path, "store"))
        await self.store.setup_infrastructure(ENDPOINT)  # six verbs cannot
        return SqlTransport(url(tmp_path, "queues")), FaultyStore(self.store, verbs_only=True)

    @pytest_asyncio.fixture(autouse=True)
    async def close(self) -> AsyncIterator[None]:
        """Close what six verbs cannot."""
        yield
        await self.store.close()
