"""Transport, delayed message store and timeout persister on SQL databases."""

from delayline.sql.cold_store import TwoTierStore
from delayline.sql.store import SqlDelayedMessageStore
from delayline.sql.timeouts import SqlTimeoutPersister
from delayline.sql.transport import SqlTransport
from delayline.sql.two_phase import TwoPhaseCommit

__all__ = ["SqlDelayedMessageStore", "SqlTimeoutPersister", "SqlTransport", "TwoPhaseCommit", "TwoTierStore"]
