"""Frames of received messages: each message is decoded by itself, whatever it contains."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.amqp_fields import long_string, short, table_of

from delayline.errors import InvalidMessage
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.amqp.channel import Channel, read_frames
from delayline.rabbitmq.amqp.errors import Closed
from delayline.rabbitmq.amqp.properties import Delivery, Undecodable, decode_properties, message_id_in
from delayline.rabbitmq.connection import parameters_of
from delayline.rabbitmq.decoding import message_from
from delayline.rabbitmq.forwarding import sent_on

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADERS, ID = 1 << 13, 1 << 7
PLAIN = struct.pack(">H", HEADERS | ID) + table_of({"größe": long_string("ä")}) + short("id")


def frame(kind: int, payload: bytes, channel: int = 7) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def delivered(exchange: bytes, key: bytes, kind: int = 60, consumer: bytes = b"mine") -> bytes:
    tag = bytes([len(consumer)]) + consumer if kind == 60 else b""
    count = b"\0\0\0\x09" if kind == 71 else b""
    payload = struct.pack(">HH", 60, kind) + tag + struct.pack(">QB", 5, 1)
    payload += bytes([len(exchange)]) + exchange + bytes([len(key)]) + key + count
    return frame(1, payload)


def content(properties: bytes, parts: Sequence[bytes]) -> bytes:
    size = sum(map(len, parts))
    return frame(2, struct.pack(">HHQ", 60, 0, size) + properties) + b"".join(frame(3, part) for part in parts)


class Broker:
    """Stands for the connection of a channel, to which a test gives what a broker would send."""

    parameters = parameters_of(BrokerAddress(), "test", None)
    frame_max = 4096
    silent_for = 0.0

    def __init__(self) -> None:
        self.channel = Channel(self, 7)
        self.taken: list[Delivery] = []
        self.channel._consumers["mine"] = self.taken.append
        self.answers: list[object] = []
        self.rest = b""

    def write(self, data: bytes) -> None:
        raise AssertionError(data)

    async def call(self, channel: int, method: Any) -> Any:  # noqa: ANN401
        raise AssertionError(channel, method)

    def answer(self, channel: int, answer: object) -> None:
        assert channel == 7
        self.answers.append(answer)

    def sends(self, data: bytes) -> None:
        self.rest = read_frames(self.rest + data, {7: self.channel}, lambda number, method: None)


@pytest.mark.parametrize("parts", [[], [b"body"], [b"bo", b"", b"dy"]])
@pytest.mark.parametrize("cut", [1, 7, 20, 10_000])
def test_messages_are_put_together_from_their_frames(parts: list[bytes], cut: int) -> None:
    """Given two messages whose frames arrive in pieces of any size, when read, then both are received whole."""
    broker, data = Broker(), (delivered(b"x", b"key") + content(PLAIN, parts)) * 2
    for at in range(0, len(data), cut):
        broker.sends(data[at : at + cut])
    assert broker.taken == [Delivery(5, True, "x", "key", PLAIN, b"".join(parts))] * 2
    assert broker.rest == b""


def test_a_message_of_an_unknown_consumer_is_dropped() -> None:
    """Given a message for a consumer that was cancelled, when read, then the next one is received."""
    broker = Broker()
    broker.sends(delivered(b"", b"", consumer=b"other") + content(PLAIN, [b"lost"]))
    broker.sends(delivered(b"", b"") + content(PLAIN, [b"mine"]))
    assert [one.body for one in broker.taken] == [b"mine"]


def test_a_message_that_was_asked_for_is_the_answer() -> None:
    """Given a basic.get, when its message has been read, then it is the answer."""
    broker = Broker()
    broker.sends(delivered(b"", b"q", kind=71) + content(PLAIN, [b"body"]))
    assert broker.answers == [Delivery(5, True, "", "q", PLAIN, b"body")]


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
def test_whatever_the_properties_are_other_messages_are_received(encoded: bytes) -> None:
    """Given any bytes as property flags and list, when read, then the message is refused at most, and by itself."""
    broker = Broker()
    broker.sends(delivered(b"", b"") + content(encoded, [b"body"]))
    broker.sends(delivered(b"", b"") + content(PLAIN, [b"good"]))
    first, second = broker.taken
    assert (first.encoded_properties, first.body) == (encoded, b"body")
    assert message_from(second).headers == {"größe": "ä"}
    try:
        message_from(first)
        sent_on(first.encoded_properties)
    except InvalidMessage:
        pass
    message_id_in(encoded)


def _with_value(value: bytes) -> bytes:
    return struct.pack(">H", HEADERS | ID) + table_of({"h": value}) + short("id")


def _nested(depth: int) -> bytes:
    value = b"t\x01"
    for _ in range(depth):
        value = b"F" + table_of({"deeper": value})
    return _with_value(value)


def test_tables_may_be_nested_to_a_limit() -> None:
    """Given tables in tables, when decoded, then 32 levels are read, and 33 are refused."""
    assert decode_properties(_nested(32)).message_id == "id"
    with pytest.raises(Undecodable, match="nested more than 32 deep"):
        decode_properties(_nested(33))


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
    with pytest.raises(Undecodable):
        decode_properties(came)
    durable = 1 << 12
    assert sent_on(came) == struct.pack(">H", HEADERS | durable | ID) + table_of(fields) + b"\x02" + short("id")


def test_marks_are_added_and_older_ones_replaced() -> None:
    """Given a message with marks of an earlier move, when it goes on with new ones, then it has only those."""
    fields = {"Mark.Old": long_string("1"), "own": long_string("2")}
    came = struct.pack(">H", (1 << 15) | HEADERS | ID) + short("text") + table_of(fields) + short("id")
    marked = decode_properties(sent_on(came, {"Mark.New": "ä", "Mark.Level": 3}, without="Mark."))
    assert marked.headers == {"own": "2", "Mark.New": "ä", "Mark.Level": 3}
    assert (marked.content_type, marked.message_id) == ("text", "id")
    bare = struct.pack(">H", (1 << 15) | ID) + short("text") + short("id")
    assert decode_properties(sent_on(bare, {"Mark.Level": 3})) == marked._replace(headers={"Mark.Level": 3})


@given(st.binary(max_size=255), st.binary(max_size=255), st.sampled_from([60, 71]))
def test_names_of_exchanges_and_keys_may_be_any_bytes(exchange: bytes, key: bytes, kind: int) -> None:
    """Given a delivery over names that are not UTF-8, when read, then they are escaped; others are unchanged."""
    broker = Broker()
    broker.sends(delivered(exchange, key, kind) + content(PLAIN, []))
    [found] = broker.taken if kind == 60 else broker.answers
    assert isinstance(found, Delivery)
    try:
        assert (found.exchange, found.routing_key) == (exchange.decode(), key.decode())
    except UnicodeDecodeError:
        assert "\\x" in found.exchange + found.routing_key


async def test_a_channel_that_the_broker_closes_meanwhile_is_not_closed_again() -> None:
    """Given a close that has begun, when the broker closes the channel first, then no method follows its CloseOk."""
    # Given
    broker = Broker()
    closing = broker.channel.close()
    closing.send(None)
    # When
    broker.channel.end(Closed(404, "NOT_FOUND"))
    # Then: `Broker.call` would fail
    assert broker.channel._closing is not None
    await broker.channel._closing
    closing.close()
