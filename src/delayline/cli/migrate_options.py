"""Options of the commands of `delayline migrate`: source, target, endpoints and due times."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from delayline.cli.due import DELAYS, INSTANTS, delay_given, instant_given
from delayline.cli.options import Command
from delayline.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta

    from delayline.migration.source import TableSource
    from delayline.migration.target import Target

SOURCE_VARIABLE: Final = "DELAYLINE_MIGRATE_SOURCE"
TARGET_VARIABLE: Final = "DELAYLINE_MIGRATE_TARGET"
JOURNAL_VARIABLE: Final = "DELAYLINE_MIGRATE_JOURNAL"
KINDS: Final = (
    "nservicebus-sql",
    "nhibernate",
    "delayline",
    "procrastinate",
    "apscheduler",
    "rabbitmq-levels",
    "azure-storage",
    "ravendb",
    "celery-levels",
    "celery-scheduled",
)


def on_a_source(command: Command) -> Command:
    """Give a command `source`."""

    @functools.wraps(command)
    def with_source(
        *args: object,
        kind: str,
        source_url: str,
        schema: str | None,
        journal: str | None,
        table: str | None,
        container: str | None,
        **arguments: Any,  # noqa: ANN401 - click's
    ) -> Any:  # noqa: ANN401 - click's
        from delayline.migration import source_at

        names = {name: value for name, value in (("table", table), ("container", container)) if value is not None}
        source = source_at(kind, source_url, schema=schema, journal=journal, **names)
        return command(*args, source=source, **arguments)

    where = f"The database, or other place, to empty. [{SOURCE_VARIABLE}]"
    kinds = f"The kind of source: {', '.join(KINDS)}."
    kept = f"The database of the journal, where the source is none. [{JOURNAL_VARIABLE}]"
    options = (
        click.option("--from", "kind", metavar="KIND", required=True, type=click.Choice(KINDS), help=kinds),
        click.option("--source", "source_url", required=True, metavar="URL", help=where, envvar=SOURCE_VARIABLE),
        click.option("--schema", metavar="NAME", help="Where the source's tables are; the user's own if left out."),
        click.option("--journal", metavar="URL", help=kept, envvar=JOURNAL_VARIABLE),
        click.option("--table", metavar="NAME", help="Of azure-storage: its table, where it is not the usual one."),
        click.option("--container", metavar="NAME", help="Of azure-storage: its container, likewise."),
    )
    decorated: Command = with_source
    for option in reversed(options):
        decorated = option(decorated)
    return decorated


def to_a_target(command: Command) -> Command:
    """Give a command `target`, None for noop."""

    @functools.wraps(command)
    def with_target(
        *args: object,
        target_url: str,
        target_schema: str | None,
        cold_tier: str | None,
        hot_horizon: timedelta,
        **arguments: Any,  # noqa: ANN401 - click's
    ) -> Any:  # noqa: ANN401 - click's
        from delayline.migration import target_at

        target = target_at(target_url, schema=target_schema, cold_tier=cold_tier, hot_horizon=hot_horizon)
        return command(*args, target=target, **arguments)

    where = (
        f"Where messages go: an amqp: or azure: URL, a database with delayline's stores, or noop. [{TARGET_VARIABLE}]"
    )
    far = f"With --cold-tier: messages due later go to its files: {DELAYS}."
    options = (
        click.option("--target", "target_url", required=True, metavar="URL", help=where, envvar=TARGET_VARIABLE),
        click.option("--target-schema", metavar="NAME", help="Where the target's tables are."),
        click.option("--cold-tier", metavar="FOLDER", help="Where far messages of the target's stores wait in files."),
        click.option("--hot-horizon", callback=delay_given, default="1d", show_default=True, help=far),
    )
    decorated: Command = with_target
    for option in reversed(options):
        decorated = option(decorated)
    return decorated


def planned(command: Command) -> Command:
    """Add the options of a plan to a command, and pass it `plan`."""

    @functools.wraps(command)
    def with_plan(
        *args: object,
        source: TableSource,
        target: Target | None,
        endpoints: Sequence[str],
        every: bool,
        cutoff: datetime | None,
        batch_size: int | None,
        **arguments: Any,  # noqa: ANN401 - click's
    ) -> Any:  # noqa: ANN401 - click's
        from delayline.migration import Plan

        if every == bool(endpoints):
            raise ConfigurationError(
                "name the endpoints whose messages are to move: --endpoint NAME, repeatable, or --all-endpoints"
            )
        chosen = None if every else tuple(endpoints)
        return command(*args, plan=Plan(source, target, chosen, cutoff, batch_size), **arguments)

    options = (
        click.option("--endpoint", "endpoints", multiple=True, metavar="NAME", help="Whose messages; may be repeated."),
        click.option("--all-endpoints", "every", is_flag=True, help="Everybody's."),
        click.option(
            "--cutoff",
            callback=instant_given,
            metavar="TIME",
            help=f"Only messages due at this time or later: {INSTANTS}.",
        ),
        click.option(
            "--batch-size",
            type=click.IntRange(1),
            help="Rows delivered, confirmed and marked together, at most: 1000, or 10000 to stores.",
        ),
    )
    decorated: Command = with_plan
    for option in reversed(options):
        decorated = option(decorated)
    return on_a_source(to_a_target(decorated))


def report_option(command: Command) -> Command:
    """Give a command `report`, a file for people."""
    text = "Write a page about it to this file."
    return click.option("--report", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help=text)(command)
