"""External transactions: the user's own database transactions, which `send(transaction=...)` can take part in."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import dataclass
from enum import Enum
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar, runtime_checkable

from delayline.errors import ConfigurationError
from delayline.transaction import Transaction

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable
    from concurrent.futures import Future

    import psycopg
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

    class DriverConnection(Protocol):
        """Common interface of psycopg2, PyMySQL, mysqlclient and Django connections."""

        def cursor(self) -> Any:  # noqa: ANN401 - the driver's
            """Return a cursor."""
            ...

        def commit(self) -> Any:  # noqa: ANN401
            """Commit."""
            ...

        def rollback(self) -> Any:  # noqa: ANN401
            """Roll back."""
            ...

    OfSqlAlchemy: TypeAlias = (
        Connection
        | Session
        | scoped_session[Session]
        | AsyncConnection
        | AsyncSession
        | async_scoped_session[AsyncSession]
    )
    #: A connection or session with a transaction; a str is an alias of Django's DATABASES.
    ExternalConnection: TypeAlias = (
        OfSqlAlchemy
        | psycopg.Connection[Any]
        | psycopg.AsyncConnection[Any]
        | sqlite3.Connection
        | DriverConnection
        | str
    )

Result = TypeVar("Result")


class Unset(Enum):
    """The default of an argument for which None would be a mistake."""

    UNSET = "left out"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset.UNSET


def checked_transaction(transaction: object) -> Any:  # noqa: ANN401 - any connection or session
    """Return the `transaction=` argument, None where it was left out; raises ConfigurationError for None."""
    if transaction is UNSET:
        return None
    if transaction is None:
        raise ConfigurationError(
            "transaction=None is not a transaction: the message would be sent outside yours. Leave transaction= out to "
            "send without one. In Django pass django.db.connection itself: its connection.connection is None until it "
            "is used"
        )
    return transaction


class ConnectionThread(Protocol):
    """Runs work on the thread that a connection belongs to."""

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the waiting thread and return or raise its result."""
        ...


@dataclass(frozen=True, slots=True)
class ExternalTransaction:
    """A transaction of the user, on the user's connection or session."""

    connection: ExternalConnection
    thread: ConnectionThread | None = None
    """The thread that waits for the send and runs its statements; None where the send is awaited on the event loop."""
    of_handler: bool = False
    """Whether delayline ends it, as the transaction of a handler: its end is known, and the connection is cut where
    delayline's statements get no answer in time, as its own connections are."""
    end: Callable[[Any], None] | None = None
    """Commits it, given its connection where that is used, after the first statements that are run in it and return
    something; None to run more of them. Raises nothing."""


@runtime_checkable
class SupportsExternalTransactions(Protocol):
    """Capability of a transport, store or delayed delivery: take part in external transactions."""

    async def enlist(self, external: ExternalTransaction) -> Transaction:
        """Return the external transaction as a delayline transaction, which only the user's code commits or rolls back.

        Raises ConfigurationError if it is on another database, or if the connection is in autocommit; TypeError for an
        object that is not a connection.
        """
        ...


async def enlisted(
    given: ExternalConnection | ExternalTransaction | Transaction, part: object, refusal: str
) -> Transaction:
    """Return a `transaction=` argument as a transaction that the part can take part in.

    Args:
        given: The user's connection or transaction; a transaction of delayline's is returned as it is.
        part: A transport, store or delayed delivery.
        refusal: What to do instead where the part takes part in no external transaction.

    Raises:
        ConfigurationError: The part cannot take part in it.
    """
    if isinstance(given, Transaction):
        return given
    if not isinstance(part, SupportsExternalTransactions):
        raise ConfigurationError(refusal)
    return await part.enlist(given if isinstance(given, ExternalTransaction) else ExternalTransaction(given))


class WaitingThread:
    """A thread that waits for a coroutine on another thread's event loop, and runs work for it while it waits."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the waiting thread; called on the event loop."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Result] = loop.create_future()

        def job() -> None:
            try:
                result = work()
            except BaseException as error:
                settle = _fail(outcome, error)
            else:
                settle = _succeed(outcome, result)
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits for the result
                loop.call_soon_threadsafe(settle)

        self._jobs.put(job)
        return await outcome

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` on the waiting thread, now or once it waits; without waiting for that."""
        self._jobs.put(work)

    def wait_for(self, outcome: Future[Result]) -> Result:
        """Wait, and return or raise the result; called on the waiting thread."""
        outcome.add_done_callback(lambda _: self._jobs.put(None))
        while (job := self._jobs.get()) is not None:
            job()
        return outcome.result()


def _succeed(outcome: asyncio.Future[Result], result: Result) -> Callable[[], None]:
    return lambda: None if outcome.done() else outcome.set_result(result)


def _fail(outcome: asyncio.Future[Any], error: BaseException) -> Callable[[], None]:
    return lambda: None if outcome.done() else outcome.set_exception(error)


#: The engine of Django's only alias where its settings have no DATABASES.
NO_DATABASE: Final = "django.db.backends.dummy"


def django_connection(alias: str, argument: str) -> Any:  # noqa: ANN401 - Django belongs to its user
    """Return Django's connection of this thread for an alias of DATABASES.

    Args:
        alias: The text that the user has given.
        argument: The name of the argument, for errors.

    Raises:
        ConfigurationError: Django is not used in this process, or its settings have no such database.
    """
    connections = getattr(sys.modules.get("django.db"), "connections", None)
    name = repr(alias) if alias.isidentifier() else "of another form"  # a URL may have a password
    must_be = f"{argument} is the text {name}: a text must be an alias of Django's DATABASES, and Django"
    if connections is None:
        raise ConfigurationError(f"{must_be} is not used here")
    from django.core.exceptions import ImproperlyConfigured

    try:
        # Not the connections: making a connection raises the same error where its driver is not installed.
        usable = [each for each, of in connections.settings.items() if of["ENGINE"] != NO_DATABASE]
    except ImproperlyConfigured:
        usable = []
    if not usable:
        raise ConfigurationError(f"{must_be} has no such settings here")
    if alias not in usable:
        raise ConfigurationError(
            f"{argument} is the text {name}, which is not an alias in Django's DATABASES: it has {', '.join(usable)}"
        )
    return connections[alias]
