"""Timeout manager: delayed delivery through a table of timeouts that is compatible with NServiceBus, or in memory."""

from __future__ import annotations

import typing

from delayline.message import TimeoutHeaders
from delayline.timeouts.manager import ExternalTimeoutManager, TimeoutManagerDelivery
from delayline.timeouts.memory import MemoryTimeoutPersister
from delayline.timeouts.persister import (
    DueTimeout,
    LockedTimeouts,
    SupportsCount,
    SupportsOpen,
    SupportsTake,
    SupportsTimeoutLocks,
    Timeout,
    TimeoutCount,
    TimeoutPersister,
    TimeoutsChunk,
)

if typing.TYPE_CHECKING:
    from delayline.timeouts.sql import SqlTimeoutPersister
else:

    def __getattr__(name: str) -> object:
        if name != "SqlTimeoutPersister":  # imported on first use: it needs SQLAlchemy
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from delayline.timeouts.sql import SqlTimeoutPersister

        return SqlTimeoutPersister


__all__ = [
    "DueTimeout",
    "ExternalTimeoutManager",
    "LockedTimeouts",
    "MemoryTimeoutPersister",
    "SqlTimeoutPersister",
    "SupportsCount",
    "SupportsOpen",
    "SupportsTake",
    "SupportsTimeoutLocks",
    "Timeout",
    "TimeoutCount",
    "TimeoutHeaders",
    "TimeoutManagerDelivery",
    "TimeoutPersister",
    "TimeoutsChunk",
]
