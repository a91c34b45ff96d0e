"""`delayline spark promote` and `compact`: move messages from the cold tier to the store, and merge its files."""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from delayline.cli.due import DELAYS, delay_given
from delayline.cli.options import examples, json_option, settings_options
from delayline.cli.spark_jobs import STORES, in_thread, session_options, stopped_by_signal, target_of

if TYPE_CHECKING:
    from datetime import timedelta

    from delayline.cli.screen import Screen
    from delayline.cli.spark_jobs import Sessions
    from delayline.config import Settings
    from delayline.spark import Promoted


@click.command(
    epilog=examples(
        "delayline spark promote --endpoint sales --cold-tier s3://bucket/reminders",
        "delayline spark promote --endpoint sales --cold-tier s3://bucket/reminders --every 1h --horizon 6h",
    )
)
@click.option(
    "--horizon",
    callback=delay_given,
    default="1d",
    show_default=True,
    help=f"Move messages due within it, with the rest of their hour: {DELAYS}.",
)
@click.option(
    "--every",
    callback=delay_given,
    metavar="DELAY",
    help="Again and again, until told to stop; at most half of --horizon.",
)
@settings_options(*STORES, "cold_tier")
@session_options
@json_option
def promote(
    settings: Settings, sessions: Sessions, screen: Screen, horizon: timedelta, every: timedelta | None
) -> None:
    """Move messages that are due soon from the cold tier into the store, exactly once. Safe to repeat anywhere.

    With --every, SIGINT and SIGTERM stop it after the current round.
    """
    from delayline.spark import promote as run_promote
    from delayline.spark import promote_every

    target, done = target_of(settings), []

    def moved(so_far: Promoted) -> None:
        done.append(so_far)
        screen.echo(_sentence(so_far))

    with sessions(screen) as session:
        if every is None:
            moved(run_promote(target, horizon=horizon, spark=session))
        else:
            told = threading.Event()
            screen.echo(f"promoting from {settings.cold_tier} again and again. Ctrl+C stops it")
            with stopped_by_signal(told.set):
                in_thread(
                    lambda: promote_every(target, every, until=told, horizon=horizon, spark=session, progress=moved)
                )
    screen.document(asdict(done[-1]))


@click.command(epilog=examples("delayline spark compact --endpoint sales --cold-tier s3://bucket/reminders"))
@settings_options(*STORES, "cold_tier")
@session_options
@json_option
def compact(settings: Settings, sessions: Sessions, screen: Screen) -> None:
    """Merge the small files of each hour of the cold tier, and delete files that have been obsolete for a day."""
    from delayline.spark import compact as run_compact

    with sessions(screen) as session:
        done = run_compact(target_of(settings), spark=session)
    screen.echo(f"{done.before:,} files merged into {done.after:,}, {done.deleted:,} deleted")
    screen.document(asdict(done))


def _sentence(done: Promoted) -> str:
    apart = f"{done.duplicates:,} there already, {done.cancelled:,} cancelled"
    return f"{done.stored:,} promoted from {done.files:,} file{'' if done.files == 1 else 's'}, {apart}"
