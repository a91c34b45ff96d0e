"""Schedule into a store or a broker in pieces: tasks commit them, and nothing is written twice.

The rows are divided by the hashes of their ids into pieces. Equal ids meet in one piece, where duplicates are found. A
task has whole pieces, in order; it commits some of them at a time, each transaction with its entries in the ledger
of jobs. A job that was killed goes on with the pieces that are missing, from any machine.

To Python code in a task a failed upstream looks like a normal end of input. Each piece therefore ends with a row that
says so, and is stored only when that row has come.

A broker alone has no ledger: its tasks send pieces, and nobody knows what they had sent when they were killed.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from delayline.bulk.fingerprint import MODULUS, Fingerprint
from delayline.bulk.jobs import Job, JobName, PieceCounts, PieceParameters, check_input
from delayline.bulk.level_pieces import SENT_AT_ONCE, deliver, is_near, parts_of
from delayline.bulk.pieces import BYTES_AT_ONCE, ROWS_AT_ONCE, PieceRows
from delayline.clock import from_microseconds
from delayline.errors import BackendUnavailable, DifferentInput, DuplicateMessage
from delayline.spark.headers import SendHeaders, Validator
from delayline.spark.options import SOURCE_COLUMNS, StoreOptions
from delayline.spark.sources import OWN_COLUMNS, content_type, prepared
from delayline.spark.workers import keep_imports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pyspark.sql import Column, DataFrame, Observation

    from delayline.backends import MessageSink
    from delayline.bulk.cold_folder import ColdFolder
    from delayline.bulk.job_folder import JobFolder
    from delayline.bulk.pieces import PieceWriter
    from delayline.delayed.store import OnConflict
    from delayline.spark.schedule import JobTarget
    from delayline.spark.shards import ShardSearch
    from delayline.spark.sources import Columns

#: So many that a piece of a thousand million messages has 61 000.
PIECES: Final = 1 << 14
#: The same of a batch of a stream, which has fewer messages and comes often.
PIECES_OF_BATCH: Final = 1 << 6
#: Column: the row's piece, and then so many bits of the hash of its id. Spark sorts by it alone, by its digits, and
#: the fingerprint of a piece has its sum.
PLACE: Final = "_delayline_place"
PLACE_BITS: Final = 48
#: What these bits are in the row that ends its piece, and is no message.
END_OF_PIECE: Final = (1 << PLACE_BITS) - 1
#: Column: only where a row may replace another; elsewhere a row with the id of an earlier row is left out anyway.
ROW_HASH: Final = "_delayline_row_hash"
#: The columns whose sums make the fingerprint of a piece.
HASHES: Final = (PLACE, ROW_HASH)
#: The piece of a row, as an expression of Spark, and the name of its column where rows are grouped by it.
PIECE_OF_PLACE: Final = f"shiftright({PLACE}, {PLACE_BITS})"
PIECE: Final = "piece"
#: Of the hash in the index of the cold tier's ids, by which pieces are cut beside one.
HASH_DIGITS: Final = 4
#: So many parts of that index are read by one task each.
INDEX_PARTS: Final = 1 << 8
#: Put before an id when its place is hashed, so that this hash is independent of the one that cuts pieces.
SEED: Final = 7
#: The columns that tasks do not need of rows for the cold tier.
CONTENTS: Final = ("headers", "body")
#: What tasks tell of their transactions, and its sums for `observe`.
COUNTS: Final = ", ".join(f"{name} LONG" for name in PieceCounts._fields)
METRICS: Final = {
    "rows": "stored + cold + sent + duplicates + rejected",
    **{name: name for name in PieceCounts._fields},
}
#: Beside them, what a broker without a ledger has refused, as JSON.
OUTCOME: Final = f"{COUNTS}, refused STRING"
FILES: Final = "file STRING"
#: The name of these sums for listeners of Spark.
METRICS_NAME: Final = "delayline"
UNENDED: Final = "the rows of a task ended in the middle of a piece: a task before this one has failed"
#: The columns that put rows of one place into order. Nulls of due times are the last, others the first.
ORDER_IN_A_PLACE: Final = ("id", "due", *(name for name in SOURCE_COLUMNS.names if name not in {"id", "due"}))


class PieceJob:
    """A job that schedules in pieces, on the driver.

    Args:
        target: The store, a broker, or both.
        columns: Names of the source's columns.
        name: The job's name and version.
        stream: Whether it is a batch of a stream.
        broker: Gets the messages that are due early.
        folder: The files of a cold tier, which gets the messages that are due late in another way.
        files: Where the pieces of a job are written that is all or nothing.
        search: Looks at the other shards, where the store is one of several.
    """

    def __init__(
        self,
        target: JobTarget,
        columns: Columns,
        name: JobName,
        *,
        stream: bool = False,
        broker: MessageSink | None = None,
        folder: ColdFolder | None = None,
        files: JobFolder | None = None,
        search: ShardSearch | None = None,
    ) -> None:
        self._target = target
        self._columns = columns
        self._name = name
        self._is_batch = stream
        self._broker = broker
        self._folder = folder
        self._files = files
        self._search = search

    @property
    def _store(self) -> StoreOptions:
        return StoreOptions.of(self._target.options)

    @property
    def _ledger(self) -> PieceWriter:
        return self._store.pieces()

    @property
    def number(self) -> int:
        """How many pieces a new job has."""
        return PIECES_OF_BATCH if self._is_batch else PIECES

    def begun(self) -> Job | None:
        """Return the job, if there is one of this name; creates the ledger, or upgrades it."""
        return self._ledger.begun(self._name, stream=self._is_batch)

    def open(self, parameters: PieceParameters) -> Job:
        """Begin the job with these parameters, or go on with it."""
        return self._ledger.open(self._name, parameters)

    def store(self, rows: DataFrame, job: Job, validator: Validator, observation: Observation | None = None) -> None:
        """Store the pieces that are missing.

        Args:
            rows: The source.
            job: Is open.
            validator: Says which rows cannot be messages.
            observation: Gets the sums of what the tasks do.

        Raises:
            DifferentInput: A piece that is stored had other rows. Nothing was stored now.
        """
        messages = self._cut(rows, job.parameters)
        stored = self._stored(messages, job)
        if stored:
            messages = _without(messages, stored)
        task = self._task(rows, job.number, job.parameters, validator)
        self._run(messages, task, self._store.connections, observation)

    def decide(self, rows: DataFrame, job: Job, validator: Validator) -> Job:
        """Write the pieces to files, and decide that they will be stored; a job that is decided keeps its files.

        Raises DuplicateMessage if the job has to fail for ids that wait already, or come twice.
        """
        task = self._task(rows, job.number, job.parameters, validator)
        messages = self._cut(rows, job.parameters)
        ordered = self._ordered(messages, job.parameters.pieces, self._store.connections)
        names = ordered.mapInArrow(task.write, FILES).toArrow().column("file").to_pylist()
        return self._ledger.decide(job.number, names)

    def load(self, rows: DataFrame, job: Job, observation: Observation | None = None) -> None:
        """Store the pieces that are in files, and missing."""
        assert self._files is not None  # noqa: S101 - the job was decided
        load = _LoadTask(self._store, job.number, job.parameters.on_conflict, self._files)
        names = pa.table({"file": pa.array(job.parameters.files, pa.string())})
        files = rows.sparkSession.createDataFrame(names).repartition(self._store.connections)
        observed(files.mapInArrow(load.run, OUTCOME), observation).toArrow()

    def send(
        self, rows: DataFrame, parameters: PieceParameters, validator: Validator, observation: Observation | None = None
    ) -> tuple[PieceCounts, Mapping[str, str]]:
        """Send the rows to a broker without a store; return the counts, and why it has refused some of the ids."""
        task = self._task(rows, None, parameters, validator)
        done = self._run(self._cut(rows, parameters), task, self._target.max_connections, observation).to_pylist()
        counts = (PieceCounts(*(row[name] for name in PieceCounts._fields)) for row in done)
        refused = {key: reason for row in done for key, reason in json.loads(row["refused"] or "{}").items()}
        return reduce(PieceCounts.plus, counts), refused

    def has_far(self, job: Job) -> bool:
        """Return whether the far rows of the job are in the cold tier, as of a job that has ended."""
        return self._ledger.has_far(job.number)

    def far_rows(self, job: Job) -> int:
        """Return how many rows the pieces of the job leave to the cold tier; all of these pieces are stored."""
        rows = sum(given.rows for given in self._ledger.inputs(job.number).values())
        now = self._ledger.named(self._name)
        return rows - (job if now is None else now).committed.rows

    def finish(self, job: Job) -> Job:
        """End the job, all of whose pieces are stored, and return it."""
        return self._ledger.finish(job.number)

    def _run(
        self, messages: DataFrame, task: _PieceTask, writers: int | None, observation: Observation | None
    ) -> pa.Table:
        ordered = self._ordered(messages, task.parameters.pieces, writers)
        return observed(ordered.mapInArrow(task.run, OUTCOME), observation).toArrow()

    def _ordered(self, messages: DataFrame, pieces: int, writers: int | None) -> DataFrame:
        """Return the rows piece by piece, with their ends; `whole_pieces` orders those of one place."""
        together = 1 if self._folder is None else max(pieces // INDEX_PARTS, 1)
        ended = messages.unionByName(ends_of(messages, pieces))
        gathered = ended.repartition(F.expr(f"{PIECE_OF_PLACE} div {together}"))
        if writers is not None:
            gathered = gathered.coalesce(writers)
        return gathered.sortWithinPartitions(PLACE)

    def _task(self, rows: DataFrame, job: int | None, parameters: PieceParameters, validator: Validator) -> _PieceTask:
        sent = from_microseconds(parameters.now)
        headers = SendHeaders(self._target.sender, content_type(rows, self._columns), sent)
        store = None if job is None else self._store
        return _PieceTask(
            store, job or 0, parameters, validator, headers, self._broker, self._folder, self._files, self._search
        )

    def _cut(self, rows: DataFrame, parameters: PieceParameters) -> DataFrame:
        """Return the messages with their pieces and hashes; a delay counts from the begin of the first attempt."""
        messages = prepared(rows, self._columns, from_microseconds(parameters.now)).drop(*OWN_COLUMNS)
        contents = []
        if parameters.on_conflict == "replace":
            since = 0 if self._columns.delay is None else parameters.now
            due = F.expr(f"unix_micros(due) - {since}")
            values = (due if name == "due" else F.col(name) for name in SOURCE_COLUMNS.names)
            contents = [F.xxhash64(*values).alias(ROW_HASH)]
        id_hash = F.shiftrightunsigned(F.xxhash64(F.lit(SEED), "id"), 64 - PLACE_BITS)
        place = place_of(self._piece_of_id(parameters.pieces), F.least(id_hash, F.lit(END_OF_PIECE - 1)))
        return messages.select(
            *(self._moved(name, parameters) for name in SOURCE_COLUMNS.names),
            place.alias(PLACE),
            *contents,
        )

    def _moved(self, name: str, parameters: PieceParameters) -> Column:
        """Return a column, without the contents of rows that are for the cold tier."""
        if self._folder is None or name not in CONTENTS:
            return F.col(name)
        far = F.expr(f"unix_micros(due) >= {parameters.far_from}")
        return F.when(far, F.lit(None)).otherwise(F.col(name)).alias(name)

    def _piece_of_id(self, pieces: int) -> Column:
        """Return the piece of a row; beside a cold tier pieces are in the order of the index of its ids."""
        if self._folder is None:
            return F.pmod(F.xxhash64("id"), F.lit(pieces))
        first = F.conv(F.substring(index_hash(), 1, HASH_DIGITS), 16, 10).cast("int")
        return F.coalesce(F.floor(first * pieces / 16**HASH_DIGITS), F.lit(0))

    def check_again(self, rows: DataFrame, job: Job) -> None:
        """Raise DifferentInput if the job that has ended had other rows."""
        given = Fingerprint()
        for part in _inputs(self._cut(rows, job.parameters)).values():
            given = given.plus(part)
        committed, contents = job.committed, job.parameters.on_conflict == "replace"
        check_input(str(self._name), committed.fingerprint, committed.rows, given, contents=contents)

    def _stored(self, messages: DataFrame, job: Job) -> set[int]:
        """Return the pieces that are stored. Raises DifferentInput if one of them had other rows."""
        parts, part = self._ledger.inputs(job.number), job.parameters.part
        if not parts:
            return set()
        given, stored = _inputs(messages), dict[int, Fingerprint]()
        for number, of_part in parts.items():
            piece = number % job.parameters.pieces
            stored[piece] = stored.get(piece, Fingerprint()).plus(of_part)
        # The rest of a piece, some of whose parts are recorded, is left to a task, which compares these.
        begun = {
            piece
            for piece, known in stored.items()
            if part and known.rows % part == 0 and known.rows < given.get(piece, known).rows
        }
        others = sum(given.get(piece) != known for piece, known in stored.items() if piece not in begun)
        if others:
            raise DifferentInput(
                f"the job {str(self._name)!r} has begun with another input: {others:,} of the {len(stored):,} pieces "
                "that it has stored have other rows now. Nothing was stored now. Run it with the rows that it began "
                "with, or give this input a name of its own; for a stream whose rows differ each time, as uuid() does, "
                "use atomic='job'"
            )
        return stored.keys() - begun


def outcome(counts: PieceCounts, refused: Mapping[str, str] | None = None) -> pa.RecordBatch:
    """Return a row of OUTCOME."""
    values = {name: pa.array([count], pa.int64()) for name, count in counts._asdict().items()}
    reasons = json.dumps(dict(refused)) if refused else None
    return pa.RecordBatch.from_pydict({**values, "refused": pa.array([reasons], pa.string())})


def observed(counts: DataFrame, observation: Observation | None) -> DataFrame:
    """Return the rows of COUNTS; their sums are metrics of the query that reads them."""
    sums = (F.sum(F.expr(what)).alias(name) for name, what in METRICS.items())
    return counts.observe(METRICS_NAME if observation is None else observation, *sums)


def _inputs(messages: DataFrame) -> dict[int, Fingerprint]:
    """Return the fingerprint of each piece, as tasks take it."""
    hashes = [name for name in HASHES if name in messages.columns]
    total = [F.sum(F.col(name).cast("decimal(20,0)")).alias(name) for name in hashes]
    by_piece = messages.groupBy(F.expr(PIECE_OF_PLACE).alias(PIECE))
    found = by_piece.agg(F.count("*").alias("rows"), *total).toArrow().to_pylist()
    return {row[PIECE]: Fingerprint(row["rows"], *(int(row[name]) % MODULUS for name in hashes)) for row in found}


def _without(messages: DataFrame, done: set[int]) -> DataFrame:
    stored = messages.sparkSession.createDataFrame(pa.table({PIECE: pa.array(sorted(done), pa.int64())}))
    return messages.join(F.broadcast(stored), F.expr(f"{PIECE_OF_PLACE} = {PIECE}"), "left_anti")


def ends_of(messages: DataFrame, pieces: int) -> DataFrame:
    """Return the row that ends each of so many pieces, with the columns of the messages."""
    no_hash = F.lit(0)  # not null, with which NumPy has a column of floats
    values = {PLACE: place_of(F.col("id"), F.lit(END_OF_PIECE)), ROW_HASH: no_hash}
    columns = [values.get(field.name, F.lit(None)).cast(field.dataType).alias(field.name) for field in messages.schema]
    return messages.sparkSession.range(0, pieces, 1, 1).select(*columns)


def place_of(piece: Column, rest: Column) -> Column:
    """Return the column PLACE."""
    return F.shiftleft(piece.cast("long"), PLACE_BITS).bitwiseOR(rest)


def index_hash() -> Column:
    """Return the hash of an id in the index of the cold tier's ids, in hexadecimal digits."""
    return F.sha2(F.col("id").cast("binary"), 256)


