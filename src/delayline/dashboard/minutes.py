"""What all processes of an endpoint did, minute by minute: their rows added up, however many processes there are."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from operator import add
from typing import TYPE_CHECKING, Final

from delayline.clock import EPOCH, ONE_HOUR, ONE_MINUTE
from delayline.errors import ConfigurationError
from delayline.telemetry.history import MinuteRow, read_minutes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime, timedelta

    from delayline.dashboard.back_ends import BackEnds

NO_HISTORY: Final = (
    "no process of this endpoint has written minute rows: set history = true, or add MinuteHistory to its observers"
)
MINUTE_ROWS: Final = "this is made of minute rows, which are"
#: Rows of a process in a piece, which is read at once: of two thousand processes it is within the limit of a reading.
PIECE: Final = 10
#: How late a process may write the row of a minute; a piece that was read later is not read again.
WRITTEN_WITHIN: Final = ONE_HOUR
#: Pieces that are kept: of a day's minutes, and of a month's hours.
PIECES_KEPT: Final = 240


class MinuteSums:
    """The minute rows of an endpoint, those of all processes added up; what is over is read once.

    Args:
        back_ends: Where they are.
    """

    def __init__(self, back_ends: BackEnds) -> None:
        self._back_ends = back_ends
        self._pieces: dict[tuple[int, int], list[MinuteRow]] = {}
        self._reading = asyncio.Lock()

    async def between(self, start: datetime, end: datetime, *, scale: int = 1) -> list[MinuteRow]:
        """Return a row without a process for each minute, or hour, in which any process has written one.

        Args:
            start: The first minute.
            end: The minute to end before.
            scale: Minutes that a row covers: 1, or 60.

        Raises:
            ConfigurationError: No rows are kept.
        """
        width = PIECE * scale * ONE_MINUTE
        rows: list[MinuteRow] = []
        async with self._reading:
            for number in range((start - EPOCH) // width, -((EPOCH - end) // width)):
                rows += await self._piece(scale, number, width)
        return [row for row in rows if start <= row.start < end]

    async def _piece(self, scale: int, number: int, width: timedelta) -> list[MinuteRow]:
        if (known := self._pieces.get((scale, number))) is not None:
            return known
        start = EPOCH + number * width
        read_at = await self._back_ends.time()
        rows = added_up(await rows_of(self._back_ends, start, start + width, scale=scale))
        if read_at >= start + width + WRITTEN_WITHIN:
            self._pieces[scale, number] = rows
            while len(self._pieces) > PIECES_KEPT:
                del self._pieces[min(self._pieces, key=lambda key: (key[0] * key[1], key))]
        return rows


async def rows_of(back_ends: BackEnds, start: datetime, end: datetime, *, scale: int = 1) -> list[MinuteRow]:
    """Return the rows of each process. Raises ConfigurationError if none are kept."""
    rows = await back_ends.sql_store(MINUTE_ROWS).read_tables(
        lambda connection, _, schema: read_minutes(connection, schema, back_ends.name, start, end, scale=scale)
    )
    if rows is None:
        raise ConfigurationError(NO_HISTORY)
    return rows


def added_up(rows: Iterable[MinuteRow]) -> list[MinuteRow]:
    """Return a row for each time, with what all processes did and without the state of any."""
    by_start: defaultdict[datetime, list[MinuteRow]] = defaultdict(list)
    for row in rows:
        by_start[row.start].append(row)
    return [_sum(by_start[start]) for start in sorted(by_start)]


def _sum(rows: list[MinuteRow]) -> MinuteRow:
    lateness: dict[str, list[int]] = {}
    for row in rows:
        for name, counts in row.lateness.items():
            known = lateness.get(name)
            lateness[name] = list(counts) if known is None else list(map(add, known, counts))
    return MinuteRow(
        process="",
        start=rows[0].start,
        minutes=rows[0].minutes,
        written=max(row.written for row in rows),
        sent=sum(row.sent for row in rows),
        dispatched=sum(row.dispatched for row in rows),
        handled=sum(row.handled for row in rows),
        failed=sum(row.failed for row in rows),
        moved=sum(row.moved for row in rows),
        uncounted=sum(row.uncounted for row in rows),
        lateness=lateness,
    )
