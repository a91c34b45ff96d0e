"""The reference transport: queues in this process's memory, gone with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from functools import partial
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING

from delayline.clock import SystemClock
from delayline.errors import DispatchFailed, QueueNotFound
from delayline.events import Event, emit
from delayline.memory.transaction import DOMAIN, MemoryTransaction, in_memory
from delayline.topics import copied, is_topic, log_gone
from delayline.transaction import TransactionMode
from delayline.transport import ReceivedMessage

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence
    from datetime import datetime

    from delayline.clock import Clock
    from delayline.message import Message
    from delayline.transaction import Transaction
    from delayline.transport import TransportOperation


logger: logging.Logger = logging.getLogger(__name__)


class MemoryTransport:
    """Transport with queues in memory; endpoints of a process share an instance.

    Args:
        clock: Decides when a message with a time to be received has expired.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._queues: dict[str, MemoryQueue] = {}
        self._subscribers: dict[str, set[str]] = {}

    @property
    def transaction_domain(self) -> Hashable:
        """The process's memory."""
        return DOMAIN

    @property
    def highest_transaction_mode(self) -> TransactionMode:
        """Every mode works, for as long as the process runs."""
        return TransactionMode.TRANSACTION_SCOPE

    def transaction(self) -> MemoryTransaction:
        """Return a transaction that memory stores can join."""
        return MemoryTransaction()

    async def setup_infrastructure(self, queues: Sequence[str]) -> None:
        """Create the queues that do not exist yet."""
        for name in queues:
            self._queues.setdefault(name, MemoryQueue(self._clock))

    async def remove_queue(self, queue: str) -> None:
        """Remove the queue with its messages."""
        self._queues.pop(queue, None)

    async def start(self) -> None:
        """Do nothing: memory is always connected."""

    async def stop(self) -> None:
        """Do nothing: queues keep their messages."""

    async def dispatch(self, operations: Sequence[TransportOperation], transaction: Transaction | None = None) -> None:
        """Put each message into its queue, now or at the commit; a copy of an event into that of each subscriber."""
        failures: dict[int, Exception] = {}
        for position, operation in enumerate(operations):
            if is_topic(operation.destination):
                self._publish(operation, transaction)
            elif operation.destination in self._queues:
                self._put(operation, transaction)
            else:
                failures[position] = QueueNotFound(operation.destination)
        if failures:
            raise DispatchFailed(failures)

    def _publish(self, event: TransportOperation, transaction: Transaction | None) -> None:
        copies = copied([event], self._subscribers).operations
        for copy in copies:
            if copy.destination in self._queues:
                self._put(copy, transaction)
        log_gone(copy.destination for copy in copies if copy.destination not in self._queues)

    def _put(self, operation: TransportOperation, transaction: Transaction | None) -> None:
        queue = self._queues[operation.destination]
        if transaction is None:
            queue.put(operation.message)
        else:
            in_memory(transaction).on_commit(partial(queue.put, operation.message))

    async def subscribe(self, queue: str, topics: Sequence[str]) -> None:
        """Let the queue have copies of events from now on."""
        for topic in topics:
            self._subscribers.setdefault(topic, set()).add(queue)

    async def unsubscribe(self, queue: str, topics: Sequence[str]) -> None:
        """Let the queue have no more copies of events."""
        for topic in topics:
            self._subscribers.get(topic, set()).discard(queue)

    async def receiver(self, queue: str) -> MemoryReceiver:
        """Return a receiver on the queue."""
        return MemoryReceiver(self._queue(queue))

    async def has_queue(self, queue: str) -> bool:
        """Return whether the queue exists."""
        return queue in self._queues

    async def queues(self) -> Sequence[str]:
        """Return the names of all queues, in order."""
        return sorted(self._queues)

    async def count(self, queue: str) -> int:
        """Return how many messages are in the queue, hidden messages included."""
        stored = self._queue(queue)
        return len(stored.visible) + len(stored.hidden)

    async def browse(self, queue: str, limit: int, *, offset: int = 0) -> Sequence[Message]:
        """Return messages, oldest first, hidden messages included."""
        stored = self._queue(queue)
        entries = sorted([*stored.visible, *stored.hidden.items()], key=itemgetter(0))
        return [message for _, message in entries[offset : offset + limit]]

    async def take(self, queue: str, message_id: str, transaction: Transaction | None = None) -> bool:
        """Remove the oldest visible copy of the message."""
        stored = self._queue(queue)
        entry = next((entry for entry in stored.visible if entry[1].id == message_id), None)
        if entry is None:
            return False
        sequence, message = entry
        stored.visible.remove(entry)
        stored.hidden[sequence] = message
        if transaction is None:
            stored.drop(sequence)
        else:
            in_memory(transaction).on_commit(partial(stored.drop, sequence))
            in_memory(transaction).on_rollback(partial(stored.give_back, sequence))
        return True

    async def purge(self, queue: str) -> int:
        """Remove every visible message."""
        visible = self._queue(queue).visible
        number = len(visible)
        self._queue(queue).forget(sequence for sequence, _ in visible)
        visible.clear()
        return number

    def _queue(self, name: str) -> MemoryQueue:
        if name not in self._queues:
            raise QueueNotFound(name)
        return self._queues[name]


