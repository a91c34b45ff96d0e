"""The envelope of NServiceBus: messages of .NET can be read, and .NET can read ours, within the size limit."""

import base64
import contextlib
import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayline import Headers, InvalidMessage, Message
from delayline.azure.envelope import LARGEST_TEXT, UnwrappedMessage, check_size, unwrap, wrap
from delayline.errors import CorruptHeaders
from delayline.failures import error_operations
from delayline.testing.conformance.messages import AT, AWKWARD_HEADERS

TEXTS = st.text(max_size=40)


def opened(text: str) -> dict[str, Any]:
    wrapper: dict[str, Any] = json.loads(base64.b64decode(text))
    return wrapper


def closed(wrapper: object, mark: bytes = b"") -> str:
    return base64.b64encode(mark + json.dumps(wrapper).encode()).decode()


def test_a_message_is_wrapped_as_dotnet_wraps_it() -> None:
    headers = {
        Headers.INTENT: "Reply",
        Headers.REPLY_TO: "sales",
        Headers.CORRELATION_ID: "c",
        "mine": "größe",
    }
    wrapper = opened(wrap(Message("m", headers, b"\x00body")))
    assert list(wrapper) == [
        "IdForCorrelation", "Id", "MessageIntent", "ReplyToAddress", "TimeToBeReceived", "Headers", "Body",
        "CorrelationId", "Recoverable",
    ]  # fmt: skip
    assert wrapper == {
        "IdForCorrelation": None,
        "Id": "m",
        "MessageIntent": 5,
        "ReplyToAddress": "sales",
        "TimeToBeReceived": "00:00:00",
        "Headers": headers,
        "Body": base64.b64encode(b"\x00body").decode(),
        "CorrelationId": "c",
        "Recoverable": False,
    }


def test_a_wrapper_of_dotnet_is_read_with_its_byte_order_mark() -> None:
    wrapper = {
        "IdForCorrelation": None,
        "Id": "7d1c9cbb-5b1c-4a5d-8d4e-0f1f2d0f7a11",
        "MessageIntent": 1,
        "ReplyToAddress": "samples-azure-storagequeues-endpoint1",
        "TimeToBeReceived": "00:00:00",
        "Headers": {"NServiceBus.EnclosedMessageTypes": "Message1", "HelpLink": None},
        "Body": "77u/eyJQcm9wZXJ0eSI6IkhlbGxvIn0=",
        "CorrelationId": "c",
        "Recoverable": True,
    }
    message = unwrap("native", closed(wrapper, b"\xef\xbb\xbf"))
    assert message.id == "7d1c9cbb-5b1c-4a5d-8d4e-0f1f2d0f7a11"
    assert message.json() == {"Property": "Hello"}
    assert message.headers == {
        "NServiceBus.EnclosedMessageTypes": "Message1",
        "HelpLink": "",
        Headers.REPLY_TO: "samples-azure-storagequeues-endpoint1",
        Headers.CORRELATION_ID: "c",
        Headers.INTENT: "Send",
    }


@given(
    id=st.text(min_size=1, max_size=40), headers=st.dictionaries(TEXTS, TEXTS, max_size=5), body=st.binary(max_size=99)
)
def test_envelopes_round_trip(id: str, headers: dict[str, str], body: bytes) -> None:
    message = Message(id, headers, body)
    assert unwrap("native", wrap(message)) == message


@pytest.mark.parametrize("body", [b"", b"x" * LARGEST_TEXT])
@pytest.mark.parametrize("headers", [{}, {Headers.FAILED_QUEUE: "q", "a": "\ud800"}])
def test_an_id_that_is_no_text_is_refused(headers: dict[str, str], body: bytes) -> None:
    """Given an id with a lone surrogate, when wrapped or checked, then the error is ours and says what is wrong."""
    for takes in (wrap, check_size):
        with pytest.raises(InvalidMessage, match="has an id that is no UTF-8"):
            takes(Message("a\ud800", headers, body))


