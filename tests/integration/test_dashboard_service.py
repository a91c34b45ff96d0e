"""The data side of the dashboard on servers: opened from settings, with what each back end can do."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import make_url
from tests.eventually import eventually_async
from tests.integration.test_pieces import piece_rows

from delayline import Headers, Message, MessageFilter
from delayline.actions import JobState, OperatorAction
from delayline.bulk.jobs import JobName, PieceParameters
from delayline.bulk.pieces import PieceWriter
from delayline.composition import endpoint_from, transport_of
from delayline.dashboard.model import LevelForecast, PendingPage, Unavailable
from delayline.dashboard.service import EndpointService
from delayline.doctor import State
from delayline.error_queue import managed_queues
from delayline.failures import failure_headers
from delayline.settings import Settings
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.servers.postgresql import PostgresqlServer

HOUR = timedelta(hours=1)
TYPE = "Shop.OrderPlaced, Shop"
#: Queues with names that Azure accepts too.
QUEUES = ["sales", "billing", "error"]


@pytest.fixture(params=["postgresql", "mariadb", "azure"])
async def settings(request: pytest.FixtureRequest) -> Settings:
    """Provide the settings of an endpoint that is set up, with three pending messages and two failed ones."""
    url = request.getfixturevalue(f"{request.param}_url")
    found = Settings(endpoint="sales", url=url, journal=True if request.param != "azure" else None)
    await set_up(found)
    return found


async def set_up(settings: Settings) -> None:
    endpoint = endpoint_from(settings, polling=False)
    await endpoint.transport.setup_infrastructure(QUEUES)
    async with endpoint:
        for number in range(3):
            await endpoint.send(
                "billing",
                {"order": number},
                message_id=f"m{number}",
                headers={Headers.ENCLOSED_MESSAGE_TYPES: TYPE, "Customer": f"c{number}"},
                delay=(number + 1) * HOUR,
            )
        for number in range(2):
            headers = failure_headers(ValueError("no stock"), "billing", "billing", datetime.now(UTC))
            message = Message(f"e{number}", headers | {Headers.ENCLOSED_MESSAGE_TYPES: TYPE}, b'{"order": 1}')
            await endpoint.transport.dispatch([TransportOperation(message, "error")])


@pytest.fixture
async def service(settings: Settings) -> AsyncIterator[EndpointService]:
    async with EndpointService(settings, time_limit=20) as one:
        yield one


async def test_every_part_that_the_back_end_has_is_shown(settings: Settings, service: EndpointService) -> None:
    # When all pages are asked for
    now, forecast = await service.overview.now(), await service.overview.forecast("day")
    page, groups = await service.search.page(), await service.errors.groups()
    shown, life, findings = (
        await service.pending.message("m1"),
        await service.life.of("m1"),
        await service.overview.doctor(),
    )
    # Then what waits is counted and listed
    assert not isinstance(now.due, Unavailable)
    assert [now.due.overdue.count, now.due.next_day.count + now.due.next_hour.count] == [0, 3]
    assert now.errors == 2
    assert not isinstance(forecast, Unavailable)
    assert sum(bar.count for bar in forecast.bars) == 3
    assert forecast.destinations == ["billing"]
    assert isinstance(page, PendingPage)
    assert [(row.id, row.message_type) for row in page.rows] == [(f"m{one}", "Shop.OrderPlaced") for one in range(3)]
    assert shown is not None
    assert not isinstance(shown, Unavailable)
    assert (shown.body.kind, shown.damaged) == ("json", None)
    assert not isinstance(groups, Unavailable)
    assert [(one.count, one.exception_type) for one in groups.groups] == [(2, "builtins.ValueError")]
    assert not isinstance(findings, Unavailable)
    wrong = {one.what for one in findings if one.state is not State.OK and not one.what.startswith("innodb")}
    assert wrong == {"queue error"}, findings  # MariaDB's server is less durable, for tests
    # And what the back end lacks has its reason
    assert not isinstance(life, Unavailable)
    assert life.pending is not None
    jobs = await service.jobs.all()
    if settings.url.startswith("azure"):
        assert life.journal is not None
        assert isinstance(jobs.schedules, Unavailable)
        assert isinstance(now.throughput, Unavailable)
        assert "SQL database" in now.throughput.reason
    else:
        assert [one.event for one in life.events] == ["scheduled"]
        assert [jobs.schedules, jobs.dispatchers, jobs.migrations, jobs.cold_tier] == [[], [], [], []]


@pytest.mark.parametrize("settings", ["postgresql", "mariadb"], indirect=True)
async def test_jobs_in_pieces_are_listed(settings: Settings, service: EndpointService) -> None:
    # Given a job that has ended, and one under way
    writer = PieceWriter(settings.url, "sales.timeouts")
    parameters = PieceParameters(0, 8, "keep")
    done, under_way = [
        await asyncio.to_thread(writer.open, JobName("nightly", version), parameters) for version in (1, 2)
    ]
    for job in (done, under_way):
        rows = piece_rows({f"{job.number}-a": 1, f"{job.number}-b": 2}, rejected=(2,))
        await asyncio.to_thread(writer.store, job.number, rows, "keep")
    await asyncio.to_thread(writer.finish, done.number)
    # Then both are there, with what they have done
    jobs = await service.jobs.all()
    assert not isinstance(jobs.schedules, Unavailable)
    found = {row.name: row for row in jobs.schedules}
    assert {name: (row.state, row.done, row.total) for name, row in found.items()} == {
        "nightly version 1": ("done", 2, 3),
        "nightly version 2": ("open", 2, None),
    }
    assert found["nightly version 1"].details == {"duplicates": "0", "rejected": "1"}
    assert found["nightly version 2"].details["pieces"] == "2"


async def test_messages_are_found_and_changed(service: EndpointService) -> None:
    found = await service.search.page(MessageFilter(header="Customer", header_value="*c1*"))
    assert isinstance(found, PendingPage)
    assert [row.id for row in found.rows] == ["m1"]
    assert [
        one.done for one in await service.pending.change(OperatorAction.CANCEL, ["m0", "m0", "x"], actor="ann")
    ] == [True, False]
    job = await service.pending.change_all(OperatorAction.RESCHEDULE, MessageFilter(), by=HOUR, actor="ann", rate=100)

    async def is_done() -> bool:
        records = await service.actions.recorded()
        assert not isinstance(records, Unavailable)
        return [(one.state, one.done) for one in records if one.name == job.name] == [(JobState.DONE, 2)]

    await eventually_async(is_done)


async def test_errors_are_retried_edited_and_deleted(settings: Settings, service: EndpointService) -> None:
    # When one message is edited, and the other one is retried
    edited = await service.errors.edit("e0", headers={"Fixed": "yes"}, body=b"{}", actor="ann")
    [retried] = await service.errors.retry(["e1"], actor="ann")
    # Then both are in their queue, and no longer in the error queue
    assert (edited.done, retried.done) == (True, True), (edited, retried)
    transport = transport_of(settings)
    await transport.start()
    try:
        queues = managed_queues(transport)
        assert (await queues.count("billing"), await queues.count("error")) == (2, 0)
        copy = next(one for one in await queues.browse("billing", 10) if one.id == "e0")
        assert (copy.headers["Fixed"], copy.body) == ("yes", b"{}")
    finally:
        await transport.stop()
    [late] = await service.errors.retry(["e1"], actor="ann")
    assert not late.done


async def test_delay_levels_are_counted_and_unsupported_features_have_a_reason(rabbitmq_url: str) -> None:
    # Given an endpoint whose messages wait in RabbitMQ's delay levels
    settings = Settings(endpoint="sales", url=rabbitmq_url)
    await set_up(settings)
    async with EndpointService(settings, time_limit=20) as service:
        # When its pages are asked for
        now, page, forecast = (
            await service.overview.now(),
            await service.search.page(),
            await service.overview.forecast("day"),
        )
        levels = await service.levels.forecast(timedelta(0), timedelta(days=4000))
        groups, outcome = (
            await service.errors.groups(),
            await service.pending.change(OperatorAction.CANCEL, ["m0"], actor="ann"),
        )
        edited = await service.errors.edit("e0", headers={"Fixed": "yes"}, body=b"{}", actor="ann")
        [retried] = await service.errors.retry(["e1"], actor="ann")
        late, listed = await service.overview.now(), await service.schedules.all()
    # Then the levels are counted
    assert isinstance(now.levels, LevelForecast)
    assert isinstance(levels, LevelForecast)
    assert now.levels.total == sum(level.count for level in now.levels.levels) == 3
    # And when they are due is bounded
    assert [(due.at_least, due.at_most) for due in levels.due] == [(0, 3), (3, 3)]
    # And what cannot be shown or done has its reason
    assert isinstance(now.throughput, Unavailable)
    assert now.throughput.reason == "this is made of minute rows, which are kept in SQL databases only, not in amqp:"
    for part in (page, forecast, now.due):
        assert isinstance(part, Unavailable)
        assert "delay levels" in part.reason
    assert (outcome[0].done, "delay levels" in outcome[0].text) == (False, True)
    # And the error queue works as elsewhere
    assert not isinstance(groups, Unavailable)
    assert [one.count for one in groups.groups] == [2]
    assert (edited.done, retried.done) == (True, True), (edited, retried)
    assert late.errors == 0
    # And an application's own endpoint has the same levels, and says the same of schedules
    async with endpoint_from(settings) as endpoint, EndpointService(endpoint, time_limit=20) as mounted:
        own = (await mounted.overview.now()).levels
        schedules = await mounted.schedules.all()
    assert isinstance(own, LevelForecast)
    assert own.total == 3
    assert mounted.levels.alone
    for reason in (schedules, listed):
        assert isinstance(reason, Unavailable)
        assert reason.reason.startswith("schedules are kept in a delayed message store, and this endpoint has none")


async def test_missing_rights_make_their_own_part_unavailable(
    postgresql: PostgresqlServer, postgresql_url: str
) -> None:
    # Given a user who may read the store, and not the queues
    await set_up(Settings(endpoint="sales", url=postgresql_url))
    database = make_url(postgresql_url).database
    with postgresql.administrator(database or "") as connection:
        connection.execute("DROP ROLE IF EXISTS looker")
        connection.execute("CREATE ROLE looker LOGIN")
        for table in ('"sales.timeouts"', "delayline_schema", "delayline_queues"):
            connection.execute(f"GRANT SELECT ON {table} TO looker")
    url = make_url(postgresql_url).set(username="looker").render_as_string(hide_password=False)
    try:
        async with EndpointService(Settings(endpoint="sales", url=url), time_limit=20) as service:
            # When the pages are asked for
            now, page = await service.overview.now(), await service.search.page()
            [outcome] = await service.pending.change(OperatorAction.CANCEL, ["m0"], actor="ann")
        # Then what may be read is shown, and the rest says what is missing
        assert not isinstance(now.due, Unavailable)
        assert now.due.pauses is None
        assert isinstance(page, PendingPage)
        assert len(page.rows) == 3
        assert isinstance(now.errors, Unavailable)
        assert "delayline_messages" in now.errors.reason
        assert not now.errors.temporary
        assert not outcome.done
        assert "permission" in outcome.text or "GRANT" in outcome.text
    finally:
        with postgresql.administrator(database or "") as connection:
            connection.execute("DROP OWNED BY looker")
            connection.execute("DROP ROLE looker")


async def test_a_server_that_is_away_is_unavailable_and_comes_back() -> None:
    settings = Settings(endpoint="sales", url="postgresql://nobody@127.0.0.1:1/none")
    async with EndpointService(settings, time_limit=10) as service:
        now, page = await service.overview.now(), await service.search.page()
    for part in (now.due, now.errors, now.queues, page):
        assert isinstance(part, Unavailable)
        assert part.temporary
