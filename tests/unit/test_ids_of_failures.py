"""A message that has failed has one id: in the log, in its error queue, and for its handlers."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.unit.conftest import build

from delayline import DelayedMessage, Headers, Message, Recoverability
from delayline.events import Event
from delayline.testing.clock import settle

if TYPE_CHECKING:
    from delayline import MessageContext
    from delayline.testing.clock import ManualClock


@pytest.mark.parametrize("rounds", [0, 1, 2])
async def test_the_log_has_the_id_of_the_error_queue(
    clock: ManualClock, caplog: pytest.LogCaptureFixture, rounds: int
) -> None:
    """Given a message that fails for good, after delayed retries or at once, then all name it as it was sent."""
    delays = [timedelta(seconds=10)] * rounds
    retries = Recoverability(immediate_retries=0, **({"delays": delays} if delays else {"delayed_retries": 0}))
    scenario = build(clock, recoverability=retries)
    seen: list[str] = []

    @scenario.endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        seen.append(message.id)
        raise ValueError(message.id)

    async with scenario.endpoint as endpoint:
        await endpoint.send("sales", b"", message_id="order-1")
        await settle()
        for _ in range(rounds):
            await clock.advance(10)
    assert seen == ["order-1"] * (rounds + 1)
    assert await scenario.ids("error") == ["order-1"]
    assert ids_in(caplog, Event.MOVED_TO_ERROR) == ["order-1"]


@pytest.mark.parametrize("headers", [{Headers.MESSAGE_ID: "order-1"}, {}])
async def test_a_copy_under_another_id_is_logged_with_that_of_its_headers(
    clock: ManualClock, caplog: pytest.LogCaptureFixture, headers: dict[str, str]
) -> None:
    """Given a delayed message whose queue is gone and whose headers have another id, then the log has that one."""
    scenario = build(clock)
    async with scenario.endpoint:
        await scenario.put(DelayedMessage(Message("copy", headers, b""), "gone", clock.now()))
        await clock.advance(1)
    shown = await scenario.ids("error")
    assert ids_in(caplog, Event.MOVED_TO_ERROR) == shown == [headers.get(Headers.MESSAGE_ID, "copy")]


def ids_in(caplog: pytest.LogCaptureFixture, event: Event) -> list[str]:
    """Return the ids in the texts and in the facts of an event, which are the same."""
    records = [record for record in caplog.records if getattr(record, "event", None) is event]
    facts = [record.facts["message"].id for record in records]  # type: ignore[attr-defined]
    assert all(id in record.getMessage() for id, record in zip(facts, records, strict=True))
    return facts
