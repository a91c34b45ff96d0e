"""The protocols of transports, which move messages between queues."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, runtime_checkable

from delayline.errors import ConfigurationError
from delayline.external import UNSET

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from datetime import timedelta

    from delayline.external import Unset
    from delayline.message import Message
    from delayline.transaction import Transaction, TransactionMode


#: What every transport has.
VERBS_OF_TRANSPORTS: Final = ("highest_transaction_mode", "setup_infrastructure", "start", "stop", "dispatch")
SUSPECT_FROM: Final = 2
"""From so many deliveries on that have ended without an outcome a message is handled beside no others."""


@dataclass(frozen=True, slots=True)
class TransportOperation:
    """A message and the queue it goes to."""

    message: Message
    destination: str


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message taken from a queue and hidden from other receivers until it is acknowledged or released."""

    message: Message
    receipt: Hashable
    """The receiver's own handle of the message; opaque to others."""
    earlier_deliveries: int = 0
    """How many deliveries before this one ended without an outcome, by a crash or by a release, if the queue counts
    them; a broker that only marks messages as delivered before counts to 1."""


class Receiver(Protocol):
    """An endpoint's hold on its input queue. Called from one event loop; methods may be awaited concurrently."""

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        """Wait for messages and return them, oldest first.

        A message is returned to a single receiver at a time, in whatever process; its holder's crash gives it back.

        Args:
            limit: The most messages to return.

        Returns:
            At least a message; none only after `stop`.

        Raises:
            BackendUnavailable: The transport is down.
        """
        ...

    async def acknowledge(self, received: ReceivedMessage, transaction: Transaction | None = None) -> bool:
        """Remove the message from the queue.

        Args:
            received: A message of this receiver.
            transaction: The transaction of the removal; without it the message is removed durably on return.

        Returns:
            Whether it was removed. False means that another receiver has handled it; the caller should roll back.
        """
        ...

    async def release(self, received: ReceivedMessage) -> None:
        """Give the message back to the queue, visible at once. Idempotent.

        Args:
            received: A message of this receiver.
        """
        ...

    async def stop(self) -> None:
        """End a waiting `receive` and accept no more; received messages can still be acknowledged. Idempotent."""
        ...


@runtime_checkable
class SupportsPrefetch(Protocol):
    """Capability of a receiver: messages can be received ahead of their handlers and acknowledged together."""

    async def acknowledge_many(
        self, received: Sequence[ReceivedMessage], transaction: Transaction | None = None
    ) -> Sequence[bool]:
        """Remove the messages from the queue.

        If it raises, none was removed or, as with BackendUnavailable, that is unknown.

        Args:
            received: Messages of this receiver.
            transaction: The transaction of the removals; without it they are durable on return.

        Returns:
            For each message what `acknowledge` returns.
        """
        ...

    async def release_many(self, received: Sequence[ReceivedMessage]) -> None:
        """Give the messages back to the queue, visible at once. Idempotent.

        Args:
            received: Messages of this receiver.
        """
        ...

    def holds(self, received: ReceivedMessage) -> bool:
        """Return False if another receiver may have the message by now, for example after a lost connection.

        Args:
            received: A message of this receiver.
        """
        ...


@runtime_checkable
class SupportsFlush(Protocol):
    """Capability of a receiver: `acknowledge` returns before the acknowledgement has reached the transport."""

    async def flush(self, received: ReceivedMessage) -> None:
        """Return once the transport has processed the message's acknowledgement.

        In transaction mode `NONE` its handler runs after it: a crash then cannot return the message to its queue.

        Args:
            received: A message that this receiver has acknowledged.

        Raises:
            BackendUnavailable: The transport did not answer; the message may be handled again, or not at all.
        """
        ...


@runtime_checkable
class SupportsDeliveryNotes(Protocol):
    """Capability of a receiver: counts by notes of its own how many deliveries of a message have ended with a crash."""

    async def begin(self, received: ReceivedMessage) -> None:
        """Note, durably on return, that the handling of a message begins whose deliveries have crashed before.

        Args:
            received: A message of this receiver, with `earlier_deliveries`.
        """
        ...


