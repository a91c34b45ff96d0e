"""The back end of `azure:` URLs: the queues and tables of a storage account."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from delayline.azure.delayed_table import AzureDelayedTable
from delayline.azure.doctor import examine
from delayline.azure.message_sink import DelayedTableSink
from delayline.azure.transport import AzureStorageQueueTransport
from delayline.backends import Backend, BulkRoute
from delayline.errors import ConfigurationError

if TYPE_CHECKING:
    from delayline.backends import BackendOptions, BackendUse, Findings
    from delayline.delayed.store import DelayedMessageStore
    from delayline.transport import Transport


class AzureBackend(Backend):
    """Azure Storage Queues, and delayed messages in a table of the account."""

    bulk_route = BulkRoute.TABLE_ROWS

    def transport(self, url: str, options: BackendOptions) -> Transport:
        """Return a new transport on the account's queues."""
        del options
        return AzureStorageQueueTransport(url)

    def store(self, url: str, options: BackendOptions) -> DelayedMessageStore:
        """Return a new store on a table of the account."""
        return AzureDelayedTable(url, table_name=options.table_name)

    def sink(self, url: str, name: str, *, endpoint: str = "") -> DelayedTableSink:
        """Return the table of the endpoint's delayed messages, to be written to."""
        del name
        return DelayedTableSink(url, endpoint)

    async def examine(self, url: str, options: BackendOptions, use: BackendUse) -> Findings:
        """Return findings about the services, the clocks and the endpoint's table."""
        return await examine(url, endpoint=options.name) if use.delays else ()

    async def planned_setup(self, url: str, options: BackendOptions, use: BackendUse) -> NoReturn:
        """Raise ConfigurationError: there are no statements."""
        del url, options, use
        raise ConfigurationError(
            "--dry-run prints SQL, which Azure Storage does not use: run delayline setup without it"
        )
