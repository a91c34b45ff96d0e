"""Messages on the wire to RabbitMQ, read back from the bytes of their frames."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.amqp_fields import read, received

from delayline import Headers, InvalidMessage, Message
from delayline.message import encode_headers
from delayline.rabbitmq.amqp.errors import Unsendable
from delayline.rabbitmq.amqp.wire import PublishFrames
from delayline.rabbitmq.decoding import message_from
from delayline.rabbitmq.encoding import DAMAGED_HEADERS, NOT_SENT, Publication
from delayline.rabbitmq.levels import DELAY_HEADER
from delayline.rabbitmq.refusals import unconfirmed

FRAME_MAX = 4096
NON_PERSISTENT = "NServiceBus.Transport.RabbitMQ.UseNonPersistentDelivery"
TYPES = "NServiceBus.EnclosedMessageTypes"


def encoded(message: Message, *, delay: int | None = None, exchange: str = "e", routing_key: str = "k") -> bytes:
    return PublishFrames(1, FRAME_MAX).encode(Publication(message, exchange, routing_key, delay))


def with_headers(**headers: Any) -> Message:  # noqa: ANN401
    return Message("id", {name.replace("__", "."): value for name, value in headers.items()}, b"")


@pytest.mark.parametrize("delay", [0, 1, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 268435455])
def test_a_delay_is_a_signed_int32_whatever_its_size(delay: int) -> None:
    """Given a delay that smaller integers could hold, when it is encoded, then it is of type 'I', which .NET needs."""
    field = read(encoded(with_headers(a="b"), delay=delay)).fields["NServiceBus.Transport.RabbitMQ.DelayInSeconds"]
    assert (field.kind, struct.unpack(">i", field.raw)[0]) == ("I", delay)


@pytest.mark.parametrize("delay", [-1, -123, -(2**31), 268435456, 2**31])
def test_a_delay_beyond_the_range_is_refused(delay: int) -> None:
    """Given a delay that no level has, when it is encoded, then nothing goes out."""
    with pytest.raises(InvalidMessage, match=rf"'id' has a delay of {delay} s, RabbitMQ's levels hold 0 to 268435455"):
        encoded(with_headers(), delay=delay)


def test_a_message_that_is_not_delayed_has_no_delay() -> None:
    """Given a message that once was delayed, when it is sent now, then its old delay is not sent with it."""
    assert DELAY_HEADER not in read(encoded(Message("id", {DELAY_HEADER: "5", "a": "b"}, b""))).fields


def test_headers_are_long_strings() -> None:
    """Given headers with Unicode, an empty and a long value, when encoded, then each is of type 'S', as it was."""
    headers = {"Größe": "😊", "empty": "", "long": "x" * 3000, Headers.TIME_SENT: "2026-04-29 22:11:26:340982 Z"}
    fields = read(encoded(Message("id", headers, b""))).fields
    assert {name: field.text for name, field in fields.items()} == headers


def test_headers_that_a_store_kept_as_json_are_the_same_on_the_wire() -> None:
    """Given one message with headers as a dict and one with their JSON, when encoded, then the bytes are equal."""
    headers = {"a": "ö", "b": ""}
    stored = Message.from_encoded("id", encode_headers(headers), b"body")
    assert encoded(stored, delay=3) == encoded(Message("id", headers, b"body"), delay=3)


NAMES = st.text(max_size=60).filter(lambda name: name not in NOT_SENT)


@given(st.dictionaries(NAMES, st.text(max_size=300)), st.text(min_size=1, max_size=60), st.binary())
def test_whatever_is_text_goes_out_and_comes_back(headers: dict[str, str], id: str, body: bytes) -> None:
    """Given any headers, id and body, when encoded, then the frames hold them."""
    frames = read(PublishFrames(1, 1 << 17).encode(Publication(Message(id, headers, body), "", "q")))
    assert {name: field.text for name, field in frames.fields.items()} == headers
    assert (frames.properties.message_id, frames.body) == (id, body)


def test_properties_repeat_headers_that_clients_read() -> None:
    """Given the headers of NServiceBus.RabbitMQ, when encoded, then the properties say the same."""
    headers = {
        Headers.CORRELATION_ID: "c",
        Headers.CONTENT_TYPE: "application/json",
        Headers.REPLY_TO: "answers",
        TYPES: "Ns.Order, Assembly, Version=1.0;Ns.Base",
    }
    properties = read(encoded(Message("the id", headers, b""))).properties
    assert (properties.message_id, properties.correlation_id) == ("the id", "c")
    assert (properties.content_type, properties.reply_to, properties.message_type) == (
        "application/json",
        "answers",
        "Ns.Order",
    )
    assert (properties.delivery_mode, properties.expiration) == (2, None)
    unset = (properties.timestamp, properties.app_id, properties.user_id, properties.priority)
    assert (*unset, properties.content_encoding) == (None,) * 5


def test_a_message_without_headers_has_the_least_properties() -> None:
    """Given no headers, when encoded, then content type, delivery mode and id are all there is."""
    properties = read(encoded(Message("id", {}, b""))).properties
    assert (properties.content_type, properties.delivery_mode) == ("application/octet-stream", 2)
    assert (properties.correlation_id, properties.reply_to, properties.message_type) == (None, None, None)


def test_publishing_is_mandatory() -> None:
    """Given any publication, when encoded, then the broker has to return it where nothing takes it."""
    publish = read(encoded(with_headers(), exchange="nsb.v2.delay-level-03", routing_key="0.1.ziel-😊")).publish
    assert (publish.exchange, publish.routing_key) == ("nsb.v2.delay-level-03", "0.1.ziel-😊")
    assert (publish.mandatory, publish.immediate) == (True, False)


@pytest.mark.parametrize(
    ("span", "expiration"),
    [
        ("00:00:05", "5000"),
        ("00:00:00", "0"),
        ("00:00:00.0000001", "1"),
        ("00:00:01.0000001", "1001"),
        ("3650.00:00:00", "315360000000"),
        ("3650.00:00:00.0000001", None),
        ("10675199.02:48:05.4775807", None),
    ],
)
def test_time_to_be_received_is_the_expiration(span: str, expiration: str | None) -> None:
    """Given a time to be received, when encoded, then it is whole milliseconds, rounded up, ten years at most."""
    assert read(encoded(Message("id", {Headers.TIME_TO_BE_RECEIVED: span}, b""))).properties.expiration == expiration


def test_a_delay_and_a_time_to_be_received_exclude_each_other() -> None:
    """Given both, when encoded, then it is refused in the words .NET users know: the levels would forget the latter."""
    with pytest.raises(
        InvalidMessage, match="Postponed delivery of messages with TimeToBeReceived set is not supported"
    ):
        encoded(Message("id", {Headers.TIME_TO_BE_RECEIVED: "00:00:05"}, b""), delay=1)


def test_a_sender_may_forgo_persistence() -> None:
    """Given the header of the .NET transport, when encoded, then the message is not persistent, and the header gone."""
    frames = read(encoded(Message("id", {NON_PERSISTENT: "True"}, b"")))
    assert (frames.properties.delivery_mode, frames.fields) == (1, {})


@pytest.mark.parametrize("which", ["x-death", "x-first-death-queue", "x-last-death-reason", "x-delivery-count"])
def test_headers_that_brokers_add_are_removed(which: str) -> None:
    """Given a header that a broker added, when encoded, then it is left out: brokers drop what goes in circles."""
    assert read(encoded(Message("id", {which: "1", "kept": "1"}, b""))).fields.keys() == {"kept"}


def test_a_large_body_is_split_into_frames() -> None:
    """Given a body of 5 MB, when encoded, then no frame is longer than was agreed, and together they are the body."""
    body = bytes(range(256)) * 20_000
    frames = read(encoded(Message("id", {}, body)))
    assert frames.body == body
    assert max(frames.sizes) == FRAME_MAX


@pytest.mark.parametrize("size", [0, 1, FRAME_MAX - 9, FRAME_MAX - 8, FRAME_MAX - 7, 2 * (FRAME_MAX - 8)])
def test_bodies_around_a_frames_size_are_whole(size: int) -> None:
    """Given bodies that just fit and just do not, when encoded, then there are as few frames as possible."""
    frames = read(encoded(Message("id", {}, b"x" * size)))
    assert len(frames.body) == size
    assert len(frames.sizes) == 2 + -(-size // (FRAME_MAX - 8))


def test_damaged_headers_are_kept_whole() -> None:
    """Given stored headers that cannot be read, when encoded, then their bytes are in one header: nothing is lost."""
    fields = read(encoded(Message.from_encoded("id", b'{"a": "\xff', b"body"), delay=4)).fields
    assert (fields[DAMAGED_HEADERS].kind, fields[DAMAGED_HEADERS].raw) == ("S", b'{"a": "\xff')
    assert fields[DELAY_HEADER].kind == "I"


def test_properties_of_others_are_sent_as_they_are() -> None:
    """Given the properties of a foreign message, when encoded, then they replace what its id and headers would be."""
    raw = struct.pack(">H", 1 << 7) + b"\x05other"
    frames = PublishFrames(3, FRAME_MAX).encode(Publication(Message("id", {"a": "b"}, b"x"), "", "q", None, raw))
    assert raw in frames
    assert b"id" not in frames


@pytest.mark.parametrize("value", [5, None, b"bytes", 1.5, ["a"], {"a": "b"}, object()])
def test_a_header_that_is_not_text_is_refused(value: object) -> None:
    """Given a value that is not a str, when encoded, then the error names the header, the value and the remedy."""
    with pytest.raises(InvalidMessage, match=r"header 'a\.b' of message 'id' is .*, no str: convert it, as in str\("):
        encoded(with_headers(a__b=value))


@pytest.mark.parametrize("name", [5, None, b"bytes"])
def test_a_header_name_that_is_not_text_is_refused(name: Any) -> None:  # noqa: ANN401
    """Given a name that is not a str, when encoded, then the error names it."""
    with pytest.raises(InvalidMessage, match=r"header name .* is not a str"):
        encoded(Message("id", {name: "x"}, b""))


@pytest.mark.parametrize(
    ("publication", "what"),
    [
        (Publication(Message("ä" * 128, {}, b""), "", "q"), "message id has 256 bytes"),
        (Publication(Message("id", {"n" * 256: ""}, b""), "", "q"), "header name has 256 bytes"),
        (Publication(Message("\ud800", {}, b""), "", "q"), "message id .* is not valid Unicode"),
    ],
)
def test_a_name_that_amqp_cannot_carry_is_refused(publication: Publication, what: str) -> None:
    """Given a name of more than 255 bytes, when encoded, then the error says which one and how long it is."""
    with pytest.raises(InvalidMessage, match=what):
        PublishFrames(1, FRAME_MAX).encode(publication)


@pytest.mark.parametrize(
    ("exchange", "key", "what"),
    [("e" * 256, "q", "exchange"), ("", "q" * 256, "routing key"), ("\ud800", "q", "exchange")],
)
def test_a_way_that_amqp_cannot_carry_is_refused(exchange: str, key: str, what: str) -> None:
    """Given an exchange or a routing key beyond AMQP's, when encoded, then the error says which; we call it invalid."""
    publication = Publication(Message("id", {}, b""), exchange, key)
    with pytest.raises(Unsendable, match=f"{what} (has 256 bytes|.*is not valid Unicode)") as refused:
        PublishFrames(1, FRAME_MAX).encode(publication)
    assert isinstance(unconfirmed(publication, refused.value), InvalidMessage)


