"""Transport and store in memory: every tutorial runs with no server."""

from delayline.memory.store import MemoryDelayedMessageStore
from delayline.memory.transport import MemoryTransport

__all__ = ["MemoryDelayedMessageStore", "MemoryTransport"]
