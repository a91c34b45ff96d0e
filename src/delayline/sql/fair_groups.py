"""The groups of a store's due messages, which are served in turn while there is a backlog; see `delayed.fairness`.

A group is found by an index over groups and due times, whatever the number of its messages: from each group to the
next is a step. That look is repeated at most ten times a second, and less often the longer it takes.

Where a server keeps the index entries of deleted rows, the step to a group that has been served for long reads all of
them. There most looks go from each known group to the next known one, and a whole look is repeated after some seconds:
it finds what others have released or stored late below the due time from which on a known group is asked.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, cast

from sqlalchemy import Index, MetaData, bindparam, literal_column, select

from delayline.delayed.fairness import FairBy, Served, Turns
from delayline.message import MAXIMUM_DESTINATION_LENGTH
from delayline.sql.prepared import Prepared
from delayline.sql.schema import ADDED_LATER, FAIR_GROUP, in_order, index_name
from delayline.sql.schema import group_column as new_group_column

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sqlalchemy import Column, Connection, Select, Table

    from delayline.delayed.fairness import Turn
    from delayline.sql.claims import Claims
    from delayline.sql.dialect import Dialect

#: Key in the `info` of a store's table: what fairness goes by.
FAIR_BY: Final = "delayline serves fairly by"
#: The parameters of `in_turn`.
OF_TURN: Final = ("group", "since", "until")
#: Seconds between looks for groups that cost little ...
LOOK_EVERY: Final = 0.1
#: ... costlier ones pause for so many times as long as they take ...
LOOK_SHARE: Final = 5
#: ... but no longer: this bounds how late a group is found that has its first message during a backlog.
LOOK_WITHIN: Final = 0.4
#: Seconds between looks for all groups, known ones too, where others pass them over.
WHOLE_LOOK_EVERY: Final = 5.0
#: Follows every name.
LAST_NAME: Final = chr(0x10FFFF) * MAXIMUM_DESTINATION_LENGTH


@lru_cache(maxsize=64)
def fair_table(table: Table, fair_by: FairBy) -> Table:
    """Return the table of a store with what fairness needs: an index, and by a header the column of groups."""
    fair = table.to_metadata(MetaData(schema=table.schema))
    if fair_by.header is not None:
        fair.append_column(new_group_column())
    fair.info[FAIR_BY] = fair_by
    name = index_name(table.name, "Index_Destination" if fair_by.header is None else "Index_Group")
    Index(name, group_column(fair), *in_order(fair), info={ADDED_LATER: f"fair_by={str(fair_by)!r}"})
    return fair


def fair_by_of(table: Table) -> FairBy | None:
    """Return what fairness goes by in the table; None where messages leave by due time alone."""
    return cast("FairBy | None", table.info.get(FAIR_BY))


def group_column(table: Table) -> Column[str]:
    """Return the column of a fair table that tells a message's group."""
    return table.c[FAIR_GROUP if FAIR_GROUP in table.c else "destination"]


def in_turn(query: Select[Any], table: Table, dialect: Dialect) -> Select[Any]:
    """Return the query for the messages of the turn bound as `group`, `since` and `until`, in their order."""
    group = group_column(table)
    order = dialect.groups.order(group, *in_order(table), constant=1)
    return _by_groups(query.where(dialect.groups.of_turn(group, table.c.due)).order_by(*order), table, dialect)


def _by_groups(query: Select[Any], table: Table, dialect: Dialect) -> Select[Any]:
    """Return the query that uses the index of groups where indexes are named."""
    if not dialect.words.forces_indexes:
        return query
    (index,) = (str(index.name) for index in table.indexes if ADDED_LATER in index.info)
    return query.with_hint(table, f"FORCE INDEX ({dialect.sql.identifier_preparer.quote(index)})")


def in_turns(
    turns: Sequence[Turn], limit: int, rows_of: Callable[[Turn, int], Sequence[Any]]
) -> list[tuple[Turn, Any]]:
    """Return up to `limit` rows that the turns give, each with its turn; `rows_of` returns up to so many of a turn."""
    found: list[tuple[Turn, Any]] = []
    for turn in turns:
        if len(found) == limit:
            break
        found += [(turn, row) for row in rows_of(turn, min(turn.most, limit - len(found)))]
    return found


def served_by(found: Sequence[tuple[Turn, Any]], fitting: int, limit: int) -> Served:
    """Return what turns have given.

    Args:
        found: The messages in their order, each with its turn and the due time from which on the group is asked again.
        fitting: How many of them are in the batch; the others were too large for it.
        limit: The most messages of the batch.
    """
    groups: dict[str, tuple[int, Any]] = {}
    for turn, since in found[:fitting]:
        groups[turn.group] = (groups.get(turn.group, (0, None))[0] + 1, since)
    return Served(groups, cut=fitting < len(found) or len(found) == limit)


