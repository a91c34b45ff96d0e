"""Conformance on MariaDB: one database, and two with and without a two-phase commit."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sampling import OtherLayout
from tests.servers.mariadb import MariadbServer

from delayline.sql import SqlDelayedMessageStore, SqlTransport, TwoPhaseCommit
from delayline.testing import DeliveryConformance, StoreConformance, TransportConformance


class OnMariadb:
    """A database for every test."""

    @pytest.fixture(autouse=True)
    def database(self, mariadb_url: str) -> None:
        self.url = mariadb_url


class TestMariadbStore(OnMariadb, StoreConformance):
    durable = True

    async def make_store(self, tmp_path: Path) -> SqlDelayedMessageStore:
        return SqlDelayedMessageStore(self.url)


class TestMariadbTransport(OnMariadb, TransportConformance):
    async def make_transport(self, tmp_path: Path) -> SqlTransport:
        return SqlTransport(self.url)


class TestMariadbDelivery(OnMariadb, DeliveryConformance):
    """One database: every transaction mode up to TRANSACTION_SCOPE."""

    async def make_backends(self, tmp_path: Path) -> tuple[SqlTransport, SqlDelayedMessageStore]:
        return SqlTransport(self.url), SqlDelayedMessageStore(self.url)

    def urls(self, tmp_path: Path) -> tuple[str, str]:
        return self.url, self.url


class TestMariadbDeliveryOverTwoDatabases(OnMariadb, OtherLayout):
    """The store in one database, the queues in another: due messages pass through this process."""

    @pytest.fixture(autouse=True)
    def second_database(self, mariadb: MariadbServer) -> Iterator[None]:
        self.second = mariadb.new_database()
        yield
        mariadb.drop_database(self.second)

    async def make_backends(self, tmp_path: Path) -> tuple[SqlTransport, SqlDelayedMessageStore]:
        return SqlTransport(self.second), SqlDelayedMessageStore(self.url)


class TestMariadbDeliveryInTwoPhases(OnMariadb, OtherLayout):
    """The store in one database, the queues in another, and one transaction over both: every mode."""

    @pytest.fixture(autouse=True)
    def second_database(self, mariadb: MariadbServer) -> Iterator[None]:
        self.second = mariadb.new_database()
        yield
        mariadb.drop_database(self.second)

    async def make_backends(self, tmp_path: Path) -> tuple[SqlTransport, SqlDelayedMessageStore]:
        both = TwoPhaseCommit()
        return SqlTransport(self.second, two_phase=both), SqlDelayedMessageStore(self.url, two_phase=both)
