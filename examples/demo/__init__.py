"""The demo: three processes exchange reminders, one of them is killed half way; none is lost, doubled or early."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from examples.demo import reminders
from examples.demo.lateness import draw
from examples.demo.pipeline import pipeline_on
from examples.demo.play import Play
from examples.demo.stage import REMINDERS, REPOSITORY, Stage
from examples.demo.verdict import show, verdict_of
from examples.demo.watching import watcher

from delayline.cli.options import EXIT_FAILED, ReportsErrors, examples, json_option
from delayline.errors import ConfigurationError

if TYPE_CHECKING:
    from examples.demo.pipeline import Pipeline
    from examples.demo.verdict import Verdict

    from delayline.cli.screen import Screen
    from delayline.spark.audit import Totals

REMINDERS_FILE: Final = Path("examples/reminders/reminders.csv")


@click.command(
    cls=ReportsErrors,
    epilog=examples("python -m examples.demo", "python -m examples.demo --rows 300 --within 3 --dir /tmp/demo"),
)
@click.option(
    "--from",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help=f"CSV of reminders; {REMINDERS_FILE}, or the same rows made up, if left out.",
)
@click.option("--dir", "directory", type=click.Path(file_okay=False, path_type=Path), help="Where to keep the run.")
@click.option("--rows", type=click.IntRange(2), help="Only the first so many reminders.")
@click.option("--within", type=click.FloatRange(0.1, 30), metavar="SECONDS", help="When the last one is due.")
@click.option(
    "--outage", type=click.FloatRange(0, 10), default=1.0, show_default=True, help="Seconds until the restart."
)
@click.option("--spark", "on_spark", is_flag=True, help="Schedule, promote and audit with Spark.")
@click.option(
    "--report", type=click.Path(dir_okay=False, path_type=Path), help="Where the audit goes; else to the run's folder."
)
@json_option
def demo(
    screen: Screen,
    file: Path | None,
    directory: Path | None,
    rows: int | None,
    within: float | None,
    outage: float,
    on_spark: bool,
    report: Path | None,
) -> None:
    """Send 10,000 reminders through SQLite, kill the dispatcher half way, and count what arrives.

    A sender, a dispatcher and a receiver run as processes of their own; with --spark a Spark job is the sender, with a
    part of them in the cold tier, and audits the journal. Exit code 1 when a message was lost, doubled or early.
    """
    chosen = _reminders(file)[:rows]
    if within is not None:
        chosen = reminders.within(chosen, within)
    stage = _stage(directory)
    reminders.write(stage.reminders, chosen)
    longest = timedelta(milliseconds=max(one.delay_ms for one in chosen))
    screen.echo(f"{len(chosen):,} reminders, due within {longest.total_seconds():g} s of sending, in {stage.directory}")
    audited: Totals | None = None
    held: int | None = None
    with pipeline_on(stage, longest, wanted=on_spark or report is not None) as pipeline:
        play = Play(stage, len(chosen), longest=longest, outage=timedelta(seconds=outage), pipeline=pipeline)
        with watcher(screen) as watch:
            course = asyncio.run(play.run(watch))
        verdict = verdict_of(course)
        show(screen, verdict)
        plot = _draw(screen, stage, verdict)
        if pipeline is not None:
            held = pipeline.held
            audited = _audit(screen, pipeline, report or stage.report)
    _conclude(screen, verdict)
    left = stage.settings(REMINDERS)
    screen.echo(f"to look at what it left: delayline dashboard --endpoint {REMINDERS} --url {left.url}", "dim")
    documents = {"plot": plot, "directory": str(stage.directory), "held": held}
    screen.document({**verdict.document(), **documents, "audit": None if audited is None else asdict(audited)})
    if not verdict.kept or not (audited is None or audited.clean):
        click.get_current_context().exit(EXIT_FAILED)


def _reminders(file: Path | None) -> list[reminders.Reminder]:
    if file is not None:
        found = reminders.read(file)
        if not found:
            raise ConfigurationError(
                f"{file} holds no reminders: write them with `python -m examples.reminders.generate`"
            )
        return found
    for place in (Path(), REPOSITORY):
        if (place / REMINDERS_FILE).is_file():
            return reminders.read(place / REMINDERS_FILE)
    return reminders.generate()


def _stage(directory: Path | None) -> Stage:
    """Return a new folder for this run: other files stay as they are."""
    if directory is None:
        return Stage(Path(tempfile.mkdtemp(prefix="delayline-demo-")))
    directory.mkdir(parents=True, exist_ok=True)
    name = f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-"
    return Stage(Path(tempfile.mkdtemp(prefix=name, dir=directory.resolve())))


def _draw(screen: Screen, stage: Stage, verdict: Verdict) -> str | None:
    try:
        draw(verdict.outside, verdict.touched, stage.plot)
    except ImportError as error:
        screen.echo(f"\nno picture ({error}): pip install matplotlib", "yellow")
        return None
    screen.echo(f"\nthe same as a picture: {stage.plot}")
    return str(stage.plot)


def _audit(screen: Screen, pipeline: Pipeline, report: Path) -> Totals:
    report.parent.mkdir(parents=True, exist_ok=True)
    screen.echo(f"scheduled with Spark, {pipeline.held:,} of them into the cold tier, and promoted from there")
    totals = pipeline.audit(report)
    counts = ", ".join(f"{getattr(totals, name):,} {name}" for name in ("scheduled", "lost", "duplicated", "early"))
    screen.echo(f"audited with Spark: {counts}; the report is {report}", None if totals.clean else "bold red")
    return totals


def _conclude(screen: Screen, verdict: Verdict) -> None:
    if verdict.kept:
        screen.echo(f"✓ every promise kept in {verdict.seconds:g} s: none lost, none doubled, none early", "bold green")
    else:
        screen.echo("✗ a promise was broken; see the numbers above that should be 0", "bold red")
