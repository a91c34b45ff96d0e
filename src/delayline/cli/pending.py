"""`delayline pending`, `cancel`, `reschedule`, `send-now`: list and change pending messages."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import click

from delayline.actions import OperatorAction, SetRequest
from delayline.cli.connection import start_of_delay
from delayline.cli.due import delay_given, due_options, shift_given
from delayline.cli.options import EXIT_FAILED, PLACE_SETTINGS, examples, json_option, settings_options
from delayline.cli.screen import bar
from delayline.cli.sets import change_set, open_waiting_set, set_options
from delayline.clock import ONE_HOUR, SystemClock, latest_of
from delayline.delayed.pauses import SupportsDispatchPauses
from delayline.delayed.store import Outcome, SupportsClock
from delayline.opening import open_waiting
from delayline.outgoing import due_time
from delayline.readable import in_the_future, local, relative, size
from delayline.set_jobs import action_log, actor_here, keep_action
from delayline.timeouts.persister import TO_GIVE_A_TIME, SupportsWithoutTime

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayline.cli.options import Command
    from delayline.cli.screen import Screen
    from delayline.cli.sets import SetOptions
    from delayline.delayed.pauses import DispatchPause
    from delayline.delayed.store import DueCount, SupportsManagement
    from delayline.message import DelayedMessage
    from delayline.settings import Settings

timeouts_option: Callable[[Command], Command] = click.option(
    "--timeouts", is_flag=True, help="Of the old timeout manager at timeouts_url, not of the store."
)
MOST = 2**31 - 1
"""Rows that every database takes as a limit."""
WIDEST = timedelta(days=365_000)
MOST_WITHOUT_TIME = 1000


@click.command(
    epilog=examples(
        "delayline pending --endpoint sales --limit 20",
        "delayline pending --endpoint sales --count --bucket 1d",
    )
)
@click.option("--destination", metavar="QUEUE", help="Only messages to this queue.")
@click.option("--limit", type=click.IntRange(1, MOST), default=50, show_default=True, help="How many to list at most.")
@click.option("--count", "counting", is_flag=True, help="Count by due time and destination instead.")
@click.option("--bucket", callback=delay_given, help="With --count, the width of a due time bucket, by default 1h.")
@timeouts_option
@settings_options(*PLACE_SETTINGS)
@json_option
def pending(
    settings: Settings,
    screen: Screen,
    destination: str | None,
    limit: int,
    counting: bool,
    bucket: timedelta | None,
    timeouts: bool,
) -> None:
    """List the messages that wait, earliest due first."""
    if bucket is not None and not counting:
        raise click.UsageError("--bucket is the width of what --count counts: add --count, or leave it out")
    if counting:
        bucket = ONE_HOUR if bucket is None else bucket
        if not timedelta(0) < bucket <= WIDEST:
            raise click.BadParameter("must be longer than zero, and 1000 years at most", param_hint="--bucket")
        counts, without_time = asyncio.run(_counts(settings, bucket, timeouts=timeouts))
        _show_counts(screen, counts, destination, _of(destination, without_time))
    else:
        listed = asyncio.run(_listed(settings, destination, limit, timeouts=timeouts))
        _show_messages(screen, listed, limit)


@click.command(
    epilog=examples(
        "delayline cancel 0197a1c5-7e52-7d3e-b7a6-0242ac120002 --endpoint sales",
        "delayline cancel --where destination=billing,due=<2026-12-01 --endpoint sales",
    )
)
@click.argument("ids", nargs=-1, metavar="[ID...]")
@set_options
@timeouts_option
@settings_options(*PLACE_SETTINGS)
@json_option
def cancel(settings: Settings, screen: Screen, ids: tuple[str, ...], wanted: SetOptions, timeouts: bool) -> None:
    """Cancel messages that wait: by id, or all that a filter means. Exit code 1 when any could not be cancelled."""
    place = WaitingPlace(settings, timeouts)
    if (chosen := wanted.filter(ids)) is not None:
        change_set(
            screen,
            wanted,
            SetRequest(OperatorAction.CANCEL, chosen),
            partial(open_waiting_set, settings, timeouts=timeouts),
            "cancel",
        )
        return
    outcomes = asyncio.run(place.each(OperatorAction.CANCEL, ids, lambda store, each: store.cancel(each)))
    _print_outcomes(screen, outcomes, "cancelled")


@click.command(
    epilog=examples(
        "delayline reschedule order-17-reminder --delay 2h --endpoint sales",
        "delayline reschedule order-17-reminder --at 2026-05-01T09:00:00+02:00 --endpoint sales",
        "delayline reschedule --where type=Reminder --by 1d --rate 1000 --endpoint sales",
    )
)
@click.argument("ids", nargs=-1, metavar="[ID...]")
@due_options
@click.option("--by", callback=shift_given, metavar="DELAY", help="How much later; with a minus earlier: 2h, -30m.")
@set_options
@timeouts_option
@settings_options(*PLACE_SETTINGS)
@json_option
def reschedule(
    settings: Settings,
    screen: Screen,
    ids: tuple[str, ...],
    wanted: SetOptions,
    delay: timedelta | None,
    deliver_at: datetime | None,
    by: timedelta | None,
    timeouts: bool,
) -> None:
    """Give messages that wait another due time. Exit code 1 when it could not be done for any."""
    if sum(given is not None for given in (delay, deliver_at, by)) != 1:
        raise click.UsageError("Give one of --delay, --at and --by.")
    place, now = WaitingPlace(settings, timeouts), datetime.now(UTC)
    due = None if by is not None else in_the_future(due_time(now, delay, deliver_at) or now, now)
    if (chosen := wanted.filter(ids)) is not None:
        request = SetRequest(OperatorAction.RESCHEDULE, chosen, to=due, by=by)
        change_set(screen, wanted, request, partial(open_waiting_set, settings, timeouts=timeouts), "reschedule")
        return
    if due is None:
        raise click.UsageError("--by is for --where and --all: give one message its time with --delay or --at.")
    fixed = due

    async def move(store: SupportsManagement, message_id: str) -> Outcome:
        clock = store.clock() if isinstance(store, SupportsClock) else None
        return await store.reschedule(message_id, fixed if delay is None else start_of_delay(clock) + delay)

    outcomes = asyncio.run(place.each(OperatorAction.RESCHEDULE, ids, move))
    _print_outcomes(screen, outcomes, f"due {local(due)}, {relative(due, now)}")


@click.command(
    "send-now",
    epilog=examples(
        "delayline send-now order-17-reminder --endpoint sales",
        "delayline send-now --where destination=billing --rate 50 --endpoint sales",
    ),
)
@click.argument("ids", nargs=-1, metavar="[ID...]")
@set_options
@timeouts_option
@settings_options(*PLACE_SETTINGS)
@json_option
def send_now(settings: Settings, screen: Screen, ids: tuple[str, ...], wanted: SetOptions, timeouts: bool) -> None:
    """Make messages that wait due at once. Exit code 1 when it could not be done for any."""
    place = WaitingPlace(settings, timeouts)
    if (chosen := wanted.filter(ids)) is not None:
        change_set(
            screen,
            wanted,
            SetRequest(OperatorAction.SEND_NOW, chosen),
            partial(open_waiting_set, settings, timeouts=timeouts),
            "send",
        )
        return

    async def send(store: SupportsManagement, message_id: str) -> Outcome:
        clock = store.clock() if isinstance(store, SupportsClock) else SystemClock()
        return await store.reschedule(message_id, latest_of(clock)())

    _print_outcomes(screen, asyncio.run(place.each(OperatorAction.SEND_NOW, ids, send)), "due now")


@dataclass(frozen=True, slots=True)
class WaitingPlace:
    """Where the messages of a command wait."""

    settings: Settings
    timeouts: bool

    async def each(
        self,
        action: OperatorAction,
        ids: Sequence[str],
        change: Callable[[SupportsManagement, str], Awaitable[Outcome]],
    ) -> dict[str, Outcome]:
        """Change message by message, and keep a record of it."""
        outcomes: dict[str, Outcome] = {}
        async with open_waiting(self.settings, timeouts=self.timeouts) as store:
            name, actor = self.settings.named_endpoint, actor_here()
            log = action_log([store], name)
            for message_id in ids:
                outcome = outcomes[message_id] = await change(store, message_id)
                is_done = outcome is Outcome.DONE
                await keep_action(log, name, action, actor, message_id, outcome.meaning, done=is_done)
        return outcomes


class Listed(NamedTuple):
    """What waits, and why messages may not leave."""

    messages: Sequence[DelayedMessage]
    without_time: Sequence[DelayedMessage]
    pauses: Sequence[DispatchPause]


async def _listed(settings: Settings, destination: str | None, limit: int, *, timeouts: bool) -> Listed:
    async with open_waiting(settings, timeouts=timeouts) as store:
        pauses = await store.dispatch_pauses.all() if isinstance(store, SupportsDispatchPauses) else []
        return Listed(
            await store.pending(destination=destination, limit=limit),
            _of(destination, await _without_time(store)),
            [pause for pause in pauses if destination is None or pause.destination in (None, destination)],
        )


async def _counts(
    settings: Settings, bucket: timedelta, *, timeouts: bool
) -> tuple[Sequence[DueCount], Sequence[DelayedMessage]]:
    async with open_waiting(settings, timeouts=timeouts) as store:
        return await store.count_by_due(bucket), await _without_time(store)


async def _without_time(store: object) -> Sequence[DelayedMessage]:
    """Return messages that are never due, which .NET's timeouts tables may have."""
    return await store.without_time(MOST_WITHOUT_TIME) if isinstance(store, SupportsWithoutTime) else ()


