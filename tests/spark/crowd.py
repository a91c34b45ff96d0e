"""A driver whose sixteen tasks run at once: it writes sixteen partitions to a store and reads them again."""

from __future__ import annotations

import sys

from tests.spark.stores import many

from delayline.spark import spark_session

TASKS = 16


def main(url: str, endpoint: str) -> None:
    """Write and read at a store, and print how many messages were read."""
    spark = spark_session(f"local[{TASKS}]")
    options = {"url": url, "endpoint": endpoint}
    many(spark, 1600, TASKS).write.format("delayed_messages").mode("append").options(**options).save()
    reader = spark.read.format("delayed_messages").options(**options, numPartitions=TASKS, maxConnections=TASKS)
    sys.stdout.write(f"{reader.load().select('id').distinct().count()}\n")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
