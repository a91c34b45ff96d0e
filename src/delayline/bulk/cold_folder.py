"""The files of a cold tier: Parquet, an hour of due times in each, in a local folder or on a file system of pyarrow.

Which files count is recorded in the catalog only.
"""

from __future__ import annotations

import contextlib
import heapq
import uuid
from collections import Counter
from functools import partial
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from delayline.bulk.cold_catalog import IDS_FOLDER, MICROS_A_HOUR, ColdFile, hour_of
from delayline.bulk.shared_folder import SharedFolder
from delayline.delayed.columns import BULK_NAMES
from delayline.errors import BackendUnusable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime

    import pyarrow as pa
    import pyarrow.parquet as pq
    from numpy.typing import NDArray

    from delayline.bulk.cold_ids import IdHashes
    from delayline.delayed.columns import StoredRow

ROWS_AT_ONCE: Final = 10_000
#: A file's rows at most: a task takes a file, so an hour of many messages is several.
ROWS_A_FILE: Final = 250_000
FILE_SUFFIX: Final = ".parquet"
#: Of Parquet too, but not of messages.
IDS_SUFFIX: Final = ".ids"
#: A writer's ids at most in memory, 24 bytes each.
IDS_AT_ONCE: Final = 4_000_000


class FoundFile(NamedTuple):
    """A file on disk, registered or orphaned."""

    name: str
    due_hour: str
    changed: datetime


