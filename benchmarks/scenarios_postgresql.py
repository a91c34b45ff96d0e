"""Scenarios on PostgreSQL, each on a private server with its default settings: fsync on, synchronous_commit on."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from benchmarks import bare_postgresql as bare
from benchmarks import peers_postgresql as peers
from benchmarks.common import ROUNDS, Figures, against, scaled, send_many_rate, together_rate
from benchmarks.on_server import Product, messages, store_rate
from benchmarks.servers import postgresql

if TYPE_CHECKING:
    from pathlib import Path

POSTGRESQL = Product(
    start=postgresql,
    bare=bare,
    tidy="VACUUM ANALYZE {table}",
    old=["BEGIN", "SELECT txid_current()"],
    asked="SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()",
)


async def pg_single_send(folder: Path) -> Figures:
    """One awaited `send(delay=)` after another, against the driver's INSERT, one to a commit."""
    return await POSTGRESQL.single_sends()


async def pg_concurrent_sends(folder: Path) -> Figures:
    """1 000 `send(delay=)` awaited together, ten times, against 100 inserts a commit, and COPY of 1 000."""
    return await POSTGRESQL.concurrent_sends()


async def pg_immediate_sends(folder: Path) -> Figures:
    """Sends without a delay, against sends with one."""
    return await POSTGRESQL.immediate_sends()


async def pg_store_many(folder: Path) -> Figures:
    """`store_many` of 1 000, against binary COPY, 1 000 a commit; it and sends, against PgQueuer's enqueue of 1 000."""
    rates, theirs, number, due = [], [], scaled(100_000), datetime.now(UTC) + timedelta(days=365)
    together, awaited = [], []
    with postgresql() as (url,):
        for turn in range(ROUNDS):
            raw = bare.many_rate(url, number)
            ours = await store_rate(url, messages(f"many{turn}", number, lambda _: due))
            rates.append((ours, raw))
            enqueued = await peers.pgqueuer_enqueue(url, number)
            theirs.append((ours, enqueued))
            together.append((await send_many_rate(url, number), enqueued))
            awaited.append((await together_rate(url, number), enqueued))
    figures, beside = against("binary COPY", rates), against("PgQueuer", theirs)
    figures |= {"PgQueuer /s": beside["PgQueuer /s"], "times PgQueuer": beside["ratio"]}
    for name, sends in (("send_many", together), ("awaited sends", awaited)):
        sent = against("PgQueuer", sends)
        figures |= {f"{name} /s": sent["delayline /s"], f"{name}, times PgQueuer": sent["ratio"]}
    return figures


async def pg_burst(folder: Path) -> Figures:
    """50 000 due at one instant, exactly once from store to queue, without a handler, against the bare move."""
    with postgresql() as (url,):
        return await POSTGRESQL.burst(url)


async def pg_fetch(folder: Path) -> Figures:
    """50 000 through Python to the memory transport, at least once, against bare claim-and-delete of 100."""
    return await POSTGRESQL.fetch()


async def pg_pollers(folder: Path) -> Figures:
    """Four poller processes on one table, against one."""
    return await POSTGRESQL.pollers()


async def pg_spread(folder: Path) -> Figures:
    """Due times 1 ms apart for 20 s, received by a handler of the same process."""
    return await POSTGRESQL.spread()


async def pg_latest(folder: Path) -> Figures:
    """60 000 of short delays that two other processes send, the table locked for 2 s once: how late the latest is."""
    return await POSTGRESQL.latest(lock="LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")


async def pg_backlog(folder: Path) -> Figures:
    """Behind 1 000 000 pending: the drain rate, and how much later a short delay is."""
    return await POSTGRESQL.backlog()


async def pg_old_transaction(folder: Path) -> Figures:
    """The drain rate while an old transaction is open elsewhere, so that nothing can be cleaned up."""
    return await POSTGRESQL.old_transaction()


async def pg_rest(folder: Path) -> Figures:
    """A poller and a receiver with nothing due for a year, watched for two minutes."""
    return await POSTGRESQL.rest()
