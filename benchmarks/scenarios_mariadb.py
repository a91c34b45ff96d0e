"""Scenarios on MariaDB, each on a private server with its default settings: every commit is flushed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from benchmarks import bare_mariadb as bare
from benchmarks.common import ROUNDS, Figures, against, scaled
from benchmarks.on_server import Product, messages, store_rate
from benchmarks.servers import mariadb

if TYPE_CHECKING:
    from pathlib import Path

MARIADB = Product(
    start=mariadb,
    bare=bare,
    tidy="ANALYZE TABLE {table}",
    old=["START TRANSACTION WITH CONSISTENT SNAPSHOT", "SELECT count(*) FROM delayline_queues"],
    asked="SELECT variable_value FROM information_schema.global_status WHERE variable_name = 'QUESTIONS'",
)


async def maria_immediate_sends(folder: Path) -> Figures:
    """Sends without a delay, against sends with one."""
    return await MARIADB.immediate_sends()


async def maria_single_send(folder: Path) -> Figures:
    """One awaited `send(delay=)` after another, against the driver's INSERT, one to a commit."""
    return await MARIADB.single_sends()


async def maria_concurrent_sends(folder: Path) -> Figures:
    """1 000 `send(delay=)` awaited together, ten times, against 100 inserts a commit."""
    return await MARIADB.concurrent_sends()


async def maria_store_many(folder: Path) -> Figures:
    """`store_many` of 1 000, against the driver's `executemany`, 1 000 a commit."""
    rates, number, due = [], scaled(20_000), datetime.now(UTC) + timedelta(days=365)
    with mariadb() as (url,):
        for turn in range(ROUNDS):
            raw = bare.many_rate(url, number)
            rates.append((await store_rate(url, messages(f"many{turn}", number, lambda _: due)), raw))
    return against("bare insert, 1 000 a commit", rates)


async def maria_burst(folder: Path) -> Figures:
    """50 000 due at one instant, exactly once from store to queue, against the bare move."""
    with mariadb() as (url,):
        return await MARIADB.burst(url)


async def maria_fetch(folder: Path) -> Figures:
    """50 000 through Python to the memory transport, at least once, against bare claim-and-delete of 100."""
    return await MARIADB.fetch()


async def maria_pollers(folder: Path) -> Figures:
    """Four poller processes on one table, against one."""
    return await MARIADB.pollers()


async def maria_spread(folder: Path) -> Figures:
    """Due times 1 ms apart for 20 s, received by a handler of the same process."""
    return await MARIADB.spread()


async def maria_backlog(folder: Path) -> Figures:
    """Behind 1 000 000 pending: the drain rate, and how much later a short delay is."""
    return await MARIADB.backlog()


async def maria_old_transaction(folder: Path) -> Figures:
    """The drain rate while an old transaction is open elsewhere, so that nothing can be cleaned up."""
    return await MARIADB.old_transaction()


async def maria_rest(folder: Path) -> Figures:
    """A poller and a receiver with nothing due for a year, watched for two minutes."""
    return await MARIADB.rest()
