"""What an older delayline has committed, as its own ledger has it: the table `delayline_spark_runs`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import inspect, select

from delayline.bulk.batches import ASKED_AT_ONCE, CLOSED
from delayline.bulk.job_tables import RunKind, Sink, earlier_runs_table
from delayline.bulk.jobs import Committed, JobName, JobPieces, PieceParameters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Table

    from delayline.bulk.batches import BatchName
    from delayline.sql.dialect import Dialect


class EarlierRuns:
    """The older ledger, where it exists, for a store; every call is part of the caller's transaction.

    The tables have been upgraded.
    """

    def __init__(self, dialect: Dialect, store: Table) -> None:
        self._dialect = dialect
        self._ledger = JobPieces(dialect, store)
        self._table: Table = earlier_runs_table(store.schema)

    def take_over(self, connection: Connection, name: JobName, *, stream: bool) -> None:
        """Record a job, or the last batch of a stream, as one with all rows at once, unless the new ledger has it.

        The older ledger was that of all stores of a schema: what it has is done in each of them.
        """
        known = self._ledger.last(connection, name.name) if stream else self._ledger.named(connection, name)
        if known is not None or not self._exists(connection):
            return
        columns = self._table.c
        run, kind = (name.name, RunKind.STREAM) if stream else (str(name), RunKind.JOB)
        found = connection.execute(select(self._table).where(columns.run == run, columns.kind == kind.value)).mappings()
        rows = {Sink(row["sink"]): row for row in found}
        if Sink.STORE not in rows:
            return
        done, numbers = rows[Sink.STORE], {sink: int(row["stored"]) for sink, row in rows.items()}
        committed = Committed(
            numbers[Sink.STORE],
            sum(int(row["duplicates"]) for row in rows.values()),
            sum(int(row["rejected"]) for row in rows.values()),
            fingerprint=done["fingerprint"],
            sent=numbers.get(Sink.LEVELS, 0),
            cold=numbers.get(Sink.COLD, 0),
        )
        has_cold_tier = Sink.COLD in rows
        parameters = PieceParameters(0, 0, "keep", stream=stream, at_once=True, has_cold_tier=has_cold_tier)
        name = JobName(name.name, int(done["batch"])) if stream else name
        self._ledger.add_done(connection, name, parameters, committed, done["finished"])

    def close(self, connection: Connection, names: Sequence[BatchName]) -> None:
        """Prevent tasks of an older delayline from committing batches; committed batches are unaffected."""
        if names and self._exists(connection):
            columns = {"sink": Sink.STORE.value, "kind": RunKind.MIGRATION.value, "batch": CLOSED}
            counts = dict.fromkeys(("stored", "duplicates", "rejected"), 0)
            rows = [{"run": _run(name), **columns, **counts} for name in sorted(names)]
            connection.execute(self._dialect.words.insert_new(self._table, "run"), rows)

    def attempts(self, connection: Connection, names: Sequence[BatchName]) -> dict[BatchName, int]:
        """Return which attempts have committed the batches, without uncommitted batches."""
        columns = self._table.c
        found: dict[BatchName, int] = {}
        for first in range(0, len(names) if self._exists(connection) else 0, ASKED_AT_ONCE):
            asked = {_run(name): name for name in names[first : first + ASKED_AT_ONCE]}
            named = (columns.run.in_(list(asked)), columns.kind == RunKind.MIGRATION.value, columns.batch > CLOSED)
            for run, attempt in connection.execute(select(columns.run, columns.batch).where(*named)):
                found[asked[run]] = int(attempt)
        return found

    def _exists(self, connection: Connection) -> bool:
        return inspect(connection).has_table(self._table.name, schema=self._table.schema)


def _run(name: BatchName) -> str:
    return f"migration {name.run} {name.partition} {name.batch}"
