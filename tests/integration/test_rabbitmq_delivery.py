"""Delay levels on a real broker, in every layout; a store in front; names that cross."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, cast

import aio_pika
import pytest
from tests.eventually import eventually_async

import delayline.rabbitmq.delivery
from delayline import (
    ConfigurationError,
    DelayedMessage,
    Endpoint,
    Event,
    Message,
    MessageContext,
    SqlDelayedMessageStore,
    SqlTransport,
    StoredDelivery,
)
from delayline.errors import BackendUnusable
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.rabbitmq.amqp.methods import ExchangeDelete, QueueDelete
from delayline.rabbitmq.front import parked
from delayline.rabbitmq.levels import MAXIMUM_DELAY
from delayline.spi import TransportOperation
from delayline.testing import NativeDeliveryConformance, Signals
from delayline.testing.conformance.native_delivery import Arrivals
from delayline.testing.conformance.transport_fixtures import received

if TYPE_CHECKING:
    from pathlib import Path

    from aio_pika.abc import AbstractIncomingMessage
    from tests.servers.rabbitmq import RabbitmqServer

SECOND = timedelta(seconds=1)


class TestDelayLevels(NativeDeliveryConformance):
    """As .NET lays them out: quorum queues, conventional routing."""

    @pytest.fixture(autouse=True)
    def vhost(self, rabbitmq_url: str) -> None:
        self.url = rabbitmq_url

    async def make_backends(self, tmp_path: Path) -> tuple[RabbitMQTransport, DelayLevelDelivery]:
        return RabbitMQTransport(self.url), DelayLevelDelivery()


@pytest.fixture
def store(tmp_path: Path) -> SqlDelayedMessageStore:
    return SqlDelayedMessageStore(f"sqlite:///{tmp_path / 'front.db'}")


def waiting(server: RabbitmqServer, url: str, queue: str) -> int:
    """Return how many messages a queue has, as the management API counts them."""
    return int(server.api("GET", f"queues/{url.rsplit('/', 1)[1]}/{queue}").json().get("messages", 0))


@pytest.mark.parametrize(
    "layout", ["queue_type=classic&topology=direct", "delays=v1", "delays=mine&topology=direct", "queue_type=classic"]
)
async def test_every_layout_delivers(rabbitmq_url: str, layout: str) -> None:
    endpoint = Endpoint(
        "sales.eu", transport=RabbitMQTransport(f"{rabbitmq_url}?{layout}"), delayed_delivery=DelayLevelDelivery()
    )
    arrivals = Arrivals(endpoint)
    async with endpoint:
        began = time.monotonic()
        await endpoint.send("sales.eu", b"", message_id="m", delay=SECOND)
        assert await arrivals.number(1) == ["m"]
    assert 1.0 <= arrivals.instants["m"] - began < 4.0


@pytest.mark.parametrize(
    ("layout", "queues", "levels"),
    [
        ("delays=v1&queue_type=classic", "classic", "classic"),
        ("queue_type=classic", "classic", "quorum"),
        ("delays=v1", "quorum", "classic"),
    ],
)
async def test_layouts_in_a_virtual_host_of_quorum_queues(
    rabbitmq4: RabbitmqServer, rabbitmq4_url: str, layout: str, queues: str, levels: str
) -> None:
    """Given quorum as the default type, when an endpoint asks for classic ones, then these are, and it delivers."""
    vhost = rabbitmq4_url.rsplit("/", 1)[1]
    rabbitmq4.api("PUT", f"vhosts/{vhost}", json={"default_queue_type": "quorum"})
    transport = RabbitMQTransport(f"{rabbitmq4_url}?{layout}")
    endpoint = Endpoint("sales", transport=transport, delayed_delivery=DelayLevelDelivery())
    arrivals = Arrivals(endpoint)
    async with endpoint:
        await endpoint.send("sales", b"", message_id="m", delay=SECOND)
        assert await arrivals.number(1) == ["m"]
    found = {one["name"]: one["type"] for one in rabbitmq4.api("GET", f"queues/{vhost}").json()}
    assert found["sales"] == queues
    assert {kind for name, kind in found.items() if "delay-level" in name} == {levels}


@pytest.mark.slow
async def test_ten_seconds_wait_eight_and_two(rabbitmq_url: str) -> None:
    """Given the document's example, when a message is delayed by 10 s, then it waits in level 3, then in level 1."""
    transport = RabbitMQTransport(rabbitmq_url)
    await transport.setup_infrastructure(["destination"])
    endpoint = Endpoint("sales", transport=transport, delayed_delivery=DelayLevelDelivery())
    async with endpoint:
        began = time.monotonic()
        await endpoint.send("destination", b"", message_id="m", delay=10 * SECOND)
        connection = await aio_pika.connect(rabbitmq_url)
        arrived: asyncio.Queue[tuple[float, list[str]]] = asyncio.Queue()

        async def note(message: AbstractIncomingMessage) -> None:
            deaths = cast("list[dict[str, str]]", message.headers["x-death"])
            arrived.put_nowait((time.monotonic(), [death["queue"] for death in deaths]))

        await (await (await connection.channel()).get_queue("destination")).consume(note)
        instant, path = await asyncio.wait_for(arrived.get(), 20)
        assert path == ["nsb.v2.delay-level-01", "nsb.v2.delay-level-03"]  # the last one first
        assert 10.0 <= instant - began < 13.0
        assert await transport.count("destination") == arrived.qsize() == 0
        await connection.close()


