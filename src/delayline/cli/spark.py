"""`delayline spark`: Spark jobs that move messages in bulk."""

from __future__ import annotations

import contextlib
import signal
import threading
from dataclasses import asdict, fields, replace
from functools import wraps
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from delayline.cli.due import delay_given
from delayline.cli.options import (
    EXIT_FAILED,
    PLACE_SETTINGS,
    Commands,
    examples,
    json_option,
    settings_options,
    with_options,
)
from delayline.cli.screen import ROWS_SHOWN
from delayline.masking import masked
from delayline.readable import DELAYS, local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import timedelta

    from pyspark.sql import SparkSession

    from delayline.bulk.jobs import Job
    from delayline.cli.screen import Screen
    from delayline.settings import Settings
    from delayline.shards import Shard
    from delayline.spark import Audit, JobTarget, Promoted, Scheduled
    from delayline.spark.audit import Totals

    Sessions = Callable[[Screen], contextlib.AbstractContextManager[SparkSession]]


STORES = ("endpoint", "url", "store_url", "table_name")


def session_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `sessions`, which opens the Spark session that --master and --conf describe."""

    @wraps(command)
    def with_sessions(*args: object, master: str | None, confs: Sequence[str], **arguments: Any) -> Any:  # noqa: ANN401
        conf = dict(pair(conf_pair) for conf_pair in confs)

        @contextlib.contextmanager
        def sessions(screen: Screen) -> Iterator[SparkSession]:
            from pyspark.sql import SparkSession

            from delayline.spark import spark_session

            theirs = SparkSession.getActiveSession()
            bar = {"spark.ui.showConsoleProgress": "true"} if screen.animated else {}
            session = spark_session(master, conf={**bar, **conf})
            try:
                yield session
            finally:
                if theirs is None:
                    session.stop()

        return command(*args, sessions=sessions, **arguments)

    description = "Where Spark runs: local[*] unless set here, by spark-submit or in Spark's files."
    with_master = click.option("--master", metavar="URL", help=description)(with_sessions)
    return click.option(
        "--conf", "confs", multiple=True, metavar="NAME=VALUE", help="A setting of Spark's; repeatable."
    )(with_master)


def target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command, in place of `settings`, `target`: their store as jobs take it, with bounds on its connections."""

    @wraps(command)
    def with_target(
        *args: object,
        settings: Settings,
        max_connections: int | None,
        connect_timeout: timedelta,
        **arguments: Any,  # noqa: ANN401 - click's
    ) -> Any:  # noqa: ANN401 - click's
        from delayline.spark import JobTarget

        target = JobTarget(
            settings.resolved_store_url,
            endpoint=settings.named_endpoint,
            table=settings.table_name,
            cold_tier=settings.cold_tier,
            max_connections=max_connections,
            connect_timeout=max(ceil(connect_timeout.total_seconds()), 1),
        )
        return command(*args, target=target, **arguments)

    return with_options(
        with_target,
        click.option(
            "--max-connections",
            type=click.IntRange(1),
            help="How many connections the tasks have at a time; by default a quarter of the free ones, at most 32.",
        ),
        click.option(
            "--connect-timeout",
            callback=delay_given,
            default="2m",
            show_default=True,
            help=f"How long a task waits for a server that has no connection left: {DELAYS}.",
        ),
    )


def pair(assignment: str) -> tuple[str, str]:
    """Return both sides of NAME=VALUE. Raises UsageError."""
    name, sign, value = assignment.partition("=")
    if not name or not sign or not value:
        raise click.UsageError(f"{assignment!r} must be NAME=VALUE.")
    return name, value


@contextlib.contextmanager
def stopped_by_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at SIGINT or SIGTERM, in place of ending; a second signal ends the process."""

    def on_signal(number: int, frame: object) -> None:
        del number, frame
        for signal_number in before:
            signal.signal(signal_number, before[signal_number])  # a second signal does not wait
        threading.Thread(target=stop, name="delayline stop").start()

    before = {signal_number: signal.getsignal(signal_number) for signal_number in (signal.SIGINT, signal.SIGTERM)}
    for signal_number in before:
        signal.signal(signal_number, on_signal)
    try:
        yield
    finally:
        for signal_number in before:
            signal.signal(signal_number, before[signal_number])


def in_thread(work: Callable[[], object]) -> None:
    """Run `work` in a thread, so that the calling thread can handle signals."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="delayline job", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    if failures:
        raise failures[0]


READABLE_FORMATS = ("parquet", "csv", "jsonl", "jdbc")
"""Rejected rows shown on the screen."""


