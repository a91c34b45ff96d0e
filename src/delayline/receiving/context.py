"""The context of a handler: what it knows of its message, its sends, and its transaction."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, Unpack, overload

from delayline.errors import ConfigurationError, InvalidDueTime, InvalidMessage
from delayline.external import UNSET
from delayline.message import MAXIMUM_ID_LENGTH, in_utc
from delayline.outgoing import PendingChange, Send, check_name

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime, timedelta

    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker

    from delayline.delayed.store import SendConflict, SupportsManagement
    from delayline.external import DriverConnection, ExternalConnection, ExternalTransaction
    from delayline.message import Body, Message
    from delayline.outgoing import Composer, Effect, HeaderMap, MessageOptions, Outgoing, PublishOptions
    from delayline.receiving.once import Records
    from delayline.receiving.transactions import (
        ConnectionPool,
        HandlerTransaction,
        HandlerTransactions,
        TransactionSource,
    )
    from delayline.transaction import Transaction

    class ConnectionOrAwaitable(Connection, Awaitable[AsyncConnection]):
        """What a transaction without a source gives: a connection, and in a coroutine function an awaitable of one."""


Result_co = TypeVar("Result_co", covariant=True)
OwnSession = TypeVar("OwnSession", bound="Session")
OwnAsyncSession = TypeVar("OwnAsyncSession", bound="AsyncSession")
ONCE_SENDS: Final = (
    "a handler that records its message with context.once() sends in the same transaction: use "
    "endpoint.send(..., transaction=connection). What it sends through its context would be lost if it failed after "
    "your commit"
)


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
        pending: SupportsManagement | None = None,
    ) -> None:
        self.message: Message = received.logical
        self.queue = queue
        self.attempt = attempt
        """Which attempt of this round this is, from 1."""
        self.effects: list[Effect] = []
        """What the handlers have sent, and the pending messages that they have changed."""
        self._received = received
        self._composer = composer
        self._transactions = transactions
        self._pending = pending
        self.own: HandlerTransaction | None = None
        """The transaction that the handler has asked for."""
        self.acknowledge_early: Callable[[ExternalTransaction], Transaction] | None = None
        """Removes the message in that transaction, which it ends, on a handler's thread; None to do so elsewhere."""
        self.records: Records | None = None
        """Records the message in a transaction of the user's; None without an inbox."""
        self._over = False

    @overload
    def send(self, destination: str, body: Body, **options: Unpack[MessageOptions]) -> Awaitable[str]: ...
    @overload
    def send(self, body: Body, /, **options: Unpack[MessageOptions]) -> Awaitable[str]: ...

    def send(  # noqa: PLR0913 - as in Endpoint.send
        self,
        destination: Any = UNSET,
        body: Body = UNSET,
        *,
        headers: HeaderMap | None = None,
        message_id: str | None = None,
        delay: timedelta | None = None,
        deliver_at: datetime | None = None,
        expires: timedelta | None = None,
        correlation_id: str | None = None,
        check_destination: bool = True,
        on_conflict: SendConflict | None = None,
        at_most: timedelta | None = None,
    ) -> Awaitable[str]:
        """Send a message, now or delayed, when the handler has succeeded.

        Args:
            destination: The queue it goes to, 1 to 200 characters. Leave it out for a body whose type has a route.
            body: Bytes as they are, str as UTF-8, anything else as JSON.
            headers: Further headers, str to str.
            message_id: Its id, 1 to 250 characters; a new UUID when left out.
            delay: How long it waits, zero or more; excludes `deliver_at`.
            deliver_at: When it is due, an aware datetime.
            expires: How long it may wait in its queue, above zero; then it is deleted.
            correlation_id: Id of the exchange that it belongs to, 1 to 250 characters.
            check_destination: Whether a delayed message for a queue that does not exist is a failure of the handler.
            on_conflict: What happens to a pending message with that id; see `Endpoint.send`.
            at_most: With `on_conflict="postpone"`, the longest time from the first send to the due time.

        Returns:
            An awaitable that gives the message's id.

        Raises:
            InvalidMessage: By the call: what was given cannot be sent, or the handler has ended.
            InvalidDueTime: By the call: a delay or instant that cannot be honoured.
        """
        if destination is UNSET or body is UNSET:
            destination, body = self._composer.routed(destination, body)
        send = Send(
            destination, body, headers, message_id, delay, deliver_at, expires, correlation_id, on_conflict, at_most
        )
        composed = self._composer.compose(send, self.message)
        return Recorded(self._keep(composed._replace(check=check_destination)))

    def send_local(self, body: Body, **options: Unpack[MessageOptions]) -> Awaitable[str]:
        """Send a message to the queue of this endpoint when the handler has succeeded.

        Args:
            body: Bytes as they are, str as UTF-8, anything else as JSON.
            options: The other arguments of `send`.

        Returns:
            An awaitable that gives the message's id.

        Raises:
            InvalidMessage: By the call, as of `send`.
            InvalidDueTime: By the call, as of `send`.
        """
        return self.send(self.queue, body, **options)

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
        return Recorded([self._keep(outgoing._replace(check=check_destination)) for outgoing in composed])

    def publish(self, event: Body, **options: Unpack[PublishOptions]) -> Awaitable[str]:
        """Publish an event, now or delayed, when the handler has succeeded; see `Endpoint.publish`.

        Args:
            event: A value of a class with a name, such as a dataclass.
            options: `headers`, `message_id`, `delay` and the others, as of `Endpoint.publish`.

        Returns:
            An awaitable that gives the event's id.

        Raises:
            InvalidMessage: By the call: the event cannot be published, or the handler has ended.
            InvalidDueTime: By the call: a delay or instant that cannot be honoured.
            ConfigurationError: By the call: the transport has no subscriptions.
        """
        composed = self._composer.compose(self._composer.publication(event, **options), self.message)
        return Recorded(self._keep(composed._replace(check=False)))

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

    def cancel(self, message_id: str) -> Awaitable[None]:
        """Cancel a pending message of this endpoint when the handler has succeeded, in the way of its sends.

        A message that is gone, or being dispatched, is left alone: where the handler has to know that, it awaits
        `endpoint.delayed.cancel(message_id, transaction=await context.transaction())`.

        Args:
            message_id: Id of the message, 1 to 250 characters.

        Returns:
            An awaitable of None.

        Raises:
            ConfigurationError: By the call: the endpoint has no pending messages that can be changed.
            InvalidMessage: By the call: the id is invalid, or the handler has ended.

        Example:
            ```python
            @shop.handles(OrderPaid)
            async def paid(order: OrderPaid, context: MessageContext) -> None:
                context.cancel(f"order-{order.number}-reminder")
            ```
        """
        return self._keep_change(PendingChange(message_id, None))

    def reschedule(self, message_id: str, due: datetime) -> Awaitable[None]:
        """Give a pending message of this endpoint a new due time when the handler has succeeded; see `cancel`.

        Args:
            message_id: Id of the message, 1 to 250 characters.
            due: The new due time, with a time zone; a past time means now.

        Returns:
            An awaitable of None.

        Raises:
            ConfigurationError: By the call: the endpoint has no pending messages that can be changed.
            InvalidDueTime: By the call: the time has no time zone.
            InvalidMessage: By the call: the id is invalid, or the handler has ended.
        """
        return self._keep_change(PendingChange(message_id, in_utc(due)))

    @overload
    def transaction(self, source: type[Connection]) -> Connection: ...
    @overload
    def transaction(self, source: type[OwnSession]) -> OwnSession: ...
    @overload
    def transaction(self, source: type[AsyncConnection]) -> Awaitable[AsyncConnection]: ...
    @overload
    def transaction(self, source: type[OwnAsyncSession]) -> Awaitable[OwnAsyncSession]: ...
    @overload
    def transaction(self, source: Engine) -> Connection: ...
    @overload
    def transaction(self, source: sessionmaker[OwnSession]) -> OwnSession: ...
    @overload
    def transaction(self, source: AsyncEngine) -> Awaitable[AsyncConnection]: ...
    @overload
    def transaction(self, source: async_sessionmaker[OwnAsyncSession]) -> Awaitable[OwnAsyncSession]: ...
    @overload
    def transaction(self, source: ConnectionPool[Result_co]) -> Result_co: ...
    @overload
    def transaction(self, source: Callable[[], Result_co]) -> Result_co: ...
    @overload
    def transaction(self, source: str) -> DriverConnection: ...
    @overload
    def transaction(self, source: None = None) -> ConnectionOrAwaitable: ...

    def transaction(self, source: TransactionSource | None = None) -> Any:
        """Open a transaction for your rows, in which this message's end and the handler's sends commit too.

        It commits when the handlers of the message have succeeded, and is rolled back when any raises. Do not commit it
        yourself. Your rows are in the database of the queues.

        Args:
            source: What the handler wants, on the database of the queues: in a function SQLAlchemy's `Connection`, the
                default, or `Session`; in a coroutine function, which awaits the result, `AsyncConnection`, the
                default, or `AsyncSession`; the classes themselves, or a session class of yours. The connections are
                at most `transaction_connections` of the endpoint. Or what makes your own. In a function: an Engine or
                sessionmaker of SQLAlchemy, a pool or a function that connects, as psycopg's, or an alias of Django's
                DATABASES. In a coroutine function: an AsyncEngine, an async_sessionmaker, an AsyncConnectionPool or a
                coroutine function.

        Returns:
            The connection or session; in a coroutine function an awaitable of it.

        Raises:
            ConfigurationError: The queues are in no SQL database, the transaction mode has no transactions, or the
                source does not fit the handler.

        Example:
            ```python
            @endpoint.handles(OrderPlaced)
            async def bill(order: OrderPlaced, context: MessageContext) -> None:
                session = await context.transaction(AsyncSession)
                session.add(Order(order.order_id))
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
        wanted = None if source is None else self._transactions.connecting(source)
        if wanted not in (None, self.own.source) or self.own.owner not in (None, threading.get_ident()):
            raise ConfigurationError(
                f"message {self.message.id!r} has a transaction of another source or handler already"
            )
        return self.own.begin()

    def once(self, transaction: ExternalConnection) -> Any:  # noqa: ANN401 - a bool, or an awaitable of it
        """Record this message in a transaction of your own, and return whether it is handled for the first time.

        For handlers that do not use `context.transaction()`: the record commits with your rows. If it returns False, a
        copy of the message was handled before: return. What you send belongs into the same transaction, as
        `await endpoint.send(..., transaction=connection)` puts it there, and not through this context.

        Args:
            transaction: A connection or session with your transaction, on the database of the inbox; see
                `Endpoint.send`.

        Returns:
            Whether there was no record; in a coroutine function an awaitable of that.

        Raises:
            ConfigurationError: The endpoint has no inbox, or the transaction is on another database; or the handler
                sends through its context.

        Example:
            ```python
            @shop.handles(OrderPaid)
            async def paid(order: OrderPaid, context: MessageContext) -> None:
                async with engine.begin() as connection:
                    if await context.once(connection):
                        await connection.execute(update(orders).values(paid=True))
            ```
        """
        if self._over:
            raise InvalidMessage(f"the handler of message {self.message.id!r} has ended: it can record nothing")
        if self.records is None:
            raise ConfigurationError("context.once() needs an inbox: Endpoint(inbox=SqlInbox(url))")
        if self.own is not None:
            raise ConfigurationError("context.transaction() records the message by itself: leave context.once() out")
        if self.effects:
            raise ConfigurationError(ONCE_SENDS)
        return self.records.write(transaction)

    def end(self) -> None:
        """Take nothing more: the handlers have ended."""
        self._over = True

    def _keep_change(self, change: PendingChange) -> Awaitable[None]:
        check_name("message_id", change.message_id, MAXIMUM_ID_LENGTH)
        if self._pending is None:
            raise ConfigurationError(
                "this endpoint has no pending messages that a handler could change: pass delayed_delivery="
                "StoredDelivery(...), with a store that has SupportsManagement; with an inbox, in its database"
            )
        self._refuse_after_once()
        if self._over:
            raise InvalidMessage(
                f"the handler of message {self.message.id!r} has ended: this change would be lost. Await in the "
                "handler all tasks that it starts, or use Endpoint.delayed"
            )
        self.effects.append(change)
        return Recorded(None)

    def _keep(self, outgoing: Outgoing) -> str:
        if self._over:
            raise InvalidMessage(
                f"the handler of message {self.message.id!r} has ended: this message would be lost. Await in the "
                "handler all tasks that it starts, or use Endpoint.send"
            )
        self._refuse_after_once()
        if outgoing.conflict is not None and self._pending is None:
            raise ConfigurationError(
                "on_conflict needs a delayed message store that this handler reaches: pass delayed_delivery="
                "StoredDelivery(...); with an inbox, in its database"
            )
        self.effects.append(outgoing)
        return outgoing.operation.message.id

    def _refuse_after_once(self) -> None:
        if self.records is not None and self.records.is_known:
            raise ConfigurationError(ONCE_SENDS)
