"""`delayline rabbitmq`: administration of a broker's delay levels."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

import click

from delayline.cli.options import (
    EXIT_FAILED,
    Command,
    Commands,
    examples,
    json_option,
    settings_options,
    without_management_option,
)
from delayline.cli.screen import MARKS, ROWS_SHOWN, bar
from delayline.readable import duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    from delayline.backends import DueBy
    from delayline.cli.screen import Screen
    from delayline.rabbitmq.address import BrokerAddress
    from delayline.rabbitmq.admin.move import Levels, Report
    from delayline.rabbitmq.admin.operations import BlockedMessages
    from delayline.rabbitmq.admin.verification import Check
    from delayline.rabbitmq.infrastructure import DelayInfrastructure
    from delayline.settings import Settings


@click.group(
    cls=Commands,
    epilog=examples(
        "delayline rabbitmq verify --url amqp://guest:guest@localhost/orders",
        "delayline rabbitmq migrate --dry-run --url amqp://guest:guest@localhost/orders",
    ),
)
def rabbitmq() -> None:
    """Create, check, move and count the delay levels of RabbitMQ.

    The broker's URL is the setting `url`, as for all commands. The commands work on the v2 levels, or on levels of
    ?delays=v1 or ?delays=PREFIX in the URL.
    """


def on_a_broker(command: Command) -> Command:
    """Give a command `address`, from the settings, and `levels`, from its --delays."""

    @functools.wraps(command)
    def with_broker(*args: object, settings: Settings, delays: str | None, **arguments: Any) -> Any:  # noqa: ANN401 - click's
        address = broker(settings.resolved_transport_url)
        return command(*args, address=address, levels=_levels_named(delays or address.delays), **arguments)

    option = click.option("--delays", metavar="NAME", help="Which levels: v2, v1, or a prefix of your own.")
    return settings_options("url", "transport_url")(option(with_broker))


def management_option(command: Command) -> Command:
    """Give a command `management_url`."""
    description = "Where the management API is, if not at the broker's port 15672, with the same user."
    return click.option("--management-url", metavar="URL", help=description)(command)


def broker(url: str) -> BrokerAddress:
    """Return where the broker at the URL is; raises ConfigurationError for another technology's URL."""
    from delayline.rabbitmq.address import BrokerAddress

    return BrokerAddress.parse(url)


def _levels_named(name: str) -> DelayInfrastructure:
    from delayline.rabbitmq.infrastructure import DelayInfrastructure

    return DelayInfrastructure.named(name)


@rabbitmq.command(
    epilog=examples(
        "delayline rabbitmq create --url amqp://guest:guest@localhost/orders",
        "delayline rabbitmq create --delays v1",
    )
)
@on_a_broker
@without_management_option
@json_option
def create(screen: Screen, address: BrokerAddress, levels: DelayInfrastructure, *, without_management: bool) -> None:
    """Create the delay levels, as .NET endpoints share them. Idempotent, and safe beside running endpoints.

    Existing levels with other arguments are left unchanged; the argument that differs is printed, with exit code 1. So
    is it if due messages without a destination are not caught, or that is unknown without the management API.
    """
    from delayline.rabbitmq.admin import operations

    asyncio.run(operations.create(address, levels))
    caught = asyncio.run(operations.catch_undeliverable(address, levels))
    limits = asyncio.run(operations.lift_limits(address, levels))
    made = {"exchanges": len(levels.exchanges), "queues": len(levels.queues), "bindings": len(levels.bindings)}
    numbers = ", ".join(f"{number} {what}" for what, number in made.items())
    screen.echo(f"✓ delay levels {levels.prefix}.* are at {address}: {numbers}", "green")
    screen.echo(*_marked(caught))
    screen.echo(*_marked(limits))
    document = {"broker": str(address), "prefix": levels.prefix, **made}
    screen.document(document | {"catch_all": caught._asdict(), "delivery_limits": limits._asdict()})
    if any(step.ok is False or (step.ok is None and not without_management) for step in (caught, limits)):
        click.get_current_context().exit(EXIT_FAILED)


