"""Azure Storage in real time: messages of .NET, foreign rows, slow handlers, and the lease."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from azure.data.tables.aio import TableClient
from azure.storage.blob.aio import BlobLeaseClient, ContainerClient
from azure.storage.queue.aio import QueueClient
from tests.eventually import PATIENCE, eventually_async
from tests.integration.azure_parts import SECOND, HandledMessages, connection, endpoint_at

from delayline import Endpoint, Event, Headers, InvalidMessage, Message, MessageContext, TransactionMode
from delayline.azure import AzureAccount, AzureDelayedTable, AzureStorageQueueTransport, DelayedTableDelivery
from delayline.azure.envelope import unwrap, wrap
from delayline.azure.names import delays_name, message_key, place_key
from delayline.delayed.store import Outcome
from delayline.errors import DispatchFailed, QueueNotFound
from delayline.testing import ManualClock, Signals
from delayline.testing.conformance.messages import delayed
from delayline.timeouts import SqlTimeoutPersister, TimeoutManagerDelivery
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path


@pytest_asyncio.fixture
async def table(azure_url: str) -> AsyncIterator[TableClient]:
    """Provide the table of the endpoint `sales`."""
    await endpoint_at(azure_url).setup()
    async with TableClient.from_connection_string(connection(azure_url), delays_name("sales")) as client:
        yield client


@pytest_asyncio.fixture
async def error_queue(azure_url: str) -> AsyncIterator[QueueClient]:
    async with QueueClient.from_connection_string(connection(azure_url), "error") as client:
        yield client


@pytest_asyncio.fixture
async def store(azure_url: str, table: TableClient) -> AsyncIterator[AzureDelayedTable]:
    store = AzureDelayedTable(azure_url)
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    yield store
    await store.close()


def row_of_dotnet(due: datetime, number: int = 1, **other: object) -> dict[str, object]:
    """Return an entity as NServiceBus 7.4 and later write it."""
    return {
        "PartitionKey": f"{due:%Y%m%d%H}",
        "RowKey": f"{due:%Y%m%d%H%M%S}_{number:032x}",
        "Destination": "sales",
        "Body": b"\xef\xbb\xbf{}",
        "MessageId": f"00000000-0000-0000-0000-{number:012}",
        "Headers": '{"NServiceBus.EnclosedMessageTypes":"Contoso.Reminder","HelpLink":null}',
    } | other


async def test_messages_stored_by_dotnet_are_delivered_and_never_early(azure_url: str, table: TableClient) -> None:
    # Given rows of a .NET instance of the same endpoint, which rounds due times down to the second
    noted = HandledMessages()
    due = datetime.now(UTC) + SECOND
    await table.create_entity(row_of_dotnet(due))
    await table.create_entity(row_of_dotnet(due - timedelta(hours=30), 2))
    # When
    async with endpoint_at(azure_url, noted=noted):
        await noted.until(2)
        arrived = datetime.now(UTC)
    # Then
    assert arrived >= due.replace(microsecond=0) + SECOND
    assert [message.id[-1] for message in noted] == ["2", "1"]
    assert noted[1].json() == {}
    assert noted[1].headers["NServiceBus.EnclosedMessageTypes"] == "Contoso.Reminder"
    assert [row async for row in table.list_entities()] == []


async def test_dotnet_can_read_stored_timeouts(azure_url: str, table: TableClient) -> None:
    due = datetime(2050, 5, 1, 12, 0, 0, tzinfo=UTC)
    async with endpoint_at(azure_url) as endpoint:
        await endpoint.transport.setup_infrastructure(["billing"])
        await endpoint.send("billing", b"\x00\xff", message_id="m", headers={"k": "ü"}, deliver_at=due)
    [row] = [row async for row in table.list_entities() if row["PartitionKey"].isdigit()]
    assert (row["PartitionKey"], row["RowKey"]) == ("2050050111", "20500501115959_m")
    assert (row["Destination"], row["MessageId"], row["Body"]) == ("billing", "m", b"\x00\xff")
    assert '"k":"ü"' in row["Headers"]
    assert set(row) == {"PartitionKey", "RowKey", "Destination", "MessageId", "Body", "Headers", "NumberOfRetries"}


async def test_messages_stored_by_dotnet_can_be_cancelled_and_rescheduled(
    azure_url: str, table: TableClient, store: AzureDelayedTable
) -> None:
    far = datetime(2050, 5, 1, 12, 0, 0, tzinfo=UTC)
    for number in (1, 2):
        await table.create_entity(row_of_dotnet(far, number))
    assert await store.cancel("00000000-0000-0000-0000-000000000001") is Outcome.DONE
    assert await store.reschedule("00000000-0000-0000-0000-000000000002", far + SECOND * 7200) is Outcome.DONE
    assert [message.due for message in await store.pending()] == [far + SECOND * 7200]


async def test_foreign_rows_stay_and_block_no_others(azure_url: str, table: TableClient) -> None:
    # Given more rows than a page of .NET has, all of them overdue and none of them a message
    past = datetime.now(UTC) - timedelta(hours=1)
    rows = [row_of_dotnet(past, number, Destination="") for number in range(60)]
    rows += [
        row_of_dotnet(past, 70, Body="text"),
        {"PartitionKey": "2020", "RowKey": "mine", "note": "another application's"},
        {"PartitionKey": "2020010100", "RowKey": "2020010199_x"},
        row_of_dotnet(past, 80, MessageId=5),
        row_of_dotnet(past, 81, Destination=past),
        row_of_dotnet(past, 82, EncodedHeaders="text"),
    ]
    for row in rows:
        await table.create_entity(row)
    noted = HandledMessages()

    async def none_pending() -> bool:
        return not await endpoint.delayed.pending()

    # When
    with Signals() as signals:
        async with endpoint_at(azure_url, noted=noted) as endpoint:
            await endpoint.send("sales", b"", message_id="m", delay=SECOND)
            await noted.until(1)
            # Then the message leaves the table after it was handled, and each foreign row is reported once
            await eventually_async(none_pending)
    assert [message.id for message in noted] == ["m"]
    assert signals.count(Event.FOREIGN_ROW) == len(rows)
    left = [row["RowKey"] async for row in table.list_entities() if row["PartitionKey"].isdigit()]
    assert len(left) == len(rows)


async def test_a_message_without_an_envelope_is_moved_to_the_error_queue_as_it_is(
    azure_url: str, table: TableClient, error_queue: QueueClient
) -> None:
    noted = HandledMessages()
    async with QueueClient.from_connection_string(connection(azure_url), "sales") as queue:
        for text in ("not base64!", base64.b64encode(b'{"Id": 7}').decode()):
            await queue.send_message(text)
    async with endpoint_at(azure_url, noted=noted) as endpoint:
        await endpoint.send("sales", b"", message_id="m")
        await noted.until(1)
        async with asyncio.timeout(PATIENCE):
            while (await error_queue.get_queue_properties()).approximate_message_count != 2:  # noqa: ASYNC110 - a server
                await asyncio.sleep(0.05)
    found = [message async for message in error_queue.receive_messages()]
    assert {message.content for message in found} == {"not base64!", base64.b64encode(b'{"Id": 7}').decode()}
    assert all(message.expires_on is not None and message.expires_on.year == 9999 for message in found)


@pytest.mark.parametrize(
    "malformed",
    [
        {"Id": "a", "Headers": {}, "Body": 5},
        {"Id": "a", "Headers": {}, "Body": [1]},
        {"Id": "a", "Headers": {}, "Body": "", "EncodedHeaders": 7},
    ],
)
async def test_a_malformed_envelope_does_not_hide_its_neighbours(
    azure_url: str, table: TableClient, error_queue: QueueClient, malformed: dict[str, object]
) -> None:
    # Given a page of messages, one of them with members of types that no sender writes
    noted = HandledMessages()
    text = base64.b64encode(json.dumps(malformed).encode()).decode()
    async with AsyncExitStack() as stack:
        queue = await stack.enter_async_context(QueueClient.from_connection_string(connection(azure_url), "sales"))
        for number in range(3):
            await queue.send_message(wrap(Message(f"before-{number}", {}, b"")))
        await queue.send_message(text)
        for number in range(3):
            await queue.send_message(wrap(Message(f"behind-{number}", {}, b"")))
        # When
        await stack.enter_async_context(endpoint_at(azure_url, noted=noted))
        await noted.until(6)
        moved: list[str] = []
        async with asyncio.timeout(PATIENCE):
            while not moved:
                moved = [message.content async for message in error_queue.receive_messages()]
    # Then all neighbours were handled once, and it is in the error queue as it was
    assert sorted(message.id for message in noted) == [f"{side}-{n}" for side in ("before", "behind") for n in range(3)]
    assert moved == [text]


async def test_a_message_that_cannot_be_kept_hidden_does_not_keep_others_from_it(azure_url: str) -> None:
    """When the queue is deleted, renewing fails with its own error, and continues for other messages."""
    transport = AzureStorageQueueTransport(azure_url, visibility_timeout=SECOND)
    await transport.setup_infrastructure(["sales"])
    await transport.start()
    try:
        receiver = await transport.receiver("sales")
        await transport.dispatch([TransportOperation(Message("m", {}, b""), "sales")])
        [held] = await receiver.receive(1)
        async with QueueClient.from_connection_string(connection(azure_url), "sales") as queue:
            with Signals() as signals:
                await queue.delete_queue()
                async with asyncio.timeout(PATIENCE):
                    while signals.count(Event.RECEIVE_LOST) < 2:  # noqa: ASYNC110 - a server
                        await asyncio.sleep(0.05)
        await receiver.release(held)
    finally:
        await transport.stop()


async def test_a_place_that_leads_nowhere_is_taken_over(
    azure_url: str, table: TableClient, store: AzureDelayedTable
) -> None:
    """The row that says where an id's message is may be damaged; the next message of the id is stored all the same."""
    far = datetime(2050, 5, 1, 12, 0, 0, tzinfo=UTC)
    for number, place in enumerate([5, "", "a/b#?", None, "20500501110000_\x01"]):
        key = place_key(f"m{number}")
        values = {} if place is None else {"Place": place}
        await table.create_entity({"PartitionKey": key.partition, "RowKey": key.row, **values})
        await store.store(replace(delayed(due=far), message=Message(f"m{number}", {}, b"")))
        assert await store.cancel(f"m{number}") is Outcome.DONE


