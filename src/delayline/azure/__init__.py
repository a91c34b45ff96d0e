"""Azure Storage Queues, delayed messages in a table, one dispatcher at a time under a lease."""

from delayline.errors import MissingExtra

try:
    from delayline.azure.account import AzureAccount
    from delayline.azure.delayed_table import AzureDelayedTable, DelayedTableDelivery
    from delayline.azure.names import dots_to_hyphens
    from delayline.azure.transport import AzureStorageQueueTransport
except ModuleNotFoundError as _error:
    if (_error.name or "").partition(".")[0] not in {"azure", "aiohttp"}:
        raise
    raise MissingExtra("azure", "Azure Storage") from _error

__all__ = ["AzureAccount", "AzureDelayedTable", "AzureStorageQueueTransport", "DelayedTableDelivery", "dots_to_hyphens"]
