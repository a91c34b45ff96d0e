"""Topics: the types of events, as addresses that a transport sends a copy to each subscriber of.

An event is sent to the address of its type's topic, now or later, like a message to a queue. Who subscribes is looked
up when it is dispatched. Its header of types names the topics of its base types too.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from delayline.errors import CorruptHeaders
from delayline.events import Event, emit
from delayline.message import MAXIMUM_DESTINATION_LENGTH, Headers
from delayline.serialization import names_in_header
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

logger: logging.Logger = logging.getLogger(__name__)

#: What the addresses of topics begin with, and the names of endpoints do not.
TOPIC: Final = "topic:"
MAXIMUM_TOPIC_LENGTH: Final = MAXIMUM_DESTINATION_LENGTH - len(TOPIC)
#: So many types of an event count: the header is a stranger's.
MOST_TOPICS: Final = 100


def topic_address(name: str) -> str:
    """Return the destination of events of the type."""
    return f"{TOPIC}{name}"


def is_topic(destination: str) -> bool:
    """Return whether a destination is a topic, not a queue."""
    return destination.startswith(TOPIC)


def any_topic(operations: Iterable[TransportOperation]) -> bool:
    """Return whether one of the operations is to a topic; it runs for every message."""
    for operation in operations:  # noqa: SIM110 - twice as fast as any()
        if operation.destination.startswith(TOPIC):
            return True
    return False


def topics_of(operation: TransportOperation) -> list[str]:
    """Return the topics of an event: its type, then its base types."""
    own = operation.destination.removeprefix(TOPIC)
    try:
        types = operation.message.headers.get(Headers.ENCLOSED_MESSAGE_TYPES, "")
    except CorruptHeaders:  # its subscribers have to see it
        return [own]
    named = [name for name in names_in_header(types) if len(name) <= MAXIMUM_TOPIC_LENGTH]
    return list(dict.fromkeys([own, *named[:MOST_TOPICS]]))


class Copies(NamedTuple):
    """Operations, with a copy for each subscriber in the place of those to topics."""

    operations: Sequence[TransportOperation]
    subscribers: Collection[str]
    """The queues that have copies only because they subscribe."""


def topics_among(operations: Iterable[TransportOperation]) -> set[str]:
    """Return all topics of the events among the operations."""
    events = (operation for operation in operations if is_topic(operation.destination))
    return {topic for event in events for topic in topics_of(event)}


def copied(operations: Sequence[TransportOperation], queues: Mapping[str, Collection[str]]) -> Copies:
    """Return the operations with copies for subscribers; a queue gets one, however many of its topics are met.

    Args:
        operations: Operations, some of which are to topics.
        queues: The queues that subscribe to each topic.
    """
    copies: list[TransportOperation] = []
    subscribers: set[str] = set()
    for operation in operations:
        if not is_topic(operation.destination):
            copies.append(operation)
            continue
        found = sorted({queue for topic in topics_of(operation) for queue in queues.get(topic, ())})
        if not found:
            log_unheard(operation)
        subscribers.update(found)
        copies += [TransportOperation(operation.message, queue) for queue in found]
    named = {operation.destination for operation in operations}
    return Copies(copies, subscribers - named)


def log_unheard(operation: TransportOperation) -> None:
    """Log that an event has no subscribers."""
    topic, message_id = operation.destination.removeprefix(TOPIC), operation.message.id
    emit(logger, logging.INFO, Event.UNHEARD, "event %s of type %s has no subscribers", message_id, topic, topic=topic)


def log_gone(queues: Iterable[str]) -> None:
    """Log that queues subscribe to an event and do not exist."""
    for queue in queues:
        log_text = "queue %s subscribes to an event that was published, and does not exist: it got no copy"
        emit(logger, logging.WARNING, Event.SUBSCRIBER_GONE, log_text, queue, queue=queue)
