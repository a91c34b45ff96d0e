"""Transactions of handlers: the user's rows, the handler's sends and the end of its message commit together."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import logging
import sys
import textwrap
import threading
from concurrent.futures import Future, InvalidStateError
from enum import StrEnum
from inspect import getsource, isawaitable, iscoroutinefunction, signature, unwrap
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

from delayline.errors import BackendUnavailable, ConfigurationError
from delayline.events import Event, emit
from delayline.external import ExternalTransaction, SupportsExternalTransactions, WaitingThread, django_connection
from delayline.transaction import Transaction, TransactionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker

    from delayline.transaction import TransactionParticipant
    from delayline.transport import ReceivedMessage, Transport

    Pooled_co = TypeVar("Pooled_co", covariant=True)

    class ConnectionPool(Protocol[Pooled_co]):
        """Common interface of the pools of psycopg and psycopg2."""

        def getconn(self) -> Pooled_co:
            """Return a connection, or an awaitable of it."""
            ...

        def putconn(self, conn: Any) -> Any:  # noqa: ANN401
            """Take it back."""
            ...

    #: Makes the connections or sessions of transactions; a str is an alias of Django's DATABASES. A class of
    #: SQLAlchemy's connections or sessions stands for one on the database of the queues.
    TransactionSource: TypeAlias = (
        Engine
        | sessionmaker[Any]
        | AsyncEngine
        | async_sessionmaker[Any]
        | type[Connection | Session | AsyncConnection | AsyncSession]
        | ConnectionPool[Any]
        | Callable[[], Any]
        | str
    )

logger: logging.Logger = logging.getLogger(__name__)

SYNC_FACTORIES: Final = (("sqlalchemy", "Engine"), ("sqlalchemy.orm", "sessionmaker"))
ASYNC_FACTORIES: Final = (("sqlalchemy.ext.asyncio", "AsyncEngine"), ("sqlalchemy.ext.asyncio", "async_sessionmaker"))
#: Whether a coroutine handler uses them, SQLAlchemy's connections, and its sessions.
CLASSES: Final = (
    (False, ("sqlalchemy", "Connection"), ("sqlalchemy.orm", "Session")),
    (True, ("sqlalchemy.ext.asyncio", "AsyncConnection"), ("sqlalchemy.ext.asyncio", "AsyncSession")),
)
CLASS_NAMES: Final = {name for _, *classes in CLASSES for _, name in classes}
SESSION_MAKERS: Final = {False: "sessionmaker", True: "async_sessionmaker"}
SOURCES: Final = (
    "an Engine, AsyncEngine, sessionmaker or async_sessionmaker of SQLAlchemy, a pool of psycopg's, a function that "
    "connects, or an alias of Django's"
)


class HandlerRows(StrEnum):
    """Whether rows that a handler writes in `context.transaction()` commit with the end of its message."""

    YES = "yes"
    WITHOUT_DELAYED_SENDS = "without delayed sends"
    NO = "no"


def handler_rows(
    transport: Transport, delivery: TransactionParticipant | None, mode: TransactionMode, *, inbox: bool = False
) -> HandlerRows:
    """Return whether rows of a handler, the end of its message and its sends can share a transaction.

    Args:
        transport: The transport of the handled messages.
        delivery: The delayed delivery; None for none.
        mode: The endpoint's transaction mode.
        inbox: Whether the endpoint keeps an inbox, in the database of the rows.
    """
    if inbox:
        return HandlerRows.YES
    if mode < TransactionMode.SENDS_ATOMIC_WITH_RECEIVE or not isinstance(transport, SupportsExternalTransactions):
        return HandlerRows.NO
    reached = transport.external_domain if isinstance(transport, SupportsEngines) else transport.transaction_domain
    if delivery is None or delivery.transaction_domain == reached:
        return HandlerRows.YES
    return HandlerRows.WITHOUT_DELAYED_SENDS


@runtime_checkable
class SupportsEngines(Protocol):
    """Capability of a transport: make Engines of SQLAlchemy on the database of its queues."""

    @property
    def external_domain(self) -> Hashable:
        """The transaction domain of external transactions."""
        ...

    def lost_connection(self, error: BaseException) -> BackendUnavailable | None:
        """Return the outage that an error of a connection to the database says; None for any other error."""
        ...

    def new_engine(self, size: int, *, asynchronous: bool) -> Engine | AsyncEngine:
        """Return an Engine with at most `size` connections. Raises ConfigurationError or MissingExtra."""
        ...


@runtime_checkable
class SupportsEarlyEnd(Protocol):
    """Capability of a receiver: end a handler's transaction before the event loop hears of the handler's end."""

    def acknowledge_early(self, received: ReceivedMessage, external: ExternalTransaction) -> Transaction:
        """Remove a message in a handler's transaction, on the thread of its connection, and end it.

        Nothing is raised: `acknowledge` is called with the transaction that is returned, and returns or raises what
        came of it.
        """
        ...


@runtime_checkable
class SupportsConflicts(Protocol):
    """Capability of a transport: tell conflicts between transactions, which go away when a transaction is repeated."""

    def gave_way(self, error: BaseException) -> bool:
        """Return whether the error comes from a transaction's end in favour of another, so that it can be repeated."""
        ...


