"""`Sales` gets a copy of each delayed message for `Contoso.Sales`: dropped where that has it too, else kept."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import pytest
from tests.eventually import eventually_async

from delayline import Endpoint, Event
from delayline.message import Headers
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.testing import Signals
from delayline.testing.conformance.native_delivery import Arrivals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.servers.rabbitmq import RabbitmqServer

    from delayline import Message

SECOND = timedelta(seconds=1)
SHORTER: Final = "Sales"
LONGER: Final = "Contoso.Sales"
DELIVERY: Final = "nsb.v2.delay-delivery"


def is_a_drop(record: logging.LogRecord) -> bool:
    return "dropped here" in record.getMessage()


def endpoint_at(url: str, name: str, **settings: object) -> Endpoint:
    return Endpoint(name, transport=RabbitMQTransport(url), delayed_delivery=DelayLevelDelivery(), **settings)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def shorter_name_runs(url: str) -> AsyncIterator[tuple[Endpoint, Arrivals]]:
    """Run `Sales`, once `Contoso.Sales` is set up."""
    await endpoint_at(url, LONGER).setup()
    endpoint = endpoint_at(url, SHORTER)
    arrivals = Arrivals(endpoint)
    async with endpoint:
        yield endpoint, arrivals


@pytest.fixture(params=["conventional", "direct"])
def topology(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def managed(rabbitmq: RabbitmqServer, rabbitmq_url: str, topology: str) -> str:
    """The broker's URL, with its management API."""
    return f"{rabbitmq_url}?topology={topology}&management={rabbitmq.management_url}"


@pytest.fixture
def vhost(rabbitmq_url: str) -> str:
    return rabbitmq_url.rsplit("/", 1)[1]


async def kept(endpoint: Endpoint, id: str) -> Message:
    """Return the message with that id once it is in the error queue."""
    transport = endpoint.transport
    assert isinstance(transport, RabbitMQTransport)
    found: list[Message] = []

    async def is_there() -> bool:
        found[:] = [one for one in await transport.browse("error", 10) if one.id == id]
        return bool(found)

    await eventually_async(is_there, f"{id} is in the error queue")
    return found[0]


async def test_a_copy_is_dropped_where_the_other_endpoint_has_it_too(managed: str) -> None:
    async with shorter_name_runs(managed) as (sales, own):
        other = endpoint_at(managed, LONGER)
        arrivals = Arrivals(other)
        async with other:
            with Signals() as signals:
                for number in range(20):
                    await sales.send(LONGER, b"", message_id=f"{number}", delay=SECOND)
                assert len(set(await arrivals.number(20))) == 20
                await signals.wait_for(Event.BINDINGS_OVERLAP, timeout=60, where=is_a_drop)
            # Then the shorter name handles its own messages, and holds no copy
            await sales.send(SHORTER, b"", message_id="own", delay=SECOND)
            assert await own.number(1) == ["own"]
        transport = sales.transport
        assert isinstance(transport, RabbitMQTransport)
        assert await transport.count("error") == 0
    assert await count_after_stop(managed, SHORTER) == 0


async def count_after_stop(url: str, queue: str) -> int:
    transport = RabbitMQTransport(url)
    await transport.start()
    try:
        return await transport.count(queue)
    finally:
        await transport.stop()


def delete_longer_name(rabbitmq: RabbitmqServer, vhost: str) -> None:
    rabbitmq.api("DELETE", f"queues/{vhost}/{LONGER}")
    with contextlib.suppress(Exception):  # the direct topology has none
        rabbitmq.api("DELETE", f"exchanges/{vhost}/{LONGER}")


def delete_its_queue(rabbitmq: RabbitmqServer, vhost: str) -> None:
    rabbitmq.api("DELETE", f"queues/{vhost}/{LONGER}")


def delete_its_binding(rabbitmq: RabbitmqServer, vhost: str) -> None:
    for one in rabbitmq.api("GET", f"exchanges/{vhost}/{DELIVERY}/bindings/source").json():
        if one["destination"] == LONGER:
            kind = one["destination_type"][0]
            rabbitmq.api("DELETE", f"bindings/{vhost}/e/{DELIVERY}/{kind}/{LONGER}/{one['properties_key']}")


