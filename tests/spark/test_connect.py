"""All jobs in a session of Spark Connect, whose driver is a server: no JVM is reachable, only DataFrames."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.spark.stores import ENDPOINT, StoreAt

from delayline import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from pathlib import Path

#: Runs in a separate process: PySpark supports one kind of session per process.
JOBS: Final = """
import json, sys, threading, time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from pyspark.sql import Observation, SparkSession
from delayline import ConfigurationError, DuplicateMessage
from delayline.settings import Settings
from delayline.spark import (
    Dispatcher, JobTarget, audit, compact, export, promote, promote_stream, read_journal, schedule, schedule_stream,
    spark_session, waiting_ids, write_report,
)
from delayline.spark.session import parallelism
from tests.spark.stores import PAST, StoreAt, frame, many
from tests.spark.tiers import FIRST, HOUR, spread

url, folder = sys.argv[1], Path(sys.argv[2])
store = StoreAt(url)
spark = SparkSession.builder.remote("local[2]").config("spark.sql.shuffle.partitions", "2").getOrCreate()
hot, cold = JobTarget(url, endpoint="sales"), JobTarget(url, endpoint="sales", cold_tier=str(folder / "cold"))
far = FIRST + 10 * HOUR - datetime.now(UTC)
found = {"kind": type(spark).__module__, "same": spark_session() is spark, "slots": parallelism(spark)}

def until(reached):
    deadline = time.monotonic() + 60
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.1)
    return reached()

def refusal(kind, work):
    try:
        work()
    except kind as error:
        return str(error)

(folder / "some.csv").write_text("id,destination,due\\nc,billing,2090-01-01T00:00:00Z\\nd,billing,soon\\n")
done = schedule(folder / "some.csv", hot)
found["file"] = [done.stored, done.rejected, [row["line"] for row in done.rejected_rows.toArrow().to_pylist()]]
observation = Observation("counts")
found["frame"] = schedule(frame(spark, "a", "", "b"), hot, observation=observation).stored
found["metrics"] = {name: observation.get[name] for name in ("rows", "stored", "rejected")}
found["doubled"] = refusal(DuplicateMessage, lambda: schedule(frame(spark, "a"), hot, on_conflict="raise"))
broken = many(spark, 10).selectExpr("raise_error('on purpose') AS id", "destination", "due", "headers", "body")
found["broken"] = refusal(ConfigurationError, lambda: schedule(broken, hot))
for prefix in "xy":
    schedule(spread(spark, 50, hours=2, prefix=prefix), cold, hot_horizon=HOUR)
found["compacted"] = compact(cold).after > 0
found["promoted"] = promote(cold, horizon=far).stored
schedule(spread(spark, 50, hours=2, prefix="z"), cold, hot_horizon=HOUR)
query = promote_stream(cold, timedelta(seconds=1), checkpoint=folder / "promote", horizon=far, spark=spark)
found["promoted by a stream"] = until(lambda: "z0" in store.ids() or not query.isActive) and query.isActive
query.stop()
many(spark, 20).write.parquet(str(folder / "source"))
source = spark.readStream.schema(many(spark, 1).schema).parquet(str(folder / "source"))
query = schedule_stream(source, hot, checkpoint=folder / "stream", trigger={"availableNow": True})
found["streamed"] = query.awaitTermination(60) and "m0" in store.ids()
settings = Settings(endpoint="sales", url=url)
store.put("due", due=PAST)
dispatcher = Dispatcher(settings, shards=1, spark=spark)
thread = threading.Thread(target=dispatcher.run)
thread.start()
found["dispatched"] = until(lambda: "due" not in store.ids())
dispatcher.stop()
thread.join(60)
store.put("due", due=PAST)
dispatcher = Dispatcher(settings, shards=1, lease=timedelta(seconds=2), spark=spark)
query = dispatcher.stream(folder / "dispatch")
found["dispatched by a stream"] = until(lambda: "due" not in store.ids())
dispatcher.stop()
query.stop()
found["exported"] = export(hot, folder / "journal").entries
with audit(read_journal(hot, folder / "journal"), waiting=waiting_ids(hot, spark)) as seen:
    totals = write_report(seen, folder / "report.html")
found["audited"] = [totals.dispatched, totals.waiting, totals.lost, totals.duplicated]
spark.stop()
print(json.dumps(found))
"""


@pytest.mark.long
def test_every_job_takes_a_connect_session(store: StoreAt, tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="Spark Connect needs more packages: pip install 'pyspark[connect]'")
    # Given a store with a journal, and a local server of Spark Connect's
    asyncio.run(SqlDelayedMessageStore(store.url, journal=True).setup_infrastructure(ENDPOINT))
    asyncio.run(SqlTransport(store.url).setup_infrastructure(["billing", "shipping", "error", ENDPOINT]))
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    # When every job runs in a session of it
    command = [sys.executable, "-c", JOBS, store.url, str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, "\n".join(line for line in ran.stderr.splitlines() if "\tat " not in line)[-4000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    # Then all of them have the usual results
    assert found.pop("kind").startswith("pyspark.sql.connect")
    assert found.pop("doubled").startswith("message 'a' waits already")
    assert "on purpose" in found.pop("broken")
    assert found == {
        "same": True,
        "slots": 2,
        "file": [1, 1, [3]],
        "frame": 2,
        "metrics": {"rows": 3, "stored": 2, "rejected": 1},
        "compacted": True,
        "promoted": 100,
        "promoted by a stream": True,
        "streamed": True,
        "dispatched": True,
        "dispatched by a stream": True,
        "exported": 327,
        "audited": [1, 173, 0, 0],
    }
