"""Refusals of a broker whose text is no UTF-8: brokers cut it at 255 bytes."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from pamqp import commands

from delayline.rabbitmq.amqp.channel import read_frames


@pytest.mark.parametrize(
    ("kind", "expected"), [((20, 40), commands.Channel.Close), ((10, 50), commands.Connection.Close)]
)
def test_a_text_that_ends_inside_a_character(kind: tuple[int, int], expected: type[Any]) -> None:
    text = ("NOT_FOUND - no queue '" + "🚚" * 100).encode()[:255]
    arguments = struct.pack(">HB", 404, len(text)) + text + struct.pack(">HH", 50, 10)
    payload = struct.pack(">HH", *kind) + arguments
    found: list[tuple[int, Any]] = []
    rest = read_frames(
        struct.pack(">BHI", 1, 3, len(payload)) + payload + b"\xce" + b"\x01", {}, lambda *method: found.append(method)
    )
    assert rest == b"\x01"
    [(number, method)] = found
    assert number == 3
    assert isinstance(method, expected)
    assert (method.reply_code, method.class_id, method.method_id) == (404, 50, 10)
    assert method.reply_text.startswith("NOT_FOUND - no queue '🚚🚚")
