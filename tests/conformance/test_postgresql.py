"""Conformance on PostgreSQL: one database, and two with and without a two-phase commit."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.sampling import OtherLayout
from tests.servers.postgresql import PostgresqlServer

from delayline.sql import SqlDelayedMessageStore, SqlTransport, TwoPhaseCommit
from delayline.testing import DeliveryConformance, FaultyStore, StoreConformance, TransportConformance
from delayline.testing.conformance.messages import ENDPOINT


class OnPostgresql:
    """A database for every test."""

    @pytest.fixture(autouse=True)
    def database(self, postgresql_url: str) -> None:
        self.url = postgresql_url


class TestPostgresqlStore(OnPostgresql, StoreConformance):
    durable = True

    async def make_store(self, tmp_path: Path) -> SqlDelayedMessageStore:
        return SqlDelayedMessageStore(self.url)


class TestPostgresqlTransport(OnPostgresql, TransportConformance):
    async def make_transport(self, tmp_path: Path) -> SqlTransport:
        return SqlTransport(self.url)


class TestPostgresqlDelivery(OnPostgresql, DeliveryConformance):
    """One database: every transaction mode up to TRANSACTION_SCOPE."""

    async def make_backends(self, tmp_path: Path) -> tuple[SqlTransport, SqlDelayedMessageStore]:
        return SqlTransport(self.url), SqlDelayedMessageStore(self.url)

    def urls(self, tmp_path: Path) -> tuple[str, str]:
        return self.url, self.url


class TestPostgresqlDeliveryOverTwoDatabases(OnPostgresql, OtherLayout):
    """The store in one database, the queues in another: no common transaction, so the lower modes only."""

    @pytest.fixture(autouse=True)
    def second_database(self, postgresql: PostgresqlServer) -> Iterator[None]:
        self.second = postgresql.new_database()
        yield
        postgresql.drop_database(self.second)

    async def make_backends(self, tmp_path: Path) -> tuple[SqlTransport, SqlDelayedMessageStore]:
        return SqlTransport(self.second), SqlDelayedMessageStore(self.url)

    def urls(self, tmp_path: Path) -> tuple[str, str]:
        return self.second, self.url


class TestPostgresqlDeliveryInTwoPhases(OnPostgresql, OtherLayout):
    """The store in one database, the queues in another, and one transaction over both: every mode."""

    @pytest.fixture(autouse=True)
    def second_database(self, postgresql: PostgresqlServer) -> Iterator[None]:
        self.second = postgresql.new_database()
        yield
        postgresql.drop_database(self.second)

    async def make_backends(self, tmp_path: Path) -> tuple[SqlTransport, SqlDelayedMessageStore]:
        both = TwoPhaseCommit()
        return SqlTransport(self.second, two_phase=both), SqlDelayedMessageStore(self.url, two_phase=both)


class TestPostgresqlSixVerbDelivery(OnPostgresql, OtherLayout):
    """The least of stores, on a server: one message at a time, locked by a transaction of the store's own."""

    burst = 100

    async def make_backends(self, tmp_path: Path) -> tuple[SqlTransport, FaultyStore]:
        self.store = SqlDelayedMessageStore(self.url)
        await self.store.setup_infrastructure(ENDPOINT)  # six verbs cannot
        return SqlTransport(self.url), FaultyStore(self.store, verbs_only=True)

    @pytest_asyncio.fixture(autouse=True)
    async def close(self, database: None) -> AsyncIterator[None]:
        """Close what six verbs cannot."""
        yield
        await self.store.close()
