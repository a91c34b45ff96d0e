"""The arithmetic of the delay levels: names, binding keys, routing keys, how long is left. Pure.

A delay in whole seconds is 28 bits. Each bit is a level: a topic exchange, and a queue that keeps messages for
2^level seconds and hands them on to the next lower exchange. The routing key carries the bits and the destination.

See https://docs.particular.net/transports/rabbitmq/delayed-delivery.
"""

from __future__ import annotations

import functools
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from delayline.clock import ONE_SECOND
from delayline.errors import InvalidDueTime, InvalidMessage
from delayline.message import to_time_span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from datetime import datetime

LEVELS: Final = 28
HIGHEST_LEVEL: Final = LEVELS - 1
MAXIMUM_DELAY: Final = (1 << LEVELS) - 1
"""Seconds: 3106 days and a bit, about eight and a half years."""
BITS_LENGTH: Final = 2 * LEVELS
"""How many characters of a routing key come before its destination."""
MAXIMUM_DESTINATION_BYTES: Final = 255 - BITS_LENGTH
"""AMQP's short strings have 255 bytes, and the destination shares one with the bits."""
DELAY_HEADER: Final = "NServiceBus.Transport.RabbitMQ.DelayInSeconds"
V1_PREFIX: Final = "nsb"
V2_PREFIX: Final = "nsb.v2"

_KEY: Final = re.compile(r"((?:[01]\.){28})(.*)", re.DOTALL)
_PATTERN_WORDS: Final = frozenset({"*", "#"})
_LONGER: Final = "Longer delays need a store in front: StoredDelivery"


def level_name(prefix: str, level: int) -> str:
    """Return the name that a level's exchange and its queue share; level 0 to 27."""
    return f"{prefix}.delay-level-{level:02}"


def delivery_name(prefix: str) -> str:
    """Return the name of the exchange that hands due messages to their destinations."""
    return f"{prefix}.delay-delivery"


def waiting_key(level: int) -> str:
    """Return the binding key of messages that wait at the level: messages with a 1 in its position."""
    return "*." * (HIGHEST_LEVEL - level) + "1.#"


def passing_key(level: int) -> str:
    """Return the binding key of messages that skip this level: a 0 in its place."""
    return "*." * (HIGHEST_LEVEL - level) + "0.#"


def destination_key(destination: str) -> str:
    """Return the binding key of a destination on the delivery exchange: any bits, then its name."""
    return f"#.{destination}"


def route(delay: int, destination: str) -> tuple[int, str]:
    """Return the level to publish to, and the routing key, for a delay in seconds; below zero is zero.

    Bits beyond the range are lost: the delay was checked before.
    """
    seconds = max(0, delay) & MAXIMUM_DELAY
    return max(0, seconds.bit_length() - 1), _bits(seconds) + destination


@functools.lru_cache(maxsize=4096)
def _bits(seconds: int) -> str:
    return ".".join(f"{seconds:028b}") + "."


def parse(routing_key: str) -> tuple[int, str] | None:
    """Return the delay in seconds and the destination of a routing key; None for another kind of key."""
    match = _KEY.fullmatch(routing_key)
    if match is None:
        return None
    return int(match[1].replace(".", ""), 2), match[2]


def remaining(delay: int, level: int) -> int:
    """Return how many seconds at most are left for a message of that delay found in that level's queue.

    The bits above the level have elapsed; the level's own is elapsing.
    """
    return delay & ((2 << level) - 1)


def seconds_of(delay: timedelta) -> int:
    """Return the delay in seconds, rounded up so that nothing is early; below zero is zero."""
    return max(0, -(delay // -ONE_SECOND))


def seconds_until(due: datetime, now: datetime) -> int:
    """Return the seconds from now until the due time, rounded up; the past is now, however long ago."""
    return seconds_of(due - now)


def checked_until(due: datetime, now: datetime) -> int:
    """Return `seconds_until(due, now)`; raises InvalidDueTime where 28 bits cannot hold it."""
    seconds = seconds_until(due, now)
    if seconds > MAXIMUM_DELAY:
        raise InvalidDueTime(
            f"a message due at {due.isoformat()!r}, in {to_time_span(due - now)!r}, cannot wait in delay levels, which "
            f"hold at most '3106.21:24:15', which is 8.5 years. {_LONGER}"
        )
    return seconds


def check_destination(destination: str) -> None:
    """Raise InvalidMessage for a destination that the levels cannot carry: too long, empty, or a pattern."""
    length = len(destination.encode("utf-8", "surrogatepass"))
    if not 1 <= length <= MAXIMUM_DESTINATION_BYTES:
        raise InvalidMessage(
            f"the destination {destination[:60]!r} has {length} bytes: delayed messages on RabbitMQ go to names of "
            f"1 to {MAXIMUM_DESTINATION_BYTES} bytes. Shorten it, or delay with a store"
        )
    if _PATTERN_WORDS & set(destination.split(".")):
        raise InvalidMessage(
            f"the destination {destination!r} has a word that is a pattern to RabbitMQ (* or #): other endpoints' "
            "delayed messages would come to it too. Rename the endpoint"
        )


def crossings(destinations: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (receiver, meant) for destinations where the first also receives messages for the second.

    `#.Sales` matches `Contoso.Sales` too: a dotted suffix of another's name receives its delayed messages. In the order
    of the names.
    """
    known = sorted(set(destinations))
    names = set(known)
    for meant in known:
        for receiver in endings(meant):
            if receiver in names:
                yield receiver, meant


def endings(name: str) -> tuple[str, ...]:
    """Return the names that also receive messages for this name: its last words, the longest first."""
    words = name.split(".")
    return tuple(ending for start in range(1, len(words)) if (ending := ".".join(words[start:])))