@click.group(
    cls=Commands,
    epilog=examples(
        "delayline spark schedule reminders.parquet --endpoint sales",
        "delayline spark promote --endpoint sales --cold-tier s3://bucket/reminders --every 1h",
        "delayline spark dispatch --endpoint sales --shards 4 --master spark://host:7077",
    ),
)
def spark() -> None:
    """Schedule, promote, dispatch, export and audit messages in bulk, on this machine or on a cluster.

    On a cluster the executors need delayline, the store's driver, and the way to the store.
    """


@spark.command(
    epilog=examples(
        "delayline spark schedule reminders.csv --endpoint sales --run nightly-2026-05-01",
        "delayline spark schedule soon.csv --endpoint sales --delay-levels amqp://host/orders --hot-horizon 30d",
        "delayline spark schedule reminders --endpoint sales --format jdbc --option url=jdbc:postgresql://host/crm",
        "delayline spark schedule far.parquet --endpoint sales --cold-tier s3://bucket/reminders --hot-horizon 2d",
        "delayline spark schedule in.json --endpoint sales --column delay=wait --column to=billing --rejected bad/",
    )
)
@click.argument("path")
@click.option(
    "--format", "form", type=click.Choice(READABLE_FORMATS), help="The file's format, if its name does not show it."
)
@click.option(
    "--option",
    "reading",
    multiple=True,
    metavar="NAME=VALUE",
    help="Of --format jdbc, where PATH is a table: url, user, passwordEnv, and all that Spark's JDBC source takes.",
)
@click.option(
    "--delay-levels", metavar="URL", help="A broker whose delay levels get messages due within --hot-horizon."
)
@click.option("--run", help="The job's name: run again under it, nothing happens twice, and a killed job goes on.")
@click.option(
    "--version", type=click.IntRange(0), default=0, help="Number of the input, where the same --run has several."
)
@click.option(
    "--atomic",
    type=click.Choice(["piece", "job"]),
    default="piece",
    show_default=True,
    help="What is stored or not: each piece, or the whole job, without --job-folder for some million rows.",
)
@click.option(
    "--job-folder",
    metavar="FOLDER",
    help="Folder or URI of all machines where --atomic job and --on-conflict raise write the rows first, however many.",
)
@click.option("--on-conflict", type=click.Choice(["keep", "replace", "raise"]), default="keep", show_default=True)
@click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="OURS=THEIRS",
    help="Where names differ; delay=... in place of due, to=QUEUE of all, time_zone=Europe/Berlin of times that have "
    "none, epoch=seconds or epoch=milliseconds of numbers.",
)
@click.option("--rejected", metavar="FOLDER", help="Where to write, as JSON Lines, the rows that cannot be messages.")
@click.option(
    "--hot-horizon",
    callback=delay_given,
    default="1d",
    show_default=True,
    help=f"With a cold tier: messages due later wait there: {DELAYS}.",
)
@settings_options(*STORES, "cold_tier")
@target_options
@session_options
@json_option
def schedule(
    target: JobTarget,
    sessions: Sessions,
    screen: Screen,
    path: str,
    columns: tuple[str, ...],
    reading: tuple[str, ...],
    delay_levels: str | None,
    job_folder: str | None,
    rejected: str | None,
    **job: Any,  # noqa: ANN401 - what schedule() takes by the same names
) -> None:
    """Store every valid row of Parquet, CSV, JSON Lines or a JDBC table as a delayed message, each once.

    A store takes the rows in pieces; a job that was killed goes on where it was under the same --run, and `delayline
    spark jobs` shows how far it is. A cold tier gets its rows at once after that. With --atomic job or --on-conflict
    raise it stores all of them, or none. A broker's delay levels get them in pieces too, at least once: up to 5,000
    messages that were under way when a task was killed are sent again. Exit code 1 when rows were rejected.
    """
    from delayline.spark import Columns
    from delayline.spark import schedule as run_schedule

    names = dict(pair(column) for column in columns)
    unknown = names.keys() - {field.name for field in fields(Columns)}
    if unknown:
        raise click.UsageError(f"--column {unknown.pop()}=... is not a column of a message.")
    named = Columns(**names)
    target = replace(target, delay_levels=delay_levels, job_folder=job_folder)
    options = dict(pair(option) for option in reading)
    with sessions(screen) as session:
        done = run_schedule(path, target, columns=named, options=options, spark=session, **job)
        if done.rejected and rejected is not None:
            done.rejected_rows.write.mode("overwrite").json(rejected)
        _print_scheduled(screen, done, rejected)
    if done.rejected:
        click.get_current_context().exit(EXIT_FAILED)


