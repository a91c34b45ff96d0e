"""A store with a cold tier: what tests put there and look at."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from tests.spark.stores import ENDPOINT, StoreAt

from delayline.bulk.two_tier_store import TwoTierStore
from delayline.spark import JobTarget, Promoted, compact, promote, schedule
from delayline.spark.cold_tier import ColdTier

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from delayline.spark import Compacted, Scheduled
    from delayline.spi import Outcome

#: When the first of `many` is due.
FIRST: Final = datetime.fromtimestamp(1_900_000_000, UTC)
HOUR: Final = timedelta(hours=1)


class Tiers(StoreAt):
    """Both tiers of the endpoint `sales`; `hot` is the store alone."""

    def __init__(self, store: StoreAt, folder: Path, spark: SparkSession) -> None:
        super().__init__(store.url)
        self.hot = store
        self.folder = folder
        self.target = JobTarget(store.url, endpoint=ENDPOINT, cold_tier=str(folder))
        self.alone = JobTarget(store.url, endpoint=ENDPOINT)
        self._spark = spark

    def schedule(self, data: DataFrame | Path, **settings: Any) -> Scheduled:  # noqa: ANN401 - schedule's own
        """Schedule the messages: those due in more than an hour go to files."""
        return schedule(data, self.target, **{"hot_horizon": HOUR, **settings})

    def promote(self, until: datetime, **settings: Any) -> Promoted:  # noqa: ANN401 - promote's own
        """Promote messages that are due before `until`, with the rest of their hour."""
        return promote(self.target, horizon=until - datetime.now(UTC), spark=self._spark, **settings)

    def compact(self) -> Compacted:
        """Merge small files."""
        return compact(self.target, spark=self._spark)

    def make(self) -> TwoTierStore:
        """Return a new store over both tiers, which is not open."""
        return TwoTierStore(self.url, cold_tier=str(self.folder))

    def cancel(self, message_id: str) -> Outcome:
        """Cancel a message wherever it waits."""
        outcome: Outcome = self.run(lambda store: store.cancel(message_id))
        return outcome

    def files(self) -> list[Path]:
        """Return all files in the folder, registered or not."""
        return sorted(self.folder.rglob("*.parquet"))

    @property
    def tier(self) -> ColdTier:
        """The cold tier as jobs see it."""
        return ColdTier(self.target.options, self.target.cold_tier)


def spread(spark: SparkSession, number: int, *, hours: int, prefix: str = "m", partitions: int = 4) -> DataFrame:
    """Return messages due over so many hours from FIRST on, in no order."""
    return spark.range(0, number, 1, partitions).selectExpr(
        f"concat('{prefix}', id) AS id",
        "IF(id % 2 = 0, 'billing', 'shipping') AS destination",
        f"timestamp_seconds({int(FIRST.timestamp())} + (id * 7919) % {hours * 3600}) AS due",
        "'{}' AS headers",
        "CAST(CAST(id AS STRING) AS BINARY) AS body",
    )
