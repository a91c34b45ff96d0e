"""Pieces of a job whose messages that are due soon go to a broker, and the others to the store.

A broker has no transaction. In one of the store's a task claims some pieces in the ledger, stores the messages that
are due later and sends the others; it commits once the broker has confirmed them. Whoever goes on with a job that was
killed sends those again that were under way in such a transaction, and no others.
"""

from __future__ import annotations

import secrets
from contextlib import AsyncExitStack
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delayline.backends import DUPLICATE_ID
from delayline.bulk.jobs import MOST_REFUSED, NUMBER_BITS, PieceCounts
from delayline.bulk.pieces import ROWS_AT_ONCE, PieceWriter
from delayline.bulk.writer import earliest_due
from delayline.delayed.arrow import completed, microseconds
from delayline.sql.statements import store_channel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray
    from sqlalchemy import Connection

    from delayline.backends import MessageSink, MessageWriter
    from delayline.bulk.pieces import PieceRows

#: Messages that a broker is sent at a time: if it has got them and this was not recorded, it gets them again.
SENT_AT_ONCE: Final = 5000


class Delivered(NamedTuple):
    """What a broker has done with messages."""

    counts: PieceCounts
    refused: Mapping[str, str]
    """The reasons of messages that it has refused, by id; of the first thousand."""


async def deliver(writer: MessageWriter, messages: pa.RecordBatch) -> Delivered:
    """Send messages, and return once the broker has confirmed or refused them."""
    refused = await writer.deliver(messages) if messages.num_rows else {}
    reasons = {at: reason for at, reason in refused.items() if reason != DUPLICATE_ID}
    counts = PieceCounts(
        sent=messages.num_rows - len(refused),
        duplicates=len(refused) - len(reasons),
        rejected=len(reasons),
        bytes=messages.nbytes,
    )
    ids = messages.column("id")
    return Delivered(counts, {ids[at].as_py(): reasons[at] for at in sorted(reasons)[:MOST_REFUSED]})


def parts_of(pieces: NDArray[Any], number: int, most: int) -> NDArray[Any]:
    """Return the part of each row, which stand piece by piece: that number of pieces, cut into parts of so many rows.

    The first part of a piece has the piece's number, so that the rest of a part's number is its piece.
    """
    if not len(pieces):
        return pieces
    starts = np.concatenate(([0], np.flatnonzero(np.diff(pieces)) + 1))
    lengths = np.diff(np.append(starts, len(pieces)))
    positions = np.arange(len(pieces)) - np.repeat(starts, lengths)
    parts: NDArray[Any] = pieces.astype(np.int64) + number * (positions // most)
    return parts


class LevelPieceWriter(PieceWriter):
    """Writer of a job in pieces to a broker and a store. Every method blocks."""

    def send(self, job: int, rows: PieceRows, broker: MessageSink, far_from: int, most: int) -> PieceCounts:
        """Send and store pieces, but for those that another attempt has recorded; return what was done.

        Waits as `store`, for the broker too.

        Args:
            job: The job's number.
            rows: Whole pieces or parts.
            broker: Gets the messages that are due earlier, some at a time.
            far_from: In microseconds since 1970; the store gets the messages that are due from then on.
            most: How many messages the broker gets at a time.

        Raises:
            DifferentInput: A piece that another attempt has recorded had other rows.
            BackendUnavailable: The database or the broker did not come back.
        """
        done: list[PieceCounts] = []
        self._patiently(self._send, job, rows, broker, far_from, most, done)
        return reduce(PieceCounts.plus, done, PieceCounts())

    async def _send(
        self, job: int, rows: PieceRows, broker: MessageSink, far_from: int, most: int, done: list[PieceCounts]
    ) -> None:
        async with AsyncExitStack() as stack:
            writer = await broker.writer(stack)
            for some in _cut(rows, far_from, most):
                near = is_near(some.messages, far_from)
                waits = np.zeros(len(near), dtype=bool)
                waits[near] = await self._known.among(some.messages.column("id").filter(pa.array(near)))
                done.append(await self._send_some(job, some.without(waits), writer, far_from))

    async def _send_some(self, job: int, rows: PieceRows, writer: MessageWriter, far_from: int) -> PieceCounts:
        """Send and store pieces in one transaction."""
        attempt = secrets.randbits(NUMBER_BITS)
        async with self._database.transaction() as ours:
            claim = partial(self._claim, job=job, attempt=attempt, rows=rows)
            mine = await self._database.write(claim, ours)
            if not mine:
                return PieceCounts()
            rows = rows.only(mine)
            near = pa.array(is_near(rows.messages, far_from))
            far = completed(rows.messages.filter(pc.invert(near)))
            stored = (
                await self._database.write(partial(self._put, messages=far, on_conflict="keep"), ours) if far else 0
            )
            counts, refused = await deliver(writer, rows.messages.filter(near))
            counts = counts.plus(
                PieceCounts(stored, len(rows.duplicates) + len(far) - stored, len(rows.rejected), far.nbytes)
            )
            record = partial(self._ledger.record, job=job, piece=mine[0], counts=counts, refused=refused)
            await self._database.write(record, ours)
        if stored:
            self._register()
            await self._database.notify_on_commit({store_channel(self._table): earliest_due(far)})
        return counts

    def _claim(self, connection: Connection, job: int, attempt: int, rows: PieceRows) -> list[int]:
        mine = list(self._ledger.claim(connection, job, attempt, rows.inputs))
        if len(mine) < len(rows.inputs):
            self._ledger.check_same(connection, job, rows.inputs)
        return mine


def is_near(messages: pa.RecordBatch, far_from: int) -> NDArray[Any]:
    """Return which messages are due earlier than that; those without a due time are too."""
    near: NDArray[Any] = pc.fill_null(pc.less(microseconds(messages.column("due")), far_from), True).to_numpy(
        zero_copy_only=False
    )
    return near


def _cut(rows: PieceRows, far_from: int, most: int) -> Iterator[PieceRows]:
    """Yield some pieces at a time, with no more messages for the broker than that unless a piece alone has more."""
    near = rows.pieces[is_near(rows.messages, far_from)]
    numbers, counts = np.unique(near, return_counts=True)
    for_broker = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    chosen, messages, size = list[int](), 0, 0
    for piece, given in rows.inputs.items():
        more = for_broker.get(piece, 0)
        if chosen and (messages + more > most or size + given.rows > ROWS_AT_ONCE):
            yield rows.only(chosen)
            chosen, messages, size = [], 0, 0
        chosen.append(piece)
        messages, size = messages + more, size + given.rows
    if chosen:
        yield rows.only(chosen)
