"""The journal of migrations, kept in the source's database: runs, partitions, batches, and rejected rows.

A batch is staged (its rows are in the holding table), then delivered (written to the target, whose confirmation is not
recorded yet), then marked (confirmed by the target). An abort returns staged and delivered rows to the source.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    MetaData,
    Table,
    and_,
    case,
    delete,
    desc,
    func,
    insert,
    inspect,
    or_,
    select,
    update,
)

from delayline.errors import BackendUnavailable
from delayline.migration.source import SourcePartition
from delayline.sql.schema import CONTENT, DUE, TableGroup, register, text
from delayline.sql.setup import RequiredTables

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from sqlalchemy import ColumnElement, Connection, FromClause

    from delayline.sql.dialect import Dialect

LONGEST_RUN: Final = 40
LONGEST_TABLE_NAME: Final = 250
LONGEST_KEPT_REASON: Final = 1000
#: The table of runs, and the lock of the process that works on them.
MIGRATIONS_TABLE: Final = "delayline_migrations"


class RunState(StrEnum):
    """How far a run is."""

    PREPARING = "preparing"
    RUNNING = "running"
    COMPLETED = "completed"
    ABORTED = "aborted"


NAMES_IN_STATEMENT: Final = 1000


class BatchState(StrEnum):
    """How far a batch is."""

    STAGED = "staged"
    DELIVERED = "delivered"
    MARKED = "marked"
    RESTORED = "restored"


#: Values, not members: drivers bind members of enums in different ways.
UNFINISHED: Final = (BatchState.STAGED.value, BatchState.DELIVERED.value)


@dataclass(frozen=True)
class MigrationRun:
    """A run, as it is kept."""

    name: str
    state: RunState
    parameters: Mapping[str, str]
    """The options of the run, without secrets."""
    started: datetime
    finished: datetime | None


@dataclass(frozen=True)
class HeldPartition:
    """An endpoint's rows of a run."""

    number: int
    source: SourcePartition
    target: str
    """The endpoint's name at the target."""
    held: str
    """The name of the holding table."""
    rows: int
    batches: int


class StartedRun(NamedTuple):
    """An attempt at a batch that has begun."""

    number: int
    rows: int


@dataclass(frozen=True)
class Progress:
    """Counts of rows of a run."""

    rows: int
    staged: int
    delivered: int
    marked: int
    restored: int
    rejected: int
    moved: int = 0
    """Marked rows that were not rejected: those that the target has."""


class MigrationTables:
    """Runs, their partitions and batches, and the rejected rows."""

    def __init__(self, schema: str | None) -> None:
        metadata = MetaData(schema=schema)
        run = ("run", text(LONGEST_RUN))
        self.runs: Table = Table(
            MIGRATIONS_TABLE,
            metadata,
            Column(*run, primary_key=True),
            Column("state", text(LONGEST_RUN), nullable=False),
            Column("parameters", CONTENT, nullable=False),
            Column("started", DUE, nullable=False),
            Column("finished", DUE),
        )
        self.partitions: Table = Table(
            "delayline_migration_parts",
            metadata,
            Column(*run, primary_key=True),
            Column("part", BigInteger, primary_key=True, autoincrement=False),
            *(Column(name, text(LONGEST_TABLE_NAME), nullable=False) for name in ("endpoint", "source_table")),
            Column("owner", text(LONGEST_TABLE_NAME)),
            *(Column(name, text(LONGEST_TABLE_NAME), nullable=False) for name in ("target", "held")),
            Column("rows", BigInteger, nullable=False),
            Column("batches", BigInteger, nullable=False),
        )
        self.batches: Table = Table(
            "delayline_migration_batches",
            metadata,
            Column(*run, primary_key=True),
            *(Column(name, BigInteger, primary_key=True, autoincrement=False) for name in ("part", "batch")),
            Column("rows", BigInteger, nullable=False),
            Column("state", text(LONGEST_RUN), nullable=False),
            Column("attempts", BigInteger, nullable=False),
        )
        self.rejected: Table = Table(
            "delayline_migration_aside",
            metadata,
            Column(*run, primary_key=True),
            *(
                Column(name, BigInteger, primary_key=True, autoincrement=False)
                for name in ("part", "batch", "attempt", "number")
            ),
            Column("id", CONTENT, nullable=False),
            Column("reason", text(LONGEST_KEPT_REASON), nullable=False),
        )

    @property
    def all(self) -> list[Table]:
        """All of them; the runs last, so that the others exist where they do."""
        return [self.partitions, self.batches, self.rejected, self.runs]


