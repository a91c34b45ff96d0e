"""RabbitMQ's delay levels, v1 and v2: messages are drained from their 28 queues, from the highest to the lowest."""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from delayline.bulk.writer import blocking
from delayline.clock import SystemClock
from delayline.errors import ConfigurationError, CorruptHeaders, InvalidMessage
from delayline.message import Headers, Message
from delayline.migration.collected import SURE, UNSURE, CollectedMessage, CollectedSource, Selection
from delayline.migration.tally import Bounds, Tally
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.admin.drain import ADVICE, Unmovable, batches, channel_of, must_have_levels, number_in, waiting
from delayline.rabbitmq.admin.poison import carried
from delayline.rabbitmq.browsing import await_returned, must_exist
from delayline.rabbitmq.connection import BrokerConnection
from delayline.rabbitmq.decoding import message_from
from delayline.rabbitmq.encoding import Publication
from delayline.rabbitmq.infrastructure import DelayInfrastructure
from delayline.rabbitmq.levels import LEVELS, parse, remaining, seconds_until
from delayline.rabbitmq.publisher import Publisher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from pyspark.sql import SparkSession
    from sqlalchemy import Connection

    from delayline.rabbitmq.amqp.channel import Channel
    from delayline.rabbitmq.amqp.properties import Delivery

MIGRATION_CONNECTION: Final = "delayline migrate"
#: Messages that are kept together and then acknowledged; so many may be in doubt after a crash.
COPIED_AT_ONCE: Final = 200
#: Messages of each level that a preview consumes and requeues; RabbitMQ 4 counts deliveries of each message.
LARGEST_SAMPLE: Final = 1000


class Found(NamedTuple):
    """A message of a level."""

    id: str | None
    destination: str | None
    due: datetime
    headers: str | None
    """As JSON."""
    why: str | None
    """Why it can be no message."""


