"""Delayed delivery from a store with shards: a poller in each of them, which knows of no other."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, cast

from delayline.delayed.delivery import StoredDelivery
from delayline.delayed.store import (
    Outcome,
    SupportsClock,
    SupportsClose,
    SupportsManagement,
    SupportsRightsCheck,
)
from delayline.errors import BackendUnavailable, ConfigurationError, NotStarted
from delayline.events import Event, emit
from delayline.shards import EachShard, SupportsShards

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence
    from datetime import datetime, timedelta

    from delayline.delayed.host import DeliveryHost
    from delayline.delayed.store import DelayedMessageStore, DueCount, StoreResult
    from delayline.message import DelayedMessage
    from delayline.transaction import Transaction
    from delayline.transport import TransportOperation

logger: logging.Logger = logging.getLogger(__name__)


class ShardedStore(SupportsShards, SupportsManagement, Protocol):
    """A store with shards."""

    @property
    def transaction_domain(self) -> Hashable:
        """Equal to that of a transport over the same shards."""
        ...

    async def shard_to_store(self, message_id: str) -> str:
        """Return where a first send is kept: with a pending message of its id, or where it belongs by the map."""
        ...

    @property
    def opening(self) -> EachShard:
        """Opens the shards."""
        ...

    async def set_up_part(self, name: str, endpoint_name: str) -> None:
        """Create the endpoint's table in a shard, and keep the version of the map there."""
        ...

    async def check_map(self) -> None:
        """Compare the map with what is in use, now and from now on. Raises ShardMapOutdated or ConfigurationError."""
        ...


class CriticalErrorsOfShards:
    """Keeps the critical errors of single shards from the endpoint, which would stop; passes on one of the last shard.

    Args:
        host: The endpoint.
        number: How many shards there are.
    """

    def __init__(self, host: DeliveryHost, number: int) -> None:
        self._host = host
        self._number = number
        self._failed: dict[str, float] = {}

    def raised(self, name: str, text: str, error: Exception) -> None:
        """Log the error of a shard; its parts go on trying."""
        now = asyncio.get_running_loop().time()
        self._failed[name] = now
        log_text = "shard %s: %s, and its messages wait: %s"
        emit(logger, logging.ERROR, Event.SHARD_FAILED, log_text, name, text, error, exception=error, shard=name)
        if sum(now - at < ALL_FAILED_WITHIN for at in self._failed.values()) == self._number:
            self._host.critical_error(f"no shard works: {text}", error)


#: Shards that have failed within so many seconds have failed together.
ALL_FAILED_WITHIN: Final = 120.0


def host_of_shard(host: DeliveryHost, name: str, errors: CriticalErrorsOfShards) -> DeliveryHost:
    """Return the endpoint as the parts in a shard see it: with the transport of that shard alone."""
    transport = host.transport.parts[name] if isinstance(host.transport, SupportsShards) else host.transport
    return replace(host, transport=transport, critical_error=partial(errors.raised, name))


class ShardedDelivery(StoredDelivery):
    """A `StoredDelivery` for each shard; what `StoredDelivery(store)` is where the store has shards."""

    parts: Mapping[str, StoredDelivery]
    _sharded: ShardedStore
    _opening: EachShard
    _set_up_late: bool

    @property
    def transaction_domain(self) -> Hashable | None:
        """The shards: a transaction is in one of them."""
        return self._sharded.transaction_domain

    def shard_of(self, message_id: str) -> str:
        """Return the name of the shard that a first send with that id goes to."""
        return self._sharded.shard_of(message_id)

    def bind(self, host: DeliveryHost) -> None:
        """Attach to the endpoint, each part to the transport of its shard."""
        super().bind(host)
        transport = host.transport
        if isinstance(transport, SupportsShards) and {*transport.parts} != {*self.parts}:
            raise ConfigurationError(
                f"the queues are in the shards {', '.join(transport.parts)}, and the delayed messages in "
                f"{', '.join(self.parts)}: give transport and store the same map"
            )
        errors, own = CriticalErrorsOfShards(host, len(self.parts)), self.clock
        for name, part in self.parts.items():
            bound = host_of_shard(host, name, errors)
            if host.clock is own and isinstance(part.store, SupportsClock):
                bound = replace(bound, clock=part.store.clock())
            part.bind(bound)

    async def setup_infrastructure(self) -> None:
        """Create the store's tables in each shard that answers; in others when they do."""
        self._set_up_late = True
        opening = EachShard("its set-up")
        try:
            await opening.open({name: partial(self._set_up, name) for name in self.parts})
        finally:
            await opening.stop()

    async def _set_up(self, name: str) -> None:
        await self._sharded.set_up_part(name, self.host.endpoint_name)

    async def missing_rights(self, endpoint_name: str, *, takes: bool) -> Sequence[str]:
        """Return the statements that grant the missing rights in the shards that answer."""
        missing: list[str] = []
        for part in self.parts.values():
            try:
                if isinstance(part.store, SupportsRightsCheck):
                    missing += await part.store.missing_rights(endpoint_name, takes=takes and self.polling)
            except BackendUnavailable:
                continue  # which the start reports
        return missing

    async def start(self) -> None:
        """Start the part of each shard that answers; others when they do."""
        await self._opening.open({name: partial(self._start_part, name) for name in self.parts})
        await self._sharded.check_map()

    async def _start_part(self, name: str) -> None:
        if self._set_up_late and name in self._opening.out_of_reach:
            await self._set_up(name)
        await self.parts[name].start()

    async def stop(self) -> None:
        """Stop every part."""
        await self._opening.stop()
        await asyncio.gather(*(part.stop() for part in self.parts.values()))
        if isinstance(self.store, SupportsClose):
            await self.store.close()

    async def defer(self, operation: TransportOperation, due: datetime, transaction: Transaction | None = None) -> None:
        """Store the operation in its shard, or in that of the transaction."""
        part = await self._part_for(operation.message.id, transaction)
        await part.defer(operation, due, transaction)

    async def defer_or_replace(
        self,
        operation: TransportOperation,
        due: datetime,
        *,
        replace: bool,
        at_most: timedelta | None = None,
        transaction: Transaction | None = None,
    ) -> StoreResult:
        """Store the operation unless a message with its id is pending in its shard."""
        part = await self._part_for(operation.message.id, transaction)
        return await part.defer_or_replace(operation, due, replace=replace, at_most=at_most, transaction=transaction)

    async def defer_many(
        self, operations: Sequence[tuple[TransportOperation, datetime]], transaction: Transaction | None = None
    ) -> None:
        """Store several operations, each in its shard, or all in that of the transaction."""
        shards: dict[int, list[tuple[TransportOperation, datetime]]] = defaultdict(list)
        parts: dict[int, StoredDelivery] = {}
        for operation, due in operations:
            part = await self._part_for(operation.message.id, transaction)
            parts[id(part)] = part
            shards[id(part)].append((operation, due))
        await asyncio.gather(*(parts[key].defer_many(those, transaction) for key, those in shards.items()))

    async def _part_for(self, message_id: str, transaction: Transaction | None) -> StoredDelivery:
        if transaction is None:
            return self._part(await self._sharded.shard_to_store(message_id))
        same = [name for name, part in self.parts.items() if part.transaction_domain == transaction.domain]
        if not same:
            raise ConfigurationError(f"a transaction on {transaction.domain} is in none of the shards")
        belongs = self.shard_of(message_id)
        return self._part(belongs if belongs in same else same[0])

    def _part(self, name: str) -> StoredDelivery:
        self._opening.check(name)
        if self._host is None:
            raise NotStarted("delayed delivery is not started: use `async with endpoint:`")
        return self.parts[name]


