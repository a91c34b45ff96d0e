"""`delayline doctor`: check an endpoint's connection, tables, queues and pending messages."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from delayline.cli.connection import table_groups
from delayline.cli.options import FAILED, examples, json_option, settings_options
from delayline.doctor import check_urls, examine_endpoint
from delayline.opening import refuse_memory

if TYPE_CHECKING:
    from delayline.cli.screen import Screen
    from delayline.config import Settings


@click.command(epilog=examples("delayline doctor --endpoint sales", "delayline doctor --endpoint sales --json"))
@settings_options()
@json_option
def doctor(settings: Settings, screen: Screen) -> None:
    """Check connection, tables, queues and pending messages, and print the guarantee. Exit code 1 for a problem."""
    refuse_memory(settings)
    check_urls(settings)
    table_groups()  # registers them, for their versions
    findings = asyncio.run(examine_endpoint(settings))
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        mark, style = ("✓", "green") if finding.ok else ("✗", "red")
        screen.echo(f"{mark} {finding.what:<{width}}  {finding.text}", style)
    healthy = all(finding.ok for finding in findings)
    screen.document({"healthy": healthy, "findings": [asdict(finding) for finding in findings]})
    if not healthy:
        click.get_current_context().exit(FAILED)
