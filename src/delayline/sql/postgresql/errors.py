"""What PostgreSQL and psycopg report, as the errors of this package."""

from __future__ import annotations

from typing import Final

from delayline.errors import (
    BackendUnavailable,
    BackendUnusable,
    InvalidMessage,
    StorageFull,
    TransactionAborted,
    TransactionConflict,
)

ABORTED: Final = (
    "the transaction on {place} is aborted, as a statement in it has failed before: roll it back, and repeat it in a "
    "new one"
)
GIVEN_UP: Final = {"40001", "40P01"}
READ_ONLY: Final = "25006"
#: Of a prepared statement too, when a table that it reads has changed.
UNSUPPORTED: Final = "0A000"
UNIQUE: Final = "23505"
#: Texts of libpq before a connection is established, when there is no SQLSTATE.
UNUSABLE: Final = {
    "authentication failed": "Check the user and the password",
    "no password supplied": "Put the password into the URL or into ~/.pgpass",
    "no pg_hba.conf entry": "Allow this user and host in pg_hba.conf",
    "does not support SSL": "Set sslmode in the URL to what the server offers",
    "SSL": "Check sslmode and the certificates",
    "permission denied for database": "As its owner: GRANT CONNECT ON DATABASE",
    "does not exist": "Create it, or name another one in the URL",
}
FULL: Final = ("too many clients", "too many connections", "connection slots are reserved", "connection limit exceeded")
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
