"""The handlers of an endpoint: which of them run for a message, and how."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import reprlib
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, overload

from delayline.checks import time_span, whole_number
from delayline.errors import ConfigurationError, InvalidDueTime, InvalidMessage, InvalidPayload, UnknownMessageType
from delayline.events import Event, emit
from delayline.message import Headers, Message
from delayline.receiving.transactions import ThreadTransaction
from delayline.serialization import JsonSerializer, Serializer, name_of_kind, names_in_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime, timedelta

    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker

    from delayline.message import Body
    from delayline.outgoing import Composer, HeaderMap, Outgoing, Send
    from delayline.receiving.recoverability import Recoverability
    from delayline.receiving.transactions import (
        ConnectionPool,
        HandlerTransaction,
        HandlerTransactions,
        TransactionSource,
    )

logger = logging.getLogger(__name__)

Result_co = TypeVar("Result_co", covariant=True)

#: A handler of messages: a coroutine function, or a function, which runs in a thread.
Handler = Callable[[Message, "MessageContext"], Awaitable[None] | None]
#: Seconds for which a coroutine handler may keep the event loop from other work before that is logged.
BLOCKS_AFTER: Final = 1.0
MOST_SLOTS: Final = 10_000
SIGNATURE: Final = "`async def handle(message: Message, context: MessageContext) -> None`"
TYPED_SIGNATURE: Final = "`async def handle(order: OrderPlaced, context: MessageContext) -> None`"


class Recorded(Coroutine[Any, Any, Result_co]):
    """The outcome of something that is done already: awaiting it returns at once, leaving it alone is fine too."""

    __slots__ = ("_value",)

    def __init__(self, value: Result_co) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, Any, Result_co]:
        """Return the value."""
        yield from ()
        return self._value

    def send(self, value: object) -> NoReturn:
        """Return the value to an event loop that runs it as a task."""
        raise StopIteration(self._value)

    def throw(self, *error: Any) -> NoReturn:  # noqa: ANN401 - as a coroutine has it
        """Raise the error."""
        raise error[1] if len(error) > 1 and error[1] is not None else error[0]

    def close(self) -> None:
        """Do nothing."""


class MessageContext:
    """The context of a handler: metadata, and sending.

    Messages sent through it are dispatched after the handler has succeeded, in the way of the transaction mode; if the
    handler raises they are dropped. Calls return at once without I/O; `await` is possible and not needed.
    """

    def __init__(
        self,
        received: Message,
        queue: str,
        attempt: int,
        composer: Composer,
        transactions: HandlerTransactions | None = None,
    ) -> None:
        self.message = received.logical
        self.queue = queue
        self.attempt = attempt
        """Which attempt of this round this is, from 1."""
        self.outgoing: list[Outgoing] = []
        self._received = received
        self._composer = composer
        self._transactions = transactions
        self.own: HandlerTransaction | None = None
        """The transaction that the handler has asked for."""
        self._over = False

    def send(
        self,
        destination: str,
        body: Body,
        *,
        headers: HeaderMap | None = None,
        message_id: str | None = None,
        delay: timedelta | None = None,
        deliver_at: datetime | None = None,
        expires: timedelta | None = None,
        correlation_id: str | None = None,
        check_destination: bool = True,
    ) -> Awaitable[str]:
        """Send a message, now or delayed, when the handler has succeeded.

        Args:
            destination: The queue it goes to, 1 to 200 characters.
            body: Bytes as they are, str as UTF-8, anything else as JSON.
            headers: Further headers, str to str.
            message_id: Its id, 1 to 250 characters; a new UUID when left out.
            delay: How long it waits, zero or more; excludes `deliver_at`.
            deliver_at: When it is due, an aware datetime.
            expires: How long it may wait in its queue, above zero; then it is deleted.
            correlation_id: Id of the exchange that it belongs to, 1 to 250 characters.
            check_destination: Whether a delayed message for a queue that does not exist is a failure of the handler.

        Returns:
            An awaitable that gives the message's id.

        Raises:
            InvalidMessage: By the call: what was given cannot be sent, or the handler has ended.
            InvalidDueTime: By the call: a delay or instant that cannot be honoured.
        """
        return Recorded(
            self._keep(
                self._composer.compose(
                    destination,
                    body,
                    headers=headers,
                    message_id=message_id,
                    delay=delay,
                    deliver_at=deliver_at,
                    expires=expires,
                    correlation_id=correlation_id,
                    related_to=self.message,
                )._replace(check=check_destination)
            )
        )

    def send_many(self, messages: Iterable[Send], *, check_destination: bool = True) -> Awaitable[list[str]]:
        """Send several messages when the handler has succeeded.

        Args:
            messages: What to send; see `Send`.
            check_destination: See `Endpoint.send`.

        Returns:
            An awaitable of the messages' ids.

        Raises:
            InvalidMessage: By the call: a message is invalid, or the handler has ended.
        """
        composed = self._composer.compose_many(messages, self.message)
        return Recorded([self._keep(one._replace(check=check_destination)) for one in composed])

    def forward(
        self, destination: str, *, delay: timedelta | None = None, deliver_at: datetime | None = None
    ) -> Awaitable[str]:
        """Send this message, unchanged, to another queue when the handler has succeeded.

        Args:
            destination: Name of the queue, 1 to 200 characters.
            delay: Time to wait, zero or more; excludes `deliver_at`.
            deliver_at: Due time, an aware datetime.

        Returns:
            An awaitable of the message's id.

        Raises:
            InvalidMessage: By the call: the queue's name is invalid, or the handler has ended.
            InvalidDueTime: By the call: the delay or due time is out of range.
        """
        return Recorded(self._keep(self._composer.forward(self.message, destination, delay, deliver_at)))

    def reply(self, body: Body, *, headers: HeaderMap | None = None, delay: timedelta | None = None) -> Awaitable[str]:
        """Send a reply to the message's reply address when the handler has succeeded.

        Args:
            body: The body: bytes, text, or a value that the endpoint's serializer takes.
            headers: Further headers.
            delay: Time to wait, zero or more.

        Returns:
            An awaitable of the reply's id.

        Raises:
            InvalidMessage: By the call: the message has no reply address, or the handler has ended.
        """
        return Recorded(self._keep(self._composer.reply(self.message, body, headers, delay)))

    def defer(self, delay: timedelta | None = None, *, deliver_at: datetime | None = None) -> Awaitable[None]:
        """Handle this same message again, later.

        Args:
            delay: Time to wait, zero or more; excludes `deliver_at`.
            deliver_at: Due time, an aware datetime.

        Returns:
            An awaitable of None.

        Raises:
            InvalidDueTime: By the call: neither or both are given, or the due time is out of range.
        """
        if delay is None and deliver_at is None:
            raise InvalidDueTime("defer needs a delay or deliver_at: give the time to handle the message again")
        self._keep(self._composer.again(self._received, self.queue, delay=delay, deliver_at=deliver_at))
        return Recorded(None)

    @overload
    def transaction(self, source: Engine) -> Connection: ...
    @overload
    def transaction(self, source: sessionmaker[Session]) -> Session: ...
    @overload
    def transaction(self, source: AsyncEngine) -> Awaitable[AsyncConnection]: ...
    @overload
    def transaction(self, source: async_sessionmaker[AsyncSession]) -> Awaitable[AsyncSession]: ...
    @overload
    def transaction(self, source: Callable[[], Result_co]) -> Result_co: ...
    @overload
    def transaction(self, source: ConnectionPool) -> Any: ...  # noqa: ANN401
    @overload
    def transaction(self, source: str | None = None) -> Any: ...  # noqa: ANN401

    def transaction(self, source: TransactionSource | None = None) -> Any:
        """Open a transaction for your rows, in which this message's end and the handler's sends commit too.

        It commits when the handlers of the message have succeeded, and is rolled back when one raises. Do not commit it
        yourself. Your rows are in the database of the queues.

        Args:
            source: Makes the connection. In a function: an Engine or sessionmaker of SQLAlchemy, a pool or a function
                that connects, as psycopg's, or an alias of Django's DATABASES. In a coroutine function, which awaits
                the result: an AsyncEngine, an async_sessionmaker, an AsyncConnectionPool or a coroutine function. By
                default an Engine on the database of the queues, with `transaction_connections` of the endpoint.

        Returns:
            The connection or session; in a coroutine function an awaitable of it.

        Raises:
            ConfigurationError: The queues are in no SQL database, the transaction mode has no transactions, or the
                source does not fit the handler.

        Example:
            ```python
            @endpoint.handles(OrderPlaced)
            async def bill(order: OrderPlaced, context: MessageContext) -> None:
                connection = await context.transaction(async_engine)
                await connection.execute(insert(orders).values(id=order.order_id))
                context.send("billing", Bill(order.order_id))
            ```
        """
        if self._over:
            raise InvalidMessage(f"the handler of message {self.message.id!r} has ended: it can open no transaction")
        if self._transactions is None:
            raise ConfigurationError("this message has no transaction that a handler can use")
        if self.own is None:
            own = self._transactions.open(source)
            begun = own.begin()
            self.own = own
            return begun
        if source not in (None, self.own.source) or self.own.owner not in (None, threading.get_ident()):
            raise ConfigurationError(
                f"message {self.message.id!r} has a transaction of another source or handler already"
            )
        return self.own.begin()

    def end(self) -> None:
        """Take nothing more: the handlers have ended."""
        self._over = True

    def _keep(self, outgoing: Outgoing) -> str:
        if self._over:
            raise InvalidMessage(
                f"the handler of message {self.message.id!r} has ended: this message would be lost. Await in the "
                "handler all tasks that it starts, or use Endpoint.send"
            )
        self.outgoing.append(outgoing)
        return outgoing.operation.message.id


class Handlers:
    """The registered handlers of one endpoint.

    Args:
        serializer: Reads the bodies of typed messages.
        threads: How many handlers that are plain functions run at once; 1 or more.
    """

    def __init__(self, serializer: Serializer | None = None, *, threads: int = 1) -> None:
        self.serializer = serializer or JsonSerializer()
        self._threads = threads
        self._plain: list[_Registered] = []
        self._typed: dict[str, _Registered] = {}
        self.limits: dict[str, int] = {}
        """How many messages are handled at once over all processes, by type; the limits of the queue come first."""
        self._executor: ThreadPoolExecutor | None = None

    def __bool__(self) -> bool:
        return bool(self._plain or self._typed)

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The registered functions: those for types first, then those for other messages, in the order they run."""
        return tuple(one.function for one in (*self._typed.values(), *self._plain))

    def add(
        self,
        function: Callable[..., Any],
        *,
        recoverability: Recoverability | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """Register a handler for messages that no typed handler takes. Raises ConfigurationError."""
        self._plain.append(self._registered(function, SIGNATURE, None, recoverability, timeout))

    def add_typed(
        self,
        kind: object,
        function: Callable[..., Any],
        *,
        recoverability: Recoverability | None = None,
        timeout: timedelta | None = None,
        concurrency: int | None = None,
    ) -> None:
        """Register a handler for messages of a type. Raises ConfigurationError, also for a second one of the type."""
        if concurrency is not None and whole_number("concurrency", concurrency, at_least=1) > MOST_SLOTS:
            raise ConfigurationError(f"concurrency must be at most {MOST_SLOTS:,}, not {concurrency:,}")
        name = name_of_kind(kind)
        if name in self._typed:
            raise ConfigurationError(
                f"messages of type {name!r} have the handler {name_of(self._typed[name].function)} already: a type has "
                "one. Call both functions in one handler"
            )
        read_as = Any if isinstance(kind, str) else kind
        registered = self._registered(function, TYPED_SIGNATURE, read_as, recoverability, timeout)
        registered.type_name = name
        if concurrency is not None:
            self.limits[name] = concurrency
        self._typed[name] = registered

    def calls(self, message: Message) -> Sequence[Call]:
        """Return the calls for one attempt to handle the message.

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
        return [one.call(message) for one in self._plain]

    def close(self) -> None:
        """End the threads of handlers that are functions; those at work end later."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None

    def in_thread(self, work: Callable[[], object], context: MessageContext) -> asyncio.Future[None]:
        """Run `work` on one of the threads, with the caller's context variables.

        The thread then runs the end of the transaction that the handler has opened, if any.
        """
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._threads, "delayline handler")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def run() -> None:
            failure: BaseException | None = None
            try:
                work()
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, done, failure)
            if isinstance(context.own, ThreadTransaction):
                context.own.serve(given_up=done.cancelled())

        self._executor.submit(copy_context().run, run)
        return done

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
        wanted: str,
        kind: Any,  # noqa: ANN401 - a type
        recoverability: Recoverability | None,
        timeout: timedelta | None,
    ) -> _Registered:
        if not callable(function):
            raise ConfigurationError(f"a handler is a function, not {function!r}: write {wanted}")
        _check_signature(function, wanted)
        called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
        coroutine = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
        seconds = None if timeout is None else time_span("timeout", timeout).total_seconds()
        return _Registered(self, function, kind, recoverability, coroutine=coroutine, seconds=seconds)


