"""Messages in PostgreSQL's binary format: COPY of many, and single statements that the event loop drives itself.

Binary COPY costs the server less than any INSERT. It has no ON CONFLICT: a message with an id that is stored already is
undone as a whole, and its rows are inserted.

Two crossings between the loop and a worker thread cost more than the insert of a message takes in the server. The loop
sends such statements on a dedicated connection and reads the answer when its socket is readable, through psycopg's
binding of libpq. Nothing in that blocks: connecting, checking an idle connection and preparing the statement are done
by a worker thread, together with the values at hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import struct
import threading
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import psycopg
from psycopg import Cursor
from psycopg.adapt import Dumper, Transformer
from psycopg.pq import ExecStatus, Format
from psycopg.types.array import ListBinaryDumper

from delayline.clock import to_microseconds
from delayline.delayed.columns import STORED_COLUMNS, ColumnKind
from delayline.errors import NotStarted, TransactionConflict
from delayline.sql.prepared import StatementResult
from delayline.sql.schema import FAIR_GROUP
from delayline.sql.server import committing_itself
from delayline.sql.workers import WorkResult

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from psycopg import Connection as Driver
    from psycopg.abc import DumperKey
    from psycopg.adapt import PyFormat
    from psycopg.pq.abc import PGresult
    from sqlalchemy import Connection

    from delayline.sql.dialect import Connections
    from delayline.sql.prepared import Prepared
    from delayline.sql.server import ServerSession, ServerSessions


#: PostgreSQL counts microseconds from here, not from 1970.
YEAR_2000: Final = 946_684_800_000_000


def use_binary(connection: Driver[Any]) -> None:
    """Let every cursor of the connection read in binary, and write lists so; other values are written as before."""
    connection.adapters.register_dumper(list, ListDumper)
    connection.cursor_factory = BinaryCursor


class ListDumper(ListBinaryDumper):
    """Writes lists; lists of whole numbers as `bigint[]`, whatever their size, which takes a fifth of the time."""

    def get_key(self, obj: list[Any], format: PyFormat) -> DumperKey:
        """Return the key of the dumper for the list."""
        return NumbersDumper if _are_numbers(obj) else super().get_key(obj, format)

    def upgrade(self, obj: list[Any], format: PyFormat) -> Any:  # noqa: ANN401 - psycopg's is a dumper of lists
        """Return the dumper for the list."""
        return NumbersDumper(list, self._tx) if _are_numbers(obj) else super().upgrade(obj, format)


class NumbersDumper(Dumper):
    """Writes lists of whole numbers as `bigint[]`."""

    format = Format.BINARY
    oid = 1016

    def dump(self, obj: list[int]) -> bytes:
        """Return the array."""
        try:
            return _bigints(obj)
        except struct.error as error:
            raise psycopg.DataError(f"a number in a list is no bigint: {error}") from error


def _bigints(numbers: list[int]) -> bytes:
    """Return the array: dimensions, nulls, type of the elements, their number, lower bound, and the elements."""
    return b"".join([ARRAY.pack(1, 0, 20, len(numbers), 1), *[BIGINT.pack(8, number) for number in numbers]])


def _are_numbers(values: list[Any]) -> bool:
    return bool(values) and {int}.issuperset(map(type, values))


class BinaryCursor(Cursor[Any]):
    """A cursor that reads in binary."""

    def __init__(self, connection: Driver[Any], **settings: Any) -> None:  # noqa: ANN401 - psycopg's own
        super().__init__(connection, **settings)
        self.format = Format.BINARY


LEAST: Final = 100  # rows; fewer are inserted as fast in the time that its round trips take
COPY_TYPES: Final = {
    ColumnKind.NAME: "varchar",
    ColumnKind.INSTANT: "timestamptz",
    ColumnKind.HEADERS: "bytea",
    ColumnKind.BYTES: "bytea",
    ColumnKind.COUNT: "int4",
}
#: The columns of messages that are copied, and their types.
COPIED: Final = {"queue": "varchar", FAIR_GROUP: "varchar"} | {
    column.name: COPY_TYPES[column.kind] for column in STORED_COLUMNS
}
ARRAY: Final = struct.Struct(">iiiii")
BIGINT: Final = struct.Struct(">iq")
#: Number of batches written by INSERT after a batch that repeated an id: a sender that repeats an id often repeats
#: more.
HELD_OFF: Final = 100
#: What an INSERT may have no trouble with, or a better word for: ids that are there, columns of other types, texts that
#: cannot be kept, row security.
TRY_OTHERWISE: Final = (
    psycopg.IntegrityError,
    psycopg.DataError,
    psycopg.errors.ProtocolViolation,
    psycopg.NotSupportedError,
    UnicodeError,
    struct.error,
)


class Copies:
    """Copies rows into tables, as long as their ids are new."""

    def __init__(self) -> None:
        self._held_off: dict[str, int] = {}

    def copied(self, driver: psycopg.Connection[Any], insert: str, rows: Sequence[tuple[Any, ...]]) -> bool:
        """Copy the rows and commit; False when they have to be inserted, and nothing was done."""
        if len(rows) < LEAST or driver.info.encoding != "utf-8":
            return False
        way = copying(insert)
        left = self._held_off.get(insert, 0)
        if way is None or left:
            self._held_off[insert] = max(0, left - 1)
            return False
        try:
            self._copy(driver, *way, rows)
        except TRY_OTHERWISE:
            self._held_off[insert] = HELD_OFF
            return False
        return True

    def _copy(
        self, driver: psycopg.Connection[Any], statement: bytes, types: Sequence[str], rows: Sequence[tuple[Any, ...]]
    ) -> None:
        """Copy the rows, all or none."""
        with psycopg.Cursor(driver).copy(statement) as target:
            target.set_types(types)
            for row in rows:
                target.write_row(row)


@lru_cache(maxsize=256)
def copying(insert: str) -> tuple[bytes, Sequence[str]] | None:
    """Return the COPY for psycopg's insert of a message, and the types of its columns; None for other inserts."""
    match = re.match(r"INSERT INTO (.+) \(([^()]+)\) VALUES \(", insert)
    columns = match[2].split(", ") if match else []
    if match is None or not COPIED.keys() >= set(columns):
        return None
    table = match[1].replace("%%", "%")
    return f"COPY {table} ({match[2]}) FROM STDIN (FORMAT BINARY)".encode(), [COPIED[name] for name in columns]


