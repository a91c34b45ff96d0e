"""Logs of `delayline run`: lines for people, or a JSON document a line for machines."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from delayline.errors import CorruptHeaders
from delayline.events import LOGGER_NAME, Event
from delayline.message import DelayedMessage, Message
from delayline.receiving import reports

LOG_FORMATS: Final = ("text", "json")
LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
TRACE: Final = "traceparent"
MOST_IDS: Final = 10


class JsonFormatter(logging.Formatter):
    """Formats a record as a line of JSON: time, level, logger, event, text, and the message that it is about.

    Args:
        endpoint: The endpoint that every record is about; None leaves it out.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        super().__init__()
        self._endpoint = endpoint

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; anything that JSON has no type for becomes its text."""
        document: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": record.getMessage(),
        }
        if self._endpoint is not None:
            document["endpoint"] = self._endpoint
        if (event := getattr(record, "event", None)) is not None:
            document["event"] = str(event)
        facts = getattr(record, "facts", {})
        for name, value in facts.items() if isinstance(facts, Mapping) else ():
            document |= _facts_of(name, value)
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace").decode()


def _facts_of(name: str, value: object) -> dict[str, Any]:
    match value:
        case DelayedMessage():
            return {**_facts_of(name, value.message), "destination": value.destination, "due": value.due}
        case Message():
            return {"message_id": value.id, **_trace_of(value)}
        case str() | int() | float() | None:
            return {name: value}
        case Sequence():
            ids = [message.id for message in value if isinstance(message, Message | DelayedMessage)]
            return {"message_ids": ids[:MOST_IDS], "messages": len(value)} if ids else {name: str(value)}
        case _:
            return {name: str(value)}


def _trace_of(message: Message) -> dict[str, str]:
    """Return the trace id of a W3C traceparent, `version-trace-span-flags`."""
    try:
        parts = message.headers.get(TRACE, "").split("-")
    except CorruptHeaders:
        return {}
    return {"trace_id": parts[1]} if len(parts) == 4 else {}


class HandledAtInfo(logging.Filter):
    """Raises the records of handled messages to INFO; other DEBUG records pass only if `debug`."""

    def __init__(self, *, debug: bool) -> None:
        super().__init__()
        self._debug = debug

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged."""
        if getattr(record, "event", None) is Event.HANDLED:
            record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        return self._debug or record.levelno > logging.DEBUG


def log_to_stderr(level: str, log_format: str, *, endpoint: str | None = None, handled: bool = False) -> None:
    """Log delayline's records to standard error.

    Args:
        level: The lowest level that is logged.
        log_format: `text` or `json`.
        endpoint: The endpoint that JSON lines name.
        handled: Whether handled messages are logged at INFO, instead of DEBUG.
    """
    handler = logging.StreamHandler()
    as_text = logging.Formatter("%(asctime)s %(levelname)-8s %(message)s")
    handler.setFormatter(JsonFormatter(endpoint) if log_format == "json" else as_text)
    if handled:
        receiving = logging.getLogger(reports.__name__)
        receiving.setLevel(logging.DEBUG)
        receiving.addFilter(HandledAtInfo(debug=level == "debug"))
    logger = logging.getLogger(LOGGER_NAME)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
