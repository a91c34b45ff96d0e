"""Filters of messages: how they are written, what they refuse, and which messages fulfil them."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayline import ConfigurationError, Headers, InvalidDueTime, Message, MessageFilter
from delayline.filters import body_pattern_of, literal, pattern_of
from delayline.message import MAXIMUM_ID_LENGTH, encode_headers

NOW = datetime(2026, 11, 27, 5, tzinfo=UTC)
DAY = timedelta(days=1)


def parsed(*written: str) -> MessageFilter:
    return MessageFilter.parse(written, NOW)


def message(message_id: str = "order-17", **headers: str) -> Message:
    return Message(message_id, {name.replace("_", "."): value for name, value in headers.items()}, b"{}")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("destination=billing", MessageFilter(destination="billing")),
        (" destination = billing , type = Reminder ", MessageFilter(destination="billing", message_type="Reminder")),
        ("id=a", MessageFilter(message_id="a")),
        ("id-prefix=a", MessageFilter(message_id="a*")),
        ("id-prefix=a*", MessageFilter(message_id=r"a\**")),
        ("header=Tenant", MessageFilter(header="Tenant")),
        ("header=Tenant:acme", MessageFilter(header="Tenant", header_value="acme")),
        ("header=:acme", MessageFilter(header_value="acme")),
        ("correlation=c,conversation=d", MessageFilter(correlation="c", conversation="d")),
        ("body=please pay", MessageFilter(body="please pay")),
        ("exception=ValueError", MessageFilter(exception="ValueError")),
        (r"id=a\,b\*c\\d\e", MessageFilter(message_id=r"a,b\*c\\d\e")),
        ("id=a\\", MessageFilter(message_id="a\\")),
        ("due=<2026-12-01", MessageFilter(due_before=datetime(2026, 12, 1, tzinfo=UTC))),
        ("due=>=now", MessageFilter(due_from=NOW)),
        ("due=now..2h", MessageFilter(due_from=NOW, due_before=NOW + timedelta(hours=2))),
        ("due=-1d..", MessageFilter(due_from=NOW - DAY)),
        ("due=..2026-11-28T05:00:00Z", MessageFilter(due_before=NOW + DAY)),
        ("", MessageFilter()),
        (" , ", MessageFilter()),
    ],
)
def test_a_written_filter_means_its_conditions(written: str, expected: MessageFilter) -> None:
    assert parsed(written) == expected
    assert parsed(written).names_nothing == (expected == MessageFilter())


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("billing", "is no condition"),
        ("colour=red", "'colour' is nothing that a filter can ask for"),
        ("destination=", "would mean every message"),
        ("destination=a,destination=b", "given twice"),
        ("id=a,id-prefix=b", "id and id-prefix are both given"),
        ("id=a,b", "'b' is no condition"),
        ("due=2026-12-01", "due=<TIME"),
        ("due=..", "due=<TIME"),
        ("due=<=2026-12-01", "due=<TIME"),
        ("due=<2026-13-01", "'2026-13-01' is not understood"),
        ("due=<2026-12-01T00:00", "no time zone"),
        ("due=<soon", "'soon' is not understood"),
        ("due=<99999999999w", "is not understood"),
        ("due=2026-12-02..2026-12-01", "must be later"),
        ("x" * 20_000, "at most 10,000 characters"),
    ],
)
def test_a_wrong_filter_is_refused_with_what_to_write(written: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        parsed(written)


def test_conditions_of_several_texts_hold_together() -> None:
    assert parsed("destination=billing", "type=Reminder") == parsed("destination=billing,type=Reminder")
    with pytest.raises(ConfigurationError, match="given twice"):
        parsed("destination=billing", "destination=shipping")


def test_characters_that_no_message_can_have_are_refused() -> None:
    for text in ("a\0b", "\ud800"):
        with pytest.raises(ConfigurationError, match="a character that no message can have"):
            MessageFilter(message_id=text)


def test_an_empty_condition_and_a_naive_time_are_refused_in_code_too() -> None:
    with pytest.raises(ConfigurationError, match="message_id is empty"):
        MessageFilter(message_id="")
    with pytest.raises(InvalidDueTime, match="no time zone"):
        MessageFilter(due_from=datetime(2026, 12, 1))  # noqa: DTZ001 - what is refused


@pytest.mark.parametrize(
    ("written", "fulfils"),
    [
        ("", True),
        ("id=order-17", True),
        ("id=order-1", False),
        ("id-prefix=order-", True),
        ("id-prefix=Order-", False),
        ("destination=billing", True),
        ("destination=bill", False),
        ("destination=bill*", True),
        ("destination=*ill*", True),
        ("destination=*ill", False),
        (r"destination=\*ill\*", False),
        ("id=*-1*", True),
        ("type=Reminder", True),
        ("type=Shop.Reminder", True),
        ("type=Cancelled", True),
        ("type=Shop.Orders+Cancelled", True),
        ("type=Remind", False),
        ("type=Remind*", True),
        ("type=Shop", False),
        ("type=reminder", False),
        ("header=Tenant", True),
        ("header=Tenant:acme", True),
        ("header=Tenant:ac", False),
        ("header=Tenant:ac*", True),
        ("header=Tenant:other", False),
        ("header=Missing", False),
        ("header=:acme", True),
        ("header=:nowhere", False),
        ("correlation=c-1", True),
        ("correlation=c", False),
        ("correlation=c*", True),
        ("conversation=talk", True),
        ("conversation=Talk", False),
        ("body=pay", True),
        ("body=Pay", False),
        ("body=please*Müller", True),
        ("body=Müller*please", False),
        (r"body=\*", True),
        (r"body=please\*", False),
        ("body=*", True),
        ("exception=ValueError", True),
        ("exception=builtins.ValueError", True),
        ("exception=Error", False),
        ("exception=*Error", True),
        ("exception=KeyError", False),
        ("due=now..1s", True),
        ("due=>=1s", False),
        ("due=<now", False),
        ("destination=billing,type=Reminder,header=Tenant:acme,due=now..", True),
        ("destination=billing,type=Reminder,header=Tenant:other", False),
    ],
)
def test_a_message_fulfils_all_conditions_or_is_left_out(written: str, fulfils: bool) -> None:
    headers = {
        Headers.ENCLOSED_MESSAGE_TYPES: "Shop.Reminder, Shop, Version=1.0.0.0;Shop.Orders+Cancelled, Shop",
        "Tenant": "acme",
        Headers.EXCEPTION_TYPE: "builtins.ValueError",
        Headers.CORRELATION_ID: "c-1",
        Headers.CONVERSATION_ID: "talk",
    }
    for body in ('"please pay* Müller"'.encode(), b'\xff"please pay* M\\u00fcller"'):
        assert parsed(written).matches(Message("order-17", headers, body), "billing", NOW) is fulfils


def test_damaged_headers_and_a_missing_due_time_fulfil_no_condition() -> None:
    damaged = Message.from_encoded("order-17", b"{", b"")
    assert parsed("id=order-17").matches(damaged, "billing")
    assert not parsed("header=:acme").matches(damaged, "billing")
    assert not parsed("due=<9999-01-01").matches(damaged, "billing")


characters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
texts = st.text(characters, min_size=1, max_size=MAXIMUM_ID_LENGTH).map(str.strip).filter(bool)


@given(texts, texts, st.datetimes(timezones=st.just(UTC)))
def test_a_filter_reads_back_as_it_is_written(message_id: str, kind: str, due: datetime) -> None:
    written = MessageFilter(message_id=literal(message_id), message_type=f"*{literal(kind)}", due_from=due)
    assert parsed(str(written)) == written


@given(texts, texts, texts)
def test_a_pattern_fits_what_it_is_made_of_and_a_text_only_itself(start: str, middle: str, end: str) -> None:
    assert pattern_of(literal(start)).matches(start)
    assert pattern_of(literal(start)).matches(end) is (start == end)
    assert pattern_of(f"{literal(start)}*{literal(end)}").matches(start + middle + end)
    assert not pattern_of(f"{literal(start)}*{literal(end)}").matches(start[:-1])
    read_back = parsed(str(MessageFilter(message_id=start))).message_id
    assert read_back is not None
    assert pattern_of(read_back).matches(middle) is pattern_of(start).matches(middle)


@given(texts, texts, texts)
def test_encoded_headers_have_the_needles_of_every_filter_that_they_fulfil(start: str, middle: str, end: str) -> None:
    wanted = MessageFilter(correlation=f"{literal(start)}*{literal(end)}", header=middle)
    headers = {Headers.CORRELATION_ID: start + middle + end, middle: end}
    message = Message("a", headers, b"")
    assert wanted.matches(message, "")
    as_json = (json.dumps(headers, ensure_ascii=escaped).encode() for escaped in (False, True))
    for encoded in (encode_headers(headers), *as_json):
        assert all(needle in encoded for needle in wanted.header_needles)


@given(texts, texts, st.binary())
def test_a_body_has_what_is_around_a_star(start: str, end: str, between: bytes) -> None:
    pattern = body_pattern_of(f"{literal(start)}*{literal(end)}")
    for form in pattern.forms:
        assert pattern.matches(b"\0" + between.join(form) + between)
