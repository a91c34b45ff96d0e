"""Frames of delivered messages: the AMQP library can decode all of them, for any content."""

from __future__ import annotations

import struct

from hypothesis import example, given
from hypothesis import strategies as st
from pamqp import commands, frame, header
from tests.unit.amqp_fields import long_string, short, table_of

from delayline.rabbitmq.amqp.properties import unchanged
from delayline.rabbitmq.amqp.stream import message_id_in, readable, unreadable

HEADERS, ID = 1 << 13, 1 << 7
PLAIN = struct.pack(">H", HEADERS | ID) + table_of({"größe": long_string("ä")}) + short("id")


def header_frame(encoded: bytes) -> bytes:
    payload = struct.pack(">HHQ", 60, 0, 5) + encoded
    return struct.pack(">BHI", 2, 7, len(payload)) + payload + b"\xce"


def delivered(exchange: bytes, key: bytes, kind: int = 60) -> bytes:
    tag = b"\x03tag" if kind == 60 else b""
    count = b"\0\0\0\x09" if kind == 71 else b""
    payload = struct.pack(">HH", 60, kind) + tag + struct.pack(">QB", 5, 1)
    payload += bytes([len(exchange)]) + exchange + bytes([len(key)]) + key + count
    return struct.pack(">BHI", 1, 7, len(payload)) + payload + b"\xce"


def test_decodable_frames_are_unchanged() -> None:
    """Given properties that the library decodes, when read, then not a byte is changed."""
    assert readable(header_frame(PLAIN)) == header_frame(PLAIN)


@given(
    st.one_of(
        st.binary(max_size=60),
        st.builds(
            lambda at, junk: PLAIN[: at % len(PLAIN)] + junk + PLAIN[at % len(PLAIN) + len(junk) :],
            st.integers(0, 200),
            st.binary(min_size=1, max_size=4),
        ),
        st.builds(
            lambda kind, raw: _with_value(bytes([kind]) + raw), st.sampled_from(b"tbBsuIilLfdDSATFVxZ"), st.binary()
        ),
    )
)
@example(struct.pack(">H", 1 << 6) + struct.pack(">Q", 2**63))
@example(struct.pack(">H", 1))
@example(b"")
def test_whatever_the_properties_are_they_can_be_decoded(encoded: bytes) -> None:
    """Given any bytes as property flags and list, when read, then the library decodes them, and keeps all."""
    _, channel, content = frame.unmarshal(readable(header_frame(encoded)))
    assert isinstance(content, header.ContentHeader)
    assert (channel, content.body_size) == (7, 5)
    raw = unreadable(content.properties)
    assert raw is None or raw == encoded
    message_id_in(encoded)


def _with_value(value: bytes) -> bytes:
    return struct.pack(">H", HEADERS | ID) + table_of({"h": value}) + short("id")


def test_undecodable_messages_are_forwarded_unchanged() -> None:
    """Given properties of a type that is not known, when they go on, then byte for byte, without the broker's own."""
    theirs = {"x-death": b"V", "x-delivery-count": b"l" + b"\0" * 8, "CC": b"V"}
    fields = {"time": b"T" + b"\xff" * 8, "kept": long_string(b"\xff")}
    expiration_and_user = (1 << 8) | (1 << 4)
    came = (
        struct.pack(">H", HEADERS | ID | expiration_and_user)
        + table_of(fields | theirs)
        + short("60")
        + short("id")
        + short("u")
    )
    _, _, content = frame.unmarshal(readable(header_frame(came)))
    assert isinstance(content, header.ContentHeader)
    assert unchanged(content.properties) == struct.pack(">H", HEADERS | ID) + table_of(fields) + short("id")


def test_a_sender_cannot_pretend_to_be_undecodable() -> None:
    """Given raw bytes in a header of the sender's, when read, then they are a header like any other."""
    sent = struct.pack(">H", HEADERS) + table_of({"Delayline.Unreadable": b"x" + struct.pack(">I", 2) + b"\0\1"})
    _, _, content = frame.unmarshal(readable(header_frame(sent)))
    assert isinstance(content, header.ContentHeader)
    assert unreadable(content.properties) is None


@given(st.binary(max_size=255), st.binary(max_size=255), st.sampled_from([60, 71]))
def test_names_of_exchanges_and_keys_may_be_any_bytes(exchange: bytes, key: bytes, kind: int) -> None:
    """Given a delivery over names that are not UTF-8, when read, then the library decodes it, escaped; others stay."""
    _, channel, method = frame.unmarshal(readable(delivered(exchange, key, kind)))
    assert isinstance(method, commands.Basic.Deliver | commands.Basic.GetOk)
    assert (channel, method.delivery_tag, method.redelivered) == (7, 5, True)
    try:
        assert (method.exchange, method.routing_key) == (exchange.decode(), key.decode())
    except UnicodeDecodeError:
        assert b"\\x" in readable(delivered(exchange, key, kind))
