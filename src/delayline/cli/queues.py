"""`delayline queues`, `pause`, `resume`, `limit`, `peek` and `purge`: look into queues, limit and hold them."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from delayline.actions import OperatorAction
from delayline.backends import backend_of
from delayline.cli.options import PLACE_SETTINGS, examples, json_option, settings_options, with_options
from delayline.clock import SystemClock
from delayline.delayed.pauses import dispatching_to
from delayline.delayed.store import SupportsClock
from delayline.error_queue import managed_queues
from delayline.errors import ConfigurationError, CorruptHeaders
from delayline.message import Headers, from_wire_time
from delayline.opening import open_transport, open_waiting
from delayline.pending import PendingMessages
from delayline.readable import local, size
from delayline.set_jobs import action_log, actor_here, keep_action
from delayline.transport import QueueLimits, limited

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from delayline.cli.options import Command
    from delayline.cli.screen import Screen
    from delayline.message import Message
    from delayline.settings import Settings

QUEUE_SETTINGS: Final = ("url", "transport_url")
NONE: Final = "none"


@click.command(epilog=examples("delayline queues", "delayline queues --json"))
@settings_options(*QUEUE_SETTINGS)
@json_option
def queues(settings: Settings, screen: Screen) -> None:
    """List the queues: how many messages are in each, and its limits. Counts include messages that are handled now."""

    async def work() -> list[tuple[QueueLimits, int]]:
        async with open_transport(settings) as transport:
            counted = managed_queues(transport)
            return [(limit, await counted.count(limit.queue)) for limit in await limited(transport).limits()]

    limits = asyncio.run(work())
    rows = [(limit.queue, str(number), *_cells(limit)) for limit, number in limits]
    screen.table(("queue", "messages", "received", "at once", "a second", "types at once"), rows)
    screen.document({"queues": [{**_document(limit), "messages": number} for limit, number in limits]})


@dataclass(frozen=True, slots=True)
class Paused:
    """What `pause` and `resume` are given: a queue whose messages are received, or due messages of an endpoint."""

    queue: str | None
    destination: str | None
    everything: bool

    def __post_init__(self) -> None:
        if [self.queue is not None, self.destination is not None, self.everything].count(True) != 1:
            raise click.UsageError("Give one of QUEUE, --dispatch and --dispatch-all.")

    @property
    def text(self) -> str:
        """The due messages, in words."""
        return dispatching_to(self.destination)


def paused_options(command: Command) -> Command:
    """Give a command `paused`."""

    @functools.wraps(command)
    def with_paused(*args: object, queue: str | None, dispatch: str | None, dispatch_all: bool, **others: Any) -> Any:  # noqa: ANN401 - click's
        return command(*args, paused=Paused(queue, dispatch, dispatch_all), **others)

    return with_options(
        with_paused,
        click.argument("queue", required=False),
        click.option("--dispatch", metavar="QUEUE", help="The endpoint's delayed messages for this queue, when due."),
        click.option("--dispatch-all", is_flag=True, help="All delayed messages of the endpoint, when due."),
    )


@click.command(epilog=examples("delayline pause billing", "delayline pause --dispatch billing --endpoint sales"))
@paused_options
@settings_options(*PLACE_SETTINGS)
@json_option
def pause(settings: Settings, screen: Screen, paused: Paused) -> None:
    """Receive no more messages from a queue, or dispatch no more delayed messages, in any process, until `resume`.

    Messages that are handled, or dispatched, at this moment are so still.
    """
    if paused.queue is not None:
        _change(settings, screen, paused.queue, OperatorAction.PAUSE, paused=True)
        return
    pause_it = OperatorAction.PAUSE, "paused"
    is_new = asyncio.run(_with_pauses(settings, paused, *pause_it, lambda pauses: pauses.pause(paused.destination)))
    screen.echo(f"✓ {paused.text} is paused" + ("" if is_new else " already"), "green")
    screen.document({"destination": paused.destination, "paused": True, "changed": is_new})


@click.command(
    epilog=examples("delayline resume billing", "delayline resume --dispatch billing --rate 50 --endpoint sales")
)
@paused_options
@click.option("--rate", type=float, metavar="N", help="The most overdue messages that leave in a second.")
@settings_options(*PLACE_SETTINGS)
@json_option
def resume(settings: Settings, screen: Screen, paused: Paused, rate: float | None) -> None:
    """Receive messages from a paused queue, or dispatch delayed messages, again.

    With --rate overdue messages get later due times, so that they leave one after the other; other messages do not
    wait for them. To limit how many are received from a queue see `delayline limit`.
    """
    if paused.queue is not None:
        if rate is not None:
            raise click.UsageError("--rate is for --dispatch and --dispatch-all; for a queue: delayline limit")
        _change(settings, screen, paused.queue, OperatorAction.RESUME, paused=False)
        return
    how = "" if rate is None else f", overdue messages at {rate:g} a second"
    resume_it = OperatorAction.RESUME, f"resumed{how}"

    async def work(pauses: PendingMessages) -> bool:
        return await pauses.resume(paused.destination, rate=rate)

    was_paused = asyncio.run(_with_pauses(settings, paused, *resume_it, work))
    screen.echo(f"✓ {paused.text} is resumed{how}" if was_paused else f"✓ {paused.text} was not paused", "green")
    screen.document({"destination": paused.destination, "paused": False, "changed": was_paused})


async def _with_pauses(
    settings: Settings,
    paused: Paused,
    action: OperatorAction,
    result: str,
    work: Callable[[PendingMessages], Coroutine[None, None, bool]],
) -> bool:
    """Pause or resume, and record what was changed."""
    native = None if settings.timeout_manager else backend_of(settings.resolved_store_url).native_delays
    if native is not None:
        raise ConfigurationError(
            f"messages in {native} leave when they are due, and cannot be held back: stop the endpoints that receive "
            "them, or keep delayed messages in a database with store_url"
        )
    async with open_waiting(settings, timeouts=False) as store:
        clock, name = store.clock() if isinstance(store, SupportsClock) else SystemClock(), settings.named_endpoint
        changed = await work(PendingMessages(store, clock, name))
        if changed:
            await keep_action(action_log([store], name), name, action, actor_here(), paused.text, result, done=True)
        return changed


@click.command(
    epilog=examples(
        "delayline limit billing --concurrency 5 --rate 20",
        "delayline limit billing --rate none",
        "delayline limit billing --type shop.Bill --concurrency 4",
    )
)
@click.argument("queue")
@click.option("--concurrency", metavar="N", help="How many of its messages are handled at once, or none for no limit.")
@click.option("--rate", metavar="N", help="How many of its messages are received a second, or none for no limit.")
@click.option(
    "--type",
    "kind",
    metavar="NAME",
    help="Let --concurrency limit the messages of this type only; none for the number in the program.",
)
@settings_options(*QUEUE_SETTINGS)
@json_option
def limit(
    settings: Settings, screen: Screen, queue: str, concurrency: str | None, rate: str | None, kind: str | None
) -> None:
    """Limit a queue or a type of message over all processes; they follow within a second."""
    if concurrency is None and (rate is None or kind is not None):
        raise click.UsageError("Give --concurrency, --rate or both; with --type, --concurrency.")
    changes: dict[str, Any] = {}
    if concurrency is not None:
        number = None if concurrency == NONE else _number("--concurrency", concurrency, int)
        changes |= {"concurrency": number} if kind is None else {"handlers": {kind: number}}
    if rate is not None:
        changes["rate"] = None if rate == NONE else _number("--rate", rate, float)
    _change(settings, screen, queue, OperatorAction.LIMIT, **changes)


@click.command(epilog=examples("delayline peek billing", "delayline peek billing --limit 3 --json"))
@click.argument("queue")
@click.option("--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="How many at most.")
@settings_options(*QUEUE_SETTINGS)
@json_option
def peek(settings: Settings, screen: Screen, queue: str, limit: int) -> None:
    """Show the messages of a queue, oldest first, without receiving them."""

    async def work() -> tuple[int, list[Message]]:
        async with open_transport(settings) as transport:
            managed = managed_queues(transport)
            return await managed.count(queue), list(await managed.browse(queue, limit))

    total, messages = asyncio.run(work())
    if messages:
        screen.table(("id", "sent", "type", "size", "body"), [_row(message) for message in messages])
    screen.echo(f"{total} in {queue}" + ("" if len(messages) == total else f", {len(messages)} shown"))
    screen.document({"queue": queue, "total": total, "messages": [_summary(message) for message in messages]})


@click.command(epilog=examples("delayline purge billing --yes"))
@click.argument("queue")
@click.option("--yes", is_flag=True, help="Do not ask.")
@settings_options(*QUEUE_SETTINGS)
@json_option
def purge(settings: Settings, screen: Screen, queue: str, yes: bool) -> None:
    """Delete the messages of a queue for ever, except messages that are handled now."""
    if screen.as_json and not yes:
        raise click.UsageError("--json cannot ask: add --yes to delete the messages for ever.")

    async def count() -> int:
        async with open_transport(settings) as transport:
            return await managed_queues(transport).count(queue)

    async def work() -> int:
        async with open_transport(settings) as transport:
            return await managed_queues(transport).purge(queue)

    if not yes:
        click.confirm(f"Delete the {asyncio.run(count())} messages of {queue!r}?", abort=True, err=True)
    number = asyncio.run(work())
    screen.echo(f"✓ {queue}: {number} deleted", "green")
    screen.document({"queue": queue, "deleted": number})


def _change(
    settings: Settings,
    screen: Screen,
    queue: str,
    action: OperatorAction,
    **changes: Any,  # noqa: ANN401 - what set_limits takes
) -> None:
    async def work() -> QueueLimits:
        async with open_transport(settings) as transport:
            limits = await limited(transport).set_limits(queue, **changes)
            log, endpoint = action_log([transport], settings.error_queue), settings.error_queue
            await keep_action(log, endpoint, action, actor_here(), f"queue {queue}", limits.text, done=True)
            return limits

    limits = asyncio.run(work())
    screen.echo(f"✓ {queue}: {limits.text}", "green")
    screen.document(_document(limits))


def _cells(limits: QueueLimits) -> tuple[str, str, str, str]:
    rate = "" if limits.rate is None else f"{limits.rate:g}"
    return "paused" if limits.paused else "received", str(limits.concurrency or ""), rate, limits.of_types


def _document(limits: QueueLimits) -> dict[str, object]:
    return asdict(limits)


def _number(option: str, given: str, kind: type[int] | type[float]) -> int | float:
    try:
        return kind(given)
    except ValueError as error:
        raise click.BadParameter(f"{given!r} is not a number, and not {NONE!r}", param_hint=option) from error


def _summary(message: Message) -> dict[str, object]:
    try:
        headers = dict(message.headers)
    except CorruptHeaders:
        headers = {}
    return {"id": message.id, "headers": headers, "body": message.body.decode("utf-8", "replace")}


def _row(message: Message) -> tuple[str, str, str, str, str]:
    headers: Any = _summary(message)["headers"]
    sent = headers.get(Headers.TIME_SENT, "")
    try:
        sent = local(from_wire_time(sent)) if sent else ""
    except ValueError:
        sent = repr(sent)
    kind = headers.get(Headers.ENCLOSED_MESSAGE_TYPES, "").partition(";")[0]
    body = message.body[:200].decode("utf-8", "replace").replace("\n", " ")
    return message.id, sent, kind, size(len(message.body)), body[:60]
