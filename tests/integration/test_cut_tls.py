"""Servers that go away during the TLS handshake: an outage, and no fault of the URL's TLS options."""

from __future__ import annotations

import socket
import struct
import threading
from typing import TYPE_CHECKING

import pytest

from delayline import BackendUnavailable, RabbitMQTransport, SqlTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: What a server of MariaDB says first: version 11.8, with TLS (0x800) in its capabilities.
GREETING = (
    b"\x0a11.8.3-MariaDB\0"
    + struct.pack("<I8sxHBHH", 1, b"12345678", 0xFFFF, 45, 2, 0x81FF)
    + b"\x15"
    + bytes(10)
    + b"123456789012\0mysql_native_password\0"
)


def postgresql(client: socket.socket) -> None:
    """Agree to TLS, and take the beginning of the handshake."""
    client.recv(8)
    client.sendall(b"S")
    client.recv(4096)


def mariadb(client: socket.socket) -> None:
    client.sendall(struct.pack("<I", len(GREETING)) + GREETING)
    client.recv(36)
    client.recv(4096)


def rabbitmq(client: socket.socket) -> None:
    client.recv(4096)


@pytest.fixture
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """A server that begins with each client as `request.param` does, and closes the connection."""
    begin: Callable[[socket.socket], None] = request.param
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    client, _ = listening.accept()
                except OSError:
                    return
                with client:
                    client.settimeout(10)
                    begin(client)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize(
    ("port", "url"),
    [
        (postgresql, "postgresql://user:secret@127.0.0.1:{port}/orders?sslmode=require"),
        (mariadb, "mariadb://user:secret@127.0.0.1:{port}/orders"),
    ],
    indirect=["port"],
    ids=["postgresql", "mariadb"],
)
async def test_of_a_database_server(port: int, url: str) -> None:
    with pytest.raises(BackendUnavailable) as raised:
        await SqlTransport(url.format(port=port)).setup_infrastructure(["orders"])
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("port", [rabbitmq], indirect=True)
async def test_of_a_broker(port: int) -> None:
    transport = RabbitMQTransport(f"amqps://user:secret@127.0.0.1:{port}/?verify=verify_none")
    with pytest.raises(BackendUnavailable) as raised:
        await transport.setup_infrastructure(["orders"])
    assert "secret" not in str(raised.value)
