"""`delayline errors`: list failed messages with their reasons, and retry them."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from delayline import error_queue
from delayline.actions import OperatorAction, SetRequest
from delayline.cli.options import EXIT_FAILED, Commands, examples, json_option, settings_options
from delayline.cli.sets import change_set, open_failed, set_options
from delayline.error_queue import RetryOutcome, managed_queues
from delayline.errors import CorruptHeaders
from delayline.failures import NAME_THE_QUEUE
from delayline.filters import MessageFilter
from delayline.message import Headers, from_wire_time
from delayline.opening import open_transport
from delayline.readable import local, size
from delayline.set_jobs import action_log, actor_here, keep_action

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from delayline.cli.screen import Screen
    from delayline.cli.sets import SetOptions
    from delayline.message import Message
    from delayline.settings import Settings

ERROR_QUEUE_SETTINGS: Final = ("url", "transport_url", "error_queue")


@click.group(
    cls=Commands, epilog=examples("delayline errors list", "delayline errors retry --where exception=TimeoutError")
)
def errors() -> None:
    """List, retry or delete the messages of the error queue."""


@errors.command("list", epilog=examples("delayline errors list --limit 20", "delayline errors list --json"))
@click.option(
    "--limit", type=click.IntRange(1, 2**31 - 1), default=50, show_default=True, help="How many to list at most."
)
@settings_options(*ERROR_QUEUE_SETTINGS)
@json_option
def list_errors(settings: Settings, screen: Screen, limit: int) -> None:
    """List failed messages, oldest first: which, where it failed, when and why."""

    async def work() -> tuple[int, list[Message]]:
        async with open_transport(settings) as transport:
            queues = managed_queues(transport)
            return await queues.count(settings.error_queue), list(await queues.browse(settings.error_queue, limit))

    total, messages = asyncio.run(work())
    if messages:
        screen.table(("id", "failed queue", "failed at", "why"), [_row(message) for message in messages])
    shown = "" if len(messages) == total else f", {len(messages)} shown"
    screen.echo(f"{total} in {settings.error_queue}{shown}")
    screen.document({"queue": settings.error_queue, "total": total, "errors": list(map(_summary, messages))})


@errors.command(epilog=examples("delayline errors show 0197a1c5-7e52-7d3e-b7a6-0242ac120002"))
@click.argument("message_id", metavar="ID")
@settings_options(*ERROR_QUEUE_SETTINGS)
@json_option
def show(settings: Settings, screen: Screen, message_id: str) -> None:
    """Show a failed message: headers, stack trace and body."""

    async def work() -> Message | None:
        async with open_transport(settings) as transport:
            messages = await error_queue.find(managed_queues(transport), settings.error_queue, {message_id})
            return messages.get(message_id)

    message = asyncio.run(work())
    if message is None:
        text = f"no message {message_id!r} in queue {settings.error_queue!r}. See: delayline errors list"
        screen.fail(text, "MessageNotFound", as_json=screen.as_json)
        click.get_current_context().exit(EXIT_FAILED)
    headers = _headers(message)
    screen.table(("header", "value"), [(name, value) for name, value in headers.items() if "\n" not in value])
    for name, value in headers.items():
        if "\n" in value:
            screen.echo(f"\n{name}\n{value.rstrip()}")
    screen.echo(f"\nbody, {size(len(message.body))}\n{message.body.decode('utf-8', 'replace')}")
    screen.document({"id": message.id, "headers": dict(headers), "body": message.body.decode("utf-8", "replace")})


@errors.command(
    epilog=examples(
        "delayline errors retry 0197a1c5-7e52-7d3e-b7a6-0242ac120002",
        "delayline errors retry --where exception=TimeoutError,destination=billing --rate 50",
        "delayline errors retry --all --to billing",
        "delayline errors retry --all --past-window --inbox-url postgresql://server/billing",
    )
)
@click.argument("ids", nargs=-1, metavar="[ID...]")
@click.option("--to", metavar="QUEUE", help=f"Send there instead of to the message's {Headers.FAILED_QUEUE}.")
@click.option("--past-window", is_flag=True, help="Retry messages that failed before the inbox's oldest record, too.")
@set_options
@settings_options(*ERROR_QUEUE_SETTINGS, "inbox_url", "inbox_seconds")
@json_option
def retry(
    settings: Settings, screen: Screen, ids: tuple[str, ...], wanted: SetOptions, to: str | None, *, past_window: bool
) -> None:
    """Send failed messages to the queue they failed in, without the headers that describe the failure.

    A message leaves the error queue in the same transaction; a message that cannot be sent stays, and so does one that
    failed longer ago than the inbox, if there is one, keeps records. Exit code 1 when any was not sent.
    """
    chosen = wanted.filter(ids)
    window, queue = None if past_window else settings.inbox_window, settings.error_queue
    if chosen is not None:
        request = SetRequest(OperatorAction.RETRY, chosen, queue=queue, destination=to, inbox_window=window)
        change_set(screen, wanted, request, partial(open_failed, settings), "retry")
        return
    outcomes = asyncio.run(_retry(settings, ids, to, window))
    for outcome in outcomes:
        if outcome.problem is None:
            screen.echo(f"✓ {outcome.id}: sent to {outcome.queue}", "green")
        else:
            screen.echo(f"✗ {outcome.id}: {outcome.problem}", "red")
    failed = sum(outcome.problem is not None for outcome in outcomes)
    screen.echo(f"{len(outcomes) - failed} retried, {failed} not")
    screen.document(
        {
            "retried": [{"id": outcome.id, "queue": outcome.queue} for outcome in outcomes if outcome.problem is None],
            "failed": [
                {"id": outcome.id, "reason": outcome.problem} for outcome in outcomes if outcome.problem is not None
            ],
        }
    )
    if failed:
        click.get_current_context().exit(EXIT_FAILED)


@errors.command(
    epilog=examples("delayline errors purge --where type=Ping", "delayline errors purge --all --yes"),
)
@set_options
@settings_options(*ERROR_QUEUE_SETTINGS)
@json_option
def purge(settings: Settings, screen: Screen, wanted: SetOptions) -> None:
    """Drop failed messages, for good: all that a filter means. Exit code 1 when any could not be dropped."""
    chosen = wanted.filter(()) or MessageFilter()
    request = SetRequest(OperatorAction.PURGE, chosen, queue=settings.error_queue)
    change_set(screen, wanted, request, partial(open_failed, settings), "drop")


async def _retry(
    settings: Settings, ids: tuple[str, ...], to: str | None, window: timedelta | None
) -> list[RetryOutcome]:
    queue, actor = settings.error_queue, actor_here()
    outcomes: dict[str, RetryOutcome] = {}
    async with open_transport(settings) as transport:
        log = action_log(transport, queue)
        async with contextlib.aclosing(error_queue.holding_ids(transport, queue, set(ids))) as messages:
            async for held in messages:
                outcome = await error_queue.retry(transport, queue, held, to=to, remedy=NAME_THE_QUEUE, window=window)
                outcomes[held.message.id] = outcome
        for message_id in dict.fromkeys(ids):
            missing = RetryOutcome(message_id, None, f"not in {queue}. See: delayline errors list")
            outcome = outcomes.setdefault(message_id, missing)
            text = outcome.problem or f"sent to {outcome.queue}"
            done = outcome.problem is None
            await keep_action(log, queue, OperatorAction.RETRY, actor, message_id, text, done=done)
    return [outcomes[message_id] for message_id in dict.fromkeys(ids)]


def _headers(message: Message) -> Mapping[str, str]:
    try:
        return message.headers
    except CorruptHeaders as error:
        return {"(corrupted)": str(error), "(as stored)": message.encoded_headers.decode("utf-8", "replace")}


def _summary(message: Message) -> dict[str, str | None]:
    headers = _headers(message)
    return {
        "id": message.id,
        "failed_queue": headers.get(Headers.FAILED_QUEUE),
        "time_of_failure": headers.get(Headers.TIME_OF_FAILURE),
        "exception_type": headers.get(Headers.EXCEPTION_TYPE),
        "exception_message": headers.get(Headers.EXCEPTION_MESSAGE, headers.get("(corrupted)")),
    }


def _row(message: Message) -> tuple[str, str, str, str]:
    summary = _summary(message)
    when = summary["time_of_failure"] or ""
    with contextlib.suppress(ValueError):
        when = local(from_wire_time(when))
    why = ": ".join(part for part in (summary["exception_type"], summary["exception_message"]) if part)
    return message.id, summary["failed_queue"] or "", when, " ".join(why.split())[:160]
