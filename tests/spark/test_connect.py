"""All jobs in a session of Spark Connect, whose driver is a server: no JVM is reachable, only DataFrames."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.spark.connect_server import client_variables, connect_server
from tests.spark.sharded import divided
from tests.spark.stores import ENDPOINT, StoreAt
from tests.spark.test_levels import sent
from tests.spark.test_pieces import BAD, NUMBER

from delayline import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.spark.sharded import Shards

#: Runs in a separate process: PySpark supports one kind of session per process.
JOBS: Final = """
import json, sys, threading, time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from pyspark.sql import Observation, SparkSession
import delayline
from delayline import ConfigurationError, DuplicateMessage
from delayline.settings import Settings
from delayline.spark import (
    Dispatcher, JobTarget, audit, compact, export, promote, promote_stream, read_journal, schedule, schedule_stream,
    spark_session, waiting_ids, write_report,
)
from delayline.spark.session import parallelism
from tests.eventually import PATIENCE
from tests.spark.stores import PAST, StoreAt, frame, many
from tests.spark.tiers import FIRST, HOUR, spread

url, folder, server = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
store = StoreAt(url)
spark = SparkSession.builder.remote(server).config("spark.sql.shuffle.partitions", "2").getOrCreate()
hot, cold = JobTarget(url, endpoint="sales"), JobTarget(url, endpoint="sales", cold_tier=str(folder / "cold"))
far = FIRST + 10 * HOUR - datetime.now(UTC)
found = {"kind": type(spark).__module__, "same": spark_session() is spark, "slots": parallelism(spark)}

def until(reached):
    deadline = time.monotonic() + PATIENCE
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
found["archive"] = Path(delayline.__file__).parents[1].is_file()
spark.stop()
print(json.dumps(found))
"""


#: Streams whose batches fail half way, or are repeated; each is started again until it has come to its end.
STREAMS: Final = """
import json, sys
from pathlib import Path
import psycopg
from pyspark.sql import SparkSession
from delayline.spark import JobTarget, schedule_stream
from delayline.spark.options import StoreOptions
from tests.eventually import PATIENCE
from tests.spark.stores import StoreAt, many
from tests.spark.test_levels import numbered
from tests.spark.test_pieces import NUMBER, REFUSE

url, shards, shard, broker, folder = *sys.argv[1:5], Path(sys.argv[5])
settings = {"spark.sql.adaptive.coalescePartitions.enabled": "false", "spark.sql.shuffle.partitions": "8"}
spark = SparkSession.builder.remote("local[2]").config(map=settings).getOrCreate()
many(spark, NUMBER).write.parquet(str(folder / "source"))

def run(name, target, rows=many, **how):
    source = spark.readStream.schema(rows(spark, 1).schema).parquet(str(folder / name))
    place, at_once = folder / f"{name} checkpoint", {"availableNow": True}
    query = schedule_stream(source, target, checkpoint=place, trigger=at_once, **how)
    try:
        return query.awaitTermination(PATIENCE)
    except Exception as error:
        return "refused on purpose" in str(error)
    finally:
        query.stop()

def forget(name):
    for file in ("0", ".0.crc"):
        (folder / f"{name} checkpoint" / "commits" / file).unlink(missing_ok=True)

hot, store, found = JobTarget(url, endpoint="sales"), StoreAt(url), {}
with psycopg.connect(url, autocommit=True) as admin:
    admin.execute(REFUSE)
    found["fails"] = run("source", hot)
    found["first"] = store.ids()
    admin.execute('DELETE FROM "sales.timeouts"')
    admin.execute('DROP TRIGGER refused ON "sales.timeouts"')
    found["goes on"] = run("source", hot)
    found["second"] = store.ids()
    [job] = StoreOptions.of(hot.options).pieces().jobs(10)
    found["job"] = [job.name.version, job.state, job.committed.stored, job.parameters.pieces]
    admin.execute('DELETE FROM "sales.timeouts"')
    forget("source")
    found["comes again"] = run("source", hot)
    found["third"] = store.ids()
(folder / "source").rename(folder / "sharded")
sharded = JobTarget(shards, endpoint="sales")
with psycopg.connect(shard, autocommit=True) as admin:
    admin.execute(REFUSE)
    found["a shard fails"] = run("sharded", sharded)
    admin.execute('DROP TRIGGER refused ON "sales.timeouts"')
    for _ in range(2):
        found["shards go on"] = run("sharded", sharded)
        forget("sharded")
