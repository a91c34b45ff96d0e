"""A backlog of one tenant in a queue beside messages of others: receivers of SQL queues serve them in turn."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from delayline import ConfigurationError, Endpoint, Message, Send, SqlDelayedMessageStore, SqlTransport, StoredDelivery
from delayline.errors import BackendUnusable
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from delayline.transport import ReceivedMessage, Receiver

BACKLOG = 3000
BATCH = 50
PATIENCE = 120.0
PRODUCTS = ["sqlite", "postgresql", "mariadb"]


@pytest.fixture(params=PRODUCTS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'fair.db'}"
    return str(request.getfixturevalue(f"{request.param}_url"))


async def fair_transport(url: str, *queues: str) -> SqlTransport:
    transport = SqlTransport(url, fair_by="header:Tenant")
    await transport.start()
    await transport.setup_infrastructure(queues or ["work"])
    return transport


async def put(transport: SqlTransport, prefix: str, number: int, tenant: str | None, queue: str = "work") -> None:
    headers = {} if tenant is None else {"Tenant": tenant}
    operations = [TransportOperation(Message(f"{prefix}{each:05}", headers, b"x"), queue) for each in range(number)]
    for first in range(0, number, 500):
        await transport.dispatch(operations[first : first + 500])


async def handled(receiver: Receiver, batches: int | None = None, limit: int = BATCH) -> list[str]:
    """Receive and acknowledge so many batches, or as many messages as come within a moment, and return their ids."""
    ids: list[str] = []
    while batches is None or batches:
        received: Sequence[ReceivedMessage] = await asyncio.wait_for(receiver.receive(limit), PATIENCE)
        for message in received:
            assert await receiver.acknowledge(message)
        ids += [message.message.id for message in received]
        batches = None if batches is None else batches - 1
    return ids


async def all_handled(receiver: Receiver, number: int) -> list[str]:
    ids: list[str] = []
    while len(ids) < number:
        ids += await handled(receiver, 1)
    return ids


async def test_a_backlog_of_one_tenant_delays_no_other(url: str) -> None:
    # Given a queue with very many messages of one tenant, then a few of others, and of none
    transport = await fair_transport(url)
    await put(transport, "a", BACKLOG, "big")
    for prefix, tenant in (("b", "small"), ("c", "Größe 🚚"), ("d", None)):
        await put(transport, prefix, 5, tenant)
    # When some batches are received
    receiver = await transport.receiver("work")
    first = await handled(receiver, 4)
    # Then the few are among them, and in the end every message has come once, those of a tenant in their order
    assert Counter(id[0] for id in first if id[0] != "a") == {"b": 5, "c": 5, "d": 5}
    ids = first + await all_handled(receiver, BACKLOG + 15 - len(first))
    assert len(set(ids)) == len(ids) == BACKLOG + 15
    for prefix in "abcd":
        of_tenant = [id for id in ids if id.startswith(prefix)]
        assert of_tenant == sorted(of_tenant)
    await receiver.stop()
    await transport.stop()


async def test_a_slow_receiver_serves_tenants_in_turn(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a receiver that is so slow that a look from the first message on is due each time
    monkeypatch.setattr("delayline.sql.receiver.QUEUE_LOOK_EVERY", 0.0)
    transport = await fair_transport(url)
    await put(transport, "a", 500, "big")
    await put(transport, "b", 5, "small")
    # When some batches are received, then those of the other tenant are among them
    receiver = await transport.receiver("work")
    assert {f"b{number:05}" for number in range(5)} <= set(await handled(receiver, 4))
    await receiver.stop()
    await transport.stop()


async def test_without_it_messages_are_received_as_they_came(url: str) -> None:
    transport = SqlTransport(url)
    await transport.start()
    await transport.setup_infrastructure(["work"])
    await put(transport, "a", 500, "big")
    await put(transport, "b", 5, "small")
    receiver = await transport.receiver("work")
    assert {id[0] for id in await handled(receiver, 4)} == {"a"}
    await receiver.stop()
    await transport.stop()


async def test_a_tenant_that_comes_during_a_backlog_has_its_turn(url: str) -> None:
    # Given a backlog that is received and given back, and so never gets smaller
    transport = await fair_transport(url)
    await put(transport, "a", 500, "big")
    receiver = await transport.receiver("work")
    await receiver.release_many(await receiver.receive(BATCH))
    # When another tenant's message comes, then it is received
    await put(transport, "b", 1, "small")
    async with asyncio.timeout(PATIENCE):
        while True:
            received = await receiver.receive(BATCH)
            await receiver.release_many(received)
            if "b00000" in {message.message.id for message in received}:
                break
    ids = await all_handled(receiver, 501)
    assert len(set(ids)) == 501
    await receiver.stop()
    await transport.stop()


async def test_several_receivers_share_a_backlog(url: str) -> None:
    # Given two transports on one queue, and other queues with messages of the same tenants
    transports = [await fair_transport(url, "work", "other") for _ in range(2)]
    await put(transports[0], "o", 100, "small", "other")
    await put(transports[0], "a", 1000, "big")
    await put(transports[0], "b", 200, "small")
    # When both receive in turn, then every message of the queue comes once, and of the other queue none
    receivers = [await transport.receiver("work") for transport in transports]
    held: list[tuple[Receiver, ReceivedMessage]] = []
    while len(held) < 1200:
        for receiver in receivers:
            if len(held) < 1200:
                held += [(receiver, message) for message in await asyncio.wait_for(receiver.receive(BATCH), PATIENCE)]
    ids = [message.message.id for _, message in held]
    assert len(set(ids)) == len(ids) == 1200
    assert not [id for id in ids if id.startswith("o")]
    assert Counter(id[0] for id in ids[:600])["b"] > 100
    for holder, message in held:
        assert await holder.acknowledge(message)
    for receiver, transport in zip(receivers, transports, strict=True):
        await receiver.stop()
        await transport.stop()


async def test_delayed_messages_have_their_tenants_too(url: str) -> None:
    # Given an endpoint whose store and queue are fair, and a backlog of one tenant that is due at one instant
    delivery = StoredDelivery(SqlDelayedMessageStore(url), fair_by="header:Tenant")
    transport = SqlTransport(url, fair_by="header:Tenant")
    endpoint = Endpoint("work", transport=transport, delayed_delivery=delivery, concurrency=1)
    order: list[str] = []
    done = asyncio.Event()

    @endpoint.handler
    async def handle(message: Message, context: object) -> None:
        order.append(message.headers["Tenant"])
        if len(order) == 1005:
            done.set()

    # When they are due, then the other tenant's messages are handled before most of the backlog
    due = datetime.now(UTC) + timedelta(seconds=3)
    async with endpoint:
        await endpoint.send_many(
            Send("work", b"", headers={"Tenant": tenant}, deliver_at=due) for tenant in ["big"] * 1000 + ["small"] * 5
        )
        await asyncio.wait_for(done.wait(), PATIENCE)
    assert order.index("small") < 900
    assert Counter(order) == {"big": 1000, "small": 5}


async def test_queues_without_the_column_say_what_to_do(url: str) -> None:
    # Given queues that were made without it, with a message
    plain = SqlTransport(url)
    await plain.start()
    await plain.setup_infrastructure(["work"])
    await put(plain, "a", 1, "big")
    # When a fair transport uses them, then it is refused, until set-up has run
    fair = SqlTransport(url, fair_by="header:Tenant")
    await fair.start()
    with pytest.raises(
        BackendUnusable, match=r"delayline_messages.* has no column 'fair_group'.*Run `delayline setup`"
    ):
        await fair.receiver("work")
    planned = await fair.planned_infrastructure(["work"])
    assert [step.split(" ")[0] for step in planned] == ["ALTER", "CREATE"]
    await fair.setup_infrastructure(["work"])
    assert not await fair.planned_infrastructure(["work"])
    # And transports without it go on using them
    await put(plain, "b", 1, "big")
    await put(fair, "c", 1, "small")
    receiver = await plain.receiver("work")
    assert await all_handled(receiver, 3) == ["a00000", "b00000", "c00000"]
    await receiver.stop()
    await fair.stop()
    await plain.stop()


KILLED = """
import asyncio, sys
from delayline import SqlTransport
async def main(url):
    transport = SqlTransport(url, fair_by="header:Tenant")
    await transport.start()
    receiver = await transport.receiver("work")
    for _ in range(4):
        await receiver.receive(50)
    print("received", flush=True)
    await asyncio.sleep(600)
asyncio.run(main(sys.argv[1]))
"""


async def test_messages_of_a_killed_receiver_come_again(url: str) -> None:
    # Given a process that has received messages of two tenants in turn
    transport = await fair_transport(url)
    await put(transport, "a", 300, "big")
    await put(transport, "b", 60, "small")
    with subprocess.Popen([sys.executable, "-c", KILLED, url], stdout=subprocess.PIPE) as process:  # noqa: ASYNC220
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"received\n"
        # When it is killed
        os.kill(process.pid, signal.SIGKILL)
    # Then another receives all of them, once
    receiver = await transport.receiver("work")
    ids = await all_handled(receiver, 360)
    assert len(set(ids)) == len(ids) == 360
    await receiver.stop()
    await transport.stop()


def test_a_queue_has_one_destination() -> None:
    with pytest.raises(ConfigurationError, match="name a header, as in fair_by='header:Tenant'"):
        SqlTransport("sqlite:///any.db", fair_by="destination")
