"""Pauses of dispatching: due messages for a destination, or of the whole endpoint, wait until someone resumes it.

A pause is kept where the messages are kept, so that every poller of every process sees it, also after a restart.
Pollers look for pauses while they poll, as often as `PAUSES_READ_EVERY` says. From then on the queries for due messages
pass over those of a paused destination, which therefore delay no other. A poller that already has a message dispatches
it: a pause is in force within a second and the time that a batch takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from delayline.clock import ONE_SECOND
from delayline.errors import ConfigurationError
from delayline.message import MAXIMUM_DESTINATION_LENGTH

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

#: Seconds until a poller reads the pauses again, while it polls.
PAUSES_READ_EVERY: Final = 0.5
#: The longest sleep of a poller while anything is paused: so late it notices at most that dispatching is resumed.
SLEEP_WHILE_PAUSED: Final = ONE_SECOND
#: The highest rate at which messages can leave after a pause, in messages a second.
HIGHEST_RESUMED_RATE: Final = 1_000_000


def dispatching_to(destination: str | None) -> str:
    """Return what a pause stops, in words."""
    return "dispatching" if destination is None else f"dispatching to {destination}"


@dataclass(frozen=True, slots=True)
class DispatchPause:
    """Due messages that are not dispatched."""

    destination: str | None
    """Their destination; None for all messages of the endpoint."""
    since: datetime
    """When it was paused."""

    @property
    def text(self) -> str:
        """What is paused, in words."""
        return dispatching_to(self.destination)


class DispatchPauses(Protocol):
    """The pauses of a store's messages."""

    async def all(self) -> Sequence[DispatchPause]:
        """Return the pauses: that of the whole endpoint first, then by destination."""
        ...

    async def pause(self, destination: str | None, at: datetime) -> bool:
        """Dispatch no more messages for the destination, or of the endpoint; return False where that is so already.

        Args:
            destination: The destination; None for the whole endpoint.
            at: The present time.
        """
        ...

    async def resume(self, destination: str | None, at: datetime, rate: float | None = None) -> bool:
        """Dispatch them again; return False where nothing was paused.

        Args:
            destination: The destination; None for a pause of the whole endpoint.
            at: The present time.
            rate: The most messages a second that leave of those overdue: they get later due times. None for no limit.
        """
        ...

    async def earliest(self) -> datetime | None:
        """Return the earliest due time of what is not paused now; None if all is, or nothing waits."""
        ...

    async def look(self) -> bool:
        """Read the pauses if it is time for that, and return whether they have changed; for the poller."""
        ...

    @property
    def is_any(self) -> bool:
        """Whether there was a pause at the last look."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether the whole endpoint was paused at the last look."""
        ...


@runtime_checkable
class SupportsDispatchPauses(Protocol):
    """Capability of a store: dispatching can be paused, and fetching passes over what is paused."""

    @property
    def dispatch_pauses(self) -> DispatchPauses:
        """The pauses."""
        ...


def pausable(store: object) -> DispatchPauses:
    """Return the pauses of a store; raises ConfigurationError if its messages cannot be held back."""
    if not isinstance(store, SupportsDispatchPauses):
        raise ConfigurationError(
            f"dispatching from a {type(store).__name__} cannot be paused: keep delayed messages in a "
            "SqlDelayedMessageStore, or pause the receivers of the destination with `delayline pause QUEUE`"
        )
    return store.dispatch_pauses


def checked_destination(destination: str | None) -> str | None:
    """Return what a pause is of. Raises ConfigurationError for what no message is for."""
    if destination is None or 0 < len(destination) <= MAXIMUM_DESTINATION_LENGTH:
        return destination
    raise ConfigurationError(
        f"a destination has 1 to {MAXIMUM_DESTINATION_LENGTH} characters, not {len(destination)}: "
        f"{destination[:MAXIMUM_DESTINATION_LENGTH]!r}"
    )


class Slots:
    """The due times of overdue messages that leave at a bounded rate.

    Args:
        start: When the first leave.
        rate: How many leave a second.

    Raises:
        ConfigurationError: The rate is not a number above 0, or too high.
    """

    def __init__(self, start: datetime, rate: float) -> None:
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= HIGHEST_RESUMED_RATE:
            raise ConfigurationError(
                f"rate must be above 0 and at most {HIGHEST_RESUMED_RATE:,} messages a second, not {rate!r}"
            )
        self._due = start
        self.size: int = max(1, math.floor(rate))
        """How many messages leave together."""
        self._width = timedelta(seconds=self.size / rate)

    def next(self) -> datetime:
        """Return the due time of the next messages, as many as `size`."""
        due, self._due = self._due, self._due + self._width
        return due