@runtime_checkable
class SupportsSureCounts(Protocol):
    """Capability of a receiver whose queue counts every return: to count crashes alone from some number on."""

    def counts_surely(self, received: ReceivedMessage) -> bool:
        """Return whether `earlier_deliveries` of the message are crashes only.

        Args:
            received: A message of this receiver.
        """
        ...

    async def count_surely(self, received: ReceivedMessage, crashes: int) -> None:
        """Replace the message by a copy in its queue that has this count, and counts further crashes only.

        Args:
            received: A message of this receiver.
            crashes: How many deliveries have ended with a crash, at most.
        """
        ...


@runtime_checkable
class SupportsHoldingOne(Protocol):
    """Capability of a receiver that holds further messages: hold no other whose crashes are counted."""

    async def hold_only(self, received: ReceivedMessage) -> None:
        """Give all other messages back, and take no more until the message is acknowledged or released.

        Args:
            received: A message of this receiver.
        """
        ...


@runtime_checkable
class SupportsAnswers(Protocol):
    """Capability of a receiver: it tells when its server has last answered, also where the queue was empty.

    After a fault an empty queue looks like a server that hangs. Without this capability an endpoint counts as recovered
    only when `receive` returns.
    """

    @property
    def answered_at(self) -> float:
        """When the server has last answered for this queue, by `time.monotonic`; minus infinity for never."""
        ...


class Transport(Protocol):
    """Moves messages between queues. Passed to endpoints of the same event loop."""

    @property
    def transaction_domain(self) -> Hashable | None:
        """Equal to a store's domain when both can share a local transaction; None for none."""
        ...

    @property
    def highest_transaction_mode(self) -> TransactionMode:
        """The strongest mode it can honour."""
        ...

    async def setup_infrastructure(self, queues: Sequence[str]) -> None:
        """Create the queues and whatever they need. Idempotent, safe to run in several processes at once.

        Args:
            queues: Names of the queues.
        """
        ...

    async def start(self) -> None:
        """Connect. Every start needs a `stop`; several endpoints may share the transport. Raises BackendUnavailable."""
        ...

    async def stop(self) -> None:
        """Undo a `start`; the last disconnects."""
        ...

    async def dispatch(self, operations: Sequence[TransportOperation], transaction: Transaction | None = None) -> None:
        """Send every operation, durably on return, or at the commit of `transaction` where given.

        Not idempotent: sending twice is two messages with the same id.

        Args:
            operations: Messages with their destinations.
            transaction: A transaction of this transport, or of a store that shares its domain.

        Raises:
            DispatchFailed: Names the operations that were not sent (a missing queue: QueueNotFound); all others were.
            BackendUnavailable: The transport is down and nothing can be sent now.
            Exception: Any other error means that none was sent.
        """
        ...

    async def receiver(self, queue: str) -> Receiver:
        """Return a receiver on the queue.

        Args:
            queue: The queue.

        Raises:
            QueueNotFound: The queue does not exist.
        """
        ...


@runtime_checkable
class SupportsCancelledDispatch(Protocol):
    """Capability of a transport: a `dispatch` without a transaction that is cancelled returns at once, and goes on.

    `stop` waits for its end; errors after the cancellation are logged.
    """

    @property
    def goes_on_when_cancelled(self) -> bool:
        """Whether it does so now."""
        ...


@runtime_checkable
class SupportsStopDeadline(Protocol):
    """Capability of a transport, store or delayed delivery: to wait less for a server when its endpoint stops."""

    def stop_soon(self) -> None:
        """Limit present and later waits, so that an endpoint with a silent server stops within 20 s."""
        ...


@runtime_checkable
class SupportsQueueAddresses(Protocol):
    """Capability: an endpoint's queue is addressed by another name than the endpoint's."""

    def address_of(self, endpoint_name: str) -> str:
        """Return the address of the endpoint's queue: for replies, and in failed messages."""
        ...