class WaitingGroups(ABC):
    """The groups that have messages, while there is a backlog."""

    def __init__(self) -> None:
        self._turns = Turns()
        self.is_backlog: bool = False
        """Whether more messages wait than were taken at once."""
        self._looks_at = 0.0
        self._looks_wholly_at = 0.0

    @abstractmethod
    def between(
        self,
        connection: Connection,
        after: Sequence[str],
        before: Sequence[str],
        until: Any,  # noqa: ANN401
    ) -> Sequence[tuple[str, Any]]:
        """Return groups whose names are between others, with where their messages begin.

        Args:
            connection: The connection.
            after: The names that they follow.
            before: For each of those the name that they precede.
            until: The value that limits the messages.
        """

    @property
    def must_look(self) -> bool:
        """Whether there is a backlog, and it is time to look for its groups."""
        return self.is_backlog and time.monotonic() >= self._looks_at

    @property
    def is_wanted(self) -> bool:
        """Whether it is time to look, or there are turns."""
        return self.must_look or (self.is_backlog and len(self._turns) > 1)

    def look(self, connection: Connection, until: object) -> None:
        """Look for groups with messages up to `until`."""
        began, known = time.monotonic(), self._turns.known
        repeated = bool(known) and began >= self._looks_wholly_at
        after, before = ([""], [LAST_NAME]) if repeated else (["", *known], [*known, LAST_NAME])
        groups = self.between(connection, after, before, until)
        ended = time.monotonic()
        pause = LOOK_SHARE * (ended - began)
        if repeated or not known:
            self._turns.found(groups)
            self._looks_wholly_at = ended + max(WHOLE_LOOK_EVERY, pause)
        else:
            self._turns.found_others(groups)
        self._looks_at = ended + (LOOK_EVERY if repeated else min(max(LOOK_EVERY, pause), LOOK_WITHIN))

    def turns(self, limit: int) -> Sequence[Turn]:
        """Return the turns of the next batch; none where it is to be in the usual order.

        A backlog of a single group is served in that order: it is the same, and costs less.
        """
        return self._turns.next(limit) if self.is_backlog and len(self._turns) > 1 else []

    def served(self, turns: Sequence[Turn], served: Served) -> None:
        """Note what the turns have given."""
        self._turns.served(turns, served)
        self.is_backlog = bool(self._turns)

    def taken_in_order(self, *, all_found: bool) -> None:
        """Note whether a batch in the usual order has taken all messages."""
        self.is_backlog = not all_found


class DueGroups(WaitingGroups):
    """The groups of a store that have due messages.

    Args:
        table: A fair table.
        dialect: The database.
    """

    def __init__(self, table: Table, dialect: Dialect) -> None:
        super().__init__()
        group, due = group_column(table), table.c.due
        between = ["after", "before"]
        found = dialect.groups.due_groups(group, due)
        self.found: Prepared | None = None if found is None else Prepared(found, dialect.sql, [*between, "until"])
        first = select(group, due).where(group > bindparam("after"), group < bindparam("before"))
        first = _by_groups(first.order_by(group, due).limit(literal_column("1")), table, dialect)
        self.first: Prepared = Prepared(first, dialect.sql, between)

    def between(
        self,
        connection: Connection,
        after: Sequence[str],
        before: Sequence[str],
        until: Any,  # noqa: ANN401
    ) -> Sequence[tuple[str, Any]]:
        """Return groups with messages due by `until`, and their earliest due times."""
        if self.found is not None:
            return self.found.rows(connection, after, before, until)
        groups = steps_between(partial(self.first.rows, connection), after, before)
        return [(name, earliest) for name, earliest in groups if earliest <= until]


class QueuedGroups(WaitingGroups):
    """The groups of a queue that have messages, numbered.

    Args:
        queued: The table of the queues, with groups.
        dialect: The database.
        queue: The queue's name.
    """

    def __init__(self, queued: Table, dialect: Dialect, queue: str) -> None:
        super().__init__()
        self._queue = queue
        columns, queries, index = queued.c, dialect.groups, (queued.c.queue, queued.c[FAIR_GROUP], queued.c.seq)
        first = select(columns[FAIR_GROUP], columns.seq - literal_column("1"))
        first = first.where(queries.groups_between(*index[:2])).order_by(*queries.order(*index, constant=1))
        numbers = select(columns.seq).where(queries.group_after(*index)).order_by(*queries.order(*index, constant=2))
        first, numbers = (_by_groups(query, queued, dialect) for query in (first.limit(literal_column("1")), numbers))
        self.first: Prepared = Prepared(first, dialect.sql, ["queue", "after", "before"])
        self.numbers: Prepared = Prepared(
            numbers.limit(bindparam("number")), dialect.sql, ["queue", "group", "since", "number"]
        )

    def between(
        self,
        connection: Connection,
        after: Sequence[str],
        before: Sequence[str],
        until: Any,  # noqa: ANN401
    ) -> Sequence[tuple[str, Any]]:
        """Return groups with messages, and the number before their first one."""
        del until
        return list(steps_between(partial(self.first.rows, connection, self._queue), after, before))

    def claim(self, connection: Connection, claims: Claims, after: int, limit: int) -> list[int]:
        """Claim up to `limit` messages of several groups in turn, and return their numbers.

        Args:
            connection: The connection.
            claims: The process's claims.
            after: The number up to which the queue has been claimed in its order.
            limit: The most messages.
        """
        if self.must_look:
            self.look(connection, None)

        def claimed_of(turn: Turn, number: int) -> Sequence[int]:
            since = max(turn.since, after)
            size = number + claims.number_claimed_after(since)
            rows = self.numbers.rows(connection, self._queue, turn.group, since, size)
            return claims.take([row for (row,) in rows], number)

        turns = self.turns(limit)
        claimed = in_turns(turns, limit, claimed_of)
        if turns:
            self.served(turns, served_by(claimed, len(claimed), limit))
        return [number for _, number in claimed]


def steps_between(
    first: Callable[[str, str], Sequence[Any]], after: Sequence[str], before: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """Yield what `first` finds behind each name, from name to name, before another."""
    for start, end in zip(after, before, strict=True):
        name = start
        while rows := first(name, end):
            ((name, found),) = rows
            yield name, found
