"""Events on Azure Storage: the table of subscriptions as .NET endpoints have it, and what may be wrong in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from azure.data.tables.aio import TableClient
from tests.eventually import eventually_async
from tests.integration.azure_parts import connection

from delayline import Endpoint, Event, MessageContext, message_type
from delayline.azure import AzureStorageQueueTransport, DelayedTableDelivery
from delayline.azure.names import topic_key
from delayline.errors import BackendUnusable, ConfigurationError
from delayline.testing import Signals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@message_type("Contoso.Lab.Happened")
@dataclass
class Happened:
    Label: str


@message_type("Contoso.Lab.HappenedAgain")
@dataclass
class HappenedAgain(Happened):
    pass


@pytest_asyncio.fixture
async def table(azure_url: str) -> AsyncIterator[TableClient]:
    """Provide the table of subscriptions, which may not be there yet."""
    async with TableClient.from_connection_string(connection(azure_url), "subscriptions") as client:
        yield client


def subscriber(url: str, name: str, got: list[str]) -> Endpoint:
    transport = AzureStorageQueueTransport(url, queue_name_sanitizer="dots-to-hyphens")
    endpoint = Endpoint(name, transport=transport)

    @endpoint.subscribes(Happened)
    async def note(event: Happened, context: MessageContext) -> None:
        got.append(event.Label)

    return endpoint


def shop(url: str) -> Endpoint:
    return Endpoint("shop", transport=AzureStorageQueueTransport(url), delayed_delivery=DelayedTableDelivery(url))


async def test_a_subscription_is_the_row_that_dotnet_writes(azure_url: str, table: TableClient) -> None:
    # When an endpoint of a name with dots subscribes, twice
    got: list[str] = []
    for _ in range(2):
        async with subscriber(azure_url, "Contoso.Billing", got) as billing, shop(azure_url) as publisher:
            await publisher.publish(HappenedAgain("one"))
            await eventually_async(lambda: bool(got))
    # Then
    keys = ("PartitionKey", "RowKey", "Topic", "Endpoint", "Address")
    rows = [tuple(row[key] for key in keys) async for row in table.list_entities()]
    topic, name = "Contoso.Lab.Happened", "Contoso.Billing"
    assert rows == [(topic, name, topic, name, "contoso-billing")]
    # And it ends on demand
    async with billing:
        await billing.unsubscribe(Happened)
    assert [row async for row in table.list_entities()] == []


async def test_rows_of_dotnet_count_and_bad_ones_keep_nobody_from_theirs(azure_url: str, table: TableClient) -> None:
    # Given rows of .NET for the same queue in other letters, and rows of queues that are nowhere or cannot be
    got: list[str] = []
    async with subscriber(azure_url, "billing", got), shop(azure_url) as publisher:
        kept = {"PartitionKey": "Contoso.Lab.HappenedAgain"}
        await table.create_entity({**kept, "RowKey": "Billing", "Address": "BILLING"})
        await table.create_entity({**kept, "RowKey": "abroad", "Address": "audit@other"})
        await table.create_entity({**kept, "RowKey": "gone", "Address": "nowhere"})
        await table.create_entity({**kept, "RowKey": "no address", "Address": 5})
        # When
        with Signals() as signals:
            await publisher.publish(HappenedAgain("one"))
            gone = {
                record.getMessage().partition(" subscribes ")[0] for record in signals.records(Event.SUBSCRIBER_GONE)
            }
        # Then the queue gets one copy, and what gets none is logged
        assert gone == {"queue audit@other", "queue nowhere", "queue no address"}
        transport = publisher.transport
        await eventually_async(lambda: bool(got))
        assert isinstance(transport, AzureStorageQueueTransport)
    await transport.start()
    assert await transport.count("billing") == 0
    await transport.stop()
    assert got == ["one"]


async def test_without_the_table_events_name_the_setup(azure_url: str) -> None:
    endpoint = Endpoint("shop", transport=AzureStorageQueueTransport(azure_url), setup_infrastructure=False)
    async with endpoint:
        with pytest.raises(BackendUnusable, match=r"table 'subscriptions' does not exist: run `delayline setup`"):
            await endpoint.publish(Happened("one"))


async def test_publishers_and_subscribers_of_another_table_find_each_other(azure_url: str) -> None:
    transport = AzureStorageQueueTransport(azure_url, subscription_table="Other")
    await transport.setup_infrastructure(["billing"])
    await transport.start()
    await transport.subscribe("billing", ["Contoso.Lab.Happened"])
    endpoint = Endpoint("shop", transport=AzureStorageQueueTransport(azure_url, subscription_table="other"))
    async with endpoint:
        await endpoint.publish(Happened("one"))
    assert await transport.count("billing") == 1
    await transport.stop()
    with pytest.raises(ConfigurationError, match="subscription_table='a-b' cannot"):
        AzureStorageQueueTransport(azure_url, subscription_table="a-b")


@pytest.mark.parametrize("name", ["a/b", "a\\b", "a#b", "a?b", "a%b", "a\nb", "a\x85b", "\ud800", "~x", "x" * 300])
def test_a_name_that_azure_refuses_as_a_key_is_hashed(name: str) -> None:
    assert topic_key(name) != topic_key(f"{name}2")
    assert len(topic_key(name)) == 65
    assert topic_key("Contoso.Lab.Outer+Inner`1") == "Contoso.Lab.Outer+Inner`1"
