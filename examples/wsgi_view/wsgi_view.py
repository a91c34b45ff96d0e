"""A web view that sends a delayed message; Django and Flask views do the same. Needs the standard library only.

python wsgi_view.py serves one request, to itself, and shows what waits then.
"""

from collections.abc import Callable, Iterable
from datetime import timedelta
from http.client import HTTPConnection
from threading import Lock, Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import delayline
from delayline import Endpoint, StoredDelivery, SyncEndpoint

URL = "sqlite:///shop.db"
_lock = Lock()
_started: list[SyncEndpoint] = []


def shop() -> SyncEndpoint:
    """Return this process's sender; started by the first request, so after a server has forked its workers."""
    with _lock:
        if not _started:
            delivery = StoredDelivery(delayline.SqlDelayedMessageStore(URL), polling=False)
            transport = delayline.SqlTransport(URL)
            sync = SyncEndpoint(Endpoint("shop", transport=transport, delayed_delivery=delivery, send_only=True))
            sync.start()
            _started.append(sync)
        return _started[0]


def application(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
    """POST /orders/17 reminds billing of order 17 in 14 days."""
    number = environ["PATH_INFO"].rpartition("/")[2]
    reminder = shop().send("billing", {"order": number}, delay=timedelta(days=14), message_id=f"order-{number}")
    start_response("202 Accepted", [("Content-Type", "text/plain")])
    return [f"{reminder} waits\n".encode()]


class Quiet(WSGIRequestHandler):
    """Does not log to the terminal."""

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def main() -> None:
    with make_server("127.0.0.1", 0, application, handler_class=Quiet) as server:
        Thread(target=server.handle_request).start()
        connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
        connection.request("POST", "/orders/17")
        response = connection.getresponse()
        print(response.status, response.read().decode().strip())
        connection.close()
    for message in shop().run(shop().endpoint.delayed.pending()):
        print(f"{message.id} for {message.destination}: {message.message.text}")


if __name__ == "__main__":
    main()
