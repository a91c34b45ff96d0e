"""Messages of types that a process has no handler for: they wait for one that has."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from tests.unit.conftest import build

from delayline import ConfigurationError, Headers, Message, MessageContext, Recoverability, message_type
from delayline.message import to_wire_time
from delayline.receiving.recoverability import MoveToErrors, RetryLater
from delayline.testing.clock import settle
from delayline.transaction import TransactionMode
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.conftest import Scenario

    from delayline.testing.clock import ManualClock

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MINUTES = timedelta(minutes=1)


@message_type("Shop.OrderPlaced", formerly=["orders.OrderPlaced", "Shop.Order"])
@dataclass
class OrderPlaced:
    order_id: str


async def arrives(scenario: Scenario, type_name: str) -> None:
    message = Message("m1", {Headers.ENCLOSED_MESSAGE_TYPES: type_name}, b'{"order_id":"17"}')
    await scenario.transport.dispatch([TransportOperation(message, "sales")])
    await settle()


@pytest.mark.parametrize("type_name", ["Shop.OrderPaid", "Shop." + "X" * 20_000])
async def test_a_message_of_an_unknown_type_waits_ten_minutes_in_all(clock: ManualClock, type_name: str) -> None:
    # Given an endpoint with a handler of another type
    scenario = build(clock)
    scenario.endpoint.handles(OrderPlaced)(lambda order, context: None)
    async with scenario.endpoint:
        # When a message comes, and ten minutes go by
        await arrives(scenario, type_name)
        [waiting] = await scenario.pending()
        assert waiting.due - clock.now() == timedelta(seconds=1)
        while (await scenario.pending()) and clock.now() < waiting.due + 9 * MINUTES:
            await clock.advance(1)
        assert await scenario.ids("error") == []
        for _ in range(90):
            await clock.advance(1)
        # Then it is in the error queue, with the reason, and what it waited for is no header of a retry
        failed = await scenario.only("error")
    assert "and no handler takes that" in failed.headers[Headers.EXCEPTION_MESSAGE]
    assert (failed.id, failed.body) == ("m1", b'{"order_id":"17"}')
    assert await scenario.pending() == []


async def test_a_process_that_knows_the_type_handles_it_with_all_its_retries(clock: ManualClock) -> None:
    # Given a message that waits as an older process did not know its type
    scenario, attempts = build(clock), []
    scenario.endpoint.recoverability = Recoverability(immediate_retries=0, delayed_retries=1)

    @scenario.endpoint.handles(OrderPlaced)
    async def fail(order: OrderPlaced, context: MessageContext) -> None:
        attempts.append(context.message.id)
        raise ValueError(order.order_id)

    since = to_wire_time(clock.now())
    async with scenario.endpoint:
        # When it comes to a process that does, whose handler fails
        names = {Headers.ENCLOSED_MESSAGE_TYPES: "Shop.OrderPlaced", Headers.UNKNOWN_SINCE: since, Headers.RETRIES: "0"}
        await scenario.transport.dispatch([TransportOperation(Message("m1", names, b'{"order_id":"17"}'), "sales")])
        await settle()
        await clock.advance(11)
        # Then it is retried as any other
        failed = await scenario.only("error")
    assert attempts == ["m1", "m1"]
    assert failed.headers[Headers.EXCEPTION_MESSAGE] == "17"


@pytest.mark.parametrize("type_name", ["Shop.OrderPlaced", "orders.OrderPlaced", "Shop.Order, Shop, Version=1.0.0.0"])
async def test_a_handler_takes_messages_under_former_names(clock: ManualClock, type_name: str) -> None:
    scenario, seen = build(clock), []

    @scenario.endpoint.handles(OrderPlaced)
    async def place(order: OrderPlaced, context: MessageContext) -> None:
        seen.append(order)

    assert scenario.endpoint.handlers == (place,)
    async with scenario.endpoint:
        await arrives(scenario, type_name)
    assert seen == [OrderPlaced("17")]


def test_two_handlers_of_a_former_name_are_refused(clock: ManualClock) -> None:
    scenario = build(clock)
    scenario.endpoint.handles("Shop.Order")(lambda order, context: None)
    with pytest.raises(ConfigurationError, match=r"'Shop\.Order' have the handler"):
        scenario.endpoint.handles(OrderPlaced)(lambda order, context: None)


@pytest.mark.parametrize(
    "settings", [{"unknown_type_wait": timedelta(0)}, {"transaction_mode": TransactionMode.NONE}], ids=["zero", "NONE"]
)
async def test_it_goes_to_the_error_queue_at_once_where_it_may_not_wait(
    clock: ManualClock, settings: dict[str, object]
) -> None:
    mode = settings.pop("transaction_mode", None)
    recoverability = Recoverability(**settings)  # type: ignore[arg-type]
    scenario = build(clock, recoverability=recoverability, transaction_mode=mode)
    scenario.endpoint.handles(OrderPlaced)(lambda order, context: None)
    async with scenario.endpoint:
        await arrives(scenario, "Shop.OrderPaid")
        failed = await scenario.only("error")
    assert "and no handler takes that" in failed.headers[Headers.EXCEPTION_MESSAGE]


@pytest.mark.parametrize(("waited", "delay"), [(0, 1), (1, 1), (4, 4), (64, 60), (590, 10), (599, 1)])
def test_it_waits_as_long_as_it_has_waited_up_to_a_minute(waited: int, delay: int) -> None:
    since = {Headers.UNKNOWN_SINCE: to_wire_time(NOW - timedelta(seconds=waited))} if waited else {}
    decision = Recoverability().await_type(since | {Headers.RETRIES: "2"}, NOW)
    assert isinstance(decision, RetryLater)
    assert decision.delay == timedelta(seconds=delay)
    assert decision.headers[Headers.RETRIES] == "2"


@pytest.mark.parametrize("since", ["", "yesterday", "2026-01-01", "9999-12-31 23:59:59:999999 Z", "\x00"])
def test_a_damaged_or_future_beginning_is_now(since: str) -> None:
    decision = Recoverability().await_type({Headers.UNKNOWN_SINCE: since}, NOW)
    assert isinstance(decision, RetryLater)
    assert decision.headers[Headers.UNKNOWN_SINCE] == to_wire_time(NOW)


def test_after_ten_minutes_it_waits_no_more() -> None:
    since = {Headers.UNKNOWN_SINCE: to_wire_time(NOW - 10 * MINUTES)}
    assert Recoverability().await_type(since, NOW) == MoveToErrors()


@pytest.mark.parametrize("wait", [timedelta(seconds=-1), 600, None])
def test_a_wait_that_is_none_is_refused(wait: object) -> None:
    with pytest.raises(ConfigurationError, match="unknown_type_wait must be a timedelta of zero or more"):
        Recoverability(unknown_type_wait=wait)  # type: ignore[arg-type]


@pytest.mark.parametrize("formerly", ["Shop.Order", ["a,b"], [""], [7]])
def test_former_names_are_checked(formerly: object) -> None:
    with pytest.raises(ConfigurationError, match=r"formerly must be a list|must be a text of 1 to 200"):
        message_type("Shop.Order", formerly=formerly)  # type: ignore[arg-type]


PROGRAM = """
from dataclasses import dataclass
from delayline.serialization import names_of_value

@dataclass
class Reminder:
    order: int

print(names_of_value(Reminder(17)))
"""


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["shop.py"], "shop.Reminder"),
        (["folder/shop.py"], "shop.Reminder"),
        (["-m", "shop"], "shop.Reminder"),
        (["-m", "folder.shop"], "folder.shop.Reminder"),
        (["-m", "folder"], "folder.__main__.Reminder"),
        (["-c", PROGRAM], None),
    ],
)
def test_a_type_of_the_program_that_was_started_has_the_name_of_its_module(
    tmp_path: Path, words: list[str], printed: str | None
) -> None:
    """Another process imports the module, and knows the type by that name."""
    (tmp_path / "folder").mkdir()
    for name in ("shop.py", "folder/shop.py", "folder/__main__.py"):
        (tmp_path / name).write_text(PROGRAM)
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    if printed is None:
        assert re.search(r'InvalidMessage: type Reminder .* @message_type\("shop.Reminder"\)', done.stderr), done.stderr
    else:
        assert done.stdout.strip() == printed, done.stderr
