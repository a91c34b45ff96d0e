"""An HTTP server in a thread, for metrics and probes: it answers also while the event loop is blocked."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple, Self
from urllib.parse import urlsplit

from delayline.errors import ConfigurationError
from delayline.events import Event, emit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

logger: logging.Logger = logging.getLogger(__name__)

#: Connections whose requests are not complete; for a further one the oldest is closed.
MOST_CONNECTIONS: Final = 100
#: Threads that make the answers.
ANSWERING_THREADS: Final = 4
#: Seconds within which a request has to be complete ...
REQUEST_WITHIN: Final = 5.0
#: ... and its answer taken.
TAKEN_WITHIN: Final = 5.0
#: Bytes of a request, which has no body.
LONGEST_HEAD: Final = 16 * 1024
HEAD_ENDS: Final = b"\r\n\r\n"
EVERY_INTERFACE: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - it is warned of
EXPOSED: Final = (
    "%s is open to every network of this machine, without a password: whoever reaches it reads %s. Name an address "
    "that only your monitoring reaches, or limit the port in the firewall or network policy"
)
TEXT_TYPE: Final = "text/plain; charset=utf-8"
EXAMPLE: Final = "write HOST:PORT, as in 127.0.0.1:9464 or [::1]:9464"


class Response(NamedTuple):
    """An answer to a GET request."""

    body: str
    status: int = HTTPStatus.OK
    content_type: str = TEXT_TYPE


class HttpServer:
    """Answers GET and HEAD requests for a few paths from a separate thread.

    Args:
        address: Where it listens, as `127.0.0.1:9464`; port 0 is a free port.
        paths: The responses by path: functions of the request's Accept header that may run in several threads at once.

    Raises:
        ConfigurationError: The address is invalid, in use, or not of this machine.
    """

    def __init__(self, address: str, paths: Mapping[str, Callable[[str], Response]]) -> None:
        host, port = parse_address(address)
        try:
            self._listening = _listening(host, port)
        except OSError as error:
            raise ConfigurationError(refusal(address, error)) from error
        name, bound = self._listening.getsockname()[:2]
        self._address = f"[{name}]:{bound}" if ":" in name else f"{name}:{bound}"
        if host in EVERY_INTERFACE:
            emit(logger, logging.WARNING, Event.HTTP_EXPOSED, EXPOSED, self._address, ", ".join(sorted(paths)))
        self._connections = _Connections(self._listening, dict(paths))
        self._thread = threading.Thread(target=self._connections.serve, name=f"delayline http {address}", daemon=True)

    @property
    def address(self) -> str:
        """Where it listens, with the port that it has."""
        return self._address

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Close the port and every connection."""
        if self._thread.is_alive():
            self._connections.stop()
            self._thread.join()
        self._listening.close()

    @property
    def paths(self) -> Sequence[str]:
        """The paths that it answers."""
        return sorted(self._connections.paths)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port. Raises ConfigurationError."""
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(f"{address!r} is not an address: {error}; {EXAMPLE}") from error
    if host is None or port is None or parts.netloc != address or parts.username is not None:
        raise ConfigurationError(f"{address!r} is not an address: {EXAMPLE}")
    return host, port


def refusal(address: str, error: OSError) -> str:
    """Return why no server can listen there, and what to do."""
    if error.errno == errno.EADDRINUSE:
        return f"{address} is in use by another process: choose another port"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"this user may not listen on {address}: choose a port above 1023"
    return f"cannot listen on {address}: {error.strerror or error}; name an address of this machine"


class _Connections:
    """Reads requests in one thread, on an event loop of its own; a few threads answer those that are complete."""

    def __init__(self, listening: socket.socket, paths: dict[str, Callable[[str], Response]]) -> None:
        self.paths = paths
        self._listening = listening
        self._stopping: Callable[[], object] | None = None
        self._began = threading.Event()
        self._reading: dict[asyncio.Task[object], None] = {}
        """The tasks of connections whose requests are not complete, the oldest first."""

    def serve(self) -> None:
        """Answer until `stop` is called in another thread."""
        with ThreadPoolExecutor(ANSWERING_THREADS, "delayline http answer") as threads:
            asyncio.run(self._serve(threads))

    def stop(self) -> None:
        """Have `serve` return, in another thread."""
        self._began.wait()
        if self._stopping is not None:
            self._stopping()

    async def _serve(self, threads: ThreadPoolExecutor) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.set_default_executor(threads)
        server = await asyncio.start_server(
            self._connected, sock=self._listening, limit=LONGEST_HEAD, backlog=MOST_CONNECTIONS
        )
        self._stopping = partial(loop.call_soon_threadsafe, ended.set)
        self._began.set()
        try:
            await ended.wait()
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a connection's only request; a connection that is slow is closed, first to make room for others."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101
        if len(self._reading) >= MOST_CONNECTIONS:
            next(iter(self._reading)).cancel()
        self._reading[task] = None
        client = writer.get_extra_info("peername")
        try:
            async with asyncio.timeout(REQUEST_WITHIN):
                head = await reader.readuntil(HEAD_ENDS)
            self._reading.pop(task, None)
            answer = await asyncio.get_running_loop().run_in_executor(None, self._answer, head)
            writer.write(answer)
            async with asyncio.timeout(TAKEN_WITHIN):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except asyncio.LimitOverrunError:
            writer.write(_encoded(Response("the request is too large\n", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)))
            writer.close()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError) as error:
            text = "a request of %s failed: %r"
            emit(logger, logging.DEBUG, Event.HTTP_REQUEST_FAILED, text, client, error)
            writer.transport.abort()
        finally:
            self._reading.pop(task, None)

    def _answer(self, head: bytes) -> bytes:
        """Return what is sent to a request with this head."""
        first, _, rest = head.decode("latin-1").partition("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _encoded(Response("this is not HTTP/1.1\n", HTTPStatus.BAD_REQUEST))
        method, target, _ = words
        if method not in ("GET", "HEAD"):
            return _encoded(Response("only GET and HEAD are answered\n", HTTPStatus.NOT_IMPLEMENTED))
        path = target.partition("?")[0]
        headers = {name.strip().lower(): value.strip() for name, _, value in map(_divided, rest.split("\r\n"))}
        response = self._response(path, headers.get("accept", ""))
        emit(logger, logging.DEBUG, Event.HTTP_REQUEST, "%s %r %d", method, path, response.status)
        return _encoded(response, with_body=method == "GET")

    def _response(self, path: str, accept: str) -> Response:
        respond = self.paths.get(path)
        if respond is None:
            paths = ", ".join(sorted(self.paths))
            return Response(f"not found; there are {paths}\n", HTTPStatus.NOT_FOUND)
        try:
            return respond(accept)
        except Exception as error:
            failed = Event.HTTP_REQUEST_FAILED
            emit(logger, logging.ERROR, failed, "The answer to %s failed: %s", path, error, exception=error)
            return Response("failed; see the log\n", HTTPStatus.INTERNAL_SERVER_ERROR)


def _divided(line: str) -> tuple[str, str, str]:
    return line.partition(":")


def _encoded(response: Response, *, with_body: bool = True) -> bytes:
    """Return the response as it is sent; the connection ends with it."""
    body = response.body.encode()
    status = HTTPStatus(response.status)
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}",
        "Server: delayline",
        f"Content-Type: {response.content_type}",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    )
    return "\r\n".join(lines).encode() + HEAD_ENDS + (body if with_body else b"")


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises OSError."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
