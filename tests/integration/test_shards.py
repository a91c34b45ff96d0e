"""Messages over two servers: a shard that is down, one more and one less under load, and processes with old maps."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest
from tests.conftest import running
from tests.eventually import PATIENCE, eventually_async
from tests.servers.postgresql import PostgresqlServer

from delayline import BackendUnavailable, ConfigurationError, Endpoint, Message, MessageContext
from delayline.delayed.store import Outcome
from delayline.shards import OUT_OF_REACH, Shard, ShardMap, ShardMapOutdated, ShardState
from delayline.sql.shards import ShardedDelayedMessageStore, ShardedTransport, versions
from delayline.telemetry.measurements import Measurements
from delayline.telemetry.probes import ready_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


SOON = timedelta(milliseconds=300)
DAY = timedelta(days=1)
#: Handles messages and keeps a row of each in the database of its shard; sends another for each first one.
WORKER = """
import asyncio, logging, sys
from datetime import timedelta
from sqlalchemy import text
from delayline import Endpoint

logging.disable(logging.CRITICAL)
endpoint = Endpoint("sales", url=f"shards:{sys.argv[1]}", concurrency=8)

@endpoint.handler
def handle(message, context):
    connection = context.transaction()
    connection.execute(text("INSERT INTO handled VALUES (:id)"), {"id": message.id})
    if message.body == b"first":
        context.send("sales", b"second", message_id=message.id + "-second", delay=timedelta(milliseconds=200))

async def main():
    async with endpoint:
        print("started", flush=True)
        await endpoint.wait_stopped()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def servers() -> Iterator[list[PostgresqlServer]]:
    with running(PostgresqlServer, "fsync=off") as first, running(PostgresqlServer, "fsync=off") as second:
        yield [first, second]


@pytest.fixture
def urls(servers: list[PostgresqlServer]) -> Iterator[list[str]]:
    made = [server.new_database() for server in servers]
    for url in made:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE handled (id text)")
    yield made
    for server, url in zip(servers, made, strict=True):
        server.drop_database(url)


def map_of(urls: Sequence[str], version: int = 1, **states: str) -> ShardMap:
    return ShardMap(
        version,
        tuple(
            Shard(name, url, state=ShardState(states.get(name, "active")))
            for name, url in zip(("a", "b"), urls, strict=False)
        ),
    )


def endpoint_of(shards: ShardMap, handled: Counter[str] | None = None, *, sets_up: bool = True) -> Endpoint:
    endpoint = Endpoint(
        "sales",
        transport=ShardedTransport(shards),
        delayed_delivery=ShardedDelayedMessageStore(shards),
        setup_infrastructure=sets_up,
    )
    if handled is not None:

        @endpoint.handler
        async def handle(message: Message, context: MessageContext) -> None:
            handled[message.id] += 1

    return endpoint


def ids_in(shards: ShardMap, name: str, number: int = 5) -> list[str]:
    """Return ids of messages that belong to the shard."""
    ids = (f"m{position}" for position in range(10_000))
    return [message_id for message_id in ids if shards.shard_of(message_id) == name][:number]


def rows(urls: Sequence[str], query: str) -> list[str]:
    found: list[str] = []
    for url in urls:
        with psycopg.connect(url) as connection:
            found += [row[0] for row in connection.execute(query).fetchall()]
    return found


