"""Limits of queues: pauses, messages handled at once and a rate, over all processes that receive."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.eventually import eventually_async

from delayline import ConfigurationError, Endpoint, Headers, QueueNotFound
from delayline.circuit_breaker import first_of
from delayline.events import Event
from delayline.memory import MemoryTransport
from delayline.rabbitmq import RabbitMQTransport
from delayline.sql import SqlTransport
from delayline.transport import QueueLimits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from delayline import Message, MessageContext


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/shop.db"
    return str(request.getfixturevalue(f"{request.param}_url"))


#: Handles a message for ever, having touched a file.
STUCK: Final = """
import asyncio, pathlib, sys
from delayline import Endpoint, SqlTransport

async def main():
    endpoint = Endpoint("shop", transport=SqlTransport(sys.argv[1]), concurrency=4)

    @endpoint.handles("Bill")
    async def handle(value, context):
        pathlib.Path(sys.argv[2]).touch()
        await asyncio.Event().wait()

    async with endpoint:
        await endpoint.wait_stopped()

asyncio.run(main())
"""


class Running:
    """Counts what several workers handle together."""

    def __init__(self) -> None:
        self.now = self.most = self.handled = 0


class Worker:
    """An endpoint that counts the messages that it handles, each of them until it is released."""

    def __init__(self, url: str, running: Running, *, blocks: bool = False, name: str = "shop") -> None:
        self.endpoint = Endpoint(name, transport=SqlTransport(url), concurrency=20)
        self.release = asyncio.Event()
        if not blocks:
            self.release.set()

        @self.endpoint.handler
        async def handle(message: Message, context: MessageContext) -> None:
            running.now += 1
            running.most = max(running.most, running.now)
            await self.release.wait()
            running.now -= 1
            running.handled += 1


@contextlib.asynccontextmanager
async def limited_shop(url: str, **limits: Any) -> AsyncIterator[SqlTransport]:  # noqa: ANN401 - as of set_limits
    """Set the limits of the queue `shop` before its receivers start, from a process of their own as it were."""
    transport = SqlTransport(url)
    await transport.setup_infrastructure(["shop", "error"])
    await transport.start()
    await transport.set_limits("shop", **limits)
    yield transport
    await transport.stop()


async def test_a_paused_queue_keeps_its_messages_until_it_is_resumed(url: str) -> None:
    """Given a paused queue, when messages come, then none is handled before the queue is resumed."""
    paused, others = Running(), Running()
    worker, other = Worker(url, paused).endpoint, Worker(url, others, name="other").endpoint
    async with limited_shop(url, paused=True) as transport, worker, other:
        for number in range(5):
            await worker.send("shop", str(number))
        await other.send("other", b"")
        await eventually_async(lambda: others.handled == 1)
        assert paused.handled == 0
        assert await transport.set_limits("shop", paused=False) == QueueLimits("shop")
        await eventually_async(lambda: paused.handled == 5)


async def test_so_many_messages_are_handled_at_once_in_all_processes(url: str) -> None:
    """Given a queue limited to 3 and two receivers, when 30 messages come, then never more than 3 run."""
    running = Running()
    first, second = Worker(url, running, blocks=True), Worker(url, running, blocks=True)
    async with limited_shop(url, concurrency=3) as transport, first.endpoint, second.endpoint:
        await asyncio.gather(*(first.endpoint.send("shop", b"") for _ in range(30)))
        await eventually_async(lambda: running.now == 3)
        first.release.set()
        second.release.set()
        await eventually_async(lambda: running.handled == 30)
        assert running.most == 3
        first.release.clear()
        second.release.clear()
        await transport.set_limits("shop", concurrency=None)
        await asyncio.gather(*(first.endpoint.send("shop", b"") for _ in range(30)))
        await eventually_async(lambda: running.now == 30)
        first.release.set()
        second.release.set()


async def test_a_rate_is_kept_over_all_receivers(url: str) -> None:
    """Given a queue limited to 20 a second and two receivers, when 25 messages wait, then they take over a second."""
    running = Running()
    first, second = Worker(url, running).endpoint, Worker(url, running).endpoint
    async with limited_shop(url, paused=True, rate=20) as transport, first, second:
        await asyncio.gather(*(first.send("shop", b"") for _ in range(25)))
        began = time.monotonic()
        assert (await transport.set_limits("shop", paused=False)).rate == 20
        await eventually_async(lambda: running.handled == 25)
        assert time.monotonic() - began > (25 - 3) / 20  # 0.1 s of messages come at once
        await transport.set_limits("shop", rate=None)
        await asyncio.gather(*(first.send("shop", b"") for _ in range(100)))
        await eventually_async(lambda: running.handled == 125)


@pytest.mark.parametrize("limits", [{"concurrency": 1}, {"handlers": {"Bill": 1}}], ids=["queue", "type"])
@pytest.mark.sample(2)
async def test_slots_of_a_process_that_is_killed_are_free(url: str, limits: dict[str, Any], tmp_path: Path) -> None:
    """Given a process that holds the only slot in a handler that never ends, when it is killed, then others get it."""
    running, headers, began = Running(), {Headers.ENCLOSED_MESSAGE_TYPES: "Bill"}, tmp_path / "began"
    async with limited_shop(url, **limits):
        # Given
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", STUCK, url, str(began))
        try:
            async with Endpoint("sender", transport=SqlTransport(url), send_only=True) as sender:
                await sender.send("shop", {}, message_id="stuck", headers=headers)
                await eventually_async(began.exists)
                worker = TwoKinds(url, running, Running(), bills=None)
                worker.release.set()
                async with worker.endpoint:
                    await sender.send("shop", {}, message_id="next", headers=headers)
                    with pytest.raises(AssertionError):
                        await eventually_async(lambda: running.handled, "a second one in the only slot", patience=1.0)
                    # When
                    process.kill()
                    await process.wait()
                    # Then it is free, and the message of the killed process with it
                    await eventually_async(lambda: running.handled == 2)
                    assert running.most == 1
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


class TwoKinds:
    """An endpoint with a limited kind of message, whose handlers end when they are released, and another kind.

    They are released together by `release`, or one by one by `ends`.
    """

    def __init__(self, url: str, running: Running, others: Running, *, bills: int | None = 2) -> None:
        self.endpoint = Endpoint("shop", transport=SqlTransport(url), concurrency=4)
        self.release = asyncio.Event()
        self.ends: list[asyncio.Event] = []

        @self.endpoint.handles("Bill", concurrency=bills)
        async def bill(value: object, context: MessageContext) -> None:
            running.now += 1
            running.most = max(running.most, running.now)
            self.ends.append(end := asyncio.Event())
            await first_of(self.release.wait(), end.wait())
            running.now -= 1
            running.handled += 1

        @self.endpoint.handles("Note")
        async def note(value: object, context: MessageContext) -> None:
            others.handled += 1

    async def send(self, kind: str, number: int) -> None:
        headers = {Headers.ENCLOSED_MESSAGE_TYPES: kind}
        await asyncio.gather(*(self.endpoint.send("shop", {}, headers=headers) for _ in range(number)))

    async def has_limit(self, number: int) -> Any:  # noqa: ANN401 - the slots in the database
        """Wait until the endpoint has read this limit of its first kind; return the slots."""
        pipeline: Any = self.endpoint._pipeline
        admission = pipeline.intake.receiver._admission

        async def is_read() -> bool:
            await admission.read()
            return bool(admission._handler_slots["Bill"]._number == number)

        await eventually_async(is_read)
        return admission._handler_slots["Bill"]


async def test_a_type_of_message_is_limited_over_all_processes(url: str) -> None:
    """Given a type limited to 2 and two receivers, then never more than 2 are handled, and others are not kept back."""
    bills, notes = Running(), Running()
    first, second = TwoKinds(url, bills, notes), TwoKinds(url, bills, notes)
    async with first.endpoint, second.endpoint:
        await first.send("Bill", 30)
        await eventually_async(lambda: bills.now == 2)
        await second.send("Note", 20)
        await eventually_async(lambda: notes.handled == 20)
        assert bills.now == 2
        first.release.set()
        second.release.set()
        await eventually_async(lambda: bills.handled == 30)
        assert bills.most == 2


async def test_a_stop_gives_messages_back_that_wait_for_their_type(url: str) -> None:
    """Given a process that stops while messages wait for their type's limit, then another process handles them."""
    bills, notes = Running(), Running()
    first, second = TwoKinds(url, bills, notes), TwoKinds(url, bills, notes)
    second.release.set()
    async with first.endpoint:
        await first.send("Bill", 6)
        await eventually_async(lambda: bills.now == 2)
        stopping = asyncio.create_task(first.endpoint.stop())
        await asyncio.sleep(0.3)
        first.release.set()
        await stopping
    async with second.endpoint:
        await eventually_async(lambda: bills.handled == 6)
        assert await second.endpoint.transport.count("error") == 0  # type: ignore[attr-defined]


