"""Pending messages as sets that actions change: page by page in the order of their numbers, with the job's progress.

A page is a transaction. What the poller has claimed is left to it, and tried again at the end of the job.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from sqlalchemy import bindparam, delete, func, literal_column, select, update

from delayline.actions import OperatorAction, SetPreview
from delayline.clock import latest_of
from delayline.message import Message
from delayline.sql.deadlines import job_work, long_work
from delayline.sql.prepared import Prepared
from delayline.sql.set_pages import EXAMPLES, SetPage, must_read, preview_of_pages, waiting_conditions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement, Connection

    from delayline.actions import ActionRecord, SetRequest
    from delayline.filters import MessageFilter
    from delayline.sql.actions import SqlActionLog
    from delayline.sql.claims import LockFree
    from delayline.sql.database import Database
    from delayline.sql.journal import Journal
    from delayline.sql.row_claims import RowClaims
    from delayline.sql.statements import StoreStatements

#: Messages that a transaction looks at; where headers are read, fewer.
LOOKED_AT_ONCE: Final = 10_000
READ_AT_ONCE: Final = 2_000
#: Messages of the poller's that a job keeps to try them again.
MOST_HELD: Final = 5_000
TOO_LATE: Final = "too late: it is being sent now"
SENT_MEANWHILE: Final = "too late: it was sent, cancelled or changed meanwhile"


class PendingRow(NamedTuple):
    """A message of a set."""

    number: int
    id: str
    due: datetime


class SqlPendingSet:
    """The pending messages of a store.

    Args:
        database: The store's database.
        statements: The statements on the store's table.
        rows: The claims on its rows.
        journal: Its journal.
        log: The record of actions.
        notify: Notifies the poller of an earlier due time.
    """

    def __init__(
        self,
        database: Database,
        statements: StoreStatements,
        rows: RowClaims,
        journal: Journal,
        log: SqlActionLog,
        notify: Callable[[datetime], Awaitable[None]],
    ) -> None:
        self._database = database
        self._statements = statements
        self._table = statements.table
        self._rows = rows
        self._journal = journal
        self._log = log
        self._notify = notify
        columns, sql = self._table.c, database.dialect.sql
        by_numbers = database.dialect.words.by_key(columns.seq, "numbers")
        self._delete = Prepared(delete(self._table).where(by_numbers), sql, ["numbers"])
        moved = update(self._table).values(due=bindparam("at"))
        self._move = Prepared(moved.where(by_numbers), sql, ["at", "numbers"])
        self._move_each = Prepared(moved.where(columns.seq == bindparam("number")), sql, ["at", "number"])

    @classmethod
    def of(
        cls,
        database: Database,
        statements: StoreStatements,
        rows: RowClaims,
        journal: Journal,
        log: SqlActionLog,
        notify: Callable[[datetime], Awaitable[None]],
    ) -> Self | None:
        """Return the messages of a table that numbers its rows; None for another table."""
        there = "seq" in statements.table.c
        return cls(database, statements, rows, journal, log, notify) if there else None

    @job_work
    async def preview(self, request: SetRequest, counted: Callable[[int], None] | None = None) -> SetPreview:
        """Count the messages."""
        wanted, at = request.filter, self._database.clock.now()
        bound = await self.last(request)
        if not must_read(wanted):
            number, examples = await self._database.read(partial(self._count, wanted=wanted, bound=bound))
            return SetPreview(number, at, bound, number, examples=examples)

        async def read(position: int) -> SetPage[PendingRow]:
            return await self._database.read(
                partial(self._page, wanted=wanted, position=position, bound=bound, most=None)
            )

        return await preview_of_pages(read, bound, at, counted)

    async def last(self, request: SetRequest) -> int:
        """Return the number of the last message."""
        del request
        return await self._database.read(self._last)

    def _last(self, connection: Connection) -> int:
        return int(connection.execute(select(func.max(self._table.c.seq))).scalar() or 0)

    def _count(self, connection: Connection, wanted: MessageFilter, bound: int) -> tuple[int, list[str]]:
        within = [self._table.c.seq <= bound, *waiting_conditions(self._table, self._database.dialect, wanted)]
        number = connection.execute(select(func.count()).select_from(self._table).where(*within)).scalar()
        examples = connection.execute(select(self._table.c.id).where(*within).limit(EXAMPLES)).scalars()
        return int(number or 0), list(examples)

    @long_work
    async def step(self, record: ActionRecord, owner: str, most: int, *, final: bool = False) -> ActionRecord | None:
        """Change the next messages in a transaction with the job's progress."""
        now = latest_of(self._database.clock)()
        step = partial(self._step, name=record.name, owner=owner, most=most, final=final, now=now)
        after, earliest = await self._rows.manage_many(step)
        if earliest is not None:
            await self._notify(earliest)
        return after

    async def close(self) -> None:
        """Do nothing: between steps nothing is held."""

    def _step(
        self, connection: Connection, lock: LockFree, *, name: str, owner: str, most: int, final: bool, now: datetime
    ) -> tuple[ActionRecord | None, datetime | None]:
        """Return the record after the step, and the earliest due time that messages were given."""
        record = self._log.locked(connection, name, owner)
        if record is None or record.request is None:
            return None, None
        wanted, tried = record.request.filter, record.held[:0]
        if record.position < record.bound:
            page = self._page(connection, wanted, record.position, record.bound, most)
            rows, record = page.rows, replace(record, position=page.end)
        else:
            tried = record.held[:most]
            rows = self._matching(connection, wanted, [self._table.c.id.in_(tried)])
            record = replace(record, held=record.held[len(tried) :])
        free = lock(connection, [row.number for row in rows]) if rows else set()
        record, earliest = self._change(connection, record, [row for row in rows if row.number in free], now)
        held = [*record.held, *(row.id for row in rows if row.number not in free)]
        for message_id in {*tried}.difference(row.id for row in rows):
            record = record.with_problem(message_id, SENT_MEANWHILE)
        kept = 0 if final and record.position >= record.bound else MOST_HELD
        for message_id in held[kept:]:
            record = record.with_problem(message_id, TOO_LATE)
        record = replace(record, held=tuple(held[:kept]))
        if record.position >= record.bound and not record.held:
            record = record.ended()
        self._log.keep(connection, record)
        return record, earliest

    def _change(
        self, connection: Connection, record: ActionRecord, rows: Sequence[PendingRow], now: datetime
    ) -> tuple[ActionRecord, datetime | None]:
        """Change locked messages; return the record, and the earliest due time that they were given."""
        request, numbers, due = record.request, [row.number for row in rows], None
        assert request is not None  # noqa: S101 - it is a job
        to_due = self._database.dialect.values.to_due
        if request.action is OperatorAction.CANCEL:
            self._journal.mark_cancelled(connection, [row.id for row in rows])
            self._delete.change_each(connection, keys=numbers)
        elif request.by is None:
            due = request.to or now
            self._move.change_each(connection, to_due(due), keys=numbers)
        else:
            moved: list[tuple[datetime, int]] = []
            for row in rows:
                try:
                    moved.append((row.due + request.by, row.number))
                except OverflowError:
                    record = record.with_problem(row.id, "its new due time lies beyond year 9999, or before year 1")
            if moved:
                self._move_each.change_many(connection, [(to_due(at), number) for at, number in moved])
            return replace(record, done=record.done + len(moved)), min(moved)[0] if moved else None
        return replace(record, done=record.done + len(numbers)), due

    def _page(
        self, connection: Connection, wanted: MessageFilter, position: int, bound: int, most: int | None
    ) -> SetPage[PendingRow]:
        """Return the next messages that match, behind `position` and up to `bound`, `most` of them."""
        number = self._table.c.seq
        at_once = READ_AT_ONCE if must_read(wanted) else LOOKED_AT_ONCE
        behind = select(number).where(number > position, number <= bound).order_by(number)
        end = connection.execute(behind.offset(at_once - 1).limit(1)).scalar() or bound
        rows = self._matching(connection, wanted, [number > position, number <= end], most)
        if most is not None and len(rows) > most:
            rows, end = rows[:most], rows[most - 1].number
        return SetPage(rows, int(end), at_once)

    def _matching(
        self,
        connection: Connection,
        wanted: MessageFilter,
        conditions: Sequence[ColumnElement[bool]],
        most: int | None = None,
    ) -> list[PendingRow]:
        """Return messages that match and fulfil more conditions, in order; a message more than `most`, or all."""
        columns, from_due, reads = self._table.c, self._database.dialect.values.from_due, must_read(wanted)
        nothing: ColumnElement[Any] = literal_column("NULL")
        shown = [
            columns.destination,
            columns.headers if wanted.checks_headers else nothing,
            columns.body if wanted.body is not None else nothing,
        ]
        query = select(columns.seq, columns.id, columns.due, *(shown if reads else []))
        query = query.where(*conditions, *waiting_conditions(self._table, self._database.dialect, wanted)).order_by(
            columns.seq
        )
        if not reads:
            rows = connection.execute(query if most is None else query.limit(most + 1))
            return [PendingRow(int(sequence), message_id, from_due(due)) for sequence, message_id, due in rows]
        matching: list[PendingRow] = []
        for sequence, message_id, kept, destination, headers, body in connection.execute(query):
            due, message = from_due(kept), Message.from_encoded(message_id, bytes(headers or b""), bytes(body or b""))
            if wanted.matches(message, destination, due):
                matching.append(PendingRow(int(sequence), message_id, due))
        return matching
