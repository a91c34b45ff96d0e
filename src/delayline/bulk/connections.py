"""The connections of a job: how many its tasks may have at a time, and how long they wait for a full server.

A cluster has more tasks than a database has connections. So the driver cuts the work into no more tasks at a time than
`connection_limit` says, and every connection of a job is made through a URL of `job_url`: it waits while the server is
full, and the server ends its session soon after the task has gone.
"""

from __future__ import annotations

from typing import Final

from delayline.sql.databases import JOB_PATIENCE, database_at
from delayline.sql.urls import read_url

#: The part of the unused connections of a server that a job takes, and the most that it takes of any.
SHARE: Final = 4
MOST_CONNECTIONS: Final = 32
#: Seconds to wait for a connection to a full server.
CONNECT_TIMEOUT: Final = 120


def job_url(url: str, connect_timeout: float = CONNECT_TIMEOUT) -> str:
    """Return the URL for the connections of a job.

    Args:
        url: The database.
        connect_timeout: Seconds to wait while the server has no connection left.
    """
    patience = {JOB_PATIENCE: f"{connect_timeout:g}"}
    return read_url(url).update_query_dict(patience).render_as_string(hide_password=False)


def connection_limit(url: str, most: int | None = None) -> int:
    """Return how many connections the tasks of a job may have at a time; blocks, on the driver.

    Args:
        url: The database.
        most: The number that the user has given; a quarter of what the server has left, at most 32, if None.

    Raises:
        BackendUnusable: The database cannot be used.
        BackendUnavailable: It cannot be reached, or stays full.
    """
    if most is not None:
        return most
    dialect = database_at(url).dialect
    dialect.connections.must_exist()
    try:
        with dialect.connections.look() as connection:
            unused = dialect.connections.unused(connection)
    except dialect.errors.kinds as error:
        raise dialect.errors.translated(error) from error
    return MOST_CONNECTIONS if unused is None else min(max(unused // SHARE, 1), MOST_CONNECTIONS)
