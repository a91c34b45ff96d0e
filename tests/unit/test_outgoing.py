"""Bad input is an error at the door, with the value and the remedy in its text."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest

from delayline import ConfigurationError, Headers, InvalidDueTime, InvalidMessage, Message
from delayline.message import to_wire_time
from delayline.outgoing import Composer, Send, check_endpoint_name, check_headers, due_time

if TYPE_CHECKING:
    from delayline.testing.clock import ManualClock

NOW = datetime(2026, 1, 1, tzinfo=UTC)
BERLIN = timezone(timedelta(hours=1))


@pytest.fixture
def composer(clock: ManualClock) -> Composer:
    return Composer("sales", clock, reply_to="sales")


def test_a_message_carries_the_headers_of_the_reference(composer: Composer) -> None:
    operation = composer.compose(Send("billing", {"a": 1})).operation
    message = operation.message
    assert operation.destination == "billing"
    assert {name: message.headers[name] for name in (Headers.MESSAGE_ID, Headers.CORRELATION_ID)} == {
        Headers.MESSAGE_ID: message.id,
        Headers.CORRELATION_ID: message.id,
    }
    assert message.headers[Headers.CONVERSATION_ID] == message.id
    assert message.headers[Headers.CONTENT_TYPE] == "application/json"
    assert message.headers[Headers.INTENT] == "Send"
    assert message.headers[Headers.ORIGINATING_ENDPOINT] == message.headers[Headers.REPLY_TO] == "sales"
    assert message.headers[Headers.TIME_SENT] == to_wire_time(NOW)
    assert message.headers[Headers.ORIGINATING_MACHINE]
    assert Headers.DELIVER_AT not in message.headers


def test_a_delayed_message_has_its_due_time_in_a_header(composer: Composer) -> None:
    outgoing = composer.compose(Send("billing", b"", delay=timedelta(seconds=5)))
    assert outgoing.due == NOW + timedelta(seconds=5)
    assert outgoing.operation.message.headers[Headers.DELIVER_AT] == to_wire_time(NOW + timedelta(seconds=5))


def test_given_headers_win_but_never_over_the_message_id(composer: Composer) -> None:
    headers = {Headers.CONTENT_TYPE: "text/xml", Headers.MESSAGE_ID: "other", "mine": "1"}
    message = composer.compose(Send("billing", b"<a/>", headers=headers, message_id="m-1")).operation.message
    assert (message.id, message.headers[Headers.MESSAGE_ID]) == ("m-1", "m-1")
    assert (message.content_type, message.headers["mine"]) == ("text/xml", "1")


def test_a_message_sent_while_handling_another_belongs_to_its_conversation(composer: Composer) -> None:
    first = Message("first", {Headers.CONVERSATION_ID: "talk"}, b"")
    message = composer.compose(Send("billing", b""), first).operation.message
    assert (message.headers[Headers.RELATED_TO], message.headers[Headers.CONVERSATION_ID]) == ("first", "talk")


def test_a_reply_goes_back_with_the_requests_correlation(composer: Composer) -> None:
    request = Message("request", {Headers.REPLY_TO: "shop", Headers.CORRELATION_ID: "c"}, b"")
    outgoing = composer.reply(request, b"yes", {"mine": "1"}, timedelta(seconds=1))
    headers = outgoing.operation.message.headers
    assert (outgoing.operation.destination, outgoing.due) == ("shop", NOW + timedelta(seconds=1))
    assert (headers[Headers.CORRELATION_ID], headers[Headers.INTENT], headers["mine"]) == ("c", "Reply", "1")


def test_messages_that_a_handler_sends_carry_the_correlation_on(composer: Composer) -> None:
    """Given a message with a correlation id, when its handler sends another, then that has it too; given ids win."""
    first = Message("first", {Headers.CORRELATION_ID: "c"}, b"")
    sent = composer.compose(Send("billing", b""), first).operation.message
    given = composer.compose(Send("billing", b"", correlation_id="mine"), first).operation.message
    assert (sent.headers[Headers.CORRELATION_ID], given.headers[Headers.CORRELATION_ID]) == ("c", "mine")


@pytest.mark.parametrize("headers", [{}, {Headers.CORRELATION_ID: ""}])
def test_a_message_related_to_one_without_correlation_has_its_own_id(
    composer: Composer, headers: dict[str, str]
) -> None:
    """Given a message without a correlation id, when its handler sends another, then that has its own id."""
    message = composer.compose(Send("billing", b""), Message("first", headers, b"")).operation.message
    assert message.headers[Headers.CORRELATION_ID] == message.id


def test_a_reply_to_a_saga_names_the_saga(composer: Composer) -> None:
    """Given a request of a saga, when answered, then the reply has the headers by which NServiceBus finds the saga."""
    saga = {Headers.ORIGINATING_SAGA_ID: "5f3c9f2a-93a1-4a6b-9f8e-b2b101234567", Headers.ORIGINATING_SAGA_TYPE: "S, A"}
    request = Message("request", {Headers.REPLY_TO: "shop", **saga}, b"")
    headers = composer.reply(request, b"yes", None, None).operation.message.headers
    assert headers[Headers.SAGA_ID] == "5f3c9f2a-93a1-4a6b-9f8e-b2b101234567"
    assert headers[Headers.SAGA_TYPE] == "S, A"


@pytest.mark.parametrize("saga", ["", "no guid", "5f3c9f2a", "{}", "\0", "f" * 20_000])
def test_a_reply_names_no_saga_where_the_request_has_none(composer: Composer, saga: str) -> None:
    """Given a request whose saga header is empty or no GUID, when answered, then the reply has none."""
    of_saga = {Headers.ORIGINATING_SAGA_ID: saga, Headers.ORIGINATING_SAGA_TYPE: "S, A"}
    request = Message("request", {Headers.REPLY_TO: "shop", **of_saga}, b"")
    headers = composer.reply(request, b"yes", None, None).operation.message.headers
    assert Headers.SAGA_ID not in headers
    assert Headers.SAGA_TYPE not in headers


def test_a_copy_to_handle_again_does_not_expire(composer: Composer) -> None:
    """Given a received message with a time to be received, when deferred, then the copy has none."""
    received = Message("m", {Headers.TIME_TO_BE_RECEIVED: "00:00:05", "mine": "1"}, b"")
    copy = composer.again(received, "sales", delay=timedelta(seconds=9)).operation.message
    due = to_wire_time(NOW + timedelta(seconds=9))
    assert copy.headers == {Headers.MESSAGE_ID: "m", "mine": "1", Headers.DELIVER_AT: due}


def test_a_message_that_is_forwarded_with_a_delay_does_not_expire(composer: Composer) -> None:
    """Given a received message with a time to be received, when forwarded, then it has none if it waits first."""
    received = Message("m", {Headers.TIME_TO_BE_RECEIVED: "00:00:05", "mine": "1"}, b"")
    assert composer.forward(received, "sales", None, None).operation.message is received
    waiting = composer.forward(received, "sales", timedelta(seconds=9), None).operation.message
    assert waiting.headers == {"mine": "1", Headers.DELIVER_AT: to_wire_time(NOW + timedelta(seconds=9))}


def test_a_reply_without_an_address_is_refused(composer: Composer) -> None:
    with pytest.raises(InvalidMessage, match=r"'request' has no NServiceBus.ReplyToAddress .*Use context.send"):
        composer.reply(Message("request", {}, b""), b"", None, None)


def test_a_send_only_endpoint_gives_no_reply_address(clock: ManualClock) -> None:
    message = Composer("sales", clock, reply_to=None).compose(Send("billing", b"")).operation.message
    assert Headers.REPLY_TO not in message.headers


@pytest.mark.parametrize(
    ("delay", "deliver_at", "due"),
    [
        (None, None, None),
        (timedelta(0), None, None),
        (timedelta(microseconds=1), None, NOW + timedelta(microseconds=1)),
        (None, NOW - timedelta(days=1), NOW - timedelta(days=1)),
        (None, datetime(2026, 5, 1, 9, tzinfo=BERLIN), datetime(2026, 5, 1, 8, tzinfo=UTC)),
    ],
)
def test_due_times(delay: timedelta | None, deliver_at: datetime | None, due: datetime | None) -> None:
    found = due_time(NOW, delay, deliver_at)
    assert found == due
    assert found is None or found.utcoffset() == timedelta(0)


@pytest.mark.parametrize(
    ("delay", "deliver_at", "value", "remedy"),
    [
        (None, datetime(2026, 5, 1), "2026, 5, 1", "tzinfo=ZoneInfo"),  # noqa: DTZ001 - the naive one is the point
        (timedelta(seconds=-1), None, "days=-1, seconds=86399", "cannot be due before it is sent"),
        (timedelta(1), NOW, "days=1", "give one of them"),
        (timedelta(days=3_000_000), None, "3000000", "use a shorter delay"),
        (timedelta.max, None, "999999999", "use a shorter delay"),
        (None, datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))), "9999", "beyond year 9999"),
        (5, None, "5", r"use timedelta\(seconds"),
        (None, "tomorrow", "'tomorrow'", "must be an aware datetime"),
    ],
)
def test_a_due_time_that_cannot_be_is_refused(delay: Any, deliver_at: Any, value: str, remedy: str) -> None:  # noqa: ANN401
    with pytest.raises(InvalidDueTime, match=remedy) as caught:
        due_time(NOW, delay, deliver_at)
    assert value in str(caught.value)


@pytest.mark.parametrize(
    ("destination", "text"),
    [
        ("", "1 to 200 characters, not ''"),
        (None, "not None"),
        ("q" * 201, "has 201 characters, 200 at most"),
        (" q", "' q' has control characters, or spaces around it: remove them"),
        ("q\n", "remove them"),
        ("q\x00r", "remove them"),
        ("\ud800", "remove them"),
    ],
)
def test_a_destination_no_back_end_could_keep_is_refused(composer: Composer, destination: Any, text: str) -> None:  # noqa: ANN401
    with pytest.raises(InvalidMessage, match="destination") as caught:
        composer.compose(Send(destination, b""))
    assert text in str(caught.value)


def test_the_longest_names_are_accepted(composer: Composer) -> None:
    assert composer.compose(Send("ü" * 200, b"", message_id="m" * 250)).operation.destination == "ü" * 200


@pytest.mark.parametrize("message_id", ["", "m" * 251, 7])
def test_a_message_id_no_back_end_could_keep_is_refused(composer: Composer, message_id: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidMessage, match="message_id"):
        composer.compose(Send("billing", b"", message_id=message_id))


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ({"a": 1}, r"header 'a': 1 must be str to str; convert it, as in str\(1\)"),
        ({1: "a"}, "header 1: 'a' must be str to str"),
        ({"a": None}, "header 'a': None must be"),
        ({"": "x"}, "a header with the value 'x' has an empty name"),
        ([("a", "b")], "must be a mapping of str to str, not list"),
        ("ab", "must be a mapping of str to str, not str"),
    ],
)
def test_headers_that_are_not_text_are_refused(composer: Composer, headers: Any, text: str) -> None:  # noqa: ANN401
    with pytest.raises(InvalidMessage, match=text):
        composer.compose(Send("billing", b"", headers=headers))
    with pytest.raises(InvalidMessage, match=text):
        composer.reply(Message("m", {Headers.REPLY_TO: "shop"}, b""), b"", headers, None)


def test_a_body_that_is_not_json_is_refused(composer: Composer) -> None:
    with pytest.raises(InvalidMessage, match="body, of type object"):
        composer.compose(Send("billing", object()))


def test_an_endpoints_name_is_a_setting() -> None:
    assert check_endpoint_name("sales") == "sales"
    with pytest.raises(ConfigurationError, match="endpoint name has 201 characters"):
        check_endpoint_name("s" * 201)


def test_a_header_value_nested_too_deep_to_be_shown_is_refused_all_the_same() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(InvalidMessage, match="must be str to str"):
        check_headers({"a": nested})  # type: ignore[dict-item]
    while nested:  # taken apart step by step: Python frees a chain this long by recursion
        nested = nested[0]  # type: ignore[assignment]