@pytest.mark.slow
async def test_a_handler_may_take_longer_than_its_message_is_hidden(azure_url: str) -> None:
    handled: list[str] = []
    done = asyncio.Event()
    first, second = (endpoint_at(azure_url, visibility_timeout=SECOND) for _ in range(2))

    async def handle(message: Message, context: MessageContext) -> None:
        handled.append(message.id)
        await asyncio.sleep(2.5)
        done.set()

    for endpoint in (first, second):
        endpoint.handler(handle)
    async with first, second:
        await first.send("sales", b"")
        async with asyncio.timeout(PATIENCE):
            await done.wait()
        await asyncio.sleep(1.5)
    assert len(handled) == 1


async def test_messages_of_another_process_arrive_within_two_seconds(azure_url: str, store: AzureDelayedTable) -> None:
    noted = HandledMessages()
    async with endpoint_at(azure_url, noted=noted):
        await asyncio.sleep(0.2)
        asked = time.monotonic()
        await store.store(delayed(due=datetime.now(UTC), destination="sales"))
        await noted.until(1)
        assert time.monotonic() - asked < 3.5  # a second to round up, one to look, one of two busy processors


async def test_a_message_too_large_to_be_dispatched_is_refused_when_it_is_stored(azure_url: str) -> None:
    async with endpoint_at(azure_url) as endpoint:
        with pytest.raises(InvalidMessage, match="36500 bytes"):
            await endpoint.send("sales", b"x" * 36_500, delay=SECOND)
        with pytest.raises(InvalidMessage, match="has headers of"):
            await endpoint.send("sales", b"", headers={"h": "x" * 33_000}, delay=SECOND)
        assert list(await endpoint.delayed.pending()) == []


