"""Names of messages in a store in front of the delay levels."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from delayline import Message
from delayline.rabbitmq.front import parked, released
from delayline.transport import TransportOperation

MESSAGE = Message("id", {}, b"")


def test_released_messages_are_unchanged() -> None:
    """Given an operation for the levels, when released, then its destination and due time are back."""
    operation, due = TransportOperation(MESSAGE, "sales|eu"), datetime(2040, 1, 1, tzinfo=UTC)
    assert released(parked(operation, due)) == (operation, due)


@pytest.mark.parametrize("destination", ["sales", "2035-01-01 00:80:00:000000 Z|x", "2035-13-01 00:00:00:000000 Z|x"])
def test_a_name_that_only_looks_held_is_an_ordinary_one(destination: str) -> None:
    """Given an arbitrary destination, when released, then it is neither an error nor a delayed message."""
    assert released(TransportOperation(MESSAGE, destination)) is None
