"""The Azure transport and delayed table on Azurite: the conformance suites, for each of them and both together."""

from datetime import timedelta
from pathlib import Path

import pytest

from delayline.azure import AzureAccount, AzureDelayedTable, AzureStorageQueueTransport
from delayline.testing import DeliveryConformance, StoreConformance, TransportConformance

ONE_SECOND = timedelta(seconds=1)
LARGEST_BODY = 35_000


class OnAzurite:
    """A storage account for every test."""

    @pytest.fixture(autouse=True)
    def storage_account(self, azure_url: str) -> None:
        self.url = azure_url


class TestDelayedTable(OnAzurite, StoreConformance):
    durable = True
    step = ONE_SECOND
    keeps_order = False
    largest_body = LARGEST_BODY
    large_batch = 1100  # a page has 1000 entities, a transaction 100

    async def make_store(self, tmp_path: Path) -> AzureDelayedTable:
        return AzureDelayedTable(self.url)


class TestAzureQueues(OnAzurite, TransportConformance):
    keeps_order = False
    takes_any_name = False
    browses_hidden = False
    largest_body = LARGEST_BODY

    async def make_transport(self, tmp_path: Path) -> AzureStorageQueueTransport:
        return AzureStorageQueueTransport(self.url)


class TestAzureDelivery(OnAzurite, DeliveryConformance):
    burst = 200
    step = ONE_SECOND
    keeps_order = False
    arrives_in_order = False

    async def make_backends(self, tmp_path: Path) -> tuple[AzureStorageQueueTransport, AzureDelayedTable]:
        account = AzureAccount(self.url)
        return AzureStorageQueueTransport(account), AzureDelayedTable(account)
