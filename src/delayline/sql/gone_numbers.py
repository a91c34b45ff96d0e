"""The number up to which all messages of a queue are gone: looks into the queue begin behind it.

A server keeps the index entries of deleted rows as long as an older snapshot is open, such as that of a report or of a
dump. Until then each look from the first number on reads all of them: 150 000 cost 50 ms. One that begins behind the
entries of messages that are gone reads none.

A message gets its number before it is committed, so a number that is not there may still appear: the number behind
which looks begin is a `SettledBound`. PostgreSQL numbers transactions and tells which are in progress. On other servers
they are taken to have ended after `ENDED_WITHIN` seconds; a message of a longer one is found by the check from the
first number on, which is repeated more often there.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from typing import TYPE_CHECKING, Final

from delayline.errors import DelaylineError
from delayline.sql.claims_in_statements import TransactionsInProgress
from delayline.sql.server_database import ServerDatabase
from delayline.sql.settled_bound import BEGINNING_EVERY, SettledBound

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection

    from delayline.sql.claims_in_statements import ClaimsInStatements
    from delayline.sql.database import Database
    from delayline.sql.statements import QueueStatements

#: Numbers that have to be given until it is worth a query to begin looks behind the earlier ones ...
SETTLED_AFTER: Final = 500
#: ... and the seconds between two such queries at least.
SETTLED_EVERY: Final = 0.5
#: Where the server does not tell which transactions are in progress: the seconds after which each is taken to have
#: ended, those between two checks, and those of a check that shows that looks can begin at the first number again.
ENDED_WITHIN: Final = 5.0
CHECKED_OFTEN: Final = 2.0
CHEAP_LOOK: Final = 0.005


class GoneNumbers:
    """The number behind which looks into one queue begin. Belongs to one event loop.

    Args:
        database: The database of the queue.
        claims: The claims on its messages, where the server tells which transactions are in progress; otherwise None.
        statements: Those of the queues.
        queue: The queue's name.
        found: Called when a message was found below the number, which has become lower.
    """

    def __init__(
        self,
        database: Database,
        claims: ClaimsInStatements | None,
        statements: QueueStatements,
        queue: str,
        found: Callable[[], None],
    ) -> None:
        self.last: int = 0
        """All messages up to this number are gone."""
        self._database = database
        self._claims = claims
        self._statements = statements
        self._queue = queue
        self._found = found
        self._reached = 0
        self._settled: SettledBound[int] = SettledBound(BEGINNING_EVERY if claims is not None else CHECKED_OFTEN)
        self._settled_at = -math.inf
        self._task: asyncio.Task[None] | None = None

    def reach(self, number: int) -> None:
        """Note that a message has that number."""
        self._reached = max(self._reached, number)

    def move_on(self) -> None:
        """Ask the server, beside the looks, if that is worth it; called now and then."""
        if self._task is not None or not isinstance(self._database, ServerDatabase):  # a file keeps no such entries
            return
        now = time.monotonic()
        settles = self._reached - self.last >= SETTLED_AFTER and now - self._settled_at >= SETTLED_EVERY
        checks = self.last > 0 and self._settled.begins_anew
        if settles or checks:
            asking = self._ask(settles=settles, checks=checks)
            self._task = asyncio.create_task(asking, name=f"delayline gone numbers {self._queue}")
            self._task.add_done_callback(self._ended)

    def stop(self) -> None:
        """End the query in progress. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None

    async def _ask(self, *, settles: bool, checks: bool) -> None:
        with contextlib.suppress(DelaylineError):  # the looks report a database that does not answer
            if settles:
                await self._settle()
            if checks:
                await self._check()

    async def _settle(self) -> None:
        reached, self._settled_at = self._reached, time.monotonic()  # given before the query
        oldest, following, first = await self._database.read(self._in_progress)
        self._settled.look(oldest, following, None if first is None else first - 1, reached)
        self.last = max(self.last, self._settled.bound or 0)

    def _in_progress(self, connection: Connection) -> TransactionsInProgress:
        if self._claims is not None:
            return self._claims.in_progress(connection, self._statements.queued, self._queue, self.last)
        now = time.monotonic()  # in place of a transaction's number
        first = self._statements.numbers.one(connection, self._queue, self.last, 1)
        return TransactionsInProgress(now, now + ENDED_WITHIN, first)

    async def _check(self) -> None:
        began = time.monotonic()
        rows = await self._database.read(
            lambda connection: self._statements.numbers.rows(connection, self._queue, 0, 1)
        )
        ended = time.monotonic()
        self._settled.began_anew(began)
        if rows and rows[0][0] <= self.last:
            self.last = rows[0][0] - 1
            self._settled.forget()
            self._found()
        elif self._claims is None and ended - began < CHEAP_LOOK:
            self.last = 0
            self._settled.forget()
