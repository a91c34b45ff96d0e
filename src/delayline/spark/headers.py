"""Add the headers of `Endpoint.send` to messages in Arrow columns."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from delayline.clock import SystemClock
from delayline.message import Headers, encode_headers
from delayline.outgoing import completed, fixed_headers, sent_headers
from delayline.spark.options import instant_option

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The most bytes that these headers add to a message: three escaped ids of 250 characters, and the common ones.
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
        templates = [_template(text, self.endpoint, self.content_type, sent) for text in given.dictionary.to_pylist()]
        id_text = _quoted(batch.column("id"))
        values = {Headers.DELIVER_AT: _wire_times(batch.column("due"))}
        parts = [f'{{"{Headers.MESSAGE_ID}":', id_text]
        for place, name in enumerate(ROW_HEADERS):
            own = pa.array([template.own[place] for template in templates]).take(given.indices)
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
    naive = due.cast(pa.timestamp("us", "UTC"), safe=False).cast(pa.timestamp("us"))
    times = pc.replace_substring(naive.cast(pa.string()), ".", ":")  # 30 times as fast as strftime
    return pc.binary_join_element_wise('"', times, ' Z"', "")