class HandlerTransaction(Protocol):
    """The transaction of a message's handler, on a separate connection."""

    source: Any
    connection: Any
    owner: int | None
    ended: Transaction | None
    """The transaction that its thread has ended in advance."""

    @property
    def thread(self) -> WaitingThread | None:
        """The thread that statements run on; None for the event loop."""
        ...

    def begin(self) -> Any:  # noqa: ANN401 - the connection or session, or an awaitable of it
        """Open the connection, once, and return it."""
        ...

    def end(self, connection: Any) -> None:  # noqa: ANN401
        """Commit and close, where the connection is used; `commit` raises what fails."""
        ...

    async def commit(self) -> None:
        """Commit, unless `end` has, and close the connection."""
        ...

    async def roll_back(self) -> None:
        """Roll back, and close the connection. Idempotent."""
        ...


class HandlerTransactions:
    """Opens the transactions of an endpoint's handlers.

    Args:
        transport: The transport of the handled messages.
        mode: The endpoint's transaction mode.
        size: The most connections to open for `context.transaction()` without a source; 1 or more. Further handlers
            wait for a free connection.
    """

    def __init__(self, transport: object, mode: TransactionMode, size: int) -> None:
        self._transport = transport
        # Asked once: to ask a protocol for each message takes longer than the rest of what is done here.
        self._participant = transport if isinstance(transport, SupportsExternalTransactions) else None
        self._maker = transport if isinstance(transport, SupportsEngines) else None
        self._mode = mode
        self._size = size
        self._engines: dict[bool, Any] = {}
        self._session_makers: dict[type, Any] = {}

    def check_drivers(self, handlers: Iterable[Callable[..., Any]]) -> None:
        """Make the Engines that the handlers will ask for: at the start a missing driver fails no message.

        Raises:
            MissingExtra: The driver of an Engine is not installed, or not to be used.
            ConfigurationError: The queues' connections are the user's own, so that a handler has to pass a source.
        """
        if self._maker is not None and self._mode >= TransactionMode.SENDS_ATOMIC_WITH_RECEIVE:
            for handle in handlers:
                if opens_without_source(handle):
                    self._engine(asynchronous=iscoroutinefunction(handle))

    def open(self, source: TransactionSource | None) -> HandlerTransaction:
        """Return a transaction for the calling handler, which is in its thread or on its event loop.

        Raises ConfigurationError if the queues or the source cannot take part.
        """
        self._check()
        source = None if source is None else self.connecting(source)
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            if source is not None and not _connects(source, asynchronous=True):
                raise ConfigurationError(
                    f"context.transaction() of a coroutine handler takes an AsyncEngine, an async_sessionmaker, an "
                    f"AsyncConnectionPool or a coroutine function that connects, or AsyncConnection or AsyncSession, "
                    f"not {_name(source)}, which would block the event loop: make the handler a `def` function"
                )
            return LoopTransaction(source or self._engine(asynchronous=True))
        if source is not None and not isinstance(source, str) and not _connects(source, asynchronous=False):
            raise ConfigurationError(
                f"context.transaction() of a function takes Connection or Session, an Engine, a sessionmaker, a pool "
                f"or a function that connects, or an alias of Django's, not {_name(source)}: make the handler a "
                f"coroutine function to use {SOURCES}"
            )
        return ThreadTransaction(source or self._engine(asynchronous=False))

    def connecting(self, source: TransactionSource) -> TransactionSource:
        """Return what makes the connections: for a class of SQLAlchemy's, its maker on the database of the queues."""
        if not isinstance(source, type):
            return source
        for asynchronous, connections, sessions in CLASSES:
            if _is_class(source, *connections):
                return cast("TransactionSource", self._engine(asynchronous=asynchronous))
            if _is_class(source, *sessions):
                if source not in self._session_makers:
                    maker = getattr(sys.modules[sessions[0]], SESSION_MAKERS[asynchronous])
                    self._session_makers[source] = maker(self._engine(asynchronous=asynchronous), class_=source)
                return cast("TransactionSource", self._session_makers[source])
        return source

    def reaches(self, delivery: object, transaction: Transaction) -> bool:
        """Return whether delayed messages are stored in the transaction, and not before it.

        Raises ConfigurationError where the transaction mode does not allow them to be stored before it.
        """
        if getattr(delivery, "transaction_domain", None) == transaction.domain:
            return True
        if self._mode is TransactionMode.TRANSACTION_SCOPE:
            raise ConfigurationError(
                "a delayed message cannot be stored in context.transaction(), which does not reach the database of the "
                "store: keep it in that of the queues, or use TransactionMode.SENDS_ATOMIC_WITH_RECEIVE"
            )
        return False

    def gave_way(self, error: BaseException) -> bool:
        """Return whether a handler can be repeated, as its transaction has ended in favour of another."""
        return isinstance(self._transport, SupportsConflicts) and self._transport.gave_way(error)

    async def enlist(self, own: HandlerTransaction, *, at_once: bool) -> Transaction:
        """Return the open transaction as delayline's own. Raises ConfigurationError for another database.

        Args:
            own: The transaction.
            at_once: Whether its end comes with the first statements that find what they look for.
        """
        assert self._participant is not None  # noqa: S101 - `open` has checked it
        if own.ended is not None:
            return own.ended
        end = own.end if at_once else None
        external = ExternalTransaction(own.connection, own.thread, of_handler=True, end=end)
        return await self._participant.enlist(external)

    def outage(self, own: HandlerTransaction | None, error: BaseException) -> TransactionLost | None:
        """Return the outage that has ended the transaction, if that is what the error says; before it is rolled back.

        An error of another connection of the handler's is not a conflict, nor is a transaction that the server gave up.
        """
        if own is None or self._maker is None or not _is_lost(own):
            return None
        link: BaseException | None = error
        while link is not None:
            lost = link if isinstance(link, BackendUnavailable) else self._maker.lost_connection(link)
            if lost is not None:
                outage = TransactionLost(str(lost))
                outage.__cause__ = error
                return outage
            link = link.__cause__
        return None

    async def close(self) -> None:
        """Close the connections of the Engines that were made here."""
        engines, self._engines = self._engines, {}
        self._session_makers.clear()
        for asynchronous, engine in engines.items():
            if asynchronous:
                await engine.dispose()
            else:
                await asyncio.to_thread(engine.dispose)

    def _check(self) -> None:
        if self._participant is None:
            raise ConfigurationError(
                f"context.transaction() needs queues in your database, and this endpoint's are in "
                f"{type(self._transport).__name__}: use a SqlTransport on it, or make the handler idempotent"
            )
        if self._mode < TransactionMode.SENDS_ATOMIC_WITH_RECEIVE:
            raise ConfigurationError(
                f"context.transaction() needs transaction_mode=TransactionMode.TRANSACTION_SCOPE or "
                f"SENDS_ATOMIC_WITH_RECEIVE, not {self._mode.name}, in which a message ends outside of transactions"
            )

    def _engine(self, *, asynchronous: bool) -> Any:  # noqa: ANN401 - an Engine or an AsyncEngine
        if asynchronous not in self._engines:
            if self._maker is None:
                raise ConfigurationError(f"context.transaction() needs a source here: {SOURCES}")
            self._engines[asynchronous] = self._maker.new_engine(self._size, asynchronous=asynchronous)
        return self._engines[asynchronous]


