"""Requests over real queues: replies reach the process that asked, and its queue goes with it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.eventually import eventually_async

from delayline import Endpoint, MessageContext, message_type
from delayline.clock import SystemClock
from delayline.requests import REMOVED_AFTER

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

LONG = timedelta(seconds=100)
PLACES = ["sqlite", "postgresql", "mariadb", "conventional", "direct", "azure"]
#: Asks a first time, and then hangs with its queue.
ASKS = """
    import asyncio, sys
    from datetime import timedelta
    from delayline import Endpoint

    async def main():
        async with Endpoint("shop", url=sys.argv[1], send_only=True) as shop:
            reply = await shop.request("pricing", {"article": "abc"}, timeout=timedelta(seconds=100))
            print(reply.text, flush=True)
            await asyncio.Event().wait()

    asyncio.run(main())
"""


@message_type("Quote")
@dataclass
class Quote:
    article: str


@message_type("Price")
@dataclass
class Price:
    cents: int


@pytest.fixture(params=PLACES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "sqlite":
            return f"sqlite:///{tmp_path / 'queues.db'}"
        case "conventional" | "direct" as topology:
            return f"{request.getfixturevalue('rabbitmq_url')}?topology={topology}"
        case "azure":
            return str(request.getfixturevalue("azure_url"))
        case product:
            return str(request.getfixturevalue(f"{product}_url"))


class Later(SystemClock):
    """A clock that is ahead of the machine's."""

    def now(self) -> datetime:
        """Return the time some minutes later."""
        return super().now() + 2 * REMOVED_AFTER


def pricing_at(url: str, **settings: Any) -> Endpoint:  # noqa: ANN401 - of Endpoint
    pricing = Endpoint("pricing", url=url, **settings)

    @pricing.handler
    async def answer(message: Any, context: MessageContext) -> None:  # noqa: ANN401
        context.reply(Price(len(message.json()["article"])))

    return pricing


async def reply_queues(endpoint: Endpoint) -> list[str]:
    return [name for name in await endpoint.transport.queues() if "replies" in name]  # type: ignore[attr-defined]


async def test_each_process_gets_its_own_replies(url: str) -> None:
    # Given two processes of one endpoint
    first, second = (Endpoint("shop", url=url, send_only=True) for _ in range(2))
    async with pricing_at(url), first, second:
        # When both ask at once
        asked = [
            asked_by.request("pricing", Quote("x" * number), timeout=LONG, reply_type=Price)
            for number in range(10)
            for asked_by in (first, second)
        ]
        # Then each has the replies to its requests
        assert await asyncio.gather(*asked) == [Price(number) for number in range(10) for _ in range(2)]


async def test_a_queue_is_gone_after_the_stop(url: str) -> None:
    shop = Endpoint("shop", url=url, send_only=True)
    async with pricing_at(url) as pricing:
        async with shop:
            reply = await shop.request("pricing", Quote("abc"), timeout=LONG)
            assert reply.json() == {"cents": 3}
            queue = shop._requests._queue

            assert await pricing.transport.has_queue(queue)  # type: ignore[attr-defined]

        async def is_gone() -> bool:
            return not await pricing.transport.has_queue(queue)  # type: ignore[attr-defined]

        await eventually_async(is_gone)


@pytest.mark.parametrize("url", ["sqlite", "postgresql", "mariadb"], indirect=True)
async def test_the_queue_of_a_killed_process_is_removed_by_another(url: str) -> None:
    async with pricing_at(url) as pricing:
        # Given a process that was killed while it had a queue for replies, and one that has its own
        script = [sys.executable, "-c", textwrap.dedent(ASKS), url]
        processes = [
            subprocess.Popen(script, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220 - at once
            for _ in range(2)
        ]
        try:
            for process in processes:
                assert process.stdout is not None
                assert await asyncio.to_thread(process.stdout.readline) == '{"cents":3}\n'
            assert len(await reply_queues(pricing)) == 2
            processes[0].kill()
            processes[0].wait(100)
            # When a third asks ten minutes later
            shop = Endpoint("shop", url=url, send_only=True, clock=Later())
            async with shop:
                await shop.request("pricing", Quote("abc"), timeout=LONG)
                # Then one queue is gone, and that of the process that runs is there
                left = [queue for queue in await reply_queues(pricing) if queue != shop._requests._queue]
                assert len(left) == 1
                [state] = await pricing.transport.queue_states(left[:1])  # type: ignore[attr-defined]
                assert state.received
        finally:
            for process in processes:
                process.kill()
                process.communicate(timeout=100)
