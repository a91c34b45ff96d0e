"""The same jobs through spark-submit, on a cluster that gets delayline with the job, and with tasks run twice."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Final

import pytest
from tests.spark.cluster import WORKERS, Cluster
from tests.spark.stores import ENDPOINT, StoreAt

from delayline import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from pathlib import Path

ROWS: Final = 2000
#: Spark runs again, on the other worker, what takes longer than the quickest task.
SPECULATION: Final = ["=true", ".interval=50ms", ".quantile=0.1", ".multiplier=1.01", ".minTaskRuntime=10ms"]
#: Commands one after the other in one session; then a job with a task that ends only when it is run twice.
PROGRAM: Final = """
import json, sys, time
from pathlib import Path
from delayline.cli import main
from delayline.spark import JobTarget, schedule, spark_session

def twice(flag):
    def wait(batches):
        from pyspark import TaskContext
        context = TaskContext.get()
        yield from batches
        if context.partitionId() == 3 and context.attemptNumber() > 0:
            flag.touch()
        while context.partitionId() == 3 and not flag.exists():
            time.sleep(0.05)
    return wait

if __name__ == "__main__":
    commands, url, flag, rows = json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    spark = spark_session()
    data = spark.range(0, rows, 1, 4).selectExpr("concat('twice', id) AS id", "'billing' AS destination",
        "timestamp_seconds(1900000000 + id) AS due")
    data = data.mapInArrow(twice(flag), data.schema)
    print(json.dumps({"twice": schedule(data, JobTarget(url, endpoint="sales"), spark=spark).stored}))
    for words in commands:
        main(words, prog_name="delayline", standalone_mode=False)
    spark.stop()
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_jobs_run_on_a_cluster_and_tasks_that_are_run_twice_count_once(store: StoreAt, tmp_path: Path) -> None:
    # Given a store with a journal, and files that every worker reaches
    asyncio.run(SqlDelayedMessageStore(store.url, journal=True).setup_infrastructure(ENDPOINT))
    asyncio.run(SqlTransport(store.url).setup_infrastructure(["billing", "error", ENDPOINT]))
    source, flag = tmp_path / "reminders", tmp_path / "run-twice"
    source.mkdir()
    for part in range(4):
        rows = [f"m{number},billing,2020-01-01T00:00:00Z,x" for number in range(part, ROWS, 4)]
        (source / f"{part}.csv").write_text("\n".join(["id,destination,due,body", *rows]) + "\n")
    far = tmp_path / "far.csv"
    far.write_text(
        "id,destination,due\n" + "".join(f"f{number},billing,2099-01-01T00:00:00Z\n" for number in range(10))
    )
    place = ["--endpoint", ENDPOINT, "--url", store.url, "--json"]
    cold = ["--cold-tier", str(tmp_path / "cold")]
    commands = [
        ["spark", "schedule", str(far), *place, *cold],
        ["spark", "schedule", str(source), "--format", "csv", *place],
        ["spark", "audit", str(tmp_path / "journal"), *place, *cold],
    ]
    # When they are scheduled and audited, with speculation on
    with Cluster(tmp_path) as cluster:
        conf = [f"spark.speculation{one}" for one in SPECULATION]
        done = cluster.submit(PROGRAM, json.dumps(commands), store.url, str(flag), str(ROWS), conf=conf)
        # And once more by a driver that got the wheel, which Spark itself does not put on the executors' path
        by_wheel = cluster.submit(PROGRAM, "[]", store.url, str(flag), str(ROWS), shipped=cluster.wheel)
    for one in (done, by_wheel):
        assert one.returncode == 0, one.stderr[-3000:]
    assert '{"twice": 0}' in by_wheel.stdout.splitlines()  # its messages wait already
    twice, in_files, scheduled, totals = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    # Then both workers got delayline, a task was run twice, and each of its messages is there once
    assert all(list(cluster.work(number).rglob(cluster.archive.name)) for number in range(WORKERS))
    assert flag.exists()
    assert (twice["twice"], in_files["cold"], scheduled["stored"]) == (ROWS, 10, ROWS)
    # And the audit has every message: half of them overdue and not dispatched
    assert (totals["scheduled"], totals["waiting"], totals["overdue"]) == (2 * ROWS + 10, ROWS + 10, ROWS)
    assert (totals["lost"], totals["duplicated"]) == (0, 0)