def _of(destination: str | None, messages: Sequence[DelayedMessage]) -> Sequence[DelayedMessage]:
    return [message for message in messages if destination in (None, message.destination)]


def _show_without_time(screen: Screen, messages: Sequence[DelayedMessage]) -> None:
    if not messages:
        return
    rows = [(message.id, message.destination, size(len(message.message.body))) for message in messages]
    screen.table(("id without a time", "destination", "size"), rows)
    number = f"at least {len(rows)}" if len(rows) == MOST_WITHOUT_TIME else str(len(rows))
    screen.echo(f"{number} without a time, which are never due. {TO_GIVE_A_TIME}")


def _show_messages(screen: Screen, listed: Listed, limit: int) -> None:
    messages, without_time, pauses = listed
    now = datetime.now(UTC)
    rows = [
        (
            message.id,
            message.destination,
            local(message.due),
            relative(message.due, now),
            message.number_of_retries,
            size(len(message.message.body)),
        )
        for message in messages
    ]
    if rows:
        screen.table(("id", "destination", "due", "", "retries", "size"), rows)
    elif not without_time:
        screen.echo("no pending messages")
    if len(rows) == limit:
        screen.echo(f"the first {limit}; see more with --limit, all with --count", "dim")
    _show_without_time(screen, without_time)
    for pause in pauses:
        screen.echo(f"{pause.text} is paused since {local(pause.since)}", "yellow")
    documents = [_as_document(message) for message in messages]
    documents += [_as_document(message) | {"due": None} for message in without_time]
    paused = [{"destination": pause.destination, "since": pause.since.isoformat()} for pause in pauses]
    screen.document({"pending": documents, "paused": paused})


