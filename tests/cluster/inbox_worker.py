"""The worker of endpoints with an inbox: `orders` writes a row and tells `books`, which writes another, each once."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import text

from delayline import Endpoint, Message, MessageContext, Recoverability, SqlInbox
from delayline.delayed.outbox import OutboxDelivery, OutboxTransport
from delayline.receiving.once import RecordedCompletion
from delayline.receiving.transactions import LoopTransaction
from delayline.sql import SqlOutbox
from delayline.sql.transactions import SqlTransaction

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delayline.spi import Transport

#: What a process may be killed before and after.
PLACES: Final[dict[str, tuple[type, str]]] = {
    "look": (SqlInbox, "recorded"),
    "record": (SqlInbox, "record"),
    "keep sends": (OutboxDelivery, "put"),
    "commit rows": (LoopTransaction, "commit"),
    "commit": (SqlTransaction, "_commit"),
    "acknowledge": (RecordedCompletion, "acknowledge"),
    "forward": (OutboxTransport, "dispatch"),
    "remove": (SqlOutbox, "remove_many"),
}


def die_at(place: str, at: str, call: int) -> None:
    """Let this process kill itself before or after the call of that number."""
    owner, name = PLACES[place]
    method: Callable[..., Awaitable[Any]] = getattr(owner, name)
    calls = 0

    @wraps(method)
    async def fatal(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - the method's
        nonlocal calls
        calls += 1
        is_the_call = calls == call
        if is_the_call and at == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = await method(*arguments, **named)
        if is_the_call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, fatal)


def endpoints(transport: Transport, rows: str, *, claims_first: bool) -> list[Endpoint]:
    """Return both endpoints. Of the orders, each second writes no row, and only tells `books`."""
    crashes = Recoverability(maximum_crashes=1000)  # the kills here are no message's fault
    orders, books = (
        Endpoint(
            name,
            transport=transport,
            inbox=SqlInbox(rows, claims_first=claims_first),
            recoverability=crashes,
            concurrency=8,
        )
        for name in ("orders", "books")
    )

    @orders.handler
    async def order(message: Message, context: MessageContext) -> None:
        number = int(message.id)
        if number % 2:
            connection = await context.transaction()
            await connection.execute(text("INSERT INTO effects VALUES ('orders', :number)"), {"number": number})
        context.send("books", message.body, message_id=message.id)

    @books.handler
    async def book(message: Message, context: MessageContext) -> None:
        connection = await context.transaction()
        await connection.execute(text("INSERT INTO effects VALUES ('books', :number)"), {"number": int(message.id)})

    return [orders, books]


async def serve_once(settings: dict[str, Any], transport: Transport) -> None:
    """Handle until SIGTERM, or until the step at which it dies."""
    terminated = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
    if "die" in settings:
        die_at(*settings["die"])
    orders, books = endpoints(transport, settings["rows"], claims_first=settings["claims_first"])
    async with orders, books:
        await terminated.wait()