LARGEST: Final = 256 * 1024  # bytes; to copy more would keep the loop from its other work
MARGIN: Final = 3.0  # seconds that closing waits for an answer beyond the server's limit
#: The types in which values are sent: varchar, timestamptz, bytea, bigint, bigint[].
OIDS: Final[dict[type, int]] = {str: 1043, datetime: 1184, bytes: 17, int: 20, list: 1016}
#: Errors of statements that had no effect and are repeated on a worker thread, which can mend some of the causes.
ELSEWHERE: Final = (
    psycopg.errors.InsufficientPrivilege,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
    psycopg.errors.UniqueViolation,
)
STATEMENT_NAMES: Final = "delayline statements"  # the key in SQLAlchemy's `Connection.info`, of the names by statement
NUMBER: Final = struct.Struct(">q")
SUCCESSFUL: Final = (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK)
#: Is called with the result of a statement before the connection is free for others.
Then: TypeAlias = Callable[[StatementResult], None]


class SharedSession(NamedTuple):
    """A session that an event loop and threads use."""

    session: ServerSession
    in_use: threading.Lock
    """Held by whoever uses it."""
    on_thread: Callable[[], AbstractContextManager[None]]
    """Waits for `in_use` on a thread, and holds it."""
    before: Callable[[Connection], object]
    """Is called on a thread before the first statement on a new connection."""


