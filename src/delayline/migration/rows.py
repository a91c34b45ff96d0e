"""Rows of a source as messages in Arrow, and the reasons for rejecting them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import starmap
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from delayline.delayed.arrow import MESSAGE_SCHEMA, completed
from delayline.delayed.columns import BULK_COLUMNS, BULK_NAMES, ColumnKind, StoredRow, message_of
from delayline.message import Message, in_utc
from delayline.spark.headers import invalid_reasons, valid_rows
from delayline.spark.options import REQUIRED, SOURCE_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from delayline.message import DelayedMessage

#: Columns by which `verify` compares pending messages.
WAITING_SCHEMA: Final = pa.schema([MESSAGE_SCHEMA.field(name) for name in REQUIRED])
WAITING_COLUMNS: Final = ", ".join(f"{name} {SOURCE_COLUMNS[name].dataType.simpleString()}" for name in REQUIRED)
#: The reason for which a row of the source cannot become a message.
WHY: Final = "why"


class SourceRow(NamedTuple):
    """What a source has of a message, whatever system it is of; None where it has nothing."""

    id: str | None
    destination: str | None
    due: datetime | None
    headers: Any
    body: Any
    why: str | None = None


def record_batch(rows: Iterable[Sequence[Any]]) -> pa.RecordBatch:
    """Return the values of `SourceRow`s as columns of messages, with the column `why`."""
    return from_columns(dict(zip(SourceRow._fields, zip(*starmap(SourceRow, rows), strict=True), strict=False)))


def from_columns(columns: Mapping[str, Sequence[Any]]) -> pa.RecordBatch:
    """Return the columns of messages; those that are not given are null."""
    arrays = [_array(name, values) for name, values in columns.items()]
    others = [name for name in columns if name not in BULK_NAMES]
    return completed(pa.RecordBatch.from_arrays(arrays, names=list(columns)), [*BULK_NAMES, *others])


def _array(name: str, values: Sequence[Any]) -> pa.Array:
    kind = MESSAGE_SCHEMA.field(name).type if name in BULK_NAMES else pa.string()
    try:
        return pa.array(values, kind)
    except (UnicodeEncodeError, TypeError):
        if name not in AS_IT_CAN_BE:
            raise
        return pa.array(map(AS_IT_CAN_BE[name], values), kind)


def checked_message(row: StoredRow, instant: Callable[[datetime], datetime]) -> DelayedMessage:
    """Return the message of a row as it is sent. Raises InvalidMessage for what no endpoint sends."""
    message, headers = message_of(row, instant), json.loads(row.headers) if row.headers else {}
    return replace(message, message=Message(message.id, headers, message.message.body))


def waiting_batch(messages: Iterable[DelayedMessage]) -> pa.RecordBatch:
    """Return the columns by which `verify` compares them."""
    rows = [StoredRow.of(message, in_utc, lambda content: content.encoded_headers) for message in messages]
    return pa.RecordBatch.from_pylist([row._asdict() for row in rows], WAITING_SCHEMA)


def reasons_of(messages: pa.RecordBatch, *, largest: int) -> pa.Array:
    """Return the reason for rejecting each row, null for valid rows: the source's reason, else the checks' reason."""
    reasons = invalid_reasons(messages, largest=largest)
    return pc.coalesce(messages.column(WHY), reasons) if WHY in messages.schema.names else reasons


def sound(messages: pa.RecordBatch, reasons: pa.Array) -> pa.RecordBatch:
    """Return the rows without a reason, as the columns of messages."""
    return valid_rows(messages, reasons).select(MESSAGE_SCHEMA.names)


def _text(headers: Any) -> str | None:  # noqa: ANN401 - what the driver gives
    """Return the headers as text for Arrow; a lone surrogate becomes a question mark."""
    return None if headers is None else str(headers).encode("utf-8", "replace").decode()


def _bytes(body: Any) -> bytes | None:  # noqa: ANN401 - as above
    return None if body is None else bytes(body)


#: Types of drivers' values that Arrow does not accept.
AS_IT_CAN_BE: Final[Mapping[str, Callable[[Any], Any]]] = {
    column.name: _text if column.kind is ColumnKind.HEADERS else _bytes for column in BULK_COLUMNS if column.is_content
}
