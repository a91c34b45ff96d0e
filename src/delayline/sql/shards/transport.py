"""A transport over several shards: the same queues in each, and a message in one of them."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from delayline.circuit_breaker import back_end_of, is_out_of_reach
from delayline.clock import ONE_SECOND
from delayline.errors import BackendUnavailable, DispatchFailed
from delayline.external import UNSET
from delayline.shards import OUT_OF_REACH
from delayline.sql.shards.parts import OnShards, ShardedTransaction
from delayline.sql.transport import SqlTransport
from delayline.transaction import TransactionMode
from delayline.transport import QueueState, ReceivedMessage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from datetime import timedelta

    from delayline.external import Unset
    from delayline.message import Message
    from delayline.shards import Shard, ShardMap
    from delayline.sql.receiver import SqlReceiver
    from delayline.transaction import Transaction
    from delayline.transport import QueueLimits, TransportOperation

Result = TypeVar("Result")


class ShardedTransport(OnShards[SqlTransport]):
    """Transport with queues in several SQL databases, or in several schemas.

    A message that is sent outside of handlers goes to the shard that the hash of its id says; what a handler sends
    stays in the shard of its message. A shard that is out of reach stops its own messages only.

    Args:
        shards: Which shards there are.
        poll_interval: How often idle receivers look for messages without a notification.
        fair_by: `header:NAME`; see `SqlTransport`.

    Raises:
        ConfigurationError: A URL or another argument is invalid.
        MissingExtra: A database's driver is not installed.
    """

    messaging_system = "delayline"

    def __init__(self, shards: ShardMap, *, poll_interval: timedelta = ONE_SECOND, fair_by: str | None = None) -> None:
        def make(shard: Shard) -> SqlTransport:
            return SqlTransport(shard.url, schema=shard.schema, fair_by=fair_by, poll_interval=poll_interval)

        super().__init__(shards, make, "its queues")
        self._queues: dict[str, None] = {}
        """The queues that a shard which is reached late gets."""
        self._starts = 0

    @property
    def highest_transaction_mode(self) -> TransactionMode:
        """Every mode works: a message, its delayed sends and its handler's rows are in one shard."""
        return TransactionMode.TRANSACTION_SCOPE

    @property
    def goes_on_when_cancelled(self) -> bool:
        """True once the tables of every shard have been checked."""
        return all(part.goes_on_when_cancelled for part in self._parts.values())

    async def start(self) -> None:
        """Open the shards; those that are out of reach later. Raises BackendUnavailable if none answers."""
        self._starts += 1
        if self._starts > 1:
            return
        try:
            await self.opening.open({name: partial(self._open, name) for name in self._parts})
        except BaseException:
            await self.stop()
            raise

    async def _open(self, name: str) -> None:
        part = self._parts[name]
        if name not in self._opened:
            await part.start()
            self._opened.add(name)
        if self._queues:
            await part.setup_infrastructure(list(self._queues))
            await self._versions.publish(self._shards[name])

    async def stop(self) -> None:
        """Undo a `start`."""
        self._starts -= 1
        if self._starts:
            return
        await self.opening.stop()
        await self._versions.stop()
        opened, self._opened = self._opened, set()
        for name in opened:
            await self._parts[name].stop()

    async def setup_infrastructure(self, queues: Sequence[str]) -> None:
        """Create the queues in every shard, and keep the version of the map there.

        A started transport creates them in a shard that is out of reach when it answers; another raises its outage.
        """
        if self._starts:
            self._queues |= dict.fromkeys(queues)
        missing = self.opening.out_of_reach if self._starts else {}
        reached = [name for name in self._parts if name not in missing]
        for name in reached:
            await self._versions.publish(self._shards[name])
        await asyncio.gather(*(self._parts[name].setup_infrastructure(queues) for name in reached))

    def measures(self) -> dict[str, float]:
        """Return how many shards are out of reach."""
        missing = [
            name
            for name, part in self._parts.items()
            if name in self.opening.out_of_reach or is_out_of_reach(back_end_of(part))
        ]
        return {OUT_OF_REACH: float(len(missing))}

    async def missing_rights(self, endpoint_name: str, *, takes: bool) -> Sequence[str]:
        """Return the GRANT statements for missing rights; see `SupportsRightsCheck`. Looks at the map's version too."""
        await self.check_map()
        rights = [await part.missing_rights(endpoint_name, takes=takes) for part in self._living]
        return [grant for grants in rights for grant in grants]

    async def missing_subscription_rights(self) -> Sequence[str]:
        """Return the GRANT statements for missing rights to subscribe; see `SupportsSubscriptionRights`."""
        rights = [await part.missing_subscription_rights() for part in self._living]
        return [grant for grants in rights for grant in grants]

    async def dispatch(self, operations: Sequence[TransportOperation], transaction: Transaction | None = None) -> None:
        """Send every operation to its shard, those of a transaction to the shard of that."""
        if not operations:
            return
        if transaction is not None:
            part, inner = await self._within(transaction, operations[0].message.id)
            await part.dispatch(operations, inner)
            return
        shards: dict[str, list[int]] = defaultdict(list)
        for position, operation in enumerate(operations):
            shards[self.shard_of(operation.message.id)].append(position)
        if len(shards) == 1:
            [name] = shards
            await self._part(name).dispatch(operations)
            return
        results = await asyncio.gather(
            *(self._dispatch(name, [operations[position] for position in at]) for name, at in shards.items()),
            return_exceptions=True,
        )
        failures = _failures(shards.values(), results)
        if failures:
            errors = [*failures.values()]
            if len(errors) == len(operations) and all(isinstance(error, BackendUnavailable) for error in errors):
                raise errors[0]
            raise DispatchFailed(failures)

    def transaction(self) -> ShardedTransaction:
        """Return a transaction, which is in the shard of its first message."""
        return ShardedTransaction(self._domain, lambda name: self._part(name).transaction())

    async def _within(self, transaction: Transaction, message_id: str) -> tuple[SqlTransport, Transaction]:
        """Return the part that a transaction is in, and its own transaction; the id says it at the first use."""
        if not isinstance(transaction, ShardedTransaction):
            return self._part_in(transaction, message_id), transaction
        name = transaction.shard or self.shard_of(message_id)
        return self._part(name), await transaction.within(name)

    async def _dispatch(self, name: str, operations: Sequence[TransportOperation]) -> None:
        await self._part(name).dispatch(operations)

    async def subscribe(self, queue: str, topics: Sequence[str]) -> None:
        """Let the queue have copies of events from now on, in every shard."""
        await self._each(lambda part: part.subscribe(queue, topics))

    async def unsubscribe(self, queue: str, topics: Sequence[str]) -> None:
        """Let the queue have no more copies of events, in every shard."""
        await self._each(lambda part: part.unsubscribe(queue, topics))

    async def receiver(self, queue: str) -> ShardedReceiver:
        """Return a receiver on the queue in every shard that answers now."""
        reached = {name: part for name, part in self._parts.items() if name not in self.opening.out_of_reach}
        receivers = await asyncio.gather(*(part.receiver(queue) for part in reached.values()))
        return ShardedReceiver(dict(zip(reached, receivers, strict=True)), self)

    async def has_queue(self, queue: str) -> bool:
        """Return whether the queue is registered, in a shard that answers: all have the same queues."""
        return await self._first(lambda part: part.has_queue(queue))

    async def queues(self) -> Sequence[str]:
        """Return the names of all queues, in order."""
        return await self._first(lambda part: part.queues())

    async def remove_queue(self, queue: str) -> None:
        """Remove the queue with its messages from every shard."""
        await self._each(lambda part: part.remove_queue(queue))

    async def limits(self, queue: str | None = None) -> Sequence[QueueLimits]:
        """Return the limits of the queue, or of every queue, by name; they hold in each shard for itself."""
        return await self._first(lambda part: part.limits(queue))

    async def set_limits(
        self,
        queue: str,
        *,
        paused: bool | Unset = UNSET,
        concurrency: int | Unset | None = UNSET,
        rate: float | Unset | None = UNSET,
        handlers: Mapping[str, int | None] | Unset = UNSET,
    ) -> QueueLimits:
        """Change the limits that are given in every shard; each shard has them for itself."""
        changed = await self._each(
            lambda part: part.set_limits(queue, paused=paused, concurrency=concurrency, rate=rate, handlers=handlers)
        )
        return next(iter(changed.values()))

    async def count(self, queue: str) -> int:
        """Return how many messages are in the queue, in all shards; an outage of one is raised."""
        return sum((await self._each(lambda part: part.count(queue))).values())

    async def queue_states(self, queues: Sequence[str] | None) -> Sequence[QueueState]:
        """Return the states of the queues over all shards; see `SupportsQueueStates`."""
        states: dict[str, list[QueueState]] = defaultdict(list)
        for of_shard in (await self._each(lambda part: part.queue_states(queues))).values():
            for state in of_shard:
                states[state.queue].append(state)
        return [_together(queue, of_shards) for queue, of_shards in states.items()]

    async def browse(self, queue: str, limit: int, *, offset: int = 0) -> Sequence[Message]:
        """Return messages, shard by shard, oldest first in each."""
        messages: list[Message] = []
        for name in self._parts:
            part = self._part(name)
            if offset and (there := await part.count(queue)) <= offset:
                offset -= there
                continue
            messages += await part.browse(queue, limit - len(messages), offset=offset)
            offset = 0
            if len(messages) == limit:
                break
        return messages

    async def take(self, queue: str, message_id: str, transaction: Transaction | None = None) -> bool:
        """Remove the oldest copy of the message that is not being handled."""
        if transaction is None:
            return await self._search(message_id, lambda part: part.take(queue, message_id), bool)
        if not isinstance(transaction, ShardedTransaction) or transaction.shard is not None:
            part, inner = await self._within(transaction, message_id)
            return await part.take(queue, message_id, inner)
        for name in dict.fromkeys([*self._versions.places_of(message_id), *self._parts]):
            take = partial(self._part(name).take, queue, message_id)
            if await transaction.adopt(name, take):
                return True
        return False

    async def purge(self, queue: str) -> int:
        """Remove every message that is not being handled, from all shards."""
        return sum((await self._each(lambda part: part.purge(queue))).values())

    async def _first(self, call: Callable[[SqlTransport], Awaitable[Result]]) -> Result:
        """Return what the call returns in the first shard that answers. Raises the outage if none does."""
        outage: BackendUnavailable | None = None
        for name in self._parts:
            try:
                return await call(self._part(name))
            except BackendUnavailable as error:
                outage = outage or error
        raise outage or BackendUnavailable("no shard answers")


