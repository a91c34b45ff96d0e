"""What Azurite never does, done between it and the clients: refusals, throttling, empty pages, requests that vanish."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from tests.servers.ports import free_port
from yarl import URL

if TYPE_CHECKING:
    from collections.abc import Mapping

NOT_FORWARDED: Final = frozenset({"host", "content-length", "transfer-encoding", "content-encoding", "connection"})

Answer = Callable[[web.Request], web.Response]


@dataclass
class Intervention:
    """Requests that match get this answer instead of Azurite's, so many times."""

    method: str
    path: str
    answer: Answer
    times: int = 1_000_000
    met: int = 0


@dataclass
class Proxy:
    """An endpoint for the three services of one account; enter it, then use `url`."""

    account_url: str
    requests: Counter[str] = field(default_factory=Counter)
    interventions: list[Intervention] = field(default_factory=list)
    _ports: dict[int, int] = field(default_factory=dict)
    _swallowed: str | None = None
    _spoken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        """The account's URL, through the proxy."""
        url = self.account_url
        for mine, theirs in self._ports.items():
            url = url.replace(f"127.0.0.1:{theirs}/", f"127.0.0.1:{mine}/")
        return url

    def instead(self, method: str, path: str, answer: Answer, times: int = 1_000_000) -> Intervention:
        """Answer requests whose path contains a match of `path`."""
        made = Intervention(method, path, answer, times)
        self.interventions.append(made)
        return made

    def swallow(self, path: str = "") -> None:
        """Take requests whose path contains a match of `path`, and answer nothing, until `speak`."""
        self._spoken.clear()
        self._swallowed = path

    def speak(self) -> None:
        """Close the connections whose requests were swallowed, and answer again."""
        self._swallowed = None
        self._spoken.set()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(auto_decompress=False)
        application = web.Application(client_max_size=8 * 1024 * 1024)
        application.router.add_route("*", "/{rest:.*}", self._handle)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        for theirs in re.findall(r"127\.0\.0\.1:(\d+)/", self.account_url):
            await web.TCPSite(self._runner, "127.0.0.1", mine := free_port()).start()
            self._ports[mine] = int(theirs)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.speak()
        await self._session.close()
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.requests[request.method] += 1
        if self._swallowed is not None and re.search(self._swallowed, request.path_qs):
            await self._spoken.wait()
            return vanishing(request)
        for one in self.interventions:
            if one.met < one.times and one.method == request.method and re.search(one.path, request.path_qs):
                one.met += 1
                return one.answer(request)
        return await self._forward(request)

    async def _forward(self, request: web.Request) -> web.Response:
        headers = CIMultiDict(one for one in request.headers.items() if one[0].lower() not in NOT_FORWARDED)
        path = re.sub(r"[?&]Next(PartitionKey|RowKey)=proxy", "", request.raw_path)
        port = self._ports[request.url.port or 0]
        async with self._session.request(
            request.method,
            URL(f"http://127.0.0.1:{port}{path}", encoded=True),
            data=await request.read(),
            headers=headers,
            skip_auto_headers=("Content-Type", "Accept", "User-Agent", "Accept-Encoding"),
        ) as response:
            kept = [(name, value) for name, value in response.headers.items() if name.lower() not in NOT_FORWARDED]
            return web.Response(status=response.status, body=await response.read(), headers=CIMultiDict(kept))


def refusal(status: int, code: str, headers: Mapping[str, str] | None = None) -> Answer:
    """Return an error as Azure Storage words it."""

    def answer(_: web.Request) -> web.Response:
        body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
        return web.Response(
            status=status,
            text=body,
            headers={"x-ms-error-code": code, **(headers or {})},
            content_type="application/xml",
        )

    return answer


def vanishing(request: web.Request) -> web.Response:
    """Close the connection without an answer."""
    if request.transport is not None:
        request.transport.close()
    raise asyncio.CancelledError


def empty_page(_: web.Request) -> web.Response:
    """Return a page of a table with nothing in it and a token for the next one."""
    return web.Response(
        text='{"value":[]}',
        content_type="application/json",
        headers={"x-ms-continuation-NextPartitionKey": "proxy", "x-ms-continuation-NextRowKey": "proxy"},
    )
