"""Logs of commands that run on: lines for people, or a JSON document a line for machines."""

from __future__ import annotations

import functools
import json
import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from delayline.cli.options import Command, with_options
from delayline.cli.screen import AS_LOG
from delayline.errors import CorruptHeaders
from delayline.events import LOGGER_NAME, Event, emit
from delayline.failures import brief
from delayline.message import DelayedMessage, Message
from delayline.receiving import reports

if TYPE_CHECKING:
    from types import TracebackType

logger: logging.Logger = logging.getLogger(__name__)

LOG_FORMATS: Final = ("text", "json")
LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
#: Loggers of the servers that commands start; they have no handlers of their own.
SERVERS: Final = ("uvicorn",)
#: Libraries whose INFO is about each request, or each start of a server.
LOUD_LIBRARIES: Final = ("azure.core", *SERVERS)
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


class LogOnStderr:
    """The log of a command on standard error: delayline's records, and in JSON those of everything in the process.

    As JSON it also has warnings, exceptions that nothing has caught, and what the command would print for people.

    Args:
        level: The lowest level that is logged.
        log_format: `text` or `json`.
    """

    def __init__(self, level: str, log_format: str) -> None:
        self.as_json: bool = log_format == "json"
        self._level = logging.getLevelNamesMapping()[level.upper()]
        self._handler = logging.StreamHandler()
        self._handler.setFormatter(
            JsonFormatter() if self.as_json else logging.Formatter("%(asctime)s %(levelname)-8s %(message)s")
        )
        logging.getLogger(LOGGER_NAME).setLevel(self._level)
        for name in LOUD_LIBRARIES:
            logging.getLogger(name).setLevel(max(self._level, logging.WARNING))
        if self.as_json:
            logging.captureWarnings(capture=True)
            logging.getLogger().setLevel(max(self._level, logging.INFO))
            sys.excepthook = _log_uncaught
            threading.excepthook = lambda failed: _log_uncaught(failed.exc_type, failed.exc_value, failed.exc_traceback)
        self.keep()

    def keep(self, endpoint: str | None = None, *, handled: bool = False) -> None:
        """Log on, also if an imported module has set up logging of its own.

        Args:
            endpoint: The endpoint that JSON lines name.
            handled: Whether handled messages are logged at INFO, instead of DEBUG.
        """
        if self.as_json:
            self._handler.setFormatter(JsonFormatter(endpoint))
        names = ("",) if self.as_json else (LOGGER_NAME, *SERVERS)
        replaced = self.as_json and self._handler not in logging.getLogger().handlers and logging.getLogger().handlers
        for name in (LOGGER_NAME, *SERVERS) if replaced else names:
            logging.getLogger(name).addHandler(self._handler)
        if handled:
            receiving = logging.getLogger(reports.__name__)
            receiving.setLevel(logging.DEBUG)
            receiving.addFilter(HandledAtInfo(debug=self._level == logging.DEBUG))


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if error is None or issubclass(kind, KeyboardInterrupt):
        return
    text = "ended by an error that nothing has caught: %s"
    emit(logger, logging.CRITICAL, Event.UNCAUGHT, text, brief(error), exception=error.with_traceback(trace))


def log_options(command: Command) -> Command:
    """Give a command `log`, which it logs to from its first line on, with --verbose, --log-level and --log-format."""

    @functools.wraps(command)
    def with_log(*args: object, verbose: bool, log_level: str, log_format: str, **arguments: Any) -> Any:  # noqa: ANN401 - click's
        log = LogOnStderr("debug" if verbose else log_level, log_format)
        click.get_current_context().meta[AS_LOG] = log.as_json
        return command(*args, log=log, **arguments)

    return with_options(
        with_log,
        click.option("--verbose", "-v", is_flag=True, help="Log every step: the same as --log-level debug."),
        click.option(
            "--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True, help="What to log."
        ),
        click.option(
            "--log-format",
            type=click.Choice(LOG_FORMATS),
            default="text",
            show_default=True,
            help="Lines for people, or a JSON document a line.",
        ),
    )
