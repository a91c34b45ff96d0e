"""Fixtures of store tests: a fresh, initialized store, and its claimed capabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pytest
import pytest_asyncio

from delayline.delayed.store import (
    DelayedMessageStore,
    SupportsBatches,
    SupportsClose,
    SupportsManagement,
    SupportsNotifications,
    SupportsSetup,
    SupportsTransactions,
)
from delayline.errors import UnsupportedTransactionMode
from delayline.testing.conformance.messages import ENDPOINT, TICK
from delayline.transaction import TransactionMode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from datetime import timedelta
    from pathlib import Path


class BatchingStore(DelayedMessageStore, SupportsBatches, Protocol):
    """A store that claims batches."""


class TransactionalStore(DelayedMessageStore, SupportsTransactions, Protocol):
    """A store that claims transactions."""


class ManagedStore(DelayedMessageStore, SupportsManagement, Protocol):
    """A store that claims management."""


class NotifyingStore(DelayedMessageStore, SupportsNotifications, Protocol):
    """A store that claims wake-ups."""


async def opened(store: DelayedMessageStore, endpoint_name: str = ENDPOINT) -> DelayedMessageStore:
    """Set the store up and initialize it in the strongest mode it accepts."""
    if isinstance(store, SupportsSetup):
        await store.setup_infrastructure(endpoint_name)
    for mode in sorted(TransactionMode, reverse=True):
        try:
            await store.initialize(endpoint_name, mode)
        except UnsupportedTransactionMode:
            continue
        return store
    raise AssertionError("initialize refused every transaction mode")


async def closed(store: DelayedMessageStore) -> None:
    """Close the store if it can be closed."""
    if isinstance(store, SupportsClose):
        await store.close()


class StoreFixtures:
    """Fixtures of the store suite."""

    pytestmark = pytest.mark.asyncio

    #: True if a second store over the same storage sees the first one's messages.
    durable: bool = False

    #: The steps in which the store keeps due times, where it is not the microsecond; it rounds them up.
    step: timedelta = TICK
    #: Whether messages that are due together are fetched as they were stored; otherwise in the order of their ids.
    keeps_order: bool = True
    #: How many bytes a body may have; a larger one is refused with InvalidMessage.
    largest_body: int = 5 * 1024 * 1024
    #: How many messages make a large batch: more than one statement or request may have.
    large_batch: int = 5000
    #: Whether the store compares ids loosely, as by case; then it refuses the second of two similar ids.
    folds_ids: bool = False

    async def make_store(self, tmp_path: Path) -> DelayedMessageStore:
        """Return a new store, neither set up nor initialized, over storage that is empty when a test begins.

        Override this. Called again within one test it returns another store, over the same storage where `durable`.
        """
        raise NotImplementedError("override make_store in your subclass of StoreConformance")

    def in_order(self, ids: Sequence[str]) -> list[str]:
        """Return the ids of messages that are due together, given as they were stored, as they are fetched."""
        return list(ids) if self.keeps_order else sorted(ids)

    @pytest_asyncio.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[DelayedMessageStore]:
        """Provide an open store."""
        store = await opened(await self.make_store(tmp_path))
        yield store
        await closed(store)

    @pytest.fixture
    def batches(self, store: DelayedMessageStore) -> BatchingStore:
        """Provide an open store that works in batches."""
        if not isinstance(store, SupportsBatches):
            pytest.skip("not claimed: SupportsBatches")
        return store

    @pytest.fixture
    def transactional(self, store: DelayedMessageStore) -> TransactionalStore:
        """Provide an open store with transactions."""
        if not isinstance(store, SupportsTransactions):
            pytest.skip("not claimed: SupportsTransactions")
        return store

    @pytest.fixture
    def managed(self, store: DelayedMessageStore) -> ManagedStore:
        """Provide an open store that people can look into."""
        if not isinstance(store, SupportsManagement):
            pytest.skip("not claimed: SupportsManagement")
        return store

    @pytest.fixture
    def waking(self, store: DelayedMessageStore) -> NotifyingStore:
        """Provide an open store that tells when something was stored."""
        if not isinstance(store, SupportsNotifications):
            pytest.skip("not claimed: SupportsNotifications")
        return store
