"""Common parts of the commands on Spark: session, store, and stopping by signals."""

from __future__ import annotations

import contextlib
import signal
import threading
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import SparkSession

    from delayline.cli.screen import Screen
    from delayline.config import Settings
    from delayline.spark import JobTarget

    Sessions = Callable[[Screen], contextlib.AbstractContextManager[SparkSession]]

STORES = ("endpoint", "url", "store_url", "table_name")


def session_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `sessions`, which opens the Spark session that --master and --conf describe."""

    @wraps(command)
    def with_sessions(*args: object, master: str | None, confs: Sequence[str], **arguments: Any) -> Any:  # noqa: ANN401
        conf = dict(pair(one) for one in confs)

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

    text = "Where Spark runs: local[*] unless this, spark-submit or its own files say something else."
    with_master = click.option("--master", metavar="URL", help=text)(with_sessions)
    return click.option(
        "--conf", "confs", multiple=True, metavar="NAME=VALUE", help="A setting of Spark's; repeatable."
    )(with_master)


def target_of(settings: Settings) -> JobTarget:
    """Return the store of the settings as bulk jobs take it."""
    from delayline.spark import JobTarget

    return JobTarget(
        settings.resolved_store_url,
        endpoint=settings.named_endpoint,
        table=settings.table_name,
        cold_tier=settings.cold_tier,
    )


def absolute(path: str) -> str:
    """Return a path of this machine so that it names the same place tomorrow; an URL as it is."""
    return path if ":" in path else str(Path(path).resolve())


def pair(text: str) -> tuple[str, str]:
    """Return both sides of NAME=VALUE. Raises UsageError."""
    name, sign, value = text.partition("=")
    if not name or not sign or not value:
        raise click.UsageError(f"{text!r} must be NAME=VALUE.")
    return name, value


@contextlib.contextmanager
def stopped_by_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at SIGINT or SIGTERM, in place of ending; a second one ends the process."""

    def told(number: int, frame: object) -> None:
        del number, frame
        for one in before:
            signal.signal(one, before[one])  # a second signal does not wait
        threading.Thread(target=stop, name="delayline stop").start()

    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    for one in before:
        signal.signal(one, told)
    try:
        yield
    finally:
        for one in before:
            signal.signal(one, before[one])


def in_thread(work: Callable[[], object]) -> None:
    """Run it beside this thread, which hears signals meanwhile."""
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
