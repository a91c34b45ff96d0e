"""The connection that declares, binds and consumes: aio-pika's, opened again on the next use after it was lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, TypeVar, cast

from aio_pika import Connection
from aio_pika import exceptions as pika
from aio_pika.abc import ConnectionParameter
from aio_pika.connection import make_url

from delayline.checks import ForkGuard
from delayline.errors import BackendUnavailable, BackendUnusable
from delayline.rabbitmq.amqp.confirms import Closed
from delayline.rabbitmq.amqp.errors import ACCESS_REFUSED, not_connected, refused_connection
from delayline.rabbitmq.amqp.methods import PermissionMissing
from delayline.rabbitmq.amqp.stream import Streams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    import aiormq
    from aiormq.channel import Channel
    from pamqp.base import Frame

    from delayline.rabbitmq.address import BrokerAddress

Result = TypeVar("Result")

CLOSING_PATIENCE: Final = 4.0
"""Seconds that a good-bye may take: for channels, and again for their connection."""
#: The errors of aio-pika, aiormq and the socket for a broker that cannot be reached any more.
LOST: Final = (pika.AMQPError, pika.ChannelInvalidStateError, OSError, TimeoutError, asyncio.IncompleteReadError)
#: Newer brokers' texts name the permission: `configure access to queue 'x' in vhost '/' refused for user 'u'`.
REFUSED: Final = re.compile(r"(?:(configure|write|read) )?access to (.*) in vhost '(.*)' refused for user '(.*)'")


#: Set in tasks that belong to connections of delayline's, those that aiormq starts included.
OWN: Final = ContextVar("delayline_rabbitmq", default=False)


def _not_own(record: logging.LogRecord) -> bool:
    """Return whether to log a line of aiormq: failures of these connections are raised, and logged once."""
    del record
    return not OWN.get()


logging.getLogger("aiormq.connection").addFilter(_not_own)


class NamedConnection(Connection):
    """A connection to a broker whose certificate may have another name than its host."""

    PARAMETERS = (
        *Connection.PARAMETERS,
        ConnectionParameter("server_hostname", str, is_kwarg=True),
        ConnectionParameter("transport_factory", lambda given: given, is_kwarg=True),
    )


class BrokerConnection:
    """One connection to a broker, shared for receiving, declaring and browsing; a lost one is replaced on next use.

    Args:
        name: the connection's name in the management UI.
    """

    def __init__(self, address: BrokerAddress, name: str) -> None:
        self._address = address
        self._name = name
        self._connection: NamedConnection | None = None
        self._streams: Streams | None = None
        self._channels: list[Channel] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._opening = asyncio.Lock()
        self._not_before = 0.0
        self._process = ForkGuard()
        self.generation = 0
        """How often it was opened: facts read through an earlier connection may be outdated."""

    async def open(self) -> NamedConnection:
        """Return a connection that was alive a moment ago. Raises BackendUnavailable or BackendUnusable."""
        if self._connection is None:
            self._process = ForkGuard()
        self._process.check(f"the connection to RabbitMQ at {self._address}")
        async with self._opening:
            if self._connection is not None and self._connection.connected.is_set():
                return self._connection
            if asyncio.get_running_loop().time() < self._not_before:
                raise BackendUnavailable(f"RabbitMQ at {self._address} was silent: the connection is given up")
            await self._drop()
            with explained(self._address):
                self._connection = await self._connect()
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
                        with contextlib.suppress(*LOST):
                            await channel.close()
            await self._drop()

    def hang_up_if_silent(self, seconds: float) -> None:
        """Give a connection up on which nothing has come for so long, and connect no more for as long."""
        if self._streams is not None and self._streams.silent_for >= seconds:
            self._streams.abort()
            self._not_before = asyncio.get_running_loop().time() + seconds

    async def channel(self) -> Channel:
        """Return a new channel, to be closed by the caller, or with the connection."""
        connection = await self.open()
        with explained(self._address):
            async with asyncio.timeout(self._address.connection_timeout):
                if connection.transport is None:
                    raise ConnectionResetError("the connection was closed")
                channel = await connection.transport.connection.channel(publisher_confirms=False)
        self._channels = [one for one in self._channels if not one.is_closed]
        self._channels.append(self._limited(cast("Channel", channel)))
        return self._channels[-1]

    def _limited(self, channel: Channel) -> Channel:
        """Give every call on the channel a limit; the connection whose broker missed it is given up."""
        call, streams, limit = channel.rpc, self._streams, self._address.server_timeout

        async def within_limit(frame: Frame, timeout: float | None = None) -> object:
            try:
                return await call(frame, timeout=timeout or limit)
            except TimeoutError:
                if streams is not None:
                    streams.abort()
                raise

        setattr(channel, "rpc", within_limit)  # noqa: B010 - aiormq's own methods call it by that name
        return channel

    async def run(self, work: Callable[[Channel], Awaitable[Result]]) -> Result:
        """Run `work` on a dedicated channel, which a refusal by the broker closes.

        Raises BackendUnavailable or BackendUnusable; LookupError for a missing queue or exchange.
        """
        channel = await self.channel()
        try:
            with explained(self._address):
                return await work(channel)
        except asyncio.CancelledError:
            closing = asyncio.create_task(_close(channel))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            raise
        finally:
            if not _cancelled():
                await _close(channel)

    async def version(self) -> tuple[int, ...]:
        """Return the broker's version. Raises BackendUnavailable or BackendUnusable."""
        channel = await self.channel()
        properties = cast("aiormq.Connection", channel.connection).server_properties or {}
        await channel.close()
        return tuple(int(part) for part in re.findall(r"\d+", str(properties.get("version", "")))[:3])

    def explained(self) -> contextlib.AbstractContextManager[None]:
        """Have errors of aio-pika's raised as delayline's."""
        return explained(self._address)

    async def _connect(self) -> NamedConnection:
        address = self._address
        streams = Streams(tls=address.tls is not None, limit=address.server_timeout, watched=address.heartbeat > 0)
        self._streams = streams
        connection = NamedConnection(
            make_url(
                host=address.host,
                port=address.port,
                login=address.user,
                password=address.password,
                virtualhost=address.vhost,
                ssl=address.tls is not None,
                heartbeat=str(address.short_heartbeat),
            ),
            transport_factory=streams,
            ssl_context=None if address.tls is None else address.tls.context(),
            server_hostname=None if address.tls is None else address.tls.server_name_indication or address.host,
            client_properties={"connection_name": self._name},
        )
        own = OWN.set(True)
        try:
            await connection.connect(timeout=address.connection_timeout)
        except BaseException:
            streams.abort()
            await connection.close()
            raise
        finally:
            OWN.reset(own)
        return connection

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        self._channels.clear()
        if connection is None:
            return
        try:
            async with asyncio.timeout(CLOSING_PATIENCE):
                await connection.close()
        except (*LOST, asyncio.CancelledError):
            if self._streams is not None:
                self._streams.abort()
            if _cancelled():
                raise


