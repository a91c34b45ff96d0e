"""The files of a cold tier as a Delta table: a log that is derived from the catalog, and read by others.

The catalog stays the truth. Whoever finds the log behind commits one version with the files that have come and those
that have left; no file is written again. The log is read before the catalog, and the commit is refused if another came
first: so a version never has an older state of the catalog than the one before it.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from delayline.bulk.cold_folder import FILE_SUFFIX
from delayline.clock import LATEST_TIME, from_microseconds
from delayline.errors import BackendUnusable, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deltalake import DeltaTable

    from delayline.bulk.cold_catalog import ColdFile
    from delayline.bulk.cold_folder import ColdFolder

#: The column of the folders, by which readers pass over hours.
PARTITION: Final = "due_hour"
ONE_MILLISECOND: Final = timedelta(milliseconds=1)
#: How often a version is tried when others commit, too.
TRIES: Final = 20


class DeltaLog:
    """The log of a folder. Every method blocks.

    Args:
        folder: The files; with the prefix of their names.
    """

    def __init__(self, folder: ColdFolder) -> None:
        self._folder = folder

    @classmethod
    def of(cls, folder: ColdFolder) -> DeltaLog | None:
        """Return the log of the folder, which has to be kept; None without one.

        Raises MissingExtra if there is a log, and deltalake is not installed.
        """
        if not folder.has("_delta_log"):
            return None
        cls._check_extra()
        return cls(folder)

    def create(self) -> None:
        """Create the log, without files, if there is none.

        Raises:
            MissingExtra: deltalake is not installed.
            BackendUnusable: It cannot be written to the folder.
        """
        self._check_extra()
        import pyarrow as pa
        from deltalake import DeltaTable, Schema
        from deltalake.exceptions import DeltaError

        from delayline.delayed.arrow import MESSAGE_SCHEMA

        self._folder.make()
        schema = Schema.from_arrow(pa.schema([*MESSAGE_SCHEMA, pa.field(PARTITION, pa.string())]))
        try:
            DeltaTable.create(self._folder.uri, schema, mode="ignore", partition_by=[PARTITION])
        except (DeltaError, OSError) as error:
            raise BackendUnusable(f"cannot keep a Delta log in {self._folder.path}: {error}") from error

    def update(self, held: Callable[[], Sequence[ColdFile]]) -> int:
        """Commit the difference between the log and the catalog, if there is any; return the log's version.

        Args:
            held: Returns the files of the catalog; called after the log was read, again if another committed meanwhile.

        Raises:
            BackendUnusable: The log cannot be read or written, or others commit all the time.
        """
        from deltalake.exceptions import CommitFailedError, DeltaError

        for _ in range(TRIES):
            try:
                table, listed = self._listed()
                files = {self._path(file): file for file in held()}
                new = [file for path, file in files.items() if path not in listed]
                old = sorted(listed - {*files})
                if new or old:
                    self._commit(table, new, old)
                    table, _ = self._listed()
                return int(table.version())
            except CommitFailedError:
                continue
            except (DeltaError, OSError) as error:
                raise BackendUnusable(f"cannot keep the Delta log in {self._folder.path}: {error}") from error
        raise BackendUnusable(f"others have committed to the Delta log in {self._folder.path} {TRIES} times: try again")

    def _listed(self) -> tuple[DeltaTable, set[str]]:
        """Return the table, and the paths of our files in it: other stores may share the folder."""
        from deltalake import DeltaTable

        table = DeltaTable(self._folder.uri)
        paths = table.get_add_actions(flatten=True).column("path").to_pylist()
        return table, {path for path in paths if path.rpartition("/")[2].startswith(f"{self._folder.tier}-")}

    def _commit(self, table: DeltaTable, new: Sequence[ColdFile], old: Sequence[str]) -> None:
        from deltalake.transaction import AddAction, CommitProperties, RemoveAction

        now = int(datetime.now(UTC).timestamp() * 1000)
        actions: list[Any] = []
        for file in new:
            size, changed = self._folder.size_of(file)
            folder = {PARTITION: file.due_hour}
            actions.append(AddAction(self._path(file), size, folder, changed, True, _statistics(file)))
        for path in old:
            hour: dict[str, str | None] = {PARTITION: re.sub(f"{PARTITION}=(.*)/.*", r"\1", path)}
            actions.append(RemoveAction(path, True, now, partition_values=hour))
        table.create_write_transaction(
            actions,
            "append",
            table.schema(),
            [PARTITION],
            commit_properties=CommitProperties(max_commit_retries=0),
        )

    @staticmethod
    def _path(file: ColdFile) -> str:
        return f"{PARTITION}={file.due_hour}/{file.name}{FILE_SUFFIX}"

    @staticmethod
    def _check_extra() -> None:
        if find_spec("deltalake") is None:
            raise MissingExtra("delta", "the Delta log of the cold tier")


def _statistics(file: ColdFile) -> str:
    """Return what a reader needs to pass over the file; times in whole milliseconds, around those of the messages."""
    first, last = from_microseconds(file.min_due), from_microseconds(file.max_due)
    statistics: dict[str, Any] = {"numRecords": file.messages}
    if last < LATEST_TIME - ONE_MILLISECOND:
        statistics["minValues"] = {"due": _in_milliseconds(first)}
        statistics["maxValues"] = {"due": _in_milliseconds(last + ONE_MILLISECOND)}
    return json.dumps(statistics)


def _in_milliseconds(instant: datetime) -> str:
    return f"{instant.year:04}-{instant:%m-%dT%H:%M:%S}.{instant.microsecond // 1000:03}Z"
