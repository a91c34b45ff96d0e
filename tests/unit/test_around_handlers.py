"""Context managers of frameworks around handlers."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import pytest
from tests.unit.conftest import build

from delayline import ConfigurationError, Message, MessageContext, Recoverability
from delayline.testing.clock import settle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from delayline.testing.clock import ManualClock

ONCE = Recoverability(immediate_retries=0, delayed_retries=0)


def noted(name: str, notes: list[str]) -> Callable[[MessageContext], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def surround(context: MessageContext) -> Iterator[None]:
        notes.append(f"{name} enters for {context.message.id} on {threading.current_thread().name.partition('_')[0]}")
        try:
            yield
        finally:
            notes.append(f"{name} leaves")

    return surround


@pytest.mark.parametrize("fails", [False, True])
async def test_a_coroutine_handler_runs_inside_of_them(clock: ManualClock, fails: bool) -> None:
    """Given two, when a handler ends or fails, then it ran inside of the second, and that inside of the first."""
    scenario, notes = build(clock, recoverability=ONCE), list[str]()
    for name in ("first", "second"):
        scenario.endpoint.around_handlers(noted(name, notes))

    @scenario.endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        notes.append("handler")
        if fails:
            raise ValueError("no")

    async with scenario.endpoint as endpoint:
        await endpoint.send("sales", b"", message_id="m1")
        await settle()
        assert await scenario.ids("error") == (["m1"] if fails else [])
    main = threading.current_thread().name
    enters = [f"{name} enters for m1 on {main}" for name in ("first", "second")]
    assert notes == [*enters, "handler", "second leaves", "first leaves"]


async def test_a_function_runs_inside_of_them_on_its_thread(clock: ManualClock) -> None:
    scenario, notes, done = build(clock), list[str](), threading.Event()

    @scenario.endpoint.around_handlers
    @contextlib.contextmanager
    def surround(context: MessageContext) -> Iterator[None]:
        with noted("it", notes)(context):
            yield
        done.set()

    @scenario.endpoint.handler
    def handle(message: Message, context: MessageContext) -> None:
        notes.append("handler")

    async with scenario.endpoint as endpoint:
        await endpoint.send("sales", b"", message_id="m1")
        await settle()
        assert done.wait(60)
    assert notes == ["it enters for m1 on delayline handler", "handler", "it leaves"]


async def test_one_that_cannot_be_entered_is_a_failure_of_the_handler(clock: ManualClock) -> None:
    """What was entered before is left, and the handler does not run."""
    scenario, notes = build(clock, recoverability=ONCE), list[str]()
    scenario.endpoint.around_handlers(noted("first", notes))

    @scenario.endpoint.around_handlers
    @contextlib.contextmanager
    def surround(context: MessageContext) -> Iterator[None]:
        if context.attempt:
            raise RuntimeError("no application")
        yield

    @scenario.endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        notes.append("handler")

    async with scenario.endpoint as endpoint:
        await endpoint.send("sales", b"", message_id="m1")
        await settle()
        assert await scenario.ids("error") == ["m1"]
    assert notes[1:] == ["first leaves"]


async def test_it_is_too_late_after_the_start(clock: ManualClock) -> None:
    async with build(clock).endpoint as endpoint:
        with pytest.raises(ConfigurationError, match="around_handlers before start"):
            endpoint.around_handlers(lambda context: contextlib.nullcontext())
