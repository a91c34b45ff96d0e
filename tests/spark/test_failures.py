"""Jobs that fail in the middle: to Python in a task a failed upstream looks like the end of its input."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException
from tests.spark.stores import many

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from tests.spark.stores import StoreAt

pytestmark = pytest.mark.usefixtures("small_batches")
ROWS = 2000
BAD = 1234


def in_python(data: DataFrame, failing: Callable[[], bool]) -> DataFrame:
    """Fail in a Python function in the middle of one partition."""

    def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            if f"m{BAD}" in batch.column("id").to_pylist() and failing():
                raise RuntimeError("the upstream fails on purpose")

    return data.mapInArrow(fail, data.schema)


def once(flag: Path) -> Callable[[], bool]:
    """Return a condition that is true once, whichever process asks."""

    def first() -> bool:
        try:
            flag.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    return first


def in_java(data: DataFrame) -> DataFrame:
    """Fail in an expression of the JVM's in the middle of one partition, always."""
    return data.selectExpr(
        f"IF(id = 'm{BAD}', raise_error('the upstream fails on purpose'), id) AS id",
        "destination",
        "due",
        "headers",
        "body",
    )


def write(data: DataFrame, store: StoreAt, **options: str) -> None:
    data.write.format("delayed_messages").mode("append").options(**store.options, **options).save()


def staged(store: StoreAt) -> list[str]:
    """Return the staging areas that are left."""
    from delayline.bulk.writer import BulkWriter

    staging = BulkWriter(store.url, "sales.timeouts")

    async def look() -> list[str]:
        database = staging._database
        await database.open()
        try:
            return list(await database.read(staging._stage.found))
        finally:
            await database.close()

    import asyncio

    return asyncio.run(look())


@pytest.mark.parametrize("upstream", ["python", "java"])
def test_a_job_that_fails_for_good_leaves_nothing(spark: SparkSession, store: StoreAt, upstream: str) -> None:
    data = many(spark, ROWS)
    failing = in_python(data, lambda: True) if upstream == "python" else in_java(data)
    with pytest.raises(PySparkException, match="fails on purpose"):
        write(failing, store, runId="nightly")
    assert store.ids() == []
    assert staged(store) == []
    # And the run can be run again
    write(data, store, runId="nightly")
    assert len(store.ids()) == ROWS


def test_a_task_that_fails_once_and_is_repeated_counts_once(
    spark: SparkSession, any_store: StoreAt, tmp_path: Path
) -> None:
    write(in_python(many(spark, ROWS), once(tmp_path / "failed")), any_store)
    assert (tmp_path / "failed").exists()
    assert any_store.ids() == sorted(f"m{number}" for number in range(ROWS))
    assert staged(any_store) == []


def test_a_worker_that_is_killed_counts_once(spark: SparkSession, store: StoreAt, tmp_path: Path) -> None:
    first = once(tmp_path / "killed")

    def kill() -> bool:
        import os
        import signal

        if first():
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    write(in_python(many(spark, ROWS), kill), store)
    assert (tmp_path / "killed").exists()
    assert len(store.ids()) == ROWS