def test_awkward_and_damaged_headers_are_kept() -> None:
    assert dict(unwrap("native", wrap(Message("m", AWKWARD_HEADERS, b""))).headers) == AWKWARD_HEADERS
    for encoded in (b"\xff{not json", b"[1]", b'{"half": "', b'{"a": "\\ud800"}'):
        message = Message.from_encoded("m", encoded, b"body")
        found = unwrap("native", wrap(message))
        assert (found.id, found.body) == ("m", b"body")
        assert found.encoded_headers in {encoded, message.encoded_headers}


@pytest.mark.parametrize(
    "text",
    [
        "", "not base64!", "größe", "\x00", base64.b64encode(b"not json").decode(), closed([]), closed({}),
        closed({"Id": "m", "Headers": None, "Body": ""}), closed({"Id": "", "Headers": {}, "Body": ""}),
        closed({"Id": "m", "Headers": {}, "Body": "!"}), base64.b64encode(b"[" * 100_000).decode(),
        closed({"Id": "m", "Headers": {}, "Body": 5}), closed({"Id": "m", "Headers": {}, "Body": ["x"]}),
        closed({"Id": "m", "Headers": {}, "Body": True}), closed({"Id": "m", "Headers": {}, "Body": {}}),
        closed({"Id": "m", "Headers": {}, "Body": "", "EncodedHeaders": 5}),
        closed({"Id": "m", "Headers": {}, "Body": "", "EncodedHeaders": "größe"}),
        base64.b64encode(b'{"Id": "m", "Headers": {"n": ' + b"9" * 5_000 + b"}}").decode(),
    ],
)  # fmt: skip
def test_messages_without_an_envelope_are_forwarded_unchanged(text: str) -> None:
    message = unwrap("native", text)
    assert isinstance(message, UnwrappedMessage)
    assert message.id == "native"
    with pytest.raises(CorruptHeaders, match="native"):
        _ = message.headers
    moved = next(
        error_operations(
            message, RuntimeError("no"), failed_queue="sales", error_queue="error", endpoint_name="sales", now=AT
        )
    )
    assert wrap(moved.message) == text


def test_any_wrapper_of_any_types_is_a_message_or_is_sent_on_as_it_is() -> None:
    """No exception leaves `unwrap`: one malformed wrapper would hide its neighbours on the page."""
    members = ("Id", "Headers", "Body", "EncodedHeaders", "ReplyToAddress", "CorrelationId", "MessageIntent")
    values: tuple[Any, ...] = (None, 5, -1, 2.5, True, "", "x", "\ud800", [], [5], {}, {"": {}}, {"a": [None]})
    good = {"Id": "m", "Headers": {}, "Body": ""}
    for member in members:
        for value in values:
            message = unwrap("native", closed(good | {member: value}))
            assert isinstance(message, Message)
            with contextlib.suppress(CorruptHeaders):
                assert all(isinstance(text, str) for text in message.headers.values())
    assert unwrap("native", cast("str", None)).id == "native"


def test_a_message_that_is_too_large_names_the_sizes() -> None:
    with pytest.raises(InvalidMessage, match=r"40000 bytes.*65536|65536.*40000"):
        wrap(Message("m", {}, b"x" * 40_000))
    check_size(Message("m", {"h": "v"}, b"x" * 35_000))
    with pytest.raises(InvalidMessage, match="blob"):
        check_size(Message("m", {}, b"x" * 36_000))


@pytest.mark.parametrize("size", [0, 10_000, 30_000, 34_000, 35_000, 36_000, 36_700])
def test_whatever_could_be_sent_can_be_moved_to_the_error_queue(size: int) -> None:
    wrap(message := Message("m", {"mine": "kept"}, b"x" * size))
    error = RuntimeError("ü" * 9_000)
    moved = next(
        error_operations(message, error, failed_queue="sales", error_queue="error", endpoint_name="sales", now=AT)
    ).message
    text = wrap(moved)
    assert len(text) <= LARGEST_TEXT
    found = unwrap("native", text)
    assert (found.id, found.body, found.headers["mine"]) == ("m", message.body, "kept")
    if size <= 36_000:
        assert found.headers[Headers.FAILED_QUEUE] == "sales"
