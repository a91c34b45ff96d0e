"""Meaning of MariaDB's and MySQL's errors: whether the server is at fault, or a message."""

from __future__ import annotations

import struct

import pymysql
import pytest

from delayline.errors import BackendUnavailable, BackendUnusable, StorageFull, TransactionConflict
from delayline.sql.databases import database_at
from delayline.sql.server_database import ServerDatabase


def raised(number: int, text: str, state: str = "HY000") -> Exception:
    """Return the error that PyMySQL makes of an answer of the server."""
    packet = b"\xff" + struct.pack("<H", number) + b"#" + state.encode() + text.encode()
    try:
        pymysql.err.raise_mysql_exception(packet)
    except pymysql.err.MySQLError as error:
        return error
    raise AssertionError


@pytest.fixture(params=["mariadb", "mysql"])
def database(request: pytest.FixtureRequest) -> ServerDatabase:
    found = database_at(f"{request.param}://shop@db.example/errors")
    assert isinstance(found, ServerDatabase)
    return found


@pytest.mark.parametrize(
    ("number", "text", "kind"),
    [
        (1047, "WSREP has not yet prepared node for application use", BackendUnavailable),
        (1197, "Multi-statement transaction required more than 'max_binlog_cache_size' bytes of storage", None),
        (1598, "Binary logging not possible. Message: something", None),
        (3100, "Error on observer while running replication hook 'before_commit'", None),
        (1467, "Failed to read auto-increment value from storage engine", None),
        (1290, "The MariaDB server is running with the --read-only option", None),
        (1213, "Deadlock found when trying to get lock", TransactionConflict),
        (1021, "Disk full (/tmp/x); waiting for someone to free some space", StorageFull),
        (1665, "Cannot execute statement: impossible to write to binary log", BackendUnusable),
        (1175, "You are using safe update mode", None),
        (1105, "an unknown error, as proxies raise", None),
        (9001, "PD server timeout, of an engine that speaks the protocol", None),
        (1064, "You have an error in your SQL syntax", BackendUnusable),
    ],
)
def test_faults_of_the_server_are_no_messages(
    database: ServerDatabase, number: int, text: str, kind: type[Exception] | None
) -> None:
    translated = database.dialect.errors.translated(raised(number, text))
    assert type(translated) is (kind or BackendUnavailable)
    assert text in str(translated)


@pytest.mark.parametrize(
    ("number", "text", "state"),
    [
        (1062, "Duplicate entry 'a' for key 'id'", "23000"),
        (1644, "a trigger's refusal", "45000"),
        (4025, "CONSTRAINT `short` failed for `shop`.`orders`", "23000"),
    ],
)
def test_faults_of_a_row_stay_what_they_are(database: ServerDatabase, number: int, text: str, state: str) -> None:
    error = raised(number, text, state)
    assert database.dialect.errors.translated(error) is error


@pytest.mark.parametrize("number", [1047, 1290, 1792, 1836, 3100])
def test_a_server_that_is_no_primary_ends_its_sessions(database: ServerDatabase, number: int) -> None:
    assert database.dialect.errors.outdates_sessions(raised(number, "no"))
