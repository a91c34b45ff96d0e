"""Transport and delayed message store on SQL databases."""

from delayline.sql.databases import SqlDatabase
from delayline.sql.inbox import SqlInbox
from delayline.sql.outbox import SqlOutbox
from delayline.sql.store import SqlDelayedMessageStore
from delayline.sql.transport import SqlTransport
from delayline.sql.two_phase import TwoPhaseCommit

__all__ = ["SqlDatabase", "SqlDelayedMessageStore", "SqlInbox", "SqlOutbox", "SqlTransport", "TwoPhaseCommit"]
