"""The transport on Azure Storage Queues, in the envelope of NServiceBus."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeVar

from azure.core.exceptions import ResourceExistsError, ResourceNotFoundError

from delayline.azure.account import AzureAccount
from delayline.azure.envelope import unwrap, wrap
from delayline.azure.names import can_be_queue, checked_sanitizer, checked_table_name, queue_name
from delayline.azure.receiver import MESSAGE_PAGE, AzureReceiver, deleted_with, page_of, receipt_of, shown
from delayline.azure.requests import Requests, code_of
from delayline.azure.subscriptions import SUBSCRIPTIONS, SubscriptionTable
from delayline.checks import positive_seconds, time_span
from delayline.clock import EPOCH, ONE_SECOND
from delayline.errors import BackendUnavailable, BackendUnusable, ConfigurationError, DispatchFailed, QueueNotFound
from delayline.events import Event, emit
from delayline.topics import any_topic, copied, is_topic, log_gone, topics_among
from delayline.transaction import TransactionMode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from azure.storage.queue import QueueMessage
    from azure.storage.queue.aio import QueueClient

    from delayline.azure.names import Sanitizer
    from delayline.message import Message
    from delayline.transaction import Transaction
    from delayline.transport import TransportOperation

logger: logging.Logger = logging.getLogger(__name__)

Named = TypeVar("Named")

HIDDEN_FOR: Final = timedelta(seconds=30)
SEVEN_DAYS: Final = timedelta(days=7)
PARALLEL_SENDS: Final = 32
FOR_EVER: Final = -1
LONGEST_LIFE_SECONDS: Final = 2**31 - 1  # seconds
#: Seconds for which a queue that does not exist is not asked for again.
QUEUE_MISSING_FOR: Final = 1.0
#: How long a walk through a queue hides messages from others, at most.
WALK: Final = 60
#: How many addresses are compared with new ones; addresses of replies come from outside.
MOST_ADDRESSES: Final = 10_000
NO_SPAN: Final = timedelta(0)


class AzureStorageQueueTransport:
    """Transport with queues in a storage account.

    Queue names are lower-cased. Several messages sent at once may arrive in any order.

    Args:
        account: Its URL, or an AzureAccount shared with the delayed messages.
        poll_interval: The longest pause between looks at an empty queue.
        visibility_timeout: How long other receivers do not see a message after its receiver's process has crashed,
            1 second to 7 days; a running handler may take longer.
        server_timeout: Seconds that a request may take with its retries; by default the account's.
        queue_name_sanitizer: Converts names of endpoints and destinations to queue names: a function, or
            `dots-to-hyphens`; by default the sanitizer in the account's URL (`queue_name_sanitizer=dots-to-hyphens`). A
            .NET endpoint of the same name needs the same sanitizer.
        subscription_table: Name of the table of subscriptions, the same for publishers and subscribers.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    messaging_system = "azure_storage_queues"
    server_address = None

    def __init__(
        self,
        account: str | AzureAccount,
        *,
        poll_interval: timedelta = ONE_SECOND,
        visibility_timeout: timedelta = HIDDEN_FOR,
        server_timeout: float | None = None,
        queue_name_sanitizer: Sanitizer | str | None = None,
        subscription_table: str = SUBSCRIPTIONS,
    ) -> None:
        if server_timeout is not None:
            positive_seconds("server_timeout", server_timeout)
        self._account = AzureAccount.at(account)
        self._sanitizer = checked_sanitizer(queue_name_sanitizer) or self._account.queue_name_sanitizer
        self._addresses: dict[str, str] = {}
        self._requests = Requests(self._account.server_timeout if server_timeout is None else server_timeout)
        table_name = checked_table_name(subscription_table, "subscription_table")
        self._subscriptions = SubscriptionTable(self._account, self._requests, table_name)
        self._poll_interval = time_span("poll_interval", poll_interval).total_seconds()
        if not ONE_SECOND <= time_span("visibility_timeout", visibility_timeout) <= SEVEN_DAYS:
            raise ConfigurationError(f"visibility_timeout={visibility_timeout!r} must be 1 second to 7 days")
        self._hidden_for = -(-visibility_timeout // ONE_SECOND)
        self._slots = asyncio.Semaphore(PARALLEL_SENDS)
        self._clients: dict[str, QueueClient] = {}
        self._events: dict[str, asyncio.Event] = {}
        self._missing: dict[str, float] = {}
        """Queues that did not exist a moment ago, and until when that is taken for granted."""
        self._seen: dict[tuple[str, str], list[tuple[str, str]]] = {}

    @property
    def account(self) -> AzureAccount:
        """Where the queues are."""
        return self._account

    @property
    def transaction_domain(self) -> None:
        """None: a queue shares no transaction with anything."""
        return

    @property
    def highest_transaction_mode(self) -> TransactionMode:
        """A message leaves its queue after its handler's sends went out."""
        return TransactionMode.RECEIVE_ONLY

    def qualified(self, queue: str, qualifier: str) -> str:
        """Return `queue-qualifier`, in lower case, as in `sales-timeouts`."""
        return queue_name(f"{self.address_of(queue)}-{qualifier}")

    def address_of(self, endpoint_name: str) -> str:
        """Return the queue of an endpoint, as others have to address it. Raises ConfigurationError."""
        return endpoint_name if self._sanitizer is None else self._sanitized(endpoint_name, self._sanitizer)

    async def setup_infrastructure(self, queues: Sequence[str]) -> None:
        """Create the queues and the table of subscriptions. Raises ConfigurationError for an impossible name."""
        names = self._distinct(queues)
        await self.start()
        try:
            await self._subscriptions.make()
            await asyncio.gather(*(self._create(name) for name in dict.fromkeys(names)))
        finally:
            await self.stop()

    async def start(self) -> None:
        """Connect. Raises BackendUnusable for credentials that do not do."""
        self._requests.begin()
        await self._account.open()
        try:
            await self._check_credential()
        except BaseException:
            await self.stop()
            raise

    def stop_soon(self) -> None:
        """From now on wait at most a few seconds for answers."""
        self._requests.stop_soon()

    async def stop(self) -> None:
        """Undo a `start`."""
        self._requests.begin()
        self._clients.clear()
        self._missing.clear()
        self._subscriptions.close()
        await self._account.close()

    async def dispatch(self, operations: Sequence[TransportOperation], transaction: Transaction | None = None) -> None:
        """Send the messages, and a copy of each event to each subscriber, several at a time."""
        _refuse(transaction)
        if any_topic(operations):
            failures = await self._publish(operations)
        else:
            failures = dict(await self._send_each(enumerate(operations)))
        if not failures:
            return
        if len(failures) == len(operations) and (error := _common(list(failures.values()))):
            raise error
        raise DispatchFailed(failures)

    async def _publish(self, operations: Sequence[TransportOperation]) -> dict[int, Exception]:
        """Send the messages and the copies of events; return the first failure of each operation, by its position.

        A subscriber without a queue is logged, and no failure.
        """
        queues = await self._subscriptions.queues(topics_among(operations))
        copies = [
            ((position, copy.destination), copy)
            for position, operation in enumerate(operations)
            for copy in copied([operation], queues).operations
        ]
        failures: dict[int, Exception] = {}
        gone: dict[str, None] = {}
        for (position, queue), error in await self._send_each(copies):
            of_event = is_topic(operations[position].destination)
            if of_event and (isinstance(error, QueueNotFound) or not can_be_queue(queue)):
                gone[queue] = None
            else:
                failures.setdefault(position, error)
        log_gone(gone)
        return failures

    async def _send_each(self, operations: Iterable[tuple[Named, TransportOperation]]) -> list[tuple[Named, Exception]]:
        """Send the messages, several at a time; return the failures, by what names each operation."""
        named = list(operations)
        results = await asyncio.gather(*(self._send(operation) for _, operation in named), return_exceptions=True)
        failures: list[tuple[Named, Exception]] = []
        for (name, _), result in zip(named, results, strict=True):
            if isinstance(result, Exception):
                failures.append((name, result))
            elif result is not None:
                raise result
        return failures

    async def subscribe(self, queue: str, topics: Sequence[str]) -> None:
        """Let the queue have copies of events from now on."""
        await self._subscriptions.add(queue, queue_name(self.address_of(queue)), topics)

    async def unsubscribe(self, queue: str, topics: Sequence[str]) -> None:
        """Let the queue have no more copies of events."""
        await self._subscriptions.remove(queue, topics)

    async def receiver(self, queue: str) -> AzureReceiver:
        """Return a receiver on the queue."""
        client = await self._existing(queue)
        return AzureReceiver(
            client,
            queue,
            poll_interval=self._poll_interval,
            hidden_for=self._hidden_for,
            event=self._event_of(queue),
            requests=self._requests,
        )

    async def has_queue(self, queue: str) -> bool:
        """Return whether the queue exists."""
        try:
            await self.count(queue)
        except QueueNotFound:
            return False
        return True

    async def queues(self) -> Sequence[str]:
        """Return the names of all queues of the account, in order."""
        async with self._requests.ask("list the queues"):
            return [listed.name async for listed in self._account.clients.queues.list_queues()]

    async def count(self, queue: str) -> int:
        """Return how many messages are in the queue, hidden messages included; on a busy queue about how many."""
        client = self._client(queue)
        async with self._asking("count", queue):
            return int((await client.get_queue_properties()).approximate_message_count or 0)

    @property
    def peeked_at_most(self) -> int:
        """How many messages are looked at without hiding any."""
        return MESSAGE_PAGE

    async def browse(self, queue: str, limit: int, *, offset: int = 0) -> Sequence[Message]:
        """Return messages, oldest first, hidden messages left out.

        More than 32 cannot be looked at without taking them: the queue is hidden from others for the moment.
        """
        if offset + limit <= MESSAGE_PAGE:
            async with self._asking("look into", queue):
                messages = await self._client(queue).peek_messages(max_messages=offset + limit)
        else:
            messages = await self._walk(queue)
        return [unwrap(message.id, message.content) for message in messages[offset : offset + limit]]

    async def take(self, queue: str, message_id: str, transaction: Transaction | None = None) -> bool:
        """Remove the oldest copy of the message that is not being handled; slow unless it was browsed just before."""
        _refuse(transaction)
        for _ in range(2):
            copies = self._seen.get((queue, message_id), [])
            while copies:
                async with self._asking("take from", queue):
                    if await deleted_with(self._client(queue), *copies.pop(0)):
                        return True
            await self._walk(queue)
            if (queue, message_id) not in self._seen:
                return False
        return False

    async def purge(self, queue: str) -> int:
        """Remove every message that is not being handled, page by page."""
        client, number = self._client(queue), 0

        async def delete(message: QueueMessage) -> bool:
            async with self._asking("purge", queue):
                return await deleted_with(client, message.id, receipt_of(message))

        while page := await self._page("purge", queue):
            number += sum(await asyncio.gather(*(delete(message) for message in page)))
        return number

    async def _walk(self, queue: str) -> list[QueueMessage]:
        """Return every message that is not being handled, oldest first, and remember its receipt."""
        client = self._client(queue)
        messages: dict[str, QueueMessage] = {}

        async def show(message: QueueMessage) -> str | None:
            async with self._asking("look into", queue, self._slots):
                return await shown(client, message.id, receipt_of(message))

        while page := await self._page("look into", queue):
            fresh = {message.id: message for message in page if message.id not in messages}
            messages |= fresh
            if not fresh:
                break  # so many that the first messages are visible again
        in_order = sorted(messages.values(), key=lambda message: message.inserted_on or EPOCH)
        receipts = await asyncio.gather(*(show(message) for message in in_order))
        self._seen = {key: copies for key, copies in self._seen.items() if key[0] != queue}
        for message, receipt in zip(in_order, receipts, strict=True):
            if receipt is not None:
                self._seen.setdefault((queue, unwrap(message.id, message.content).id), []).append((message.id, receipt))
        return in_order

    async def _page(self, doing: str, queue: str) -> list[QueueMessage]:
        async with self._asking(doing, queue):
            return await page_of(self._client(queue), MESSAGE_PAGE, WALK)

    async def _send(self, operation: TransportOperation) -> None:
        message, queue = operation.message, operation.destination
        client = self._client(queue)
        span = message.time_to_be_received
        if span is not None and span <= NO_SPAN:
            emit(logger, logging.DEBUG, Event.EXPIRED, "Deleted expired message %s", message.id)
            return
        wrapped = wrap(message)
        name = client.queue_name
        try:
            async with self._asking("send to", queue, self._slots):
                self._check_not_missing(queue, name)
                await client.send_message(wrapped, time_to_live=_life(span))
        except QueueNotFound:
            self._missing.setdefault(name, asyncio.get_running_loop().time() + QUEUE_MISSING_FOR)
            raise
        self._missing.pop(name, None)
        self._event_of(queue).set()

    def _check_not_missing(self, queue: str, name: str) -> None:
        """Raise QueueNotFound if the queue did not exist a moment ago; after that a single send at a time asks."""
        if not self._missing:
            return
        now = asyncio.get_running_loop().time()
        if now < self._missing.get(name, 0.0):
            raise QueueNotFound(queue)
        for expired in [expired for expired, until in self._missing.items() if until <= now - QUEUE_MISSING_FOR]:
            del self._missing[expired]
        if name in self._missing:
            self._missing[name] = now + QUEUE_MISSING_FOR

    async def _create(self, name: str) -> None:
        self._missing.pop(name, None)
        async with self._requests.ask(f"create queue {name!r}"):
            try:
                await self._account.clients.queues.create_queue(name)
            except ResourceExistsError as error:
                if code_of(error) == "QueueBeingDeleted":
                    raise BackendUnavailable(f"queue {name!r} is being deleted: try again in a minute") from error

    async def remove_queue(self, queue: str) -> None:
        """Remove the queue with its messages."""
        client = self._client(queue)
        with contextlib.suppress(QueueNotFound):
            async with self._asking("remove", queue):
                await client.delete_queue()

    async def _existing(self, queue: str) -> QueueClient:
        client = self._client(queue)
        async with self._asking("find", queue):
            await client.get_queue_properties()
        return client

    async def _check_credential(self) -> None:
        """Send a request, so that a wrong key is detected now.

        A user without the right to list queues may still use them.
        """
        try:
            async with self._requests.ask(f"connect to storage account {self._account.name!r}"):
                async for _ in self._account.clients.queues.list_queues(results_per_page=1):
                    break
        except BackendUnusable as error:
            if not str(getattr(error.__cause__, "error_code", "")).startswith("Authorization"):
                raise

    def _client(self, queue: str) -> QueueClient:
        address = self.address_of(queue)
        if not can_be_queue(address):
            raise QueueNotFound(queue)
        name, clients = queue_name(address), self._account.clients
        if name not in self._clients:
            self._clients[name] = clients.queues.get_queue_client(name)
        return self._clients[name]

    def _event_of(self, queue: str) -> asyncio.Event:
        return self._events.setdefault(queue_name(self.address_of(queue)), asyncio.Event())

    def _distinct(self, queues: Sequence[str]) -> list[str]:
        """Return the names of the queues; raises ConfigurationError where two names become equal."""
        names: dict[str, str] = {}
        for queue in queues:
            name = queue_name(self.address_of(queue))
            first = names.setdefault(name, queue)
            if first.lower() != queue.lower():
                raise _one_queue(first, queue, name)
        return list(names)

    def _sanitized(self, address: str, sanitizer: Sanitizer) -> str:
        """Return the sanitized address. Raises ConfigurationError if another address has the same sanitized form.

        The sanitized name is an address of the queue too: replies use it.
        """
        try:
            name = sanitizer(address)
        except Exception as error:
            raise ConfigurationError(f"queue_name_sanitizer failed for {address!r}: {error!r}") from error
        if not isinstance(name, str):
            raise ConfigurationError(f"queue_name_sanitizer must return a text for {address!r}, not {name!r}")
        if address.lower() != name.lower():
            if len(self._addresses) > MOST_ADDRESSES:
                self._addresses.clear()
            known = self._addresses.setdefault(name.lower(), address)
            if known.lower() != address.lower():
                raise _one_queue(known, address, name)
        return name

    @contextlib.asynccontextmanager
    async def _asking(self, doing: str, queue: str, semaphore: asyncio.Semaphore | None = None) -> AsyncIterator[None]:
        async with self._requests.ask(f"{doing} queue {queue!r}", semaphore=semaphore):
            try:
                yield
            except ResourceNotFoundError as error:
                raise QueueNotFound(queue) from error


def _one_queue(first: str, second: str, name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{first!r} and {second!r} would both be the queue {name!r}: rename one of them, or use another "
        "queue_name_sanitizer"
    )


def _life(span: timedelta | None) -> int:
    """Return how many seconds a message lives: for ever, where .NET lets it vanish after 30 days."""
    seconds = FOR_EVER if span is None else -(-span // ONE_SECOND)
    return seconds if seconds <= LONGEST_LIFE_SECONDS else FOR_EVER


def _common(failures: Sequence[Exception]) -> Exception | None:
    """Return the error that kept all messages from being sent, if the account is the cause."""
    first = failures[0]
    alike = all(type(failure) is type(first) for failure in failures)
    return first if alike and isinstance(first, BackendUnavailable | BackendUnusable) else None


def _refuse(transaction: Transaction | None) -> None:
    if transaction is not None:
        raise ConfigurationError("Azure Storage cannot take part in a transaction: send without transaction=")
