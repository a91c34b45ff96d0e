"""The index of a cold tier's ids: which file has a message, without a look into the files.

Each writer of files writes their ids once more, as hashes in the order of the hashes, and compaction merges these
indexes. To look for an id costs a part of each index, for a thousand million ids a single pass over them.

A hash has 128 bits of SHA-256, so that ids with the same hash are the same. Spark knows the hash too.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from delayline.bulk.cold_catalog import ColdFile, IdsFile
    from delayline.bulk.cold_folder import ColdFolder

HASH_BYTES: Final = 16
#: The first byte of a hash is its bucket: how an index is divided when it is merged.
BUCKET_SHIFT: Final = 56
#: So many ids are read for one that is looked for.
IDS_A_GROUP: Final = 8192
SCHEMA: Final = pa.schema(
    [("high", pa.uint64()), ("low", pa.uint64()), ("file", pa.dictionary(pa.int32(), pa.string()))]
)


class IdHashes(NamedTuple):
    """The hashes of ids, both halves of each."""

    high: NDArray[Any]
    low: NDArray[Any]

    @classmethod
    def of(cls, ids: pa.Array) -> IdHashes:
        """Hash the ids; a null as an empty text."""
        texts = ids.cast(pa.binary()).to_pylist()
        hashed = b"".join(hashlib.sha256(text or b"").digest()[:HASH_BYTES] for text in texts)
        halves = np.frombuffer(hashed, ">u8").astype(np.uint64).reshape(-1, 2)
        return cls(halves[:, 0], halves[:, 1])


def ids_in(file: str, ids: Sequence[IdHashes]) -> pa.Table:
    """Return the index of a file's ids, in no order."""
    high, low = (
        (np.concatenate([np.empty(0, np.uint64), *half]) for half in zip(*ids, strict=True)) if ids else ((), ())
    )
    names = pa.DictionaryArray.from_arrays(np.zeros(len(high), np.int32), pa.array([file]))
    return pa.table([pa.array(high, pa.uint64()), pa.array(low, pa.uint64()), names], schema=SCHEMA)


def bucket_of(high: int) -> int:
    """Return the bucket of a hash."""
    return high >> BUCKET_SHIFT


class IdIndex:
    """The indexes of a tier at a moment, open for looks. Every method blocks.

    Args:
        folder: The files.
        indexes: The files of hashes.
        others: Files of messages that are in none of them: all of their ids are read.
    """

    def __init__(self, folder: ColdFolder, indexes: Sequence[IdsFile], others: Sequence[ColdFile]) -> None:
        self._folder = folder
        self._indexes = [_OpenIndex(folder, index) for index in indexes]
        self._unread = list(others)
        self._in_memory: list[_Group] = []

    def files(self, ids: pa.Array) -> Iterator[tuple[int, str]]:
        """Yield the positions of ids that are in files, each with the name of the file."""
        if not len(ids):
            return
        hashes = IdHashes.of(ids)
        order = np.argsort(hashes.high)
        wanted = IdHashes(hashes.high[order], hashes.low[order])
        for group, first, last in self._groups(wanted):
            for position, name in group.find(IdHashes(wanted.high[first:last], wanted.low[first:last])):
                yield int(order[first + position]), name

    def _groups(self, wanted: IdHashes) -> Iterator[tuple[_Group, int, int]]:
        for file in self._unread:
            ids = [IdHashes.of(batch.column("id")) for batch in self._folder.batches(file, columns=("id",))]
            self._in_memory.append(_Group.of(ids_in(file.name, ids).sort_by("high")))
        self._unread = []
        for group in self._in_memory:
            yield group, 0, len(wanted.high)
        for index in self._indexes:
            yield from index.groups(wanted.high)


class _Group:
    """Some entries in the order of their hashes; the names of their files are read when they are asked for."""

    def __init__(self, high: NDArray[Any], low: NDArray[Any], names: Any) -> None:  # noqa: ANN401 - a function
        self._high, self._low = high, low
        self._names = names

    @classmethod
    def of(cls, entries: pa.Table) -> _Group:
        """Return the entries of a table."""
        column = entries.column("file")
        return cls(entries.column("high").to_numpy(), entries.column("low").to_numpy(), lambda: column)

    def find(self, wanted: IdHashes) -> Iterator[tuple[int, str]]:
        """Yield the positions of hashes that are here, with the names of the files."""
        first, last = (np.searchsorted(self._high, wanted.high, side=side) for side in ("left", "right"))
        names = None
        for position in np.flatnonzero(last > first).tolist():
            for row in range(first[position], last[position]):
                if self._low[row] == wanted.low[position]:
                    names = self._names() if names is None else names
                    yield position, names[row].as_py()


class _OpenIndex:
    """A file of hashes; its groups are read where hashes that are looked for may be in them."""

    def __init__(self, folder: ColdFolder, index: IdsFile) -> None:
        self._folder, self._index = folder, index
        self._ranges: tuple[NDArray[Any], NDArray[Any]] | None = None
        self._last: tuple[int, _Group] | None = None

    def groups(self, high: NDArray[Any]) -> Iterator[tuple[_Group, int, int]]:
        """Yield the groups, each with the range of the hashes that may be in it; the hashes are in order."""
        if bucket_of(int(high[-1])) < self._index.first_bucket or bucket_of(int(high[0])) > self._index.last_bucket:
            return
        if self._ranges is None:
            self._ranges = self._folder.ranges_of_ids(self._index.name)
        lowest, highest = self._ranges
        first, last = np.searchsorted(high, lowest, side="left"), np.searchsorted(high, highest, side="right")
        for number in np.flatnonzero(last > first).tolist():
            yield self._group(number), int(first[number]), int(last[number])

    def _group(self, number: int) -> _Group:
        if self._last is None or self._last[0] != number:  # the next ids are often in the same
            read = self._folder.ids_of_group
            keys = read(self._index.name, number, ("high", "low"))
            high, low = (keys.column(half).to_numpy() for half in ("high", "low"))
            group = _Group(high, low, lambda: read(self._index.name, number, ("file",)).column("file"))
            self._last = number, group
        return self._last[1]


def in_order(entries: Iterable[pa.Table]) -> pa.Table:
    """Return the entries in the order of their hashes."""
    return pa.concat_tables([SCHEMA.empty_table(), *entries]).unify_dictionaries().sort_by("high")
