"""The timeout manager on real servers: a table that .NET has made, a database that goes away, other transports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import Text, create_engine, select, type_coerce
from tests.cluster.harness import mariadb_at
from tests.eventually import PATIENCE
from tests.servers.postgresql import PostgresqlServer

from delayline import (
    Endpoint,
    Guarantee,
    Headers,
    Message,
    MessageContext,
    SqlTransport,
    StoredDelivery,
    TwoPhaseCommit,
)
from delayline.azure import AzureDelayedTable, AzureStorageQueueTransport
from delayline.events import Event
from delayline.message import from_wire_time, to_wire_time
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.spi import DelayedDelivery, Outcome, Transport, TransportOperation
from delayline.sql import SqlDelayedMessageStore
from delayline.testing import Signals
from delayline.timeouts import SqlTimeoutPersister, TimeoutHeaders, TimeoutManagerDelivery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

SECOND = timedelta(seconds=1)
#: What .NET's installers run, in their own words.
DDL = {
    "postgresql": [
        """create table if not exists public."Sales_Eu_TimeoutData"(
            "Id" uuid not null, "Destination" character varying(200), "SagaId" uuid, "State" bytea,
            "Time" timestamp, "Headers" text, "PersistenceVersion" character varying(23), primary key ("Id"))""",
        """create index if not exists "Sales_Eu_TimeoutData_TimeIdx" on public."Sales_Eu_TimeoutData" ("Time" asc)""",
        """create index if not exists "Sales_Eu_TimeoutData_SagaIdx" on public."Sales_Eu_TimeoutData" ("SagaId" asc)""",
    ],
    "mariadb": [
        """create table if not exists `Sales_Eu_TimeoutData` (
            `Id` varchar(38) not null, `Destination` nvarchar(200), `SagaId` varchar(38), `State` longblob,
            `Time` datetime, `Headers` json not null, `PersistenceVersion` varchar(23) not null,
            primary key (`Id`)) default charset=ascii""",
        "create index `Index_SagaId` on `Sales_Eu_TimeoutData` (`SagaId`)",
        "create index `Index_Time` on `Sales_Eu_TimeoutData` (`Time`)",
    ],
}
HEADERS = (
    '{\r\n  "NServiceBus.MessageId": "a1b2",\r\n  "Ключ 🔑": "Größe",\r\n  "NServiceBus.ReplyToAddress": "crm"\r\n}'
)


class Arrivals:
    """The messages that arrived at an endpoint, with their times."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.messages: list[tuple[Message, datetime]] = []
        self._news = asyncio.Event()
        endpoint.handler(self.handle)

    async def handle(self, message: Message, context: MessageContext) -> None:
        self.messages.append((message, datetime.now(UTC)))
        self._news.set()

    async def number(self, wanted: int) -> list[str]:
        """Return the ids once so many have come."""
        async with asyncio.timeout(PATIENCE):
            while len(self.messages) < wanted:
                self._news.clear()
                await self._news.wait()
        return sorted(message.id for message, _ in self.messages)

    @property
    def early(self) -> list[str]:
        """The ids of those that came before they were due."""
        return [
            message.id
            for message, at in self.messages
            if at < from_wire_time(message.headers.get(Headers.DELIVER_AT, "1970-01-01 00:00:00:000000 Z"))
        ]


