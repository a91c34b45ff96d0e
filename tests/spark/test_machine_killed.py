"""Driver, JVM and tasks die together in the middle of everything: what was in flight is done again, and once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

from tests.spark.stores import PAST, StoreAt, many
from tests.spark.test_dispatch import arrived, running, settings, until
from tests.spark.test_stream import add, files, write

from delayline.spark import Dispatcher, Target, schedule

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession
    from tests.servers.postgresql import PostgresqlServer

NUMBER: Final = 20_000
WAITING: Final = 2000
#: A task that has read `seen` rows says so with a file, and goes no further.
DRIVER: Final = """
import sys, threading, time
from pathlib import Path
from delayline.config import Settings
from delayline.spark import Dispatcher, Target, schedule, spark_session
from tests.spark.stores import StoreAt, many
from tests.spark.test_stream import files, write

bulk, streamed, dispatched, folder = sys.argv[1:]
folder = Path(folder)
spark = spark_session("local[5]", conf={"spark.driver.memory": "1g"})

def stuck(data, name, last):
    def wait(batches):
        for batch in batches:
            yield batch
            if last in batch.column("id").to_pylist():
                (folder / name).touch()
                time.sleep(1000)
    return data.mapInArrow(wait, data.schema)

def store():
    data = stuck(many(spark, 20_000), "bulk", "m12345")
    schedule(data, Target(bulk, endpoint="sales"), run="nightly", spark=spark)

def stream():
    data = stuck(files(spark, folder / "source"), "streamed", "m150")
    write(data, StoreAt(streamed), folder / "checkpoint", txnAppId="loader")

for job in (store, stream, Dispatcher(Settings(endpoint="sales", url=dispatched), shards=2, spark=spark).run):
    threading.Thread(target=job).start()
threading.Event().wait()
"""


def test_everything_in_flight(spark: SparkSession, postgresql: PostgresqlServer, tmp_path: Path) -> None:
    # Given a bulk job that has staged some, a stream in its second batch, and a dispatcher that is at work
    bulk, streamed, dispatched = (StoreAt(postgresql.new_database()) for _ in range(3))
    place = settings(dispatched)
    add(spark, tmp_path / "source", 0)
    add(spark, tmp_path / "source", 100)
    waiting = [f"d{number}" for number in range(WAITING)]
    dispatched.put(waiting[0], due=PAST)
    command = [sys.executable, "-c", DRIVER, bulk.url, streamed.url, dispatched.url, str(tmp_path)]
    log = tmp_path / "log"
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not ((tmp_path / "bulk").exists() and (tmp_path / "streamed").exists() and arrived(dispatched)):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        # When driver and JVM are killed, and their Python workers a moment later
        dispatched.put(*waiting[1:], due=PAST)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    # Then of the bulk job nothing has happened, of the stream what it had committed
    assert bulk.ids() == []
    assert streamed.ids() == sorted(f"m{number}" for number in range(100))
    # And when all of them are begun again, everything has happened once
    assert (
        schedule(many(spark, NUMBER), Target(bulk.url, endpoint="sales"), run="nightly", spark=spark).stored == NUMBER
    )
    write(files(spark, tmp_path / "source"), streamed, tmp_path / "checkpoint", txnAppId="loader")
    with running(Dispatcher(place, shards=2, spark=spark)):
        until(lambda: len(arrived(dispatched)) >= WAITING)
    assert streamed.ids() == sorted(f"m{number}" for number in range(200))
    assert sorted(arrived(dispatched)) == sorted(waiting)
    assert dispatched.ids() == []
