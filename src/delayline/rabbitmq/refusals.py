"""What a broker refuses, as delayline's errors, with the remedy."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from delayline.errors import BackendUnusable, InvalidMessage, MessageRejected, QueueNotFound
from delayline.rabbitmq.amqp.confirms import NotTaken, Returned
from delayline.rabbitmq.amqp.errors import ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED

if TYPE_CHECKING:
    from delayline.rabbitmq.address import BrokerAddress
    from delayline.rabbitmq.amqp.confirms import Closed
    from delayline.rabbitmq.encoding import Publication

TOO_LARGE: Final = re.compile(r"message size (\d+) is larger than configured max size (\d+)")


class Unroutable(QueueNotFound):
    """The broker had no exchange or no queue for a message; its sender reports the destination instead."""

    def __init__(self, exchange: str, routing_key: str, reason: str) -> None:
        super().__init__(routing_key or exchange)
        self.args = (f"nothing takes messages at exchange {exchange!r} with routing key {routing_key!r}: {reason}",)
        self.exchange = exchange
        self.routing_key = routing_key


def unconfirmed(publication: Publication, error: Exception) -> Exception:
    """Return the error of one publication that the broker returned or did not take; others are unchanged."""
    match error:
        case Returned():
            return Unroutable(publication.exchange, publication.routing_key, str(error))
        case NotTaken():
            return MessageRejected(
                f"RabbitMQ did not take message {publication.message.id!r} for exchange {publication.exchange!r} with "
                f"routing key {publication.routing_key!r}: a queue there is full, or has no majority of its replicas"
            )
    return error


def refused_publication(address: BrokerAddress, publication: Publication, closed: Closed) -> Exception:
    """Return the error of one publication for which the broker closed the channel."""
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
