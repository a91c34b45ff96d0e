"""How a migration dies: its driver anywhere, a task before a batch is delivered or when nobody has heard of it."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AsyncExitStack
    from pathlib import Path

    import pyarrow as pa

    from delayline.migration.target import Attempted, Delivered, DeliveryRound, DeliverySession, Staged, Target


class Killed(BaseException):
    """Ends the driver in the middle, as a signal does."""


@dataclass(frozen=True)
class Deaths:
    """Where they are counted, how many there are to be, and the message behind whose batch tasks die."""

    folder: Path
    number: int
    behind: str
    before: bool = False
    """Whether they die when the target does not have the batch yet."""

    def come_to(self, ids: Sequence[str]) -> None:
        """Kill this process where it is time."""
        if self.behind in ids and len(list(self.folder.iterdir())) < self.number:
            (self.folder / f"{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Mortal:
    """The target, with rounds whose tasks die."""

    def __init__(self, target: Target, deaths: Deaths) -> None:
        self._target = target
        self._deaths = deaths

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the target's
        return getattr(self._target, name)

    def __str__(self) -> str:
        return str(self._target)

    def begin(self, endpoint: str) -> MortalWave:
        return MortalWave(self._target.begin(endpoint), self._deaths)


class MortalWave:
    def __init__(self, delivery_round: DeliveryRound, deaths: Deaths) -> None:
        self.delivery_round = delivery_round
        self.deaths = deaths
        self.largest_message = delivery_round.largest_message
        self.confirms = delivery_round.confirms

    async def session(self, stack: AsyncExitStack) -> MortalSession:
        return MortalSession(await self.delivery_round.session(stack), self.deaths)

    def commit(self, staged: Sequence[Staged], attempts: Mapping[str, int]) -> None:
        self.delivery_round.commit(staged, attempts)

    def discard(self) -> None:
        self.delivery_round.discard()


class MortalSession:
    def __init__(self, session: DeliverySession, deaths: Deaths) -> None:
        self._session = session
        self._deaths = deaths

    async def deliver(self, messages: pa.RecordBatch, attempt: Attempted) -> Delivered:
        ids = messages.column("id").to_pylist()
        if self._deaths.before:
            self._deaths.come_to(ids)
        delivered = await self._session.deliver(messages, attempt)
        self._deaths.come_to(ids)
        return delivered

    async def end(self) -> Sequence[Staged]:
        return await self._session.end()