async def test_endpoints_follow_a_change_of_a_types_limit(url: str) -> None:
    """Given a type limited to 2 by the code, when its limit changes, then two receivers follow, up and back down."""
    bills, notes = Running(), Running()
    first, second = TwoKinds(url, bills, notes), TwoKinds(url, bills, notes)
    async with limited_shop(url) as transport, first.endpoint, second.endpoint:
        await first.send("Bill", 12)
        await eventually_async(lambda: bills.now == 2)
        assert (await transport.set_limits("shop", handlers={"Bill": 4})).handlers == {"Bill": 4}
        await eventually_async(lambda: bills.now == 4)
        await first.has_limit(4)
        await second.has_limit(4)
        # When the number in the code counts again, then those that run are counted, whichever end first
        assert (await transport.set_limits("shop", handlers={"Bill": None})).handlers == {}
        await first.has_limit(2)
        await second.has_limit(2)
        for ended in range(1, 11):
            next(end for end in first.ends + second.ends if not end.is_set()).set()
            await eventually_async(lambda ended=ended: bills.handled == ended)  # type: ignore[misc]
            await eventually_async(lambda ended=ended: bills.now == min(max(2, 4 - ended), 12 - ended))  # type: ignore[misc]
        assert bills.most == 4
        first.release.set()
        second.release.set()
        await eventually_async(lambda: bills.handled == 12)


