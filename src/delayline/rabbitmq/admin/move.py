"""Moves messages between delay levels: from v1 to v2 on a broker, or from a broker to another.

Nothing is lost: a message leaves its level once the target broker has confirmed it. After an interruption the next move
continues with the remaining messages; messages in flight may be duplicated. Nothing is early: due times are rounded up.
Messages that cannot be moved go to a poison queue beside the levels, with the reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from delayline.clock import SystemClock
from delayline.errors import BackendUnusable, ConfigurationError, InvalidMessage
from delayline.rabbitmq.admin.drain import (
    LevelMessage,
    Unmovable,
    batches,
    channel_of,
    must_have_levels,
    number_in,
    waiting,
)
from delayline.rabbitmq.admin.limits import limit_of_levels
from delayline.rabbitmq.admin.operations import BlockedMessages, overdue
from delayline.rabbitmq.admin.poison import PoisonMessage, PoisonQueue, carried, content
from delayline.rabbitmq.browsing import await_returned
from delayline.rabbitmq.connection import BrokerConnection
from delayline.rabbitmq.delivery_limits import NACK_IS_NOT_COUNTED
from delayline.rabbitmq.encoding import Publication
from delayline.rabbitmq.levels import LEVELS, seconds_until
from delayline.rabbitmq.publisher import Publisher
from delayline.rabbitmq.topology import Routability

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayline.clock import Clock
    from delayline.rabbitmq.address import BrokerAddress
    from delayline.rabbitmq.amqp.channel import Channel
    from delayline.rabbitmq.amqp.properties import Delivery
    from delayline.rabbitmq.infrastructure import DelayInfrastructure

BATCH: Final = 200
"""Messages that are moved at once, and may arrive twice when a move is cut off."""
SAMPLE: Final = 1000
"""Messages of each level that a dry run looks at."""
Going = tuple["Delivery", LevelMessage]


@dataclass(frozen=True, slots=True)
class Levels:
    """An end of a move: a broker and its delay levels."""

    address: BrokerAddress
    infrastructure: DelayInfrastructure


@dataclass(slots=True)
class LevelReport:
    """The result of moving a level."""

    level: int
    counted: int
    moved: int = 0
    poison: int = 0


@dataclass(slots=True)
class Report:
    """The result of a move; of a dry run, the expected result for the messages it looked at."""

    levels: list[LevelReport] = field(default_factory=list)
    recovered: int = 0
    """Moved messages that an earlier run had put into the poison queue."""
    stale: int = 0
    """Moved messages whose due time is that of their level, since their headers are of an earlier attempt."""
    destinations: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    """Reasons of messages in the poison queue."""
    blocked: BlockedMessages | None = None
    """Due messages on the source without a destination, which a move leaves where they are."""
    poison_queue: str = ""
    """The name of the poison queue, on the source's broker."""

    @property
    def moved(self) -> int:
        """Number of messages that the target's levels have."""
        return sum(level.moved for level in self.levels) + self.recovered

    @property
    def poison(self) -> int:
        """Number of messages put into the poison queue."""
        return sum(level.poison for level in self.levels)


