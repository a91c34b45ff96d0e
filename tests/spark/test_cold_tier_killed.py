"""The driver of a job is killed at each step: what it has not committed never was, and what it has is done."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pytest
from tests.spark.tiers import FIRST, HOUR, spread

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession
    from tests.spark.tiers import Tiers

NUMBER: Final = 500
DRIVER: Final = """
import os, signal, sys
from datetime import UTC, datetime, timedelta
from delayline.spark import Target, promote, schedule, spark_session
from delayline.sql.staging import Staging

url, folder, job, step, source, until = sys.argv[1:]

def killed(name, *, before):
    work = getattr(Staging, name)
    def run(self, *arguments, **settings):
        if not before:
            work(self, *arguments, **settings)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(Staging, name, run)

match step:
    case "staged":
        killed("commit", before=True)
    case "moved":
        killed("_stored", before=False)
    case "committed":
        killed("commit", before=False)

spark = spark_session("local[1]", conf={"spark.driver.memory": "512m"})
target = Target(url, endpoint="sales", cold_tier=folder)
if job == "promote":
    promote(target, horizon=datetime.fromisoformat(until) - datetime.now(UTC), spark=spark)
else:
    schedule(source, target, hot_horizon=timedelta(hours=1), run="campaign", spark=spark)
"""


@pytest.mark.parametrize(
    ("job", "step"), [("schedule", "staged"), ("promote", "staged"), ("promote", "moved"), ("promote", "committed")]
)
def test_nothing_is_lost_or_doubled_when_the_driver_is_killed(
    spark: SparkSession, tiers: Tiers, tmp_path: Path, job: str, step: str
) -> None:
    # Given messages in files
    source, until = tmp_path / "source.parquet", FIRST + 5 * HOUR
    spread(spark, NUMBER, hours=4).write.parquet(str(source))
    if job == "promote":
        tiers.schedule(source, run="campaign", spark=spark)
    # When the driver is killed
    arguments = [tiers.hot.url, str(tiers.folder), job, step, str(source), until.isoformat()]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, *arguments], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    # Then everything or nothing has happened
    held = {"schedule": 0, "promote": 0 if step == "committed" else NUMBER}[job]
    assert sum(one.messages for one in tiers.tier.held()[0]) == held
    assert len(tiers.hot.ids()) == (NUMBER if step == "committed" else 0)
    # And what is left to do is done by the next one
    tiers.schedule(source, run="campaign", spark=spark)
    tiers.promote(until)
    assert tiers.hot.ids() == sorted(f"m{number}" for number in range(NUMBER))
    assert tiers.promote(until).files == 0