class LoopStatements:
    """Runs single statements in turn, for the first event loop that uses it while that loop runs.

    `_free` is held from the start of a statement until its answer has been read.

    Args:
        database: The sessions, of which a session is taken as long as statements follow each other.
        connections: The connections of the server, which have the limits.
        shared: A session that threads use too, instead of a session of the database.
    """

    def __init__(self, database: ServerSessions, connections: Connections, shared: SharedSession | None = None) -> None:
        self._database = database
        self._connections = connections
        self._free = threading.Lock() if shared is None else shared.in_use
        self._session = None if shared is None else shared.session
        self._shared = shared
        self._reclaiming = threading.Lock()
        self._driver: psycopg.Connection[Any] | None = None
        self._pgconn: Any = None
        """The driver's; nothing is sent before there is one."""
        self._names: dict[str, bytes] = {}
        self._watch: SocketWatch | None = None
        self._under_way: WorkResult[StatementResult | None] | None = None
        self._commits = False
        """Whether the statement under way changes rows, and commits that by itself."""
        self._result: PGresult | None = None
        self._then: Then | None = None
        self._refusal: psycopg.Error | None = None  # its end may come a moment later than itself

    async def run(
        self, statement: Prepared, values: tuple[Any, ...], then: Then | None = None
    ) -> StatementResult | None:
        """Run the statement, which commits implicitly.

        None if nothing was done and another route has to be taken. If cancelled, raises CancelledError once the effect
        is certain. Raises the errors of a session.

        Args:
            statement: The statement.
            values: Its parameters.
            then: Is called with the result before the connection is free for other statements.
        """
        loop, encoded = asyncio.get_running_loop(), _in_binary(statement.in_order(values))
        if encoded is None or not self._take(loop):
            return None
        session = self._session
        if (
            session is None
            or session.driver is not self._driver
            or not session.trusted
            or statement.sql not in self._names
        ):
            try:
                return await self._run_slowly(statement, values, then)
            except TransactionConflict:  # the other route repeats it
                return None
        if self._watches(loop):
            self._then = then
            self._commits = statement.writes
            return await self._run(loop, self._names[statement.sql], encoded)
        self._free.release()
        return None

    def close(self) -> None:
        """Finish the statement in progress and accept no more; blocks. The database keeps the connection."""
        watch = self._watch
        abandoned = watch is not None and watch.loop.is_closed()
        longest = self._connections.stops.left(self._connections.server_timeout) + MARGIN
        if abandoned or self._free.acquire(timeout=longest):
            self._end_watch()
        elif watch is not None:
            with contextlib.suppress(RuntimeError):  # closed just now
                watch.loop.call_soon_threadsafe(self._abandon)

    def reclaim(self) -> None:
        """End a statement whose event loop has been closed meanwhile, so that threads can use the session again."""
        with self._reclaiming:
            watch, session = self._watch, self._session
            if self._shared is not None and watch is not None and session is not None and watch.loop.is_closed():
                self._end_watch()
                self._under_way = None
                session.close()
                self._free.release()

    def rest(self) -> None:
        """Give a connection that has not been used for a while back to the pool. Never blocks."""
        watch = self._watch
        if self._session is None or self._session.trusted:
            return
        if watch is None:
            self._give_back(None)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the next loop takes the connection over
                watch.loop.call_soon_threadsafe(self._give_back, watch)

    def _give_back(self, watch: SocketWatch | None) -> None:
        """Let others use the connection; on the event loop that watches it, which must not read their answers."""
        if not self._free.acquire(blocking=False):
            return
        session = self._session
        at_rest = session is not None and not session.trusted and watch is self._watch
        if at_rest:
            self._session = self._watch = None
            if watch is not None:
                watch.end_here()
        self._free.release()
        if session is not None and at_rest:
            session.give_back()

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

    async def _run_slowly(self, statement: Prepared, values: tuple[Any, ...], then: Then | None) -> StatementResult:
        """Run it on a worker thread, which may have to connect first; after that the loop can go on."""
        self._end_watch()
        if self._shared is not None:  # other workers may wait for it, and none would be left to run this statement
            self._free.release()
            return await self._database.run(partial(self._run_shared, self._shared, statement, values, then))
        if self._session is None:
            self._session = self._database.session()
        work = partial(self._prepare_and_run, statement, values, then)
        try:
            return await self._database.run(partial(self._run_blocking, self._session, work))
        except NotStarted:
            self._free.release()
            raise

    def _run_blocking(self, session: ServerSession, work: Callable[[Connection], StatementResult]) -> StatementResult:
        try:
            return session.run(work)
        finally:
            self._free.release()
            self._database.close_unused()

    def _run_shared(
        self, shared: SharedSession, statement: Prepared, values: tuple[Any, ...], then: Then | None
    ) -> StatementResult:
        def run(connection: Connection) -> StatementResult:
            shared.before(connection)
            return self._prepare_and_run(statement, values, then, connection)

        with shared.on_thread():
            result = shared.session.run(run)
        self._database.close_unused()
        return result

    def _prepare_and_run(
        self, statement: Prepared, values: tuple[Any, ...], then: Then | None, connection: Connection
    ) -> StatementResult:
        driver: Any = connection.connection.driver_connection
        if driver is not self._driver:
            self._driver, self._names = driver, connection.info.setdefault(STATEMENT_NAMES, {})
            self._pgconn = driver.pgconn
        usable = driver.prepare_threshold is not None and driver.info.encoding == "utf-8"
        if usable and statement.sql not in self._names:
            name = f"delayline_{len(self._names)}".encode()
            types = [_oid(value) for value in statement.in_order(values)]
            _must_be_done(driver.pgconn.prepare(name, _numbered(statement.sql), types))
            self._names[statement.sql] = name
        with committing_itself(connection, psycopg.Error) if statement.writes else contextlib.nullcontext():
            result = statement.result(connection, *values)
        if then is not None:
            then(result)
        return result

    def _watches(self, loop: asyncio.AbstractEventLoop) -> bool:
        if self._watch is None:
            try:
                self._watch = SocketWatch(loop, self._pgconn.socket, self._on_readable)
            except (NotImplementedError, OSError, psycopg.Error):  # Windows, no descriptor left, a connection just lost
                return False
        return True

    async def _run(
        self, loop: asyncio.AbstractEventLoop, name: bytes, values: Sequence[bytes]
    ) -> StatementResult | None:
        answer: WorkResult[StatementResult | None] = WorkResult(loop.create_future())
        self._under_way, self._result = answer, None
        assert self._session is not None  # noqa: S101 - nothing is sent before there is a session
        self._session.waits()
        try:
            self._pgconn.send_query_prepared(name, values, (Format.BINARY,) * len(values), Format.BINARY)
            if self._pgconn.flush():
                self._on_writable()
        except Exception as error:
            self._finish(error)
        return await answer.end()

    def _on_writable(self) -> None:
        """Send as much as the socket takes; the rest when it takes more."""
        if self._under_way is None or self._watch is None:
            return  # it has failed meanwhile
        try:
            self._watch.for_writing(self._on_writable if self._pgconn.flush() else None)
        except Exception as error:
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
                if result.status not in SUCCESSFUL:
                    self._refusal = self._refusal or psycopg.errors.error_from_result(result)
                self._result = result
        except Exception as error:
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

    def _finish(self, error: Exception | None) -> None:
        """Answer the caller and let others have the session, whatever has happened."""
        answer, self._under_way, self._refusal = self._under_way, None, None
        result: StatementResult | None = None
        failure: Exception | None = None
        try:
            # Finding the reason for missing rights, and repeating after a deadlock, needs a thread that may wait.
            if not isinstance(error, ELSEWHERE):
                result, failure = self._outcome(error)
            elif self._session is not None:
                self._session.answered()
        except Exception as unexpected:  # raised here it would end in the event loop, and `run` would never return
            failure = unexpected
        if self._shared is not None and self._watch is not None:  # a thread may read the next answer
            self._watch.end_here()
            self._watch = None
        self._free.release()
        self._database.close_unused()
        if answer is not None:
            answer.finish(result, failure)

    def _outcome(self, error: Exception | None) -> tuple[StatementResult | None, Exception | None]:
        """Return the result, or the failure of the statement."""
        if error is not None:
            failure = self._given_up(error, commits=self._commits)
            failure.__cause__ = None if failure is error else error
            return None, failure
        if self._session is not None:
            self._session.answered()
        try:
            result = self._read_result()
        except psycopg.Error as unreadable:  # a value that Python has no form for
            return None, self._given_up(unreadable, commits=False)
        if self._then is not None:
            self._then(result)
        return result, None

    def _read_result(self) -> StatementResult:
        result = self._result
        assert result is not None  # noqa: S101 - it has come before the end of the answer
        if not result.ntuples:
            return StatementResult(result.command_tuples or 0, [])
        reader = Transformer(self._driver)
        reader.set_pgresult(result, format=Format.BINARY)
        return StatementResult(result.command_tuples or 0, reader.load_rows(0, result.ntuples, tuple))

    def _given_up(self, error: Exception, *, commits: bool) -> Exception:
        """Return the session's error, and watch its connection no more if that was its end."""
        assert self._session is not None  # noqa: S101 - as above
        try:
            failure = self._session.failed(error, commits=commits)
        finally:
            if not isinstance(error, psycopg.Error):  # not of the server: where its answers stand is unknown
                self._session.close()
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
            self.loop.call_soon_threadsafe(self.end_here)
        except RuntimeError:  # the loop is closed
            os.close(self._descriptor)

    def end_here(self) -> None:
        """Watch no more, from now on; on the event loop, once."""
        self.loop.remove_reader(self._descriptor)
        self.loop.remove_writer(self._descriptor)
        os.close(self._descriptor)


