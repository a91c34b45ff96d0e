"""Group commit: concurrent sends share transactions, and each waits for its own message only."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

from delayline.delayed.store import SupportsBatches
from delayline.errors import BackendUnavailable, BackendUnusable, InvalidMessage
from delayline.events import Event, emit
from delayline.transaction import WAITING_TASK

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from datetime import datetime

    from delayline.circuit_breaker import RepeatedFailuresOverTime
    from delayline.delayed.store import DelayedMessageStore
    from delayline.message import DelayedMessage

logger = logging.getLogger(__name__)

MAXIMUM_GROUP: Final = 500
ABANDONED: Final = "Message %s, whose send was cancelled, is not sent: %s"

PendingStore = tuple["DelayedMessage", "asyncio.Future[None]"]


class StoreGroup:
    """Stores messages; messages that arrive while a transaction is running share the next one.

    Args:
        store: Takes the messages, in batches if it can.
        breaker: Counts failures.
        stored: Called with the due time of each stored message.
    """

    def __init__(
        self,
        store: DelayedMessageStore,
        breaker: RepeatedFailuresOverTime,
        stored: Callable[[datetime], None],
    ) -> None:
        self._store = store
        self._stored = stored
        self._batches = store if isinstance(store, SupportsBatches) else None
        self._breaker = breaker
        self._waiting: list[PendingStore] = []
        self._writing = False
        self._under_way: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def store(self, message: DelayedMessage) -> None:
        """Return when the message is durable; raises the store's error.

        If cancelled, it returns at once, and the message is usually stored all the same, though not twice.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        caller = asyncio.current_task()
        try:
            if self._batches is None:
                self._start(self._store_one((message, done), caller))
            else:
                self._waiting.append((message, done))
                if not self._writing:
                    self._writing = True
                    self._idle.clear()
                    self._start(self._write(self._batches, caller))
            await done
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

    async def _store_one(self, pending: PendingStore, caller: asyncio.Task[Any] | None) -> None:
        WAITING_TASK.set(caller)
        try:
            await self._store.store(pending[0])
        except Exception as error:
            self._finish([pending], error)
        except BaseException:
            pending[1].cancel()
            raise
        else:
            self._finish([pending], None)

    async def _write(self, batches: SupportsBatches, caller: asyncio.Task[Any] | None) -> None:
        WAITING_TASK.set(caller)
        try:
            while self._waiting:
                group, self._waiting = self._waiting[:MAXIMUM_GROUP], self._waiting[MAXIMUM_GROUP:]
                await self._write_group(batches, group)
        except asyncio.CancelledError:
            for _, done in self._waiting:
                done.cancel()
            self._waiting = []
            raise
        finally:
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
            self._finish(group, error)
        except Exception as error:
            if len(group) == 1:
                self._finish(group, error)
                return
            # A message that the store cannot take must not fail the others.
            for one in group:
                await self._write_group(batches, [one])
        except BaseException:
            for _, done in group:
                done.cancel()
            raise
        else:
            self._finish(group, None)

    def _finish(self, group: list[PendingStore], error: Exception | None) -> None:
        for message, done in group:
            if error is None:
                self._stored(message.due)
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)
            elif error is not None:
                emit(logger, logging.WARNING, Event.SEND_ABANDONED, ABANDONED, message.id, error)
