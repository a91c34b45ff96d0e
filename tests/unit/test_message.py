from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayline import DelayedMessage, Headers, InvalidMessage, Message
from delayline.clock import from_microseconds
from delayline.errors import CorruptBody, CorruptHeaders
from delayline.message import decode_headers, encode_body, encode_headers, from_wire_time, new_message_id, to_wire_time

ANY_TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates and astral characters too
ZONES = st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))


@given(st.datetimes(datetime(1, 1, 3), datetime(9999, 12, 29), timezones=ZONES))  # noqa: DTZ001 - the bounds are naive
def test_wire_time_round_trips_whatever_the_zone(instant: datetime) -> None:
    text = to_wire_time(instant)
    assert len(text) == 28
    assert from_wire_time(text) == instant
    assert from_wire_time(text).tzinfo is UTC


def test_wire_time_is_the_references_vector() -> None:
    instant = datetime(2026, 4, 29, 22, 11, 26, 340982, tzinfo=UTC)
    assert to_wire_time(instant) == "2026-04-29 22:11:26:340982 Z"
    assert from_wire_time("2026-04-29 22:11:26:340982 Z") == instant


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2026-04-29T22:11:26.340982Z",
        "2026-04-29 22:11:26:34098 Z",
        "2026-4-29 22:11:26:340982 Z",
        "2026-04-29 22:11:26:340982 ZZ",
        "2026-13-29 22:11:26:340982 Z",
        "2026-04-29 2x:11:26:340982 Z",
    ],
)
def test_invalid_wire_times_are_refused_as_by_dotnet(text: str) -> None:
    with pytest.raises(ValueError, match=r"String was not recognized as a valid DateTime") as caught:
        from_wire_time(text)
    assert repr(text) in str(caught.value)


@given(st.dictionaries(ANY_TEXT, ANY_TEXT))
def test_headers_round_trip_with_astral_characters_and_lone_surrogates(headers: dict[str, str]) -> None:
    stored = Message("m", headers, b"").encoded_headers
    assert dict(Message.from_encoded("m", stored, b"").headers) == headers
    assert decode_headers(stored, "m") == headers


def test_headers_with_nothing_stored_are_empty_and_null_values_become_empty_text() -> None:
    assert decode_headers(b"", "m") == {}
    assert decode_headers(b'{"a": null, "b": 1}', "m") == {"a": "", "b": "1"}


@pytest.mark.parametrize(
    "stored", [b"{", b"[]", b"1", b"\xff\xfe", b"[" * 100_000, b'{"a":' + b"9" * 5000 + b"}"], ids=repr
)
def test_headers_that_cannot_be_read_are_corrupt_and_named(stored: bytes) -> None:
    message = Message.from_encoded("the-id", stored, b"")
    with pytest.raises(CorruptHeaders, match="'the-id' has corrupted headers"):
        _ = message.headers
    assert message.encoded_headers is stored  # and still moves, byte for byte


def test_headers_are_read_only() -> None:
    message = Message("m", {"a": "1"}, b"")
    with pytest.raises(TypeError):
        message.headers["a"] = "2"  # type: ignore[index]


def test_with_headers_sets_after_it_leaves_out() -> None:
    message = Message("m", {"a.x": "1", "b": "2"}, b"body")
    changed = message.with_headers({"a.y": "3"}, without=("a.",))
    assert (changed.id, dict(changed.headers), changed.body) == ("m", {"a.y": "3", "b": "2"}, b"body")
    assert dict(message.headers) == {"a.x": "1", "b": "2"}
    assert dict(message.with_headers({"b": "4"}).headers) == {"a.x": "1", "b": "4"}


def test_messages_compare_by_value() -> None:
    one = Message("m", {"a": "1"}, b"x")
    same = Message.from_encoded("m", b'{"a":"1"}', b"x")
    assert one == same
    assert hash(one) == hash(same)
    assert one != Message("m", {"a": "1"}, b"y")
    assert one != "m"
    assert repr(one) == "Message(id='m', body=1 bytes)"


def test_text_and_json_ignore_a_byte_order_mark() -> None:
    message = Message("m", {Headers.CONTENT_TYPE: "application/json"}, b'\xef\xbb\xbf{"a": 1}')
    assert message.text == '{"a": 1}'
    assert message.json() == {"a": 1}
    assert message.content_type == "application/json"
    assert Message("m", {}, b"").content_type == "application/octet-stream"


def test_a_delayed_message_has_its_messages_id() -> None:
    assert DelayedMessage(Message("m", {}, b""), "out", datetime(2026, 1, 1, tzinfo=UTC)).id == "m"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    )
)
def test_a_body_that_is_neither_bytes_nor_text_is_json(body: object) -> None:
    encoded, content_type = encode_body(body)
    if isinstance(body, str):
        assert (encoded.decode(), content_type) == (body, "text/plain; charset=utf-8")
    else:
        assert (json.loads(encoded), content_type) == (body, "application/json")


def test_a_body_of_bytes_is_left_alone() -> None:
    assert encode_body(b"\x00\xff") == (b"\x00\xff", "application/octet-stream")


def _endless() -> list[object]:
    loop: list[object] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    "body",
    [pytest.param(object(), id="object"), {"a": [object]}, float("nan"), _endless(), {(1, 2): 3}, "\ud800"],
    ids=ascii,
)
def test_a_body_that_cannot_be_encoded_is_refused(body: object) -> None:
    with pytest.raises(InvalidMessage, match=r"^body.* (cannot be written as JSON|cannot be encoded as UTF-8): "):
        encode_body(body)


@given(st.integers(0, 2**47), st.integers(1, 2**40))
def test_message_ids_sort_by_time(milliseconds: int, later: int) -> None:
    def at(value: int) -> datetime:
        return from_microseconds(min(value * 1000, 250_000_000_000_000_000))

    first, second = at(milliseconds), at(milliseconds + later)
    if first < second:
        assert new_message_id(first) < new_message_id(second)


def test_message_ids_are_uuids_of_version_7_and_unique() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    ids = {new_message_id(now) for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(id) == 36 and id[14] == "7" and id[19] in "89ab" and id.count("-") == 4 for id in ids)


@pytest.mark.parametrize("body", [b"\xff\xfe", b"{", b"", b"[" * 200_000, b"nan!"])
def test_a_body_that_is_not_json_is_an_error_of_delayline_s(body: bytes) -> None:
    with pytest.raises(CorruptBody, match="body of message 'm'"):
        Message("m", {}, body).json()


def test_a_body_that_is_not_text_is_an_error_of_delayline_s() -> None:
    with pytest.raises(CorruptBody, match=r"body of message 'm' is not UTF-8 text.*message\.body"):
        _ = Message("m", {}, b"\xff").text


def test_headers_that_are_subclasses_of_str_are_encoded_as_text() -> None:
    class Text(str):
        __slots__ = ()

    assert encode_headers({Text("name"): Text("value")}) == b'{"name":"value"}'


@given(st.dictionaries(ANY_TEXT, ANY_TEXT))
def test_headers_are_encoded_as_the_standard_library_does(headers: dict[str, str]) -> None:
    expected = json.dumps(headers, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    assert encode_headers(headers) == expected
