"""Minute rows: what each process of an endpoint has done, kept for 30 days in the database of its store.

The dashboard's pictures are made of them: they survive restarts, and show all processes. A row of each hour holds the
same for longer time spans.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import zlib
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import BigInteger, Column, Integer, MetaData, Table, and_, delete, func, insert, inspect, select

from delayline.clock import from_microseconds, to_microseconds
from delayline.errors import DelaylineError
from delayline.events import Event, emit
from delayline.message import MAXIMUM_DESTINATION_LENGTH
from delayline.observer import Action
from delayline.sql.databases import database_at
from delayline.sql.schema import CONTENT, MAXIMUM_NAME_LENGTH, TableGroup, register, text
from delayline.sql.setup import RequiredTables
from delayline.telemetry.measurements import LATENESS_BOUNDS, Measurements

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection

    from delayline.clock import Clock
    from delayline.observer import ObservedEndpoint
    from delayline.telemetry.measurements import Activity, Snapshot

logger: logging.Logger = logging.getLogger(__name__)

HISTORY_KEPT_FOR: Final = timedelta(days=30)
LAST_ROW_WITHIN: Final = 2.0  # seconds that an endpoint waits for it when it stops
MICROS_A_MINUTE: Final = 60_000_000  # microseconds
#: Minutes that a row covers.
SCALES: Final = (1, 60)
#: Minutes whose rows are deleted in a single transaction.
DELETED_AT_ONCE: Final = 240
#: The most bytes of a row's content that are read.
LARGEST_CONTENT: Final = 4_000_000
#: Decoded rows that are kept: two hours' of a hundred processes, for pages that read them again and again. About 40 MB.
ROWS_KEPT: Final = 12_000


@lru_cache(maxsize=64)
def minutes_table(schema: str | None = None) -> Table:
    """Return the table of minute rows in that schema, the connection's own where None."""
    return Table(
        "delayline_minutes",
        MetaData(schema=schema),
        Column("endpoint", text(MAXIMUM_DESTINATION_LENGTH), primary_key=True),
        Column("scale", Integer, primary_key=True, autoincrement=False),  # minutes that the row covers
        Column("minute", BigInteger, primary_key=True, autoincrement=False),  # the first minute, since 1970
        Column("process", text(MAXIMUM_NAME_LENGTH), primary_key=True),
        Column("content", CONTENT, nullable=False),  # JSON, compressed
    )


MINUTES: Final = register(TableGroup("history", lambda _, schema: [minutes_table(schema)]))