async def test_a_queue_that_is_made_later_is_seen(azure_url: str) -> None:
    """.NET remembers for ever that a queue does not exist."""
    transport = AzureStorageQueueTransport(azure_url)
    async with endpoint_at(azure_url) as endpoint:
        with pytest.raises(LookupError):
            await endpoint.send("billing", b"")
        await transport.setup_infrastructure(["billing"])
        await asyncio.sleep(1.5)  # a missing queue is remembered for a second
        await endpoint.send("billing", b"")


async def test_a_message_to_be_received_in_time_has_a_life_in_azure(azure_url: str) -> None:
    async with endpoint_at(azure_url) as endpoint:
        await AzureStorageQueueTransport(azure_url).setup_infrastructure(["billing"])
        await endpoint.send("billing", b"", headers={Headers.TIME_TO_BE_RECEIVED: "00:01:00.5"})
    async with QueueClient.from_connection_string(connection(azure_url), "billing") as queue:
        message = await queue.receive_message()
    assert message is not None
    assert message.expires_on is not None
    assert message.inserted_on is not None
    assert message.expires_on - message.inserted_on == timedelta(seconds=61)
    assert unwrap("", message.content).headers[Headers.TIME_TO_BE_RECEIVED] == "00:01:00.5"


@pytest.mark.slow
async def test_a_broken_lease_is_logged_and_other_processes_fetch_its_messages(
    azure_url: str, store: AzureDelayedTable
) -> None:
    # Given a message in the hands of one process
    other = AzureDelayedTable(azure_url)
    await other.initialize("sales", TransactionMode.RECEIVE_ONLY)
    now = datetime.now(UTC)
    await store.store(delayed(due=now))
    with Signals() as signals:
        assert await store.fetch_next_due(now + SECOND) is not None
        assert await other.fetch_next_due(now + SECOND) is None
        # When its lease is broken
        account = AzureAccount(azure_url)
        await account.open()
        container = account.clients.blobs.get_container_client(delays_name("sales"))
        await BlobLeaseClient(container).break_lease(0)
        await account.close()
        # Then
        fetched = await other.fetch_next_due(now + SECOND)
        assert fetched is not None
        await signals.wait_for(Event.LEASE_LOST, timeout=PATIENCE)
        assert await other.remove(fetched) is True
        assert await store.remove(fetched) is False
    await other.close()