class ColdFolder(SharedFolder):
    """Where the files of a store's cold tier are; pickled to tasks. Every method blocks.

    Args:
        path: a local folder, or a URI of pyarrow's: file, s3, gs, hdfs, abfss.
        tier: the prefix of names of new files.

    Raises:
        BackendUnusable: The folder cannot be read or written.
        ConfigurationError: The path or URI is not valid.
        MissingExtra: pyarrow is not installed.
    """

    setting: ClassVar[str] = "cold_tier"
    purpose: ClassVar[str] = "the cold tier"

    def __init__(self, path: str, tier: str = "") -> None:
        super().__init__(path)
        self.tier = tier

    def new_name(self) -> str:
        """Return a name that no other file has."""
        return f"{self.tier}-{uuid.uuid4().hex}"

    def open_new(self, name: str, due_hour: str) -> Any:  # noqa: ANN401 - pyarrow's writer
        """Return a writer of Parquet."""
        import pyarrow.parquet as pq

        from delayline.delayed.arrow import MESSAGE_SCHEMA

        system, root = self._place
        with self._plainly(f"write to {self.path}"):
            system.create_dir(f"{root}/due_hour={due_hour}", recursive=True)
            address = self._address(name, due_hour)
            return pq.ParquetWriter(address, MESSAGE_SCHEMA, filesystem=system, compression="zstd", compression_level=1)

    def batches(
        self, file: ColdFile, dead: Sequence[str] = (), *, columns: Sequence[str] = BULK_NAMES
    ) -> Iterator[pa.RecordBatch]:
        """Yield a file's rows, without rows of dead ids, earliest due first."""
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        from delayline.delayed.arrow import completed

        system, _ = self._place
        ids = pa.array(dead, pa.string())
        asked = list(dict.fromkeys([*columns, *(["id"] if dead else [])]))
        rows = 0
        with self._plainly(f"read {file.name} of {self.path}"):
            address = self._address(file.name, file.due_hour)
            with pq.ParquetFile(address, filesystem=system, pre_buffer=True) as source:
                for batch in source.iter_batches(ROWS_AT_ONCE, columns=asked):
                    rows += batch.num_rows
                    kept = batch.filter(pc.invert(pc.is_in(batch.column("id"), value_set=ids))) if dead else batch
                    yield completed(kept, columns)
        if rows != file.messages:
            raise BackendUnusable(
                f"{address} has {rows} rows, but the catalog lists {file.messages}: the file was changed. Restore it"
            )

    def rows(
        self, files: Sequence[ColdFile], dead: Mapping[str, Sequence[str]], destination: str | None = None
    ) -> Iterator[StoredRow]:
        """Yield the messages of the files, earliest due first; reads no further than it is asked."""
        hours: dict[str, list[ColdFile]] = {}
        for file in sorted(files, key=lambda file: file.min_due):
            hours.setdefault(file.due_hour, []).append(file)
        for some in hours.values():
            each = (self._rows(file, dead.get(file.name, ()), destination) for file in some)
            yield from heapq.merge(*each, key=attrgetter("due", "id"))

    def write_ids(self, entries: pa.Table) -> str:
        """Write an index of ids, which are in the order of their hashes; return its name."""
        import pyarrow.parquet as pq

        from delayline.bulk.cold_ids import IDS_A_GROUP

        name, (system, root) = self.new_name(), self._place
        with self._plainly(f"write to {self.path}"):
            system.create_dir(f"{root}/{IDS_FOLDER}", recursive=True)
            address = self._address(name, IDS_FOLDER)
            pq.write_table(
                entries, address, filesystem=system, row_group_size=IDS_A_GROUP, use_dictionary=["file"],
                compression="zstd", compression_level=1,
            )  # fmt: skip
            self.settle(address)
        return name

    def ranges_of_ids(self, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the lowest and the highest hash of each group of an index."""
        import numpy as np

        with self._ids(name) as source:
            found = [source.metadata.row_group(number).column(0).statistics for number in range(source.num_row_groups)]
        lowest, highest = ([getattr(group, edge) for group in found] for edge in ("min", "max"))
        return np.array(lowest, np.uint64), np.array(highest, np.uint64)

    def ids_of_group(self, name: str, number: int, columns: Sequence[str]) -> pa.Table:
        """Return the entries of a group of an index."""
        with self._ids(name) as source:
            return source.read_row_group(number, columns=list(columns))

    def ids_of_buckets(self, name: str, first: int, last: int) -> pa.Table:
        """Return the entries of an index in these buckets, the last one included."""
        import pyarrow as pa

        from delayline.bulk.cold_ids import BUCKET_SHIFT, SCHEMA

        lowest, highest = self.ranges_of_ids(name)
        buckets = lowest >> BUCKET_SHIFT, highest >> BUCKET_SHIFT
        groups = ((buckets[0] <= last) & (buckets[1] >= first)).nonzero()[0].tolist()
        with self._ids(name) as source:
            entries = source.read_row_groups(groups, columns=SCHEMA.names) if groups else SCHEMA.empty_table()
        found = entries.column("high").to_numpy() >> BUCKET_SHIFT
        return entries.filter(pa.array((found >= first) & (found <= last)))

    @contextlib.contextmanager
    def _ids(self, name: str) -> Iterator[pq.ParquetFile]:
        import pyarrow.parquet as pq

        address, (system, _) = self._address(name, IDS_FOLDER), self._place
        with (
            self._plainly(f"read {name} of {self.path}"),
            pq.ParquetFile(address, filesystem=system, read_dictionary=["file"]) as source,
        ):
            yield source

    def find(self, files: Sequence[ColdFile], message_id: str) -> dict[str, StoredRow]:
        """Return the message of that id in each of the files that have it: looks through the ids of all of them."""
        import pyarrow.dataset as ds

        from delayline.delayed.arrow import MESSAGE_SCHEMA, rows_in

        if not files:
            return {}
        system, _ = self._place
        by_address = {self._address(file.name, file.due_hour): file for file in files}
        asked = ds.field("id") == message_id
        open_them = partial(ds.dataset, schema=MESSAGE_SCHEMA, format="parquet", filesystem=system)
        with self._plainly(f"look through {self.path}"):
            names = open_them(list(by_address)).to_table(columns=["__filename"], filter=asked).column(0)
            rows: dict[str, StoredRow] = {}
            for address in names.unique().to_pylist():
                batch, *_ = open_them([address]).to_table(filter=asked).combine_chunks().to_batches()
                rows[by_address[address].name] = next(rows_in(batch))
            return rows

    def position(self, file: ColdFile, message_id: str) -> int:
        """Return the position of a message in its file."""
        import pyarrow as pa
        import pyarrow.compute as pc

        ids = pa.concat_arrays([batch.column("id") for batch in self.batches(file, columns=("id",))])
        return int(pc.index(ids, message_id).as_py())

    def has(self, name: str) -> bool:
        """Return whether there is a folder of that name in it."""
        from pyarrow.fs import FileType

        system, root = self._place
        with self._plainly(f"look through {self.path}"):
            return bool(system.get_file_info(f"{root}/{name}").type == FileType.Directory)

    def make(self) -> None:
        """Make the folder, if it is not there."""
        system, root = self._place
        with self._plainly(f"write to {self.path}"):
            system.create_dir(root, recursive=True)

    def size_of(self, file: ColdFile) -> tuple[int, int]:
        """Return the size of a file in bytes, and when it was written, in milliseconds since 1970."""
        system, _ = self._place
        address = self._address(file.name, file.due_hour)
        with self._plainly(f"look through {self.path}"):
            info = system.get_file_info(address)
        if info.size is None:
            raise BackendUnusable(f"{address} is missing, but the catalog lists it. Restore it")
        return info.size, 0 if info.mtime is None else int(info.mtime.timestamp() * 1000)

    def lying(self) -> Iterator[FoundFile]:
        """Yield this tier's files that are there, by looking through the whole folder."""
        from pyarrow.fs import FileSelector

        system, root = self._place
        with self._plainly(f"look through {self.path}"):
            infos = system.get_file_info(FileSelector(root, recursive=True, allow_not_found=True))
        for info in infos:
            name = info.base_name.removesuffix(FILE_SUFFIX).removesuffix(IDS_SUFFIX)
            hour = Path(info.path).parent.name.removeprefix("due_hour=")
            if info.base_name.startswith(f"{self.tier}-") and info.mtime is not None:
                yield FoundFile(name, hour, info.mtime)

    def delete(self, name: str, due_hour: str) -> None:
        """Delete a file, and its folder where it was the last; nothing where it is gone."""
        system, _ = self._place
        with self._plainly(f"delete {name} of {self.path}"), contextlib.suppress(FileNotFoundError):
            system.delete_file(self._address(name, due_hour))
        with contextlib.suppress(OSError):
            Path(self._address(name, due_hour)).parent.rmdir()  # of a local folder; object stores have none

    def _address(self, name: str, due_hour: str) -> str:
        if due_hour == IDS_FOLDER:
            return f"{self._place[1]}/{IDS_FOLDER}/{name}{IDS_SUFFIX}"
        return f"{self._place[1]}/due_hour={due_hour}/{name}{FILE_SUFFIX}"

    def _rows(self, file: ColdFile, dead: Sequence[str], destination: str | None) -> Iterator[StoredRow]:
        from delayline.delayed.arrow import rows_in

        for batch in self.batches(file, dead):
            for row in rows_in(batch):
                if destination is None or row.destination == destination:
                    yield row


class HourWriter:
    """Writes rows that come ordered by due time: a file an hour, several where an hour has many; and their ids."""

    def __init__(self, folder: ColdFolder) -> None:
        self._folder = folder
        self._open: _Growing | None = None
        self._files: list[ColdFile] = []
        self._ids: list[pa.Table] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Write the rows, which have all columns of messages."""
        from delayline.delayed.arrow import MESSAGE_SCHEMA

        batch = batch.select(MESSAGE_SCHEMA.names).cast(MESSAGE_SCHEMA)
        hours = _due(batch) // MICROS_A_HOUR
        changes = (hours[1:] != hours[:-1]).nonzero()[0] + 1
        for start, end in pairwise([0, *changes.tolist(), batch.num_rows]):
            if end > start:
                self._write(int(hours[start]), batch.slice(start, end - start))

    def close(self) -> list[ColdFile]:
        """Finish the last file and the index of the ids, and return all files."""
        self._finish()
        self._write_ids()
        return self._files

    def _finish(self) -> None:
        if self._open is not None:
            self._files.append(self._open.close())
            self._ids.append(self._open.ids)
            self._open = None
            if sum(ids.num_rows for ids in self._ids) >= IDS_AT_ONCE:
                self._write_ids()

    def _write_ids(self) -> None:
        from delayline.bulk.cold_ids import in_order

        if self._ids:
            name = self._folder.write_ids(in_order(self._ids))
            self._files = [file if file.ids else file._replace(ids=name) for file in self._files]
            self._ids = []

    def _write(self, hour: int, rows: pa.RecordBatch) -> None:
        if self._open is not None and (self._open.hour != hour or self._open.messages >= ROWS_A_FILE):
            self._finish()
        if self._open is None:
            self._open = _Growing(self._folder, hour)
        self._open.write(rows)


class _Growing:
    """A file that is being written."""

    def __init__(self, folder: ColdFolder, hour: int) -> None:
        self.hour, self.messages = hour, 0
        self._folder, self._name, self._due_hour = folder, folder.new_name(), hour_of(hour * MICROS_A_HOUR)
        self._first, self._last = (hour + 1) * MICROS_A_HOUR, hour * MICROS_A_HOUR
        self._destinations: Counter[str] = Counter()
        self._hashes: list[IdHashes] = []
        self._writer = folder.open_new(self._name, self._due_hour)

    def write(self, rows: pa.RecordBatch) -> None:
        import pyarrow.compute as pc

        from delayline.bulk.cold_ids import IdHashes

        due = _due(rows)
        self._hashes.append(IdHashes.of(rows.column("id")))
        self._first, self._last = min(self._first, int(due.min())), max(self._last, int(due.max()))
        self.messages += rows.num_rows
        for counted in pc.value_counts(rows.column("destination")).to_pylist():
            self._destinations[counted["values"]] += counted["counts"]
        with self._folder._plainly(f"write to {self._folder.path}"):
            self._writer.write_batch(rows)

    @property
    def ids(self) -> pa.Table:
        """The ids that were written, as entries of an index."""
        from delayline.bulk.cold_ids import ids_in

        return ids_in(self._name, self._hashes)

    def close(self) -> ColdFile:
        with self._folder._plainly(f"write to {self._folder.path}"):
            self._writer.close()
            self._folder.settle(self._folder._address(self._name, self._due_hour))
        return ColdFile(self._name, self._due_hour, self.messages, self._first, self._last, dict(self._destinations))


def _due(batch: pa.RecordBatch) -> Any:  # noqa: ANN401 - NumPy's array
    """Return the due times in microseconds since 1970."""
    from delayline.delayed.arrow import microseconds

    return microseconds(batch.column("due")).to_numpy(zero_copy_only=False)
