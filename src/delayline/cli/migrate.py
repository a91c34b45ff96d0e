"""`delayline migrate`: move pending messages from one system to another, with Spark."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from delayline.cli.due import delay_given, instant_given
from delayline.cli.options import EXIT_FAILED, Command, Commands, examples, json_option, with_options
from delayline.cli.screen import ROWS_SHOWN
from delayline.errors import ConfigurationError
from delayline.readable import DELAYS, INSTANTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime, timedelta

    from pyspark.sql import SparkSession

    from delayline.cli.screen import Screen
    from delayline.migration import EndpointPreview, MigrationResult, Plan
    from delayline.migration.journal import MigrationRun
    from delayline.migration.source import TableSource
    from delayline.migration.target import Target
    from delayline.migration.verify import Verified


SOURCE_VARIABLE: Final = "DELAYLINE_MIGRATE_SOURCE"
TARGET_VARIABLE: Final = "DELAYLINE_MIGRATE_TARGET"
JOURNAL_VARIABLE: Final = "DELAYLINE_MIGRATE_JOURNAL"
SOURCE_KINDS: Final = (
    "nservicebus-sql",
    "nhibernate",
    "delayline",
    "procrastinate",
    "apscheduler",
    "rabbitmq-levels",
    "azure-storage",
    "celery-levels",
    "celery-scheduled",
)


def on_a_source(command: Command) -> Command:
    """Give a command `source`."""

    @functools.wraps(command)
    def with_source(
        *args: object,
        kind: str,
        source_url: str,
        schema: str | None,
        journal: str | None,
        table: str | None,
        container: str | None,
        **arguments: Any,  # noqa: ANN401 - click's
    ) -> Any:  # noqa: ANN401 - click's
        from delayline.migration import source_at

        names = {name: value for name, value in (("table", table), ("container", container)) if value is not None}
        source = source_at(kind, source_url, schema=schema, journal=journal, **names)
        return command(*args, source=source, **arguments)

    where = f"The database, or other place, to empty. [{SOURCE_VARIABLE}]"
    kinds = f"The kind of source: {', '.join(SOURCE_KINDS)}, or an installed distribution's."
    kept = f"The database of the journal, where the source is none. [{JOURNAL_VARIABLE}]"
    options = (
        click.option("--from", "kind", metavar="KIND", required=True, help=kinds),
        click.option("--source", "source_url", required=True, metavar="URL", help=where, envvar=SOURCE_VARIABLE),
        click.option("--schema", metavar="NAME", help="Where the source's tables are; the user's own if left out."),
        click.option("--journal", metavar="URL", help=kept, envvar=JOURNAL_VARIABLE),
        click.option("--table", metavar="NAME", help="Of azure-storage: its table, where it is not the usual table."),
        click.option("--container", metavar="NAME", help="Of azure-storage: its container, likewise."),
    )
    return with_options(with_source, *options)


def to_a_target(command: Command) -> Command:
    """Give a command `target`, None for noop."""

    @functools.wraps(command)
    def with_target(
        *args: object,
        target_url: str,
        target_schema: str | None,
        cold_tier: str | None,
        hot_horizon: timedelta,
        **arguments: Any,  # noqa: ANN401 - click's
    ) -> Any:  # noqa: ANN401 - click's
        from delayline.migration import target_at

        target = target_at(target_url, schema=target_schema, cold_tier=cold_tier, hot_horizon=hot_horizon)
        return command(*args, target=target, **arguments)

    where = (
        f"Where messages go: the URL of a back end that delayline setup has made ready, or noop. [{TARGET_VARIABLE}]"
    )
    far = f"With --cold-tier: messages due later go to its files: {DELAYS}."
    options = (
        click.option("--target", "target_url", required=True, metavar="URL", help=where, envvar=TARGET_VARIABLE),
        click.option("--target-schema", metavar="NAME", help="Where the target's tables are."),
        click.option("--cold-tier", metavar="FOLDER", help="Where far messages of the target's stores wait in files."),
        click.option("--hot-horizon", callback=delay_given, default="1d", show_default=True, help=far),
    )
    return with_options(with_target, *options)


def planned(command: Command) -> Command:
    """Add the options of a plan to a command, and pass it `plan`."""

    @functools.wraps(command)
    def with_plan(
        *args: object,
        source: TableSource,
        target: Target | None,
        endpoints: Sequence[str],
        every: bool,
        cutoff: datetime | None,
        batch_size: int | None,
        **arguments: Any,  # noqa: ANN401 - click's
    ) -> Any:  # noqa: ANN401 - click's
        from delayline.migration import Plan

        if every == bool(endpoints):
            raise ConfigurationError(
                "name the endpoints whose messages are to move: --endpoint NAME, repeatable, or --all-endpoints"
            )
        chosen = None if every else tuple(endpoints)
        return command(*args, plan=Plan(source, target, chosen, cutoff, batch_size), **arguments)

    options = (
        click.option("--endpoint", "endpoints", multiple=True, metavar="NAME", help="Whose messages; may be repeated."),
        click.option("--all-endpoints", "every", is_flag=True, help="All endpoints' messages."),
        click.option(
            "--cutoff",
            callback=instant_given,
            metavar="TIME",
            help=f"Only messages due at this time or later: {INSTANTS}.",
        ),
        click.option(
            "--batch-size",
            type=click.IntRange(1),
            help="Rows delivered, confirmed and marked together, at most: 1000, or 10000 to stores.",
        ),
    )
    return on_a_source(to_a_target(with_options(with_plan, *options)))


def report_option(command: Command) -> Command:
    """Give a command `report`, a file for people."""
    usage = "Write a page about it to this file."
    return click.option("--report", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help=usage)(
        command
    )


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
    """Count the messages that would move, and messages that cannot, with reasons. Changes nothing.

    Exit code 1 when something could not move.
    """
    from delayline.migration import preview as look

    previews = look(plan, _spark())
    _show(screen, previews)
    screen.document({"endpoints": [_described(endpoint) for endpoint in previews]})
    if any(endpoint.problems or endpoint.unmovable for endpoint in previews):
        click.get_current_context().exit(EXIT_FAILED)


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
    """Move all messages. Rejected messages go back to the source, with their reason in the journal.

    Stop the endpoints first. With --target noop everything is read and nothing moved or marked. Exit code 1 when
    a row was rejected.
    """
    with _shown(screen) as progress:
        outcome = _migration(plan, progress).run(_spark())
    _print_outcome(screen, plan, outcome, report)


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
    _print_outcome(screen, plan, outcome, report)


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
    screen.echo(f"{aborted}: {restored} returned to the source, {moved} had moved", "green")
    screen.document({"run": outcome.run, "restored": restored, "moved": moved, "left": outcome.left})
    _print_left(screen, plan, outcome)


@migrate.command(
    epilog=examples(
        "delayline migrate status --from nservicebus-sql --source postgresql://me@old/nsb",
        "delayline migrate status --from nservicebus-sql --json",
    )
)
@on_a_source
@click.option("--run", "name", metavar="NAME", help="Which migration; the latest if left out.")
@json_option
def status(screen: Screen, source: TableSource, name: str | None) -> None:
    """Show the progress of a migration, and its rejected rows with reasons."""
    from delayline.migration.verify import details, left_in, run_named

    run = run_named(source, name)
    progress, reasons, rejected = details(source, run, ROWS_SHOWN)
    left = left_in(source, run)
    reasons = [*reasons, *((group.reason, group.rows) for group in left)]
    rejected = [*rejected, *((name, group.reason) for group in left for name in group.names)][:ROWS_SHOWN]
    counts = {
        "rows": progress.rows, "moved": progress.moved, "on_their_way": progress.delivered,
        "to_go": progress.staged, "restored": progress.restored, "rejected": progress.rejected,
        "skipped": sum(group.rows for group in left),
    }  # fmt: skip
    screen.echo(f"migration {run.name} to {run.parameters['target']}: {run.state}")
    screen.table(("count", "of rows"), [(number, state.replace("_", " ")) for state, number in counts.items()])
    if reasons:
        _print_reasons(screen, reasons, rejected)
    screen.document({**_run_document(run), **counts, "reasons": dict(reasons)})


@migrate.command(
    epilog=examples(
        "delayline migrate history --from nservicebus-sql --source postgresql://me@old/nsb",
        "delayline migrate history --from nservicebus-sql --json",
    )
)
@on_a_source
@json_option
def history(screen: Screen, source: TableSource) -> None:
    """List all migrations of a source, the latest first."""
    from delayline.migration.verify import runs_of

    runs = runs_of(source)
    rows = [
        (run.name, run.state, run.parameters["endpoints"], run.parameters["target"], f"{run.started:%Y-%m-%d %H:%M:%S}")
        for run in runs
    ]
    if rows:
        screen.table(("run", "state", "endpoints", "target", "started (UTC)"), rows)
    else:
        screen.echo(f"no migration has run from {source}")
    screen.document({"runs": [_run_document(run) for run in runs]})


@migrate.command(
    epilog=examples(f"delayline migrate verify {FROM}", f"delayline migrate verify {FROM} --json --run NAME")
)
@on_a_source
@to_a_target
@click.option("--run", "name", metavar="NAME", help="Which migration; the latest if left out.")
@json_option
def verify(screen: Screen, source: TableSource, target: Target | None, name: str | None) -> None:
    """Compare source, target and journal, message by message; changes nothing.

    Messages that may have been delivered twice are named by their ids. Exit code 1 if they differ.
    """
    from delayline.migration.verify import verify as compare

    if target is None:
        raise ConfigurationError("noop has no messages to verify: give the URL that the messages went to")
    verified = compare(source, target, _spark(), run=name)
    _print_verified(screen, verified)
    if not verified.ok:
        click.get_current_context().exit(EXIT_FAILED)


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


def _show(screen: Screen, previews: Sequence[EndpointPreview]) -> None:
    for preview in previews:
        if preview.unseen:
            screen.echo(f"{preview.unseen} of the messages were only counted; the following figures cover the others")
        times = "" if preview.first is None or preview.last is None else f", due {preview.first:%Y-%m-%d %H:%M:%S} to "
        last = "" if preview.last is None else f"{preview.last:%Y-%m-%d %H:%M:%S} UTC"
        screen.echo(f"{preview.endpoint}: {preview.rows} messages{times}{last}, {preview.overdue} overdue", "bold")
        if preview.before_cutoff:
            screen.echo(f"  {preview.before_cutoff} are due before the cutoff and stay in the source")
        for problem in preview.problems:
            screen.echo(f"  ✗ {problem}", "red")
        screen.table(
            ("count", "destination"), [(number, name or "(none)") for name, number in preview.destinations[:ROWS_SHOWN]]
        )
        if preview.unmovable:
            screen.table(
                ("count", "rejected because", "for example"),
                [(number, reason, example or "") for reason, number, example in preview.unmovable[:ROWS_SHOWN]],
            )
    if not previews:
        screen.echo("no messages to move")


def _described(preview: EndpointPreview) -> Mapping[str, object]:
    return {
        "endpoint": preview.endpoint, "rows": preview.rows, "first": preview.first, "last": preview.last,
        "overdue": preview.overdue, "before_cutoff": preview.before_cutoff,
        "destinations": dict(preview.destinations), "problems": preview.problems,
        "unmovable": [{"reason": why, "rows": number, "id": key} for why, number, key in preview.unmovable],
    }  # fmt: skip


def _run_document(run: MigrationRun) -> dict[str, object]:
    return {
        "run": run.name, "state": str(run.state), "parameters": dict(run.parameters), "started": run.started,
        "finished": run.finished,
    }  # fmt: skip


def _print_outcome(screen: Screen, plan: Plan, outcome: MigrationResult, report: Path | None) -> None:
    progress = outcome.progress
    rows, rejected = (0, 0) if progress is None else (progress.rows, progress.rejected)
    moved = 0 if progress is None or plan.target is None else progress.moved
    if outcome.reasons:
        _print_reasons(screen, outcome.reasons, outcome.examples)
    stays = f", {outcome.skipped} skipped" if outcome.skipped else ""
    if plan.target is None:
        screen.echo(f"{rows - rejected} would move, {rejected} would be rejected{stays}; nothing was changed")
    else:
        rate = f" in {outcome.seconds:.1f} s, {moved / outcome.seconds:.0f}/s" if outcome.seconds else ""
        line = f"{moved} moved to {plan.target}{rate}, {rejected} rejected{stays}"
        screen.echo(f"{line} (migration {outcome.run})" if outcome.run else line, "red" if outcome.reasons else "green")
    screen.document(
        {"run": outcome.run, "state": str(outcome.state), "rows": rows, "moved": moved, "rejected": rejected,
         "seconds": outcome.seconds, "left": outcome.left, "skipped": outcome.skipped,
         "reasons": dict(outcome.reasons),
         "examples": [{"id": key, "reason": why} for key, why in outcome.examples]}
    )  # fmt: skip
    if report is not None:
        from delayline.migration.report import page
        from delayline.spark.report import write_whole

        write_whole(report, page(plan, outcome))
        screen.echo(f"the report is in {report}")
    _print_left(screen, plan, outcome)
    if outcome.reasons:
        click.get_current_context().exit(EXIT_FAILED)


def _print_reasons(screen: Screen, reasons: Sequence[tuple[str, int]], examples: Sequence[tuple[str, str]]) -> None:
    screen.table(("count", "rejected because"), [(number, why) for why, number in reasons[:ROWS_SHOWN]])
    if examples:
        screen.table(("id", "reason"), examples[:ROWS_SHOWN])


def _print_left(screen: Screen, plan: Plan, outcome: MigrationResult) -> None:
    if outcome.left:
        screen.echo(f"✗ {outcome.left} could not be returned to {plan.source}: abort again once it is available", "red")
        click.get_current_context().exit(EXIT_FAILED)


def _print_verified(screen: Screen, check: Verified) -> None:
    rows: list[tuple[int, str]] = [
        (check.rows, "found in the source when the run began"),
        (check.moved, "moved, by the journal"),
        (check.rejected, "rejected and returned to the source"),
        (check.restored, "returned to the source by an abort"),
        (check.unfinished, "not finished"),
    ]
    if check.waiting is not None:
        rows += [(check.waiting, "pending at the target, unchanged"), (check.gone, "due, and no longer at the target")]
        rows += [
            (len(check.missing), "missing at the target"),
            (len(check.changed), "pending there with another due time or destination"),
        ]
    else:
        screen.echo("the target cannot list its messages; it has confirmed each moved message")
    if check.skipped:
        rows += [(check.skipped, "skipped: rows without a readable due time stay in the source; see status")]
    rows += [(len(check.doubled), "moved, and in the source too")]
    rows += [(len(check.repeatable), "possibly delivered more than once")]
    screen.table(("count", f"messages of migration {check.run.name}"), rows)
    for title, ids in (("missing", check.missing), ("changed", check.changed), ("in both", check.doubled)):
        for message_id in ids[:ROWS_SHOWN]:
            screen.echo(f"{title}: {message_id}", "red")
    for message_id in check.repeatable[:ROWS_SHOWN]:
        screen.echo(f"possibly twice: {message_id}")
    screen.echo(
        "✓ nothing is missing" if check.ok else "✗ source, journal and target differ", "green" if check.ok else "red"
    )
    screen.document(
        {"run": check.run.name, "ok": check.ok, "rows": check.rows, "moved": check.moved, "rejected": check.rejected,
         "restored": check.restored, "skipped": check.skipped, "unfinished": check.unfinished,
         "waiting": check.waiting, "gone": check.gone,
         "missing": check.missing, "changed": check.changed, "in_both": check.doubled,
         "possible_duplicates": check.repeatable}
    )  # fmt: skip
