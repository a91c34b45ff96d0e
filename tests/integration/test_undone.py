"""A transaction that SQLite undoes by itself, as on a full disk, is over: nothing of it is committed piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.servers.sqlite import database_of

from delayline import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sqlalchemy import Connection


def sql(text: str) -> Callable[[Connection], object]:
    def work(connection: Connection) -> object:
        return connection.connection.cursor().execute(text).fetchall()

    return work


async def test_statements_after_a_rollback_by_sqlite_are_refused(file: Path) -> None:
    # Given a transaction with a row in it
    database = database_of(file)
    await database.open()
    await database.write(sql("CREATE TABLE kept (name)"))
    with pytest.raises(BackendUnavailable, match="undone the transaction by itself"):
        async with database.transaction() as transaction:
            await database.write(sql("INSERT INTO kept VALUES ('before')"), transaction)
            # When SQLite rolls it back, and the caller goes on
            await transaction.run(sql("ROLLBACK"))
            await database.write(sql("INSERT INTO kept VALUES ('after')"), transaction)
    # Then neither is there, and the next transaction works
    assert await database.read(sql("SELECT name FROM kept")) == []
    await database.write(sql("INSERT INTO kept VALUES ('next')"))
    assert await database.read(sql("SELECT name FROM kept")) == [("next",)]
    await database.close()


async def test_it_cannot_be_committed(file: Path) -> None:
    database = database_of(file)
    await database.open()
    with pytest.raises(BackendUnavailable, match="undone the transaction by itself"):
        async with database.transaction() as transaction:
            await transaction.run(sql("CREATE TABLE kept (name)"))
            await transaction.run(sql("ROLLBACK"))
    await database.close()
