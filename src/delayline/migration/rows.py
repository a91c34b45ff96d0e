"""Rows of a source as messages in Arrow, and the reasons for rejecting them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from delayline.spark.headers import INSTANT, invalid_reasons, valid_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


MESSAGE: Final = pa.schema(
    [
        ("id", pa.string()),
        ("destination", pa.string()),
        ("due", INSTANT),
        ("headers", pa.string()),
        ("body", pa.binary()),
    ]
)
#: Columns by which `verify` compares pending messages.
WAITING_COLUMNS: Final = "id STRING, destination STRING, due TIMESTAMP"
WAITING_SCHEMA: Final = pa.schema([MESSAGE.field(name) for name in ("id", "destination", "due")])
#: The reason for which a row of the source cannot become a message.
WHY: Final = pa.field("why", pa.string())


def record_batch(rows: Iterable[tuple[Any, ...]]) -> pa.RecordBatch:
    """Return rows as the columns of messages. A row may end with the reason why it cannot become a message."""
    return from_columns(list(zip(*rows, strict=True)) or [()] * len(MESSAGE))


def from_columns(columns: Sequence[Sequence[Any]]) -> pa.RecordBatch:
    """Return the columns of messages. An additional column has the reasons of rows that cannot become messages."""
    schema = MESSAGE if len(columns) == len(MESSAGE) else MESSAGE.append(WHY)
    arrays = []
    for values, column in zip(columns, schema, strict=True):
        try:
            arrays.append(pa.array(values, column.type))
        except (UnicodeEncodeError, TypeError):
            if column.name not in AS_IT_CAN_BE:
                raise
            arrays.append(pa.array(map(AS_IT_CAN_BE[column.name], values), column.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def reasons_of(messages: pa.RecordBatch, *, largest: int) -> pa.Array:
    """Return the reason for rejecting each row, null for valid rows: the source's reason, else the checks' reason."""
    reasons = invalid_reasons(messages, largest=largest)
    if WHY.name not in messages.schema.names:
        return reasons
    return pc.coalesce(messages.column(WHY.name), reasons)


def sound(messages: pa.RecordBatch, reasons: pa.Array) -> pa.RecordBatch:
    """Return the rows without a reason, as the columns of messages."""
    return valid_rows(messages, reasons).select(MESSAGE.names)


def _text(headers: Any) -> str | None:  # noqa: ANN401 - what the driver gives
    """Return the headers as text for Arrow; a lone surrogate becomes a question mark."""
    return None if headers is None else str(headers).encode("utf-8", "replace").decode()


def _bytes(body: Any) -> bytes | None:  # noqa: ANN401 - as above
    return None if body is None else bytes(body)


#: Types of drivers' values that Arrow does not accept.
AS_IT_CAN_BE: Final[Mapping[str, Callable[[Any], Any]]] = {"headers": _text, "body": _bytes}
