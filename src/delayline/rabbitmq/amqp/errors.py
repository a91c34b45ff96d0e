"""What goes wrong with a broker, a channel or a publication."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from pamqp.frame import FrameTypes

ACCESS_REFUSED: Final = 403
NOT_FOUND: Final = 404
PRECONDITION_FAILED: Final = 406
NOT_ALLOWED: Final = 530


class AmqpError(Exception):
    """An error of this package."""


class Unsendable(AmqpError):
    """AMQP cannot carry a publication."""


class Returned(AmqpError):
    """The broker had no queue for a message and sent it back, for this reason."""


class NotTaken(AmqpError):
    """A queue refused a message."""


class Unavailable(AmqpError):
    """The connection or the channel is closed, or the broker does not answer in time."""


class NotConnected(AmqpError):
    """No connection could be made; its cause is why."""


class NoFreeChannel(AmqpError):
    """All channels that the broker allows are open."""


class Closed(NamedTuple):
    """Why the broker closed a channel or a connection."""

    code: int
    text: str


class ConnectionEnded(AmqpError):
    """The broker closed the connection."""

    def __init__(self, closed: Closed) -> None:
        super().__init__(f"{closed.code} {closed.text}")
        self.closed = closed


class ChannelEnded(AmqpError):
    """The broker closed the channel in place of an answer to a method."""

    def __init__(self, closed: Closed, method: FrameTypes | bytes) -> None:
        super().__init__(f"{closed.code} {closed.text}")
        self.closed = closed
        self.method = method
