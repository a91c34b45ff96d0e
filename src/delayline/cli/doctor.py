"""`delayline doctor`: check an endpoint's connection, tables, queues and pending messages."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from delayline.cli.connection import table_groups
from delayline.cli.due import delay_given
from delayline.cli.options import EXIT_FAILED, examples, json_option, settings_options, without_management_option
from delayline.cli.screen import MARKS
from delayline.doctor import Thresholds, check_urls, examine_endpoint
from delayline.opening import other_endpoints, refuse_memory

if TYPE_CHECKING:
    from datetime import timedelta

    from delayline.cli.screen import Screen
    from delayline.settings import Settings


@click.command(
    epilog=examples(
        "delayline doctor --endpoint sales",
        "delayline doctor --endpoint sales --max-errors 0 --max-overdue 60s --max-queue 10000 --json",
    )
)
@click.option("--max-errors", type=click.IntRange(min=0), help="How many messages may be in the error queue.")
@click.option(
    "--max-overdue",
    callback=delay_given,
    default="10s",
    show_default=True,
    help="How long the oldest pending message may be overdue, as in 60s or 5m.",
)
@click.option("--max-queue", type=click.IntRange(min=0), help="How many messages may be in the endpoint's queue.")
@without_management_option
@settings_options()
@json_option
def doctor(
    settings: Settings,
    screen: Screen,
    max_errors: int | None,
    max_overdue: timedelta,
    max_queue: int | None,
    *,
    without_management: bool,
) -> None:
    """Check connection, tables, queues and pending messages, and print the guarantee.

    Exit code 1 for a problem, a number above its limit, or what is unknown; 2 for wrong settings.
    """
    refuse_memory(settings)
    check_urls(settings)
    table_groups()  # registers them, for their versions
    findings = asyncio.run(examine_endpoint(settings, Thresholds(max_overdue, max_errors, max_queue)))
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        mark, style = MARKS[finding.ok]
        screen.echo(f"{mark} {finding.what:<{width}}  {finding.text}", style)
    if not all(finding.ok for finding in findings) and (others := asyncio.run(other_endpoints(settings))):
        screen.echo(others, "red")
    healthy = all(finding.ok or (finding.ok is None and without_management) for finding in findings)
    screen.document({"healthy": healthy, "findings": [asdict(finding) for finding in findings]})
    if not healthy:
        click.get_current_context().exit(EXIT_FAILED)
