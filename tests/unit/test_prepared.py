"""Prepared statements: arguments reach the driver in the order of the SQL."""

from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, String, Table, bindparam, select
from sqlalchemy.dialects import mysql, sqlite

from delayline.sql.prepared import LONGEST_LIST, Prepared

TABLE = Table("t", MetaData(), Column("id", Integer), Column("name", String(10)))
PAGE = select(TABLE.c.id).where(TABLE.c.name == bindparam("name")).limit(bindparam("number")).offset(bindparam("skip"))
SOME = (
    select(TABLE.c.id)
    .where(TABLE.c.id.in_(bindparam("keys", expanding=True)), TABLE.c.name == "constant")
    .where(TABLE.c.id > bindparam("after"))
)


class Driver:
    """A connection and its cursor, which record their calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self.rowcount = 1

    @property
    def connection(self) -> "Driver":
        return self

    def cursor(self) -> "Driver":
        return self

    def execute(self, sql: str, values: tuple[Any, ...]) -> None:
        self.asked.append((sql, values))

    def executemany(self, sql: str, rows: list[tuple[Any, ...]]) -> None:
        self.asked.extend((sql, row) for row in rows)

    def fetchall(self) -> list[tuple[int]]:
        return [(1,)]

    def close(self) -> None:
        pass


def test_an_offset_before_the_limit() -> None:
    page, driver = Prepared(PAGE, mysql.dialect(), ["name", "number", "skip"]), Driver()
    assert page.sql.endswith("LIMIT %s, %s")
    page.rows(driver, "a", 10, 20)  # type: ignore[arg-type]
    page.change_many(driver, [("b", 1, 2)])  # type: ignore[arg-type]
    assert [values for _, values in driver.asked] == [("a", 20, 10), ("b", 2, 1)]


def test_a_list_and_a_constant_in_the_middle() -> None:
    some, driver = Prepared(SOME, sqlite.dialect(), ["after", "keys"]), Driver()
    some.rows(driver, 7, [1, 2, 3])  # type: ignore[arg-type]
    ((sql, values),) = driver.asked
    assert "IN (?, ?, ?) AND t.name = ? AND t.id > ?" in sql
    assert values == (1, 2, 3, "constant", 7)


def test_long_lists_are_asked_for_in_parts() -> None:
    some, driver = Prepared(SOME, sqlite.dialect(), ["after", "keys"]), Driver()
    assert some.rows_each(driver, 7, keys=list(range(LONGEST_LIST + 1))) == [(1,), (1,)]  # type: ignore[arg-type]
    assert [len(values) for _, values in driver.asked] == [LONGEST_LIST + 2, 3]


def test_a_name_that_the_statement_does_not_take() -> None:
    with pytest.raises(ValueError, match="the statement takes"):
        Prepared(PAGE, sqlite.dialect(), ["name", "number", "skip", "other"])
