"""A store in front of RabbitMQ, and publishes that are refused for a reason that is no message's."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit

import pytest
from tests.eventually import PATIENCE, eventually_async

from delayline import DelayedMessage, Endpoint, Message, MessageContext, SqlDelayedMessageStore, StoredDelivery
from delayline.clock import SystemClock
from delayline.delayed.store import SupportsBatches
from delayline.errors import DispatchFailed
from delayline.events import Event
from delayline.rabbitmq import RabbitMQTransport
from delayline.testing import Fault, FaultyTransport, Signals

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.servers.rabbitmq import RabbitmqServer

    from delayline.spi import TransportOperation

IDS = [f"m{number}" for number in range(6)]
UNCOUNTED = (Event.BACKED_OFF, Event.ERROR_MOVE_FAILED, Event.MOVED_TO_ERROR)


class Refused(Exception):
    """An error of a client that nobody knows."""


def endpoint_on(transport: RabbitMQTransport | FaultyTransport, path: Path, handled: list[str]) -> Endpoint:
    store = SqlDelayedMessageStore(f"sqlite:///{path / 'front.db'}")
    endpoint = Endpoint("sales", transport=transport, delayed_delivery=StoredDelivery(store))

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled.append(message.id)

    return endpoint


async def send_all(endpoint: Endpoint) -> None:
    for message_id in IDS:
        await endpoint.send("sales", b"", message_id=message_id, delay=timedelta(seconds=1))


@pytest.mark.parametrize("singly", [False, True], ids=["as a whole", "singly"])
async def test_an_unknown_error_of_every_publish_counts_against_no_message(
    rabbitmq_url: str, tmp_path: Path, singly: bool
) -> None:
    def refused(sent: Sequence[TransportOperation]) -> Exception:
        return DispatchFailed(dict.fromkeys(range(len(sent)), Refused("?"))) if singly else Refused("?")

    handled: list[str] = []
    transport = FaultyTransport(RabbitMQTransport(rabbitmq_url))
    endpoint = endpoint_on(transport, tmp_path, handled)
    await endpoint.setup()
    with Signals() as signals:
        async with asyncio.timeout(2 * PATIENCE), endpoint:
            transport.inject(Fault("dispatch", refused))
            await send_all(endpoint)
            await eventually_async(lambda: signals.count(Event.BREAKER_ARMED), "the breaker is armed")
            await asyncio.sleep(2)
            assert [signals.count(event) for event in UNCOUNTED] == [0, 0, 0]
            transport.heal()
            await eventually_async(lambda: sorted(handled) == IDS, "all are handled")
            assert signals.count(Event.MOVED_TO_ERROR) == 0


async def test_a_revoked_permission_counts_against_no_message(
    rabbitmq: RabbitmqServer, rabbitmq_url: str, tmp_path: Path
) -> None:
    """The user may not publish to the queue of the messages, though to the error queue."""
    await endpoint_on(RabbitMQTransport(rabbitmq_url), tmp_path, []).setup()
    url = rabbitmq.new_user(rabbitmq_url, configure=".*", write=".*", read=".*")
    user, vhost = unquote(urlsplit(url).username or ""), unquote(urlsplit(url).path[1:])

    def permit(write: str) -> None:
        path = f"permissions/{quote(vhost, safe='')}/{user}"
        rabbitmq.api("PUT", path, json={"configure": ".*", "write": write, "read": ".*"})

    handled: list[str] = []
    with Signals() as signals:
        async with asyncio.timeout(3 * PATIENCE), endpoint_on(RabbitMQTransport(url), tmp_path, handled) as endpoint:
            permit("^(?!sales$).*")
            await send_all(endpoint)
            await eventually_async(lambda: signals.count(Event.BREAKER_ARMED), "the breaker is armed")
            await asyncio.sleep(2)
            assert [signals.count(event) for event in UNCOUNTED] == [0, 0, 0]
            permit(".*")
            await eventually_async(lambda: sorted(handled) == IDS, "all are handled", 2 * PATIENCE)
            assert signals.count(Event.MOVED_TO_ERROR) == 0


async def test_one_refused_message_is_in_the_error_queue(rabbitmq_url: str, tmp_path: Path) -> None:
    def is_refused(sent: Sequence[TransportOperation]) -> bool:
        return any(each.message.id == "m2" and each.destination == "sales" for each in sent)

    handled: list[str] = []
    transport = FaultyTransport(RabbitMQTransport(rabbitmq_url), Fault("dispatch", Refused("?"), when=is_refused))
    endpoint = endpoint_on(transport, tmp_path, handled)
    await endpoint.setup()
    with Signals() as signals:
        async with asyncio.timeout(2 * PATIENCE), endpoint:
            due = SystemClock().now() + timedelta(seconds=1)
            messages = [DelayedMessage(Message(message_id, {}, b""), "sales", due) for message_id in IDS]
            assert isinstance(endpoint.delayed_delivery, StoredDelivery)
            assert isinstance(endpoint.delayed_delivery.store, SupportsBatches)
            await endpoint.delayed_delivery.store.store_many(messages)
            await eventually_async(lambda: signals.count(Event.MOVED_TO_ERROR), "it is in the error queue")
            await eventually_async(lambda: sorted(handled) == [id for id in IDS if id != "m2"], "others are handled")
