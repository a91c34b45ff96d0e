"""Mistakes that type checkers find: each line with `type: ignore` is an error, or the comment is one.

mypy says so in `make lint` (`warn_unused_ignores`), pyright likewise in `test_pyright.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from delayline import Endpoint, MemoryTransport, Message, MessageContext, SyncEndpoint

endpoint = Endpoint("shop", transport=MemoryTransport())
twin = SyncEndpoint(endpoint)


@dataclass
class Placed:
    number: int


@dataclass
class Paid:
    number: int


@endpoint.handles(Placed)  # type: ignore[arg-type]
async def of_another_type(order: Paid, context: MessageContext) -> None: ...


@endpoint.handles(Placed)  # type: ignore[arg-type]
async def without_a_context(order: Placed) -> None: ...


@endpoint.handles(Placed)  # type: ignore[arg-type]
async def the_other_way_round(context: MessageContext, order: Placed) -> None: ...


@endpoint.handles(Placed)  # type: ignore[type-var]
def that_returns_something(order: Placed, context: MessageContext) -> int:
    return order.number


@endpoint.handles  # type: ignore[arg-type]
async def bare_without_a_context(order: Placed) -> None: ...


@endpoint.handler  # type: ignore[arg-type]
async def every_message_of_a_type(order: Placed, context: MessageContext) -> None: ...


@endpoint.handler(timeout=timedelta(seconds=1))  # type: ignore[arg-type]
def every_message_as_a_number(number: int, context: MessageContext) -> None: ...


@twin.handles(Placed)  # type: ignore[arg-type]
def in_the_twin(order: Message, context: MessageContext) -> None: ...


def transactions(context: MessageContext) -> None:
    session: AsyncSession = context.transaction(Session)  # type: ignore[assignment]
    session.add(context.transaction(AsyncSession).info)  # type: ignore[attr-defined]