@dataclass(frozen=True, slots=True)
class MinuteRow:
    """The counts of a process in a minute or an hour, and its state at the end."""

    process: str
    start: datetime
    minutes: int
    """How many minutes the row covers: 1 or 60."""
    written: datetime
    sent: int = 0
    dispatched: int = 0
    handled: int = 0
    failed: int = 0
    """Attempts to handle a message that failed."""
    moved: int = 0
    """Messages moved to the error queue."""
    uncounted: int = 0
    """Dispatched messages whose lateness the store did not report."""
    lateness: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Numbers of dispatched messages by destination, in the buckets of `LATENESS_BOUNDS`."""
    poller: datetime | None = None
    """When the poller last succeeded."""
    receivers: Mapping[str, datetime | None] = field(default_factory=dict)
    running_handlers: int = 0
    breakers: Mapping[str, int] = field(default_factory=dict)
    measures: Mapping[str, float] = field(default_factory=dict)


class MinuteHistory(Measurements):
    """An observer that writes its counts to a SQL database every minute.

    Args:
        url: The database, as of a store; its table is created when the endpoint starts.
        schema: Schema of the table; by default the connection's.
        kept_for: How long rows are kept.
        clock: Decides which minute it is; by default the database server's clock, or the machine's on SQLite.

    Example:
        ```python
        endpoint = Endpoint("sales", transport=transport, observers=[MinuteHistory("sqlite:///delayline.db")])
        ```
    """

    def __init__(
        self, url: str, *, schema: str | None = None, kept_for: timedelta = HISTORY_KEPT_FOR, clock: Clock | None = None
    ) -> None:
        super().__init__()
        self._database = database_at(url)
        self._schema = self._database.dialect.catalog.schema_of(schema)
        self._kept_for = kept_for
        self._given_clock = clock
        self._process = process_name()
        self._first = self.snapshot()
        self._bases: dict[int, tuple[int, Snapshot]] = {}
        """By scale: the minute that began last, and what was counted until then."""

    @property
    def process(self) -> str:
        """The name of this process in the rows."""
        return self._process

    def attached(self, endpoint: ObservedEndpoint) -> None:
        """Belong to that endpoint, and count from now on."""
        super().attached(endpoint)
        self._first = self.snapshot()

    async def run(self) -> None:
        """Write a row at the end of each minute until cancelled, and a last row then."""
        await self._database.open()
        try:
            clock = self._given_clock or self._database.clock
            table = RequiredTables(self._database.dialect, self._schema, MINUTES)
            prepared = False
            self._begin(clock.now())
            try:
                while True:
                    now = to_microseconds(clock.now())
                    await clock.sleep((MICROS_A_MINUTE - now % MICROS_A_MINUTE) / 1_000_000)
                    try:
                        if not prepared:
                            await self._database.set_up(table.plan, table.set_up)
                            prepared = True
                        await self.write(clock.now())
                    except DelaylineError as error:
                        log_text = (
                            "The minute row of endpoint %s was not written, the next row will hold its counts: %s"
                        )
                        endpoint = self.snapshot().endpoint
                        emit(logger, logging.WARNING, Event.BACKGROUND_TASK_FAILED, log_text, endpoint, error)
            finally:
                if prepared:
                    await self._write_last(clock)
        finally:
            await self._database.close()

    async def write(self, now: datetime) -> None:
        """Write the rows of the minutes and hours that have ended by `now`, and delete a few old rows."""
        snapshot, minute = self.snapshot(), to_microseconds(now) // MICROS_A_MINUTE
        for scale in SCALES:
            start, base = self._bases[scale]
            if minute // scale * scale > start:
                await self._put(scale, start, difference(self._process, scale, start, base, snapshot, now))
                self._bases[scale] = minute // scale * scale, snapshot
        await self._database.write(lambda connection: self._delete_old(connection, snapshot.endpoint, minute))

    def _begin(self, now: datetime) -> None:
        minute = to_microseconds(now) // MICROS_A_MINUTE
        self._bases = {scale: (minute // scale * scale, self._first) for scale in SCALES}

    async def _write_last(self, clock: Clock) -> None:
        """Write the rest of the minute and the hour; shielded, as the endpoint is stopping."""
        snapshot, now = self.snapshot(), clock.now()

        async def put() -> None:
            for scale, (start, base) in self._bases.items():
                await self._put(scale, start, difference(self._process, scale, start, base, snapshot, now))

        try:
            async with asyncio.timeout(LAST_ROW_WITHIN):
                await asyncio.shield(asyncio.ensure_future(put()))
        except (DelaylineError, TimeoutError) as error:
            log_text = "The last minute row of endpoint %s was not written: %s"
            emit(logger, logging.WARNING, Event.BACKGROUND_TASK_FAILED, log_text, snapshot.endpoint, error)

    async def _put(self, scale: int, start: int, row: MinuteRow) -> None:
        table, endpoint = minutes_table(self._schema), self.snapshot().endpoint
        key = {"endpoint": endpoint, "scale": scale, "minute": start, "process": self._process}
        same = and_(*(table.c[name] == value for name, value in key.items()))

        def put(connection: Connection) -> None:
            connection.execute(delete(table).where(same))
            connection.execute(insert(table).values(**key, content=encoded(row)))

        await self._database.write(put)

    def _delete_old(self, connection: Connection, endpoint: str, minute: int) -> None:
        """Delete rows that are too old, of some hours at a time."""
        table = minutes_table(self._schema)
        oldest_kept = minute - self._kept_for // timedelta(minutes=1)
        for scale in SCALES:
            mine = and_(table.c.endpoint == endpoint, table.c.scale == scale)
            first = connection.execute(select(func.min(table.c.minute)).where(mine)).scalar()
            if first is not None and first < oldest_kept:
                until = min(oldest_kept, int(first) + DELETED_AT_ONCE * scale)
                connection.execute(delete(table).where(mine, table.c.minute < until))


def process_name() -> str:
    """Return a name of this process, on this machine and since this start."""
    return f"{socket.gethostname()[:80]}:{os.getpid()}:{secrets.token_hex(3)}"


def read_minutes(
    connection: Connection,
    schema: str | None,
    endpoint: str,
    start: datetime,
    end: datetime,
    *,
    scale: int = 1,
    limit: int = 20_000,
) -> list[MinuteRow] | None:
    """Return the rows of all processes from `start` on and before `end`, earliest first.

    None if the table does not exist. The latest `limit` rows at most; rows that cannot be read are left out.
    """
    table = minutes_table(schema)
    if not inspect(connection).has_table(table.name, schema=table.schema):
        return None
    first, last = (to_microseconds(due) // MICROS_A_MINUTE for due in (start, end))
    query = select(table.c.process, table.c.minute, table.c.content).where(
        table.c.endpoint == endpoint, table.c.scale == scale, table.c.minute >= first, table.c.minute < last
    )
    rows = connection.execute(query.order_by(table.c.minute.desc()).limit(limit)).all()
    minutes = (decoded(process, int(minute), scale, bytes(content)) for process, minute, content in reversed(rows))
    return [row for row in minutes if row is not None]


def difference(process: str, scale: int, start: int, before: Snapshot, after: Snapshot, now: datetime) -> MinuteRow:
    """Return the row with the counts between two snapshots."""
    lateness = {}
    for destination, histogram in after.lateness.items():
        base = before.lateness.get(destination)
        counts = [number - (base.counts[index] if base else 0) for index, number in enumerate(histogram.counts)]
        if any(counts):
            lateness[destination] = counts

    def handled(snapshot: Snapshot, *, failed: bool) -> int:
        return sum(histogram.count for (_, error), histogram in snapshot.handled.items() if bool(error) is failed)

    def sent(snapshot: Snapshot) -> int:
        return sum(number for (_, _, error), number in snapshot.sent.items() if not error)

    def moved(snapshot: Snapshot) -> int:
        return sum(number for (action, _), number in snapshot.recovered.items() if action is Action.MOVED)

    return MinuteRow(
        process=process,
        start=from_microseconds(start * MICROS_A_MINUTE),
        minutes=scale,
        written=now,
        sent=sent(after) - sent(before),
        dispatched=after.dispatched - before.dispatched,
        handled=handled(after, failed=False) - handled(before, failed=False),
        failed=handled(after, failed=True) - handled(before, failed=True),
        moved=moved(after) - moved(before),
        uncounted=after.uncounted - before.uncounted,
        lateness=lateness,
        poller=_on_clock(after.polling, after, now),
        receivers={queue: _on_clock(receiving, after, now) for queue, receiving in after.receiving.items()},
        running_handlers=after.running_handlers,
        breakers=dict(after.breakers),
        measures=dict(after.measures),
    )


def _on_clock(activity: Activity, snapshot: Snapshot, now: datetime) -> datetime | None:
    """Return when a part last succeeded on the clock of the rows, which may not be the machine's."""
    last = activity.last_success_utc
    return None if last is None else now - (snapshot.taken - last)


