"""A process that is stopped while it uses an SQLite file: others wait for its write lock no longer than the limit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import pytest

from delayline import BackendUnavailable, Endpoint, SqlDatabase, SqlDelayedMessageStore, SqlTransport
from delayline.delayed.delivery import StoredDelivery

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from delayline import Message, MessageContext

MARGIN: Final = 8.0  # seconds, on a busy machine
STOP: Final = 20.0

WRITING: Final = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("ready", flush=True)
sys.stdin.read()
"""

HANDLING: Final = """
import asyncio, sys
from delayline import Endpoint, SqlTransport

async def main():
    endpoint = Endpoint("orders", transport=SqlTransport(f"sqlite:///{sys.argv[1]}"), concurrency=2)
    begun = []

    @endpoint.handler
    async def handle(message, context):
        begun.append(message.id)
        if len(begun) == 2:
            print(*begun, flush=True)
        await asyncio.Event().wait()

    await endpoint.start()
    await asyncio.Event().wait()

asyncio.run(main())
"""


class OtherProcess:
    """A process that uses the file too."""

    def __init__(self, script: str, file: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", script, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def freeze(self) -> list[str]:
        """Stop the process after its next line of output, and return that line."""
        assert self._process.stdout is not None
        said = self._process.stdout.readline().split()
        assert said
        os.kill(self._process.pid, signal.SIGSTOP)
        return said

    def go_on(self) -> None:
        """Let it go on."""
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


@pytest.fixture
def others() -> Iterator[list[OtherProcess]]:
    started: list[OtherProcess] = []
    yield started
    for other in started:
        other.kill()


async def ignore(endpoint: Endpoint, text: str, error: Exception) -> None:
    """What to do about a critical error."""


def endpoint_at(file: Path, timeout: float, *, server_timeout: float | None = None) -> Endpoint:
    url = f"sqlite:///{file}?timeout={timeout:g}"
    return Endpoint(
        "orders",
        transport=SqlTransport(SqlDatabase(url, server_timeout=server_timeout)),
        delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url)),
        on_critical_error=ignore,
    )


async def failing(endpoint: Endpoint, delay: timedelta | None) -> float:
    began = time.monotonic()
    with pytest.raises(BackendUnavailable, match=r"another process holds the write lock of .*file\.db"):
        await endpoint.send("orders", b"", delay=delay)
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize(("timeout", "server_timeout"), [(2.0, None), (60.0, 2.0)])
async def test_writes_beside_a_process_frozen_in_a_write_end_together(
    tmp_path: Path, others: list[OtherProcess], timeout: float, server_timeout: float | None
) -> None:
    """Given writes that wait for the same lock, now and delayed, when it is not given, then all end together."""
    file = tmp_path / "file.db"
    endpoint = endpoint_at(file, timeout, server_timeout=server_timeout)
    handled: Counter[str] = Counter()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled[message.id] += 1

    async with endpoint:
        await endpoint.send("orders", b"", message_id="before")
        others.append(OtherProcess(WRITING, file))
        others[0].freeze()
        hour = timedelta(hours=1)
        waits = await asyncio.gather(*(failing(endpoint, [None, hour][one % 2]) for one in range(20)))
        assert max(waits) < 2 * 2.0 + MARGIN
        began = time.monotonic()
        others[0].kill()
        async with asyncio.timeout(30):
            await endpoint.send("orders", b"", message_id="after")
            while not handled["after"]:  # noqa: ASYNC110 - the endpoint's time
                await asyncio.sleep(0.05)
        assert time.monotonic() - began < 30
    assert handled["after"] == 1


@pytest.mark.slow
async def test_an_endpoint_stops_beside_a_process_frozen_in_a_write(tmp_path: Path, others: list[OtherProcess]) -> None:
    """Given messages in hand and a timeout of a minute, when another process has the lock, then a stop ends in time."""
    file = tmp_path / "file.db"
    endpoint = endpoint_at(file, 60)
    handling, may_end = asyncio.Event(), asyncio.Event()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handling.set()
        await may_end.wait()
        await context.send("orders", b"", delay=timedelta(hours=1))

    await endpoint.start()
    for _ in range(10):
        await endpoint.send("orders", b"")
        await endpoint.send("orders", b"", delay=timedelta(seconds=1))
    await asyncio.wait_for(handling.wait(), 15)
    others.append(OtherProcess(WRITING, file))
    others[0].freeze()
    may_end.set()
    await asyncio.sleep(1.5)
    began = time.monotonic()
    await endpoint.stop()
    assert time.monotonic() - began < STOP


async def test_a_frozen_process_keeps_only_the_messages_it_has_claimed(
    tmp_path: Path, others: list[OtherProcess]
) -> None:
    """Given a process stopped with two messages in hand, then others are handled, and those when it has ended."""
    file = tmp_path / "file.db"
    endpoint = endpoint_at(file, 5)
    handled: Counter[str] = Counter()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled[message.id] += 1

    sender = Endpoint("sender", transport=SqlTransport(f"sqlite:///{file}"), send_only=True)
    await endpoint.setup()
    async with sender:
        for number in range(2):
            await sender.send("orders", b"", message_id=f"claimed {number}".replace(" ", "-"))
    others.append(OtherProcess(HANDLING, file))
    claimed = await asyncio.to_thread(others[0].freeze)
    async with endpoint:
        for number in range(20):
            delay = timedelta(milliseconds=10) if number % 2 else None
            await endpoint.send("orders", b"", message_id=f"free-{number}", delay=delay)
        async with asyncio.timeout(30):
            while len(handled) < 20:  # noqa: ASYNC110 - the endpoint's time
                await asyncio.sleep(0.05)
        assert not set(claimed) & set(handled)
        others[0].kill()
        async with asyncio.timeout(30):
            while len(handled) < 22:  # noqa: ASYNC110 - the endpoint's time
                await asyncio.sleep(0.05)
    assert set(handled.values()) == {1}
