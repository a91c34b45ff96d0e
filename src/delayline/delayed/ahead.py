"""One batch ahead: the next one is fetched while the one before it is sent, confirmed and removed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from datetime import datetime
    from types import TracebackType

    from delayline.message import DelayedMessage
    from delayline.transaction import Transaction


class Fetched:
    """Due messages, and the transaction that holds them from their fetch until it is left, where there is one."""

    def __init__(
        self,
        messages: Sequence[DelayedMessage],
        at: datetime,
        transaction: Transaction | None,
        holds: contextlib.AsyncExitStack,
    ) -> None:
        self.messages = messages
        self.at = at
        self.transaction = transaction
        self._holds = holds

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._holds.__aexit__(kind, error, trace)

    async def undo(self) -> None:
        """Roll the transaction back."""
        with contextlib.suppress(Undone):
            async with self:
                raise Undone


class Undone(Exception):
    """Ends a transaction in which nothing has happened."""


class Ahead:
    """At most one batch that is fetched, or being fetched, and has not been asked for yet."""

    def __init__(self) -> None:
        self._fetching: asyncio.Task[Fetched] | None = None

    def __bool__(self) -> bool:
        return self._fetching is not None

    def begin(self, fetch: Coroutine[None, None, Fetched]) -> None:
        """Fetch it beside whatever the caller does next."""
        self._fetching = asyncio.create_task(fetch, name="delayline fetch ahead")

    async def take(self) -> Fetched | None:
        """Return it, its fetch ended, or None where there is none. Raises what the fetch has raised.

        A cancellation leaves it: it can be taken later.
        """
        fetching = self._fetching
        if fetching is None:
            return None
        await asyncio.wait([fetching])
        self._fetching = None
        return fetching.result()