@rabbitmq.command(
    epilog=examples(
        "delayline rabbitmq subscribe Contoso.Messages.OrderPlaced --endpoint billing",
        "delayline rabbitmq subscribe Contoso.Messages.OrderPlaced --endpoint billing --url amqp://localhost?topology=direct",
    )
)
@click.argument("event_type", metavar="TYPE")
@settings_options("url", "transport_url", "endpoint")
@json_option
def subscribe(settings: Settings, screen: Screen, event_type: str) -> None:
    """Have an endpoint receive the events that .NET endpoints publish as TYPE, the full name with its namespace.

    Creates the binding that a .NET subscriber would create, in the topology of the URL. Idempotent. The endpoint's
    queue has to exist.
    """
    _subscribe(settings, screen, event_type, undo=False)


@rabbitmq.command(epilog=examples("delayline rabbitmq unsubscribe Contoso.Messages.OrderPlaced --endpoint billing"))
@click.argument("event_type", metavar="TYPE")
@settings_options("url", "transport_url", "endpoint")
@json_option
def unsubscribe(settings: Settings, screen: Screen, event_type: str) -> None:
    """Undo `subscribe`: the endpoint receives no more events of that type. Events in its queue stay."""
    _subscribe(settings, screen, event_type, undo=True)


def _subscribe(settings: Settings, screen: Screen, event_type: str, *, undo: bool) -> None:
    from delayline.rabbitmq.admin import operations

    endpoint = settings.named_endpoint
    asyncio.run(operations.subscribe(broker(settings.resolved_transport_url), endpoint, event_type, undo=undo))
    what = "receives no more events" if undo else "receives the events"
    screen.echo(f"✓ {endpoint} {what} of {event_type}", "green")
    screen.document({"endpoint": endpoint, "type": event_type, "subscribed": not undo})


def _marked(check: Check) -> tuple[str, str]:
    mark, style = MARKS[check.ok]
    return f"{mark} {check.what}: {check.text}", style


@rabbitmq.command(
    epilog=examples(
        "delayline rabbitmq verify --management-url http://broker:15672", "delayline rabbitmq verify --json"
    )
)
@on_a_broker
@management_option
@json_option
def verify(screen: Screen, address: BrokerAddress, levels: DelayInfrastructure, management_url: str | None) -> None:
    """Check version, feature flags, every exchange, queue and binding, and whether due messages get through.

    Needs the broker's management plugin. Exit code 1 when anything differs.
    """
    checks = asyncio.run(_verify(address, levels, management_url))
    width = max(len(check.what) for check in checks)
    for check in checks:
        mark, style = MARKS[check.ok]
        screen.echo(f"{mark} {check.what:<{width}}  {check.text}", style)
    healthy = all(check.ok for check in checks)
    screen.document({"healthy": healthy, "checks": [check._asdict() for check in checks]})
    if not healthy:
        click.get_current_context().exit(EXIT_FAILED)


async def _verify(address: BrokerAddress, levels: DelayInfrastructure, url: str | None) -> Sequence[Check]:
    from delayline.rabbitmq.admin import verification
    from delayline.rabbitmq.admin.management_api import ManagementApi

    async with ManagementApi(address, url) as api:
        return [*await verification.verify(api, levels), *await verification.examine(api, levels)]


@rabbitmq.command(
    epilog=examples("delayline rabbitmq migrate --dry-run", "delayline rabbitmq migrate --from v1 --delays v2")
)
@on_a_broker
@click.option("--from", "source", default="v1", show_default=True, metavar="NAME", help="The levels to empty.")
@click.option("--dry-run", is_flag=True, help="Look at up to 1000 messages of each level, and move none.")
@without_management_option
@json_option
def migrate(
    screen: Screen,
    address: BrokerAddress,
    levels: DelayInfrastructure,
    source: str,
    *,
    dry_run: bool,
    without_management: bool,
) -> None:
    """Move messages from a set of levels to another on the same broker, v1 to v2.

    Nothing is lost and nothing is early. After an interruption run it again; messages in flight may be duplicated, with
    the same message id. Messages that cannot be moved go to the queue delays-migrate-poison-messages, with the reason;
    the next run retries missing destinations. Exit code 1 when there are any, when due messages hang in the levels, or
    when that is unknown without the management API.
    """
    from delayline.rabbitmq.admin.move import Levels

    ends = Levels(address, _levels_named(source)), Levels(address, levels)
    _move(screen, *ends, "migrate", dry_run=dry_run, without_management=without_management)


