"""Entities of the delayed messages table, as a .NET endpoint of the same name writes and reads them.

See https://docs.particular.net/transports/azure-storage-queues/delayed-delivery.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from delayline.azure.names import Key, due_of, message_key, place_key
from delayline.errors import CorruptHeaders, InvalidMessage
from delayline.message import DelayedMessage, Message

if TYPE_CHECKING:
    from collections.abc import Mapping

Entity = dict[str, Any]

#: Azure's limit for one property that is a text.
LONGEST_TEXT: Final = 32 * 1024
#: Columns that .NET neither writes nor reads. A row without the first was not written here.
RETRIES: Final = "NumberOfRetries"
ENCODED_HEADERS: Final = "EncodedHeaders"
#: Column of an index row: the row key of the message.
PLACE: Final = "Place"


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
    """Return the entity of a message; raises InvalidMessage for one that is too large for an entity."""
    message = row.message.message
    text, encoded = _headers(message)
    entity: Entity = {
        "PartitionKey": row.key.partition,
        "RowKey": row.key.row,
        "Destination": row.message.destination,
        "Body": message.body,
        "MessageId": message.id,
        "Headers": text,
        RETRIES: row.message.number_of_retries,
    }
    return entity if encoded is None else entity | {ENCODED_HEADERS: encoded}


def from_entity(entity: Mapping[str, Any]) -> TableRow:
    """Return the message of an entity; raises ForeignRow, and nothing else, for one that holds none."""
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
    message_id, destination = entity.get("MessageId"), entity.get("Destination")
    if not isinstance(message_id, str) or not message_id or not isinstance(destination, str) or not destination:
        raise ForeignRow("it has no MessageId or no Destination")
    body, headers, retries = entity.get("Body", b""), entity.get(ENCODED_HEADERS), entity.get(RETRIES)
    if headers is None:
        headers = str(entity.get("Headers") or "").encode("utf-8", "surrogatepass")
    if not isinstance(body, bytes) or not isinstance(headers, bytes):
        raise ForeignRow("its Body or EncodedHeaders is not binary")
    number = retries if isinstance(retries, int) and retries >= 0 else 0
    message = Message.from_encoded(message_id, headers, body)
    return TableRow(key, DelayedMessage(message, destination, due, number), own=retries is not None)


def place_entity(message_id: str, key: Key) -> Entity:
    """Return the index entity of that message id."""
    place = place_key(message_id)
    return {"PartitionKey": place.partition, "RowKey": place.row, PLACE: key.row}


def place_in(entity: Mapping[str, Any]) -> Key | None:
    """Return where such an entity says that the message is; None where that is the key of no message."""
    row = entity.get(PLACE)
    return Key(row[:10], row) if isinstance(row, str) and USABLE_KEY.fullmatch(row) and due_of(row) else None


def _headers(message: Message) -> tuple[str, bytes | None]:
    """Return the headers as the JSON that .NET reads, and, where that would not bring them back, as they are."""
    encoded = message.encoded_headers
    try:
        _ = message.headers
        text = encoded.decode()
        json.loads(text or "x")
    except (CorruptHeaders, ValueError):
        return "{}", encoded
    if len(text.encode("utf-16-le")) // 2 > LONGEST_TEXT:
        raise InvalidMessage(
            f"message {message.id!r} has headers of {len(text)} characters, {LONGEST_TEXT} at most beside a delay on "
            "Azure Storage: put long values into the body"
        )
    return text, None
