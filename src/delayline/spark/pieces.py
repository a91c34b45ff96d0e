"""Schedule into a store in pieces: tasks commit them, and nothing is written twice.

The rows are divided by the hashes of their ids into pieces. Equal ids meet in one piece, where duplicates are found. A
task has whole pieces, in order; it commits some of them at a time, each transaction with its entries in the ledger
of jobs. A job that was killed goes on with the pieces that are missing, from any machine.

To Python code in a task a failed upstream looks like a normal end of input. Each piece therefore ends with a row that
says so, and is stored only when that row has come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from delayline.bulk.fingerprint import MODULUS, Fingerprint
from delayline.bulk.jobs import Job, JobName, JobState, PieceCounts, PieceParameters
from delayline.bulk.ledger import check_input
from delayline.bulk.pieces import BYTES_AT_ONCE, ROWS_AT_ONCE, PieceRows
from delayline.clock import from_microseconds, to_microseconds
from delayline.errors import BackendUnavailable, DifferentInput
from delayline.spark.headers import SendHeaders, Validator
from delayline.spark.options import SOURCE_COLUMNS, StoreOptions
from delayline.spark.sources import OWN_COLUMNS, content_type, prepared

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from pyspark.sql import DataFrame, Observation

    from delayline.delayed.store import OnConflict
    from delayline.spark.schedule import JobTarget
    from delayline.spark.sources import Columns

#: So many that a piece of a thousand million messages has 61 000.
PIECES: Final = 1 << 14
#: The same of a batch of a stream, which has fewer messages and comes often.
PIECES_OF_BATCH: Final = 1 << 6
PIECE: Final = "_delayline_piece"
#: Column: whether the row is the end of its piece, and no message.
END: Final = "_delayline_end"
ID_HASH: Final = "_delayline_id_hash"
ROW_HASH: Final = "_delayline_row_hash"
#: What the hash of an id begins with in a fingerprint: another number than that by which pieces are cut.
SEED: Final = 7
#: What tasks tell of their transactions, and its sums for `observe`.
COUNTS: Final = ", ".join(f"{name} LONG" for name in PieceCounts._fields)
METRICS: Final = {"rows": "stored + duplicates + rejected", **{name: name for name in PieceCounts._fields}}
#: The name of these sums for listeners of Spark.
METRICS_NAME: Final = "delayline"
UNENDED: Final = "the rows of a task ended in the middle of a piece: a task before this one has failed"
ROW_COLUMNS: Final = (*SOURCE_COLUMNS.names, PIECE, END, ID_HASH, ROW_HASH)


class PieceJob:
    """A job that schedules in pieces, on the driver.

    Args:
        target: The store; without a cold tier and a broker.
        columns: Names of the source's columns.
        on_conflict: For ids that wait already: `keep` or `replace`.
        name: The job's name and version.
        named: Whether a user has given it.
        stream: Whether it is a batch of a stream.
    """

    def __init__(
        self,
        target: JobTarget,
        columns: Columns,
        on_conflict: OnConflict,
        name: JobName,
        *,
        named: bool = True,
        stream: bool = False,
    ) -> None:
        self._target = target
        self._columns = columns
        self._name = name
        self._is_named = named
        self._is_batch = stream
        self._on_conflict: OnConflict = on_conflict
        self._store = StoreOptions.of(target.options)

    def run(
        self, rows: DataFrame, now: datetime, validator: Validator, observation: Observation | None = None
    ) -> tuple[Job, bool]:
        """Store the pieces that are missing, and return the job; whether it had ended before.

        Args:
            rows: The source.
            now: The server's time, for a job that is new.
            validator: Says which rows cannot be messages.
            observation: Gets the sums of what the tasks do, unless the job had ended before.

        Raises:
            DifferentInput: A job of that name has stored pieces of other rows. Nothing was stored now.
        """
        writer = self._store.pieces()
        pieces = PIECES_OF_BATCH if self._is_batch else PIECES
        parameters = PieceParameters(
            to_microseconds(now), pieces, self._on_conflict, named=self._is_named, stream=self._is_batch
        )
        job = writer.open(self._name, parameters)
        if job.state is JobState.DONE:
            if not self._is_batch:  # which Spark repeats with the same rows
                self._check_again(rows, job)
            return job, True
        messages, done = self._cut(rows, job), writer.inputs(job.number)
        if done:
            self._check_begun(messages, done)
            messages = _without(messages, done)
        ordered = _ordered(
            messages.unionByName(ends_of(messages, PIECE, job.parameters.pieces)), self._store.connections
        )
        sent = from_microseconds(job.parameters.now)
        headers = SendHeaders(self._target.sender, content_type(rows, self._columns), sent)
        task = _PieceTask(self._store, job.number, self._on_conflict, validator, headers)
        observed(ordered.mapInArrow(task.run, COUNTS), observation).toArrow()
        return writer.finish(job.number), False

    def _cut(self, rows: DataFrame, job: Job) -> DataFrame:
        """Return the messages with their pieces and hashes; a delay counts from the begin of the first attempt."""
        messages = prepared(rows, self._columns, from_microseconds(job.parameters.now)).drop(*OWN_COLUMNS)
        contents = F.lit(0).cast("long")
        if self._on_conflict == "replace":  # otherwise a row with the id of an earlier row is left out anyway
            since = 0 if self._columns.delay is None else job.parameters.now
            due = F.expr(f"unix_micros(due) - {since}")
            contents = F.xxhash64(*(due if name == "due" else F.col(name) for name in SOURCE_COLUMNS.names))
        return messages.select(
            *SOURCE_COLUMNS.names,
            F.pmod(F.xxhash64("id"), F.lit(job.parameters.pieces)).cast("int").alias(PIECE),
            F.lit(False).alias(END),
            F.xxhash64(F.lit(SEED), "id").alias(ID_HASH),
            contents.alias(ROW_HASH),
        )

    def _check_again(self, rows: DataFrame, job: Job) -> None:
        """Raise DifferentInput if the job that has ended had other rows."""
        given = Fingerprint()
        for part in _inputs(self._cut(rows, job)).values():
            given = given.plus(part)
        committed, contents = job.committed, self._on_conflict == "replace"
        check_input(str(self._name), committed.fingerprint, committed.rows, given, contents=contents)

    def _check_begun(self, messages: DataFrame, done: dict[int, Fingerprint]) -> None:
        """Raise DifferentInput if a piece that is stored had other rows."""
        given = _inputs(messages)
        others = sum(given.get(piece, Fingerprint()) != stored for piece, stored in done.items())
        if others:
            raise DifferentInput(
                f"the job {str(self._name)!r} has begun with another input: {others:,} of the {len(done):,} pieces "
                "that it has stored have other rows now. Nothing was stored now. Run it with the rows that it began "
                "with, or give this input a name of its own; for a stream whose rows differ each time, as uuid() does, "
                "use atomic='job'"
            )


def counts_batch(counts: PieceCounts) -> pa.RecordBatch:
    """Return counts as a row of COUNTS."""
    return pa.RecordBatch.from_pydict({name: pa.array([count], pa.int64()) for name, count in counts._asdict().items()})


def observed(counts: DataFrame, observation: Observation | None) -> DataFrame:
    """Return the rows of COUNTS; their sums are metrics of the query that reads them."""
    sums = (F.sum(F.expr(what)).alias(name) for name, what in METRICS.items())
    return counts.observe(METRICS_NAME if observation is None else observation, *sums)


def _inputs(messages: DataFrame) -> dict[int, Fingerprint]:
    """Return the fingerprint of each piece, as tasks take it."""
    total = [F.sum(F.col(name).cast("decimal(20,0)")).alias(name) for name in (ID_HASH, ROW_HASH)]
    found = messages.groupBy(PIECE).agg(F.count("*").alias("rows"), *total).toArrow().to_pylist()
    return {
        row[PIECE]: Fingerprint(row["rows"], int(row[ID_HASH]) % MODULUS, int(row[ROW_HASH]) % MODULUS) for row in found
    }


def _without(messages: DataFrame, done: dict[int, Fingerprint]) -> DataFrame:
    stored = messages.sparkSession.createDataFrame(pa.table({PIECE: pa.array(sorted(done), pa.int32())}))
    return messages.join(F.broadcast(stored), PIECE, "left_anti").select(*ROW_COLUMNS)


def ends_of(messages: DataFrame, piece: str, pieces: int) -> DataFrame:
    """Return the row that ends each piece, with the columns of the messages.

    Args:
        messages: With the column END, false.
        piece: The column of the piece's number.
        pieces: How many there are.
    """
    values = {piece: F.col("id"), END: F.lit(True)}
    columns = [values.get(field.name, F.lit(None)).cast(field.dataType).alias(field.name) for field in messages.schema]
    return messages.sparkSession.range(0, pieces, 1, 1).select(*columns)


def _ordered(messages: DataFrame, writers: int) -> DataFrame:
    """Return the rows piece by piece; of rows with the same id the first is the one that counts."""
    others = (name for name in SOURCE_COLUMNS.names if name not in {"id", "due"})
    gathered = messages.repartition(PIECE).coalesce(writers)
    return gathered.sortWithinPartitions(PIECE, END, "id", F.col("due").asc_nulls_last(), *others)


@dataclass(frozen=True)
class _PieceTask:
    """The work of a task; pickled."""

    store: StoreOptions
    job: int
    on_conflict: OnConflict
    validator: Validator
    headers: SendHeaders

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Store the pieces; yields what was done, once for each transaction."""
        yield counts_batch(PieceCounts(0, 0, 0, 0))  # a sum of no rows is unknown
        writer = self.store.pieces()
        for whole in whole_pieces(batches):
            rows = self._checked(whole)
            if rows.inputs:
                yield counts_batch(writer.store(self.job, rows, self.on_conflict))

    def _checked(self, batch: pa.RecordBatch) -> PieceRows:
        """Return the rows of whole pieces, with the headers of a send; rejected rows and duplicates apart."""
        batch = batch.filter(pc.invert(batch.column(END)))
        pieces = _numbers(batch, PIECE)
        is_good = pc.is_null(self.validator.reasons(batch)).to_numpy(zero_copy_only=False)
        good, of_good = batch.filter(pa.array(is_good)), pieces[is_good]
        is_new = np.ones(good.num_rows, dtype=bool)
        ids = good.column("id")
        if good.num_rows > 1:
            is_new[1:] = pc.not_equal(ids.slice(1), ids.slice(0, len(ids) - 1)).to_numpy(zero_copy_only=False)
        new = good.filter(pa.array(is_new)).select(SOURCE_COLUMNS.names)
        return PieceRows(
            self.headers.complete(new),
            of_good[is_new],
            pieces[~is_good],
            of_good[~is_new],
            _inputs_of(pieces, _numbers(batch, ID_HASH), _numbers(batch, ROW_HASH)),
        )


