"""A client that publishes whatever bytes it is given as a message's properties: what no library would send."""

from __future__ import annotations

import socket
import struct
from typing import Self
from urllib.parse import unquote, urlsplit

#: The properties in their order on the wire, with the bit that says that one is there.
ORDER = (
    ("content_type", 15), ("content_encoding", 14), ("headers", 13), ("delivery_mode", 12), ("priority", 11),
    ("correlation_id", 10), ("reply_to", 9), ("expiration", 8), ("message_id", 7), ("timestamp", 6), ("type", 5),
    ("user_id", 4), ("app_id", 3),
)  # fmt: skip


def short(raw: bytes | str) -> bytes:
    raw = raw if isinstance(raw, bytes) else raw.encode()
    return bytes([len(raw)]) + raw


def long(raw: bytes | str) -> bytes:
    raw = raw if isinstance(raw, bytes) else raw.encode()
    return struct.pack(">I", len(raw)) + raw


def field(name: bytes | str, kind: bytes, value: bytes) -> bytes:
    return short(name) + kind + value


def text(name: bytes | str, value: bytes | str) -> bytes:
    return field(name, b"S", long(value))


def nested(depth: int) -> bytes:
    """Return a field whose value is tables within tables."""
    inner = b""
    for _ in range(depth):
        inner = field("a", b"F", long(inner))
    return inner


def properties(headers: bytes | None = None, message_id: bytes | str | None = None, **others: bytes) -> bytes:
    """Return property flags and list; `headers` are the entries of the table, `others` are encoded already."""
    values = dict(others)
    if headers is not None:
        values["headers"] = long(headers)
    if message_id is not None:
        values["message_id"] = short(message_id)
    flags = sum(1 << bit for name, bit in ORDER if name in values)
    return struct.pack(">H", flags) + b"".join(values[name] for name, _ in ORDER if name in values)


class RawClient:
    """One connection with one channel, in confirm mode."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10)
        self._socket.sendall(b"AMQP\x00\x00\x09\x01")
        self._read()
        secret = f"\0{unquote(parts.username or 'guest')}\0{unquote(parts.password or 'guest')}"
        self._call(0, 10, 11, long(b"") + short("PLAIN") + long(secret) + short("en_US"))
        most, self._frame_max, _ = struct.unpack(">HIH", self._read()[2][4:12])
        self._call(0, 10, 31, struct.pack(">HIH", most, self._frame_max, 0))
        self._call(0, 10, 40, short(unquote(parts.path[1:])) + short("") + b"\0")
        self._read()
        for group, method, arguments in ((20, 10, short("")), (85, 10, b"\0")):
            self._call(1, group, method, arguments)
            self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def publish(self, queue: str, encoded: bytes, body: bytes = b"{}", *, routing_key: bytes | None = None) -> None:
        """Publish to the exchange of a queue's name, or to the queue itself, and wait for the confirm."""
        exchange = short("" if routing_key is None else queue)
        self._call(
            1, 60, 40, struct.pack(">H", 0) + exchange + short(queue if routing_key is None else routing_key) + b"\0"
        )
        self._send(2, 1, struct.pack(">HHQ", 60, 0, len(body)) + encoded)
        if body:
            self._send(3, 1, body)
        answer = self._read()[2]
        assert struct.unpack(">HH", answer[:4]) == (60, 80), answer

    def take(self, queue: str) -> tuple[bytes, bytes] | None:
        """Take one message: its property flags and list, and its body; None where the queue is empty."""
        self._call(1, 60, 70, struct.pack(">H", 0) + short(queue) + b"\1")
        if struct.unpack(">HH", self._read()[2][:4]) == (60, 72):
            return None
        content = self._read()[2]
        body = b""
        while len(body) < struct.unpack_from(">Q", content, 4)[0]:
            body += self._read()[2]
        return content[12:], body

    def _call(self, channel: int, group: int, method: int, arguments: bytes) -> None:
        self._send(1, channel, struct.pack(">HH", group, method) + arguments)

    def _send(self, kind: int, channel: int, payload: bytes) -> None:
        self._socket.sendall(struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce")

    def _read(self) -> tuple[int, int, bytes]:
        kind, channel, size = struct.unpack(">BHI", self._exactly(7))
        payload = self._exactly(size)
        self._exactly(1)
        return kind, channel, payload

    def _exactly(self, number: int) -> bytes:
        data = b""
        while len(data) < number:
            more = self._socket.recv(number - len(data))
            if not more:
                raise ConnectionError("the broker has closed the connection")
            data += more
        return data
