"""Claims on queue rows in PostgreSQL: advisory locks of a session."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from delayline.errors import DelaylineError
from delayline.sql.claims_in_statements import Page, TransactionsInProgress, WaitingReceivers
from delayline.sql.moves import Moved
from delayline.sql.postgresql.moves import PostgresqlForwarding, PostgresqlMove
from delayline.sql.prepared import Prepared
from delayline.sql.server import committing_itself, run
from delayline.sql.session_claims import SessionClaims
from delayline.sql.workers import is_given_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection, Table

    from delayline.sql.claims_in_statements import WaitingReceiver
    from delayline.sql.moves import Forwarding
    from delayline.sql.postgresql.dialect import Postgresql
    from delayline.sql.prepared import StatementResult
    from delayline.sql.server import ServerSessions

Result = TypeVar("Result")

ADVISORY_LOCK: Final = "SELECT k FROM unnest(%s::bigint[]) AS k WHERE pg_try_advisory_lock(%s + k)"
#: The first part returns no rows: an unlock is never null.
ADVISORY_EXCHANGE: Final = f"""
SELECT k FROM unnest(%s::bigint[]) AS k WHERE pg_advisory_unlock(%s + k) IS NULL
UNION ALL {ADVISORY_LOCK}
"""  # noqa: S608 - our own
#: A key is in two parts: https://www.postgresql.org/docs/current/view-pg-locks.html
ADVISORY_UNLOCK_OTHERS: Final = """
SELECT pg_advisory_unlock(key) FROM (
  SELECT (classid::bigint << 32) | objid::bigint AS key FROM pg_locks
  WHERE locktype = 'advisory' AND objsubid = 1 AND pid = pg_backend_pid()
) AS locked WHERE key <> ALL (ARRAY(SELECT %s + k FROM unnest(%s::bigint[]) AS k))
"""
#: Only the index of the queues' order has this order: by the primary key other queues' messages would be read too.
AFTER: Final = "(queue, seq) > (%s, %s) AND queue <= %s"
#: The first part returns no rows. The limit is inside, so that no further rows are locked.
ADVISORY_TAKE_NEXT: Final = """
SELECT k, false FROM unnest(%s::bigint[]) AS k WHERE pg_advisory_unlock(%s + k) IS NULL
UNION ALL SELECT seq, pg_try_advisory_lock(%s + seq) FROM (
  SELECT seq FROM {queued} WHERE {after} AND seq <> ALL (%s::bigint[]) ORDER BY queue, seq LIMIT %s
) AS page
"""
#: The same for a page that is longer than what is wanted: no more is locked. Its last row is that of the page.
ADVISORY_TAKE_AMONG: Final = """
WITH page AS MATERIALIZED (
  SELECT seq FROM {queued} WHERE {after} AND seq <> ALL (%s::bigint[]) ORDER BY queue, seq LIMIT %s
), locked AS MATERIALIZED (
  SELECT seq FROM page WHERE pg_try_advisory_lock(%s + seq) LIMIT %s
)
SELECT k, false, 0 FROM unnest(%s::bigint[]) AS k WHERE pg_advisory_unlock(%s + k) IS NULL
UNION ALL SELECT seq, true, 0 FROM locked
UNION ALL SELECT max(seq), false, count(*) FROM page
"""
IN_PROGRESS: Final = """
SELECT pg_snapshot_xmin(taken)::text::bigint, pg_snapshot_xmax(taken)::text::bigint,
  (SELECT seq FROM {queued} WHERE {after} ORDER BY queue, seq LIMIT 1)