def _as_document(message: DelayedMessage) -> dict[str, object]:
    return {
        "id": message.id,
        "destination": message.destination,
        "due": message.due.isoformat(),
        "retries": message.number_of_retries,
        "bytes": len(message.message.body),
    }


def _show_counts(
    screen: Screen, counts: Sequence[DueCount], destination: str | None, without_time: Sequence[DelayedMessage]
) -> None:
    counts = [count for count in counts if destination is None or count.destination == destination]
    largest = max((count.count for count in counts), default=0)
    total = sum(count.count for count in counts)
    now = datetime.now(UTC)
    if counts:
        rows = [(local(count.start), count.destination, count.count, bar(count.count, largest)) for count in counts]
        screen.table(("due from", "destination", "count", ""), rows)
    screen.echo(f"{total} pending {'message' if total == 1 else 'messages'}")
    _show_without_time(screen, without_time)
    screen.document(
        {
            "now": now.isoformat(),
            "total": total,
            "counts": [
                {"due_from": count.start.isoformat(), "destination": count.destination, "count": count.count}
                for count in counts
            ],
        }
    )


def _print_outcomes(screen: Screen, outcomes: dict[str, Outcome], done: str) -> None:
    for message_id, outcome in outcomes.items():
        succeeded = outcome is Outcome.DONE
        screen.echo(
            f"{'✓' if succeeded else '✗'} {message_id}: {done if succeeded else outcome.meaning}",
            "green" if succeeded else "red",
        )
    screen.document({"outcomes": {message_id: outcome.value for message_id, outcome in outcomes.items()}})
    if any(outcome is not Outcome.DONE for outcome in outcomes.values()):
        click.get_current_context().exit(EXIT_FAILED)
