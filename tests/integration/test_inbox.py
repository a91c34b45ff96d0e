"""An inbox: what a handler does in its database, and what it sends, happens once, however often its message comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool
from tests.eventually import eventually_async
from tests.integration.test_callers import asynchronous
from tests.integration.test_outbox import begun, orders, url, with_orders

from delayline import (
    ConfigurationError,
    Endpoint,
    Event,
    Guarantee,
    HandlerRows,
    Headers,
    MemoryDelayedMessageStore,
    MemoryTransport,
    Message,
    MessageContext,
    Recoverability,
    SqlInbox,
    SqlOutbox,
    StoredDelivery,
    TransactionMode,
)
from delayline.inbox import RecordKey
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.sql import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["orders", "url"]
LATER = timedelta(days=1)
FAST = Recoverability(immediate_retries=2, delayed_retries=0)


def count(url: str, table: str = "orders") -> int:
    with begun(url) as connection:
        return int(connection.execute(text(f"SELECT COUNT(*) FROM {table}")).scalar() or 0)  # noqa: S608 - our own


class Billing:
    """An endpoint with an inbox, whose handler writes an order and tells another endpoint."""

    def __init__(self, url: str, transport: Any = None, *, kind: str = "coroutine", **parts: Any) -> None:  # noqa: ANN401
        self.transport = transport or MemoryTransport()
        self.endpoint = Endpoint(
            "billing",
            transport=self.transport,
            inbox=parts.pop("inbox", None) or SqlInbox(url),
            recoverability=FAST,
            **({"delayed_delivery": StoredDelivery(MemoryDelayedMessageStore())} | parts),
        )
        self.times = 0
        self.told: list[str] = []
        self.fails = 0
        self.handlers = {"coroutine": self._coroutine, "function": self._function}
        self._kind = kind
        self.books = Endpoint("books", transport=self.transport, delayed_delivery=parts.get("books"))
        self.books.handler(self._tell)

    async def _coroutine(self, message: Message, context: MessageContext) -> None:
        connection = await context.transaction()
        await connection.execute(text("INSERT INTO orders VALUES (17)"))
        self._end(message, context)

    def _function(self, message: Message, context: MessageContext) -> None:
        context.transaction().execute(text("INSERT INTO orders VALUES (17)"))
        self._end(message, context)

    def _end(self, message: Message, context: MessageContext) -> None:
        self.times += 1
        context.send("books", f"billed {message.body.decode()}")
        if self.times <= self.fails:
            raise ValueError("not yet")

    async def _tell(self, message: Message, context: MessageContext) -> None:
        del context
        self.told.append(message.body.decode())

    async def start(self, stack: contextlib.AsyncExitStack) -> Endpoint:
        if not self.endpoint.handlers:
            self.endpoint.handler(self.handlers[self._kind])
        await stack.enter_async_context(self.books)
        return await stack.enter_async_context(self.endpoint)


@pytest.fixture
async def stack() -> Any:  # noqa: ANN401 - a stack
    async with contextlib.AsyncExitStack() as stack:
        yield stack


@pytest.mark.parametrize("kind", ["coroutine", "function"])
async def test_a_message_that_comes_twice_is_handled_once(
    orders: str, kind: str, stack: contextlib.AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a message that was handled
    caplog.set_level(logging.INFO, "delayline")
    billing = Billing(orders, kind=kind)
    endpoint = await billing.start(stack)
    await endpoint.send("billing", "order", message_id="17")
    await eventually_async(lambda: billing.told == ["billed order"])
    # When a copy of it comes, and then another message
    await endpoint.send("billing", "order", message_id="17")
    await eventually_async(lambda: Event.HANDLED_BEFORE in {getattr(r, "event", None) for r in caplog.records})
    await endpoint.send("billing", "next", message_id="18")
    await eventually_async(lambda: len(billing.told) == 2)
    # Then it had no effect
    assert billing.told == ["billed order", "billed next"]
    assert count(orders) == 2
    assert count(orders, "delayline_inbox") == 2
    assert endpoint.guarantee is Guarantee.EXACTLY_ONCE
    assert endpoint.handler_rows is HandlerRows.YES


@pytest.mark.parametrize("kind", ["coroutine", "function"])
async def test_a_handler_that_fails_leaves_nothing(orders: str, kind: str, stack: contextlib.AsyncExitStack) -> None:
    billing = Billing(orders, kind=kind)
    billing.fails = 2
    endpoint = await billing.start(stack)
    await endpoint.send("billing", "order")
    await eventually_async(lambda: billing.told == ["billed order"])
    assert (billing.times, count(orders)) == (3, 1)


async def test_a_handler_without_rows_is_recorded_with_its_sends(orders: str, stack: contextlib.AsyncExitStack) -> None:
    billing = Billing(orders)

    async def tell(message: Message, context: MessageContext) -> None:
        billing.times += 1
        context.send("books", message.body)

    billing.endpoint.handler(tell)
    endpoint = await billing.start(stack)
    for number in range(100):
        await endpoint.send("billing", f"{number}", message_id=f"{number}")
    for number in range(0, 100, 10):
        await endpoint.send("billing", f"{number}", message_id=f"{number}")
    await endpoint.send("billing", "last")
    await eventually_async(lambda: "last" in billing.told)
    await eventually_async(lambda: len(billing.told) == 101)
    assert len(set(billing.told)) == 101
    assert count(orders, "delayline_inbox") == 101


async def test_two_copies_that_are_handled_at_the_same_time_have_one_effect(
    orders: str, stack: contextlib.AsyncExitStack
) -> None:
    # Given two processes that handle copies of a message at the same time
    if orders.startswith("sqlite"):
        pytest.skip("a file has one writer: the second handler waits for the first")
    transport, both = MemoryTransport(), asyncio.Barrier(2)
    first, second = Billing(orders, transport), Billing(orders, transport)
    for billing in (first, second):

        @billing.endpoint.handler
        async def insert(message: Message, context: MessageContext) -> None:
            connection = await context.transaction()
            await connection.execute(text("INSERT INTO orders VALUES (17)"))
            context.send("books", message.body)
            await both.wait()

    await stack.enter_async_context(first.endpoint)
    endpoint = await stack.enter_async_context(second.endpoint)
    await stack.enter_async_context(first.books)
    # When both end
    await endpoint.send("billing", "order", message_id="17")
    await endpoint.send("billing", "order", message_id="17")
    await eventually_async(lambda: first.told)
    await endpoint.send("books", "later")
    await eventually_async(lambda: "later" in first.told)
    # Then one has won
    assert first.told == ["order", "later"]
    assert count(orders) == 1


async def test_an_inbox_that_claims_first_handles_copies_one_after_the_other(
    orders: str, stack: contextlib.AsyncExitStack
) -> None:
    transport = MemoryTransport()
    first, second = (Billing(orders, transport, inbox=SqlInbox(orders, claims_first=True)) for _ in range(2))
    running = most = times = 0

    async def handle(message: Message, context: MessageContext) -> None:
        nonlocal running, most, times
        del message, context
        times += 1
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.1)
        running -= 1

    for billing in (first, second):
        billing.endpoint.handler(handle)
        await stack.enter_async_context(billing.endpoint)
    for _ in range(6):
        await first.endpoint.send("billing", "order", message_id="17")
    await eventually_async(lambda: _is_empty(transport, "billing"))
    assert (times, most) == (1, 1)


async def _is_empty(transport: MemoryTransport, queue: str) -> bool:
    return not await transport.count(queue)


async def test_the_same_id_from_two_senders_is_two_messages(orders: str, stack: contextlib.AsyncExitStack) -> None:
    billing = Billing(orders)
    endpoint = await billing.start(stack)
    await endpoint.send("billing", "one", message_id="17")
    await billing.books.send("billing", "two", message_id="17")
    await eventually_async(lambda: sorted(billing.told) == ["billed one", "billed two"])


@pytest.mark.parametrize("sender", ["x" * 5000, "nul\0", "", "emoji \U0001f600"])
async def test_hostile_senders_and_longest_ids(orders: str, sender: str, stack: contextlib.AsyncExitStack) -> None:
    billing = Billing(orders)
    endpoint = await billing.start(stack)
    for _ in range(2):
        await endpoint.send(
            "billing", "order", message_id="\u00e9" * 250, headers={Headers.ORIGINATING_ENDPOINT: sender}
        )
    await endpoint.send("billing", "next")
    await eventually_async(lambda: _is_empty(billing.transport, "billing"))
    await eventually_async(lambda: {"billed next", "billed order"} <= set(billing.told))
    await eventually_async(lambda: _is_empty(billing.transport, "books"))
    assert sorted(billing.told) == ["billed next", "billed order"]


async def test_delayed_sends_of_handlers_reach_a_delivery_elsewhere(
    orders: str, stack: contextlib.AsyncExitStack
) -> None:
    billing = Billing(orders)

    @billing.endpoint.handler
    async def remind(message: Message, context: MessageContext) -> None:
        del message
        context.send("books", "reminder", delay=LATER, message_id="reminder-17")

    endpoint = await billing.start(stack)
    await endpoint.send("billing", "order")
    await eventually_async(endpoint.delayed.pending)
    [waiting] = await endpoint.delayed.pending()
    assert waiting.id == "reminder-17"


async def test_a_store_beside_the_inbox_takes_part(orders: str, stack: contextlib.AsyncExitStack) -> None:
    # Given a store in the database of the inbox, with a reminder
    billing = Billing(orders, delayed_delivery=StoredDelivery(SqlDelayedMessageStore(orders)))
    failed = False

    @billing.endpoint.handler
    async def paid(message: Message, context: MessageContext) -> None:
        nonlocal failed
        del message
        context.cancel("reminder-17")
        context.send("books", "receipt", delay=LATER, message_id="receipt-17")
        if not failed:
            failed = True
            raise ValueError("not yet")

    endpoint = await billing.start(stack)
    await endpoint.send("books", "reminder", delay=LATER, message_id="reminder-17")
    # When a handler cancels it and sends another
    await endpoint.send("billing", "paid")

    # Then both happen together
    async def has_receipt_only() -> bool:
        return [waiting.id for waiting in await endpoint.delayed.pending()] == ["receipt-17"]

    await eventually_async(has_receipt_only)


async def test_a_change_of_a_message_that_waits_elsewhere_is_refused(
    orders: str, stack: contextlib.AsyncExitStack
) -> None:
    billing, errors = Billing(orders), []

    @billing.endpoint.handler
    async def paid(message: Message, context: MessageContext) -> None:
        del message
        try:
            context.cancel("reminder-17")
        except ConfigurationError as error:
            errors.append(str(error))

    endpoint = await billing.start(stack)
    await endpoint.send("billing", "paid")
    await eventually_async(lambda: errors)
    assert "with an inbox, in its database" in errors[0]


@pytest.mark.parametrize("kind", ["coroutine", "function"])
async def test_a_record_in_a_transaction_of_the_handlers_own(
    orders: str, kind: str, stack: contextlib.AsyncExitStack
) -> None:
    # Given a handler that commits its transaction itself
    billing, firsts = Billing(orders, outbox=SqlOutbox(orders)), []

    async def coroutine(message: Message, context: MessageContext) -> None:
        engine = create_async_engine(asynchronous(orders), poolclass=NullPool)
        async with engine.begin() as connection:
            firsts.append(await context.once(connection))
            if firsts[-1]:
                await connection.execute(text("INSERT INTO orders VALUES (17)"))
                await billing.endpoint.send("books", message.body, transaction=connection)

    def function(message: Message, context: MessageContext) -> None:
        del message
        with begun(orders) as connection:
            firsts.append(context.once(connection))
            if firsts[-1]:
                connection.execute(text("INSERT INTO orders VALUES (17)"))

    billing.endpoint.handler(coroutine if kind == "coroutine" else function)
    # And a crash after its commit: the inbox does not find the record before the second
    inbox: Any = billing.endpoint.inbox
    looks, recorded = 0, inbox.recorded

    async def finds_nothing(keys: object) -> object:
        nonlocal looks
        looks += 1
        return set() if looks <= 2 else await recorded(keys)

    inbox.recorded = finds_nothing
    endpoint = await billing.start(stack)
    for _ in range(3):
        await endpoint.send("billing", "order", message_id="17")
    await eventually_async(lambda: _is_empty(billing.transport, "billing"))
    assert firsts.count(True) == 1
    assert False in firsts
    assert count(orders) == 1
    if kind == "coroutine":
        await eventually_async(lambda: billing.told == ["order"])


async def test_sends_through_the_context_of_a_handler_that_records_itself_are_refused(
    orders: str, stack: contextlib.AsyncExitStack
) -> None:
    billing, errors = Billing(orders), []

    @billing.endpoint.handler
    def record(message: Message, context: MessageContext) -> None:
        del message
        with begun(orders) as connection:
            context.once(connection)
            try:
                context.send("books", "lost")
            except ConfigurationError as error:
                errors.append(str(error))

    endpoint = await billing.start(stack)
    await endpoint.send("billing", "order")
    await eventually_async(lambda: errors)
    assert "endpoint.send(..., transaction=connection)" in errors[0]


async def test_records_are_removed_when_their_time_is_over(orders: str, stack: contextlib.AsyncExitStack) -> None:
    # Given records that are kept for a second, of an endpoint that is gone too
    gone = Billing(orders, inbox=SqlInbox(orders, window=timedelta(seconds=1)))
    inbox = SqlInbox(orders, window=timedelta(seconds=1))
    billing = Billing(orders, inbox=inbox)
    async with contextlib.AsyncExitStack() as others:
        endpoint = await gone.start(others)
        await endpoint.send("billing", "gone")
        await eventually_async(lambda: gone.told)
    with begun(orders) as connection:
        connection.execute(text("UPDATE delayline_inbox SET endpoint = 'gone'"))
    endpoint = await billing.start(stack)
    await endpoint.send("billing", "order")
    await eventually_async(lambda: billing.told)
    # When that is over
    removed = 0

    async def all_removed() -> bool:
        nonlocal removed
        removed += await inbox.remove_old_records()
        return removed == 2

    # Then they are removed
    await eventually_async(all_removed)
    assert count(orders, "delayline_inbox") == 0


async def test_many_old_records_are_removed_in_parts(orders: str, stack: contextlib.AsyncExitStack) -> None:
    inbox = SqlInbox(orders, window=timedelta(seconds=1))
    await Billing(orders, inbox=inbox).start(stack)
    await inbox.record([RecordKey(f"{number}", "shop") for number in range(2500)])
    removed = 0

    async def all_removed() -> bool:
        nonlocal removed
        removed += await inbox.remove_old_records()
        return removed == 2500

    await eventually_async(all_removed)


@pytest.mark.parametrize(
    ("mode", "allowed"), [(TransactionMode.RECEIVE_ONLY, True), (None, True), (TransactionMode.NONE, False)]
)
def test_modes(tmp_path: Path, mode: TransactionMode | None, *, allowed: bool) -> None:
    with contextlib.nullcontext() if allowed else pytest.raises(ConfigurationError, match="leave transaction_mode out"):
        inbox = SqlInbox(f"sqlite:///{tmp_path / 'shop.db'}")
        endpoint = Endpoint("billing", transport=MemoryTransport(), inbox=inbox, transaction_mode=mode)
        assert endpoint.transaction_mode is TransactionMode.RECEIVE_ONLY


def test_an_outbox_elsewhere_is_refused(tmp_path: Path) -> None:
    inbox, outbox = SqlInbox(f"sqlite:///{tmp_path / 'one.db'}"), SqlOutbox(f"sqlite:///{tmp_path / 'two.db'}")
    with pytest.raises(ConfigurationError, match="leave outbox= out"):
        Endpoint("billing", transport=MemoryTransport(), inbox=inbox, outbox=outbox)


TRANSPORTS: dict[str, Callable[[pytest.FixtureRequest, Path], tuple[Any, Any]]] = {
    "rabbitmq": lambda request, _: (
        RabbitMQTransport(request.getfixturevalue("rabbitmq_url")),
        DelayLevelDelivery(),
    ),
    "two databases": lambda _, path: (
        SqlTransport(f"sqlite:///{path / 'queues.db'}"),
        StoredDelivery(SqlDelayedMessageStore(f"sqlite:///{path / 'queues.db'}")),
    ),
}


@pytest.mark.parametrize("queues", TRANSPORTS)
async def test_queues_elsewhere(
    postgresql_url: str, queues: str, request: pytest.FixtureRequest, tmp_path: Path, stack: contextlib.AsyncExitStack
) -> None:
    with_orders(postgresql_url)
    transport, delivery = TRANSPORTS[queues](request, tmp_path)
    billing = Billing(postgresql_url, transport, delayed_delivery=delivery)
    endpoint = await billing.start(stack)
    for _ in range(2):
        for number in range(30):
            await endpoint.send("billing", f"{number}", message_id=f"{number}")
    await endpoint.send("billing", "soon", delay=timedelta(seconds=1))
    await eventually_async(lambda: len(billing.told) >= 31)
    await eventually_async(lambda: _is_empty(transport, "billing"))
    assert sorted(billing.told) == sorted([*(f"billed {number}" for number in range(30)), "billed soon"])
    assert count(postgresql_url) == 31
