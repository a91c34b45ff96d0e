"""Due messages go from store to queue under SQLite's write lock."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import bindparam, delete, func, select
from sqlalchemy.dialects.sqlite import insert

from delayline.delayed.fairness import Served
from delayline.sql.fair_groups import OF_TURN, fair_by_of, in_turn
from delayline.sql.moves import Moved
from delayline.sql.prepared import Prepared
from delayline.sql.statements import EXPIRY_MARKER, MARKER, QueueStatements

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import ColumnElement, Connection, Select

    from delayline.delayed.fairness import Turn
    from delayline.sql.schema import QueueTables
    from delayline.sql.sqlite.dialect import Sqlite
    from delayline.sql.statements import StoreStatements


class MoveStatements(NamedTuple):
    """Statements that find the first messages, copy them to their queues and remove them."""

    heads: Prepared
    move: Prepared
    remove: Prepared


class FileForwarding:
    """Moves the earliest due messages under SQLite's write lock, which excludes other pollers."""

    def __init__(self, of_store: StoreStatements, tables: QueueTables, dialect: Sqlite) -> None:
        table, sql = of_store.table, dialect.sql
        columns = table.c
        size = func.length(columns.headers) + func.length(columns.body)
        marked = func.instr(columns.headers, bindparam("marker")) + func.instr(columns.headers, bindparam("expiry"))
        self._queues = QueueStatements(tables, dialect)

        def statements(first: Callable[..., Select[Any]], names: Sequence[str]) -> MoveStatements:
            moved = first(columns.destination, columns.id, columns.headers, columns.body)
            move = insert(tables.queued).from_select(["queue", "id", "headers", "body"], moved)
            remove = delete(table).where(columns.seq.in_(first(columns.seq)))
            heads = first(columns.destination, columns.due, size, marked)
            return MoveStatements(
                Prepared(heads, sql, ["marker", "expiry", *names, "number"]),
                Prepared(move, sql, [*names, "number"]),
                Prepared(remove, sql, [*names, "number"]),
            )

        def by_due_time(*selected: ColumnElement[Any]) -> Select[Any]:
            due = select(*selected).where(columns.due <= bindparam("until"), *of_store.unpaused)
            return due.order_by(columns.due, columns.seq).limit(bindparam("number"))

        def of_turn(*selected: ColumnElement[Any]) -> Select[Any]:
            return in_turn(select(*selected), table, dialect).where(*of_store.unpaused).limit(bindparam("number"))

        self._by_due_time = statements(by_due_time, ["until"])
        self.of_turn: MoveStatements | None = None if fair_by_of(table) is None else statements(of_turn, OF_TURN)

    def run(
        self,
        connection: Connection,
        until: object,
        *,
        limit: int,
        max_bytes: int,
        counted: bool = False,
        turns: Sequence[Turn] = (),
    ) -> Moved:
        """Move messages and return the result, with `counts` if `counted`.

        Stops before the first that needs more than moving: its queue does not exist, or its headers hold properties
        that are meant for the dispatch only, or a time to be received. With turns only the group's turn ends there, and
        the message is counted in `left`.
        """
        part = FilePart(connection, self._queues, limit, max_bytes, Counter() if counted else None)
        served = None
        if turns and self.of_turn is not None:
            served = self._move_turns(part, self.of_turn, turns, until, limit)
        else:
            part.move(self._by_due_time, (until,), limit)
        queues = {name for name, exists in part.known.items() if exists} if part.number else set()
        left = 0 if served is None else part.stopped
        return Moved(part.number, queues, left, counts=part.counts, served=served)

    def _move_turns(
        self, part: FilePart, statements: MoveStatements, turns: Sequence[Turn], until: object, limit: int
    ) -> Served:
        """Move what the turns give, until the batch is full."""
        groups: dict[str, tuple[int, Any]] = {}
        for turn in turns:
            if part.is_full:
                break
            number, stopped = part.number, part.stopped
            part.move(statements, (turn.group, turn.since, until), min(turn.most, limit - number))
            if part.stopped > stopped:  # there is more of it
                groups[turn.group] = (turn.most, turn.since)
            elif part.number > number:
                groups[turn.group] = (part.number - number, turn.since)
        return Served(groups, cut=part.is_full)


class FilePart:
    """A batch of moves in an open transaction.

    Args:
        connection: The connection with the write lock.
        queues: The statements of the queues.
        limit: The most messages of the batch.
        max_bytes: The most bytes of the batch, if it has more than a message.
        counts: Where moved messages are counted by destination and due time; None for nowhere.
    """

    def __init__(
        self,
        connection: Connection,
        queues: QueueStatements,
        limit: int,
        max_bytes: int,
        counts: Counter[tuple[str, Any]] | None,
    ) -> None:
        self._connection = connection
        self._queues = queues
        self._limit = limit
        self._bytes_left = max_bytes
        self.counts = counts
        self.number: int = 0
        self.stopped: int = 0
        """How often a message has ended a move that needs more than moving."""
        self.known: dict[str, bool] = {}
        """Whether the queues exist that messages are for."""
        self._is_large = False

    @property
    def is_full(self) -> bool:
        """Whether the batch has as many messages or bytes as it may."""
        return self._is_large or self.number >= self._limit

    def move(self, statements: MoveStatements, values: tuple[Any, ...], limit: int) -> None:
        """Move up to `limit` messages that the statements find by the values, as far as they fit."""
        connection, number = self._connection, 0
        heads, move, remove = statements
        for destination, due, length, marked in heads.stream(connection, MARKER, EXPIRY_MARKER, *values, limit):
            if destination not in self.known:
                self.known[destination] = not self._queues.missing(connection, [destination])
            if marked or not self.known[destination]:
                self.stopped += 1
                break
            if self.number + number and length > self._bytes_left:
                self._is_large = True
                break
            self._bytes_left -= length
            number += 1
            if self.counts is not None:
                self.counts[destination, due] += 1
        if number == 0:
            return
        moved, removed = move.change(connection, *values, number), remove.change(connection, *values, number)
        if not moved == removed == number:
            raise RuntimeError(f"{number} messages were due, {moved} were moved and {removed} removed")
        self.number += number