def encoded(row: MinuteRow) -> bytes:
    """Return a row's content, compressed."""
    content = {
        "written": to_microseconds(row.written),
        "counts": [row.sent, row.dispatched, row.handled, row.failed, row.moved, row.uncounted],
        "lateness": {
            name: {index: number for index, number in enumerate(counts) if number}
            for name, counts in row.lateness.items()
        },
        "poller": None if row.poller is None else to_microseconds(row.poller),
        "receivers": {name: None if at is None else to_microseconds(at) for name, at in row.receivers.items()},
        "handlers": row.running_handlers,
        "breakers": row.breakers,
        "measures": row.measures,
    }
    return zlib.compress(json.dumps(content, separators=(",", ":")).encode())


@lru_cache(maxsize=ROWS_KEPT)
def decoded(process: str, minute: int, scale: int, content: bytes) -> MinuteRow | None:
    """Return the row, or None for content that cannot be read: another version's, or damaged."""

    def time(kept: Any) -> datetime | None:  # noqa: ANN401 - what JSON has
        return None if kept is None else from_microseconds(int(kept))

    try:
        document = json.loads(zlib.decompressobj().decompress(content, LARGEST_CONTENT))
        sent, dispatched, handled, failed, moved, uncounted = map(int, document["counts"])
        lateness = {}
        for name, counts in document["lateness"].items():
            buckets = [0] * (len(LATENESS_BOUNDS) + 1)
            for index, number in counts.items():
                buckets[int(index)] += int(number)
            lateness[str(name)] = buckets
        return MinuteRow(
            process=str(process),
            start=from_microseconds(minute * MICROS_A_MINUTE),
            minutes=scale,
            written=from_microseconds(int(document["written"])),
            sent=sent,
            dispatched=dispatched,
            handled=handled,
            failed=failed,
            moved=moved,
            uncounted=uncounted,
            lateness=lateness,
            poller=time(document["poller"]),
            receivers={str(name): time(at) for name, at in document["receivers"].items()},
            running_handlers=int(document["handlers"]),
            breakers={str(name): int(state) for name, state in document["breakers"].items()},
            measures={str(name): float(value) for name, value in document["measures"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, zlib.error):
        return None
