"""What PostgreSQL and psycopg report, as the errors of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from delayline.errors import (
    BackendUnavailable,
    BackendUnusable,
    ConfigurationError,
    InvalidMessage,
    StorageFull,
    TransactionAborted,
    TransactionConflict,
)
from delayline.failures import is_cut_handshake
from delayline.sql.postgresql import numbers, rights
from delayline.sql.server import ServerErrors, cause_of, watch_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

ABORTED: Final = (
    "the transaction on {place} is aborted, as a statement in it has failed before: roll it back, and repeat it in a "
    "new transaction"
)
GIVEN_UP: Final = {"40001", "40P01"}
READ_ONLY: Final = "25006"
#: Of a prepared statement too, when a table that it reads has changed.
UNSUPPORTED: Final = "0A000"
UNIQUE: Final = "23505"
#: Texts of libpq before a connection is established, when there is no SQLSTATE.
UNUSABLE_TEXTS: Final = {
    "authentication failed": "Check the user and the password",
    "no password supplied": "Put the password into the URL or into ~/.pgpass",
    "no pg_hba.conf entry": "Allow this user and host in pg_hba.conf",
    "does not support SSL": "Set sslmode in the URL to what the server offers",
    "SSL": "Check sslmode and the certificates",
    "permission denied for database": "As its owner: GRANT CONNECT ON DATABASE",
    "does not exist": "Create it, or name another database in the URL",
}
#: What engines answer that lack something: not supported, a syntax error, no such function.
NOT_SUPPORTED: Final = frozenset({UNSUPPORTED, "42601", "42883"})
TOO_MANY: Final = "53300"
TOO_MANY_SESSIONS: Final = (
    "too many clients",
    "too many connections",
    "connection slots are reserved",
    "connection limit exceeded",
    "no more connections allowed",  # PgBouncer's
)
BEHIND_PGBOUNCER: Final = (
    "{place} shares its sessions between clients, as PgBouncer does in transaction mode: {cause}. Add ?pgbouncer=true "
    "to the URL of endpoints that only send; for others name the server itself"
)
REFUSES_OPTIONS: Final = (
    "{place} is behind a pooler that refuses options: {cause}. If it is PgBouncer in session mode, set "
    "ignore_startup_parameters = options in its settings. In transaction mode clients share sessions: Add "
    "?pgbouncer=true to the URL of endpoints that only send; for others name the server itself"
)
TRANSLATIONS: Final[dict[str, tuple[type[Exception], str]]] = {
    "08": (BackendUnavailable, "the connection to {place} is lost: {cause}"),
    "0A": (BackendUnavailable, "{place} does not support a statement now, as after a change of its tables: {cause}"),
    "22021": (InvalidMessage, "{place} cannot keep this text: {cause}"),
    "22P05": (InvalidMessage, "{place} cannot keep this text: {cause}. Its encoding has to be UTF8 for that"),
    "22001": (InvalidMessage, "{place} cannot keep a text of that length: {cause}"),
    READ_ONLY: (BackendUnavailable, "{place} is read-only, a standby perhaps: {cause}. Name the primary in the URL"),
    "25P02": (TransactionAborted, ABORTED),
    "25": (BackendUnavailable, "{place} has ended a transaction: {cause}"),
    "28": (BackendUnusable, "{place} refuses this user: {cause}. Check the user and the password"),
    "3D000": (BackendUnusable, "{place} does not exist: {cause}. Create it: createdb"),
    "3F000": (BackendUnusable, "{place} has no such schema: {cause}. Create it, or leave out `schema`"),
    **dict.fromkeys(GIVEN_UP, (TransactionConflict, "{place} gave this transaction up in favour of another: {cause}")),
    "40": (BackendUnavailable, "{place} has undone this transaction: {cause}"),
    "26000": (BackendUnusable, BEHIND_PGBOUNCER),
    "42P05": (BackendUnusable, BEHIND_PGBOUNCER),
    "42P01": (BackendUnusable, "{place} is not set up for this endpoint: {cause}. Run `delayline setup`"),
    "42703": (BackendUnusable, "{place} has a table of another shape: {cause}. Name another table_name"),
    "42804": (BackendUnusable, "{place} has a table of another shape: {cause}. Name another table_name"),
    "42": (BackendUnusable, "{place} refuses a statement of delayline's: {cause}. `delayline doctor` says what it is"),
    "53100": (StorageFull, "{place} has no space left: {cause}"),
    "53": (BackendUnavailable, "{place} is short of resources: {cause}"),
    "54": (InvalidMessage, "{place} cannot keep something that large: {cause}"),
    "55P03": (BackendUnavailable, "{place} did not get a lock in time: {cause}"),
    "55": (BackendUnavailable, "{place} cannot do that now: {cause}"),
    "57": (BackendUnavailable, "{place} has ended the statement or the connection: {cause}"),
    "58": (BackendUnavailable, "{place} cannot read or write its files: {cause}. Check its disk"),
    "XX": (BackendUnavailable, "{place} reports an internal error: {cause}"),
}


class PostgresqlErrors(ServerErrors):
    """The errors of psycopg, by the server's SQLSTATE."""

    @property
    def _place(self) -> str:
        return str(self._connections)

    def is_broken(self, connection: Connection) -> bool:
        """Return whether libpq has found the connection's end, which in a pipeline the error does not show."""
        if super().is_broken(connection):
            return True
        driver: Any = connection.connection.driver_connection
        return bool(driver.closed)

    @property
    def kinds(self) -> tuple[type[Exception], ...]:
        """The driver's exceptions, and UnicodeEncodeError in lists, which it does not wrap."""
        return (*super().kinds, UnicodeEncodeError)

    def is_disconnect(self, error: Exception) -> bool:
        """Return whether the server has gone, or this connection to it."""
        state = _state(error)
        return state.startswith(("08", "57P")) or (not state and _is_operational(error))

    def outdates_sessions(self, error: Exception) -> bool:
        """Return whether the session is read-only, or its prepared statements are for tables of another shape."""
        return _state(error) in {READ_ONLY, UNSUPPORTED}

    def is_not_supported(self, error: Exception) -> bool:
        """Return whether the engine does not know the statement or a function of it."""
        return _state(error) in NOT_SUPPORTED

    def is_full(self, error: Exception) -> bool:
        """Return whether the server, the database or the user has no connection left."""
        cause = str(cause_of(error))  # libpq gives no SQLSTATE before a connection is established
        return _state(error) == TOO_MANY or (not _state(error) and any(sign in cause for sign in TOO_MANY_SESSIONS))

    def is_deadlock(self, error: Exception) -> bool:
        """Return whether the transaction failed by a deadlock or a serialization conflict."""
        return _state(error) in GIVEN_UP

    def translated(self, error: Exception) -> Exception:
        """Return the delayline error for a driver's error, or the error itself when it is a programming mistake."""
        state, cause = _state(error), str(cause_of(error)).strip()
        if state == rights.DENIED:
            refusal = _brief(cause)
            return BackendUnusable(f"{self._place}: {refusal}. {self._remedy(refusal)}")
        if state == UNIQUE and numbers.is_number_taken(cause_of(error)):
            return BackendUnavailable(f"{self._place} {self._catch_up(cause_of(error))}: {_brief(cause)}")
        for prefix, (kind, template) in TRANSLATIONS.items():
            if state.startswith(prefix):
                return kind(
                    template.format(place=self._place, cause=_brief(cause) if kind is InvalidMessage else cause)
                )
        if "unsupported startup parameter" in cause:
            return BackendUnusable(REFUSES_OPTIONS.format(place=self._place, cause=cause))
        if _is_operational(error):
            return self._not_reached(cause)
        if "invalid connection option" in cause or "invalid URI" in cause:
            return ConfigurationError(f"the URL of {self._place} has an option unknown to libpq: {cause}")
        if "bad value for" in cause:
            return ConfigurationError(
                f"the URL of {self._place} has an option with a value that cannot be used: {cause}"
            )
        if "NUL" in cause or "surrogates" in cause:
            return InvalidMessage(f"{self._place} cannot keep this text: {cause}")
        return error

    def _remedy(self, refusal: str) -> str:
        try:
            with self._connections.connect() as connection:
                watch_of(connection).begin(self._connections.server_timeout)
                return rights.remedy(connection, refusal)
        except self.kinds:
            return rights.RIGHTS_REMEDY

    def _catch_up(self, error: BaseException) -> str:
        """Set the sequence behind the rows whose number the error has found taken; return what was done."""
        try:
            with self._connections.connect() as connection:
                watch_of(connection).begin(self._connections.server_timeout)
                return numbers.catch_up(connection, error)
        except self.kinds:
            return numbers.BEHIND

    def _not_reached(self, cause: str) -> Exception:
        for sign, advice in UNUSABLE_TEXTS.items():
            if sign in cause and not is_cut_handshake(cause):
                return BackendUnusable(f"cannot use {self._place}: {cause}. {advice}")
        if any(sign in cause for sign in TOO_MANY_SESSIONS):
            return BackendUnavailable(
                f"{self._place} is full: {cause}. Raise max_connections, or start fewer processes"
            )
        return BackendUnavailable(
            f"cannot reach {self._place}: {' '.join(cause.split())}. Check that the server runs and answers there"
        )


def _brief(cause: str) -> str:
    """Return the server's text without its details and a part of the statement, which are in further lines."""
    return cause.partition("\n")[0]


def _state(error: BaseException) -> str:
    cause = cause_of(error)
    return str(getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or "")  # psycopg2 has the latter


def _is_operational(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(cause_of(error)).__mro__}
    return bool(names & {"OperationalError", "InterfaceError"})