@dataclass(frozen=True)
class _PieceTask:
    """The work of a task; pickled."""

    store: StoreOptions | None
    job: int
    parameters: PieceParameters
    validator: Validator
    headers: SendHeaders
    broker: MessageSink | None
    folder: ColdFolder | None
    files: JobFolder | None
    search: ShardSearch | None

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Store the pieces; yields what was done, once for some of them."""
        yield outcome(PieceCounts())  # a sum of no rows is unknown
        put = self._writer()
        for whole in whole_pieces(batches):
            if self.search is not None:
                self.search.check()
            rows, _ = self._checked(whole)
            if rows.inputs:
                yield put(rows)
        keep_imports()

    def write(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the pieces to files; yields their names."""
        assert self.files is not None and self.store is not None  # noqa: S101 - of a job that is to be decided
        ledger = self.store.pieces()
        for whole in whole_pieces(batches):
            rows, repeated = self._checked(whole)
            if self.parameters.on_conflict == "raise":
                ids = rows.messages.column("id")
                for taken in (repeated, ids.filter(pa.array(ledger.waiting(ids)))):
                    if len(taken):
                        raise DuplicateMessage(taken[0].as_py())
            if rows.inputs:
                yield pa.RecordBatch.from_pydict({"file": pa.array([self.files.write(self.job, rows)])})
        keep_imports()

    def _writer(self) -> Callable[[PieceRows], pa.RecordBatch]:
        store, broker, parameters = self.store, self.broker, self.parameters
        if store is None:
            assert broker is not None  # noqa: S101 - a job has a store, a broker, or both
            return lambda rows: asyncio.run(_sent(broker, rows))
        if broker is None:
            pieces = store.pieces(self.folder)
            return lambda rows: outcome(pieces.store(self.job, rows, parameters.on_conflict))
        levels = store.level_pieces(self.folder)
        return lambda rows: outcome(levels.send(self.job, rows, broker, parameters.far_from, parameters.part))

    def _checked(self, batch: pa.RecordBatch) -> tuple[PieceRows, pa.Array]:
        """Return the rows of whole pieces, with the headers of a send, and the ids that came before.

        The messages are copied once, in the order of their ids, neighbours in the index of ids, the largest; beside a
        cold tier they stay in the order of the index of its ids.
        """
        places = _numbers(batch, PLACE)
        positions = np.flatnonzero(~_is_end(places))
        pieces = places[positions] >> PLACE_BITS
        if self.parameters.part:
            pieces = parts_of(pieces, self.parameters.pieces, self.parameters.part)
        hashes = (_numbers(batch, name)[positions] for name in HASHES if name in batch.schema.names)
        inputs = _inputs_of(pieces, *hashes)
        if self.folder is not None:
            near = is_near(batch, self.parameters.far_from)[positions]
            positions, pieces = positions[near], pieces[near]
        is_good = pc.is_null(self.validator.reasons(batch)).to_numpy(zero_copy_only=False)[positions]
        good, of_good = positions[is_good], pieces[is_good]
        ids = batch.column("id").take(pa.array(good))
        is_new = np.ones(len(good), dtype=bool)
        if len(good) > 1:
            is_new[1:] = pc.not_equal(ids.slice(1), ids.slice(0, len(ids) - 1)).to_numpy(zero_copy_only=False)
        if self.search is not None:
            is_new &= ~self.search.waiting(ids, self.parameters.on_conflict)
        order = np.flatnonzero(is_new)
        if self.folder is None:
            order = order[pc.sort_indices(ids.filter(pa.array(is_new))).to_numpy()]
        messages = self.headers.complete(batch.select(SOURCE_COLUMNS.names).take(pa.array(good[order])))
        rows = PieceRows(messages, of_good[order], pieces[~is_good], of_good[~is_new], inputs)
        return rows, ids.filter(pa.array(~is_new))


