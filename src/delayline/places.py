"""Places where messages may be, and what looks for messages there: page by page, in the order of a key."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from delayline.failure_groups import headers_of, message_type
from delayline.message import Headers, from_wire_time

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from delayline.filters import MessageFilter
    from delayline.message import DelayedMessage, Message

#: Characters of the reason of a failure.
LONGEST_REASON: Final = 300

#: The key of a row in the order of its place, as JSON has it: a number, or several values.
Key = int | list[str]


class PlaceKind(StrEnum):
    """A kind of places, in the order in which messages go through them."""

    PENDING = "pending"
    QUEUES = "queues"
    ERRORS = "errors"
    JOURNAL = "journal"


@dataclass(frozen=True, slots=True)
class MessagePlace:
    """A place where messages may be."""

    kind: PlaceKind
    name: str
    """The endpoint, the queue, or the back end of a place for all."""

    def __str__(self) -> str:
        match self.kind:
            case PlaceKind.PENDING:
                return f"pending messages of {self.name}"
            case PlaceKind.QUEUES:
                return f"queue {self.name}" if self.name else "queues"
            case PlaceKind.ERRORS:
                return f"error queue {self.name}"
            case PlaceKind.JOURNAL:
                return f"journal of {self.name}" if self.name else "journal"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageMatch:
    """A message that a search has found, and where."""

    place: MessagePlace
    id: str
    state: str
    """`pending`, `in its queue`, `failed`, or of the journal the last event, as `handled`."""
    destination: str
    """The queue it is for; of a failed message, the queue it failed in, empty where that is unknown."""
    endpoint: str | None = None
    """The endpoint that it waits, or waited, in."""
    due: datetime | None = None
    """None where nobody knows it."""
    at: datetime | None = None
    """When it failed, or when the journal's event was."""
    message_type: str = ""
    reason: str = ""
    """Why it failed, cut."""
    size: int | None = None
    """Bytes of headers and body; None where they are not there."""


@dataclass(frozen=True, slots=True)
class PlacePage:
    """What a look at a page of a place has found."""

    matches: Sequence[MessageMatch]
    end: Key | None
    """The key behind which the next page begins; None at the end of the place."""
    looked_at: int
    """About how many messages were looked through."""
    share: float = 0.0
    """How far through the place it is, from 0 to 1."""
    missed: str | None = None
    """Why the rest of the place was not looked at, though this is the end; None if it was."""


class SearchablePlace(Protocol):
    """Messages of a place, to be looked through without changing them."""

    @property
    def place(self) -> MessagePlace:
        """The place."""
        ...

    async def page(self, wanted: MessageFilter, after: Key | None, most: int) -> PlacePage:
        """Look at some messages behind a key.

        Args:
            wanted: Which messages.
            after: The end of the page before; None for the first.
            most: How many matches to return at most.

        Raises:
            DelaylineError: The place cannot be looked through.
        """
        ...


@runtime_checkable
class SupportsSearch(Protocol):
    """Capability of stores and transports: look through their messages by the keys of their tables."""

    def searched_places(self, name: str) -> Sequence[SearchablePlace]:
        """Return the places.

        Args:
            name: Of a store the endpoint, of a transport the error queue.
        """
        ...


@runtime_checkable
class SupportsNeighbourSearch(Protocol):
    """Capability of stores: look through the messages of the other endpoints that are kept beside theirs."""

    async def neighbour_places(self) -> Sequence[SearchablePlace]:
        """Return the places, as far as they can be listed."""
        ...


def cannot_have(kind: PlaceKind, wanted: MessageFilter) -> str | None:
    """Return why no message in a place of the kind can fulfil the filter, whichever are there; None if some may."""
    if kind is PlaceKind.JOURNAL and (wanted.checks_headers or wanted.body is not None):
        return "the journal keeps no headers and bodies"
    if kind is PlaceKind.PENDING and (wanted.exception is not None or wanted.group is not None):
        return "pending messages have not failed"
    if kind in {PlaceKind.QUEUES, PlaceKind.ERRORS} and wanted.checks_due:
        return "messages in queues have no due time"
    return None


def pending_match(place: MessagePlace, delayed: DelayedMessage, body_size: int) -> MessageMatch:
    """Return the match of a pending message."""
    message = delayed.message
    return MessageMatch(
        place=place,
        id=message.id,
        state="pending",
        destination=delayed.destination,
        endpoint=place.name,
        due=delayed.due,
        message_type=message_type(headers_of(message)[0]),
        size=len(message.encoded_headers) + body_size,
    )


def queued_match(place: MessagePlace, queue: str, message: Message, body_size: int) -> MessageMatch:
    """Return the match of a message of a queue."""
    headers, _ = headers_of(message)
    failed = place.kind is PlaceKind.ERRORS
    at: datetime | None = None
    with contextlib.suppress(ValueError):
        at = from_wire_time(headers.get(Headers.TIME_OF_FAILURE, "")) if failed else None
    why = (headers.get(name, "") for name in (Headers.EXCEPTION_TYPE, Headers.EXCEPTION_MESSAGE))
    return MessageMatch(
        place=place,
        id=message.id,
        state="failed" if failed else "in its queue",
        destination=headers.get(Headers.FAILED_QUEUE, "") if failed else queue,
        at=at,
        message_type=message_type(headers),
        reason=": ".join(filter(None, why))[:LONGEST_REASON] if failed else "",
        size=len(message.encoded_headers) + body_size,
    )
