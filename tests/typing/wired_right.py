"""What users write, and the types that checkers see in it: mypy in `make lint`, pyright in `test_pyright.py`."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypedDict, assert_type

import psycopg
import psycopg_pool
from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from delayline import Endpoint, MemoryTransport, Message, MessageContext, SyncEndpoint

endpoint = Endpoint("shop", transport=MemoryTransport())
twin = SyncEndpoint(endpoint)


@dataclass
class Placed:
    number: int


@dataclass
class Gift(Placed):
    greeting: str


class Note(TypedDict):
    text: str


class OwnSession(Session):
    pass


@endpoint.handles
async def bare(order: Placed, context: MessageContext) -> None: ...


@endpoint.handles(timeout=timedelta(seconds=5))
async def with_options(order: Placed, context: MessageContext) -> None: ...


@endpoint.handles(Placed)
async def typed(order: Placed, context: MessageContext) -> None: ...


@endpoint.handles(Gift)
async def of_its_base(order: Placed, context: MessageContext) -> None: ...


@endpoint.handles(Gift)
@endpoint.handles(Placed)
async def of_both(order: Placed | Gift, context: MessageContext) -> None: ...


@endpoint.handles(Note)
def of_a_dict(note: Note, context: MessageContext) -> None: ...


@endpoint.handles("Contoso.Note")
async def named(note: dict[str, str], context: MessageContext) -> None: ...


@endpoint.handler
async def every(message: Message, context: MessageContext) -> None: ...


@endpoint.handler(timeout=timedelta(seconds=5))
def every_in_a_thread(message: Message, context: MessageContext) -> None: ...


@twin.handles
def in_the_twin(order: Placed, context: MessageContext) -> None: ...


class Service:
    async def place(self, order: Placed, context: MessageContext) -> None: ...

    def __call__(self, order: Placed, context: MessageContext) -> None: ...


async def with_database(order: Placed, context: MessageContext, *, database: str) -> None: ...


endpoint.handles(Placed)(Service().place)
endpoint.handles(Placed)(Service())
endpoint.handles(Placed)(partial(with_database, database="shop"))
endpoint.handles(Service().place)

orders: Callable[[Placed, MessageContext], Coroutine[Any, Any, None]] = typed
orders = bare
messages: Callable[[Message, MessageContext], Coroutine[Any, Any, None]] = every
assert_type(in_the_twin, Callable[[Placed, MessageContext], None])


async def handled(context: MessageContext) -> None:
    await typed(Placed(17), context)
    in_the_twin(Placed(17), context)


def transactions(context: MessageContext, engine: Engine, sessions: sessionmaker[OwnSession]) -> None:
    assert_type(context.transaction(Session), Session)
    assert_type(context.transaction(OwnSession), OwnSession)
    assert_type(context.transaction(Connection), Connection)
    assert_type(context.transaction(engine), Connection)
    assert_type(context.transaction(sessions), OwnSession)
    assert_type(context.transaction(lambda: sqlite3.connect("shop.db")), sqlite3.Connection)
    default: Connection = context.transaction()
    default.close()


def of_psycopg(context: MessageContext, pool: psycopg_pool.ConnectionPool[psycopg.Connection[int]]) -> None:
    assert_type(context.transaction(pool), psycopg.Connection[int])


async def in_coroutines(
    context: MessageContext, engine: AsyncEngine, sessions: async_sessionmaker[AsyncSession]
) -> None:
    assert_type(context.transaction(AsyncSession), Awaitable[AsyncSession])
    assert_type(await context.transaction(AsyncConnection), AsyncConnection)
    assert_type(await context.transaction(engine), AsyncConnection)
    assert_type(await context.transaction(sessions), AsyncSession)
    assert_type(await context.transaction(), AsyncConnection)


async def of_asynchronous_psycopg(
    context: MessageContext, pool: psycopg_pool.AsyncConnectionPool[psycopg.AsyncConnection[int]]
) -> None:
    assert_type(await context.transaction(pool), psycopg.AsyncConnection[int])
