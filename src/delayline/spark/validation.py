"""Validate messages in Arrow columns, with the rules and the error texts of `Endpoint.send`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from delayline.errors import InvalidMessage
from delayline.message import MAXIMUM_DESTINATION_LENGTH, MAXIMUM_ID_LENGTH, Headers
from delayline.outgoing import check_headers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

INSTANT: Final = pa.timestamp("us", "UTC")
#: Due times that Python and every database can hold: the years 1 to 9999.
EARLIEST: Final = -62_135_596_800_000_000
LATEST: Final = 253_402_300_799_999_999
BEYOND_LEVELS: Final = "due is beyond the reach of delay levels, 3106 days: give a store for such messages"
SHOWN: Final = 80  # characters of a value in a reason
SPACE: Final = r"[ \t\r\n]*"
TEXT: Final = r'"[^"\\\x00-\x1f]{}"'
PAIR: Final = SPACE.join(["", TEXT.format("+"), ":", TEXT.format("*"), ""])
#: A JSON object of texts without escapes, like nearly all headers.
PLAIN_HEADERS: Final = rf"^{SPACE}\{{({PAIR}(,{PAIR})*|{SPACE})\}}{SPACE}$"


@dataclass(frozen=True)
class Validator:
    """The rules of a job; pickled to tasks. Times in microseconds since 1970."""

    largest: int
    """Bytes of headers and body together."""
    levels_until: int | None = None
    """Messages due earlier go to a broker; it refuses these destinations and ids."""
    destinations: Mapping[str, str] = field(default_factory=dict)
    ids: Mapping[str, str] = field(default_factory=dict)
    latest: int | None = None
    """The latest due time of a message."""

    def reasons(self, batch: pa.RecordBatch) -> pa.Array:
        """Return the reason for each invalid row, null for a valid one."""
        reasons = invalid_reasons(batch, largest=self.largest)
        due = batch.column("due").cast(INSTANT, safe=False).cast(pa.int64())
        if self.latest is not None:
            late = pc.fill_null(pc.greater(due, self.latest), False)
            reasons = pc.coalesce(reasons, pc.if_else(late, BEYOND_LEVELS, pa.scalar(None, pa.string())))
        if self.levels_until is not None:
            near = pc.fill_null(pc.less(due, self.levels_until), False)
            for name, refused in (("destination", self.destinations), ("id", self.ids)):
                if refused:
                    texts = batch.column(name).dictionary_encode()
                    broker = pa.array([refused.get(text) for text in texts.dictionary.to_pylist()], pa.string())
                    found = pc.if_else(near, broker.take(texts.indices), pa.scalar(None, pa.string()))
                    reasons = pc.coalesce(reasons, found)
        return reasons


def invalid_reasons(batch: pa.RecordBatch, *, largest: int) -> pa.Array:
    """Return the reason for each row that cannot be a message, null for a valid one.

    Args:
        batch: rows with all columns of a message.
        largest: the most bytes of headers and body together.
    """
    headers, body = batch.column("headers"), batch.column("body")
    size = pc.add(_length(headers), _length(body))
    due = batch.column("due").cast(INSTANT, safe=False).cast(pa.int64())
    found = [
        *_name_faults("id", batch.column("id"), MAXIMUM_ID_LENGTH),
        *_name_faults("destination", batch.column("destination"), MAXIMUM_DESTINATION_LENGTH),
        (pc.is_null(due), "due is missing: give an instant"),
        (pc.or_(pc.less(due, EARLIEST), pc.greater(due, LATEST)), "due is not in the years 1 to 9999"),
        (pc.greater(size, largest), f"headers and body have more than {largest:,} bytes: keep large content elsewhere"),
    ]
    reasons = _header_faults(headers)
    for wrong, reason in reversed(found):
        if pc.any(wrong).as_py():
            reasons = pc.if_else(pc.fill_null(wrong, False), reason, reasons)
    return reasons


def valid_rows(batch: pa.RecordBatch, reasons: pa.Array) -> pa.RecordBatch:
    """Return the rows without a reason."""
    return batch if reasons.null_count == batch.num_rows else batch.filter(pc.is_null(reasons))


def raise_for_invalid(batch: pa.RecordBatch, reasons: pa.Array) -> None:
    """Raise InvalidMessage for the first invalid row."""
    if reasons.null_count == batch.num_rows:
        return
    row = pc.index(pc.is_valid(reasons), pa.scalar(True)).as_py()
    message_id = batch.column("id")[row].as_py()
    raise InvalidMessage(f"message {_shown(message_id)}: {reasons[row].as_py()}")


def _name_faults(what: str, names: pa.Array, longest: int) -> Iterable[tuple[pa.Array, Any]]:
    """Yield a mask and a reason for each kind of name that a back end would cut, lose or quote wrongly."""
    length = pc.utf8_length(names)
    trimmed = pc.utf8_trim_whitespace(names)
    unprintable = pc.or_(pc.invert(pc.utf8_is_printable(names)), pc.not_equal(trimmed, names))
    yield pc.or_kleene(pc.is_null(names), pc.equal(length, 0)), f"{what} must be a text of 1 to {longest} characters"
    yield pc.greater(length, longest), f"{what} has more than {longest} characters"
    yield unprintable, f"{what} has control characters, or spaces around it: remove them"


def _header_faults(headers: pa.Array) -> pa.Array:
    """Check each distinct value once, and only values that are not obviously right: most messages share theirs."""
    looks_right = pc.and_not(
        pc.match_substring_regex(headers, PLAIN_HEADERS),
        pc.match_substring_regex(headers, re.escape(Headers.TIME_TO_BE_RECEIVED)),
    )
    others = pc.invert(pc.fill_null(looks_right, True))
    encoded = headers.filter(others).dictionary_encode()
    reasons = pa.array([_header_fault(text) for text in encoded.dictionary.to_pylist()], pa.string())
    return pc.replace_with_mask(pa.nulls(len(headers), pa.string()), others, reasons.take(encoded.indices))


@lru_cache(maxsize=4096)
def _header_fault(text: str) -> str | None:
    if not text:
        return None
    try:
        headers = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"headers are not JSON: {error}"
    try:
        check_headers(headers)
    except InvalidMessage as error:
        return str(error)
    return None


def _length(column: pa.Array) -> pa.Array:
    return pc.fill_null(pc.binary_length(column), 0).cast(pa.int64())


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
