"""The ledger of jobs that commit in pieces: each piece of a job is stored once, whoever stores it.

A job is known by its name and version. Its pieces are cut by the hashes of their messages' ids, so that every attempt
cuts alike; a task records a piece in the transaction that stores its messages. When all pieces are stored the job
is done, and its row keeps the sums.

The far messages of a job with a cold tier are a piece too, FAR, recorded in the transaction that registers their files.

Where messages go to a broker, large pieces are cut into parts of some thousand rows in the order of their ids, so that
what has to be sent again after a kill stays small. Each part has an entry of its own, recorded once it is confirmed.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
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
from delayline.bulk.job_tables import JOBS, job_tables
from delayline.errors import ConfigurationError, DifferentInput
from delayline.message import MAXIMUM_ID_LENGTH
from delayline.sql.prepared import Prepared
from delayline.sql.setup import RequiredTables

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sqlalchemy import ColumnElement, Connection

    from delayline.delayed.store import OnConflict
    from delayline.sql.dialect import Dialect

#: Jobs that nobody has named are forgotten so long after they began.
UNNAMED_KEPT: Final = timedelta(days=7)
#: Of the numbers of jobs and of attempts.
NUMBER_BITS: Final = 62
#: The piece of all messages that are for the cold tier, after those of the others.
FAR: Final = -1
#: The most messages whose refusal by a broker a job keeps with the reason.
MOST_REFUSED: Final = 1000


class JobState(StrEnum):
    """How far a job is."""

    OPEN = "open"
    """Some of its pieces may be stored."""
    DECIDED = "decided"
    """All of its pieces are in files, and will be stored by whoever goes on with it."""
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
    migration: bool = False
    """Whether the job is a slice of a migration, whose batches are its pieces."""
    stream: bool = False
    """Whether the versions of the name are batches of a stream, of which the ledger keeps the last."""
    at_once: bool = False
    """Whether all rows are stored in the transaction that records the job, which has no pieces then."""
    part: int = 0
    """How many rows of a piece are a part of it; 0 without a broker, where pieces have no parts."""
    far_from: int = 0
    """Messages due earlier are near: they go to the broker, or not to the cold tier; in microseconds since 1970."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Destinations that the broker cannot reach, with the reason."""
    is_decided: bool = False
    """Whether no piece is stored before it is decided to store all."""
    has_cold_tier: bool = False
    """Whether far messages are placed in a cold tier: after the pieces, or with all rows at once."""
    files: list[str] = field(default_factory=list)
    """The files with the pieces of a job that is decided."""
    shards: list[str] = field(default_factory=list)
    """The shards that its rows are divided among: those that were active when it began; none of a single store."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The result of a bulk job, counted in rows."""

    stored: int
    duplicates: int = 0
    """Left out because their id waits already, or came twice."""
    rejected: int = 0
    repeated: bool = False
    """Whether the run had committed before, so that nothing was done now."""
    fingerprint: str | None = field(default=None, compare=False)
    """The fingerprint of the input, as the ledger has it; None where it was not taken."""
    sent: int = 0
    """Sent to a broker."""
    cold: int = 0
    """Written to the files of a cold tier."""

    @property
    def rows(self) -> int:
        """How many rows the input had."""
        return self.stored + self.cold + self.sent + self.duplicates + self.rejected


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
    """How many pieces or parts with messages are stored; 0 for a job that is done."""
    started: datetime
    last: datetime
    """When its last piece was stored, or it began or ended."""
    refused: Mapping[str, str]
    """Ids of messages that a broker has refused, with the reason; of a job that is done."""

    @property
    def is_open(self) -> bool:
        """Whether some of its pieces may be missing."""
        return self.state is not JobState.DONE


class PieceCounts(NamedTuple):
    """What a transaction has done with the rows of its pieces."""

    stored: int = 0
    duplicates: int = 0
    rejected: int = 0
    bytes: int = 0
    sent: int = 0
    cold: int = 0

    def plus(self, other: PieceCounts) -> PieceCounts:
        """Return the sums."""
        return PieceCounts(*map(sum, zip(self, other, strict=True)))


