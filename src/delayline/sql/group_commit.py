"""Group commit: writes that wait for the same turn share one commit, the most expensive part of a short transaction."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection

    from delayline.sql.dialects.sqlite import Sqlite

Result = TypeVar("Result")
MAXIMUM_GROUP: Final = 200


class Write(Generic[Result]):
    """One caller's work and what became of it."""

    def __init__(self, work: Callable[[Connection], Result]) -> None:
        self.work = work
        self.asked_at = time.monotonic()
        self.finished = False
        self._results: list[Result] = []
        self._error: BaseException | None = None

    def run(self, connection: Connection) -> None:
        """Run the work; its effect lasts only once the group is committed."""
        self._results.append(self.work(connection))

    def fail(self, error: BaseException) -> None:
        """Note why it failed, unless that is known."""
        self._error = self._error or error

    def result(self) -> Result:
        """Return or raise the result of the work."""
        if self._error is not None:
            raise self._error
        return self._results[0]


class GroupCommit:
    """Collects writes; the first writer to get the turn runs all of them, each behind a savepoint."""

    def __init__(self, dialect: Sqlite) -> None:
        self._dialect = dialect
        self._waiting: deque[Write[Any]] = deque()

    def add(self, write: Write[Any]) -> None:
        """Let the write take part in the next group."""
        self._waiting.append(write)

    def withdraw(self, write: Write[Any]) -> bool:
        """Take the write back; False when a group has it already."""
        try:
            self._waiting.remove(write)
        except ValueError:
            return False
        return True

    def take(self) -> list[Write[Any]]:
        """Return the writes of the next group."""
        group: list[Write[Any]] = []
        with contextlib.suppress(IndexError):  # not by the length: another loop's thread may withdraw one meanwhile
            while len(group) < MAXIMUM_GROUP:
                group.append(self._waiting.popleft())
        return group

    def run(self, group: list[Write[Any]], connection: Connection) -> None:
        """Run the group in one transaction: those that fail alone are undone alone, the others committed."""
        dialect = self._dialect
        try:
            dialect.begin(connection)
            try:
                for write in group:
                    if len(group) == 1:
                        write.run(connection)
                    else:
                        self._run_apart(write, connection)
                dialect.commit(connection)
            except BaseException:
                dialect.rollback(connection)
                raise
        except BaseException as error:
            failure = dialect.translated(error) if isinstance(error, dialect.errors) else error
            for write in group:
                write.fail(failure)
        for write in group:
            write.finished = True

    def _run_apart(self, write: Write[Any], connection: Connection) -> None:
        dialect = self._dialect
        dialect.set_savepoint(connection)
        try:
            write.run(connection)
        except Exception as error:
            if not dialect.in_transaction(connection):
                raise  # SQLite has undone everything: a full disk, an I/O error
            dialect.roll_back_to_savepoint(connection)
            write.fail(dialect.translated(error) if isinstance(error, dialect.errors) else error)
        dialect.release_savepoint(connection)