async def test_levels_that_are_not_there_are_reported_at_start(rabbitmq_url: str) -> None:
    transport = RabbitMQTransport(rabbitmq_url)
    await transport.setup_infrastructure(["sales", "error"])
    endpoint = Endpoint("sales", transport=transport, delayed_delivery=DelayLevelDelivery(), setup_infrastructure=False)
    with pytest.raises(BackendUnusable, match=r"'nsb\.v2\.delay-delivery' are not on the broker.*delayline rabbitmq"):
        await endpoint.start()


async def test_other_transports_have_no_levels(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"needs a RabbitMQTransport, not SqlTransport: use StoredDelivery"):
        Endpoint("s", transport=SqlTransport(f"sqlite:///{tmp_path / 'q.db'}"), delayed_delivery=DelayLevelDelivery())


async def test_names_that_end_in_another_are_warned_of(rabbitmq_url: str) -> None:
    """Given sales and contoso.sales, when both get delayed messages, then the log says that they cross."""
    transport = RabbitMQTransport(rabbitmq_url)
    await transport.setup_infrastructure(["contoso.sales"])
    endpoint = Endpoint("sales", transport=transport, delayed_delivery=DelayLevelDelivery())
    with Signals() as signals:
        async with endpoint:
            await endpoint.send("contoso.sales", b"", delay=timedelta(days=1))
    [record] = signals.records(Event.BINDINGS_OVERLAP)
    assert "'sales' also receives the delayed messages for 'contoso.sales'" in record.getMessage()


async def test_names_that_others_use_are_warned_of_at_start(rabbitmq: RabbitmqServer, rabbitmq_url: str) -> None:
    """Given another process' endpoint contoso.sales, when sales starts and may ask the broker, then the log says it."""
    other = Endpoint("contoso.sales", transport=RabbitMQTransport(rabbitmq_url), delayed_delivery=DelayLevelDelivery())
    await other.setup()
    url = f"{rabbitmq_url}?management={rabbitmq.management_url}"
    endpoint = Endpoint("sales", transport=RabbitMQTransport(url), delayed_delivery=DelayLevelDelivery())
    with Signals() as signals:
        async with endpoint:
            await signals.wait_for(Event.BINDINGS_OVERLAP, timeout=20)