@runtime_checkable
class SupportsTransportTransactions(Protocol):
    """Capability: sends, receives and (in a shared domain) the store in the same transaction."""

    def transaction(self) -> Transaction:
        """Return a new transaction; enter it with `async with`."""
        ...


@dataclass(frozen=True, slots=True)
class QueueState:
    """A queue at a moment; None is unknown."""

    queue: str
    messages: int | None = None
    """How many messages are in it; of some back ends without those that a receiver holds."""
    received: bool | None = None
    """Whether any process receives from it, or has it open to receive again after a pause."""
    paused: bool | None = None
    """Whether it is paused; False also where queues cannot be paused."""


@runtime_checkable
class SupportsQueueStates(Protocol):
    """Capability of a transport: tell the states of many queues at the cost of a few questions."""

    async def queue_states(self, queues: Sequence[str] | None) -> Sequence[QueueState]:
        """Return the states of the queues, in any order; queues that do not exist are left out.

        Args:
            queues: Names of queues; None for all that can be listed.

        Raises:
            DelaylineError: Nothing can be told.
        """
        ...


@runtime_checkable
class SupportsQueueManagement(Protocol):
    """Capability: look into queues and take single messages out, for people and for `delayline errors`."""

    async def count(self, queue: str) -> int:
        """Return how many messages are in the queue, hidden messages included.

        Args:
            queue: The queue.

        Raises:
            QueueNotFound: The queue does not exist.
        """
        ...

    async def browse(self, queue: str, limit: int, *, offset: int = 0) -> Sequence[Message]:
        """Return messages, oldest first, without taking them.

        Args:
            queue: The queue.
            limit: The most messages to return.
            offset: How many messages to leave out first.

        Raises:
            QueueNotFound: The queue does not exist.
        """
        ...

    async def take(self, queue: str, message_id: str, transaction: Transaction | None = None) -> bool:
        """Remove a copy of the message.

        Args:
            queue: The queue.
            message_id: Id of the message.
            transaction: The transaction of the removal; without it the copy is removed durably on return.

        Returns:
            Whether a copy was removed; False when none is there or it is being handled.
        """
        ...

    async def purge(self, queue: str) -> int:
        """Remove every message that is not being handled.

        Args:
            queue: The queue.

        Returns:
            How many messages were removed.

        Raises:
            QueueNotFound: The queue does not exist.
        """
        ...


class Stretch(NamedTuple):
    """The messages with successive numbers, in numbers."""

    messages: int
    """How many there are."""
    mark: int
    """Another one once others are there, if they are as many."""


class QueueLook(NamedTuple):
    """What a look at a queue finds."""

    total: int
    """How many messages the queue has, also those that the look does not show."""
    stretches: Mapping[int, Stretch]
    """The messages that can be read: with a width `w`, those numbered `n * w` to `n * w + w - 1` by `n`."""
    renumbered: bool = False
    """Whether numbers may mean other messages than at the last look."""


class NumberedQueue(Protocol):
    """The messages of a queue by their numbers: one that arrives later has a higher number, as a rule."""

    async def look(self, width: int) -> QueueLook:
        """Count the messages in stretches of numbers. Raises QueueNotFound."""
        ...

    async def numbers(self, first: int, last: int) -> Sequence[int]:
        """Return the numbers from `first` to `last` that messages have, in order."""
        ...

    async def read(
        self, first: int, last: int | None, limit: int, *, newest_first: bool = False, bodies: bool = False
    ) -> Sequence[tuple[int, Message]]:
        """Return messages with their numbers, in the order of these.

        Args:
            first: The lowest number.
            last: The highest number; None for no limit.
            limit: The most messages to return.
            newest_first: Whether to begin with the highest numbers.
            bodies: Whether to read bodies too, which are empty otherwise.
        """
        ...

    async def messages(self, numbers: Sequence[int], *, bodies: bool = False) -> Mapping[int, Message]:
        """Return the messages with the numbers that are still there, with bodies if asked for."""
        ...


