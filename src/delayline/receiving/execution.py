"""How a handler's function runs: a coroutine on the event loop, watched for blocking it; others in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from delayline.events import Event, emit
from delayline.receiving.transactions import ThreadTransaction

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from delayline.message import Message
    from delayline.receiving.context import MessageContext

logger: logging.Logger = logging.getLogger(__name__)

#: Seconds for which a coroutine handler may keep the event loop from other work before that is logged.
BLOCKS_AFTER: Final = 1.0


class HandlerThreads:
    """The threads of handlers that are plain functions.

    Args:
        number: How many run at once; 1 or more.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._executor: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """End the threads; threads at work end later."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None

    def run(self, work: Callable[[], object], context: MessageContext) -> asyncio.Future[None]:
        """Run `work` on a thread, with the caller's context variables.

        The thread then runs the end of the transaction that the handler has opened, if any.
        """
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._number, "delayline handler")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def run() -> None:
            failure: BaseException | None = None
            try:
                work()
            except BaseException as error:
                failure = error
            else:
                early = context.acknowledge_early
                if isinstance(context.own, ThreadTransaction) and early is not None and not context.effects:
                    context.own.end_early(early, given_up=done.cancelled())
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, done, failure)
            if isinstance(context.own, ThreadTransaction):
                context.own.serve(given_up=done.cancelled())

        self._executor.submit(copy_context().run, run)
        return done


def _settle(done: asyncio.Future[None], failure: BaseException | None) -> None:
    if done.done():
        return
    if isinstance(failure, StopIteration):  # which a future cannot raise
        wrapped = RuntimeError("the handler raised StopIteration")
        wrapped.__cause__, failure = failure, wrapped
    if failure is None:
        done.set_result(None)
    else:
        done.set_exception(failure)


class Watched:
    """Awaits a handler's coroutine, and logs steps of it that have blocked the event loop.

    Args:
        coroutine: The coroutine.
        function: The handler.
        message: The message that it handles; with the handler for the log of a step that blocks (`loop_watch`).
    """

    __slots__ = ("_coroutine", "function", "message")

    def __init__(self, coroutine: Coroutine[Any, Any, None], function: Callable[..., Any], message: Message) -> None:
        self._coroutine = coroutine
        self.function: Callable[..., Any] = function
        self.message: Message = message

    def __await__(self) -> Generator[Any, Any, None]:
        """Run the handler step by step."""
        step = partial(self._coroutine.send, None)
        while True:
            began = time.monotonic()
            try:
                awaited = step()
            except StopIteration:
                return
            finally:
                if (blocked := time.monotonic() - began) > BLOCKS_AFTER:
                    self._log(blocked)
            try:
                value = yield awaited
            except GeneratorExit:
                self._coroutine.close()
                raise
            except BaseException as error:
                step = partial(self._coroutine.throw, error)
            else:
                step = partial(self._coroutine.send, value)

    def _log(self, seconds: float) -> None:
        emit(
            logger,
            logging.WARNING,
            Event.HANDLER_BLOCKED,
            "Handler %s has blocked the event loop for %.1f s: make it a `def` function, which runs in a thread, or "
            "await what takes long",
            name_of(self.function),
            seconds,
        )


def name_of(function: object) -> str:
    """Return the name of a function, for people."""
    return str(getattr(function, "__qualname__", None) or repr(function))