class MemoryQueue:
    """Messages in the order they came, and messages that a receiver or a transaction holds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._expiry: dict[int, datetime] = {}
        self.visible: deque[tuple[int, Message]] = deque()
        self.hidden: dict[int, Message] = {}
        self.changed: asyncio.Event = asyncio.Event()
        self._sequence = count()

    def put(self, message: Message) -> None:
        """Append the message and wake receivers."""
        sequence, span = next(self._sequence), message.time_to_be_received
        if span is not None:
            with contextlib.suppress(OverflowError):  # beyond year 9999: never
                self._expiry[sequence] = self._clock.now() + span
        self.visible.append((sequence, message))
        self.changed.set()

    def expired(self, sequence: int) -> bool:
        """Return whether the message has waited for longer than its time to be received."""
        expiry = self._expiry.get(sequence)
        return expiry is not None and expiry <= self._clock.now()

    def forget(self, sequences: Iterable[int]) -> None:
        """Forget the expiry of messages that are gone."""
        for sequence in sequences:
            self._expiry.pop(sequence, None)

    def drop(self, sequence: int) -> None:
        """Forget a hidden message for good."""
        del self.hidden[sequence]
        self.forget([sequence])

    def give_back(self, sequence: int) -> None:
        """Return a hidden message to its place in the order."""
        message = self.hidden.pop(sequence)
        position = next((i for i, (number, _) in enumerate(self.visible) if number > sequence), len(self.visible))
        self.visible.insert(position, (sequence, message))
        self.changed.set()


class MemoryReceiver:
    """Takes messages from a queue; competes fairly with other receivers on it."""

    def __init__(self, queue: MemoryQueue) -> None:
        self._queue = queue
        self._stopped = False

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        """Wait for messages and hide up to `limit` of them."""
        queue = self._queue
        batch: list[ReceivedMessage] = []
        while not batch and not self._stopped:
            if not queue.visible:
                queue.changed.clear()
                await queue.changed.wait()
            while queue.visible and len(batch) < limit and not self._stopped:
                sequence, message = queue.visible.popleft()
                if queue.expired(sequence):
                    queue.forget([sequence])
                    log_text = "Deleted expired message %s"
                    emit(logger, logging.DEBUG, Event.EXPIRED, log_text, message.id)
                    continue
                queue.hidden[sequence] = message
                batch.append(ReceivedMessage(message, sequence))
        return batch

    async def acknowledge_many(
        self, received: Sequence[ReceivedMessage], transaction: Transaction | None = None
    ) -> Sequence[bool]:
        """Forget the hidden messages, now or at the commit."""
        return [await self.acknowledge(message, transaction) for message in received]

    async def acknowledge(self, received: ReceivedMessage, transaction: Transaction | None = None) -> bool:
        """Forget the hidden message, now or at the commit."""
        hidden, sequence = self._queue.hidden, received.receipt
        if not isinstance(sequence, int) or sequence not in hidden:
            return False
        if transaction is None:
            self._queue.drop(sequence)
        else:
            in_memory(transaction).on_commit(partial(self._queue.drop, sequence))
        return True

    async def release(self, received: ReceivedMessage) -> None:
        """Put the hidden message back into its place."""
        sequence = received.receipt
        if isinstance(sequence, int) and sequence in self._queue.hidden:
            self._queue.give_back(sequence)

    async def release_many(self, received: Sequence[ReceivedMessage]) -> None:
        """Put the messages back where they were."""
        for message in received:
            await self.release(message)

    def holds(self, received: ReceivedMessage) -> bool:
        """Return whether the message is hidden."""
        return received.receipt in self._queue.hidden

    async def stop(self) -> None:
        """End a waiting receive."""
        self._stopped = True
        self._queue.changed.set()