class TransactionEnd:
    """The end of a transaction in the place where its connection is used, for those who ask for it elsewhere."""

    def __init__(self) -> None:
        self._has_come = False
        self._failure: BaseException | None = None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Keep what the commit inside raises."""
        try:
            yield
        except BaseException as error:
            self._failure = error
        finally:
            self._has_come = True

    def is_over(self) -> bool:
        """Return whether the end has come. Raises the failure of the commit."""
        if self._failure is not None:
            raise self._failure
        return self._has_come


class LoopTransaction:
    """A transaction on an AsyncConnection or AsyncSession, opened by a coroutine handler."""

    def __init__(self, source: Any) -> None:  # noqa: ANN401 - an AsyncEngine or an async_sessionmaker
        self.source = source
        self.connection: Any = None
        self.owner: int | None = None
        self.ended: Transaction | None = None
        self._end = TransactionEnd()

    @property
    def thread(self) -> None:
        """None: statements run on the event loop."""
        return None

    def end(self, connection: Any) -> None:  # noqa: ANN401 - SQLAlchemy's, inside the asynchronous connection
        """Commit and close in the greenlet that uses the connection."""
        with self._end.noted():
            try:
                connection.commit()
            finally:
                self.connection = None
                try:
                    connection.close()
                except Exception as error:
                    _log_unclosed(error)

    async def begin(self) -> Any:  # noqa: ANN401 - the connection or session
        """Open the connection, once, and return it."""
        if self.connection is None:
            made = _made_by(self.source, *ASYNC_FACTORIES[0])
            self.connection = await made if isawaitable(made) else made
        return self.connection

    async def commit(self) -> None:
        """Commit, unless `end` has, and close the connection."""
        if self._end.is_over():
            return
        try:
            await self.connection.commit()
        finally:
            await self.roll_back()

    async def roll_back(self) -> None:
        """Close the connection, which rolls back an open transaction."""
        connection, self.connection = self.connection, None
        if connection is not None:
            try:
                if hasattr(self.source, "putconn"):
                    try:
                        await connection.rollback()
                    finally:  # also of a connection that is lost, which the pool replaces
                        await self.source.putconn(connection)
                else:
                    await connection.close()
            except Exception as error:
                _log_unclosed(error)


class ThreadTransaction:
    """A transaction on a blocking connection or session: opened, used and ended on the thread of a handler.

    The thread runs the work of the transaction's end, after the handler has returned, until `serve` returns.
    """

    def __init__(self, source: Any) -> None:  # noqa: ANN401 - an Engine, a sessionmaker, or an alias of Django's
        self.source = source
        self._thread = WaitingThread()
        self.owner: int | None = threading.get_ident()
        self.ended: Transaction | None = None
        self._over: Future[None] = Future()
        self._end = TransactionEnd()
        self._returned = False
        self._atomic: Any = None
        self.connection: Any = None

    @property
    def thread(self) -> WaitingThread:
        """The handler's thread."""
        return self._thread

    def begin(self) -> Any:  # noqa: ANN401 - the connection or session
        """Open the connection, once, and return it; on the handler's thread."""
        if self.connection is None:
            if isinstance(self.source, str):
                self.connection = self._begin_in_django(self.source)
            else:
                self.connection = _made_by(self.source, *SYNC_FACTORIES[0])
        return self.connection

    def end_early(self, acknowledge: Callable[[ExternalTransaction], Transaction], *, given_up: bool) -> None:
        """Remove the message and commit, on the handler's thread, after the handler: it has not to be asked again.

        Args:
            acknowledge: Removes the message.
            given_up: Whether the handler took too long or was cancelled.
        """
        if given_up or self.connection is None:
            return
        external = ExternalTransaction(self.connection, self._thread, of_handler=True, end=self.end)
        with contextlib.suppress(Exception):  # which is raised on the event loop too
            self.ended = acknowledge(external)

    def serve(self, *, given_up: bool) -> None:
        """Run the work of the transaction's end; on the handler's thread, after the handler.

        Args:
            given_up: Whether the handler took too long or was cancelled: then the transaction is rolled back.
        """
        if given_up:
            self._roll_back()
            return
        self._returned = True
        self._thread.wait_for(self._over)

    def end(self, connection: Any) -> None:  # noqa: ANN401
        """Commit and close, on the handler's thread, which is then free."""
        del connection
        with self._end.noted():
            self._commit()
        with contextlib.suppress(InvalidStateError):  # given up meanwhile
            self._over.set_result(None)

    async def commit(self) -> None:
        """Commit, unless `end` has, and close the connection."""
        if self._end.is_over():
            return
        try:
            await self._thread.run(self._commit)
        finally:
            self._over.set_result(None)

    async def roll_back(self) -> None:
        """Roll back and close; a handler that has been given up does so when it returns."""
        if self._over.done():
            return
        try:
            if self._returned:
                await self._thread.run(self._roll_back)
            else:
                self._thread.post(self._roll_back)
        finally:
            self._over.set_result(None)

    def _commit(self) -> None:
        try:
            if self._atomic is not None:
                atomic, self._atomic = self._atomic, None
                atomic.__exit__(None, None, None)
            else:
                self.connection.commit()
        finally:
            self._roll_back()

    def _roll_back(self) -> None:
        atomic, self._atomic = self._atomic, None
        connection, self.connection = self.connection, None
        try:
            if atomic is not None:
                atomic.__exit__(Undone, Undone(), None)
            elif connection is not None and hasattr(self.source, "putconn"):
                try:
                    connection.rollback()
                finally:  # also of a connection that is lost, which the pool replaces
                    self.source.putconn(connection)
            elif connection is not None and not isinstance(self.source, str):
                connection.close()
        except Exception as error:
            _log_unclosed(error)

    def _begin_in_django(self, alias: str) -> Any:  # noqa: ANN401
        connection = django_connection(alias, "the source of context.transaction")
        from django.db.transaction import Atomic

        atomic = Atomic(using=alias, savepoint=True, durable=False)
        atomic.__enter__()
        self._atomic = atomic
        return connection


