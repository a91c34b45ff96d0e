"""The server of the dashboard beside clients that are slow, silent or many."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

import pytest
from starlette.responses import PlainTextResponse
from tests.eventually import PATIENCE, eventually_async

from delayline.dashboard import server
from delayline.dashboard.server import listening, server_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LARGE = "x" * 50_000_000


@contextlib.asynccontextmanager
async def serving(text: str = "well") -> AsyncIterator[int]:
    """Serve a page of this text; provides the port."""
    with listening("127.0.0.1", 0) as made:
        running = server_of(PlainTextResponse(text))
        running.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        serves = asyncio.create_task(running.serve(sockets=[made]))
        await eventually_async(lambda: running.started)
        yield made.getsockname()[1]
        running.should_exit = running.force_exit = True
        await serves


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Return whether the server ends the connection without an answer."""
    async with asyncio.timeout(PATIENCE):
        try:
            return await reader.read(1000) == b""
        except ConnectionResetError:
            return True


async def test_answers_are_sent_without_waiting_for_acknowledgements() -> None:
    """Given a listening socket, when it accepts a connection, then Nagle's algorithm is off there."""
    with listening("127.0.0.1", 0) as made, socket.create_connection(made.getsockname()):
        accepted, _ = made.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\nX: a", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc"]
)
async def test_a_client_that_does_not_end_its_request_is_sent_away(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_WITHIN", 0.3)
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        if b"POST" in sent:
            assert b"200 OK" in await reader.readuntil(b"well")  # the page does not wait for the form
        assert await is_closed(reader)
        writer.close()


async def test_a_second_request_has_to_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_WITHIN", 0.3)
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        await reader.readuntil(b"well")
        writer.write(b"GET / HT")
        assert await is_closed(reader)
        writer.close()


async def test_a_client_that_takes_no_answer_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a page larger than all buffers, when its client reads none of it, then the connection is closed."""
    monkeypatch.setattr(server, "TAKES_WITHIN", 0.3)
    async with serving(LARGE) as port:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(REQUEST)
            client.settimeout(PATIENCE)
            await asyncio.sleep(1.0)  # the client takes nothing meanwhile
            taken = await asyncio.to_thread(taken_of, client)
    assert taken < len(LARGE)


def taken_of(client: socket.socket) -> int:
    """Return how many bytes come until the end."""
    taken = 0
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(1 << 20):
            taken += len(part)
    return taken


async def test_silent_connections_leave_room_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given more silent connections than there may be, when a request comes, then it is answered."""
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 10)
    async with serving() as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        async with asyncio.timeout(PATIENCE):
            assert b"200 OK" in await reader.readuntil(b"well")
        for _, other in [*silent, (reader, writer)]:
            other.close()
