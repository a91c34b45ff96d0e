"""The connection that declares, binds and consumes: opened again on the next use after it was lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from delayline.checks import LoopGuard
from delayline.errors import BackendUnavailable
from delayline.events import Event, emit
from delayline.rabbitmq.address import Node
from delayline.rabbitmq.amqp.connection import AmqpConnection
from delayline.rabbitmq.amqp.errors import AmqpError
from delayline.rabbitmq.amqp.parameters import Parameters
from delayline.rabbitmq.refusals import explained, none_connected

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    from delayline.rabbitmq.address import BrokerAddress
    from delayline.rabbitmq.amqp.channel import Channel

logger: logging.Logger = logging.getLogger("delayline.rabbitmq")

Result = TypeVar("Result")

CHANNEL_CLOSING_PATIENCE: Final = 4.0
"""Seconds that closing may take: for channels, and again for their connection."""


async def connect(address: BrokerAddress, name: str, *, instead_of: AmqpConnection | None = None) -> AmqpConnection:
    """Connect and log in at the first node that takes the connection; the nodes share the time limit.

    Args:
        address: The broker.
        name: The connection's name in the management UI.
        instead_of: The connection that was lost: its node is tried last.

    Raises:
        BackendUnavailable: No node takes the connection.
        BackendUnusable: The broker refuses the login, or the virtual host.
        ConfigurationError: The TLS files cannot be used.
    """
    context, loop = address.tls.context() if address.tls else None, asyncio.get_running_loop()
    nodes = address.in_turn(node_of(instead_of) if instead_of else None)
    deadline = loop.time() + address.connection_timeout
    errors: list[Exception] = []
    for number, node in enumerate(nodes):
        connection = AmqpConnection(parameters_of(node, name, context), partial(_tell_blocked, node))
        try:
            await connection.open((deadline - loop.time()) / (len(nodes) - number))
        except AmqpError as error:
            errors.append(explained(node, error))
            errors[-1].__cause__ = error.__cause__
        else:
            return connection
    raise none_connected(errors)


def parameters_of(node: BrokerAddress, name: str, context: ssl.SSLContext | None) -> Parameters:
    """Return how the protocol reaches that node, over TLS with that context."""
    return Parameters(
        host=node.host,
        port=node.port,
        user=node.user,
        password=node.password,
        vhost=node.vhost,
        product="delayline",
        connection_name=name,
        label=str(node),
        tls=context,
        server_name=(node.tls.server_name_indication or node.host) if node.tls else None,
        heartbeat=node.short_heartbeat,
        answer_timeout=node.server_timeout,
    )


def node_of(connection: AmqpConnection) -> Node:
    """Return the node that the connection is to."""
    return Node(connection.parameters.host, connection.parameters.port)


def _tell_blocked(address: BrokerAddress, reason: str | None) -> None:
    if reason is None:
        template = "RabbitMQ at %s takes messages again"
        emit(logger, logging.WARNING, Event.PUBLISHING_UNBLOCKED, template, address)
    else:
        template = "RabbitMQ at %s takes no messages now (%s): sends wait until it does"
        emit(logger, logging.WARNING, Event.PUBLISHING_BLOCKED, template, address, reason, reason=reason)


class BrokerConnection:
    """A connection to a broker, shared for receiving, declaring and browsing; it is replaced when lost, on next use.

    Args:
        name: the connection's name in the management UI.
    """

    def __init__(self, address: BrokerAddress, name: str) -> None:
        self._address = address
        self._name = name
        self._connection: AmqpConnection | None = None
        self._channels: list[Channel] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._opening = asyncio.Lock()
        self._not_before = 0.0
        self._process = LoopGuard()
        self.generation: int = 0
        """How often it was opened: facts read through an earlier connection may be outdated."""

    async def open(self) -> AmqpConnection:
        """Return a connection that was alive a moment ago. Raises BackendUnavailable or BackendUnusable."""
        if self._connection is None:
            self._process = LoopGuard()
        self._process.check(f"the connection to RabbitMQ at {self._address}")
        async with self._opening:
            if self._connection is not None and self._connection.lost is None:
                return self._connection
            if asyncio.get_running_loop().time() < self._not_before:
                raise BackendUnavailable(f"RabbitMQ at {self._address} was silent: the connection is given up")
            self._channels.clear()
            self._connection = await connect(self._address, self._name, instead_of=self._connection)
            self.generation += 1
            return self._connection

    async def close(self) -> None:
        """Close the channels each alone, so that their data is sent, then the connection. Idempotent.

        Waits a few seconds for a broker that does not answer.
        """
        if self._process.forked:
            return  # it is the parent's: ending it here would end it there
        async with self._opening:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHANNEL_CLOSING_PATIENCE):
                    for channel in self._channels:
                        await _close(channel)
            connection, self._connection = self._connection, None
            self._channels.clear()
            if connection is not None:
                await connection.close(CHANNEL_CLOSING_PATIENCE)

    def hang_up_if_silent(self, seconds: float) -> None:
        """Give a connection up on which nothing has come for so long, and connect no more for as long."""
        connection = self._connection
        if connection is not None and connection.lost is None and connection.silent_for >= seconds:
            connection.hang_up(seconds)
            self._not_before = asyncio.get_running_loop().time() + seconds

    async def channel(self) -> Channel:
        """Return a new channel, to be closed by the caller, or with the connection."""
        connection = await self.open()
        channel = await connection.channel(partial(explained, self._address.at(node_of(connection))))
        self._channels = [known for known in self._channels if known.closed is None]
        self._channels.append(channel)
        return channel

    async def run(self, work: Callable[[Channel], Awaitable[Result]]) -> Result:
        """Run `work` on a dedicated channel, which a refusal by the broker closes.

        Raises BackendUnavailable or BackendUnusable; LookupError for a missing queue or exchange.
        """
        channel = await self.channel()
        try:
            return await work(channel)
        except asyncio.CancelledError:
            closing = asyncio.create_task(_close(channel))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            raise
        finally:
            if not _cancelled():
                await _close(channel)

    async def release(self, channel: Channel) -> None:
        """Close a channel: unacknowledged messages return to their queues. Waits a few seconds at most."""
        closing = asyncio.create_task(_close(channel))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.shield(closing)

    async def version(self) -> tuple[int, ...]:
        """Return the broker's version. Raises BackendUnavailable or BackendUnusable."""
        return tuple(int(part) for part in re.findall(r"\d+", (await self.open()).version)[:3])


async def _close(channel: Channel) -> None:
    with contextlib.suppress(BackendUnavailable, TimeoutError):
        async with asyncio.timeout(CHANNEL_CLOSING_PATIENCE):
            await channel.close()


def _cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
