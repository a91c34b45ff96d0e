"""Dispatching from a cluster: resident Spark tasks, each with an endpoint's own poller."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import uuid
from collections import deque
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from delayline.backends import backend_of
from delayline.bulk.dispatchers import DispatcherControl, Generation, ShardMetrics
from delayline.checks import time_span, whole_number
from delayline.composition import endpoint_from
from delayline.errors import BackendUnavailable, BackendUnusable, ConfigurationError, DelaylineError
from delayline.events import LOGGER_NAME, Event, emit
from delayline.spark.errors import translated_errors
from delayline.spark.session import session_for, spark_session, started

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from delayline.settings import Settings


logger: logging.Logger = logging.getLogger(__name__)

TEN_MINUTES: Final = timedelta(minutes=10)
FIRST_RESTART_PAUSE: Final = 1.0  # seconds after a failed job, doubling
LONGEST_RESTART_PAUSE: Final = 60.0
FAILURES_IN_A_ROW: Final = 8
SPECULATION: Final = "spark.speculation"


class Dispatcher:
    """Runs jobs of resident tasks, one after another, that dispatch the due messages of an endpoint.

    A lost task is started again, by Spark or by the next job. A dispatcher takes over from a running one of the same
    name.

    Args:
        settings: The endpoint, its store and its queues, as for `delayline run`. Every executor must reach both.
        shards: Number of tasks; 1 or more. Each occupies a slot of Spark.
        lease: How long a job lasts. A task that outlives its driver ends with the lease.
        name: Name of the dispatcher; the endpoint's name if None.
        spark: The session; `spark_session()` if None.

    Raises:
        ConfigurationError: A value is out of range, or store or queues are in memory, where tasks cannot reach them.

    Example:
        ```python
        Dispatcher(Settings(endpoint="sales", url="postgresql://app@db/orders"), shards=4).run()
        ```
    """

    def __init__(
        self,
        settings: Settings,
        *,
        shards: int = 2,
        lease: timedelta = TEN_MINUTES,
        name: str | None = None,
        spark: SparkSession | None = None,
    ) -> None:
        self.name: str = name or settings.named_endpoint
        self._settings = settings
        self._shards = whole_number("shards", shards, at_least=1)
        self._lease = time_span("lease", lease)
        self._spark = spark
        self._owner = uuid.uuid4().hex
        self._stopping = threading.Event()
        for url in (settings.resolved_store_url, settings.resolved_transport_url):
            if backend_of(url).in_process:
                raise ConfigurationError(
                    f"{url!r} is the memory of one process, which the tasks of a dispatcher cannot reach"
                )
        self._control = DispatcherControl(settings.resolved_store_url)

    def run(self) -> None:
        """Dispatch until `stop` is called or another dispatcher takes over. Blocks.

        Raises:
            ConfigurationError: Speculative execution is on.
            DelaylineError: Eight jobs in a row failed; this is the error of the last.
        """
        spark = self._prepared()
        failures = 0
        while (generation := self._control.next_generation(self.name, self._owner, self._lease)) is not None:
            try:
                with translated_errors():
                    _run_generation(spark, self._settings, generation, self._shards)
            except DelaylineError as error:
                failures += 1
                if failures >= FAILURES_IN_A_ROW:
                    raise
                log_text = "generation %d of dispatcher %s failed and will be restarted: %s"
                emit(
                    logger,
                    logging.WARNING,
                    Event.GENERATION_FAILED,
                    log_text,
                    generation.number,
                    self.name,
                    error,
                    exception=error,
                )
                self._stopping.wait(min(FIRST_RESTART_PAUSE * 2 ** (failures - 1), LONGEST_RESTART_PAUSE))
            else:
                failures = 0

    def stop(self) -> None:
        """Ask the dispatcher, from any thread or process, to finish messages in flight and to stop; does not wait.

        Idempotent.
        """
        self._stopping.set()
        self._control.create()
        self._control.stop(self.name)

    def metrics(self) -> Sequence[ShardMetrics]:
        """Return the latest metrics of the tasks, at most some two seconds old."""
        return self._control.shards(self.name)

    def stream(self, checkpoint: str | Path) -> StreamingQuery:
        """Start a query whose every batch is such a job, for platforms that run only streams.

        Call `stop` before stopping the query: a stopped query ends tasks at once, which is safe, but repeats messages
        in flight.

        Args:
            checkpoint: Folder of the query's checkpoint.

        Returns:
            The running query.
        """
        spark = self._prepared()
        ticks = spark.readStream.format("rate").option("rowsPerSecond", 1).load()
        work = partial(
            _run_batch,
            settings=self._settings,
            name=self.name,
            owner=self._owner,
            lease=self._lease,
            shards=self._shards,
        )
        writer = ticks.writeStream.option("checkpointLocation", str(checkpoint))
        return started(writer.queryName(f"dispatcher {self.name}").trigger(processingTime="1 second"), work)

    def _prepared(self) -> SparkSession:
        spark = spark_session() if self._spark is None else self._spark
        if str(spark.conf.get(SPECULATION, "false")).strip().lower() == "true":  # as Spark reads it
            raise ConfigurationError(f"{SPECULATION} is on: Spark would run resident tasks twice. Set it to false")
        self._stopping.clear()
        self._control.create()
        self._control.begin(self.name, self._owner)
        return session_for(spark)


def stop_dispatcher(settings: Settings, name: str | None = None) -> None:
    """Request a stop of the endpoint's dispatcher, wherever it runs. Raises BackendUnusable if there was none."""
    name = name or settings.named_endpoint
    if not DispatcherControl(settings.resolved_store_url).stop(name):
        raise BackendUnusable(
            f"no dispatcher {name!r} has ever run on this store: check the --name that it was started with"
        )


