"""The arithmetic of RabbitMQ's delay levels: the reference's vectors, and what holds for any delay."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayline.errors import InvalidDueTime, InvalidMessage
from delayline.rabbitmq import levels

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DELAYS = st.integers(0, levels.MAXIMUM_DELAY)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)

#: Delay, destination, bits without dots, level.
VECTORS: Final = [
    (0, "some-address", "0000000000000000000000000000", 0),
    (0, "", "0000000000000000000000000000", 0),
    (0, "exotic-😊-address", "0000000000000000000000000000", 0),
    (1, "some-address", "0000000000000000000000000001", 0),
    (2, "some-address", "0000000000000000000000000010", 1),
    (3, "🔥-unicode", "0000000000000000000000000011", 1),
    (10, "some-address", "0000000000000000000000001010", 3),
    (15, "small-delay", "0000000000000000000000001111", 3),
    (28, "short-delay", "0000000000000000000000011100", 4),
    (268435454, "almost-max", "1111111111111111111111111110", 27),
    (268435455, "some-address", "1111111111111111111111111111", 27),
    (-123, "some-address", "0000000000000000000000000000", 0),
    (59, "a", "0000000000000000000000111011", 5),
    (60, "a", "0000000000000000000000111100", 5),
    (61, "a", "0000000000000000000000111101", 5),
    (3600, "a", "0000000000000000111000010000", 11),
    (86400, "a", "0000000000010101000110000000", 16),
    (604800, "a", "0000000010010011101010000000", 19),
    (2592000, "a", "0000001001111000110100000000", 21),
    (31536000, "a", "0001111000010011001110000000", 24),
    (134217727, "a", "0111111111111111111111111111", 26),
    (134217728, "a", "1000000000000000000000000000", 27),
]


@pytest.mark.parametrize(("delay", "destination", "bits", "level"), VECTORS)
def test_a_delay_becomes_the_references_routing_key(delay: int, destination: str, bits: str, level: int) -> None:
    assert levels.route(delay, destination) == (level, ".".join(bits) + "." + destination)


def test_ten_seconds_to_destination_are_the_documents_example() -> None:
    key = "0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.1.0.1.0.destination"
    assert levels.route(10, "destination") == (3, key)


def matches(pattern: str, key: str) -> bool:
    """Match as a topic exchange does: * is one word, # any number of them."""
    return _matches(pattern.split("."), key.split("."))


def _matches(pattern: list[str], key: list[str]) -> bool:
    if not pattern:
        return not key
    if pattern[0] == "#":
        return any(_matches(pattern[1:], key[start:]) for start in range(len(key) + 1))
    return bool(key) and pattern[0] in ("*", key[0]) and _matches(pattern[1:], key[1:])


@given(DELAYS, st.sampled_from(["sales", "contoso.sales", "1.0.1", "é.ü"]))
def test_the_levels_that_any_delay_visits_add_up_to_it(delay: int, destination: str) -> None:
    # Given the level it enters at, and topic exchanges that are bound as the reference says
    level, key = levels.route(delay, destination)

    # When it goes down through them
    waited = 0
    for below in range(level, -1, -1):
        waits, passes = matches(levels.waiting_key(below), key), matches(levels.passing_key(below), key)
        assert waits != passes
        if waits:
            assert waited + levels.remaining(delay, below) == delay
            waited += 1 << below

    # Then it has waited for exactly its delay, and is delivered
    assert waited == delay
    assert matches(levels.destination_key(destination), key)


@given(DELAYS, NAMES)
def test_a_routing_key_contains_its_delay_and_destination(delay: int, destination: str) -> None:
    assert levels.parse(levels.route(delay, destination)[1]) == (delay, destination)


@pytest.mark.parametrize(
    "key", ["", "sales", "0.1.sales", "2." * 28 + "sales", "0." * 27 + "sales", "\u0660." * 28 + "a"]
)
def test_a_key_without_28_bits_is_none_of_the_levels(key: str) -> None:
    assert levels.parse(key) is None


@given(st.timedeltas(timedelta(0), timedelta(seconds=levels.MAXIMUM_DELAY)))
def test_seconds_are_rounded_up_by_less_than_one(delay: timedelta) -> None:
    late = timedelta(seconds=levels.seconds_of(delay)) - delay
    assert timedelta(0) <= late < timedelta(seconds=1)


