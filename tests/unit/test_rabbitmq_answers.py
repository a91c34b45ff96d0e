"""Whatever answers in place of the management API: an error of ours, and no other."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any, cast

import pytest

from delayline import BackendUnavailable
from delayline.errors import BackendUnusable, DelaylineError
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.admin.management_api import ManagementApi

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

ADDRESS = BrokerAddress()


@contextlib.asynccontextmanager
async def answering(answer: bytes, status: str = "200 OK", headers: str = "") -> AsyncIterator[str]:
    """Provide the URL of a web server that answers every request with this."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            length = f"Content-Length: {len(answer)}\r\nConnection: close\r\n{headers}\r\n"
            writer.write(f"HTTP/1.1 {status}\r\n{length}".encode() + answer)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


READS: list[Callable[[ManagementApi], Awaitable[Any]]] = [
    getattr(ManagementApi, name) for name in ("version", "feature_flags", "exchanges", "queues", "bindings", "policies")
]


@pytest.mark.parametrize(
    "answer",
    [None, 5, "text", [5], ["x"], [None], [[]], [{}], {"a": 5}, [{"name": "q"}], [{"name": [], "type": "fanout"}]],
    ids=repr,
)
async def test_an_answer_that_is_not_the_management_apis_is_an_error_of_ours(answer: object) -> None:
    """Given JSON of another shape, when the management API is read, then it is told to be none."""
    async with answering(json.dumps(answer).encode()) as url, ManagementApi(ADDRESS, url) as api:
        for read in READS:
            if (answer, read) == ({"a": 5}, cast("Any", ManagementApi.version)):
                continue  # which is unknown then
            with pytest.raises(BackendUnusable, match=rf"{url} is not a RabbitMQ management API: Switch it on"):
                await read(api)


@pytest.mark.parametrize(
    ("answer", "status", "headers", "kind"),
    [
        (b"<html>", "200 OK", "", BackendUnusable),
        (b"[" * 100_000, "200 OK", "", BackendUnusable),
        (b"\xff\xfe", "200 OK", "", BackendUnusable),
        (b"no gzip", "200 OK", "Content-Encoding: gzip\r\n", BackendUnavailable),
        (b"", "302 Found", "Location: http://[\r\n", BackendUnusable),
        (b"\xff", "503 Busy", "Content-Type: text/plain; charset=nonsense\r\n", BackendUnavailable),
        (b"", "999 What", "", BackendUnavailable),
    ],
)
async def test_answers_that_are_no_json_are_errors_of_ours(
    answer: bytes, status: str, headers: str, kind: type[Exception]
) -> None:
    """Given answers that cannot be read, when the management API is asked, then the error is ours."""
    async with answering(answer, status, headers) as url, ManagementApi(ADDRESS, url) as api:
        with pytest.raises(kind):
            await api.queues()


async def test_no_error_of_the_management_api_has_the_password_in_its_url() -> None:
    """Given a user in the URL, when the API refuses, fails or is not there, then the error has no password."""
    login = "http://admin:sesame@"
    for status in ("401 Unauthorized", "404 Not Found", "500 Oops", "418 Teapot", "200 OK"):
        async with answering(b"<html>", status) as url, ManagementApi(ADDRESS, login + url.partition("//")[2]) as api:
            with pytest.raises(DelaylineError) as refused:
                await api.queues()
        assert "sesame" not in str(refused.value)
        assert url in str(refused.value)
    async with ManagementApi(BrokerAddress.parse("amqp://h?management=http://admin:sesame@127.0.0.1:1")) as api:
        with pytest.raises(BackendUnavailable, match=r"no management API at http://127\.0\.0\.1:1: ") as gone:
            await api.queues()
    assert "sesame" not in str(gone.value)
