"""What arguments must be, said in the same words wherever they are given."""

from __future__ import annotations

from datetime import timedelta

from delayline.errors import ConfigurationError


def whole_number(name: str, value: int, *, at_least: int) -> int:
    """Return the value; raises ConfigurationError unless it is an int, no bool, of `at_least` or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigurationError(f"{name} must be a whole number of {at_least} or more, not {value!r}")
    return value


def time_span(name: str, value: timedelta) -> timedelta:
    """Return the value; raises ConfigurationError unless it is a timedelta longer than zero."""
    if not isinstance(value, timedelta) or value <= timedelta(0):
        raise ConfigurationError(f"{name} must be a timedelta longer than zero, not {value!r}")
    return value
