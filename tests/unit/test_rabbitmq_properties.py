"""Messages of other senders on the wire, byte by byte, as handlers see them."""

from __future__ import annotations

import struct

import pytest
from tests.unit.amqp_fields import delivered, long_string, received, short, table, table_of, taken_apart

from delayline import Headers, InvalidMessage, Message
from delayline.rabbitmq.amqp.properties import Delivery
from delayline.rabbitmq.amqp.wire import PublishFrames
from delayline.rabbitmq.decoding import message_from
from delayline.rabbitmq.encoding import DAMAGED_HEADERS, Publication
from delayline.rabbitmq.forwarding import sent_on

CONTENT_TYPE, HEADERS, MODE, CORRELATION, REPLY_TO, ID, TYPE = (1 << bit for bit in (15, 13, 12, 10, 9, 7, 5))
EXPIRATION, USER_ID = 1 << 8, 1 << 4
DELAY = "NServiceBus.Transport.RabbitMQ.DelayInSeconds"
TYPES = "NServiceBus.EnclosedMessageTypes"
NUL = b"\0\0\0\0"


def with_fields(fields: dict[str, bytes], id: str = "id", body: bytes = b"") -> Delivery:
    return delivered(HEADERS | MODE | ID, table_of(fields) + b"\x02" + short(id), body)


def headers_of(fields: dict[str, bytes]) -> dict[str, str]:
    return dict(message_from(with_fields(fields)).headers)


def test_a_delayed_message_of_the_dotnet_transport() -> None:
    """Given a deferred order as NServiceBus 9 puts it on the wire, when read, then nothing of its way here is left."""
    own = {
        "NServiceBus.MessageId": "5f3c9f2a-93a1-4a6b-9f8e-b2b101234567",
        "NServiceBus.MessageIntent": "Send",
        "NServiceBus.ConversationId": "0b0c7a3e-6f8e-4b0f-8f39-b2b101234568",
        "NServiceBus.CorrelationId": "5f3c9f2a-93a1-4a6b-9f8e-b2b101234567",
        "NServiceBus.ReplyToAddress": "Samples.Sales",
        "NServiceBus.OriginatingMachine": "MÜNCHEN-7",
        "NServiceBus.OriginatingEndpoint": "Samples.Sales",
        "$.diagnostics.originating.hostid": "9e1c4f6fd5e76ab2d4e3ad8d4c8a3c55",
        "NServiceBus.ContentType": "application/json",
        "NServiceBus.EnclosedMessageTypes": "Messages.PlaceOrder, Messages, Version=1.0.0.0, Culture=neutral",
        "NServiceBus.Version": "9.2.0",
        "NServiceBus.TimeSent": "2026-04-29 22:11:26:340982 Z",
        "NServiceBus.DeliverAt": "2026-04-29 22:11:36:340982 Z",
    }
    death = b"F" + table(count=b"l" + struct.pack(">q", 1), reason=long_string("expired"), exchange=long_string("x"))
    fields = {name: long_string(value) for name, value in own.items()} | {
        DELAY: b"I" + struct.pack(">i", 10),
        "x-dotnet-pub-seq-no": long_string(struct.pack(">Q", 255)),
        "NServiceBus.Transport.RabbitMQ.ConfirmationId": long_string("17"),
        "x-death": b"A" + struct.pack(">I", len(death)) + death,
        "x-first-death-exchange": long_string("nsb.v2.delay-level-03"),
        "x-first-death-queue": long_string("nsb.v2.delay-level-03"),
        "x-first-death-reason": long_string("expired"),
        "x-last-death-exchange": long_string("nsb.v2.delay-level-01"),
        "x-last-death-queue": long_string("nsb.v2.delay-level-01"),
        "x-last-death-reason": long_string("expired"),
        "x-delivery-count": b"l" + struct.pack(">q", 2),
        "x-acquired-count": b"l" + struct.pack(">q", 3),
    }
    properties = (
        short("application/json") + table_of(fields) + b"\x02" + short(own["NServiceBus.CorrelationId"])
        + short("Samples.Sales") + short(own["NServiceBus.MessageId"]) + short("Messages.PlaceOrder")
    )  # fmt: skip
    flags = CONTENT_TYPE | HEADERS | MODE | CORRELATION | REPLY_TO | ID | TYPE
    came = delivered(flags, properties, b'\xef\xbb\xbf{"orderId": "\xc3\xa4"}')
    message = message_from(came)
    assert message == Message(own["NServiceBus.MessageId"], own, b'\xef\xbb\xbf{"orderId": "\xc3\xa4"}')
    assert message.json() == {"orderId": "ä"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (long_string("größe"), "größe"),
        (long_string(b"\xff\xfe"), "��"),
        (long_string("\ud83d".encode("utf-8", "surrogatepass")), "\ud83d"),
        (b"x" + struct.pack(">I", 3) + b"\xc3\xa4!", "ä!"),
        (b"V", ""),
        (b"t\x01", "True"),
        (b"t\x00", "False"),
        (b"b" + struct.pack(">b", -5), "-5"),
        (b"s" + struct.pack(">h", -300), "-300"),
        (b"u" + struct.pack(">H", 65535), "65535"),
        (b"I" + struct.pack(">i", 42), "42"),
        (b"i" + struct.pack(">I", 2**32 - 1), "4294967295"),
        (b"l" + struct.pack(">q", -(2**63)), "-9223372036854775808"),
        (b"d" + struct.pack(">d", 1.5), "1.5"),
        (b"d" + struct.pack(">d", 3.0), "3"),
        (b"d" + struct.pack(">d", float("nan")), "nan"),
        (b"D" + struct.pack(">Bi", 2, 12345), "123.45"),
        (b"T" + struct.pack(">Q", 2**31 - 1), "2038-01-19 03:14:07:000000 Z"),
        (b"F" + table(a=long_string("1"), b=b"I" + struct.pack(">i", 2)), "a=1,b=2"),
        (b"A" + struct.pack(">I", 7) + long_string("a") + b"V", "a;"),
    ],
)
def test_values_that_are_not_texts_become_texts(value: bytes, text: str) -> None:
    """Given a header of each of AMQP's types, when read, then it is the text that the .NET transport makes of it."""
    assert headers_of({"h": value}) == {"h": text}