@pytest.mark.parametrize("change", [delete_longer_name, delete_its_queue, delete_its_binding])
async def test_a_copy_is_kept_where_the_other_endpoint_cannot_have_it(
    rabbitmq: RabbitmqServer, vhost: str, managed: str, change: Callable[[RabbitmqServer, str], None]
) -> None:
    """Given a copy that was just dropped, when the other endpoint loses its way, then the next copy is kept."""
    async with shorter_name_runs(managed) as (sales, _):
        other = endpoint_at(managed, LONGER)
        arrivals = Arrivals(other)
        with Signals() as signals:
            async with other:
                await sales.send(LONGER, b"", message_id="before", delay=SECOND)
                await arrivals.number(1)
            await signals.wait_for(Event.BINDINGS_OVERLAP, timeout=60, where=is_a_drop)
        # Given a message that waits
        await sales.send(LONGER, b"whole", message_id="after", delay=3 * SECOND, headers={"shop": "Köln"})
        # When the other endpoint loses its way, before the message is due
        await asyncio.to_thread(change, rabbitmq, vhost)
        # Then the copy is in the error queue, whole, with the reason, and a retry would go to the other endpoint
        found = await kept(sales, "after")
        assert (found.body, found.headers["shop"]) == (b"whole", "Köln")
        assert found.headers[Headers.FAILED_QUEUE] == LONGER
        assert f"a delayed message for '{LONGER}'" in found.headers[Headers.EXCEPTION_MESSAGE]


async def test_a_copy_is_kept_where_the_broker_cannot_be_asked(rabbitmq_url: str) -> None:
    """Given no management API, when a copy comes, then it is kept with the reason, and own messages are handled."""
    url = f"{rabbitmq_url}?management=http://127.0.0.1:9"
    async with shorter_name_runs(url) as (sales, own):
        await sales.send(LONGER, b"", message_id="copy", delay=SECOND)
        await sales.send(SHORTER, b"", message_id="own", delay=SECOND)
        assert await own.number(1) == ["own"]
        found = await kept(sales, "copy")
        assert "no management API at http://127.0.0.1:9" in found.headers[Headers.EXCEPTION_MESSAGE]


async def test_a_management_api_without_an_answer_delays_no_other_message(rabbitmq_url: str) -> None:
    """Given a management API that never answers, when copies come, then own messages are handled meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are taken, and never answered
        port = silent.getsockname()[1]
        async with shorter_name_runs(f"{rabbitmq_url}?management=http://127.0.0.1:{port}") as (sales, own):
            for number in range(40):
                await sales.send(LONGER, b"", message_id=f"copy{number}", delay=SECOND)
            await sales.send(SHORTER, b"", message_id="own", delay=2 * SECOND)
            assert await own.number(1) == ["own"]
            transport = sales.transport
            assert isinstance(transport, RabbitMQTransport)

            async def all_are_kept() -> bool:
                return await transport.count("error") == 40

            await eventually_async(all_are_kept)


async def test_a_stop_returns_copies_that_are_not_decided(rabbitmq_url: str) -> None:
    """Given copies that wait for an answer of the management API, when the endpoint stops, then they are in a queue."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are taken, and never answered
        port = silent.getsockname()[1]
        url = f"{rabbitmq_url}?management=http://127.0.0.1:{port}"
        async with shorter_name_runs(url) as (sales, own):
            for number in range(3):
                await sales.send(LONGER, b"", message_id=f"copy{number}", delay=SECOND)
            await sales.send(SHORTER, b"", message_id="own", delay=2 * SECOND)
            await own.number(1)

        async def all_are_kept() -> bool:  # a level or a queue of a busy broker may give them back later
            return await count_after_stop(url, SHORTER) + await count_after_stop(url, "error") == 3

        await eventually_async(all_are_kept)
