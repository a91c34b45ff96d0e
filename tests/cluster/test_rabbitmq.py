"""RabbitMQ: the broker killed, its memory used up, consumers and pollers killed; nothing is lost, nothing early."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cluster.harness import new_seed
from tests.eventually import PATIENCE

from delayline import BackendUnavailable, Endpoint, Event, Message, MessageContext, StoredDelivery
from delayline.message import Headers, from_wire_time
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.sql import SqlDelayedMessageStore
from delayline.testing import Signals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.rabbitmq import RabbitmqServer

WORKER = Path(__file__).parent / "rabbitmq_worker.py"
MANY = 20_000


class Handled:
    """What an endpoint handled: how often, and how late."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.times: Counter[str] = Counter()
        self.lateness: list[float] = []
        self._news = asyncio.Event()
        endpoint.handler(self.note)

    async def note(self, message: Message, context: MessageContext) -> None:
        self.times[message.id] += 1
        if Headers.DELIVER_AT in message.headers:
            due = from_wire_time(message.headers[Headers.DELIVER_AT])
            self.lateness.append((datetime.now(UTC) - due).total_seconds())
        self._news.set()

    async def all_of(self, ids: set[str], within: float = PATIENCE) -> None:
        async with asyncio.timeout(within):
            while ids - self.times.keys():
                self._news.clear()
                await self._news.wait()


async def send_surely(endpoint: Endpoint, message_id: str, delay: float) -> None:
    """Send until the sender knows that it is kept: with the same id, as at least once asks for."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(BackendUnavailable):
                await endpoint.send("sales", b"", message_id=message_id, delay=timedelta(seconds=delay))
                return
            await asyncio.sleep(0.2)


async def goes_on(endpoint: Endpoint, text: str, error: Exception) -> None:
    """Do nothing about a critical error: on a busy machine a broker's start takes longer than its breaker waits."""


def sales(url: str) -> Endpoint:
    return Endpoint(
        "sales",
        transport=RabbitMQTransport(url),
        delayed_delivery=DelayLevelDelivery(),
        concurrency=16,
        on_critical_error=goes_on,
    )


@pytest.mark.slow
async def test_a_broker_killed_with_messages_on_several_levels(crashing_rabbitmq: RabbitmqServer) -> None:
    """Given delays of 0 to 10 s under way and more being sent, when the broker is killed, then all arrive in time."""
    server, chance = crashing_rabbitmq, random.Random(new_seed())  # noqa: S311 - repeatable
    endpoint = sales(server.new_vhost())
    handled = Handled(endpoint)
    ids = {f"m{number}": chance.uniform(0, 10) for number in range(400)}
    async with endpoint:
        await asyncio.to_thread(server.settle)
        sending = asyncio.gather(*(send_surely(endpoint, *one) for one in list(ids.items())[:300]))
        await sending
        late = asyncio.gather(*(send_surely(endpoint, *one) for one in list(ids.items())[300:]))
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        await late
        await handled.all_of(set(ids))
    assert set(handled.times) == set(ids)
    assert min(handled.lateness) >= 0


async def test_a_memory_alarm_makes_senders_wait(rabbitmq: RabbitmqServer, rabbitmq_url: str) -> None:
    """Given a broker that takes nothing more, when it does again, then everything that was sent meanwhile arrives."""
    endpoint = sales(f"{rabbitmq_url}?server_timeout=120")  # a busy machine may take longer than the default
    handled = Handled(endpoint)
    async with endpoint:
        await endpoint.send("sales", b"", message_id="before", delay=timedelta(seconds=1))
        with Signals() as signals:
            await asyncio.to_thread(rabbitmq.raise_memory_alarm)
            try:
                sends = [asyncio.create_task(endpoint.send("sales", b"", message_id=f"m{n}")) for n in range(50)]
                await signals.wait_for(Event.PUBLISHING_BLOCKED, timeout=PATIENCE)
                await handled.all_of({"before"})
                assert not all(send.done() for send in sends)
            finally:
                await asyncio.to_thread(rabbitmq.clear_memory_alarm)
            await asyncio.wait_for(asyncio.gather(*sends), PATIENCE)
        await handled.all_of({f"m{n}" for n in range(50)})
    assert set(handled.times.values()) == {1}


@pytest.fixture
def workers(rabbitmq_url: str, tmp_path: Path) -> Iterator[Workers]:
    workers = Workers(rabbitmq_url, tmp_path)
    yield workers
    workers.kill()


class Workers:
    """Processes of the endpoint, and the journal of their handled messages."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.store_url = f"sqlite:///{folder / 'store.db'}"
        self._journal = folder / "journal"
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, number: int, *, stored: bool) -> None:
        command = [sys.executable, str(WORKER), self.url, self.store_url if stored else "", str(self._journal)]
        self._running += [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(number)]

    def die(self, mode: str, step: str) -> None:
        """Run a process that kills itself at the step of an acknowledgement of dozens of messages."""
        command = [sys.executable, str(WORKER), self.url, "", str(self._journal), mode, step]
        process = subprocess.run(command, stderr=subprocess.DEVNULL, timeout=PATIENCE, check=False)
        assert process.returncode == -signal.SIGKILL, f"was not killed {step}"

    def acknowledged(self) -> list[int]:
        """Return how many messages were acknowledged by each process that has killed itself."""
        return [int(line) for line in Path(f"{self._journal}.acknowledged").read_text().split()]

    def stop(self) -> None:
        """Let the processes finish the messages that they handle."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        for process in self._running:
            process.send_signal(number)
            process.wait(PATIENCE)
        self._running.clear()

    def lines(self) -> list[tuple[str, float]]:
        if not self._journal.exists():
            return []
        entries = (line.split() for line in self._journal.read_text().splitlines())
        return [(message_id, float(instant)) for message_id, instant in entries]


