"""Meaning of SQL Server's errors, by number.

Where Microsoft's driver gives no number, the text decides, which is English in every session, and then the SQLSTATE,
which the driver writes out in words.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from delayline.errors import (
    BackendUnavailable,
    BackendUnusable,
    ConfigurationError,
    InvalidMessage,
    MissingExtra,
    StorageFull,
)
from delayline.failures import is_cut_handshake
from delayline.sql.server import ServerErrors, cause_of

if TYPE_CHECKING:
    from delayline.sql.sqlserver.connections import SqlServerConnections

NOT_LOADED: Final = (
    "mssql-python cannot be loaded: {error} On Debian run: "
    "apt-get install libltdl7 libodbc2 libkrb5-3 libgssapi-krb5-2; "
    "or install delayline[pymssql] and write mssql+pymssql:// in the URL"
)
DUPLICATE_KEY: Final = frozenset({2627, 2601})
ALREADY_THERE: Final = frozenset({2714, 1913})
#: After the following errors the server has rolled the transaction back.
ROLLED_BACK_NUMBERS: Final = frozenset({1205, 3903, 3930, 3998})
ENDED: Final = "delayline: the transaction has ended"
"""The text of the error of ours for a statement whose transaction an earlier error has ended."""
DATABASE_READ_ONLY: Final = 3906
NO_SUCH_OBJECT: Final = 208

#: Prefixes or parts of error texts, the most specific first.
SIGNS: Final = {
    "Cannot open database": 4060,
    "Login failed for user": 18456,
    "Invalid object name": 208,
    "Invalid column name": 207,
    "Lock request time out period exceeded": 1222,
    "was deadlocked on": 1205,
    "Violation of PRIMARY KEY constraint": 2627,
    "Violation of UNIQUE KEY constraint": 2627,
    "Cannot insert duplicate key": 2601,
    "There is already an object named": 2714,
    "because an index or statistics with name": 1913,
    "String or binary data would be truncated": 2628,
    "Could not allocate space for object": 1105,
    "transaction log for database": 9002,
    "reached its size quota": 40544,
    "The specified schema name": 2760,
    "permission denied in database": 262,
    "permission was denied on": 229,
    "is not able to access the database": 916,
    "Operand type clash": 206,
    "Implicit conversion from data type": 257,
    "because the database is read-only": DATABASE_READ_ONLY,
    "The current transaction cannot be committed": 3930,
    "has no corresponding BEGIN TRANSACTION": 3903,
    ENDED: 3903,
    "insufficient memory": 701,
    "is not currently available": 40613,
    "The service has encountered an error processing your request": 40197,
    "The service is currently busy": 40501,
    "Resource ID": 10928,
    "Cannot process request. Not enough resources": 49918,
    "Cannot process create or update request": 49919,
    "The service is busy processing multiple requests": 49920,
    "but then an error occurred during the": 233,
    "Could not continue scan with NOLOCK": 601,
    "cannot have any enabled triggers": 334,
    "cannot obtain a LOCK resource": 1204,
    "You can only specify the READPAST lock": 650,
}

#: The error number nearest to each SQLSTATE of mssql-python, in whichever language the server answers.
STATES: Final = {
    "Integrity constraint violation": 2627,  # 23000
    "Serialization failure": 1205,  # 40001
    "Base table or view not found": 208,  # 42S02
    "Column not found": 207,  # 42S22
    "Base table or view already exists": 2714,  # 42S01
    "Index already exists": 1913,  # 42S11
    "Invalid authorization specification": 18456,  # 28000
    "String data, right-truncated": 2628,  # 22001
    "Invalid schema name": 2760,  # 3F000
    "Invalid catalog name": 4060,  # 3D000
}

SHAPE: Final = "{place} has a table of another shape: {cause}. Name another table_name"
RIGHTS: Final = "{place} does not allow this user that: {cause}. Grant it"
LOGIN: Final = "{place} refuses this user: {cause}. Check the user and the password"
LONG: Final = "{place} cannot keep a text of that length: {cause}. Characters beyond U+FFFF count twice there"
SAME: Final = (
    "{place} takes this id for that of a message that waits already, as its collation ignores case, or spaces at the "
    "end: {cause}. Give the message another id"
)
FULL: Final = "{place} has no space left: {cause}"
NOT_NOW: Final = "{place} cannot do that now: {cause}"

#: Errors that pass by themselves, most of them Azure's: the service scales, moves a database or limits its use.
#: https://learn.microsoft.com/azure/azure-sql/database/troubleshoot-common-errors-issues
TRANSIENT: Final = frozenset(
    {
        233,
        615,
        3960,
        4221,
        6005,
        8645,
        10053,
        10054,
        10060,
        10928,
        10929,
        40143,
        40197,
        40501,
        40540,
        40613,
        42108,
        42109,
    }
    | {49918, 49919, 49920}
)

TRANSLATIONS: Final[dict[int, tuple[type[Exception], str]]] = {
    206: (BackendUnusable, SHAPE),
    207: (BackendUnusable, SHAPE),
    208: (BackendUnusable, "{place} is not set up for this endpoint: {cause}. Run `delayline setup`"),
    229: (BackendUnusable, RIGHTS),
    230: (BackendUnusable, RIGHTS),
    257: (BackendUnusable, SHAPE),
    262: (BackendUnusable, RIGHTS),
    650: (BackendUnusable, "{place} does not run at READ COMMITTED: {cause}. Set its isolation level to that"),
    701: (BackendUnavailable, NOT_NOW),
    911: (BackendUnusable, "{place} does not exist: {cause}. Create it"),
    916: (BackendUnusable, RIGHTS),
    1105: (StorageFull, FULL),
    1204: (BackendUnavailable, NOT_NOW),
    1205: (BackendUnavailable, "{place} gave this transaction up in favour of another: {cause}"),
    1222: (BackendUnavailable, "{place} did not get a lock in time: {cause}"),
    1913: (BackendUnusable, "{place} has something else of that name: {cause}. Name another table_name"),
    2601: (InvalidMessage, SAME),
    2627: (InvalidMessage, SAME),
    2628: (InvalidMessage, LONG),
    2714: (BackendUnusable, "{place} has something else of that name: {cause}. Name another table_name"),
    2760: (BackendUnusable, "{place} has no such schema: {cause}. Create it, or leave out `schema`"),
    3903: (BackendUnavailable, "{place} has ended this transaction: {cause}"),
    DATABASE_READ_ONLY: (
        BackendUnavailable,
        "{place} is read-only, a secondary perhaps: {cause}. Name the primary in the URL",
    ),
    3930: (BackendUnavailable, "{place} has ended this transaction: {cause}"),
    3998: (BackendUnavailable, "{place} has ended this transaction: {cause}"),
    4060: (
        BackendUnavailable,
        "{place} cannot be opened: {cause}. On Azure this may pass; else create it, or let this user in",
    ),
    8152: (InvalidMessage, LONG),
    9002: (StorageFull, FULL),
    18456: (BackendUnusable, LOGIN),
    18452: (BackendUnusable, LOGIN),
    18470: (BackendUnusable, LOGIN),
    18488: (BackendUnusable, LOGIN),
    40544: (StorageFull, FULL),
    334: (
        BackendUnusable,
        "{place} has a trigger on a table of delayline's, whose statements return what they delete: {cause}. Remove it",
    ),
    601: (BackendUnavailable, NOT_NOW),
    **dict.fromkeys(TRANSIENT, (BackendUnavailable, NOT_NOW)),
}
KNOWN: Final = TRANSLATIONS.keys() | DUPLICATE_KEY | ALREADY_THERE | ROLLED_BACK_NUMBERS
#: The heading of pymssql's errors; "General SQL Server error" follows if the server sent a text itself.
FRAME: Final = re.compile(
    r"DB-Lib error message [0-9]+, severity [0-9]+:(\s*General SQL Server error[^\n]*)?|(?<=\n)Net-Lib error during "
)
#: Errors of the drivers before a connection exists.
UNUSABLE: Final = {
    "certificate": "Give the server a certificate that this machine trusts, or add ?TrustServerCertificate=yes",
    "SSL": "Check Encrypt and TrustServerCertificate in the URL",
    "encrypt": "Check Encrypt and TrustServerCertificate in the URL",
    "Invalid authorization specification": "Check the user and the password",
}


def number_of(error: BaseException) -> int:
    """Return the server's number of an error; 0 where it is unknown."""
    cause = cause_of(error)
    number = getattr(cause, "sqlserver_number", 0) or (cause.args[0] if cause.args else None)
    if isinstance(number, tuple) and number:  # pymssql wraps errors of connections twice
        number = number[0]
    if isinstance(number, int) and (number in KNOWN or not hasattr(cause, "driver_error")):
        return number
    by_text = next((known for sign, known in SIGNS.items() if sign in str(cause)), 0)
    return by_text or STATES.get(getattr(cause, "driver_error", ""), 0)