@dataclass(frozen=True)
class _LoadTask:
    """Stores pieces that are in files; pickled."""

    store: StoreOptions
    job: int
    on_conflict: OnConflict
    files: JobFolder

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Store the pieces of each file; yields what was done."""
        yield outcome(PieceCounts())
        ledger = self.store.pieces()
        on_conflict: OnConflict = "replace" if self.on_conflict == "replace" else "keep"  # it is decided
        for batch in batches:
            for name in batch.column("file").to_pylist():
                yield outcome(ledger.store(self.job, self.files.read(name), on_conflict))
        keep_imports()


async def _sent(broker: MessageSink, rows: PieceRows) -> pa.RecordBatch:
    """Send the messages without a ledger."""
    counts, refused = PieceCounts(duplicates=len(rows.duplicates), rejected=len(rows.rejected)), dict[str, str]()
    async with AsyncExitStack() as stack:
        writer = await broker.writer(stack)
        for start in range(0, rows.messages.num_rows, SENT_AT_ONCE):
            done = await deliver(writer, rows.messages.slice(start, SENT_AT_ONCE))
            counts = counts.plus(done.counts)
            refused |= done.refused
    return outcome(counts, refused)


def whole_pieces(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield some whole pieces at a time; rows with equal ids stand together, in the order in which the first counts.

    Raises BackendUnavailable if the last did not come to its end.
    """
    begun, whole = list[pa.RecordBatch](), list[pa.RecordBatch]()
    for batch in batches:
        ends = np.flatnonzero(_is_end(_numbers(batch, PLACE)))
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
        yield _settled(pa.concat_batches(parts))


