"""A driver whose sixteen tasks run at once: they write to a store, all with a connection or some, and read it again."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.spark.stores import many

from delayline.spark import JobTarget, export, schedule, spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASKS = 16
ROWS = 1600


def main(url: str, endpoint: str, most: str) -> None:
    """Write and read at a store, and print how many messages were read; most: of connections, 0 for the default."""
    spark = spark_session(f"local[{TASKS}]", conf={"spark.sql.adaptive.coalescePartitions.enabled": "false"})
    options = {"url": url, "endpoint": endpoint}
    if most == "0":
        many(spark, ROWS, TASKS).write.format("delayed_messages").mode("append").options(**options).save()
    else:
        bounded_jobs(spark, url, endpoint, int(most))
    reads = {"numPartitions": TASKS, "maxConnections": int(most) or TASKS}
    reader = spark.read.format("delayed_messages").options(**options, **reads)
    sys.stdout.write(f"{reader.load().select('id').distinct().count()}\n")
    spark.stop()


def bounded_jobs(spark: SparkSession, url: str, endpoint: str, most: int) -> None:
    """Schedule in pieces, at once and into a cold tier, and export the journal."""
    with tempfile.TemporaryDirectory() as folder:
        target = JobTarget(url, endpoint=endpoint, max_connections=most, connect_timeout=60)
        far = JobTarget(url, endpoint=endpoint, max_connections=most, cold_tier=str(Path(folder, "cold")))
        rows = many(spark, ROWS, TASKS)
        schedule(rows.where("substr(id, 2) % 2 = 0"), target, spark=spark)
        schedule(rows.where("substr(id, 2) % 2 = 1"), target, atomic="job", spark=spark)
        schedule(rows.selectExpr("concat('far', id) AS id", "destination", "due"), far, spark=spark)
        export(target, Path(folder, "journal"), partitions=TASKS, spark=spark)


if __name__ == "__main__":
    main(*sys.argv[1:])
