"""MessagesTarget: a back end without bulk writing; each message is kept as an endpoint keeps it when it is sent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar, Final

import pyarrow as pa

from delayline.backends import UNKNOWN_QUEUE, backend_of
from delayline.bulk.writer import blocking
from delayline.composition import endpoint_from, transport_of
from delayline.delayed.arrow import rows_in
from delayline.errors import ConfigurationError, InvalidMessage, QueueNotFound
from delayline.masking import masked
from delayline.message import in_utc
from delayline.migration.rows import WAITING_COLUMNS, checked_message, waiting_batch
from delayline.migration.target import Delivered, DeliverySession, WithoutLedger
from delayline.opening import open_pending, open_store, open_waiting
from delayline.settings import Settings
from delayline.transport import SupportsQueueLookup, TransportOperation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
    from contextlib import AsyncExitStack
    from datetime import timedelta

    from pyspark.sql import DataFrame, SparkSession

    from delayline.backends import Backend
    from delayline.delayed.columns import StoredRow
    from delayline.message import DelayedMessage
    from delayline.migration.target import Attempted

#: Rows that every back end takes as a limit.
ALL_MESSAGES: Final = 2**31 - 1
KEPT_AT_ONCE: Final = 100


class MessagesTarget(WithoutLedger):
    """The queues and delayed messages of a back end, which `delayline setup` has made; pickled to tasks."""

    kind: ClassVar[str] = "messages"
    exactly_once: ClassVar[bool] = False

    def __init__(self, url: str) -> None:
        self.url = url

    def __str__(self) -> str:
        return masked(self.url)

    @property
    def backend(self) -> Backend:
        """The back end of the URL."""
        return backend_of(self.url)

    @property
    def longest(self) -> timedelta | None:
        """The longest delay that it holds a message for."""
        return self.backend.longest_delay

    @property
    def grain(self) -> timedelta:
        """The resolution to which it rounds due times up."""
        return self.backend.grain

    @property
    def largest_message(self) -> int:
        """How many bytes headers and body may have together."""
        return self.backend.largest_message

    def endpoint_named(self, name: str) -> str:
        """Return the name. Raises BackendUnusable if the endpoint's messages cannot wait there yet."""

        async def look() -> None:
            if self.backend.unlisted is None:
                async with open_pending(Settings(endpoint=name, url=self.url)):
                    pass

        blocking(look())
        return name

    def refusals(self, destinations: Sequence[str]) -> Mapping[str, str]:
        """Return the destinations that have no queue; none where the queues are elsewhere, or cannot be looked up."""
        try:
            transport = transport_of(Settings(url=self.url))
        except ConfigurationError:
            return {}

        async def look() -> Mapping[str, str]:
            await transport.start()
            try:
                if not isinstance(transport, SupportsQueueLookup):
                    return {}
                return {
                    name: UNKNOWN_QUEUE.format(name) for name in destinations if not await transport.has_queue(name)
                }
            finally:
                await transport.stop()

        return blocking(look())

    def waiting(self, endpoint: str, spark: SparkSession) -> DataFrame | None:
        """Return the pending messages of the endpoint, which a single task reads; None if they cannot be listed."""
        if self.backend.unlisted is not None:
            return None

        def read(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            if sum(batch.num_rows for batch in numbers):
                yield blocking(self._pending(endpoint))

        return spark.range(0, 1, 1, 1).mapInArrow(read, WAITING_COLUMNS)

    def begin(self, endpoint: str) -> MessagesSession:
        """Return a session; nothing is staged."""
        return MessagesSession(self.url, endpoint, self.largest_message)

    async def _pending(self, endpoint: str) -> pa.RecordBatch:
        async with open_waiting(Settings(endpoint=endpoint, url=self.url), timeouts=False) as waiting:
            messages = await waiting.pending(limit=ALL_MESSAGES)
        return waiting_batch(messages)


class MessagesSession(DeliverySession):
    """Keeps batches of an endpoint's messages in its back end."""

    _keep: Callable[[DelayedMessage], Awaitable[None]]

    def __init__(self, url: str, endpoint: str, largest_message: int) -> None:
        self.largest_message = largest_message
        self._url = url
        self._endpoint = endpoint

    async def open(self, stack: AsyncExitStack) -> None:
        """Open the back end's own delivery, or its store."""
        settings = Settings(endpoint=self._endpoint, url=self._url)
        if backend_of(self._url).native_delays is None:
            self._keep = (await stack.enter_async_context(open_store(settings))).store
            return
        endpoint = endpoint_from(settings, polling=False, send_only=True, setup_infrastructure=False)
        await stack.enter_async_context(endpoint)
        delivery = endpoint.delayed_delivery
        assert delivery is not None  # noqa: S101 - settings describe it

        async def defer(message: DelayedMessage) -> None:
            await delivery.defer(TransportOperation(message.message, message.destination), message.due)

        self._keep = defer

    async def deliver(self, messages: pa.RecordBatch, attempt: Attempted) -> Delivered:
        """Keep each message durably; a message that the back end cannot take is refused alone."""
        rows = list(rows_in(messages))
        refused: dict[int, str] = {}
        for first in range(0, len(rows), KEPT_AT_ONCE):
            works = [self._keep_row(row) for row in rows[first : first + KEPT_AT_ONCE]]
            for position, error in enumerate(await asyncio.gather(*works, return_exceptions=True), first):
                if isinstance(error, InvalidMessage | QueueNotFound):
                    refused[position] = str(error)
                elif error is not None:
                    raise error
        return Delivered(attempt.number, refused)

    async def _keep_row(self, row: StoredRow) -> None:
        await self._keep(checked_message(row, in_utc))
