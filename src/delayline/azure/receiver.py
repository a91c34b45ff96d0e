"""Taking messages from a queue: hidden while they are handled, for as long as that takes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Final

from azure.core.exceptions import HttpResponseError, ResourceNotFoundError

from delayline.azure.envelope import BEGUN, HANDLING_ENDED, UnwrappedMessage, crashes_noted, unwrap, with_note
from delayline.azure.requests import code_of
from delayline.errors import BackendUnavailable, BackendUnusable, QueueNotFound
from delayline.events import Event, emit
from delayline.transport import ReceivedMessage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from azure.storage.queue import QueueMessage
    from azure.storage.queue.aio import QueueClient

    from delayline.azure.requests import Requests

logger: logging.Logger = logging.getLogger(__name__)

MESSAGE_PAGE: Final = 32
#: Renewals of a message's invisibility within the time for which it is hidden.
RENEWALS: Final = 3
SHORTEST_WAIT: Final = 0.05
#: Errors for a message that is gone, or was delivered to another receiver meanwhile.
GONE_ERRORS: Final = frozenset({"MessageNotFound", "PopReceiptMismatch", "QueueNotFound"})


@dataclass(slots=True)
class InvisibleMessage:
    """A message that is hidden from others, and the receipt that lets its holder delete it."""

    id: str
    receipt: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    text: str = ""
    """The queue's text of one that was delivered before."""
    crashes: int = 0
    """How many deliveries of it have ended without an outcome."""
    noted: bool = False
    """Whether its text has the note that it is handled."""


