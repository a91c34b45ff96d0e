"""Databases on the SQL Server that DELAYLINE_TEST_SQLSERVER_URL names; no such server is installed for the tests."""

from __future__ import annotations

import os
import uuid

from sqlalchemy.engine import make_url

from delayline.sql.server import run
from delayline.sql.sqlserver.dialect import SqlServer

IN_USE = "currently in use"  # in the text of error 3702
URL = os.environ.get("DELAYLINE_TEST_SQLSERVER_URL", "")
NO_URL = "DELAYLINE_TEST_SQLSERVER_URL names no SQL Server"


def new_database() -> str:
    """Create a database and return its URL."""
    name = f"delayline_{uuid.uuid4().hex[:12]}"
    with SqlServer(make_url(URL)).connections.connect() as connection:
        run(connection, f"CREATE DATABASE [{name}]")
    return make_url(URL).set(database=name).render_as_string(hide_password=False)


def drop_database(url: str) -> None:
    """Drop the database; single-user mode, which Azure SQL Database lacks, is set only if connections are open."""
    name, server = make_url(url).database, SqlServer(make_url(URL))
    with server.connections.connect() as connection:
        try:
            run(connection, f"DROP DATABASE [{name}]")
        except server.errors.kinds as error:
            if IN_USE not in str(error):
                raise
            run(connection, f"ALTER DATABASE [{name}] SET SINGLE_USER WITH ROLLBACK IMMEDIATE")
            run(connection, f"DROP DATABASE [{name}]")