@pytest.mark.parametrize("kind", [b"b\x0a", b"s\x00\x0a", b"u\x00\x0a", b"I\0\0\0\x0a", b"l\0\0\0\0\0\0\0\x0a"])
def test_a_delay_of_any_width_is_left_behind(kind: bytes) -> None:
    """Given a delay as other clients write integers, when read, then it is not among the headers."""
    assert headers_of({DELAY: kind, "a": long_string("b")}) == {"a": "b"}


def test_properties_win_over_headers() -> None:
    """Given a sender that sets properties and headers apart, when read, then the properties are right."""
    fields = {
        Headers.CORRELATION_ID: long_string("header"),
        Headers.REPLY_TO: long_string("header"),
        Headers.CONTENT_TYPE: long_string("header"),
        TYPES: long_string("Header.Type, Assembly"),
    }
    properties = short("text/xml") + table_of(fields) + short("c") + short("r") + short("id") + short("Property.Type")
    message = message_from(delivered(CONTENT_TYPE | HEADERS | CORRELATION | REPLY_TO | ID | TYPE, properties))
    assert message.headers == {
        Headers.CORRELATION_ID: "c",
        Headers.REPLY_TO: "r",
        Headers.CONTENT_TYPE: "text/xml",
        TYPES: "Header.Type, Assembly",
    }


def test_a_type_alone_is_the_enclosed_type() -> None:
    """Given a native sender with the property type only, when read, then handlers see the enclosed type."""
    assert message_from(delivered(ID | TYPE, short("id") + short("Ns.Order"))).headers == {TYPES: "Ns.Order"}


def test_a_callback_queue_wins_over_the_reply_address() -> None:
    """Given the header of callbacks, when read, then answers go there."""
    fields = {"NServiceBus.RabbitMQ.CallbackQueue": long_string("callbacks")}
    message = message_from(delivered(HEADERS | REPLY_TO | ID, table_of(fields) + short("answers") + short("id")))
    assert message.headers[Headers.REPLY_TO] == "callbacks"


