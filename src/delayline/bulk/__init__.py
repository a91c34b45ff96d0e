"""Bulk work on SQL stores: staging and the ledger of Spark jobs and migrations, the cold tier's files and catalog."""

from delayline.bulk.two_tier_store import ShardedTwoTierStore, TwoTierStore

__all__ = ["ShardedTwoTierStore", "TwoTierStore"]