def _in_binary(values: tuple[Any, ...]) -> list[bytes] | None:
    """Return the values of a statement, encoded; None if they are too large or would be refused."""
    encoded = []
    try:
        for value in values:
            match value:
                case bytes():
                    encoded.append(value)
                case str():
                    encoded.append(data := value.encode())
                    if b"\0" in data:
                        return None
                case datetime():
                    encoded.append(NUMBER.pack(to_microseconds(value) - YEAR_2000))
                case list():
                    encoded.append(_bigints(value))
                case _:
                    encoded.append(NUMBER.pack(value))
    except (TypeError, UnicodeEncodeError, struct.error):
        return None
    return encoded if sum(map(len, encoded)) <= LARGEST else None


def _oid(value: object) -> int:
    """Return the type in which the value is sent."""
    return next(oid for kind, oid in OIDS.items() if isinstance(value, kind))


def _numbered(sql: str) -> bytes:
    """Return psycopg's SQL as the server's: with $1 for the first %s, and a single % for two."""
    numbers = count(1)
    return re.sub("%[%s]", lambda match: "%" if match[0] == "%%" else f"${next(numbers)}", sql).encode()


def _must_be_done(result: PGresult) -> None:
    if result.status not in SUCCESSFUL:
        raise psycopg.errors.error_from_result(result)
