"""Files exported by another product: they are not changed, and the journal records the moved messages."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from sqlalchemy import select

from delayline.errors import ConfigurationError
from delayline.masking import masked
from delayline.migration.collected import CollectedMessage, CollectedSource
from delayline.migration.journal import BatchState, MigrationJournal
from delayline.migration.source import BATCH_COLUMN, NUMBER_COLUMN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection

    from delayline.migration.journal import HeldPartition


class ExportedFiles(CollectedSource):
    """Messages in export files, `*` and `?` in the path standing for several."""

    written_by: ClassVar[str]
    """The program that has written the files."""

    def __str__(self) -> str:
        return f"{self.written_by}'s export {masked(self.place)}"

    @property
    def files(self) -> list[str]:
        """The files. Raises ConfigurationError for none."""
        files = [self.place] if Path(self.place).is_file() else sorted(glob.glob(self.place))  # noqa: PTH207 - anywhere
        if not files:
            raise ConfigurationError(
                f"there is no file {masked(self.place)}: give the path of a file written by {self.written_by}"
            )
        return [str(Path(file).absolute()) for file in files]

    async def restore(self, rows: Sequence[CollectedMessage]) -> Mapping[str, str]:
        """No-op: a file is not changed."""
        del rows
        return {}

    def moved(self, connection: Connection) -> list[tuple[str, HeldPartition]]:
        """Return earlier runs of this source with their messages, some of which have moved."""
        journal = MigrationJournal(self.dialect, self.schema)
        runs = [run.name for run in journal.list_runs(connection) if run.parameters.get("source") == str(self)]
        return [(run, partition) for run in runs for partition in journal.list_partitions(connection, run)]

    def new(
        self, connection: Connection, rows: Sequence[CollectedMessage], moved: Sequence[tuple[str, HeldPartition]]
    ) -> list[CollectedMessage]:
        """Return the messages that none of the runs has moved."""
        keys = [row.key for row in rows]
        journal = MigrationJournal(self.dialect, self.schema)
        gone: set[str] = set()
        for run, partition in moved:
            held = self.held(partition.held)
            marked = select(journal.batches.c.batch).where(
                journal.batches_in(run, partition.number, [BatchState.MARKED.value])
            )
            rejected = select(journal.rejected.c.number).where(journal.rejected_in(run, partition.number))
            query = select(held.c[self.key]).where(
                held.c[self.key].in_(keys), held.c[BATCH_COLUMN].in_(marked), held.c[NUMBER_COLUMN].not_in(rejected)
            )
            gone.update(connection.execute(query).scalars())
        return [row for row in rows if row.key not in gone]
