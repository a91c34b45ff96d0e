"""Index of messages by id: one row per id, so that an id is unique and found at once.

Its partition keys begin with letters, behind all due times, so no poller reads them, of .NET either. Index rows are
deleted later than their messages, when nothing is due, so that they delay no dispatch. A row left by a crash is
harmless: the next message with that id takes it over.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from azure.core.exceptions import AzureError

from delayline.azure.names import place_key
from delayline.azure.rows import ForeignRow, from_entity, place_entity, place_in
from delayline.errors import DelaylineError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delayline.azure.names import Key
    from delayline.azure.rows import TableRow
    from delayline.azure.table import Table

ATTEMPTS: Final = 5
SWEPT_AT_ONCE: Final = 400


class MessageIndex:
    """The rows of one table that tell where messages are."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._left: dict[Key, None] = {}
        self._sweeping: asyncio.Task[None] | None = None

    def leave(self, message_ids: Iterable[str]) -> None:
        """Take note of messages that are gone, whose rows can be deleted when there is time."""
        self._left |= dict.fromkeys(place_key(one) for one in message_ids)

    def sweep(self) -> None:
        """Delete the rows of messages that are gone, in the background."""
        if self._left and self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep(), name="delayline sweep")

    async def close(self) -> None:
        """Delete the rest of them, if that is possible now."""
        self.sweep()
        if self._sweeping is not None:
            await asyncio.wait([self._sweeping])

    async def take(self, rows: Sequence[TableRow]) -> list[bool]:
        """Claim the ids of messages to be stored; False for one whose id waits already."""
        for row in rows:
            self._left.pop(place_key(row.message.id), None)
        claimed = await self._table.create_each([place_entity(row.message.id, row.key) for row in rows])
        known = [position for position, new in enumerate(claimed) if not new]
        answers = await asyncio.gather(*(self._take_over(rows[position]) for position in known))
        for position, answer in zip(known, answers, strict=True):
            claimed[position] = answer
        return claimed

    async def put(self, row: TableRow) -> None:
        """Note where the message is now."""
        await self._table.put_each([place_entity(row.message.id, row.key)])

    async def find(self, message_id: str) -> TableRow | None:
        """Return the message with that id, or None; messages stored by .NET are searched in the whole table."""
        place = await self._table.get(place_key(message_id))
        key = None if place is None else place_in(place)
        entity = None if key is None else await self._table.get(key)
        if entity is not None:
            with contextlib.suppress(ForeignRow):
                return from_entity(entity)
        async for one in self._table.waiting(only={"MessageId": message_id}):
            with contextlib.suppress(ForeignRow):
                return from_entity(one)
        return None

    async def _sweep(self) -> None:
        try:
            with contextlib.suppress(DelaylineError, AzureError):  # the next message of the id takes it over
                while self._left:
                    keys = list(self._left)[:SWEPT_AT_ONCE]
                    for key in keys:
                        del self._left[key]
                    await self._table.delete_each(keys)
        finally:
            self._sweeping = None

    async def _take_over(self, row: TableRow) -> bool:
        """Claim an id that was claimed before, unless its message is there; the same message twice is one."""
        for _ in range(ATTEMPTS):
            place = await self._table.get(place_key(row.message.id))
            mine = place_entity(row.message.id, row.key)
            if place is None:
                if all(await self._table.create_each([mine])):
                    return True
                continue
            kept = place_in(place)
            if kept == row.key:
                return True
            if kept is not None and await self._table.get(kept) is not None:
                return False
            if await self._table.replace(mine, place.metadata["etag"]):
                return True
        return True