async def test_a_name_that_ends_in_one_on_the_broker_is_warned_of_at_start(rabbitmq_url: str) -> None:
    """Given another process' endpoint sales, when acme.sales starts, then the log says it, without management."""
    other = Endpoint("sales", transport=RabbitMQTransport(rabbitmq_url), delayed_delivery=DelayLevelDelivery())
    await other.setup()
    transport = RabbitMQTransport(rabbitmq_url)
    endpoint = Endpoint("of.acme.sales", transport=transport, delayed_delivery=DelayLevelDelivery())
    with Signals() as signals:
        async with endpoint:
            await signals.wait_for(Event.BINDINGS_OVERLAP, timeout=20)
    [record] = signals.records(Event.BINDINGS_OVERLAP)
    assert record.getMessage().startswith("'sales' is on the broker as well")


async def test_a_destination_that_is_deleted_and_made_again(rabbitmq: RabbitmqServer, rabbitmq_url: str) -> None:
    """Given a message that waits, when its queue is deleted and set up again before it is due, then it arrives."""
    transport = RabbitMQTransport(rabbitmq_url)
    endpoint = Endpoint("sales", transport=transport, delayed_delivery=DelayLevelDelivery())
    vhost = rabbitmq_url.rsplit("/", 1)[1]
    async with endpoint:
        await endpoint.send("sales", b"", message_id="m", delay=SECOND)
        rabbitmq.api("DELETE", f"queues/{vhost}/sales")
        rabbitmq.api("DELETE", f"exchanges/{vhost}/sales")
        await asyncio.sleep(1.5)  # it is due, and has nowhere to go: it stays in its level
        await endpoint.setup()
        [found] = await received(await transport.receiver("sales"))
        assert found.message.id == "m"


async def test_short_delays_are_precise_with_a_store_in_front(rabbitmq_url: str, store: SqlDelayedMessageStore) -> None:
    delivery = DelayLevelDelivery(stored=StoredDelivery(store), stored_below=SECOND)
    endpoint = Endpoint("sales", transport=RabbitMQTransport(rabbitmq_url), delayed_delivery=delivery)
    arrivals = Arrivals(endpoint)
    async with endpoint:
        began = time.monotonic()
        await endpoint.send("sales", b"", message_id="m", delay=0.2 * SECOND)
        await endpoint.send("sales", b"", message_id="levels", delay=3600 * SECOND)
        await arrivals.number(1)
        async with asyncio.timeout(20):
            while await store.next_due() is not None:  # noqa: ASYNC110 - there is no notification
                await asyncio.sleep(0.05)
    assert 0.2 <= arrivals.instants["m"] - began < 0.9


@pytest.mark.slow
async def test_the_fraction_of_a_second_waits_in_the_store_in_front(
    rabbitmq: RabbitmqServer, rabbitmq_url: str, store: SqlDelayedMessageStore
) -> None:
    """Given delays that end within a second, when sent, then whole seconds wait in levels, and none is rounded up."""
    delivery = DelayLevelDelivery(stored=StoredDelivery(store))
    endpoint = Endpoint("sales", transport=RabbitMQTransport(rabbitmq_url), delayed_delivery=delivery)
    arrivals = Arrivals(endpoint)
    seconds = [0.3, 1.3, 2.2, 3.0]
    async with endpoint:
        far = {f"far{whole}": whole for whole in (300, 301, 364)}
        for name, whole in far.items():
            await endpoint.send("sales", b"", message_id=name, delay=(whole + 0.3) * SECOND)
        kept = {message.id: message.due for message in await store.pending()}
        shown = {message.id: message for message in await endpoint.delayed.pending()}
        assert {name: shown[name].due - due for name, due in kept.items()} == {name: far[name] * SECOND for name in far}
        assert {message.destination for message in shown.values()} == {"sales"}
        began = time.monotonic()
        for delay in seconds:
            await endpoint.send("sales", b"", message_id=f"{delay}", delay=delay * SECOND)
        assert "3.0" not in {one.id for one in await endpoint.delayed.pending()}
        await arrivals.number(len(seconds))
        await eventually_async(lambda: waiting(rabbitmq, rabbitmq_url, "nsb.v2.delay-level-08") == len(far))
    for delay in seconds:
        assert delay <= arrivals.instants[f"{delay}"] - began


