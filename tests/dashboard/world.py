"""An endpoint with messages that wait and messages that failed, on any back end; some of them are hostile."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from delayline import Headers, Message
from delayline.cli.connection import table_groups
from delayline.composition import endpoint_from, set_up_features
from delayline.message import to_wire_time
from delayline.settings import Settings
from delayline.spi import TransportOperation
from delayline.sql.databases import database_at
from delayline.telemetry.history import MinuteRow, encoded, minutes_table
from delayline.telemetry.measurements import LATENESS_BOUNDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ENDPOINT: Final = "sales"
QUEUES: Final = ("billing", "email", "audit")
#: What would run, close an element or leave an attribute if a page did not escape it.
HOSTILE: Final = "\"'><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
HOSTILE_ID: Final = "evil\"'><script>document.title='owned'</script>"
TRACE: Final = """Traceback (most recent call last):
  File "/app/handlers.py", line 17, in charge
    gateway.charge(order)
  File "/app/gateway.py", line 40, in charge
    raise PaymentRefused(order)
shop.PaymentRefused: card expired
"""


async def fill(url: str, *, hostile: bool = True) -> Settings:
    """Set the endpoint up at the URL and give it messages."""
    sql = url.startswith(("sqlite", "postgresql"))
    settings = Settings(endpoint=ENDPOINT, url=url, journal=True if sql else None)
    if sql:
        await set_up_features(settings, list(table_groups().values()))
        await remember(url)
    endpoint = endpoint_from(settings, polling=False)
    async with endpoint:
        await endpoint.transport.setup_infrastructure([*QUEUES, settings.error_queue])
        for number, delay in enumerate(delays()):
            order = {"order": number, "customer": f"C-{1000 + number % 7}", "amount": round(19.9 * (number % 9 + 1), 2)}
            await endpoint.send(
                QUEUES[number % 7 // 3],
                json.dumps(order).encode(),
                delay=delay,
                message_id=f"order-{number:03}-reminder",
                headers={Headers.ENCLOSED_MESSAGE_TYPES: ("shop.Reminder", "shop.Invoice")[number % 3 == 0]},
            )
        if hostile:
            await endpoint.send(
                "billing",
                HOSTILE.encode(),
                delay=timedelta(minutes=3),
                message_id=HOSTILE_ID,
                headers={HOSTILE: HOSTILE, Headers.ENCLOSED_MESSAGE_TYPES: HOSTILE},
            )
        await endpoint.transport.dispatch([TransportOperation(one, settings.error_queue) for one in failures(hostile)])
    return settings


async def remember(url: str, rows: Sequence[MinuteRow] | None = None) -> None:
    """Write minute rows; by default those of the last day, of which an hour was slow."""
    if rows is None:
        now = datetime.now(UTC)
        rows = [minute_row(back, now=now) for back in range(1, 24 * 60)]
    contents = [
        {
            "endpoint": ENDPOINT,
            "scale": row.minutes,
            "minute": int(row.start.timestamp()) // 60,
            "process": row.process,
            "content": encoded(row),
        }
        for row in rows
    ]
    database = database_at(url)
    await database.open()
    try:
        await database.write(lambda connection: connection.execute(minutes_table().insert(), contents))
    finally:
        await database.close()


def minute_row(back: int, *, now: datetime | None = None, dispatched: int = 600) -> MinuteRow:
    """Return the row of a minute so many minutes ago."""
    start = (now or datetime.now(UTC)).replace(second=0, microsecond=0) - timedelta(minutes=back)
    return MinuteRow(
        process="web-1:4711:a1b2c3",
        start=start,
        minutes=1,
        written=start + timedelta(minutes=1),
        sent=140,
        dispatched=dispatched,
        handled=590,
        failed=back % 3,
        lateness={name: late(back, share) for name, share in (("billing", 400), ("email", 150), ("audit", 50))},
        poller=start + timedelta(seconds=58),
        receivers={ENDPOINT: start + timedelta(seconds=59)},
        running_handlers=4,
        breakers={"store": 0, "dispatch": int(back == 1)},
        measures={"lease.held": 1.0},
    )


def late(back: int, total: int) -> list[int]:
    """Return a day's latenesses: a wave with its middle at some ms, and an hour at some seconds."""
    middle = 4 + 2 * math.sin(back / 220) + (7 if 400 < back < 470 else 0)
    weights = [math.exp(-(((place - middle) / 1.5) ** 2)) for place in range(len(LATENESS_BOUNDS) + 1)]
    return [round(total * weight / sum(weights)) for weight in weights]


def delays() -> Iterator[timedelta]:
    """Yield times from half a minute to years ahead."""
    for number in range(60):
        yield timedelta(seconds=30 * 1.27**number)


def failures(hostile: bool) -> Iterator[Message]:
    """Yield messages as they stand in the error queue."""
    now = datetime.now(UTC)
    for number in range(24):
        refused = number % 3 != 0
        yield failed(
            f"failed-{number:03}",
            "shop.PaymentRefused" if refused else "builtins.TimeoutError",
            "card expired" if refused else "no answer from smtp.example.com in 10 s",
            now - timedelta(hours=5 * number),
            queue="billing" if refused else "email",
        )
    if hostile:
        yield failed(HOSTILE_ID, HOSTILE, HOSTILE, now, queue="billing", trace=HOSTILE, body=HOSTILE)


def failed(
    message_id: str, kind: str, text: str, at: datetime, *, queue: str, trace: str = TRACE, body: str = '{"order": 17}'
) -> Message:
    """Return a message with the headers of its failure."""
    headers = {
        Headers.MESSAGE_ID: message_id,
        Headers.ENCLOSED_MESSAGE_TYPES: "shop.Charge",
        Headers.EXCEPTION_TYPE: kind,
        Headers.EXCEPTION_MESSAGE: text,
        Headers.EXCEPTION_STACK_TRACE: trace,
        Headers.FAILED_QUEUE: queue,
        Headers.TIME_OF_FAILURE: to_wire_time(at),
    }
    return Message(message_id, headers, body.encode())
