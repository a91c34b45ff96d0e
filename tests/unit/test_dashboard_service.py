"""The data side of the dashboard, over memory and SQLite."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, cast

import pytest
from tests.eventually import eventually_async

from delayline import ConfigurationError, DelayedMessage, Endpoint, Headers, Message, MessageFilter, StoredDelivery
from delayline.actions import ActionRecord, JobState, OperatorAction
from delayline.dashboard.contents import body_of
from delayline.dashboard.model import PendingPage, Unavailable
from delayline.dashboard.service import EndpointService
from delayline.error_queue import managed_queues
from delayline.errors import BackendUnavailable
from delayline.failure_groups import group_key, place_of
from delayline.failures import failure_headers
from delayline.memory import MemoryDelayedMessageStore, MemoryTransport
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.testing import Fault, FaultyStore, ManualClock
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NOW = datetime.now(UTC).replace(microsecond=0)
HOUR = timedelta(hours=1)
TYPE = "Shop.OrderPlaced, Shop, Version=1.0"


@pytest.fixture(params=["memory", "sqlite"])
async def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Endpoint]:
    """Provide a started endpoint that dispatches nothing by itself."""
    url = f"sqlite:///{tmp_path / 'delayline.db'}"
    sql = request.param == "sqlite"
    transport = SqlTransport(url) if sql else MemoryTransport()
    store = SqlDelayedMessageStore(url, journal=True) if sql else MemoryDelayedMessageStore()
    one = Endpoint("sales", transport=transport, delayed_delivery=StoredDelivery(store, polling=False), send_only=False)
    await transport.setup_infrastructure(["sales", "billing", "error"])
    async with one:
        yield one


@pytest.fixture
async def service(endpoint: Endpoint) -> AsyncIterator[EndpointService]:
    async with EndpointService(endpoint) as one:
        yield one


def store_of(endpoint: Endpoint) -> SqlDelayedMessageStore:
    delivery = endpoint.delayed_delivery
    assert isinstance(delivery, StoredDelivery)
    return cast("SqlDelayedMessageStore", delivery.store)


async def put(endpoint: Endpoint, number: int, *, destination: str = "billing", body: bytes = b"{}") -> None:
    """Store messages m0, m1 ... due at the next hours."""
    await store_of(endpoint).store_many(
        [
            DelayedMessage(
                Message(f"m{one}", {Headers.ENCLOSED_MESSAGE_TYPES: TYPE, "Customer": f"c{one}"}, body),
                destination,
                NOW + (one + 1) * HOUR,
            )
            for one in range(number)
        ]
    )


def raised(error: Exception) -> Exception:
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


async def fail(endpoint: Endpoint, message_id: str, error: Exception, *, queue: str = "billing") -> None:
    """Put a failed message into the error queue."""
    headers = failure_headers(raised(error), queue, "billing", NOW) | {Headers.ENCLOSED_MESSAGE_TYPES: TYPE}
    message = Message(message_id, headers, b'{"order": 1}')
    await endpoint.transport.dispatch([TransportOperation(message, "error")])


async def ids_of(page: PendingPage | Unavailable) -> list[str]:
    assert isinstance(page, PendingPage)
    return [row.id for row in page.rows]


async def test_now_counts_due_messages_and_reports_missing_parts(endpoint: Endpoint, service: EndpointService) -> None:
    # Given an overdue message, and three of the next hours
    await put(endpoint, 3)
    overdue = DelayedMessage(Message("late", {}, b""), "billing", NOW - HOUR)
    await store_of(endpoint).store(overdue)
    # When the page is asked for
    now = await service.overview.now()
    # Then it has the counts, exactly
    assert not isinstance(now.due, Unavailable)
    counts = (now.due.overdue, now.due.next_minute, now.due.next_hour, now.due.next_day, now.due.later)
    assert now.due.overdue.count == 1
    assert sum(one.count for one in counts) == 4
    assert all(one.exact for one in counts)
    assert now.due.earliest == NOW - HOUR
    # And says why it has no rates; there are no levels
    assert isinstance(now.throughput, Unavailable)
    assert "minute rows" in now.throughput.reason
    assert now.levels is None
    assert now.errors == 0
    assert not isinstance(now.queues, Unavailable)
    assert {"sales", "error"} <= {one.name for one in now.queues}


async def test_a_forecast_has_bars_and_destinations(endpoint: Endpoint, service: EndpointService) -> None:
    await put(endpoint, 5)
    found = await service.overview.forecast("day")
    assert not isinstance(found, Unavailable)
    assert sum(bar.count for bar in found.bars) == 5
    assert found.destinations == ["billing"]
    assert isinstance(found.drain_rate, Unavailable)
    with pytest.raises(ConfigurationError, match="use one of all, hour, day"):
        await service.overview.forecast("century")


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (MessageFilter(), ["m0", "m1", "m2", "m3"]),
        (MessageFilter(message_id="m2"), ["m2"]),
        (MessageFilter(message_id="nothing"), []),
        (MessageFilter(message_id="m*", destination="*ling"), ["m0", "m1", "m2", "m3"]),
        (MessageFilter(message_id="*2"), ["m2"]),
        (MessageFilter(message_id="m2", destination="sales"), []),
        (MessageFilter(destination="billing", due_from=NOW + 2 * HOUR, due_before=NOW + 4 * HOUR), ["m1", "m2"]),
        (MessageFilter(message_type="*OrderPlaced*"), ["m0", "m1", "m2", "m3"]),
        (MessageFilter(message_type="*OrderCancelled*"), []),
        (MessageFilter(header="Customer", header_value="*c3*"), ["m3"]),
        (MessageFilter(header="Nothing"), []),
        (MessageFilter(header_value="*c1*"), ["m1"]),
    ],
)
async def test_pending_messages_are_found(
    endpoint: Endpoint, service: EndpointService, query: MessageFilter, expected: list[str]
) -> None:
    await put(endpoint, 4)
    page = await service.search.page(query)
    assert await ids_of(page) == expected
    assert isinstance(page, PendingPage)
    assert (page.complete, page.cut, page.total) == (True, False, None)


async def test_pages_go_on_where_the_last_one_ended(endpoint: Endpoint, service: EndpointService) -> None:
    # Given messages, many of them due at the same time
    await put(endpoint, 3)
    same = [DelayedMessage(Message(f"s{one}", {}, b""), "billing", NOW + 2 * HOUR) for one in range(6)]
    await store_of(endpoint).store_many(same)
    # When they are read in pages of two
    found: list[str] = []
    after, offset = None, 0
    for _ in range(6):
        page = await service.search.page(limit=2, after=after, offset=offset)
        assert isinstance(page, PendingPage)
        found += [row.id for row in page.rows]
        if page.complete:
            break
        assert page.next_offset is not None
        after, offset = page.next_after, page.next_offset
    # Then each is on one page
    assert sorted(found) == sorted(["m0", "m1", "m2", *(f"s{one}" for one in range(6))])
    assert found[0] == "m0"


@pytest.fixture
async def impatient(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EndpointService]:
    """Provide a service whose searches end after the first three messages."""
    monkeypatch.setattr("delayline.dashboard.search.READ_AT_ONCE", 3)
    async with EndpointService(endpoint, search_time=0) as one:
        yield one


async def test_a_search_ends_with_its_time_and_goes_on_from_there(
    endpoint: Endpoint, impatient: EndpointService
) -> None:
    await put(endpoint, 7)
    query = MessageFilter(header_value="*c5*", due_before=NOW + 7 * HOUR)
    page = await impatient.search.page(query, limit=3)
    assert isinstance(page, PendingPage)
    assert (list(page.rows), page.looked_at, page.complete, page.cut) == ([], 3, False, True)
    assert page.next_after == NOW + 3 * HOUR
    assert page.total is not None
    assert (page.total.count, page.total.exact) == (6, True)
    # And going on finds it
    rest = await impatient.search.page(query, limit=3, after=page.next_after, offset=page.next_offset or 0)
    assert isinstance(rest, PendingPage)
    assert [row.id for row in rest.rows] == ["m5"]
    assert rest.total is not None
    assert rest.total.count == 3


async def test_a_full_page_does_not_count_as_cut(endpoint: Endpoint, impatient: EndpointService) -> None:
    await put(endpoint, 7)
    page = await impatient.search.page(MessageFilter(message_type="*Order*"), limit=3)
    assert isinstance(page, PendingPage)
    assert (len(page.rows), page.complete, page.cut, page.total) == (3, False, False, None)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (MessageFilter(), (7, True)),
        (MessageFilter(due_from=NOW + 2 * HOUR, due_before=NOW + 7 * HOUR), (5, True)),
        (MessageFilter(message_id="m5"), (1, True)),
        (MessageFilter(destination="billing"), (7, False)),
        (MessageFilter(destination="billing", due_from=NOW + 2 * HOUR, due_before=NOW + 7 * HOUR), (5, False)),
        (MessageFilter(destination="nowhere"), (0, False)),
        (MessageFilter(destination="bill*"), (7, False)),
        (MessageFilter(message_id="m*"), (7, False)),
        (MessageFilter(destination="billing", due_before=NOW + 3 * HOUR), (2, True)),
        (MessageFilter(message_type="*OrderPlaced*"), (7, False)),
        (MessageFilter(message_type="*OrderPlaced*", due_from=NOW + 2 * HOUR), (6, False)),
        (MessageFilter(header_value="*c1*"), (2, False)),  # one of three looked at, of seven
        (MessageFilter(header="Nothing"), (0, False)),
    ],
)
async def test_a_preview_is_an_estimate_when_its_time_ends(
    endpoint: Endpoint, impatient: EndpointService, query: MessageFilter, expected: tuple[int, bool]
) -> None:
    await put(endpoint, 7)
    preview = await impatient.search.preview(query)
    assert not isinstance(preview, Unavailable)
    assert (preview.number, preview.exact, preview.at_least) == (*expected, False)


async def test_an_action_changes_all_that_match_after_an_estimate(
    endpoint: Endpoint, impatient: EndpointService
) -> None:
    await put(endpoint, 7)
    query = MessageFilter(header_value="*c*")
    preview = await impatient.search.preview(query)
    assert not isinstance(preview, Unavailable)
    assert (preview.exact, list(preview.example)) == (False, ["m0", "m1", "m2"])
    job = await impatient.pending.change_all(OperatorAction.CANCEL, query, actor="ann", rate=1000)
    done = await ended(impatient, job.name)
    assert (done.state, done.expected, done.done) == (JobState.DONE, None, 7)
    assert not await store_of(endpoint).pending()


async def test_a_message_is_shown_with_its_body_cut(endpoint: Endpoint, service: EndpointService) -> None:
    await put(endpoint, 1, body=b"x" * 200_000)
    shown = await service.pending.message("m0")
    assert shown is not None
    assert not isinstance(shown, Unavailable)
    assert (shown.destination, shown.due, shown.message_type) == ("billing", NOW + HOUR, "Shop.OrderPlaced")
    assert (shown.body.kind, shown.body.size, shown.body.cut, len(shown.body.text)) == ("text", 200_000, True, 65_536)
    assert {"Customer"} <= {row.name for row in shown.headers}
    assert await service.pending.message("nothing") is None


async def test_damaged_headers_and_binary_bodies_are_shown(endpoint: Endpoint, service: EndpointService) -> None:
    # Given a message that a stranger has written
    message = Message.from_encoded("bad", b"{not json <script>", b"\x00\x01\xff")
    await store_of(endpoint).store(DelayedMessage(message, "billing", NOW + HOUR))
    # When it is listed and shown
    page, shown = await service.search.page(), await service.pending.message("bad")
    # Then both work
    assert await ids_of(page) == ["bad"]
    assert shown is not None
    assert not isinstance(shown, Unavailable)
    assert shown.damaged is not None
    assert shown.headers[0].value == "{not json <script>"
    assert shown.body.kind == "binary"
    assert shown.body.text.startswith("00000000  00 01 ff")


async def test_pending_messages_are_cancelled_moved_and_sent(endpoint: Endpoint, service: EndpointService) -> None:
    await put(endpoint, 3)
    [gone, missing] = await service.pending.change(OperatorAction.CANCEL, ["m0", "x"], actor="ann")
    assert (gone.done, missing.done) == (True, False)
    assert "no pending message" in missing.text
    [moved] = await service.pending.change(OperatorAction.RESCHEDULE, ["m1"], by=HOUR, actor="ann")
    assert moved.done
    [sent] = await service.pending.change(OperatorAction.SEND_NOW, ["m2"], actor="ann")
    assert sent.done
    left = {one.id: one.due for one in await store_of(endpoint).pending()}
    assert left["m1"] == NOW + 3 * HOUR
    assert left["m2"] <= datetime.now(UTC)
    # And each action has its entry
    records = await recorded(service)
    assert (records[0].action, records[0].actor) == (OperatorAction.SEND_NOW, "ann")
    assert [record.state for record in records].count(JobState.DONE) == 3
    assert len(records) == 4
    with pytest.raises(ConfigurationError, match="to=, or how much later, by="):
        await service.pending.change(OperatorAction.RESCHEDULE, ["m1"], actor="ann")


async def recorded(service: EndpointService) -> list[ActionRecord]:
    """Return the recorded actions, the latest first."""
    records = await service.actions.recorded()
    assert not isinstance(records, Unavailable)
    return records


async def ended(service: EndpointService, name: str) -> ActionRecord:
    """Return the job once it has ended."""

    async def job() -> ActionRecord | None:
        return next((one for one in await recorded(service) if one.name == name and one.over), None)

    await eventually_async(job)
    record = await job()
    assert record is not None
    return record


async def test_all_that_match_are_changed_by_a_job(endpoint: Endpoint, service: EndpointService) -> None:
    # Given messages of which some match
    await put(endpoint, 6)
    query = MessageFilter(due_before=NOW + 4 * HOUR)
    preview = await service.search.preview(query)
    assert not isinstance(preview, Unavailable)
    assert (preview.number, preview.exact, list(preview.example)) == (3, True, ["m0", "m1", "m2"])
    # When they are moved behind messages that do not match
    job = await service.pending.change_all(
        OperatorAction.RESCHEDULE, query, by=timedelta(days=1), actor="ann", rate=1000
    )
    done = await ended(service, job.name)
    # Then each of them was moved once
    assert (done.state, done.done, done.failed) == (JobState.DONE, 3, 0)
    dues = {one.id: one.due for one in await store_of(endpoint).pending()}
    assert dues["m0"] == NOW + HOUR + timedelta(days=1)
    assert dues["m5"] == NOW + 6 * HOUR
    with pytest.raises(ConfigurationError, match="rate must be"):
        await service.pending.change_all(OperatorAction.CANCEL, query, actor="ann", rate=0)


async def test_a_job_keeps_to_its_rate_and_can_be_stopped(endpoint: Endpoint) -> None:
    # Given a job with a message a second
    await put(endpoint, 5)
    clock = ManualClock(NOW)
    async with EndpointService(endpoint, clock=clock) as service:
        job = await service.pending.change_all(OperatorAction.CANCEL, MessageFilter(), actor="ann", rate=1)

        async def has_done(number: int) -> bool:
            return next(one.done for one in await recorded(service) if one.name == job.name) == number

        await eventually_async(lambda: has_done(1))
        # When a second passes, and the job is stopped
        await clock.advance(timedelta(seconds=1))
        await eventually_async(lambda: has_done(2))
        assert await service.actions.stop(job.name, actor="bob")
        stopped = await ended(service, job.name)
        assert not await service.actions.stop(job.name, actor="bob")
    # Then two were cancelled
    assert (stopped.state, stopped.done) == (JobState.STOPPED, 2)
    assert len(await store_of(endpoint).pending()) == 3


async def test_a_job_goes_on_in_the_dashboard_that_starts_next(endpoint: Endpoint) -> None:
    """Given a job whose dashboard has ended, when another one resumes it, then each message is changed once."""
    if not isinstance(endpoint.transport, SqlTransport):
        return
    await put(endpoint, 5)
    async with EndpointService(endpoint, clock=ManualClock(NOW)) as first:
        by = timedelta(days=1)
        job = await first.pending.change_all(OperatorAction.RESCHEDULE, MessageFilter(), by=by, actor="ann", rate=1)
        await eventually_async(lambda: moved(endpoint, NOW + by))
    async with EndpointService(endpoint) as second:
        [interrupted] = [one for one in await recorded(second) if one.name == job.name]
        assert (interrupted.state, interrupted.done) == (JobState.INTERRUPTED, 1)
        assert await second.actions.resume(job.name, actor="bob")
        done = await ended(second, job.name)
        assert (done.state, done.done, done.failed, done.actor) == (JobState.DONE, 5, 0, "ann")
        assert not await second.actions.resume(job.name, actor="bob")
    dues = [one.due for one in await store_of(endpoint).pending()]
    assert dues == [NOW + by + (number + 1) * HOUR for number in range(5)]


async def moved(endpoint: Endpoint, since: datetime) -> bool:
    """Return whether a message is due from then on."""
    return any(one.due >= since for one in await store_of(endpoint).pending())


async def test_errors_are_grouped_with_their_trend(endpoint: Endpoint, service: EndpointService) -> None:
    # Given failures of two kinds, one of a stranger
    await fail(endpoint, "a", ValueError("no stock"))
    await fail(endpoint, "b", ValueError("no stock for 7"))
    await fail(endpoint, "c", KeyError("x"))
    strange = Message.from_encoded("d", b"\xff", b"")
    await endpoint.transport.dispatch([TransportOperation(strange, "error")])
    # When they are grouped
    groups = await service.errors.groups()
    assert not isinstance(groups, Unavailable)
    # Then equal failures are one group
    assert (groups.known.total, groups.known.read, groups.known.text) == (4, 4, "")
    assert [group.exception_type for group in groups.groups][:2] == [
        "(headers that cannot be read)",
        "builtins.KeyError",
    ]
    largest = groups.groups[2]
    assert (largest.count, largest.exception_type, largest.kinds[0].queue) == (2, "builtins.ValueError", "billing")
    assert largest.place.startswith("test_dashboard_service.py:")
    assert largest.place.endswith(" in raised")
    assert largest.by_day == {NOW.date().isoformat(): 2}
    assert groups.days[-1] == datetime.now(UTC).date().isoformat()
    page = await service.errors.page(MessageFilter(group=largest.key))
    assert not isinstance(page, Unavailable)
    assert [row.id for row in page.rows] == ["b", "a"]
    # And the export has all of them
    documents = [document async for document in service.errors.export()]
    assert len(json.dumps(documents)) > 100
    assert [one["id"] for one in documents] == ["a", "b", "c", "d"]


async def test_an_export_has_every_failed_message(service: EndpointService, endpoint: Endpoint) -> None:
    """Given more failed messages than are read to be grouped, when exported, then none is left out."""
    number = 10_500
    for first in range(0, number, 500):
        batch = [TransportOperation(Message(f"m{n}", {}, b""), "error") for n in range(first, first + 500)]
        await endpoint.transport.dispatch(batch)
    assert {document["id"] async for document in service.errors.export()} == {f"m{n}" for n in range(number)}


async def test_a_group_is_retried(endpoint: Endpoint, service: EndpointService) -> None:
    await fail(endpoint, "a", ValueError("no stock"))
    await fail(endpoint, "b", ValueError("no stock"))
    await fail(endpoint, "c", KeyError("x"), queue="nowhere")
    groups = await service.errors.groups()
    assert not isinstance(groups, Unavailable)
    job = await service.errors.retry_all(MessageFilter(group=groups.groups[1].key), actor="ann", rate=1000)
    done = await ended(service, job.name)
    assert (done.done, done.failed) == (2, 0)
    queues = managed_queues(endpoint.transport)
    assert await queues.count("billing") == 2
    # And a message whose queue does not exist stays
    [outcome] = await service.errors.retry(["c"], actor="ann")
    assert not outcome.done
    assert "does not exist" in outcome.text
    assert await queues.count("error") == 1


async def test_an_edited_copy_takes_the_place_of_the_message(endpoint: Endpoint, service: EndpointService) -> None:
    # Given a failed message
    await fail(endpoint, "a", ValueError("no stock"))
    shown = await service.errors.message("a")
    assert shown is not None
    assert not isinstance(shown, Unavailable)
    headers = {row.name: row.value for row in shown.headers} | {"Fixed": "yes"}
    # When an edited copy is sent
    outcome = await service.errors.edit("a", headers=headers, body=b'{"order": 2}', actor="ann")
    # Then it has the same id, the new content, and no headers of the failure
    assert outcome.done
    [copy] = await managed_queues(endpoint.transport).browse("billing", 10)
    assert (copy.id, copy.body, copy.headers["Fixed"]) == ("a", b'{"order": 2}', "yes")
    assert Headers.EXCEPTION_TYPE not in copy.headers
    assert await managed_queues(endpoint.transport).count("error") == 0
    # And a second edit of it sends nothing
    again = await service.errors.edit("a", headers=headers, body=b"{}", actor="ann")
    assert not again.done
    assert await managed_queues(endpoint.transport).count("billing") == 1


async def test_a_message_that_leaves_while_it_is_edited_is_sent_once(endpoint: Endpoint) -> None:
    # Given two services that have both looked at the same message
    await fail(endpoint, "a", ValueError("no stock"))
    async with EndpointService(endpoint) as one, EndpointService(endpoint) as other:
        # When one edits and the other retries it at once
        outcomes = await asyncio.gather(
            one.errors.edit("a", headers={}, body=b"{}", actor="ann"), other.errors.retry(["a"], actor="bob")
        )
    # Then one of them has done it, and the other says that it was too late
    done = [outcomes[0].done, outcomes[1][0].done]
    assert sorted(done) == [False, True]
    assert await managed_queues(endpoint.transport).count("billing") == 1
    assert await managed_queues(endpoint.transport).count("error") == 0


async def test_failed_messages_are_deleted(endpoint: Endpoint, service: EndpointService) -> None:
    for one in "abc":
        await fail(endpoint, one, ValueError("no stock"))
    outcomes = await service.errors.purge(["a"], actor="ann")
    assert [one.done for one in outcomes] == [True]
    job = await service.errors.purge_all(MessageFilter(), actor="ann")
    done = await ended(service, job.name)
    assert (done.done, done.failed) == (2, 0)
    assert await managed_queues(endpoint.transport).count("error") == 0


async def test_a_life_shows_where_a_message_is(endpoint: Endpoint, service: EndpointService) -> None:
    await put(endpoint, 1)
    life = await service.life.of("m0")
    assert not isinstance(life, Unavailable)
    assert life.pending is not None
    if isinstance(endpoint.transport, SqlTransport):
        assert [one.event for one in life.events] == ["scheduled"]
        assert life.journal is None
        await service.pending.change(OperatorAction.CANCEL, ["m0"], actor="ann")
        life = await service.life.of("m0")
        assert not isinstance(life, Unavailable)
        assert [one.event for one in life.events] == ["scheduled", "cancelled"]
        assert life.pending is None
    else:
        assert life.journal is not None
        assert "no journal" in life.journal
    await fail(endpoint, "f", ValueError("x"))
    failed = await service.life.of("f")
    assert not isinstance(failed, Unavailable)
    assert failed.failed is not None


async def test_jobs_are_listed_from_their_tables(endpoint: Endpoint, service: EndpointService) -> None:
    jobs = await service.jobs.all()
    if isinstance(endpoint.transport, SqlTransport):
        assert [jobs.schedules, jobs.dispatchers, jobs.migrations, jobs.cold_tier] == [[], [], [], []]
    else:
        assert isinstance(jobs.schedules, Unavailable)
        assert "SQL database" in jobs.schedules.reason


async def test_a_back_end_that_is_away_makes_its_own_part_unavailable() -> None:
    # Given a store that is down, and queues that work
    faults = Fault("due_forecast", error=BackendUnavailable("the database is down"))
    store, transport = FaultyStore(MemoryDelayedMessageStore(), faults), MemoryTransport()
    await transport.setup_infrastructure(["sales", "error"])
    endpoint = Endpoint("sales", transport=transport, delayed_delivery=StoredDelivery(store, polling=False))
    async with endpoint, EndpointService(endpoint) as service:
        # When the page is asked for
        now = await service.overview.now()
    # Then only the counts of due messages are unavailable
    assert now.due == Unavailable("the database is down", temporary=True)
    assert now.errors == 0


async def test_a_back_end_that_is_slow_is_asked_once() -> None:
    # Given queues whose count does not return
    release = asyncio.Event()

    class Slow(MemoryTransport):
        asked = 0

        async def count(self, queue: str) -> int:
            Slow.asked += queue == "error"
            await release.wait()
            return await super().count(queue)

    transport = Slow()
    await transport.setup_infrastructure(["sales", "error"])
    delivery = StoredDelivery(MemoryDelayedMessageStore(), polling=False)
    endpoint = Endpoint("sales", transport=transport, delayed_delivery=delivery, send_only=True)
    async with endpoint, EndpointService(endpoint, time_limit=0.05) as service:
        # When it is asked again and again
        pages = [await service.overview.now() for _ in range(3)]
        # Then each page says so and has its other parts, and there is one question
        assert all(isinstance(page.errors, Unavailable) and page.errors.temporary for page in pages)
        assert all(not isinstance(page.due, Unavailable) for page in pages)
        assert Slow.asked <= 2  # of the error queue itself, and in the list of queues
        # And once it answers, it is shown
        release.set()

        async def answered() -> bool:
            return (await service.overview.now()).errors == 0

        await eventually_async(answered)


async def test_an_endpoint_that_is_not_started_is_unavailable() -> None:
    endpoint = Endpoint("sales", transport=MemoryTransport(), send_only=True)
    async with EndpointService(endpoint) as service:
        found = await service.errors.groups()
    assert isinstance(found, Unavailable)
    assert "not started" in found.reason


PYTHON = """Traceback (most recent call last):
  File "/app/.venv/lib/python3.12/site-packages/delayline/pipeline.py", line 400, in _handle
    await handler(message)
  File "/app/shop/orders.py", line 17, in place_order
    stock[item] -= 1
  File "/usr/lib/python3.12/collections/__init__.py", line 1, in __missing__
    raise KeyError(key)
