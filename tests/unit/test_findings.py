"""What users stumbled over once, and does not happen again."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.unit.conftest import START, delayed

import delayline
from delayline import (
    ConfigurationError,
    Endpoint,
    Headers,
    InvalidDueTime,
    MemoryDelayedMessageStore,
    MemoryTransport,
    Message,
    MessageContext,
    QueueNotFound,
    Recoverability,
    SqlDelayedMessageStore,
    SqlTransport,
    StoredDelivery,
    TransactionMode,
)
from delayline.errors import CorruptHeaders
from delayline.events import Event
from delayline.testing import Signals

if TYPE_CHECKING:
    from delayline.testing.clock import ManualClock


def test_an_endpoint_cannot_be_its_own_error_queue() -> None:
    with pytest.raises(ConfigurationError, match=r"error_queue='sales' is the endpoint's own queue: name another"):
        Endpoint("sales", transport=MemoryTransport(), error_queue="sales")


def test_without_delayed_delivery_nothing_waits() -> None:
    with pytest.raises(ConfigurationError, match=r"endpoint 'sales' has no delayed delivery"):
        _ = Endpoint("sales", transport=MemoryTransport()).delayed


def test_an_object_that_is_not_a_store_is_refused_with_the_missing_method() -> None:
    with pytest.raises(ConfigurationError, match=r"not a delayed message store: it has no method 'initialize'"):
        StoredDelivery(None)  # type: ignore[arg-type]


def test_sqlite_without_file_locks_is_refused_in_one_sentence() -> None:
    """Windows has no module fcntl."""
    code = (
        "import sys; sys.modules['fcntl'] = None\n"
        "import delayline\n"
        "try: delayline.SqlTransport('sqlite:///a.db')\n"
        "except delayline.ConfigurationError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Windows" in done.stdout
    assert "WSL" in done.stdout


@pytest.mark.parametrize(
    "url",
    ["postgresql://me:%ff@db/shop", "postgresql://me@db/sh\udcffop", "sqlite:///a%00b.db", "sqlite:///a\0b.db"],
)
def test_a_url_that_is_not_utf_8_or_has_nul_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read") as refused:
        SqlTransport(url)
    assert "%ff" not in str(refused.value), "it may be part of the password"


async def test_names_that_sqlite_reserves_are_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    for name in ("sqlite_shop", "SQLite_shop"):
        endpoint = Endpoint(
            name, transport=SqlTransport(url), delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url))
        )
        with pytest.raises(ConfigurationError, match="reserves names that begin with 'sqlite_'"):
            await endpoint.start()


@pytest.mark.parametrize("kind", [SqlTransport, SqlDelayedMessageStore])
def test_sqlite_has_no_schemas(kind: type[SqlTransport | SqlDelayedMessageStore], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="schema='my': SQLite has no schemas"):
        kind(f"sqlite:///{tmp_path}/a.db", schema="my")


#: Every table that delayline declares, in whichever module.
DECLARED = sorted(
    name
    for module in Path(delayline.__file__).parent.rglob("*.py")
    for name in re.findall(r'\bTable\(\s*f?"([^"]+)"', module.read_text(encoding="utf-8"))
)


def test_delaylines_own_tables_are_named_with_a_prefix() -> None:
    assert len(DECLARED) > 10
    assert [name for name in DECLARED if not name.startswith("delayline_")] == []


@pytest.mark.parametrize("name", ["", *DECLARED, "Delayline_Journal", "delayline_spark_runs", "delayline_migrations"])
def test_a_store_cannot_take_a_table_of_delaylines_own(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="choose another"):
        SqlDelayedMessageStore(f"sqlite:///{tmp_path}/a.db", table_name=name)


def test_a_poll_interval_is_a_timedelta(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="poll_interval must be a timedelta longer than zero, not 1"):
        SqlTransport(f"sqlite:///{tmp_path}/a.db", poll_interval=1)  # type: ignore[arg-type]


def test_unrecoverable_is_a_tuple_of_classes() -> None:
    with pytest.raises(ConfigurationError, match="unrecoverable must be a tuple of exception classes"):
        Recoverability(unrecoverable=ValueError)  # type: ignore[arg-type]


async def test_an_immediate_send_to_a_missing_queue_is_reported() -> None:
    async with Endpoint("sales", transport=MemoryTransport()) as endpoint:
        with pytest.raises(QueueNotFound, match="queue 'nowhere' does not exist"):
            await endpoint.send("nowhere", b"")


async def test_bad_due_times_and_buckets_are_refused_by_every_store(tmp_path: Path) -> None:
    sql = SqlDelayedMessageStore(f"sqlite:///{tmp_path}/a.db")
    await sql.setup_infrastructure("sales")
    await sql.initialize("sales", TransactionMode.RECEIVE_ONLY)
    for store in (sql, MemoryDelayedMessageStore()):
        await store.store(delayed("m"))
        with pytest.raises(InvalidDueTime, match="no time zone"):
            await store.reschedule("m", datetime(2030, 1, 1))  # noqa: DTZ001 - what the test is about
        for bucket in (timedelta(0), timedelta(seconds=-1)):
            with pytest.raises(ConfigurationError, match="bucket must be a timedelta longer than zero"):
                await store.count_by_due(bucket)
        assert [message.due for message in await store.pending()] == [START]
    await sql.close()


async def test_a_handler_can_stop_its_endpoint() -> None:
    endpoint = Endpoint("sales", transport=MemoryTransport())
    returned = asyncio.Event()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        del message, context
        await endpoint.stop()
        returned.set()

    await endpoint.start()
    await endpoint.send("sales", b"")
    await asyncio.wait_for(endpoint.wait_stopped(), 10)
    assert returned.is_set()


async def test_a_handlers_corrupt_headers_error_is_a_failure_like_any_other(clock: ManualClock) -> None:
    transport, attempts = MemoryTransport(), list[int]()
    endpoint = Endpoint("sales", transport=transport, clock=clock, recoverability=Recoverability(immediate_retries=1))

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        del message
        attempts.append(context.attempt)
        raise CorruptHeaders("of some other message")

    with Signals() as signals:
        async with endpoint:
            await endpoint.send("sales", b"")
            await signals.wait_for(Event.MOVED_TO_ERROR)
    assert attempts == [1, 2]
    (failed,) = await transport.browse("error", 10)
    assert failed.headers[Headers.EXCEPTION_MESSAGE] == "of some other message"


async def test_after_delayed_retries_the_error_queue_has_the_original_id(clock: ManualClock) -> None:
    transport = MemoryTransport()
    endpoint = Endpoint(
        "sales",
        transport=transport,
        delayed_delivery=StoredDelivery(MemoryDelayedMessageStore()),
        clock=clock,
        recoverability=Recoverability(immediate_retries=0, delayed_retries=1),
    )

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        raise ValueError(f"{message.id} {context.attempt}")

    with Signals() as signals:
        async with endpoint:
            await endpoint.send("sales", b"", message_id="order-1")
            await signals.wait_for(Event.RETRIED_LATER)
            await clock.advance(11)
            await signals.wait_for(Event.MOVED_TO_ERROR)
    assert [message.id for message in await transport.browse("error", 10)] == ["order-1"]


async def test_a_cancelled_send_is_not_delivered_twice(tmp_path: Path) -> None:
    # Given a send that waits for a lock of another transaction
    url = f"sqlite:///{tmp_path}/a.db"
    endpoint = Endpoint(
        "sales", transport=SqlTransport(url), delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url))
    )
    seen = list[str]()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        del context
        seen.append(message.id)

    with Signals() as signals:
        async with endpoint:
            await signals.wait_for(Event.SLEEPS)
            other = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            send = asyncio.create_task(endpoint.send("sales", b"", message_id="X", delay=timedelta(milliseconds=50)))
            await asyncio.sleep(0)
            # When it is cancelled, and the lock is released
            send.cancel()
            other.close()
            await asyncio.wait([send])
            await endpoint.send("sales", b"", message_id="last", delay=timedelta(milliseconds=100))
            await signals.wait_for(Event.HANDLED, where=lambda record: vars(record)["facts"]["message"].id == "last")
    # Then it has arrived once at most
    assert seen.count("X") <= 1


async def test_a_cancelled_immediate_send_goes_on_and_its_failure_is_logged(tmp_path: Path) -> None:
    # Given an endpoint that has sent before, and sends that wait for a lock of another transaction
    transport = SqlTransport(f"sqlite:///{tmp_path}/a.db")
    with Signals() as signals:
        async with Endpoint("sales", transport=transport, send_only=True) as endpoint:
            await endpoint.send("error", b"before")
            other = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            sends = [asyncio.create_task(endpoint.send(queue, b"", message_id=queue)) for queue in ("error", "nowhere")]
            for _ in range(3):
                await asyncio.sleep(0)
            # When they are cancelled, they return at once
            for one in sends:
                one.cancel()
            done, _ = await asyncio.wait(sends, timeout=20)
            assert all(one.cancelled() for one in done)
            assert len(done) == 2
            other.close()
        # Then the one has been sent, and the other's failure is in the log
        [found] = await signals.wait_for(Event.SEND_ABANDONED)
        assert "nowhere" in found.getMessage()
    await transport.start()
    assert [message.id for message in await transport.browse("error", 10)][1:] == ["error"]
    await transport.stop()


async def test_a_write_inside_ones_own_transaction_is_an_error_and_does_not_hang(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    store = SqlDelayedMessageStore(url)
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    async with store.transaction() as transaction:
        await store.store(delayed("a"), transaction)
        with pytest.raises(RuntimeError, match="this task is in a transaction on the same database"):
            await store.store(delayed("b"))
    assert [message.id for message in await store.pending()] == ["a"]
    await store.close()


async def test_a_cancelled_receive_gives_its_messages_back(tmp_path: Path) -> None:
    transport = SqlTransport(f"sqlite:///{tmp_path}/a.db")
    await transport.setup_infrastructure(["sales"])
    async with Endpoint("sales", transport=transport) as endpoint:
        for number in range(3):
            await endpoint.send("sales", str(number))
        receiver = await transport.receiver("sales")
        for turns in range(6):
            receiving = asyncio.ensure_future(receiver.receive(3))
            for _ in range(turns):
                await asyncio.sleep(0)
            receiving.cancel()
            await asyncio.wait([receiving])
            if not receiving.cancelled():
                break
        else:
            receiving = asyncio.ensure_future(receiver.receive(3))
        received = await receiving
        assert [message.message.text for message in received] == ["0", "1", "2"]
        for message in received:
            await receiver.release(message)


async def test_an_overdue_send_to_a_missing_queue_is_reported(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    delivery = StoredDelivery(SqlDelayedMessageStore(url))
    async with Endpoint("sales", transport=SqlTransport(url), delayed_delivery=delivery) as endpoint:
        with pytest.raises(QueueNotFound):
            await endpoint.send("nowhere", b"", deliver_at=datetime(2020, 1, 1, tzinfo=UTC))


AT_EXIT = """
import atexit
from delayline import Endpoint, SqlDelayedMessageStore, SqlTransport, StoredDelivery, SyncEndpoint
url = "sqlite:///{path}"
sync = SyncEndpoint(Endpoint("web", transport=SqlTransport(url),
    delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url)), send_only=True))
sync.start()
atexit.register(sync.stop)
"""


def test_a_sync_endpoint_can_be_stopped_at_exit(tmp_path: Path) -> None:
    script = AT_EXIT.format(path=tmp_path / "web.db")
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