class RabbitmqLevelsSource(CollectedSource):
    """The delay levels of a virtual host: v2, or those of ?delays= in the URL. They are shared by all endpoints.

    The named endpoint owns the store that receives the messages; their destinations are unchanged.
    """

    kind: ClassVar[str] = "rabbitmq-levels"
    advice: ClassVar[str] = ADVICE

    def __init__(self, place: str, journal: str, *, schema: str | None = None) -> None:
        super().__init__(place, journal, schema=schema)
        self.address: BrokerAddress = BrokerAddress.parse(place)
        self.levels: DelayInfrastructure = DelayInfrastructure.named(self.address.delays)

    def __str__(self) -> str:
        return f"{self.levels.prefix}.* at {self.address}"

    async def drain(self, which: Selection, spark: SparkSession) -> None:
        """Drain all levels; the broker keeps a message that falls due meanwhile, or it is drained at a lower level.

        Raises ConfigurationError for several endpoints or none, and for a cutoff: levels are emptied whole.
        """
        del spark
        endpoint = _the_endpoint(which)
        doubts = await self.database.write(partial(self._begin, endpoint=endpoint))
        async with self._connected() as connection, channel_of(connection) as counting:
            for level in reversed(range(LEVELS)):
                number = await number_in(counting, self.levels.level(level))
                if number:
                    await self._drain(connection, level, number, endpoint, doubts)

    async def restore(self, rows: Sequence[CollectedMessage]) -> Mapping[str, str]:
        """Publish each message for its remaining delay; returns once the broker has confirmed."""
        await self.database.write(partial(self.set_state, keys=[row.key for row in rows], state=UNSURE))
        publisher = Publisher(self.address, connection_name=MIGRATION_CONNECTION)
        await publisher.open()
        try:
            refused = await publisher.publish([self._publication(row) for row in rows])
        finally:
            await publisher.close()
        return {rows[position].key: str(error) for position, error in refused.items()}

    def looked_at(self, which: Selection, bounds: Bounds, spark: SparkSession) -> Tally:
        """Count all messages, and check a thousand of each level, which are consumed and requeued for that."""
        del spark
        endpoint, tally = _the_endpoint(which), Tally()

        async def look() -> None:
            async with self._connected() as connection, channel_of(connection) as counting:
                for level in reversed(range(LEVELS)):
                    queue = self.levels.level(level)
                    number = await number_in(counting, queue)
                    async with channel_of(connection) as channel:
                        seen = 0
                        async for some in batches(
                            channel, queue, min(number, LARGEST_SAMPLE), size=LARGEST_SAMPLE, ahead=LARGEST_SAMPLE
                        ):
                            tally.add([self._read(message, level, endpoint) for message in some], which, bounds)
                            seen += len(some)
                    if number:  # else what comes next would find the queue empty
                        await await_returned(counting, queue, number)
                    tally.of(endpoint).unseen += max(0, number - seen)

        blocking(look())
        return tally

    def found(self, delivered: Delivery, level: int, now: datetime) -> Found:
        """Return the contents of a message of a level."""
        routing_key, why = delivered.routing_key, None
        parsed = parse(routing_key)
        destination = None if parsed is None else parsed[1]
        left = 1 << level if parsed is None else remaining(parsed[0], level)
        due = now + timedelta(seconds=left)
        try:
            sent = waiting(routing_key, delivered.properties.headers, level, now)
            destination, due = sent.destination, sent.due
        except Unmovable as error:
            why = str(error)
        name, headers, broken = _content(delivered)
        return Found(name, destination, due, headers, why or broken)

    def _read(self, delivered: Delivery, level: int, endpoint: str) -> CollectedMessage:
        """Return the row to store for a message of a level: its contents, and all of its AMQP properties."""
        routing_key, body = delivered.routing_key, delivered.body
        properties = carried(delivered)
        name, destination, due, headers, why = self.found(delivered, level, datetime.now(UTC))
        digest = hashlib.sha256(
            b"\0".join([routing_key.encode("utf-8", "surrogatepass"), properties, body])
        ).hexdigest()
        original: dict[str, Any] = {
            "level": level, "routing_key": routing_key, "properties": base64.b64encode(properties).decode(),
        }  # fmt: skip
        key = f"{digest}-{uuid.uuid4().hex}"
        return CollectedMessage(
            key, endpoint, name, destination, due, headers, body, why, json.dumps(original).encode()
        )

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[BrokerConnection]:
        connection = BrokerConnection(self.address, MIGRATION_CONNECTION)
        try:
            await must_have_levels(self.levels, self.address, connection, advice=self.advice)
            yield connection
        finally:
            await connection.close()

    def _begin(self, connection: Connection, *, endpoint: str) -> Counter[str]:
        """Assign stored messages to the endpoint; return the messages that may be in a level as well."""
        connection.execute(self.kept.update().values(endpoint=endpoint))
        query = self.kept.select().with_only_columns(self.kept.c[self.key]).where(self.kept.c.state == UNSURE)
        return Counter(_digest_in(key) for key in connection.execute(query).scalars())

    async def _drain(
        self, connection: BrokerConnection, level: int, number: int, endpoint: str, doubts: Counter[str]
    ) -> None:
        queue = self.levels.level(level)
        async with channel_of(connection) as channel:
            async for some in batches(channel, queue, number, size=COPIED_AT_ONCE, ahead=2 * COPIED_AT_ONCE):
                new, known = _apart([self._read(message, level, endpoint) for message in some], doubts)
                await self.database.write(partial(self._keep_new, rows=new))
                await self._acknowledge(channel, queue, some)
                await self.database.write(partial(self._settle, new=new, known=known))

    async def _acknowledge(self, channel: Channel, queue: str, some: Sequence[Delivery]) -> None:
        """Let the broker forget them; it has when it answers the question that follows."""
        channel.acknowledge(some[-1].tag, multiple=True)
        await must_exist(channel, queue)

    def _keep_new(self, connection: Connection, *, rows: Sequence[CollectedMessage]) -> None:
        """Store messages under new ids: an event that failed at two endpoints is pending twice under the same id."""
        ids = {row.id.encode("utf-8", "replace") for row in rows if row.id}
        pending = {bytes(message_id).decode("utf-8", "replace") for message_id in self.among(connection, "id", ids)}
        named: list[CollectedMessage] = []
        for row in rows:
            name = row.id
            for further_id in (f"{row.id}/{row.destination}", f"{row.id}/{row.key}"):
                if name in pending:
                    name = further_id
            pending.add(name or "")
            named.append(replace(row, id=name, state=UNSURE))
        self.keep(connection, named)

    def _settle(
        self, connection: Connection, *, new: Sequence[CollectedMessage], known: Sequence[CollectedMessage]
    ) -> None:
        """Take note that the broker has forgotten the messages."""
        self.set_state(connection, [row.key for row in new], SURE)
        again = self.kept.update().where(self.kept.c.state == UNSURE).values(state=SURE)
        for row in known:
            connection.execute(again.where(self.kept.c[self.key].startswith(_digest_in(row.key))))

    def _publication(self, row: CollectedMessage) -> Publication:
        """Return the message as it came, with a delay for the rest of its time; where it lay, if it has none."""
        original = json.loads(row.original or b"{}")
        properties = base64.b64decode(original["properties"])
        message = Message(row.id or "", {}, row.body or b"")
        parsed = parse(original["routing_key"])
        if parsed is None or row.due is None:
            return Publication(message, "", self.levels.level(original["level"]), properties=properties)
        exchange, key = self.levels.route(seconds_until(row.due, SystemClock().now()), parsed[1])
        return Publication(message, exchange, key, properties=properties)


def _the_endpoint(which: Selection) -> str:
    if which.cutoff is not None:
        raise ConfigurationError("delay levels are emptied whole: leave out --cutoff")
    if which.endpoints is None or len(which.endpoints) != 1:
        raise ConfigurationError(
            "delay levels belong to no endpoint: name with --endpoint the endpoint in whose store the messages "
            "are to wait; each keeps its own destination"
        )
    return which.endpoints[0]


def _content(delivered: Delivery) -> tuple[str | None, str | None, str | None]:
    """Return the message's id, its headers, and why they cannot be read."""
    name = delivered.properties.message_id or None
    try:
        message = message_from(delivered)
        headers = {Headers.MESSAGE_ID: message.id, **message.headers}
        return message.id, json.dumps(headers, ensure_ascii=False), None
    except (InvalidMessage, CorruptHeaders) as error:
        return name, None, str(error)


def _apart(
    rows: Sequence[CollectedMessage], doubts: Counter[str]
) -> tuple[list[CollectedMessage], list[CollectedMessage]]:
    """Return the new messages, and messages stored before whose acknowledgement was lost."""
    new: list[CollectedMessage] = []
    known: list[CollectedMessage] = []
    for row in rows:
        digest = _digest_in(row.key)
        (known if doubts[digest] else new).append(row)
        doubts[digest] -= bool(doubts[digest])
    return new, known


def _digest_in(key: str) -> str:
    return key.partition("-")[0]
