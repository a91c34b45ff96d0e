"""The handlers of an endpoint: which of them run for a message, and how."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import reprlib
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from delayline.checks import time_span, whole_number
from delayline.errors import ConfigurationError, InvalidPayload, UnknownMessageType
from delayline.message import Headers, Message
from delayline.receiving.annotations import (
    SIGNATURE,
    TYPED_SIGNATURE,
    check_annotations,
    check_kind,
    signature_of,
)
from delayline.receiving.context import MessageContext
from delayline.receiving.execution import HandlerThreads, Watched, name_of
from delayline.serialization import JsonSerializer, Serializer, SupportsKindCheck, names_in_header, names_taken

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from delayline.receiving.recoverability import Recoverability

#: Returns the context manager that a handler runs inside of, for a message.
Surrounding = Callable[[MessageContext], AbstractContextManager[object]]
#: A handler of messages: a coroutine function, or a function, which runs in a thread.
Handler = Callable[[Message, MessageContext], Awaitable[None] | None]
MOST_SLOTS: Final = 10_000
NOTHING_AROUND: Final = contextlib.nullcontext()


class Handlers:
    """The registered handlers of an endpoint.

    Args:
        serializer: Reads the bodies of typed messages.
        threads: How many handlers that are plain functions run at once; 1 or more.
    """

    def __init__(self, serializer: Serializer | None = None, *, threads: int = 1) -> None:
        self.serializer: Serializer = serializer or JsonSerializer()
        self._threads = HandlerThreads(threads)
        self._plain: list[_Registered] = []
        self._typed: dict[str, _Registered] = {}
        self.surroundings: list[Surrounding] = []
        """What each handler runs inside of, the outermost first."""
        self.limits: dict[str, int] = {}
        """How many messages are handled at once over all processes, by type; the limits of the queue come first."""

    def __bool__(self) -> bool:
        return bool(self._plain or self._typed)

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The registered functions: for types first, then for other messages, in the order they run."""
        return tuple(registered.function for registered in (*dict.fromkeys(self._typed.values()), *self._plain))

    def add(
        self,
        function: Callable[..., Any],
        *,
        recoverability: Recoverability | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """Register a handler for messages that no typed handler takes. Raises ConfigurationError."""
        self._plain.append(self._registered(function, Message, recoverability, timeout))

    def add_typed(
        self,
        kind: object,
        function: Callable[..., Any],
        *,
        recoverability: Recoverability | None = None,
        timeout: timedelta | None = None,
        concurrency: int | None = None,
    ) -> None:
        """Register a handler for messages of a type. Raises ConfigurationError, also for a second."""
        if concurrency is not None and whole_number("concurrency", concurrency, at_least=1) > MOST_SLOTS:
            raise ConfigurationError(f"concurrency must be at most {MOST_SLOTS:,}, not {concurrency:,}")
        check_kind(kind, f"handler {name_of(function)}")
        if isinstance(self.serializer, SupportsKindCheck) and not isinstance(kind, str):
            self.serializer.check_kind(kind)
        names = names_taken(kind)
        for name in names:
            if name in self._typed:
                raise ConfigurationError(
                    f"messages of type {name!r} have the handler {name_of(self._typed[name].function)} already: a type "
                    "has one. Call both functions in one handler"
                )
        registered = self._registered(function, kind, recoverability, timeout)
        registered.type_name = names[0]
        if concurrency is not None:
            self.limits[registered.type_name] = concurrency
        self._typed |= dict.fromkeys(names, registered)

    def calls(self, message: Message) -> Sequence[Call]:
        """Return the calls for an attempt to handle the message.

        Raises:
            UnknownMessageType: No handler takes the message's type.
            InvalidPayload: The body does not fit the type.
        """
        named = message.headers.get(Headers.ENCLOSED_MESSAGE_TYPES, "") if self._typed else ""
        for name in names_in_header(named) if named else ():
            if (typed := self._typed.get(name)) is not None:
                return [typed.call(self._payload(message, name, typed.kind))]
        if not self._plain:
            known = ", ".join(map(repr, sorted(self._typed)))
            what = f"is of type {reprlib.repr(named)}" if named else f"has no {Headers.ENCLOSED_MESSAGE_TYPES} header"
            raise UnknownMessageType(
                f"message {message.id!r} {what}, and no handler takes that. Handlers are registered for {known}"
            )
        return [registered.call(message) for registered in self._plain]

    def close(self) -> None:
        """End the threads of handlers that are functions; functions at work end later."""
        self._threads.close()

    def _payload(self, message: Message, name: str, kind: Any) -> Any:  # noqa: ANN401 - as registered
        given, ours = message.headers.get(Headers.CONTENT_TYPE, ""), self.serializer.content_type
        if given and _media_type(given) != _media_type(ours):
            raise InvalidPayload(
                f"the body of message {message.id!r}, a {name}, is {given[:100]!r}, and this endpoint reads {ours!r}"
            )
        try:
            return self.serializer.loads(message.body, kind)
        except Exception as error:
            raise InvalidPayload(f"the body of message {message.id!r} cannot be read as {name}: {error}") from error

    def _registered(
        self,
        function: Callable[..., Any],
        kind: Any,  # noqa: ANN401 - a type, or the name of one
        recoverability: Recoverability | None,
        timeout: timedelta | None,
    ) -> _Registered:
        wanted = SIGNATURE if kind is Message else TYPED_SIGNATURE
        if not callable(function):
            raise ConfigurationError(f"a handler is a function, not {function!r}: write {wanted}")
        _check_signature(function, wanted)
        check_annotations(function, (kind, MessageContext), wanted)
        called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
        coroutine = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
        seconds = None if timeout is None else time_span("timeout", timeout).total_seconds()
        read_as = Any if isinstance(kind, str) else kind
        return _Registered(
            self._threads, self.surroundings, function, read_as, recoverability, coroutine=coroutine, seconds=seconds
        )


class _Registered:
    """A registered function."""

    def __init__(
        self,
        threads: HandlerThreads,
        surroundings: Sequence[Surrounding],
        function: Callable[..., Any],
        kind: Any,  # noqa: ANN401 - a type
        recoverability: Recoverability | None,
        *,
        coroutine: bool,
        seconds: float | None,
    ) -> None:
        self._threads = threads
        self._surroundings = surroundings
        self.function = function
        self.kind = kind
        self.recoverability = recoverability
        self.type_name = ""
        self._coroutine = coroutine
        self._seconds = seconds
        self.run: Callable[[Any, MessageContext], Coroutine[Any, Any, None]] = (
            self._run if seconds is None else self._run_in_time
        )

    def call(self, argument: Any) -> Call:  # noqa: ANN401 - a message, or a value of the type
        """Return the call with the message, or the typed value, as its first argument."""
        return Call(self, argument)

    def _call(self, argument: Any, context: MessageContext) -> None:  # noqa: ANN401 - as above
        with self._entered(context):
            self.function(argument, context)

    def _entered(self, context: MessageContext) -> AbstractContextManager[object]:
        """Return the context manager of all that the function runs inside of."""
        if not self._surroundings:
            return NOTHING_AROUND
        entered = contextlib.ExitStack()
        with entered:
            for surround in self._surroundings:
                entered.enter_context(surround(context))
            return entered.pop_all()

    async def _run_in_time(self, argument: Any, context: MessageContext) -> None:  # noqa: ANN401 - as above
        """Run the function. Raises TimeoutError if it takes too long; a thread then runs on."""
        limit = asyncio.timeout(self._seconds)
        try:
            async with limit:
                await self._run(argument, context)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(
                f"handler {name_of(self.function)} has not ended within {self._seconds:g} s, its timeout"
            ) from error

    async def _run(self, argument: Any, context: MessageContext) -> None:  # noqa: ANN401 - as above
        """Run the function; what would end the event loop, such as SystemExit, is a failure like any other.

        KeyboardInterrupt in a coroutine ends the loop, as it may be the user's.
        """
        try:
            if self._coroutine:
                with self._entered(context):
                    handling = self.function(argument, context)
                    if inspect.iscoroutine(handling):
                        handling = Watched(handling, self.function, context.message)
                    await handling
            else:
                await self._threads.run(partial(self._call, argument, context), context)
        except Exception:
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            if isinstance(error, GeneratorExit) or (isinstance(error, KeyboardInterrupt) and self._coroutine):
                raise
            raise RuntimeError(f"handler {name_of(self.function)} raised {error!r}") from error


class Call:
    """A handler and its first argument, for an attempt."""

    __slots__ = ("_argument", "_registered")

    def __init__(self, registered: _Registered, argument: Any) -> None:  # noqa: ANN401 - as registered
        self._registered = registered
        self._argument = argument

    @property
    def recoverability(self) -> Recoverability | None:
        """The handler's own retries, if it has any."""
        return self._registered.recoverability

    @property
    def type_name(self) -> str:
        """The type that the handler is registered for; empty for a handler of every message."""
        return self._registered.type_name

    def __call__(self, context: MessageContext) -> Coroutine[Any, Any, None]:
        """Run the handler."""
        return self._registered.run(self._argument, context)


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _check_signature(function: Callable[..., Any], wanted: str) -> None:
    try:
        signature = signature_of(function)
    except (ValueError, TypeError):  # not to be seen, as of some extension modules
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigurationError(
            f"handler {name_of(function)}{signature} cannot be called with a message and a context ({error}): write "
            f"{wanted}"
        ) from error
