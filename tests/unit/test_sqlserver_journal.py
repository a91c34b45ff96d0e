"""The journal on SQL Server: its triggers compiled, and run by SQLite after a translation, as no server runs here."""

from __future__ import annotations

import re
import sqlite3
from typing import Final

import pytest
from tests.unit.sqlserver_translation import dialect

from delayline.sql.journal import Journal, Trigger

NAME: Final = "sale's Überweisungen.timeouts"
COLUMNS: Final = ("Id", "Destination", "State", "Time", "Headers", "RetryCount")
BODY: Final = re.compile(r"AFTER (INSERT|UPDATE|DELETE) AS\nBEGIN\nSET NOCOUNT ON;\n(.*)END\n", re.DOTALL)


def statements() -> dict[str, str]:
    """Return the statements that create the triggers."""
    server = dialect()
    store = server.catalog.store_table(NAME, None)
    journal = Journal(store, server)
    triggers = server.catalog.journal
    return {
        word: str(Trigger(template, f"journal_{word}", store, journal.entries).compile(dialect=server.sql))
        for word, template in triggers.create.items()
    }


def translated(statement: str) -> str:
    """Return SQLite's trigger, which comes row by row, each of the tables of old and new rows with that row."""
    found = BODY.search(statement)
    assert found is not None, statement
    body = re.sub(r"N'", "'", found[2]).replace("SYSUTCDATETIME()", "datetime('now')").replace("[dbo].", "")
    for rows, row in (("inserted", "NEW"), ("deleted", "OLD")):
        of_row = f"(SELECT {', '.join(f'{row}.[{name}] AS [{name}]' for name in COLUMNS)}) AS {rows}"
        body = re.sub(rf"(FROM|JOIN) {rows}\b", rf"\1 {of_row}", body)
    return f"{statement[: found.start()].replace('[dbo].', '')} AFTER {found[1]} ON [{NAME}] BEGIN\n{body}END".replace(
        f" ON [{NAME}]  AFTER", " AFTER"
    )


@pytest.fixture
def store() -> sqlite3.Connection:
    """Provide a store with the triggers."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    columns = ", ".join(f"[{name}]" for name in COLUMNS)
    connection.execute(f"CREATE TABLE [{NAME}] ({columns})")
    connection.execute(
        "CREATE TABLE delayline_journal (seq INTEGER PRIMARY KEY, store NOT NULL, event NOT NULL, id NOT NULL, "
        "destination NOT NULL, due NOT NULL, at NOT NULL, retries NOT NULL)"
    )
    for statement in statements().values():
        connection.execute(translated(statement))
    return connection


def run(store: sqlite3.Connection, statement: str, *values: object) -> None:
    store.execute(statement.replace("{table}", f"[{NAME}]"), values)


def entries(store: sqlite3.Connection) -> list[tuple[object, ...]]:
    return store.execute(
        "SELECT store, event, id, destination, due, retries FROM delayline_journal ORDER BY seq"
    ).fetchall()


def put(
    store: sqlite3.Connection, key: str, destination: str | None = "billing", due: str | None = "2030-01-01"
) -> None:
    run(store, "INSERT INTO {table} VALUES (?, ?, x'', ?, x'', 0)", key, destination, due)


def test_each_event_of_a_message_is_an_entry(store: sqlite3.Connection) -> None:
    # Given messages
    for key in ("a", "b", "c"):
        put(store, key)
    # When one is moved, retried and dispatched, one is cancelled, and one has failed
    run(store, "UPDATE {table} SET [Time] = '2031-01-01' WHERE [Id] = 'a'")
    run(store, "UPDATE {table} SET [RetryCount] = 1, [Time] = '2032-01-01' WHERE [Id] = 'a'")
    run(store, "DELETE FROM {table} WHERE [Id] = 'a'")
    for key, mark in (("b", -1), ("c", -2)):
        run(store, "UPDATE {table} SET [RetryCount] = ? WHERE [Id] = ?", mark, key)
        run(store, "DELETE FROM {table} WHERE [Id] = ?", key)
    # Then each of these is an entry, and the marks are none
    assert [entry[1:] for entry in entries(store)] == [
        *(("scheduled", key, "billing", "2030-01-01", 0) for key in ("a", "b", "c")),
        ("rescheduled", "a", "billing", "2031-01-01", 0),
        ("retried", "a", "billing", "2032-01-01", 1),
        ("dispatched", "a", "billing", "2032-01-01", 1),
        ("cancelled", "b", "billing", "2030-01-01", 0),
        ("failed", "c", "billing", "2030-01-01", 0),
    ]
    assert {entry[0] for entry in entries(store)} == {NAME}


def test_rows_that_dotnet_has_written_without_values_fail_nothing(store: sqlite3.Connection) -> None:
    put(store, "nowhere", destination=None)
    put(store, "never", due=None)
    run(store, "UPDATE {table} SET [RetryCount] = 1")
    assert [entry[1:4] for entry in entries(store)] == [("scheduled", "nowhere", ""), ("retried", "nowhere", "")]


def test_triggers_hide_their_row_counts_and_names_are_literals_in_unicode() -> None:
    for statement in statements().values():
        assert "SET NOCOUNT ON;" in statement
        assert "SELECT N'sale''s Überweisungen.timeouts', " in statement
