"""`delayline setup`: create tables and queues before the endpoints start, as a user with the rights for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import click

from delayline.backends import backend_of
from delayline.cli.connection import table_groups
from delayline.cli.options import (
    EXIT_FAILED,
    PLACE_SETTINGS,
    examples,
    json_option,
    settings_options,
    without_management_option,
)
from delayline.cli.screen import MARKS
from delayline.composition import (
    after_setup,
    endpoint_from,
    planned_features,
    planned_setup,
    satellites_of,
    set_up_features,
    set_up_queues,
    set_up_warnings,
)
from delayline.masking import masked
from delayline.opening import refuse_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delayline.cli.screen import Screen
    from delayline.settings import Settings
    from delayline.sql.schema import TableGroup

#: The features whose tables are created at their first use.
FEATURES: Final = ("cold_tier", "dispatchers", "jobs", "migrations", "schedules", "streams")


@click.command(
    epilog=examples(
        "delayline setup --endpoint sales",
        "delayline setup --endpoint sales --url sqlite:///orders.db --queue billing --queue shipping",
        "delayline setup --endpoint sales --dry-run",
        "delayline setup --url postgresql://server/shop --feature cold_tier --feature jobs --dry-run",
    )
)
@click.option("--queue", "queues", multiple=True, metavar="NAME", help="A further queue to create; repeatable.")
@click.option(
    "--feature",
    "features",
    multiple=True,
    type=click.Choice(FEATURES),
    help="Create the tables of a feature in the store's database before its first use; repeatable.",
)
@click.option("--dry-run", is_flag=True, help="Print the SQL that would run, and run none of it.")
@settings_options(*PLACE_SETTINGS, "journal", "fair_by", "queues_fair_by")
@without_management_option
@json_option
def setup(
    settings: Settings,
    screen: Screen,
    queues: tuple[str, ...],
    features: tuple[str, ...],
    *,
    dry_run: bool,
    without_management: bool,
) -> None:
    """Create or upgrade the queues and the table of an endpoint, or further queues and the tables of features only.

    Safe to repeat and to run beside running endpoints. Existing tables of other features are upgraded too. Exit code 1
    if a step was refused, or, on RabbitMQ, if it is unknown without the management API whether it was.
    """
    refuse_memory(settings)
    if settings.endpoint is None and not queues and not features:
        _ = settings.named_endpoint  # raises if there is none
    groups = table_groups(migrations="migrations" in features)
    wanted = [groups[feature] for feature in dict.fromkeys(features)]
    if dry_run:
        _show(screen, asyncio.run(_planned(settings, queues, wanted)))
        return
    asyncio.run(_setup(settings, queues, wanted))
    created = list(queues)
    if settings.endpoint is not None:
        created = [settings.endpoint, settings.error_queue, *satellites_of(settings), *created]
        screen.echo(f"delayed messages of {settings.endpoint} wait at {masked(settings.resolved_store_url)}")
    if created:
        screen.echo(f"queues at {masked(settings.resolved_transport_url)}: {', '.join(created)}")
    if features:
        screen.echo(f"tables of {', '.join(features)} at {masked(settings.resolved_store_url)}")
    further = asyncio.run(after_setup(settings, created))
    undone = [problem for _, ok, problem in further if ok is False]
    unknown = [problem for _, ok, problem in further if ok is None]
    for _, ok, finding in further:
        if not ok:
            mark, style = MARKS[ok]
            screen.echo(f"{mark} {finding}", style)
    warnings = asyncio.run(set_up_warnings(settings, created))
    for warning in warnings:
        screen.echo(f"! {warning}", "yellow")
    screen.document(
        {
            "endpoint": settings.endpoint,
            "queues": created,
            "features": features,
            "undone": undone,
            "unknown": unknown,
            "warnings": warnings,
        }
    )
    if undone or (unknown and not without_management):
        click.get_current_context().exit(EXIT_FAILED)


def _show(screen: Screen, planned: Mapping[str, Sequence[str]]) -> None:
    """Show the statements, grouped by database under SQL comments that name the database."""
    needed = {masked(url): statements for url, statements in planned.items() if statements}
    for url, statements in needed.items():
        if len(planned) > 1:
            screen.echo(f"-- {url}")
        screen.echo("\n".join(f"{statement};" for statement in statements))
    if not needed:
        screen.echo("nothing to do")
    every = [statement for statements in needed.values() for statement in statements]
    screen.document({"statements": every, "databases": needed})


async def _planned(
    settings: Settings, queues: tuple[str, ...], groups: Sequence[TableGroup]
) -> Mapping[str, Sequence[str]]:
    planned: dict[str, Sequence[str]] = {}
    if queues or settings.endpoint is not None:
        planned |= await planned_setup(settings, queues)
    if groups:
        store_url = settings.resolved_store_url
        statements = await planned_features(settings, groups)
        planned[store_url] = list(dict.fromkeys([*planned.get(store_url, ()), *statements]))
    return planned


async def _setup(settings: Settings, queues: tuple[str, ...], groups: Sequence[TableGroup]) -> None:
    if queues:  # before the endpoint, whose set-up has due messages without a destination caught
        await set_up_queues(settings, queues)
    if settings.endpoint is not None:
        await endpoint_from(settings).setup()
        if queues and backend_of(settings.resolved_transport_url).native_delays is not None:  # they are there now
            await set_up_queues(settings, queues)
    if groups:
        await set_up_features(settings, groups)
