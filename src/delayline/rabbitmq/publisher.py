"""Publishes messages to exchanges with many outstanding confirms, over a dedicated connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from delayline.checks import LoopGuard
from delayline.errors import BackendUnavailable, BackendUnusable, DelaylineError, NotStarted
from delayline.events import Event, emit
from delayline.grouping import ABANDONED
from delayline.rabbitmq.amqp.confirms import PublishBatch
from delayline.rabbitmq.amqp.errors import NOT_FOUND, AmqpError, Unsendable
from delayline.rabbitmq.connection import connect, node_of
from delayline.rabbitmq.encoding import Publication
from delayline.rabbitmq.refusals import explained, refused_publication, size_limit, too_large, unconfirmed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Mapping, Sequence

    from delayline.rabbitmq.address import BrokerAddress
    from delayline.rabbitmq.amqp.channel import PublishChannel
    from delayline.rabbitmq.amqp.connection import AmqpConnection
    from delayline.rabbitmq.amqp.errors import Closed

logger: logging.Logger = logging.getLogger(__name__)

Result = TypeVar("Result")

PIPELINE: Final = 1
APART: Final = 2
MOST_PIPELINES: Final = 50  # numbers of channels, used in turn
NONE_MISSING: Final[Mapping[str, Closed]] = MappingProxyType({})
CHUNK: Final = 128  # publications that are encoded before anything else may run
CHUNK_BYTES: Final = 1 << 18
FIRST_BACK_OFF: Final = 0.1  # seconds, doubled with every failure
LONGEST_BACK_OFF: Final = 5.0
#: Seconds after a connection was replaced in which quorum queues may be without a leader: a node of theirs was lost.
ELECTION: Final = 10.0
ELECTION_PAUSE: Final = 0.1  # seconds, doubled up to a second, until what was refused for that is sent again
#: Seconds after which a channel that refuses is replaced: it goes on refusing for a queue that has a leader again.
REFUSING: Final = 0.5
CLOSING_PATIENCE: Final = 10.0  # seconds for outstanding confirms
DISCONNECT_PATIENCE: Final = 4.0  # seconds for the broker's answer to Connection.Close
#: The largest message that brokers accept by default, before version 4 and since.
LARGEST_MESSAGE: Final = 134_217_728
LARGEST_MESSAGE_OF_4: Final = 16_777_216


class Publisher:
    """Publishes to a virtual host. Concurrent calls of an event loop share the connection and its pipeline.

    Every message is mandatory, and persistent unless its headers ask for another. A lost connection is opened again by
    the next use, after a pause that grows while that fails.
    """

    def __init__(self, address: BrokerAddress, *, connection_name: str = "delayline Publish") -> None:
        self._address = address
        self._name = connection_name
        self._started = False
        self._link: PublisherLink | None = None
        self._opening = asyncio.Lock()
        self._failed: Exception | None = None
        self._back_off = FIRST_BACK_OFF
        self._not_before = 0.0
        self._process = LoopGuard()

    @property
    def blocked(self) -> str | None:
        """Why the broker takes no messages now, as when its memory or disk runs short; None when it does."""
        return self._link.connection.blocked if self._link is not None else None

    @property
    def lost(self) -> bool:
        """Whether there is no connection; the next use opens it."""
        return self._link is None or self._link.connection.lost is not None

    @property
    def writes_at_once(self) -> bool:
        """Whether publications are written without a wait, but for the first look whether their exchange is there."""
        return self._started and self._link is not None and self._link.writes_at_once

    @property
    def outstanding(self) -> int:
        """How many publications are written and not settled."""
        return self._link.outstanding if self._link is not None else 0

    async def open(self) -> None:
        """Connect. Raises BackendUnavailable or BackendUnusable. Idempotent."""
        if not self._started:
            self._process = LoopGuard()
        self._started = True
        self._not_before = 0.0
        await self._connected()

    def hang_up_if_silent(self, seconds: float) -> None:
        """Give a connection up on which nothing has come for so long, and connect no more for as long."""
        link = self._link
        if link is not None and link.connection.lost is None and link.connection.silent_for >= seconds:
            self._failed = explained(link.address, link.connection.hang_up(seconds))
            self._not_before = asyncio.get_running_loop().time() + seconds

    async def close(self) -> None:
        """Wait at most ten seconds for outstanding confirms, then disconnect. Idempotent."""
        self._started = False
        if self._process.forked:
            return  # the connection is the parent's: ending it here would end it there
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def publish(self, publications: Sequence[Publication]) -> Mapping[int, Exception]:
        """Publish all, in order, and return once each is confirmed or refused: the errors of the refused by position.

        Unroutable: no such exchange, or no queue bound. MessageRejected: a full queue. InvalidMessage: AMQP or the
        broker cannot carry it. BackendUnusable: no right to write. Waits up to `server_timeout` while the broker is
        blocked. Raises BackendUnavailable if the connection is lost, or if no confirm comes for that long: the messages
        may have arrived. After a cancellation, publications go on that were written, or whose exchange was asked for,
        and failures are logged. If the broker refuses a publication by closing the channel, the others outstanding
        are sent again, and may be duplicated.
        """
        if not publications:
            return {}
        self._process.check("the publisher")
        link = self._link
        if link is None or link.connection.lost is not None or not self._started:
            link = await self._connected()
        try:
            return await link.publish(publications)
        except AmqpError as error:
            raise explained(link.address, error) from error.__cause__

    async def _connected(self) -> PublisherLink:
        if not self._started:
            raise NotStarted("the publisher is closed: open it first")
        self._process.check("the publisher")
        link = self._link
        if link is not None and link.connection.lost is None:
            return link
        async with self._opening:
            return await self._reopened()

    async def _reopened(self) -> PublisherLink:
        link, now = self._link, asyncio.get_running_loop().time()
        if link is not None and link.connection.lost is None:
            return link
        if self._failed is not None and now < self._not_before:
            raise BackendUnavailable(f"{self._failed} (tried again in {self._not_before - now:.1f} s)")
        try:
            lost = link.connection if link is not None else None
            self._link = await PublisherLink.open(self._address, self._name, instead_of=lost)
        except (BackendUnavailable, BackendUnusable) as error:
            self._failed = error
            self._not_before = asyncio.get_running_loop().time() + self._back_off
            self._back_off = min(2 * self._back_off, LONGEST_BACK_OFF)
            raise
        self._failed, self._back_off = None, FIRST_BACK_OFF
        if not self._started:
            await self.close()
            raise NotStarted("the publisher was closed while it connected")
        return self._link


class PublisherLink:
    """A connection with its two channels: the pipeline, and a channel where publications go apart from the others."""

    def __init__(self, connection: AmqpConnection, address: BrokerAddress, election_ends: float) -> None:
        self.address = address
        self.connection = connection
        self._election_ends = election_ends
        self._pipeline = PIPELINE
        self._pipeline_opened = 0.0
        self._channels: dict[int, PublishChannel] = {}
        self._opening = asyncio.Lock()
        self._apart = asyncio.Lock()
        self._known: set[str] = {""}
        self._ending: set[asyncio.Task[Any]] = set()
        newer = connection.version.partition(".")[0] not in ("", "3")
        self._largest = LARGEST_MESSAGE_OF_4 if newer else LARGEST_MESSAGE

    @classmethod
    async def open(
        cls, address: BrokerAddress, name: str, *, instead_of: AmqpConnection | None = None
    ) -> PublisherLink:
        """Connect and open the pipeline. Raises BackendUnavailable or BackendUnusable."""
        connection = await connect(address, name, instead_of=instead_of)
        node = node_of(connection)
        replaced = instead_of is not None or node != address.nodes[0]
        link = cls(connection, address.at(node), asyncio.get_running_loop().time() + ELECTION if replaced else 0.0)
        try:
            await link._pipeline_channel()
        except AmqpError as error:
            link.connection.abort()
            raise explained(link.address, error) from error.__cause__
        except BaseException:
            link.connection.abort()
            raise
        return link

    @property
    def writes_at_once(self) -> bool:
        """Whether the channel is open, and takes publications."""
        return self.connection.flows and self._ready_pipeline() is not None

    @property
    def outstanding(self) -> int:
        """How many publications are written and not settled."""
        return sum(len(channel.confirms) for channel in self._channels.values())

    async def close(self) -> None:
        """Wait for outstanding confirms, then disconnect."""
        try:
            async with asyncio.timeout(CLOSING_PATIENCE):
                for channel in list(self._channels.values()):
                    await channel.confirms.empty()
                while self._ending:
                    await asyncio.wait(self._ending)
        except TimeoutError:  # a broker that does not confirm will not answer a close
            self.connection.abort()
        await self.connection.close(DISCONNECT_PATIENCE)

    async def publish(self, publications: Sequence[Publication]) -> Mapping[int, Exception]:
        """Send all; see Publisher.publish."""
        unknown = {publication.exchange for publication in publications} - self._known
        missing = NONE_MISSING
        if unknown:
            try:
                missing = await asyncio.shield(self._spawn(self._missing(unknown)))
            except asyncio.CancelledError:
                self._spawn(self._end_abandoned(publications, self.publish(publications)))
                raise
        batch = PublishBatch(publications)
        await self._write(batch, missing)
        resending: asyncio.Task[None] | None = None
        try:
            await self._settled(batch)
            if batch.over or self._without_leader(batch):
                resending = self._spawn(self._resend(batch))
                await asyncio.shield(resending)
        except asyncio.CancelledError:
            self._spawn(self._end_abandoned(publications, self._outcome(batch, resending)))
            raise
        return batch.failures and _unconfirmed(batch)

    def _spawn(self, work: Coroutine[object, object, Result]) -> asyncio.Task[Result]:
        task = asyncio.create_task(work, name="delayline publish")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def _end_abandoned(
        self, publications: Sequence[Publication], outcome: Awaitable[Mapping[int, Exception]]
    ) -> None:
        """Log what fails of a cancelled call, whose result is not awaited any more."""
        try:
            failures = await outcome
        except AmqpError as error:
            failures = dict.fromkeys(range(len(publications)), explained(self.address, error))
        except DelaylineError as error:
            failures = dict.fromkeys(range(len(publications)), error)
        for position, failure in failures.items():
            message_id = publications[position].message.id
            emit(logger, logging.WARNING, Event.SEND_ABANDONED, ABANDONED, message_id, failure)

    async def _outcome(
        self, batch: PublishBatch[Publication], resending: asyncio.Task[None] | None
    ) -> Mapping[int, Exception]:
        """Return the failures of a batch that was written, after the wait for them was cancelled."""
        if resending is None:
            batch.wait_again()
            await self._settled(batch)
            await self._resend(batch)
        else:
            await resending
        return batch.failures and _unconfirmed(batch)

    async def _missing(self, unknown: set[str]) -> Mapping[str, Closed]:
        """Return which exchanges take no messages, and the broker's words; usable exchanges are asked for once only.

        Publishing to another would close the channel, and make others' outstanding messages be sent twice. From version
        4.3 on the broker also refuses to tell of an exchange to which the user has no rights.
        """
        missing: dict[str, Closed] = {}
        async with self._apart:
            for exchange in sorted(unknown - self._known):
                if len(exchange.encode()) > 255:
                    continue
                channel = await self._channel(APART)
                await self.connection.ask_for_exchange(channel, exchange)
                if channel.closed is None:
                    self._known.add(exchange)
                else:
                    missing[exchange] = channel.closed
        return missing

    async def _write(self, batch: PublishBatch[Publication], missing: Mapping[str, Closed]) -> None:
        positions: list[int] = []
        frames: list[bytes] = []
        size = 0
        channel = self._ready_pipeline() or await self._pipeline_channel()
        for position, publication in enumerate(batch.publications):
            if len(positions) >= CHUNK or size >= CHUNK_BYTES:
                channel = await self._flush(channel, batch, positions, frames)
                await asyncio.sleep(0)
                positions, frames, size = [], [], 0
            try:
                encoded = self._encoded(channel, publication, missing)
            except (DelaylineError, Unsendable) as error:
                batch.failures[position] = error
                batch.settle(1)
                continue
            positions.append(position)
            frames.append(encoded)
            size += len(encoded)
        await self._flush(channel, batch, positions, frames)

    async def _settled(self, batch: PublishBatch[Publication]) -> None:
        """Return once all of the batch is settled; raises BackendUnavailable where the limit passes and none was."""
        if batch.settled.done():
            return await batch.settled
        loop, limit = asyncio.get_running_loop(), self.address.server_timeout
        watch: asyncio.TimerHandle

        def look(left: int, answers: int) -> None:
            nonlocal watch
            if batch.left < left:
                watch = loop.call_later(limit, look, batch.left, self._answers)
            elif answers == self._answers and self.connection.blocked is None:
                batch.lose(self.connection.give_up())
            else:
                batch.lose(self._unanswered(len(batch.publications)))

        watch = loop.call_later(limit, look, batch.left, self._answers)
        try:
            await batch.settled
        finally:
            watch.cancel()

    @property
    def _answers(self) -> int:
        return sum(channel.confirms.answers for channel in self._channels.values())

    def _unanswered(self, number: int) -> BackendUnavailable:
        reason = self.connection.blocked or "a queue that it goes to may have no majority of its replicas"
        return BackendUnavailable(
            f"RabbitMQ at {self.address} has confirmed none of {number} messages for "
            f"{self.address.server_timeout:g} s ({reason}): their outcome is unknown, they may arrive"
        )

    def _encoded(self, channel: PublishChannel, publication: Publication, missing: Mapping[str, Closed]) -> bytes:
        if publication.exchange in missing:
            raise refused_publication(self.address, publication, missing[publication.exchange])
        if len(publication.message.body) > self._largest:
            raise too_large(publication, self._largest)
        return channel.frames.encode(publication)

    async def _flush(
        self,
        channel: PublishChannel,
        batch: PublishBatch[Publication],
        positions: Sequence[int],
        frames: Sequence[bytes],
    ) -> PublishChannel:
        """Write when that is possible and return the channel to go on with: frames fit any of the same number."""
        if positions:
            if not self.connection.flows:
                await self.connection.flowing()
            if channel.closed is not None or channel.closing:
                channel = await self._channel(channel.number)
            channel.write(batch, positions, frames)
        return channel

    def _without_leader(self, batch: PublishBatch[Publication]) -> Sequence[int]:
        """Return the positions that were refused while queues elect new leaders."""
        elect = batch.not_taken and asyncio.get_running_loop().time() < self._election_ends
        return batch.not_taken if elect else ()

    async def _resend(self, batch: PublishBatch[Publication]) -> None:
        """Resend what a closed channel left unsettled, and, until the elections must have ended, what was refused."""
        await self._one_by_one(batch)
        pause = ELECTION_PAUSE
        while positions := self._without_leader(batch):
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)
            again = PublishBatch([batch.publications[position] for position in positions])
            await self._write(again, NONE_MISSING)
            await self._settled(again)
            await self._one_by_one(again)
            for position in positions:
                del batch.failures[position]
            batch.failures.update({positions[at]: error for at, error in again.failures.items()})
            batch.not_taken = [positions[at] for at in again.not_taken]

    async def _one_by_one(self, batch: PublishBatch[Publication]) -> None:
        """Resend the unsettled publications of a closed channel, each alone: only the refused fail."""
        async with self._apart:
            for position in batch.over:
                publication = batch.publications[position]
                channel = await self._channel(APART)
                alone = PublishBatch([publication])
                await self._flush(channel, alone, [0], [channel.frames.encode(publication)])
                await self._settled(alone)
                error = alone.failures.get(0)
                if alone.over and channel.closed is not None:
                    error = self._to_blame(publication, channel.closed)
                if error is not None:
                    batch.failures[position] = error

    def _to_blame(self, publication: Publication, closed: Closed) -> Exception:
        if closed.code == NOT_FOUND:
            self._known.discard(publication.exchange)
        limit = size_limit(closed)
        if limit is not None:
            self._largest = limit
        return refused_publication(self.address, publication, closed)

    def _ready_pipeline(self) -> PublishChannel | None:
        """Return the channel of the pipeline; None where it has to be opened, also in place of a refusing channel."""
        channel = self._open_channel(self._pipeline)
        if channel is None or not channel.confirms.refused:
            return channel
        return channel if asyncio.get_running_loop().time() < self._pipeline_opened + REFUSING else None

    async def _pipeline_channel(self) -> PublishChannel:
        refusing = self._open_channel(self._pipeline)
        if refusing is not None and self._ready_pipeline() is None:
            self._pipeline = max(APART, self._pipeline % MOST_PIPELINES) + 1
            self._spawn(_retire(refusing))
        self._pipeline_opened = asyncio.get_running_loop().time()
        return await self._channel(self._pipeline)

    async def _channel(self, number: int) -> PublishChannel:
        """Return the open channel of that number, opening it where it is closed. Raises BackendUnavailable."""
        async with self._opening:
            channel = self._open_channel(number)
            if channel is None:
                closing = self._channels.get(number)
                if closing is not None and closing.closed is None:
                    await closing.close()
                channel = self._channels[number] = await self.connection.publish_channel(number)
            return channel

    def _open_channel(self, number: int) -> PublishChannel | None:
        channel = self._channels.get(number)
        return channel if channel is not None and channel.closed is None and not channel.closing else None


def _unconfirmed(batch: PublishBatch[Publication]) -> Mapping[int, Exception]:
    return {position: unconfirmed(batch.publications[position], error) for position, error in batch.failures.items()}


async def _retire(channel: PublishChannel) -> None:
    """Close a channel once everything on it is settled."""
    await channel.confirms.empty()
    with contextlib.suppress(AmqpError):
        await channel.close()