(folder / "sharded").rename(folder / "decided")
decided = JobTarget(url, endpoint="sales", job_folder=str(folder / "files"))
found["decided"] = run("decided", decided, atomic="job")
found["all"] = len(store.ids())
others = numbered(spark, 30).selectExpr("concat('to levels ', id) AS id", "destination", "due", "body")
others.write.parquet(str(folder / "levels"))
levels = JobTarget(url, endpoint="sales", delay_levels=broker, cold_tier=str(folder / "cold"))
for _ in range(2):
    found["to levels"] = run("levels", levels, rows=numbered)
    forget("levels")
spark.stop()
print(json.dumps(found))
"""
#: A Python whose first foreachBatch does not come to life.
LATE: Final = """#!/bin/sh
case "$2" in
  *foreach_batch_worker) [ -e {flag} ] || {{ touch {flag}; exit 1; }} ;;
esac
exec {python} "$@"
"""


def run_on_connect(program: str, *arguments: str, **variables: str) -> dict[str, Any]:
    """Run a program in a process of its own, and return what it has printed at its end."""
    ran = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, "\n".join(line for line in ran.stderr.splitlines() if "\tat " not in line)[-4000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.fixture(params=["installed on the server", "shipped by the client"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Provide what a client connects to, and its variables: a local server, or one whose Python lacks delayline."""
    if request.param == "installed on the server":
        yield "local[2]", {"PYSPARK_PYTHON": sys.executable}
    else:
        with connect_server(tmp_path) as url:
            yield url, client_variables(tmp_path)


@pytest.mark.long
@pytest.mark.timeout(700)
def test_every_job_takes_a_connect_session(
    store: StoreAt, server: tuple[str, Mapping[str, str]], tmp_path: Path
) -> None:
    pytest.importorskip("grpc", reason="Spark Connect needs more packages: pip install 'pyspark[connect]'")
    # Given a store with a journal, and a server of Spark Connect
    asyncio.run(SqlDelayedMessageStore(store.url, journal=True).setup_infrastructure(ENDPOINT))
    asyncio.run(SqlTransport(store.url).setup_infrastructure(["billing", "shipping", "error", ENDPOINT]))
    # When every job runs in a session of it
    url, variables = server
    found = run_on_connect(JOBS, store.url, str(tmp_path), url, **variables)
    # Then all of them have the usual results
    assert found.pop("kind").startswith("pyspark.sql.connect")
    assert found.pop("archive") == url.startswith("sc:")
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


@pytest.mark.long
@pytest.mark.timeout(700)
def test_a_batch_of_a_stream_that_fails_or_comes_again_is_stored_once(
    store: StoreAt, shards: Shards, broker: str, tmp_path: Path
) -> None:
    pytest.importorskip("grpc", reason="Spark Connect needs more packages: pip install 'pyspark[connect]'")
    # Given a server whose first process for a foreachBatch does not come to life, and a shard that will refuse a row
    ids = [f"m{number}" for number in range(NUMBER)]
    refusing = shards.urls[shards.map.shard_of(BAD)]
    python = tmp_path / "late-python"
    python.write_text(LATE.format(flag=tmp_path / "started", python=os.environ["PYSPARK_PYTHON"]))
    python.chmod(0o755)
    # When streams fail half way, and are started again
    places = (store.url, shards.url, refusing, broker, str(tmp_path))
    found = run_on_connect(STREAMS, *places, PYSPARK_PYTHON=str(python))
    # Then a batch goes on with the pieces that are missing, as without Spark Connect, and one that comes again is known
    first, second = found.pop("first"), found.pop("second")
    assert 0 < len(first) < NUMBER and BAD not in first
    assert sorted(first + second) == sorted(ids)
    # And so over shards, and in each other way
    assert shards.ids() == divided(ids, shards.map)
    assert found == {
        "fails": True,
        "goes on": True,
        "job": [0, "done", NUMBER, 64],
        "comes again": True,
        "third": [],
        "a shard fails": True,
        "shards go on": True,
        "decided": True,
        "all": NUMBER,
        "to levels": True,
    }
    assert sent(broker) == {f"to levels m{number}": 1 for number in range(30) if number % 10}
    assert (tmp_path / "started").exists()