FROM pg_current_snapshot() AS taken
"""
ADVISORY_UNLOCK: Final = "SELECT pg_advisory_unlock(%s + k) FROM unnest(%s::bigint[]) AS k"


class AdvisoryLockClaims(SessionClaims):
    """This process's claims on the rows of a table."""

    def __init__(self, database: ServerSessions, table: str, dialect: Postgresql) -> None:
        from delayline.sql.postgresql.binary import LoopStatements, SharedSession

        super().__init__(database)
        self._dialect = dialect
        shared = SharedSession(self._session, self._in_use, self._in_session, self._lock_again)
        self._statements = LoopStatements(database, dialect.connections, shared)
        self._owned = dialect.connections.owned
        base = int.from_bytes(hashlib.sha256(table.encode()).digest()[:3], "big", signed=True)
        if self._owned is not None:
            base >>= 1  # in Citus row numbers are as large as 1 << 60: their upper part is the server's number
        self._base = base << 40  # row numbers stay below
        self.receivers: WaitingReceivers = WaitingReceivers()

    def try_lock(self, connection: Connection, rows: Sequence[int]) -> set[int]:
        """Lock free rows in a single round trip."""
        return {row for (row,) in run(connection, ADVISORY_LOCK, list(rows), self._base)}

    def exchange(self, connection: Connection, released: Sequence[int], rows: Sequence[int]) -> set[int]:
        """Unlock the released rows, then lock free rows, in a single round trip."""
        locked = run(connection, ADVISORY_EXCHANGE, list(released), self._base, list(rows), self._base)
        self._check_owner(connection)
        return {row for (row,) in locked}

    def unlock(self, connection: Connection, rows: Sequence[int]) -> None:
        """Unlock, in a single round trip."""
        run(connection, ADVISORY_UNLOCK, self._base, list(rows))

    async def move(
        self,
        forwarding: Forwarding,
        receiver: WaitingReceiver,
        until: object,
        *,
        limit: int,
        max_bytes: int,
        counted: bool,
        since: object | None,
    ) -> Moved:
        """Move messages on the claims' connection, and claim up to as many of the queue as the receiver waits for."""
        assert isinstance(forwarding, PostgresqlForwarding)  # noqa: S101 - there are no others on PostgreSQL
        statements, queue, wanted = forwarding.statements[counted, True], receiver.queue, receiver.wanted
        move = PostgresqlMove(statements, until, limit, max_bytes, counted, since, queue, wanted)

        def claimed(moved: Moved) -> tuple[Moved, list[int]]:
            return moved, [row[0] for row in moved.claimed]

        def read(result: StatementResult) -> tuple[Moved, list[int]] | None:
            moved = move.moved(result.rows)
            return None if moved is None else claimed(moved)

        def run_on_thread(connection: Connection) -> tuple[Moved, list[int]]:
            with committing_itself(connection, *self._dialect.errors.kinds):
                return claimed(move.run(connection, self._base))

        return await self._claim(*move.statement(self._base), read, run_on_thread)

    def in_progress(self, connection: Connection, queued: Table, queue: str, after: int) -> TransactionsInProgress:
        """Return which transactions are in progress, and the queue's first message after the number `after`."""
        return TransactionsInProgress(
            *_written(IN_PROGRESS, queued, self._dialect).rows(connection, queue, after, queue)[0]
        )

    async def take_next(self, queued: Table, queue: str, after: int, limit: int, among: int = 0) -> Page:
        """Claim up to `limit` messages of a queue after the number `after`; skips messages with other claims.

        `among`: how many messages to look at, `limit` of them if that is more.
        """
        statement, released = _written(ADVISORY_TAKE_NEXT, queued, self._dialect), self._take_released()
        with self._lock:
            own = [row for row in self._claimed if row > after]
        among = max(among, limit)
        values: tuple[Any, ...] = (released, self._base, self._base, queue, after, queue, own, limit)
        if among > limit:
            statement = _written(ADVISORY_TAKE_AMONG, queued, self._dialect)
            values = (queue, after, queue, own, among, self._base, limit, released, self._base)

        def read(result: StatementResult) -> tuple[Page, list[int]]:
            locked = [number for number, is_locked, *_ in result.rows if is_locked]
            with self._lock:  # another event loop's look may have claimed some since `own` was read
                claimed = [number for number in locked if number not in self._claimed]
                self._released += set(locked).difference(claimed)
            released.clear()  # they are unlocked
            last = result.rows[-1][0] if result.rows else None
            number = result.rows[-1][2] if among > limit else len(result.rows)
            if len(locked) == limit:  # where the page is longer, the rest of it was not looked at
                last, number = locked[-1], among
            return Page(claimed, after if last is None else last, number == among), claimed

        try:
            return await self._claim(
                statement, values, read, lambda connection: read(statement.result(connection, *values))
            )
        except asyncio.CancelledError:
            with self._lock:  # rows of a statement that has not run
                self._released += released
            raise

    async def _claim(
        self,
        statement: Prepared,
        values: tuple[Any, ...],
        read: Callable[[StatementResult], tuple[Result, list[int]] | None],
        on_thread: Callable[[Connection], tuple[Result, list[int]]],
    ) -> Result:
        """Run a statement that locks rows on the claims' connection, and claim the rows.

        Args:
            statement: The statement.
            values: Its parameters.
            read: Returns the result and the locked rows; None if nothing was done and `on_thread` must be called.
            on_thread: The same on a worker thread, where the event loop cannot run the statement.
        """
        outcomes: list[tuple[Result, list[int]]] = []

        def claim(outcome: tuple[Result, list[int]] | None) -> None:
            if outcome is not None:
                with self._lock:
                    if is_given_up():
                        self._released += outcome[1]
                        return
                    self._claimed.update(outcome[1])
                outcomes.append(outcome)

        def run_in_session() -> None:
            with self._in_session():
                claim(self._session.run(partial(self._run_locking, on_thread)))

        try:
            if self._owned is None:
                await self._statements.run(statement, values, lambda result: claim(read(result)))
            if not outcomes:
                await self._database.run(run_in_session)
        except asyncio.CancelledError:
            self.release(row for _, claimed in outcomes for row in claimed)
            raise
        except GeneratorExit:  # of an event loop that has ended, where nothing can be awaited
            self._database.spawn(self._unlock_others)
            raise
        except BaseException:  # locks outlast the transaction that has taken them
            with contextlib.suppress(DelaylineError):  # the locks of a lost connection end with it
                await self._database.run(self._unlock_others)
            raise
        return outcomes[0][0]

    def _run_locking(self, work: Callable[[Connection], Result], connection: Connection) -> Result:
        self._lock_again(connection)
        try:
            result = work(connection)
            self._check_owner(connection)
        except BaseException:
            self._unlock_unclaimed(connection)
            raise
        return result

    def _lock_again(self, connection: Connection) -> None:
        is_new = connection is not self._locked_by
        super()._lock_again(connection)
        if is_new and self._owned is not None:
            self._owned.wait_for_others()

    def _check_owner(self, connection: Connection) -> None:
        """Raise if what was locked was locked on a server that does not own the schema."""
        if self._owned is not None:
            self._owned.check(connection)

    def _unlock_others(self) -> None:
        """Unlock rows that a failed statement has locked."""
        with self._in_session():
            self._session.run(self._unlock_unclaimed)

    def _reclaim(self) -> None:
        self._statements.reclaim()

    def _unlock_unclaimed(self, connection: Connection) -> None:
        with self._lock:
            known = [*self._claimed, *self._released]
        with contextlib.suppress(*self._dialect.errors.kinds):  # the locks of a lost connection end with it
            run(connection, ADVISORY_UNLOCK_OTHERS, self._base, known)


@lru_cache(maxsize=64)
def _written(template: str, queued: Table, dialect: Postgresql) -> Prepared:
    table = dialect.sql.identifier_preparer.format_table(queued)
    return Prepared.of_text(template.format(queued=table, after=AFTER))
