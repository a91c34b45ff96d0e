"""Which ids wait in a store or its cold tier, asked for some of them: what it costs does not grow with what waits."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from sqlalchemy import select

from delayline.bulk.cold_catalog import ColdFiles, IdsSnapshot
from delayline.bulk.cold_ids import IdIndex
from delayline.sql.prepared import Prepared

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray
    from sqlalchemy import Connection, Table

    from delayline.bulk.cold_catalog import ColdFile
    from delayline.bulk.cold_folder import ColdFolder
    from delayline.sql.database import Database


class Located(NamedTuple):
    """Where messages are that were looked for in files."""

    files: list[tuple[int, ColdFile]]
    """The positions of their ids, with the files in which they wait."""
    gone: set[str]
    """Files in which some of them were: they have been promoted."""


class ColdIds:
    """The ids in the files of a store, as they were when it was opened or later.

    Args:
        database: The store's database, open.
        table: The store's table.
        folder: The files.
    """

    def __init__(self, database: Database, table: Table, folder: ColdFolder) -> None:
        self._database = database
        self._folder = folder
        self.catalog: ColdFiles = ColdFiles(database.dialect, table)
        self._index: IdIndex | None = None
        #: Files that had been merged into others when the index was opened, which has the others.
        self._merged: set[str] = set()

    async def open(self) -> None:
        """Take note of what has to be looked through: what is in files now is found from now on, unless it leaves."""
        self._index = IdIndex(self._folder, *await self._database.read(self._snapshot))

    async def locate(self, ids: pa.Array) -> Located:
        """Look for messages in the files; fastest for ids in the order of their hashes. A null is nowhere."""
        while True:
            if self._index is None:
                await self.open()
            entries = await asyncio.to_thread(self._entries, ids)
            if not entries:
                return Located([], set())
            asked: dict[str, list[str]] = defaultdict(list)
            for position, name in entries:
                asked[name].append(ids[position].as_py())
            now = await self._database.read(partial(self.catalog.whereabouts, ids=asked))
            if now.merged <= self._merged:
                break
            self._merged |= now.merged
            self._index = None
        files = [
            (position, now.held[name])
            for position, name in entries
            if name in now.held and ids[position].as_py() not in now.dead.get(name, ())
        ]
        return Located(files, {*asked} - {*now.held} - now.merged)

    def _entries(self, ids: pa.Array) -> list[tuple[int, str]]:
        return [] if self._index is None else list(self._index.files(ids))

    def _snapshot(self, connection: Connection) -> IdsSnapshot:
        return self.catalog.ids_snapshot(connection) if self.catalog.exist(connection) else IdsSnapshot([], [])


class KnownIds:
    """The ids of a store and of its cold tier.

    Args:
        database: The store's database, open.
        table: The store's table.
        folder: The files of the cold tier, if there is one.
    """

    def __init__(self, database: Database, table: Table, folder: ColdFolder | None) -> None:
        self._database = database
        self._cold = None if folder is None else ColdIds(database, table, folder)
        ids, dialect = table.c.id, database.dialect
        self._waiting = Prepared(select(ids).where(dialect.words.one_of(ids, "keys")), dialect.sql, ["keys"])

    async def among(self, ids: pa.Array) -> NDArray[Any]:
        """Return which of the ids wait, a null never; fastest for ids in the order of their hashes."""
        known = await self.in_files(ids)  # before the store: an id promoted meanwhile is seen twice and not missed
        texts = ids.to_pylist()
        keys = [key for key, is_known in zip(texts, known.tolist(), strict=True) if key and not is_known]
        rows = await self._database.read(partial(self._waiting.rows_each, keys=keys)) if keys else []
        waiting = {row[0] for row in rows}
        known[[position for position, key in enumerate(texts) if key in waiting]] = True
        return known

    async def in_files(self, ids: pa.Array) -> NDArray[Any]:
        """Return which of the ids wait in the cold tier, as `among`."""
        known: NDArray[Any] = np.zeros(len(ids), dtype=bool)
        if self._cold is not None:
            known[[position for position, _ in (await self._cold.locate(ids)).files]] = True
        return known
