"""The ledger of jobs that store all of their rows in one transaction, with their entry."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from delayline.bulk.earlier_runs import EarlierRuns
from delayline.bulk.jobs import Committed, Job, JobName, JobPieces, JobState, PieceParameters, check_input
from delayline.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, Table

    from delayline.bulk.fingerprint import Fingerprint
    from delayline.sql.dialect import Dialect


class WholeJob(NamedTuple):
    """A job with all rows at once."""

    name: JobName
    parameters: PieceParameters
    fingerprint: Fingerprint | None = None
    """That of its input, if it was taken."""


class WholeJobs:
    """The ledger of a store's jobs with all rows at once; every call is part of the caller's transaction."""

    def __init__(self, dialect: Dialect, store: Table) -> None:
        self._ledger = JobPieces(dialect, store)
        self._earlier = EarlierRuns(dialect, store)

    def create(self, connection: Connection) -> None:
        """Create the tables, or upgrade them."""
        self._ledger.create(connection)

    def committed(self, connection: Connection, name: JobName, *, stream: bool) -> Committed | None:
        """Return the result of a job that has committed, by an older delayline too; None if it has not.

        Raises ConfigurationError for a job that commits in pieces.
        """
        self._earlier.take_over(connection, name, stream=stream)
        job = self._ledger.named(connection, name)
        return None if job is None else _committed(job, stream=stream)

    def commit(self, connection: Connection, job: WholeJob, work: Callable[[], Committed]) -> Committed:
        """Do the work of a job in the transaction that records it, unless another has; return the result.

        Waits for another transaction that has begun it, and then sees its result.

        Raises:
            DifferentInput: The job has committed another input, or its stream a later batch.
            ConfigurationError: It commits in pieces.
        """
        name, parameters, fingerprint = job
        self._earlier.take_over(connection, name, stream=parameters.stream)
        entry = self._ledger.locked(connection, self._ledger.begin(connection, name, parameters).number)
        before = _committed(entry, stream=parameters.stream)
        if before is not None:
            contents = parameters.on_conflict == "replace"  # otherwise a row with a known id is left out anyway
            check_input(str(name), before.fingerprint, before.rows, fingerprint, contents=contents)
            return replace(before, repeated=True)
        committed = replace(work(), fingerprint=None if fingerprint is None else str(fingerprint))
        self._ledger.end(connection, entry, committed)
        return committed


def _committed(job: Job, *, stream: bool) -> Committed | None:
    is_done, parameters = job.state is JobState.DONE, job.parameters
    is_batch = stream and parameters.stream
    if not parameters.at_once and not (is_batch and is_done):
        raise ConfigurationError(
            f"the job {str(job.name)!r} has begun in pieces, and not with all rows at once: run it again as it was, or "
            "give the new job a name of its own"
        )
    if stream != parameters.stream:
        raise ConfigurationError(
            f"the job {str(job.name)!r} has begun with{'' if parameters.stream else 'out'} the batches of a stream: "
            "give the new job a name of its own"
        )
    return job.committed if is_done else None