def _print_scheduled(screen: Screen, done: Scheduled, folder: str | None) -> None:
    again = "stored by an earlier run of that name" if done.repeated else "stored"
    elsewhere = f"{done.cold:,} in the cold tier, " if done.cold else ""
    elsewhere += f"{done.sent:,} sent to delay levels, " if done.sent else ""
    screen.echo(f"{done.stored:,} {again}, {elsewhere}{done.duplicates:,} there already, {done.rejected:,} rejected")
    rows = done.rejected_rows.limit(ROWS_SHOWN).toArrow().to_pylist() if done.rejected else []
    for row in rows:
        screen.echo(f"  {row['file'] or ''} line {row['line'] or '?'}: {row['reason']}", "yellow")
    if folder is not None and done.rejected:
        screen.echo(f"all of them are in {folder}")
    counts = {
        name: getattr(done, name) for name in ("run", "stored", "cold", "sent", "duplicates", "rejected", "repeated")
    }
    screen.document({**counts, "rejected_rows": rows})


@spark.command(epilog=examples("delayline spark jobs --endpoint sales", "delayline spark jobs --endpoint sales --json"))
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="The most jobs to list.")
@settings_options(*STORES)
@json_option
def jobs(settings: Settings, screen: Screen, limit: int) -> None:
    """List the jobs that store or send messages, the latest first: what they have done, what is under way.

    An open job is running, or was not finished: its last piece says when it last stored something. A job over a map of
    shards is a job in each of them.
    """
    from delayline.bulk.pieces import PieceWriter
    from delayline.shards import named_errors
    from delayline.sql.shards.backend import map_named

    table, url = settings.table_name or f"{settings.named_endpoint}.timeouts", settings.resolved_store_url
    shards = map_named(url)
    found: list[tuple[Shard | None, Job]] = []
    for shard in (None,) if shards is None else shards.used:
        writer = PieceWriter(url, table) if shard is None else PieceWriter(shard.url, table, schema=shard.schema)
        with named_errors(shard):
            found += [(shard, job) for job in writer.jobs(limit)]
    found = sorted(found, key=lambda each: each[1].started, reverse=True)[:limit]
    columns = (
        *(() if shards is None else ("shard",)),
        "job",
        "version",
        "state",
        "stored",
        "cold",
        "sent",
        "there already",
        "rejected",
        "pieces",
        "began",
        "last piece",
    )
    rows = [
        (
            *(() if shard is None else (shard.name,)),
            job.name.name,
            job.name.version or "",
            job.state,
            f"{job.committed.stored:,}",
            f"{job.committed.cold:,}" if job.parameters.has_cold_tier else "",
            f"{job.committed.sent:,}" if job.parameters.part or job.committed.sent else "",
            f"{job.committed.duplicates:,}",
            f"{job.committed.rejected:,}",
            f"{job.pieces:,}" if job.is_open else "",
            local(job.started),
            local(job.last),
        )
        for shard, job in found
    ]
    if rows:
        screen.table(columns, rows)
    else:
        screen.echo("no jobs")
    screen.document({"jobs": [_job_document(job, shard) for shard, job in found]})


def _job_document(job: Job, shard: Shard | None) -> dict[str, object]:
    committed = job.committed
    return {
        **({} if shard is None else {"shard": shard.name}),
        "job": job.name.name,
        "version": job.name.version,
        "state": job.state,
        "stored": committed.stored,
        "cold": committed.cold if job.parameters.has_cold_tier else None,
        "sent": committed.sent if job.parameters.part or committed.sent else None,
        "duplicates": committed.duplicates,
        "rejected": committed.rejected,
        "pieces": job.pieces if job.is_open else None,
        "most_pieces": None if job.parameters.at_once else job.parameters.pieces,
        "on_conflict": job.parameters.on_conflict,
        "began": job.started.isoformat(),
        "last": job.last.isoformat(),
    }