@pytest.mark.slow
async def test_a_name_too_long_for_the_store_in_front_is_rounded_up(
    rabbitmq_url: str, store: SqlDelayedMessageStore
) -> None:
    """Given a destination whose name leaves no place for the due time, when sent, then the levels alone have it."""
    transport, name = RabbitMQTransport(rabbitmq_url), "q" * 190
    endpoint = Endpoint("sales", transport=transport, delayed_delivery=DelayLevelDelivery(stored=StoredDelivery(store)))
    async with endpoint:
        await transport.setup_infrastructure([name])
        await endpoint.send(name, b"", message_id="m", delay=1.4 * SECOND)
        assert await endpoint.delayed.pending() == []
        [found] = await received(await transport.receiver(name))
    assert found.message.id == "m"


@pytest.mark.slow
async def test_a_long_delay_waits_in_the_store_until_the_levels_can_take_it(
    rabbitmq: RabbitmqServer, rabbitmq_url: str, store: SqlDelayedMessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a delay 3 s beyond the range, when those have passed, then the message is in the levels."""
    delivery = DelayLevelDelivery(stored=StoredDelivery(store))
    endpoint = Endpoint("sales", transport=RabbitMQTransport(rabbitmq_url), delayed_delivery=delivery)
    monkeypatch.setattr(delayline.rabbitmq.delivery, "LEVELS_MARGIN", timedelta(0))
    async with endpoint:
        due = datetime.now(UTC) + timedelta(seconds=MAXIMUM_DELAY + 3)
        await endpoint.send("sales", b"", message_id="m", deliver_at=due)
        [kept], [shown] = await store.pending(), await endpoint.delayed.pending()
        assert kept.due == due - timedelta(seconds=MAXIMUM_DELAY)
        assert "sales" in kept.destination
        assert (shown.destination, shown.due) == ("sales", due)
        await eventually_async(lambda: waiting(rabbitmq, rabbitmq_url, "nsb.v2.delay-level-27") == 1)
        assert await endpoint.delayed.pending() == []


async def test_a_long_delay_for_a_missing_queue_ends_in_the_error_queue(
    rabbitmq_url: str, store: SqlDelayedMessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a store in front, when the levels find no destination later, then the message names its destination."""
    transport = RabbitMQTransport(rabbitmq_url)
    endpoint = Endpoint("sales", transport=transport, delayed_delivery=DelayLevelDelivery(stored=StoredDelivery(store)))
    async with endpoint:
        monkeypatch.setattr(delayline.rabbitmq.delivery, "LEVELS_MARGIN", timedelta(0))
        due = datetime.now(UTC) + timedelta(seconds=MAXIMUM_DELAY, milliseconds=300)
        await endpoint.send("nowhere", b"", message_id="m", deliver_at=due)
        [found] = await received(await transport.receiver("error"))
    assert found.message.headers["NServiceBus.FailedQ"] == "nowhere"


async def test_a_clock_that_stepped_back_makes_no_long_delay_short(
    rabbitmq_url: str, store: SqlDelayedMessageStore
) -> None:
    """Given a message released a day early, when the levels cannot take it yet, then it is not sent at all."""
    due = datetime.now(UTC) + timedelta(seconds=MAXIMUM_DELAY) + timedelta(days=1)
    transport = RabbitMQTransport(rabbitmq_url)
    endpoint = Endpoint("sales", transport=transport, delayed_delivery=DelayLevelDelivery(stored=StoredDelivery(store)))
    arrivals = Arrivals(endpoint)
    async with endpoint:
        early = parked(TransportOperation(Message("m", {}, b""), "sales"), due)
        await store.store(DelayedMessage(early.message, early.destination, datetime.now(UTC)))
        [found] = await received(await transport.receiver("error"))
    assert found.message.headers["NServiceBus.FailedQ"] == "sales"
    assert (
        "cannot wait in delay levels, which hold at most" in found.message.headers["NServiceBus.ExceptionInfo.Message"]
    )
    assert arrivals.messages == []


async def test_a_callers_transaction_is_joined_by_the_store_in_front(
    rabbitmq_url: str, tmp_path: Path, store: SqlDelayedMessageStore
) -> None:
    endpoint = Endpoint(
        "sales",
        transport=RabbitMQTransport(rabbitmq_url),
        delayed_delivery=DelayLevelDelivery(stored=StoredDelivery(store)),
    )
    arrivals = Arrivals(endpoint)
    async with endpoint:
        connection = sqlite3.connect(tmp_path / "front.db")
        connection.execute("BEGIN")
        await endpoint.send("sales", b"", message_id="now", transaction=connection)
        await endpoint.send("sales", b"", message_id="later", delay=0.3 * SECOND, transaction=connection)
        assert arrivals.messages == []
        connection.commit()
        connection.close()
        assert await arrivals.number(2) == ["now", "later"]


def test_a_threshold_needs_a_store() -> None:
    with pytest.raises(ConfigurationError, match=r"stored_below= needs a store"):
        DelayLevelDelivery(stored_below=SECOND)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["conventional", "direct"])
