"""`delayline doctor`: check an endpoint's connection, tables, queues and pending messages."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import click

from delayline.cli.connection import table_groups
from delayline.cli.due import delay_given
from delayline.cli.options import (
    EXIT_FAILED,
    EXIT_NOT_CHECKED,
    examples,
    json_option,
    settings_options,
    without_management_option,
)
from delayline.cli.screen import MARKS
from delayline.doctor import State, Thresholds, check_urls, examine_endpoint, worst
from delayline.opening import other_endpoints, refuse_memory

if TYPE_CHECKING:
    from datetime import timedelta

    from delayline.cli.screen import Screen
    from delayline.settings import Settings

OKS: Final[dict[State, bool | None]] = {State.OK: True, State.PROBLEM: False, State.NOT_CHECKED: None}
EXIT_CODES: Final = {State.OK: 0, State.PROBLEM: EXIT_FAILED, State.NOT_CHECKED: EXIT_NOT_CHECKED}


@click.command(
    epilog=examples(
        "delayline doctor --endpoint sales",
        "delayline doctor --endpoint sales --max-errors 0 --max-overdue 60s --max-queue 10000 --json",
    )
)
@click.option(
    "--max-errors",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How many messages may be in the error queue.",
)
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
    max_errors: int,
    max_overdue: timedelta,
    max_queue: int | None,
    *,
    without_management: bool,
) -> None:
    """Check connection, tables, queues and pending messages, and print the guarantee.

    Exit code 0 if all was checked and is well, 1 for a problem or a number above its limit, 3 if nothing is wrong as
    far as could be seen, but something could not be checked, 2 for wrong settings.
    """
    refuse_memory(settings)
    check_urls(settings)
    table_groups()  # registers them, for their versions
    findings = asyncio.run(examine_endpoint(settings, Thresholds(max_overdue, max_errors, max_queue)))
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        mark, style = MARKS[OKS[finding.state]]
        screen.echo(f"{mark} {finding.what:<{width}}  {finding.text}", style)
    state = worst(findings)
    if state is not State.OK and (others := asyncio.run(other_endpoints(settings))):
        screen.echo(others, "red")
    screen.document({"state": state, "findings": [asdict(finding) for finding in findings]})
    accepted = state is State.NOT_CHECKED and without_management
    click.get_current_context().exit(0 if accepted else EXIT_CODES[state])