def _failures(placed: Iterable[Sequence[int]], results: Sequence[BaseException | None]) -> dict[int, Exception]:
    """Return the failures of dispatches to several shards, by the positions of the operations in all of them."""
    failures: dict[int, Exception] = {}
    for positions, result in zip(placed, results, strict=True):
        if isinstance(result, DispatchFailed):
            failures |= {positions[place]: error for place, error in result.failures.items()}
        elif isinstance(result, Exception):
            failures |= dict.fromkeys(positions, result)
        elif result is not None:
            raise result
    return failures


def _together(queue: str, states: Sequence[QueueState]) -> QueueState:
    counts = [state.messages for state in states]
    received = [state.received for state in states]
    paused = [state.paused for state in states]
    return QueueState(
        queue,
        None if None in counts else sum(number for number in counts if number is not None),
        True if True in received else None if None in received else False,
        True if True in paused else None if None in paused else False,
    )


class ShardReceipt(NamedTuple):
    """A received message's shard, and the message as it was received there."""

    shard: str
    received: ReceivedMessage


class ShardedReceiver:
    """Takes messages from a queue in every shard. What other shards have meanwhile is kept for the next call.

    Args:
        receivers: The receiver in each shard.
        transport: Has their transactions.
    """

    def __init__(self, receivers: Mapping[str, SqlReceiver], transport: ShardedTransport) -> None:
        self._receivers = receivers
        self._transport = transport
        self._receiving: dict[str, asyncio.Task[Sequence[ReceivedMessage]]] = {}
        self._kept: list[ReceivedMessage] = []
        self._stopped = False

    @property
    def answered_at(self) -> float:
        """When the server that has answered longest ago has last answered, by `time.monotonic`."""
        return min((receiver.answered_at for receiver in self._receivers.values()), default=-math.inf)

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        """Wait for messages of any shard."""
        while not self._kept and not self._stopped:
            for name, receiver in self._receivers.items():
                if name not in self._receiving:
                    self._receiving[name] = asyncio.create_task(receiver.receive(limit))
            await asyncio.wait(self._receiving.values(), return_when=asyncio.FIRST_COMPLETED)
            self._collect()
        if self._stopped:  # `stop` gives back what was kept
            return []
        received, self._kept = self._kept[:limit], self._kept[limit:]
        return received

    def _collect(self) -> None:
        """Keep what has come. Raises the error of a shard, if nothing has."""
        failure: BaseException | None = None
        for name, task in [*self._receiving.items()]:
            if task.done():
                del self._receiving[name]
                if task.cancelled():
                    continue
                failure = failure or task.exception()
                if task.exception() is None:
                    self._kept += [
                        replace(received, receipt=ShardReceipt(name, received)) for received in task.result()
                    ]
        if failure is not None and not self._kept:
            raise failure

    async def acknowledge(self, received: ReceivedMessage, transaction: Transaction | None = None) -> bool:
        """Remove the message, in the transaction of its shard."""
        shard, own = _receipt(received)
        inner = transaction
        if isinstance(transaction, ShardedTransaction):
            inner = await transaction.within(shard)
        return await self._receivers[shard].acknowledge(own, inner)

    async def release(self, received: ReceivedMessage) -> None:
        """Give the message back."""
        shard, own = _receipt(received)
        await self._receivers[shard].release(own)

    async def begin(self, received: ReceivedMessage) -> None:
        """Note that the handling of a message begins that may end the process."""
        shard, own = _receipt(received)
        await self._receivers[shard].begin(own)

    async def stop(self) -> None:
        """End a waiting `receive`, and give back what was not returned."""
        self._stopped = True
        for receiver in self._receivers.values():
            await receiver.stop()
        if self._receiving:
            await asyncio.wait(self._receiving.values())
            with contextlib.suppress(Exception):
                self._collect()
        kept, self._kept = self._kept, []
        for received in kept:
            await self.release(received)


def _receipt(received: ReceivedMessage) -> ShardReceipt:
    if not isinstance(received.receipt, ShardReceipt):
        raise TypeError(f"receipt {received.receipt!r} was not given by this receiver")
    return received.receipt
