"""One resident task of a dispatcher: an endpoint that dispatches due messages until its generation ends."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from delayline.bulk.dispatchers import DispatcherControl, ShardMetrics
from delayline.config import endpoint_from
from delayline.errors import BackendUnavailable
from delayline.events import LOGGER_NAME, Event

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from delayline.bulk.dispatchers import Wave
    from delayline.config import Settings

SHARD: Final = "shard INT, dispatched BIGINT"
LOOK_EVERY: Final = 1.0  # seconds
#: Looks that may fail one after another before a task ends by itself: its wave may long be over.
MOST_FAILED_LOOKS: Final = 30
#: Latenesses that percentiles are taken of.
RECENT: Final = 10_000


class DispatchCounter(logging.Handler):
    """Counts what delayline tells of in this process."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.dispatched = self.retried = self.failed = 0
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

    def metrics(self, shard: int, wave: int) -> ShardMetrics:
        """Return the counts, and the lateness of the last 10 000 where messages went through this process."""
        late = sorted(self._late)

        def rank(share: float) -> float | None:
            return late[min(int(share * len(late)), len(late) - 1)] if late else None

        place = f"{socket.gethostname()[:80]} {os.getpid()}"
        counts = (self.dispatched, self.retried, self.failed)
        return ShardMetrics(shard, wave, place, *counts, rank(0.5), rank(0.99), rank(1.0))


def run_shards(batches: Iterable[pa.RecordBatch], *, settings: Settings, wave: Wave) -> Iterator[pa.RecordBatch]:
    """Run in a task, for every row a shard."""
    for batch in batches:
        for shard in batch.column(0).to_pylist():
            dispatched = asyncio.run(run_shard(settings, wave, shard))
            yield pa.RecordBatch.from_pydict(
                {"shard": pa.array([shard], pa.int32()), "dispatched": pa.array([dispatched], pa.int64())}
            )


async def run_shard(settings: Settings, wave: Wave, shard: int) -> int:
    """Dispatch due messages until the generation ends; return their number. Raises the endpoint's critical error."""
    logger, tally = logging.getLogger(LOGGER_NAME), DispatchCounter()
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.DEBUG)
    logger.addHandler(tally)
    logger.propagate = False  # every batch would be on the executor's stderr
    try:
        async with endpoint_from(settings, send_only=True, setup_infrastructure=False) as endpoint:
            stopped = asyncio.ensure_future(endpoint.wait_stopped())
            await _until_over(stopped, settings, wave, shard, tally)
            by_itself = stopped.done()
            stopped.cancel()
        await _tell(settings, wave, tally.metrics(shard, wave.number))
    finally:
        logger.removeHandler(tally)
        logger.setLevel(level)
        logger.propagate = propagate
    if by_itself:
        raise BackendUnavailable(f"shard {shard} stopped after a critical error: its store or its queues are away")
    return tally.dispatched


async def _until_over(
    stopped: asyncio.Future[None], settings: Settings, wave: Wave, shard: int, tally: DispatchCounter
) -> None:
    control, failed_looks = DispatcherControl(settings.resolved_store_url), 0
    while not stopped.done():
        try:
            await asyncio.to_thread(control.tell, wave.dispatcher, tally.metrics(shard, wave.number))
            if not await asyncio.to_thread(control.goes_on, wave):
                return
            failed_looks = 0
        except BackendUnavailable:
            failed_looks += 1
            if failed_looks >= MOST_FAILED_LOOKS:
                raise
        await asyncio.wait([stopped], timeout=LOOK_EVERY)


async def _tell(settings: Settings, wave: Wave, metrics: ShardMetrics) -> None:
    try:
        await asyncio.to_thread(DispatcherControl(settings.resolved_store_url).tell, wave.dispatcher, metrics)
    except BackendUnavailable:
        logging.getLogger(__name__).warning("the last metrics of shard %d are not written down", metrics.shard)
