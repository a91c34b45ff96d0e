"""Export of journal entries, each exactly once; every method blocks.

Entries are exported in ranges of consecutive numbers. Entries that other transactions commit meanwhile are in no
exported range, whatever their numbers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import delete, func, insert, inspect, select

from delayline.bulk.writer import blocking
from delayline.errors import BackendUnavailable, BackendUnusable
from delayline.sql.databases import database_at
from delayline.sql.deadlines import job_work
from delayline.sql.journal import journal_tables
from delayline.sql.schema import DUE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sqlalchemy import Connection, Select

EVENTS_AT_ONCE: Final = 10_000


class EntryRange(NamedTuple):
    """The entries with numbers from `first` to `last`, none of which is missing."""

    first: int
    last: int

    @property
    def entries(self) -> int:
        """How many they are."""
        return self.last - self.first + 1


class JournalExport:
    """The way out of the journal that is in a schema of a database."""

    def __init__(self, url: str, *, schema: str | None = None) -> None:
        self._database = database_at(url)
        self._dialect = self._database.dialect
        self._tables = journal_tables(self._dialect.catalog.schema_of(schema))

    def runs(self, limit: int) -> list[EntryRange]:
        """Return the runs of the first `limit` entries. Raises BackendUnusable where no journal is kept."""
        number = self._tables.entries.c.seq
        island = (number - func.row_number().over(order_by=number)).label("island")
        some = select(number, island).order_by(number).limit(limit).subquery().c
        query = select(func.min(some.seq), func.max(some.seq)).group_by(some.island).order_by(func.min(some.seq))
        return [EntryRange(*row) for row in self._read(partial(_all, query=query))]

    def entries(self, run: EntryRange) -> Iterator[list[tuple[Any, ...]]]:
        """Yield some entries of a run at a time, with all columns of their table, times in UTC."""
        entries, from_due = self._tables.entries, self._dialect.values.from_due
        number, reads = entries.c.seq, [from_due if column.type is DUE else _as_it_is for column in entries.c]
        for first in range(run.first, run.last + 1, EVENTS_AT_ONCE):
            last = min(first + EVENTS_AT_ONCE - 1, run.last)
            query = select(entries).where(number.between(first, last)).order_by(number)
            rows = self._read(partial(_all, query=query))
            yield [tuple(read(value) for read, value in zip(reads, row, strict=True)) for row in rows]

    def finish(self, path: str, directory: str, runs: Sequence[EntryRange]) -> None:
        """Remove the exported entries and record the directory as complete, in a single transaction.

        Raises BackendUnavailable if another process has exported any of the entries; the directory then does not count.
        """
        blocking(self._opened_write(path, directory, runs))

    def directories(self, path: str) -> list[str]:
        """Return the directories under the path that count, oldest first."""
        exports = self._tables.exports.c
        query = select(exports.directory).where(exports.path == path).order_by(exports.finished, exports.directory)
        return list(self._read(lambda connection: connection.execute(query).scalars().all()))

    @job_work
    async def _opened_write(self, path: str, directory: str, runs: Sequence[EntryRange]) -> None:
        await self._database.open()
        try:
            await self._database.write(lambda connection: self._finish(connection, path, directory, runs))
        finally:
            await self._database.close()

    def _finish(self, connection: Connection, path: str, directory: str, runs: Sequence[EntryRange]) -> None:
        entries, number = sum(run.entries for run in runs), self._tables.entries.c.seq
        removed = sum(
            connection.execute(delete(self._tables.entries).where(number.between(*run))).rowcount for run in runs
        )
        if removed != entries:
            raise BackendUnavailable(
                f"{entries - removed} of {entries} entries of the journal were exported by another process meanwhile. "
                "Nothing was lost or doubled; export again"
            )
        now = self._dialect.values.in_seconds(0)
        row = {"directory": directory, "path": path, "entries": entries, "finished": now}
        connection.execute(insert(self._tables.exports).values(row))

    def _read(self, work: Callable[[Connection], Sequence[Any]]) -> Sequence[Any]:
        self._dialect.connections.must_exist()
        entries = self._tables.entries
        try:
            with self._dialect.connections.look() as connection:
                if not inspect(connection).has_table(entries.name, schema=entries.schema):
                    raise BackendUnusable(
                        f"no journal is kept in {self._dialect}: begin a journal with `delayline setup --journal true`"
                    )
                return work(connection)
        except self._dialect.errors.kinds as error:
            raise self._dialect.errors.translated(error) from error


def _as_it_is(value: Any) -> Any:  # noqa: ANN401 - what the driver gives
    return value


def _all(connection: Connection, *, query: Select[Any]) -> Sequence[Any]:
    return connection.execute(query).all()
