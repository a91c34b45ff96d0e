"""Timeout persisters keep every promise: in memory, in SQLite, on PostgreSQL and MariaDB."""

from datetime import timedelta
from pathlib import Path

import pytest

from delayline.testing import TimeoutPersisterConformance
from delayline.timeouts import MemoryTimeoutPersister, SqlTimeoutPersister


class TestMemoryTimeouts(TimeoutPersisterConformance):
    async def make_persister(self, tmp_path: Path) -> MemoryTimeoutPersister:
        return MemoryTimeoutPersister()


class TestSqliteTimeouts(TimeoutPersisterConformance):
    durable = True

    async def make_persister(self, tmp_path: Path) -> SqlTimeoutPersister:
        return SqlTimeoutPersister(f"sqlite:///{tmp_path}/delayline.db")


class TestPostgresqlTimeouts(TimeoutPersisterConformance):
    durable = True

    @pytest.fixture(autouse=True)
    def database(self, postgresql_url: str) -> None:
        """Provide a database for every test."""
        self.url = postgresql_url

    async def make_persister(self, tmp_path: Path) -> SqlTimeoutPersister:
        return SqlTimeoutPersister(self.url)


class TestMariadbTimeouts(TimeoutPersisterConformance):
    """Whole seconds, as .NET's table keeps them."""

    durable = True
    step = timedelta(seconds=1)

    @pytest.fixture(autouse=True)
    def database(self, mariadb_url: str) -> None:
        """Provide a database for every test."""
        self.url = mariadb_url

    async def make_persister(self, tmp_path: Path) -> SqlTimeoutPersister:
        return SqlTimeoutPersister(self.url)
