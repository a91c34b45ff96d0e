"""Options for delays and instants."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from delayline.errors import InvalidDueTime
from delayline.readable import DELAYS, INSTANTS, parse_delay, parse_instant

if TYPE_CHECKING:
    from datetime import datetime, timedelta


def delay_given(ctx: click.Context, param: click.Parameter, value: str | None) -> timedelta | None:
    """Return the delay of an option, or fail with how to write it."""
    try:
        return None if value is None else parse_delay(value)
    except InvalidDueTime as error:
        raise click.BadParameter(str(error), ctx, param) from error


def shift_given(ctx: click.Context, param: click.Parameter, value: str | None) -> timedelta | None:
    """Return how much later an option says, negative for earlier, or fail with how to write it."""
    if value is None or not value.startswith("-"):
        return delay_given(ctx, param, value)
    earlier = delay_given(ctx, param, value[1:])
    return None if earlier is None else -earlier


def instant_given(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime | None:
    """Return the aware instant of an option, or fail with how to write it."""
    try:
        return None if value is None else parse_instant(value)
    except InvalidDueTime as error:
        raise click.BadParameter(str(error), ctx, param) from error


def due_options(command: click.decorators.FC) -> click.decorators.FC:
    """Give a command --delay and --at."""
    at = click.option("--at", "deliver_at", callback=instant_given, metavar="TIME", help=f"When it is due: {INSTANTS}.")
    delay = click.option("--delay", callback=delay_given, metavar="DELAY", help=f"How long to wait: {DELAYS}.")
    return delay(at(command))
