"""`delayline actions`: what people have done to messages, and the jobs that change many of them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import click

from delayline.actions import OF_PENDING, JobState
from delayline.cli.options import EXIT_FAILED, PLACE_SETTINGS, Commands, examples, json_option, settings_options
from delayline.cli.sets import open_failed, open_waiting_set, run_job, show_job
from delayline.errors import ConfigurationError, DelaylineError
from delayline.opening import open_pending, open_transport
from delayline.readable import local
from delayline.set_jobs import action_log, actor_here, keep_action

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from delayline.actions import ActionLog, ActionRecord
    from delayline.cli.screen import Screen
    from delayline.settings import Settings

LISTED: Final = 50


@click.group(cls=Commands, epilog=examples("delayline actions list --endpoint sales"))
def actions() -> None:
    """List what people did to messages, resume or stop the jobs that change many of them."""


@actions.command("list", epilog=examples("delayline actions list --endpoint sales --limit 20"))
@click.option("--limit", type=click.IntRange(1, 10_000), default=LISTED, show_default=True, help="How many at most.")
@settings_options(*PLACE_SETTINGS)
@json_option
def list_actions(settings: Settings, screen: Screen, limit: int) -> None:
    """List the latest actions on the endpoint's pending messages and on its error queue, the latest first."""
    records = asyncio.run(_latest(settings, limit))
    rows = [
        (
            record.name,
            local(record.started),
            record.actor,
            record.action.value,
            record.what,
            record.state.value,
            record.result if record.over else record.numbers,
        )
        for record in records
    ]
    if rows:
        screen.table(("name", "at", "who", "action", "messages", "state", "outcome"), rows)
    else:
        screen.echo("no actions")
    if any(record.state is JobState.INTERRUPTED for record in records):
        screen.echo("go on with an interrupted job: delayline actions resume NAME")
    screen.document({"actions": [_as_document(record) for record in records]})


@actions.command(epilog=examples("delayline actions resume cancel-1f0c2ab9-1 --endpoint sales"))
@click.argument("name", metavar="NAME")
@settings_options(*PLACE_SETTINGS)
@json_option
def resume(settings: Settings, screen: Screen, name: str) -> None:
    """Go on with a job whose process has ended, or follow one that runs. Exit code 1 unless it changes all messages."""

    async def work() -> ActionRecord:
        record = await _named(settings, name)
        if record.request is None:
            raise ConfigurationError(f"{name!r} is an action on one message, which is over: only jobs go on")
        failed = record.action not in OF_PENDING
        async with open_failed(settings) if failed else open_waiting_set(settings) as part:
            return record if record.over else await run_job(screen, part, record)

    show_job(screen, asyncio.run(work()))


@actions.command(epilog=examples("delayline actions stop cancel-1f0c2ab9-1 --endpoint sales"))
@click.argument("name", metavar="NAME")
@settings_options(*PLACE_SETTINGS)
@json_option
def stop(settings: Settings, screen: Screen, name: str) -> None:
    """Stop a job, wherever it runs; what it has changed stays changed. Exit code 1 if it does not run."""

    async def work() -> bool:
        async with _logs(settings) as logs:
            for log, endpoint in logs:
                record = await log.action(name)
                if record is not None and await log.stop(name):
                    await keep_action(log, endpoint, record.action, actor_here(), name, "stopped the job", done=True)
                    return True
        return False

    stopped = asyncio.run(work())
    screen.echo(f"✓ {name}: stopped" if stopped else f"✗ {name}: no such job runs", "green" if stopped else "red")
    screen.document({"job": name, "stopped": stopped})
    if not stopped:
        click.get_current_context().exit(EXIT_FAILED)


async def _latest(settings: Settings, limit: int) -> list[ActionRecord]:
    records: dict[str, ActionRecord] = {}
    async with _logs(settings) as logs:
        for log, _ in logs:
            records |= {record.name: record for record in await log.actions(limit)}
    return sorted(records.values(), key=lambda record: record.started, reverse=True)[:limit]


async def _named(settings: Settings, name: str) -> ActionRecord:
    async with _logs(settings) as logs:
        for log, _ in logs:
            if (record := await log.action(name)) is not None:
                return record
    raise DelaylineError(f"no action is named {name!r} there. See: delayline actions list")


@contextlib.asynccontextmanager
async def _logs(settings: Settings) -> AsyncIterator[Sequence[tuple[ActionLog, str]]]:
    """Open the records of the store's and of the transport's database. Raises ConfigurationError if there are none."""
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_pending(settings))
        transport = await stack.enter_async_context(open_transport(settings))
        named = (([store], settings.named_endpoint), ([transport, store], settings.error_queue))
        logs = [(log, name) for parts, name in named if (log := action_log(parts, name)) is not None]
        if not logs:
            raise ConfigurationError(
                "neither the pending messages nor the queues are in a database that keeps actions: they are in the log "
                "only"
            )
        yield logs


def _as_document(record: ActionRecord) -> dict[str, object]:
    return {
        "name": record.name,
        "endpoint": record.endpoint,
        "action": record.action.value,
        "who": record.actor,
        "messages": record.what,
        "filter": None if record.request is None else str(record.request.filter),
        "state": record.state.value,
        "started": record.started.isoformat(),
        "finished": None if record.finished is None else record.finished.isoformat(),
        "expected": record.expected,
        "done": record.done,
        "failed": record.failed,
        "problems": list(record.problems),
        "result": record.result,
    }
