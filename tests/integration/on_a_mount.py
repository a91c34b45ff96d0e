"""Runs in a separate mount namespace: an endpoint whose disk is full or read only. Prints the results as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from delayline import DelaylineError, Endpoint, MemoryTransport, Recoverability, SqlInbox, StoredDelivery
from delayline.errors import StorageFull
from delayline.events import Event
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.testing import Signals

if TYPE_CHECKING:
    from delayline import Message, MessageContext

BODY = bytes(20_000)


def endpoint_in(folder: Path) -> Endpoint:
    url = f"sqlite:///{folder}/delayline.db"
    return Endpoint("orders", transport=SqlTransport(url), delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url)))


async def full(folder: Path) -> dict[str, object]:
    """Send until the disk is full, let the pending messages fall due meanwhile, free space, and see what arrives."""
    ballast = folder / "ballast"
    ballast.write_bytes(bytes(5_000_000))
    endpoint, handled = endpoint_in(folder), list[str]()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled.append(message.id)

    kept: list[str] = []
    error = ""
    due = datetime.now(UTC) + timedelta(seconds=1.5)
    with Signals() as signals:
        async with endpoint:
            try:
                while True:
                    kept.append(await endpoint.send("orders", BODY, deliver_at=due))
            except StorageFull as full:
                error = str(full)
            await signals.wait_for(Event.DISPATCH_FAILED)
            failed_while_full = not handled
            ballast.unlink()
            async with asyncio.timeout(20):
                await signals.wait_for(Event.HANDLED, len(kept), timeout=20)
    return {"kept": sorted(kept), "handled": sorted(handled), "error": error, "failed_while_full": failed_while_full}


async def inbox(folder: Path) -> dict[str, object]:
    """Let the disk of an inbox be full while messages are handled, free space, and see what has happened once."""
    transport, told = MemoryTransport(), list[str]()
    inbox = SqlInbox(f"sqlite:///{folder}/rows.db")
    no_retries = Recoverability(immediate_retries=0, delayed_retries=0)
    orders = Endpoint("orders", transport=transport, inbox=inbox, recoverability=no_retries)
    books = Endpoint("books", transport=transport)

    @orders.handler
    async def order(message: Message, context: MessageContext) -> None:
        context.send("books", BODY, message_id=message.id)

    @books.handler
    async def note(message: Message, context: MessageContext) -> None:
        told.append(message.id)

    async with books, orders:
        ballast = folder / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with Signals() as signals:
            for number in range(20):
                await orders.send("orders", b"", message_id=f"{number:02}")
            await signals.wait_for(Event.RECEIVE_FAILED)
            told_while_full = len(told)
            ballast.unlink()
            async with asyncio.timeout(40):
                while len(told) < 20:  # noqa: ASYNC110 - the handler's list
                    await asyncio.sleep(0.05)
        failed = await transport.count("error")
    return {"told": sorted(told), "told_while_full": told_while_full, "failed": failed}


async def start(folder: Path) -> dict[str, object]:
    """Try to start an endpoint."""
    with contextlib.suppress(asyncio.CancelledError):
        try:
            async with endpoint_in(folder):
                return {"error": ""}
        except DelaylineError as error:
            return {"error": str(error), "type": type(error).__name__}
    return {}


if __name__ == "__main__":
    scenario = {"full": full, "inbox": inbox, "start": start}[sys.argv[1]]
    print(json.dumps(asyncio.run(scenario(Path(sys.argv[2])))))  # noqa: T201 - the answer
