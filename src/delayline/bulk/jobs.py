"""The ledger of jobs that commit in pieces: each piece of a job is stored once, whoever stores it.

A job is known by its name and version. Its pieces are cut by the hashes of their messages' ids, so that every attempt
cuts alike; a task records a piece in the transaction that stores its messages. When all pieces are stored the job
is done, and its row keeps the sums.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import (
    Table,
    delete,
    func,
    inspect,
    select,
    update,
)

from delayline.bulk.fingerprint import Fingerprint
from delayline.bulk.ledger import LEDGER, Committed, job_tables
from delayline.errors import ConfigurationError, DifferentInput
from delayline.sql.prepared import Prepared
from delayline.sql.setup import RequiredTables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import ColumnElement, Connection

    from delayline.delayed.store import OnConflict
    from delayline.sql.dialect import Dialect

#: Jobs that nobody has named are forgotten so long after they began.
UNNAMED_KEPT: Final = timedelta(days=7)
#: Of the numbers of jobs and of attempts.
NUMBER_BITS: Final = 62


class JobState(StrEnum):
    """How far a job is."""

    OPEN = "open"
    """Some of its pieces may be stored."""
    DONE = "done"
    """All of its pieces are stored."""


class JobName(NamedTuple):
    """The name and version of a job, as `txnAppId` and `txnVersion` name a write to a Delta table."""

    name: str
    version: int = 0

    def __str__(self) -> str:
        return self.name if not self.version else f"{self.name} version {self.version}"


@dataclass(frozen=True)
class PieceParameters:
    """What all attempts of a job share, so that they cut the same pieces from the same messages."""

    now: int
    """The time that delays are counted from, in microseconds since 1970."""
    pieces: int
    """Into how many pieces the messages are cut."""
    on_conflict: OnConflict
    named: bool = True
    """Whether a user has given the name."""
    stream: bool = False
    """Whether the versions of the name are batches of a stream, of which the ledger keeps the last."""


@dataclass(frozen=True)
class Job:
    """A job in the ledger."""

    number: int
    name: JobName
    parameters: PieceParameters
    state: JobState
    committed: Committed
    """What is stored so far."""
    pieces: int
    """How many pieces with messages are stored; 0 for a job that is done."""
    started: datetime
    last: datetime
    """When its last piece was stored, or it began or ended."""

    @property
    def is_open(self) -> bool:
        """Whether some of its pieces may be missing."""
        return self.state is JobState.OPEN


class PieceCounts(NamedTuple):
    """What a transaction has done with the rows of its pieces."""

    stored: int
    duplicates: int
    rejected: int
    bytes: int


class JobPieces:
    """The ledger of the jobs of a store; every call is part of the caller's transaction."""

    def __init__(self, dialect: Dialect, store: Table) -> None:
        self._dialect = dialect
        self._store = store.name
        self._jobs, self._pieces = job_tables(store.schema)

    def create(self, connection: Connection) -> None:
        """Create the tables, or upgrade them."""
        RequiredTables(self._dialect, self._jobs.schema, LEDGER).set_up(connection)

    def open(self, connection: Connection, name: JobName, parameters: PieceParameters) -> Job:
        """Return the job of that name, with these parameters if it is new; unnamed jobs of last week are forgotten.

        Raises:
            ConfigurationError: The job has begun with another `on_conflict`.
            DifferentInput: It is a batch of a stream, a later batch of which is stored.
        """
        self._forget(connection)
        if parameters.stream:
            self._must_be_last(connection, name)
        counts = dict.fromkeys(PieceCounts._fields, 0)
        row = {
            "store": self._store,
            **name._asdict(),
            **counts,
            "job": secrets.randbits(NUMBER_BITS),
            "state": JobState.OPEN.value,
            "parameters": json.dumps(vars(parameters)),
            "started": self._now(connection),
        }
        connection.execute(self._dialect.words.insert_new(self._jobs, "name").values(row))
        [job] = self.jobs(connection, name=name)
        if job.parameters.on_conflict != parameters.on_conflict:
            raise ConfigurationError(
                f"the job {str(name)!r} has begun with on_conflict={job.parameters.on_conflict!r}, and not with "
                f"{parameters.on_conflict!r}: run it again as it was, or give the new job a name of its own"
            )
        return job

    def named(self, connection: Connection, name: JobName) -> Job | None:
        """Return the job of that name, if there is one."""
        found = self.jobs(connection, name=name)
        return found[0] if found else None

    def find(self, connection: Connection, number: int) -> Job:
        """Return the job of that number."""
        [job] = self.jobs(connection, number=number)
        return job

    def jobs(
        self,
        connection: Connection,
        *,
        number: int | None = None,
        name: JobName | None = None,
        limit: int | None = None,
    ) -> list[Job]:
        """Return the latest jobs of the store, or the one of that number or name."""
        if not inspect(connection).has_table(self._jobs.name, schema=self._jobs.schema):
            return []
        jobs, pieces = self._jobs, self._pieces.c
        query = (
            select(jobs).where(jobs.c.store == self._store).order_by(jobs.c.started.desc(), jobs.c.name).limit(limit)
        )
        if number is not None:
            query = query.where(jobs.c.job == number)
        if name is not None:
            query = query.where(jobs.c.name == name.name, jobs.c.version == name.version)
        found = connection.execute(query).mappings().all()
        sums = [func.sum(pieces[field]).label(field) for field in PieceCounts._fields]
        begun = select(pieces.job, func.count().label("pieces"), func.max(pieces.committed).label("last"), *sums)
        numbers = [row["job"] for row in found if row["state"] == JobState.OPEN]
        grouped = begun.where(pieces.job.in_(numbers)).group_by(pieces.job)
        progress = {row["job"]: row for row in connection.execute(grouped).mappings()} if numbers else {}
        return [self._job(row, progress.get(row["job"])) for row in found]

    def inputs(self, connection: Connection, job: int) -> dict[int, Fingerprint]:
        """Return the fingerprints of the pieces that are stored."""
        pieces = self._pieces.c
        rows = connection.execute(select(pieces.piece, pieces.input).where(pieces.job == job))
        return {piece: Fingerprint.parse(given) for piece, given in rows}

    def claim(self, connection: Connection, job: int, attempt: int, inputs: Mapping[int, Fingerprint]) -> Sequence[int]:
        """Record pieces, and return those that are this attempt's; the others are stored by another attempt.

        Waits for a transaction that has recorded one of them and has not ended. The end of the job waits for this one;
        after it there are no pieces to store, for a task that nobody waits for any more.

        Args:
            connection: In the transaction that stores them.
            job: The job's number.
            attempt: A number that no other transaction has.
            inputs: The fingerprint of each piece's rows.
        """
        jobs = self._jobs.c
        state = connection.execute(select(jobs.state).where(jobs.job == job).with_for_update(read=True)).scalar()
        if state != JobState.OPEN:
            return []
        now = self._now(connection)
        counts = dict.fromkeys(PieceCounts._fields, 0)
        rows = [
            {"job": job, "piece": piece, "attempt": attempt, "input": str(inputs[piece]), "committed": now, **counts}
            for piece in sorted(inputs)  # attempts at the same pieces wait for each other, and do not deadlock
        ]
        names = self._pieces.c.keys()
        insert_new = Prepared(self._dialect.words.insert_new(self._pieces, "piece"), self._dialect.sql, names)
        self._dialect.bulk.insert_rows(connection, insert_new, [tuple(row[name] for name in names) for row in rows])
        pieces = self._pieces.c
        mine = (pieces.job == job, pieces.attempt == attempt, pieces.piece.between(min(inputs), max(inputs)))
        return connection.execute(select(pieces.piece).where(*mine)).scalars().all()

    def record(self, connection: Connection, job: int, piece: int, counts: PieceCounts) -> None:
        """Record what the transaction did, in the row of its first piece."""
        pieces = self._pieces.c
        connection.execute(
            update(self._pieces).where(pieces.job == job, pieces.piece == piece).values(**counts._asdict())
        )

    def finish(self, connection: Connection, number: int) -> Job:
        """End the job: its row takes the sums of the pieces, which are forgotten. Returns it; idempotent."""
        jobs, pieces = self._jobs.c, self._pieces.c
        connection.execute(select(jobs.job).where(jobs.job == number).with_for_update()).one()
        job = self.find(connection, number)
        if job.state is JobState.DONE:
            return job
        total = Fingerprint()
        for given in self.inputs(connection, number).values():
            total = total.plus(given)
        sums = select(*(func.coalesce(func.sum(pieces[field]), 0).label(field) for field in PieceCounts._fields))
        counts = {
            field: int(value)
            for field, value in connection.execute(sums.where(pieces.job == number)).mappings().one().items()
        }
        ended = {"state": JobState.DONE.value, "input": str(total), "finished": self._now(connection)}
        connection.execute(update(self._jobs).where(jobs.job == number).values(**counts, **ended))
        connection.execute(delete(self._pieces).where(pieces.job == number))
        if job.parameters.stream:
            connection.execute(delete(self._jobs).where(*self._named(job.name), jobs.version < job.name.version))
        return self.find(connection, number)

    def _must_be_last(self, connection: Connection, name: JobName) -> None:
        """Raise DifferentInput if a later batch of the stream is known."""
        version = self._jobs.c.version
        last = connection.execute(select(func.max(version)).where(*self._named(name))).scalar()
        if last is not None and last > name.version:
            raise DifferentInput(
                f"batch {name.version} of {name.name!r} comes after batch {last} was stored: the checkpoint is old, "
                "and this batch may have other rows. Nothing of it was stored; start the stream with a new checkpoint "
                "and on_conflict='keep'"
            )

    def _named(self, name: JobName) -> Sequence[ColumnElement[bool]]:
        jobs = self._jobs.c
        return jobs.store == self._store, jobs.name == name.name

    def _forget(self, connection: Connection) -> None:
        """Forget unnamed jobs of which nobody can know the name any more."""
        jobs = self._jobs.c
        until = self._dialect.values.in_seconds(-int(UNNAMED_KEPT.total_seconds()))
        unnamed = jobs.parameters.like('%"named": false%')
        old = connection.execute(select(jobs.job).where(jobs.started < until, unnamed)).scalars().all()
        for number in old:
            connection.execute(delete(self._pieces).where(self._pieces.c.job == number))
            connection.execute(delete(self._jobs).where(jobs.job == number))

    def _now(self, connection: Connection) -> Any:  # noqa: ANN401 - as the product keeps instants
        return connection.execute(select(self._dialect.values.in_seconds(0))).scalar_one()

    def _job(self, row: Any, progress: Any) -> Job:  # noqa: ANN401 - mappings
        counted = row if progress is None else progress
        stored, duplicates, rejected = (int(counted[field]) for field in PieceCounts._fields[:3])
        started, last = row["started"], row["finished"] or row["started"]
        return Job(
            row["job"],
            JobName(row["name"], row["version"]),
            PieceParameters(**json.loads(row["parameters"])),
            JobState(row["state"]),
            Committed(stored, duplicates, rejected, fingerprint=row["input"]),
            0 if progress is None else progress["pieces"],
            self._dialect.values.from_due(started),
            self._dialect.values.from_due(last if progress is None else progress["last"]),
        )