"""
NET = """   at System.Collections.Generic.Dictionary`2.get_Item(TKey key)
   at Shop.Orders.PlaceOrderHandler.Handle(PlaceOrder message) in C:\\shop\\Orders.cs:line 17
   at NServiceBus.InvokeHandlerTerminator.Terminate(IInvokeHandlerContext context)
"""


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        (PYTHON, "orders.py:17 in place_order"),
        (NET, "Shop.Orders.PlaceOrderHandler.Handle"),
        ("", ""),
        ("nonsense\n" * 1000, ""),
        ('  File "<script>", line 1, in x', "<script>:1 in x"),
    ],
)
def test_the_place_of_a_failure_is_the_users_own_code(trace: str, expected: str) -> None:
    assert place_of({Headers.EXCEPTION_STACK_TRACE: trace}) == expected


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (b"", "empty", ""),
        (b'{"a":[1]}', "json", '{\n  "a": [\n    1\n  ]\n}'),
        (b'{"a":', "text", '{"a":'),
        ("grüße".encode(), "text", "grüße"),
        (b"\x89PNG\r\n", "binary", "00000000  89 50 4e 47 0d 0a" + " " * 30 + "  .PNG.."),
        (b"[" * 5000, "text", "[" * 5000),
    ],
)
def test_bodies_are_shown_by_their_kind(body: bytes, kind: str, text: str) -> None:
    shown = body_of(body, len(body))
    assert (shown.kind, shown.text, shown.cut) == (kind, text, False)


def test_groups_do_not_depend_on_the_text_of_the_exception() -> None:
    one = Message("1", {Headers.EXCEPTION_TYPE: "A", Headers.EXCEPTION_MESSAGE: "x 1"}, b"")
    other = Message("2", {Headers.EXCEPTION_TYPE: "A", Headers.EXCEPTION_MESSAGE: "x 2"}, b"")
    assert group_key(one) == group_key(other)
    assert group_key(one) != group_key(Message("3", {Headers.EXCEPTION_TYPE: "B"}, b""))
