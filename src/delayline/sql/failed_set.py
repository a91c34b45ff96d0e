"""Failed messages as sets that actions change: page by page in the order of their numbers, with the job's progress."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import func, literal_column, select

from delayline.actions import OperatorAction
from delayline.failures import failed_queue_of, no_queue, retry_of
from delayline.message import Message
from delayline.sql.deadlines import job_work, long_work
from delayline.sql.set_pages import SetPage, preview_of_pages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from sqlalchemy import ColumnElement, Connection

    from delayline.actions import ActionRecord, SetPreview, SetRequest
    from delayline.filters import MessageFilter
    from delayline.sql.actions import SqlActionLog
    from delayline.sql.claims import Claims
    from delayline.sql.database import Database
    from delayline.sql.statements import QueueStatements
    from delayline.transaction import Transaction
    from delayline.transport import TransportOperation

#: Messages whose headers are read in a statement, and that are changed in a transaction: a server has room for so many
#: claims only.
READ_AT_ONCE: Final = 1_000
CHANGED_AT_ONCE: Final = 500
BODIES_AT_ONCE: Final = 100
RECEIVED: Final = "a receiver of the error queue has it"


class FailedRow(NamedTuple):
    """A message of the set."""

    number: int
    id: str


class SqlFailedSet:
    """The messages of an error queue.

    Args:
        database: The transport's database.
        statements: The statements on its queues.
        claims: Returns the claims on messages of queues.
        log: The record of actions.
        dispatch: Sends messages in a transaction.
    """

    def __init__(
        self,
        database: Database,
        statements: QueueStatements,
        claims: Callable[[], Claims],
        log: SqlActionLog,
        dispatch: Callable[[Sequence[TransportOperation], Transaction], Awaitable[None]],
    ) -> None:
        self._database = database
        self._statements = statements
        self._claims = claims
        self._log = log
        self._dispatch = dispatch

    @job_work
    async def preview(self, request: SetRequest, counted: Callable[[int], None] | None = None) -> SetPreview:
        """Count the messages."""
        queue, at = request.queue or "", self._database.clock.now()
        bound = await self.last(request)

        async def read(position: int) -> SetPage[FailedRow]:
            page = partial(self._page, queue=queue, wanted=request.filter, position=position, bound=bound, most=None)
            return await self._database.read(page)

        return await preview_of_pages(read, bound, at, counted)

    async def last(self, request: SetRequest) -> int:
        """Return the number of the last message of the queue."""
        return await self._database.read(partial(self._last, queue=request.queue or ""))

    @long_work
    async def step(self, record: ActionRecord, owner: str, most: int, *, final: bool = False) -> ActionRecord | None:
        """Change the next messages in a transaction with the job's progress."""
        del final
        taken: list[int] = []
        try:
            async with self._database.transaction() as transaction:
                work = partial(self._step, name=record.name, owner=owner, most=min(most, CHANGED_AT_ONCE), taken=taken)
                after, operations = await self._database.write(work, transaction)
                if operations:
                    await self._dispatch(operations, transaction)
            return after
        finally:
            self._claims().release(taken)  # after the commit: before it a receiver would still see the rows

    async def close(self) -> None:
        """Do nothing: between steps nothing is held."""

    def _step(
        self, connection: Connection, *, name: str, owner: str, most: int, taken: list[int]
    ) -> tuple[ActionRecord | None, list[TransportOperation]]:
        """Remove the next messages, and return the record with what is to be sent in their place."""
        record = self._log.locked(connection, name, owner)
        if record is None or record.request is None:
            return None, []
        request, queue = record.request, record.request.queue or ""
        page = self._page(connection, queue, request.filter, record.position, record.bound, most)
        record = replace(record, position=page.end)
        taken.extend(self._claims().take((row.number for row in page.rows), len(page.rows)))
        free = {*taken}
        for row in page.rows:
            if row.number not in free:
                record = record.with_problem(row.id, RECEIVED)
        operations: list[TransportOperation] = []
        removed = list(taken)
        if request.action is OperatorAction.RETRY and taken:
            record, sends = self._retried(connection, record, request, queue, taken)
            removed, operations = list(sends), list(sends.values())
        if removed:
            there = self._statements.remove(connection, queue, removed)
            record = replace(record, done=record.done + len(there))
            if operations and len(there) < len(removed):
                operations = [send for number, send in zip(removed, operations, strict=True) if number in there]
        if record.position >= record.bound:
            record = record.ended()
        self._log.keep(connection, record)
        return record, operations

    def _retried(
        self,
        connection: Connection,
        record: ActionRecord,
        request: SetRequest,
        queue: str,
        numbers: Sequence[int],
    ) -> tuple[ActionRecord, dict[int, TransportOperation]]:
        """Return the sends that retry messages by their numbers, and the record with those that cannot be retried."""
        sends: dict[int, TransportOperation] = {}
        for number, message_id, headers, body, *_ in self._statements.claimed.rows_each(
            connection, queue, keys=numbers
        ):
            message = Message.from_encoded(message_id, bytes(headers), bytes(body))
            send = retry_of(message, to=request.destination, window=request.inbox_window)
            if isinstance(send, str):
                record = record.with_problem(message_id, send)
            else:
                sends[int(number)] = send
        missing = self._statements.missing(connection, {send.destination for send in sends.values()})
        for send in sends.values():
            if send.destination in missing:
                record = record.with_problem(send.message.id, no_queue(send.destination, queue))
        return record, {number: send for number, send in sends.items() if send.destination not in missing}

    def _page(
        self, connection: Connection, queue: str, wanted: MessageFilter, position: int, bound: int, most: int | None
    ) -> SetPage[FailedRow]:
        """Return the next messages that match, behind `position` and up to `bound`, `most` of them."""
        columns = self._statements.queued.c
        reads_headers, reads_bodies = wanted.checks_headers or wanted.destination is not None, wanted.body is not None
        conditions: list[ColumnElement[bool]] = [columns.queue == queue, columns.seq > position, columns.seq <= bound]
        nothing: ColumnElement[Any] = literal_column("NULL")
        contents = [columns.headers if reads_headers else nothing, columns.body if reads_bodies else nothing]
        shown = [columns.seq, columns.id, *contents]
        at_once = READ_AT_ONCE if reads_headers or most is None else min(most, READ_AT_ONCE)
        at_once = min(at_once, BODIES_AT_ONCE) if reads_bodies else at_once
        query = select(*shown).where(*conditions).order_by(columns.queue, columns.seq).limit(at_once)
        rows: list[FailedRow] = []
        looked_at, end = 0, position
        for number, message_id, headers, body in connection.execute(query):
            if most is not None and len(rows) == most:
                return SetPage(rows, end, looked_at)
            looked_at, end = looked_at + 1, int(number)
            message = Message.from_encoded(message_id, bytes(headers or b""), bytes(body or b""))
            if wanted.matches(message, failed_queue_of(message) if reads_headers else ""):
                rows.append(FailedRow(end, message_id))
        return SetPage(rows, end if looked_at == at_once else bound, looked_at)

    def _last(self, connection: Connection, queue: str) -> int:
        self._statements.must_exist(connection, queue)
        columns = self._statements.queued.c
        return int(connection.execute(select(func.max(columns.seq)).where(columns.queue == queue)).scalar() or 0)
