"""Pending messages that handlers cancel and reschedule: with their sends, in order, or not at all."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.conftest import START, build, delayed
from tests.unit.test_pipeline import start

from delayline import ConfigurationError, Endpoint, InvalidMessage, MemoryTransport, Message, TransactionMode
from delayline.errors import InvalidDueTime
from delayline.testing.clock import settle
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from tests.unit.conftest import Scenario

    from delayline import MessageContext
    from delayline.testing.clock import ManualClock

HOUR = timedelta(hours=1)
#: Every transaction mode, and whether store and queues share transactions.
MODES = pytest.mark.parametrize(
    ("mode", "shared"),
    [
        *((mode, True) for mode in TransactionMode),
        *((mode, False) for mode in TransactionMode if mode is not TransactionMode.TRANSACTION_SCOPE),
    ],
    ids=lambda value: value.name if isinstance(value, TransactionMode) else "shared" if value else "apart",
)


async def receive(scenario: Scenario, *ids: str) -> None:
    await scenario.transport.dispatch([TransportOperation(Message(each, {}, b""), "sales") for each in ids])
    await settle()


async def waiting(scenario: Scenario) -> dict[str, float]:
    return {message.id: (message.due - START).total_seconds() / 3600 for message in await scenario.pending()}


@MODES
async def test_changes_happen_when_the_handler_has_succeeded(
    clock: ManualClock, mode: TransactionMode, shared: bool
) -> None:
    # Given two pending messages, and a handler that fails the first time
    scenario = build(clock, transaction_mode=mode, shared=shared)
    await scenario.put(delayed("cancelled", after=3600), delayed("moved", after=3600))
    before: list[dict[str, float]] = []

    async def act(message: Message, context: MessageContext) -> None:
        context.cancel("cancelled")
        await context.reschedule("moved", START + 5 * HOUR)
        context.cancel("never there")
        before.append(await waiting(scenario))
        if context.attempt == 1 and mode is not TransactionMode.NONE:
            raise RuntimeError("after the changes")

    await start(scenario, act)
    # When a message is handled
    await receive(scenario, "m")
    # Then the failed attempt has changed nothing, and the other has
    assert {tuple(each.items()) for each in before} == {(("cancelled", 1.0), ("moved", 1.0))}
    assert len(before) == (1 if mode is TransactionMode.NONE else 2)
    assert await waiting(scenario) == {"moved": 5}
    assert await scenario.transport.count("sales") == 0
    await scenario.endpoint.stop()


@MODES
async def test_sends_and_changes_keep_their_order(clock: ManualClock, mode: TransactionMode, shared: bool) -> None:
    # Given a pending message, and a handler that sends it anew and sends another that it cancels
    scenario = build(clock, transaction_mode=mode, shared=shared)
    await scenario.put(delayed("old", after=3600))

    async def act(message: Message, context: MessageContext) -> None:
        context.cancel("old")
        context.send("out", "", message_id="old", delay=2 * HOUR)
        context.send("out", "", message_id="new", delay=HOUR)
        context.send("out", "", message_id="now")
        context.cancel("new")
        context.send("out", "", message_id="now too")

    await start(scenario, act)
    await receive(scenario, "m")
    assert await waiting(scenario) == {"old": 2}
    assert sorted(await scenario.ids("out")) == ["now", "now too"]
    await scenario.endpoint.stop()


async def test_changes_of_many_handlers_are_completed_together(clock: ManualClock) -> None:
    # Given a pending message for each of 20 messages
    scenario = build(clock, transaction_mode=TransactionMode.TRANSACTION_SCOPE, concurrency=20)
    ids, opened = [f"m{number}" for number in range(20)], asyncio.Event()
    await scenario.put(*(delayed(f"for {each}", after=3600) for each in ids))

    async def act(message: Message, context: MessageContext) -> None:
        await opened.wait()
        context.cancel(f"for {message.id}")

    await start(scenario, act)
    await receive(scenario, *ids)
    # When all handlers end at once
    opened.set()
    await settle()
    # Then none waits, after few transactions
    assert await waiting(scenario) == {}
    assert len(scenario.faults.recorded("acknowledge")) <= 3
    await scenario.endpoint.stop()


async def test_what_cannot_be_changed_is_refused_by_the_call(clock: ManualClock) -> None:
    scenario = build(clock)
    refused: list[Exception] = []
    contexts: list[MessageContext] = []

    async def act(message: Message, context: MessageContext) -> None:
        contexts.append(context)
        calls: list[Any] = [
            lambda: context.cancel(""),
            lambda: context.cancel("x" * 251),
            lambda: context.reschedule("x", START.replace(tzinfo=None)),
        ]
        for call in calls:
            try:
                call()
            except (InvalidMessage, InvalidDueTime) as error:
                refused.append(error)

    await start(scenario, act)
    await receive(scenario, "m")
    assert [type(error) for error in refused] == [InvalidMessage, InvalidMessage, InvalidDueTime]
    with pytest.raises(InvalidMessage, match="has ended: this change would be lost"):
        contexts[0].cancel("x")
    await scenario.endpoint.stop()


async def test_an_endpoint_without_pending_messages_refuses_changes() -> None:
    endpoint, refused = Endpoint("sales", transport=MemoryTransport()), asyncio.Future[str]()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        try:
            context.cancel("x")
        except ConfigurationError as error:
            refused.set_result(str(error))

    async with endpoint:
        await endpoint.send("sales", "")
        assert "has no pending messages that a handler could change" in await asyncio.wait_for(refused, 20)
