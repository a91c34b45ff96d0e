"""The checks that every constructor shares."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest

from delayline import ConfigurationError
from delayline.checks import time_span, whole_number


def test_valid_values_are_returned() -> None:
    assert whole_number("batch_size", 1, at_least=1) == 1
    assert time_span("bucket", timedelta(microseconds=1)) == timedelta(microseconds=1)


@pytest.mark.parametrize("value", [0, True, 1.0, "1", None])
def test_a_whole_number_is_an_int_that_is_large_enough(value: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigurationError, match=f"batch_size must be .* of 1 or more, not {re.escape(repr(value))}"):
        whole_number("batch_size", value, at_least=1)


@pytest.mark.parametrize("value", [timedelta(0), timedelta(-1), 1, None])
def test_a_time_span_is_longer_than_zero(value: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigurationError, match=f"bucket must be .* zero, not {re.escape(repr(value))}"):
        time_span("bucket", value)