@lru_cache(maxsize=64)
def migration_tables(schema: str | None = None) -> MigrationTables:
    """Return the tables in that schema, the connection's own for None."""
    return MigrationTables(schema)


MIGRATIONS: Final = register(TableGroup("migrations", lambda _, schema: migration_tables(schema).all))


class MigrationJournal:
    """The tables of a database; every call is part of the caller's transaction."""

    def __init__(self, dialect: Dialect, schema: str | None) -> None:
        tables = migration_tables(schema)
        self.runs: Table = tables.runs
        self.partitions: Table = tables.partitions
        self.batches: Table = tables.batches
        self.rejected: Table = tables.rejected
        self._dialect = dialect

    def exists(self, connection: Connection) -> bool:
        """Return whether the tables exist, as they do since the first migration."""
        return inspect(connection).has_table(self.runs.name, schema=self.runs.schema)

    def set_up(self, connection: Connection) -> None:
        """Create the tables, or upgrade them."""
        RequiredTables(self._dialect, self.runs.schema, MIGRATIONS).set_up(connection)

    def list_runs(self, connection: Connection) -> list[MigrationRun]:
        """Return all runs, the latest first."""
        if not self.exists(connection):
            return []
        columns = self.runs.c
        rows = connection.execute(select(self.runs).order_by(desc(columns.started), desc(columns.run)))
        return [
            MigrationRun(row.run, RunState(row.state), json.loads(bytes(row.parameters)), self._time(row.started),
                None if row.finished is None else self._time(row.finished))
            for row in rows
        ]  # fmt: skip

    def begin(self, connection: Connection, name: str, parameters: Mapping[str, str]) -> None:
        """Record a new run."""
        kept = json.dumps(dict(parameters)).encode()
        row = {"run": name, "state": RunState.PREPARING.value, "parameters": kept, "started": self._now()}
        connection.execute(insert(self.runs).values(row))

    def set_state(self, connection: Connection, name: str, state: RunState) -> None:
        """Record the run's state; COMPLETED and ABORTED end it."""
        finished = self._now() if state in (RunState.COMPLETED, RunState.ABORTED) else None
        changed = update(self.runs).where(self.runs.c.run == name).values(state=state.value, finished=finished)
        connection.execute(changed)

    def must_be_open(self, connection: Connection, name: str) -> None:
        """Raise BackendUnavailable if another process has ended the run; otherwise lock it for this transaction."""
        state = connection.execute(select(self.runs.c.state).where(self.runs.c.run == name).with_for_update()).scalar()
        if state not in (RunState.PREPARING, RunState.RUNNING):
            raise BackendUnavailable(f"migration {name} was {state} by another process: this run stops")

    def add_partition(self, connection: Connection, run: str, held: HeldPartition, batches: Mapping[int, int]) -> None:
        """Record the held rows of an endpoint, and the sizes of its batches."""
        row = {
            "run": run, "part": held.number, "endpoint": held.source.endpoint, "source_table": held.source.table,
            "owner": held.source.owner, "target": held.target, "held": held.held, "rows": held.rows,
            "batches": held.batches,
        }  # fmt: skip
        connection.execute(insert(self.partitions).values(row))
        for some in chunks(list(batches.items())):
            staged = [
                {"run": run, "part": held.number, "batch": batch, "rows": rows, "state": BatchState.STAGED.value,
                 "attempts": 0}
                for batch, rows in some
            ]  # fmt: skip
            connection.execute(insert(self.batches), staged)

    def list_partitions(self, connection: Connection, run: str) -> list[HeldPartition]:
        """Return the partitions of a run."""
        rows = connection.execute(
            select(self.partitions).where(self.partitions.c.run == run).order_by(self.partitions.c.part)
        )
        return [
            HeldPartition(
                row.part,
                SourcePartition(row.endpoint, row.source_table, row.owner),
                row.target,
                row.held,
                row.rows,
                row.batches,
            )
            for row in rows
        ]  # fmt: skip

    def unfinished(self, connection: Connection, run: str, partition: int) -> list[int]:
        """Return the numbers of the batches that are still to go."""
        columns = self.batches.c
        query = select(columns.batch).where(self._of(run, partition), columns.state.in_(UNFINISHED))
        return list(connection.execute(query.order_by(columns.batch)).scalars())

    def deliver(
        self, connection: Connection, run: str, partition: int, batches: Sequence[int]
    ) -> dict[int, StartedRun]:
        """Begin an attempt at each of the batches that is not done.

        Raises BackendUnavailable where the run was aborted meanwhile.
        """
        columns = self.batches.c
        mine = and_(self._of(run, partition), columns.batch.in_(batches))
        begun = update(self.batches).where(mine, columns.state.in_(UNFINISHED))
        connection.execute(begun.values(state=BatchState.DELIVERED.value, attempts=columns.attempts + 1))
        query = select(columns.batch, columns.state, columns.attempts, columns.rows).where(mine).order_by(columns.batch)
        started: dict[int, StartedRun] = {}
        for row in connection.execute(query):
            if row.state == BatchState.DELIVERED:
                started[row.batch] = StartedRun(int(row.attempts), int(row.rows))
            else:
                self._must_be_marked(row.state, run)
        return started

    def record_rejected(
        self,
        connection: Connection,
        run: str,
        partition: int,
        batch: int,
        attempt: int,
        rejected: Mapping[int, tuple[str, str]],
    ) -> None:
        """Record the ids and reasons of rejected rows of an attempt, by row number.

        It counts if the attempt does. Nothing is written where the batch is done. Raises BackendUnavailable for an
        attempt that is not the last.
        """
        columns, lost = self.batches.c, self.rejected.c
        mine = and_(self._of(run, partition), columns.batch == batch)
        begun = connection.execute(select(columns.state, columns.attempts).where(mine).with_for_update()).one()
        if begun.state != BatchState.DELIVERED:
            self._must_be_marked(begun.state, run)
            return
        if begun.attempts != attempt:
            raise BackendUnavailable(f"another task works on batch {batch} now: this attempt's work does not count")
        before = and_(self.rejected_in(run, partition), lost.batch == batch, lost.attempt == attempt)
        connection.execute(delete(self.rejected).where(before))
        rows = [
            {"run": run, "part": partition, "batch": batch, "attempt": attempt, "number": number,
             "id": key.encode("utf-8", "replace"), "reason": reason[:LONGEST_KEPT_REASON]}
            for number, (key, reason) in rejected.items()
        ]  # fmt: skip
        if rows:
            connection.execute(insert(self.rejected), rows)

    def mark(self, connection: Connection, run: str, partition: int, attempts: Mapping[int, int]) -> None:
        """Mark committed batches, with the attempts that count; rejections of other attempts are deleted.

        A batch that is marked stays as it is. Raises BackendUnavailable where the run was aborted meanwhile.
        """
        columns, lost = self.batches.c, self.rejected.c
        for some in chunks(list(attempts)):
            query = select(columns.batch, columns.state).where(self._of(run, partition), columns.batch.in_(some))
            mine: dict[int, list[int]] = {}
            for batch, state in connection.execute(query.with_for_update()):
                if state in UNFINISHED:
                    mine.setdefault(attempts[batch], []).append(batch)
                else:
                    self._must_be_marked(state, run)
            for attempt, batches in mine.items():
                done = update(self.batches).where(self._of(run, partition), columns.batch.in_(batches))
                connection.execute(done.values(state=BatchState.MARKED.value))
                others = and_(self.rejected_in(run, partition), lost.batch.in_(batches), lost.attempt != attempt)
                connection.execute(delete(self.rejected).where(others))

    def expected(self, connection: Connection, run: str, partition: int, attempts: Mapping[int, int]) -> int:
        """Return how many rows of the batches go to the target: all but the rows that the attempts have rejected."""
        columns, lost = self.batches.c, self.rejected.c
        rows = 0
        for some in chunks(list(attempts)):
            total = select(func.sum(columns.rows)).where(self._of(run, partition), columns.batch.in_(some))
            rows += int(connection.execute(total).scalar() or 0)
            by_attempt = select(lost.batch, lost.attempt, func.count()).where(
                self.rejected_in(run, partition), lost.batch.in_(some)
            )
            counts = connection.execute(by_attempt.group_by(lost.batch, lost.attempt))
            rows -= sum(int(number) for batch, attempt, number in counts if attempts[batch] == attempt)
        return rows

    def restore(self, connection: Connection, run: str) -> None:
        """Record that undelivered rows were returned."""
        columns = self.batches.c
        back = update(self.batches).where(columns.run == run, columns.state.in_(UNFINISHED))
        connection.execute(back.values(state=BatchState.RESTORED.value))

    def progress(self, connection: Connection, run: str) -> Progress:
        """Return the number of rows in each state."""
        columns = self.batches.c
        query = select(columns.state, func.sum(columns.rows)).where(columns.run == run).group_by(columns.state)
        rows = {state: int(number) for state, number in connection.execute(query)}
        done = case((columns.state == BatchState.MARKED.value, 1))
        rejected = select(func.count(), func.count(done)).select_from(self._counted).where(self.rejected.c.run == run)
        number, of_marked = map(int, connection.execute(rejected).one())
        staged, delivered, marked, restored = (rows.get(state.value, 0) for state in BatchState)
        return Progress(sum(rows.values()), staged, delivered, marked, restored, number, marked - of_marked)

    def reasons(self, connection: Connection, run: str) -> list[tuple[str, int]]:
        """Return the reasons for rejections, the most frequent first."""
        reason = self.rejected.c.reason
        query = (
            select(reason, func.count()).select_from(self._counted).where(self.rejected.c.run == run).group_by(reason)
        )
        counts = [(why, int(number)) for why, number in connection.execute(query)]
        return sorted(counts, key=lambda count: -count[1])

    def list_rejected(self, connection: Connection, run: str, limit: int) -> list[tuple[str, str]]:
        """Return ids of rejected rows, with their reasons."""
        columns = self.rejected.c
        query = select(columns.id, columns.reason).select_from(self._counted).where(columns.run == run)
        rows = connection.execute(query.order_by(columns.part, columns.batch, columns.number).limit(limit))
        return [(bytes(key).decode(), reason) for key, reason in rows]

    def attempted_once(self, run: str, partition: int) -> ColumnElement[bool]:
        """Return the condition on the rows of `batches` that they are the partition's, done by their first attempt."""
        return and_(self.batches_in(run, partition, [BatchState.MARKED.value]), self.batches.c.attempts == 1)

    def repeated(self, connection: Connection, run: str, partition: int) -> list[int]:
        """Return the batches that the target may have more than once, or that were returned after an attempt."""
        columns = self.batches.c
        again = and_(columns.state == BatchState.MARKED.value, columns.attempts > 1)
        back = and_(columns.state == BatchState.RESTORED.value, columns.attempts > 0)
        query = select(columns.batch).where(self._of(run, partition), or_(again, back))
        return list(connection.execute(query.order_by(columns.batch)).scalars())

    def rejected_in(self, run: str, partition: int) -> ColumnElement[bool]:
        """Return the condition on the rows of `rejected` that they are the partition's."""
        return and_(self.rejected.c.run == run, self.rejected.c.part == partition)

    def batches_in(self, run: str, partition: int, states: Iterable[str]) -> ColumnElement[bool]:
        """Return the condition on the rows of `batches` that they are the partition's, in one of the states."""
        return and_(self._of(run, partition), self.batches.c.state.in_(list(states)))

    def _of(self, run: str, partition: int) -> ColumnElement[bool]:
        return and_(self.batches.c.run == run, self.batches.c.part == partition)

    @property
    def _counted(self) -> FromClause:
        """Return the rows rejected by the counting attempts, or by the last attempt while none counts."""
        batches, rejected = self.batches.c, self.rejected.c
        same = and_(batches.run == rejected.run, batches.part == rejected.part, batches.batch == rejected.batch)
        last = or_(batches.state == BatchState.MARKED.value, batches.attempts == rejected.attempt)
        return self.rejected.join(self.batches, and_(same, last))

    def _must_be_marked(self, state: str, run: str) -> None:
        if state != BatchState.MARKED:
            raise BackendUnavailable(f"migration {run} was aborted meanwhile: this task's work does not count")

    def _now(self) -> Any:  # noqa: ANN401 - what the driver takes
        return self._dialect.values.to_due(datetime.now(UTC))

    def _time(self, kept: Any) -> datetime:  # noqa: ANN401 - what the driver gives
        return self._dialect.values.from_due(kept)


def chunks(names: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield the names in lists that fit into a statement's parameters."""
    for first in range(0, len(names), NAMES_IN_STATEMENT):
        yield names[first : first + NAMES_IN_STATEMENT]
