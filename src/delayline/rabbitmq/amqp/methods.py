"""AMQP methods for any name: pamqp holds names against a pattern that RabbitMQ does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from aio_pika.exceptions import ChannelClosed
from pamqp import commands

if TYPE_CHECKING:
    from aiormq.abc import AbstractChannel
    from aiormq.channel import Channel
    from pamqp.base import Frame


class AnyName:
    """A frame whose names are as long as AMQP allows and made of whatever characters."""

    def validate(self) -> None:
        """Accept the frame."""


class ExchangeDeclare(AnyName, commands.Exchange.Declare):
    """Create an exchange, or look whether it is there."""


class ExchangeBind(AnyName, commands.Exchange.Bind):
    """Let one exchange pass messages on to another."""


class QueueDeclare(AnyName, commands.Queue.Declare):
    """Create a queue, or look whether it is there."""


class QueueBind(AnyName, commands.Queue.Bind):
    """Let an exchange put messages into a queue."""


class QueuePurge(AnyName, commands.Queue.Purge):
    """Empty a queue."""


class Consume(AnyName, commands.Basic.Consume):
    """Have a queue's messages delivered."""


class Get(AnyName, commands.Basic.Get):
    """Take one message."""


class PermissionMissing(ChannelClosed):
    """The user may not do that; older brokers do not say which of the three permissions it takes."""

    def __init__(self, method: Frame, refused: ChannelClosed) -> None:
        super().__init__(*refused.args)
        self.permission = _permission(method, str(refused))


async def ask(channel: AbstractChannel, method: Frame) -> object:
    """Send a method and return the broker's answer. Raises aiormq's errors."""
    try:
        return await cast("Channel", channel).rpc(method)
    except ChannelClosed as error:
        if "ACCESS_REFUSED" in str(error):
            raise PermissionMissing(method, error) from error
        raise


def _permission(method: Frame, text: str) -> str:
    match method:
        case QueueDeclare() if "access to exchange" in text:  # its dead letters go there
            return "write"
        case QueueDeclare() if "x-dead-letter-exchange" in (method.arguments or {}):
            return "configure, or no read,"
        case QueueDeclare() | ExchangeDeclare():
            return "configure"
        case QueueBind():
            return "write" if "access to queue" in text else "read"
        case ExchangeBind():
            return "read" if f"exchange '{method.source}'" in text else "write"
    return "read"
