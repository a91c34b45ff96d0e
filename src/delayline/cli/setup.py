"""`delayline setup`: create tables and queues, by somebody who may, before the endpoints start."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from delayline.cli.connection import open_transport, refuse_memory
from delayline.cli.options import PLACES, examples, json_option, settings_options
from delayline.config import endpoint_from, masked

if TYPE_CHECKING:
    from delayline.cli.screen import Screen
    from delayline.config import Settings


@click.command(
    epilog=examples(
        "delayline setup --endpoint sales",
        "delayline setup --endpoint sales --url sqlite:///orders.db --queue billing --queue shipping",
    )
)
@click.option("--queue", "queues", multiple=True, metavar="NAME", help="A further queue to create; repeatable.")
@settings_options(*PLACES)
@json_option
def setup(settings: Settings, screen: Screen, queues: tuple[str, ...]) -> None:
    """Create the queues and the table of an endpoint, or further queues only.

    Safe to repeat and to run beside running endpoints. Without an endpoint only the --queue ones are created.
    """
    refuse_memory(settings)
    if settings.endpoint is None and not queues:
        _ = settings.named_endpoint  # says how to name one
    asyncio.run(_setup(settings, queues))
    created = list(queues)
    if settings.endpoint is not None:
        created = [settings.endpoint, settings.error_queue, *created]
        screen.tell(f"delayed messages of {settings.endpoint} wait at {masked(settings.where_messages_wait)}")
    screen.tell(f"queues at {masked(settings.where_queues_are)}: {', '.join(created)}")
    screen.document({"endpoint": settings.endpoint, "queues": created})


async def _setup(settings: Settings, queues: tuple[str, ...]) -> None:
    if settings.endpoint is not None:
        await endpoint_from(settings).setup()
    if queues:
        async with open_transport(settings) as transport:
            await transport.setup_infrastructure(queues)
