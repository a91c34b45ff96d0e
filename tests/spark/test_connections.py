"""More tasks than the database server has connections, or than a job may have."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import psycopg
import pytest
from tests.conftest import running
from tests.servers.postgresql import PostgresqlServer
from tests.spark.stores import StoreAt

from delayline import ConfigurationError, SqlDelayedMessageStore
from delayline.spark import JobTarget

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The driver has one at a time, and another that it is closing.
OF_DRIVER: Final = 2
OTHERS: Final = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""


def crowd(store: StoreAt, most: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.spark.crowd", store.url, store.endpoint, f"{most}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def crowded() -> Iterator[StoreAt]:
    """Provide a store on a server with room for ten, of which others have taken six."""
    with running(PostgresqlServer, "fsync=off", "max_connections=10") as server:
        store = StoreAt(server.new_database())
        with contextlib.ExitStack() as others:
            for _ in range(6):
                others.enter_context(psycopg.connect(store.url))
            yield store


@pytest.mark.slow
def test_sixteen_tasks_share_the_last_four_connections(crowded: StoreAt) -> None:
    # When sixteen tasks write at once, and sixteen read
    with crowd(crowded, 0) as driver:
        output, errors = driver.communicate(timeout=280)
    # Then they wait for each other, and no message is missing
    assert driver.returncode == 0, errors[-3000:]
    assert output.splitlines()[-1] == "1600"


@pytest.mark.slow
def test_jobs_have_no_more_connections_than_their_target_says(store: StoreAt) -> None:
    # Given a store with a journal
    asyncio.run(SqlDelayedMessageStore(store.url, journal=True).setup_infrastructure(store.endpoint))
    most = [0]
    with psycopg.connect(store.url, autocommit=True) as looker, crowd(store, 2) as driver:
        # When jobs of sixteen tasks run with two connections at most
        while driver.poll() is None:
            most.extend(count for (count,) in looker.execute(OTHERS))
        output, errors = driver.communicate(timeout=10)
    # Then they never had more, apart from the driver's, and no message is missing
    assert driver.returncode == 0, errors[-3000:]
    assert output.splitlines()[-1] == "1600"
    assert 0 < max(most) <= 2 + OF_DRIVER


def test_the_bounds_of_a_target_are_options_of_the_data_source() -> None:
    target = JobTarget("sqlite:///delayline.db", endpoint="sales", max_connections=3, connect_timeout=5)
    assert {"maxConnections": "3", "connectTimeout": "5"}.items() <= target.options.items()
    with pytest.raises(ConfigurationError, match="max_connections must be a whole number of 1 or more, not 0"):
        JobTarget("sqlite:///delayline.db", endpoint="sales", max_connections=0)
    with pytest.raises(ConfigurationError, match="connect_timeout must be a whole number of 1 or more, not 0"):
        JobTarget("sqlite:///delayline.db", endpoint="sales", connect_timeout=0)
