"""The database goes away in the middle of a job: a line says so, nothing is half there, and it can be run again."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import running
from tests.servers.postgresql import PostgresqlServer
from tests.spark.stores import StoreAt, many
from tests.spark.test_failures import in_python, once, staged
from tests.spark.tiers import HOUR, Tiers

from delayline import BackendUnavailable
from delayline.spark import schedule

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("small_batches")
NUMBER = 2000


@pytest.fixture
def crashing() -> Iterator[PostgresqlServer]:
    """Provide a server of the test's own, to be crashed."""
    with running(PostgresqlServer, "fsync=off") as server:
        yield server


@pytest.mark.sample(1, group="Spark kills")
def test_a_database_that_crashes_in_the_middle_of_jobs(
    spark: SparkSession, crashing: PostgresqlServer, tmp_path: Path
) -> None:
    tiers = Tiers(StoreAt(crashing.new_database()), tmp_path / "cold", spark)
    data, first = many(spark, NUMBER), once(tmp_path / "crashed")

    def crash() -> bool:
        if first():
            crashing.stop("immediate")
            crashing.start()
        return False

    def job(**settings: Any) -> int:  # noqa: ANN401 - schedule's own
        how = {"hot_horizon": HOUR * 1_000_000, "atomic": "job", **settings}
        return schedule(in_python(data, crash), tiers.target, **how).stored

    # Given a server that crashes when some tasks have staged their rows, and others have not
    # Then the job says that it has lost them, and nothing is stored; or every task came after the crash, once more
    try:
        stored = job(run="nightly")
    except BackendUnavailable as caught:
        assert re.search(r"has crashed since they were written|does not answer", str(caught))
        assert "\n" not in str(caught)
        assert (tiers.hot.ids(), staged(tiers.hot)) == ([], [])
        # And run again it does everything
        stored = job(run="nightly")
    assert stored == NUMBER


def test_a_store_that_the_executors_cannot_reach(
    spark: SparkSession, crashing: PostgresqlServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Given a store that answers the driver, and then does not answer
    tiers = Tiers(StoreAt(crashing.new_database()), tmp_path / "cold", spark)
    first = once(tmp_path / "gone")

    def go() -> bool:
        if first():
            crashing.stop()
        return False

    # Then that is reported in a line
    with pytest.raises(BackendUnavailable) as caught:
        how: dict[str, Any] = {"hot_horizon": HOUR * 1_000_000, "atomic": "job", "spark": spark}
        schedule(in_python(many(spark, NUMBER), go), tiers.target, **how)
    assert str(crashing.port) in str(caught.value) and "\n" not in str(caught.value)
    assert "\tat " not in capfd.readouterr().err
    # And nothing is half there
    crashing.start()
    assert tiers.hot.ids() == []
