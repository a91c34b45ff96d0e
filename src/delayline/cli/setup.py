"""`delayline setup`: create tables and queues before the endpoints start, as a user with the rights for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from delayline.cli.connection import refuse_memory
from delayline.cli.options import FAILED, PLACES, examples, json_option, settings_options
from delayline.config import after_setup, endpoint_from, planned_setup, satellites_of, transport_of
from delayline.setting_values import masked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delayline.cli.screen import Screen
    from delayline.config import Settings


@click.command(
    epilog=examples(
        "delayline setup --endpoint sales",
        "delayline setup --endpoint sales --url sqlite:///orders.db --queue billing --queue shipping",
        "delayline setup --endpoint sales --dry-run",
    )
)
@click.option("--queue", "queues", multiple=True, metavar="NAME", help="A further queue to create; repeatable.")
@click.option("--dry-run", is_flag=True, help="Print the SQL that would run, and run none of it.")
@settings_options(*PLACES, "journal")
@json_option
def setup(settings: Settings, screen: Screen, queues: tuple[str, ...], dry_run: bool) -> None:
    """Create or upgrade the queues and the table of an endpoint, or further queues only.

    Safe to repeat and to run beside running endpoints. Without an endpoint only the --queue ones are created.
    """
    refuse_memory(settings)
    if settings.endpoint is None and not queues:
        _ = settings.named_endpoint  # says how to name one
    if dry_run:
        _show(screen, asyncio.run(planned_setup(settings, queues)))
        return
    asyncio.run(_setup(settings, queues))
    created = list(queues)
    if settings.endpoint is not None:
        created = [settings.endpoint, settings.error_queue, *satellites_of(settings), *created]
        screen.echo(f"delayed messages of {settings.endpoint} wait at {masked(settings.resolved_store_url)}")
    screen.echo(f"queues at {masked(settings.resolved_transport_url)}: {', '.join(created)}")
    undone = [text for _, ok, text in asyncio.run(after_setup(settings)) if not ok]
    for text in undone:
        screen.echo(f"✗ {text}", "red")
    screen.document({"endpoint": settings.endpoint, "queues": created, "undone": undone})
    if undone:
        click.get_current_context().exit(FAILED)


def _show(screen: Screen, planned: Mapping[str, Sequence[str]]) -> None:
    """Show the statements; of several databases' say whose they are, in a comment, so that all of it stays SQL."""
    needed = {masked(url): statements for url, statements in planned.items() if statements}
    for place, statements in needed.items():
        if len(planned) > 1:
            screen.echo(f"-- {place}")
        screen.echo("\n".join(f"{statement};" for statement in statements))
    if not needed:
        screen.echo("nothing to do")
    every = [statement for statements in needed.values() for statement in statements]
    screen.document({"statements": every, "databases": needed})


async def _setup(settings: Settings, queues: tuple[str, ...]) -> None:
    if settings.endpoint is not None:
        await endpoint_from(settings).setup()
    if queues:
        await transport_of(settings).setup_infrastructure(queues)
