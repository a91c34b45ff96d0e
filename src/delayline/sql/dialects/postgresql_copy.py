"""Binary COPY of many messages, which costs the server less than any INSERT.

COPY has no ON CONFLICT: one with an id that is stored already is undone as a whole, and its rows go in by an INSERT.
"""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import Cursor
from psycopg.pq import Format
from psycopg.types.array import ListBinaryDumper

from delayline.clock import to_microseconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from psycopg import Connection


#: The header and trailer of binary COPY.
COPY_HEADER: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
COPY_END: Final = b"\xff\xff"
#: PostgreSQL counts microseconds from here, not from 1970.
YEAR_2000: Final = 946_684_800_000_000


def use_binary(connection: Connection[Any]) -> None:
    """Let every cursor of the connection read in binary, and write lists so; other values are written as before."""
    connection.adapters.register_dumper(list, ListBinaryDumper)
    connection.cursor_factory = BinaryCursor


class BinaryCursor(Cursor[Any]):
    """A cursor that reads in binary."""

    def __init__(self, connection: Connection[Any], **settings: Any) -> None:  # noqa: ANN401 - psycopg's own
        super().__init__(connection, **settings)
        self.format = Format.BINARY


LEAST: Final = 100  # rows; fewer are inserted as fast in the time that its round trips take
PART: Final = 64  # rows that are sent at once, so that the server takes some while the next are written
FIRST: Final = struct.Struct(">hi")
LENGTH: Final = struct.Struct(">i")
INSTANT: Final = struct.Struct(">iqi")
COUNT: Final = struct.Struct(">ii")
COLUMNS: Final = ["id", "destination", "due", "headers", "body", "retry_count"]
#: Number of batches written by INSERT after one that repeated an id: a sender that repeats one often repeats more.
HELD_OFF: Final = 100
#: What an INSERT may have no trouble with, or a better word for: ids that are there, columns of other types, texts that
#: cannot be kept, row security.
TRY_OTHERWISE: Final = (
    psycopg.IntegrityError,
    psycopg.DataError,
    psycopg.errors.ProtocolViolation,
    psycopg.NotSupportedError,
    UnicodeError,
    struct.error,
)


class Copies:
    """Copies rows into tables, as long as their ids are new."""

    def __init__(self) -> None:
        self._held_off: dict[str, int] = {}

    def copied(self, driver: psycopg.Connection[Any], insert: str, rows: Sequence[tuple[Any, ...]]) -> bool:
        """Copy the rows and commit; False when they have to be inserted, and nothing was done."""
        if len(rows) < LEAST or driver.info.encoding != "utf-8":
            return False
        statement = copy_statement(insert)
        left = self._held_off.get(insert, 0)
        if statement is None or left:
            self._held_off[insert] = max(0, left - 1)
            return False
        try:
            copy(driver, statement, rows)
        except TRY_OTHERWISE:
            self._held_off[insert] = HELD_OFF
            return False
        return True


def copy(driver: psycopg.Connection[Any], statement: bytes, rows: Sequence[tuple[Any, ...]]) -> None:
    """Copy the rows, all or none."""
    with psycopg.Cursor(driver).copy(statement) as target:
        target.write(COPY_HEADER)
        for first in range(0, len(rows), PART):
            target.write(b"".join(map(in_binary, rows[first : first + PART])))
        target.write(COPY_END)


def in_binary(row: tuple[Any, ...]) -> bytes:
    """Return a message's row as COPY takes it: varchar, varchar, timestamptz, bytea, bytea, int4."""
    message_id, destination, due, headers, body, retry_count = row
    key, queue = message_id.encode(), destination.encode()
    due = INSTANT.pack(8, to_microseconds(due) - YEAR_2000, len(headers))
    lengths = FIRST.pack(6, len(key)), LENGTH.pack(len(queue)), LENGTH.pack(len(body)), COUNT.pack(4, retry_count)
    return b"".join((lengths[0], key, lengths[1], queue, due, headers, lengths[2], body, lengths[3]))


@lru_cache(maxsize=256)
def copy_statement(insert: str) -> bytes | None:
    """Return the COPY for the insert of a message's row, psycopg's; None for that of something else."""
    found = re.match(r"INSERT INTO (.+) \(([^()]+)\) VALUES \(", insert)
    if found is None or found[2].split(", ") != COLUMNS:
        return None
    table = found[1].replace("%%", "%")
    return f"COPY {table} ({found[2]}) FROM STDIN (FORMAT BINARY)".encode()
