"""The connection that declares, binds and consumes: opened again on the next use after it was lost."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING, Final, TypeVar

from delayline.checks import LoopGuard
from delayline.errors import BackendUnavailable
from delayline.rabbitmq.amqp.connection import AmqpConnection

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delayline.rabbitmq.address import BrokerAddress
    from delayline.rabbitmq.amqp.channel import Channel

Result = TypeVar("Result")

CLOSING_PATIENCE: Final = 4.0
"""Seconds that closing may take: for channels, and again for their connection."""


class BrokerConnection:
    """One connection to a broker, shared for receiving, declaring and browsing; a lost one is replaced on next use.

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
        self.generation = 0
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
            self._connection = await AmqpConnection.open(self._address, self._name, instead_of=self._connection)
            self.generation += 1
            return self._connection

    async def close(self) -> None:
        """Close the channels one by one, so that their data is sent, then the connection. Idempotent.

        Waits a few seconds for a broker that does not answer.
        """
        if self._process.forked:
            return  # it is the parent's: ending it here would end it there
        async with self._opening:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSING_PATIENCE):
                    for channel in self._channels:
                        await _close(channel)
            connection, self._connection = self._connection, None
            self._channels.clear()
            if connection is not None:
                await connection.close(CLOSING_PATIENCE)

    def hang_up_if_silent(self, seconds: float) -> None:
        """Give a connection up on which nothing has come for so long, and connect no more for as long."""
        connection = self._connection
        if connection is not None and connection.lost is None and connection.silent_for >= seconds:
            connection.hang_up(seconds)
            self._not_before = asyncio.get_running_loop().time() + seconds

    async def channel(self) -> Channel:
        """Return a new channel, to be closed by the caller, or with the connection."""
        connection = await self.open()
        channel = await connection.channel()
        self._channels = [one for one in self._channels if one.closed is None]
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
        async with asyncio.timeout(CLOSING_PATIENCE):
            await channel.close()


def _cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
