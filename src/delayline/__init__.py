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
    ManagedStore,
    Outcome,
    StoreClock,
    StoreInfrastructure,
    StoreTransactions,
    StoreWakeUps,
)
from delayline.endpoint import Endpoint
from delayline.errors import (
    BackendUnavailable,
    BackendUnusable,
    ConfigurationError,
    CorruptHeaders,
    DelaylineError,
    DispatchFailed,
    InvalidDueTime,
    InvalidMessage,
    MissingExtra,
    NewerSchema,
    NotStarted,
    QueueNotFound,
    StorageFull,
    UnsupportedTransactionMode,
)
from delayline.events import Event
from delayline.memory import MemoryDelayedMessageStore, MemoryTransport
from delayline.message import DelayedMessage, Headers, Message
from delayline.pipeline import MessageContext
from delayline.recoverability import Recoverability
from delayline.sync import SyncEndpoint
from delayline.transaction import Guarantee, Savepoints, Transaction, TransactionMode, guarantee
from delayline.transport import (
    ManagedQueues,
    ReceivedMessage,
    Receiver,
    Transport,
    TransportOperation,
    TransportTransactions,
)

if typing.TYPE_CHECKING:
    from delayline.sql import SqlDelayedMessageStore, SqlTransport, TwoPhaseCommit
else:

    def __getattr__(name: str) -> object:
        """Load what needs SQLAlchemy when it is asked for: that takes longer than all the rest."""
        if name not in {"SqlDelayedMessageStore", "SqlTransport", "TwoPhaseCommit"}:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from delayline import sql

        return getattr(sql, name)

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
    "CorruptHeaders",
    "DelayedDelivery",
    "DelayedMessage",
    "DelayedMessageStore",
    "DelaylineError",
    "DeliveryHost",
    "DispatchFailed",
    "DueCount",
    "Endpoint",
    "Event",
    "Forwarded",
    "ForwardingStore",
    "Guarantee",
    "Headers",
    "InvalidDueTime",
    "InvalidMessage",
    "JoinsCallers",
    "ManagedQueues",
    "ManagedStore",
    "MemoryDelayedMessageStore",
    "MemoryTransport",
    "Message",
    "MessageContext",
    "MissingExtra",
    "NewerSchema",
    "NotStarted",
    "Outcome",
    "QueueNotFound",
    "ReceivedMessage",
    "Receiver",
    "Recoverability",
    "Savepoints",
    "SqlDelayedMessageStore",
    "SqlTransport",
    "StorageFull",
    "StoreClock",
    "StoreInfrastructure",
    "StoreTransactions",
    "StoreWakeUps",
    "StoredDelivery",
    "SyncEndpoint",
    "SystemClock",
    "Transaction",
    "TransactionMode",
    "Transport",
    "TransportOperation",
    "TransportTransactions",
    "TwoPhaseCommit",
    "UnsupportedTransactionMode",
    "guarantee",
]