class JobPieces:
    """The ledger of the jobs of a store; every call is part of the caller's transaction."""

    def __init__(self, dialect: Dialect, store: Table) -> None:
        self._dialect = dialect
        self._store = store.name
        self._jobs, self._pieces = job_tables(store.schema)

    def create(self, connection: Connection) -> None:
        """Create the tables, or upgrade them."""
        RequiredTables(self._dialect, self._jobs.schema, JOBS).set_up(connection)

    def open(self, connection: Connection, name: JobName, parameters: PieceParameters) -> Job:
        """Return the job of that name, with these parameters if it is new; unnamed jobs of last week are forgotten.

        Raises:
            ConfigurationError: The job has begun in another way.
            DifferentInput: It is a batch of a stream, a later batch of which is stored.
        """
        self._forget(connection)
        job = self.begin(connection, name, parameters)
        if job.parameters.on_conflict != parameters.on_conflict:
            raise ConfigurationError(
                f"the job {str(name)!r} has begun with on_conflict={job.parameters.on_conflict!r}, and not with "
                f"{parameters.on_conflict!r}: run it again as it was, or give the new job a name of its own"
            )
        for what, begun, given in (
            ("the batches of a migration", job.parameters.migration, parameters.migration),
            ("the batches of a stream", job.parameters.stream, parameters.stream),
            ("all rows at once", job.parameters.at_once, parameters.at_once),
            ("delay levels", job.parameters.part > 0, parameters.part > 0),
            ("a cold tier", job.parameters.has_cold_tier, parameters.has_cold_tier),
            ("files, to be all or nothing", job.parameters.is_decided, parameters.is_decided),
            ("a map of shards", bool(job.parameters.shards), bool(parameters.shards)),
        ):
            if begun != given:
                raise ConfigurationError(
                    f"the job {str(name)!r} has begun with{'' if begun else 'out'} {what}: run it again as it was, or "
                    "give the new job a name of its own"
                )
        return job

    def begin(self, connection: Connection, name: JobName, parameters: PieceParameters) -> Job:
        """Return the job of that name, with these parameters if it is new, and no questions asked.

        Raises DifferentInput if it is a batch of a stream, a later batch of which is known.
        """
        if parameters.stream:
            self._must_be_last(connection, name)
        self._add(connection, name, parameters)
        [job] = self.jobs(connection, name=name)
        return job

    def begun(self, connection: Connection, name: JobName, parameters: PieceParameters) -> int:
        """Return the number of the job of that name, with these parameters if it is new; in few statements."""
        number = select(self._jobs.c.job).where(*self._named(name), self._jobs.c.version == name.version)
        found = connection.execute(number).scalar()
        if found is None:
            self._add(connection, name, parameters)
            found = connection.execute(number).scalar_one()
        return int(found)

    def named(self, connection: Connection, name: JobName) -> Job | None:
        """Return the job of that name, if there is one."""
        found = self.jobs(connection, name=name)
        return found[0] if found else None

    def find(self, connection: Connection, number: int) -> Job:
        """Return the job of that number."""
        [job] = self.jobs(connection, number=number)
        return job

    def locked(self, connection: Connection, number: int) -> Job:
        """Lock the job of that number until the end of the transaction, and return it."""
        jobs = self._jobs.c
        connection.execute(select(jobs.job).where(jobs.job == number).with_for_update()).one()
        return self.find(connection, number)

    def last(self, connection: Connection, name: str) -> int | None:
        """Return the last version of that name; None if there is none."""
        jobs = self._jobs.c
        last = select(func.max(jobs.version)).where(jobs.store == self._store, jobs.name == name)
        found: int | None = connection.execute(last).scalar()
        return found

    def jobs(
        self,
        connection: Connection,
        *,
        number: int | None = None,
        name: JobName | None = None,
        limit: int | None = None,
    ) -> list[Job]:
        """Return the latest jobs of the store but for migrations, or the one of that number or name."""
        if not inspect(connection).has_table(self._jobs.name, schema=self._jobs.schema):
            return []
        RequiredTables(self._dialect, self._jobs.schema, JOBS).check_upgraded(connection)
        jobs, pieces = self._jobs, self._pieces.c
        query = (
            select(jobs).where(jobs.c.store == self._store).order_by(jobs.c.started.desc(), jobs.c.name).limit(limit)
        )
        if number is not None:
            query = query.where(jobs.c.job == number)
        if name is not None:
            query = query.where(jobs.c.name == name.name, jobs.c.version == name.version)
        if number is None and name is None:
            query = query.where(jobs.c.parameters.not_like('%"migration": true%'))
        found = connection.execute(query).mappings().all()
        sums = [func.sum(pieces[name]).label(name) for name in PieceCounts._fields]
        begun = select(pieces.job, func.count().label("pieces"), func.max(pieces.committed).label("last"), *sums)
        numbers = [row["job"] for row in found if row["state"] != JobState.DONE]
        grouped = begun.where(pieces.job.in_(numbers)).group_by(pieces.job)
        progress = {row["job"]: row for row in connection.execute(grouped).mappings()} if numbers else {}
        return [self._job(row, progress.get(row["job"])) for row in found]

    def inputs(self, connection: Connection, job: int) -> dict[int, Fingerprint]:
        """Return the fingerprints of the pieces that are stored, of their parts where they have parts.

        Those of near messages, and of rows for the cold tier too: FAR is none of them.
        """
        pieces = self._pieces.c
        rows = connection.execute(select(pieces.piece, pieces.input).where(pieces.job == job, pieces.piece != FAR))
        return {piece: Fingerprint.parse(given) for piece, given in rows}

    def has_far(self, connection: Connection, job: int) -> bool:
        """Return whether the messages for the cold tier are in it, as of a job that has ended."""
        jobs, pieces = self._jobs.c, self._pieces.c
        far = select(pieces.piece).where(pieces.job == job, pieces.piece == FAR)
        if connection.execute(far).first() is not None:
            return True
        return connection.execute(select(jobs.state).where(jobs.job == job)).scalar() == JobState.DONE

    def record_far(self, connection: Connection, job: int, counts: PieceCounts, register: Callable[[], object]) -> bool:
        """Register files of far messages in the transaction that records them, unless another driver has.

        Args:
            connection: In the transaction.
            job: The job's number.
            counts: What its rows for the cold tier have become.
            register: Registers the files.

        Returns:
            Whether they were registered now.
        """
        is_mine = bool(self.claim(connection, job, secrets.randbits(NUMBER_BITS), {FAR: Fingerprint()}))
        if is_mine:
            register()
            self.record(connection, job, FAR, counts)
        return is_mine

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
        if state == JobState.DONE:
            return []
        now = self._now(connection)
        begun = {**PieceCounts()._asdict(), "committed": now, "refused": None}
        rows = [
            {"job": job, "piece": piece, "attempt": attempt, "input": str(inputs[piece]), **begun}
            for piece in sorted(inputs)  # attempts at the same pieces wait for each other, and do not deadlock
        ]
        names = self._pieces.c.keys()
        insert_new = Prepared(self._dialect.words.insert_new(self._pieces, "piece"), self._dialect.sql, names)
        self._dialect.bulk.insert_rows(connection, insert_new, [tuple(row[name] for name in names) for row in rows])
        pieces = self._pieces.c
        mine = (pieces.job == job, pieces.attempt == attempt, pieces.piece.between(min(inputs), max(inputs)))
        return connection.execute(select(pieces.piece).where(*mine)).scalars().all()

    def record(
        self,
        connection: Connection,
        job: int,
        piece: int,
        counts: PieceCounts,
        refused: Mapping[str, str] | None = None,
    ) -> None:
        """Record what the transaction did, in the row of its first piece.

        Args:
            connection: In the transaction.
            job: The job's number.
            piece: The first piece that the transaction has claimed.
            counts: What it did.
            refused: Ids of messages that a broker has refused, with the reason.
        """
        pieces = self._pieces.c
        values = {**counts._asdict(), "refused": json.dumps(refused) if refused else None}
        connection.execute(update(self._pieces).where(pieces.job == job, pieces.piece == piece).values(**values))

    def check_same(self, connection: Connection, job: int, inputs: Mapping[int, Fingerprint]) -> None:
        """Raise DifferentInput if a piece that another attempt has recorded had other rows."""
        pieces = self._pieces.c
        mine = (pieces.job == job, pieces.piece.between(min(inputs), max(inputs)))
        rows = connection.execute(select(pieces.piece, pieces.input).where(*mine))
        others = sum(piece in inputs and Fingerprint.parse(given) != inputs[piece] for piece, given in rows)
        if others:
            raise DifferentInput(
                f"the job {str(self.find(connection, job).name)!r} has begun with another input: {others:,} of the "
                f"parts that it has sent have other rows now. Run it with the rows that it began with, or give this "
                "input a name of its own"
            )

    def decide(self, connection: Connection, number: int, files: Sequence[str]) -> Job:
        """Decide that the pieces in these files will be stored, unless that is decided of others; return the job."""
        job = self.locked(connection, number)
        if job.state is JobState.OPEN:
            parameters = json.dumps({**vars(job.parameters), "files": list(files)})
            decided = update(self._jobs).where(self._jobs.c.job == number)
            connection.execute(decided.values(state=JobState.DECIDED.value, parameters=parameters))
        return self.find(connection, number)

    def finish(self, connection: Connection, number: int) -> Job:
        """End the job: its row takes the sums of the pieces, which are forgotten. Returns it; idempotent."""
        pieces, job = self._pieces.c, self.locked(connection, number)
        if job.state is JobState.DONE:
            return job
        total = Fingerprint()
        for given in self.inputs(connection, number).values():
            total = total.plus(given)
        sums = select(*(func.coalesce(func.sum(pieces[name]), 0).label(name) for name in PieceCounts._fields))
        counts = {
            name: int(value)
            for name, value in connection.execute(sums.where(pieces.job == number)).mappings().one().items()
        }
        self._end(connection, job, {**counts, "input": str(total), "refused": self._refused(connection, number)})
        connection.execute(delete(self._pieces).where(pieces.job == number))
        return self.find(connection, number)

    def end(self, connection: Connection, job: Job, committed: Committed) -> None:
        """End a job with all rows at once, in the transaction that stores them."""
        self._end(connection, job, _values(committed))

    def add_done(
        self,
        connection: Connection,
        name: JobName,
        parameters: PieceParameters,
        committed: Committed,
        finished: Any,  # noqa: ANN401 - as the product keeps instants
    ) -> None:
        """Record a job that has ended elsewhere, unless there is one of that name."""
        ended = finished or self._now(connection)
        state = {"state": JobState.DONE.value, "started": ended, "finished": ended}
        self._add(connection, name, parameters, **state, **_values(committed))

    def _end(self, connection: Connection, job: Job, values: Mapping[str, object]) -> None:
        jobs, state = self._jobs.c, JobState.DONE.value
        ended = update(self._jobs).where(jobs.job == job.number)
        connection.execute(ended.values(state=state, finished=self._now(connection), **values))
        if job.parameters.stream:
            connection.execute(delete(self._jobs).where(*self._named(job.name), jobs.version < job.name.version))

    def _refused(self, connection: Connection, number: int) -> str | None:
        """Return some of the messages that a broker has refused, as JSON."""
        pieces, refused = self._pieces.c, dict[str, str]()
        kept = select(pieces.refused).where(pieces.job == number, pieces.refused.is_not(None)).order_by(pieces.piece)
        for some in connection.execute(kept.limit(MOST_REFUSED)).scalars():
            refused |= json.loads(some)
        return json.dumps(dict(list(refused.items())[:MOST_REFUSED])) if refused else None

    def _must_be_last(self, connection: Connection, name: JobName) -> None:
        """Raise DifferentInput if a later batch of the stream is known."""
        last = self.last(connection, name.name)
        if last is not None and last > name.version:
            raise DifferentInput(
                f"batch {name.version} of {name.name!r} comes after batch {last} was stored: the checkpoint is old, "
                "and this batch may have other rows. Nothing of it was stored; start the stream with a new checkpoint "
                "and on_conflict='keep'"
            )

    def _named(self, name: JobName) -> Sequence[ColumnElement[bool]]:
        jobs = self._jobs.c
        return jobs.store == self._store, jobs.name == name.name

    def _add(self, connection: Connection, name: JobName, parameters: PieceParameters, **others: object) -> None:
        """Begin the job, unless there is one of that name; others: values of further columns."""
        row = {
            "store": self._store,
            **name._asdict(),
            **PieceCounts()._asdict(),
            "job": secrets.randbits(NUMBER_BITS),
            "state": JobState.OPEN.value,
            "parameters": json.dumps(vars(parameters)),
            "started": self._now(connection),
            **others,
        }
        connection.execute(self._dialect.words.insert_new(self._jobs, "name").values(row))

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
        stored, duplicates, rejected, sent, cold = (
            int(counted[name] or 0) for name in ("stored", "duplicates", "rejected", "sent", "cold")
        )
        started, last = row["started"], row["finished"] or row["started"]
        return Job(
            row["job"],
            JobName(row["name"], row["version"]),
            PieceParameters(**json.loads(row["parameters"])),
            JobState(row["state"]),
            Committed(stored, duplicates, rejected, fingerprint=row["input"], sent=sent, cold=cold),
            0 if progress is None else progress["pieces"],
            self._dialect.values.from_due(started),
            self._dialect.values.from_due(last if progress is None else progress["last"]),
            json.loads(row["refused"] or "{}"),
        )


