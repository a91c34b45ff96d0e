"""An HTTP server in a thread, for metrics and probes: it answers also while the event loop is blocked."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from urllib.parse import urlsplit

from delayline.errors import ConfigurationError
from delayline.events import Event, emit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

logger: logging.Logger = logging.getLogger(__name__)

#: Requests that are answered at once; further connections are closed.
MOST_CONNECTIONS: Final = 16
#: Seconds until a connection is closed, whatever its client does.
LONGEST_REQUEST: Final = 10.0
#: Seconds to wait for the next bytes of a client.
CLIENT_PATIENCE: Final = 5.0
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
            self._server = _Server(host, port, dict(paths))
        except OSError as error:
            raise ConfigurationError(refusal(address, error)) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.2},
            name=f"delayline http {address}",
            daemon=True,
        )

    @property
    def address(self) -> str:
        """Where it listens, with the port that it has."""
        host, port = self._server.server_address[:2]
        name = host.decode() if isinstance(host, bytes) else str(host)
        return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Close the port and every connection."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    @property
    def paths(self) -> Sequence[str]:
        """The paths that it answers."""
        return sorted(self._server.paths)

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


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 2 * MOST_CONNECTIONS

    def __init__(self, host: str, port: int, paths: dict[str, Callable[[str], Response]]) -> None:
        self.paths = paths
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._open: dict[Any, float] = {}
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without HTTPServer's look at the host's name, which may ask a distant server."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as the library has it
        """Start a thread for the request, unless there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._open[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request)

    def _ended(self, request: Any) -> None:  # noqa: ANN401
        if self._open.pop(request, None) is not None:
            self._free.release()

    def service_actions(self) -> None:
        """Close connections that have lasted too long; called several times a second."""
        latest = time.monotonic() - LONGEST_REQUEST
        for request, began in self._open.copy().items():
            if began < latest:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Log that a request has failed: clients come and go."""
        del request
        error = sys.exception()
        emit(logger, logging.DEBUG, Event.HTTP_REQUEST_FAILED, "a request of %s failed: %s", client_address, error)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_PATIENCE
    server_version = "delayline"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        respond = self.server.paths.get(urlsplit(self.path).path)
        if respond is None:
            paths = ", ".join(sorted(self.server.paths))
            response = Response(f"not found; there are {paths}\n", HTTPStatus.NOT_FOUND)
        else:
            try:
                response = respond(self.headers.get("Accept", ""))
            except Exception as error:
                path, failed = urlsplit(self.path).path, Event.HTTP_REQUEST_FAILED
                emit(logger, logging.ERROR, failed, "The answer to %s failed: %s", path, error, exception=error)
                response = Response("failed; see the log\n", HTTPStatus.INTERNAL_SERVER_ERROR)
        body = response.body.encode()
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log requests at DEBUG, and not to standard error."""
        emit(logger, logging.DEBUG, Event.HTTP_REQUEST, format.replace("\n", " "), *args)