async def test_endpoints_with_and_without_a_timeout_manager_exchange_delayed_messages(
    azure_url: str, tmp_path: Path
) -> None:
    """Both ways, as the document promises: a receiver cannot tell how a message has waited."""
    # Given an endpoint of each schema on one account
    old_noted, new_noted = HandledMessages(), HandledMessages()
    account = AzureAccount(azure_url)
    old = Endpoint(
        "old",
        transport=AzureStorageQueueTransport(account),
        delayed_delivery=TimeoutManagerDelivery(SqlTimeoutPersister(f"sqlite:///{tmp_path / 'timeouts.db'}")),
    )
    old.handler(old_noted.handle)
    new = endpoint_at(azure_url, "new", new_noted)
    # When
    async with old, new:
        await old.send("new", b"from the old one", delay=SECOND)
        await new.send("old", b"from the new one", delay=SECOND)
        await old_noted.until(1)
        await new_noted.until(1)
        queues = {one.name async for one in account.clients.queues.list_queues()}
    # Then
    assert [message.text for message in old_noted] == ["from the new one"]
    assert [message.text for message in new_noted] == ["from the old one"]
    assert queues == {"old", "old-timeouts", "old-timeoutsdispatcher", "new", "error"}


async def test_an_endpoint_that_has_moved_to_the_table_drains_its_timeout_manager(
    azure_url: str, tmp_path: Path
) -> None:
    # Given what its timeout manager has stored before the upgrade
    def persister() -> SqlTimeoutPersister:
        return SqlTimeoutPersister(f"sqlite:///{tmp_path / 'timeouts.db'}")

    account = AzureAccount(azure_url)
    before = Endpoint(
        "sales",
        transport=AzureStorageQueueTransport(account),
        delayed_delivery=TimeoutManagerDelivery(persister()),
    )
    async with before:
        await before.send("sales", b"old", delay=3 * SECOND)
        await asyncio.sleep(1.5)
    # When it starts with the table, draining
    noted = HandledMessages()
    after = Endpoint(
        "sales",
        transport=AzureStorageQueueTransport(account),
        delayed_delivery=DelayedTableDelivery(account),
        draining=TimeoutManagerDelivery(persister()),
    )
    after.handler(noted.handle)
    async with after:
        await after.send("sales", b"new", delay=SECOND)
        await noted.until(2)
    assert {message.text for message in noted} == {"old", "new"}


