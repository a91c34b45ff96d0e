"""Block statements of other processes in PostgreSQL half way, with triggers that wait for an advisory lock."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg
from tests.eventually import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOCK: Final = 20_300_102
FUNCTION: Final = f"""
CREATE FUNCTION held() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_advisory_xact_lock({LOCK});
  IF TG_OP = 'DELETE' THEN RETURN OLD; END IF;
  RETURN NEW;
END $$
"""
#: Sessions that wait for the lock.
WAITING: Final = """
SELECT pid, client_port FROM pg_stat_activity JOIN pg_locks USING (pid)
WHERE locktype = 'advisory' AND NOT granted AND datname = current_database()
"""


class BlockedStatements:
    """Statements that wait for the lock."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def wait(self, number: int, over: Callable[[], bool]) -> None:
        """Wait until this many statements are blocked; fails if `over` returns True first."""
        eventually(lambda: over() or len(self._connection.execute(WAITING).fetchall()) == number)
        assert not over(), "the work ended before its statements were blocked"

    def senders(self) -> list[int]:
        """Return the ids of the processes that sent the blocked statements."""
        server = self._connection.info.port
        return [_process_at(port, server) for _, port in self._connection.execute(WAITING).fetchall()]

    def release(self) -> None:
        """Unblock the statements, and wait until the database has ended the sessions of dead processes."""
        pids = [pid for pid, _ in self._connection.execute(WAITING).fetchall()]
        self._connection.execute("SELECT pg_advisory_unlock(%s)", [LOCK])
        there = "SELECT FROM pg_stat_activity WHERE pid = ANY(%s)"
        eventually(lambda: not self._connection.execute(there, [pids]).fetchall())


@contextmanager
def blocked_statements(url: str, *where: str) -> Iterator[BlockedStatements]:
    """Block statements that fire one of the triggers, each as in CREATE TRIGGER, from its time to its condition."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(%s)", [LOCK])
        connection.execute(FUNCTION)
        for number, when in enumerate(where):
            kind = "CONSTRAINT TRIGGER" if "DEFERRED" in when else "TRIGGER"
            connection.execute(f"CREATE {kind} held_{number} {when} EXECUTE FUNCTION held()".encode())
        yield BlockedStatements(connection)


def _process_at(port: int, server: int) -> int:
    """Return the process at this end of a connection to a server on this machine."""
    ends = [f"0100007F:{one:04X}" for one in (port, server)]
    found: list[int] = []

    def look() -> list[int]:
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        sockets = [f"socket:[{line[9]}]" for line in lines if line[1:3] == ends]
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # others end while all are looked at
                for file in (process / "fd").iterdir():
                    with suppress(OSError):
                        if str(file.readlink()) in sockets:
                            found.append(int(process.name))
        return found

    eventually(look, f"a process has port {port}")
    return found[0]