class AzureReceiver:
    """Takes messages from a queue, in pages of 32 at most.

    Args:
        poll_interval: the longest wait, in seconds, between looks at an empty queue; the first are shorter.
        hidden_for: how many seconds a crash of its holder keeps a message from others.
    """

    def __init__(
        self,
        client: QueueClient,
        queue: str,
        *,
        poll_interval: float,
        hidden_for: int,
        event: asyncio.Event,
        requests: Requests,
    ) -> None:
        self._requests = requests
        self._client = client
        self._queue = queue
        self._poll_interval = poll_interval
        self._hidden_for = hidden_for
        self._event = event
        self._numbers = count()
        self._held: dict[int, InvisibleMessage] = {}
        self._stopped = asyncio.Event()
        self.answered_at: float = -math.inf
        """When a look at the queue was last answered, by `time.monotonic`."""
        self._renewing: asyncio.Task[None] | None = None
        self._alone: int | None = None
        """The number of the only message that may be held."""

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        """Wait for messages and hide up to `limit` of them."""
        wait = SHORTEST_WAIT
        while not self._stopped.is_set():
            self._event.clear()
            batch = [] if self._holds_one() else await self._page(min(limit, MESSAGE_PAGE))
            if batch and self._holds_one():  # since it was asked for
                await asyncio.gather(*map(self.release, batch))
                self._event.clear()
            elif batch:
                return batch
            await self._sleep(wait)
            wait = min(2 * wait, self._poll_interval)
        return []

    async def acknowledge(self, received: ReceivedMessage, transaction: object = None) -> bool:
        """Delete the message; False if it was gone, or had been delivered to another receiver."""
        entry = self._held.get(_number(received))
        if entry is None:
            return False
        async with entry.lock, self._asking():
            deleted = await deleted_with(self._client, entry.id, entry.receipt)
        self._let_go(received)
        return deleted

    async def release(self, received: ReceivedMessage) -> None:
        """Make the message visible again at once; a message whose release fails is visible when its time is over."""
        entry = self._held.get(_number(received))
        self._let_go(received)
        if entry is None:
            return
        async with entry.lock:
            with contextlib.suppress(BackendUnavailable, BackendUnusable):
                async with self._asking():
                    content = with_note(entry.text, HANDLING_ENDED, entry.crashes) if entry.noted else None
                    await shown(self._client, entry.id, entry.receipt, content)
        self._event.set()

    async def begin(self, received: ReceivedMessage) -> None:
        """Note in the message that its handling begins, if it was delivered before."""
        entry = self._held.get(_number(received))
        if entry is None or not entry.text:
            return
        async with entry.lock, self._asking():
            content = with_note(entry.text, BEGUN, entry.crashes)
            noted = await self._client.update_message(
                entry.id, entry.receipt, content=content, visibility_timeout=self._hidden_for
            )
            entry.receipt, entry.noted = receipt_of(noted), True

    async def hold_only(self, received: ReceivedMessage) -> None:
        """Take no more until the message is acknowledged or released."""
        number = _number(received)
        self._alone = number if number in self._held else None

    async def stop(self) -> None:
        """End a waiting receive; delivered messages stay invisible until they are acknowledged or released."""
        self._stopped.set()

    def _holds_one(self) -> bool:
        return self._alone is not None

    async def _page(self, number: int) -> list[ReceivedMessage]:
        async with self._asking():
            page = await page_of(self._client, number, self._hidden_for)
        self.answered_at = time.monotonic()
        received = [self._hold(message) for message in page]
        if received and self._renewing is None:
            self._renewing = asyncio.create_task(self._renew(), name=f"delayline visibility {self._queue}")
        return received

    def _hold(self, message: QueueMessage) -> ReceivedMessage:
        unwrapped = unwrap(message.id, message.content)
        number = next(self._numbers)
        entry = self._held[number] = InvisibleMessage(message.id, receipt_of(message))
        if (message.dequeue_count or 0) > 1:
            entry.text, entry.crashes = str(message.content), crashes_noted(message.content)
        if isinstance(unwrapped, UnwrappedMessage):
            log_text = "Failed to deserialize message envelope for message with id %s: %s"
            emit(
                logger, logging.WARNING, Event.POISON_MESSAGE, log_text, message.id, unwrapped.reason, message=unwrapped
            )
        return ReceivedMessage(unwrapped, number, entry.crashes)

    async def _renew(self) -> None:
        """Renew the invisibility of delivered messages until there are none."""
        while self._held:
            await asyncio.sleep(self._hidden_for / RENEWALS)
            await asyncio.gather(*(self._hide_longer(number, entry) for number, entry in list(self._held.items())))
        self._renewing = None

    async def _hide_longer(self, number: int, entry: InvisibleMessage) -> None:
        async with entry.lock:
            if number not in self._held:
                return
            try:
                async with self._asking():
                    renewed = await self._client.update_message(
                        entry.id, entry.receipt, visibility_timeout=self._hidden_for
                    )
                    entry.receipt = receipt_of(renewed)
            except Exception as error:  # of this message: the others are kept hidden all the same
                log_text = "Could not keep message %s of queue %s hidden while it is handled: %s"
                emit(logger, logging.WARNING, Event.RECEIVE_LOST, log_text, entry.id, self._queue, error)

    def _let_go(self, received: ReceivedMessage) -> None:
        self._held.pop(_number(received), None)
        if self._alone == _number(received):
            self._alone = None
            self._event.set()
        if not self._held and self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None

    async def _sleep(self, seconds: float) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (self._event, self._stopped)]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        async with self._requests.ask(f"receive from queue {self._queue!r}"):
            try:
                yield
            except ResourceNotFoundError as error:
                raise QueueNotFound(self._queue) from error


async def page_of(client: QueueClient, number: int, hidden_for: int) -> list[QueueMessage]:
    """Return up to so many messages, hidden for so many seconds, in a single request: no page is lost with another."""
    pages = client.receive_messages(
        messages_per_page=number, max_messages=number, visibility_timeout=hidden_for
    ).by_page()
    async for page in pages:
        return [message async for message in page]
    return []


def receipt_of(message: QueueMessage) -> str:
    """Return the receipt with which the message can be deleted; only the latest is valid."""
    return message.pop_receipt or ""


async def deleted_with(client: QueueClient, message_id: str, receipt: str) -> bool:
    """Delete a message; False if the receipt has expired."""
    try:
        await client.delete_message(message_id, receipt)
    except HttpResponseError as error:
        if code_of(error) not in GONE_ERRORS:
            raise
        return False
    return True


async def shown(client: QueueClient, message_id: str, receipt: str, text: str | None = None) -> str | None:
    """Make a message visible, with a new text if given, and return its receipt; None if the old receipt has expired."""
    try:
        return receipt_of(await client.update_message(message_id, receipt, content=text, visibility_timeout=0))
    except HttpResponseError as error:
        if code_of(error) not in GONE_ERRORS:
            raise
        return None


def _number(received: ReceivedMessage) -> int:
    if not isinstance(received.receipt, int):
        raise TypeError(f"receipt {received.receipt!r} was not given by this receiver")
    return received.receipt