@pytest.mark.timeout(300)
async def test_a_shard_that_is_down_at_the_start_stops_its_own_messages_only(
    servers: list[PostgresqlServer], urls: list[str]
) -> None:
    shards, handled = map_of(urls), Counter[str]()
    async with endpoint_of(shards):
        pass
    # Given a server that is down
    servers[1].stop()
    try:
        endpoint = endpoint_of(shards, handled)
        measurements = Measurements.of(endpoint)
        async with endpoint:
            # When messages are sent
            for message_id in ids_in(shards, "a"):
                await endpoint.send("sales", b"", message_id=message_id, delay=SOON)
            for message_id in ids_in(shards, "b"):
                with pytest.raises(BackendUnavailable, match="shard 'b'"):
                    await endpoint.send("sales", b"", message_id=message_id, delay=SOON)
            # Then those of the other server arrive, and the metrics count the shard
            await eventually_async(lambda: set(handled) == set(ids_in(shards, "a")))
            assert endpoint.measures()[OUT_OF_REACH] == 1
            with pytest.raises(BackendUnavailable, match="'b'"):
                await endpoint.delayed.cancel("none")
            # And when the server is there again, its own do
            servers[1].start()

            async def sent() -> bool:
                with contextlib.suppress(BackendUnavailable):
                    for message_id in ids_in(shards, "b"):
                        await endpoint.send("sales", b"", message_id=message_id, delay=SOON)
                    return True
                return False

            await eventually_async(sent)
            await eventually_async(lambda: set(handled) == {*ids_in(shards, "a"), *ids_in(shards, "b")})
            await eventually_async(lambda: endpoint.measures()[OUT_OF_REACH] == 0)
            # And one that stops later is counted, too
            servers[1].stop()
            await eventually_async(lambda: endpoint.measures()[OUT_OF_REACH] == 1)
            assert ready_of(measurements).ok
    finally:
        with contextlib.suppress(Exception):
            servers[1].start()
    assert max(handled.values()) == 1


async def test_no_shard_in_reach_refuses_the_start(tmp_path: Path) -> None:
    shards = map_of(["postgresql://nobody@127.0.0.1:9/none", "postgresql://nobody@127.0.0.1:9/other"])
    with pytest.raises(BackendUnavailable):
        await endpoint_of(shards).start()


@pytest.mark.timeout(300)
async def test_a_shard_is_added_and_another_drained(urls: list[str]) -> None:
    # Given messages that wait in the only shard
    before, handled = map_of(urls[:1]), Counter[str]()
    waiting = [f"m{number}" for number in range(40)]
    async with endpoint_of(before) as endpoint:
        for message_id in waiting:
            await endpoint.send("sales", b"", message_id=message_id, delay=DAY)
    # When another is added
    added = map_of(urls, version=2)
    async with endpoint_of(added) as endpoint:
        # Then nothing has moved, and the messages are found where they wait
        assert len(rows(urls[:1], 'SELECT id FROM "sales.timeouts"')) == len(waiting)
        for message_id in waiting:
            await endpoint.send("sales", b"", message_id=message_id, delay=DAY)
        assert len(await endpoint.delayed.pending(limit=100)) == len(waiting)
        for message_id in waiting[:10]:
            assert await endpoint.delayed.cancel(message_id) is Outcome.DONE
        # And new messages are in both
        for number in range(40):
            await endpoint.send("sales", b"", message_id=f"n{number}", delay=DAY)
        assert rows(urls[1:], 'SELECT id FROM "sales.timeouts"')
    # And when the first is drained
    draining = map_of(urls, version=3, a="draining")
    async with endpoint_of(draining, handled) as endpoint:
        known = set(rows(urls[:1], 'SELECT id FROM "sales.timeouts"'))
        for number in range(40):
            await endpoint.send("sales", b"", message_id=f"p{number}", delay=DAY)
        # Then it gets nothing more, and what it has is handled
        assert set(rows(urls[:1], 'SELECT id FROM "sales.timeouts"')) == known
        with pytest.raises(ConfigurationError, match="still has"):
            await endpoint_of(map_of(urls, version=4, a="removed")).start()
        for message_id in known:
            assert await endpoint.delayed.send_now(message_id) is Outcome.DONE
        await eventually_async(lambda: set(handled) == known)
    # And once it is empty it can be removed
    async with endpoint_of(map_of(urls, version=4, a="removed"), handled) as endpoint:
        await endpoint.send("sales", b"", message_id="last")
        await eventually_async(lambda: "last" in handled)
    assert max(handled.values()) == 1


