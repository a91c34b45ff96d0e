"""Sets of messages changed by jobs: claims, races, rates, outages, killed processes, two operators."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.eventually import eventually_async

from delayline import BackendUnavailable, DelayedMessage, Headers, Message, MessageFilter, TransactionMode
from delayline.actions import ActionRecord, JobState, OperatorAction, SetRequest
from delayline.clock import SystemClock
from delayline.set_jobs import JobInterrupted, SetJob
from delayline.spi import TransportOperation
from delayline.sql import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from delayline.actions import ActionLog, MessageSet

SOON = datetime.now(UTC) + timedelta(hours=1)
CLOCK = SystemClock()


@pytest.fixture
async def kept(url: str) -> AsyncIterator[SqlDelayedMessageStore]:
    """The open store of endpoint `shop`."""
    store = SqlDelayedMessageStore(url)
    await store.setup_infrastructure("shop")
    await store.initialize("shop", TransactionMode.RECEIVE_ONLY)
    yield store
    await store.close()


def delayed(
    number: int, destination: str = "billing", due: datetime = SOON, headers: dict[str, str] | None = None
) -> DelayedMessage:
    return DelayedMessage(Message(f"m-{number:05}", headers or {}, b"body"), destination, due)


async def fill(store: SqlDelayedMessageStore, messages: Sequence[DelayedMessage]) -> None:
    for first in range(0, len(messages), 500):
        await store.store_many(messages[first : first + 500])


async def fail(transport: SqlTransport, ids: Sequence[str], kind: str, queue: str = "billing") -> None:
    headers = {Headers.FAILED_QUEUE: queue, Headers.EXCEPTION_TYPE: kind, "Tenant": "acme"}
    for first in range(0, len(ids), 500):
        some = ids[first : first + 500]
        await transport.dispatch([TransportOperation(Message(each, headers, b"body"), "error") for each in some])


def pending_request(action: OperatorAction, *where: str, **more: Any) -> SetRequest:  # noqa: ANN401
    return SetRequest(action, MessageFilter.parse(where, datetime.now(UTC)), **more)


def failed_request(action: OperatorAction, *where: str, **more: Any) -> SetRequest:  # noqa: ANN401
    return pending_request(action, *where, queue="error", **more)


def set_of(part: SqlDelayedMessageStore | SqlTransport) -> tuple[MessageSet, ActionLog]:
    name = "shop" if isinstance(part, SqlDelayedMessageStore) else "error"
    messages = part.message_set(name)
    assert messages is not None
    return messages, part.action_log(name)


async def begun(
    part: SqlDelayedMessageStore | SqlTransport,
    request: SetRequest,
    *,
    rate: int | None = None,
    progress: Callable[[ActionRecord], None] | None = None,
) -> SetJob:
    messages, log = set_of(part)
    record = await log.begin(request, await messages.preview(request), actor="me", rate=rate)
    return SetJob(messages, log, record, CLOCK, progress=progress)


async def run(
    part: SqlDelayedMessageStore | SqlTransport,
    request: SetRequest,
    *,
    rate: int | None = None,
    progress: Callable[[ActionRecord], None] | None = None,
) -> ActionRecord:
    return await (await begun(part, request, rate=rate, progress=progress)).run()


async def waiting(store: SqlDelayedMessageStore) -> dict[str, datetime]:
    return {message.id: message.due for message in await store.pending(limit=100_000)}


async def in_queue(transport: SqlTransport, queue: str) -> list[str]:
    return [message.id for message in await transport.browse(queue, 100_000)]


# Pending messages


async def test_a_set_is_cancelled_by_each_condition(kept: SqlDelayedMessageStore) -> None:
    # Given messages that differ in what filters ask for
    kind = {Headers.ENCLOSED_MESSAGE_TYPES: "Shop.Reminder, Shop"}
    messages = [
        delayed(1, headers=kind),
        delayed(2, "shipping", headers=kind),
        delayed(3, headers={"Tenant": "acme"}),
        delayed(4, due=SOON + timedelta(days=2)),
        DelayedMessage(Message("other", {}, b""), "billing", SOON),
        DelayedMessage(Message.from_encoded("damaged", b"{", b""), "billing", SOON),
        DelayedMessage(Message("100%_sure\\", {}, b""), "billing", SOON),
        DelayedMessage(Message("M-00001", {}, b""), "billing", SOON),
    ]
    await fill(kept, messages)
    last = (SOON + timedelta(days=1)).isoformat()
    for where, gone in (
        ("type=Shop.Reminder,destination=ship*", {"m-00002"}),
        ("type=Shop.Reminder", {"m-00001"}),
        ("header=Tenant:acm", set()),
        ("header=Tenant:ac*", {"m-00003"}),
        (f"due=>={last}", {"m-00004"}),
        ("id-prefix=100%_sure", {"100%_sure\\"}),
        ("id-prefix=M-", {"M-00001"}),
        ("destination=bill", set()),
        ("destination=Bill*", set()),
        ("id=*-0000", set()),
        ("id=*AM*", set()),
        ("id=*am*", {"damaged"}),
        (f"destination=billing,due=..{last}", {"other"}),
    ):
        before = set(await waiting(kept))
        request = pending_request(OperatorAction.CANCEL, where)
        preview = await set_of(kept)[0].preview(request)
        record = await run(kept, request)
        # Then the preview and the job agree, and no other message is touched
        assert before - set(await waiting(kept)) == gone, where
        assert (preview.number, record.done, record.failed) == (len(gone), len(gone), 0), where
        assert set(preview.examples) == gone
    assert await waiting(kept) == {}


async def test_a_set_larger_than_a_page_is_changed_whole_and_once(kept: SqlDelayedMessageStore) -> None:
    # Given more messages than a transaction looks at
    await fill(kept, [delayed(number) for number in range(10_500)])
    by = timedelta(hours=3)
    # When they are moved by three hours
    record = await run(kept, pending_request(OperatorAction.RESCHEDULE, "destination=billing", by=by))
    # Then each was moved once
    assert (record.state, record.done, record.failed) == (JobState.DONE, 10_500, 0)
    assert set((await waiting(kept)).values()) == {SOON + by}


async def test_what_the_poller_has_is_tried_again_once_it_is_free(kept: SqlDelayedMessageStore) -> None:
    # Given messages of which a poller has fetched some
    now = datetime.now(UTC)
    await fill(kept, [delayed(number, due=now - timedelta(seconds=5)) for number in range(20)])
    fetched = await kept.fetch_due(now, 5, max_bytes=1 << 20)
    assert len(fetched) == 5
    # When all are cancelled
    held: list[int] = []
    job = asyncio.create_task(
        run(kept, pending_request(OperatorAction.CANCEL, ""), progress=lambda record: held.append(len(record.held)))
    )
    await eventually_async(lambda: 5 in held)
    assert not job.done()
    assert set(await waiting(kept)) == {message.id for message in fetched}
    # And the poller dispatches two, and gives back the others
    await kept.remove_many(fetched[:2])
    await kept.release_many(fetched[2:])
    record = await job
    # Then each message counts once: dispatched or cancelled
    assert (record.done, record.failed) == (18, 2)
    assert all("too late" in problem for problem in record.problems)
    assert await waiting(kept) == {}


async def test_messages_stored_after_the_preview_do_not_belong_to_the_set(kept: SqlDelayedMessageStore) -> None:
    await fill(kept, [delayed(1)])
    messages, log = set_of(kept)
    request = pending_request(OperatorAction.CANCEL, "destination=billing")
    preview = await messages.preview(request)
    await fill(kept, [delayed(2)])
    record = await log.begin(request, preview, actor="me")
    await SetJob(messages, log, record, CLOCK).run()
    assert set(await waiting(kept)) == {"m-00002"}


async def test_what_matches_no_longer_when_the_job_comes_to_it_is_left(kept: SqlDelayedMessageStore) -> None:
    # Given a set that was counted, and a message of it that was moved out of it since
    await fill(kept, [delayed(1), delayed(2)])
    messages, log = set_of(kept)
    end = (SOON + timedelta(minutes=1)).isoformat()
    request = pending_request(OperatorAction.CANCEL, f"due=..{end}")
    preview = await messages.preview(request)
    await kept.reschedule("m-00001", SOON + timedelta(days=1))
    # When the job runs
    record = await log.begin(request, preview, actor="me")
    record = await SetJob(messages, log, record, CLOCK).run()
    # Then
    assert (preview.number, record.done) == (2, 1)
    assert set(await waiting(kept)) == {"m-00001"}


async def test_operators_who_begin_at_the_same_moment_share_a_job(kept: SqlDelayedMessageStore, url: str) -> None:
    stores = [SqlDelayedMessageStore(url), SqlDelayedMessageStore(url)]
    logs = [store.action_log("shop") for store in stores]
    for store in stores:
        await store.initialize("shop", TransactionMode.RECEIVE_ONLY)
    for number in range(20):
        request = pending_request(OperatorAction.CANCEL, f"destination=queue-{number}")
        preview = await set_of(kept)[0].preview(request)
        begun_jobs = await asyncio.gather(*(log.begin(request, preview, actor="me") for log in 2 * logs))
        assert len({record.name for record in begun_jobs}) == 1
    for store in stores:
        await store.close()


async def test_two_operators_on_one_set_share_a_job(kept: SqlDelayedMessageStore, url: str) -> None:
    """Given the same relative move asked for twice at once, then each message is moved once."""
    await fill(kept, [delayed(number) for number in range(300)])
    second = SqlDelayedMessageStore(url)
    await second.initialize("shop", TransactionMode.RECEIVE_ONLY)
    by = timedelta(hours=1)
    request = pending_request(OperatorAction.RESCHEDULE, "destination=billing", by=by)
    first, other = await asyncio.gather(run(kept, request, rate=200), run(second, request, rate=200))
    await second.close()
    assert first.name == other.name
    assert (first.done, other.done) == (300, 300)
    assert set((await waiting(kept)).values()) == {SOON + by}
    # And asked for again it is another job
    assert (await run(kept, request)).name != first.name


async def test_a_job_can_be_stopped_from_elsewhere(kept: SqlDelayedMessageStore) -> None:
    await fill(kept, [delayed(number) for number in range(50)])
    _, log = set_of(kept)
    job = asyncio.create_task(run(kept, pending_request(OperatorAction.CANCEL, ""), rate=4))

    async def begun() -> ActionRecord | None:
        return next((record for record in await log.actions(5) if record.done), None)

    await eventually_async(begun)
    record = await begun()
    assert record is not None
    assert await log.stop(record.name)
    ended = await job
    assert ended.state is JobState.STOPPED
    left = len(await waiting(kept))
    assert (ended.done + left, ended.done < 50) == (50, True)
    assert not await log.stop(record.name)
    assert await log.take(record.name, "another") is None


JOB = """
import asyncio, sys
from datetime import UTC, datetime, timedelta
from tests.integration.test_sets import pending_request, run
from delayline import TransactionMode
from delayline.actions import OperatorAction
from delayline.sql import SqlDelayedMessageStore

