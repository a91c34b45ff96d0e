"""Counts deliveries that ended without an outcome, as when a message has killed the process that handled it.

Nothing is written for ordinary messages. A receiver is a row, and a claim on its number that ends with its process.
When a receiver starts it looks for rows without a claim: receivers that have crashed. Which messages they handled is
unknown, but receivers start messages in the order of their numbers, so it was some of the first unclaimed messages, as
many as are handled at once. Only of such messages each further delivery is noted before it begins, and counted when the
message is received again with that note still there.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

from sqlalchemy import bindparam, delete, insert, select, update

from delayline.errors import BackendUnavailable, DelaylineError
from delayline.events import Event, emit
from delayline.sql.prepared import Prepared

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from sqlalchemy import Connection

    from delayline.sql.claims import Claims
    from delayline.sql.database import Database
    from delayline.sql.dialect import Dialect
    from delayline.sql.schema import QueueTables
    from delayline.sql.statements import QueueStatements

logger: logging.Logger = logging.getLogger(__name__)

#: The numbers of receivers are above the numbers of messages, whose claims they share.
FIRST_NUMBER: Final = 1 << 39
#: Seconds until the suspects are read again, while messages are received.
CRASHES_READ_EVERY: Final = 0.5
MOST_SUSPECTS: Final = 10_000
#: Message numbers that are looked at together, and at most, for messages that a crashed receiver may have handled.
NUMBERS_A_LOOK: Final = 500
MOST_LOOKED_AT: Final = 20_000
UNCOUNTED: Final = (
    "Deliveries of %s that end with their process are not counted: %s. A message that kills its process will be "
    "received again and again"
)


class CrashStatements:
    """The statements on receivers and suspects."""

    def __init__(self, tables: QueueTables, dialect: Dialect) -> None:
        receivers, suspects, sql = tables.receivers, tables.suspects, dialect.sql
        numbered, of_queue = receivers.c.number == bindparam("receiver"), suspects.c.queue == bindparam("name")
        by_numbers = dialect.words.one_of(suspects.c.seq, "numbers")
        queued = tables.queued.c.seq
        others = select(receivers.c.number, receivers.c.concurrency).where(
            receivers.c.queue == bindparam("name"), receivers.c.number != bindparam("receiver")
        )
        count, holder = (
            bindparam("count", type_=suspects.c.crashes.type),
            bindparam("holder", type_=receivers.c.number.type),
        )
        self.register: Prepared = Prepared(insert(receivers), sql, ["number", "queue", "concurrency"])
        self.unregister: Prepared = Prepared(delete(receivers).where(numbered), sql, ["receiver"])
        self.others: Prepared = Prepared(others, sql, ["name", "receiver"])
        self.add: Prepared = Prepared(insert(suspects), sql, ["seq", "queue", "crashes", "receiver"])
        self.of_queue: Prepared = Prepared(select(suspects.c.seq, suspects.c.receiver).where(of_queue), sql, ["name"])
        self.counts: Prepared = Prepared(
            select(suspects.c.seq, suspects.c.crashes, suspects.c.receiver).where(by_numbers), sql, ["numbers"]
        )
        self.note: Prepared = Prepared(
            update(suspects).where(suspects.c.seq == bindparam("suspect")).values(crashes=count, receiver=holder),
            sql,
            ["count", "holder", "suspect"],
        )
        self.clear: Prepared = Prepared(update(suspects).where(by_numbers).values(receiver=0), sql, ["numbers"])
        self.remove: Prepared = Prepared(delete(suspects).where(by_numbers), sql, ["numbers"])
        self.there: Prepared = Prepared(select(queued).where(dialect.words.one_of(queued, "numbers")), sql, ["numbers"])


@lru_cache(maxsize=64)
def crash_statements(tables: QueueTables, dialect: Dialect) -> CrashStatements:
    """Return the statements of the tables, compiled once for every transport on them."""
    return CrashStatements(tables, dialect)


class CrashCounts:
    """The count of a receiver's queue. Belongs to an event loop.

    Where the tables cannot be used, as before an upgrade of the database, nothing is counted, and the log says so once.
    """

    def __init__(
        self, database: Database, statements: CrashStatements, messages: QueueStatements, claims: Claims, queue: str
    ) -> None:
        self._database = database
        self._statements = statements
        self._messages = messages
        self._claims = claims
        self._queue = queue
        self._number: int | None = None
        """The receiver's; None before its first look."""
        self._is_counting = True
        self._closed = asyncio.Event()
        self._suspects: set[int] = set()
        self._counts: dict[int, int] = {}
        """How many deliveries of suspects that are held here ended without an outcome."""
        self._noted: set[int] = set()
        self._read_at = 0.0

    async def open(self, concurrency: int) -> None:
        """Note that the receiver runs, and find receivers that have crashed. Idempotent.

        Args:
            concurrency: How many messages are handled at once.

        Raises:
            BackendUnavailable: The database does not answer.
        """
        if self._number is None and self._is_counting and not self._closed.is_set():
            try:
                await self._count(self._open(concurrency))
            finally:
                if self._closed.is_set():  # while the row was written, and so it found none to delete
                    await self.close()

    async def close(self) -> None:
        """Note that the receiver stops in order: what it still handles is not counted."""
        self._closed.set()
        number, self._number = self._number, None
        if number is None:
            return
        try:
            await self._note_briefly(lambda connection: self._statements.unregister.change(connection, number))
        except DelaylineError:  # then it looks like a crash, which costs the first messages a note each
            pass
        finally:
            self._claims.release([number])

    def expire(self) -> None:
        """Read the suspects again before the next message."""
        self._read_at = 0.0

    async def of(self, numbers: Iterable[int]) -> Mapping[int, int]:
        """Return how many deliveries of claimed messages ended without an outcome; 0 is left out."""
        if self._number is None:
            return {}
        if time.monotonic() - self._read_at >= CRASHES_READ_EVERY:
            await self._count(self._read())
        if not self._suspects or not (suspects := self._suspects.intersection(numbers)):
            return {}
        rows = await self._database.read(partial(self._statements.counts.rows_each, keys=sorted(suspects)))
        counts = {seq: crashes + (receiver not in (0, self._number)) for seq, crashes, receiver in rows}
        self._counts |= counts
        return counts

    async def begin(self, number: int) -> None:
        """Note that a suspect is handled now, durably on return."""
        count = self._counts.get(number)
        if self._number is None or count is None:
            return
        holder = self._number
        self._noted.add(number)
        await self._database.write(
            lambda connection: self._statements.note.change(connection, count, holder, number), one_statement=True
        )

    async def released(self, numbers: Sequence[int]) -> None:
        """Note that messages go back to the queue in order; before others can have them."""
        noted = self._noted.intersection(numbers)
        if noted:
            self._noted -= noted
            await self._database.write(partial(self._statements.clear.change_each, keys=sorted(noted)))

    def handled(self, numbers: Sequence[int]) -> Sequence[int]:
        """Forget messages that are gone; return the suspects among them, whose rows can be deleted."""
        if not self._suspects:
            return ()
        gone = self._suspects.intersection(numbers)
        self._suspects -= gone
        self._noted -= gone
        for number in gone:
            self._counts.pop(number, None)
        return sorted(gone)

    async def remove(self, numbers: Sequence[int]) -> None:
        """Delete the rows of suspects that were handled."""
        await self._database.write(partial(self._statements.remove.change_each, keys=numbers))

    async def _count(self, work: Awaitable[None]) -> None:
        try:
            await work
        except BackendUnavailable:
            raise
        except DelaylineError as error:  # no such tables, or no rights on them
            self._is_counting, self._number = False, None
            emit(logger, logging.WARNING, Event.CRASHES_UNCOUNTED, UNCOUNTED, self._queue, error, queue=self._queue)

    async def _open(self, concurrency: int) -> None:
        number = FIRST_NUMBER + secrets.randbelow(FIRST_NUMBER)
        await self._database.read(lambda _: self._claims.take([number], 1))  # before others can see the row
        try:
            await self._note_briefly(
                lambda connection: self._statements.register.change(connection, number, self._queue, concurrency)
            )
            self._number = number
            others = await self._database.read(
                lambda connection: self._statements.others.rows(connection, self._queue, number)
            )
            if others:
                await self._look_for_crashes(dict(others))
        except BaseException:
            if self._number is None:
                self._claims.release([number])
            raise
        await self._read()

    async def _note_briefly(self, note: Callable[[Connection], int]) -> None:
        """Write a note of the receiver's that a start and a stop must not wait for."""

        def briefly(connection: Connection) -> None:
            with self._database.dialect.transactions.waiting_briefly(connection):
                note(connection)

        await self._database.write(briefly)

    async def _look_for_crashes(self, others: Mapping[int, int]) -> None:
        taken: list[int] = []
        try:
            await self._database.write(partial(self._suspect, others=others, taken=taken))
        finally:
            self._claims.release(taken)

    def _suspect(self, connection: Connection, others: Mapping[int, int], taken: list[int]) -> None:
        """Note the messages that receivers without a claim may have handled; their rows are deleted."""
        statements = self._statements
        crashed = self._claims.take(others, len(others))
        taken += crashed
        if not crashed:
            return
        known = dict(map(tuple, statements.of_queue.rows(connection, self._queue)))
        existing = {seq for (seq,) in statements.there.rows_each(connection, keys=sorted(known))}
        statements.remove.change_each(connection, keys=sorted(known.keys() - existing))
        wanted = 0
        for number in crashed:
            if statements.unregister.change(connection, number) and number not in known.values():
                wanted += others[number]
        after = looked_at = 0
        while wanted > 0 and looked_at < MOST_LOOKED_AT:
            page = [seq for (seq,) in self._messages.numbers.rows(connection, self._queue, after, NUMBERS_A_LOOK)]
            free = self._claims.take((seq for seq in page if seq not in known), wanted)
            taken += free
            if free:
                statements.add.change_many(connection, [(seq, self._queue, 1, 0) for seq in free])
            wanted -= len(free)
            if len(page) < NUMBERS_A_LOOK:
                break
            after, looked_at = page[-1], looked_at + NUMBERS_A_LOOK

    async def _read(self) -> None:
        self._read_at = time.monotonic()
        rows = await self._database.read(lambda connection: self._statements.of_queue.rows(connection, self._queue))
        self._suspects = {seq for seq, _ in rows[:MOST_SUSPECTS]}
