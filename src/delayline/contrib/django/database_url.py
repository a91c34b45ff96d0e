"""The URL of a database that Django uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, connections
from django.utils.connection import ConnectionDoesNotExist
from sqlalchemy import URL

#: Options of libpq that Django passes on as they are.
LIBPQ_OPTIONS: Final = (
    "sslmode", "sslrootcert", "sslcert", "sslkey", "target_session_attrs", "connect_timeout", "options",
)  # fmt: skip
#: MySQLdb's options for TLS, and what a URL calls them.
MYSQL_TLS: Final = {"ca": "ssl_ca", "cert": "ssl_cert", "key": "ssl_key"}


def url_of(database: str) -> str:
    """Return the URL of a database in Django's DATABASES.

    Args:
        database: Its alias.

    Raises:
        ImproperlyConfigured: There is none, or delayline cannot use it as it is written.
    """
    try:
        written: dict[str, Any] = connections[database].settings_dict
    except ConnectionDoesNotExist as error:
        raise ImproperlyConfigured(f'DELAYLINE["DATABASE"] is {database!r}, which DATABASES does not have') from error
    name, options = str(written["NAME"] or ""), written.get("OPTIONS", {})
    query: dict[str, str] = {}
    match connections[database].vendor:
        case "sqlite":
            if not name or ":memory:" in name or name.startswith("file:"):
                raise ImproperlyConfigured(
                    f"the database {database!r} is in this process's memory ({name!r}), where no other process finds "
                    'messages. Give it a file, for tests in DATABASES: {..., "TEST": {"NAME": "test.sqlite3"}}'
                )
            return f"sqlite:///{Path(name).absolute()}"
        case "postgresql":
            scheme, query = "postgresql", {key: str(options[key]) for key in LIBPQ_OPTIONS if key in options}
        case "mysql":
            scheme, tls = _scheme_of_mysql(database), options.get("ssl") or {}
            query = {MYSQL_TLS[key]: str(value) for key, value in tls.items() if key in MYSQL_TLS}
        case _:
            raise ImproperlyConfigured(
                f"delayline has no tables in a database of {written['ENGINE']}. Give the URL of another in "
                'DELAYLINE["URL"], as "postgresql://user@host/name"'
            )
    host, user, password = written["HOST"] or None, written["USER"] or None, written["PASSWORD"] or None
    if host is not None and host.startswith("/"):
        query["host" if scheme == "postgresql" else "unix_socket"], host = host, None
    port = int(written["PORT"]) if written["PORT"] and host is not None else None
    if written["PORT"] and host is None and scheme == "postgresql":
        query["port"] = str(written["PORT"])
    made = URL.create(scheme, user, password, host, port, name or None, query)
    return made.render_as_string(hide_password=False)


def _scheme_of_mysql(database: str) -> str:
    """Return the scheme of the product that Django has connected to, mysql where it cannot connect."""
    try:
        return "mariadb" if connections[database].mysql_is_mariadb else "mysql"
    except OperationalError:
        return "mysql"
