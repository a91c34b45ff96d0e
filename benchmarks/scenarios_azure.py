"""Azure Storage, on an Azurite of its own: it shares this machine, and its rates are no service's."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from azure.data.tables.aio import TableServiceClient
from azure.storage.queue.aio import QueueServiceClient

from benchmarks.bare import BODY
from benchmarks.common import DESTINATION, NAME, ROUNDS, Figures, against, scaled
from benchmarks.handled import Handled
from benchmarks.servers import azurite
from delayline import DelayedMessage, Endpoint, Event, Headers, Message, TransactionMode
from delayline.azure import AzureAccount, AzureDelayedTable, AzureStorageQueueTransport, DelayedTableDelivery
from delayline.azure.envelope import wrap
from delayline.azure.names import delays_name
from delayline.azure.rows import row_of, to_entity
from delayline.message import to_wire_time
from delayline.testing import Signals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

A_SECOND = 50
SECONDS = 20
BURST = 5000
ONE_BY_ONE = 300
PATIENCE = 600.0
#: Dispatches until it is killed, and says so after each batch.
DISPATCHER = """
import asyncio, logging, sys, time
from benchmarks.scenarios_azure import endpoint_at
class Printed(logging.Handler):
    def emit(self, record):
        if getattr(record, "event", None) == "delayed.dispatched":
            print(time.monotonic(), flush=True)
logger = logging.getLogger("delayline.delayed.batch")
logger.setLevel(logging.DEBUG)
logger.propagate = False
logger.addHandler(Printed())
async def main():
    async with endpoint_at(sys.argv[1], batch_size=50):
        await asyncio.Event().wait()
asyncio.run(main())
"""


def endpoint_at(url: str, batch_size: int = 500) -> Endpoint:
    account = AzureAccount(url)
    return Endpoint(
        NAME,
        transport=AzureStorageQueueTransport(account),
        delayed_delivery=DelayedTableDelivery(account, batch_size=batch_size),
        concurrency=16,
    )


@contextlib.asynccontextmanager
async def store_at(url: str) -> AsyncIterator[AzureDelayedTable]:
    await endpoint_at(url).setup()
    await AzureStorageQueueTransport(url).setup_infrastructure([DESTINATION])
    store = AzureDelayedTable(url)
    await store.initialize(NAME, TransactionMode.RECEIVE_ONLY)
    yield store
    await store.close()


async def azure_spread(folder: Path) -> Figures:
    """50 messages a second for 20 s, received by a handler, whose due times the table keeps in whole seconds."""
    number = A_SECOND * SECONDS
    with azurite() as server:
        url = server.new_account()
        endpoint = endpoint_at(url)
        handled = Handled(endpoint, number)
        async with store_at(url) as store:
            start = datetime.now(UTC) + timedelta(seconds=10)
            dues = [start + timedelta(seconds=n / A_SECOND) for n in range(number)]
            await store.store_many([delayed(n, due, NAME) for n, due in enumerate(dues)])
        async with endpoint:
            await handled.wait(PATIENCE)
    return handled.lateness()


async def azure_burst(folder: Path) -> Figures:
    """5 000 messages due at one instant, table to queue, beside a loop that moves them one by one."""
    number, rates = scaled(BURST), list[tuple[float, float]]()
    with azurite() as server:
        for _ in range(ROUNDS):
            before = await one_by_one(server.new_account(), ONE_BY_ONE)
            ours = await drained(server.new_account(), number)
            after = await one_by_one(server.new_account(), ONE_BY_ONE)
            rates.append((ours, (before + after) / 2))
    return against("one by one", rates)


async def azure_failover(folder: Path) -> Figures:
    """How long nobody dispatches after the process with the lease was killed, in the middle of a burst."""
    with azurite() as server:
        url = server.new_account()
        async with store_at(url) as store:
            await store.store_many([delayed(n, datetime.now(UTC), DESTINATION) for n in range(scaled(BURST))])
        both = [await dispatcher(url) for _ in range(2)]
        try:
            waits = [asyncio.create_task(one.stdout.readline()) for one in both if one.stdout is not None]
            [first], [second] = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            both[waits.index(first)].send_signal(signal.SIGKILL)
            killed = time.monotonic()
            return {"seconds": float(await asyncio.wait_for(second, PATIENCE)) - killed}
        finally:
            for one in both:
                with contextlib.suppress(ProcessLookupError):
                    one.kill()
                await one.wait()


async def drained(url: str, number: int) -> float:
    """Return messages a second that the poller moves."""
    async with store_at(url) as store:
        await store.store_many([delayed(n, datetime.now(UTC), DESTINATION) for n in range(number)])
    await asyncio.sleep(1)
    with Signals() as signals:
        started = time.perf_counter()
        async with endpoint_at(url):
            moved = 0
            while moved < number:
                await signals.wait_for(Event.REMOVED, signals.count(Event.REMOVED) + 1, timeout=PATIENCE)
                moved = sum(len(vars(record)["facts"]["messages"]) for record in signals.records(Event.REMOVED))
            return number / (time.perf_counter() - started)


async def one_by_one(url: str, number: int) -> float:
    """Return messages a second of a loop over the bare clients: read the next one, send it, delete it."""
    async with store_at(url):
        pass
    connection = url.partition(":")[2]
    now = datetime.now(UTC)
    async with (
        TableServiceClient.from_connection_string(connection) as tables,
        QueueServiceClient.from_connection_string(connection) as queues,
    ):
        table, queue = tables.get_table_client(delays_name(NAME)), queues.get_queue_client(DESTINATION)
        entities = [to_entity(row_of(delayed(n, now, DESTINATION))) for n in range(number)]
        for first in range(0, number, 100):
            await table.submit_transaction([("create", one) for one in entities[first : first + 100]])
        text = wrap(Message("m", {}, BODY))
        started = time.perf_counter()
        for _ in range(number):
            async for entity in table.query_entities("PartitionKey lt ':'", results_per_page=1):
                await queue.send_message(text, time_to_live=-1)
                await table.delete_entity(entity)
                break
        return number / (time.perf_counter() - started)


async def dispatcher(url: str) -> asyncio.subprocess.Process:
    command: Sequence[str] = (sys.executable, "-c", DISPATCHER, url)
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)


def delayed(number: int, due: datetime, destination: str) -> DelayedMessage:
    headers = {Headers.DELIVER_AT: to_wire_time(due)}
    return DelayedMessage(Message(f"m-{number:030d}", headers, BODY), destination, due)
