"""The demo's three processes: `python -m examples.demo.parties sender|dispatcher|receiver DIRECTORY`."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from examples.demo import reminders
from examples.demo.stage import DISPATCHER, RECEIVER, REMINDERS, SENDER, Journal, Stage

from delayline.clock import SystemClock, to_microseconds
from delayline.composition import endpoint_from, transport_of
from delayline.endpoint import Endpoint
from delayline.message import Headers, from_wire_time
from delayline.running import run_until_stopped

if TYPE_CHECKING:
    from delayline.message import Message
    from delayline.receiving.context import MessageContext

AT_ONCE: Final = 500
STANDARD_INPUT: Final = 0
"""A pipe from the demo's own process: its end stops the other processes."""


async def send(stage: Stage) -> None:
    """Store every reminder, and note those that are stored."""
    rows = reminders.read(stage.reminders)
    journal = Journal(stage.journal(SENDER))
    async with endpoint_from(stage.settings(REMINDERS), polling=False, send_only=True) as endpoint:
        for start in range(0, len(rows), AT_ONCE):
            chunk = rows[start : start + AT_ONCE]
            await asyncio.gather(*(_send_one(endpoint, row) for row in chunk))
            journal.write([(row.id,) for row in chunk])


async def _send_one(endpoint: Endpoint, row: reminders.Reminder) -> None:
    body = json.loads(row.body)
    await endpoint.send(row.destination, body, message_id=row.id, delay=timedelta(milliseconds=row.delay_ms))


async def dispatch(stage: Stage) -> None:
    """Forward due messages until stopped or killed."""
    journal = Journal(stage.journal(DISPATCHER))
    endpoint = endpoint_from(stage.settings(REMINDERS), send_only=True)
    clock = SystemClock()
    await run_until_stopped(
        endpoint, started=lambda: journal.write_now("started", clock.now()), parent_pipe=STANDARD_INPUT
    )


async def receive(stage: Stage) -> None:
    """Note every message that arrives: its id, when it was due and when it came."""
    journal = Journal(stage.journal(RECEIVER))
    settings = stage.settings(reminders.DESTINATION)
    endpoint = Endpoint(reminders.DESTINATION, transport=transport_of(settings), concurrency=8)
    clock = SystemClock()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        del context
        due = from_wire_time(message.headers[Headers.DELIVER_AT])
        journal.write([(message.id, to_microseconds(due), to_microseconds(clock.now()))])

    await run_until_stopped(
        endpoint, started=lambda: journal.write_now("started", clock.now()), parent_pipe=STANDARD_INPUT
    )


PARTIES: Final = {SENDER: send, DISPATCHER: dispatch, RECEIVER: receive}

if __name__ == "__main__":
    asyncio.run(PARTIES[sys.argv[1]](Stage(Path(sys.argv[2]))))
