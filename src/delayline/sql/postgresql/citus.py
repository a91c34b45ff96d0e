"""Schemas of Citus: each is on one server, its owner. Claims exclude each other, and notifications arrive, only there.

Any server of Citus answers for every schema, also the former owner of a schema that was moved: so the owner is looked
up in Citus' metadata for each new connection, and after each claim.
See https://docs.citusdata.com/en/stable/develop/api_metadata.html
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from sqlalchemy import MetaData, text

from delayline.errors import BackendUnavailable, BackendUnusable
from delayline.events import Event, emit
from delayline.sql.server import run
from delayline.sql.urls import Host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection, Executable, Table

    from delayline.sql.dialect import Finding

logger: logging.Logger = logging.getLogger(__name__)

#: The parameter of a URL that names a schema of Citus.
CITUS_SCHEMA: Final = "citus_schema"
#: Servers that are asked for the owner of a schema while it moves.
MOST_SERVERS_ASKED: Final = 3
#: Seconds until a process notices that its schema was moved, where it has nothing to claim.
OWNER_LOOKED_UP_EVERY: Final = 1.0
#: Seconds after a move in which a process claims nothing: others lock again meanwhile what they handle.
CLAIMS_WAIT: Final = 3.0
#: Plans for any value would go through another server.
SETTINGS: Final = {"plan_cache_mode": "force_custom_plan"}
#: All tables of a schema are on one server; tables that have no shard key, and that are no reference tables.
OWNER: Final = """
SELECT n.nodename, n.nodeport, n.groupid = (SELECT groupid FROM pg_dist_local_group)
FROM pg_dist_partition AS t
JOIN pg_class AS c ON c.oid = t.logicalrelid JOIN pg_namespace AS s ON s.oid = c.relnamespace
JOIN pg_dist_shard AS d ON d.logicalrelid = t.logicalrelid JOIN pg_dist_placement AS p ON p.shardid = d.shardid
JOIN pg_dist_node AS n ON n.groupid = p.groupid AND n.noderole = 'primary'
WHERE s.nspname = %s AND t.partmethod = 'n' AND t.repmodel = 's' LIMIT 1
"""
#: Without a row it is no table of a distributed schema, but local, a reference table or divided by a shard key.
OWNED_TABLE: Final = """
SELECT 1 FROM pg_dist_partition WHERE logicalrelid = to_regclass(%s) AND partmethod = 'n' AND repmodel = 's'
"""
IS_UNLOGGED: Final = "SELECT relpersistence = 'u' FROM pg_class WHERE oid = to_regclass(%s)"


class OwnedSchema:
    """A schema that Citus has distributed: connections go to the server that owns it now.

    Args:
        name: The schema.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._owner: Host | None = None
        self._moved_at: float | None = None
        self._connecting = threading.local()

    @property
    def quoted(self) -> str:
        """The name as in SQL."""
        return f'"{self.name}"'

    def server(self, connect: Callable[[], Connection]) -> Host | None:
        """Return the server for a new connection, None for that of the URL: for a user's Engine the owner.

        Args:
            connect: Connects to the owner, which is looked up on the way.
        """
        if self._connecting.__dict__.get("begun"):
            return self._connecting.__dict__["server"]  # type: ignore[no-any-return]
        if self._owner is None:
            connect().close()
        return self._owner

    def connect(self, connect: Callable[[], Connection]) -> Connection:
        """Return a connection to the owner; to the URL's server while the schema has no tables."""
        asked = self._owner
        for _ in range(MOST_SERVERS_ASKED):
            try:
                connection = self._connect_to(asked, connect)
            except Exception:
                if asked is None or asked != self._owner:
                    raise
                self._owner = asked = None  # it may have been moved
                continue
            try:
                found = run(connection, OWNER, self.name)
            except BaseException:
                connection.close()
                raise
            if not found or found[0][2]:
                if found:
                    self._note(asked or Host(found[0][0], found[0][1]))
                return connection
            connection.close()
            asked = Host(found[0][0], found[0][1])
        raise BackendUnavailable(
            f"the owner of schema {self.name!r} is not found: servers of Citus name each other, as while it is moved"
        )

    def connect_to_set_up(self, connect: Callable[[], Connection]) -> Connection:
        """Return a connection to the URL's server: of Citus' servers only the coordinator creates tables."""
        return self._connect_to(None, connect)

    def is_owner(self, connection: Connection) -> bool:
        """Return whether the connection's server owns the schema, or the schema has no tables."""
        found = run(connection, OWNER, self.name)
        return not found or bool(found[0][2])

    def check_table(self, connection: Connection, name: str) -> None:
        """Raise BackendUnusable for a table that is not in a schema which Citus has distributed."""
        if not run(connection, OWNED_TABLE, name):
            raise BackendUnusable(
                f"table {name} is not in a schema that Citus has distributed: run SELECT citus_schema_distribute"
                f"('{self.name}') on the coordinator, or leave {CITUS_SCHEMA} out of the URL"
            )

    def findings(self, connection: Connection) -> list[Finding]:
        """Return which server owns the schema."""
        found = run(connection, OWNER, self.name)
        if not found:
            return [("owner of the schema", False, f"schema {self.name!r} has no tables that Citus has distributed")]
        host, port, is_here = found[0]
        return [("owner of the schema", bool(is_here), f"{Host(host, port)} owns schema {self.name!r}")]

    def check(self, connection: Connection) -> None:
        """Raise what outdates the process's connections, as changed tables do, unless the server owns the schema."""
        if not self.is_owner(connection):
            from psycopg.errors import FeatureNotSupported

            raise FeatureNotSupported(f"Citus has moved schema {self.name!r} to another server")

    def wait_for_others(self) -> None:
        """Return once other processes had the time to lock again what they handle, after a move; blocks."""
        if self._moved_at is not None and (left := self._moved_at + CLAIMS_WAIT - time.monotonic()) > 0:
            time.sleep(left)

    def _connect_to(self, server: Host | None, connect: Callable[[], Connection]) -> Connection:
        self._connecting.begun, self._connecting.server = True, server
        try:
            return connect()
        finally:
            self._connecting.begun = False

    def _note(self, owner: Host) -> None:
        before, self._owner = self._owner, owner
        if before is not None and before != owner:
            self._moved_at = time.monotonic()
            log_text = "Citus has moved schema %s from %s to %s: claims go on in %g s"
            emit(logger, logging.WARNING, Event.SCHEMA_MOVED, log_text, self.name, before, owner, CLAIMS_WAIT)


def logged(connection: Connection, name: str) -> Sequence[Executable]:
    """Return the statement without which Citus cannot move a table."""
    return [text(f"ALTER TABLE {name} SET LOGGED")] if run(connection, IS_UNLOGGED, name)[0][0] else []


def logged_copy(table: Table) -> Table:
    """Return the declaration of a table without UNLOGGED."""
    copy = table.to_metadata(MetaData())
    copy._prefixes = []
    return copy
