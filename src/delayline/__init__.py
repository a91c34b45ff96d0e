"""Durable delayed message delivery: sent now, delivered when due, never lost, never early.

Authors of stores and transports find their protocols in `delayline.spi`; the timeout manager is `delayline.timeouts`.
"""

import typing

from delayline.actions import ActionRecord, JobState, SetPreview
from delayline.delayed.delivery import StoredDelivery
from delayline.delayed.recurrence import cron, interval
from delayline.delayed.schedules import Schedule, Schedules
from delayline.delayed.store import Outcome
from delayline.endpoint import Endpoint
from delayline.errors import (
    BackendUnavailable,
    ConfigurationError,
    DelaylineError,
    DuplicateMessage,
    InvalidDueTime,
    InvalidMessage,
    NoReply,
    NotStarted,
    QueueNotFound,
    TransactionAborted,
)
from delayline.events import Event
from delayline.failed import FailedMessages
from delayline.filters import MessageFilter
from delayline.lazy_imports import lazy_imports as _lazy_imports
from delayline.memory import MemoryDelayedMessageStore, MemoryTransport
from delayline.message import DelayedMessage, Headers, Message
from delayline.outgoing import Send
from delayline.pending import PendingMessages
from delayline.receiving.context import MessageContext
from delayline.receiving.recoverability import Discard, MoveToErrors, Recoverability, Retry, exponential
from delayline.receiving.transactions import HandlerRows, handler_rows
from delayline.running import run_until_stopped
from delayline.serialization import JsonSerializer, Serializer, message_type
from delayline.set_jobs import MessageJobs
from delayline.sync import SyncEndpoint, SyncFailedMessages, SyncMessageJobs, SyncPendingMessages, SyncSchedules
from delayline.transaction import Guarantee, TransactionMode, guarantee

if typing.TYPE_CHECKING:
    from delayline.azure import AzureStorageQueueTransport as AzureStorageQueueTransport
    from delayline.azure import DelayedTableDelivery as DelayedTableDelivery
    from delayline.rabbitmq import DelayLevelDelivery as DelayLevelDelivery
    from delayline.rabbitmq import RabbitMQTransport as RabbitMQTransport
    from delayline.sql import SqlDatabase, SqlDelayedMessageStore, SqlInbox, SqlOutbox, SqlTransport, TwoPhaseCommit
    from delayline.version import __version__ as __version__
else:
    #: Imported on first use: their libraries take longer to load than all the rest. Names that need an extra are not
    #: in `__all__`, so that `from delayline import *` works without it.
    __getattr__, __dir__ = _lazy_imports(
        __name__,
        {
            "AzureStorageQueueTransport": "delayline.azure",
            "DelayLevelDelivery": "delayline.rabbitmq",
            "DelayedTableDelivery": "delayline.azure",
            "RabbitMQTransport": "delayline.rabbitmq",
            "SqlDatabase": "delayline.sql",
            "SqlDelayedMessageStore": "delayline.sql",
            "SqlInbox": "delayline.sql",
            "SqlOutbox": "delayline.sql",
            "SqlTransport": "delayline.sql",
            "TwoPhaseCommit": "delayline.sql",
            "__version__": "delayline.version",
        },
    )


__all__ = [
    "ActionRecord",
    "BackendUnavailable",
    "ConfigurationError",
    "DelayedMessage",
    "DelaylineError",
    "Discard",
    "DuplicateMessage",
    "Endpoint",
    "Event",
    "FailedMessages",
    "Guarantee",
    "HandlerRows",
    "Headers",
    "InvalidDueTime",
    "InvalidMessage",
    "JobState",
    "JsonSerializer",
    "MemoryDelayedMessageStore",
    "MemoryTransport",
    "Message",
    "MessageContext",
    "MessageFilter",
    "MessageJobs",
    "MoveToErrors",
    "NoReply",
    "NotStarted",
    "Outcome",
    "PendingMessages",
    "QueueNotFound",
    "Recoverability",
    "Retry",
    "Schedule",
    "Schedules",
    "Send",
    "Serializer",
    "SetPreview",
    "SqlDatabase",
    "SqlDelayedMessageStore",
    "SqlInbox",
    "SqlOutbox",
    "SqlTransport",
    "StoredDelivery",
    "SyncEndpoint",
    "SyncFailedMessages",
    "SyncMessageJobs",
    "SyncPendingMessages",
    "SyncSchedules",
    "TransactionAborted",
    "TransactionMode",
    "TwoPhaseCommit",
    "cron",
    "exponential",
    "guarantee",
    "handler_rows",
    "interval",
    "message_type",
    "run_until_stopped",
]
