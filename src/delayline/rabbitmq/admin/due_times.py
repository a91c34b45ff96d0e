"""Due time of a message found in a delay level, from its sender's headers and its level. Pure.

The level alone gives bounds: the bits above it have elapsed, the bits below have not begun. The sender's header is
exact, but stale if a failed message was retried with its old headers; therefore it counts only within the bounds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from delayline.errors import InvalidMessage
from delayline.message import Headers, from_wire_time
from delayline.rabbitmq.levels import DELAY_HEADER, MAXIMUM_DELAY, check_destination, parse, remaining

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The broker's record of the message's way, newest first.
DEATHS: Final = "x-death"
#: How far the clocks of a sender and of a broker may be apart and the sender's word still count.
SKEW: Final = timedelta(minutes=1)
SECOND: Final = timedelta(seconds=1)
LEVEL_QUEUE: Final = re.compile(r".*delay-level-([0-9]{2})", re.DOTALL)


class Unmovable(Exception):
    """A message that cannot be moved to other levels as it is; its text says why."""


@dataclass(frozen=True, slots=True)
class LevelMessage:
    """A message in a level: where it goes, and when."""

    destination: str
    due: datetime
    stale: bool
    """Whether its headers do not fit the place it was found in: then it is due when that place says at the latest."""


def waiting(routing_key: str, headers: Mapping[str, object], level: int, now: datetime) -> LevelMessage:
    """Return where and when a message found at `level` goes. Raises Unmovable.

    Never before the broker that has it would deliver it, and never after, but for the seconds of `DEATHS`.
    """
    parsed = parse(routing_key)
    if parsed is None:
        raise Unmovable(f"its routing key {routing_key[:80]!r} is none of the delay levels'")
    delay, destination = parsed
    if not delay >> level & 1:
        raise Unmovable(f"its routing key says {delay} s: those do not wait at level {level:02}")
    try:
        check_destination(destination)
    except InvalidMessage as error:
        raise Unmovable(str(error)) from error
    first, last = _bounds(delay, level, headers, now)
    for stated in _stated(headers):
        if first - SKEW <= stated:
            return LevelMessage(destination, min(max(stated, first), last), stale=False)
    return LevelMessage(destination, last, stale=True)


def _bounds(delay: int, level: int, headers: Mapping[str, object], now: datetime) -> tuple[datetime, datetime]:
    """Return the bounds of the due time: from its arrival at this level, or else from its remaining bits."""
    left = timedelta(seconds=remaining(delay, level))
    last = now + left
    first = last - timedelta(seconds=1 << level)
    entered = _entered(headers, level)
    # Compared without adding to the header's value, which may be year 9999.
    if entered is not None and first - left - SECOND <= entered <= last - left:
        return max(first, entered + left), min(last, entered + left + SECOND)
    return first, last


def _stated(headers: Mapping[str, object]) -> list[datetime]:
    """Return when the sender wanted it to be delivered, the surest first. Raises Unmovable.

    A retry has its own time; a message that waited in a store before it came here has its due time only.
    """
    delay = headers.get(DELAY_HEADER)
    if not isinstance(delay, int) or isinstance(delay, bool):
        raise Unmovable(f"its header {DELAY_HEADER} is {_shown(delay)}, and not a number of seconds")
    length = timedelta(seconds=min(max(delay, 0), MAXIMUM_DELAY))
    if headers.get(Headers.RETRIES_TIMESTAMP):
        return [_time(headers, Headers.RETRIES_TIMESTAMP, length)]
    stated = [_time(headers, Headers.TIME_SENT, length)]
    if headers.get(Headers.DELIVER_AT) and not headers.get(Headers.RETRIES):
        stated.append(_time(headers, Headers.DELIVER_AT, timedelta(0)))
    return stated


def _time(headers: Mapping[str, object], name: str, later: timedelta) -> datetime:
    value = headers.get(name)
    try:
        return from_wire_time(value if isinstance(value, str) else "") + later
    except (ValueError, OverflowError):
        raise Unmovable(
            f"its header {name} is {_shown(value)}, and not a time as `2026-04-29 22:11:26:340982 Z`"
        ) from None


def _entered(headers: Mapping[str, object], level: int) -> datetime | None:
    """Return the second in which the broker took it from a higher level; None for one that came here first."""
    deaths = headers.get(DEATHS)
    if not isinstance(deaths, list):
        return None
    times = [
        death["time"]
        for death in deaths
        if isinstance(death, dict) and isinstance(death.get("time"), datetime) and _above(death.get("queue"), level)
    ]
    return max((time if time.tzinfo else time.replace(tzinfo=UTC) for time in times), default=None)


def _above(queue: object, level: int) -> bool:
    found = LEVEL_QUEUE.fullmatch(queue) if isinstance(queue, str) else None
    return found is not None and int(found[1]) > level


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)[:60]
