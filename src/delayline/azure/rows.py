"""Entities of the delayed messages table, as a .NET endpoint of the same name has them, and an index of ids.

See https://docs.particular.net/transports/azure-storage-queues/delayed-delivery.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from azure.core.exceptions import AzureError

from delayline.azure.names import BEHIND_INDEX, INDEX, Key, due_of, id_key, latest_due, message_key, place_key
from delayline.delayed.columns import STORED_COLUMNS, StoredRow, message_of
from delayline.errors import CorruptHeaders, DelaylineError, InvalidMessage
from delayline.message import in_utc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
    from datetime import datetime

    from delayline.azure.table import Table
    from delayline.message import DelayedMessage, Message


Entity = dict[str, Any]

#: The property of each column that is not in the row's key.
PROPERTY_NAMES: Final = {
    column.name: column.capitalised if column.azure is None else column.azure
    for column in STORED_COLUMNS
    if column.azure != ""
}
#: Azure's limit for a property that is a text.
LONGEST_TEXT: Final = 32 * 1024
#: Columns that .NET neither writes nor reads. A row without the first was not written here.
RETRIES_COLUMN: Final = PROPERTY_NAMES["retry_count"]
ENCODED_HEADERS: Final = "EncodedHeaders"
#: Column of an index row: the row key of the message.
PLACE_COLUMN: Final = "Place"


#: Characters that Azure accepts in a row key.
USABLE_KEY: Final = re.compile(r"[^/\\#?\x00-\x1f\x7f-\x9f]{1,512}")


class ForeignRow(ValueError):
    """A row that is not a delayed message; it stays in the table."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """A delayed message, and where in the table it is."""

    key: Key
    message: DelayedMessage
    own: bool
    """Whether delayline wrote the row: then its id has an index row."""


def row_of(message: DelayedMessage) -> TableRow:
    """Return where a message is kept, its due time rounded up to the second. Raises InvalidDueTime."""
    key = message_key(message.id, message.due)
    return TableRow(key, replace(message, due=due_of(key.row) or message.due), own=True)


def to_entity(row: TableRow) -> Entity:
    """Return the entity of a message; raises InvalidMessage for a message that is too large for an entity."""
    headers, encoded = _headers(row.message.message)
    kept = StoredRow.of(row.message, in_utc, lambda _: b"")
    properties = {PROPERTY_NAMES[name]: value for name, value in kept._asdict().items() if name in PROPERTY_NAMES}
    entity: Entity = {
        "PartitionKey": row.key.partition,
        "RowKey": row.key.row,
        **{name: value for name, value in properties.items() if value is not None},
        PROPERTY_NAMES["headers"]: headers,
    }
    return entity if encoded is None else entity | {ENCODED_HEADERS: encoded}


def from_entity(entity: Mapping[str, Any]) -> TableRow:
    """Return the message of an entity; raises ForeignRow, and nothing else, for an entity that holds none."""
    try:
        return _row_in(entity)
    except ForeignRow:
        raise
    except Exception as error:
        raise ForeignRow(f"it cannot be read ({type(error).__name__}: {error})") from error


def _row_in(entity: Mapping[str, Any]) -> TableRow:
    key = Key(entity["PartitionKey"], entity["RowKey"])
    due = due_of(key.row)
    if due is None or not key.row.startswith(key.partition):
        raise ForeignRow("its keys are not a due time (yyyyMMddHH, yyyyMMddHHmmss_id)")
    values = {name: entity.get(property_name) for name, property_name in PROPERTY_NAMES.items()}
    retries, headers = values["retry_count"], entity.get(ENCODED_HEADERS)
    if headers is None:
        headers = str(values["headers"] or "").encode("utf-8", "surrogatepass")
    number = retries if isinstance(retries, int) and retries >= 0 else 0
    row = StoredRow(**values | {"due": due, "headers": headers, "retry_count": number})
    if not isinstance(row.id, str) or not row.id or not isinstance(row.destination, str) or not row.destination:
        raise ForeignRow("it has no MessageId or no Destination")
    if not isinstance(row.body, bytes | None) or not isinstance(row.headers, bytes):
        raise ForeignRow("its Body or EncodedHeaders is not binary")
    return TableRow(key, message_of(row, in_utc), own=retries is not None)


def place_entity(message_id: str, key: Key) -> Entity:
    """Return the index entity of that message id."""
    index_key = place_key(message_id)
    return {"PartitionKey": index_key.partition, "RowKey": index_key.row, PLACE_COLUMN: key.row}


def place_in(entity: Mapping[str, Any]) -> Key | None:
    """Return the message's key in an index entity; None where it is not a message's key."""
    row = entity.get(PLACE_COLUMN)
    return Key(row[:10], row) if isinstance(row, str) and USABLE_KEY.fullmatch(row) and due_of(row) else None


def _headers(message: Message) -> tuple[str, bytes | None]:
    """Return the headers as the JSON that .NET reads, and, where that would not bring them back, as they are."""
    encoded = message.encoded_headers
    try:
        _ = message.headers
        plain = encoded.decode()
        json.loads(plain or "x")
    except (CorruptHeaders, ValueError):
        return "{}", encoded
    if len(plain.encode("utf-16-le")) // 2 > LONGEST_TEXT:
        raise InvalidMessage(
            f"message {message.id!r} has headers of {len(plain)} characters, {LONGEST_TEXT} at most beside a delay on "
            "Azure Storage: put long values into the body"
        )
    return plain, None


CLAIM_ATTEMPTS: Final = 5
SWEPT_AT_ONCE: Final = 400
ORPHANS_AT_ONCE: Final = 100


class MessageIndex:
    """The index rows of a table: the key of each message by its id."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._left: dict[Key, None] = {}
        self._sweeping: asyncio.Task[None] | None = None

    def leave(self, message_ids: Iterable[str]) -> None:
        """Take note of messages that are gone, whose rows can be deleted when there is time."""
        self._left |= dict.fromkeys(place_key(message_id) for message_id in message_ids)

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
        """Claim the ids of messages to be stored; False for an id that waits already."""
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
        index_row = await self._table.get(place_key(message_id))
        key = None if index_row is None else place_in(index_row)
        entity = None if key is None else await self._table.get(key)
        if entity is not None and entity.get("MessageId") == message_id:
            with contextlib.suppress(ForeignRow):
                return from_entity(entity)
        async for row in self._table.waiting(only={"MessageId": message_id}):
            with contextlib.suppress(ForeignRow):
                return from_entity(row)
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

    async def orphans(self, before: datetime) -> AsyncIterator[list[Any]]:
        """Yield the index rows that point at no message, some at a time: .NET does not delete them when it dispatches.

        Only rows whose message was due `before` that time, and that are older: a message is stored after its index row.
        """
        latest = latest_due(before).row
        query = f"PartitionKey ge '{INDEX}' and PartitionKey lt '{BEHIND_INDEX}' and {PLACE_COLUMN} lt '{latest}'"
        chunk: list[Any] = []
        async with contextlib.aclosing(self._table.query(query, ORPHANS_AT_ONCE)) as rows:  # type: ignore[type-var]
            async for row in rows:
                if row.metadata["timestamp"] < before:  # type: ignore[attr-defined]
                    chunk.append(row)
                if len(chunk) == ORPHANS_AT_ONCE:
                    yield await self._orphans_of(chunk)
                    chunk = []
        yield await self._orphans_of(chunk)

    async def remove(self, orphans: Sequence[Any]) -> int:
        """Delete index rows that `orphans` has yielded, unless they are in use again; return their number."""
        return sum(await self._table.delete_unchanged_each(orphans))

    async def _orphans_of(self, rows: Sequence[Any]) -> list[Any]:
        held = await asyncio.gather(*(self._holds(place_in(row), row["RowKey"]) for row in rows))
        return [row for row, is_held in zip(rows, held, strict=True) if not is_held]

    async def _holds(self, place: Key | None, id_row: str) -> bool:
        """Return whether the message whose index row has that key is in that place."""
        entity = None if place is None else await self._table.get(place, columns=["MessageId"])
        named = None if entity is None else entity.get("MessageId")
        return isinstance(named, str) and id_key(named) == id_row

    async def _take_over(self, row: TableRow) -> bool:
        """Claim an id that was claimed before, unless its message is there; the same message twice is a claim."""
        for _ in range(CLAIM_ATTEMPTS):
            index_row = await self._table.get(place_key(row.message.id))
            mine = place_entity(row.message.id, row.key)
            if index_row is None:
                if all(await self._table.create_each([mine])):
                    return True
                continue
            kept = place_in(index_row)
            if kept == row.key:
                return True
            if await self._holds(kept, id_key(row.message.id)):
                return False
            if await self._table.replace(mine, index_row.metadata["etag"]):
                return True
        return True
