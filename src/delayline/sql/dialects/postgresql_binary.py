"""Connections on which rows and lists travel in PostgreSQL's binary format.

As text a body is twice as long, and a list of ids takes seven times as long to write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from psycopg import Cursor
from psycopg.pq import Format
from psycopg.types.array import ListBinaryDumper

if TYPE_CHECKING:
    from psycopg import Connection

#: What binary COPY begins and ends with.
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
