"""The ledger of bulk jobs: a batch that a run has committed is not committed again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from sqlalchemy import BigInteger, Column, MetaData, Table, inspect, select, update

from delayline.errors import ConfigurationError
from delayline.message import MAXIMUM_ID_LENGTH
from delayline.sql.schema import DUE, TableGroup, register, text
from delayline.sql.setup import RequiredTables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection

    from delayline.sql.dialect import Dialect

#: The number of a batch before the first one.
NONE_YET: Final = -1
#: In place of an attempt: there may be none any more.
CLOSED: Final = 0
#: Names that are asked for in one statement.
AT_ONCE: Final = 1000


@dataclass(frozen=True, slots=True)
class Committed:
    """The result of a bulk job, counted in rows."""

    stored: int
    duplicates: int = 0
    """Left out because their id waits already, or came twice."""
    rejected: int = 0
    repeated: bool = False
    """Whether the run had committed before, so that nothing was done now."""


@lru_cache(maxsize=64)
def runs_table(schema: str | None = None) -> Table:
    """Return the ledger's table in that schema, the connection's own where None."""
    return Table(
        "delayline_spark_runs",
        MetaData(schema=schema),
        Column("run", text(MAXIMUM_ID_LENGTH), primary_key=True),
        # The last batch of a stream; 0 for a job; for a batch that is a run by itself, the attempt that committed it.
        Column("batch", BigInteger, nullable=False),
        Column("stored", BigInteger, nullable=False),
        Column("duplicates", BigInteger, nullable=False),
        Column("rejected", BigInteger, nullable=False),
        Column("finished", DUE),
    )


LEDGER: Final = register(TableGroup("jobs", lambda _, schema: [runs_table(schema)]))


class JobLedger:
    """The ledger in one database; every call is part of the caller's transaction."""

    def __init__(self, dialect: Dialect, schema: str | None = None) -> None:
        self._dialect = dialect
        self.table = runs_table(schema)

    def create(self, connection: Connection) -> None:
        """Create the table, or upgrade it."""
        RequiredTables(self._dialect, self.table.schema, LEDGER).set_up(connection)

    def begin(self, connection: Connection, run: str, batch: int = 0) -> Committed | None:
        """Lock the run's ledger row. Return its result, or None if this batch has not been committed.

        Waits for another transaction that has locked the row, and then sees its result.
        """
        last, committed = self._state(connection, run)
        return None if last < batch else committed

    def begin_attempt(self, connection: Connection, run: str) -> int | None:
        """Lock the ledger row of a batch that is a run by itself; return the attempt that committed it, or CLOSED."""
        last, _ = self._state(connection, run)
        return None if last == NONE_YET else last

    def attempts(self, connection: Connection, runs: Sequence[str]) -> dict[str, int]:
        """Return which attempts have committed those of the batches that any has."""
        columns = self.table.c
        if not inspect(connection).has_table(self.table.name, schema=self.table.schema):
            return {}
        found: dict[str, int] = {}
        for first in range(0, len(runs), AT_ONCE):
            named = columns.run.in_(runs[first : first + AT_ONCE])
            rows = connection.execute(select(columns.run, columns.batch).where(named, columns.batch > CLOSED))
            found |= {run: int(attempt) for run, attempt in rows}
        return found

    def add(self, connection: Connection, attempts: Mapping[str, int]) -> None:
        """Record the attempts at batches that the transaction commits, or CLOSED; existing rows are kept."""
        now = connection.execute(select(self._dialect.in_seconds(0))).scalar_one()
        rows = [
            {"run": run, "batch": attempt, "stored": 0, "duplicates": 0, "rejected": 0, "finished": now}
            for run, attempt in attempts.items()
        ]
        if rows:
            connection.execute(self._dialect.insert_new(self.table, "run"), rows)

    def end(self, connection: Connection, run: str, batch: int, committed: Committed) -> None:
        """Record the result of the transaction."""
        counts = {name: getattr(committed, name) for name in ("stored", "duplicates", "rejected")}
        now = self._dialect.in_seconds(0)
        entry = update(self.table).where(self.table.c.run == run).values(batch=batch, finished=now, **counts)
        connection.execute(entry)

    def find(self, connection: Connection, run: str, batch: int = 0) -> Committed | None:
        """Return the run's last committed batch; None if that was before this batch, or if there is none."""
        columns = self.table.c
        if not inspect(connection).has_table(self.table.name, schema=self.table.schema):
            return None
        query = select(columns.stored, columns.duplicates, columns.rejected)
        found = connection.execute(query.where(columns.run == run, columns.batch >= batch)).first()
        return None if found is None else Committed(*found)

    def _state(self, connection: Connection, run: str) -> tuple[int, Committed]:
        columns = self.table.c
        nothing = {"run": run, "batch": NONE_YET, "stored": 0, "duplicates": 0, "rejected": 0, "finished": None}
        connection.execute(self._dialect.insert_new(self.table, "run").values(nothing))
        query = select(columns.batch, columns.stored, columns.duplicates, columns.rejected)
        found = connection.execute(query.where(columns.run == run).with_for_update()).one()
        return found.batch, Committed(*found[1:], repeated=True)


def check_run(run: str) -> str:
    """Return the name of a run; raises ConfigurationError for one that the ledger could not keep as it is."""
    if not isinstance(run, str) or not run.strip() or len(run) > MAXIMUM_ID_LENGTH or not run.isprintable():
        raise ConfigurationError(
            f"run={run!r} must be a text of 1 to {MAXIMUM_ID_LENGTH} printable characters, the same when run again"
        )
    return run
