"""How many messages a broker may send ahead: as many as the handlers soon get to."""

from __future__ import annotations

import pytest

from delayline.rabbitmq.read_ahead import ReadAhead


def after(*seconds: float) -> ReadAhead:
    """Return what was measured of messages that were handled for so long, one after the other, up to second 0."""
    ahead = ReadAhead()
    for tag, lasted in enumerate(seconds):
        ahead.begin(tag, -lasted)
        ahead.end(tag, 0.0)
    return ahead


@pytest.mark.parametrize(
    ("lasted", "at_once", "number"), [(0.001, 1, 2), (0.001, 32, 64), (0.3, 1, 1), (3.0, 1, 0), (3.0, 32, 5)]
)
def test_as_many_as_are_handled_soon(lasted: float, at_once: int, number: int) -> None:
    assert after(lasted).number(at_once, 0.0) == number


def test_none_before_one_was_handled() -> None:
    assert ReadAhead().number(32, 0.0) == 0


def test_a_slow_one_counts_for_a_while() -> None:
    """Given a slow message, when quick ones follow, then it takes hundreds of them until it is forgotten."""
    assert after(5.0, *[0.001] * 50).number(1, 0.0) == 0
    assert after(5.0, *[0.001] * 500).number(1, 0.0) == 2


def test_one_that_is_still_handled_counts() -> None:
    ahead = after(0.001)
    ahead.begin(7, 0.0)
    assert ahead.number(1, 10.0) == 0
    ahead.forget()
    assert ahead.number(1, 10.0) == 2


def test_the_end_of_one_that_was_not_handled_counts_for_nothing() -> None:
    ahead = ReadAhead()
    ahead.end(1, 100.0)
    assert ahead.number(1, 0.0) == 0
