"""Moves of due messages on servers that need a statement per step: messages are locked, then copied, then removed."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, bindparam, delete, exists, func, insert, literal_column, select

from delayline.sql.fair_groups import OF_TURN, fair_by_of, in_turn, in_turns, served_by
from delayline.sql.moves import Moved
from delayline.sql.prepared import Prepared
from delayline.sql.schema import in_order
from delayline.sql.statements import EXPIRY_MARKER, MARKER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import ColumnElement, Connection

    from delayline.delayed.fairness import Turn
    from delayline.sql.schema import QueueTables
    from delayline.sql.server import Columns, Server
    from delayline.sql.statements import StoreStatements


class LockedForwarding:
    """Moves the earliest due messages that are not locked, on servers that need a statement per step."""

    one_statement = False
    can_claim = False

    def __init__(self, statements: StoreStatements, tables: QueueTables, dialect: Server) -> None:
        table, sql = statements.table, dialect.sql
        columns = table.c
        size = func.length(columns.headers) + func.length(columns.body)
        known = exists().where(tables.queues.c.name == dialect.words.exact(columns.destination))
        movable = self.movable(columns, known)
        free = and_(dialect.leases(table, tables).free, *statements.unpaused)
        selected = select(columns.id, columns.due, columns.destination, size, movable)
        selected = selected.limit(bindparam("number")).with_for_update(skip_locked=True)
        heads = selected.where(columns.due <= bindparam("until"), free).order_by(*in_order(table))
        chosen = dialect.words.one_of(columns.id, "keys")
        moved = select(columns.destination, columns.id, columns.headers, self.body(columns)).where(chosen)
        move = insert(tables.queued).from_select(["queue", "id", "headers", "body"], moved.order_by(*in_order(table)))
        since = columns.due >= bindparam("since")
        self._heads = Prepared(heads, sql, ["until", "number"])
        self._heads_since = Prepared(heads.where(since), sql, ["until", "number", "since"])
        if fair_by_of(table) is not None:
            self._heads_in_turn = Prepared(in_turn(selected, table, dialect).where(free), sql, [*OF_TURN, "number"])
        self._move = Prepared(move, sql, ["keys"])
        self._remove = Prepared(delete(table).where(chosen), sql, ["keys"])

    def movable(self, columns: Columns, known: ColumnElement[bool]) -> ColumnElement[Any]:
        """Return the condition for messages that only need moving; `known`: their queue exists."""
        markers: list[ColumnElement[bytes]] = [bindparam("marker", MARKER), bindparam("expiry", EXPIRY_MARKER)]
        return and_(*(func.instr(columns.headers, marker) == literal_column("0") for marker in markers), known)

    def body(self, columns: Columns) -> ColumnElement[bytes]:
        """Return the body, as the queue takes it."""
        return columns.body

    def run(
        self,
        connection: Connection,
        until: object,
        *,
        limit: int,
        max_bytes: int,
        counted: bool = False,
        since: object | None = None,
        turns: Sequence[Turn] = (),
    ) -> Moved:
        """Move messages, only from `since` on if given, and return the result, with `counts` if `counted`."""
        served = None
        if turns:
            found = in_turns(turns, limit, partial(self._of_turn, connection, until))
            heads: Sequence[Any] = [head for _, head in found]
        elif since is None:
            heads = self._heads.rows(connection, until, limit)
        else:
            heads = self._heads_since.rows(connection, until, limit, since)
        movable = [head for head in heads if head[-1]]
        chosen, left = _fitting(movable, max_bytes), len(heads) - len(movable)
        if turns:
            fitting = len(heads) if len(chosen) == len(movable) else heads.index(movable[len(chosen)])
            dues = [(turn, turn.since if left else head[1]) for turn, head in found]
            served = served_by(dues, fitting, limit)
        if not chosen:
            return Moved(0, set(), left, until if heads else None, served=served)
        if not self.move(connection, [head[0] for head in chosen]):
            return Moved(0, set(), len(heads), until, served=served)
        more, reached = len(chosen) < len(movable) or len(heads) == limit, chosen[-1][1]
        return Moved(
            len(chosen),
            {head[2] for head in chosen},
            left,
            until if more or turns else None,
            None if left or turns else reached,
            Counter((head[2], head[1]) for head in chosen) if counted else None,
            served,
        )

    def _of_turn(self, connection: Connection, until: object, turn: Turn, number: int) -> Sequence[Any]:
        return self._heads_in_turn.rows(connection, turn.group, turn.since, until, number)

    def move(self, connection: Connection, ids: Sequence[str]) -> bool:
        """Move messages that are locked; False where that is left to the poller's own hands, and nothing is done."""
        moved = self._move.change_each(connection, keys=ids)
        removed = self._remove.change_each(connection, keys=ids)
        if not moved == removed == len(ids):
            raise RuntimeError(f"{len(ids)} messages were locked, {moved} were moved and {removed} removed")
        return True


def _fitting(heads: Sequence[Any], max_bytes: int) -> Sequence[Any]:
    """Return as many as fit, at least the first."""
    for number, (_, _, _, size, _) in enumerate(heads):
        max_bytes -= size
        if number and max_bytes < 0:
            return heads[:number]
    return heads
