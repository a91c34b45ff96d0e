"""What a broker refuses, as delayline's errors, with the remedy."""

from __future__ import annotations

import re
import ssl
from typing import TYPE_CHECKING, Final

from delayline.errors import BackendUnavailable, BackendUnusable, InvalidMessage, MessageRejected, QueueNotFound
from delayline.rabbitmq.amqp.errors import (
    ACCESS_REFUSED,
    NOT_ALLOWED,
    NOT_FOUND,
    PRECONDITION_FAILED,
    AmqpError,
    ChannelEnded,
    ConnectionEnded,
    NoFreeChannel,
    NotConnected,
    NotTaken,
    Returned,
    Unsendable,
)
from delayline.rabbitmq.amqp.methods import ExchangeBind, ExchangeDeclare, QueueBind, QueueDeclare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pamqp.frame import FrameTypes

    from delayline.rabbitmq.address import BrokerAddress
    from delayline.rabbitmq.amqp.errors import Closed
    from delayline.rabbitmq.encoding import Publication

TOO_LARGE: Final = re.compile(r"message size (\d+) is larger than configured max size (\d+)")

FROM_BROKER: Final = {320, 506, 541}  # connection forced, resource error, internal error
#: Newer brokers' texts name the permission: `configure access to queue 'x' in vhost '/' refused for user 'u'`.
REFUSED_RIGHT: Final = re.compile(r"(?:(configure|write|read) )?access to (.*) in vhost '(.*)' refused for user '(.*)'")


class NotFound(LookupError):
    """An exchange or a queue does not exist."""


class PreconditionFailed(BackendUnusable):
    """The broker has it already, with other arguments."""


class Unroutable(QueueNotFound):
    """The broker had no exchange or no queue for a message; its sender reports the destination instead."""

    def __init__(self, exchange: str, routing_key: str, reason: str) -> None:
        super().__init__(routing_key or exchange)
        self.args: tuple[str] = (
            f"nothing takes messages at exchange {exchange!r} with routing key {routing_key!r}: {reason}",
        )
        self.exchange = exchange
        self.routing_key = routing_key


def explained(address: BrokerAddress, error: AmqpError) -> Exception:
    """Return what went wrong with a connection, or a channel, to the broker at that address as an error of delayline.

    It is BackendUnavailable, or BackendUnusable where another attempt will not help; of a refused method NotFound or
    PreconditionFailed too.
    """
    match error:
        case NotConnected() if error.__cause__ is not None:
            return not_connected(address, error.__cause__)
        case ConnectionEnded():
            return refused_connection(address, error.closed)
        case ChannelEnded():
            return refused_call(address, error.method, error.closed)
        case NoFreeChannel():
            return BackendUnusable(str(error))
    return BackendUnavailable(str(error))


def not_connected(address: BrokerAddress, error: BaseException) -> BackendUnavailable | BackendUnusable:
    """Return the error for a failed connection attempt."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return BackendUnusable(
            f"the certificate of {address} is not trusted: {error.verify_message}. Give cacertfile=, the PEM file of "
            "the authority that signed it, or server_name_indication=, the name in it"
        )
    if isinstance(error, ssl.SSLError):
        return BackendUnusable(f"{address} does not speak TLS as this client does: {error}. Its TLS port is often 5671")
    reason = (
        "no answer in time; is that its port for AMQP?"
        if isinstance(error, TimeoutError)
        else str(error) or type(error).__name__
    )
    return BackendUnavailable(f"RabbitMQ at {address} does not answer: {reason}")


def none_connected(errors: Sequence[Exception]) -> Exception:
    """Return the error for a broker none of whose nodes takes a connection, from each node's."""
    if len(errors) == 1:
        return errors[0]
    problem = f"none of {len(errors)} nodes takes the connection: {'; '.join(map(str, errors))}"
    if all(isinstance(error, BackendUnusable) for error in errors):
        return BackendUnusable(problem)
    return BackendUnavailable(problem)


