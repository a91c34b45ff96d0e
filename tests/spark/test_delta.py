"""Jobs keep the Delta log of a cold tier: DuckDB reads what waits there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from tests.integration.delta_reader import ids_in_table
from tests.spark.tiers import FIRST, HOUR, spread

from delayline.bulk import delta_log
from delayline.errors import MissingExtra
from delayline.spark import keep_delta_log
from delayline.spi import Outcome

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.spark.tiers import Tiers


def ids(*prefixes: str, number: int = 60) -> list[str]:
    return sorted(f"{prefix}{each}" for prefix in prefixes for each in range(number))


def test_two_schedulers_and_a_compaction_at_once(
    spark: SparkSession, tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a cold tier with a log
    tiers.schedule(spread(spark, 60, hours=2, prefix="a"))
    tiers.schedule(spread(spark, 60, hours=2, prefix="b"))
    assert keep_delta_log(tiers.target) == 1
    assert ids_in_table(tiers.folder) == ids("a", "b")
    tiers.cancel("a1")
    # When two jobs schedule and one compacts, at once
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(tiers.schedule, spread(spark, 60, hours=2, prefix=prefix)) for prefix in ("c", "d")]
        compaction = pool.submit(tiers.compact)
        assert [job.result().cold for job in jobs] == [60, 60]
        assert compaction.result().before > 0
    # Then the log has all that waits, and what was cancelled has left it with the compaction
    expected = sorted({*ids("a", "b", "c", "d")} - {"a1"})
    assert ids_in_table(tiers.folder) == tiers.ids() == expected
    # And what is promoted leaves it
    assert tiers.promote(FIRST + HOUR).stored > 0
    assert sorted([*ids_in_table(tiers.folder), *tiers.hot.ids()]) == expected
    assert tiers.cancel(ids_in_table(tiers.folder)[0]) is Outcome.DONE
    # And a job that cannot keep it does not begin
    monkeypatch.setattr(delta_log, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'delayline\[delta\]'"):
        tiers.schedule(spread(spark, 60, hours=2, prefix="e"))
