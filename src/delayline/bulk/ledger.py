"""The ledger of bulk jobs: a batch that a run has committed is not committed again.

A run is known by its name, what it belongs to, and the sink of its messages. With its result the ledger keeps a
fingerprint of its input, so that another input under the same name is refused and not taken for the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    Integer,
    MetaData,
    Table,
    and_,
    insert,
    inspect,
    literal,
    or_,
    select,
    update,
)

from delayline.errors import ConfigurationError, DifferentInput
from delayline.message import MAXIMUM_ID_LENGTH
from delayline.sql.schema import (
    DUE,
    JSON_TEXT,
    MAXIMUM_NAME_LENGTH,
    MAXIMUM_TABLE_NAME_LENGTH,
    TableGroup,
    register,
    text,
)
from delayline.sql.setup import RequiredTables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import ColumnElement, Connection, Executable, Row, Select

    from delayline.bulk.fingerprint import Fingerprint
    from delayline.sql.dialect import Dialect

#: The number of a batch before the first.
NONE_YET: Final = -1
#: In place of an attempt: there may be none any more.
CLOSED: Final = 0
#: Names that are asked for in a statement.
RUNS_AT_ONCE: Final = 1000
LONGEST_KIND: Final = 16
LONGEST_FINGERPRINT: Final = 64


class RunKind(StrEnum):
    """What a run belongs to."""

    JOB = "job"
    """A job that a user has named."""
    STREAM = "stream"
    """A stream; each of its batches is committed under the next number."""
    MIGRATION = "migration"
    """A migration, each of whose batches is a run by itself."""


class Sink(StrEnum):
    """Where the messages of a run went."""

    STORE = "store"
    COLD = "cold"
    LEVELS = "levels"


class RunKey(NamedTuple):
    """The key of a run's row."""

    run: str
    sink: Sink = Sink.STORE
    kind: RunKind = RunKind.JOB

    @property
    def columns(self) -> dict[str, str]:
        """The key by column."""
        return {name: str(value) for name, value in self._asdict().items()}


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

    @property
    def rows(self) -> int:
        """How many rows the input had."""
        return self.stored + self.duplicates + self.rejected


def _of_migration(run: str) -> RunKey:
    return RunKey(run, kind=RunKind.MIGRATION)


@lru_cache(maxsize=64)
def runs_table(schema: str | None = None) -> Table:
    """Return the ledger's table in that schema, the connection's own where None."""
    return Table(
        "delayline_spark_runs",
        MetaData(schema=schema),
        Column("run", text(MAXIMUM_ID_LENGTH), primary_key=True),
        # Since revision 2, before which the names of runs began with them.
        Column("sink", text(LONGEST_KIND), primary_key=True, server_default=Sink.STORE.value),
        Column("kind", text(LONGEST_KIND), primary_key=True, server_default=RunKind.JOB.value),
        # The last batch of a stream; 0 for a job; for a batch that is a run by itself, the attempt that committed it.
        Column("batch", BigInteger, nullable=False),
        Column("stored", BigInteger, nullable=False),
        Column("duplicates", BigInteger, nullable=False),
        Column("rejected", BigInteger, nullable=False),
        Column("finished", DUE),
        # Since revision 2; NULL for other runs than jobs, and for earlier jobs.
        Column("fingerprint", text(LONGEST_FINGERPRINT)),
    )


