"""Bulk work on SQL stores: staging and ledgers for Spark jobs and migrations, the cold tier's files and catalog."""

from delayline.bulk.two_tier_store import TwoTierStore

__all__ = ["TwoTierStore"]
