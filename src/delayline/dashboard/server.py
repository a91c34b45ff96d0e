"""The HTTP server of `delayline dashboard`: uvicorn, with limits on the time that clients may take."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp

#: Seconds within which a request has to come, with its form, once its connection is made or its first bytes are there.
REQUEST_WITHIN: Final = 10.0
#: Seconds for which a connection is kept between two requests.
IDLE_FOR: Final = 15
#: Seconds for which a client may take nothing of its answer.
TAKES_WITHIN: Final = 30.0
#: Connections at once; for a further one the oldest that has sent no request yet is closed.
MOST_CONNECTIONS: Final = 200


class TimeLimit:
    """A time after which a connection is closed, unless what it waits for has happened."""

    def __init__(self, seconds: float, close: Callable[[], None]) -> None:
        self._seconds = seconds
        self._close = close
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Let the time run, if it does not already."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._close)

    def end(self) -> None:
        """Let it run no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class TimedConnection(H11Protocol):
    """A connection whose client has to send requests and take answers in time; uvicorn alone waits for ever."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request, in the place of another if there are too many connections."""
        super().connection_made(transport)
        self._request_limit = TimeLimit(REQUEST_WITHIN, self.abort)
        self._answer_limit = TimeLimit(TAKES_WITHIN, self.abort)
        self._made_at = self.loop.time()
        self._request_limit.begin()
        if len(self.connections) >= MOST_CONNECTIONS:
            silent = [other for other in self.connections if isinstance(other, TimedConnection) and other.cycle is None]
            min(silent, key=lambda other: other._made_at).abort()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request, or its end."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            self._request_limit.begin()
        else:
            self._request_limit.end()

    def pause_writing(self) -> None:
        """Wait until the client takes more."""
        super().pause_writing()
        self._answer_limit.begin()

    def resume_writing(self) -> None:
        """Go on with the answer."""
        super().resume_writing()
        self._answer_limit.end()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the waits."""
        self._request_limit.end()
        self._answer_limit.end()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close the connection at once."""
        self.connections.discard(self)
        self.transport.abort()


def server_of(application: ASGIApp) -> uvicorn.Server:
    """Return a server of the application, which logs only what is wrong."""
    config = uvicorn.Config(
        application,
        http=TimedConnection,
        access_log=False,  # paths hold ids of messages
        log_config=None,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=IDLE_FOR,
        timeout_graceful_shutdown=2,  # responses with live parts end only with the connection
        limit_concurrency=2 * MOST_CONNECTIONS,
    )
    return uvicorn.Server(config)


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens; the connections that it accepts send each part of an answer at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.create_server((host, port), family=family, backlog=128)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made
