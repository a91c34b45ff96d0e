"""Write messages through the data source: tasks stage rows, the driver commits the attempts that finished.

A task must not commit: to Python code in a task, a failed upstream looks like a normal end of input.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from delayline.bulk.fingerprint import Fingerprint
from delayline.bulk.jobs import JobName, PieceParameters
from delayline.bulk.whole_jobs import WholeJob
from delayline.bulk.writer import STREAMS, Attempt, BulkWriter, new_area
from delayline.delayed.arrow import completed
from delayline.delayed.store import OnConflict
from delayline.message import MAXIMUM_ID_LENGTH
from delayline.spark.headers import HEADER_ALLOWANCE, SendHeaders, invalid_reasons, raise_for_invalid, valid_rows
from delayline.spark.options import StoreOptions, choice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

INVALID: Final = ("fail", "skip")
ON_CONFLICT_CHOICES: Final[tuple[OnConflict, ...]] = ("raise", "keep", "replace")


@dataclass
class TaskCommit(WriterCommitMessage):
    """The rows that a task has staged, and the query that it belongs to."""

    attempt: Attempt
    query: str | None = None
    fingerprint: Fingerprint = Fingerprint()  # noqa: RUF009 - it is immutable


class StagingWriter:
    """The common part of batch and stream."""

    def __init__(self, options: Mapping[str, str], area: str) -> None:
        self._store = StoreOptions.of(options)
        self._area = area
        self._on_conflict = choice(options, "onConflict", ON_CONFLICT_CHOICES)
        self._skips = choice(options, "invalid", INVALID) == "skip"
        self._sender = SendHeaders.of(options)
        self._staging.create()

    @property
    def _staging(self) -> BulkWriter:
        return self._store.staging(self._area)

    def _parameters(self, *, stream: bool = False) -> PieceParameters:
        return PieceParameters(0, 0, self._on_conflict, stream=stream, at_once=True)

    def _stage(
        self, batches: Iterator[pa.RecordBatch], *, seen: Callable[[pa.RecordBatch], None] = lambda batch: None
    ) -> Attempt:
        staging, rejected, sender = self._staging, 0, self._sender
        largest = staging.largest_message - (0 if sender is None else HEADER_ALLOWANCE)

        def good() -> Iterator[pa.RecordBatch]:
            nonlocal rejected
            for batch in batches:
                batch = completed(batch.rename_columns([name.lower() for name in batch.schema.names]))
                seen(batch)
                reasons = invalid_reasons(batch, largest=largest)
                if not self._skips:
                    raise_for_invalid(batch, reasons)
                kept = valid_rows(batch, reasons)
                rejected += batch.num_rows - kept.num_rows
                yield kept if sender is None else sender.complete(kept)

        return staging.write(good(), rejected=lambda: rejected)


class BatchWriter(StagingWriter, DataSourceArrowWriter):
    """The writer of a job, built on the driver and pickled to its tasks and its commit."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options, new_area())
        self._run = options.get("runId")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskCommit:
        """Stage a task's rows."""
        fingerprint = Fingerprint()

        def seen(batch: pa.RecordBatch) -> None:
            nonlocal fingerprint
            fingerprint = fingerprint.plus(Fingerprint.of(batch))

        attempt = self._stage(iterator) if self._run is None else self._stage(iterator, seen=seen)
        return TaskCommit(attempt, fingerprint=fingerprint)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Move the staged rows to the store. Raises DifferentInput if the run has stored other rows before."""
        given = Fingerprint()
        for message in messages:
            if isinstance(message, TaskCommit):
                given = given.plus(message.fingerprint)
        job = None if self._run is None else WholeJob(JobName(self._run), self._parameters(), given)
        self._staging.commit(_attempts(messages), on_conflict=self._on_conflict, job=job)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Drop the staging table; a task that still writes fails."""
        del messages
        self._staging.discard()


class StreamWriter(StagingWriter, DataSourceStreamArrowWriter):
    """The writer of a stream. Spark builds a new writer for every batch and every commit."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options, STREAMS)
        self._app = options.get("txnAppId", "")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskCommit:
        """Stage a task's rows of a batch."""
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty("sql.streaming.queryId")
        return TaskCommit(self._stage(iterator), query)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's
        """Move the batch to the store, unless it was committed before.

        Each checkpoint numbers its batches from 0, so after the loss of a checkpoint they are stored again, not
        skipped. Spark repeats the last batch of a checkpoint with the same input; the number of an older batch may have
        other rows.

        Raises:
            DifferentInput: The batch is older than the last that was stored.
        """
        queries = {message.query for message in messages if isinstance(message, TaskCommit)}
        if not queries:
            return
        run = f"stream {self._app} {queries.pop()}"
        if len(run) > MAXIMUM_ID_LENGTH:
            run = f"stream {hashlib.sha256(run.encode()).hexdigest()}"
        job = WholeJob(JobName(run, batchId), self._parameters(stream=True))
        self._staging.commit(_attempts(messages), on_conflict=self._on_conflict, job=job)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's
        """Delete the staged rows of the batch."""
        del batchId
        self._staging.discard(_attempts(messages))


def _attempts(messages: Sequence[WriterCommitMessage | None]) -> list[Attempt]:
    return [message.attempt for message in messages if isinstance(message, TaskCommit)]