def dispatcher_status(settings: Settings, name: str | None = None) -> Sequence[ShardMetrics]:
    """Return the last progress of the dispatcher's tasks. Raises BackendUnusable if there was none."""
    return DispatcherControl(settings.resolved_store_url).shards(name or settings.named_endpoint)


def _run_generation(spark: SparkSession, settings: Settings, generation: Generation, shards: int) -> None:
    tasks = spark.range(0, shards, 1, shards).mapInArrow(
        partial(run_shards, settings=settings, generation=generation), SHARD
    )
    tasks.toArrow()


def _run_batch(
    frame: DataFrame, batch: int, *, settings: Settings, name: str, owner: str, lease: timedelta, shards: int
) -> None:
    del batch
    generation = DispatcherControl(settings.resolved_store_url).next_generation(name, owner, lease)
    if generation is None:
        return
    try:
        with translated_errors():
            _run_generation(frame.sparkSession, settings, generation, shards)
    except (DelaylineError, PySparkException) as error:  # the next batch starts it again
        log_text = "generation %d of dispatcher %s failed and will be restarted: %s"
        emit(
            logger, logging.WARNING, Event.GENERATION_FAILED, log_text, generation.number, name, error, exception=error
        )


SHARD: Final = "shard INT, dispatched BIGINT"
CHECK_EVERY: Final = 1.0  # seconds
#: Failed checks in a row after which a task ends, because its generation may be over.
MOST_FAILED_CHECKS: Final = 30
#: The number of latest messages that the percentiles are computed from.
RECENT: Final = 10_000


class DispatchCounter(logging.Handler):
    """Counts the events that delayline logs in this process."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.dispatched: int = 0
        self.retried: int = 0
        self.failed: int = 0
        self._late: deque[float] = deque(maxlen=RECENT)

    def emit(self, record: logging.LogRecord) -> None:
        """Count the record."""
        facts = getattr(record, "facts", {})
        match getattr(record, "event", None):
            case Event.DISPATCHED:
                now = datetime.now(UTC)
                self.dispatched += facts.get("count", 0)
                self._late.extend((now - message.due).total_seconds() for message in facts.get("messages", ()))
            case Event.BACKED_OFF:
                self.retried += 1
            case Event.MOVED_TO_ERROR:
                self.failed += 1

    def metrics(self, shard: int, generation: int) -> ShardMetrics:
        """Return the counts, and the lateness of the last 10 000 messages that passed through this process."""
        late = sorted(self._late)

        def rank(share: float) -> float | None:
            return late[min(int(share * len(late)), len(late) - 1)] if late else None

        machine = f"{socket.gethostname()[:80]} {os.getpid()}"
        counts = (self.dispatched, self.retried, self.failed)
        return ShardMetrics(shard, generation, machine, *counts, rank(0.5), rank(0.99), rank(1.0))


def run_shards(
    batches: Iterable[pa.RecordBatch], *, settings: Settings, generation: Generation
) -> Iterator[pa.RecordBatch]:
    """Run a shard for each row; the function of a task."""
    for batch in batches:
        for shard in batch.column(0).to_pylist():
            dispatched = asyncio.run(run_shard(settings, generation, shard))
            yield pa.RecordBatch.from_pydict(
                {"shard": pa.array([shard], pa.int32()), "dispatched": pa.array([dispatched], pa.int64())}
            )


async def run_shard(settings: Settings, generation: Generation, shard: int) -> int:
    """Dispatch due messages until the generation ends.

    Return their number. Raises BackendUnavailable after a critical error.
    """
    logger, counter = logging.getLogger(LOGGER_NAME), DispatchCounter()
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.DEBUG)
    logger.addHandler(counter)
    logger.propagate = False  # else every batch is logged to the executor's stderr
    try:
        async with endpoint_from(settings, send_only=True, setup_infrastructure=False) as endpoint:
            stopped = asyncio.ensure_future(endpoint.wait_stopped())
            await _until_generation_ends(stopped, settings, generation, shard, counter)
            failed = stopped.done()
            stopped.cancel()
        await _report(settings, generation, counter.metrics(shard, generation.number))
    finally:
        logger.removeHandler(counter)
        logger.setLevel(level)
        logger.propagate = propagate
    if failed:
        raise BackendUnavailable(
            f"shard {shard} stopped after a critical error: its store or its queues cannot be reached"
        )
    return counter.dispatched


async def _until_generation_ends(
    stopped: asyncio.Future[None], settings: Settings, generation: Generation, shard: int, counter: DispatchCounter
) -> None:
    control, failed_checks = DispatcherControl(settings.resolved_store_url), 0
    while not stopped.done():
        try:
            await asyncio.to_thread(
                control.record_metrics, generation.dispatcher, counter.metrics(shard, generation.number)
            )
            if not await asyncio.to_thread(control.goes_on, generation):
                return
            failed_checks = 0
        except BackendUnavailable:
            failed_checks += 1
            if failed_checks >= MOST_FAILED_CHECKS:
                raise
        await asyncio.wait([stopped], timeout=CHECK_EVERY)


async def _report(settings: Settings, generation: Generation, metrics: ShardMetrics) -> None:
    try:
        await asyncio.to_thread(
            DispatcherControl(settings.resolved_store_url).record_metrics, generation.dispatcher, metrics
        )
    except BackendUnavailable:
        logging.getLogger(__name__).warning("could not save the last metrics of shard %d", metrics.shard)