async def test_new_handlers_wait_for_all_that_run_after_a_limit_was_lowered(url: str) -> None:
    """Given 3 handlers at work, when the limit becomes 1, then the next one begins after the last of them."""
    bills, notes = Running(), Running()
    shop = TwoKinds(url, bills, notes, bills=3)
    async with limited_shop(url) as transport, shop.endpoint:
        await shop.send("Bill", 4)
        await eventually_async(lambda: bills.now == 3)
        await transport.set_limits("shop", handlers={"Bill": 1})
        slots = await shop.has_limit(1)
        for _ in range(2):
            next(end for end in shop.ends if not end.is_set()).set()
        await eventually_async(lambda: bills.handled == 2)
        assert await slots.take() is None
        assert len(shop.ends) == 3
        shop.release.set()
        await eventually_async(lambda: bills.handled == 4)


async def test_a_type_without_a_limit_in_the_code_is_limited(url: str) -> None:
    """Given a type that the code does not limit, when it has a limit, then that holds until it is removed."""
    bills, notes = Running(), Running()
    first, second = (TwoKinds(url, bills, notes, bills=None) for _ in range(2))
    async with limited_shop(url, handlers={"Bill": 1}) as transport, first.endpoint, second.endpoint:
        await first.send("Bill", 20)
        await first.send("Note", 1)
        await eventually_async(lambda: bills.now == 1 and notes.handled == 1)
        assert bills.most == 1
        await transport.set_limits("shop", handlers={"Bill": None})
        await eventually_async(lambda: bills.now > 1)
        first.release.set()
        second.release.set()
        await eventually_async(lambda: bills.handled == 20)
        # Then the endpoints' own concurrency of 4 each is kept, but for one that has waited
        assert bills.most <= 2 * (4 + 1)


async def test_concurrent_changes_of_different_types_are_kept(url: str) -> None:
    """Given transports that change the limits of a type each at the same time, then all of them are kept."""
    kinds = {f"Type{number}": number for number in range(1, 9)}
    async with limited_shop(url, handlers={"Gone": 3}) as transport:
        changes = ({name: number} for name, number in kinds.items())
        await asyncio.gather(*(transport.set_limits("shop", handlers=one) for one in changes))
        await transport.set_limits("shop", paused=True, handlers={"Gone": None, "Never": None})
        assert await transport.limits("shop") == [QueueLimits("shop", paused=True, handlers=kinds)]


