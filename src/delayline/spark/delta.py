"""Show the cold tier to others as a Delta table, which DuckDB, Trino and Spark read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayline.bulk.delta_log import DeltaLog
from delayline.shards import named_errors
from delayline.spark.cold_tier import ColdTier
from delayline.spark.shards import parts_of

if TYPE_CHECKING:
    from delayline.spark.schedule import JobTarget


def keep_delta_log(target: JobTarget) -> int:
    """Create a Delta log in the folder of the cold tier, or bring it up to date. Blocks, without Spark.

    From then on each job that changes the cold tier keeps the log, and needs the extra `delta`. The files are not
    written again. Messages that were cancelled are in the table until `compact` has merged their files.

    Args:
        target: The store and its cold tier.

    Returns:
        The version of the table.

    Raises:
        ConfigurationError: The target has no cold tier.
        MissingExtra: The extra `delta` is not installed.
        BackendUnusable: The log cannot be written to the folder.
    """
    versions = []
    for part in parts_of(target):
        with named_errors(part.shard):
            tier = ColdTier(part.target.options, part.target.cold_tier)
            log = DeltaLog(tier.create())
            log.create()
            versions.append(log.update(tier.held))
    return versions[-1]
