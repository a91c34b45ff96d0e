"""`delayline migrate`: move pending messages from one system to another, with Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from delayline.cli.migrate_options import on_a_source, planned, report_option, to_a_target
from delayline.cli.options import FAILED, Commands, examples, json_option
from delayline.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import SparkSession

    from delayline.cli.screen import Screen
    from delayline.migration import EndpointPreview, MigrationResult, Plan
    from delayline.migration.journal import MigrationRun
    from delayline.migration.source import TableSource
    from delayline.migration.target import Target
    from delayline.migration.verify import Verified

SHOWN: Final = 10
FROM_TO: Final = "--from nservicebus-sql --source postgresql://db/nsb --target amqp://broker"
FROM: Final = "--from nservicebus-sql"


@click.group(
    cls=Commands,
    epilog=examples(
        f"delayline migrate preview {FROM_TO} --all-endpoints",
        f"delayline migrate run {FROM} --endpoint Sales.Orders",
        f"delayline migrate verify {FROM}",
    ),
)
def migrate() -> None:
    """Move pending messages between systems: .NET's timeout tables, other schedulers, delayline's own stores.

    Rows are staged in the source, delivered, confirmed and then marked, batch by batch. After any interruption resume
    or abort the run. Needs delayline[spark].
    """


def _spark() -> SparkSession:
    from delayline.spark import spark_session

    return spark_session()


@migrate.command(
    epilog=examples(
        f"delayline migrate preview {FROM_TO} --all-endpoints",
        "delayline migrate preview --from nservicebus-sql --target noop --endpoint Sales --json",
    )
)
@planned
@json_option
def preview(screen: Screen, plan: Plan) -> None:
    """Count the messages that would move, and those that cannot, with reasons. Changes nothing.

    Exit code 1 when something could not move.
    """
    from delayline.migration import preview as look

    found = look(plan, _spark())
    _show(screen, found)
    screen.document({"endpoints": [_described(one) for one in found]})
    if any(one.problems or one.unmovable for one in found):
        click.get_current_context().exit(FAILED)


@migrate.command(
    epilog=examples(
        f"delayline migrate run {FROM} --endpoint Sales.Orders",
        f"delayline migrate run {FROM} --all-endpoints --cutoff 2026-12-01T00:00:00+01:00",
    )
)
@planned
@report_option
@json_option
def run(screen: Screen, plan: Plan, report: Path | None) -> None:
    """Move all messages. Rejected ones go back to the source, with their reason in the journal.

    Stop the endpoints first. With --target noop everything is read and nothing moved or marked. Exit code 1 when
    something was set aside.
    """
    with _shown(screen) as progress:
        outcome = _migration(plan, progress).run(_spark())
    _tell(screen, plan, outcome, report)


@migrate.command(
    epilog=examples(
        f"delayline migrate resume {FROM} --endpoint Sales.Orders",
        f"delayline migrate resume {FROM} --all-endpoints --json",
    )
)
@planned
@report_option
@json_option
def resume(screen: Screen, plan: Plan, report: Path | None) -> None:
    """Go on with a run that something has stopped, with the same parameters; others are refused."""
    with _shown(screen) as progress:
        outcome = _migration(plan, progress).resume(_spark())
    _tell(screen, plan, outcome, report)


@migrate.command(
    epilog=examples(
        f"delayline migrate abort {FROM} --endpoint Sales.Orders",
        f"delayline migrate abort {FROM} --all-endpoints --json",
    )
)
@planned
@json_option
def abort(screen: Screen, plan: Plan) -> None:
    """Return unmoved messages to the source unchanged. Moved messages stay where they are.

    A batch that was being sent to a broker is returned, too: `verify` lists its ids.
    """
    outcome = _migration(plan, None).abort()
    progress = outcome.progress
    moved = 0 if progress is None else progress.moved
    restored = 0 if progress is None else progress.restored + progress.marked - moved
    aborted = (
        f"migration {outcome.run} is aborted"
        if outcome.run
        else "no migration had begun, and collected messages are back"
    )
    screen.echo(f"{aborted}: {restored} given back, {moved} had moved", "green")
    screen.document({"run": outcome.run, "restored": restored, "moved": moved, "left": outcome.left})
    _tell_left(screen, plan, outcome)


@migrate.command(
    epilog=examples(
        "delayline migrate status --from nservicebus-sql --source postgresql://me@old/nsb",
        "delayline migrate status --from nservicebus-sql --json",
    )
)
@on_a_source
@click.option("--run", "name", metavar="NAME", help="Which migration; the last one if left out.")
@json_option
def status(screen: Screen, source: TableSource, name: str | None) -> None:
    """Show the progress of a migration, and its rejected rows with reasons."""
    from delayline.migration.verify import details, left_in, run_named

    found = run_named(source, name)
    progress, reasons, aside = details(source, found, SHOWN)
    left = left_in(source, found)
    reasons = [*reasons, *((one.reason, one.rows) for one in left)]
    aside = [*aside, *((name, one.reason) for one in left for name in one.names)][:SHOWN]
    counts = {
        "rows": progress.rows, "moved": progress.moved, "on_their_way": progress.delivered,
        "to_go": progress.staged, "given_back": progress.restored, "set_aside": progress.aside,
        "not_taken": sum(one.rows for one in left),
    }  # fmt: skip
    screen.echo(f"migration {found.name} to {found.parameters['target']}: {found.state}")
    screen.table(("count", "of rows"), [(number, one.replace("_", " ")) for one, number in counts.items()])
    if reasons:
        _tell_reasons(screen, reasons, aside)
    screen.document({**_run_document(found), **counts, "reasons": dict(reasons)})


@migrate.command(
    epilog=examples(
        "delayline migrate history --from nservicebus-sql --source postgresql://me@old/nsb",
        "delayline migrate history --from nservicebus-sql --json",
    )
)
@on_a_source
@json_option
def history(screen: Screen, source: TableSource) -> None:
    """List all migrations of a source, the last one first."""
    from delayline.migration.verify import runs_of

    runs = runs_of(source)
    rows = [
        (one.name, one.state, one.parameters["endpoints"], one.parameters["target"], f"{one.started:%Y-%m-%d %H:%M:%S}")
        for one in runs
    ]
    if rows:
        screen.table(("run", "state", "endpoints", "target", "started (UTC)"), rows)
    else:
        screen.echo(f"nothing was ever moved from {source}")
    screen.document({"runs": [_run_document(one) for one in runs]})


@migrate.command(
    epilog=examples(f"delayline migrate verify {FROM}", f"delayline migrate verify {FROM} --json --run NAME")
)
@on_a_source
@to_a_target
@click.option("--run", "name", metavar="NAME", help="Which migration; the last one if left out.")
@json_option
def verify(screen: Screen, source: TableSource, target: Target | None, name: str | None) -> None:
    """Hold source, target and journal against each other, message by message; changes nothing.

    Messages that may have been delivered twice are named by their ids. Exit code 1 when anything does not add up.
    """
    from delayline.migration.verify import verify as compare

    if target is None:
        raise ConfigurationError("noop has no messages to verify: give the URL that the messages went to")
    verified = compare(source, target, _spark(), run=name)
    _tell_verified(screen, verified)
    if not verified.ok:
        click.get_current_context().exit(FAILED)


def _migration(plan: Plan, progress: Any) -> Any:  # noqa: ANN401 - loaded with PySpark
    from delayline.migration import Migration

    return Migration(plan, progress=progress)


class _shown:  # noqa: N801 - read as a verb
    """A progress bar, which shows where it may move."""

    def __init__(self, screen: Screen) -> None:
        self._bars = screen.progress()
        self._task = self._bars.add_task("moving", total=None)

    def __enter__(self) -> Any:  # noqa: ANN401 - a callback
        self._bars.start()
        return self._show

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def _show(self, done: int, rows: int) -> None:
        self._bars.update(self._task, description=f"{done} of {rows}", completed=done, total=rows or None)


def _show(screen: Screen, found: Sequence[EndpointPreview]) -> None:
    for one in found:
        if one.unseen:
            screen.echo(f"{one.unseen} of the messages were only counted: the following figures are about the others")
        times = "" if one.first is None or one.last is None else f", due {one.first:%Y-%m-%d %H:%M:%S} to "
        last = "" if one.last is None else f"{one.last:%Y-%m-%d %H:%M:%S} UTC"
        screen.echo(f"{one.endpoint}: {one.rows} messages{times}{last}, {one.overdue} overdue", "bold")
        if one.before_cutoff:
            screen.echo(f"  {one.before_cutoff} are due before the cutoff and stay")
        for problem in one.problems:
            screen.echo(f"  ✗ {problem}", "red")
        screen.table(
            ("count", "destination"), [(number, name or "(none)") for name, number in one.destinations[:SHOWN]]
        )
        if one.unmovable:
            screen.table(
                ("count", "cannot move because", "for example"),
                [(number, reason, example or "") for reason, number, example in one.unmovable[:SHOWN]],
            )
    if not found:
        screen.echo("there is nothing to move")


def _described(one: EndpointPreview) -> Mapping[str, object]:
    return {
        "endpoint": one.endpoint, "rows": one.rows, "first": one.first, "last": one.last, "overdue": one.overdue,
        "before_cutoff": one.before_cutoff, "destinations": dict(one.destinations), "problems": one.problems,
        "unmovable": [{"reason": why, "rows": number, "id": key} for why, number, key in one.unmovable],
    }  # fmt: skip


def _run_document(run: MigrationRun) -> dict[str, object]:
    return {
        "run": run.name, "state": str(run.state), "parameters": dict(run.parameters), "started": run.started,
        "finished": run.finished,
    }  # fmt: skip


def _tell(screen: Screen, plan: Plan, outcome: MigrationResult, report: Path | None) -> None:
    progress = outcome.progress
    rows, aside = (0, 0) if progress is None else (progress.rows, progress.aside)
    moved = 0 if progress is None or plan.target is None else progress.moved
    if outcome.reasons:
        _tell_reasons(screen, outcome.reasons, outcome.examples)
    stays = f", {outcome.not_taken} not taken" if outcome.not_taken else ""
    if plan.target is None:
        screen.echo(f"{rows - aside} would move, {aside} would be set aside{stays}; nothing was changed")
    else:
        rate = f" in {outcome.seconds:.1f} s, {moved / outcome.seconds:.0f}/s" if outcome.seconds else ""
        text = f"{moved} moved to {plan.target}{rate}, {aside} set aside{stays}"
        screen.echo(f"{text} (migration {outcome.run})" if outcome.run else text, "red" if outcome.reasons else "green")
    screen.document(
        {"run": outcome.run, "state": str(outcome.state), "rows": rows, "moved": moved, "set_aside": aside,
         "seconds": outcome.seconds, "left": outcome.left, "not_taken": outcome.not_taken,
         "reasons": dict(outcome.reasons),
         "examples": [{"id": key, "reason": why} for key, why in outcome.examples]}
    )  # fmt: skip
    if report is not None:
        from delayline.migration.report import page
        from delayline.spark.report import write_whole

        write_whole(report, page(plan, outcome))
        screen.echo(f"the report is in {report}")
    _tell_left(screen, plan, outcome)
    if outcome.reasons:
        click.get_current_context().exit(FAILED)


def _tell_reasons(screen: Screen, reasons: Sequence[tuple[str, int]], examples: Sequence[tuple[str, str]]) -> None:
    screen.table(("count", "not moved because"), [(number, why) for why, number in reasons[:SHOWN]])
    if examples:
        screen.table(("id", "reason"), examples[:SHOWN])


def _tell_left(screen: Screen, plan: Plan, outcome: MigrationResult) -> None:
    if outcome.left:
        screen.echo(f"✗ {outcome.left} could not go back to {plan.source}: abort again when it is well", "red")
        click.get_current_context().exit(FAILED)


def _tell_verified(screen: Screen, found: Verified) -> None:
    rows: list[tuple[int, str]] = [
        (found.rows, "were taken aside"),
        (found.moved, "moved, says the journal"),
        (found.aside, "were set aside and went back"),
        (found.restored, "were given back by an abort"),
        (found.unfinished, "are not done"),
    ]
    if found.waiting is not None:
        rows += [(found.waiting, "wait at the target as they were sent"), (found.gone, "were due and have left it")]
        rows += [(len(found.missing), "should wait there and do not"), (len(found.changed), "wait there otherwise")]
    else:
        screen.echo("the target cannot list its messages: each of these was confirmed by it")
    if found.not_taken:
        rows += [(found.not_taken, "stay in the source: no run takes them, as status says")]
    rows += [(len(found.doubled), "moved and are in the source too")]
    rows += [(len(found.repeatable), "may have been delivered more often than once")]
    screen.table(("count", f"messages of migration {found.run.name}"), rows)
    for title, ids in (("missing", found.missing), ("changed", found.changed), ("in both", found.doubled)):
        for one in ids[:SHOWN]:
            screen.echo(f"{title}: {one}", "red")
    for one in found.repeatable[:SHOWN]:
        screen.echo(f"perhaps twice: {one}")
    screen.echo("✓ everything adds up" if found.ok else "✗ it does not add up", "green" if found.ok else "red")
    screen.document(
        {"run": found.run.name, "ok": found.ok, "rows": found.rows, "moved": found.moved, "set_aside": found.aside,
         "given_back": found.restored, "not_taken": found.not_taken, "unfinished": found.unfinished,
         "waiting": found.waiting, "gone": found.gone,
         "missing": found.missing, "changed": found.changed, "in_both": found.doubled,
         "possible_duplicates": found.repeatable}
    )  # fmt: skip
