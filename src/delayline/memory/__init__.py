"""Transport and store in memory: every tutorial runs with no server."""

from delayline.memory.store import MemoryDelayedMessageStore
from delayline.memory.timeouts import MemoryTimeoutPersister
from delayline.memory.transport import MemoryTransport

__all__ = ["MemoryDelayedMessageStore", "MemoryTimeoutPersister", "MemoryTransport"]
