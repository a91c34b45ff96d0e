"""Writes that wait for the same turn: one commit for all, each failing or succeeding alone."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import TYPE_CHECKING

import pytest
from tests.servers.sqlite import database_of

from delayline import BackendUnavailable
from delayline.errors import StorageFull

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from sqlalchemy import Connection

    from delayline.sql.file_database import FileDatabase


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[FileDatabase]:
    database = database_of(tmp_path / "group.db", "?timeout=0")
    await database.open()
    await database.write(lambda connection: run(connection, "CREATE TABLE kept (name TEXT UNIQUE)"))
    yield database
    await database.close()


def run(connection: Connection, sql: str, *values: str) -> None:
    connection.connection.cursor().execute(sql, values)


def keep(name: str) -> Callable[[Connection], str]:
    def work(connection: Connection) -> str:
        run(connection, "INSERT INTO kept VALUES (?)", name)
        return name

    return work


async def kept(database: FileDatabase) -> list[str]:
    def names(connection: Connection) -> list[str]:
        return [row[0] for row in connection.connection.cursor().execute("SELECT name FROM kept ORDER BY name")]

    return await database.read(names)


async def together(
    database: FileDatabase, writes: Sequence[Callable[[Connection], object]]
) -> tuple[list[object], list[str]]:
    """Run the writes together behind a held turn; return their results and the statements that ran."""
    statements: list[str] = []
    connection = database._write_connection
    assert connection is not None
    driver = connection.connection.driver_connection
    assert driver is not None
    driver.set_trace_callback(statements.append)
    await database.semaphore.enter()
    tasks = [asyncio.ensure_future(database.write(write)) for write in writes]
    await asyncio.sleep(0)
    database.semaphore.leave()
    results: list[object] = list(await asyncio.gather(*tasks, return_exceptions=True))
    driver.set_trace_callback(None)
    return results, statements


async def test_writes_that_wait_together_share_one_commit(database: FileDatabase) -> None:
    results, statements = await together(database, [keep(name) for name in "abc"])
    assert results == ["a", "b", "c"]
    assert statements.count("COMMIT") == 1
    assert await kept(database) == ["a", "b", "c"]


async def test_one_that_fails_is_undone_alone(database: FileDatabase) -> None:
    def half(connection: Connection) -> None:
        run(connection, "INSERT INTO kept VALUES ('half')")
        raise LookupError("half way")

    results, statements = await together(database, [keep("a"), half, keep("b")])
    assert results[0] == "a"
    assert isinstance(results[1], LookupError)
    assert results[2] == "b"
    assert statements.count("COMMIT") == 1
    assert await kept(database) == ["a", "b"]


async def test_all_callers_get_the_error_if_the_database_rolls_everything_back(database: FileDatabase) -> None:
    # Given a database that has no room for the second of three
    await database.write(lambda connection: run(connection, "PRAGMA max_page_count = 20"))
    big = "x" * 200_000

    results, _ = await together(database, [keep("a"), keep(big), keep("b")])

    # Then no caller gets a false success
    there = await kept(database)
    for name, result in zip(["a", big, "b"], results, strict=True):
        assert (result == name) == (name in there)
    assert any(isinstance(result, StorageFull) for result in results)


async def test_a_transaction_that_cannot_begin_fails_all_writes(database: FileDatabase, tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "group.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    results, _ = await together(database, [keep("a"), keep("b")])
    other.close()
    assert [type(result) for result in results] == [BackendUnavailable, BackendUnavailable]
    assert await kept(database) == []


async def test_cancelled_before_its_turn_a_write_has_no_effect(database: FileDatabase) -> None:
    await database.semaphore.enter()
    write = asyncio.ensure_future(database.write(keep("a")))
    await asyncio.sleep(0)
    write.cancel()
    with pytest.raises(asyncio.CancelledError):
        await write
    database.semaphore.leave()
    await database.write(keep("b"))
    assert await kept(database) == ["b"]


async def test_cancelled_while_another_process_writes_it_the_effect_is_certain_first(database: FileDatabase) -> None:
    # Given two writes in one group, the first of them doing the writing
    await database.semaphore.enter()
    first = asyncio.ensure_future(database.write(keep("a")))
    second = asyncio.ensure_future(database.write(keep("b")))
    await asyncio.sleep(0)
    database.semaphore.leave()
    while database._group._waiting:  # noqa: ASYNC110 - until the first has taken both
        await asyncio.sleep(0)
    # When the second is cancelled meanwhile
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    # Then it was written before the caller was cancelled
    assert await kept(database) == ["a", "b"]
    assert await first == "a"
    await database.write(keep("c"))


async def test_more_than_a_group_takes_are_all_written(database: FileDatabase) -> None:
    names = [f"{number:04}" for number in range(450)]
    results, statements = await together(database, [keep(name) for name in names])
    assert results == names
    assert statements.count("COMMIT") == 3
    assert await kept(database) == names
