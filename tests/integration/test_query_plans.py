"""Every statement on the way of a message uses an index, whatever is pending."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING

import pytest
from tests.servers.sqlite import database_of

from delayline.delayed.fairness import FairBy
from delayline.sql.fair_groups import DueGroups, QueuedGroups, fair_table
from delayline.sql.file_database import NumberStatements
from delayline.sql.prepared import Prepared
from delayline.sql.schema import QUEUES, SUBSCRIPTIONS, queue_tables, timeouts_table
from delayline.sql.setup import RequiredTables
from delayline.sql.sqlite.moves import FileForwarding
from delayline.sql.statements import QueueStatements, StoreStatements

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from delayline.sql.sqlite.dialect import Sqlite

TABLE = "orders.timeouts"
NO_TABLE = "SCAN CONSTANT ROW"


def statements(
    owner: StoreStatements | NumberStatements | QueueStatements | DueGroups | QueuedGroups,
) -> dict[str, str]:
    return {name: value.text([3] * value.lists) for name, value in vars(owner).items() if isinstance(value, Prepared)}


def dialect_at(file: Path) -> Sqlite:
    return database_of(file).dialect


@pytest.fixture
def connection(file: Path) -> Iterator[sqlite3.Connection]:
    """Provide a connection to a file with the tables, some thousand rows and statistics."""
    dialect = dialect_at(file)
    made = dialect.connections.connect(writing=True)
    RequiredTables(dialect, None, QUEUES, SUBSCRIPTIONS, others=[timeouts_table(TABLE)]).set_up(made)
    made.close()
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        rows = [(f"m{number}", "billing", number, b"{}", b"") for number in range(3000)]
        connection.executemany(
            f'INSERT INTO "{TABLE}" (id, destination, due, headers, body, retry_count) VALUES (?, ?, ?, ?, ?, 0)',  # noqa: S608
            rows,
        )
        connection.executemany(
            "INSERT INTO delayline_messages (queue, id, headers, body) VALUES (?, ?, ?, ?)",
            [(f"queue{number % 7}", f"m{number}", b"{}", b"") for number in range(3000)],
        )
        connection.executemany(
            "INSERT INTO delayline_queues (name) VALUES (?)", [(f"queue{number}",) for number in range(7)]
        )
        yield connection


def plan_of(connection: sqlite3.Connection, sql: str) -> list[str]:
    steps = connection.execute(f"EXPLAIN QUERY PLAN {sql}", [1] * sql.count("?")).fetchall()
    return [step[3] for step in steps]


def assert_cheap(name: str, sql: str, plan: list[str]) -> None:
    for step in plan:
        assert "TEMP B-TREE" not in step, f"{name} sorts: {sql}"
        assert not step.startswith("SCAN") or step == NO_TABLE, f"{name} reads the whole table: {sql}"
    if not sql.startswith("INSERT") and plan != [NO_TABLE]:
        assert any(step.startswith("SEARCH") for step in plan), f"{name} uses no index: {plan}"


@pytest.mark.parametrize("analyzed", [False, True], ids=["fresh", "analyzed"])
def test_no_statement_scans_or_sorts(connection: sqlite3.Connection, file: Path, analyzed: bool) -> None:
    # Given tables with rows, with statistics or without
    if analyzed:
        connection.execute("ANALYZE")
    dialect = dialect_at(file)
    # When SQLite is asked how it would run each statement
    store = StoreStatements(timeouts_table(TABLE), dialect)
    found = statements(store) | statements(NumberStatements(store))
    found |= statements(QueueStatements(queue_tables(), dialect))
    # Then each searches an index
    assert {"due", "due_numbers", "next_due", "insert", "delete", "known", "put", "numbers"} <= set(found)
    for name, sql in found.items():
        assert_cheap(name, sql, plan_of(connection, sql))


@pytest.mark.parametrize("analyzed", [False, True], ids=["fresh", "analyzed"])
@pytest.mark.parametrize("fair_by", ["destination", "header:Tenant"])
def test_no_statement_of_turns_scans_or_sorts(
    connection: sqlite3.Connection, file: Path, fair_by: str, analyzed: bool
) -> None:
    # Given tables whose messages, all of one group, are served fairly
    dialect = dialect_at(file)
    table, queues = fair_table(timeouts_table(TABLE), FairBy.of(fair_by)), queue_tables(fair=True)
    connection.commit()
    upgraded = dialect.connections.connect(writing=True)
    RequiredTables(dialect, None, QUEUES, SUBSCRIPTIONS, others=[table, queues.queued]).set_up(upgraded)
    upgraded.close()
    connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()  # EXPLAIN does not read a changed schema
    if analyzed:
        connection.execute("ANALYZE")
    # When SQLite is asked how it would run each statement
    store, moves = StoreStatements(table, dialect), FileForwarding(StoreStatements(table, dialect), queues, dialect)
    assert moves.of_turn is not None
    found = statements(store) | statements(NumberStatements(store)) | statements(QueueStatements(queues, dialect))
    found |= {f"queued {name}": sql for name, sql in statements(QueuedGroups(queues.queued, dialect, "q")).items()}
    found |= statements(DueGroups(table, dialect)) | {"heads": moves.of_turn.heads.sql}
    # Then each searches an index, and those of turns that of groups
    for name, sql in found.items():
        assert_cheap(name, sql, plan_of(connection, sql))
    for name in ("numbers_of_turn", "due_of_turn", "heads", "first"):
        assert "Index_Destination" in str(plan := plan_of(connection, found[name])) or "Index_Group" in str(plan), plan
    for name in ("queued first", "queued numbers"):
        assert "delayline_messages_groups" in str(plan_of(connection, found[name]))
        assert "<" in str(plan_of(connection, found[name])), "it reads to the end of the index"


def test_the_guard_can_fail(connection: sqlite3.Connection) -> None:
    # Given tables without their indexes
    connection.execute(f'DROP INDEX "{TABLE}.Index_Time"')
    sql = f'SELECT id FROM "{TABLE}" WHERE due <= ? ORDER BY due, seq'  # noqa: S608
    # Then the guard sees it
    with pytest.raises(AssertionError, match=r"sorts|whole table"):
        assert_cheap("due", sql, plan_of(connection, sql))
