"""Timeout manager: delayed delivery through a table of timeouts that is compatible with NServiceBus, or in memory."""

from __future__ import annotations

import typing

from delayline.lazy_imports import lazy_imports as _lazy_imports
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
    SupportsWithoutTime,
    Timeout,
    TimeoutCount,
    TimeoutPersister,
    TimeoutsChunk,
)

if typing.TYPE_CHECKING:
    from delayline.timeouts.sql import SqlTimeoutPersister
else:
    #: Imported on first use: it needs SQLAlchemy.
    __getattr__, __dir__ = _lazy_imports(__name__, {"SqlTimeoutPersister": "delayline.timeouts.sql"})


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
    "SupportsWithoutTime",
    "Timeout",
    "TimeoutCount",
    "TimeoutHeaders",
    "TimeoutManagerDelivery",
    "TimeoutPersister",
    "TimeoutsChunk",
]