class _Registered:
    """One registered function."""

    def __init__(
        self,
        owner: Handlers,
        function: Callable[..., Any],
        kind: Any,  # noqa: ANN401 - a type
        recoverability: Recoverability | None,
        *,
        coroutine: bool,
        seconds: float | None,
    ) -> None:
        self._owner = owner
        self.function = function
        self.kind = kind
        self.recoverability = recoverability
        self.type_name = ""
        self._coroutine = coroutine
        self._seconds = seconds
        self.run = self._run if seconds is None else self._run_in_time

    def call(self, argument: Any) -> Call:  # noqa: ANN401 - a message, or a value of the type
        """Return the call with the message, or the typed value, as its first argument."""
        return Call(self, argument)

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
                handling = self.function(argument, context)
                await (Watched(handling, self.function) if inspect.iscoroutine(handling) else handling)
            else:
                await self._owner.in_thread(partial(self.function, argument, context), context)
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
    """A handler and its first argument, for one attempt."""

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
        """The type that the handler is registered for; empty for one that takes every message."""
        return self._registered.type_name

    def __call__(self, context: MessageContext) -> Coroutine[Any, Any, None]:
        """Run the handler."""
        return self._registered.run(self._argument, context)


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
    """Awaits a handler's coroutine, and logs steps of it that block the event loop."""

    __slots__ = ("_coroutine", "_function")

    def __init__(self, coroutine: Coroutine[Any, Any, None], function: Callable[..., Any]) -> None:
        self._coroutine = coroutine
        self._function = function

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
            name_of(self._function),
            seconds,
        )


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _check_signature(function: Callable[..., Any], wanted: str) -> None:
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # not to be seen, as of some extension modules
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigurationError(
            f"handler {name_of(function)}{signature} cannot be called with a message and a context ({error}): write "
            f"{wanted}"
        ) from error


def name_of(function: object) -> str:
    """Return the name of a function, for people."""
    return str(getattr(function, "__qualname__", None) or repr(function))
