"""Waiting for a condition that another process or thread makes true, where no event can be awaited."""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE: Final = 100.0  # seconds until a condition that never becomes true fails the test
INTERVAL: Final = 0.02


def eventually(condition: Callable[[], object], what: str = "the condition", patience: float = PATIENCE) -> None:
    """Return once `condition()` is true. Raises AssertionError after `patience` seconds."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"not within {patience} s: {what}"
        time.sleep(INTERVAL)


async def eventually_async(
    condition: Callable[[], object], what: str = "the condition", patience: float = PATIENCE
) -> None:
    """Like `eventually`, while the event loop runs on; the condition may be a coroutine function."""
    deadline = time.monotonic() + patience
    while not await _result(condition()):
        assert time.monotonic() < deadline, f"not within {patience} s: {what}"
        await asyncio.sleep(INTERVAL)


async def _result(found: object) -> object:
    return await found if inspect.isawaitable(found) else found
