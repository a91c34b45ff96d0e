"""The tables of jobs, of their pieces, and of what an older delayline has committed."""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from sqlalchemy import BigInteger, Column, Integer, MetaData, Table, and_, insert, literal, or_, select, update

from delayline.message import MAXIMUM_ID_LENGTH
from delayline.sql.schema import (
    DUE,
    JSON_TEXT,
    MAXIMUM_NAME_LENGTH,
    MAXIMUM_TABLE_NAME_LENGTH,
    NO_LONGER_MADE,
    TableGroup,
    register,
    text,
)

if TYPE_CHECKING:
    from sqlalchemy import Executable

LONGEST_KIND: Final = 16
LONGEST_FINGERPRINT: Final = 64


class RunKind(StrEnum):
    """What a run of an older delayline belongs to."""

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


@lru_cache(maxsize=64)
def earlier_runs_table(schema: str | None = None) -> Table:
    """Return the ledger of an older delayline in that schema, the connection's own where None."""
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
        info={NO_LONGER_MADE: True},
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
        # Since revision 4; NULL for jobs without a broker.
        Column("sent", BigInteger),
        Column("refused", JSON_TEXT),
        # Since revision 5; NULL for jobs that ended before it.
        Column("cold", BigInteger),
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
        # Since revision 4: messages that a broker has confirmed, and the reasons of those that it has refused, by id.
        Column("sent", BigInteger),
        Column("refused", JSON_TEXT),
        # Since revision 5: messages that files of the cold tier have got.
        Column("cold", BigInteger),
    )
    return jobs, pieces


#: The id of a query, at the end of the name of a stream's run; the other names of streams are hashes.
QUERY: Final = "%________-____-____-____-____________"
HASH: Final = "_" * 64


def _convert_rows(schema: str | None) -> list[Executable]:
    """Return statements that give the rows of revision 1 their sinks and kinds, which are in their names.

    A row "cold nightly" beside a row "nightly" may be of either run: it is kept, and copied to the sink of "nightly".
    """
    table = earlier_runs_table(schema)
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


JOBS: Final = register(
    TableGroup(
        "jobs",
        lambda _, schema: [*job_tables(schema), earlier_runs_table(schema)],
        revision=5,
        usable_from=5,  # an older delayline does not know what migrations and jobs at once have stored since
        convert_rows=_convert_rows,
    )
)
