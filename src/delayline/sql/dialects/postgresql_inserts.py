"""Inserts of single rows that the event loop drives itself, on a dedicated connection.

Two crossings between the loop and a worker thread cost more than such an insert takes in the server. The loop sends the
insert and reads the answer when its socket is readable, through psycopg's binding of libpq. Nothing here blocks:
connecting, checking an idle connection and preparing the statement are done by a worker thread, together with the row
at hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import struct
import threading
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg.pq import ExecStatus

from delayline.clock import to_microseconds
from delayline.errors import NotStarted
from delayline.sql.dialects.postgresql_copy import YEAR_2000
from delayline.sql.workers import WorkResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from psycopg.pq.abc import PGconn, PGresult
    from sqlalchemy import Connection

    from delayline.sql.dialect import Server, ServerSession, ServerSessions
    from delayline.sql.prepared import Prepared

LARGEST: Final = 256 * 1024  # bytes; to copy more would keep the loop from its other work
MARGIN: Final = 3.0  # seconds that closing waits for an answer beyond the server's limit
#: The columns of a message's row, each sent as it is kept: varchar, varchar, timestamptz, bytea, bytea, int4.
TYPES: Final = (1043, 1043, 1184, 17, 17, 23)
BINARY: Final = (1,) * len(TYPES)
INSTANT: Final = struct.Struct(">q")
COUNT: Final = struct.Struct(">i")


class LoopInserts:
    """Inserts message rows one at a time, for the first event loop that uses it while that loop lives.

    `_free` is held from the start of an insert until its answer has been read.
    """

    def __init__(self, database: ServerSessions, dialect: Server) -> None:
        self._database = database
        self._dialect = dialect
        self._free = threading.Lock()
        self._session: ServerSession | None = None
        self._driver: psycopg.Connection[Any] | None = None
        self._names: dict[str, bytes] = {}
        self._watch: SocketWatch | None = None
        self._under_way: WorkResult[bool] | None = None
        self._refusal: psycopg.Error | None = None  # its end may come a moment later than itself

    async def insert(self, statement: Prepared, row: tuple[Any, ...]) -> bool:
        """Insert the row, which commits implicitly; False if nothing was done and another route has to be taken.

        If cancelled, raises CancelledError once the effect is certain. Raises the errors of a session.
        """
        loop, values = asyncio.get_running_loop(), _in_binary(row)
        if values is None or not self._take(loop):
            return False
        session = self._session
        if session is None or not session.trusted or statement.sql not in self._names:
            await self._insert_slowly(statement, row)
        elif self._watches(loop):
            return await self._insert(loop, self._names[statement.sql], values)
        else:
            self._free.release()
            return False
        return True

    def close(self) -> None:
        """Finish the insert in progress and accept no more; blocks. The database keeps the connection."""
        watch = self._watch
        abandoned = watch is not None and watch.loop.is_closed()
        longest = self._dialect.stops.left(self._dialect.server_timeout) + MARGIN
        if abandoned or self._free.acquire(timeout=longest):
            self._end_watch()
        elif watch is not None:
            with contextlib.suppress(RuntimeError):  # closed just now
                watch.loop.call_soon_threadsafe(self._abandon)

    def _take(self, loop: asyncio.AbstractEventLoop) -> bool:
        if not self._free.acquire(blocking=False):
            return False
        if self._watch is None or self._watch.loop is loop:
            return True
        closed = self._watch.loop.is_closed()
        if closed:
            self._end_watch()
        else:
            self._free.release()
        return closed

    async def _insert_slowly(self, statement: Prepared, row: tuple[Any, ...]) -> None:
        """Insert on a worker thread, which may have to connect first; after that the loop can go on."""
        self._end_watch()
        if self._session is None:
            self._session = self._database.session()
        try:
            await self._database.run(partial(self._insert_blocking, self._session, statement, row))
        except NotStarted:
            self._free.release()
            raise

    def _insert_blocking(self, session: ServerSession, statement: Prepared, row: tuple[Any, ...]) -> None:
        try:
            session.run(partial(self._prepare_and_insert, statement, row), commits=True)
        finally:
            self._free.release()

    def _prepare_and_insert(self, statement: Prepared, row: tuple[Any, ...], connection: Connection) -> None:
        driver: Any = connection.connection.driver_connection
        if driver is not self._driver:
            self._driver, self._names = driver, {}
        usable = driver.prepare_threshold is not None and driver.info.encoding == "utf-8"
        if usable and statement.sql not in self._names:
            name = f"delayline_{len(self._names)}".encode()
            _must_be_done(driver.pgconn.prepare(name, _numbered(statement.sql), TYPES))
            self._names[statement.sql] = name
        self._dialect.insert_rows(connection, statement, [row])

    def _watches(self, loop: asyncio.AbstractEventLoop) -> bool:
        if self._watch is None:
            try:
                self._watch = SocketWatch(loop, self._pgconn.socket, self._on_readable)
            except (NotImplementedError, OSError, psycopg.Error):  # Windows, no descriptor left, a connection just lost
                return False
        return True

    async def _insert(self, loop: asyncio.AbstractEventLoop, name: bytes, values: Sequence[bytes]) -> bool:
        answer: WorkResult[bool] = WorkResult(loop.create_future())
        self._under_way = answer
        assert self._session is not None  # noqa: S101 - nothing is sent before there is one
        self._session.waits()
        try:
            self._pgconn.send_query_prepared(name, values, BINARY)
            self._flush()
        except psycopg.Error as error:
            self._finish(error)
        return await answer.end()

    @property
    def _pgconn(self) -> PGconn:
        assert self._driver is not None  # noqa: S101 - nothing is sent before there is one
        return self._driver.pgconn

    def _flush(self) -> None:
        """Send as much as the socket takes; the rest when it takes more."""
        assert self._watch is not None  # noqa: S101 - as above
        self._watch.for_writing(self._on_writable if self._pgconn.flush() else None)

    def _on_writable(self) -> None:
        if self._under_way is None:
            return  # it has failed meanwhile
        try:
            self._flush()
        except psycopg.Error as error:
            self._finish(error)

    def _on_readable(self) -> None:
        if self._under_way is None:
            self._on_unasked()
            return
        pgconn = self._pgconn
        try:
            pgconn.consume_input()
            while not pgconn.is_busy():
                result = pgconn.get_result()
                if result is None:
                    self._finish(self._refusal)
                    return
                self._refusal = self._refusal or _failure(result)
        except psycopg.Error as error:
            self._finish(self._refusal or error)

    def _on_unasked(self) -> None:
        """Read an unsolicited message of the server, usually that it closes the connection."""
        if not self._free.acquire(blocking=False):
            return  # the connection is being closed
        try:
            self._pgconn.consume_input()
        except psycopg.Error as error:
            self._given_up(error, commits=False)
        finally:
            self._free.release()

    def _abandon(self) -> None:
        if self._under_way is not None:
            self._finish(psycopg.OperationalError("closed before the server has answered"))

    def _finish(self, error: psycopg.Error | None) -> None:
        answer, self._under_way, self._refusal = self._under_way, None, None
        failure: Exception | None = None
        refused = isinstance(error, psycopg.errors.InsufficientPrivilege)  # to say why takes a thread that may wait
        if error is not None and not refused:
            failure = self._given_up(error, commits=True)
            failure.__cause__ = None if failure is error else error
        elif self._session is not None:
            self._session.answered()
        self._free.release()
        if answer is not None:
            answer.finish(not refused, failure)

    def _given_up(self, error: psycopg.Error, *, commits: bool) -> Exception:
        """Return the session's error, and watch its connection no more if that was its end."""
        assert self._session is not None  # noqa: S101 - as above
        failure = self._session.failed(error, commits=commits)
        if not self._session.trusted:
            self._end_watch()
        return failure

    def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()


