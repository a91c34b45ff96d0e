"""A handler that keeps how late each message is."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from delayline import Headers
from delayline.message import from_wire_time

if TYPE_CHECKING:
    from benchmarks.common import Figures
    from delayline import Endpoint, Message, MessageContext


class Handled:
    """The messages that an endpoint has handled, until so many have come."""

    def __init__(self, endpoint: Endpoint, number: int) -> None:
        self._number = number
        self._late: list[tuple[datetime, float]] = []
        self._all = asyncio.Event()
        endpoint.handler(self._handle)

    async def wait(self, seconds: float = 120) -> None:
        """Wait for the last one."""
        async with asyncio.timeout(seconds):
            await self._all.wait()

    def lateness(self, prefix: str = "", *, due_after: datetime | None = None) -> Figures:
        """Return now minus due, as percentiles in milliseconds, and how many were early."""
        late = sorted(value for due, value in self._late if due_after is None or due > due_after)
        return {
            f"{prefix}lateness p50 ms": percentile(late, 0.5),
            f"{prefix}lateness p99 ms": percentile(late, 0.99),
            f"{prefix}lateness max ms": late[-1],
            f"{prefix}early": float(sum(value < 0 for value in late)),
        }

    def late_between(self, start: datetime, end: datetime) -> list[float]:
        """Return by how many milliseconds messages due in that time were late, sorted."""
        return sorted(value for due, value in self._late if start <= due <= end)

    async def _handle(self, message: Message, context: MessageContext) -> None:
        del context
        due = from_wire_time(message.headers[Headers.DELIVER_AT])
        self._late.append((due, (datetime.now(UTC) - due).total_seconds() * 1000))
        if len(self._late) == self._number:
            self._all.set()


def percentile(values: list[float], share: float) -> float:
    """Return the value below which that share of the sorted values lies."""
    return values[min(len(values) - 1, int(len(values) * share))]
