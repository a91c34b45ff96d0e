"""The raw loops on MariaDB: PyMySQL alone, the same tables, indexes, rows and isolation, default durability."""

from __future__ import annotations

import contextlib
import json
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pymysql
from sqlalchemy.engine import make_url

from benchmarks.bare import BODY, HEADERS
from benchmarks.handled_worker import HEADERS as HANDLED_HEADERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAME = "COLLATE utf8mb4_nopad_bin NOT NULL"
TABLES = (
    "DROP TABLE IF EXISTS bare, bare_queue",
    f"""CREATE TABLE bare (
    seq BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, id VARCHAR(250) {NAME} UNIQUE, destination VARCHAR(200) {NAME},
    due DATETIME(6) NOT NULL, headers LONGBLOB NOT NULL, body LONGBLOB NOT NULL, retry_count INTEGER NOT NULL,
    INDEX (due, seq))""",
    f"""CREATE TABLE bare_queue (
    seq BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, queue VARCHAR(200) {NAME}, id VARCHAR(250) {NAME},
    headers LONGBLOB NOT NULL, body LONGBLOB NOT NULL, INDEX (queue, seq))""",
)
COLUMNS = "id, destination, due, headers, body, retry_count"
INSERT = f"INSERT INTO bare ({COLUMNS}) VALUES (%s, %s, %s, _binary %s, _binary %s, 0)"  # noqa: S608 - our own
LOCK = "SELECT seq FROM bare FORCE INDEX (due) WHERE due <= %s ORDER BY due, seq LIMIT %s FOR UPDATE SKIP LOCKED"
READ = "SELECT id, destination, headers, body FROM bare WHERE seq IN %s"
PUT = """
INSERT INTO bare_queue (queue, id, headers, body)
SELECT destination, id, headers, body FROM bare WHERE seq IN %s ORDER BY due, seq
"""
DELETE = "DELETE FROM bare WHERE seq IN %s"
CLAIM_QUEUE = """
SELECT seq, id, headers, body FROM bare_queue WHERE queue = 'destination' ORDER BY seq LIMIT 500 FOR UPDATE SKIP LOCKED
"""
DELETE_QUEUED = "DELETE FROM bare_queue WHERE seq IN %s"


@contextlib.contextmanager
def connected(url: str) -> Iterator[Any]:
    """Provide a cursor in autocommit that reads what is committed."""
    place = make_url(url)
    with (
        pymysql.connect(
            host=place.host, port=place.port or 3306, user=place.username, database=place.database, autocommit=True,
            init_command="SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
        ) as connection,
        connection.cursor() as cursor,
    ):  # fmt: skip
        yield cursor


@contextlib.contextmanager
def with_tables(url: str) -> Iterator[Any]:
    """Provide the same, with the tables there and empty."""
    with connected(url) as cursor:
        for statement in TABLES:
            cursor.execute(statement)
        yield cursor


def rows(number: int, due: datetime) -> list[tuple[object, ...]]:
    """Return what the statements take."""
    due = due.replace(tzinfo=None)
    return [(f"{i:036d}", "destination", due + timedelta(seconds=i), HEADERS, BODY) for i in range(number)]


def single_rate(url: str, number: int) -> float:
    """Return inserts a second, each committed by itself in one round trip."""
    with with_tables(url) as cursor:
        made = rows(number, datetime.now(UTC))
        started = time.perf_counter()
        for row in made:
            cursor.execute(INSERT, row)
        return number / (time.perf_counter() - started)


def hundreds_rate(url: str, number: int) -> float:
    """Return inserts a second, a hundred to a commit and a statement."""
    return _inserts(url, number, 100)


def many_rate(url: str, number: int) -> float:
    """Return inserts a second, a thousand to a commit."""
    return _inserts(url, number, 1000)


def move_rate(url: str, number: int, per_commit: int) -> float:
    """Return messages a second that go from table to table inside the server: lock, insert, delete, commit."""
    return _drain(url, number, per_commit, _move)


def claim_rate(url: str, number: int, per_commit: int) -> float:
    """Return messages a second that are read and deleted: lock, read, delete, commit."""

    def claim(cursor: Any, chosen: list[int]) -> None:  # noqa: ANN401
        cursor.execute(READ, (chosen,))
        cursor.fetchall()
        cursor.execute(DELETE, (chosen,))

    return _drain(url, number, per_commit, claim)


def fill(url: str, bodies: list[bytes], due: datetime | None) -> None:
    """Insert messages into the table, or into the queue's."""
    headers, far = json.dumps(HANDLED_HEADERS).encode(), (due or datetime.now(UTC)).replace(tzinfo=None)
    made: list[tuple[object, ...]] = [
        (f"{number:036d}", "destination", far, headers, body) for number, body in enumerate(bodies)
    ]
    with with_tables(url) as cursor:
        _insert(cursor, made, 1000)
        if due is None:
            _batch(cursor, len(made), _move)


def handle(url: str, write: Callable[[bytes], None], due: datetime | None, started: Callable[[], None]) -> None:
    """Move 500 from table to table, claim 500, and so on; what is in the queue already is only claimed."""
    with connected(url) as cursor:
        started()
        if due is not None:
            time.sleep((due - datetime.now(UTC)).total_seconds())
        while True:
            moved = _batch(cursor, 500, _move) if due else 0
            cursor.execute("BEGIN")
            cursor.execute(CLAIM_QUEUE)
            claimed = cursor.fetchall()
            if claimed:
                cursor.execute(DELETE_QUEUED, ([row[0] for row in claimed],))
            cursor.execute("COMMIT")
            for _, _, _, body in claimed:
                write(body)
            if not moved and not claimed:
                time.sleep(0.01)


def _move(cursor: Any, chosen: list[int]) -> None:  # noqa: ANN401 - PyMySQL has no types
    cursor.execute(PUT, (chosen,))
    cursor.execute(DELETE, (chosen,))


def _batch(cursor: Any, number: int, work: Callable[[Any, list[int]], None]) -> int:  # noqa: ANN401
    """Lock messages that are due now, do the work on them, commit, and return how many there were."""
    cursor.execute("BEGIN")
    cursor.execute(LOCK, (datetime.now(UTC).replace(tzinfo=None), number))
    chosen = [seq for (seq,) in cursor.fetchall()]
    if chosen:
        work(cursor, chosen)
    cursor.execute("COMMIT")
    return len(chosen)


def _inserts(url: str, number: int, per_commit: int) -> float:
    with with_tables(url) as cursor:
        made = rows(number, datetime.now(UTC))
        started = time.perf_counter()
        _insert(cursor, made, per_commit)
        return number / (time.perf_counter() - started)


def _insert(cursor: Any, made: list[tuple[object, ...]], per_commit: int) -> None:  # noqa: ANN401
    for first in range(0, len(made), per_commit):
        cursor.execute("BEGIN")
        cursor.executemany(INSERT, made[first : first + per_commit])
        cursor.execute("COMMIT")


def _drain(url: str, number: int, per_commit: int, work: Callable[[Any, list[int]], None]) -> float:
    with with_tables(url) as cursor:
        _insert(cursor, rows(number, datetime.now(UTC) - timedelta(days=365)), 1000)
        cursor.execute("ANALYZE TABLE bare")
        taken, started = 0, time.perf_counter()
        while taken < number:
            taken += _batch(cursor, per_commit, work)
        return number / (time.perf_counter() - started)
