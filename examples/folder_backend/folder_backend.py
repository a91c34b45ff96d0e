"""A back end of one's own with delays of its own: queues are folders, a delayed message is a file that is not due yet.

A file's name begins with the time from which receivers take it, so that no process has to move it when it is due. A
received message is locked with flock, which ends with its holder.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections import Counter
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote, urlsplit

from delayline import DelayedMessage, Endpoint, Message, MessageContext, QueueNotFound, TransactionMode
from delayline.errors import BackendUnusable, ConfigurationError, DispatchFailed, InvalidMessage, NotStarted
from delayline.spi import (
    Backend,
    BackendOptions,
    BackendUse,
    DeliveryHost,
    DueBucket,
    DueCount,
    DueForecast,
    Outcome,
    ReceivedMessage,
    TransportOperation,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from delayline.spi import Transaction

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
RECEIVE_EVERY = 0.05


class LockedFile:
    """A message's file, locked until it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.stat()  # it may have been removed, or renamed, before it was locked
        except OSError:
            os.close(self._descriptor)
            raise

    def close(self) -> None:
        """Unlock it."""
        os.close(self._descriptor)


class Folder:
    """The folder of a URL: in it a folder a queue, in that the queue's name and a file a message."""

    def __init__(self, url: str) -> None:
        self.root = Path(unquote(urlsplit(url).path))
        self._arrival = 0

    def create(self, queues: Sequence[str]) -> None:
        """Create the queues."""
        for queue in queues:
            folder = self.root / _key(queue)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "name").write_text(queue)

    def queues(self) -> list[str]:
        """Return the names of all queues."""
        return sorted(file.read_text() for file in self.root.glob("*/name"))

    def queue(self, name: str) -> Path:
        """Return the queue's folder."""
        folder = self.root / _key(name)
        if not (folder / "name").exists():
            raise QueueNotFound(name)
        return folder

    def put(self, operation: TransportOperation, due: datetime = EPOCH, sender: str = "") -> None:
        """Write the message's file durably: whole under another name first, so that no crash leaves half of it."""
        message, folder = operation.message, self.queue(operation.destination)
        span = message.time_to_be_received
        content = {
            "id": message.id,
            "destination": operation.destination,
            "sender": sender,
            "expires": None if span is None else time.time() + span.total_seconds(),
            "headers": base64.b64encode(message.encoded_headers).decode(),
            "body": base64.b64encode(message.body).decode(),
        }
        self._arrival = max(time.time_ns(), self._arrival + 1)
        draft = folder / f"{self._arrival}-{os.getpid()}.draft"
        with draft.open("w") as out:
            json.dump(content, out)
            out.flush()
            os.fsync(out.fileno())
        draft.rename(folder / f"{_sortable(due)}-{self._arrival:020}-{os.getpid()}.json")
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def due(self, queue: str) -> list[Path]:
        """Return the files of the queue's messages that receivers may take, oldest first."""
        now = _sortable(datetime.now(UTC))
        return sorted(file for file in self.queue(queue).glob("*.json") if file.name <= now)

    def waiting(self, sender: str) -> Iterator[tuple[Path, DelayedMessage]]:
        """Yield an endpoint's messages that are not due yet, earliest first, with their files."""
        now = _sortable(datetime.now(UTC))
        for file in sorted(self.root.glob("*/*.json"), key=lambda file: file.name):
            if file.name > now:
                content = json.loads(file.read_text())
                if content["sender"] == sender:
                    due = EPOCH + int(file.name[:20]) * MICROSECOND
                    yield file, DelayedMessage(_message(content), content["destination"], due)


