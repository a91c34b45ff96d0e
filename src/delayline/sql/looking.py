"""Looking now and then for what other processes have stored, where the database cannot tell."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from delayline.errors import DelaylineError, NotStarted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from datetime import datetime

    Look = Callable[[], Awaitable[Sequence[datetime | None]]]


class ChangePoller:
    """Looks every `interval` seconds at the earliest due times, and tells of each that has changed."""

    def __init__(self, look: Look, tell: Callable[[datetime], None], interval: float) -> None:
        self._look = look
        self._tell = tell
        self._interval = interval
        self._seen: Sequence[datetime | None] = ()
        self._task = asyncio.create_task(self._run(), name="delayline lookout")

    def stop(self) -> None:
        """Look no more. Idempotent."""
        self._task.cancel()

    async def _run(self) -> None:
        with contextlib.suppress(NotStarted):  # closed meanwhile
            while True:
                await asyncio.sleep(self._interval)
                await self._look_once()

    async def _look_once(self) -> None:
        try:
            found = await self._look()
        except NotStarted:
            raise
        except DelaylineError:
            return  # the user of the database reports the error
        for due in found:
            if due is not None and due not in self._seen:
                self._tell(due)
        self._seen = found
