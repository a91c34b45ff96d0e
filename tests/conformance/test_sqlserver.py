"""Conformance on the SQL Server that DELAYLINE_TEST_SQLSERVER_URL names.

The URL leads to a server on which databases may be created, as in `mssql://sa:password@host/master`. No such server
runs where delayline is made. On a server that speaks the protocol but ignores lock hints, leave out what needs row
locks: `pytest -m "not row_locks"`.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.sampling import OtherLayout
from tests.servers.sqlserver import NO_URL, URL, drop_database, new_database

from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.testing import DeliveryConformance, StoreConformance, TransportConformance

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path


if not URL:
    pytest.skip(NO_URL, allow_module_level=True)


def row_locks(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Return the suite's test, marked here and nowhere else."""

    @functools.wraps(test)
    async def marked(*arguments: object, **fixtures: object) -> None:
        await test(*arguments, **fixtures)

    kept: Callable[..., Awaitable[None]] = pytest.mark.row_locks(marked)
    return kept


class OnSqlServer:
    """A database for every test."""

    @pytest.fixture(autouse=True)
    def database(self) -> Iterator[None]:
        self.url = new_database()
        yield
        drop_database(self.url)


class TestSqlServerStore(OnSqlServer, StoreConformance):
    durable = True
    step = timedelta(milliseconds=10)  # every third step of `datetime` is a whole hundredth
    keeps_order = False
    folds_ids = True

    async def make_store(self, tmp_path: Path) -> SqlDelayedMessageStore:
        return SqlDelayedMessageStore(self.url)


class TestSqlServerTransport(OnSqlServer, TransportConformance):
    async def make_transport(self, tmp_path: Path) -> SqlTransport:
        return SqlTransport(self.url)


class TestSqlServerDelivery(OnSqlServer, DeliveryConformance):
    """One database: every transaction mode up to TRANSACTION_SCOPE."""

    step = timedelta(milliseconds=10)
    keeps_order = False

    async def make_backends(self, tmp_path: Path) -> tuple[SqlTransport, SqlDelayedMessageStore]:
        return SqlTransport(self.url), SqlDelayedMessageStore(self.url)


class TestSqlServerDeliveryOverTwoDatabases(OnSqlServer, OtherLayout):
    """No common transaction without a coordinator: the lower modes only."""

    step = timedelta(milliseconds=10)
    keeps_order = False

    @pytest.fixture(autouse=True)
    def second_database(self) -> Iterator[None]:
        self.second = new_database()
        yield
        drop_database(self.second)

    async def make_backends(self, tmp_path: Path) -> tuple[SqlTransport, SqlDelayedMessageStore]:
        return SqlTransport(self.second), SqlDelayedMessageStore(self.url)


#: Tests in which other connections must not see, or not wait for, locked rows.
for name in (
    "test_a_message_fetched_in_a_transaction_is_locked",
    "test_others_go_on_beside_a_transaction_that_locks_rows",
    "test_a_message_that_leaves_meanwhile",
    "test_an_answer_holds_whatever_the_race",
    "test_competing_batches_never_share_a_message",
    "test_competing_fetches_never_share_a_message",
):
    setattr(TestSqlServerStore, name, row_locks(getattr(TestSqlServerStore, name)))
