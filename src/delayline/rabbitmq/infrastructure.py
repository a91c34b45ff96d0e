"""The delay levels: 29 exchanges, 28 queues and 56 bindings, as .NET declares them.

See https://docs.particular.net/transports/rabbitmq/delayed-delivery.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from delayline.errors import BackendUnusable, ConfigurationError
from delayline.rabbitmq.amqp.methods import (
    ExchangeBind,
    ExchangeDeclare,
    ExchangeDelete,
    QueueBind,
    QueueDeclare,
    QueueDelete,
)
from delayline.rabbitmq.levels import (
    LEVELS,
    V1_PREFIX,
    V2_PREFIX,
    delivery_name,
    level_name,
    passing_key,
    route,
    waiting_key,
)
from delayline.rabbitmq.refusals import PreconditionFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delayline.rabbitmq.amqp.channel import Channel

Arguments = Mapping[str, str | int]

#: RabbitMQ's own names allow more; such names need no quoting anywhere.
LEVEL_PREFIX: Final = re.compile(r"[A-Za-z0-9_.:-]{1,200}")
#: `inequivalent arg 'x' for queue 'q' in vhost '/': received 'a' but current is 'b'`, in the words of several versions.
INEQUIVALENT: Final = re.compile(
    r"inequivalent arg '(?P<argument>.*?)' for (?P<kind>\w+) '(?P<name>.*?)' in vhost '.*?': "
    r"received (?P<ours>.*?) but current is (?P<theirs>.*)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class LevelQueue:
    """A queue that keeps messages for 2^level seconds; durable, shared by all, never deleted by itself."""

    name: str
    arguments: Arguments


@dataclass(frozen=True, slots=True)
class Binding:
    """A binding from an exchange to a queue or to another exchange."""

    source: str
    destination: str
    routing_key: str
    to_queue: bool

    @property
    def method(self) -> QueueBind | ExchangeBind:
        """The declarations of the levels, in order."""
        if self.to_queue:
            return QueueBind(queue=self.destination, exchange=self.source, routing_key=self.routing_key)
        return ExchangeBind(destination=self.destination, source=self.source, routing_key=self.routing_key)


@dataclass(frozen=True, slots=True)
class Difference:
    """An argument that the broker has otherwise."""

    kind: str
    """`queue` or `exchange`."""
    name: str
    argument: str
    theirs: str
    ours: str

    def __str__(self) -> str:
        """Return it as a sentence for people."""
        return f"{self.kind} {self.name!r} has {self.argument} {self.theirs}, and {self.ours} was asked for"


@dataclass(frozen=True, slots=True)
class DelayInfrastructure:
    """The delay levels with a common prefix, and the type of their queues."""

    prefix: str = V2_PREFIX
    quorum: bool = True

    def __post_init__(self) -> None:
        """Raise ConfigurationError for a prefix that makes no good names."""
        if not isinstance(self.prefix, str) or LEVEL_PREFIX.fullmatch(self.prefix) is None:
            raise ConfigurationError(
                f"the prefix of delay levels must be 1 to 200 letters, digits, _ . : or -, not {self.prefix!r}"
            )

    @classmethod
    def v2(cls) -> DelayInfrastructure:
        """Return the levels that NServiceBus.RabbitMQ 7 and later use: quorum queues, forwarded at least once."""
        return cls()

    @classmethod
    def v1(cls) -> DelayInfrastructure:
        """Return the levels that NServiceBus.RabbitMQ 4.3 to 6 use: lazy classic queues, which may lose messages."""
        return cls(V1_PREFIX, quorum=False)

    @classmethod
    def custom(cls, prefix: str) -> DelayInfrastructure:
        """Return levels apart from all others, made as v2 makes them; raises ConfigurationError for the prefix."""
        if prefix == V1_PREFIX:
            raise ConfigurationError(f"the prefix {prefix!r} is that of v1, with classic queues. Choose another, or v1")
        return cls(prefix)

    @classmethod
    def named(cls, delays: str) -> DelayInfrastructure:
        """Return the levels that the setting `delays` names: v2, v1, or a custom prefix."""
        return {"v1": cls.v1, "v2": cls.v2}[delays]() if delays in ("v1", "v2") else cls.custom(delays)

    @property
    def delivery(self) -> str:
        """The exchange that hands due messages to their destinations."""
        return delivery_name(self.prefix)

    def level(self, level: int) -> str:
        """Return the name of a level's exchange and queue."""
        return level_name(self.prefix, level)

    def route(self, delay: int, destination: str) -> tuple[str, str]:
        """Return the exchange and the routing key for a delay in seconds, which was checked before."""
        level, key = route(delay, destination)
        return self.level(level), key

    @property
    def exchanges(self) -> tuple[str, ...]:
        """All 29: topic, durable, without arguments."""
        return (*(self.level(level) for level in reversed(range(LEVELS))), self.delivery)

    @property
    def queues(self) -> tuple[LevelQueue, ...]:
        """All 28, the highest level first."""
        return tuple(
            LevelQueue(self.level(level), MappingProxyType(dict(self._arguments(level))))
            for level in reversed(range(LEVELS))
        )

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """All 56: of each level to its queue, and to the next lower exchange."""
        return (
            *(Binding(self.level(n), self.level(n), waiting_key(n), to_queue=True) for n in reversed(range(LEVELS))),
            *(Binding(self.level(n), self._below(n), passing_key(n), to_queue=False) for n in reversed(range(LEVELS))),
        )

    async def declare(self, channel: Channel) -> None:
        """Create missing exchanges, queues and bindings. Idempotent, safe in several processes at once.

        Raises BackendUnusable, with the argument that differs, for existing levels with other arguments; the channel is
        closed then.
        """
        try:
            for exchange in self.exchanges:
                await channel.call(ExchangeDeclare(exchange=exchange, exchange_type="topic", durable=True))
            for queue in self.queues:
                await channel.call(QueueDeclare(queue=queue.name, durable=True, arguments=dict(queue.arguments)))
            for binding in self.bindings:
                await channel.call(binding.method)
        except PreconditionFailed as error:
            raise refusal(error) from error

    async def delete(self, channel: Channel) -> None:
        """Delete levels with their messages. Idempotent."""
        await channel.call(ExchangeDelete(exchange=self.delivery))
        for level in reversed(range(LEVELS)):
            await channel.call(QueueDelete(queue=self.level(level)))
            await channel.call(ExchangeDelete(exchange=self.level(level)))

    def _arguments(self, level: int) -> Iterator[tuple[str, str | int]]:
        if self.quorum:
            yield "x-queue-type", "quorum"
            yield "x-dead-letter-strategy", "at-least-once"
            yield "x-overflow", "reject-publish"
        else:
            yield "x-queue-type", "classic"
            yield "x-queue-mode", "lazy"
        yield "x-message-ttl", (1 << level) * 1000
        yield "x-dead-letter-exchange", self._below(level)

    def _below(self, level: int) -> str:
        return self.level(level - 1) if level else self.delivery


def refusal(error: PreconditionFailed) -> BackendUnusable:
    """Return a 406 as an error with the argument that differs, and the remedy."""
    answer = " ".join(str(part) for part in error.args)
    difference = difference_in(answer)
    if difference is None:
        return BackendUnusable(f"the broker refuses what delayline needs: {answer}")
    return BackendUnusable(
        f"{difference}. Created with other arguments: use it as it is, choose another name, or delete it when empty"
    )


def difference_in(text: str) -> Difference | None:
    """Return the argument that a 406's text complains of; None where it is about something else."""
    match = INEQUIVALENT.search(text)
    if match is None:
        return None
    return Difference(
        match["kind"], match["name"], match["argument"], theirs=_value(match["theirs"]), ours=_value(match["ours"])
    )


def _value(text: str) -> str:
    """Return the value in `the value '8000' of type 'long'`, or in `'8000'`."""
    quoted = re.search(r"'(.*?)'", text, re.DOTALL)
    return quoted[1] if quoted else text.strip(' "')