@runtime_checkable
class SupportsNumberedQueues(Protocol):
    """Capability: read a queue by the numbers of its messages."""

    def numbered_queue(self, queue: str) -> NumberedQueue:
        """Return the messages of a queue by their numbers."""
        ...


class QueuePass(Protocol):
    """A look through a queue; iterate over its messages, oldest first."""

    def __aiter__(self) -> QueuePass: ...

    async def __anext__(self) -> Message: ...

    async def remove(self) -> bool:
        """Remove the message that the iteration returned last, durably; False if another process may have it."""
        ...


@runtime_checkable
class SupportsQueuePass(Protocol):
    """Capability: look through a queue in a single pass, where looking takes messages and gives them back."""

    def passing(self, queue: str) -> AbstractAsyncContextManager[QueuePass]:
        """Return the messages that are in the queue and that no receiver holds; messages not removed return at the end.

        Args:
            queue: The queue.

        Raises:
            QueueNotFound: The queue does not exist.
        """
        ...


@runtime_checkable
class SupportsPeek(Protocol):
    """Capability: look at the first messages of a queue at once; looking at more hides messages from receivers."""

    @property
    def peeked_at_most(self) -> int:
        """How many messages are looked at without hiding any."""
        ...


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The limits of a queue, which hold over all processes that receive from it."""

    queue: str
    paused: bool = False
    """Whether no messages are received."""
    concurrency: int | None = None
    """How many messages are handled at once."""
    rate: float | None = None
    """How many messages are received a second."""
    handlers: Mapping[str, int] = field(default_factory=dict, hash=False)
    """How many messages of a type are handled at once, by its name. They replace those of `handles(concurrency=)`."""

    @property
    def text(self) -> str:
        """The limits as a person reads them."""
        rate = "any number" if self.rate is None else f"{self.rate:g}"
        said = f"{'paused' if self.paused else 'received'}, {self.concurrency or 'any number'} at once, {rate} a second"
        return f"{said}; types at once: {self.of_types}" if self.handlers else said

    @property
    def of_types(self) -> str:
        """The limits of types as a person reads them."""
        return ", ".join(f"{name} {number}" for name, number in sorted(self.handlers.items()))


@runtime_checkable
class SupportsQueueLimits(Protocol):
    """Capability: pause queues and limit them, while endpoints run; every process follows within a second."""

    async def limits(self, queue: str | None = None) -> Sequence[QueueLimits]:
        """Return the limits of the queue, or of every queue, by name.

        Args:
            queue: The queue; None for all.

        Raises:
            QueueNotFound: The queue does not exist.
        """
        ...

    async def set_limits(
        self,
        queue: str,
        *,
        paused: bool | Unset = UNSET,
        concurrency: int | Unset | None = UNSET,
        rate: float | Unset | None = UNSET,
        handlers: Mapping[str, int | None] | Unset = UNSET,
    ) -> QueueLimits:
        """Change the limits that are given, None for no limit, and return all of the queue.

        Args:
            queue: The queue.
            paused: Whether to receive no messages; messages that were received already are handled.
            concurrency: How many messages are handled at once; 1 to 10 000.
            rate: How many messages are received a second; above 0.
            handlers: How many messages of a type are handled at once, 1 to 10 000, by its name; None for the number in
                `handles(concurrency=)`. Other types keep their limits.

        Raises:
            QueueNotFound: The queue does not exist.
            ConfigurationError: A value is out of range, or a type has no name.
        """
        ...


def limited(transport: object) -> SupportsQueueLimits:
    """Return the transport if its queues can be limited; raises ConfigurationError if they cannot."""
    if not isinstance(transport, SupportsQueueLimits):
        raise ConfigurationError(
            f"{type(transport).__name__} has no limits of queues: they need queues in a SQL database"
        )
    return transport


@runtime_checkable
class SupportsQualifiedQueues(Protocol):
    """Capability: queues that belong to an endpoint beside its own have names in the transport's own style."""

    def qualified(self, queue: str, qualifier: str) -> str:
        """Return the name of such a queue; `{queue}.{qualifier}` in transports without this capability.

        Args:
            queue: The endpoint's queue.
            qualifier: The purpose of the other queue, such as `Timeouts`.
        """
        ...


