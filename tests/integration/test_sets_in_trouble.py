"""Jobs on sets of messages: servers and processes die, names are hostile, operators are in each other's way."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.conftest import running
from tests.eventually import eventually_async
from tests.integration.test_sets import (
    CLOCK,
    SOON,
    delayed,
    failed_request,
    fill,
    in_queue,
    kept,
    pending_request,
    run,
    set_of,
    waiting,
)
from tests.servers.mariadb import MariadbServer
from tests.servers.postgresql import PostgresqlServer

from delayline import (
    DelayedMessage,
    Headers,
    Message,
    MessageFilter,
    RabbitMQTransport,
    SqlDelayedMessageStore,
    SqlTransport,
    TransactionMode,
)
from delayline.actions import ActionRecord, JobState, OperatorAction, SetRequest
from delayline.clock import SystemClock
from delayline.filters import literal
from delayline.set_jobs import MemoryActionLog, failed_jobs, pending_jobs
from delayline.spi import TransportOperation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from delayline.rabbitmq.front import ManagedAsSent

__all__ = ["kept"]
HOUR = timedelta(hours=1)
HOSTILE = (
    "'; DROP TABLE delayline_messages; --",
    'a"b`c]d',
    "100%_sure",
    "back\\slash\\",
    "st*r",
    "comma,equals=x",
    "<script>alert(1)</script>",
    "snow\u2603man \U0001f600",
    "{0} %s %(name)s ${x}",
    "..",
    " leading and trailing ",
)


async def test_hostile_names_choose_themselves_alone(kept: SqlDelayedMessageStore) -> None:
    # Given messages whose ids, destinations, types and headers are hostile
    messages = []
    for number, name in enumerate(HOSTILE):
        headers = {Headers.ENCLOSED_MESSAGE_TYPES: f"T{number}", name.strip(): name}
        messages.append(DelayedMessage(Message(name, headers, b""), name, SOON))
    await fill(kept, messages)
    for name in HOSTILE:
        for wanted in (
            MessageFilter(message_id=literal(name)),
            MessageFilter(destination=literal(name)),
            MessageFilter(header=name.strip(), header_value=literal(name)),
            MessageFilter(message_id=f"{literal(name[:4])}*", destination=f"*{literal(name[1:])}"),
        ):
            # When one is asked for, then that one is counted, and its record is read back as it was
            request = SetRequest(OperatorAction.CANCEL, wanted)
            preview = await set_of(kept)[0].preview(request)
            assert (preview.number, list(preview.examples)) == (1, [name])
            assert SetRequest.decoded(request.encoded()) == request
        record = await run(kept, SetRequest(OperatorAction.CANCEL, MessageFilter(destination=literal(name))))
        assert (record.done, record.failed) == (1, 0)
        kept_record = await set_of(kept)[1].action(record.name)
        assert kept_record is not None
        assert kept_record.what == f"pending messages with {MessageFilter(destination=literal(name))}"
    assert await waiting(kept) == {}


async def test_hostile_names_of_failed_messages(queues: SqlTransport) -> None:
    for name in HOSTILE:
        headers = {Headers.FAILED_QUEUE: name, Headers.EXCEPTION_TYPE: name}
        await queues.dispatch([TransportOperation(Message(name, headers, b""), "error")])
    request = failed_request(OperatorAction.RETRY)
    record = await run(queues, request)
    assert (record.done, record.failed) == (0, len(HOSTILE))
    assert all("does not exist" in problem for problem in record.problems)
    for name in HOSTILE:
        wanted = MessageFilter(destination=literal(name), message_id=literal(name))
        record = await run(queues, SetRequest(OperatorAction.PURGE, wanted, queue="error"))
        assert record.done == 1
    assert await in_queue(queues, "error") == []


async def test_a_set_that_changes_while_its_job_runs(kept: SqlDelayedMessageStore) -> None:
    """Given a slow job, then what leaves the set meanwhile is left, and what comes later does not belong to it."""
    await fill(kept, [delayed(number) for number in range(60)])
    begun = asyncio.Event()

    def progressed(record: ActionRecord) -> None:
        if record.done:
            begun.set()

    request = pending_request(OperatorAction.CANCEL, "destination=billing", f"due=..{(SOON + HOUR).isoformat()}")
    job = asyncio.create_task(run(kept, request, rate=8, progress=progressed))
    await begun.wait()
    assert await kept.reschedule("m-00059", SOON + 2 * HOUR)
    await kept.cancel("m-00058")
    await fill(kept, [delayed(100)])
    log = set_of(kept)[1]
    [record] = await log.actions(1)
    # When it is stopped, and asked for again at full speed, while another one runs
    assert await log.stop(record.name)
    stopped = await job
    await fill(kept, [delayed(101)])
    done = await run(kept, request)
    assert stopped.state is JobState.STOPPED
    assert stopped.done + done.done == 58 + 2
    assert set(await waiting(kept)) == {"m-00059"}


async def test_two_operators_want_different_things_of_a_group(kept: SqlDelayedMessageStore, url: str) -> None:
    """Given a cancel and a move of the same messages at once, then the cancel has each, and none is left or lost."""
    await fill(kept, [delayed(number) for number in range(400)])
    second = SqlDelayedMessageStore(url)
    await second.initialize("shop", TransactionMode.RECEIVE_ONLY)
    cancel = pending_request(OperatorAction.CANCEL, "destination=billing")
    move = pending_request(OperatorAction.RESCHEDULE, "destination=billing", by=HOUR)
    cancelled, moved = await asyncio.gather(run(kept, cancel, rate=2_000), run(second, move, rate=2_000))
    await second.close()
    assert (cancelled.done, cancelled.failed) == (400, 0)
    assert moved.done <= 400
    assert moved.state is JobState.DONE
    assert await waiting(kept) == {}


@pytest.fixture(params=["PostgreSQL", "MariaDB"])
def own_server(request: pytest.FixtureRequest) -> Iterator[PostgresqlServer | MariadbServer]:
    if request.param == "PostgreSQL":
        with running(PostgresqlServer) as postgresql:
            yield postgresql
    else:
        with running(MariadbServer) as mariadb:
            yield mariadb


@pytest.mark.slow
@pytest.mark.parametrize("action", [OperatorAction.RESCHEDULE, OperatorAction.RETRY])
async def test_a_job_goes_on_when_its_database_is_killed_and_comes_back(
    own_server: PostgresqlServer | MariadbServer, action: OperatorAction
) -> None:
    # Given a job in the middle of its messages
    url = own_server.new_database()
    store, transport = SqlDelayedMessageStore(url), SqlTransport(url)
    await store.setup_infrastructure("shop")
    await store.initialize("shop", TransactionMode.RECEIVE_ONLY)
    await transport.start()
    await transport.setup_infrastructure(["billing", "error"])
    part: SqlDelayedMessageStore | SqlTransport
    if action is OperatorAction.RESCHEDULE:
        await fill(store, [delayed(number) for number in range(3_000)])
        part, request = store, pending_request(action, "destination=billing", by=HOUR)
    else:
        for first in range(0, 3_000, 500):
            headers = {Headers.FAILED_QUEUE: "billing"}
            some = [Message(f"m-{number:05}", headers, b"") for number in range(first, first + 500)]
            await transport.dispatch([TransportOperation(each, "error") for each in some])
        part, request = transport, failed_request(action)
    seen: list[int] = []
    job = asyncio.create_task(run(part, request, rate=1_000, progress=lambda record: seen.append(record.done)))
    await eventually_async(lambda: bool(seen) and seen[-1] >= 500)
    # When its server is killed, and starts again
    own_server.kill()
    assert seen[-1] < 3_000
    assert not job.done()
    own_server.start()
    record = await job
    # Then it has gone on, and each message was changed once
    assert (record.state, record.done, record.failed) == (JobState.DONE, 3_000, 0)
    if action is OperatorAction.RESCHEDULE:
        assert Counter((await waiting(store)).values()) == {SOON + HOUR: 3_000}
    else:
        assert sorted(await in_queue(transport, "billing")) == [f"m-{number:05}" for number in range(3_000)]
        assert await transport.count("error") == 0
    await transport.stop()
    await store.close()


# Beside RabbitMQ


@pytest.fixture
async def broker(rabbitmq_url: str) -> AsyncIterator[RabbitMQTransport]:
    """The started transport, with queues `billing` and `error`."""
    transport = RabbitMQTransport(rabbitmq_url)
    await transport.start()
    await transport.setup_infrastructure(["billing", "error"])
    yield transport
    await transport.stop()


RETRY = """
import asyncio, sys
from delayline import MessageFilter, RabbitMQTransport, SqlDelayedMessageStore, TransactionMode
from delayline.actions import OperatorAction, SetRequest
from delayline.clock import SystemClock
from delayline.set_jobs import failed_jobs

