"""Failed messages in the error queue: find them, send them on their way again, and replace them by a changed copy.

Where the transport has transactions a message leaves the error queue in the transaction that sends it; elsewhere it is
sent first, so that a crash in between doubles it and never loses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from delayline.errors import ConfigurationError, CorruptHeaders, DispatchFailed, QueueNotFound
from delayline.message import Headers
from delayline.recoverability import FAILURE_HEADERS
from delayline.transport import SupportsQueueManagement, SupportsTransportTransactions, TransportOperation

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Set

    from delayline.message import Message
    from delayline.transport import Transport

#: Messages that are read at a time.
PAGE: Final = 200


@dataclass(frozen=True, slots=True)
class RetryOutcome:
    """The result for one message: its new queue, or why it stayed."""

    id: str
    queue: str | None
    problem: str | None


def managed_queues(transport: Transport) -> SupportsQueueManagement:
    """Return the transport as one whose queues people can look into; raises ConfigurationError."""
    if not isinstance(transport, SupportsQueueManagement):
        raise ConfigurationError(f"{type(transport).__name__} cannot list or move single messages of a queue")
    return transport


async def browse(queues: SupportsQueueManagement, queue: str) -> AsyncGenerator[Message, None]:
    """Yield the messages of a queue, oldest first."""
    offset = 0
    while page := await queues.browse(queue, PAGE, offset=offset):
        for message in page:
            yield message
        offset += len(page)


async def find(queues: SupportsQueueManagement, queue: str, ids: Set[str]) -> dict[str, Message]:
    """Return the messages with these ids, as far as they are in the queue."""
    found: dict[str, Message] = {}
    async for message in browse(queues, queue):
        if message.id in ids:
            found.setdefault(message.id, message)
        if len(found) == len(ids):
            break
    return found


async def retry(
    transport: Transport, queue: str, message: Message, *, to: str | None = None, remedy: str = "Name the queue"
) -> RetryOutcome:
    """Send a failed message to the queue it failed in, without the headers that describe the failure.

    Args:
        transport: The transport, started.
        queue: The error queue.
        message: A message of that queue.
        to: The queue to send it to instead.
        remedy: How the caller's user names a queue where the message does not.
    """
    try:
        destination = to or message.headers.get(Headers.FAILED_QUEUE)
        again = message.with_headers({}, without=FAILURE_HEADERS)
    except CorruptHeaders as error:
        destination, again = to, message
        if to is None:
            return RetryOutcome(message.id, None, f"{error}. {remedy}")
    if not destination:
        return RetryOutcome(message.id, None, f"it has no {Headers.FAILED_QUEUE} header. {remedy}")
    return await replace(transport, queue, message.id, again, destination)


async def replace(
    transport: Transport, queue: str, message_id: str, message: Message, destination: str
) -> RetryOutcome:
    """Send the message to its destination in place of the one with that id in the queue."""
    try:
        taken = await _move(transport, queue, message_id, TransportOperation(message, destination))
    except DispatchFailed as failed:
        reason = next(iter(failed.failures.values()))
        stays = "it stays in " + queue
        if isinstance(reason, QueueNotFound):
            stays += f". Create it with: delayline setup --queue {destination}"
            return RetryOutcome(message_id, None, f"queue {destination!r} does not exist; {stays}")
        return RetryOutcome(message_id, None, f"{reason}; {stays}")
    return RetryOutcome(message_id, destination, None if taken else "another process took it meanwhile")


async def _move(transport: Transport, queue: str, message_id: str, operation: TransportOperation) -> bool:
    queues = managed_queues(transport)
    if isinstance(transport, SupportsTransportTransactions):
        async with transport.transaction() as transaction:
            taken = await queues.take(queue, message_id, transaction)
            if taken:
                await transport.dispatch([operation], transaction)
        return taken
    await transport.dispatch([operation])  # a crash before the next line doubles the message, it does not lose it
    return await queues.take(queue, message_id)