@lru_cache(maxsize=64)
def job_tables(schema: str | None = None) -> tuple[Table, Table]:
    """Return the tables of jobs and of their pieces in that schema, the connection's own where None."""
    metadata = MetaData(schema=schema)
    jobs = Table(
        "delayline_jobs",
        metadata,
        Column("store", text(MAXIMUM_TABLE_NAME_LENGTH), primary_key=True),
        Column("name", text(MAXIMUM_ID_LENGTH), primary_key=True),
        Column("version", BigInteger, primary_key=True, autoincrement=False),
        Column("job", BigInteger, nullable=False, unique=True),
        Column("state", text(MAXIMUM_NAME_LENGTH), nullable=False),
        Column("parameters", JSON_TEXT, nullable=False),
        Column("input", text(LONGEST_FINGERPRINT)),
        Column("stored", BigInteger, nullable=False),
        Column("duplicates", BigInteger, nullable=False),
        Column("rejected", BigInteger, nullable=False),
        Column("bytes", BigInteger, nullable=False),
        Column("started", DUE, nullable=False),
        Column("finished", DUE),
    )
    pieces = Table(
        "delayline_job_pieces",
        metadata,
        Column("job", BigInteger, primary_key=True, autoincrement=False),
        Column("piece", Integer, primary_key=True, autoincrement=False),
        Column("attempt", BigInteger, nullable=False),
        Column("input", text(LONGEST_FINGERPRINT), nullable=False),
        # Of all pieces of a transaction, in the row of the first.
        Column("stored", BigInteger, nullable=False),
        Column("duplicates", BigInteger, nullable=False),
        Column("rejected", BigInteger, nullable=False),
        Column("bytes", BigInteger, nullable=False),
        Column("committed", DUE, nullable=False),
    )
    return jobs, pieces


#: The id of a query, at the end of the name of a stream's run; the other names of streams are hashes.
QUERY: Final = "%________-____-____-____-____________"
HASH: Final = "_" * 64


def _convert_rows(schema: str | None) -> list[Executable]:
    """Return statements that give the rows of revision 1 their sinks and kinds, which are in their names.

    A row "cold nightly" beside a row "nightly" may be of either run: it is kept, and copied to the sink of "nightly".
    """
    table = runs_table(schema)
    rows = table.c
    is_batch = or_(rows.batch > 0, and_(rows.stored == 0, rows.duplicates == 0, rows.rejected == 0))
    migrations = and_(rows.run.like("migration % % %"), is_batch)
    streams = and_(
        or_(rows.run.like(f"stream {QUERY}"), and_(rows.run.like(f"stream {HASH}"), rows.batch > 0)),
        rows.sink == Sink.STORE.value,
    )
    statements: list[Executable] = [
        update(table).where(migrations).values(kind=RunKind.MIGRATION.value),
        update(table).where(streams).values(kind=RunKind.STREAM.value),
    ]
    counts = ("batch", "stored", "duplicates", "rejected", "finished")
    for sink in (Sink.COLD, Sink.LEVELS):
        store, old, new = table.alias("store"), table.alias("old"), table.alias("new")
        same = and_(new.c.run == store.c.run, new.c.kind == store.c.kind, new.c.sink == sink.value)
        pairs = store.join(old, old.c.run == literal(f"{sink.value} ") + store.c.run).outerjoin(new, same)
        keys = (store.c.run, literal(sink.value), store.c.kind)
        merged = select(*keys, *(old.c[name] for name in counts)).select_from(pairs)
        both = (store.c.sink == Sink.STORE.value, old.c.sink == Sink.STORE.value, new.c.run.is_(None))
        statements.append(insert(table).from_select(["run", "sink", "kind", *counts], merged.where(*both)))
    return statements


LEDGER: Final = register(
    TableGroup(
        "jobs",
        lambda _, schema: [runs_table(schema), *job_tables(schema)],
        revision=3,
        usable_from=2,
        convert_rows=_convert_rows,
    )
)


