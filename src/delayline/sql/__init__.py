"""Transport and delayed message store on SQL databases."""

from delayline.sql.store import SqlDelayedMessageStore
from delayline.sql.transport import SqlTransport

__all__ = ["SqlDelayedMessageStore", "SqlTransport"]