def _values(committed: Committed) -> dict[str, object]:
    """Return the columns of a job that has committed so much."""
    counts = {name: getattr(committed, name) for name in ("stored", "duplicates", "rejected", "sent", "cold")}
    return {**counts, "input": committed.fingerprint}


def check_input(run: str, kept: str | None, rows: int, given: Fingerprint | None, *, contents: bool) -> None:
    """Raise DifferentInput if a run that has ended had another input.

    Args:
        run: The run's name.
        kept: The fingerprint that was recorded for it; None by an older delayline, which recorded the counts only.
        rows: How many rows its input had.
        given: The input under that name now; None if it is not known.
        contents: Whether rows with the same ids and other contents are another input.
    """
    if given is None:
        return
    before = given._replace(rows=rows) if kept is None else type(given).parse(kept)
    if (given if contents else given[:2]) == (before if contents else before[:2]):
        return
    if given.rows != before.rows:
        how = f"it had {before.rows:,} rows, and this input has {given.rows:,}"
    else:
        how = "the rows of this input have other " + ("ids" if given.ids != before.ids else "contents")
    raise DifferentInput(
        f"the run {run!r} was used for another input: {how}. Nothing was stored now. Give each input a run name of its "
        "own; under this name only the earlier rows may come again"
    )


def check_run(run: str) -> str:
    """Return the name of a run; raises ConfigurationError for a name that the ledger could not keep as it is."""
    if not isinstance(run, str) or not run.strip() or len(run) > MAXIMUM_ID_LENGTH or not run.isprintable():
        raise ConfigurationError(
            f"run={run!r} must be a text of 1 to {MAXIMUM_ID_LENGTH} printable characters, the same when run again"
        )
    return run