class JobLedger:
    """The ledger in a database; every call is part of the caller's transaction."""

    def __init__(self, dialect: Dialect, schema: str | None = None) -> None:
        self._dialect = dialect
        self.table: Table = runs_table(schema)

    def create(self, connection: Connection) -> None:
        """Create the table, or upgrade it."""
        RequiredTables(self._dialect, self.table.schema, LEDGER).set_up(connection)

    def begin(
        self,
        connection: Connection,
        key: RunKey,
        batch: int = 0,
        fingerprint: Fingerprint | None = None,
        *,
        contents: bool = False,
    ) -> Committed | None:
        """Lock the run's ledger row. Return its result, or None if this batch has not been committed.

        Waits for another transaction that has locked the row, and then sees its result.

        Raises:
            DifferentInput: The run has committed another input, or a later batch.
        """
        last, committed = self._state(connection, key)
        if last < batch:
            return None
        if key.kind is RunKind.STREAM and last > batch:
            raise DifferentInput(
                f"batch {batch} of {key.run!r} comes after batch {last} was stored: the checkpoint is old, and "
                "this batch may have other rows. Nothing of it was stored; start the stream with a new checkpoint and "
                "on_conflict='keep'"
            )
        check_input(key.run, committed.fingerprint, committed.rows, fingerprint, contents=contents)
        return committed

    def begin_attempt(self, connection: Connection, run: str) -> int | None:
        """Lock the row of a migration's batch; return the attempt that committed it, or CLOSED."""
        last, _ = self._state(connection, _of_migration(run))
        return None if last == NONE_YET else last

    def attempts(self, connection: Connection, runs: Sequence[str]) -> dict[str, int]:
        """Return which attempts have committed batches of a migration, without uncommitted batches."""
        columns = self.table.c
        if not inspect(connection).has_table(self.table.name, schema=self.table.schema):
            return {}
        attempts: dict[str, int] = {}
        for first in range(0, len(runs), RUNS_AT_ONCE):
            named = (columns.run.in_(runs[first : first + RUNS_AT_ONCE]), columns.kind == RunKind.MIGRATION.value)
            rows = connection.execute(select(columns.run, columns.batch).where(*named, columns.batch > CLOSED))
            attempts |= {run: int(attempt) for run, attempt in rows}
        return attempts

    def add(self, connection: Connection, attempts: Mapping[str, int]) -> None:
        """Record the attempts at a migration's batches that the transaction commits, or CLOSED; keeps existing rows."""
        now = connection.execute(select(self._dialect.values.in_seconds(0))).scalar_one()
        counts = {"stored": 0, "duplicates": 0, "rejected": 0, "finished": now}
        rows = [{**_of_migration(run).columns, "batch": attempt, **counts} for run, attempt in attempts.items()]
        if rows:
            connection.execute(self._dialect.words.insert_new(self.table, "run"), rows)

    def end(self, connection: Connection, key: RunKey, batch: int, committed: Committed) -> None:
        """Record the result of the transaction."""
        counts = {name: getattr(committed, name) for name in ("stored", "duplicates", "rejected", "fingerprint")}
        now = self._dialect.values.in_seconds(0)
        entry = update(self.table).where(*self._is(key)).values(batch=batch, finished=now, **counts)
        connection.execute(entry)

    def find(self, connection: Connection, key: RunKey, batch: int = 0) -> Committed | None:
        """Return the run's last committed batch; None if that was before this batch, or if there is none."""
        columns = self.table.c
        if not inspect(connection).has_table(self.table.name, schema=self.table.schema):
            return None
        counts = connection.execute(self._counts().where(*self._is(key), columns.batch >= batch)).first()
        return None if counts is None else _committed(counts, repeated=False)

    def _state(self, connection: Connection, key: RunKey) -> tuple[int, Committed]:
        nothing = {"batch": NONE_YET, "stored": 0, "duplicates": 0, "rejected": 0, "finished": None}
        connection.execute(self._dialect.words.insert_new(self.table, "run").values({**key.columns, **nothing}))
        counts = connection.execute(self._counts().where(*self._is(key)).with_for_update()).one()
        return counts.batch, _committed(counts, repeated=True)

    def _counts(self) -> Select[Any]:
        columns = self.table.c
        return select(columns.batch, columns.stored, columns.duplicates, columns.rejected, columns.fingerprint)

    def _is(self, key: RunKey) -> list[ColumnElement[bool]]:
        return [self.table.c[name] == value for name, value in key.columns.items()]


def _committed(row: Row[Any], *, repeated: bool) -> Committed:
    return Committed(row.stored, row.duplicates, row.rejected, repeated, row.fingerprint)


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