class HandlerSlots(Protocol):
    """The slots of a type of message: as many messages are handled at once as there are slots, over all processes."""

    async def take(self) -> int | None:
        """Return a free slot, which is free again when this process ends; None while all are taken."""
        ...

    async def give_back(self, slot: int) -> None:
        """Free a slot."""
        ...


@runtime_checkable
class SupportsHandlerSlots(Protocol):
    """Capability of a receiver: limit how many messages of a type are handled at once, over all processes."""

    def handler_slots(self, numbers: Mapping[str, int]) -> Mapping[str, HandlerSlots]:
        """Return the slots of each type that is limited, by its name; the receiver updates them as limits change.

        Args:
            numbers: How many messages are handled at once, by type, unless the limits of the queue have a number.
        """
        ...


@runtime_checkable
class SupportsQueueComparison(Protocol):
    """Capability: compares queues with the queues that it would create."""

    async def difference(self, queue: str) -> str:
        """Return in which way an existing queue differs; empty if it does not. Raises QueueNotFound."""
        ...


@runtime_checkable
class SupportsQueueRemoval(Protocol):
    """Capability: remove a queue, as that for the replies to a process that ends."""

    async def remove_queue(self, queue: str) -> None:
        """Remove the queue with its messages; nothing where it does not exist.

        Args:
            queue: The queue, which nobody receives from any more.
        """
        ...


@runtime_checkable
class SupportsExpiringQueues(Protocol):
    """Capability: create a queue that the back end removes by itself when nobody has received from it for a while."""

    async def create_expiring(self, queue: str, unused_for: timedelta) -> None:
        """Create the queue.

        Args:
            queue: The queue.
            unused_for: It is removed when no process has received from it for so long.
        """
        ...


@runtime_checkable
class SupportsQueueLookup(Protocol):
    """Capability: look up whether a queue exists, so that a send to a misspelt destination fails."""

    async def has_queue(self, queue: str) -> bool:
        """Return whether a message for the queue would arrive.

        Args:
            queue: A destination.

        Raises:
            BackendUnavailable: The transport does not answer.
        """
        ...

    async def queues(self) -> Sequence[str]:
        """Return the names of queues that exist, as far as they can be listed; for suggestions."""
        ...


@runtime_checkable
class SupportsPublishing(Protocol):
    """Capability: `dispatch` to the address of a topic sends a copy to each queue that subscribes to it.

    The address is `topic:` and the name of the event's type; the header with the names of its base types has further
    topics. A queue gets one copy. An event without subscribers is dispatched all the same, to nobody.
    """

    async def subscribe(self, queue: str, topics: Sequence[str]) -> None:
        """Let the queue have copies of events from now on, durably on return. Idempotent.

        Args:
            queue: The queue.
            topics: Names of types.
        """
        ...

    async def unsubscribe(self, queue: str, topics: Sequence[str]) -> None:
        """Let the queue have no more copies of events, durably on return. Idempotent.

        Args:
            queue: The queue.
            topics: Names of types.
        """
        ...


@runtime_checkable
class SupportsSubscriptionRights(Protocol):
    """Capability of transports that publish: report missing rights to subscribe."""

    async def missing_subscription_rights(self) -> Sequence[str]:
        """Return the statements that grant them, beside those of `SupportsRightsCheck`.

        Raises:
            BackendUnavailable, BackendUnusable: The database cannot be queried.
        """
        ...


def address_in(transport: Transport, queue: str) -> str:
    """Return how others have to address a queue of the transport."""
    return transport.address_of(queue) if isinstance(transport, SupportsQueueAddresses) else queue


def qualified_queue(transport: Transport, queue: str, qualifier: str) -> str:
    """Return the name of a queue that belongs to an endpoint beside its own; see `SupportsQualifiedQueues`."""
    if isinstance(transport, SupportsQualifiedQueues):
        return transport.qualified(queue, qualifier)
    return f"{queue}.{qualifier}"