class TransactionLost(BackendUnavailable):
    """The connection of a handler's transaction was lost, or could not be made: an outage, and no failure of it."""


def _is_lost(own: HandlerTransaction) -> bool:
    """Return whether the transaction's connection is lost, or could not be opened, as far as it can be asked."""
    connection = own.connection
    if connection is None:
        return True
    ends = [getattr(connection, name, None) for name in ("invalidated", "closed", "broken")]
    known = [end for end in ends if isinstance(end, bool | int)]
    return any(known) or not known


class Undone(Exception):
    """Makes Django roll back."""


def opens_without_source(handle: Callable[..., Any]) -> bool:
    """Return whether the source code of a handler asks its context, of whatever name, for the queues' own Engine.

    That is `context.transaction()`, and the same with a class of SQLAlchemy's.

    False where the code cannot be read, or where another function calls it.
    """
    try:
        tree = ast.parse(textwrap.dedent(getsource(unwrap(handle))))
        context = list(signature(handle).parameters)[-1:]
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    return any(
        isinstance(node, ast.Call)
        and all(ast.unparse(argument).rpartition(".")[2] in CLASS_NAMES for argument in node.args)
        and not node.keywords
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "transaction"
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in context
        for node in ast.walk(tree)
    )


def _is(source: object, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(source, getattr(loaded, name))


def _is_class(source: type, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and issubclass(source, getattr(loaded, name))


def _connects(source: object, *, asynchronous: bool) -> bool:
    """Return whether a handler that is a coroutine function, or another handler, can use the source."""
    fits, others = (ASYNC_FACTORIES, SYNC_FACTORIES) if asynchronous else (SYNC_FACTORIES, ASYNC_FACTORIES)
    if any(_is(source, *kind) for kind in fits):
        return True
    makes = getattr(source, "getconn", source)
    if any(_is(source, *kind) for kind in others) or not callable(makes):
        return False
    function = getattr(makes, "func", makes)  # of a functools.partial
    return iscoroutinefunction(function) is asynchronous


def _made_by(source: Any, module: str, engine: str) -> Any:  # noqa: ANN401 - a connection, or an awaitable of it
    """Return a new connection or session of the source."""
    if _is(source, module, engine):
        return source.connect()
    return source.getconn() if hasattr(source, "getconn") else source()


def _name(source: object) -> str:
    return "a str" if isinstance(source, str) else f"a {type(source).__name__}"


def _log_unclosed(error: Exception) -> None:
    log_text = "The connection of a handler's transaction could not be closed: %r"
    emit(logger, logging.WARNING, Event.BACKGROUND_TASK_FAILED, log_text, error)
