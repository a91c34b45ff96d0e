"""The decorators that register handlers, which an endpoint and its synchronous twin have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar, Unpack, overload

from delayline.message import Message
from delayline.receiving.annotations import is_handler, kind_of
from delayline.receiving.context import MessageContext

if TYPE_CHECKING:
    from datetime import timedelta

    from delayline.receiving.recoverability import Recoverability

Payload = TypeVar("Payload")
#: What a handler returns; kept as it is, so that a coroutine function stays one for type checkers.
Handling = TypeVar("Handling", bound="Awaitable[None] | None")


class TypedRegistration(Protocol[Payload]):
    """Registers handlers of messages of a type: a decorator that type checkers hold to the type."""

    def __call__(
        self, handle: Callable[[Payload, MessageContext], Handling], /
    ) -> Callable[[Payload, MessageContext], Handling]:
        """Register the handler, and return it as it is."""
        ...


class AnnotatedRegistration(Protocol):
    """Registers handlers of the type that the annotation of their first parameter names."""

    def __call__(
        self, handle: Callable[[Payload, MessageContext], Handling], /
    ) -> Callable[[Payload, MessageContext], Handling]:
        """Register the handler, and return it as it is."""
        ...


class HandlerOptions(TypedDict, total=False):
    """What can be said of a handler of a type; see `Endpoint.handles`."""

    recoverability: Recoverability | None
    timeout: timedelta | None
    concurrency: int | None


class RegistersHandlers(ABC):
    """Takes handlers, as functions and as decorators."""

    @abstractmethod
    def _register(
        self,
        handle: Callable[..., Any],
        kind: Any,  # noqa: ANN401 - a type, or its name
        *,
        recoverability: Recoverability | None,
        timeout: timedelta | None,
        concurrency: int | None,
    ) -> None:
        """Register a handler for a type; for every message if `kind` is None."""

    @abstractmethod
    def _subscribe_to(self, kind: object) -> None:
        """Subscribe to events of a type at start. Raises ConfigurationError."""

    @overload
    def handler(
        self,
        handle: Callable[[Message, MessageContext], Handling],
        *,
        recoverability: Recoverability | None = None,
        timeout: timedelta | None = None,
    ) -> Callable[[Message, MessageContext], Handling]: ...

    @overload
    def handler(
        self, *, recoverability: Recoverability | None = None, timeout: timedelta | None = None
    ) -> TypedRegistration[Message]: ...

    def handler(
        self, handle: Any = None, *, recoverability: Recoverability | None = None, timeout: timedelta | None = None
    ) -> Any:
        """Register a function for every message that no handler of `handles` takes; usable as a decorator.

        A coroutine function runs in the event loop, any other function in a thread. Several handlers run in order.

        Args:
            handle: A function of a `Message` and a `MessageContext`.
            recoverability: Retries when this handler fails; by default the endpoint's.
            timeout: How long an attempt may take, above zero; then it is cancelled and has failed. A thread runs on.

        Raises:
            ConfigurationError: `handle` cannot be called so, the endpoint is send-only, or it is started.

        Example:
            ```python
            @endpoint.handler
            async def handle(message: Message, context: MessageContext) -> None:
                print(message.json())
            ```
        """
        if handle is None:
            return partial(self.handler, recoverability=recoverability, timeout=timeout)
        self._register(handle, None, recoverability=recoverability, timeout=timeout, concurrency=None)
        return handle

    @overload  # a class can be called too, but only the first that fits counts
    def handles(  # type: ignore[overload-overlap]
        self,
        kind: type[Payload],
        *,
        recoverability: Recoverability | None = None,
        timeout: timedelta | None = None,
        concurrency: int | None = None,
    ) -> TypedRegistration[Payload]: ...

    @overload
    def handles(
        self,
        kind: str,
        *,
        recoverability: Recoverability | None = None,
        timeout: timedelta | None = None,
        concurrency: int | None = None,
    ) -> TypedRegistration[Any]: ...

    @overload
    def handles(
        self, kind: Callable[[Payload, MessageContext], Handling], /
    ) -> Callable[[Payload, MessageContext], Handling]: ...

    @overload
    def handles(
        self,
        *,
        recoverability: Recoverability | None = None,
        timeout: timedelta | None = None,
        concurrency: int | None = None,
    ) -> AnnotatedRegistration: ...

    def handles(
        self,
        kind: Any = None,
        *,
        recoverability: Recoverability | None = None,
        timeout: timedelta | None = None,
        concurrency: int | None = None,
    ) -> Any:
        """Register the handler below it for messages of a type: the given one, or that of its annotation.

        Args:
            kind: A dataclass, TypedDict, pydantic model, msgspec struct or other type that the serializer reads; or the
                name of a type, whose messages are given as the serializer reads them. See `message_type` for names.
                Left out, as in `@endpoint.handles`, it is what the handler's first parameter is annotated with.
            recoverability: Retries when this handler fails; by default the endpoint's.
            timeout: How long an attempt may take, above zero; then it is cancelled and has failed. A thread runs on.
            concurrency: How many messages of the type are handled at once, by all processes of the endpoint together;
                1 to 10000, by default no limit but the endpoint's. For queues in a SQL database, where
                `queues.set_limits(..., handlers=...)` replaces it while endpoints run.

        Raises:
            ConfigurationError: The type has a handler already, the function cannot be called with a value and a
                context, its annotation is of another type or missing, the endpoint is send-only, or it is started; or
                the transport has no such limits.

        Example:
            ```python
            @endpoint.handles
            async def bill(order: OrderPlaced, context: MessageContext) -> None:
                context.send("billing", Bill(order.order_id), delay=timedelta(days=14))
            ```
        """
        bare = is_handler(kind)

        def register(handle: Any) -> Any:  # noqa: ANN401 - a handler
            taken = kind_of(handle) if bare or kind is None else kind
            self._register(handle, taken, recoverability=recoverability, timeout=timeout, concurrency=concurrency)
            return handle

        return register(kind) if bare else register

    @overload  # as of `handles`
    def subscribes(  # type: ignore[overload-overlap]
        self, kind: type[Payload], **options: Unpack[HandlerOptions]
    ) -> TypedRegistration[Payload]: ...
    @overload
    def subscribes(self, kind: str, **options: Unpack[HandlerOptions]) -> TypedRegistration[Any]: ...
    @overload
    def subscribes(
        self, kind: Callable[[Payload, MessageContext], Handling], /
    ) -> Callable[[Payload, MessageContext], Handling]: ...
    @overload
    def subscribes(self, **options: Unpack[HandlerOptions]) -> AnnotatedRegistration: ...

    def subscribes(self, kind: Any = None, **options: Any) -> Any:
        """Register the handler below it for events of a type, and subscribe to them at start; see `handles`.

        A subscription outlives the endpoint: events wait in its queue while it does not run, until `unsubscribe`.

        Args:
            kind: The type of the events, or its name; left out, that of the handler's annotation. Events of types that
                derive from it come too.
            options: `recoverability`, `timeout` and `concurrency`, as of `handles`.

        Raises:
            ConfigurationError: As of `handles`; or the transport has no subscriptions.

        Example:
            ```python
            @endpoint.subscribes
            async def bill(order: OrderPlaced, context: MessageContext) -> None:
                context.send("billing", Bill(order.order_id))
            ```
        """
        bare = is_handler(kind)

        def register(handle: Any) -> Any:  # noqa: ANN401 - a handler
            self.subscribe(kind_of(handle) if bare or kind is None else kind, handle, **options)
            return handle

        return register(kind) if bare else register

    @overload
    def subscribe(
        self,
        kind: type[Payload],
        handle: Callable[[Payload, MessageContext], Awaitable[None] | None],
        **options: Unpack[HandlerOptions],
    ) -> None: ...
    @overload
    def subscribe(
        self,
        kind: str,
        handle: Callable[[Any, MessageContext], Awaitable[None] | None],
        **options: Unpack[HandlerOptions],
    ) -> None: ...

    def subscribe(
        self,
        kind: Any,
        handle: Callable[..., Any],
        *,
        recoverability: Recoverability | None = None,
        timeout: timedelta | None = None,
        concurrency: int | None = None,
    ) -> None:
        """Register a handler for events of a type, and subscribe to them at start; see `subscribes`.

        Args:
            kind: The type of the events, or its name.
            handle: The handler.
            recoverability: As of `handles`.
            timeout: As of `handles`.
            concurrency: As of `handles`.

        Raises:
            ConfigurationError: As of `handles`; or the transport has no subscriptions.
        """
        self._subscribe_to(kind)
        self._register(handle, kind, recoverability=recoverability, timeout=timeout, concurrency=concurrency)
