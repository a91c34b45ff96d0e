"""AMQP as bytes, written out by type as other clients write it, and taken apart again without a library."""

from __future__ import annotations

import struct
from typing import NamedTuple

from pamqp import commands, frame, header

from delayline.rabbitmq.amqp.properties import Delivery


class Field(NamedTuple):
    """A value of a header table as it is on the wire."""

    kind: str
    raw: bytes

    @property
    def text(self) -> str:
        """The value of a field of type 'S'."""
        assert self.kind == "S"
        return self.raw.decode()


#: How many bytes a value of a type has; the others say so themselves.
SIZES = {"t": 1, "b": 1, "B": 1, "s": 2, "u": 2, "I": 4, "i": 4, "l": 8, "L": 8, "f": 4, "d": 8, "T": 8, "V": 0, "D": 5}


def short(text: str) -> bytes:
    return bytes([len(text.encode())]) + text.encode()


def long_string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return b"S" + struct.pack(">I", len(raw)) + raw


def table(**fields: bytes) -> bytes:
    """Return a table of values that are encoded, type first; names with __ for a dot."""
    return table_of({name.replace("__", "."): value for name, value in fields.items()})


def table_of(fields: dict[str, bytes]) -> bytes:
    encoded = b"".join(short(name) + value for name, value in fields.items())
    return struct.pack(">I", len(encoded)) + encoded


def taken_apart(encoded: bytes) -> dict[str, Field]:
    """Return the fields of a table: its length in front, and nothing behind it."""
    assert struct.unpack_from(">I", encoded)[0] == len(encoded) - 4
    fields, at = {}, 4
    while at < len(encoded):
        length = encoded[at]
        name, at = encoded[at + 1 : at + 1 + length].decode(), at + 1 + length
        kind, at = chr(encoded[at]), at + 1
        size = SIZES.get(kind)
        if size is None:
            size, at = struct.unpack_from(">I", encoded, at)[0], at + 4
        fields[name] = Field(kind, encoded[at : at + size])
        at += size
    return fields


class Frames(NamedTuple):
    """The frames of one publication, taken apart."""

    publish: commands.Basic.Publish
    properties: commands.Basic.Properties
    fields: dict[str, Field]
    body: bytes
    sizes: list[int]


def read(encoded: bytes) -> Frames:
    """Take a publication apart: method frame, header frame, body frames."""
    sizes, parts = [], []
    while encoded:
        size, _, part = frame.unmarshal(encoded)
        sizes.append(size)
        parts.append((part, encoded[:size]))
        encoded = encoded[size:]
    (publish, _), (content, raw), *bodies = parts
    assert isinstance(publish, commands.Basic.Publish)
    assert isinstance(content, header.ContentHeader)
    body = b"".join(part.value for part, _ in bodies)  # type: ignore[union-attr]
    assert content.body_size == len(body)
    return Frames(publish, content.properties, taken_apart(table_in(raw[19:])), body, sizes)


def table_in(encoded: bytes) -> bytes:
    """Return the header table in property flags and list: behind content type and encoding, where there are any."""
    flags, at = struct.unpack_from(">H", encoded)[0], 2
    for flag in (1 << 15, 1 << 14):
        if flags & flag:
            at += 1 + encoded[at]
    return encoded[at : at + 4 + struct.unpack_from(">I", encoded, at)[0]]


def delivered(flags: int, properties: bytes, body: bytes = b"") -> Delivery:
    """Return a message whose sender encoded its properties so."""
    return Delivery(1, False, "", "", struct.pack(">H", flags) + properties, body)


def received(encoded: bytes) -> Delivery:
    """Return the message that a publication's frames carry."""
    at, parts = 0, []
    while at < len(encoded):
        size = struct.unpack_from(">I", encoded, at + 3)[0]
        parts.append(encoded[at + 7 : at + 7 + size])
        at += size + 8
    return Delivery(1, False, "", "", parts[1][12:], b"".join(parts[2:]))
