"""For authors of stores and transports: the protocols to implement, and the values that they take and return.

A store is a class with the six methods of `DelayedMessageStore`; every other protocol here is a capability that an
endpoint finds with `isinstance` at its start and does without where it is missing.
"""

from delayline.callers import Caller, JoinsCallers
from delayline.clock import Clock, SystemClock
from delayline.delayed.delivery import DelayedDelivery
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
from delayline.message import DelayedMessage
from delayline.transaction import Savepoints, Transaction
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

__all__ = [
    "BatchStore",
    "Caller",
    "Clock",
    "ClosableStore",
    "DelayedDelivery",
    "DelayedMessage",
    "DelayedMessageStore",
    "DeliveryHost",
    "DueCount",
    "FindsQueues",
    "Forwarded",
    "ForwardingStore",
    "JoinsCallers",
    "JournaledStore",
    "ManagedQueues",
    "ManagedStore",
    "Outcome",
    "QualifiedQueues",
    "ReceivedMessage",
    "Receiver",
    "Savepoints",
    "StoreClock",
    "StoreInfrastructure",
    "StoreTransactions",
    "StoreWakeUps",
    "SystemClock",
    "Transaction",
    "Transport",
    "TransportOperation",
    "TransportTransactions",
]
