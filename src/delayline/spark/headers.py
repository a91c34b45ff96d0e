"""Add the headers of `Endpoint.send` to messages in Arrow columns."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from delayline.clock import SystemClock
from delayline.delayed.arrow import INSTANT, microseconds
from delayline.errors import InvalidMessage
from delayline.message import MAXIMUM_DESTINATION_LENGTH, MAXIMUM_ID_LENGTH, Headers, encode_headers
from delayline.outgoing import check_headers, completed, fixed_headers, sent_headers
from delayline.spark.options import instant_option

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


#: The most bytes that the headers add to a message: three escaped ids of 250 characters, and the common ones.
HEADER_ALLOWANCE: Final = 8192
#: Placeholder for a row's own value. No header of the user has it by chance.
PLACEHOLDER: Final = "{0b0f5f6e-7f0f-4d8e-9a55-9a2f6c3f7c11}"
ROW_HEADERS: Final = (Headers.CORRELATION_ID, Headers.CONVERSATION_ID, Headers.DELIVER_AT)


class _Template(NamedTuple):
    """The common part, as JSON, of rows with the same headers; and which headers of ROW_HEADERS each row adds."""

    rest: str
    own: tuple[bool, ...]


@dataclass(frozen=True)
class SendHeaders:
    """The endpoint, the content type and the time of a send; pickled to tasks.

    Args:
        sent: the time of each task if None.
    """

    endpoint: str
    content_type: str
    sent: datetime | None

    @classmethod
    def of(cls, options: Mapping[str, str]) -> SendHeaders | None:
        """Read the options; None leaves headers unchanged."""
        name = options.get("sender")
        if name is None:
            return None
        return cls(name, options.get("contentType", "application/octet-stream"), instant_option(options, "sentAt"))

    @property
    def options(self) -> Mapping[str, str]:
        """The values as options of the data source."""
        sent = {} if self.sent is None else {"sentAt": self.sent.isoformat()}
        return {"sender": self.endpoint, "contentType": self.content_type, **sent}

    def complete(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return valid messages with the headers of a send. A row's own headers win, except for the message id."""
        if not batch.num_rows:
            return batch
        given = pc.fill_null(batch.column("headers"), "").dictionary_encode()
        sent = self.sent or SystemClock().now()
        templates = [_template(own, self.endpoint, self.content_type, sent) for own in given.dictionary.to_pylist()]
        id_text = _quoted(batch.column("id"))
        values = {Headers.DELIVER_AT: _wire_times(batch.column("due"))}
        parts = [f'{{"{Headers.MESSAGE_ID}":', id_text]
        for position, name in enumerate(ROW_HEADERS):
            own = pa.array([template.own[position] for template in templates]).take(given.indices)
            parts.append(_where(own, pc.binary_join_element_wise(f',"{name}":', values.get(name, id_text), "")))
        parts += [pa.array([template.rest for template in templates]).take(given.indices), ""]
        headers = pc.binary_join_element_wise(*parts)
        return batch.set_column(batch.schema.get_field_index("headers"), "headers", headers)


@lru_cache(maxsize=4096)
def _template(text: str, endpoint: str, content_type: str, sent: datetime) -> _Template:
    named = (
        sent_headers(PLACEHOLDER, content_type, sent, None)
        | {Headers.DELIVER_AT: PLACEHOLDER}
        | fixed_headers(endpoint, None)
    )
    named = completed(named, json.loads(text) if text else None)
    own = tuple(named[name] == PLACEHOLDER for name in ROW_HEADERS)
    theirs = {name for name, is_own in zip(ROW_HEADERS, own, strict=True) if is_own} | {Headers.MESSAGE_ID}
    rest = encode_headers({name: value for name, value in named.items() if name not in theirs}).decode()
    return _Template("," + rest[1:], own)


def _where(own: pa.Array, values: pa.Array) -> pa.Array:
    return values if pc.all(own).as_py() else pc.if_else(own, values, "")


def _quoted(texts: pa.Array) -> pa.Array:
    """Return texts without control characters as JSON strings."""
    for special in ("\\", '"'):
        texts = pc.replace_substring(texts, special, f"\\{special}")
    return pc.binary_join_element_wise('"', texts, '"', "")