class Move:
    """A run: from the source's levels to the target's.

    Args:
        name: `migrate` or `transfer`; part of the name of the queue that keeps messages that cannot be moved.
        progress: called with level, messages done and messages found, as it goes.
    """

    def __init__(
        self,
        source: Levels,
        target: Levels,
        *,
        name: str,
        dry_run: bool = False,
        clock: Clock | None = None,
        progress: Callable[[int, int, int], None] | None = None,
    ) -> None:
        if _same(source, target):
            raise ConfigurationError(
                f"source and target are the same delay levels, {source.infrastructure.prefix}* on {source.address}"
            )
        self._ends = source, target
        self._from, self._to = source.infrastructure, target.infrastructure
        self._source = BrokerConnection(source.address, f"delayline {name}")
        self._target = BrokerConnection(target.address, f"delayline {name}")
        self._publisher = Publisher(target.address, connection_name=f"delayline {name} Publish")
        self._poison = PoisonQueue(source.address, self._source, name)
        self._reach = Routability(self._target, self._to.delivery, only_look=dry_run)
        self._dry_run = dry_run
        self._clock = clock or SystemClock()
        self._progress = progress or (lambda level, done, number: None)
        self.report: Report = Report(poison_queue=self._poison.queue)
        """The results so far."""

    async def run(self) -> Report:
        """Move all messages, highest level first. Idempotent: run it again after an interruption.

        Raises BackendUnusable if either broker has no levels, or if a dry run could make messages early;
        BackendUnavailable if the connection is lost.
        """
        try:
            await self._open()
            if self._dry_run:
                await self._must_only_look()
            else:
                await self._move_recoverable()
            async with channel_of(self._source) as counting:
                for level in reversed(range(LEVELS)):
                    await self._drain(level, counting)
        finally:
            for part in (self._publisher, self._poison, self._target, self._source):
                await part.close()
        self.report.blocked = await overdue(self._ends[0].address, self._from, self._clock)
        return self.report

    async def _open(self) -> None:
        for end, connection in zip(self._ends, (self._source, self._target), strict=True):
            await must_have_levels(end.infrastructure, end.address, connection)
        if not self._dry_run:
            await self._publisher.open()
            await self._poison.open()

    async def _must_only_look(self) -> None:
        """Raise BackendUnusable where the broker may send messages on that a dry run gives back."""
        version = await self._source.version()
        if version >= NACK_IS_NOT_COUNTED:
            return
        limit = await limit_of_levels(self._ends[0].address, version, self._from)
        if limit.drops:
            raise BackendUnusable(
                f"a dry run takes messages from their levels and returns them, and {limit.fact}: it would come due "
                f"early. {limit.remedy}"
            )

    async def _drain(self, level: int, counting: Channel) -> None:
        """Move the messages of the level, including messages that arrive meanwhile."""
        queue = self._from.level(level)
        number = await number_in(counting, queue)
        report = LevelReport(level, number)
        self.report.levels.append(report)
        self._progress(level, 0, number)
        if not number:
            return
        async with channel_of(self._source) as channel:
            await self._consume(channel, queue, report)
        if self._dry_run:  # else what comes next, a move perhaps, would find the queue empty
            await await_returned(counting, queue, number)

    async def _consume(self, channel: Channel, queue: str, report: LevelReport) -> None:
        wanted = min(report.counted, SAMPLE) if self._dry_run else report.counted
        ahead, done = SAMPLE if self._dry_run else 2 * BATCH, 0
        async for batch in batches(channel, queue, wanted, size=BATCH, ahead=ahead):
            await self._move(channel, batch, report)
            done += len(batch)
            self._progress(report.level, done, report.counted)

    async def _move(self, channel: Channel, batch: Sequence[Delivery], report: LevelReport) -> None:
        """Move messages, or put them into the poison queue; each leaves its level once it is confirmed elsewhere."""
        going: list[Going] = []
        unmoved: list[PoisonMessage] = []
        for delivered in batch:
            try:
                waits = waiting(delivered.routing_key, delivered.properties.headers, report.level, self._clock.now())
            except Unmovable as error:
                unmoved.append(PoisonMessage(delivered, str(error), None))
                continue
            if await self._reach.includes(waits.destination):
                going.append((delivered, waits))
            else:
                unmoved.append(
                    PoisonMessage(delivered, f"its destination {waits.destination!r} does not exist there", waits)
                )
        if self._dry_run:
            self._count(report, [waits for _, waits in going])
        else:
            unmoved += await self._send(channel, going, report)
            await self._poison.keep(unmoved, report.level)
            # A common acknowledgement: of many single acknowledgements a broker loses the last when the channel is
            # closed.
            channel.acknowledge(batch[-1].tag, multiple=True)
        report.poison += len(unmoved)
        self.report.reasons.update(message.reason for message in unmoved)

    async def _send(self, channel: Channel, going: Sequence[Going], report: LevelReport) -> list[PoisonMessage]:
        """Publish to the other levels; return messages that the broker will never accept. Raises temporary errors."""
        refused = await self._publisher.publish([self._publication(*message) for message in going])
        moved = [message for index, message in enumerate(going) if index not in refused]
        self._count(report, [waits for _, waits in moved])
        for error in refused.values():
            if not isinstance(error, InvalidMessage):
                for delivered, _ in moved:
                    channel.acknowledge(delivered.tag)
                raise error
        return [PoisonMessage(going[index][0], str(error), None) for index, error in refused.items()]

    def _count(self, report: LevelReport, moved: Sequence[LevelMessage]) -> None:
        report.moved += len(moved)
        self.report.stale += sum(message.stale for message in moved)
        self.report.destinations.update(message.destination for message in moved)

    def _publication(self, delivered: Delivery, waits: LevelMessage) -> Publication:
        """Return the message as it came, on its way to the level that its remaining time begins with."""
        exchange, key = self._to.route(seconds_until(waits.due, self._clock.now()), waits.destination)
        return Publication(content(delivered), exchange, key, properties=carried(delivered))

    async def _move_recoverable(self) -> None:
        """Move the messages of an earlier run whose destinations exist now."""
        async with channel_of(self._source) as channel:
            async for delivered, waits in self._poison.movable(channel):
                if await self._reach.includes(waits.destination):
                    for error in (await self._publisher.publish([self._publication(delivered, waits)])).values():
                        raise error
                    channel.acknowledge(delivered.tag)
                    self.report.recovered += 1
                    self.report.destinations[waits.destination] += 1


def _same(source: Levels, target: Levels) -> bool:
    """Return whether both are the same levels, also where the addresses name different nodes of their cluster."""
    return (
        source.infrastructure.prefix == target.infrastructure.prefix
        and source.address.vhost == target.address.vhost
        and not set(source.address.nodes).isdisjoint(target.address.nodes)
    )