@pytest.mark.parametrize("text", ["{", '{"Bill": "2"}', "[1]", '{"Bill": 0}', '{"": 2}'])
async def test_unusable_limits_of_types_are_logged_and_ignored(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Given a registry in which others have written, then the limits of the code hold, and a new limit replaces it."""
    url = f"sqlite:///{tmp_path}/shop.db"
    bills, notes = Running(), Running()
    shop = TwoKinds(url, bills, notes)
    async with limited_shop(url) as transport:
        with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
            connection.execute("UPDATE delayline_queues SET handlers = ? WHERE name = 'shop'", [text])
            connection.commit()
        async with shop.endpoint:
            await shop.send("Bill", 3)
            await eventually_async(lambda: bills.now == 2)
            shop.release.set()
            await eventually_async(lambda: bills.handled == 3)
        logged = [one for one in caplog.records if getattr(one, "event", None) is Event.LIMITS_UNUSABLE]
        assert len(logged) == 1
        assert "column 'handlers' of queue 'shop' in delayline_queues is unusable" in logged[0].getMessage()
        assert (await transport.set_limits("shop", handlers={"Bill": 3})).handlers == {"Bill": 3}


async def test_limits_of_types_that_are_refused(tmp_path: Path) -> None:
    """Given a number out of range or no name, then the error names it, and nothing is changed."""
    wrong: list[tuple[Any, str]] = [
        *(({"Bill": number}, "concurrency of 'Bill' must be") for number in (0, -1, 10_001, True, 1.5, "2")),
        *(({name: 2}, "handlers must be numbers by the name of a type") for name in ("", " ", 7)),
        (["Bill"], "handlers must be numbers by the name of a type"),
    ]
    async with limited_shop(f"sqlite:///{tmp_path}/shop.db") as transport:
        for handlers, text in wrong:
            with pytest.raises(ConfigurationError, match=text):
                await transport.set_limits("shop", paused=True, handlers=handlers)
        assert await transport.limits("shop") == [QueueLimits("shop")]


async def test_types_that_cannot_be_limited_are_refused() -> None:
    """Given queues that are not in a SQL database, or a number out of range, then the registration is refused."""
    elsewhere = Endpoint("shop", transport=MemoryTransport())
    with pytest.raises(ConfigurationError, match="needs queues in a SQL database: not MemoryTransport"):
        elsewhere.handles("Bill", concurrency=2)(nothing)
    here = Endpoint("shop", transport=SqlTransport("sqlite:///shop.db"))
    for wrong in (0, -1, 10_001, True, 1.5):
        with pytest.raises(ConfigurationError, match="concurrency must be"):
            here.handles("Bill", concurrency=wrong)(nothing)  # type: ignore[arg-type]


async def nothing(value: object, context: MessageContext) -> None:
    """A handler."""


async def test_limits_of_queues_that_cannot_have_them(tmp_path: Path) -> None:
    """Given a queue that does not exist, a value out of range or another transport, then the error says so."""
    shop = Worker(f"sqlite:///{tmp_path}/shop.db", Running()).endpoint
    async with shop:
        with pytest.raises(QueueNotFound):
            await shop.queues.set_limits("never", paused=True)
        for wrong in (0, -1, 2_000_000, True):
            with pytest.raises(ConfigurationError, match="rate must be messages a second"):
                await shop.queues.set_limits("shop", rate=wrong)
        for wrong in (0, 10_001, 2**40):
            with pytest.raises(ConfigurationError, match="concurrency"):
                await shop.queues.set_limits("shop", concurrency=wrong)
        assert [one.queue for one in await shop.queues.limits()] == ["error", "shop"]
    for transport in (MemoryTransport(), RabbitMQTransport("amqp://localhost")):
        with pytest.raises(ConfigurationError, match=f"{type(transport).__name__} has no limits of queues"):
            _ = Endpoint("shop", transport=transport).queues