def test_a_value_too_long_for_a_property_stays_a_header() -> None:
    """Given a correlation id of 300 bytes, when encoded, then its header carries it: receivers read that as well."""
    headers = {Headers.CORRELATION_ID: "c" * 300, Headers.REPLY_TO: "r" * 300, TYPES: "T" * 300}
    frames = read(encoded(Message("id", headers, b"")))
    assert frames.fields[Headers.CORRELATION_ID].text == "c" * 300
    properties = frames.properties
    assert (properties.correlation_id, properties.reply_to, properties.message_type) == (None, None, None)


def test_headers_larger_than_a_frame_are_refused() -> None:
    """Given more headers than AMQP can put into its one frame for them, when encoded, then it is refused."""
    with pytest.raises(InvalidMessage, match=r"'id' has \d{4} bytes of headers, a frame of this broker holds 4088"):
        encoded(with_headers(a="x" * 5000))


def test_halves_of_characters_in_headers_survive() -> None:
    """Given a header with half a surrogate pair, as JSON may have, when encoded, then its bytes are kept."""
    headers = {"a": "\ud83d", Headers.CORRELATION_ID: "\ud83d", Headers.CONTENT_TYPE: "\ud83d"}
    frames = read(encoded(Message("id", headers, b""), delay=1))
    assert frames.fields["a"].raw == "\ud83d".encode("utf-8", "surrogatepass")
    assert (frames.properties.correlation_id, frames.properties.content_type) == (None, None)


@pytest.mark.parametrize(
    "headers",
    [{"a": "x" * 5000}, {"n" * 256: "v"}, {Headers.EXCEPTION_MESSAGE: "x" * 5000}, {f"h{n}": "" for n in range(500)}],
)
@pytest.mark.parametrize("mark", [Headers.FAILED_QUEUE, Headers.RETRIES])
def test_a_failed_message_always_fits_a_frame(headers: dict[str, str], mark: str) -> None:
    """Given a failed message with headers that no frame carries, when encoded, then all are there for a receiver."""
    message = Message("ж" * 200, {**headers, mark: "sales"}, b"body")
    frames = read(encoded(message))
    found = message_from(received(encoded(message)))
    assert (dict(found.headers), found.body) == (dict(message.headers), b"body")
    assert frames.fields[mark].text == "sales"
    assert len(frames.properties.message_id or "") == 36


def test_damaged_headers_larger_than_a_frame_fit() -> None:
    """Given damaged headers of any size, when encoded, then they come out as they went in."""
    found = message_from(received(encoded(Message.from_encoded("id", b"[" * 9000, b"body"))))
    assert (found.id, found.encoded_headers, found.body) == ("id", b"[" * 9000, b"body")