@pytest.mark.parametrize(("delay", "seconds"), [(0, 0), (0.001, 1), (9.0, 9), (9.2, 10), (-5, 0), (0.999999, 1)])
def test_the_references_roundings(delay: float, seconds: int) -> None:
    assert levels.seconds_until(NOW + timedelta(seconds=delay), NOW) == seconds
    assert levels.seconds_of(timedelta(seconds=delay)) == seconds


def test_the_first_year_is_now() -> None:
    assert levels.seconds_until(datetime(1, 1, 1, tzinfo=UTC), NOW) == 0


def test_the_longest_delay_is_taken_and_a_microsecond_more_is_refused() -> None:
    longest = timedelta(seconds=levels.MAXIMUM_DELAY)
    assert levels.checked_until(NOW + longest, NOW) == 268_435_455
    text = r"due at '2034-07-04T21:24:15\.000001\+00:00', in '3106\.21:24:15\.000001', .* at most '3106\.21:24:15'"
    with pytest.raises(InvalidDueTime, match=text):
        levels.checked_until(NOW + longest + timedelta(microseconds=1), NOW)


@pytest.mark.parametrize("destination", ["s" * 199, "ü" * 99, "😊" * 49, "dots.in.it", "a#b", "*a", "MixedCase"])
def test_a_destination_of_199_bytes_at_most_is_taken(destination: str) -> None:
    levels.check_destination(destination)
    assert len(levels.route(levels.MAXIMUM_DELAY, destination)[1].encode()) <= 255


@pytest.mark.parametrize("destination", ["s" * 200, "ü" * 100, "😊" * 50, ""])
def test_a_destination_that_does_not_fit_beside_the_bits_is_refused(destination: str) -> None:
    with pytest.raises(InvalidMessage, match=f"has {len(destination.encode())} bytes"):
        levels.check_destination(destination)


@pytest.mark.parametrize("destination", ["*", "#", "sales.*", "#.sales", "a.#.b"])
def test_a_destination_that_is_a_pattern_is_refused(destination: str) -> None:
    with pytest.raises(InvalidMessage, match="pattern"):
        levels.check_destination(destination)


def test_a_dotted_suffix_of_another_name_gets_its_messages_too() -> None:
    names = ["Sales", "Contoso.Sales", "x.Contoso.Sales", "sales", "Contoso", "PreSales", "Sales.x", "Sales"]
    assert list(levels.crossings(names)) == [
        ("Sales", "Contoso.Sales"),
        ("Contoso.Sales", "x.Contoso.Sales"),
        ("Sales", "x.Contoso.Sales"),
    ]


@given(st.lists(st.text("ab.", min_size=1, max_size=7).filter(lambda name: ".." not in name), max_size=6))
def test_crossings_equal_the_matches_of_a_topic_exchange(names: list[str]) -> None:
    distinct = set(names)
    matched = {
        (receiver, meant)
        for receiver in distinct
        for meant in distinct - {receiver}
        if matches(levels.destination_key(receiver), levels.route(5, meant)[1])
    }
    assert set(levels.crossings(names)) == matched


@pytest.mark.parametrize(
    ("prefix", "level", "delivery"),
    [
        (levels.V1_PREFIX, "nsb.delay-level-07", "nsb.delay-delivery"),
        (levels.V2_PREFIX, "nsb.v2.delay-level-07", "nsb.v2.delay-delivery"),
        ("acme", "acme.delay-level-07", "acme.delay-delivery"),
    ],
)
def test_names_match_the_version(prefix: str, level: str, delivery: str) -> None:
    assert (levels.level_name(prefix, 7), levels.delivery_name(prefix)) == (level, delivery)


def test_binding_keys_are_the_references() -> None:
    assert (levels.waiting_key(27), levels.passing_key(27)) == ("1.#", "0.#")
    assert (levels.waiting_key(26), levels.passing_key(26)) == ("*.1.#", "*.0.#")
    assert (levels.waiting_key(0), levels.passing_key(0)) == ("*." * 27 + "1.#", "*." * 27 + "0.#")