@spark.command(
    epilog=examples(
        "delayline spark dispatch --endpoint sales --shards 4 --master spark://host:7077",
        "delayline spark dispatch --endpoint sales --status",
        "delayline spark dispatch --endpoint sales --stop",
    )
)
@click.option("--shards", type=click.IntRange(1), default=2, show_default=True, help="Tasks; each holds a slot.")
@click.option(
    "--lease", callback=delay_given, default="10m", show_default=True, help=f"How long a job lasts: {DELAYS}."
)
@click.option("--name", help="The dispatcher's; the endpoint's name if left out.")
@click.option("--stop", "stops", is_flag=True, help="Stop the running dispatcher, on whichever machine; do not wait.")
@click.option("--status", "shows", is_flag=True, help="Show the progress of its tasks.")
@settings_options(*PLACE_SETTINGS, "number_of_retries", "batch_size")
@session_options
@json_option
def dispatch(
    settings: Settings,
    sessions: Sessions,
    screen: Screen,
    shards: int,
    lease: timedelta,
    name: str | None,
    stops: bool,
    shows: bool,
) -> None:
    """Dispatch due messages from Spark's tasks, each with a poller like that of `delayline run`, until stopped.

    SIGINT and SIGTERM stop it once messages in flight were sent.
    """
    from delayline.spark.dispatch import Dispatcher, dispatcher_status, stop_dispatcher

    if stops:
        stop_dispatcher(settings, name)
        screen.echo("stop requested")
        screen.document({"stopping": True})
        return
    if shows:
        _show_shards(screen, [asdict(shard) for shard in dispatcher_status(settings, name)])
        return
    with sessions(screen) as session:
        dispatcher = Dispatcher(settings, shards=shards, lease=lease, name=name, spark=session)
        screen.echo(f"dispatching from {masked(settings.resolved_store_url)} in {shards} tasks. Ctrl+C stops it")
        with stopped_by_signal(dispatcher.stop):
            in_thread(dispatcher.run)
        _show_shards(screen, [asdict(shard) for shard in dispatcher.metrics()])


def _show_shards(screen: Screen, shards: Sequence[dict[str, Any]]) -> None:
    columns = ("shard", "generation", "place", "dispatched", "retried", "failed", "p50", "p99", "longest", "seen")
    screen.table(columns, [["" if shard[name] is None else shard[name] for name in columns] for shard in shards])
    screen.document({"shards": list(shards)})


@spark.command(epilog=examples("delayline spark export journal/ --endpoint sales"))
@click.argument("path")
@click.option("--partitions", type=click.IntRange(1), default=2, show_default=True, help="Tasks that read.")
@settings_options(*STORES)
@target_options
@session_options
@json_option
def export(target: JobTarget, sessions: Sessions, screen: Screen, path: str, partitions: int) -> None:
    """Move the entries of the store's journal to Parquet under PATH, each exactly once. Safe to kill and to repeat.

    A journal is kept after `delayline setup --journal true`.
    """
    from delayline.spark import export as run_export

    with sessions(screen) as session:
        done = run_export(target, path, partitions=partitions, spark=session)
    screen.echo(f"{done.entries:,} entries in {done.batches} batch{'' if done.batches == 1 else 'es'} under {path}")
    screen.document({"entries": done.entries, "batches": done.batches, "path": path})


@spark.command(
    epilog=examples(
        "delayline spark audit journal/ --endpoint sales --report audit.html",
        "delayline spark audit journal/ --endpoint sales --delivered received.parquet --json",
    )
)
@click.argument("path")
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), help="Write it as an HTML page, too.")
@click.option("--delivered", metavar="PARQUET", help="Receipts of the receivers, columns id and at, to judge by.")
@click.option(
    "--patience",
    callback=delay_given,
    default="1m",
    show_default=True,
    help=f"A message that is overdue for longer is missed: {DELAYS}.",
)
@click.option(
    "--maximum-overdue",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="How many messages may still be in the store for longer.",
)
@settings_options(*STORES, "cold_tier")
@target_options
@session_options
@json_option
def audit(
    target: JobTarget,
    sessions: Sessions,
    screen: Screen,
    path: str,
    report: Path | None,
    delivered: str | None,
    patience: timedelta,
    maximum_overdue: int,
) -> None:
    """Export the journal to PATH, and reconcile scheduled with dispatched and pending messages.

    Exit code 1 when a message was lost, duplicated or early, when more than --maximum-overdue are overdue, and when
    there was nothing to audit.
    """
    from delayline.spark import audit as run_audit
    from delayline.spark import export as run_export
    from delayline.spark import read_journal, waiting_ids, write_report
    from delayline.spark.errors import translated_errors

    with sessions(screen) as session:
        waiting = waiting_ids(target, session).cache()
        with translated_errors():
            waiting.count()  # later dispatches are in the journal
        run_export(target, path, spark=session)
        journal = read_journal(target, path, spark=session)
        arrived = None if delivered is None else session.read.parquet(delivered)
        store = target.table or f"{target.endpoint}.timeouts"
        with run_audit(
            journal,
            store=store,
            delivered=arrived,
            waiting=waiting,
            patience=patience,
            maximum_overdue=maximum_overdue,
        ) as audited:
            totals = audited.totals() if report is None else write_report(audited, report, title=f"Audit of {store}")
            _show_audit(screen, audited, totals)
    if report is not None:
        screen.echo(f"\nthe same with charts: {report}")
    for fault in totals.faults:
        screen.echo(fault, "red")
    screen.document({**asdict(totals), "clean": totals.clean, "report": None if report is None else str(report)})
    if not totals.clean:
        click.get_current_context().exit(EXIT_FAILED)