class SocketWatch:
    """An event loop's watch on a connection, through a duplicate descriptor that outlives the connection's own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int, on_readable: Callable[[], None]) -> None:
        self.loop = loop
        self._writing = False
        self._descriptor = os.dup(descriptor)
        try:
            loop.add_reader(self._descriptor, on_readable)
        except BaseException:
            os.close(self._descriptor)
            raise

    def for_writing(self, on_writable: Callable[[], None] | None) -> None:
        """Call it while the connection can be written to, None for no more; on the event loop."""
        if on_writable is not None:
            self.loop.add_writer(self._descriptor, on_writable)
        elif self._writing:
            self.loop.remove_writer(self._descriptor)
        self._writing = on_writable is not None

    def end(self) -> None:
        """Watch no more; from any thread, once."""
        try:
            self.loop.call_soon_threadsafe(self._end)
        except RuntimeError:  # the loop is closed
            os.close(self._descriptor)

    def _end(self) -> None:
        self.loop.remove_reader(self._descriptor)
        self.loop.remove_writer(self._descriptor)
        os.close(self._descriptor)


def _in_binary(row: tuple[Any, ...]) -> list[bytes] | None:
    """Return the encoded row of a message; None if it is too large or would be refused."""
    message_id, destination, due, headers, body, retry_count = row
    if len(headers) + len(body) > LARGEST:
        return None
    try:
        key, queue = message_id.encode(), destination.encode()
        at, retries = INSTANT.pack(to_microseconds(due) - YEAR_2000), COUNT.pack(retry_count)
    except (TypeError, UnicodeEncodeError, struct.error):
        return None
    return None if b"\0" in key or b"\0" in queue else [key, queue, at, headers, body, retries]


def _numbered(sql: str) -> bytes:
    """Return psycopg's SQL as the server's: with $1 for the first %s, and one % for two."""
    numbers = count(1)
    return re.sub("%[%s]", lambda found: "%" if found[0] == "%%" else f"${next(numbers)}", sql).encode()


def _must_be_done(result: PGresult) -> None:
    failure = _failure(result)
    if failure is not None:
        raise failure


def _failure(result: PGresult) -> psycopg.Error | None:
    if result.status == ExecStatus.COMMAND_OK:
        return None
    return psycopg.errors.error_from_result(result)
