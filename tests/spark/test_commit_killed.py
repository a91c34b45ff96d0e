"""The process in which Spark commits is killed at each step of that: all messages of the job wait, or none."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import pytest
from pyspark.errors import PySparkException
from tests.spark.blocked_statements import blocked_statements
from tests.spark.stores import many
from tests.spark.test_dispatch import PATIENCE
from tests.spark.test_failures import staged
from tests.spark.test_stream import files, write

from delayline import ConfigurationError
from delayline.bulk.writer import STREAMS, BulkWriter
from delayline.spark.errors import translated_errors
from delayline.spark.options import FORMAT
from delayline.spark.session import activated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession
    from tests.spark.stores import StoreAt

NUMBER: Final = 500
IDS: Final = sorted(f"m{number}" for number in range(NUMBER))
LEDGER: Final = "delayline_jobs"
#: Steps of a commit, by what holds it up there.
STEPS: Final = {
    "staged": f"BEFORE INSERT ON {LEDGER}",
    "half moved": "BEFORE INSERT ON \"sales.timeouts\" FOR EACH ROW WHEN (NEW.id = 'm250')",
    "moved": f"BEFORE UPDATE ON {LEDGER}",
    "committed": f"AFTER UPDATE ON {LEDGER} DEFERRABLE INITIALLY DEFERRED FOR EACH ROW",
}


@pytest.fixture
def source(spark: SparkSession, tmp_path: Path) -> Path:
    """Provide Parquet with messages."""
    path = tmp_path / "source.parquet"
    many(spark, NUMBER).coalesce(1).write.parquet(str(path))
    return path


@contextmanager
def killed_at(step: str, store: StoreAt, work: Callable[[], object]) -> Iterator[Callable[[], object]]:
    """Kill the process that commits the work, as with kill -9; yields what returns as the work does."""
    BulkWriter(store.url, "sales.timeouts", name=STREAMS).create()  # for the ledger
    with blocked_statements(store.url, STEPS[step]) as commit, ThreadPoolExecutor(1) as pool:
        running = pool.submit(work)
        commit.wait(1, running.done)
        for process in commit.senders():
            os.kill(process, signal.SIGKILL)
        commit.release()
        yield lambda: running.result(PATIENCE)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.sample(1)
def test_a_job(spark: SparkSession, store: StoreAt, source: Path, step: str) -> None:
    def job() -> None:
        data = activated(spark).read.parquet(str(source))
        with translated_errors():
            data.write.format(FORMAT).mode("append").options(**store.options, runId="campaign").save()

    # When the commit of a job is killed
    with killed_at(step, store, job) as result, pytest.raises(ConfigurationError) as caught:
        result()
    assert "\n" not in str(caught.value) and "\tat " not in str(caught.value)
    # Then all or nothing has happened, and nothing else is left
    assert (store.ids(), staged(store)) == (IDS if step == "committed" else [], [STREAMS])
    # And run again the job does the rest: pending ids would be an error
    job()
    assert store.ids() == IDS


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.sample(1)
def test_a_stream(spark: SparkSession, store: StoreAt, source: Path, tmp_path: Path, step: str) -> None:
    def stream() -> None:
        write(files(activated(spark), source), store, tmp_path / "checkpoint", txnAppId="loader")

    # When the commit of a batch is killed
    with killed_at(step, store, stream) as result, pytest.raises(PySparkException):
        result()
    # Then all or nothing has happened
    assert store.ids() == (IDS if step == "committed" else [])
    # And started again the stream does the rest: pending ids would be an error
    stream()
    assert store.ids() == IDS
