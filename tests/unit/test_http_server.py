"""The HTTP server for metrics and probes: what it answers, and what it refuses."""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from delayline import ConfigurationError
from delayline.telemetry import http_server
from delayline.telemetry.http_server import MOST_CONNECTIONS, HttpServer, Response, parse_address

if TYPE_CHECKING:
    from collections.abc import Iterator


def fail(accept: str) -> Response:
    raise RuntimeError(f"broken for {accept}")


@pytest.fixture
def server() -> Iterator[HttpServer]:
    paths = {"/metrics": lambda accept: Response(f"accepts {accept} ü\n"), "/fails": fail}
    with HttpServer("127.0.0.1:0", paths) as running:
        yield running


def request(server: HttpServer, path: str, method: str = "GET") -> tuple[int, str, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(*parse_address(server.address), timeout=5)
    connection.request(method, path, headers={"Accept": "text/plain"})
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, body, response


def test_a_path_is_answered_with_its_text(server: HttpServer) -> None:
    status, body, response = request(server, "/metrics?x=1")
    assert (status, body) == (200, "accepts text/plain ü\n")
    assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert response.headers["Cache-Control"] == "no-store"
    assert "Python" not in response.headers["Server"]


def test_head_has_no_body_and_other_methods_are_refused(server: HttpServer) -> None:
    assert request(server, "/metrics", "HEAD")[:2] == (200, "")
    assert request(server, "/metrics", "POST")[0] == 501


def test_an_unknown_path_is_not_found_and_echoes_nothing(server: HttpServer) -> None:
    status, body, _ = request(server, "/<script>alert(1)</script>")
    assert (status, body) == (404, "not found; there are /fails, /metrics\n")


def test_a_failed_response_does_not_contain_the_error(server: HttpServer, caplog: pytest.LogCaptureFixture) -> None:
    status, body, _ = request(server, "/fails")
    assert (status, body) == (500, "failed; see the log\n")
    assert "broken for text/plain" in caplog.text


def test_idle_clients_are_dropped_and_block_no_other(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given as many clients that send nothing as are served at once, when they have lasted too long, others get in."""
    monkeypatch.setattr(http_server, "REQUEST_WITHIN", 0.1)
    idle = [socket.create_connection(parse_address(server.address)) for _ in range(MOST_CONNECTIONS)]
    for one in idle:
        one.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert one.recv(1) == b""  # closed by the server
        one.close()
    monkeypatch.setattr(http_server, "REQUEST_WITHIN", 10.0)
    assert request(server, "/metrics")[0] == 200


def test_more_silent_clients_than_may_be_make_no_request_fail(server: HttpServer) -> None:
    """Given 500 clients that end no request, when others come, then each is answered, and the oldest close."""
    address = parse_address(server.address)
    silent = [socket.create_connection(address) for _ in range(500)]
    for client in silent:
        with contextlib.suppress(OSError):  # closed already
            client.sendall(b"GET /metrics HTTP/1.1\r\nX: a")
    assert [request(server, "/metrics")[0] for _ in range(20)] == [200] * 20
    silent[0].settimeout(5)
    with contextlib.suppress(ConnectionResetError):
        assert silent[0].recv(1) == b""
    for client in silent:
        client.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])  # noqa: S104 - it is warned of
def test_an_address_of_every_interface_is_warned_of(host: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "delayline")
    HttpServer(f"{host}:0", {"/live": lambda _: Response("x")}).stop()
    [record] = caplog.records
    assert "whoever reaches it reads /live" in record.getMessage()


@pytest.mark.parametrize("raw", [b"\x00\xff\r\n\r\n", b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n", b"GET\r\n\r\n"])
def test_requests_that_are_not_http_are_refused(server: HttpServer, raw: bytes) -> None:
    with socket.create_connection(parse_address(server.address)) as client:
        client.settimeout(5)
        client.sendall(raw)
        answer = client.recv(1000)
    assert b"Traceback" not in answer
    assert request(server, "/metrics")[0] == 200


def test_a_port_in_use_is_an_error_with_a_remedy(server: HttpServer) -> None:
    with pytest.raises(ConfigurationError, match=f"{server.address} is in use by another process: choose another port"):
        HttpServer(server.address, {})


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot listen on 192\.0\.2\.1:9464"):
        HttpServer("192.0.2.1:9464", {})


@pytest.mark.parametrize("address", ["", "9464", "127.0.0.1", "host:70000", "host:x", "a@b:1", "h:1/path", "[::1"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match="HOST:PORT"):
        parse_address(address)


def test_addresses_of_ipv6_have_brackets() -> None:
    assert parse_address("[::1]:9464") == ("::1", 9464)
    with HttpServer("[::1]:0", {"/metrics": lambda _: Response("x")}) as server:
        assert server.address.startswith("[::1]:")
        assert request(server, "/metrics")[1] == "x"


def test_stopping_ends_the_thread_and_frees_the_port(server: HttpServer) -> None:
    before = threading.active_count()
    other = HttpServer("127.0.0.1:0", {})
    other.start()
    other.stop()
    assert threading.active_count() == before
    HttpServer(other.address, {}).stop()