class FolderTransport:
    """Queues in folders."""

    transaction_domain = None
    highest_transaction_mode = TransactionMode.RECEIVE_ONLY

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    async def setup_infrastructure(self, queues: Sequence[str]) -> None:
        self.folder.create(queues)

    async def start(self) -> None:
        """Do nothing: there is no connection."""

    async def stop(self) -> None:
        """Do nothing."""

    async def dispatch(self, operations: Sequence[TransportOperation], transaction: Transaction | None = None) -> None:
        failures: dict[int, Exception] = {}
        for position, operation in enumerate(operations):
            try:
                await asyncio.to_thread(self.folder.put, operation)
            except QueueNotFound as error:
                failures[position] = error
        if failures:
            raise DispatchFailed(failures)

    async def receiver(self, queue: str) -> FolderReceiver:
        self.folder.queue(queue)
        return FolderReceiver(self.folder, queue)

    async def has_queue(self, queue: str) -> bool:
        return queue in self.folder.queues()

    async def queues(self) -> Sequence[str]:
        return self.folder.queues()

    async def count(self, queue: str) -> int:
        return len(self.folder.due(queue))

    async def browse(self, queue: str, limit: int, *, offset: int = 0) -> Sequence[Message]:
        return [_message(json.loads(file.read_text())) for file in self.folder.due(queue)[offset : offset + limit]]

    async def take(self, queue: str, message_id: str, transaction: Transaction | None = None) -> bool:
        return self._remove(queue, message_id, most=1) == 1

    async def purge(self, queue: str) -> int:
        return self._remove(queue, None)

    def _remove(self, queue: str, message_id: str | None, most: int | None = None) -> int:
        number = 0
        for file in self.folder.due(queue):
            if number != most and message_id in (None, json.loads(file.read_text())["id"]):
                try:
                    with closing(LockedFile(file)):
                        file.unlink()
                        number += 1
                except OSError:
                    continue  # a receiver has it
        return number


class FolderReceiver:
    """Takes the messages of a queue that are due."""

    def __init__(self, folder: Folder, queue: str) -> None:
        self._folder = folder
        self._queue = queue
        self._held: dict[str, LockedFile] = {}
        self._stopped = asyncio.Event()

    async def receive(self, limit: int) -> Sequence[ReceivedMessage]:
        batch: list[ReceivedMessage] = []
        while not batch and not self._stopped.is_set():
            for file in self._folder.due(self._queue):
                if len(batch) < limit and file.name not in self._held:
                    batch += self._taken(file)
            if not batch:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopped.wait(), RECEIVE_EVERY)
        return batch

    def _taken(self, file: Path) -> list[ReceivedMessage]:
        try:
            locked = LockedFile(file)
        except OSError:
            return []  # another receiver has it
        content = json.loads(file.read_text())
        if content["expires"] is not None and content["expires"] <= time.time():
            file.unlink()
            locked.close()
            return []
        self._held[file.name] = locked
        return [ReceivedMessage(_message(content), file.name)]

    async def acknowledge(self, received: ReceivedMessage, transaction: Transaction | None = None) -> bool:
        locked = self._held.pop(str(received.receipt), None)
        if locked is None:
            return False
        locked.path.unlink()
        locked.close()
        return True

    async def release(self, received: ReceivedMessage) -> None:
        locked = self._held.pop(str(received.receipt), None)
        if locked is not None:
            locked.close()

    async def stop(self) -> None:
        self._stopped.set()