def text_of(error: BaseException) -> str:
    """Return the driver's text without the frame that it puts around it."""
    cause = cause_of(error)
    answer = getattr(cause, "ddbc_error", None) or cause
    parts = answer.args if isinstance(answer, BaseException) else (answer,)
    while len(parts) == 1 and isinstance(parts[0], tuple):
        parts = parts[0]
    texts = [part.decode(errors="replace") if isinstance(part, bytes) else str(part) for part in parts]
    message = re.sub(r"^(\[[^]]*\])+", "", texts[-1] if texts else "").strip()
    lines = [line for line in map(str.strip, FRAME.sub("\n", message).splitlines()) if line]
    return ". ".join(line.rstrip(".") for line in dict.fromkeys(lines)) or message


class SqlServerErrors(ServerErrors):
    """The errors of both drivers, by the server's number."""

    _connections: SqlServerConnections

    @property
    def kinds(self) -> tuple[type[Exception], ...]:
        """The drivers' exceptions, and the exception of Microsoft's driver for an unknown option in a URL."""
        if self._connections.uses_pymssql or self._connections.missing is not None:
            return super().kinds
        from mssql_python.exceptions import ConnectionStringParseError

        return (*super().kinds, ConnectionStringParseError)

    def plans_without(self, error: Exception) -> bool:
        """Return whether the server or its driver is missing; the statements are idempotent."""
        if isinstance(error, BackendUnavailable | MissingExtra):
            return True
        return str(error).startswith(NOT_LOADED.partition("{")[0])

    def is_disconnect(self, error: Exception) -> bool:
        """Return whether the connection is unusable; pymssql's is out of step when a transaction has ended."""
        cause, sql = cause_of(error), self._connections.engine.dialect
        lost = isinstance(cause, sql.loaded_dbapi.Error) and sql.is_disconnect(cause, None, None)
        return lost or (self._connections.uses_pymssql and self.has_rolled_back(error))

    def outdates_sessions(self, error: Exception) -> bool:
        """Return whether the database is read-only."""
        return number_of(error) == DATABASE_READ_ONLY

    def has_rolled_back(self, error: Exception) -> bool:
        """Return whether the server has rolled back the whole transaction: the next statement would be outside it."""
        return number_of(error) in ROLLED_BACK_NUMBERS

    def translated(self, error: Exception) -> Exception:
        """Return the delayline error for a driver's error, or the error itself when it is a programming mistake."""
        cause, number, server = text_of(error), number_of(error), self._connections
        kinds = {kind.__name__ for kind in type(cause_of(error)).__mro__}
        if number in TRANSLATIONS:
            kind, template = TRANSLATIONS[number]
            return kind(template.format(place=server, cause=cause))
        if "ConnectionStringParseError" in kinds:
            return ConfigurationError(f"the URL of {server} has an option unknown to the driver: {cause}")
        if kinds & {"OperationalError", "InterfaceError"}:
            for sign, remedy in UNUSABLE.items():
                if sign in cause and not is_cut_handshake(cause):
                    return BackendUnusable(f"cannot use {server}: {cause}. {remedy}")
            return BackendUnavailable(f"cannot reach {server}: {cause}. Check that the server runs and answers there")
        return error