def divide(delivery: StoredDelivery, *, fair_by: str | None) -> None:
    """Give a delivery that has become one over shards a part in each of them, with its own settings."""
    assert isinstance(delivery, ShardedDelivery)  # noqa: S101 - it has become that
    delivery._sharded = cast("ShardedStore", delivery.store)
    delivery._opening = delivery._sharded.opening
    delivery._set_up_late = False
    delivery.parts = {name: _part_of(delivery, part, fair_by) for name, part in delivery._sharded.parts.items()}


def _part_of(delivery: ShardedDelivery, store: DelayedMessageStore, fair_by: str | None) -> PartDelivery:
    part = PartDelivery(
        store,
        number_of_retries=delivery.number_of_retries,
        time_to_trigger_store_circuit_breaker=delivery.time_to_trigger_store_circuit_breaker,
        time_to_trigger_fetch_circuit_breaker=delivery.time_to_trigger_fetch_circuit_breaker,
        time_to_trigger_dispatch_circuit_breaker=delivery.time_to_trigger_dispatch_circuit_breaker,
        maximum_recovery_failures_per_second=delivery.maximum_recovery_failures_per_second,
        batch_size=delivery.batch_size,
        batch_bytes=delivery.batch_bytes,
        fair_by=fair_by,
        polling=delivery.polling,
    )
    part.whole = delivery._sharded
    return part


class PartDelivery(StoredDelivery):
    """The delayed delivery of a shard, as the handlers of that shard's messages see it."""

    whole: ShardedStore

    @property
    def management(self) -> object:
        """The pending messages: in a handler's transaction those of its shard, and without it of all shards."""
        return ManagedFromShard(cast("SupportsManagement", self.store), self.whole)


class ManagedFromShard:
    """The pending messages as a handler changes them: its own shard in its transaction, others at once.

    Args:
        own: The store of the handler's shard.
        whole: The store over all shards.
    """

    def __init__(self, own: SupportsManagement, whole: SupportsManagement) -> None:
        self._own = own
        self._whole = whole

    async def pending(
        self, *, destination: str | None = None, limit: int = 100, offset: int = 0
    ) -> Sequence[DelayedMessage]:
        """List pending messages of all shards, earliest due first."""
        return await self._whole.pending(destination=destination, limit=limit, offset=offset)

    async def count_by_due(self, bucket: timedelta) -> Sequence[DueCount]:
        """Count the pending messages of all shards per span of due time and destination."""
        return await self._whole.count_by_due(bucket)

    async def cancel(self, message_id: str, transaction: Transaction | None = None) -> Outcome:
        """Delete a pending message."""
        outcome = await self._own.cancel(message_id, transaction)
        return await self._whole.cancel(message_id) if outcome is Outcome.NOT_PENDING else outcome

    async def reschedule(self, message_id: str, due: datetime, transaction: Transaction | None = None) -> Outcome:
        """Give a pending message a new due time."""
        outcome = await self._own.reschedule(message_id, due, transaction)
        return await self._whole.reschedule(message_id, due) if outcome is Outcome.NOT_PENDING else outcome
