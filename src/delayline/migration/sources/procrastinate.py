"""Procrastinate's scheduled jobs: a partition for each of its queues."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar, Final

from sqlalchemy import BigInteger, Boolean, Column, Integer, String, Text, and_, cast, func, select
from sqlalchemy.dialects import postgresql
from sqlalchemy.sql import column, table

from delayline.errors import ConfigurationError
from delayline.message import Headers
from delayline.migration.rows import record_batch
from delayline.migration.source import SourcePartition, TableSource

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    import pyarrow as pa
    from sqlalchemy import ColumnElement, Connection, FromClause, Select, Table

PROCRASTINATE_JOBS: Final = "procrastinate_jobs"
WAITING_STATUS: Final = "todo"
STATUSES: Final = ("todo", "doing", "succeeded", "failed", "cancelled", "aborting", "aborted")
#: Headers that describe the original job; the body has its arguments.
TASK: Final = "Procrastinate.Task"
ATTEMPTS_HEADER: Final = "Procrastinate.Attempts"
LOCKED: Final = "it has a {}, which no message can have: let Procrastinate run it"


class Procrastinate(TableSource):
    """Jobs of Procrastinate 3 that are to run at a time: the queue becomes the destination, the arguments the body.

    Jobs of periodic tasks stay, as Procrastinate makes them itself; so do jobs with locks. The events of a job go when
    it moves, and are not restored with it.
    """

    kind: ClassVar[str] = "procrastinate"
    key: ClassVar[str] = "id"
    due: ClassVar[str] = "scheduled_at"
    body: ClassVar[str] = "args"
    destination: ClassVar[str | None] = "queue_name"
    owner: ClassVar[str | None] = "queue_name"
    outside: ClassVar[str] = "it belongs to a periodic task, or is due beyond the years 1753 to 9999"

    def __init__(self, url: str, *, schema: str | None = None) -> None:
        super().__init__(url, schema=schema)
        if self.dialect.sql.name != "postgresql":
            raise ConfigurationError(f"Procrastinate's jobs are on PostgreSQL, not on {self.dialect}")

    def columns(self) -> list[Column[Any]]:
        """Return the columns that Procrastinate 3 makes."""
        status = postgresql.ENUM(*STATUSES, name="procrastinate_job_status", create_type=False)
        return [
            Column("id", BigInteger, primary_key=True),
            Column("queue_name", String(128)),
            Column("task_name", String(128)),
            Column("priority", Integer),
            Column("lock", Text),
            Column("queueing_lock", Text),
            Column("args", postgresql.JSONB),
            Column("status", status),
            Column("scheduled_at", postgresql.TIMESTAMP(timezone=True)),
            Column("attempts", Integer),
            Column("abort_requested", Boolean),
            Column("worker_id", BigInteger),
        ]

    def partitions(self, connection: Connection) -> list[SourcePartition]:
        """Return a partition for each queue with scheduled jobs."""
        if PROCRASTINATE_JOBS not in self.table_names(connection):
            return []
        self.check_columns(connection, PROCRASTINATE_JOBS)
        queue = self.table(PROCRASTINATE_JOBS).c.queue_name
        rows = connection.execute(select(queue).distinct().where(self._scheduled()))
        return [SourcePartition(name, PROCRASTINATE_JOBS, name) for name in sorted(rows.scalars())]

    def movable(self, partition: SourcePartition, cutoff: datetime | None) -> ColumnElement[bool]:
        """Return the condition on scheduled jobs that no periodic task refers to."""
        periodic: Select[Any] = select(column("job_id")).select_from(
            table("procrastinate_periodic_defers", schema=self.schema)
        )
        kept = self.table(partition.table).c.id.in_(periodic.where(column("job_id").is_not(None)))
        return and_(super().movable(partition, cutoff), ~kept)

    def owned(self, partition: SourcePartition) -> ColumnElement[bool]:
        """Return the scheduled jobs of the queue."""
        return and_(super().owned(partition), self._scheduled())

    def kept_due(self, due: datetime) -> datetime:
        """Return the instant."""
        return due

    def read_due(self, kept: datetime) -> datetime:
        """Return the instant in UTC."""
        return self.dialect.values.from_due(kept)

    def size(self, rows: FromClause) -> ColumnElement[int]:
        """Return how long the arguments are as text."""
        return func.length(cast(rows.c.args, Text))

    def selected(self, table: Table, *, bodies: bool = True) -> Sequence[ColumnElement[Any]]:
        """Return the columns that make a job a message."""
        del bodies
        names = ("id", "queue_name", "scheduled_at", "task_name", "attempts", "lock", "queueing_lock")
        return [*(table.c[name] for name in names), cast(table.c.args, Text)]

    def messages(self, rows: Sequence[Sequence[Any]]) -> pa.RecordBatch:
        """Return the jobs as messages; jobs with locks with a reason."""
        return record_batch(self._message(*row) for row in rows)

    def _message(
        self, key: int, queue: str, due: datetime, task: str, attempts: int, lock: str | None, queueing: str | None,
        args: str,
    ) -> tuple[Any, ...]:  # fmt: skip
        message_id = f"procrastinate-{key}"
        named = {
            Headers.MESSAGE_ID: message_id, Headers.CONTENT_TYPE: "application/json", TASK: task,
            ATTEMPTS_HEADER: str(attempts),
        }  # fmt: skip
        reason = LOCKED.format("lock") if lock else LOCKED.format("queueing lock") if queueing else None
        return message_id, queue, self.read_due(due), json.dumps(named), args.encode(), reason

    def _scheduled(self) -> ColumnElement[bool]:
        columns = self.table(PROCRASTINATE_JOBS).c
        return and_(columns.status == WAITING_STATUS, columns.scheduled_at.is_not(None))
