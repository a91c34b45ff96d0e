"""One public door: what is in `delayline.__all__` is the API, and nothing joins or leaves it unnoticed."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import delayline

PINNED = [
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


def test_the_list_is_pinned() -> None:
    assert sorted(delayline.__all__) == sorted(PINNED)


def test_the_list_is_sorted_and_has_no_doubles() -> None:
    assert list(delayline.__all__) == sorted(set(delayline.__all__))


def test_every_name_can_be_imported_and_is_documented() -> None:
    for name in delayline.__all__:
        member = getattr(delayline, name)
        assert member.__name__ == name
        assert inspect.getdoc(member), name


def test_every_public_member_is_listed() -> None:
    public = {
        name for name in dir(delayline) if not name.startswith("_") and not inspect.ismodule(getattr(delayline, name))
    }
    assert public == set(delayline.__all__)


def test_sqlalchemy_is_loaded_when_it_is_needed() -> None:
    """Given a fresh interpreter, when delayline is imported, then SQLAlchemy is not, until a name needs it."""
    program = """if True:
        import sys
        import delayline
        assert "sqlalchemy" not in sys.modules
        assert set(delayline.__all__) <= set(dir(delayline))
        assert "sqlalchemy" not in sys.modules
        from delayline import *
        assert SqlTransport is delayline.SqlTransport is delayline.sql.SqlTransport
    """
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_name_that_is_not_there_is_told() -> None:
    with pytest.raises(AttributeError, match="module 'delayline' has no attribute 'SqlTransprot'"):
        _ = delayline.SqlTransprot  # type: ignore[attr-defined]


def test_every_error_is_public() -> None:
    errors = {name for name, member in vars(delayline.errors).items() if inspect.isclass(member)}
    assert {name for name in errors if issubclass(getattr(delayline.errors, name), Exception)} <= set(delayline.__all__)
