"""Failed messages in the error queue: find them, send them on their way again, and replace them by a changed copy.

Where the transport has transactions a message leaves the error queue in the transaction that sends it; elsewhere it is
sent first, so that a crash in between doubles it and never loses it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from delayline.errors import ConfigurationError, DispatchFailed, QueueNotFound
from delayline.failure_index import WIDTH
from delayline.failures import failed_queue_of, no_queue, retry_of
from delayline.transport import (
    QueueLook,
    Stretch,
    SupportsNumberedQueues,
    SupportsQueueManagement,
    SupportsQueuePass,
    SupportsTransportTransactions,
    TransportOperation,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence, Set
    from datetime import timedelta

    from delayline.filters import MessageFilter
    from delayline.message import Message
    from delayline.transport import NumberedQueue, Transport

#: Messages that are read at a time.
ERROR_PAGE: Final = 200
#: Messages that are looked at where each has to be taken from the broker and given back.
MOST_TAKEN: Final = 1_000
#: Failed messages whose headers are read at a time, the newest first.
NEWEST_AT_ONCE: Final = 500
#: The same with their bodies.
BODIES_AT_ONCE: Final = 100
#: More than a queue has.
WHOLE_QUEUE: Final = 2**31


class HeldMessage(NamedTuple):
    """A message of a queue, and what removes it; None where the transport takes it by its id."""

    message: Message
    remove: Callable[[], Awaitable[bool]] | None


@dataclass(frozen=True, slots=True)
class RetryOutcome:
    """The result for a message: its new queue, or why it stayed."""

    id: str
    queue: str | None
    problem: str | None


def managed_queues(transport: Transport) -> SupportsQueueManagement:
    """Return the transport if people can look into its queues; raises ConfigurationError."""
    if not isinstance(transport, SupportsQueueManagement):
        raise ConfigurationError(f"{type(transport).__name__} cannot list or move single messages of a queue")
    return transport


async def browse(queues: SupportsQueueManagement, queue: str) -> AsyncGenerator[Message, None]:
    """Yield the messages of a queue, oldest first. Close it: some transports get the messages back only then."""
    if isinstance(queues, SupportsQueuePass):
        async with queues.passing(queue) as messages:
            async for message in messages:
                yield message
        return
    if isinstance(queues, SupportsNumberedQueues):
        numbered, end = queues.numbered_queue(queue), 0
        while rows := await numbered.read(end + 1, None, ERROR_PAGE, bodies=True):
            for end, message in rows:  # noqa: B007 - the last number of the page
                yield message
        return
    offset = 0
    while page := await queues.browse(queue, ERROR_PAGE, offset=offset):
        for message in page:
            yield message
        offset += len(page)


class BrowsedQueue:
    """The messages of a queue without numbers, as a look shows them: their places, from the oldest on.

    Places are those of the last look. Where looking takes messages from a broker, it shows the oldest ones.

    Args:
        queues: The transport.
        queue: The queue.
    """

    def __init__(self, queues: SupportsQueueManagement, queue: str) -> None:
        self._queues = queues
        self._queue = queue
        self._shown: Sequence[Message] = ()
        # Only what shares this process's memory, or a database, shows all without taking it.
        self._most = WHOLE_QUEUE if isinstance(queues, SupportsTransportTransactions) else MOST_TAKEN

    async def look(self, width: int) -> QueueLook:
        """Read the messages."""
        total = await self._queues.count(self._queue)
        self._shown = await self._queues.browse(self._queue, self._most)
        number = len(self._shown)
        ends = range(width, number + 1 + width, width)
        stretches = {place: Stretch(min(end, number + 1) - max(1, end - width), 0) for place, end in enumerate(ends)}
        there = {place: each for place, each in stretches.items() if each.messages}
        return QueueLook(max(total, number), there, renumbered=True)

    async def numbers(self, first: int, last: int) -> Sequence[int]:
        """Return the places from `first` to `last` that messages have."""
        return range(max(1, first), min(last, len(self._shown)) + 1)

    async def read(
        self, first: int, last: int | None, limit: int, *, newest_first: bool = False, bodies: bool = False
    ) -> Sequence[tuple[int, Message]]:
        """Return messages of the last look with their places; see `NumberedQueue`."""
        del bodies
        places = await self.numbers(first, len(self._shown) if last is None else last)
        wanted = reversed(places) if newest_first else iter(places)
        return [(place, self._shown[place - 1]) for place, _ in zip(wanted, range(limit), strict=False)]

    async def messages(self, numbers: Sequence[int], *, bodies: bool = False) -> Mapping[int, Message]:
        """Return the messages of the last look at these places."""
        del bodies
        return {place: self._shown[place - 1] for place in numbers if place <= len(self._shown)}


def numbered(transport: Transport, queue: str) -> NumberedQueue:
    """Return the messages of a queue by numbers: those of a database, or their places."""
    if isinstance(transport, SupportsNumberedQueues):
        return transport.numbered_queue(queue)
    return BrowsedQueue(managed_queues(transport), queue)


class NewestFailures(NamedTuple):
    """Failed messages, the newest first."""

    total: int
    """How many messages the queue has."""
    rows: Sequence[tuple[int, Message]]
    """Messages with their numbers."""
    next_before: int | None
    """The number to go on below; None if there are no more."""


async def newest(
    queue: NumberedQueue,
    wanted: MessageFilter,
    limit: int,
    *,
    before: int | None = None,
    looked: Callable[[int], None] = lambda _: None,
) -> NewestFailures:
    """Return failed messages that fulfil a filter, the newest first.

    Args:
        queue: The error queue.
        wanted: Which messages.
        limit: The most messages.
        before: Only messages with lower numbers.
        looked: Called now and then with how many messages were looked through.
    """
    total = (await queue.look(WIDTH)).total
    rows: list[tuple[int, Message]] = []
    end, number = before, 0
    bodies = wanted.body is not None
    read = partial(queue.read, 0, limit=BODIES_AT_ONCE if bodies else NEWEST_AT_ONCE, newest_first=True, bodies=bodies)
    while page := await read(last=None if end is None else end - 1):
        for end, message in page:
            if wanted.matches(message, failed_queue_of(message)):
                rows.append((end, message))
            if len(rows) > limit:
                return NewestFailures(total, rows[:limit], rows[limit - 1][0])
        number += len(page)
        looked(number)
    return NewestFailures(total, rows, None)


async def find(queues: SupportsQueueManagement, queue: str, ids: Set[str]) -> dict[str, Message]:
    """Return the messages with the ids, as far as they are in the queue."""
    matching: dict[str, Message] = {}
    async with contextlib.aclosing(browse(queues, queue)) as messages:
        async for message in messages:
            if message.id in ids:
                matching.setdefault(message.id, message)
            if len(matching) == len(ids):
                break
    return matching


async def holding(
    transport: Transport, queue: str, wanted: Callable[[Message], bool] | None = None, *, most: int | None = None
) -> AsyncGenerator[HeldMessage, None]:
    """Yield messages of a queue with what removes each; close it.

    Where looking takes messages and gives them back, each is taken once.

    Args:
        transport: The transport, started.
        queue: The queue.
        wanted: Whether a message is to be yielded; by default each is.
        most: How many messages to yield at most; by default all.
    """
    queues, number = managed_queues(transport), 0
    if isinstance(queues, SupportsQueuePass):
        async with queues.passing(queue) as messages:
            async for message in messages:
                if wanted is None or wanted(message):
                    yield HeldMessage(message, messages.remove)
                    number += 1
                if number == most:
                    return
        return
    matching = []
    async with contextlib.aclosing(browse(queues, queue)) as pages:
        async for message in pages:
            if wanted is None or wanted(message):
                matching.append(message)
            if len(matching) == most:
                break
    for message in matching:
        yield HeldMessage(message, None)


async def holding_ids(transport: Transport, queue: str, ids: Set[str]) -> AsyncGenerator[HeldMessage, None]:
    """Yield the messages with the ids, each once, as `holding` does."""
    left = set(ids)

    def wanted(message: Message) -> bool:
        if message.id not in left:
            return False
        left.remove(message.id)
        return True

    async with contextlib.aclosing(holding(transport, queue, wanted, most=len(ids))) as holding_ids:
        async for held in holding_ids:
            yield held


async def retry(
    transport: Transport,
    queue: str,
    held: HeldMessage,
    *,
    to: str | None = None,
    remedy: str = "Name the queue",
    window: timedelta | None = None,
) -> RetryOutcome:
    """Send a failed message to the queue it failed in, without the headers that describe the failure.

    Args:
        transport: The transport, started.
        queue: The error queue.
        held: A message of that queue.
        to: The queue to send it to instead.
        remedy: How the caller's user names a queue where the message does not.
        window: How long the endpoint's inbox keeps records: a message that failed longer ago stays, as a copy of it may
            have been handled. None for any age.
    """
    message = held.message
    operation = retry_of(message, to=to, remedy=remedy, window=window)
    if isinstance(operation, str):
        return RetryOutcome(message.id, None, operation)
    return await replace(transport, queue, held, operation.message, operation.destination)


async def replace(
    transport: Transport, queue: str, held: HeldMessage, message: Message, destination: str
) -> RetryOutcome:
    """Send the message to its destination in place of the queue's message."""
    message_id = held.message.id
    try:
        taken = await _move(transport, queue, held, TransportOperation(message, destination))
    except DispatchFailed as failed:
        reason = next(iter(failed.failures.values()))
        stays = "it stays in " + queue
        if isinstance(reason, QueueNotFound):
            return RetryOutcome(message_id, None, no_queue(destination, queue))
        return RetryOutcome(message_id, None, f"{reason}; {stays}")
    return RetryOutcome(message_id, destination, None if taken else "another process took it meanwhile")


async def remove(transport: Transport, queue: str, held: HeldMessage) -> bool:
    """Remove a message from its queue; False if another process took it meanwhile."""
    if held.remove is not None:
        return await held.remove()
    return await managed_queues(transport).take(queue, held.message.id)


async def _move(transport: Transport, queue: str, held: HeldMessage, operation: TransportOperation) -> bool:
    if isinstance(transport, SupportsTransportTransactions):
        async with transport.transaction() as transaction:
            taken = await managed_queues(transport).take(queue, held.message.id, transaction)
            if taken:
                await transport.dispatch([operation], transaction)
        return taken
    await transport.dispatch([operation])  # a crash before the next line doubles the message, it does not lose it
    return await remove(transport, queue, held)
