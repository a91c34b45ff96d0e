"""NServiceBus' timeout tables on a database product."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from sqlalchemy import Connection, Table
    from sqlalchemy.types import TypeEngine

    from delayline.sql.moves import Moved
    from delayline.sql.schema import QueueTables


class TimeoutForwarding(Protocol):
    """Moves the earliest expired timeouts of a table on a server, in a single statement."""

    def run(self, connection: Connection, at: object, until: object, sent: str, *, limit: int, max_bytes: int) -> Moved:
        """Move expired timeouts and return the result; `next_due` is when the next expires or its lease ends.

        Skips timeouts that need more than moving: an unknown queue, or headers that the dispatcher has to read.

        Args:
            connection: the connection to run on.
            at: the present time in the type of leases.
            until: the present time in the type of due times.
            sent: the present time as a header.
            limit: how many timeouts to move at most.
            max_bytes: how many bytes of bodies and headers to move at most.
        """
        ...


@dataclass(frozen=True, slots=True)
class TimeoutShape:
    """The columns of NServiceBus' timeout table on a product: https://docs.particular.net/persistence/sql/."""

    key: TypeEngine[Any]
    destination: TypeEngine[str]
    time: TypeEngine[Any]
    headers: TypeEngine[Any]
    round_time: Callable[[datetime], datetime] | None = None
    """Rounds a time in UTC up to what the column keeps; None if the column keeps times as a store's does."""
    time_lost: timedelta = timedelta(0)
    """How much earlier a time that .NET has stored may be than the exact time."""
    nullable: bool = False
    """Whether Headers and PersistenceVersion may be NULL."""
    named_by_table: bool = False
    """Whether the names of indexes begin with the table's name."""
    json_headers: bool = False
    """Whether Headers has the type JSON, which LIKE does not accept."""
    binary_keys: bool = False
    """Whether the driver returns keys as UUIDs, unless they are cast to text."""
    inserts_new: bool = True
    """Whether `insert_new` supports keys of this type."""
    forwarding: Callable[[Table, QueueTables], TimeoutForwarding] | None = None
    """How expired timeouts of a table move inside the server; None where they do not."""