async def test_a_deleted_container_is_created_again(azure_url: str, store: AzureDelayedTable) -> None:
    """.NET never makes it again."""
    now = datetime.now(UTC)
    await store.store(delayed(due=now))
    async with ContainerClient.from_connection_string(connection(azure_url), delays_name("sales")) as container:
        await container.delete_container()
        assert await store.fetch_next_due(now + SECOND) is not None
        assert await container.exists()


async def test_an_endpoint_whose_name_has_dots_is_addressed_as_dotnet_addresses_it(azure_url: str) -> None:
    # Given endpoints on a transport with the sanitizer, by its URL
    noted, answers = HandledMessages(), HandledMessages()
    account = AzureAccount(f"{azure_url}queue_name_sanitizer=dots-to-hyphens")

    def endpoint(name: str) -> Endpoint:
        return Endpoint(
            name, transport=AzureStorageQueueTransport(account), delayed_delivery=DelayedTableDelivery(account)
        )

    sales, billing = endpoint("Contoso.Sales"), endpoint("Contoso.Billing")
    sales.handler(answers.handle)

    @billing.handler
    async def handle(message: Message, context: MessageContext) -> None:
        await noted.handle(message, context)
        await context.reply({"paid": True})

    # When one sends to the other by its name, now and later
    async with sales, billing:
        await sales.send("Contoso.Billing", b"", message_id="now")
        await sales.send("Contoso.Billing", b"", message_id="later", delay=SECOND)
        await noted.until(2)
        await answers.until(2)
        queues = await sales.transport.queues()  # type: ignore[attr-defined]
    # Then names and addresses are those of .NET
    assert set(queues) == {"contoso-sales", "contoso-billing", "error"}
    for message in noted:
        assert message.headers[Headers.REPLY_TO] == "contoso-sales"
        assert message.headers[Headers.ORIGINATING_ENDPOINT] == "Contoso.Sales"
    name = "delaysc020b82bdef476d113b9a5987918421f23755656"
    async with TableClient.from_connection_string(connection(azure_url), name) as table:
        assert [row async for row in table.list_entities() if row["PartitionKey"].isdigit()] == []


