"""For authors of stores and transports: the protocols to implement, and the values that they take and return.

A store is a class with the six methods of `DelayedMessageStore`; every other protocol here is a capability that an
endpoint finds with `isinstance` at its start and does without where it is missing.
"""

from delayline.backends import Backend, BackendOptions
from delayline.clock import Clock, SystemClock
from delayline.delayed.delivery import DelayedDelivery
from delayline.delayed.host import DeliveryHost
from delayline.delayed.store import (
    DelayedMessageStore,
    DueBucket,
    DueCount,
    DueForecast,
    Forwarded,
    FoundMessage,
    Outcome,
    StoreResult,
    SupportsBatches,
    SupportsClock,
    SupportsClose,
    SupportsDueForecast,
    SupportsForwardedCounts,
    SupportsForwarding,
    SupportsJournal,
    SupportsLookup,
    SupportsManagement,
    SupportsNotifications,
    SupportsReplacement,
    SupportsSetup,
    SupportsTransactions,
)
from delayline.external import ExternalTransaction, SupportsExternalTransactions
from delayline.message import DelayedMessage
from delayline.transaction import SupportsHighestMode, SupportsSavepoints, Transaction
from delayline.transport import (
    HandlerSlots,
    QueueLimits,
    ReceivedMessage,
    Receiver,
    SupportsFlush,
    SupportsHandlerSlots,
    SupportsPrefetch,
    SupportsQualifiedQueues,
    SupportsQueueComparison,
    SupportsQueueLimits,
    SupportsQueueLookup,
    SupportsQueueManagement,
    SupportsTransportTransactions,
    Transport,
    TransportOperation,
)

__all__ = [
    "Backend",
    "BackendOptions",
    "Clock",
    "DelayedDelivery",
    "DelayedMessage",
    "DelayedMessageStore",
    "DeliveryHost",
    "DueBucket",
    "DueCount",
    "DueForecast",
    "ExternalTransaction",
    "Forwarded",
    "FoundMessage",
    "HandlerSlots",
    "Outcome",
    "QueueLimits",
    "ReceivedMessage",
    "Receiver",
    "StoreResult",
    "SupportsBatches",
    "SupportsClock",
    "SupportsClose",
    "SupportsDueForecast",
    "SupportsExternalTransactions",
    "SupportsFlush",
    "SupportsForwardedCounts",
    "SupportsForwarding",
    "SupportsHandlerSlots",
    "SupportsHighestMode",
    "SupportsJournal",
    "SupportsLookup",
    "SupportsManagement",
    "SupportsNotifications",
    "SupportsPrefetch",
    "SupportsQualifiedQueues",
    "SupportsQueueComparison",
    "SupportsQueueLimits",
    "SupportsQueueLookup",
    "SupportsQueueManagement",
    "SupportsReplacement",
    "SupportsSavepoints",
    "SupportsSetup",
    "SupportsTransactions",
    "SupportsTransportTransactions",
    "SystemClock",
    "Transaction",
    "Transport",
    "TransportOperation",
]
