"""The ledger of a migration's batches: each is stored once, in one transaction with its entry.

A slice of a migration is a job, and its batches are the pieces. An abort closes the batches that it returns to the
source, so that a task that outlives its driver stores none of them.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from sqlalchemy import select, update

from delayline.bulk.fingerprint import Fingerprint
from delayline.bulk.job_tables import job_tables
from delayline.bulk.jobs import JobName, JobPieces, PieceCounts, PieceParameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sqlalchemy import Connection, Table

    from delayline.sql.dialect import Dialect

#: In place of the attempt that has committed a batch, until the end of the transaction that commits it.
NONE_YET: Final = -1
#: In place of an attempt: there may be none any more.
CLOSED: Final = 0
#: Batches that are asked for in a statement.
ASKED_AT_ONCE: Final = 1000
#: The batches are cut by the migration, which returns messages whose ids are taken.
PARAMETERS: Final = PieceParameters(now=0, pieces=0, on_conflict="raise", migration=True)


class BatchName(NamedTuple):
    """The name of a migration's batch in the ledger of its target."""

    run: str
    """The migration's."""
    partition: int
    batch: int

    @property
    def job(self) -> JobName:
        """The name of the job that it is a piece of."""
        return JobName(f"migration {self.run}", self.partition)


class BatchLedger:
    """The ledger of the batches of a store; every call is part of the caller's transaction."""

    def __init__(self, dialect: Dialect, store: Table) -> None:
        self._dialect = dialect
        self._jobs = JobPieces(dialect, store)
        _, self._pieces = job_tables(store.schema)

    def store(self, connection: Connection, name: BatchName, attempt: int, work: Callable[[], PieceCounts]) -> int:
        """Do the work of a batch, unless another transaction has; return the attempt that counts.

        Waits for another transaction that has begun it, and then sees its result.

        Args:
            connection: In the transaction.
            name: The batch's name.
            attempt: The number of this attempt, 1 or more.
            work: Stores the batch; returns what it did.

        Returns:
            The attempt, or CLOSED if the batch may not be stored any more.
        """
        pieces, job = self._pieces.c, self._jobs.begun(connection, name.job, PARAMETERS)
        self._insert(connection, job, {name.batch: NONE_YET})
        mine = (pieces.job == job, pieces.piece == name.batch)
        before = int(connection.execute(select(pieces.attempt).where(*mine).with_for_update()).scalar_one())
        if before == NONE_YET:
            counts = work()._asdict()
            connection.execute(update(self._pieces).where(*mine).values(attempt=attempt, **counts))
        return attempt if before == NONE_YET else before

    def attempts(self, connection: Connection, names: Sequence[BatchName]) -> dict[BatchName, int]:
        """Return which attempts have committed the batches, without uncommitted batches."""
        pieces, found = self._pieces.c, dict[BatchName, int]()
        for job, some in self._by_job(connection, names):
            for first in range(0, len(some), ASKED_AT_ONCE):
                asked = {name.batch: name for name in some[first : first + ASKED_AT_ONCE]}
                mine = (pieces.job == job, pieces.piece.in_(list(asked)), pieces.attempt > CLOSED)
                for piece, attempt in connection.execute(select(pieces.piece, pieces.attempt).where(*mine)):
                    found[asked[piece]] = int(attempt)
        return found

    def add(self, connection: Connection, attempts: Mapping[BatchName, int]) -> None:
        """Record the attempts at batches that the transaction commits, or CLOSED; existing entries stay."""
        for job, some in self._by_job(connection, list(attempts)):
            self._insert(connection, job, {name.batch: attempts[name] for name in some})

    def _by_job(self, connection: Connection, names: Sequence[BatchName]) -> Iterator[tuple[int, Sequence[BatchName]]]:
        by_job: dict[JobName, list[BatchName]] = defaultdict(list)
        for name in names:
            by_job[name.job].append(name)
        for job, some in by_job.items():
            yield self._jobs.begun(connection, job, PARAMETERS), some

    def _insert(self, connection: Connection, job: int, attempts: Mapping[int, int]) -> None:
        now = connection.execute(select(self._dialect.values.in_seconds(0))).scalar_one()
        other = {"job": job, "input": str(Fingerprint()), "committed": now, **PieceCounts()._asdict()}
        # In one order: transactions with the same batches wait for each other, and do not deadlock.
        rows = [{"piece": batch, "attempt": attempt, **other} for batch, attempt in sorted(attempts.items())]
        connection.execute(self._dialect.words.insert_new(self._pieces, "piece"), rows)
