"""Limits of a queue over all processes: pauses, the messages that are handled at once, and the rate."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from sqlalchemy import bindparam, func, select, update

from delayline.checks import whole_number
from delayline.clock import to_microseconds
from delayline.errors import ConfigurationError, QueueNotFound
from delayline.external import UNSET
from delayline.sql.prepared import Prepared
from delayline.transport import QueueLimits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy import Connection

    from delayline.external import Unset
    from delayline.sql.database import Database
    from delayline.sql.dialect import Claims, Dialect
    from delayline.sql.schema import QueueTables

READ_EVERY: Final = 0.5  # seconds until a receiver reads its queue's limits again
LIMITS_CHANGED: Final = -1  # the time in a notification of a queue whose limits have changed
WAIT: Final = 0.5  # seconds that it waits where they admit nothing
SECOND: Final = 1_000_000  # microseconds
MOST_SLOTS: Final = 10_000
HIGHEST_RATE: Final = 1_000_000
BURST: Final = SECOND // 10  # microseconds at rest for which messages may follow at once
ATTEMPTS: Final = 20  # to advance a rate that other processes advance too


class LimitStatements:
    """The statements on the limits in the registry of queues."""

    def __init__(self, tables: QueueTables, dialect: Dialect) -> None:
        columns, sql, named = tables.queues.c, dialect.sql, tables.queues.c.name == bindparam("queue")
        kept = select(columns.name, columns.paused, columns.concurrency, columns.period)
        self.all = Prepared(kept.order_by(columns.name), sql, [])
        self.one = Prepared(kept.where(named), sql, ["queue"])
        self.next_at = Prepared(select(func.coalesce(columns.next_at, 0)).where(named), sql, ["queue"])
        unchanged = func.coalesce(columns.next_at, 0) == bindparam("before")
        advance = update(tables.queues).where(named, unchanged).values(next_at=bindparam("after"))
        self.advance = Prepared(advance, sql, ["after", "queue", "before"])
        self.change = {
            name: Prepared(
                update(tables.queues).where(named).values({name: bindparam("value")}), sql, ["value", "queue"]
            )
            for name in ("paused", "concurrency", "period")
        }

    def limits(self, connection: Connection, queue: str) -> QueueLimits:
        """Return the limits of the queue. Raises QueueNotFound."""
        rows = self.one.rows(connection, queue)
        if not rows:
            raise QueueNotFound(queue)
        return limits_of(rows[0])


def limits_of(row: Sequence[object]) -> QueueLimits:
    """Return the limits in a row of the registry."""
    name, paused, concurrency, period = row
    rate = SECOND / period if isinstance(period, int) and period else None
    return QueueLimits(str(name), paused=bool(paused), concurrency=concurrency or None, rate=rate)  # type: ignore[arg-type]


def checked_changes(
    paused: bool | Unset, concurrency: int | Unset | None, rate: float | Unset | None
) -> dict[str, int | None]:
    """Return the columns that change, by name. Raises ConfigurationError for a value out of range."""
    changes: dict[str, int | None] = {}
    if paused is not UNSET:
        changes["paused"] = 1 if paused else None
    if concurrency is not UNSET:
        changes["concurrency"] = None if concurrency is None else _slots(concurrency)
    if rate is not UNSET:
        changes["period"] = None if rate is None else _period(rate)
    return changes


def _slots(concurrency: int) -> int:
    number = whole_number("concurrency", concurrency, at_least=1)
    if number > MOST_SLOTS:
        raise ConfigurationError(
            f"concurrency must be at most {MOST_SLOTS:,}, not {number:,}: leave it out for no limit"
        )
    return number


def _period(rate: object) -> int:
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 1e-6 <= rate <= HIGHEST_RATE:
        raise ConfigurationError(f"rate must be messages a second, above 0 and up to {HIGHEST_RATE:,}, not {rate!r}")
    return round(SECOND / rate)


class QueueAdmission:
    """Admits messages of one queue to one receiver, within the queue's limits. Belongs to one event loop."""

    def __init__(self, database: Database, statements: LimitStatements, queue: str, slots: str) -> None:
        self._database = database
        self._statements = statements
        self._queue = queue
        self._slots_name = slots
        self._limits = QueueLimits(queue)
        self._read_at = -math.inf
        self._free: list[int] = []
        """Slots that this receiver holds for messages that it is about to receive."""
        self._slots: dict[int, int] = {}
        """The slot of each message that is handled."""
        self._credit = 0
        """Messages that the rate has admitted and that were not there."""

    @property
    def wait(self) -> float | None:
        """Seconds to wait after nothing was admitted; None where the queue has no limits."""
        limits = self._limits
        if limits.rate is not None and not limits.paused:
            return min(WAIT, 1 / limits.rate)
        return WAIT if limits.paused or limits.concurrency is not None else None

    def expire(self) -> None:
        """Read the limits again before the next message."""
        self._read_at = -math.inf

    async def admit(self, number: int) -> int:
        """Return how many messages may be received now, at most `number`; `received` has to follow.

        A queue that had no limits is taken to have none; `confirm` has to follow too.
        """
        if self._is_limited:
            await self._read()
        if self._limits.paused:
            return 0
        if self._limits.concurrency is not None:
            await self._database.read(lambda _: self._take_slots(number))
            number = len(self._free)
        if self._limits.rate is not None and number:
            if self._credit < number:
                reserve = partial(self._reserve, wanted=number - self._credit)
                self._credit += await self._database.write(reserve)
            number = min(number, self._credit)
        return number

    async def confirm(self) -> bool:
        """Return whether the messages that were found may be received; False if the queue has had limits for a while.

        An empty queue is not asked for its limits: an endpoint at rest asks for little.
        """
        if self._is_limited:
            return True
        await self._read()
        return not self._is_limited

    async def _read(self) -> None:
        if time.monotonic() - self._read_at >= READ_EVERY:
            self._limits = await self._database.read(partial(self._statements.limits, queue=self._queue))
            self._read_at = time.monotonic()

    @property
    def _is_limited(self) -> bool:
        return self._limits != QueueLimits(self._queue)

    def received(self, messages: Sequence[int]) -> None:
        """Count messages that were received; by their row numbers."""
        self._credit = max(0, self._credit - len(messages))
        for message in messages:
            if self._free:
                self._slots[message] = self._free.pop()
        self._give_back(self._free)
        self._free = []

    def ended(self, messages: Iterable[int]) -> bool:
        """Give back the slots of messages that are not handled any more; return whether there were any."""
        if not self._slots:
            return False
        slots = [slot for message in messages if (slot := self._slots.pop(message, None)) is not None]
        self._give_back(slots)
        return bool(slots)

    def _take_slots(self, number: int) -> None:
        slots = range(1, (self._limits.concurrency or 0) + 1)
        self._free += self._claims.take(slots, max(0, number - len(self._free)))

    def _give_back(self, slots: list[int]) -> None:
        if slots:
            self._claims.release(slots)

    @property
    def _claims(self) -> Claims:
        return self._database.claims(self._slots_name)

    def _reserve(self, connection: Connection, wanted: int) -> int:
        """Return how many messages the rate admits now, and advance it by as many."""
        period = SECOND / (self._limits.rate or HIGHEST_RATE)
        for _ in range(ATTEMPTS):
            now = to_microseconds(self._database.clock.now())
            before = int(self._statements.next_at.one(connection, self._queue) or 0)
            start = max(before, now - BURST)
            number = min(wanted, int((now - start) / period) + 1) if start <= now else 0
            if not number:
                return 0
            after = round(start + number * period)
            if self._statements.advance.change(connection, after, self._queue, before):
                return number
        return 0
