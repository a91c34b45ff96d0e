"""More tasks than the database server has connections."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING

import psycopg
import pytest
from tests.conftest import running
from tests.servers.postgresql import PostgresqlServer
from tests.spark.stores import StoreAt

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    command = [sys.executable, "-m", "tests.spark.crowd", crowded.url, crowded.endpoint]
    driver = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    # Then they wait for each other, and no message is missing
    assert driver.returncode == 0, driver.stderr[-3000:]
    assert driver.stdout.splitlines()[-1] == "1600"
