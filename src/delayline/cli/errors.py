"""`delayline errors`: list failed messages with their reasons, and retry them."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from delayline import error_queue
from delayline.actions import OperatorAction, SetRequest
from delayline.cli.options import EXIT_FAILED, Commands, examples, json_option, settings_options
from delayline.cli.sets import WHERE, change_set, open_failed, set_options
from delayline.error_queue import RetryOutcome, managed_queues
from delayline.errors import CorruptHeaders, InvalidDueTime
from delayline.failure_index import FailureIndex, GroupOrder, check_for_groups
from delayline.failures import NAME_THE_QUEUE
from delayline.filters import MessageFilter
from delayline.message import Headers, from_wire_time
from delayline.opening import beside_queues, open_transport
from delayline.readable import DELAYS, INSTANTS, local, parse_delay, parse_instant, size
from delayline.set_jobs import action_log, actor_here, keep_action

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from rich.progress import Progress, TaskID

    from delayline.cli.screen import Screen
    from delayline.cli.sets import SetOptions
    from delayline.failure_index import FailureGroup
    from delayline.message import Message
    from delayline.settings import Settings

ERROR_QUEUE_SETTINGS: Final = ("url", "transport_url", "error_queue")


@click.group(
    cls=Commands, epilog=examples("delayline errors list", "delayline errors retry --where exception=TimeoutError")
)
def errors() -> None:
    """List, group, retry or delete the messages of the error queue."""


@errors.command(
    "list",
    epilog=examples(
        "delayline errors list --limit 20",
        "delayline errors list --where exception=TimeoutError,destination=billing",
        "delayline errors list --json",
    ),
)
@click.option(
    "--limit", type=click.IntRange(1, 2**31 - 1), default=50, show_default=True, help="How many to list at most."
)
@click.option("--where", multiple=True, metavar="FILTER", help=WHERE)
@click.option(
    "--before",
    type=click.IntRange(1),
    metavar="NUMBER",
    help="Go on below this number, as the list before says.",
)
@settings_options(*ERROR_QUEUE_SETTINGS)
@json_option
def list_errors(settings: Settings, screen: Screen, limit: int, where: tuple[str, ...], before: int | None) -> None:
    """List failed messages, the newest first: which, where it failed, when and why."""
    wanted = MessageFilter.parse(where, datetime.now(UTC))
    wanted.check_of_failed()

    async def work() -> error_queue.NewestFailures:
        async with open_transport(settings) as transport:
            queue = error_queue.numbered(transport, settings.error_queue)
            with screen.progress() as bars:
                bar = bars.add_task("looking", total=None)
                show = partial(_show_looked, bars, bar)
                return await error_queue.newest(queue, wanted, limit, before=before, looked=show)

    found = asyncio.run(work())
    messages = [message for _, message in found.rows]
    if messages:
        screen.table(("id", "failed queue", "failed at", "why"), [_row(message) for message in messages])
    shown = "" if len(messages) == found.total else f", {len(messages)} shown"
    screen.echo(f"{found.total} in {settings.error_queue}{shown}")
    if found.next_before is not None:
        screen.echo(f"older ones: delayline errors list --before {found.next_before}")
    screen.document(
        {
            "queue": settings.error_queue,
            "total": found.total,
            "next_before": found.next_before,
            "errors": list(map(_summary, messages)),
        }
    )


@errors.command(
    epilog=examples(
        "delayline errors groups --since 2h",
        "delayline errors groups --where destination=billing --order largest",
    )
)
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="How many at most.")
@click.option("--where", multiple=True, metavar="FILTER", help=WHERE)
@click.option("--since", metavar="TIME", help="Count as new what failed later: 2h for two hours ago, or an instant.")
@click.option(
    "--order",
    type=click.Choice([order.value for order in GroupOrder]),
    default=GroupOrder.NEWEST.value,
    show_default=True,
    help="Which groups come first.",
)
@settings_options(*ERROR_QUEUE_SETTINGS)
@json_option
def groups(
    settings: Settings, screen: Screen, limit: int, where: tuple[str, ...], since: str | None, order: str
) -> None:
    """Group failed messages by exception and place.

    `--where group=KEY` means the messages of a group, in `delayline errors list`, `retry` and `purge`.
    """
    now = datetime.now(UTC)
    wanted, after = MessageFilter.parse(where, now), None if since is None else _since(since, now)
    check_for_groups(wanted)

    async def work() -> FailureIndex:
        async with open_transport(settings) as transport:
            index = FailureIndex(error_queue.numbered(transport, settings.error_queue))
            with screen.progress() as bars:
                bar = bars.add_task("reading", total=None)
                await index.refresh(partial(_show_read, bars, bar))
            return index

    index = asyncio.run(work())
    found = GroupOrder(order).sorted(index.groups(wanted, after))
    if found:
        rows = [_group_row(group) for group in found[:limit]]
        screen.table(("exception", "place", "messages", "new", "last", "failed in: type", "group"), rows)
    number = sum(group.all.count for group in found)
    read = "" if index.read == index.total else f"; of {index.total} in {settings.error_queue} {index.read} were read"
    screen.echo(f"{number} in {len(found)} groups{'' if len(found) <= limit else f', {limit} shown'}{read}")
    screen.document(
        {
            "queue": settings.error_queue,
            "total": index.total,
            "read": index.read,
            "groups": [_group_document(group) for group in found[:limit]],
        }
    )


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
    async with open_transport(settings) as transport, beside_queues(settings, transport) as store:
        log = action_log([transport, store], queue)
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


def _since(written: str, now: datetime) -> datetime:
    """Return the instant that a person means by a delay before now, or by an instant."""
    try:
        return parse_instant(written) if written[4:5] == "-" else now - parse_delay(written)
    except (InvalidDueTime, OverflowError) as error:
        raise click.BadParameter(
            f"{written!r} is neither a delay as {DELAYS}, nor {INSTANTS}", param_hint="--since"
        ) from error


def _show_looked(bars: Progress, bar: TaskID, number: int) -> None:
    bars.update(bar, description=f"looked at {number:,}")


def _show_read(bars: Progress, bar: TaskID, read: int, total: int) -> None:
    bars.update(bar, completed=read, total=total, description=f"read {read:,} of {total:,}")


def _group_row(group: FailureGroup) -> tuple[str, ...]:
    kinds = [f"{queue or '?'}: {types or 'no type'}" for queue, types, _ in group.largest_kinds[:3]]
    more = len(group.kinds) - len(kinds)
    last = "" if group.all.last is None else local(group.all.last)
    shown = ", ".join(kinds) + (f" and {more} more" if more else "")
    return group.title, group.failure.place, str(group.all.count), str(group.all.new), last, shown, group.key


def _group_document(group: FailureGroup) -> dict[str, object]:
    count = group.all
    return {
        "group": group.key,
        "exception": group.failure.exception,
        "place": group.failure.place,
        "damaged": group.failure.damaged,
        "messages": count.count,
        "new": count.new,
        "first": None if count.first is None else count.first.isoformat(),
        "last": None if count.last is None else count.last.isoformat(),
        "kinds": [
            {"failed_queue": queue, "type": types, "messages": kind.count, "new": kind.new}
            for queue, types, kind in group.largest_kinds
        ],
    }


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
