"""Reads the broker's frames before the AMQP library does, and replaces frames that the library cannot decode.

A message of another client must not end a connection: pamqp raises for text that is not UTF-8, for times beyond year
9999 and for unknown value types, and aiormq then closes the connection. Therefore each frame of a delivered message is
checked first. If pamqp could not decode its properties, they are passed on as raw bytes.
"""

from __future__ import annotations

import asyncio
import secrets
import struct
from typing import TYPE_CHECKING, Any, Final, cast

from pamqp import commands, header

from delayline.errors import InvalidMessage
from delayline.rabbitmq.amqp.wire import (
    BASIC,
    FRAME_END,
    FRAME_HEADER,
    FRAME_METHOD,
    FRAME_OVERHEAD,
    HEADERS_FLAG,
    LONGEST_SHORT_STRING,
    NOT_FOR_ERROR_QUEUE,
    goes_on,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yarl import URL

FRAME_START: Final = FRAME_OVERHEAD - 1
PROTOCOL: Final = b"AMQP"
#: Header under which properties that pamqp cannot decode go on inside this process. No sender can guess it.
UNREADABLE: Final = f"Delayline.Unreadable.{secrets.token_hex(16)}"
DEEPEST: Final = 32
"""How deep tables and lists may be nested: decoders call themselves for each level."""
LAST_TIMESTAMP: Final = 253_402_300_799_000
"""The last second of year 9999, in milliseconds: pamqp takes numbers beyond 2106 for those."""
LOOKS_BEFORE_SILENCE: Final = 8

#: The properties in their order: flag, and how many bytes each has; None for a short string.
PROPERTIES: Final = (
    (1 << 15, None),
    (1 << 14, None),
    (HEADERS_FLAG, -1),
    (1 << 12, 1),
    (1 << 11, 1),
    (1 << 10, None),
    (1 << 9, None),
    (1 << 8, None),
    (1 << 7, None),
    (1 << 6, 8),
    (1 << 5, None),
    (1 << 4, None),
    (1 << 3, None),
    (1 << 2, None),
)
MESSAGE_ID: Final = 1 << 7
TIMESTAMP: Final = 1 << 6
#: Bytes of a value of each type; the others begin with their length.
SIZES: Final = dict(zip(b"tbBsuIilLfdTVD", (1, 1, 1, 2, 2, 4, 4, 8, 8, 4, 8, 8, 0, 5), strict=True))
WITH_LENGTH: Final = frozenset(b"SxFA")
DELIVER: Final = 60
GET_OK: Final = 71
TAG_AND_FLAG: Final = 9  # bytes in front of the exchange in both

_length = struct.Struct(">I")
_frame_head = struct.Struct(">BHI")
_content_head = struct.Struct(">HHQ")


class Undecodable(Exception):
    """Bytes that pamqp would not decode."""


class Streams:
    """Opens sockets to a broker, as aiormq's `transport_factory`, and hangs up on one silent for `limit` seconds."""

    def __init__(self, *, tls: bool, limit: float, watched: bool) -> None:
        self._tls = tls
        self._limit = limit
        self._watched = watched
        self._writer: asyncio.StreamWriter | None = None
        self._frames: ReadableFrames | None = None

    @property
    def silent_for(self) -> float:
        """Seconds since something has come, 0 where nothing is connected."""
        if self._frames is None:
            return 0.0
        return asyncio.get_running_loop().time() - self._frames.received_at

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:  # noqa: ANN401 - aiormq's
        """Connect. Raises OSError."""
        context = kwargs.pop("ssl_context_provider")
        reader, self._writer = await asyncio.open_connection(
            url.host, url.port, ssl=await context.get_context() if self._tls else None, **kwargs
        )
        self._frames = frames = ReadableFrames(reader, self._writer, self._limit)
        if self._watched:
            frames.watch_later()
        return cast("asyncio.StreamReader", frames), self._writer

    def abort(self) -> None:
        """Hang up at once. Idempotent."""
        if self._writer is not None:
            self._writer.transport.abort()


class ReadableFrames:
    """A broker's frames as aiormq reads them from a socket, each of them in a form that pamqp decodes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: float) -> None:
        self._reader = reader
        self._writer = writer
        self._limit = limit
        self._frame = b""
        self._at = 0
        self._heard = False
        self._silent = 0
        self._given_up = False
        self.received_at = asyncio.get_running_loop().time()

    def at_eof(self) -> bool:
        """Return whether nothing is left."""
        return self._at >= len(self._frame) and self._reader.at_eof()

    async def readexactly(self, number: int) -> bytes:
        """Return so many bytes; raises ConnectionResetError or IncompleteReadError where the connection has ended."""
        if self._at >= len(self._frame):
            self._frame, self._at = await self._next(), 0
        part = self._frame[self._at : self._at + number]
        self._at += number
        return part

    def watch_later(self) -> None:
        """Look again and again whether something has come; heartbeats come more often than the limit."""
        asyncio.get_running_loop().call_later(self._limit / LOOKS_BEFORE_SILENCE, self._watch)

    def _watch(self) -> None:
        """Close a silent connection after this many looks: a busy process may read data late that is there already."""
        if self._writer.transport.is_closing():
            return
        self._silent = 0 if self._heard else self._silent + 1
        self._heard = False
        if self._silent >= LOOKS_BEFORE_SILENCE:
            self._given_up = True
            self._writer.transport.abort()
            return
        self.watch_later()

    async def _next(self) -> bytes:
        try:
            head = await self._reader.readexactly(FRAME_START)
            self._heard = True
            if head.startswith(PROTOCOL):
                return head
            size = _frame_head.unpack(head)[2]
            frame = head + await self._reader.readexactly(size + 1)
        except asyncio.IncompleteReadError:
            if self._given_up:
                raise ConnectionResetError(f"the broker was silent for {self._limit:g} s") from None
            raise
        self._heard = True
        self.received_at = asyncio.get_running_loop().time()
        return readable(frame)


def readable(frame: bytes) -> bytes:
    """Return the frame where pamqp decodes it, else one that stands for it."""
    kind = frame[0]
    if kind == FRAME_HEADER:
        try:
            check_properties(frame[FRAME_START + 12 : -1])
        except Undecodable:
            return _standing_in(frame)
    elif kind == FRAME_METHOD:
        return _readable_method(frame)
    return frame


def check_properties(encoded: bytes) -> None:
    """Raise Undecodable for a message's property flags and list where pamqp does not decode them."""
    try:
        for flag, start, end in _walk(encoded):
            if flag == HEADERS_FLAG:
                _check_fields(encoded, start + 4, end, 0, names=True)
            elif flag == TIMESTAMP:
                if int.from_bytes(encoded[start:end], "big") > LAST_TIMESTAMP:
                    raise Undecodable("a time beyond year 9999")
            elif flag not in (1 << 12, 1 << 11):
                encoded[start + 1 : end].decode()
    except (ValueError, IndexError, struct.error) as error:
        raise Undecodable(str(error)) from error


def message_id_in(encoded: bytes) -> str | None:
    """Return the message id in property flags and list, whatever else is in them; None where there is none."""
    try:
        for flag, start, end in _walk(encoded):
            if flag == MESSAGE_ID:
                return encoded[start + 1 : end].decode(errors="replace")
    except (ValueError, IndexError, struct.error):
        return None
    return None


def unreadable(properties: commands.Basic.Properties) -> bytes | None:
    """Return the property flags and list that pamqp could not decode; None for a message that it could."""
    raw = (properties.headers or {}).get(UNREADABLE)
    return bytes(raw) if isinstance(raw, bytes | bytearray) else None


def sent_on(encoded: bytes) -> bytes:
    """Return the original property flags and list, for the error queue; see properties.unchanged for omissions."""
    flags, parts = 0, []
    try:
        for flag, start, end in _walk(encoded):
            if flag in NOT_FOR_ERROR_QUEUE:
                continue
            flags |= flag
            parts.append(encoded[start:end] if flag != HEADERS_FLAG else _fields_that_go_on(encoded, start + 4, end))
    except (ValueError, IndexError, struct.error) as error:
        raise InvalidMessage(f"the properties of a message cannot be sent on: {error}") from error
    return struct.pack(">H", flags) + b"".join(parts)


def _walk(encoded: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield each property that is there: its flag, where it begins and where it ends."""
    (flags,) = struct.unpack_from(">H", encoded)
    if flags & 1:
        raise ValueError("more than one word of property flags")
    at = 2
    for flag, size in PROPERTIES:
        if not flags & flag:
            continue
        start = at
        if size is None:
            at += 1 + encoded[at]
        elif size < 0:
            at += 4 + _length.unpack_from(encoded, at)[0]
        else:
            at += size
        if at > len(encoded):
            raise ValueError("a property ends behind the frame")
        yield flag, start, at


def _values(encoded: bytes, at: int, end: int, *, names: bool) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the values of a table or list: where the entry and its name begin, its type, and where the value is."""
    while at < end:
        entry = at
        if names:
            at += 1 + encoded[at]
        kind = encoded[at]
        at += 1
        size = SIZES.get(kind)
        start = at
        if size is None:
            if kind not in WITH_LENGTH:
                raise Undecodable(f"a value of type {bytes([kind])!r}")
            size = 4 + _length.unpack_from(encoded, at)[0]
        at += size
        if at > end:
            raise ValueError("a value ends behind its table")
        yield entry, kind, start, at, start - 1


def _check_fields(encoded: bytes, start: int, end: int, depth: int, *, names: bool) -> None:
    if depth > DEEPEST:
        raise Undecodable(f"tables nested more than {DEEPEST} deep")
    for entry, kind, at, behind, named in _values(encoded, start, end, names=names):
        if names:
            encoded[entry + 1 : named].decode()
        if kind in b"FA":
            _check_fields(encoded, at + 4, behind, depth + 1, names=kind == ord("F"))
        elif kind == ord("T") and int.from_bytes(encoded[at:behind], "big") > LAST_TIMESTAMP:
            raise Undecodable("a time beyond year 9999")


def _fields_that_go_on(encoded: bytes, start: int, end: int) -> bytes:
    """Return the table without headers that a broker interprets; unchanged if its fields cannot be separated."""
    try:
        kept = b"".join(
            encoded[entry:behind]
            for entry, _, _, behind, named in _values(encoded, start, end, names=True)
            if goes_on(encoded[entry + 1 : named].decode(errors="replace"))
        )
    except (ValueError, IndexError, struct.error, Undecodable):
        kept = encoded[start:end]
    return _length.pack(len(kept)) + kept


def _standing_in(frame: bytes) -> bytes:
    """Return a header frame whose only property is the bytes of the properties that were there."""
    _, weight, size = _content_head.unpack_from(frame, FRAME_START)
    properties = commands.Basic.Properties(headers={UNREADABLE: bytearray(frame[FRAME_START + 12 : -1])})
    content = header.ContentHeader(weight, size, properties).marshal()
    return _framed(FRAME_HEADER, _frame_head.unpack_from(frame)[1], content)


def _readable_method(frame: bytes) -> bytes:
    """Return the frame with the exchange and routing key of a delivered message in UTF-8, whatever they were."""
    try:
        group, kind = struct.unpack_from(">HH", frame, FRAME_START)
        if group != BASIC or kind not in (DELIVER, GET_OK):
            return frame
        at = FRAME_START + 4
        if kind == DELIVER:
            at += 1 + frame[at]
        at += TAG_AND_FLAG
        if frame[at:-1].isascii():
            return frame
        exchange, at_key = _text(frame, at)
        key, behind = _text(frame, at_key)
    except (ValueError, IndexError, struct.error):
        return frame
    payload = frame[FRAME_START:at] + exchange + key + frame[behind:-1]
    return _framed(FRAME_METHOD, _frame_head.unpack_from(frame)[1], payload)


def _text(frame: bytes, at: int) -> tuple[bytes, int]:
    """Return the short string at this position as valid UTF-8, and its end; invalid bytes are escaped."""
    behind = at + 1 + frame[at]
    raw = frame[at + 1 : behind]
    text = raw.decode("utf-8", "backslashreplace").encode()
    text = text[:LONGEST_SHORT_STRING].decode("utf-8", "ignore").encode()
    return bytes([len(text)]) + text, behind


def _framed(kind: int, channel: int, payload: bytes) -> bytes:
    return _frame_head.pack(kind, channel, len(payload)) + payload + FRAME_END
