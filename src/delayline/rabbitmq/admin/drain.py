"""Drain delay levels batch by batch, and compute when their messages are due."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from delayline.clock import ONE_SECOND
from delayline.errors import BackendUnavailable, BackendUnusable, InvalidMessage
from delayline.message import Headers, from_wire_time
from delayline.rabbitmq.amqp.methods import ExchangeDeclare
from delayline.rabbitmq.browsing import count, must_exist
from delayline.rabbitmq.delivery_limits import NACK_IS_NOT_COUNTED
from delayline.rabbitmq.levels import DELAY_HEADER, MAXIMUM_DELAY, check_destination, parse, remaining
from delayline.rabbitmq.refusals import NotFound

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from delayline.rabbitmq.address import BrokerAddress
    from delayline.rabbitmq.amqp.channel import Channel
    from delayline.rabbitmq.amqp.properties import Delivery
    from delayline.rabbitmq.connection import BrokerConnection
    from delayline.rabbitmq.infrastructure import DelayInfrastructure


ADVICE: Final = "Create them with: delayline rabbitmq create"
SILENCE: Final = 1.0  # seconds without a message, before the level is counted again
SILENT_WAITS: Final = 30  # number of such waits while other consumers seem to have the remaining messages


async def must_have_levels(
    levels: DelayInfrastructure, address: BrokerAddress, connection: BrokerConnection, *, advice: str = ADVICE
) -> None:
    """Raise BackendUnusable where they are not complete."""

    async def look(channel: Channel) -> None:
        await channel.call(ExchangeDeclare(exchange=levels.delivery, passive=True))
        for queue in levels.queues:
            await must_exist(channel, queue.name)

    try:
        await connection.run(look)
    except NotFound as error:
        raise BackendUnusable(
            f"there are no complete delay levels {levels.prefix}* at {address}: {error}. {advice}"
        ) from error


@contextlib.asynccontextmanager
async def channel_of(connection: BrokerConnection) -> AsyncIterator[Channel]:
    """Provide a channel; messages taken on it and not acknowledged return to their queue afterwards."""
    channel = await connection.channel()
    try:
        yield channel
    finally:
        with contextlib.suppress(BackendUnavailable):
            if channel.closed is None and await connection.version() >= NACK_IS_NOT_COUNTED:
                await channel.requeue_all()
            await channel.close()


async def number_in(channel: Channel, queue: str) -> int:
    """Return how many messages the queue has; that it has none is its leader's word, as nothing could be taken.

    A count says so too where the broker does not reach the leader.
    """
    if number := await count(channel, queue):
        return number
    taken = await channel.get(queue)
    if taken is None:
        return 0
    channel.requeue(taken.tag)
    return max(1, await count(channel, queue))


async def batches(channel: Channel, queue: str, wanted: int, *, size: int, ahead: int) -> AsyncIterator[list[Delivery]]:
    """Yield that many messages of the queue, in batches of `size` at most; fewer where the rest has left it.

    Args:
        channel: the channel to consume on.
        queue: the queue's name.
        wanted: how many messages to yield.
        size: messages of a batch, at most.
        ahead: how many unacknowledged messages the broker may send ahead.
    """
    inbox: asyncio.Queue[Delivery] = asyncio.Queue()
    await channel.consume(queue, inbox.put_nowait, prefetch=ahead)
    done = silences = 0
    while done < wanted and silences < SILENT_WAITS:
        batch = await _next(inbox, min(size, wanted - done))
        if not batch:
            silences += 1
            if not await count(channel, queue):
                last = await channel.get(queue)
                if last is None:
                    return
                inbox.put_nowait(last)
            continue
        silences = 0
        yield batch
        done += len(batch)


async def _next(inbox: asyncio.Queue[Delivery], limit: int) -> list[Delivery]:
    """Return the messages received so far, some unless the queue stays silent."""
    try:
        batch = [await asyncio.wait_for(inbox.get(), SILENCE)]
    except TimeoutError:
        return []
    while len(batch) < limit and not inbox.empty():
        batch.append(inbox.get_nowait())
    return batch


#: The broker's record of the message's way, newest first.
DEATHS: Final = "x-death"
#: How far the clocks of a sender and of a broker may be apart and the sender's word still count.
SKEW: Final = timedelta(minutes=1)
LEVEL_QUEUE: Final = re.compile(r".*delay-level-([0-9]{2})", re.DOTALL)


class Unmovable(Exception):
    """A message that cannot be moved to other levels as it is; the text is the reason."""


@dataclass(frozen=True, slots=True)
class LevelMessage:
    """A message in a level: where it goes, and when."""

    destination: str
    due: datetime
    stale: bool
    """Whether its headers do not fit its level: then it is due when it leaves the level at the latest."""


def waiting(routing_key: str, headers: Mapping[str, object], level: int, now: datetime) -> LevelMessage:
    """Return where and when a message found at `level` goes. Raises Unmovable.

    Never before the broker that has it would deliver it, and never after, but for the seconds of `DEATHS`.
    """
    parsed = parse(routing_key)
    if parsed is None:
        raise Unmovable(f"its routing key {routing_key[:80]!r} is none of the delay levels'")
    delay, destination = parsed
    if not delay >> level & 1:
        raise Unmovable(f"its routing key has a delay of {delay} s, which does not wait at level {level:02}")
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
    if entered is not None and first - left - ONE_SECOND <= entered <= last - left:
        return max(first, entered + left), min(last, entered + left + ONE_SECOND)
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
    """Return the second in which the broker took it from a higher level; None for a message that came here first."""
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
    match = LEVEL_QUEUE.fullmatch(queue) if isinstance(queue, str) else None
    return match is not None and int(match[1]) > level


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)[:60]
