"""An endpoint on a storage account, and what its handler has seen."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from tests.eventually import PATIENCE

from delayline import (
    Endpoint,
    Message,
    MessageContext,
)
from delayline.azure import AzureAccount, AzureStorageQueueTransport, DelayedTableDelivery

SECOND = timedelta(seconds=1)


class HandledMessages(list[Message]):
    """Messages that a handler has seen."""

    def __init__(self) -> None:
        super().__init__()
        self._news = asyncio.Event()

    async def handle(self, message: Message, context: MessageContext) -> None:
        self.append(message)
        self._news.set()

    async def until(self, number: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while len(self) < number:
                self._news.clear()
                await self._news.wait()


def endpoint_at(
    url: str, name: str = "sales", noted: HandledMessages | None = None, visibility_timeout: timedelta = 30 * SECOND
) -> Endpoint:
    account = AzureAccount(url)
    endpoint = Endpoint(
        name,
        transport=AzureStorageQueueTransport(account, visibility_timeout=visibility_timeout),
        delayed_delivery=DelayedTableDelivery(account),
    )
    if noted is not None:
        endpoint.handler(noted.handle)
    return endpoint


def connection(url: str) -> str:
    return url.partition(":")[2]
