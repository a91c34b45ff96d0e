"""Connections to a server: each for as long as it lasts, and the pool of resting connections.

The pool notes for all what a connection has found: a server that is gone (`generation`), that takes no writes any
more (`usable_since`), or that leaves requests without answers (`silent`).
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from delayline.errors import BackendUnavailable, DelaylineError
from delayline.sql.deadlines import FACTOR, WATCH
from delayline.sql.server import IN_SESSION, NOT_COMMITTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection

    from delayline.sql.deadlines import AnswerDeadline
    from delayline.sql.server import Server


Result = TypeVar("Result")
OUTCOME_UNKNOWN: Final = "The commit's outcome is unknown: check whether the data was written before repeating it"
PING_AFTER: Final = 5.0  # idle seconds after which a connection is tested before use
CLOSE_AFTER: Final = 30.0  # idle seconds after which a connection is closed while others are in use
CLOSE_EVERY: Final = 0.1  # seconds between looks for such a connection
PING_TIMEOUT: Final = 5.0  # seconds at most that the answer to that may take
#: Seconds after which a connection in use is asked too: a server that has become a replica answers, and takes no
#: writes.
PING_EVERY: Final = 30.0
PROBE_AFTER: Final = 5.0  # seconds at most after a missed answer until the server is asked again
DEADLOCKS: Final = 5  # in a row; after that the caller decides
#: Seconds at most before the first repetition, doubled for each further: those who met once would meet again.
LONGEST_FIRST_PAUSE: Final = 0.005
#: Kept for ever: closing inherited connections would end the parent process's.
inherited: Final[list[object]] = []


class Session:
    """A connection, for as long as it lasts, and then another. Used by a single thread at a time.

    Args:
        pool: Knows whether the server answers.
        connect: Makes the connections; None for those of the pool.
    """

    def __init__(self, pool: SessionPool, connect: Callable[[], Connection] | None = None) -> None:
        self._pool = pool
        self._make = connect or pool.dialect.connections.connect
        dialect = pool.dialect
        self._connections, self._errors, self._transactions = dialect.connections, dialect.errors, dialect.transactions
        self._connection: Connection | None = None
        self.driver: Any = None
        """The driver's connection; None while there is none."""
        self._watch: AnswerDeadline | None = None
        self._generation = 0
        self._used = 0.0
        self._pinged = 0.0
        self._process = os.getpid()
        self._thread: int | None = None
        """The thread whose work runs on the connection."""
        self._abandoned = False

    def run(self, work: Callable[[Connection], Result], *, commits: bool = False) -> Result:
        if self._pool.silent:
            self._pool.probe()
        with self._at_work():
            try:
                connection = self._trusted()
            except self._errors.kinds as error:  # open connections may still work: the server may be full
                raise self._errors.translated(error) from error
            return self._run(work, connection, commits=commits)

    def go_on(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` in the transaction that is open; never outside it, on a new connection."""
        if self._connection is None:
            raise BackendUnavailable(
                f"the connection to {self._connections} was lost in the middle of a transaction, which is undone: "
                "repeat it"
            )
        with self._at_work():
            return self._run(work, self._connection, commits=False)

    def in_transaction(self, work: Callable[[Connection], Result], connection: Connection) -> Result:
        """Run `work` in a separate transaction; inside `run`, on the session's connection."""
        self._transactions.begin(connection)
        try:
            result = work(connection)
            self._transactions.commit(connection)
        except BaseException:
            try:
                self._transactions.rollback(connection)
            except BaseException:
                self.close()
                raise
            raise
        return result

    def run_despite_deadlocks(self, work: Callable[[Connection], Result], *, commits: bool = False) -> Result:
        """Run `work`, again if a deadlock has rolled its own transaction back as a whole."""
        return self.run(partial(self._again, work), commits=commits)

    def _again(self, work: Callable[[Connection], Result], connection: Connection) -> Result:
        longest = LONGEST_FIRST_PAUSE
        for _ in range(DEADLOCKS):
            try:
                return work(connection)
            except self._errors.kinds as error:
                if not self._errors.is_deadlock(error):
                    raise
            time.sleep(random.uniform(0, longest))  # noqa: S311 - spreads load
            longest *= 2
        return work(connection)

    @property
    def is_at_work(self) -> bool:
        """Whether work of some thread runs on the connection."""
        return self._thread is not None

    @property
    def trusted(self) -> bool:
        """Whether the connection can be used without trying it first."""
        now = time.monotonic()
        return (
            self._connection is not None
            and self._generation == self._pool.generation
            and now - self._used <= PING_AFTER
            and now - self._pinged <= PING_EVERY
            and not self._missed
        )

    @property
    def used(self) -> float:
        """When the server has last answered here."""
        return self._used

    def waits(self) -> None:
        """Expect an answer within the limit."""
        if self._watch is not None:
            self._watch.begin(self._connections.server_timeout)

    def answered(self) -> None:
        """Note that the connection was alive a moment ago."""
        if self._watch is not None:
            self._watch.deadline = None
        self._used = time.monotonic()
        if self._pool.silent:
            self._pool.answers()

    def failed(self, error: Exception, *, commits: bool) -> Exception:
        """Return delayline's error for a driver's, having given the connection up if that was its end."""
        translated = self._errors.translated(error)
        connection = self._connection
        broken = connection is not None and self._errors.is_broken(connection)
        if connection is not None and not connection.invalidated:  # SQLAlchemy asks an invalidated one for another
            commits = connection.info.pop(NOT_COMMITTED, commits)
        missed = self._missed
        if missed or broken or self._errors.is_disconnect(error):
            if missed:
                translated = self._overdue(self._connections.server_timeout * FACTOR.get())
            elif not isinstance(translated, DelaylineError):
                translated = BackendUnavailable(f"the connection to {self._connections} is lost: {error}")
            if commits:
                translated = BackendUnavailable(f"{translated}. {OUTCOME_UNKNOWN}")
            self._pool.lost(self._generation)
            self.close()
        elif self._errors.outdates_sessions(error):  # which has had no effect
            self.answered()
            self._pool.outdate(self._generation)
            self.close()
        else:
            self.answered()
            if self._errors.has_rolled_back(error):
                self.close()
        return translated

    def give_back(self) -> None:
        """Let others use the connection."""
        self._pool.give_back(self)

    def close(self) -> None:
        """Disconnect. Idempotent; leaves another process's connection alone.

        A connection on which another thread still waits for the server is cut, and that thread disconnects.
        """
        if self._thread not in (None, threading.get_ident()):
            self._abandoned = True
            if self._watch is not None:
                self._watch.cut()
            return
        connection, self._connection, self.driver = self._connection, None, None
        watch, self._watch = self._watch, None
        if connection is None:
            return
        if self._process != os.getpid():
            inherited.append(connection)
            return
        if watch is not None:
            if self._pool.silent:
                watch.cut()  # ending a connection in order asks the server too
            else:
                watch.begin(min(self._connections.server_timeout, PING_TIMEOUT))
        began = time.monotonic()
        with contextlib.suppress(*self._errors.kinds):
            connection.close()
        if watch is not None and watch.missed and not self._pool.silent:
            self._pool.missed(self, began)

    def _run(self, work: Callable[[Connection], Result], connection: Connection, *, commits: bool) -> Result:
        watch = self._watch
        if watch is not None:
            watch.begin(self._connections.server_timeout * FACTOR.get())
        try:
            result = work(connection)
        except self._errors.kinds as error:
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
            raise BackendUnavailable(f"{self._connections} has not answered an earlier request on this connection")
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
        seconds = min(seconds, self._connections.server_timeout * FACTOR.get())
        if self._watch is not None and self._connections.stops.at is not None:
            seconds = min(seconds, round(time.monotonic() - self._watch.since, 1))
        self._pool.missed(self, time.monotonic() - seconds)
        return BackendUnavailable(
            f"no answer from {self._connections} within {seconds:g} s: check that the server and the network are "
            "alive, or raise server_timeout"
        )

    def _trusted(self) -> Connection:
        generation = self._pool.generation
        if self._connection is not None and self._generation < self._pool.usable_since:
            self.close()
        if self._connection is not None and not self.trusted:
            if self._watch is not None:
                self._watch.begin(min(self._connections.server_timeout, PING_TIMEOUT))
            try:
                if self._missed:
                    self.close()
                else:
                    writes = self._connections.ping(self._connection)
                    self.answered()
                    self._pinged = self._used
                    if not writes:
                        self._pool.outdate(self._generation)
                        generation = self._pool.generation
                        self.close()
            except self._errors.kinds:
                if self._missed:
                    overdue = self._overdue(PING_TIMEOUT)
                    self.close()
                    raise overdue from None
                self._pool.lost(self._generation)
                generation = self._pool.generation
                self.close()
        if self._connection is None:
            self._connection = self._connect()
            self._pinged = time.monotonic()
            self.driver = self._connection.connection.driver_connection
            self._watch = self._connection.info[WATCH]
            self._connection.info[IN_SESSION] = True
        if self._abandoned:
            raise BackendUnavailable(f"{self._connections} was closed before the server had answered")
        self._generation = generation
        return self._connection

    def _connect(self) -> Connection:
        began, limit = time.monotonic(), self._connections.connect_timeout
        try:
            return self._make()
        except self._errors.kinds:
            if time.monotonic() - began >= 0.9 * limit:
                self._pool.missed(self, began)
            elif self._pool.silent:  # a refusal is an answer
                self._pool.answers()
            raise


class SessionPool:
    """The connections of a server's database.

    Args:
        dialect: The server.
        close_soon: Closes a connection on another thread, if there is any.
        outdated: Is called when the connections that there are have become of no use.
        rest: Gives connections back that others keep and have not used for a while.
    """

    def __init__(
        self,
        dialect: Server,
        *,
        close_soon: Callable[[Session], None],
        outdated: Callable[[], None],
        rest: Callable[[], None],
    ) -> None:
        self.dialect = dialect
        self._connections = dialect.connections
        self._close_soon = close_soon
        self._outdated = outdated
        self._rest = rest
        self._closes_at = 0.0
        self._probing = threading.Lock()
        self._all: set[Session] = set()
        self._idle: list[Session] = []
        self.generation: int = 0
        """Counts how often the server was found gone."""
        self.usable_since: int = 0
        """The oldest generation of connections that are used; earlier ones are outdated, as by a failover."""
        self.silent: bool = False
        """Whether a request was left without an answer, and none has been answered since."""
        self._silent_until = 0.0
        self._closed = False

    def session(self) -> Session:
        """Return the idle connection that was used last, or a new connection; on a worker thread."""
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return self._new_session()

    def use_session(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` on an idle connection, or on a new connection; on a worker thread."""
        with self.idle_session() as session:
            return session.run(work)

    @contextlib.contextmanager
    def idle_session(self) -> Iterator[Session]:
        """Yield an idle connection, or a new connection; on a worker thread."""
        session = self.session()
        try:
            yield session
        finally:
            self.give_back(session)

    def set_up(self, work: Callable[[Connection], None]) -> None:
        """Run `work` in a transaction on a new connection to the server that creates tables; on a worker thread."""
        session = Session(self, self._connections.connect_to_set_up)
        try:
            session.run_despite_deadlocks(partial(session.in_transaction, work))
        finally:
            session.close()

    def give_back(self, session: Session) -> None:
        """Keep the connection for the next work."""
        self.close_unused()  # before, as it may give back another, which is not as good
        if session in self._all and not session.is_at_work and not self._closed:
            self._idle.append(session)
        else:  # closed meanwhile, and perhaps opened again
            session.close()

    def close_unused(self) -> None:
        """Close the connection that was used longest ago, if that is a while ago. Never blocks."""
        now = time.monotonic()
        if now < self._closes_at:
            return
        self._closes_at = now + CLOSE_EVERY
        self._rest()
        with contextlib.suppress(IndexError):  # taken meanwhile
            if now - self._idle[0].used > CLOSE_AFTER:
                self.discard(self._idle.pop(0))

    def discard(self, session: Session) -> None:
        """Close a connection whose state is unknown."""
        self._all.discard(session)
        self._close_soon(session)

    def lost(self, generation: int) -> None:
        """Try every connection of this generation before it is used again: some connection found the server gone."""
        if generation == self.generation:  # otherwise another has found it before
            self.generation += 1

    def outdate(self, generation: int) -> None:
        """Replace every connection of this generation: some connection has answered, and is of no use any more."""
        self.lost(generation)
        if generation >= self.usable_since:
            self.usable_since = self.generation
            while self._idle:
                with contextlib.suppress(IndexError):  # taken meanwhile
                    self.discard(self._idle.pop())
            self._outdated()

    def missed(self, session: Session, since: float) -> None:
        """Note that an answer is overdue since then; unless others have come meanwhile the server is silent.

        During a stop it is silent in any case.
        """
        if self._connections.stops.at is None and any(
            other is not session and other.used > since for other in list(self._all)
        ):
            return
        self._silent_until = time.monotonic() + min(PROBE_AFTER, self._connections.server_timeout / 3)
        self.silent = True

    def answers(self) -> None:
        """Note that the server is not silent any more."""
        self.silent = False

    def probe(self) -> None:
        """Return when it is time to ask a silent server again, for a single caller; else raise BackendUnavailable.

        During a stop it is not asked again: every further wait would make the stop longer.
        """
        with self._probing:
            now = time.monotonic()
            if self.silent and (now < self._silent_until or self._connections.stops.at is not None):
                raise BackendUnavailable(
                    f"{self.dialect} has left a request without an answer, and is asked again in a moment: "
                    "check that the server and the network are alive"
                )
            self._silent_until = now + self._connections.server_timeout

    def _new_session(self) -> Session:
        session = Session(self)
        self._all.add(session)
        return session

    def close(self) -> None:
        """Close every connection, also those in use; one that is made later is closed when it is given back."""
        self._closed = True
        sessions, self._all = self._all, set()
        for session in sessions:
            session.close()