async def _close(channel: Channel) -> None:
    with contextlib.suppress(*LOST):
        async with asyncio.timeout(CLOSING_PATIENCE):
            await channel.close()


def _cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class NotFound(LookupError):
    """The broker says that an exchange or a queue does not exist."""


class PreconditionFailed(BackendUnusable):
    """The broker has it already, with other arguments."""


@contextlib.contextmanager
def explained(address: BrokerAddress) -> Iterator[None]:
    """Translate errors of aio-pika; NotFound and PreconditionFailed for 404 and 406."""
    try:
        yield
    except LOST as error:
        raise _explained(error, address) from error


def _explained(error: BaseException, address: BrokerAddress) -> Exception:
    text = _text(error)
    if isinstance(error, pika.ChannelNotFoundEntity):
        return NotFound(text)
    if isinstance(error, pika.ChannelPreconditionFailed):
        return PreconditionFailed(text)
    if isinstance(error, pika.ChannelClosed) and "ACCESS_REFUSED" in text:
        return _refused(text, address, error.permission if isinstance(error, PermissionMissing) else "sufficient")
    if isinstance(error, pika.ProbableAuthenticationError | pika.AuthenticationError):
        return refused_connection(address, Closed(ACCESS_REFUSED, text))
    code = error.args[0] if isinstance(error, pika.ConnectionClosed) and error.args else None
    if isinstance(code, int) and code > 0:
        return refused_connection(address, Closed(code, text))
    return not_connected(address, error.__cause__ if isinstance(error.__cause__, OSError) else error)


def _refused(text: str, address: BrokerAddress, permission: str) -> BackendUnusable:
    refused = REFUSED.search(text)
    if refused is None:
        return BackendUnusable(f"RabbitMQ at {address} refuses: {text}")
    what, thing, vhost, user = refused.groups()
    return BackendUnusable(
        f"user {user!r} has no {what or permission} permission on {thing} in virtual host {vhost!r}. Allow it with: "
        f"rabbitmqctl set_permissions -p {vhost} {user} CONFIGURE WRITE READ ({text})"
    )


def _text(error: BaseException) -> str:
    return " ".join(str(part) for part in error.args if isinstance(part, str) and part) or str(error)