async def test_an_endpoint_ignores_delayed_messages_of_a_longer_name(
    rabbitmq: RabbitmqServer, rabbitmq_url: str, topology: str
) -> None:
    """Given sales and contoso.sales, when both get delayed messages, then each handles its own."""
    handled: dict[str, list[str]] = {"sales": [], "contoso.sales": []}
    sales, contoso = (
        Endpoint(
            name,
            transport=RabbitMQTransport(f"{rabbitmq_url}?management={rabbitmq.management_url}", topology=topology),
            delayed_delivery=DelayLevelDelivery(),
        )
        for name in handled
    )

    @sales.handler
    async def of_sales(message: Message, context: MessageContext) -> None:
        handled["sales"].append(message.id)

    @contoso.handler
    async def of_contoso(message: Message, context: MessageContext) -> None:
        handled["contoso.sales"].append(message.id)

    with Signals() as signals:
        async with sales, contoso:
            for seconds in (1, 2, 3):
                for name in handled:
                    await contoso.send(name, b"", delay=timedelta(seconds=seconds), message_id=f"{name}-{seconds}")
            await contoso.send("sales", b"", message_id="sales-0")
            async with asyncio.timeout(20):
                while len(handled["sales"]) < 4 or len(handled["contoso.sales"]) < 3:  # noqa: ASYNC110 - the broker's time
                    await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            assert await sales.transport.count("sales") == 0  # type: ignore[attr-defined]
    assert sorted(handled["sales"]) == ["sales-0", "sales-1", "sales-2", "sales-3"]
    assert sorted(handled["contoso.sales"]) == ["contoso.sales-1", "contoso.sales-2", "contoso.sales-3"]
    dropped = [one for one in signals.records(Event.BINDINGS_OVERLAP) if "dropped here" in one.getMessage()]
    assert len(dropped) == 1


@pytest.mark.slow
async def test_a_delayed_message_for_a_longer_name_that_is_gone_is_not_lost(rabbitmq_url: str) -> None:
    """Given a message for contoso.sales, which is deleted meanwhile, then the error queue has it."""
    transport = RabbitMQTransport(rabbitmq_url)
    endpoint = Endpoint("sales", transport=transport, delayed_delivery=DelayLevelDelivery())

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        pytest.fail("it is not for sales")

    async with endpoint:
        await transport.setup_infrastructure(["contoso.sales"])
        await endpoint.send("contoso.sales", b"body", delay=timedelta(seconds=2), message_id="lost?")
        await transport.connection.run(lambda channel: channel.call(QueueDelete(queue="contoso.sales")))
        await transport.connection.run(lambda channel: channel.call(ExchangeDelete(exchange="contoso.sales")))
        async with asyncio.timeout(20):
            while not await transport.count("error"):  # noqa: ASYNC110 - the broker's time
                await asyncio.sleep(0.05)
        [found] = await transport.browse("error", 2)
    assert (found.id, found.body) == ("lost?", b"body")