@rabbitmq.command(
    epilog=examples(
        "delayline rabbitmq transfer --source amqp://old/orders --target amqp://new/orders --dry-run",
        "delayline rabbitmq transfer --source amqp://old/orders?delays=v1 --target amqp://new/orders",
    )
)
@click.option("--source", required=True, metavar="URL", help="The broker to empty.", envvar="DELAYLINE_TRANSFER_SOURCE")
@click.option("--target", required=True, metavar="URL", help="The broker to fill.", envvar="DELAYLINE_TRANSFER_TARGET")
@click.option("--dry-run", is_flag=True, help="Look at up to 1000 messages of each level, and move none.")
@without_management_option
@json_option
def transfer(screen: Screen, source: str, target: str, *, dry_run: bool, without_management: bool) -> None:
    """Move the messages in the delay levels of a broker to another broker's.

    See migrate; messages that cannot be moved stay on the source, in the queue delays-transfer-poison-messages.
    """
    from delayline.rabbitmq.admin.move import Levels

    ends = [Levels(address, _levels_named(address.delays)) for address in (broker(source), broker(target))]
    _move(screen, ends[0], ends[1], "transfer", dry_run=dry_run, without_management=without_management)


def _move(
    screen: Screen, source: Levels, target: Levels, name: str, *, dry_run: bool, without_management: bool
) -> None:
    from delayline.rabbitmq.admin.move import Move

    with screen.progress() as bars:
        task = bars.add_task("", total=None)

        def show(level: int, done: int, total: int) -> None:
            bars.update(task, description=f"level {level:02}: {done} of {total}", completed=done, total=total or None)

        move = Move(source, target, name=name, dry_run=dry_run, progress=show)
        try:
            asyncio.run(move.run())
        except BaseException:
            screen.echo(f"{move.report.moved} moved before it stopped; run it again for the rest")
            raise
    _print_report(screen, move.report, dry_run=dry_run)
    if move.report.poison or _fails(move.report.blocked, without_management=without_management):
        click.get_current_context().exit(EXIT_FAILED)


def _print_report(screen: Screen, report: Report, *, dry_run: bool) -> None:
    used = [level for level in report.levels if level.counted]
    if used:
        rows = [(f"{level.level:02}", level.counted, level.moved, level.poison) for level in used]
        screen.table(("level", "messages", "moved", "poison"), rows)
    if report.destinations:
        screen.table(("destination", "count"), report.destinations.most_common())
    if report.reasons:
        screen.table(("count", "not moved because"), [(n, why) for why, n in report.reasons.most_common(ROWS_SHOWN)])
    would = "would be " if dry_run else ""
    screen.echo(
        f"{report.moved} {would}moved, {report.poison} not"
        + (f": {would}put into {report.poison_queue}" if report.poison else ""),
        "red" if report.poison else "green",
    )
    if report.recovered:
        screen.echo(f"{report.recovered} of them came from the poison queue of an earlier run")
    if report.stale:
        screen.echo(
            f"{report.stale} {would}moved by the due time of their level: their headers are of an earlier attempt"
        )
    if report.blocked is not None:
        _print_blocked(screen, report.blocked)
    screen.document(
        {
            "dry_run": dry_run,
            "moved": report.moved,
            "poison": report.poison,
            "poison_queue": report.poison_queue if report.poison else None,
            "recovered": report.recovered,
            "stale": report.stale,
            "levels": [
                {"level": level.level, "found": level.counted, "moved": level.moved, "poison": level.poison}
                for level in used
            ],
            "destinations": dict(report.destinations),
            "reasons": dict(report.reasons),
            **_blocked_document(report.blocked),
        }
    )


def _print_blocked(screen: Screen, blocked: BlockedMessages) -> None:
    if blocked.places:
        screen.echo(f"✗ {blocked}", "red")
    if blocked.unseen is not None:
        screen.echo(f"? {blocked.unseen}", "yellow")