@pytest.mark.parametrize("own", [b"", b"\x01", b"\x02"])
def test_copies_of_a_message_that_is_not_durable_are(own: bytes) -> None:
    """Given a message of any delivery mode, when it is sent on, as it came or composed anew, then it is durable."""
    came = delivered((MODE if own else 0) | ID, own + short("id"))
    assert sent_on(came.encoded_properties) == struct.pack(">H", MODE | ID) + b"\x02" + short("id")
    assert message_from(came).headers == {}


def test_the_id_may_be_in_the_header_only() -> None:
    """Given no message-id property but its header, when read, then that is the id."""
    fields = table_of({Headers.MESSAGE_ID: long_string("from the header")})
    assert message_from(delivered(HEADERS, fields)).id == "from the header"


@pytest.mark.parametrize(
    ("flags", "properties"),
    [(0, b""), (ID, short(" ")), (HEADERS, NUL), (HEADERS | ID, table_of({Headers.MESSAGE_ID: b"V"}) + short(""))],
)
def test_a_message_without_an_id_is_refused(flags: int, properties: bytes) -> None:
    """Given no id or a blank one, when read, then the error is the one .NET users know."""
    with pytest.raises(InvalidMessage, match="A non-empty 'message-id' property is required"):
        message_from(delivered(flags, properties))


@pytest.mark.parametrize("damaged", [b'{"a": "\xff', b"no json", b"\xef\xbb\xbf<xml", b'{"a": "\xed\xa0\xbd'])
def test_damaged_headers_come_out_as_they_went_in(damaged: bytes) -> None:
    """Given headers that could not be read when they were sent, when received, then they are as damaged as before."""
    sent = PublishFrames(1, 4096).encode(Publication(Message.from_encoded("id", damaged, b"body"), "", "q"))
    message = message_from(received(sent))
    assert (message.id, message.encoded_headers, message.body) == ("id", damaged, b"body")
    assert DAMAGED_HEADERS not in message.encoded_headers.decode("utf-8", "replace")


def test_a_message_that_goes_on_unchanged_keeps_its_properties() -> None:
    """Given a message with every property, when forwarded, then it has all but those that the broker interprets."""
    fields = {
        DELAY: b"I" + struct.pack(">i", 10),
        "text": long_string("größe"),
        "invalid": long_string(b"\xff\xfe"),
        "wide": b"l" + struct.pack(">q", 2**40),
        "flag": b"t\x01",
        "nothing": b"V",
        "table": b"F" + table(a=b"I" + struct.pack(">i", 1)),
        "list": b"A" + struct.pack(">I", 5) + b"I" + struct.pack(">i", 2),
        "double": b"d" + struct.pack(">d", 0.1),
        "bytes": b"x" + struct.pack(">I", 2) + b"\0\1",
        "time": b"T" + struct.pack(">Q", 1_700_000_000),
    }
    came = {**fields, "x-death": b"A" + NUL, "x-first-death-queue": long_string("q"), "x-mine": long_string("kept")}
    properties = short("text/xml") + short("gzip") + table_of(came) + b"\x02\x05" + short("c") + short("r")
    properties += short("60000") + short("id") + struct.pack(">Q", 1_700_000_000) + short("T") + short("u") + short("a")
    gone_on = sent_on(delivered(0xFFF8, properties).encoded_properties)
    assert struct.unpack_from(">H", gone_on)[0] == 0xFFF8 & ~EXPIRATION & ~USER_ID
    head, tail = short("text/xml") + short("gzip"), b"\x02\x05" + short("c") + short("r") + short("id")
    tail += struct.pack(">Q", 1_700_000_000) + short("T") + short("a")
    table_there = gone_on[2 + len(head) : -len(tail)]
    assert gone_on == gone_on[:2] + head + table_there + tail
    expected = taken_apart(table_of({**fields, "x-mine": long_string("kept")}))
    assert taken_apart(table_there) == expected


def test_no_properties_go_on_as_durable_alone() -> None:
    """Given a message without any property, when it goes on, then it has the one that makes it durable."""
    assert sent_on(delivered(0, b"").encoded_properties) == struct.pack(">H", MODE) + b"\x02"