class FolderPending:
    """An endpoint's messages that are not due yet: lists, counts, cancels and reschedules them."""

    def __init__(self, folder: Folder, endpoint: str) -> None:
        self._folder = folder
        self._endpoint = endpoint

    async def pending(
        self, *, destination: str | None = None, limit: int = 100, offset: int = 0
    ) -> Sequence[DelayedMessage]:
        messages = [message for message in self._messages() if destination in (None, message.destination)]
        return messages[offset : offset + limit]

    async def count_by_due(self, bucket: timedelta) -> Sequence[DueCount]:
        counts = Counter(
            (EPOCH + (message.due - EPOCH) // bucket * bucket, message.destination) for message in self._messages()
        )
        return [DueCount(start, destination, number) for (start, destination), number in sorted(counts.items())]

    async def due_forecast(self, edges: Sequence[datetime], *, by_destination: bool = False) -> DueForecast:
        messages, buckets = self._messages(), []
        for start, end in pairwise([None, *edges, None]):
            within = [m for m in messages if (start is None or m.due >= start) and (end is None or m.due < end)]
            names = Counter(message.destination for message in within) if by_destination else {}
            buckets.append(DueBucket(start, end, len(within), destinations=names))
        return DueForecast(buckets, messages[0].due if messages else None)

    async def cancel(self, message_id: str, transaction: Transaction | None = None) -> Outcome:
        return self._change(message_id, None, transaction)

    async def reschedule(self, message_id: str, due: datetime, transaction: Transaction | None = None) -> Outcome:
        return self._change(message_id, due, transaction)

    def _messages(self) -> list[DelayedMessage]:
        return [message for _, message in self._folder.waiting(self._endpoint)]

    def _change(self, message_id: str, due: datetime | None, transaction: Transaction | None) -> Outcome:
        if transaction is not None:
            raise ConfigurationError("files take no part in a transaction: leave transaction= out")
        for file, message in self._folder.waiting(self._endpoint):
            if message.id == message_id:
                try:
                    with closing(LockedFile(file)):
                        if due is None:
                            file.unlink()
                        else:
                            file.rename(file.with_name(_sortable(due) + file.name[20:]))
                except OSError:
                    return Outcome.DISPATCHING
                return Outcome.DONE
        return Outcome.NOT_PENDING


class FolderDelivery:
    """Puts delayed messages into the queues that they go to, where they wait until they are due."""

    store = None
    transaction_domain = None
    clock = None
    finds_destinations = True
    _host: DeliveryHost

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._started = False

    @property
    def management(self) -> FolderPending:
        return FolderPending(self._folder, self._host.endpoint_name)

    def bind(self, host: DeliveryHost) -> None:
        self._host = host

    async def setup_infrastructure(self) -> None:
        """Do nothing: the queues are all that it needs."""

    async def start(self) -> None:
        self._started = True

    async def stop(self) -> None:
        self._started = False

    async def defer(self, operation: TransportOperation, due: datetime, transaction: Transaction | None = None) -> None:
        if not self._started:
            raise NotStarted("delayed delivery is not started: use `async with endpoint:`")
        if operation.message.time_to_be_received is not None:
            raise InvalidMessage(f"message {operation.message.id!r} has a TimeToBeReceived: send it without a delay")
        await asyncio.to_thread(self._folder.put, operation, max(due, EPOCH), self._host.endpoint_name)


class FolderBackend(Backend):
    """`folder:///path`: all that delayline asks about it."""

    native_delays: ClassVar[str | None] = "the queues themselves"

    def transport(self, url: str, options: BackendOptions) -> FolderTransport:
        return FolderTransport(Folder(url))

    def delivery(self, url: str, options: BackendOptions, **store: object) -> FolderDelivery:
        return FolderDelivery(Folder(url))

    def must_exist(self, url: str) -> None:
        folder = Folder(url).root
        if not folder.is_dir():
            raise BackendUnusable(f"there is no folder {str(folder)!r}: create it with delayline setup")

    async def examine(self, url: str, options: BackendOptions, use: BackendUse) -> Sequence[tuple[str, bool, str]]:
        folder = Folder(url).root
        usable = os.access(folder, os.R_OK | os.W_OK | os.X_OK)
        return [("folder", usable, f"{folder} {'can' if usable else 'cannot'} be written to")]

    async def planned_setup(self, url: str, options: BackendOptions, use: BackendUse) -> Sequence[str]:
        folder = Folder(url)
        missing = set(use.queues or ()) - set(folder.queues())
        return [f"mkdir -p {folder.root / _key(queue)}" for queue in sorted(missing)]

    @asynccontextmanager
    async def pending(self, url: str, options: BackendOptions) -> AsyncIterator[FolderPending]:
        yield FolderPending(Folder(url), options.name)


def _key(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _sortable(due: datetime) -> str:
    return f"{(due - EPOCH) // MICROSECOND:020}"


def _message(content: dict[str, Any]) -> Message:
    headers, body = base64.b64decode(content["headers"]), base64.b64decode(content["body"])
    return Message.from_encoded(content["id"], headers, body)


async def main() -> None:
    """Send a message that is due in a second, look at it while it waits, and print it when it arrives."""
    arrived: asyncio.Queue[Message] = asyncio.Queue()
    with tempfile.TemporaryDirectory() as directory:
        folder = Folder(f"folder://{directory}")
        endpoint = Endpoint("sales", transport=FolderTransport(folder), delayed_delivery=FolderDelivery(folder))

        @endpoint.handler
        async def handle(message: Message, context: MessageContext) -> None:
            await arrived.put(message)

        async with endpoint:
            await endpoint.send("sales", "a second later", delay=timedelta(seconds=1))
            for message in await endpoint.delayed.pending():
                print(f"{message.message.text!r} waits in {directory}")
            print(f"{(await arrived.get()).text!r} has arrived")


if __name__ == "__main__":
    asyncio.run(main())
