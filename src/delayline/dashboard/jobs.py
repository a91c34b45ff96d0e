"""The jobs of the pipeline, as their tables in the store's database have them."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Final

from sqlalchemy import func, inspect, select

from delayline.bulk.cold_catalog import FileState, cold_tables
from delayline.bulk.dispatchers import dispatcher_tables
from delayline.bulk.jobs import JobPieces
from delayline.dashboard.back_ends import PageQueries, within_limit
from delayline.dashboard.model import ColdDay, JobRow, Jobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, Table

    from delayline.dashboard.actions import Actions
    from delayline.dashboard.back_ends import BackEnds
    from delayline.sql.dialect import Dialect

#: Rows of each kind.
LISTED: Final = 50


class PipelineJobs(PageQueries):
    """Lists the jobs of the pipeline that works on an endpoint's store."""

    def __init__(self, back_ends: BackEnds, actions: Actions) -> None:
        super().__init__(back_ends)
        self._actions = actions

    async def all(self) -> Jobs:
        """Return the jobs of the pipeline, from their tables."""
        schedule_rows, dispatcher_rows, migration_rows, cold_rows, actions, kept = await asyncio.gather(
            self._schedules(),
            self._rows(dispatchers),
            self._migrations(),
            self._cold_tier(),
            self._actions.recorded(),
            self._actions.are_kept(),
        )
        return Jobs(schedule_rows, dispatcher_rows, migration_rows, cold_rows, actions, kept)

    @within_limit
    async def _rows(self, read: Callable[[Connection, Dialect, str | None], list[JobRow]]) -> list[JobRow]:
        return await self.back_ends.sql_store("their records are").read_tables(read)

    @within_limit
    async def _schedules(self) -> list[JobRow]:
        store = self.back_ends.sql_store("their records are")
        return await store.read_tables(partial(schedules, store=store.table_of(self.back_ends.name)))

    @within_limit
    async def _migrations(self) -> list[JobRow]:
        work = await asyncio.to_thread(migrations)  # its import takes seconds
        return await self.back_ends.sql_store("their records are").read_tables(work)

    @within_limit
    async def _cold_tier(self) -> list[ColdDay]:
        store = self.back_ends.sql_store("their records are")
        return await store.read_tables(partial(cold_tier, store=store.table_of(self.back_ends.name).name))


def schedules(connection: Connection, dialect: Dialect, schema: str | None, *, store: Table) -> list[JobRow]:
    """Return the bulk jobs of a store, the latest first."""
    del schema
    rows = []
    for job in JobPieces(dialect, store).jobs(connection, limit=LISTED):
        done, is_open = job.committed, job.is_open
        details = {"cold": str(done.cold)} if job.parameters.has_cold_tier else {}
        details |= {"sent": str(done.sent)} if job.parameters.part or done.sent else {}
        details |= {"duplicates": str(done.duplicates), "rejected": str(done.rejected)}
        details |= {"pieces": str(job.pieces), "last piece": job.last.isoformat(timespec="seconds")} if is_open else {}
        ended, total = (None, None) if is_open else (job.last, done.rows)
        number = done.stored + done.cold + done.sent
        rows.append(JobRow("schedule", str(job.name), job.state, job.started, ended, total, number, details))
    return rows


def dispatchers(connection: Connection, dialect: Dialect, schema: str | None) -> list[JobRow]:
    """Return the dispatchers and their tasks."""
    tables = dispatcher_tables(schema)
    if not _exists(connection, tables.dispatchers):
        return []
    owners, shards = tables.dispatchers.c, tables.shards.c
    alive = (owners.until > dialect.values.in_seconds(0)).label("alive")
    states = connection.execute(
        select(owners.name, owners.owner, owners.generation, owners.stopping, alive).order_by(owners.name).limit(LISTED)
    ).all()
    rows = []
    for dispatcher in states:
        state = "expired" if not dispatcher.alive else "stopping" if dispatcher.stopping else "alive"
        details = {"owner": dispatcher.owner, "generation": str(dispatcher.generation)}
        number = 0
        mine = select(tables.shards).where(shards.dispatcher == dispatcher.name).order_by(shards.shard).limit(LISTED)
        for shard in connection.execute(mine):
            number += int(shard.dispatched)
            late = "" if shard.p99 is None else f", p99 {shard.p99:.3f} s"
            seen = dialect.values.from_due(shard.seen).isoformat(timespec="seconds")
            counts = f"{shard.dispatched} dispatched, {shard.retried} retried, {shard.failed} failed{late}"
            details[f"shard {shard.shard}"] = f"{counts}, on {shard.place}, seen {seen}"
        rows.append(JobRow("dispatcher", dispatcher.name, state, None, None, None, number, details))
    return rows


def cold_tier(connection: Connection, dialect: Dialect, schema: str | None, *, store: str) -> list[ColdDay]:
    """Return the files of a store's cold tier by the day on which they are due, earliest first."""
    del dialect
    table = cold_tables(schema).files
    if not _exists(connection, table):
        return []
    hour, state = table.c.due_hour, table.c.state
    sums = select(hour, state, func.sum(table.c.messages), func.count()).where(table.c.store == store)
    hours: dict[str, Counter[str]] = {}
    files: Counter[str] = Counter()
    promoted: Counter[str] = Counter()
    for due_hour, kind, messages, number in connection.execute(sums.group_by(hour, state).order_by(hour)):
        day = f"{due_hour[:4]}-{due_hour[4:6]}-{due_hour[6:8]}"
        by_hour = hours.setdefault(day, Counter())
        if kind == FileState.HELD:
            by_hour[f"{due_hour[8:]}:00"] += int(messages)
            files[day] += int(number)
        elif kind == FileState.PROMOTED:
            promoted[day] += int(messages)
    return [ColdDay(day, by_hour, files[day], promoted[day]) for day, by_hour in hours.items()]


def migrations() -> Callable[[Connection, Dialect, str | None], list[JobRow]]:
    """Return the function that returns the runs of migrations; raises MissingExtra without the extra `spark`."""
    from delayline.migration.journal import MigrationJournal

    def runs(connection: Connection, dialect: Dialect, schema: str | None) -> list[JobRow]:
        journal = MigrationJournal(dialect, schema)
        rows = []
        for run in journal.list_runs(connection)[:LISTED]:
            progress = journal.progress(connection, run.name)
            details = {
                **run.parameters,
                "rejected": str(progress.rejected),
                "staged": str(progress.staged),
                "delivered": str(progress.delivered),
            }
            name, state = run.name, run.state.value
            rows.append(
                JobRow("migration", name, state, run.started, run.finished, progress.rows, progress.marked, details)
            )
        return rows

    return runs


def _exists(connection: Connection, table: Table) -> bool:
    return inspect(connection).has_table(table.name, schema=table.schema)
