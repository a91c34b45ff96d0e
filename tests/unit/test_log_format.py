"""The JSON lines of `delayline run --log-format json`."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

import pytest

from delayline.cli.log_format import JsonFormatter
from delayline.events import Event, emit
from delayline.message import DelayedMessage, Message

DUE = datetime(2026, 3, 1, 12, tzinfo=UTC)
TRACE = "0af7651916cd43dd8448eb211c80319c"


def logged(text: str, *values: object, exception: BaseException | None = None, **facts: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the JSON of what `emit` logs."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(JsonFormatter().format(record))

    logger = logging.Logger("delayline.test")
    logger.addHandler(Lines())
    emit(logger, logging.WARNING, Event.HANDLER_FAILED, text, *values, exception=exception, **facts)
    [line] = lines
    assert "\n" not in line
    document: dict[str, Any] = json.loads(line)
    return document


def test_a_record_has_event_text_and_message() -> None:
    message = Message("m-1", {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}, b"")
    document = logged("Attempt %d failed", 3, message=message, count=3)
    assert datetime.fromisoformat(document.pop("time")).tzinfo == UTC
    assert document == {
        "level": "warning",
        "logger": "delayline.test",
        "text": "Attempt 3 failed",
        "event": "receive.handler_failed",
        "message_id": "m-1",
        "trace_id": TRACE,
        "count": 3,
    }


def test_delayed_messages_and_batches_are_named() -> None:
    waiting = DelayedMessage(Message("w", {}, b""), "billing", DUE)
    document = logged("later", message=waiting)
    assert (document["message_id"], document["destination"]) == ("w", "billing")
    assert datetime.fromisoformat(document["due"]) == DUE
    batch = logged("many", messages=tuple(DelayedMessage(Message(str(n), {}, b""), "q", DUE) for n in range(50)))
    assert (batch["messages"], batch["message_ids"]) == (50, [str(n) for n in range(10)])


@pytest.mark.parametrize("odd", ["\ud800", "line\nbreak", "", "ü🚀", "\x00"])
def test_odd_texts_and_exceptions_are_one_line(odd: str) -> None:
    document = logged(
        "odd %s", odd, message=Message(odd or "empty", {"traceparent": odd}, b""), exception=ValueError(odd)
    )
    assert "trace_id" not in document
    assert document["exception"].startswith("ValueError")


def test_damaged_headers_leave_the_id() -> None:
    assert logged("bad", message=Message.from_encoded("m", b"{no json", b""))["message_id"] == "m"
