"""Durable delayed message delivery: sent now, delivered when due, never lost, never early."""

import typing

from delayline.callers import Caller, JoinsCallers
from delayline.clock import Clock, SystemClock
from delayline.delayed.delivery import DelayedDelivery, StoredDelivery
from delayline.delayed.host import DeliveryHost
from delayline.delayed.store import (
    BatchStore,
    ClosableStore,
    DelayedMessageStore,
    DueCount,
    Forwarded,
    ForwardingStore,
    JournaledStore,
    ManagedStore,
    Outcome,
    StoreClock,
    StoreInfrastructure,
    StoreTransactions,
    StoreWakeUps,
)
from delayline.delayed.timeout_headers import TimeoutHeaders
from delayline.delayed.timeout_manager import TimeoutManagerDelivery
from delayline.delayed.timeout_persister import (
    CountedTimeouts,
    DueTimeout,
    LockedTimeouts,
    LocksTimeouts,
    TakesTimeouts,
    Timeout,
    TimeoutCount,
    TimeoutPersister,
    TimeoutsChunk,
    TimeoutStorage,
)
from delayline.delayed.timeout_routing import ExternalTimeoutManager
from delayline.endpoint import Endpoint
from delayline.errors import (
    BackendUnavailable,
    BackendUnusable,
    ConfigurationError,
    CorruptBody,
    CorruptHeaders,
    DelaylineError,
    DispatchFailed,
    DuplicateMessage,
    InvalidDueTime,
    InvalidMessage,
    MessageRejected,
    MissingExtra,
    NewerSchema,
    NotStarted,
    QueueNotFound,
    StorageFull,
    UnsupportedTransactionMode,
)
from delayline.events import Event
from delayline.memory import MemoryDelayedMessageStore, MemoryTimeoutPersister, MemoryTransport
from delayline.message import DelayedMessage, Headers, Message
from delayline.pipeline import MessageContext
from delayline.recoverability import Recoverability
from delayline.sync import SyncEndpoint
from delayline.transaction import Guarantee, Savepoints, Transaction, TransactionMode, guarantee
from delayline.transport import (
    FindsQueues,
    ManagedQueues,
    QualifiedQueues,
    ReceivedMessage,
    Receiver,
    Transport,
    TransportOperation,
    TransportTransactions,
)

if typing.TYPE_CHECKING:
    from delayline.sql import SqlDelayedMessageStore, SqlTimeoutPersister, SqlTransport, TwoPhaseCommit
else:
    #: What is loaded when it is asked for: it needs SQLAlchemy and takes longer than all the rest.
    _ROOMS = {
        "SqlDelayedMessageStore": "delayline.sql",
        "SqlTimeoutPersister": "delayline.sql",
        "SqlTransport": "delayline.sql",
        "TwoPhaseCommit": "delayline.sql",
    }

    def __getattr__(name: str) -> object:
        if name not in _ROOMS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module(_ROOMS[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "BackendUnavailable",
    "BackendUnusable",
    "BatchStore",
    "Caller",
    "Clock",
    "ClosableStore",
    "ConfigurationError",
    "CorruptBody",
    "CorruptHeaders",
    "CountedTimeouts",
    "DelayedDelivery",
    "DelayedMessage",
    "DelayedMessageStore",
    "DelaylineError",
    "DeliveryHost",
    "DispatchFailed",
    "DueCount",
    "DueTimeout",
    "DuplicateMessage",
    "Endpoint",
    "Event",
    "ExternalTimeoutManager",
    "FindsQueues",
    "Forwarded",
    "ForwardingStore",
    "Guarantee",
    "Headers",
    "InvalidDueTime",
    "InvalidMessage",
    "JoinsCallers",
    "JournaledStore",
    "LockedTimeouts",
    "LocksTimeouts",
    "ManagedQueues",
    "ManagedStore",
    "MemoryDelayedMessageStore",
    "MemoryTimeoutPersister",
    "MemoryTransport",
    "Message",
    "MessageContext",
    "MessageRejected",
    "MissingExtra",
    "NewerSchema",
    "NotStarted",
    "Outcome",
    "QualifiedQueues",
    "QueueNotFound",
    "ReceivedMessage",
    "Receiver",
    "Recoverability",
    "Savepoints",
    "SqlDelayedMessageStore",
    "SqlTimeoutPersister",
    "SqlTransport",
    "StorageFull",
    "StoreClock",
    "StoreInfrastructure",
    "StoreTransactions",
    "StoreWakeUps",
    "StoredDelivery",
    "SyncEndpoint",
    "SystemClock",
    "TakesTimeouts",
    "Timeout",
    "TimeoutCount",
    "TimeoutHeaders",
    "TimeoutManagerDelivery",
    "TimeoutPersister",
    "TimeoutStorage",
    "TimeoutsChunk",
    "Transaction",
    "TransactionMode",
    "Transport",
    "TransportOperation",
    "TransportTransactions",
    "TwoPhaseCommit",
    "UnsupportedTransactionMode",
    "guarantee",
]
