"""The whole pipeline in processes of its own, JVM and all: a machine, as far as anybody can kill one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tests.spark.daemon import PLACE, forking
from tests.spark.stores import ENDPOINT
from tests.spark.test_stream import files
from tests.spark.tiers import HOUR

from delayline.config import Settings
from delayline.spark import Dispatcher, JobTarget, schedule, schedule_stream, spark_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from delayline.spark import Scheduled

PROGRAM: Final = "import sys; from tests.spark.machine import Pipeline; Pipeline(*sys.argv[1:]).live()"


class Pipeline(NamedTuple):
    """What runs, wherever it does."""

    url: str
    broker: str
    folder: str

    @property
    def target(self) -> JobTarget:
        """Both tiers of the endpoint whose queues are beside its store."""
        return JobTarget(self.url, endpoint=ENDPOINT, cold_tier=f"{self.folder}/cold")

    @property
    def settings(self) -> list[Settings]:
        """That endpoint, and one whose queues are a broker's."""
        return [
            Settings(endpoint=ENDPOINT, url=self.url),
            Settings(endpoint="shop", store_url=self.url, transport_url=self.broker, batch_size=50),
        ]

    def dispatchers(self, spark: SparkSession) -> list[Dispatcher]:
        """Return one for each endpoint."""
        return [Dispatcher(one, shards=1, spark=spark) for one in self.settings]

    def campaign(self, spark: SparkSession) -> Scheduled:
        """Schedule into both tiers."""
        return schedule(f"{self.folder}/campaign.parquet", self.target, hot_horizon=HOUR, run="campaign", spark=spark)

    def stream(self, spark: SparkSession, **trigger: Any) -> StreamingQuery:  # noqa: ANN401 - Spark's own
        """Begin to schedule file by file."""
        source, target = files(spark, Path(self.folder, "stream")), JobTarget(self.url, endpoint=ENDPOINT)
        return schedule_stream(source, target, checkpoint=f"{self.folder}/checkpoint", trigger=trigger)

    def live(self) -> None:
        """Run all of it at once, until somebody kills it."""
        with forking() as place:
            os.environ[PLACE] = place
            spark = spark_session("local[4]")
            for dispatcher in self.dispatchers(spark):
                threading.Thread(target=dispatcher.run).start()
            self.stream(spark, processingTime="100 milliseconds")
            threading.Thread(target=self.campaign, args=[spark]).start()
            threading.Event().wait()


@contextmanager
def machine(pipeline: Pipeline) -> Iterator[subprocess.Popen[bytes]]:
    """Start it, and yield its first process, whose session all of them are in; kills what is left of it."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM, *pipeline], start_new_session=True) as process:
        try:
            yield process
        finally:
            kill(process.pid)


def kill(session: int) -> None:
    """Kill all of its processes, as with kill -9."""
    while there := [place.name for place in Path("/proc").glob("[0-9]*") if _session(place) == session]:
        for pid in map(int, there):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _session(process: Path) -> int | None:
    """Return what session a process is of, None for a dead one."""
    with suppress(OSError):
        state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
        return None if state == "Z" else int(session)
    return None
