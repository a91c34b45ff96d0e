"""What MariaDB, MySQL and PyMySQL report, as the errors of this package."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from delayline.errors import (
    BackendUnavailable,
    BackendUnusable,
    ConfigurationError,
    InvalidMessage,
    StorageFull,
    TransactionConflict,
)
from delayline.failures import is_cut_handshake
from delayline.sql.server import ServerErrors, cause_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: The connection is of no use any more: the server shuts down, has killed it, or is not there.
DISCONNECTS: Final = {0, 1053, 1152, 1153, 1158, 1159, 1160, 1161, 1927, 2002, 2003, 2006, 2013, 2014, 2055, 4031}
#: All connections of the server, or of the user, are in use.
FULL: Final = {1040, 1203, 1226}
#: The transaction gave way to another. 1020: the other has changed a row since this transaction's snapshot
#: (innodb_snapshot_isolation, which is on since MariaDB 11.6.2).
GAVE_WAY: Final = {1020, 1213, 1614}
#: The following errors end the whole transaction, 1206 for want of room for its locks; others undo their statement
#: only.
ROLLED_BACK: Final = GAVE_WAY | {1206}
#: The server, or the session, takes no writes: a primary that has become a replica.
NO_WRITES: Final = (1290, 1792, 1836)
#: A node of a cluster that is not a part of it now; others may be reached by a new connection.
NODE_APART: Final = (1047, 3100)
RIGHT_DENIED: Final = frozenset({1142, 1143})
LOCK_WAIT_TIMEOUT: Final = 1205
#: MySQL's refusals of XA RECOVER.
RIGHT_TO_RECOVER: Final = frozenset({1227, 1401})
NO_SPACE: Final = ("errno: 28", "error 28 ", "Errcode: 28", "No space left")

UNUSABLE, UNAVAILABLE = BackendUnusable, BackendUnavailable
CREDENTIALS: Final = "{place} refuses this user: {cause}. Check the user and the password"
RIGHT_MISSING: Final = "{place} does not allow this user that: {cause}. Run as an administrator: GRANT {missing}"
#: A refusal names the missing commands, unless the user has no right at all on the database.
DENIED_COMMAND: Final = re.compile(r"(.+?) command denied to user .*? for (?:table|column) (.+)")
ALL_RIGHTS: Final = "SELECT, INSERT, UPDATE, DELETE on its tables, and CREATE, ALTER and INDEX for `delayline setup`"
OTHER_SHAPE: Final = "{place} has a table of another shape: {cause}. Name another table_name"
LOST: Final = "the connection to {place} is lost: {cause}"
NAME_REFUSED: Final = "{place} cannot have a table of that name: {cause}. Choose another endpoint name or table_name"
TLS: Final = "{place} and this machine agree on no encryption: {cause}. Check the ssl_ options in the URL"
TEXT_REFUSED: Final = "{place} cannot keep this text: {cause}"
DISK_FULL: Final = "{place} has no space left: {cause}"
SHORT: Final = "{place} is short of resources: {cause}. Raise its limits, or connect less often"
SERVER_READ_ONLY: Final = "{place} is read-only, a replica perhaps: {cause}. Name the primary in the URL"
STATEMENT_LOG: Final = (
    "{place} writes statements to its binary log, which it refuses to do for transactions that read what is committed: "
    "{cause}. Set binlog_format to MIXED or ROW"
)
REFUSES: Final = "{place} does not do that now: {cause}"
NOT_REACHED: Final = "cannot reach {place}: {cause}. Check that the server runs and answers there"

TRANSLATIONS: Final[dict[tuple[int, ...], tuple[type[Exception], str]]] = {
    (1045, 1130, 1251, 1698, 1820, 1862, 2059): (UNUSABLE, CREDENTIALS),
    (1044, 1142, 1143, 1227, 1370): (UNUSABLE, RIGHT_MISSING),
    (1049,): (UNUSABLE, "{place} does not exist: {cause}. Create it: CREATE DATABASE, or name another in the URL"),
    (1146, 1932): (UNUSABLE, "{place} is not set up for this endpoint: {cause}. Run `delayline setup`"),
    (1054, 1136, 1364): (UNUSABLE, OTHER_SHAPE),
    (1059, 1102, 1103, 1300): (ConfigurationError, NAME_REFUSED),
    (2026, 3159, 4052): (UNUSABLE, TLS),
    (1153, 1301): (InvalidMessage, "{place} cannot take something that large: {cause}. Raise max_allowed_packet"),
    (1264, 1292, 1366, 1406): (InvalidMessage, TEXT_REFUSED),
    (1021, 1114): (StorageFull, DISK_FULL),
    (1037, 1038, 1040, 1041, 1129, 1135, 1203, 1206, 1226): (UNAVAILABLE, SHORT),
    (1684,): (UNAVAILABLE, "another process is setting up {place}: {cause}"),
    (1205, 3572): (UNAVAILABLE, "{place} did not get a lock in time: {cause}"),
    (1020, 1213, 1614): (TransactionConflict, "{place} gave this transaction up in favour of another: {cause}"),
    (1305, 1402, 1613): (UNAVAILABLE, "{place} has ended this transaction: {cause}"),
    NO_WRITES: (UNAVAILABLE, SERVER_READ_ONLY),
    NODE_APART: (UNAVAILABLE, "{place} is a node that is not a part of its cluster now: {cause}"),
    (1197, 1467, 1594, 1595, 1596, 1598, 1637, 1785): (UNAVAILABLE, "{place} cannot write that now: {cause}"),
    (1665,): (UNUSABLE, STATEMENT_LOG),
    (1317, 1969, 3024): (UNAVAILABLE, "{place} has ended the statement: {cause}"),
    (1053, 1927, 2006, 2013, 2014, 2055, 4031, 0): (UNAVAILABLE, LOST),
    (1152, 1158, 1159, 1160, 1161): (UNAVAILABLE, LOST),
    (1005, 1026, 1030, 1180, 1181): (UNAVAILABLE, "{place} cannot read or write its files: {cause}. Check its disk"),
}
BY_NUMBER: Final = {number: meaning for numbers, meaning in TRANSLATIONS.items() for number in numbers}


#: Classes of errors that no message causes by its contents ...
OF_SERVERS: Final = frozenset({"OperationalError", "InternalError", "NotSupportedError", "InterfaceError"})
#: ... but for these: a trigger's refusal, a constraint's, and refusals of values that do not fit.
OF_ROWS: Final = frozenset({1048, 1062, 1169, 1216, 1217, 1364, 1365, 1451, 1452, 1557, 1586, 1644, 1690, 3819, 4025})

DUPLICATE_KEY: Final = 1062


def number_of(error: BaseException) -> int | None:
    """Return the server's or the driver's number of an error, None for an error without."""
    arguments = cause_of(error).args
    return arguments[0] if arguments and isinstance(arguments[0], int) else None


class MariadbErrors(ServerErrors):
    """The errors of PyMySQL, by the server's number."""

    @property
    def kinds(self) -> tuple[type[Exception], ...]:
        """The driver's exceptions, and UnicodeEncodeError, which it does not wrap."""
        return (*super().kinds, UnicodeEncodeError)

    def is_broken(self, connection: Connection) -> bool:
        """Return whether PyMySQL has given the connection up."""
        if super().is_broken(connection):
            return True
        driver: Any = connection.connection.driver_connection
        return not driver.open

    def is_disconnect(self, error: Exception) -> bool:
        """Return whether the server has gone, or this connection to it."""
        return number_of(error) in DISCONNECTS

    def is_full(self, error: Exception) -> bool:
        """Return whether the server, or the user, has no connection left."""
        return number_of(error) in FULL

    def outdates_sessions(self, error: Exception) -> bool:
        """Return whether the server is read-only, or not a part of its cluster."""
        return number_of(error) in (*NO_WRITES, *NODE_APART)

    def is_duplicate(self, error: Exception) -> bool:
        """Return whether a row is there already; the failed statement alone is undone."""
        return number_of(error) == DUPLICATE_KEY

    def is_deadlock(self, error: Exception) -> bool:
        """Return whether the transaction gave way to another."""
        return number_of(error) in GAVE_WAY

    def has_rolled_back(self, error: Exception) -> bool:
        """Return whether the whole transaction is rolled back, after a deadlock for instance."""
        return number_of(error) in ROLLED_BACK

    def translated(self, error: Exception) -> Exception:
        """Return the delayline error for a driver's error, or the error itself when it is a programming mistake."""
        cause, number, server = _text(error), number_of(error), self._connections
        if isinstance(error, UnicodeEncodeError):
            return InvalidMessage(
                TEXT_REFUSED.format(place=server, cause=f"{error.reason}: {error.object[error.start : error.end]!r}")
            )
        if number in {2002, 2003}:
            if ("SSL" in cause or "certificate" in cause) and not is_cut_handshake(cause):
                return BackendUnusable(TLS.format(place=server, cause=cause))
            return BackendUnavailable(NOT_REACHED.format(place=server, cause=cause))
        if any(sign in cause for sign in NO_SPACE):
            return StorageFull(DISK_FULL.format(place=server, cause=cause))
        if number in BY_NUMBER:
            kind, template = BY_NUMBER[number]
            return kind(template.format(place=server, cause=cause, missing=_missing(cause)))
        kinds = {kind.__name__ for kind in type(cause_of(error)).__mro__}
        if number not in OF_ROWS and kinds & OF_SERVERS:
            return BackendUnavailable(REFUSES.format(place=server, cause=cause))
        if number is not None and "ProgrammingError" in kinds:
            return BackendUnusable(REFUSES.format(place=server, cause=cause))
        return error


def _missing(cause: str) -> str:
    """Return the missing rights that a refusal names, and their table."""
    refused = DENIED_COMMAND.match(cause)
    return ALL_RIGHTS if refused is None else f"{refused[1]} ON {refused[2]}"


def _text(error: BaseException) -> str:
    """Return the server's text without the error numbers around it."""
    arguments = cause_of(error).args
    return str(arguments[1] if len(arguments) > 1 else arguments[0] if arguments else error).strip().rstrip(".")
