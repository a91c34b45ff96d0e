"""A migration target whose tasks are killed, and the exception with which tests end the driver."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delayline.migration.target import DeliverySession

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AsyncExitStack
    from pathlib import Path

    import pyarrow as pa

    from delayline.bulk.batches import BatchName
    from delayline.migration.target import Attempted, Delivered, Staged, Target


class DriverKilled(BaseException):
    """Ends the driver as a signal does."""


@dataclass(frozen=True)
class TaskKills:
    """Kills the first tasks that deliver a batch with a certain message.

    Args:
        folder: Counts the kills over all processes: one file for each.
        number: How many tasks to kill.
        message_id: Id of the message.
        before: Kill before the batch is delivered, not after it.
    """

    folder: Path
    number: int
    message_id: str
    before: bool = False

    def kill(self, ids: Sequence[str]) -> None:
        """Kill this process if the batch has the message and kills are left."""
        if self.message_id in ids and len(list(self.folder.iterdir())) < self.number:
            (self.folder / f"{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class KillingTarget:
    """The target, with sessions whose tasks are killed."""

    def __init__(self, target: Target, kills: TaskKills) -> None:
        self._target = target
        self._kills = kills

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the target's
        return getattr(self._target, name)

    def __str__(self) -> str:
        return str(self._target)

    def begin(self, endpoint: str) -> KillingSession:
        return KillingSession(self._target.begin(endpoint), self._kills)


class KillingSession(DeliverySession):
    def __init__(self, session: DeliverySession, kills: TaskKills) -> None:
        self._session = session
        self._kills = kills
        self.largest_message = session.largest_message
        self.confirms = session.confirms

    async def open(self, stack: AsyncExitStack) -> None:
        await self._session.open(stack)

    async def deliver(self, messages: pa.RecordBatch, attempt: Attempted) -> Delivered:
        ids = messages.column("id").to_pylist()
        if self._kills.before:
            self._kills.kill(ids)
        delivered = await self._session.deliver(messages, attempt)
        self._kills.kill(ids)
        return delivered

    async def end(self) -> Sequence[Staged]:
        return await self._session.end()

    def commit(self, staged: Sequence[Staged], attempts: Mapping[BatchName, int]) -> None:
        self._session.commit(staged, attempts)

    def discard(self) -> None:
        self._session.discard()
