"""The groups of a store's due messages, which are served in turn while there is a backlog; see `delayed.fairness`.

A group is found by an index over groups and due times, whatever the number of its messages: from each group to the
next is a step. That look is repeated at most ten times a second, and less often the longer it takes.

Where a server keeps the index entries of deleted rows, the step to a group that has been served for long reads all of
them. There most looks go from each known group to the next known one, and a whole look is repeated after some seconds:
it finds what others have released or stored late below the due time from which on a known group is asked.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

from sqlalchemy import Column, Index, MetaData, bindparam, literal_column, select

from delayline.delayed.fairness import LONGEST_GROUP, NO_GROUP, FairBy, Served, Turns
from delayline.message import MAXIMUM_DESTINATION_LENGTH
from delayline.sql.prepared import Prepared
from delayline.sql.schema import ADDED_LATER, in_order, index_name, text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection, Select, Table

    from delayline.delayed.fairness import Turn
    from delayline.sql.dialect import Dialect

#: The column of messages' groups, where fairness goes by a header.
FAIR_GROUP: Final = "fair_group"
#: Key in the `info` of a store's table: what fairness goes by.
FAIR_BY: Final = "delayline serves fairly by"
#: The parameters of `in_turn`.
OF_TURN: Final = ("group", "since", "until")
#: Seconds between looks for groups that cost little ...
LOOK_EVERY: Final = 0.1
#: ... costlier ones pause for so many times as long as they take.
LOOK_SHARE: Final = 10
#: Seconds between looks for all groups, known ones too, where others pass them over.
WHOLE_LOOK_EVERY: Final = 5.0
#: Follows every name.
LAST_NAME: Final = chr(0x10FFFF) * MAXIMUM_DESTINATION_LENGTH


@lru_cache(maxsize=64)
def fair_table(table: Table, fair_by: FairBy) -> Table:
    """Return the table of a store with what fairness needs: an index, and by a header the column of groups."""
    fair = table.to_metadata(MetaData(schema=table.schema))
    if fair_by.header is not None:
        fair.append_column(Column(FAIR_GROUP, text(LONGEST_GROUP), nullable=False, server_default=NO_GROUP))
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
    query = query.where(dialect.words.of_turn(group, table.c.due)).order_by(group, *in_order(table))
    return _by_groups(query, table, dialect)


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


class DueGroups:
    """The groups of a store that have due messages while there is a backlog.

    Args:
        table: A fair table.
        dialect: The database.
    """

    def __init__(self, table: Table, dialect: Dialect) -> None:
        group, due = group_column(table), table.c.due
        between = ["after", "before"]
        found = dialect.words.due_groups(group, due)
        self.found = None if found is None else Prepared(found, dialect.sql, [*between, "until"])
        first = select(group, due).where(*(group > bindparam("after"), group < bindparam("before")))
        first = _by_groups(first.order_by(group, due).limit(literal_column("1")), table, dialect)
        self.first = Prepared(first, dialect.sql, between)
        self._turns = Turns()
        self._is_backlog = False
        self._looks_at = 0.0
        self._looks_wholly_at = 0.0

    @property
    def must_look(self) -> bool:
        """Whether there is a backlog, and it is time to look for its groups."""
        return self._is_backlog and time.monotonic() >= self._looks_at

    def look(self, connection: Connection, until: object) -> None:
        """Look for groups with messages due by `until`."""
        began, known = time.monotonic(), self._turns.known
        repeated = bool(known) and began >= self._looks_wholly_at
        after, before = ([""], [LAST_NAME]) if repeated else (["", *known], [*known, LAST_NAME])
        groups = self._between(connection, after, before, until)
        ended = time.monotonic()
        pause = LOOK_SHARE * (ended - began)
        if repeated or not known:
            self._turns.found(groups)
            self._looks_wholly_at = ended + max(WHOLE_LOOK_EVERY, pause)
        else:
            self._turns.found_others(groups)
        self._looks_at = ended + (LOOK_EVERY if repeated else max(LOOK_EVERY, pause))

    def _between(
        self,
        connection: Connection,
        after: Sequence[str],
        before: Sequence[str],
        until: Any,  # noqa: ANN401
    ) -> Sequence[tuple[str, Any]]:
        """Return groups with due messages between names, and their earliest due times."""
        if self.found is not None:
            return self.found.rows(connection, after, before, until)
        groups: list[tuple[str, Any]] = []
        for name, end in zip(after, before, strict=True):
            while row := next(iter(self.first.rows(connection, name, end)), None):
                name, earliest = row
                if earliest <= until:
                    groups.append((name, earliest))
        return groups

    def turns(self, limit: int) -> Sequence[Turn]:
        """Return the turns of the next batch; none where it is to be by due time alone.

        A backlog of a single group is served by due time: it is the same, and costs less.
        """
        return self._turns.next(limit) if self._is_backlog and len(self._turns) > 1 else []

    def served(self, turns: Sequence[Turn], served: Served) -> None:
        """Note what the turns have given."""
        self._turns.served(turns, served)
        self._is_backlog = bool(self._turns)

    def moved_by_due_time(self, *, all_due: bool) -> None:
        """Note whether a batch by due time alone has taken all due messages."""
        self._is_backlog = not all_due
