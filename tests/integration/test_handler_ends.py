"""How transactions of handlers end that send nothing: the commit follows the statement that removes the message."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text
from tests.integration.test_handler_transactions import ROW, Shop, engine_at, orders

from delayline import Recoverability

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from delayline import Message, MessageContext

NO_RETRIES = Recoverability(immediate_retries=0, delayed_retries=0)
KINDS = ["def", "coroutine"]
TABLE = "CREATE TABLE orders (id VARCHAR(50) PRIMARY KEY)"
#: Rows that are refused at the commit, and not before.
REFUSED_LATE = """
CREATE TABLE orders (id VARCHAR(50) REFERENCES customers DEFERRABLE INITIALLY DEFERRED)
"""


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Provide the URL of a database."""
    kind = request.param
    return f"sqlite:///{tmp_path}/shop.db" if kind == "sqlite" else str(request.getfixturevalue(f"{kind}_url"))


def execute(url: str, *statements: str) -> None:
    engine = engine_at(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


def register(shop: Shop, kind: str, meanwhile: Callable[[], Any] = lambda: None) -> None:
    """Register a handler that writes a row, in its own transaction."""

    def handle(message: Message, context: MessageContext) -> None:
        shop.attempts += 1
        meanwhile()
        context.transaction().execute(text(ROW), {"id": message.id})

    async def handle_too(message: Message, context: MessageContext) -> None:
        shop.attempts += 1
        await asyncio.to_thread(meanwhile)
        connection = await context.transaction()
        await connection.execute(text(ROW), {"id": message.id})

    shop.endpoint.handler(handle if kind == "def" else handle_too)


@pytest.mark.parametrize("kind", KINDS)
async def test_rows_and_the_messages_end_commit_together(url: str, kind: str) -> None:
    """Given handlers that send nothing, when they have succeeded, then each message is gone, and its row there."""
    execute(url, TABLE)
    shop = Shop(url, concurrency=4)
    register(shop, kind)
    await shop.handled(20)
    assert (len(orders(url)), shop.attempts, shop.failed) == (20, 20, 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_message_that_has_left_its_queue_leaves_no_row(url: str, kind: str) -> None:
    """Given a message that is removed while it is handled, when the handler has succeeded, then its row is undone."""
    execute(url, TABLE)
    shop = Shop(url)
    register(shop, kind, lambda: execute(url, "DELETE FROM delayline_messages"))
    await shop.handled()
    assert (orders(url), shop.attempts, shop.failed) == ([], 1, 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_commit_that_is_refused_is_a_failure_of_the_message(postgresql_url: str, kind: str) -> None:
    """Given rows that the commit refuses, then the message is in the error queue with the reason, and no row there."""
    execute(postgresql_url, "CREATE TABLE customers (id VARCHAR(50) PRIMARY KEY)", REFUSED_LATE)
    shop, reasons = Shop(postgresql_url, recoverability=NO_RETRIES), list[str]()
    register(shop, kind)
    is_empty = shop.is_empty

    async def has_failed() -> bool:
        messages = await shop.transport.browse("error", 10)
        reasons[:] = [message.headers["NServiceBus.ExceptionInfo.Message"] for message in messages]
        return bool(reasons) and await is_empty()

    shop.is_empty = has_failed  # type: ignore[method-assign]
    await shop.handled()
    assert (orders(postgresql_url), shop.attempts, shop.failed) == ([], 1, 1)
    assert "violates foreign key constraint" in reasons[0]


async def test_a_row_is_undone_if_a_later_handler_fails(url: str) -> None:
    """Given two handlers of a message, when the second fails, then the row of the first is undone."""
    execute(url, TABLE)
    shop = Shop(url, recoverability=NO_RETRIES)
    register(shop, "def")

    @shop.endpoint.handler
    def fail(message: Message, context: MessageContext) -> None:
        raise ValueError(message.id)

    await shop.handled()
    assert (orders(url), shop.attempts, shop.failed) == ([], 1, 1)