async def main():
    store, transport = SqlDelayedMessageStore(sys.argv[1]), RabbitMQTransport(sys.argv[2])
    await store.initialize("shop", TransactionMode.RECEIVE_ONLY)
    await transport.start()
    jobs = failed_jobs(transport, "error", SystemClock(), beside=store)
    request = SetRequest(OperatorAction.RETRY, MessageFilter(exception="Often"), queue="error")
    await jobs.change(request, rate=100, actor="me", progress=None)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_killed_retry_in_rabbitmq_is_recorded_in_the_store_and_gone_on_with(
    broker: RabbitMQTransport, rabbitmq_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given failed messages in RabbitMQ, and a store in SQLite
    database = f"sqlite:///{tmp_path}/shop.db"
    store = SqlDelayedMessageStore(database)
    await store.setup_infrastructure("shop")
    await store.initialize("shop", TransactionMode.RECEIVE_ONLY)
    ids = [f"f-{number:03}" for number in range(400)]
    headers = {Headers.FAILED_QUEUE: "billing", Headers.EXCEPTION_TYPE: "Often"}
    await broker.dispatch([TransportOperation(Message(each, headers, b""), "error") for each in ids])
    await broker.dispatch([TransportOperation(Message("other", {}, b""), "error")])
    # When the process that retries them is killed in the middle
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", RETRY, database, rabbitmq_url]
    process = subprocess.Popen(command, env=environment)  # noqa: ASYNC220 - returns at once
    jobs = failed_jobs(broker, "error", SystemClock(), beside=store)
    assert jobs.is_recorded

    async def progressed() -> bool:
        return any(record.done >= 50 for record in await jobs.list(1))

    await eventually_async(progressed)
    process.send_signal(signal.SIGKILL)
    process.wait()
    monkeypatch.setattr("delayline.sql.actions.INTERRUPTED_AFTER", 1)
    jobs = failed_jobs(broker, "error", SystemClock(), beside=store)

    async def interrupted() -> bool:
        return (await jobs.list(1))[0].state is JobState.INTERRUPTED

    await eventually_async(interrupted)
    [record] = await jobs.list(1)
    # Then another process goes on by its name, none is lost, and none but the last is sent twice
    ended = await jobs.resume(record.name)
    arrived = Counter(message.id for message in await broker.browse("billing", 1_000))
    assert (ended.state, ended.failed) == (JobState.DONE, 0)
    assert sorted(arrived) == ids
    assert sum(arrived.values()) <= len(ids) + 1
    assert [message.id for message in await broker.browse("error", 1_000)] == ["other"]
    await store.close()


async def test_retries_in_rabbitmq_without_a_database_are_not_recorded(broker: RabbitMQTransport) -> None:
    jobs = failed_jobs(broker, "error", CLOCK)
    assert not jobs.is_recorded
    assert isinstance(jobs.log, MemoryActionLog)
    headers = {Headers.FAILED_QUEUE: "billing"}
    await broker.dispatch([TransportOperation(Message(f"f-{number}", headers, b""), "error") for number in range(3)])
    request = SetRequest(OperatorAction.RETRY, MessageFilter(message_id="f-*"), queue="error")
    record = await jobs.change(request, rate=None, actor=None, progress=None)
    assert (record.state, record.done) == (JobState.DONE, 3)
    assert await broker.count("billing") == 3


async def test_pending_messages_in_front_of_rabbitmq_are_chosen_as_they_were_sent(tmp_path: Path) -> None:
    """Given messages that go to the delay levels later, then filters mean them as sent, and jobs are recorded."""
    from delayline.rabbitmq.front import managed_as_sent, parked

    store = SqlDelayedMessageStore(f"sqlite:///{tmp_path}/front.db")
    await store.setup_infrastructure("shop")
    await store.initialize("shop", TransactionMode.RECEIVE_ONLY)
    far = SOON + timedelta(days=4_000)
    for number in range(3):
        operation = TransportOperation(Message(f"far-{number}", {}, b""), "billing")
        await store.store(DelayedMessage(operation.message, parked(operation, far).destination, SOON))
    await store.store(delayed(1, "shipping"))
    jobs = pending_jobs(managed_as_sent(store), "shop", CLOCK)
    assert jobs.is_recorded
    request = pending_request(OperatorAction.RESCHEDULE, "destination=billing", by=HOUR)
    record = await jobs.change(request, rate=None, actor="me", progress=None)
    assert (record.state, record.done, record.failed) == (JobState.DONE, 3, 0)
    managed: ManagedAsSent = managed_as_sent(store)  # type: ignore[assignment] # the store can be managed
    dues = {message.id: message.due for message in await managed.pending()}
    assert dues == {"m-00001": SOON, **{f"far-{number}": far + HOUR for number in range(3)}}
    assert (await jobs.list(1))[0].result == "3 rescheduled"
    await store.close()