def run_sql(product: str, url: str, *statements: tuple[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Run statements as another program does and return the last one's rows."""
    if product == "postgresql":
        with psycopg.connect(url, autocommit=True) as connection:
            for statement, values in statements:
                cursor = connection.execute(statement.encode(), values)
            return cursor.fetchall() if cursor.description else []
    with contextlib.closing(mariadb_at(url)) as mariadb, mariadb.cursor() as cursor_:
        mariadb.autocommit(True)
        cursor_.execute("SET NAMES utf8mb4")
        cursor_.execute("SET SESSION sql_mode = ''")
        for statement, values in statements:
            cursor_.execute(statement, values)
        return list(cursor_.fetchall())


@pytest.mark.parametrize("product", ["postgresql", "mariadb"])
async def test_a_table_of_dotnet_without_its_indexes_delivers(product: str, request: pytest.FixtureRequest) -> None:
    # Given a table of .NET's without the index on the due time
    url = request.getfixturevalue(f"{product}_url")
    quote = '"' if product == "postgresql" else "`"
    insert = f"insert into {quote}Sales_Eu_TimeoutData{quote} values (%s, %s, %s, %s, %s, %s, %s)"  # noqa: S608
    overdue = datetime.now(UTC).replace(tzinfo=None, microsecond=0) - SECOND
    row = (str(uuid.uuid4()), "Sales.Eu", None, b"", overdue, '{"NServiceBus.MessageId":"due"}', "6.2.0.0")
    run_sql(product, url, (DDL[product][0], ()), (insert, row))
    # When an endpoint of that name starts
    endpoint = Endpoint(
        "Sales.Eu",
        transport=SqlTransport(url),
        delayed_delivery=TimeoutManagerDelivery(SqlTimeoutPersister(url)),
    )
    arrivals = Arrivals(endpoint)
    with Signals() as signals:
        async with endpoint:
            # Then it delivers, and where statements force indexes it logs the one that is missing
            assert await arrivals.number(1) == ["due"]
        texts = [record.getMessage() for record in signals.records(Event.INDEX_MISSING)]
    if product == "mariadb":
        assert any("CREATE INDEX `Index_Time`" in text for text in texts), texts


@pytest.mark.parametrize("product", ["postgresql", "mariadb"])
async def test_a_table_of_dotnet_is_taken_over_as_it_is(product: str, request: pytest.FixtureRequest) -> None:
    # Given a table and rows as .NET leaves them: overdue, without a body, saga or destination, and far in the future
    url = request.getfixturevalue(f"{product}_url")
    quote = '"' if product == "postgresql" else "`"
    insert = f"insert into {quote}Sales_Eu_TimeoutData{quote} values (%s, %s, %s, %s, %s, %s, %s)"  # noqa: S608
    now = datetime.now(UTC).replace(tzinfo=None, microsecond=0)
    rows = [
        ("Sales.Eu", str(uuid.uuid4()), b"\x00body", now - 400 * timedelta(days=1), HEADERS),
        ("Sales.Eu", str(uuid.UUID(int=0)), b"", now + 2 * SECOND, '{"NServiceBus.MessageId":"soon"}'),
        ("Sales.Eu", None, None, now - SECOND, '{"NServiceBus.MessageId":"bare"}'),
        ("Sales.Eu", None, b"", now + timedelta(days=3000), '{"NServiceBus.MessageId":"far"}'),
        ("Sales.Eu", None, b"", now - SECOND, '{"NServiceBus.MessageId":"nul","k":"a\\u0000b"}'),
        (None, None, b"lost?", now - SECOND, '{"NServiceBus.MessageId":"nowhere"}'),
    ]
    statements: list[tuple[str, Sequence[Any]]] = [(statement, ()) for statement in DDL[product]]
    statements += [(insert, (str(uuid.uuid4()), *row, "6.2.0.0")) for row in rows]
    run_sql(product, url, *statements)
    # When an endpoint of that name starts
    endpoint = Endpoint(
        "Sales.Eu",
        transport=SqlTransport(url),
        delayed_delivery=TimeoutManagerDelivery(SqlTimeoutPersister(url)),
    )
    assert endpoint.guarantee is Guarantee.EXACTLY_ONCE
    arrivals = Arrivals(endpoint)
    async with endpoint:
        # Then
        assert await arrivals.number(4) == ["a1b2", "bare", "nul", "soon"]
        assert next(message.headers["k"] for message, _ in arrivals.messages if message.id == "nul") == "a\0b"
        delivered = next(message for message, _ in arrivals.messages if message.id == "a1b2")
        assert (delivered.body, delivered.headers["Ключ 🔑"]) == (b"\x00body", "Größe")
        assert TimeoutHeaders.RELATED_TIMEOUT in delivered.headers
        assert isinstance(endpoint.transport, SqlTransport)
        async with asyncio.timeout(PATIENCE):
            while await endpoint.transport.count("error") == 0:  # noqa: ASYNC110 - there is no notification
                await asyncio.sleep(0.05)
        [nowhere] = await endpoint.transport.browse("error", 10)
        assert (nowhere.id, nowhere.body) == ("nowhere", b"lost?")
        # And .NET can read the rows that it stores
        await endpoint.send("Sales.Eu", b"later", message_id="later", delay=timedelta(days=1), headers={"k": "ключ"})
        query = f"select {quote}Headers{quote} from {quote}Sales_Eu_TimeoutData{quote}"  # noqa: S608
        async with asyncio.timeout(PATIENCE):
            while len(left := run_sql(product, url, (query, ()))) < 2:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.05)
    assert any("\\u043a\\u043b\\u044e\\u0447" in row[0] or "ключ" in row[0] for row in left)


@pytest.mark.slow
async def test_rows_of_dotnet_whose_time_lost_its_fraction_are_not_early(mariadb_url: str) -> None:
    """Given rows of .NET on MariaDB, whose column keeps whole seconds, then each is due at the time of its header."""
    insert = "insert into `Sales_Eu_TimeoutData` values (%s, %s, %s, %s, %s, %s, %s)"
    soon = datetime.now(UTC) + 2 * SECOND
    dues = {f"m{number}": soon + timedelta(milliseconds=173 * number) for number in range(20)}
    rows = []
    for name, due in dues.items():
        headers = {"NServiceBus.MessageId": name, TimeoutHeaders.EXPIRE: to_wire_time(due)}
        cut = due.replace(tzinfo=None, microsecond=0)
        rows.append((str(uuid.uuid4()), "Sales.Eu", None, b"", cut, json.dumps(headers), "6.2.0.0"))
    bare = soon.replace(microsecond=0)
    dues["bare"] = bare + SECOND  # without the header a whole second may be lost
    without = '{"NServiceBus.MessageId":"bare"}'
    rows.append((str(uuid.uuid4()), "Sales.Eu", None, b"", bare.replace(tzinfo=None), without, "6.2.0.0"))
    run_sql("mariadb", mariadb_url, *((text, ()) for text in DDL["mariadb"]), *((insert, row) for row in rows))
    endpoint = Endpoint(
        "Sales.Eu",
        transport=SqlTransport(mariadb_url),
        delayed_delivery=TimeoutManagerDelivery(SqlTimeoutPersister(mariadb_url)),
    )
    arrived: dict[str, datetime] = {}

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        arrived[message.id] = datetime.now(UTC)

    async with endpoint:
        assert {one.id: one.due for one in await endpoint.delayed.pending()} == dues
        async with asyncio.timeout(PATIENCE):
            while len(arrived) < len(dues):  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
    assert {name: arrived[name] - due for name, due in dues.items() if arrived[name] < due} == {}


@pytest.fixture
def stopped() -> Iterator[PostgresqlServer]:
    """Provide a server that does not run, with a database."""
    server = PostgresqlServer(settings=["fsync=off"])
    server.url = server.new_database()  # type: ignore[attr-defined]
    server.stop()
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.server
async def test_the_database_may_come_later_and_go_away(stopped: PostgresqlServer, tmp_path: Path) -> None:
    # Given queues that work, and timeouts in a database that does not
    url: str = stopped.url  # type: ignore[attr-defined]
    critical: list[str] = []

    async def note(endpoint: Endpoint, text: str, error: Exception) -> None:
        critical.append(text)

    endpoint = Endpoint(
        "sales",
        transport=SqlTransport(f"sqlite:///{tmp_path}/queues.db"),
        delayed_delivery=TimeoutManagerDelivery(SqlTimeoutPersister(url)),
        on_critical_error=note,
    )
    arrivals = Arrivals(endpoint)
    async with endpoint:
        await endpoint.send("sales", b"", message_id="before", delay=SECOND)
        # When it is there
        await asyncio.to_thread(stopped.start)
        assert await arrivals.number(1) == ["before"]
        # When it crashes, and comes back
        await endpoint.send("sales", b"", message_id="stored", delay=3 * SECOND)
        await asyncio.sleep(1)
        await asyncio.to_thread(stopped.stop, "immediate")
        await endpoint.send("sales", b"", message_id="meanwhile", delay=2 * SECOND)
        await asyncio.sleep(1)
        await asyncio.to_thread(stopped.start)
        # Then all of it arrives
        assert await arrivals.number(3) == ["before", "meanwhile", "stored"]
    assert (critical, arrivals.early) == ([], [])


@pytest.mark.parametrize("timeouts_in", ["postgresql", "mariadb"])
async def test_two_databases_with_a_two_phase_commit(
    postgresql_url: str, timeouts_in: str, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue(timeouts_in)
    url = server.new_database()
    both = TwoPhaseCommit()
    transport = SqlTransport(postgresql_url, two_phase=both)
    persister = SqlTimeoutPersister(url, two_phase=both)
    endpoint = Endpoint("sales", transport=transport, delayed_delivery=TimeoutManagerDelivery(persister))
    assert endpoint.guarantee is Guarantee.EXACTLY_ONCE
    arrivals = Arrivals(endpoint)
    async with endpoint:
        await asyncio.gather(
            *(endpoint.send("sales", b"", message_id=f"{number:02}", delay=2 * SECOND) for number in range(20))
        )
        assert await arrivals.number(20) == [f"{number:02}" for number in range(20)]
        assert (await persister.count()).number == 0
    assert arrivals.early == []
    server.drop_database(url)


async def both_ways(old: Endpoint, new: Endpoint) -> None:
    """An endpoint with a timeout manager and one with native delivery send each other delayed messages."""
    to_old, to_new = Arrivals(old), Arrivals(new)
    async with old, new:
        await old.send(new.name, b"", message_id="by timeout", delay=2 * SECOND)
        await new.send(old.name, b"", message_id="by broker", delay=2 * SECOND)
        assert await to_new.number(1) == ["by timeout"]
        assert await to_old.number(1) == ["by broker"]
    assert to_old.early + to_new.early == []


async def drains(transport: Callable[[], Transport], new: DelayedDelivery, url: str, queue: str) -> None:
    """Pending messages of the old delivery arrive while new messages use the new one."""
    old = Endpoint(
        "sales", transport=transport(), delayed_delivery=TimeoutManagerDelivery(SqlTimeoutPersister(url), polling=False)
    )
    async with old:
        await old.send("sales", b"", message_id="old", delay=2 * SECOND)
    endpoint = Endpoint(
        "sales",
        transport=transport(),
        delayed_delivery=new,
        draining=TimeoutManagerDelivery(SqlTimeoutPersister(url)),
    )
    arrivals = Arrivals(endpoint)
    async with endpoint:
        await endpoint.send("sales", b"", message_id="new", delay=2 * SECOND)
        assert await arrivals.number(2) == ["new", "old"]
        # And a sender that only has the queue's name, as a .NET endpoint
        due = datetime.now(UTC) + 2 * SECOND
        headers = {
            Headers.MESSAGE_ID: "dotnet",
            TimeoutHeaders.EXPIRE: f"{due:%Y-%m-%d %H:%M:%S:%f} Z",
            TimeoutHeaders.DESTINATION: "sales",
        }
        await endpoint.transport.dispatch([TransportOperation(Message("dotnet", headers, b""), queue)])
        assert await arrivals.number(3) == ["dotnet", "new", "old"]
    assert arrivals.early == []


def timeouts_in(folder: Path) -> str:
    return f"sqlite:///{folder}/timeouts.db"


async def test_on_rabbitmq_both_kinds_exchange_delayed_messages(rabbitmq_url: str, tmp_path: Path) -> None:
    old = TimeoutManagerDelivery(SqlTimeoutPersister(timeouts_in(tmp_path)))
    await both_ways(
        Endpoint("old", transport=RabbitMQTransport(rabbitmq_url), delayed_delivery=old),
        Endpoint("new", transport=RabbitMQTransport(rabbitmq_url), delayed_delivery=DelayLevelDelivery()),
    )


@pytest.mark.slow
async def test_on_rabbitmq_an_old_timeout_manager_drains(rabbitmq_url: str, tmp_path: Path) -> None:
    url = timeouts_in(tmp_path)
    await drains(lambda: RabbitMQTransport(rabbitmq_url), DelayLevelDelivery(), url, "sales.Timeouts")


async def test_on_azure_both_kinds_exchange_delayed_messages(azure_url: str, tmp_path: Path) -> None:
    old = TimeoutManagerDelivery(SqlTimeoutPersister(timeouts_in(tmp_path)))
    new = StoredDelivery(AzureDelayedTable(azure_url))
    await both_ways(
        Endpoint("old", transport=AzureStorageQueueTransport(azure_url), delayed_delivery=old),
        Endpoint("new", transport=AzureStorageQueueTransport(azure_url), delayed_delivery=new),
    )


@pytest.mark.slow
async def test_on_azure_an_old_timeout_manager_drains(azure_url: str, tmp_path: Path) -> None:
    new = StoredDelivery(AzureDelayedTable(azure_url))
    await drains(lambda: AzureStorageQueueTransport(azure_url), new, timeouts_in(tmp_path), "sales-timeouts")


@pytest.mark.slow
async def test_a_store_of_sql_drains_a_timeout_manager_in_the_same_database(postgresql_url: str) -> None:
    new = StoredDelivery(SqlDelayedMessageStore(postgresql_url))
    await drains(lambda: SqlTransport(postgresql_url), new, postgresql_url, "sales.Timeouts")


async def test_a_delayed_message_is_a_part_of_the_callers_transaction(tmp_path: Path) -> None:
    # Given an endpoint, and a database of orders that its queues are in
    url = f"sqlite:///{tmp_path}/shop.db"
    endpoint = Endpoint(
        "sales", transport=SqlTransport(url), delayed_delivery=TimeoutManagerDelivery(SqlTimeoutPersister(url))
    )
    arrivals = Arrivals(endpoint)
    engine = create_engine(url)
    async with endpoint:
        # When one order is committed, and another one is not
        with engine.begin() as committed:
            await endpoint.send("sales", b"", message_id="kept", delay=2 * SECOND, transaction=committed)
        with engine.connect() as abandoned:
            await endpoint.send("sales", b"", message_id="gone", delay=SECOND, transaction=abandoned)
            abandoned.rollback()
        # Then
        assert await arrivals.number(1) == ["kept"]
    engine.dispose()


@pytest.mark.parametrize("product", ["sqlite", "postgresql", "mariadb"])
async def test_pending_messages_are_listed_cancelled_and_rescheduled(
    product: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    # Given messages that wait, one of them with an id that is a pattern, another one with a body of its saga's
    url = timeouts_in(tmp_path) if product == "sqlite" else request.getfixturevalue(f"{product}_url")
    delivery = TimeoutManagerDelivery(SqlTimeoutPersister(url))
    endpoint = Endpoint("sales", transport=SqlTransport(url), delayed_delivery=delivery)
    arrivals, saga, hostile = Arrivals(endpoint), str(uuid.uuid4()), 'ключ "%_\\'
    async with endpoint:
        day = timedelta(days=1)
        await endpoint.send("sales", b"body", message_id="a", delay=day, headers={Headers.SAGA_ID: saga})
        await endpoint.send("sales", b"", message_id=hostile, delay=2 * day)
        await endpoint.send("error", b"", message_id="x", delay=3 * day)
        await endpoint.send("sales", b"", message_id="abc", delay=4 * day)
        async with asyncio.timeout(PATIENCE):
            while len(waiting := await endpoint.delayed.pending()) < 4:  # noqa: ASYNC110 - there is no notification
                await asyncio.sleep(0.05)
        # Then they are listed with the values of the table
        assert [(one.id, one.destination) for one in waiting] == [
            ("a", "sales"),
            (hostile, "sales"),
            ("x", "error"),
            ("abc", "sales"),
        ]
        assert waiting[0].message.headers[Headers.SAGA_ID] == saga
        assert from_wire_time(waiting[0].message.headers[Headers.DELIVER_AT]) <= waiting[0].due
        assert [one.id for one in await endpoint.delayed.pending(destination="sales", limit=1, offset=1)] == [hostile]
        counts = await endpoint.delayed.count_by_due(timedelta(days=1000))
        assert {(one.destination, one.count) for one in counts} == {("sales", 3), ("error", 1)}
        # When one is cancelled by its id, one by its timeout's, and one is due sooner
        [timeout_id] = [row[0] for row in await _ids_of(delivery, "x")]
        outcomes = [await endpoint.delayed.cancel(one) for one in (hostile, timeout_id, timeout_id, "%")]
        assert outcomes == [Outcome.DONE, Outcome.DONE, Outcome.NOT_PENDING, Outcome.NOT_PENDING]
        assert await endpoint.delayed.reschedule("abc", datetime.now(UTC) + 2 * SECOND) is Outcome.DONE
        # Then it comes in time, and the others do not
        async with asyncio.timeout(8):
            assert await arrivals.number(1) == ["abc"]
        assert [one.id for one in await endpoint.delayed.pending()] == ["a"]


@pytest.mark.parametrize("product", ["postgresql", "mariadb"])
async def test_rows_without_a_time_are_named_at_the_start_and_hold_up_no_others(
    product: str, request: pytest.FixtureRequest
) -> None:
    # Given a table of .NET's with a row without a time, and one that is due
    url = request.getfixturevalue(f"{product}_url")
    quote = '"' if product == "postgresql" else "`"
    insert = f"insert into {quote}Sales_Eu_TimeoutData{quote} values (%s, %s, %s, %s, %s, %s, %s)"  # noqa: S608
    overdue = datetime.now(UTC).replace(tzinfo=None, microsecond=0) - SECOND
    rows = [
        (str(uuid.uuid4()), "Sales.Eu", None, b"", time, json.dumps({"NServiceBus.MessageId": name}), "6.2.0.0")
        for name, time in (("never", None), ("due", overdue))
    ]
    run_sql(product, url, *((statement, ()) for statement in DDL[product]), *((insert, row) for row in rows))
    delivery = TimeoutManagerDelivery(SqlTimeoutPersister(url))
    endpoint = Endpoint("Sales.Eu", transport=SqlTransport(url), delayed_delivery=delivery)
    arrivals = Arrivals(endpoint)
    # When the endpoint starts
    with Signals() as signals:
        async with endpoint:
            # Then the one that is due comes, and the other one is named
            assert await arrivals.number(1) == ["due"]
            [warning] = signals.records(Event.WITHOUT_TIME)
            assert "Sales_Eu_TimeoutData" in warning.getMessage()
            assert "never" in warning.getMessage()
            assert "delayline reschedule ID" in warning.getMessage()
            # And it comes too, once it is given a time
            assert [message.id for message in await delivery.persister.without_time()] == ["never"]  # type: ignore[attr-defined]
            assert await endpoint.delayed.reschedule("never", datetime.now(UTC)) is Outcome.DONE
            assert await arrivals.number(2) == ["due", "never"]


@pytest.mark.parametrize("product", ["sqlite", "postgresql", "mariadb"])
async def test_destinations_that_differ_in_case_only_are_listed_apart(
    product: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The column of NServiceBus' table has MySQL's and MariaDB's usual collation, which ignores case and accents."""
    url = timeouts_in(tmp_path) if product == "sqlite" else request.getfixturevalue(f"{product}_url")
    delivery = TimeoutManagerDelivery(SqlTimeoutPersister(url))
    names = ["id", "ID", "straße", "strasse"]
    async with Endpoint("sales", transport=SqlTransport(url), delayed_delivery=delivery) as endpoint:
        for name in names:
            day = timedelta(days=1)
            await endpoint.send(name, b"", message_id=name, delay=day, check_destination=False)
        async with asyncio.timeout(PATIENCE):
            while len(await endpoint.delayed.pending()) < len(names):  # noqa: ASYNC110 - there is no notification
                await asyncio.sleep(0.05)
        for name in names:
            assert [one.destination for one in await endpoint.delayed.pending(destination=name)] == [name]
        counts = await endpoint.delayed.count_by_due(timedelta(days=1000))
        assert {(one.destination, one.count) for one in counts} == {(name, 1) for name in names}


async def _ids_of(delivery: TimeoutManagerDelivery, message_id: str) -> list[tuple[str]]:
    """The timeouts of that message."""
    persister = delivery.persister
    assert isinstance(persister, SqlTimeoutPersister)
    table = persister._statements.table
    query = select(table.c.Id).where(type_coerce(table.c.Headers, Text).contains(f'"{message_id}"'))
    rows = await persister._database.read(lambda connection: connection.execute(query).all())
    return [(str(row[0]),) for row in rows]