def _show_audit(screen: Screen, audited: Audit, totals: Totals) -> None:
    from delayline.spark.report import OF_SHARDS

    counts = asdict(totals)
    late = counts.pop("lateness")
    screen.table(
        ("", "messages"),
        [(name, f"{count:,}") for name, count in counts.items() if name not in ("until", "maximum_overdue")],
    )
    if screen.as_json:
        return
    for of, frame in (("destination", audited.by_destination), ("shard", audited.by_shard)):
        if frame is not None:
            screen.echo("")
            columns = (of, "messages", *late, "retries", "failed")
            rows = frame.limit(20).toArrow().to_pylist()
            screen.table(columns, [[_figure(row[name]) for name in columns] for row in rows])
    screen.echo("lateness in seconds")
    if audited.by_shard is not None:
        screen.echo(OF_SHARDS)


def _figure(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "-" if value is None else str(value)


@spark.command(
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
    help="Again and again, until stopped; at most half of --horizon.",
)
@click.option(
    "--delay-levels",
    metavar="URL",
    help="A broker with delay levels, or a storage account with the endpoint's table, that gets them.",
)
@settings_options(*STORES, "cold_tier")
@target_options
@session_options
@json_option
def promote(
    target: JobTarget,
    sessions: Sessions,
    screen: Screen,
    horizon: timedelta,
    every: timedelta | None,
    delay_levels: str | None,
) -> None:
    """Move messages that are due soon from the cold tier into the store, exactly once. Safe to repeat anywhere.

    With --delay-levels they go to a broker, and those that it refuses to the store; where a task is killed, up to
    5,000 messages are sent again.

    With --every, SIGINT and SIGTERM stop it after the current round.
    """
    from delayline.spark import Promoted, promote_every
    from delayline.spark import promote as run_promote

    target, done = replace(target, delay_levels=delay_levels), list[Promoted]()

    def moved(so_far: Promoted) -> None:
        done.append(so_far)
        screen.echo(_sentence(so_far))

    with sessions(screen) as session:
        if every is None:
            moved(run_promote(target, horizon=horizon, spark=session))
        else:
            stopped = threading.Event()
            screen.echo(f"promoting from {target.cold_tier} again and again. Ctrl+C stops it")
            with stopped_by_signal(stopped.set):
                in_thread(
                    lambda: promote_every(target, every, until=stopped, horizon=horizon, spark=session, progress=moved)
                )
    screen.document(asdict(done[-1]))


@spark.command(epilog=examples("delayline spark compact --endpoint sales --cold-tier s3://bucket/reminders"))
@settings_options(*STORES, "cold_tier")
@target_options
@session_options
@json_option
def compact(target: JobTarget, sessions: Sessions, screen: Screen) -> None:
    """Merge the small files of each hour of the cold tier, and delete files that have been obsolete for a day."""
    from delayline.spark import compact as run_compact

    with sessions(screen) as session:
        done = run_compact(target, spark=session)
    screen.echo(f"{done.before:,} files merged into {done.after:,}, {done.deleted:,} deleted")
    screen.document(asdict(done))


@spark.command(epilog=examples("delayline spark delta --endpoint sales --cold-tier s3://bucket/reminders"))
@settings_options(*STORES, "cold_tier")
@target_options
@json_option
def delta(target: JobTarget, screen: Screen) -> None:
    """Keep a Delta log of the cold tier, which DuckDB, Trino and Spark read as a table; needs the extra delta.

    It is created, or brought up to date; from then on all jobs keep it.
    """
    from delayline.spark import keep_delta_log

    version = keep_delta_log(target)
    screen.echo(f"the Delta log of {target.cold_tier} is at version {version}")
    screen.document({"version": version})


def _sentence(done: Promoted) -> str:
    apart = f"{done.duplicates:,} there already, {done.cancelled:,} cancelled"
    return f"{done.stored + done.sent:,} promoted from {done.files:,} file{'' if done.files == 1 else 's'}, {apart}"
