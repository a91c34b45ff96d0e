"""Four shards on two servers under kills, while one is added and another drained: each effect counts once.

`make test-all` kills a few. The examination takes some minutes; `DELAYLINE_KILLS_SEED` repeats its choices:

    DELAYLINE_KILLS=200 pytest --log-cli-level=warning tests/integration/test_many_shards.py
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import psycopg
import pytest
from tests.eventually import PATIENCE, eventually_async
from tests.integration.test_shards import Workers, endpoint_of, rows, send, servers  # noqa: F401 - a fixture

from delayline.shards import Shard, ShardMap, ShardState

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.servers.postgresql import PostgresqlServer


logger: logging.Logger = logging.getLogger(__name__)

KILLS: Final = int(os.environ.get("DELAYLINE_KILLS", "6"))
SEED: Final = os.environ.get("DELAYLINE_KILLS_SEED", "1")
#: Messages that are sent between two kills; each handler sends another.
MESSAGES_A_KILL: Final = 30
WORKERS: Final = 3
NAMES: Final = ("a", "b", "c", "d", "e")


def map_of(urls: Sequence[str], version: int) -> ShardMap:
    """Return a map: the first four shards; then five; then without first sends to the first."""
    names = NAMES[:4] if version == 1 else NAMES
    shards = [Shard(name, url) for name, url in zip(names, urls, strict=False)]
    if version == 3:
        shards[0] = replace(shards[0], state=ShardState.DRAINING)
    return ShardMap(version, tuple(shards))


def write(file: Path, shards: ShardMap) -> None:
    listed = "".join(
        f'[[shard]]\nname = "{shard.name}"\nurl = "{shard.url}"\nstate = "{shard.state}"\n' for shard in shards.shards
    )
    file.write_text(f"version = {shards.version}\n{listed}")


@pytest.mark.long
@pytest.mark.timeout(7200)
async def test_many_kills_while_a_shard_is_added_and_another_drained(
    servers: list[PostgresqlServer],  # noqa: F811 - the fixture
    tmp_path: Path,
) -> None:
    urls = [servers[place % 2].new_database() for place in range(len(NAMES))]
    for url in urls:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE handled (id text)")
    file, choices = tmp_path / "shards.toml", random.Random(SEED)  # noqa: S311 - repeatable
    workers, killed, ids = Workers(file), Counter[str](), list[str]()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(workers.stop)
        for version in (1, 2, 3):
            # Given the next version of the map, with which the processes are started
            shards = map_of(urls, version)
            write(file, shards)
            async with endpoint_of(shards) as endpoint:
                await workers.stop()
                for _ in range(WORKERS):
                    await workers.start()
                # When processes and servers are killed while messages flow
                for _ in range(KILLS // 3 + (version <= KILLS % 3)):
                    batch = [f"m{len(ids) + number}" for number in range(MESSAGES_A_KILL)]
                    ids += batch
                    sending = asyncio.gather(*(send(endpoint, message_id) for message_id in batch))
                    await asyncio.sleep(choices.random() / 2)
                    if choices.random() < 0.8:
                        killed["process"] += 1
                        await workers.kill()
                        await workers.start()
                    else:
                        killed["server"] += 1
                        server = choices.choice(servers)
                        await asyncio.to_thread(server.stop, "immediate")
                        await asyncio.to_thread(server.start)
                    await sending
        # Then every message is handled, and what its handler sends
        wanted = {*ids, *(f"{message_id}-second" for message_id in ids)}

        async def all_handled() -> bool:
            return set(await asyncio.to_thread(rows, urls, "SELECT id FROM handled")) == wanted

        await eventually_async(all_handled, patience=5 * PATIENCE)
    counts = Counter(rows(urls, "SELECT id FROM handled"))
    logger.warning("%d messages, %s killed: each handled once", len(counts), dict(killed))
    # And its effects are there once, and nothing is left in the drained shard
    assert {message_id: number for message_id, number in counts.items() if number > 1} == {}
    assert rows(urls[:1], 'SELECT id FROM "sales.timeouts"') == []
    for server, url in zip([*servers, *servers, servers[0]], urls, strict=True):
        server.drop_database(url)
