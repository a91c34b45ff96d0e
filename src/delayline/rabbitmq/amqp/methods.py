"""AMQP methods for any name: pamqp holds names against a pattern that RabbitMQ does not have."""

from __future__ import annotations

from pamqp import commands


class AnyName:
    """A frame whose names are as long as AMQP allows and made of whatever characters."""

    def validate(self) -> None:
        """Accept the frame."""


class ConnectionOpen(AnyName, commands.Connection.Open):
    """Use a virtual host."""


class ExchangeDeclare(AnyName, commands.Exchange.Declare):
    """Create an exchange, or look whether it is there."""


class ExchangeBind(AnyName, commands.Exchange.Bind):
    """Let an exchange pass messages on to another."""


class QueueDeclare(AnyName, commands.Queue.Declare):
    """Create a queue, or look whether it is there."""


class QueueBind(AnyName, commands.Queue.Bind):
    """Let an exchange put messages into a queue."""


class ExchangeUnbind(AnyName, commands.Exchange.Unbind):
    """Undo a binding of an exchange to another."""


class QueueUnbind(AnyName, commands.Queue.Unbind):
    """Undo a binding of a queue to an exchange."""


class ExchangeDelete(AnyName, commands.Exchange.Delete):
    """Delete an exchange."""


class QueueDelete(AnyName, commands.Queue.Delete):
    """Delete a queue."""


class QueuePurge(AnyName, commands.Queue.Purge):
    """Empty a queue."""


class Consume(AnyName, commands.Basic.Consume):
    """Have a queue's messages delivered."""


class Get(AnyName, commands.Basic.Get):
    """Take a message."""
