"""The raw loops everything is compared with: sqlite3 alone, the same tables, rows, indexes and durability."""

from __future__ import annotations

import json
import sqlite3
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

#: Eight, as an endpoint sends them; 430 bytes.
SENT_HEADERS = {
    "NServiceBus.MessageId": "01890a5d-ac96-774b-bcce-b302099a8057",
    "NServiceBus.CorrelationId": "01890a5d-ac96-774b-bcce-b302099a8057",
    "NServiceBus.ConversationId": "01890a5d-ac96-774b-bcce-b302099a8057",
    "NServiceBus.ContentType": "application/json",
    "NServiceBus.TimeSent": "2026-04-29 22:11:26:340982 Z",
    "NServiceBus.DeliverAt": "2026-04-29 23:11:26:340982 Z",
    "NServiceBus.MessageIntent": "Send",
    "NServiceBus.OriginatingEndpoint": "bench",
}
HEADERS = json.dumps(SENT_HEADERS).encode()
BODY = b"b" * 256
FAR = 4_000_000_000_000_000  # microseconds since 1970: the year 2096

STORE = """
CREATE TABLE timeouts (seq INTEGER PRIMARY KEY AUTOINCREMENT, id VARCHAR(250) NOT NULL UNIQUE,
    destination VARCHAR(200) NOT NULL, due BIGINT NOT NULL, headers BLOB NOT NULL, body BLOB NOT NULL,
    retry_count INTEGER NOT NULL);
CREATE INDEX timeouts_due ON timeouts (due, seq);
CREATE TABLE queue (seq INTEGER PRIMARY KEY AUTOINCREMENT, queue VARCHAR(200) NOT NULL, id VARCHAR(250) NOT NULL,
    headers BLOB NOT NULL, body BLOB NOT NULL);
CREATE INDEX queue_order ON queue (queue, seq);
"""
INSERT = "INSERT INTO timeouts (id, destination, due, headers, body, retry_count) VALUES (?, ?, ?, ?, ?, 0)"
DUE = "FROM timeouts WHERE due <= ? ORDER BY due, seq LIMIT ?"
PUT = f"INSERT INTO queue (queue, id, headers, body) SELECT destination, id, headers, body {DUE}"
DELETE = f"DELETE FROM timeouts WHERE seq IN (SELECT seq {DUE})"  # noqa: S608 - our own


def connect(path: Path) -> sqlite3.Connection:
    """Open a file as delayline does: WAL, synchronous FULL, the same cache."""
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "cache_size = -16384"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def insert_rate(path: Path, number: int, per_commit: int) -> float:
    """Return inserted messages a second."""
    connection = connect(path)
    connection.executescript(STORE)
    rows = [(f"{i:036d}", "destination", FAR + i, HEADERS, BODY) for i in range(number)]
    started = time.perf_counter()
    for first in range(0, number, per_commit):
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(INSERT, rows[first : first + per_commit])
        connection.execute("COMMIT")
    elapsed = time.perf_counter() - started
    connection.close()
    return number / elapsed


def move_rate(path: Path, number: int, per_commit: int) -> float:
    """Return messages a second that go from the store's table to the queue's, inside SQLite."""
    insert_rate(path, number, 1000)
    connection = connect(path)
    started = time.perf_counter()
    for _ in range(0, number, per_commit):
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(PUT, (FAR * 2, per_commit))
        connection.execute(DELETE, (FAR * 2, per_commit))
        connection.execute("COMMIT")
    elapsed = time.perf_counter() - started
    moved = connection.execute("SELECT count(*) FROM queue").fetchone()
    assert moved == (number,)
    connection.close()
    return number / elapsed
