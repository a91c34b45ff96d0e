"""The limits of queues: pauses, concurrency and rate, within which receivers receive."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import bindparam, func, select, update

from delayline.checks import whole_number
from delayline.clock import to_microseconds
from delayline.errors import ConfigurationError, QueueNotFound
from delayline.events import Event, emit
from delayline.external import UNSET
from delayline.sql.prepared import Prepared
from delayline.transport import QueueLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from sqlalchemy import Connection

    from delayline.external import Unset
    from delayline.sql.claims import Claims
    from delayline.sql.database import Database
    from delayline.sql.dialect import Dialect
    from delayline.sql.schema import QueueTables

logger: logging.Logger = logging.getLogger(__name__)

LIMITS_READ_EVERY: Final = 0.5  # seconds until a receiver reads its queue's limits again
LIMITS_CHANGED: Final = -1  # the time in a notification of a queue whose limits have changed
WAIT: Final = 0.5  # seconds that it waits where they admit nothing
MICROSECONDS_A_SECOND: Final = 1_000_000  # microseconds
MOST_SLOTS: Final = 10_000
CLAIMED_AT_ONCE: Final = 100  # slots of a handler, to count taken slots: a server has room for some thousands
HIGHEST_RATE: Final = 1_000_000
BURST: Final = MICROSECONDS_A_SECOND // 10  # idle microseconds for which messages may follow at once
ADVANCE_ATTEMPTS: Final = 20  # to advance a rate that other processes advance too


class LimitStatements:
    """The statements on the limits in the registry of queues."""

    def __init__(self, tables: QueueTables, dialect: Dialect) -> None:
        columns, sql, named = tables.queues.c, dialect.sql, tables.queues.c.name == bindparam("queue")
        kept = select(columns.name, columns.paused, columns.concurrency, columns.period, columns.handlers)
        self.all: Prepared = Prepared(kept.order_by(columns.name), sql, [])
        self.one: Prepared = Prepared(kept.where(named), sql, ["queue"])
        self.next_at: Prepared = Prepared(select(func.coalesce(columns.next_at, 0)).where(named), sql, ["queue"])
        unchanged = func.coalesce(columns.next_at, 0) == bindparam("before")
        advance = update(tables.queues).where(named, unchanged).values(next_at=bindparam("after"))
        self.advance: Prepared = Prepared(advance, sql, ["after", "queue", "before"])
        self.lock: Prepared = Prepared(
            update(tables.queues).where(named).values(handlers=columns.handlers), sql, ["queue"]
        )
        """Locks the row until the transaction ends, so that concurrent changes follow each other."""
        self.change: dict[str, Prepared] = {
            name: Prepared(
                update(tables.queues).where(named).values({name: bindparam("value")}), sql, ["value", "queue"]
            )
            for name in ("paused", "concurrency", "period", "handlers")
        }

    def limits(self, connection: Connection, queue: str) -> QueueLimits:
        """Return the limits of the queue. Raises QueueNotFound."""
        rows = self.one.rows(connection, queue)
        if not rows:
            raise QueueNotFound(queue)
        return limits_of(rows[0])


@lru_cache(maxsize=64)
def limit_statements(tables: QueueTables, dialect: Dialect) -> LimitStatements:
    """Return the statements of the tables, compiled once for every transport on them."""
    return LimitStatements(tables, dialect)


def limits_of(row: Sequence[object]) -> QueueLimits:
    """Return the limits in a row of the registry."""
    name, paused, concurrency, period, handlers = row
    rate = MICROSECONDS_A_SECOND / period if isinstance(period, int) and period else None
    of_types = _limits_of_types(str(name), handlers) if handlers else {}
    return QueueLimits(str(name), bool(paused), concurrency or None, rate, dict(of_types))  # type: ignore[arg-type]


@lru_cache(maxsize=1000)  # the same text is parsed, and logged where it is unusable, once
def _limits_of_types(queue: str, text: object) -> Mapping[str, int]:
    """Return the limits of types in the registry; none if the text is unusable, as after a change by hand."""
    try:
        limits: Any = json.loads(text) if isinstance(text, str) else text
        return {name: _slots(number) for name, number in checked_handlers(limits).items() if number is not None}
    except (ValueError, RecursionError, ConfigurationError) as error:
        problem = "Limits of types are ignored: column 'handlers' of queue %r in delayline_queues is unusable: %s"
        emit(logger, logging.ERROR, Event.LIMITS_UNUSABLE, problem, queue, error, queue=queue)
        return {}


def checked_handlers(handlers: Mapping[str, int | None] | Unset) -> Mapping[str, int | None]:
    """Return the limits of types that change. Raises ConfigurationError for a value out of range or an empty name."""
    if handlers is UNSET:
        return {}
    if not isinstance(handlers, Mapping):
        raise ConfigurationError(f"handlers must be numbers by the name of a type, not {handlers!r}")
    for name, number in handlers.items():
        if not isinstance(name, str) or not name.strip():
            raise ConfigurationError(f"handlers must be numbers by the name of a type; {name!r} is not one")
        if number is not None:
            _slots(number, f"concurrency of {name!r}")
    return handlers


def merged(kept: Mapping[str, int], changes: Mapping[str, int | None]) -> str | None:
    """Return the text in the registry for limits of types with the changes."""
    after = {name: number for name, number in {**kept, **changes}.items() if number is not None}
    return json.dumps(after, sort_keys=True) if after else None


def checked_changes(
    paused: bool | Unset, concurrency: int | Unset | None, rate: float | Unset | None
) -> dict[str, int | str | None]:
    """Return the columns that change, by name. Raises ConfigurationError for a value out of range."""
    changes: dict[str, int | str | None] = {}
    if paused is not UNSET:
        changes["paused"] = 1 if paused else None
    if concurrency is not UNSET:
        changes["concurrency"] = None if concurrency is None else _slots(concurrency)
    if rate is not UNSET:
        changes["period"] = None if rate is None else _period(rate)
    return changes


def _slots(concurrency: int, setting: str = "concurrency") -> int:
    number = whole_number(setting, concurrency, at_least=1)
    if number > MOST_SLOTS:
        raise ConfigurationError(f"{setting} must be at most {MOST_SLOTS:,}, not {number:,}: leave it out for no limit")
    return number


def _period(rate: object) -> int:
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 1e-6 <= rate <= HIGHEST_RATE:
        raise ConfigurationError(f"rate must be messages a second, above 0 and up to {HIGHEST_RATE:,}, not {rate!r}")
    return round(MICROSECONDS_A_SECOND / rate)


class SqlHandlerSlots:
    """The slots of a type of message, each of them claimed by the process that uses it."""

    def __init__(
        self, database: Database, name: str, number: int, read_limits: Callable[[], Coroutine[object, object, None]]
    ) -> None:
        self._database = database
        self._name = name
        self._number = self._highest = number
        self._read_limits = read_limits

    def resize(self, number: int) -> None:
        """Change how many slots there are; taken slots above that are counted until they are free."""
        self._number, self._highest = number, max(number, self._highest)

    async def take(self) -> int | None:
        """Return a free slot; None while all are claimed."""
        await self._read_limits()
        return await self._database.read(lambda _: self._take())

    def _take(self) -> int | None:
        number, highest = self._number, self._highest
        slots = self._claims.take(range(1, number + 1), 1)
        if slots and highest > number:
            if not (above := self._taken(number + 1, highest)):
                self._highest = max(number, self._number)  # which may have changed meanwhile
            elif above + self._taken(1, number) > number:
                self._claims.release(slots)
                return None
        return slots[0] if slots else None

    def _taken(self, first: int, last: int) -> int:
        """Return how many of the slots are claimed, in all processes: slots that cannot be claimed here."""
        taken = 0
        for start in range(first, last + 1, CLAIMED_AT_ONCE):
            some = range(start, min(start + CLAIMED_AT_ONCE, last + 1))
            free = self._claims.take(some, len(some))
            self._claims.forget(free)
            self._claims.flush()
            taken += len(some) - len(free)
        return taken

    async def give_back(self, slot: int) -> None:
        """Free a slot."""
        self._claims.release([slot])
        await self._database.read(lambda _: self._claims.flush())

    @property
    def _claims(self) -> Claims:
        return self._database.claims(self._name)


class QueueAdmission:
    """Admits messages of a queue to a receiver, within the queue's limits. Belongs to an event loop."""

    def __init__(self, database: Database, statements: LimitStatements, queue: str, slots: str) -> None:
        self._database = database
        self._statements = statements
        self._queue = queue
        self._slots_name = slots
        self._limits = QueueLimits(queue)
        self.read_at: float = -math.inf
        """When the limits were last read, by `time.monotonic`."""
        self._is_outdated = True
        self._free: list[int] = []
        """Slots that this receiver holds for messages that it is about to receive."""
        self._slots: dict[int, int] = {}
        """The slot of each message that is handled."""
        self._credit = 0
        """Messages that the rate has admitted and that were not there."""
        self._in_code: Mapping[str, int] = {}
        self._handler_slots: dict[str, SqlHandlerSlots] = {}

    def handler_slots(self, numbers: Mapping[str, int]) -> Mapping[str, SqlHandlerSlots]:
        """Return the slots of types, updated whenever limits are read; `numbers` hold where the registry has none."""
        self._in_code = numbers
        self._resize_handlers()
        return self._handler_slots

    @property
    def wait(self) -> float | None:
        """Seconds to wait after nothing was admitted; None where the queue has no limits."""
        limits = self._limits
        if limits.rate is not None and not limits.paused:
            return min(WAIT, 1 / limits.rate)
        return WAIT if limits.paused or limits.concurrency is not None else None

    def expire(self) -> None:
        """Read the limits again before the next message."""
        self._is_outdated = True

    async def admit(self, number: int) -> int:
        """Return how many messages may be received now, at most `number`; `received` has to follow.

        A queue that had no limits is assumed to have none; `confirm` has to follow too.
        """
        if self.is_limited:
            await self.read()
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

        Skipped while the queue is empty, to keep idle endpoints cheap.
        """
        if self.is_limited:
            return True
        await self.read()
        return not self.is_limited

    async def read(self) -> None:
        """Read the limits again if it is time for that."""
        if self._is_outdated or time.monotonic() - self.read_at >= LIMITS_READ_EVERY:
            self._limits = await self._database.read(partial(self._statements.limits, queue=self._queue))
            self._is_outdated, self.read_at = False, time.monotonic()
            self._resize_handlers()

    def _resize_handlers(self) -> None:
        numbers = {**self._in_code, **self._limits.handlers}
        for name in self._handler_slots.keys() - numbers.keys():
            del self._handler_slots[name]
        for name, number in numbers.items():
            if name in self._handler_slots:
                self._handler_slots[name].resize(number)
            else:
                claims = f"{self._slots_name} by {name}"
                self._handler_slots[name] = SqlHandlerSlots(self._database, claims, number, self.read)

    @property
    def is_limited(self) -> bool:
        """Whether the queue has limits, or is paused."""
        return self._limits.paused or self._limits.concurrency is not None or self._limits.rate is not None

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
        period = MICROSECONDS_A_SECOND / (self._limits.rate or HIGHEST_RATE)
        for _ in range(ADVANCE_ATTEMPTS):
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