def whole_pieces(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield some whole pieces at a time. Raises BackendUnavailable if the last did not come to its end."""
    begun, whole = list[pa.RecordBatch](), list[pa.RecordBatch]()
    for batch in batches:
        ends = np.flatnonzero(batch.column(END).to_numpy(zero_copy_only=False))
        until = int(ends[-1]) + 1 if len(ends) else 0
        if until:
            whole += [*begun, batch.slice(0, until)]
            begun = []
        if until < batch.num_rows:
            begun.append(batch.slice(until))
        if sum(part.num_rows for part in whole) >= ROWS_AT_ONCE or sum(part.nbytes for part in whole) >= BYTES_AT_ONCE:
            yield from _joined(whole)
            whole = []
    yield from _joined(whole)
    if begun:
        raise BackendUnavailable(UNENDED)


def _joined(parts: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    if parts:
        yield pa.concat_batches(parts)


def _numbers(batch: pa.RecordBatch, name: str) -> Any:  # noqa: ANN401 - an array of NumPy
    return batch.column(name).to_numpy(zero_copy_only=False)


def _inputs_of(pieces: Any, ids: Any, contents: Any) -> dict[int, Fingerprint]:  # noqa: ANN401 - arrays of NumPy
    """Return the fingerprint of each piece; the rows of a piece are side by side."""
    if not len(pieces):
        return {}
    starts = np.concatenate(([0], np.flatnonzero(np.diff(pieces)) + 1))
    rows = np.diff(np.append(starts, len(pieces)))
    sums = (np.add.reduceat(hashes.view(np.uint64), starts) for hashes in (ids, contents))
    each = zip(pieces[starts].tolist(), rows.tolist(), *(part.tolist() for part in sums), strict=True)
    return {piece: Fingerprint(number, *hashes) for piece, number, *hashes in each}
