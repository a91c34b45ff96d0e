"""Requests: a message is sent, and its sender awaits the reply, in a queue that belongs to its process alone.

The queue is created with the first request and removed when the endpoint stops. Where a process was killed, RabbitMQ
removes its queue; in a SQL database the next process of the endpoint does that, with its first request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from delayline.checks import time_span
from delayline.delayed.host import Satellite
from delayline.errors import DelaylineError, InvalidMessage, InvalidPayload, NoReply, NotStarted
from delayline.events import Event, emit
from delayline.external import UNSET
from delayline.message import Headers, new_message_id
from delayline.transaction import TransactionMode
from delayline.transport import (
    SupportsExpiringQueues,
    SupportsQualifiedQueues,
    SupportsQueueLookup,
    SupportsQueueRemoval,
    SupportsQueueStates,
    address_in,
    qualified_queue,
)

if TYPE_CHECKING:
    from delayline.delayed.host import DeliveryHost, RunningSatellite
    from delayline.message import Message
    from delayline.outgoing import Send
    from delayline.sending import Sender
    from delayline.serialization import Serializer
    from delayline.transaction import Transaction
    from delayline.transport import Transport

logger: logging.Logger = logging.getLogger(__name__)

#: Stands between the endpoint's name, and the time and the random text that make the queue's name its own.
REPLIES: Final = "replies"
CONCURRENCY: Final = 16
#: A queue that no process receives from is removed when it is so old: a younger one may be about to be received from.
REMOVED_AFTER: Final = timedelta(minutes=10)
#: Characters of the endpoint's name in that of the queue, and in the short names of Azure.
LONGEST_ENDPOINT: Final = 150
LONGEST_IN_SHORT_NAME: Final = 30


class Requests:
    """The requests of an endpoint's process that wait for replies. Belongs to an event loop.

    Args:
        endpoint_name: The endpoint.
        transport: Its transport.
        serializer: Reads the bodies of replies that are asked for by type.
    """

    def __init__(self, endpoint_name: str, transport: Transport, serializer: Serializer) -> None:
        self._endpoint_name = endpoint_name
        self._transport = transport
        self._serializer = serializer
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        self._opening: asyncio.Lock | None = None
        self._queue = ""
        self._receiving: RunningSatellite | None = None

    async def request(
        self, host: DeliveryHost, sender: Sender, send: Send, timeout: timedelta, reply_type: object
    ) -> Any:  # noqa: ANN401 - a message, or a value of the type
        """Send a message and return its reply; see `Endpoint.request`."""
        seconds = time_span("timeout", timeout).total_seconds()
        message_id = new_message_id(host.clock.now()) if send.message_id is None else send.message_id
        if message_id in self._waiting:
            raise InvalidMessage(f"message {message_id!r} waits for its reply already: give the request another id")
        reply = self._waiting[message_id] = asyncio.get_running_loop().create_future()
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                queue = await self._open(host)
                headers = {**(send.headers or {}), Headers.REPLY_TO: address_in(self._transport, queue)}
                await sender.send(send._replace(message_id=message_id, headers=headers), UNSET, check_destination=True)
                message = await reply
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise NoReply(
                f"no reply to message {message_id!r} has come from {send.destination} within {seconds:g} s: it may "
                "still be handled. A reply that comes later is logged and dropped"
            ) from error
        finally:
            del self._waiting[message_id]
        if reply_type is None:
            return message
        try:
            return self._serializer.loads(message.body, reply_type)
        except Exception as error:
            raise InvalidPayload(
                f"the reply {message.id!r} from {send.destination} cannot be read as {reply_type!r}: {error}"
            ) from error

    async def stop(self) -> None:
        """Receive no more, tell those that wait, and remove the queue."""
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(NotStarted("the endpoint was stopped before the reply came"))
        receiving, self._receiving, self._opening = self._receiving, None, None
        if receiving is None:
            return
        await receiving.stop()
        if isinstance(self._transport, SupportsQueueRemoval):
            with contextlib.suppress(DelaylineError):  # it is removed by others
                await self._transport.remove_queue(self._queue)

    async def prepare(self, message: Message, attempt: int) -> None:
        """Do nothing: a reply needs no preparation."""

    async def work(self, message: Message, transaction: Transaction | None) -> None:
        """Hand the reply to the request that waits for it; of several, the first."""
        del transaction
        reply = self._waiting.get(message.headers.get(Headers.CORRELATION_ID, ""))
        if reply is None or reply.done():
            log_text = "Reply %s is dropped: its request no longer waits, or has another reply"
            emit(logger, logging.WARNING, Event.REPLY_DROPPED, log_text, message.id, message=message)
            return
        reply.set_result(message)

    async def _open(self, host: DeliveryHost) -> str:
        """Return the queue, which the first request creates and begins to receive from."""
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._receiving is None:
                prefix, now = f"{_qualified(self._transport, self._endpoint_name)}-", host.clock.now()
                await self._remove_abandoned(prefix, now)
                queue = f"{prefix}{int(now.timestamp()):08x}-{secrets.token_hex(6)}"
                if isinstance(self._transport, SupportsExpiringQueues):
                    await self._transport.create_expiring(queue, REMOVED_AFTER)
                else:
                    await self._transport.setup_infrastructure([queue])
                receiving = await host.satellite(
                    host, Satellite(queue, self, TransactionMode.RECEIVE_ONLY, CONCURRENCY)
                )
                receiving.start()
                self._queue, self._receiving = queue, receiving
        return self._queue

    async def _remove_abandoned(self, prefix: str, now: datetime) -> None:
        """Remove the queues of processes of this endpoint that were killed."""
        transport = self._transport
        if isinstance(transport, SupportsExpiringQueues) or not isinstance(transport, SupportsQueueLookup):
            return
        if not isinstance(transport, SupportsQueueStates) or not isinstance(transport, SupportsQueueRemoval):
            return
        for queue in await transport.queues():
            created = _created(queue, prefix)
            if created is not None and now - created > REMOVED_AFTER:
                with contextlib.suppress(DelaylineError):  # another process removes it
                    if any(state.received is False for state in await transport.queue_states([queue])):
                        await transport.remove_queue(queue)


def _created(queue: str, prefix: str) -> datetime | None:
    """Return when a queue for replies, whose name begins so, was created; None for any other queue."""
    written = queue.removeprefix(prefix).partition("-")[0] if queue.startswith(prefix) else ""
    try:
        return datetime.fromtimestamp(int(written, 16), UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _qualified(transport: Transport, endpoint_name: str) -> str:
    if isinstance(transport, SupportsQualifiedQueues):
        endpoint_name = endpoint_name[:LONGEST_IN_SHORT_NAME].strip("-")
    return qualified_queue(transport, endpoint_name[:LONGEST_ENDPOINT], REPLIES)
