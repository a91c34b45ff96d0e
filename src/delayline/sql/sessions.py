"""Connections to a server: made when they are needed, and again when the server has gone."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Final, TypeVar

from delayline.errors import BackendUnavailable, DelaylineError, NotStarted
from delayline.sql.deadlines import FACTOR, WATCH
from delayline.sql.server import IN_SESSION, NOT_COMMITTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection

    from delayline.sql.deadlines import AnswerDeadline
    from delayline.sql.server_database import ServerDatabase

Result = TypeVar("Result")
UNKNOWN: Final = "The commit's outcome is unknown: check whether the data was written before repeating it"
PING_AFTER: Final = 5.0  # seconds at rest after which a connection is tried before it is trusted
PING_TIMEOUT: Final = 5.0  # seconds at most that the answer to that may take


class Session:
    """One connection, for as long as it lasts, and then another one. Used by one thread at a time."""

    def __init__(self, database: ServerDatabase) -> None:
        self._database = database
        self._dialect = database.dialect
        self._connection: Connection | None = None
        self._watch: AnswerDeadline | None = None
        self._generation = 0
        self._used = 0.0
        self._process = os.getpid()
        self._thread: int | None = None
        """The thread whose work runs on the connection."""
        self._abandoned = False

    def run(self, work: Callable[[Connection], Result], *, commits: bool = False) -> Result:
        """Run `work` while no transaction is open; driver errors come out as delayline's.

        commits: it is a statement that commits by itself, so that with its answer its outcome is lost.
        """
        if self._database.silent:
            self._database.probe()
        with self._at_work():
            try:
                connection = self._trusted()
            except self._dialect.errors as error:  # says nothing of the connections there are: the server may be full
                raise self._dialect.translated(error) from error
            return self._run(work, connection, commits=commits)

    def go_on(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` in the transaction that is open; never outside it, on a new connection."""
        if self._connection is None:
            raise BackendUnavailable(
                f"the connection to {self._dialect} was lost in the middle of a transaction, which is undone: repeat it"
            )
        with self._at_work():
            return self._run(work, self._connection, commits=False)

    @property
    def is_at_work(self) -> bool:
        """Whether work of some thread runs on the connection."""
        return self._thread is not None

    @property
    def trusted(self) -> bool:
        """Whether the connection can be used without trying it first."""
        rest = time.monotonic() - self._used
        return (
            self._connection is not None
            and self._generation == self._database.generation
            and rest <= PING_AFTER
            and not self._missed
        )

    @property
    def used(self) -> float:
        """When the server has last answered here."""
        return self._used

    def waits(self) -> None:
        """Expect an answer within the limit."""
        if self._watch is not None:
            self._watch.begin(self._dialect.server_timeout)

    def answered(self) -> None:
        """Note that the connection was alive a moment ago."""
        if self._watch is not None:
            self._watch.deadline = None
        self._used = time.monotonic()
        if self._database.silent:
            self._database.answers()

    def failed(self, error: Exception, *, commits: bool) -> Exception:
        """Return delayline's error for a driver's, having given the connection up if that was its end."""
        translated = self._dialect.translated(error)
        connection = self._connection
        broken = connection is not None and self._dialect.is_broken(connection)
        if connection is not None and not connection.invalidated:  # SQLAlchemy asks one that is for another one
            commits = connection.info.pop(NOT_COMMITTED, commits)
        missed = self._missed
        if missed or broken or self._dialect.is_disconnect(error):
            if missed:
                translated = self._overdue(self._dialect.server_timeout * FACTOR.get())
            elif not isinstance(translated, DelaylineError):
                translated = BackendUnavailable(f"the connection to {self._dialect} is lost: {error}")
            if commits:
                translated = BackendUnavailable(f"{translated}. {UNKNOWN}")
            self._database.lost()
            self.close()
        else:
            self.answered()
            if self._dialect.has_rolled_back(error):
                self.close()
        return translated

    def close(self) -> None:
        """Disconnect. Idempotent; leaves a connection that another process has made to that one.

        A connection on which another thread still waits for the server is cut, and that thread disconnects.
        """
        if self._thread not in (None, threading.get_ident()):
            self._abandoned = True
            if self._watch is not None:
                self._watch.cut()
            return
        connection, self._connection = self._connection, None
        watch, self._watch = self._watch, None
        if connection is None:
            return
        if self._process != os.getpid():
            _inherited.append(connection)
            return
        if watch is not None:
            if self._database.silent:
                watch.cut()  # ending a connection in order asks the server too
            else:
                watch.begin(min(self._dialect.server_timeout, PING_TIMEOUT))
        began = time.monotonic()
        with contextlib.suppress(*self._dialect.errors):
            connection.close()
        if watch is not None and watch.missed and not self._database.silent:
            self._database.missed(self, began)

    def _run(self, work: Callable[[Connection], Result], connection: Connection, *, commits: bool) -> Result:
        watch = self._watch
        if watch is not None:
            watch.begin(self._dialect.server_timeout * FACTOR.get())
        try:
            result = work(connection)
        except self._dialect.errors as error:
            raise self.failed(error, commits=commits) from error
        except BaseException:
            if watch is not None:
                watch.end()
            raise
        self.answered()
        return result

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        thread, this = self._thread, threading.get_ident()
        if thread not in (None, this):
            raise BackendUnavailable(f"{self._dialect} has not answered an earlier request on this connection")
        self._thread = this
        try:
            yield
        finally:
            self._thread = thread
            if self._abandoned and thread is None:
                self.close()

    @property
    def _missed(self) -> bool:
        return self._watch is not None and self._watch.missed

    def _overdue(self, seconds: float) -> BackendUnavailable:
        seconds = min(seconds, self._dialect.server_timeout * FACTOR.get())
        if self._watch is not None and self._dialect.stops.at is not None:
            seconds = min(seconds, round(time.monotonic() - self._watch.since, 1))
        self._database.missed(self, time.monotonic() - seconds)
        return BackendUnavailable(
            f"no answer from {self._dialect} within {seconds:g} s: check that the server and the network are alive, "
            "or raise server_timeout"
        )

    def _trusted(self) -> Connection:
        generation = self._database.generation
        if self._connection is not None and not self.trusted:
            if self._watch is not None:
                self._watch.begin(min(self._dialect.server_timeout, PING_TIMEOUT))
            try:
                if self._missed:
                    self.close()
                else:
                    self._dialect.ping(self._connection)
                    self.answered()
            except self._dialect.errors:
                if self._missed:
                    overdue = self._overdue(PING_TIMEOUT)
                    self.close()
                    raise overdue from None
                if self._generation == generation:
                    self._database.lost()
                    generation = self._database.generation
                self.close()
        if self._connection is None:
            self._connection = self._connect()
            self._watch = self._connection.info[WATCH]
            self._connection.info[IN_SESSION] = True
        if self._abandoned:
            raise BackendUnavailable(f"{self._dialect} was closed before the server had answered")
        self._generation = generation
        return self._connection

    def _connect(self) -> Connection:
        began, limit = time.monotonic(), self._dialect.connect_timeout
        try:
            return self._dialect.connect()
        except self._dialect.errors:
            if time.monotonic() - began >= 0.9 * limit:
                self._database.missed(self, began)
            elif self._database.silent:  # a refusal is an answer
                self._database.answers()
            raise


class SessionCheckout:
    """A connection for one transaction, and the transaction's place in the lane."""

    def __init__(self, database: ServerDatabase) -> None:
        self._database = database
        self._lane = database.lane
        self._session: Session | None = None

    async def run(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` on the connection."""
        if self._lane is not self._database.lane:
            raise NotStarted(f"{self._database.dialect} was closed in the middle of a transaction, which is undone")
        return await self._database.run_in_transaction(lambda: self._run(work))

    def leave(self) -> None:
        """Let the next transaction have it."""
        if self._session is not None:
            self._database.give_back(self._session)
        self._leave()

    def discard(self) -> None:
        """Withdraw the connection: its state is unknown."""
        if self._session is not None:
            self._database.discard(self._session)
        self._leave()

    def _leave(self) -> None:
        self._session = None
        self._lane.leave()

    def _run(self, work: Callable[[Connection], Result]) -> Result:
        if self._session is not None:
            return self._session.go_on(work)
        self._session = self._database.session()
        return self._session.run(work)


_inherited: Final[
    list[object]
] = []  # kept alive for ever: closing inherited connections here would close the parent process's
