"""The lease that lets a single process at a time dispatch an endpoint's delayed messages.

See https://docs.particular.net/transports/azure-storage-queues/delayed-delivery.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from typing import TYPE_CHECKING, Final

from azure.core.exceptions import HttpResponseError, ResourceExistsError, ResourceNotFoundError
from azure.storage.blob.aio import BlobLeaseClient

from delayline.errors import BackendUnavailable, BackendUnusable
from delayline.events import Event, emit

if TYPE_CHECKING:
    from collections.abc import Callable

    from azure.storage.blob.aio import ContainerClient

    from delayline.azure.requests import Requests

logger: logging.Logger = logging.getLogger(__name__)

DURATION: Final = 15  # seconds; as in .NET, which takes turns with this
RENEWED_EVERY: Final = 5.0
#: Taken off the end of the lease: the answer that granted it was on its way for a while.
LEASE_MARGIN: Final = 1.0
TAKEN: Final = 409


class ContainerLease:
    """A lease of 15 seconds on a container, renewed while it is held; time is this machine's monotonic clock.

    Args:
        lost: called when another process has it, or may have it, without a release.
    """

    def __init__(self, container: ContainerClient, lost: Callable[[], None], requests: Requests) -> None:
        self._container = container
        self._requests = requests
        self._lost = lost
        self._id = str(uuid.uuid4())
        self._until = 0.0
        self._renewing: asyncio.Task[None] | None = None

    @property
    def held(self) -> bool:
        """Whether no other process can have it."""
        return time.monotonic() < self._until

    async def acquire(self) -> bool:
        """Acquire the lease unless another process has it; True if it is held. Creates a missing container."""
        if self.held:
            return True
        try:
            taken = await self._acquire()
        except ResourceNotFoundError:
            await self.make_container()
            taken = await self._acquire_in_new()
        if taken and self._renewing is None:
            self._renewing = asyncio.create_task(self._renew(), name="delayline lease")
        return taken

    async def release(self) -> None:
        """Release the lease, so that a waiting process can acquire it at once.

        Idempotent; a failure only delays the others.
        """
        held, self._until = self.held, 0.0
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
        if held:
            with contextlib.suppress(HttpResponseError, BackendUnavailable, BackendUnusable):
                async with self._requests.ask("release the lease"):
                    await self._client().release()

    async def make_container(self) -> None:
        """Create the container without public access. Idempotent."""
        async with self._requests.ask(f"create container {self._container.container_name!r}"):
            with contextlib.suppress(ResourceExistsError):
                await self._container.create_container()

    async def _acquire(self) -> bool:
        asked = time.monotonic()
        async with self._requests.ask(f"lease container {self._container.container_name!r}"):
            try:
                await self._client().acquire(lease_duration=DURATION)
            except ResourceNotFoundError:
                raise
            except HttpResponseError as error:
                if error.status_code != TAKEN:
                    raise
                return False
        self._until = asked + DURATION - LEASE_MARGIN
        return True

    async def _acquire_in_new(self) -> bool:
        try:
            return await self._acquire()
        except ResourceNotFoundError as error:
            raise BackendUnavailable(
                f"container {self._container.container_name!r} is being deleted: it can be made again in a minute"
            ) from error

    async def _renew(self) -> None:
        """Renew until released; retry failures until the lease has expired."""
        while True:
            await asyncio.sleep(RENEWED_EVERY if self.held else 0)
            asked = time.monotonic()
            try:
                async with self._requests.ask("renew the lease", at_most=self._until - asked):
                    await self._client().renew()
            except (BackendUnavailable, BackendUnusable) as error:
                if not self.held:
                    return self._end(error)
            except Exception as error:  # whatever it is: a task that ended unseen would never renew again
                return self._end(error)
            else:
                self._until = asked + DURATION - LEASE_MARGIN

    def _end(self, error: Exception) -> None:
        self._until, self._renewing = 0.0, None
        log_text = "Lost the lease on %s, and no longer dispatch: %s"
        emit(logger, logging.WARNING, Event.LEASE_LOST, log_text, self._container.container_name, error)
        self._lost()

    def _client(self) -> BlobLeaseClient:
        """Return a client with this holder's id: the library's forgets it at a release."""
        return BlobLeaseClient(self._container, lease_id=self._id)