@pytest.mark.parametrize("stored", [False, True], ids=["levels", "stored"])
@pytest.mark.sample(1)
async def test_consumers_and_pollers_killed_again_and_again(workers: Workers, stored: bool) -> None:
    """Given two processes, when both are killed while they handle and forward, then nothing is lost or early.

    Twenty are due at a time, five make a batch: there is always one that was fetched while another is confirmed.
    """
    delivery = (
        StoredDelivery(SqlDelayedMessageStore(workers.store_url), polling=False) if stored else DelayLevelDelivery()
    )
    sender = Endpoint("sales", transport=RabbitMQTransport(workers.url), delayed_delivery=delivery)
    await sender.setup()
    due: dict[str, float] = {}
    workers.start(2, stored=stored)
    async with sender:
        for number in range(300):
            delay = number // 20 * 20 / 50
            due[f"m{number}"] = time.time() + delay
            await sender.send("sales", b"", message_id=f"m{number}", delay=timedelta(seconds=delay))
    for _ in range(3):
        before = len(workers.lines())
        async with asyncio.timeout(PATIENCE):
            while len(workers.lines()) < min(before + 40, 250):  # noqa: ASYNC110 - another process' file
                await asyncio.sleep(0.02)
        workers.kill()
        workers.start(2, stored=stored)
    async with asyncio.timeout(PATIENCE):
        while {message_id for message_id, _ in workers.lines()} != set(due):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    early = [(message_id, at) for message_id, at in workers.lines() if at < due[message_id]]
    assert early == []


@pytest.mark.parametrize(("mode", "steps"), [("RECEIVE_ONLY", ["before", "after"]), ("NONE", ["in handler"] * 3)])
@pytest.mark.sample(1)
async def test_consumers_killed_while_many_messages_are_acknowledged(
    workers: Workers, mode: str, steps: list[str]
) -> None:
    # Given messages in a queue
    sender = Endpoint("sales", transport=RabbitMQTransport(workers.url), delayed_delivery=DelayLevelDelivery())
    await sender.setup()
    ids = {f"m{number}" for number in range(1000)}
    async with sender:
        await asyncio.gather(*(sender.send("sales", b"", message_id=one) for one in ids))
    # When consumers are killed while they acknowledge dozens together
    for step in steps:
        await asyncio.to_thread(workers.die, mode, step)
    assert len(workers.acknowledged()) == len(steps)
    # Then others handle the rest, until one has stopped and left nothing
    transport = RabbitMQTransport(workers.url)
    await transport.start()

    async def waiting() -> int:  # the broker returns what a process held some time after its end
        missing = ids - set(handled(workers)) if mode == "RECEIVE_ONLY" else ()
        return len(missing) or await transport.count("sales")

    async with asyncio.timeout(PATIENCE):
        while await waiting():
            workers.start(1, stored=False)
            while await waiting():  # noqa: ASYNC110 - another process' messages
                await asyncio.sleep(0.05)
            await asyncio.to_thread(workers.stop)
    await transport.stop()
    times = handled(workers)
    lost, doubled = len(ids - set(times)), sum(times.values()) - len(times)
    print(f"{mode}: acknowledged {workers.acknowledged()}, {lost} lost, {doubled} doubled")  # noqa: T201
    # And in mode NONE none is handled twice, in the other none is lost
    if mode == "NONE":
        assert (doubled, lost <= 64 * len(steps)) == (0, True)
    else:
        assert (lost, doubled <= 64 * len(steps)) == (0, True)


def handled(workers: Workers) -> Counter[str]:
    """Return how often each message was handled."""
    return Counter(message_id for message_id, _ in workers.lines())


@pytest.mark.slow
@pytest.mark.long
async def test_twenty_thousand_delays_of_up_to_twenty_seconds(rabbitmq_url: str) -> None:
    """Each arrives once, none early, whatever levels it waits in."""
    chance = random.Random(new_seed())  # noqa: S311 - repeatable
    endpoint = sales(rabbitmq_url)
    handled = Handled(endpoint)
    ids = {f"m{number}" for number in range(MANY)}
    async with endpoint:
        for first in range(0, MANY, 1000):
            await asyncio.gather(
                *(
                    endpoint.send(
                        "sales", b"", message_id=f"m{number}", delay=timedelta(seconds=chance.uniform(0.001, 20))
                    )
                    for number in range(first, first + 1000)
                )
            )
        await handled.all_of(ids, within=100)
    assert handled.times == Counter(ids)
    assert min(handled.lateness) >= 0
    print(f"lateness: median {sorted(handled.lateness)[MANY // 2]:.3f} s")  # noqa: T201
