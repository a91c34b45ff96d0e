"""Group commit: concurrent sends share transactions, and each waits for its own message only."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from delayline.delayed.store import SupportsBatches
from delayline.errors import BackendUnavailable, BackendUnusable, InvalidMessage
from delayline.events import Event, emit

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from delayline.circuit_breaker import RepeatedFailuresOverTime
    from delayline.delayed.store import DelayedMessageStore
    from delayline.message import DelayedMessage

logger = logging.getLogger(__name__)

MAXIMUM_GROUP: Final = 500

PendingStore = tuple["DelayedMessage", "asyncio.Future[None]"]


class StoreGroup:
    """Stores messages; messages that arrive while a transaction is running share the next one."""

    def __init__(self, store: DelayedMessageStore, breaker: RepeatedFailuresOverTime) -> None:
        self._store = store
        self._batches = store if isinstance(store, SupportsBatches) else None
        self._breaker = breaker
        self._waiting: list[PendingStore] = []
        self._writing = False
        self._under_way: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def store(self, message: DelayedMessage) -> None:
        """Return when the message is durable; raises the store's error.

        After a cancellation the message may or may not be stored, but not twice.
        """
        try:
            if self._batches is None:
                await asyncio.shield(self._start(self._store_one(message)))
            elif self._writing:
                done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiting.append((message, done))
                await done
            else:
                await self._store_alone(self._batches, message)
        except Exception as error:
            emit(
                logger,
                logging.WARNING,
                Event.STORE_FAILED,
                "Error while storing delayed message %s: %s",
                message.id,
                error,
                message=message,
            )
            if not isinstance(error, InvalidMessage):  # the message's fault, not the store's
                self._breaker.note(error)  # without a pause: the caller gets the error at once
            raise
        self._breaker.success()
        if logger.isEnabledFor(logging.DEBUG):
            emit(logger, logging.DEBUG, Event.STORED, "stored %s due %s", message.id, message.due, messages=(message,))

    async def stop(self) -> None:
        """Wait until every accepted message is stored or has failed."""
        while self._under_way or not self._idle.is_set():
            await asyncio.gather(self._idle.wait(), *self._under_way, return_exceptions=True)

    async def _store_one(self, message: DelayedMessage) -> None:
        await self._store.store(message)

    async def _store_alone(self, batches: SupportsBatches, message: DelayedMessage) -> None:
        """Store without creating a task: most sends are alone. Sends during it form the next group."""
        self._writing = True
        self._idle.clear()
        try:
            await batches.store_many([message])
        finally:
            if self._waiting:
                self._start(self._write(batches))
            else:
                self._end()

    async def _write(self, batches: SupportsBatches) -> None:
        try:
            while self._waiting:
                group, self._waiting = self._waiting[:MAXIMUM_GROUP], self._waiting[MAXIMUM_GROUP:]
                await self._write_group(batches, group)
        finally:
            self._end()

    def _end(self) -> None:
        self._writing = False
        self._idle.set()

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="delayline store")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def _write_group(self, batches: SupportsBatches, group: list[PendingStore]) -> None:
        try:
            await batches.store_many([message for message, _ in group])
        except (BackendUnavailable, BackendUnusable) as error:
            _finish(group, error)
        except Exception as error:
            if len(group) == 1:
                _finish(group, error)
                return
            # A message that the store cannot take must not fail the others.
            for one in group:
                await self._write_group(batches, [one])
        except BaseException:
            for _, done in group:
                done.cancel()
            raise
        else:
            _finish(group, None)


def _finish(group: list[PendingStore], error: Exception | None) -> None:
    for _, done in group:
        if done.done():
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
