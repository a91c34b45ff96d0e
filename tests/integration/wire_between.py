"""A wire between a client and a broker that a test can hold and cut."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class Line:
    """One client's connection."""

    def __init__(self) -> None:
        self.said = bytearray()
        self.answers = asyncio.Event()
        self.answers.set()


class Wire:
    """Forwards bytes both ways until it is held or cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._forwarding: set[asyncio.Task[None]] = set()
        self._lines: list[Line] = []
        self._answers = asyncio.Event()
        self._requests = asyncio.Event()
        self.connections = 0
        self.withheld = 0
        """How many packets of the broker's were not let through since answers are held."""
        self.refuses = False
        self.requests_left: int | None = None
        """How many packets of clients are let through until the wire is cut for good; None for any number."""
        self.let_through()

    def hold_answers(self) -> None:
        """Withhold the broker's answers from the client."""
        self.withheld = 0
        self._answers.clear()

    def hold_answers_to(self, said: bytes) -> int:
        """Withhold the broker's answers from clients that have sent this; return how many there are."""
        held = [line for line in self._lines if said in line.said]
        for line in held:
            line.answers.clear()
        return len(held)

    def hold(self) -> None:
        """Let nothing through: both sides are alive and receive nothing."""
        self._answers.clear()
        self._requests.clear()

    def let_through(self) -> None:
        """Forward withheld data first, and everything after it."""
        self._answers.set()
        self._requests.set()
        for line in self._lines:
            line.answers.set()

    def cut(self) -> None:
        """Close all connections and drop withheld data."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def requested(self) -> None:
        """Count a packet of a client's, and cut the wire when there were as many as it lets through."""
        if self.requests_left is not None:
            self.requests_left -= 1
            if self.requests_left <= 0:
                self.refuses = True
                self.cut()

    def answered(self) -> None:
        """Count a packet of the broker's that is withheld."""
        self.withheld += not self._answers.is_set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect one client to the broker."""
        self.connections += 1
        if self.refuses:
            writer.transport.abort()
            return
        try:
            from_broker, to_broker = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, to_broker}
        line = Line()
        self._lines.append(line)
        self._forwarding |= {
            asyncio.create_task(_forward(reader, to_broker, [self._requests], line.said, self.requested)),
            asyncio.create_task(
                _forward(from_broker, writer, [self._answers, line.answers], bytearray(), self.answered)
            ),
        }

    async def close(self) -> None:
        """Cut the wire, and return when nothing is left of it."""
        self.cut()
        self.let_through()
        if self._forwarding:
            await asyncio.wait(self._forwarding)


async def _forward(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    gates: list[asyncio.Event],
    seen: bytearray,
    came: Callable[[], None],
) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            seen += data
            came()
            for gate in gates:
                await gate.wait()
            writer.write(data)
            await writer.drain()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def wire_to(url: str) -> AsyncIterator[tuple[Wire, str]]:
    """Provide a wire to the broker at `url`, and the URL of its other end."""
    found = re.search(r":(\d+)/", url)
    assert found is not None
    wire = Wire(int(found[1]))
    server = await asyncio.start_server(wire.accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield wire, url.replace(f":{found[1]}/", f":{port}/")
    finally:
        await wire.close()
        server.close()
        await server.wait_closed()


@contextlib.asynccontextmanager
async def a_server(says: bytes) -> AsyncIterator[int]:
    """Provide the port of a server that says one thing to one client and then listens until that hangs up."""
    left = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        left.set()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        await left.wait()
