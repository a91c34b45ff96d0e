"""The synchronous face, from plain threads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from delayline import ConfigurationError, Endpoint, MemoryTransport, NotStarted, SyncEndpoint
from delayline.events import Event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline import Message, MessageContext
    from delayline.spi import Transaction, TransportOperation


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint("sales", transport=MemoryTransport())


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "delayline sales"]


def test_threads_send_and_the_handler_receives(endpoint: Endpoint) -> None:
    seen: list[str] = []
    all_seen = threading.Event()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        seen.append(message.id)
        if len(seen) == 20:
            all_seen.set()

    with SyncEndpoint(endpoint) as sync, ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(lambda number: sync.send("sales", {"number": number}), range(20)))
        assert all_seen.wait(10)
    assert sorted(seen) == sorted(ids)
    assert threads() == []


NEVER_STOPPED = """
import asyncio, logging, sys, threading
from delayline import Endpoint, MemoryTransport, SyncEndpoint

logging.basicConfig(level=logging.INFO, format="%(message)s")
endpoint = Endpoint("sales", transport=MemoryTransport())
begun = threading.Event()

@endpoint.handler
async def handle(message, context):
    begun.set()
    try:
        await asyncio.sleep(float(sys.argv[1]))
    except asyncio.CancelledError:
        await asyncio.sleep(3600)
    print("handled", flush=True)

sales = SyncEndpoint(endpoint)
sales.start()
sales.send("sales", b"")
begun.wait()
"""


@pytest.mark.parametrize(
    ("seconds", "printed"),
    [("0.2", "handled"), ("3600", "what is in hand is done again: TimeoutError()")],
    ids=["finishes", "left"],
)
def test_the_end_of_the_interpreter_stops_it_but_does_not_wait_for_ever(seconds: str, printed: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", NEVER_STOPPED, seconds],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stdout
    assert printed in ended.stdout
    assert "Traceback" not in ended.stdout


def test_it_starts_once_and_stops_as_often_as_you_like(endpoint: Endpoint) -> None:
    sync = SyncEndpoint(endpoint)
    sync.stop()
    sync.start()
    with pytest.raises(ConfigurationError, match="'sales' is started already"):
        sync.start()
    sync.stop()
    sync.stop()
    with sync:
        sync.send("sales", b"again")
    assert threads() == []


def test_a_send_before_the_start_raises_an_error_with_the_remedy(endpoint: Endpoint) -> None:
    with pytest.raises(NotStarted, match=r"use `with SyncEndpoint\(endpoint\):`"):
        SyncEndpoint(endpoint).send("sales", b"")


def test_a_failing_start_leaves_no_thread() -> None:
    class Broken(MemoryTransport):
        async def start(self) -> None:
            raise OSError("no route")

    sync = SyncEndpoint(Endpoint("sales", transport=Broken()))
    with pytest.raises(OSError, match="no route"):
        sync.start()
    assert threads() == []


def test_a_failing_stop_leaves_no_thread() -> None:
    class Broken(MemoryTransport):
        async def stop(self) -> None:
            raise OSError("no route")

    sync = SyncEndpoint(Endpoint("sales", transport=Broken()))
    sync.start()
    with pytest.raises(OSError, match="no route"):
        sync.stop()
    assert threads() == []


def test_a_call_from_a_handler_is_an_error_instead_of_a_deadlock(endpoint: Endpoint) -> None:
    errors: list[Exception] = []
    done = threading.Event()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        try:
            sync.send("sales", b"")
        except ConfigurationError as error:
            errors.append(error)
        done.set()

    with SyncEndpoint(endpoint) as sync:
        sync.send("sales", b"")
        assert done.wait(10)
    assert "await context.send" in str(errors[0])


def test_stopping_leaves_no_other_thread_waiting_for_ever() -> None:
    sending = threading.Event()

    class Hanging(MemoryTransport):
        async def dispatch(
            self, operations: Sequence[TransportOperation], transaction: Transaction | None = None
        ) -> None:
            sending.set()
            await asyncio.Event().wait()

    sync = SyncEndpoint(Endpoint("sales", transport=Hanging()))
    sync.start()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sync.send, "sales", b"")
        assert sending.wait(10)
        sync.stop()
        with pytest.raises(CancelledError):
            waiting.result(10)


async def test_calls_on_an_event_loop_are_warned_of(endpoint: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    """Given a coroutine or a notebook, when it calls a SyncEndpoint, then the log says once to await instead."""
    with SyncEndpoint(endpoint) as sync:
        await asyncio.to_thread(sync.send, "sales", b"")
        assert sync.send("sales", b"")
        assert sync.run(endpoint.send("sales", b""))
    [warning] = [record for record in caplog.records if getattr(record, "event", None) is Event.LOOP_BLOCKED]
    assert "made on: await the calls of endpoint 'sales' itself" in warning.getMessage()
