"""What shards cost, and what one that is down costs the others."""

from __future__ import annotations

import asyncio
import statistics
import time
from datetime import UTC, datetime, timedelta
from itertools import count, islice
from typing import TYPE_CHECKING

from benchmarks.bare import BODY
from benchmarks.common import NAME, ROUNDS, Figures, headers_for, scaled
from benchmarks.handled import Handled
from benchmarks.servers import cpu_with, postgresql_server
from delayline import DelayedMessage, Endpoint, Message, TransactionMode
from delayline.sql.shards import Shard, ShardedDelayedMessageStore, ShardedTransport, ShardMap

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.servers.postgresql import PostgresqlServer

NUMBER = scaled(20_000)
SPREAD = scaled(2_000)
GAP = timedelta(milliseconds=5)


async def shards(folder: Path) -> Figures:
    """Four shards on two servers: handled beside a single shard, and late while a server is stopped beside none."""
    del folder
    with postgresql_server() as first, postgresql_server() as second:
        servers = (first, second)
        alone = ShardMap(1, (Shard("a", first.new_database()),))
        four = ShardMap(1, tuple(Shard(name, servers[place % 2].new_database()) for place, name in enumerate("abcd")))
        on_first = [shard.name for shard in four.shards[0::2]]
        rates: dict[str, list[tuple[float, float]]] = {}
        late: dict[str, list[float]] = {}
        for turn in range(ROUNDS):
            for name, shard_map in (("one shard", alone), ("four shards", four)):
                rates.setdefault(name, []).append(await _handled(shard_map, f"{name}{turn}", servers))
            late.setdefault("all up", []).append(await _late(four, on_first, f"up{turn}"))
            await asyncio.to_thread(second.stop)
            try:
                late.setdefault("one server stopped", []).append(await _late(four, on_first, f"down{turn}"))
            finally:
                await asyncio.to_thread(second.start)
    figures = {f"{name} /s": statistics.median(rate for rate, _ in both) for name, both in rates.items()}
    figures |= {f"{name}, CPU us": statistics.median(cpu for _, cpu in both) for name, both in rates.items()}
    figures |= {f"{name}, lateness p99 ms": statistics.median(values) for name, values in late.items()}
    pairs = zip(late["all up"], late["one server stopped"], strict=True)
    return figures | {
        "ratio of rates": figures["four shards /s"] / figures["one shard /s"],
        "times later": statistics.median(down / up for up, down in pairs),
    }


def _endpoint(shard_map: ShardMap) -> Endpoint:
    store = ShardedDelayedMessageStore(shard_map)
    return Endpoint(NAME, transport=ShardedTransport(shard_map), delayed_delivery=store, concurrency=16)


async def _fill(shard_map: ShardMap, messages: Sequence[DelayedMessage]) -> None:
    store = ShardedDelayedMessageStore(shard_map)
    await store.initialize(NAME, TransactionMode.TRANSACTION_SCOPE)
    try:
        for start in range(0, len(messages), 1000):
            await store.store_many(messages[start : start + 1000])
    finally:
        await store.close()


def _message(message_id: str, due: datetime) -> DelayedMessage:
    return DelayedMessage(Message.from_encoded(message_id, headers_for(due), BODY), NAME, due)


async def _handled(shard_map: ShardMap, prefix: str, servers: Sequence[PostgresqlServer]) -> tuple[float, float]:
    """Return how many messages a second are handled from the instant all are due, and the CPU of each in us."""
    endpoint = _endpoint(shard_map)
    handled = Handled(endpoint, NUMBER)
    await endpoint.setup()
    due = datetime.now(UTC) + timedelta(seconds=5 + NUMBER / 5_000)
    await _fill(shard_map, [_message(f"{prefix}{number}", due) for number in range(NUMBER)])

    def cpu() -> float:
        return sum(map(cpu_with, servers)) - time.process_time() * (len(servers) - 1)

    async with endpoint:
        assert datetime.now(UTC) < due, "the endpoint started after the messages were due"
        await asyncio.sleep((due - datetime.now(UTC)).total_seconds())
        taken, began = cpu(), time.perf_counter()
        await handled.wait()
        elapsed = time.perf_counter() - began
        return NUMBER / elapsed, (cpu() - taken) / NUMBER * 1e6


async def _late(shard_map: ShardMap, names: Sequence[str], prefix: str) -> float:
    """Return how late 99 % of the messages of some shards are at most, in milliseconds."""
    store = ShardedDelayedMessageStore(shard_map)
    transport = ShardedTransport(shard_map)
    endpoint = Endpoint(NAME, transport=transport, delayed_delivery=store, concurrency=16, setup_infrastructure=False)
    handled = Handled(endpoint, SPREAD)

    def ids() -> Iterator[str]:
        return (made for number in count() if shard_map.shard_of(made := f"{prefix}-{number}") in names)

    async with endpoint:
        start = datetime.now(UTC) + timedelta(seconds=3 + SPREAD / 5_000)
        for message_id, position in zip(islice(ids(), SPREAD), range(SPREAD), strict=True):
            message = _message(message_id, start + GAP * position)
            await store.store(message)
        await handled.wait(300)
    return handled.lateness()["lateness p99 ms"]
