"""Checks of arguments, with the same error texts everywhere."""

from __future__ import annotations

import asyncio
import os
import re
from datetime import timedelta
from typing import TYPE_CHECKING

from delayline.errors import ConfigurationError, NotStarted

if TYPE_CHECKING:
    from collections.abc import Iterable


def whole_number(name: str, value: int, *, at_least: int) -> int:
    """Return the value; raises ConfigurationError unless it is an int, no bool, of `at_least` or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigurationError(f"{name} must be a whole number of {at_least} or more, not {value!r}")
    return value


def time_span(name: str, value: timedelta) -> timedelta:
    """Return the value; raises ConfigurationError unless it is a timedelta longer than zero."""
    if not isinstance(value, timedelta) or value <= timedelta(0):
        raise ConfigurationError(f"{name} must be a timedelta longer than zero, not {value!r}")
    return value


def positive_seconds(name: str, value: float) -> float:
    """Return the value; raises ConfigurationError unless it is a finite number above zero."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1e9:
        raise ConfigurationError(f"{name} must be a number of seconds above 0, not {value!r}")
    return value


def check_part(argument: str, given: object, methods: Iterable[str], example: str) -> None:
    """Raise ConfigurationError for a text, a class or another object where a part of an endpoint is wanted.

    Args:
        argument: The name of the argument.
        given: What was given.
        methods: What the part has.
        example: How one is made, for the error.
    """
    if isinstance(given, str):  # which may be a URL with a password
        raise ConfigurationError(f"{argument}= is a text: pass what is made of it, as {example}")
    if isinstance(given, type):
        name = given.__name__
        raise ConfigurationError(f"{argument}= is the class {name}, not an instance of it: write {name}(...)")
    if not all(hasattr(given, method) for method in methods):
        raise ConfigurationError(f"{argument}= is {_a(given)}: pass for example {example}")


def _a(given: object) -> str:
    name = type(given).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


class ForkGuard:
    """The process that an object was made or started in: its threads, loops and connections are not in a fork of it."""

    __slots__ = ("_id",)

    def __init__(self) -> None:
        self._id = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is another process, forked since."""
        return os.getpid() != self._id

    def check(self, what: str) -> None:
        """Raise NotStarted, naming `what`, in another process."""
        if self.forked:
            raise NotStarted(
                f"{what} was started before this process was forked, and its threads and connections are its parent's: "
                "make and start another after the server has forked its workers"
            )


class LoopGuard(ForkGuard):
    """The process and the event loop that an object was started in: what it awaits belongs to that loop."""

    __slots__ = ("_loop",)

    def __init__(self) -> None:
        super().__init__()
        self._loop = running_loop()

    @property
    def ended(self) -> bool:
        """Whether the loop is closed, and with it everything that ran there."""
        return self._loop is not None and self._loop.is_closed()

    def check(self, what: str) -> None:
        """Raise, naming `what`, in another process or on another event loop.

        Raises:
            NotStarted: This process was forked since.
            ConfigurationError: This is another event loop, or the loop has ended.
        """
        if os.getpid() != self._id:
            super().check(what)
        if self._loop is None or running_loop() is self._loop:
            return
        if self._loop.is_closed():
            raise ConfigurationError(
                f"{what} was started on an event loop that has ended, as each asyncio.run does, and nothing of it runs "
                "any more: make another and start and use it within one asyncio.run, or from synchronous code with "
                "SyncEndpoint"
            )
        raise ConfigurationError(
            f"{what} was started on another event loop than this call runs on, and cannot be used from here: in "
            "threads, in routes without async and in synchronous code use SyncEndpoint, which has a loop of its own; "
            "else call it on the loop that started it"
        )


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread; None for none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def full_scheme(url: str) -> str:
    """Return the URL with `postgresql` for `postgres`, as hosting services write it."""
    return re.sub(r"(?i)\Apostgres(?=[:+])", "postgresql", url)
