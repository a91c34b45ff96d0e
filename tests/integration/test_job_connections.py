"""The connections of jobs: a share of the server's, which wait while it is full, and end with their client."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pymysql
import pytest
from sqlalchemy import make_url
from tests.conftest import running
from tests.eventually import eventually
from tests.servers.mariadb import MariadbServer
from tests.servers.postgresql import PostgresqlServer

from delayline import BackendUnavailable
from delayline.bulk.connections import MOST_CONNECTIONS, connection_limit, job_url
from delayline.sql.databases import database_at
from delayline.sql.server import run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from delayline.sql.server import ServerConnections

#: What the smallest MariaDB has room for; PostgreSQL keeps three of them for superusers.
ROOM: Final = 10
USER: Final = "jobs"
PATIENCE: Final = 100.0
RUNNING: Final = """
import sys
from delayline.sql.databases import database_at
from delayline.sql.server import run

with database_at(sys.argv[1]).dialect.connections.look() as connection:
    print(run(connection, "SELECT pg_backend_pid()")[0][0], flush=True)
    run(connection, "SELECT pg_sleep(600)")
"""


@pytest.fixture(scope="module")
def small_postgresql() -> Iterator[str]:
    """Provide a database for a user without rights, on a server with room for ten."""
    with running(PostgresqlServer, "fsync=off", f"max_connections={ROOM}") as server:
        with server.administrator() as connection:
            connection.execute(f"CREATE ROLE {USER} LOGIN")
        yield f"postgresql://{USER}@127.0.0.1:{server.port}/postgres"


@pytest.fixture(scope="module")
def small_mariadb() -> Iterator[str]:
    """Provide a database for a user without rights, on a server with room for ten."""
    with running(MariadbServer, f"max_connections={ROOM}") as server:
        with server.administrator() as cursor:
            cursor.execute("CREATE DATABASE small")
            cursor.execute(f"CREATE USER {USER}@'127.0.0.1'")
            cursor.execute(f"GRANT ALL ON small.* TO {USER}@'127.0.0.1'")
        yield f"mariadb://{USER}@127.0.0.1:{server.port}/small"


@pytest.fixture(params=["small_postgresql", "small_mariadb"])
def small_server(request: pytest.FixtureRequest) -> str:
    """Provide the server of each product."""
    url: str = request.getfixturevalue(request.param)
    return url


def connect(url: str) -> Any:  # noqa: ANN401 - of either driver
    place = make_url(url)
    if place.get_backend_name() == "postgresql":
        return psycopg.connect(url)
    return pymysql.connect(host=place.host or "", port=place.port or 0, user=place.username, database=place.database)


@contextlib.contextmanager
def no_room(url: str) -> Iterator[list[Any]]:
    """Take connections until the server refuses."""
    taken: list[Any] = []
    with pytest.raises((psycopg.OperationalError, pymysql.err.OperationalError)):
        while len(taken) <= ROOM:
            taken.append(connect(url))
    try:
        yield taken
    finally:
        for connection in taken:
            connection.close()


def connections_of(url: str) -> ServerConnections:
    connections: ServerConnections = database_at(url).dialect.connections  # type: ignore[assignment]
    return connections


def test_a_job_waits_for_a_full_server(small_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a server without room for another connection
    connections, refused = connections_of(job_url(small_server, PATIENCE)), threading.Event()
    is_full = connections.errors.is_full

    def noting(error: Exception) -> bool:
        refused.set()
        return is_full(error)

    monkeypatch.setattr(connections.errors, "is_full", noting)
    with no_room(small_server) as taken, ThreadPoolExecutor(1) as thread:
        # When a job connects, is refused, and then a connection ends
        connecting = thread.submit(connections.connect)
        assert refused.wait(PATIENCE)
        taken.pop().close()
        # Then the job has its connection
        connecting.result(PATIENCE).close()


def test_a_job_waits_no_longer_than_it_may_and_an_endpoint_not_at_all(small_server: str) -> None:
    with no_room(small_server):
        for url in (small_server, job_url(small_server, 0.3)):
            # The limit itself is asked for by a connection too
            with pytest.raises(
                BackendUnavailable, match=r"(is full|short of resources): .*(?i:too many|slots are reserved)"
            ):
                connection_limit(url)


def test_a_job_takes_a_quarter_of_the_connections_that_are_left(small_server: str) -> None:
    url = job_url(small_server)
    assert connection_limit(url) == 2 if "mariadb" in url else 1
    with no_room(small_server) as taken:
        for _ in range(3):
            taken.pop().close()
        eventually(lambda: connection_limit(url) == 1, "a job takes one connection at least")
    assert connection_limit(url, 17) == 17


def test_a_job_takes_at_most_32_connections(postgresql_url: str, mariadb_url: str, tmp_path: Path) -> None:
    (tmp_path / "delayline.db").touch()
    for url in (postgresql_url, mariadb_url, f"sqlite:///{tmp_path / 'delayline.db'}"):
        assert connection_limit(job_url(url)) == MOST_CONNECTIONS


def test_limits_of_a_user_or_a_database_count_too(small_server: str, request: pytest.FixtureRequest) -> None:
    del request
    place = make_url(small_server)
    if place.get_backend_name() == "postgresql":
        administrator = psycopg.connect(str(place.set(username="delayline")), autocommit=True)
        begin, end = f"ALTER ROLE {USER} CONNECTION LIMIT 5", f"ALTER ROLE {USER} CONNECTION LIMIT -1"
    else:
        administrator = connect(str(place.set(username="delayline", database="mysql")))
        limit = f"ALTER USER {USER}@'127.0.0.1' WITH MAX_USER_CONNECTIONS"
        begin, end = f"{limit} 5", f"{limit} 0"
    with contextlib.closing(administrator), administrator.cursor() as cursor:
        cursor.execute(begin)
        try:
            connections = connections_of(small_server)
            with connections.look() as connection, connections.look():
                assert connections.unused(connection) == 3
        finally:
            cursor.execute(end)


def test_the_server_ends_idle_transactions_of_jobs_only(postgresql_url: str, mariadb_url: str) -> None:
    settings = {
        postgresql_url: "SELECT current_setting('idle_in_transaction_session_timeout')",
        mariadb_url: "SELECT @@idle_transaction_timeout",
    }
    for url, query in settings.items():
        shown = []
        for each in (url, job_url(url)):
            with connections_of(each).look() as connection:
                shown.append(str(run(connection, query)[0][0]))
        assert shown in (["0", "1h"], ["0", "3600"])


def test_settings_in_the_url_of_a_job_win(postgresql_url: str) -> None:
    url = job_url(f"{postgresql_url}?options=-c%20idle_in_transaction_session_timeout%3D7s")
    with connections_of(url).look() as connection:
        assert run(connection, "SHOW idle_in_transaction_session_timeout") == [("7s",)]


def test_a_statement_ends_soon_after_its_task_was_killed(postgresql_url: str) -> None:
    # Given a task in the middle of a long statement
    command = [sys.executable, "-c", RUNNING, job_url(postgresql_url)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as task:
        assert task.stdout is not None
        backend = int(task.stdout.readline())
        # When it is killed
        task.send_signal(signal.SIGKILL)
    # Then the server gives the statement up
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        query = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
        eventually(lambda: connection.execute(query, [backend]).fetchone() == (0,), "the backend has ended")


def test_jobs_share_a_file_with_the_endpoints_of_their_process_and_no_connections_of_a_server(
    postgresql_url: str, tmp_path: Path
) -> None:
    file = f"sqlite:///{tmp_path / 'delayline.db'}"
    assert database_at(job_url(file)) is database_at(file)
    assert database_at(job_url(postgresql_url)) is not database_at(postgresql_url)
