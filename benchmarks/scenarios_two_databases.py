"""Exactly once with store and queues in two databases: a two-phase commit a batch, against one database."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from benchmarks.common import NAME, ROUNDS, Figures, against, endpoint_on
from benchmarks.on_server import BURST, drain_rate
from benchmarks.servers import mariadb, postgresql
from delayline import Endpoint, SqlDelayedMessageStore, SqlTransport, StoredDelivery
from delayline.sql import TwoPhaseCommit

if TYPE_CHECKING:
    from pathlib import Path

PREPARING = ["max_prepared_transactions=20"]


async def two_pg(folder: Path) -> Figures:
    """50 000 due at one instant, exactly once from one PostgreSQL database to another, 500 a commit."""
    with postgresql(PREPARING, databases=2) as (store, queues):
        return await _against_one(store, queues)


async def two_pg_maria(folder: Path) -> Figures:
    """50 000 due at one instant, exactly once from PostgreSQL to queues in MariaDB, 500 a commit."""
    with contextlib.ExitStack() as servers:
        (store,) = servers.enter_context(postgresql(PREPARING))
        (queues,) = servers.enter_context(mariadb())
        return await _against_one(store, queues)


async def two_maria_pg(folder: Path) -> Figures:
    """50 000 due at one instant, exactly once from MariaDB to queues in PostgreSQL, 500 a commit."""
    with contextlib.ExitStack() as servers:
        (store,) = servers.enter_context(mariadb())
        (queues,) = servers.enter_context(postgresql())
        return await _against_one(store, queues)


async def _against_one(store: str, queues: str) -> Figures:
    rates = []
    for _ in range(ROUNDS):
        one = await drain_rate(store, BURST, lambda: endpoint_on(store))
        two = await drain_rate(store, BURST, lambda: _over_both(store, queues), queues=queues)
        rates.append((two, one))
    return against("one database", rates)


def _over_both(store: str, queues: str) -> Endpoint:
    both = TwoPhaseCommit()
    delivery = StoredDelivery(SqlDelayedMessageStore(store, two_phase=both), batch_size=500)
    return Endpoint(NAME, transport=SqlTransport(queues, two_phase=both), delayed_delivery=delivery)
