"""Engines that speak PostgreSQL's protocol without being PostgreSQL."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from delayline.errors import BackendUnusable
from delayline.sql.server import run

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from delayline.sql.postgresql.connections import PostgresqlConnections

VERSION: Final = "SELECT version()"
TAKE: Final = "SELECT pg_try_advisory_lock(%s)"
END: Final = "SELECT pg_advisory_unlock(%s)"
NOTIFY: Final = "SELECT pg_notify('delayline', '')"
#: What the versions of PostgreSQL begin with, and those of YugabyteDB contain, which is made of it.
POSTGRESQL: Final = "PostgreSQL "
YUGABYTE: Final = "-YB-"


def check_engine(connections: PostgresqlConnections, connection: Connection) -> None:
    """Note whether an engine has notifications.

    Raises BackendUnusable for one on which sessions do not exclude each other: claims would not hold there.

    CockroachDB has the functions, and locks nothing: https://github.com/cockroachdb/cockroach/issues/13546
    """
    version = str(run(connection, VERSION)[0][0])
    if version.startswith(POSTGRESQL) and YUGABYTE not in version:
        return
    try:
        run(connection, NOTIFY)
    except connections.errors.kinds as error:
        if not connections.errors.is_not_supported(error):
            raise
        connections.notifies = False
    key = random.getrandbits(62)
    run(connection, TAKE, key)
    try:
        with connections.connect() as other:
            both = run(other, TAKE, key)[0][0]
    finally:
        run(connection, END, key)
    if both:
        raise BackendUnusable(
            f"{connections} is {version.partition(',')[0]}, where locks of a session keep no other session out: "
            "several processes would handle the same message at once. Name a PostgreSQL"
        )