async def test_requests_are_logged_on_request_only(azure_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Given an application that logs at INFO, when messages are handled, then Azure's client logs no request."""
    caplog.set_level("INFO")
    handled = HandledMessages()
    endpoint = endpoint_at(azure_url, noted=handled)
    async with endpoint:
        await endpoint.send("sales", b"", message_id="m")
        await handled.until(1)
        assert [record.name for record in caplog.records if record.name.startswith("azure")] == []
        assert [record for record in caplog.records if record.name == "delayline.azure.http"] == []
        # When it sets the level, then there are some
        caplog.set_level("INFO", logger="delayline.azure.http")
        await endpoint.send("sales", b"", message_id="n")
        assert any("queue" in record.getMessage() for record in caplog.records if record.name == "delayline.azure.http")


async def orphaned(table: TableClient, store: AzureDelayedTable, ids: Sequence[str], due: datetime) -> None:
    """Store messages, and delete their rows, as a .NET endpoint does that dispatches them."""
    await store.store_many([replace(delayed(due=due), message=Message(one, {}, b"")) for one in ids])
    for one in ids:
        key = message_key(one, due)
        await table.delete_entity(key.partition, key.row)


async def index_of(table: TableClient) -> list[str]:
    return sorted([row["RowKey"] async for row in table.list_entities() if not row["PartitionKey"].isdigit()])


async def test_index_rows_that_point_at_nothing_are_deleted(
    azure_url: str, table: TableClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given messages stored here and dispatched by .NET, when some time has passed, then their index rows go too."""
    now = datetime.now(UTC)
    clock = ManualClock(now)
    store = AzureDelayedTable(azure_url, clock=clock)
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    await orphaned(table, store, [f"gone{number}" for number in range(120)] + ["ö/1"], now - SECOND)
    await orphaned(table, store, ["future"], now + timedelta(days=1))
    await store.store(replace(delayed(due=now - SECOND), message=Message("waits", {}, b"")))
    # Then none of them is touched as long as they may belong to a message that is just being stored
    assert (await store.count_orphans(), len(await index_of(table))) == (0, 123)
    await clock.advance(timedelta(minutes=20))
    assert await store.count_orphans() == 121
    # When a poller runs
    monkeypatch.setattr("delayline.azure.delayed_table.SWEEP_AFTER", 0.1)
    monkeypatch.setattr("delayline.azure.delayed_table.SWEEP_PAUSE", 0.01)
    stop = store.on_stored(lambda due: None)
    await eventually_async(lambda: has_index(table, ["future", "waits"]))
    stop()
    await store.close()


async def has_index(table: TableClient, names: list[str]) -> bool:
    return await index_of(table) == names


async def test_an_index_row_of_another_message_hides_no_message(
    azure_url: str, table: TableClient, store: AzureDelayedTable
) -> None:
    """Given an index row that points at another message, when one of its id is stored, then both are kept."""
    due = datetime(2050, 5, 1, 12, tzinfo=UTC)
    await store.store(replace(delayed(due=due), message=Message("other", {}, b"")))
    wrong = place_key("mine")
    place = message_key("other", due).row
    await table.create_entity({"PartitionKey": wrong.partition, "RowKey": wrong.row, "Place": place})
    assert await store.cancel("mine") is Outcome.NOT_PENDING
    await store.store(replace(delayed(due=due + SECOND), message=Message("mine", {}, b"")))
    assert [message.id for message in await store.pending()] == ["other", "mine"]
    assert await store.cancel("mine") is Outcome.DONE
    assert [message.id for message in await store.pending()] == ["other"]


async def test_a_missing_queue_is_asked_for_once_a_second_and_found_when_it_is_made(
    azure_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a queue that does not exist, and one that does
    asked: list[str] = []
    send = QueueClient.send_message

    async def counted(client: QueueClient, *arguments: object, **options: object) -> object:
        asked.append(client.queue_name)
        return await send(client, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(QueueClient, "send_message", counted)
    transport = AzureStorageQueueTransport(azure_url)
    await transport.setup_infrastructure(["there"])
    await transport.start()
    # When many messages for both are sent together
    names = ["gone", "there"] * 200
    operations = [TransportOperation(Message(str(number), {}, b""), name) for number, name in enumerate(names)]
    with pytest.raises(DispatchFailed) as failed:
        await transport.dispatch(operations)
    # Then those for the missing one fail, few of which were asked for, and the others are sent
    assert {names[position] for position in failed.value.failures} == {"gone"}
    assert all(isinstance(error, QueueNotFound) for error in failed.value.failures.values())
    assert len(failed.value.failures) == asked.count("there") == 200
    assert asked.count("gone") < 150
    # When another process makes it
    other = AzureStorageQueueTransport(azure_url)
    await other.setup_infrastructure(["gone"])

    # Then it is found within a second or so
    async def arrives() -> bool:
        try:
            await transport.dispatch(operations[:1])
        except DispatchFailed:
            return False
        return True

    await eventually_async(arrives, "the queue is found")
    # And at once where this one makes it
    with pytest.raises(DispatchFailed):
        await transport.dispatch([TransportOperation(Message("n", {}, b""), "new")])
    await transport.setup_infrastructure(["new"])
    await transport.dispatch([TransportOperation(Message("n", {}, b""), "new")])
    await transport.stop()