def refused_connection(address: BrokerAddress, closed: Closed) -> BackendUnavailable | BackendUnusable:
    """Return the error for a connection closed by the broker, at its opening or later."""
    if closed.code == ACCESS_REFUSED:
        return BackendUnusable(
            f"RabbitMQ at {address} refuses user {address.user!r} or the password. Check both; the user guest may come "
            f"from the broker's own machine only ({closed.text})"
        )
    if closed.code == NOT_ALLOWED and "not found" in closed.text:
        return BackendUnusable(
            f"RabbitMQ at {address.authority} has no virtual host {address.vhost!r}. "
            f"Create it with: rabbitmqctl add_vhost {address.vhost}"
        )
    if closed.code == NOT_ALLOWED and "access" in closed.text:
        return BackendUnusable(
            f"user {address.user!r} may not use virtual host {address.vhost!r} of RabbitMQ at {address.authority}. "
            f"Allow it with: rabbitmqctl set_permissions -p {address.vhost} {address.user} CONFIGURE WRITE READ"
        )
    problem = f"RabbitMQ at {address} closed the connection: {closed.code} {closed.text}"
    return BackendUnavailable(problem) if closed.code in FROM_BROKER else BackendUnusable(problem)


def refused_call(address: BrokerAddress, method: FrameTypes | bytes, closed: Closed) -> Exception:
    """Return the error of a call in place of whose answer the broker closed the channel."""
    if closed.code == NOT_FOUND:
        return NotFound(closed.text)
    if closed.code == PRECONDITION_FAILED:
        return PreconditionFailed(closed.text)
    if closed.code != ACCESS_REFUSED:
        return BackendUnavailable(f"RabbitMQ at {address} closed a channel: {closed.code} {closed.text}")
    refused = REFUSED_RIGHT.search(closed.text)
    if refused is None:
        return BackendUnusable(f"RabbitMQ at {address} refuses: {closed.text}")
    what, thing, vhost, user = refused.groups()
    return BackendUnusable(
        f"user {user!r} has no {what or _permission(method, closed.text)} permission on {thing} in virtual host "
        f"{vhost!r}. Allow it with: rabbitmqctl set_permissions -p {vhost} {user} CONFIGURE WRITE READ ({closed.text})"
    )


def _permission(method: FrameTypes | bytes, text: str) -> str:
    """Return the permission that a method takes: older brokers do not name it."""
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


def unconfirmed(publication: Publication, error: Exception) -> Exception:
    """Return the error of a publication that was not sent, returned or not taken; others are unchanged."""
    match error:
        case Unsendable():
            return InvalidMessage(str(error))
        case Returned():
            return Unroutable(publication.exchange, publication.routing_key, str(error))
        case NotTaken():
            return MessageRejected(
                f"RabbitMQ did not take message {publication.message.id!r} for exchange {publication.exchange!r} with "
                f"routing key {publication.routing_key!r}: a queue there is full, or has no majority of its replicas"
            )
    return error


def refused_publication(address: BrokerAddress, publication: Publication, closed: Closed) -> Exception:
    """Return the error of a publication for which the broker closed the channel."""
    if closed.code == NOT_FOUND:
        return Unroutable(publication.exchange, publication.routing_key, f"{closed.code} {closed.text}")
    if closed.code == ACCESS_REFUSED:
        return BackendUnusable(
            f"user {address.user!r} may not write to exchange {publication.exchange!r} in virtual host "
            f"{address.vhost!r}. Allow it with: rabbitmqctl set_permissions -p {address.vhost} {address.user} "
            f"CONFIGURE WRITE READ, where WRITE matches it ({closed.text})"
        )
    limit = size_limit(closed)
    if limit is not None:
        return too_large(publication, limit)
    message = f"RabbitMQ refuses message {publication.message.id!r}: {closed.code} {closed.text}"
    return InvalidMessage(message) if closed.code == PRECONDITION_FAILED else MessageRejected(message)


def size_limit(closed: Closed) -> int | None:
    """Return the broker's max_message_size where it closed the channel over it."""
    sizes = TOO_LARGE.search(closed.text) if closed.code == PRECONDITION_FAILED else None
    return int(sizes[2]) if sizes else None


def too_large(publication: Publication, limit: int) -> InvalidMessage:
    """Return the error of a message beyond the broker's max_message_size."""
    return InvalidMessage(
        f"message {publication.message.id!r} has a body of {len(publication.message.body)} bytes, the broker takes "
        f"{limit} at most: send a reference to it, or raise max_message_size in the broker's configuration"
    )