def _settled(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Put rows that share a place into order: those with equal ids, and with ids whose hashes happen to be equal."""
    places = _numbers(batch, PLACE)
    is_repeated = places[1:] == places[:-1]
    if not is_repeated.any():
        return batch
    tied = np.flatnonzero(np.append(is_repeated, False) | np.insert(is_repeated, 0, False))
    rows = batch.select([PLACE, *ORDER_IN_A_PLACE]).take(pa.array(tied))
    keys = {PLACE: rows.column(PLACE)}
    for name in ORDER_IN_A_PLACE:
        if name != "due":
            keys[f"whether there is {name}"] = rows.column(name).is_valid().cast(pa.int8())
        keys[name] = rows.column(name)
    order = pc.sort_indices(pa.table(keys), [(name, "ascending") for name in keys]).to_numpy()
    del rows, keys  # before all is copied
    moved = np.arange(batch.num_rows)
    moved[tied] = tied[order]
    return batch.take(pa.array(moved))


def _is_end(places: Any) -> Any:  # noqa: ANN401 - arrays of NumPy
    return places & END_OF_PIECE == END_OF_PIECE


def _numbers(batch: pa.RecordBatch, name: str) -> Any:  # noqa: ANN401 - an array of NumPy
    return batch.column(name).to_numpy(zero_copy_only=False)


def _inputs_of(pieces: Any, *hashes: Any) -> dict[int, Fingerprint]:  # noqa: ANN401 - arrays of NumPy
    """Return the fingerprint of each piece; the rows of a piece are side by side."""
    if not len(pieces):
        return {}
    starts = np.concatenate(([0], np.flatnonzero(np.diff(pieces)) + 1))
    rows = np.diff(np.append(starts, len(pieces)))
    sums = (np.add.reduceat(of_rows.view(np.uint64), starts) for of_rows in hashes)
    each = zip(pieces[starts].tolist(), rows.tolist(), *(part.tolist() for part in sums), strict=True)
    return {piece: Fingerprint(number, *totals) for piece, number, *totals in each}
