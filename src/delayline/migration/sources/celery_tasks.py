"""Conversion of Celery tasks: the body becomes the message's, headers are kept, other options rejected."""

from __future__ import annotations

import json
import re
import reprlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from delayline.message import Headers
from delayline.rabbitmq.levels import parse

if TYPE_CHECKING:
    from collections.abc import Mapping

JSON_TYPE: Final = "application/json"
CELERY_PREFIX: Final = "Celery."
#: Options of a task that start other tasks after it.
FOLLOWERS: Final = ("callbacks", "errbacks", "chain", "chord")
#: kombu writes a 29th bit of a delay beyond its range, and all of them are read wrongly.
TOO_MANY_BITS: Final = re.compile(r"[01]\.")
#: How many of the things that follow the arguments in a task's body.
PARTS: Final = 3


class NoMessage(Exception):
    """A task that cannot become a message; the text is the reason."""


class Task(NamedTuple):
    """A task as a message."""

    id: str
    due: datetime
    headers: str
    """As JSON."""


def task_of(fields: Mapping[str, Any], content_type: str | None, body: bytes) -> Task:
    """Return the task of protocol 2 with the headers. Raises NoMessage."""
    name, task_id = fields.get("task"), fields.get("id")
    if not isinstance(name, str) or not name or not isinstance(task_id, str) or not task_id:
        raise NoMessage("it is not a task of Celery's protocol 2: its header 'task' or 'id' is missing")
    if fields.get("expires") is not None:
        raise NoMessage(f"it expires at {_shown(fields['expires'])}, and its message would not: let Celery run it")
    _check_body(fields.get("compression"), content_type, body)
    due = due_of(fields.get("eta"))
    try:
        kept = _headers(fields)
        encoded = json.dumps({Headers.MESSAGE_ID: task_id, Headers.CONTENT_TYPE: JSON_TYPE, **kept}, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise NoMessage(f"its headers cannot be kept: {error}") from error
    return Task(task_id, due, encoded)


def _headers(fields: Mapping[str, Any]) -> dict[str, str]:
    return {
        f"{CELERY_PREFIX}{''.join(word.capitalize() for word in key.split('_'))}": _text(value)
        for key, value in fields.items()
        if value is not None and not key.startswith("x-")
    }


def due_of(eta: Any) -> datetime:  # noqa: ANN401 - whatever a header holds
    """Return when a task is due. Raises NoMessage without a time or zone: the app's zone is not in the task."""
    if eta is None:
        raise NoMessage("it has no eta: its due time is unknown")
    try:
        due = datetime.fromisoformat(eta)
        if due.tzinfo is not None:
            return due.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        raise NoMessage(f"its eta {_shown(eta)} is not a time") from None
    raise NoMessage(f"its eta {_shown(eta)} has no zone: set enable_utc in the Celery app, or let Celery run it")


def queue_in(routing_key: str) -> str:
    """Return the routing key without the bits of a delay; older kombus put the bits of a retry before the first.

    Raises NoMessage for a delay that was garbled.
    """
    while (parsed := parse(routing_key)) is not None:
        routing_key = parsed[1]
    if TOO_MANY_BITS.match(routing_key):
        raise NoMessage("its routing key has more than 28 bits: kombu garbles delays of more than 8.5 years")
    return routing_key


def _check_body(compression: Any, content_type: str | None, body: bytes) -> None:  # noqa: ANN401 - as above
    if compression is not None:
        raise NoMessage(f"its body is compressed ({_shown(compression)}): let Celery run it")
    if content_type != JSON_TYPE:
        raise NoMessage(f"its arguments are {content_type or 'of no known type'}, no JSON: let Celery run it")
    try:
        partitions = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NoMessage(f"its body is not JSON: {error}") from error
    if not isinstance(partitions, list) or len(partitions) != PARTS or not isinstance(partitions[2], dict):
        raise NoMessage("its body is none of Celery's protocol 2, arguments and what follows")
    follows = [name for name in FOLLOWERS if partitions[2].get(name)]
    if follows:
        raise NoMessage(f"it goes on with its {' and '.join(follows)} when it is done: let Celery run it")


def _text(value: Any) -> str:  # noqa: ANN401 - whatever AMQP has
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _shown(value: Any) -> str:  # noqa: ANN401 - as above
    return reprlib.repr(value)[:60]
