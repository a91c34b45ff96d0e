"""The tables of a MariaDB or MySQL database: set-up, checks, rights, and what `doctor` finds."""

from __future__ import annotations

import contextlib
import hashlib
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar, Final

from delayline.errors import BackendUnavailable
from delayline.sql import journal_triggers
from delayline.sql.dialect import Catalog, TableIdentity
from delayline.sql.mariadb.errors import LOCK_WAIT_TIMEOUT, RIGHT_DENIED, number_of
from delayline.sql.schema import TO_PUT, must_fit
from delayline.sql.server import run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sqlalchemy import Connection, Table

    from delayline.sql.dialect import Finding
    from delayline.sql.mariadb.dialect import Mariadb

LONGEST_MARIADB_NAME: Final = 64  # characters
LONGEST_FILE_NAME: Final = 250  # bytes; a table is a file, in whose name every special character takes five
HEADROOM: Final = 64 * 1024  # bytes of a statement beside body and headers, and for the headers of a failure
TABLE_EXISTS: Final = "SELECT 1 FROM information_schema.tables WHERE table_schema = %s AND table_name = %s"
SETUP_LOCK_NAME: Final = "delayline setup"

#: Statements that need a single right, and affect no row.
EXPLAINED: Final = {
    "SELECT": "SELECT 1 FROM {table} WHERE FALSE",
    "INSERT": "INSERT INTO {table} VALUES ()",
    "UPDATE": "UPDATE {table} SET {one} = 1 WHERE FALSE",
    "DELETE": "DELETE FROM {table} WHERE FALSE",
}


class MariadbCatalog(Catalog):
    """The tables of a MariaDB or MySQL database."""

    journal: ClassVar[journal_triggers.JournalTriggers] = journal_triggers.MYSQL
    # Its insert of a row that may be there already is an update.
    rights_to_store: ClassVar[Sequence[str]] = (*TO_PUT, "UPDATE")

    def __init__(self, dialect: Mariadb) -> None:
        self._dialect = dialect

    def kept_name(self, table: str) -> str:
        """Return the name, with characters that names cannot have replaced by a hash of the whole."""
        must_fit(table, len(table), LONGEST_MARIADB_NAME, "characters", self._dialect)
        kept = re.sub(r"[^\x01-\uffff]|[\ud800-\udfff]", "_", table)
        if kept != table:
            digest = hashlib.sha256(table.encode("utf-8", "surrogatepass")).hexdigest()[:8]
            kept = f"{kept[: LONGEST_MARIADB_NAME - 9]}~{digest}"
        bytes_of_file = sum(1 if letter.isascii() and (letter.isalnum() or letter == "_") else 5 for letter in kept)
        must_fit(table, bytes_of_file, LONGEST_FILE_NAME, "bytes of a file's name", self._dialect)
        return kept

    @contextlib.contextmanager
    def setting_up(self, connection: Connection) -> Iterator[None]:
        """Let a single process at a time create tables."""
        patience = int(self._dialect.connections.setup_patience)
        if not run(connection, "SELECT GET_LOCK(%s, %s)", SETUP_LOCK_NAME, patience)[0][0]:
            raise BackendUnavailable(f"another process has been setting up {self._dialect} for {patience} s: try again")
        try:
            yield
        finally:
            if not self._dialect.errors.is_broken(connection):  # with which the lock ends
                run(connection, "SELECT RELEASE_LOCK(%s)", SETUP_LOCK_NAME)

    def missing_rights(self, connection: Connection, needed: Mapping[Table, Sequence[str]]) -> list[str]:
        """Return the GRANT statements for missing rights on existing tables.

        An EXPLAIN of a statement checks the same rights as running it, rights of roles included. A table that another
        session has locked is left out, as EXPLAIN would wait for that session.
        """
        with self._dialect.transactions.waiting_briefly(connection):
            return self._missing_rights(connection, needed)

    def _missing_rights(self, connection: Connection, needed: Mapping[Table, Sequence[str]]) -> list[str]:
        grants, user = [], ""
        for table, needs in needed.items():
            name = self._dialect.sql.identifier_preparer.format_table(table)
            column = self._dialect.sql.identifier_preparer.quote(next(iter(table.columns)).name)
            lacking = []
            for need in needs:
                refusal = self._refusal(connection, EXPLAINED[need].format(table=name, one=column))
                if refusal == LOCK_WAIT_TIMEOUT:
                    break
                if refusal in RIGHT_DENIED:
                    lacking.append(need)
            if lacking:
                user = user or _quoted_user(run(connection, "SELECT CURRENT_USER()")[0][0])
                granted_on = (
                    name
                    if table.schema
                    else f"`{str(self._dialect.connections.url.database).replace('`', '``')}`.{name}"
                )
                grants.append(f"GRANT {', '.join(lacking)} ON {granted_on.replace('%%', '%')} TO {user};")
        return grants

    def _refusal(self, connection: Connection, statement: str) -> int | None:
        try:
            run(connection, f"EXPLAIN {statement}")
        except self._dialect.errors.kinds as error:
            if self._dialect.errors.is_disconnect(error):
                raise
            return number_of(error)
        return None

    def findings(self, connection: Connection) -> list[Finding]:
        """Return the version, how durable a commit is, how large a message may be, and how far our clock is off."""
        version, flush, packet, now = run(
            connection, "SELECT VERSION(), @@innodb_flush_log_at_trx_commit, @@max_allowed_packet, UTC_TIMESTAMP(6)"
        )[0]
        off = (datetime.now(UTC) - self._dialect.values.from_due(now)).total_seconds()
        return [
            ("server", True, f"{self._dialect.connections.product} {version}"),
            ("innodb_flush_log_at_trx_commit", flush == 1, f"{flush}" + ("" if flush == 1 else ": set it to 1")),
            ("max_allowed_packet", True, f"{packet} bytes: a message may have {largest(packet)}"),
            ("clock", abs(off) < 1, f"this machine is {off:+.3f} s off; the server's clock decides"),
        ]

    def identify(self, connection: Connection, table: Table, known: TableIdentity | None = None) -> TableIdentity:
        """Return the server, and the table in the database that it or the connection names."""
        del known
        [(database, *server)] = run(connection, "SELECT DATABASE(), @@hostname, @@port, @@datadir")
        inside = table.schema or database
        rows = run(connection, TABLE_EXISTS, inside, table.name)
        return TableIdentity(
            f"{self._dialect.connections.product} database {inside}", (*server, inside), table.name if rows else None
        )


def _quoted_user(user: str) -> str:
    """Return the account, `name@host` as the server writes it, as GRANT takes it."""
    name, _, host = user.rpartition("@")
    return "@".join("'" + part.replace("\\", "\\\\").replace("'", "''") + "'" for part in (name, host))


def largest(packet: int) -> int:
    """Return how many bytes of body and headers fit into a statement, where each is written as two digits."""
    return packet // 2 - min(HEADROOM, packet // 8)
