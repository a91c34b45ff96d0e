"""The caller's own transaction: what `send(transaction=...)` takes besides delayline's, and who can take part in it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from enum import Enum
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar, runtime_checkable

from delayline.errors import ConfigurationError

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable
    from concurrent.futures import Future

    import psycopg
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

    from delayline.transaction import Transaction

    class DriverConnection(Protocol):
        """A connection of psycopg2, PyMySQL, mysqlclient or Django: what they have in common."""

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
    #: On what a caller can have a transaction; a text is an alias of Django's DATABASES.
    CallersConnection: TypeAlias = (
        OfSqlAlchemy
        | psycopg.Connection[Any]
        | psycopg.AsyncConnection[Any]
        | sqlite3.Connection
        | DriverConnection
        | str
    )

Result = TypeVar("Result")


class NotGiven(Enum):
    """What an argument is that was left out, where None would be a mistake."""

    NOT_GIVEN = "left out"

    def __repr__(self) -> str:
        return "NOT_GIVEN"


NOT_GIVEN: Final = NotGiven.NOT_GIVEN


def given_transaction(transaction: object) -> Any:  # noqa: ANN401 - what a caller has passed
    """Return what was passed as `transaction=`, None where it was left out; raises ConfigurationError for None."""
    if transaction is NOT_GIVEN:
        return None
    if transaction is None:
        raise ConfigurationError(
            "transaction=None is no transaction: the message would be sent outside of yours. Leave transaction= out to "
            "send without one. In Django pass django.db.connection itself: its connection.connection is None until it "
            "is used"
        )
    return transaction


class CallersThread(Protocol):
    """Runs work on the thread that a connection belongs to."""

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` there and return or raise what it does."""
        ...


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who has a transaction, on a connection or session of their own."""

    connection: CallersConnection
    thread: CallersThread | None = None
    """The thread that the caller is waiting on; None for a caller on the event loop."""


@runtime_checkable
class JoinsCallers(Protocol):
    """Capability of a transport, store or delayed delivery: to take part in transactions that are not delayline's."""

    async def join(self, caller: Caller) -> Transaction:
        """Return the caller's transaction as one of delayline's, which the caller alone commits or rolls back.

        Raises ConfigurationError where it is on another database, or the connection is in autocommit; TypeError for
        what is no connection.
        """
        ...


class WaitingThread:
    """A thread that waits for a coroutine on another thread's event loop, and does its errands meanwhile."""

    def __init__(self) -> None:
        self._errands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the waiting thread; called on the event loop."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Result] = loop.create_future()

        def errand() -> None:
            try:
                result = work()
            except BaseException as error:
                settle = _fail(outcome, error)
            else:
                settle = _succeed(outcome, result)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle)

        self._errands.put(errand)
        return await outcome

    def wait_for(self, outcome: Future[Result]) -> Result:
        """Wait, and return or raise what comes of it; called on the waiting thread."""
        outcome.add_done_callback(lambda _: self._errands.put(None))
        while (errand := self._errands.get()) is not None:
            errand()
        return outcome.result()


def _succeed(outcome: asyncio.Future[Result], result: Result) -> Callable[[], None]:
    return lambda: None if outcome.done() else outcome.set_result(result)


def _fail(outcome: asyncio.Future[Any], error: BaseException) -> Callable[[], None]:
    return lambda: None if outcome.done() else outcome.set_exception(error)
