"""A delayed message store of one's own: a directory with one file a message, the six verbs and nothing else."""

from __future__ import annotations

import asyncio
import base64
import errno
import fcntl
import hashlib
import json
import os
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from delayline import (
    BackendUnavailable,
    DelayedMessage,
    Endpoint,
    MemoryTransport,
    Message,
    MessageContext,
    StoredDelivery,
    TransactionMode,
)
from delayline.errors import StorageFull, UnsupportedTransactionMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayline.spi import Transaction

Result = TypeVar("Result")

YEAR_ONE = datetime(1, 1, 1, tzinfo=UTC)
DUE_LENGTH = 18


class DirectoryStore:
    """Keeps each message in a file whose name begins with its due time, so that a listing is the order of delivery.

    A fetched message has a lease file beside it, until it is removed, counted as failed, or the lease has run out.
    One process at a time works on the directory, under flock.
    """

    def __init__(self, directory: Path, *, lease: timedelta = timedelta(minutes=1)) -> None:
        self._directory = directory
        self._folder = directory
        self._lease = lease
        self._last_arrival = 0

    async def initialize(self, endpoint_name: str, mode: TransactionMode) -> None:
        """Open the endpoint's folder; files take part in nobody's transactions."""
        if mode is TransactionMode.TRANSACTION_SCOPE:
            raise UnsupportedTransactionMode(
                "files cannot share a transaction: use transaction_mode=TransactionMode.SENDS_ATOMIC_WITH_RECEIVE"
            )
        self._folder = self._directory / _key(endpoint_name)
        self._folder.mkdir(parents=True, exist_ok=True)

    async def store(self, message: DelayedMessage, transaction: Transaction | None = None) -> None:
        """Write the message's file, unless there is one with its id."""

        def write() -> None:
            if self._find(message) is None:
                self._last_arrival = max(time.time_ns(), self._last_arrival + 1)
                name = f"{_sortable(message.due)}-{self._last_arrival:020}-{_key(message.id)}.json"
                self._write(self._folder / name, message)

        await self._alone(write)

    async def fetch_next_due(self, at: datetime, transaction: Transaction | None = None) -> DelayedMessage | None:
        """Lease and return the first message that is due and not leased."""
        latest = _sortable(at)

        def fetch() -> DelayedMessage | None:
            for file in self._files():
                if file.name[:DUE_LENGTH] > latest:
                    return None
                if self._take_lease(file):
                    return _read(file)
            return None

        return await self._alone(fetch)

    async def next_due(self) -> datetime | None:
        """Read the earliest due time off the first file's name."""

        def look() -> datetime | None:
            first = min(self._folder.glob("*.json"), default=None)
            return None if first is None else YEAR_ONE + timedelta(microseconds=int(first.name[:DUE_LENGTH]))

        return await self._alone(look)

    async def remove(self, message: DelayedMessage, transaction: Transaction | None = None) -> bool:
        """Delete the message's file."""

        def remove() -> bool:
            file = self._find(message)
            if file is None:
                return False
            file.unlink()  # not synced: a crash that undoes it doubles the message, it does not lose it
            file.with_suffix(".lease").unlink(missing_ok=True)
            return True

        return await self._alone(remove)

    async def increment_failure_count(self, message: DelayedMessage) -> bool:
        """Write the file anew with one more failure, then drop the lease."""

        def count() -> bool:
            file = self._find(message)
            if file is None:
                return False
            stored = _read(file)
            self._write(file, replace(stored, number_of_retries=stored.number_of_retries + 1))
            file.with_suffix(".lease").unlink(missing_ok=True)
            return True

        return await self._alone(count)

    async def _alone(self, work: Callable[[], Result]) -> Result:
        return await asyncio.to_thread(self._under_lock, work)

    def _under_lock(self, work: Callable[[], Result]) -> Result:
        try:
            with (self._folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                return work()
        except OSError as error:
            kind = StorageFull if error.errno in {errno.ENOSPC, errno.EDQUOT} else BackendUnavailable
            raise kind(f"delayed messages in {self._folder} cannot be reached: {error}") from error

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("*.json"))

    def _find(self, message: DelayedMessage) -> Path | None:
        return next(self._folder.glob(f"*-{_key(message.id)}.json"), None)

    def _take_lease(self, file: Path) -> bool:
        lease, now = file.with_suffix(".lease"), time.time()
        if lease.exists() and lease.stat().st_mtime > now:
            return False
        lease.touch()
        ends = now + self._lease.total_seconds()
        os.utime(lease, (ends, ends))
        return True

    def _write(self, file: Path, message: DelayedMessage) -> None:
        """Put the whole message on disk under another name first, so that no crash leaves half a file."""
        draft = file.with_suffix(".draft")
        with draft.open("w") as out:
            json.dump(_to_json(message), out)
            out.flush()
            os.fsync(out.fileno())
        draft.replace(file)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _key(name: str) -> str:
    """Return a file name for an id or an endpoint, which may be called anything."""
    return hashlib.sha256(name.encode()).hexdigest()


def _sortable(due: datetime) -> str:
    """Return microseconds as text that sorts like the instants."""
    return f"{(due - YEAR_ONE) // timedelta(microseconds=1):0{DUE_LENGTH}}"


def _to_json(message: DelayedMessage) -> dict[str, object]:
    """Return what the file holds; headers are opaque bytes to a store, never parsed."""
    return {
        "id": message.id,
        "destination": message.destination,
        "due": message.due.isoformat(),
        "number_of_retries": message.number_of_retries,
        "headers": base64.b64encode(message.message.encoded_headers).decode(),
        "body": base64.b64encode(message.message.body).decode(),
    }


def _read(file: Path) -> DelayedMessage:
    held = json.loads(file.read_text())
    return DelayedMessage(
        Message.from_encoded(held["id"], base64.b64decode(held["headers"]), base64.b64decode(held["body"])),
        held["destination"],
        datetime.fromisoformat(held["due"]).astimezone(UTC),
        held["number_of_retries"],
    )


async def main() -> None:
    """Send three messages, due within two seconds, and print them as they arrive."""
    delays = [timedelta(seconds=2), timedelta(milliseconds=500), timedelta(seconds=1)]
    arrived: asyncio.Queue[Message] = asyncio.Queue()
    with tempfile.TemporaryDirectory() as directory:
        endpoint = Endpoint(
            "reminders",
            transport=MemoryTransport(),
            delayed_delivery=StoredDelivery(DirectoryStore(Path(directory))),
        )

        @endpoint.handler
        async def handle(message: Message, context: MessageContext) -> None:
            await arrived.put(message)

        async with endpoint:
            for delay in delays:
                await endpoint.send("reminders", f"sent to arrive after {delay.total_seconds()} s", delay=delay)
            print(f"{len(delays)} messages wait in {directory}")
            started = time.monotonic()
            for _ in delays:
                message = await arrived.get()
                print(f"after {time.monotonic() - started:.2f} s: {message.text}")


if __name__ == "__main__":
    asyncio.run(main())
