"""Runs endpoints until a signal stops them: what `delayline run` does, for programs of their own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

from delayline.endpoint import GRACE, Endpoint
from delayline.errors import ConfigurationError
from delayline.events import Event, emit
from delayline.sync import SyncEndpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import timedelta

logger: logging.Logger = logging.getLogger(__name__)


def nothing() -> None:
    """Do nothing."""


async def run_until_stopped(
    *endpoints: Endpoint | SyncEndpoint,
    grace: timedelta = GRACE,
    started: Callable[[], None] = nothing,
    stopping: Callable[[], None] = nothing,
    parent_pipe: int | None = None,
) -> str | None:
    """Run endpoints until SIGINT or SIGTERM, or until one of them stops by itself, and stop them all.

    A second signal ends the process at once: messages in flight are handled again. Call it in the main thread, as
    `asyncio.run(run_until_stopped(endpoint))`.

    Args:
        endpoints: The endpoints, not started; of a SyncEndpoint the endpoint in it, on this event loop.
        grace: How long handlers may take after the signal; then they are cancelled.
        started: Called when all have started.
        stopping: Called when they begin to stop.
        parent_pipe: A file descriptor; the end of the process at its other side stops the endpoints too.

    Returns:
        The name of the signal that stopped them; None if one stopped by itself, as after a critical error.

    Raises:
        ConfigurationError: There is no endpoint, two have one name, or this is not the main thread.
        DelaylineError: The errors of `Endpoint.start`; those that had started are stopped.

    Example:
        ```python
        asyncio.run(run_until_stopped(shop, billing, grace=timedelta(minutes=1)))
        ```
    """
    each = checked_endpoints(endpoints)
    stopped_by: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with _stopped_by_signal(stopped_by, parent_pipe):
        gc.collect()  # before messages are handled, which would wait for it
        gc.freeze()  # full collections would traverse the modules again and again: see production.md
        async with contextlib.AsyncExitStack() as running:
            for endpoint in each:
                await running.enter_async_context(endpoint)
            started()
            by_themselves = [asyncio.ensure_future(endpoint.wait_stopped()) for endpoint in each]
            either: list[asyncio.Future[Any]] = [stopped_by, *by_themselves]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            for waiting in by_themselves:
                waiting.cancel()
            stopping()
            await asyncio.gather(*(endpoint.stop(grace) for endpoint in each))
    return stopped_by.result() if stopped_by.done() else None


def checked_endpoints(endpoints: Sequence[Endpoint | SyncEndpoint]) -> list[Endpoint]:
    """Return the endpoints that may run in one process. Raises ConfigurationError."""
    each = [endpoint.endpoint if isinstance(endpoint, SyncEndpoint) else endpoint for endpoint in endpoints]
    if not each:
        raise ConfigurationError("there is no endpoint to run: pass one or more")
    for endpoint in each:
        if not isinstance(endpoint, Endpoint):
            raise ConfigurationError(f"a {type(endpoint).__name__} is no Endpoint: pass endpoints, one by one")
        if [other.name for other in each].count(endpoint.name) > 1:
            raise ConfigurationError(
                f"two endpoints are named {endpoint.name!r}: one process runs an endpoint once. "
                "Run it in several processes, or raise its concurrency"
            )
    return each


@contextlib.contextmanager
def _stopped_by_signal(stopped_by: asyncio.Future[str], parent_pipe: int | None) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def stop(name: str) -> None:
        if not stopped_by.done():
            stopped_by.set_result(name)
            return
        emit(
            logger,
            logging.WARNING,
            Event.ENDED_AT_ONCE,
            "%s, the second signal: ended at once. Messages in flight are handled again",
            name,
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        os.kill(os.getpid(), getattr(signal, name, signal.SIGTERM))

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number.name)
    except (ValueError, RuntimeError) as error:
        raise ConfigurationError(
            "signals reach only the main thread: call run_until_stopped there, or use `async with endpoint:`"
        ) from error
    if parent_pipe is not None:
        loop.add_reader(parent_pipe, _once(loop, parent_pipe, partial(stop, "parent gone")))
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        if parent_pipe is not None:
            loop.remove_reader(parent_pipe)


def _once(loop: asyncio.AbstractEventLoop, descriptor: int, work: Callable[[], None]) -> Callable[[], None]:
    """Return `work` as a reader that is removed before it runs."""

    def run() -> None:
        loop.remove_reader(descriptor)
        work()

    return run
