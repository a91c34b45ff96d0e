"""A channel in confirm mode, and the frames that come back on it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, Protocol

from pamqp import commands, frame

from delayline.rabbitmq.amqp.confirms import Closed, Confirms, PublishBatch
from delayline.rabbitmq.amqp.stream import message_id_in
from delayline.rabbitmq.amqp.wire import (
    BASIC,
    FRAME_BODY,
    FRAME_END,
    FRAME_HEADER,
    FRAME_HEARTBEAT,
    FRAME_METHOD,
    FRAME_OVERHEAD,
    PublishFrames,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Channel", "Closed", "read_frames"]

_frame_start = struct.Struct(">BHI").unpack_from
_answer = struct.Struct(">HHQB").unpack_from
ANSWER_SIZE: Final = 13
CONTENT_HEAD: Final = 12  # bytes of a header frame in front of its property flags
ACK: Final = 80
NACK: Final = 120
PROTOCOL: Final = b"AMQP"
KINDS: Final = {FRAME_METHOD, FRAME_HEADER, FRAME_BODY, FRAME_HEARTBEAT}


class Wire(Protocol):
    """The connection that a channel writes to."""

    frame_max: int

    def write(self, data: bytes) -> None:
        """Send frames; raises BackendUnavailable."""


class Channel:
    """The unsettled publications of one channel, and the reason of its closing."""

    def __init__(self, wire: Wire, number: int) -> None:
        self._wire = wire
        self.number = number
        self.confirms = Confirms()
        self.frames = PublishFrames(number, wire.frame_max)
        self.closed: Closed | None = None
        self._returning: commands.Basic.Return | None = None

    def write(self, batch: PublishBatch, positions: Sequence[int], frames: Sequence[bytes]) -> None:
        """Write the frames of these publications. Raises BackendUnavailable."""
        self._wire.write(b"".join(frames))
        self.confirms.wrote(batch, positions)

    def close(self, closed: Closed) -> None:
        """Leave every outstanding publication to its sender; the broker takes no more here."""
        self.closed = closed
        self.confirms.abandon()

    def on_answer(self, kind: int, tag: int, bits: int) -> None:
        """Take a basic.ack or basic.nack."""
        self.confirms.settle(tag, multiple=bool(bits & 1), acknowledged=kind == ACK)

    def on_return(self, method: commands.Basic.Return) -> None:
        """Take the first frame of a message that comes back."""
        self._returning = method

    def on_header(self, properties: bytes) -> None:
        """Take the second one, with the property flags and list of the message that it is."""
        back, self._returning = self._returning, None
        if back is not None:
            reason = f"{back.reply_code} {back.reply_text}"
            self.confirms.returned(back.exchange or "", back.routing_key or "", message_id_in(properties), reason)


def read_frames(data: bytes, channels: Mapping[int, Channel], on_method: Callable[[int, Any], None]) -> bytes:
    """Handle every complete frame and return the rest. Raises ValueError or PAMQPException for a malformed frame."""
    start, end = 0, len(data)
    while end - start >= FRAME_OVERHEAD:
        kind, number, size = _frame_start(data, start)
        if kind not in KINDS:
            raise ValueError(_no_frame(data[start : start + 16]))
        last = start + FRAME_OVERHEAD + size - 1
        if last >= end:
            break
        if data[last] != FRAME_END[0]:
            raise ValueError(f"a frame without an end, {data[start : start + 16]!r}")
        if kind == FRAME_METHOD:
            _method(data, start, size, channels.get(number), number, on_method)
        elif kind == FRAME_HEADER and number in channels:
            channels[number].on_header(data[start + FRAME_OVERHEAD - 1 + CONTENT_HEAD : last])
        start = last + 1
    return data[start:]


def _no_frame(found: bytes) -> str:
    if found.startswith(PROTOCOL):
        return f"it asks for another version of the protocol, {found[:8]!r}"
    return f"no frame begins with {found!r}"


def _method(
    data: bytes,
    start: int,
    size: int,
    channel: Channel | None,
    number: int,
    on_method: Callable[[int, Any], None],
) -> None:
    if size == ANSWER_SIZE and channel is not None:
        group, kind, tag, bits = _answer(data, start + FRAME_OVERHEAD - 1)
        if group == BASIC and kind in (ACK, NACK):
            channel.on_answer(kind, tag, bits)
            return
    method = frame.unmarshal(data[start : start + size + FRAME_OVERHEAD])[2]
    if isinstance(method, commands.Basic.Return) and channel is not None:
        channel.on_return(method)
    else:
        on_method(number, method)
