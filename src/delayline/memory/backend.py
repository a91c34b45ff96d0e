"""The back end `memory:`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from delayline.backends import Backend
from delayline.memory.store import MemoryDelayedMessageStore
from delayline.memory.transport import MemoryTransport

if TYPE_CHECKING:
    from delayline.backends import BackendOptions
    from delayline.delayed.store import DelayedMessageStore
    from delayline.transport import Transport


class MemoryBackend(Backend):
    """Queues and delayed messages in this process's memory."""

    in_process: ClassVar[bool] = True

    def transport(self, url: str, options: BackendOptions) -> Transport:
        """Return a new transport with no queues yet."""
        del url, options
        return MemoryTransport()

    def store(self, url: str, options: BackendOptions) -> DelayedMessageStore:
        """Return a new, empty store."""
        del url, options
        return MemoryDelayedMessageStore()