async def main():
    store = SqlDelayedMessageStore(sys.argv[1])
    await store.initialize("shop", TransactionMode.RECEIVE_ONLY)
    request = pending_request(OperatorAction.RESCHEDULE, "destination=billing", by=timedelta(hours=1))
    await run(store, request, rate=400)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_job_of_a_killed_process_is_gone_on_with_exactly_where_it_was(
    kept: SqlDelayedMessageStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a job in another process, which is killed in the middle
    await fill(kept, [delayed(number) for number in range(2_000)])
    messages, log = set_of(kept)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", JOB, url], env=environment)  # noqa: ASYNC220 - returns at once

    async def progressed() -> bool:
        return any(record.done >= 300 for record in await log.actions(1))

    await eventually_async(progressed)
    process.send_signal(signal.SIGKILL)
    process.wait()
    [record] = await log.actions(1)
    assert (record.state, record.over) == (JobState.RUNNING, False)
    assert await log.take(record.name, "another") is None, "its process may live: it was seen a moment ago"
    # When it has not been seen for a while
    monkeypatch.setattr("delayline.sql.actions.INTERRUPTED_AFTER", 1)
    messages, log = set_of(kept)

    async def interrupted() -> bool:
        return (await log.actions(1))[0].state is JobState.INTERRUPTED

    await eventually_async(interrupted)
    # Then another process goes on, and each message was moved once
    ended = await SetJob(messages, log, record, CLOCK).run()
    assert (ended.state, ended.done, ended.failed) == (JobState.DONE, 2_000, 0)
    assert Counter((await waiting(kept)).values()) == {SOON + timedelta(hours=1): 2_000}


class LosesAnswers:
    """A set whose answers are lost, before or after what was asked for is done."""

    def __init__(self, messages: MessageSet, lost: dict[int, str]) -> None:
        self._messages = messages
        self._lost = lost
        self._asked = 0
        self.close = messages.close
        self.preview = messages.preview
        self.last = messages.last

    async def step(self, record: ActionRecord, owner: str, most: int, *, final: bool = False) -> ActionRecord | None:
        self._asked += 1
        when = self._lost.get(self._asked, self._lost.get(0))
        if when == "before":
            raise BackendUnavailable("the connection was lost")
        answer = await self._messages.step(record, owner, min(most, 10), final=final)
        if when == "after":
            raise BackendUnavailable("the answer was lost")
        return answer


async def test_a_lost_answer_changes_no_message_twice(kept: SqlDelayedMessageStore) -> None:
    await fill(kept, [delayed(number) for number in range(50)])
    messages, log = set_of(kept)
    request = pending_request(OperatorAction.RESCHEDULE, "", by=timedelta(hours=1))
    record = await log.begin(request, await messages.preview(request), actor="me")
    lossy = LosesAnswers(messages, {2: "before", 3: "after", 5: "after"})
    ended = await SetJob(lossy, log, record, CLOCK).run()
    assert (ended.state, ended.done) == (JobState.DONE, 50)
    assert Counter((await waiting(kept)).values()) == {SOON + timedelta(hours=1): 50}


async def test_a_job_whose_back_end_stays_away_is_interrupted_and_never_done(kept: SqlDelayedMessageStore) -> None:
    await fill(kept, [delayed(number) for number in range(50)])
    messages, log = set_of(kept)
    request = pending_request(OperatorAction.CANCEL, "")
    record = await log.begin(request, await messages.preview(request), actor="me")
    lost = LosesAnswers(messages, {1: "", 2: "after", 0: "before"})
    with pytest.raises(JobInterrupted, match=f"interrupted, 10 of 50 cancelled.*actions resume {record.name}"):
        await SetJob(lost, log, record, CLOCK, outage_limit=0.5).run()
    [kept_record] = await log.actions(1)
    assert not kept_record.over
    assert kept_record.done == 20, "the step whose answer was lost is recorded"
    assert len(await waiting(kept)) == 30


# Failed messages


async def test_a_group_behind_others_is_retried_and_each_message_once(queues: SqlTransport) -> None:
    # Given failures of one kind behind many of another, one for a queue that is gone, and damaged headers
    often = [f"often-{number}" for number in range(1_200)]
    rare = [f"rare-{number}" for number in range(300)]
    await fail(queues, often, "Often")
    await fail(queues, rare, "Rare")
    await fail(queues, ["lost"], "Rare", "gone")
    await queues.dispatch([TransportOperation(Message.from_encoded("damaged", b"{", b""), "error")])
    # When the rare ones are retried
    request = failed_request(OperatorAction.RETRY, "exception=Rare")
    preview = await set_of(queues)[0].preview(request)
    record = await run(queues, request)
    # Then
    assert (preview.number, record.done, record.failed) == (301, 300, 1)
    assert "queue 'gone' does not exist; it stays in error" in record.problems[0]
    assert sorted(await in_queue(queues, "billing")) == sorted(rare)
    assert await in_queue(queues, "error") == [*often, "lost", "damaged"]
    [message, *_] = await queues.browse("billing", 1)
    assert dict(message.headers) == {"Tenant": "acme"}


async def test_failed_messages_are_deleted_by_a_filter_or_all(queues: SqlTransport) -> None:
    await fail(queues, [f"a-{number}" for number in range(700)], "Often")
    await fail(queues, ["b-1"], "Often", "shipping")
    assert (await run(queues, failed_request(OperatorAction.PURGE, "destination=shipping"))).done == 1
    assert (
        await run(queues, failed_request(OperatorAction.PURGE, "id-prefix=a-1,header=Tenant"))
    ).done == 111 + 100 - 100
    record = await run(queues, failed_request(OperatorAction.PURGE, ""))
    assert record.failed == 0
    assert await queues.count("error") == 0


async def test_messages_that_fail_again_meanwhile_are_not_retried_again(queues: SqlTransport) -> None:
    await fail(queues, [f"a-{number}" for number in range(30)], "Often")

    async def fails_again() -> None:
        while True:
            for message in await queues.browse("billing", 100):
                if await queues.take("billing", message.id):
                    await fail(queues, [message.id], "Often")
            await asyncio.sleep(0.01)

    again = asyncio.create_task(fails_again())
    record = await run(queues, failed_request(OperatorAction.RETRY, ""), rate=40)
    again.cancel()
    assert (record.done, record.failed) == (30, 0)


async def test_two_operators_retry_a_group_once(queues: SqlTransport, url: str) -> None:
    await fail(queues, [f"a-{number}" for number in range(400)], "Often")
    second = SqlTransport(url)
    await second.start()
    request, other = (failed_request(OperatorAction.RETRY, where) for where in ("exception=Often", "id-prefix=a"))
    jobs = await asyncio.gather(begun(queues, request), begun(second, request), begun(second, other))
    records = await asyncio.gather(*(job.run() for job in jobs))
    await second.stop()
    assert records[0].name == records[1].name != records[2].name
    assert records[0].done + records[2].done == 400
    assert len(await in_queue(queues, "billing")) == 400
    assert await queues.count("error") == 0
