"""`delayline schedules`: list, add, change, pause, resume, trigger and remove recurring messages."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from delayline.cli.due import delay_given
from delayline.cli.options import PLACE_SETTINGS, Commands, examples, json_option, settings_options
from delayline.cli.send import header_given
from delayline.clock import SystemClock
from delayline.composition import endpoint_from
from delayline.delayed.recurrence import cron, interval
from delayline.delayed.schedules import MISSED_CHOICES, Schedules, scheduled
from delayline.delayed.store import SupportsClock, SupportsSetup
from delayline.opening import open_store, open_transport, refuse_memory
from delayline.outgoing import Composer, Destinations
from delayline.readable import local, relative
from delayline.recurring import schedule_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from datetime import timedelta

    from delayline.cli.options import Command
    from delayline.cli.screen import Screen
    from delayline.clock import Clock
    from delayline.delayed.recurrence import Recurrence
    from delayline.delayed.schedules import Missed, Schedule, ScheduledStore
    from delayline.settings import Settings

Found = TypeVar("Found")
#: How many characters of a body `show` prints.
BODY_SHOWN: Final = 2000

name_argument: Callable[[Command], Command] = click.argument("name", metavar="NAME")
cron_option: Callable[[Command], Command] = click.option(
    "--cron", "expression", metavar="EXPRESSION", help="When it is due, as in '0 9 * * MON-FRI'; needs the extra cron."
)
zone_option: Callable[[Command], Command] = click.option(
    "--tz", metavar="ZONE", help="Time zone of --cron, as in Europe/Berlin.  [default: UTC]"
)
every_option: Callable[[Command], Command] = click.option(
    "--every", "length", callback=delay_given, metavar="TIME", help="The interval at which it is due, as in 6h."
)
missed_option: Callable[[Command], Command] = click.option(
    "--missed",
    type=click.Choice(MISSED_CHOICES),
    help="How many of the occurrences leave that no process was there to dispatch.",
)


@click.group(cls=Commands, epilog=examples("delayline schedules list", "delayline schedules pause nightly-report"))
def schedules() -> None:
    """List and change the recurring messages of an endpoint."""


@schedules.command(
    "list", epilog=examples("delayline schedules list --endpoint sales", "delayline schedules list --json")
)
@settings_options(*PLACE_SETTINGS)
@json_option
def list_schedules(settings: Settings, screen: Screen) -> None:
    """List the schedules: when each is due, and next."""
    found = asyncio.run(_with(settings, lambda schedules: schedules.list()))
    now = datetime.now(UTC)
    if found:
        rows = [(each.name, each.recurrence, each.destination, *_next(each, now)) for each in found]
        screen.table(("name", "due", "destination", "next", ""), rows)
    else:
        screen.echo("no schedules")
    screen.document({"schedules": list(map(_document, found))})


@schedules.command(epilog=examples("delayline schedules show nightly-report --endpoint sales"))
@name_argument
@settings_options(*PLACE_SETTINGS)
@json_option
def show(settings: Settings, screen: Screen, name: str) -> None:
    """Show a schedule with its headers and body."""
    schedule = asyncio.run(_with(settings, lambda schedules: schedules.get(name)))
    following, when = _next(schedule, datetime.now(UTC))
    rows = {
        "due": schedule.recurrence,
        "destination": schedule.destination,
        "next": f"{following} {when}".strip(),
        "last": "none yet" if schedule.last_at is None else local(schedule.last_at),
        "missed": schedule.missed,
        "declared": "in code" if schedule.declared else "by hand",
        **schedule.headers,
        "body": schedule.body[:BODY_SHOWN].decode(errors="replace"),
    }
    screen.table(("name", schedule.name), list(rows.items()))
    body = schedule.body.decode(errors="replace")
    screen.document({**_document(schedule), "headers": dict(schedule.headers), "body": body})


@schedules.command(
    epilog=examples(
        "delayline schedules add nightly-report reports --cron '0 9 * * MON-FRI' --tz Europe/Berlin",
        """delayline schedules add cleaning reports '{"kind": "cleaning"}' --every 6h --endpoint reports""",
    )
)
@name_argument
@click.argument("destination")
@click.argument("body", required=False, default="")
@cron_option
@zone_option
@every_option
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header; repeatable.")
@missed_option
@click.option(
    "--no-check-destination", "unchecked", is_flag=True, help="Add it also for a queue that does not exist now."
)
@settings_options(*PLACE_SETTINGS)
@json_option
def add(  # noqa: PLR0913 - an option each
    settings: Settings,
    screen: Screen,
    name: str,
    destination: str,
    body: str,
    expression: str | None,
    tz: str | None,
    length: timedelta | None,
    headers: tuple[str, ...],
    missed: Missed | None,
    unchecked: bool,
) -> None:
    """Add a recurring message to DESTINATION with BODY ("-" reads it from standard input).

    A running endpoint takes part at once. Exit code 1 if there is a schedule with the name.
    """
    recurrence = _recurrence(expression, tz, length)
    if recurrence is None:
        raise click.UsageError("Give one of --cron and --every.")
    given = {
        "name": name,
        "recurrence": recurrence,
        "destination": destination,
        "body": sys.stdin.read() if body == "-" else body,
        "headers": dict(header_given(header) for header in headers),
        "missed": missed or "one",
    }
    schedule = asyncio.run(_add(settings, given, check_destination=not unchecked))
    _report(screen, schedule, "added")


@schedules.command(epilog=examples("delayline schedules pause nightly-report --endpoint sales"))
@name_argument
@settings_options(*PLACE_SETTINGS)
@json_option
def pause(settings: Settings, screen: Screen, name: str) -> None:
    """Pause a schedule: its pending occurrence is cancelled."""
    _report(screen, asyncio.run(_with(settings, lambda schedules: schedules.pause(name))), "paused")


@schedules.command(epilog=examples("delayline schedules resume nightly-report --endpoint sales"))
@name_argument
@settings_options(*PLACE_SETTINGS)
@json_option
def resume(settings: Settings, screen: Screen, name: str) -> None:
    """Resume a schedule from now on."""
    _report(screen, asyncio.run(_with(settings, lambda schedules: schedules.resume(name))), "resumed")


@schedules.command(epilog=examples("delayline schedules trigger nightly-report --endpoint sales"))
@name_argument
@settings_options(*PLACE_SETTINGS)
@json_option
def trigger(settings: Settings, screen: Screen, name: str) -> None:
    """Send an occurrence now, besides those of the schedule."""
    message_id = asyncio.run(_with(settings, lambda schedules: schedules.trigger(name)))
    screen.echo(f"✓ {name}: {message_id} leaves now", "green")
    screen.document({"name": name, "id": message_id})


@schedules.command(epilog=examples("delayline schedules change nightly-report --cron '0 7 * * *' --endpoint sales"))
@name_argument
@cron_option
@zone_option
@every_option
@click.option("--destination", metavar="QUEUE", help="The queue that it goes to.")
@click.option("--body", help='The body of each occurrence; "-" reads it from standard input.')
@missed_option
@settings_options(*PLACE_SETTINGS)
@json_option
def change(
    settings: Settings,
    screen: Screen,
    name: str,
    expression: str | None,
    tz: str | None,
    length: timedelta | None,
    destination: str | None,
    body: str | None,
    missed: Missed | None,
) -> None:
    """Change a schedule and its pending occurrence, until its declaration in code changes."""
    recurrence = _recurrence(expression, tz, length)
    content = sys.stdin.read() if body == "-" else body
    if (recurrence, destination, content, missed) == (None,) * 4:
        raise click.UsageError("Give what is to be changed: --cron, --every, --destination, --body or --missed.")

    def change(schedules: Schedules) -> Coroutine[None, None, Schedule]:
        return schedules.change(name, recurrence=recurrence, destination=destination, body=content, missed=missed)

    _report(screen, asyncio.run(_with(settings, change)), "changed")


@schedules.command(epilog=examples("delayline schedules remove nightly-report --endpoint sales"))
@name_argument
@settings_options(*PLACE_SETTINGS)
@json_option
def remove(settings: Settings, screen: Screen, name: str) -> None:
    """Remove a schedule and cancel its pending occurrence; declared in code, it comes back at the next start."""
    asyncio.run(_with(settings, lambda schedules: schedules.remove(name)))
    screen.echo(f"✓ {name}: removed", "green")
    screen.document({"name": name, "removed": True})


@contextlib.asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[ScheduledStore]:
    refuse_memory(settings)
    # It says why, if the settings are those of an endpoint that keeps no schedules.
    _ = endpoint_from(settings, polling=False, send_only=True, setup_infrastructure=False).schedules
    async with open_store(settings) as store:
        yield scheduled(store)


async def _with(settings: Settings, work: Callable[[Schedules], Coroutine[None, None, Found]]) -> Found:
    async with _opened(settings) as store:
        return await work(Schedules(store, _clock_of(store)))


def _clock_of(store: object) -> Clock:
    return store.clock() if isinstance(store, SupportsClock) else SystemClock()


async def _add(settings: Settings, given: dict[str, Any], *, check_destination: bool) -> Schedule:
    """Add a schedule, and create the table of schedules if there is none."""
    async with _opened(settings) as store:
        clock = _clock_of(store)
        composer = Composer(settings.named_endpoint, clock, reply_to=None)
        schedule = replace(schedule_of(composer, clock, **given), declared="")
        if check_destination:
            async with open_transport(settings) as transport:
                await Destinations(transport, clock).check(schedule.destination)
        schedules = Schedules(store, clock)
        if not await store.schedules.exist() and isinstance(store, SupportsSetup):
            schedules.require()
            await store.setup_infrastructure(settings.named_endpoint)
        return await schedules.add(schedule)


def _recurrence(expression: str | None, tz: str | None, length: timedelta | None) -> Recurrence | None:
    if expression is not None and length is not None:
        raise click.UsageError("Give one of --cron and --every.")
    if tz is not None and expression is None:
        raise click.UsageError("--tz is for --cron.")
    if length is not None:
        return interval(seconds=length.total_seconds())
    return None if expression is None else cron(expression, tz=tz or "UTC")


def _next(schedule: Schedule, now: datetime) -> tuple[str, str]:
    """Return when the next occurrence is due, absolute and relative."""
    if schedule.paused:
        return "paused", ""
    return ("none", "") if schedule.next_at is None else (local(schedule.next_at), relative(schedule.next_at, now))


def _report(screen: Screen, schedule: Schedule, done: str) -> None:
    following, when = _next(schedule, datetime.now(UTC))
    then = "" if schedule.paused else f", next {following} {when}".rstrip()
    screen.echo(f"✓ {schedule.name}: {done}{then}", "green")
    screen.document(_document(schedule))


def _document(schedule: Schedule) -> dict[str, object]:
    return {
        "name": schedule.name,
        "recurrence": schedule.recurrence,
        "destination": schedule.destination,
        "missed": schedule.missed,
        "paused": schedule.paused,
        "next": None if schedule.next_at is None else schedule.next_at.isoformat(),
        "last": None if schedule.last_at is None else schedule.last_at.isoformat(),
        "declared_in_code": bool(schedule.declared),
    }