def _wire_times(due: pa.Array) -> pa.Array:
    """Return times as `"yyyy-MM-dd HH:mm:ss:ffffff Z"`, with the quotes."""
    naive = due.cast(INSTANT, safe=False).cast(pa.timestamp("us"))
    times = pc.replace_substring(naive.cast(pa.string()), ".", ":")  # 30 times as fast as strftime
    return pc.binary_join_element_wise('"', times, ' Z"', "")


#: Due times that Python and every database can hold: the years 1 to 9999.
YEAR_1: Final = -62_135_596_800_000_000
END_OF_YEAR_9999: Final = 253_402_300_799_999_999
BEYOND_LEVELS: Final = "due is beyond the reach of delay levels, 3106 days: give a store for such messages"
LONGEST_SHOWN_VALUE: Final = 80  # characters of a value in a reason
SPACE: Final = r"[ \t\r\n]*"
JSON_STRING: Final = r'"[^"\\\x00-\x1f]{}"'
JSON_PAIR: Final = SPACE.join(["", JSON_STRING.format("+"), ":", JSON_STRING.format("*"), ""])
#: A JSON object of texts without escapes, like nearly all headers.
PLAIN_HEADERS: Final = rf"^{SPACE}\{{({JSON_PAIR}(,{JSON_PAIR})*|{SPACE})\}}{SPACE}$"


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
        """Return the reason for each invalid row, null for a valid row."""
        reasons = invalid_reasons(batch, largest=self.largest)
        due = microseconds(batch.column("due"))
        if self.latest is not None:
            late = pc.fill_null(pc.greater(due, self.latest), False)
            reasons = pc.coalesce(reasons, pc.if_else(late, BEYOND_LEVELS, pa.scalar(None, pa.string())))
        if self.levels_until is not None:
            near = pc.fill_null(pc.less(due, self.levels_until), False)
            for name, refused in (("destination", self.destinations), ("id", self.ids)):
                if refused:
                    texts = batch.column(name).dictionary_encode()
                    broker = pa.array([refused.get(value) for value in texts.dictionary.to_pylist()], pa.string())
                    refusals = pc.if_else(near, broker.take(texts.indices), pa.scalar(None, pa.string()))
                    reasons = pc.coalesce(reasons, refusals)
        return reasons


def invalid_reasons(batch: pa.RecordBatch, *, largest: int) -> pa.Array:
    """Return the reason for each row that cannot be a message, null for a valid row.

    Args:
        batch: rows with all columns of a message.
        largest: the most bytes of headers and body together.
    """
    headers, body = batch.column("headers"), batch.column("body")
    size = pc.add(_length(headers), _length(body))
    due = microseconds(batch.column("due"))
    faults = [
        *_name_faults("id", batch.column("id"), MAXIMUM_ID_LENGTH),
        *_name_faults("destination", batch.column("destination"), MAXIMUM_DESTINATION_LENGTH),
        (pc.is_null(due), "due is missing: give an instant"),
        (pc.or_(pc.less(due, YEAR_1), pc.greater(due, END_OF_YEAR_9999)), "due is not in the years 1 to 9999"),
        (pc.greater(size, largest), f"headers and body have more than {largest:,} bytes: keep large content elsewhere"),
    ]
    reasons = _header_faults(headers)
    for wrong, reason in reversed(faults):
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
    encoded = headers.dictionary_encode()
    distinct = encoded.dictionary
    looks_right = pc.and_not(
        pc.match_substring_regex(distinct, PLAIN_HEADERS),
        pc.match_substring_regex(distinct, re.escape(Headers.TIME_TO_BE_RECEIVED)),
    )
    others = pc.invert(looks_right)
    faults = pa.array([_header_fault(text) for text in distinct.filter(others).to_pylist()], pa.string())
    return pc.replace_with_mask(pa.nulls(len(distinct), pa.string()), others, faults).take(encoded.indices)


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
    shown = repr(value)
    return shown if len(shown) <= LONGEST_SHOWN_VALUE else f"{shown[:LONGEST_SHOWN_VALUE]}..."