def _fails(blocked: BlockedMessages | None, *, without_management: bool) -> bool:
    """Return whether due messages hang, or it is unknown whether any do and the user has not accepted that."""
    return blocked is not None and bool(blocked.places or (blocked.unseen is not None and not without_management))


def _blocked_document(blocked: BlockedMessages | None) -> Mapping[str, object]:
    return {} if blocked is None else {"blocked": dict(blocked.places), "unseen": blocked.unseen}


@rabbitmq.command(epilog=examples("delayline rabbitmq pending", "delayline rabbitmq pending --delays v1 --json"))
@on_a_broker
@without_management_option
@json_option
def pending(screen: Screen, address: BrokerAddress, levels: DelayInfrastructure, *, without_management: bool) -> None:
    """Count the messages at each level, and estimate when they come due.

    The time that a message has been in its level is unknown: the estimate has certain and probable numbers. Due
    messages without a destination are counted separately: exit code 1 when there are any, or when their number is
    unknown without the management API.
    """
    from delayline.backends import due_by
    from delayline.rabbitmq.admin import operations

    counts = asyncio.run(operations.pending(address, levels))
    blocked = asyncio.run(operations.overdue(address, levels))
    levels_due = operations.due_within(counts)
    windows = due_by(levels_due, operations.WINDOWS)
    total, largest = sum(counts), max(counts)
    used = [(level, within) for level, within in enumerate(levels_due) if within.count]
    if used:
        screen.table(
            ("level", "messages", "due within", ""),
            [
                (f"{level:02}", within.count, duration(within.span), bar(within.count, largest))
                for level, within in used
            ],
        )
        screen.table(("due within", "surely", "probably"), [_row(window, total) for window in windows])
    screen.echo(f"{total} pending {'message' if total == 1 else 'messages'} in {levels.prefix}.* at {address}")
    _print_blocked(screen, blocked)
    screen.document(
        {
            "total": total,
            "levels": [
                {"level": level, "count": within.count, "due_within": _seconds(within.span)} for level, within in used
            ],
            "windows": [
                {"seconds": _seconds(window.span), "at_least": window.at_least, "estimate": window.estimate}
                for window in windows
            ],
            **_blocked_document(blocked),
        }
    )
    if _fails(blocked, without_management=without_management):
        click.get_current_context().exit(EXIT_FAILED)


def _row(window: DueBy, total: int) -> Sequence[object]:
    return duration(window.span), window.at_least, f"{window.estimate} of {total}"


def _seconds(span: timedelta) -> int:
    return int(span.total_seconds())


@rabbitmq.command("catch-all", epilog=examples("delayline rabbitmq catch-all on", "delayline rabbitmq catch-all off"))
@click.argument("switch", type=click.Choice(["on", "off"]))
@on_a_broker
@management_option
@json_option
def catch_all(
    screen: Screen, address: BrokerAddress, levels: DelayInfrastructure, switch: str, management_url: str | None
) -> None:
    """Turn the catch-all queue for undeliverable due messages on or off.

    Without it such messages stay in their level, and 32 of them block it for every endpoint. The catch-all is a policy
    on the delivery exchange; levels stay as .NET declares them.
    """
    name, changed = asyncio.run(_switch(address, levels, management_url, on=switch == "on"))
    if switch == "on":
        screen.echo(f"✓ due messages without a destination go to the queue {name}", "green")
    else:
        was = "" if changed else "; it was off already"
        screen.echo(f"due messages without a destination stay in their level{was}. Undeliverable ones stay in {name}")
    screen.document({"queue": name, "on": switch == "on"})


async def _switch(
    address: BrokerAddress, levels: DelayInfrastructure, url: str | None, *, on: bool
) -> tuple[str, bool]:
    from delayline.rabbitmq.admin import operations, verification
    from delayline.rabbitmq.admin.management_api import ManagementApi

    async with ManagementApi(address, url) as api:
        if on:
            return await operations.catch_all_on(address, levels, api), True
        return verification.catch_all_name(levels), await operations.catch_all_off(levels, api)
