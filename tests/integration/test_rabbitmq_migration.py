"""Moves between delay levels: no message is lost or early, and a bad one does not delay others."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import pytest
from pamqp.commands import Basic
from pamqp.header import ContentHeader
from tests.eventually import PATIENCE
from tests.integration.rabbitmq_queues import declare_levels
from tests.integration.test_rabbitmq_infrastructure import a_channel

from delayline.errors import BackendUnavailable, BackendUnusable, ConfigurationError
from delayline.message import Headers, Message, from_wire_time, to_wire_time
from delayline.rabbitmq import RabbitMQTransport, browsing
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.admin import move
from delayline.rabbitmq.admin.move import Levels, Move, Report
from delayline.rabbitmq.encoding import Publication
from delayline.rabbitmq.infrastructure import DelayInfrastructure
from delayline.rabbitmq.levels import DELAY_HEADER, parse
from delayline.rabbitmq.publisher import Publisher
from delayline.testing import ManualClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from aiormq.channel import Channel
    from tests.servers.rabbitmq import RabbitmqServer

V1, V2 = DelayInfrastructure.v1(), DelayInfrastructure.v2()
NOW: Final = datetime(2026, 1, 1, tzinfo=UTC)
APART: Final = "delays-migrate-poison-messages"


@pytest.fixture
async def channel(rabbitmq_url: str) -> AsyncIterator[Channel]:
    await declare_levels(rabbitmq_url, V1, V2)
    async with a_channel(rabbitmq_url) as channel:
        yield channel  # type: ignore[misc]


@pytest.fixture
def second_url(rabbitmq: RabbitmqServer) -> Iterator[str]:
    url = rabbitmq.new_vhost()
    yield url
    rabbitmq.drop_vhost(url)


async def conventional(channel: Channel, name: str) -> None:
    await channel.queue_declare(name, durable=True)
    await channel.exchange_declare(name, exchange_type="fanout", durable=True)
    await channel.queue_bind(name, name)


async def put(
    channel: Channel, delay: int, destination: str = "sales", levels: DelayInfrastructure = V1, **more: object
) -> None:
    """Publish as a .NET endpoint does; `more` are headers that it has as well, or None for those that it has not."""
    headers: dict[str, Any] = {DELAY_HEADER: delay, Headers.TIME_SENT: to_wire_time(NOW)}
    headers |= {"NServiceBus." + name.replace("_", "."): value for name, value in more.items()}
    exchange, key = levels.route(delay, destination)
    properties = Basic.Properties(
        headers={name: value for name, value in headers.items() if value is not None},
        message_id=f"{destination}-{delay}",
        delivery_mode=2,
    )
    await channel.basic_publish(f"{delay} s".encode(), exchange=exchange, routing_key=key, properties=properties)


async def count(channel: Channel, queue: str) -> int:
    return (await channel.queue_declare(queue, passive=True)).message_count or 0


async def taken(channel: Channel, queue: str) -> list[Any]:
    """Take everything that is in a queue."""
    found = []
    while (delivered := await channel.basic_get(queue, no_ack=True)).delivery_tag is not None:
        found.append(delivered)
    return found


async def waiting_in(channel: Channel, levels: DelayInfrastructure) -> dict[bytes, int]:
    """Take everything that waits: the body of each message, and the delay in its routing key."""
    delays = {}
    for queue in levels.queues:
        for delivered in await taken(channel, queue.name):
            parsed = parse(delivered.routing_key)
            assert parsed is not None
            delays[bytes(delivered.body)] = parsed[0]
    return delays


async def migrate(url: str, clock: ManualClock | None = None, **how: Any) -> Report:  # noqa: ANN401 - Move's own
    address = BrokerAddress.parse(url)
    move = Move(Levels(address, V1), Levels(address, V2), name="migrate", clock=clock or ManualClock(NOW), **how)
    return await move.run()


async def test_messages_go_to_the_levels_of_their_remaining_delay(channel: Channel, rabbitmq_url: str) -> None:
    # Given messages that were sent 5.5 s ago, as far as their headers go
    await conventional(channel, "sales")
    for delay in (40, 600, 100_000, 268_435_455):
        await put(channel, delay)

    # When they are moved
    report = await migrate(rabbitmq_url, ManualClock(NOW + timedelta(seconds=5.5)))

    # Then each waits for the rest, rounded up, and its old levels are empty
    assert (report.moved, report.poison, report.stale) == (4, 0, 0)
    assert await waiting_in(channel, V1) == {}
    assert await waiting_in(channel, V2) == {
        b"40 s": 35, b"600 s": 595, b"100000 s": 99_995, b"268435455 s": 268_435_450,
    }  # fmt: skip


async def test_a_moved_message_is_as_it_was(channel: Channel, rabbitmq_url: str) -> None:
    # Given a message with all sorts of headers
    await conventional(channel, "sales")
    odd: dict[str, Any] = {
        "wide": 2**40,
        "flag": True,
        "list": [1, "two"],
        "table": {"a": None},
        "raw": bytearray(b"\xff"),
    }
    properties = Basic.Properties(
        headers={DELAY_HEADER: 1000, Headers.TIME_SENT: to_wire_time(NOW), "number": 1.25, **odd},
        message_id="m", correlation_id="c", reply_to="r", content_type="t", message_type="T", app_id="a",
        user_id="guest", priority=3,
    )  # fmt: skip
    exchange, key = V1.route(1000, "sales")
    async with publisher(rabbitmq_url) as out:
        message = Message("m", {}, b"\x00body")
        encoded = ContentHeader(0, 0, properties).marshal()[12:]
        assert not await out.publish([Publication(message, exchange, key, properties=encoded)])

    # When it is moved
    await migrate(rabbitmq_url)

    # Then nothing of it has changed, but that its sender's signature is gone
    [found] = await taken(channel, V2.level(9))
    assert found.body == b"\x00body"
    after = found.header.properties
    assert {name: value for name, value in after.headers.items() if name != "x-delivery-count"} == properties.headers
    assert (after.message_id, after.correlation_id, after.reply_to, after.priority) == ("m", "c", "r", 3)
    assert (after.content_type, after.message_type, after.app_id, after.user_id) == ("t", "T", "a", None)


@contextlib.asynccontextmanager
async def publisher(url: str) -> AsyncIterator[Publisher]:
    out = Publisher(BrokerAddress.parse(url))
    await out.open()
    try:
        yield out
    finally:
        await out.close()


async def test_a_retry_waits_for_its_own_delay_and_not_that_of_the_first_attempt(
    channel: Channel, rabbitmq_url: str
) -> None:
    await conventional(channel, "sales")
    yesterday, lately = to_wire_time(NOW - timedelta(days=1)), to_wire_time(NOW - timedelta(seconds=3))
    await put(channel, 100, TimeSent=yesterday, Retries="1", Retries_Timestamp=lately)
    await put(channel, 120, TimeSent=yesterday, Retries="1")
    report = await migrate(rabbitmq_url)
    assert await waiting_in(channel, V2) == {b"100 s": 97, b"120 s": 120}
    assert report.stale == 1


async def test_messages_that_cannot_be_moved_go_to_the_poison_queue_with_the_reason(
    channel: Channel, rabbitmq_url: str
) -> None:
    # Given good messages, some with malformed, missing or odd headers, and one without a destination
    await conventional(channel, "sales")
    await put(channel, 100)
    await put(channel, 101, TimeSent="yesterday")
    await put(channel, 102, TimeSent=None)
    await put(channel, 103, Transport_RabbitMQ_DelayInSeconds="soon")
    await put(channel, 104, destination="nobody")
    await put(channel, 105, Transport_RabbitMQ_DelayInSeconds=105 + 2**40)
    await channel.basic_publish(b"stray", exchange="", routing_key=V1.level(6))

    # When they are moved
    report = await migrate(rabbitmq_url)

    # Then the good ones have moved, and the others are complete in a separate queue
    assert (report.moved, report.poison, report.poison_queue) == (2, 5, APART)
    assert await waiting_in(channel, V2) == {b"100 s": 100, b"105 s": 105}
    poison = {bytes(one.body): one.header.properties for one in await taken(channel, APART)}
    reasons = {body: properties.headers["Delayline.Poison.Reason"] for body, properties in poison.items()}
    assert "TimeSent is 'yesterday'" in reasons[b"101 s"]
    assert "TimeSent is missing" in reasons[b"102 s"]
    assert "DelayInSeconds is 'soon'" in reasons[b"103 s"]
    assert reasons[b"104 s"] == "its destination 'nobody' does not exist there"
    assert "is none of the delay levels'" in reasons[b"stray"]
    assert poison[b"101 s"].message_id == "sales-101"
    assert poison[b"101 s"].headers["Delayline.Poison.RoutingKey"] == V1.route(101, "sales")[1]
    assert poison[b"101 s"].headers[Headers.TIME_SENT] == "yesterday"


async def test_a_destination_created_later_gets_its_messages(channel: Channel, rabbitmq_url: str) -> None:
    # Given a message in the poison queue because its destination was missing, and one that is malformed
    await put(channel, 100, destination="late")
    await put(channel, 101, destination="late", TimeSent="?")
    assert (await migrate(rabbitmq_url)).poison == 2

    # When the destination is there, and the move runs again, 30 s later
    await conventional(channel, "late")
    report = await migrate(rabbitmq_url, ManualClock(NOW + timedelta(seconds=30)))

    # Then the one has moved with the rest of its delay, and the other stays
    assert (report.recovered, report.moved, report.poison) == (1, 1, 0)
    [found] = await taken(channel, V2.level(6))
    assert parse(found.routing_key) == (70, "late")
    assert not [name for name in found.header.properties.headers if name.startswith("Delayline.")]
    assert [bytes(one.body) for one in await taken(channel, APART)] == [b"101 s"]


async def test_destinations_are_bound_in_either_topology(channel: Channel, rabbitmq_url: str) -> None:
    # Given a destination with an exchange, and one with a queue only
    await conventional(channel, "with.dots")
    await channel.queue_declare("direct", durable=True)
    await put(channel, 2000, destination="with.dots")
    await put(channel, 2000, destination="direct")

    # When their messages are moved
    assert (await migrate(rabbitmq_url)).destinations == {"with.dots": 1, "direct": 1}

    # Then due messages get there
    for name in ("with.dots", "direct"):
        await channel.basic_publish(b"due", exchange=V2.level(0), routing_key=V2.route(0, name)[1])
        assert [bytes(one.body) for one in await arrived(channel, name, 1)] == [b"due"]


async def arrived(channel: Channel, queue: str, number: int) -> list[Any]:
    found: list[Any] = []
    async with asyncio.timeout(30):
        while len(found) < number:
            found += await taken(channel, queue)
            await asyncio.sleep(0.02)
    return found


async def test_a_dry_run_reports_the_same_and_moves_nothing(channel: Channel, rabbitmq_url: str) -> None:
    await conventional(channel, "sales")
    for delay in (100, 101, 5000):
        await put(channel, delay)
    await put(channel, 102, destination="nobody")
    report = await migrate(rabbitmq_url, dry_run=True)
    assert (report.moved, report.poison) == (3, 1)
    assert report.destinations == {"sales": 3}
    assert await waiting_in(channel, V2) == {}
    assert len(await waiting_in(channel, V1)) == 4


async def test_messages_are_moved_although_the_leader_of_their_level_answers_late(
    rabbitmq: RabbitmqServer, channel: Channel, rabbitmq_url: str
) -> None:
    """Given a leader that does not answer the broker, which then says that the level is empty, then it is not."""
    await conventional(channel, "sales")
    for number in range(3):
        await put(channel, 64 + number, levels=V2)
    await asyncio.to_thread(rabbitmq.halt_leader, rabbitmq_url, V2.level(6), 3)
    address = BrokerAddress.parse(rabbitmq_url)
    report = await Move(Levels(address, V2), Levels(address, V1), name="migrate", clock=ManualClock(NOW)).run()
    assert report.moved == 3


async def test_a_number_that_the_broker_does_not_know_is_not_zero(
    rabbitmq: RabbitmqServer, channel: Channel, rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(channel, 64, levels=V2)
    transport = RabbitMQTransport(rabbitmq_url)
    await transport.start()
    monkeypatch.setattr(browsing, "COUNT_TRIES", 2)
    await asyncio.to_thread(rabbitmq.halt_leader, rabbitmq_url, V2.level(6), PATIENCE)
    try:
        with pytest.raises(BackendUnavailable, match=r"unknown how many messages 'nsb\.v2\.delay-level-06' has"):
            await transport.count(V2.level(6))
    finally:
        await asyncio.to_thread(rabbitmq.resume_leader, rabbitmq_url, V2.level(6))
        await transport.stop()


async def test_the_state_of_a_queue_is_known_although_its_leader_answers_late(
    rabbitmq: RabbitmqServer, channel: Channel, rabbitmq_url: str
) -> None:
    """Given a leader that answers as late as on a busy machine, when queues are looked at, then the number is known."""
    await put(channel, 64, levels=V2)
    transport = RabbitMQTransport(rabbitmq_url)
    await transport.start()
    try:
        await asyncio.to_thread(rabbitmq.halt_leader, rabbitmq_url, V2.level(6), 0.7)
        [state] = await transport.queue_states([V2.level(6)])
        assert state.messages == 1
    finally:
        await transport.stop()


async def test_progress_is_reported_level_by_level(channel: Channel, rabbitmq_url: str) -> None:
    await conventional(channel, "sales")
    for number in range(3):
        await put(channel, 64 + number)
    seen: list[tuple[int, int, int]] = []
    await migrate(rabbitmq_url, progress=lambda *step: seen.append(step))
    moves = [step for step in seen if step[2]]
    assert (moves[0], moves[-1]) == ((6, 0, 3), (6, 3, 3))
    assert {level for level, _, _ in seen} == set(range(28))


async def test_a_move_that_is_cut_off_is_finished_by_the_next(
    rabbitmq: RabbitmqServer, channel: Channel, rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given many messages, and a move whose connections are cut in the middle
    await conventional(channel, "sales")
    for delay in range(4096, 4096 + 300):
        await put(channel, delay)
    monkeypatch.setattr(move, "BATCH", 10)
    cut_at: list[int] = []

    def cut_after_50(level: int, done: int, found: int) -> None:
        if done >= 50 and not cut_at:
            cut_at.append(done)
            rabbitmq.cut_connections(rabbitmq_url)

    with pytest.raises(BackendUnavailable):
        await migrate(rabbitmq_url, progress=cut_after_50)

    # When it runs again
    await migrate(rabbitmq_url)

    # Then every message has moved; none is left, and none is lost
    async with a_channel(rabbitmq_url) as fresh:
        assert await waiting_in(fresh, V1) == {}  # type: ignore[arg-type]
        assert len(await waiting_in(fresh, V2)) == 300  # type: ignore[arg-type]


@pytest.mark.slow
async def test_many_messages_move_once_each(channel: Channel, rabbitmq_url: str) -> None:
    # Given more messages in quorum queues than one batch takes
    await conventional(channel, "sales")
    for batch in range(10):
        await asyncio.gather(*(put(channel, 5000 + 200 * batch + number, levels=V2) for number in range(200)))
    other = DelayInfrastructure.custom("acme")
    await declare_levels(rabbitmq_url, other)

    # When they are moved
    address = BrokerAddress.parse(rabbitmq_url)
    move = Move(Levels(address, V2), Levels(address, other), name="migrate", clock=ManualClock(NOW))
    assert (await move.run()).moved == 2000

    # Then each is there once, and none comes back to where it was
    counts = [await count(channel, queue.name) for queue in other.queues]
    assert sum(counts) == 2000
    assert len(await waiting_in(channel, other)) == 2000
    assert await waiting_in(channel, V2) == {}


async def test_messages_go_from_one_broker_to_another(rabbitmq_url: str, second_url: str, channel: Channel) -> None:
    # Given two virtual hosts, of which only the second has the destination
    await declare_levels(second_url, V2)
    async with a_channel(second_url) as other:
        await conventional(other, "sales")  # type: ignore[arg-type]
        await put(channel, 1000, levels=V2)
        await put(channel, 1001, levels=V2, destination="nobody")

        # When the messages of the one are transferred to the other
        source, target = BrokerAddress.parse(rabbitmq_url), BrokerAddress.parse(second_url)
        move = Move(Levels(source, V2), Levels(target, V2), name="transfer", clock=ManualClock(NOW))
        report = await move.run()

        # Then it waits there, and what could not go stays where it was
        assert (report.moved, report.poison) == (1, 1)
        assert await waiting_in(other, V2) == {b"1000 s": 1000}  # type: ignore[arg-type]
    assert await count(channel, "delays-transfer-poison-messages") == 1
    assert await waiting_in(channel, V2) == {}


@pytest.mark.slow
async def test_a_message_that_passed_levels_arrives_once_and_not_early(channel: Channel, rabbitmq_url: str) -> None:
    # Given a message of 12 s that has passed level 3 on the broker, which leaves its marks on it
    await conventional(channel, "sales")
    sent = datetime.now(UTC)
    await put(channel, 12, TimeSent=to_wire_time(sent))
    for _ in range(1500):
        if await count(channel, V1.level(2)):
            break
        await asyncio.sleep(0.02)

    # When it is moved to v2
    address = BrokerAddress.parse(rabbitmq_url)
    report = await Move(Levels(address, V1), Levels(address, V2), name="migrate").run()

    # Then it arrives once, when it is due
    assert (report.moved, report.stale) == (1, 0)
    [found] = await arrived(channel, "sales", 1)
    assert datetime.now(UTC) - sent >= timedelta(seconds=12)
    assert found.header.properties.headers[DELAY_HEADER] == 12
    assert from_wire_time(found.header.properties.headers[Headers.TIME_SENT]) == from_wire_time(to_wire_time(sent))
    deaths = found.header.properties.headers["x-death"]
    assert {death["queue"] for death in deaths} <= {V2.level(number) for number in range(3)}


async def test_the_same_levels_are_refused(rabbitmq_url: str) -> None:
    address = BrokerAddress.parse(rabbitmq_url)
    with pytest.raises(ConfigurationError, match="source and target are the same delay levels"):
        Move(Levels(address, V2), Levels(address, V2), name="transfer")


async def test_levels_that_are_missing_are_reported_before_anything_moves(rabbitmq_url: str) -> None:
    await declare_levels(rabbitmq_url, V1)
    with pytest.raises(BackendUnusable, match=r"no complete delay levels nsb\.v2.*delayline rabbitmq create"):
        await migrate(rabbitmq_url)