async def test_an_old_map_is_refused(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "LOOKED_FOR_EVERY", 0.05)
    old, handled = map_of(urls[:1]), Counter[str]()
    async with endpoint_of(old, handled) as outdated:
        await outdated.send("sales", b"", message_id="before", delay=DAY)
        # When a process starts with a newer version
        async with endpoint_of(map_of(urls, version=2)):
            pass

        # Then one with the old version sends nothing more
        async def refused() -> bool:
            try:
                await outdated.send("sales", b"", delay=DAY)
            except ShardMapOutdated as error:
                return "version 2 is in use" in str(error) and "restart" in str(error)
            return False

        await eventually_async(refused)
        with pytest.raises(ShardMapOutdated):
            await outdated.send("sales", b"")
        # But goes on with what waits
        assert await outdated.delayed.send_now("before") is Outcome.DONE
        await eventually_async(lambda: handled["before"] == 1)
    # And another does not start
    with pytest.raises(ShardMapOutdated):
        await endpoint_of(old).start()
    with pytest.raises(ConfigurationError, match="give the changed map version 3"):
        await endpoint_of(map_of(urls, version=2, a="draining")).start()
    with pytest.raises(ConfigurationError, match="'b' is missing"):
        await endpoint_of(map_of(urls[:1], version=3)).start()


async def test_a_transaction_of_the_user_names_its_shard(urls: list[str]) -> None:
    shards = map_of(urls)
    async with endpoint_of(shards) as endpoint:
        for place, name in enumerate(("b", "a")):
            connection = await psycopg.AsyncConnection.connect(urls[1 - place])
            async with connection, connection.transaction():
                for number in range(5):
                    await endpoint.send("sales", b"", message_id=f"{name}{number}", delay=DAY, transaction=connection)
            assert sorted(rows([urls[1 - place]], 'SELECT id FROM "sales.timeouts"')) == [
                f"{name}{number}" for number in range(5)
            ]
        assert await endpoint.delayed.cancel("a3") is Outcome.DONE


async def send(endpoint: Endpoint, message_id: str) -> None:
    while True:
        try:
            await endpoint.send("sales", b"first", message_id=message_id, delay=SOON)
        except BackendUnavailable:
            await asyncio.sleep(0.05)  # the sender's own retry
            continue
        return


class Workers:
    """Processes that handle the messages of a map."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WORKER, str(self._file), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            assert await process.stdout.readline() == b"started\n"
        self._processes.append(process)

    async def kill(self) -> None:
        process = self._processes.pop(0)
        process.send_signal(signal.SIGKILL)
        await process.wait()

    async def stop(self) -> None:
        while self._processes:
            await self.kill()


@pytest.mark.timeout(600)
async def test_kills_of_processes_and_of_a_server_lose_and_double_nothing(
    servers: list[PostgresqlServer], urls: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "shards.toml"
    shards = map_of(urls)
    listed = "".join(f'[[shard]]\nname = "{shard.name}"\nurl = "{shard.url}"\n' for shard in shards.shards)
    file.write_text(f"version = 1\n{listed}")
    workers, ids = Workers(file), [f"m{number}" for number in range(600)]
    try:
        async with endpoint_of(shards) as endpoint:
            await workers.start()
            await workers.start()

            # When processes are killed, and a server stops, while messages flow
            for position in range(0, len(ids), 100):
                await asyncio.gather(*(send(endpoint, message_id) for message_id in ids[position : position + 50]))
                sending = asyncio.gather(
                    *(send(endpoint, message_id) for message_id in ids[position + 50 : position + 100])
                )
                if position in (100, 300):
                    await workers.kill()
                    await workers.start()
                if position == 200:
                    await asyncio.to_thread(servers[1].stop, "immediate")
                    await asyncio.to_thread(servers[1].start)
                await sending
            # Then every message is handled, and what its handler sends
            wanted = {*ids, *(f"{message_id}-second" for message_id in ids)}

            async def all_handled() -> bool:
                return set(await asyncio.to_thread(rows, urls, "SELECT id FROM handled")) == wanted

            await eventually_async(all_handled, patience=3 * PATIENCE)
    finally:
        await workers.stop()
    # And its effects are there once, in its own shard
    counts = Counter(rows(urls, "SELECT id FROM handled"))
    repeated = {message_id: number for message_id, number in counts.items() if number > 1}
    assert repeated == {}
    for name, url in zip(("a", "b"), urls, strict=True):
        of_shard = {row.removesuffix("-second") for row in rows([url], "SELECT id FROM handled")}
        assert {shards.shard_of(message_id) for message_id in of_shard} == {name}
