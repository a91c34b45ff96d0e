"""The part of the delivery suite that needs a second process: claims and notifications between the two."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest
import pytest_asyncio

from delayline.clock import SystemClock
from delayline.delayed.delivery import StoredDelivery
from delayline.delayed.store import SupportsNotifications
from delayline.endpoint import Endpoint
from delayline.events import Event
from delayline.outgoing import Send
from delayline.testing.conformance.messages import ENDPOINT
from delayline.testing.signals import Signals

if TYPE_CHECKING:
    import logging
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from delayline.delayed.store import DelayedMessageStore
    from delayline.message import Message
    from delayline.receiving.context import MessageContext
    from delayline.transport import Transport

#: Seconds until something that never comes fails a test; less than the poller's longest sleep, which ends by itself.
PROCESS_PATIENCE: Final = 45.0
#: The other process: an endpoint at two URLs. It prints the ids of handled messages, and sends what it reads.
PROGRAM: Final = """
import asyncio, sys
from datetime import timedelta
from delayline import Endpoint, StoredDelivery
from delayline.backends import BackendOptions, backend_of

async def main(transport_url, store_url, name, handles):
    options = BackendOptions()
    transport = backend_of(transport_url, kind="transport").transport(transport_url, options)
    store = backend_of(store_url, kind="delayed message store").store(store_url, options)
    endpoint = Endpoint(name, transport=transport, delayed_delivery=StoredDelivery(store, polling=False),
                        send_only=not handles)

    async def handle(message, context):
        print("handled", message.id, flush=True)

    if handles:
        endpoint.handler(handle)
    async with endpoint:
        print("started", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            message_id, seconds = line.split()
            await endpoint.send(name, b"", message_id=message_id, delay=timedelta(seconds=float(seconds)))

asyncio.run(main(*sys.argv[1:4], sys.argv[4] == "handles"))
"""


class OtherProcess:
    """An endpoint of the same name in another process, which receives too, or only sends; it does not poll."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._reading = asyncio.create_task(self._read())
        self._changed = asyncio.Event()
        self._started = False
        self.handled: list[str] = []
        """The ids of the messages that it has handled."""

    @classmethod
    async def start(cls, urls: Urls, *, handles: bool) -> OtherProcess:
        """Return it once its endpoint is started."""
        words = ("-c", PROGRAM, *urls, ENDPOINT, "handles" if handles else "sends")
        pipe = asyncio.subprocess.PIPE
        other = cls(await asyncio.create_subprocess_exec(sys.executable, *words, stdin=pipe, stdout=pipe))
        await other.until(lambda: other._started)
        return other

    async def send(self, message_id: str, delay: timedelta) -> None:
        """Let it send a delayed message to the endpoint."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{message_id} {delay.total_seconds()}\n".encode())
        await self._process.stdin.drain()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once the condition holds; it is checked after each line of the process."""
        async with asyncio.timeout(PROCESS_PATIENCE):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def stop(self) -> None:
        """Stop its endpoint, and wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(PROCESS_PATIENCE):
                await self._process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            await self._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            what, *ids = line.decode().split()
            self._started |= what == "started"
            self.handled += ids
            self._changed.set()


class Urls(NamedTuple):
    """Where another process finds the transport and the store of a test."""

    transport: str
    store: str


class DeliveryBetweenProcesses:
    """What a process does is seen by another, with its own connections."""

    pytestmark: pytest.MarkDecorator = pytest.mark.asyncio

    async def make_backends(self, tmp_path: Path) -> tuple[Transport, DelayedMessageStore]:
        """Return a new transport and a new store; see `DeliveryFixtures`."""
        raise NotImplementedError

    def urls(self, tmp_path: Path) -> tuple[str, str] | None:
        """Return the URLs of the transport and the store that `make_backends` makes, for another process.

        None, the default, if they have none: what happens between processes is then reported as `not claimed`.
        """
        del tmp_path
        return None

    @pytest_asyncio.fixture
    async def parts(self, tmp_path: Path) -> AsyncIterator[tuple[Transport, DelayedMessageStore, Urls]]:
        """Provide the parts of this process, and where the other process finds its own."""
        transport, store = await self.make_backends(tmp_path)
        urls = self.urls(tmp_path)
        if urls is None:
            pytest.skip("not claimed: other processes")
        yield transport, store, Urls(*urls)

    @pytest.mark.timeout(180)
    async def test_a_message_in_a_handler_is_received_by_no_other_process(
        self, parts: tuple[Transport, DelayedMessageStore, Urls]
    ) -> None:
        # Given messages that were due, four of them in handlers of this process
        transport, store, urls = parts
        delivery, held, ended = StoredDelivery(store), set[str](), list[str]()
        endpoint = Endpoint(ENDPOINT, transport=transport, delayed_delivery=delivery, concurrency=4)
        are_held, may_end, all_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        ids = {f"m{number}" for number in range(24)}

        async def handle(message: Message, context: MessageContext) -> None:
            held.add(message.id)
            if len(held) == endpoint.concurrency:
                are_held.set()
            await may_end.wait()
            ended.append(message.id)
            if len(ended) == endpoint.concurrency:
                all_ended.set()

        endpoint.handler(handle)
        async with asyncio.timeout(3 * PROCESS_PATIENCE), endpoint:
            delay = timedelta(milliseconds=200)
            await endpoint.send_many([Send(ENDPOINT, b"", message_id=key, delay=delay) for key in sorted(ids)])
            await are_held.wait()
            # When another process receives from their queue
            other = await OtherProcess.start(urls, handles=True)
            try:
                await other.until(lambda: len(other.handled) >= len(ids) - len(held))
                # Then it gets the others, each of them once
                assert sorted(other.handled) == sorted(ids - held)
                may_end.set()
                await all_ended.wait()
            finally:
                await other.stop()
        assert sorted(ended + other.handled) == sorted(ids)

    @pytest.mark.timeout(180)
    async def test_a_message_of_another_process_wakes_a_poller_that_sleeps(
        self, parts: tuple[Transport, DelayedMessageStore, Urls]
    ) -> None:
        # Given a poller in its longest sleep
        transport, store, urls = parts
        if not isinstance(store, SupportsNotifications):
            pytest.skip("not claimed: SupportsNotifications")
        endpoint = Endpoint(ENDPOINT, transport=transport, delayed_delivery=StoredDelivery(store))
        handled = asyncio.Event()

        async def handle(message: Message, context: MessageContext) -> None:
            handled.set()

        def is_long(record: logging.LogRecord) -> bool:
            return bool(vars(record)["facts"]["until"] - SystemClock().now() > timedelta(seconds=PROCESS_PATIENCE))

        endpoint.handler(handle)
        with Signals() as signals:
            async with endpoint:
                other = await OtherProcess.start(urls, handles=False)
                try:
                    await signals.wait_for(Event.SLEEPS, timeout=PROCESS_PATIENCE, where=is_long)
                    # When another process sends a message that is due long before its end
                    await other.send("soon", timedelta(seconds=1))
                    # Then it does not sleep on
                    async with asyncio.timeout(PROCESS_PATIENCE):
                        await handled.wait()
                finally:
                    await other.stop()
