"""`delayline send`: a message, or a file of messages."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from delayline.cli.connection import sending_endpoint, start_of_delay
from delayline.cli.due import due_options
from delayline.cli.message_file import InputLine, InputRow, RejectedFile, RowFile, reason_of
from delayline.cli.options import EXIT_FAILED, PLACE_SETTINGS, examples, json_option, settings_options
from delayline.cli.screen import ROWS_SHOWN
from delayline.errors import DelaylineError, InvalidMessage, QueueNotFound
from delayline.message import Headers
from delayline.outgoing import due_time
from delayline.readable import in_the_future, local, relative
from delayline.serialization import JsonSerializer

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayline.cli.screen import Screen
    from delayline.endpoint import Endpoint
    from delayline.settings import Settings

SENT_AT_ONCE: Final = 2000
"""Rows that are stored concurrently, and so in few transactions."""


@click.command(
    epilog=examples(
        """delayline send billing '{"order": 17}' --delay 5m --endpoint sales""",
        "delayline send billing hello --at 2026-05-01T09:00:00+02:00 --id order-17 --header tenant=acme",
        """delayline send billing '{"order": 17}' --type shop.Bill --json-body --endpoint sales""",
        "delayline send --from reminders.csv --endpoint sales",
    )
)
@click.argument("destination", required=False)
@click.argument("body", required=False)
@due_options
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header; repeatable.")
@click.option(
    "--type",
    "message_type",
    metavar="NAME",
    help=f"The name of the message's type, by which handlers are chosen: {Headers.ENCLOSED_MESSAGE_TYPES}.",
)
@click.option(
    "--json-body",
    is_flag=True,
    help=f"BODY is JSON: check it, and say so in the header {Headers.CONTENT_TYPE}.",
)
@click.option("--id", "message_id", metavar="ID", help="The message's id; repeating it while it waits changes nothing.")
@click.option(
    "--from",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="CSV or JSON Lines with destination, body, delay (or delay_ms, deliver_at), id, headers.",
)
@click.option(
    "--no-check-destination",
    "unchecked",
    is_flag=True,
    help="Store delayed messages also for queues that do not exist now.",
)
@settings_options(*PLACE_SETTINGS)
@json_option
def send(  # noqa: PLR0913 - an option each
    settings: Settings,
    screen: Screen,
    destination: str | None,
    body: str | None,
    delay: timedelta | None,
    deliver_at: datetime | None,
    headers: tuple[str, ...],
    message_type: str | None,
    json_body: bool,
    message_id: str | None,
    file: Path | None,
    unchecked: bool,
) -> None:
    """Send BODY ("-" reads it from standard input) to DESTINATION, now or later; or every row of a file.

    Bad lines of a file are kept in FILE.rejected with their reasons, to be corrected and sent from there; the good
    lines are stored. Sending a file again changes no pending message: ids come from the file, or, where it
    has none, from its content and the line number.
    """
    if file is not None:
        if any((destination, body, delay, deliver_at, headers, message_type, json_body, message_id)):
            raise click.UsageError("--from FILE includes everything: leave the other arguments out.")
        _send_file(settings, screen, file, check_destination=not unchecked)
        return
    if destination is None or body is None:
        raise click.UsageError("Give DESTINATION and BODY, or --from FILE.")
    if delay is not None and deliver_at is not None:
        raise click.UsageError("--delay and --at exclude each other: give one of them.")
    now = datetime.now(UTC)
    due = due_time(now, delay, deliver_at)
    if due is not None:
        in_the_future(due, now)
    content = sys.stdin.read() if body == "-" else body
    given = dict(header_given(header) for header in headers)
    if message_type is not None:
        given[Headers.ENCLOSED_MESSAGE_TYPES] = message_type
    if json_body:
        _check_json(content)
        given[Headers.CONTENT_TYPE] = JsonSerializer.content_type
    checked = not unchecked
    sent, due = asyncio.run(
        _send(settings, destination, content, delay or due, given, message_id, check_destination=checked)
    )
    when = "sent" if due is None else f"due {local(due)}, {relative(due, now)}"
    screen.echo(f"✓ {sent} to {destination}: {when}", "green")
    screen.document({"id": sent, "destination": destination, "due": None if due is None else due.isoformat()})


async def _send(
    settings: Settings,
    destination: str,
    body: str,
    when: timedelta | datetime | None,
    headers: dict[str, str],
    message_id: str | None,
    *,
    check_destination: bool,
) -> tuple[str, datetime | None]:
    """Send the message; return its id and when it is due, by the clock that decides."""
    async with sending_endpoint(settings) as endpoint:
        due = _start(endpoint) + when if isinstance(when, timedelta) else when
        try:
            sent = await endpoint.send(
                destination,
                body,
                headers=headers,
                message_id=message_id,
                deliver_at=due,
                check_destination=check_destination,
            )
        except QueueNotFound as error:
            unless = "" if due is None else ", or pass --no-check-destination where it will exist in time"
            raise QueueNotFound(error.queue, similar=error.similar, unless=unless) from error
        return sent, due


def _start(endpoint: Endpoint) -> datetime:
    return start_of_delay(None if endpoint.delayed_delivery is None else endpoint.delayed_delivery.clock)


def header_given(header: str) -> tuple[str, str]:
    """Return name and value of a --header, or fail with how to write it."""
    name, equals, value = header.partition("=")
    if not name or not equals:
        raise click.BadParameter(f"{header!r} is not NAME=VALUE", param_hint="--header")
    return name, value


def _check_json(body: str) -> None:
    try:
        json.loads(body)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"BODY is not JSON: {error}", param_hint="--json-body") from error


def _send_file(settings: Settings, screen: Screen, file: Path, *, check_destination: bool) -> None:
    rows = RowFile(file)
    shown: list[tuple[int, str]] = []
    with RejectedFile(rows) as rejected, screen.progress() as progress:
        task = progress.add_task("stored 0", total=file.stat().st_size)
        bulk = Bulk(rows, rejected, shown, check_destination=check_destination)

        def step() -> None:
            progress.update(task, completed=rows.read_bytes, description=f"stored {bulk.stored}")

        try:
            asyncio.run(bulk.send(settings, step))
        except DelaylineError:
            if bulk.stored:
                screen.echo(
                    f"{bulk.stored} stored before it failed; send the file again: pending messages are not duplicated"
                )
            raise
    if shown:
        screen.table(("line", "rejected because"), shown)
    screen.echo(f"{bulk.stored} stored, {rejected.count} rejected", "red" if rejected.count else "green")
    if rejected.count:
        screen.echo(f"correct them in {rejected.path} and send that file")
    screen.document(
        {
            "stored": bulk.stored,
            "rejected": rejected.count,
            "rejected_file": str(rejected.path) if rejected.count else None,
            "first_rejected": [{"line": line, "reason": reason} for line, reason in shown],
        }
    )
    if rejected.count:
        click.get_current_context().exit(EXIT_FAILED)


class Bulk:
    """Stores the rows of a file, many at once, and sets bad rows aside."""

    def __init__(
        self, rows: RowFile, rejected: RejectedFile, shown: list[tuple[int, str]], *, check_destination: bool
    ) -> None:
        self.stored: int = 0
        self._rows = rows
        self._rejected = rejected
        self._shown = shown
        self._check_destination = check_destination

    async def send(self, settings: Settings, step: Callable[[], None]) -> None:
        """Store everything; raises the first error that is not a row's own fault."""
        async with sending_endpoint(settings) as endpoint:
            lines = self._rows.lines()
            while chunk := list(islice(lines, SENT_AT_ONCE)):
                now = _start(endpoint)
                good: list[InputRow] = []
                for line in chunk:
                    try:
                        good.append(self._rows.row(line, now))
                    except InvalidMessage as error:
                        self._reject(line, error)
                await self._store(endpoint, good)
                step()

    async def _store(self, endpoint: Endpoint, rows: list[InputRow]) -> None:
        results = await asyncio.gather(*(self._store_row(endpoint, row) for row in rows), return_exceptions=True)
        for row, result in zip(rows, results, strict=True):
            if result is None:
                self.stored += 1
            elif isinstance(result, InvalidMessage | QueueNotFound):
                self._reject(row.line, result)
        for result in results:
            if result is not None and not isinstance(result, InvalidMessage | QueueNotFound):
                raise result

    async def _store_row(self, endpoint: Endpoint, row: InputRow) -> None:
        await endpoint.send(
            row.destination,
            row.body,
            headers=row.headers,
            message_id=row.id,
            deliver_at=row.due,
            check_destination=self._check_destination,
        )

    def _reject(self, line: InputLine, error: Exception) -> None:
        reason = reason_of(error)
        self._rejected.add(line, reason)
        if len(self._shown) < ROWS_SHOWN:
            self._shown.append((line.number, reason))
