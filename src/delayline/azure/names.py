"""Names on Azure: queues, the table and container of an endpoint, and row keys."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, NamedTuple

from delayline.clock import ONE_SECOND
from delayline.errors import ConfigurationError, InvalidDueTime

#: 3 to 63 lower-case letters, digits and single hyphens, none of them at either end (Azure's rule for queues).
QUEUE: Final = re.compile(r"(?=.{3,63}\Z)[a-z0-9]+(?:-[a-z0-9]+)*")
#: Names that are valid for both a table and, in lower case, a container.
TABLE_PATTERN: Final = re.compile(r"[A-Za-z][A-Za-z0-9]{2,62}")
#: Ids that are row keys as they are; they keep their order there. Azure refuses `/ \\ # ?` and control characters.
PLAIN_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,250}")
#: Types of events and names of endpoints that are keys as they are, as .NET writes them.
PLAIN_TOPIC: Final = re.compile(r"(?!~)[^/\\#?%\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,250}")
ROW_KEY: Final = re.compile(r"([0-9]{14})(?:_.*)?", re.DOTALL)
#: Sorts behind every key that begins with a digit; the keys before it are messages.
BEHIND_DIGITS: Final = ":"
#: Number of partitions of the index by id. Their keys are letters, which no poller reads as due times.
ID_PARTITIONS: Final = 4
INDEX: Final = "id"
#: Sorts behind the keys of the index's partitions.
BEHIND_INDEX: Final = "ie"
LAST_SECOND: Final = datetime.max.replace(microsecond=0, tzinfo=UTC)


Sanitizer = Callable[[str], str]
"""Makes the name of a queue of an address: of an endpoint's name, or a destination."""


class Key(NamedTuple):
    """The key of an entity."""

    partition: str
    row: str


def queue_name(address: str) -> str:
    """Return the queue of an address, in lower case; raises ConfigurationError for a name that Azure cannot have."""
    name = address.lower()
    if QUEUE.fullmatch(name) is None:
        raise ConfigurationError(
            f"Azure Storage can have no queue named {address!r}: use 3 to 63 letters, digits and single hyphens, "
            "beginning and ending with a letter or digit, as in contoso-sales. For names with dots give the transport "
            "queue_name_sanitizer='dots-to-hyphens'"
        )
    return name


def dots_to_hyphens(address: str) -> str:
    """Return the address in lower case, with a hyphen for each dot: `contoso-sales` for `Contoso.Sales`."""
    return address.replace(".", "-").lower()


#: Sanitizers that can be named in a URL.
SANITIZERS: Final[dict[str, Sanitizer]] = {"dots-to-hyphens": dots_to_hyphens}


def checked_sanitizer(given: Sanitizer | str | None) -> Sanitizer | None:
    """Return the sanitizer, or the sanitizer of that name; raises ConfigurationError."""
    if given is None or callable(given):
        return given
    if given not in SANITIZERS:
        raise ConfigurationError(
            f"queue_name_sanitizer={given!r} must be a function from an address to a queue's name, or one of "
            f"{', '.join(SANITIZERS)}"
        )
    return SANITIZERS[given]


def can_be_queue(address: str) -> bool:
    """Return whether Azure can have a queue of that name."""
    return QUEUE.fullmatch(address.lower()) is not None


def delays_name(endpoint_name: str) -> str:
    """Return the name of an endpoint's table and container, as NServiceBus derives it."""
    return "delays" + hashlib.sha1(endpoint_name.encode(), usedforsecurity=False).hexdigest()


def checked_table_name(name: str, setting: str = "table_name") -> str:
    """Return a name given by the user, in lower case; raises ConfigurationError, which names the setting."""
    if not isinstance(name, str) or TABLE_PATTERN.fullmatch(name) is None:
        raise ConfigurationError(
            f"{setting}={name!r} cannot name a table and a container: use a letter, then 2 to 62 letters and digits"
        )
    return name.lower()


def message_key(message_id: str, due: datetime) -> Key:
    """Return the key of a message with this due time. Raises InvalidDueTime if its second is beyond year 9999.

    A key names the second before the due time: a .NET endpoint, which dispatches a row once its second is over, and
    this endpoint then agree, and neither is early.
    """
    try:
        second = _ceiling(due) - ONE_SECOND
    except OverflowError as error:
        if due.year == 1:
            second = due.replace(microsecond=0)
        else:
            raise InvalidDueTime(f"{due} cannot be rounded up to a second: use {LAST_SECOND} at the latest") from error
    digits = _digits(second)
    return Key(digits[:10], f"{digits}_{id_key(message_id)}")


def due_of(row_key: str) -> datetime | None:
    """Return when the message of a row is due; None for a key that no message has."""
    match = ROW_KEY.fullmatch(row_key)
    try:
        second = datetime.strptime(match[1], "%Y%m%d%H%M%S").replace(tzinfo=UTC) if match else None
        return second + ONE_SECOND if second is not None and "_" in row_key else second
    except (ValueError, OverflowError):
        return None


def latest_due(at: datetime) -> Key:
    """Return the greatest key that a message due not after `at` may have."""
    digits = _digits(at.astimezone(UTC).replace(microsecond=0))
    return Key(digits[:10], digits)


def latest_before(edge: datetime) -> Key:
    """Return the greatest key that a message due before `edge` may have; due times are whole seconds."""
    return latest_due(_ceiling(edge) - ONE_SECOND)


def id_key(message_id: str) -> str:
    """Return the part of a key that stands for the id: the id, or, where Azure would refuse it, its SHA-1."""
    if PLAIN_ID.fullmatch(message_id):
        return message_id
    return "~" + hashlib.sha1(message_id.encode("utf-8", "surrogatepass"), usedforsecurity=False).hexdigest()


def topic_key(name: str) -> str:
    """Return the key that stands for a type of event or an endpoint: its name, or, where Azure would refuse it, a hash.

    Some clients do not find a key with `%`.
    """
    if PLAIN_TOPIC.fullmatch(name):
        return name
    return "~" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


def place_key(message_id: str) -> Key:
    """Return the key of the index row of that message id."""
    row = id_key(message_id)
    bucket = hashlib.sha1(row.encode(), usedforsecurity=False).digest()[0] % ID_PARTITIONS
    return Key(f"{INDEX}{bucket}", row)


def _ceiling(due: datetime) -> datetime:
    due = due.astimezone(UTC)
    whole = due.replace(microsecond=0)
    return whole if whole == due else whole + ONE_SECOND


def _digits(second: datetime) -> str:
    return f"{second.year:04}{second:%m%d%H%M%S}"  # strftime does not pad years
