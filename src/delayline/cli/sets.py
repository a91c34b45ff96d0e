"""Actions on all messages that a filter means: the options, the preview, the confirmation, the progress."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import click

from delayline.cli.options import EXIT_FAILED, with_options
from delayline.clock import SystemClock
from delayline.errors import ConfigurationError
from delayline.filters import MessageFilter
from delayline.opening import beside_queues, open_transport, open_waiting
from delayline.readable import duration
from delayline.set_jobs import HIGHEST_RATE, actor_here, failed_jobs, pending_jobs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from rich.progress import Progress

    from delayline.actions import ActionRecord, MessageSet, SetPreview, SetRequest
    from delayline.cli.options import Command
    from delayline.cli.screen import Screen
    from delayline.set_jobs import MessageJobs
    from delayline.settings import Settings

#: How `--where` is written, in help texts.
WHERE: Final = "Messages that fulfil all conditions: name=value,name=value; repeatable. See the manual for the names."


@dataclass(frozen=True, slots=True)
class SetOptions:
    """What was asked for a set of messages."""

    where: tuple[str, ...]
    every: bool
    yes: bool
    rate: int | None

    def filter(self, ids: tuple[str, ...]) -> MessageFilter | None:
        """Return the filter; None where ids are given instead. Raises UsageError unless one of them is given."""
        if ids:
            if self.where or self.every or self.rate is not None:
                raise click.UsageError("Give IDs, or --where or --all: --rate is for these.")
            return None
        wanted = MessageFilter.parse(self.where, datetime.now(UTC))
        if self.every == bool(self.where):
            raise click.UsageError("Give the IDs of messages, --where with a filter, or --all.")
        if wanted.names_nothing and not self.every:
            raise click.UsageError("The filter names nothing, which would be every message: say --all if you mean it.")
        return wanted


def set_options(command: Command) -> Command:
    """Give a command `wanted`, the options for a set of messages."""

    @functools.wraps(command)
    def with_set(
        *args: object, where: tuple[str, ...], every: bool, yes: bool, rate: int | None, **more: object
    ) -> Any:  # noqa: ANN401 - click's
        return command(*args, wanted=SetOptions(where, every, yes, rate), **more)

    return with_options(
        with_set,
        click.option("--where", multiple=True, metavar="FILTER", help=WHERE),
        click.option("--all", "every", is_flag=True, help="All messages."),
        click.option("--yes", is_flag=True, help="Do not ask for the number of messages to be typed."),
        click.option("--rate", type=click.IntRange(1, HIGHEST_RATE), help="Messages a second at most."),
    )


@dataclass(frozen=True, slots=True)
class OpenSet:
    """The messages of a command, open."""

    jobs: MessageJobs
    messages: MessageSet


@contextlib.asynccontextmanager
async def open_waiting_set(settings: Settings, *, timeouts: bool = False) -> AsyncIterator[OpenSet]:
    """Open the pending messages as sets; with `timeouts` those of an old timeout manager."""
    async with open_waiting(settings, timeouts=timeouts) as store:
        yield _opened(pending_jobs(store, settings.named_endpoint, SystemClock()))


@contextlib.asynccontextmanager
async def open_failed(settings: Settings) -> AsyncIterator[OpenSet]:
    """Open the failed messages as sets."""
    async with open_transport(settings) as transport, beside_queues(settings, transport) as store:
        yield _opened(failed_jobs(transport, settings.error_queue, SystemClock(), beside=store))


def _opened(jobs: MessageJobs) -> OpenSet:
    return OpenSet(jobs, jobs.new_set())


def change_set(
    screen: Screen,
    options: SetOptions,
    request: SetRequest,
    opened: Callable[[], contextlib.AbstractAsyncContextManager[OpenSet]],
    verb: str,
) -> None:
    """Preview, confirm, and change all messages of a request. Exit code 1 when any was not changed.

    Args:
        screen: Where it is shown.
        options: What was asked for.
        request: The action.
        opened: Opens the messages.
        verb: What happens to them, as in `cancel`.
    """
    if screen.as_json and not options.yes:
        raise click.UsageError(f"--json cannot ask: add --yes to {verb} the messages.")
    record = asyncio.run(_change_set(screen, options, request, opened, verb))
    if record is None:
        screen.document({"job": None, "done": 0, "failed": 0})
        return
    show_job(screen, record)


async def _change_set(
    screen: Screen,
    options: SetOptions,
    request: SetRequest,
    opened: Callable[[], contextlib.AbstractAsyncContextManager[OpenSet]],
    verb: str,
) -> ActionRecord | None:
    async with opened() as part:
        with screen.progress() as bars:
            looking = bars.add_task("looking", total=None)
            preview = await part.messages.preview(
                request, lambda number: bars.update(looking, description=f"looked at {number:,}")
            )
        if not preview.number:
            screen.echo(f"there are no {request.what}: nothing to {verb}")
            return None
        screen.echo(
            f"{preview.number:,} {request.what}, counted {_age(preview)} ago: {', '.join(preview.examples)} ..."
        )
        if not part.jobs.is_recorded:
            screen.echo("not recorded: no database here keeps actions, so that the job ends with this command")
        if not options.yes:
            _confirm(preview, verb)
        rate = options.rate
        record = await part.jobs.log.begin(request, preview, actor=actor_here(), rate=rate)
        if record.position or record.done:
            screen.echo(f"job {record.name} by {record.actor} does this already: {record.numbers}")
        return await run_job(screen, part, record)


async def run_job(screen: Screen, part: OpenSet, record: ActionRecord) -> ActionRecord:
    """Run a job, or follow the process that runs it, with a progress bar."""
    with screen.progress() as bars:
        bar = bars.add_task(record.name, total=record.expected)
        job = part.jobs.job(record, part.messages, progress=_shown_by(bars, bar))
        try:
            return await job.run()
        except asyncio.CancelledError:
            if part.jobs.is_recorded:
                screen.complain(f"left at {job.record.numbers}: go on with: delayline actions resume {record.name}")
            raise


def _shown_by(bars: Progress, bar: Any) -> Callable[[ActionRecord], None]:  # noqa: ANN401 - rich's number
    def show(record: ActionRecord) -> None:
        bars.update(bar, completed=record.done + record.failed, description=f"{record.name}: {record.numbers}")

    return show


def show_job(screen: Screen, record: ActionRecord) -> None:
    """Show the outcome of a job. Exit code 1 unless it is done, and every message was changed."""
    is_well = record.over and not record.failed and record.result != "stopped"
    screen.echo(
        f"{'✓' if is_well else '✗'} {record.numbers}{'' if is_well else f', {record.state.value}'}",
        "green" if is_well else "red",
    )
    for problem in record.problems:
        screen.echo(f"  {problem}", "red")
    if record.failed > len(record.problems):
        screen.echo(f"  and {record.failed - len(record.problems):,} more", "red")
    screen.document(
        {
            "job": record.name,
            "state": record.state.value,
            "expected": record.expected,
            "done": record.done,
            "failed": record.failed,
            "problems": list(record.problems),
        }
    )
    if not is_well:
        click.get_current_context().exit(EXIT_FAILED)


def _confirm(preview: SetPreview, verb: str) -> None:
    """Have the number typed. Raises ConfigurationError for another one, Abort for none."""
    typed = click.prompt(f"Type {preview.number} to {verb} them", default="", show_default=False).strip()
    if typed.replace(",", "") != str(preview.number):
        raise ConfigurationError(f"{typed!r} is not the number of messages, {preview.number}: nothing was done")


def _age(preview: SetPreview) -> str:
    return duration(max(datetime.now(UTC) - preview.at, timedelta(0)))
