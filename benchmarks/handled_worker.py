"""What the `*_handled` and `*_steady` scenarios run in processes of their own.

`python -m benchmarks.handled_worker ACTION PEER URL SETTINGS`: `fill` stores messages, `send` sends them at a steady
rate, `work` prints "ready" and handles them until it is ended. URL is that of queues and store, or
both with a space between; SETTINGS is a JSON object. For every message the handler
appends 20 bytes to the file `BENCHMARK_HANDLED`: the message's number, and the time in microseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from delayline import Message

Settings = dict[str, Any]
#: A record has the message's number in so many digits, which its body begins with ...
NUMBER_DIGITS = 8
#: ... and its time, in microseconds, in so many: it starts again after 11 days.
DIGITS = 12
#: The number of the message that connects a sender before it counts.
FIRST = 10**NUMBER_DIGITS - 1
HEADERS = {f"Header.Number.{number}": f"value of header number {number}" for number in range(8)}
BATCH = 1000


class Records:
    """Appends a record of 20 bytes to a file for every message: any number of threads and processes at once."""

    def __init__(self, variable: str = "BENCHMARK_HANDLED") -> None:
        self._file = os.open(os.environ[variable], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, body: bytes) -> None:
        """Do a handler's work."""
        self._append(body, time.time_ns() // 1000)

    def expect(self, body: bytes, due: float) -> None:
        """Record when a message is due."""
        self._append(body, int(due * 1e6))

    def _append(self, body: bytes, microseconds: int) -> None:
        os.write(self._file, b"%b%0*d" % (body[:NUMBER_DIGITS], DIGITS, microseconds % 10**DIGITS))


def body_of(number: int) -> bytes:
    """Return a body of 256 bytes that begins with the message's number."""
    return b"%0*d" % (NUMBER_DIGITS, number) + b"b" * (256 - NUMBER_DIGITS)


def bodies(number: int) -> Iterator[list[bytes]]:
    """Return the bodies of so many messages, a thousand at a time."""
    for first in range(0, number, BATCH):
        yield [body_of(position) for position in range(first, min(number, first + BATCH))]


def due_of(settings: Settings) -> datetime | None:
    """Return the instant at which all messages are due, if they are delayed."""
    return None if settings["due"] is None else datetime.fromtimestamp(settings["due"], UTC)


def ready() -> None:
    """Print that the worker has started; the garbage collector leaves what there is alone."""
    gc.collect()
    gc.freeze()
    print("ready", flush=True)


async def forever() -> None:
    """Wait until the process is ended."""
    await asyncio.Event().wait()


def _options(url: str, settings: Settings) -> Settings:
    queues, _, store = url.partition(" ")
    options: Settings = settings.get("settings", {})
    if "inbox" in settings:
        return {"url": queues} | ({"inbox_url": store} if settings["inbox"] else {}) | options
    return {"url": queues} | ({"store_url": store} if store else {}) | options


def message_of(body: bytes) -> Message:
    """Return a message with eight headers."""
    from delayline import Message
    from delayline.message import encode_headers

    return Message.from_encoded(f"{time.time_ns()}-{body[:NUMBER_DIGITS].decode()}", encode_headers(HEADERS), body)


async def delayline_fill(url: str, settings: Settings) -> None:
    """Store messages for the due instant, or send them to the queue."""
    from benchmarks.common import NAME
    from delayline import DelayedMessage, SqlDelayedMessageStore, StoredDelivery
    from delayline.composition import endpoint_from
    from delayline.settings import Settings as Options
    from delayline.transport import TransportOperation

    due = due_of(settings)
    endpoint = endpoint_from(Options(endpoint=NAME, **_options(url, settings)))
    await endpoint.setup()
    async with endpoint:
        for batch in bodies(settings["number"]):
            if due is None:
                await endpoint.transport.dispatch([TransportOperation(message_of(body), NAME) for body in batch])
            else:
                assert isinstance(endpoint.delayed_delivery, StoredDelivery)
                assert isinstance(endpoint.delayed_delivery.store, SqlDelayedMessageStore)
                await endpoint.delayed_delivery.store.store_many(
                    [DelayedMessage(message_of(body), NAME, due) for body in batch]
                )


async def delayline_work(url: str, settings: Settings) -> None:
    """Handle with an endpoint."""
    from benchmarks.common import NAME
    from benchmarks.telemetry_kinds import watched
    from delayline import MessageContext
    from delayline.composition import endpoint_from
    from delayline.settings import Settings as Options

    endpoint, records = endpoint_from(Options(endpoint=NAME, **_options(url, settings))), Records()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        del context
        records.write(message.body)

    with watched(endpoint, settings.get("telemetry", "off")):
        async with endpoint:
            ready()
            await forever()


async def delayline_send(url: str, settings: Settings) -> None:
    """Send at a steady rate from an endpoint that does not poll."""
    from benchmarks.common import NAME, endpoint_on
    from delayline import Endpoint, SqlDelayedMessageStore, StoredDelivery
    from delayline.rabbitmq import RabbitMQTransport

    delay = timedelta(seconds=settings["delay"]) if settings["delay"] else None
    queues, _, store = url.partition(" ")
    stored = StoredDelivery(SqlDelayedMessageStore(store or queues), polling=False)
    sender = (
        Endpoint(NAME, transport=RabbitMQTransport(queues), delayed_delivery=stored)
        if store
        else endpoint_on(url, polling=False)
    )
    async with sender as endpoint:

        async def send(body: bytes) -> None:
            await endpoint.send(NAME, body, headers=HEADERS, delay=delay)

        await steadily(settings, send)


async def steadily(settings: Settings, send: Callable[[bytes], Awaitable[None]]) -> None:
    """Send so many messages a second, and record when each is due."""
    records, rate, delay = Records("BENCHMARK_SENT"), settings["rate"], settings["delay"] or 0.0
    await send(body_of(FIRST))  # connects
    ready()
    await asyncio.to_thread(sys.stdin.readline)
    started, sending = time.monotonic(), set[asyncio.Future[None]]()
    for number in range(settings["number"]):
        await asyncio.sleep(max(0.0, started + number / rate - time.monotonic()))
        body = body_of(number)
        records.expect(body, time.time() + delay)
        one = asyncio.ensure_future(send(body))
        sending.add(one)
        one.add_done_callback(sending.discard)
    await asyncio.gather(*sending)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(usage.ru_utime + usage.ru_stime, flush=True)


def main() -> None:
    """Do what the arguments say."""
    import uvloop

    from benchmarks import peers_postgresql, peers_rabbitmq

    action, peer, url, settings = sys.argv[1:]
    places = (sys.modules[__name__], peers_postgresql, peers_rabbitmq)
    name = f"{peer.replace('-', '_').lower()}_{action}"
    found = next(getattr(place, name) for place in places if hasattr(place, name))
    with contextlib.suppress(KeyboardInterrupt):
        if peer != "delayline":
            url = url.partition(" ")[0]
        run = uvloop.run if peer == "PgQueuer" else asyncio.run  # as `pgq run` does
        run(found(url, json.loads(settings)))


if __name__ == "__main__":
    main()
