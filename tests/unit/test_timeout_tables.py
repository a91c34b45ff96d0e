"""The tables of timeouts are those of NServiceBus' SQL persistence, column for column."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy.schema import CreateTable

from delayline import ConfigurationError
from delayline.sql.databases import database_at
from delayline.sql.schema import queue_tables
from delayline.timeouts import SqlTimeoutPersister
from delayline.timeouts.nservicebus import TimeoutTimes, table_prefix, timeout_table
from delayline.timeouts.sql import TimeoutStatements

URLS = {
    "postgresql": "postgresql://server/shop",
    "mariadb": "mariadb://server/shop",
    "mysql": "mysql://server/shop",
    "mssql": "mssql://server/shop",
    "sqlite": "sqlite:///shop.db",
}
IN_MYSQL = [
    "Id VARCHAR(38) NOT NULL",
    "Destination NATIONAL VARCHAR(200)",
    "SagaId VARCHAR(38)",
    "State LONGBLOB",
    "Time DATETIME",
    "Headers JSON NOT NULL",
    "PersistenceVersion VARCHAR(23) NOT NULL",
]
COLUMNS = {
    "postgresql": [
        "Id UUID NOT NULL",
        "Destination VARCHAR(200)",
        "SagaId UUID",
        "State BYTEA",
        "Time TIMESTAMP WITHOUT TIME ZONE",
        "Headers TEXT",
        "PersistenceVersion VARCHAR(23)",
    ],
    "mariadb": IN_MYSQL,
    "mysql": IN_MYSQL,
    "mssql": [
        "Id UNIQUEIDENTIFIER NOT NULL",
        "Destination NVARCHAR(200) NULL",
        "SagaId UNIQUEIDENTIFIER NULL",
        "State VARBINARY(max) NULL",
        "Time DATETIME NULL",
        "Headers NVARCHAR(max) NOT NULL",
        "PersistenceVersion VARCHAR(23) NOT NULL",
    ],
}
INDEXES = {
    "postgresql": {"Sales_Eu_TimeoutData_SagaIdx", "Sales_Eu_TimeoutData_TimeIdx"},
    "mariadb": {"Index_SagaId", "Index_Time"},
    "mysql": {"Index_SagaId", "Index_Time"},
    "mssql": {"Index_SagaId", "Index_Time"},
}


@pytest.mark.parametrize("product", list(COLUMNS))
def test_columns_and_indexes_match_the_reference(product: str) -> None:
    dialect = database_at(URLS[product]).dialect
    table = timeout_table(table_prefix("Sales.Eu"), dialect.catalog.schema_of(None), dialect)
    text = re.sub(r'["`\[\]]', "", str(CreateTable(table).compile(dialect=dialect.sql)))
    lines = [line.strip().rstrip(",") for line in text.splitlines() if line.startswith("\t")]
    assert lines[:-1] == COLUMNS[product]
    assert lines[-1].startswith("PRIMARY KEY (Id)")
    assert {str(index.name) for index in table.indexes} == INDEXES[product]
    assert table.name == "Sales_Eu_TimeoutData"


@pytest.mark.parametrize("url", URLS.values())
def test_statements_compile_for_every_product(url: str) -> None:
    dialect = database_at(url).dialect
    table = timeout_table("s_", dialect.catalog.schema_of(None), dialect)
    statements = TimeoutStatements(table, queue_tables(dialect.catalog.schema_of(None)), dialect)
    assert "TimeoutData" in statements._lock.sql
    locks = {"mssql": "UPDLOCK", "sqlite": "SELECT"}.get(dialect.sql.name, "FOR UPDATE")
    assert locks in statements._lock.sql


@pytest.mark.parametrize("product", list(URLS))
def test_due_times_are_never_rounded_down(product: str) -> None:
    times = TimeoutTimes(database_at(URLS[product]).dialect)
    step = timedelta(seconds=1) if product in {"mysql", "mariadb"} else timedelta(milliseconds=4)
    for microsecond in (0, 1, 3_334, 500_000, 999_999):
        due = datetime(2026, 12, 31, 23, 59, 59, microsecond, tzinfo=UTC)
        kept = times.read(times.kept(due))
        assert due <= kept < due + step
        assert kept.utcoffset() == timedelta(0)


def test_due_times_of_another_zone_are_kept_in_utc() -> None:
    times = TimeoutTimes(database_at(URLS["postgresql"]).dialect)
    due = datetime.fromisoformat("2026-06-01T12:00:00+02:00")
    assert times.kept(due) == datetime(2026, 6, 1, 10)  # noqa: DTZ001 - as the column keeps it


def test_a_name_that_would_be_cut_is_refused() -> None:
    persister = SqlTimeoutPersister(URLS["postgresql"])
    assert persister.table_of("s" * 43) == "s" * 43 + "_TimeoutData"
    with pytest.raises(ConfigurationError, match="shorter name"):
        persister.table_of("s" * 44)


def test_a_prefix_can_be_named_but_not_left_empty() -> None:
    assert SqlTimeoutPersister(URLS["sqlite"], table_prefix="old_").table_of("sales") == "old_TimeoutData"
    with pytest.raises(ConfigurationError, match="leave it out"):
        SqlTimeoutPersister(URLS["sqlite"], table_prefix="")
