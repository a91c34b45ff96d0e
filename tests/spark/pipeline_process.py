"""Run the whole pipeline, with its JVM, in a session of processes that can be killed like a machine."""

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

from delayline.settings import Settings
from delayline.spark import Dispatcher, JobTarget, schedule, schedule_stream, spark_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from delayline.spark import Scheduled

PROGRAM: Final = "import sys; from tests.spark.pipeline_process import Pipeline; Pipeline(*sys.argv[1:]).live()"


class Pipeline(NamedTuple):
    """The jobs, with their database, broker and folder."""

    url: str
    broker: str
    folder: str

    @property
    def target(self) -> JobTarget:
        """Both tiers of the endpoint with its queues in the store's database."""
        return JobTarget(self.url, endpoint=ENDPOINT, cold_tier=f"{self.folder}/cold")

    @property
    def settings(self) -> list[Settings]:
        """That endpoint, and one with its queues at a broker."""
        return [
            Settings(endpoint=ENDPOINT, url=self.url),
            Settings(endpoint="shop", store_url=self.url, transport_url=self.broker, batch_size=50),
        ]

    def dispatchers(self, spark: SparkSession) -> list[Dispatcher]:
        """Return one for each endpoint."""
        return [Dispatcher(one, shards=1, spark=spark) for one in self.settings]

    def campaign(self, spark: SparkSession) -> Scheduled:
        """Schedule into both tiers at once."""
        how: dict[str, Any] = {"hot_horizon": HOUR, "run": "campaign", "atomic": "job"}
        return schedule(f"{self.folder}/campaign.parquet", self.target, spark=spark, **how)

    def stream(self, spark: SparkSession, **trigger: Any) -> StreamingQuery:  # noqa: ANN401 - Spark's own
        """Begin to schedule file by file."""
        source, target = files(spark, Path(self.folder, "stream")), JobTarget(self.url, endpoint=ENDPOINT)
        return schedule_stream(source, target, checkpoint=f"{self.folder}/checkpoint", trigger=trigger)

    def live(self) -> None:
        """Run all jobs at once until killed."""
        with forking() as place:
            os.environ[PLACE] = place
            spark = spark_session("local[4]")
            for dispatcher in self.dispatchers(spark):
                threading.Thread(target=dispatcher.run).start()
            self.stream(spark, processingTime="100 milliseconds")
            threading.Thread(target=self.campaign, args=[spark]).start()
            threading.Event().wait()


@contextmanager
def pipeline_process(pipeline: Pipeline) -> Iterator[subprocess.Popen[bytes]]:
    """Start the pipeline and yield its first process, which leads the session; kill the rest at the end."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM, *pipeline], start_new_session=True) as process:
        try:
            yield process
        finally:
            kill_session(process.pid)


def kill_session(session: int) -> None:
    """Kill all processes of the session with SIGKILL."""
    while there := processes_of(session):
        for pid in there:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def processes_of(session: int) -> list[int]:
    """Return the ids of the session's processes."""
    return [int(place.name) for place in Path("/proc").glob("[0-9]*") if _session(place) == session]


def _session(process: Path) -> int | None:
    """Return the session of a process; None for a dead one."""
    with suppress(OSError):
        state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
        return None if state == "Z" else int(session)
    return None
