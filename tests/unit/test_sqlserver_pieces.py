"""Pieces of jobs on SQL Server: statements compiled, and run by SQLite after a translation, as no server runs here."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, cast

import pyarrow as pa
import pytest
from mssql_python.exceptions import IntegrityError
from sqlalchemy import select
from tests.unit.sqlserver_translation import Translated, dialect

from delayline.bulk.job_tables import job_tables
from delayline.bulk.jobs import JobPieces
from delayline.delayed.arrow import completed
from delayline.errors import ConfigurationError
from delayline.sql.sqlserver.staging import SqlServerStage

if TYPE_CHECKING:
    from sqlalchemy import Connection

DUE: Final = datetime(2030, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)


def batch(*ids: str, destination: str = "billing") -> pa.RecordBatch:
    number = len(ids)
    rows = {
        "id": pa.array(ids, pa.string()),
        "destination": pa.array([destination] * number),
        "due": pa.array([DUE] * number, pa.timestamp("us", "UTC")),
        "headers": pa.array(['{"n":"1"}'] * number),
        "body": pa.array([b"x"] * number, pa.binary()),
    }
    return completed(pa.RecordBatch.from_pydict(rows))


@pytest.fixture
def translated() -> Connection:
    """Provide a connection to a store in which a waits, and b, which a poller has leased."""
    connection = Translated()
    stage().append(cast("Connection", connection), batch("a", "b"))
    connection.database.execute("INSERT INTO delayline_leases VALUES ('sales.timeouts', 'b', '9999-01-01')")
    return cast("Connection", connection)


def stage() -> SqlServerStage:
    server = dialect()
    return SqlServerStage(server, server.catalog.store_table("sales.timeouts", None), "")


def rows(connection: Connection) -> dict[str, tuple[Any, ...]]:
    return cast("Translated", connection).rows()


def test_pieces_are_stored_with_headers_as_the_document_has_them(translated: Connection) -> None:
    assert list(rows(translated)) == ["a", "b"]
    destination, headers, body = rows(translated)["a"]
    assert (destination, body) == ("billing", b"x")
    assert headers.startswith(b"<ArrayOfHeaderInfo") or b"<HeaderInfo>" in headers


def test_an_id_that_waits_already_fails_the_way_for_new_ids(translated: Connection) -> None:
    with pytest.raises(IntegrityError):
        stage().append(translated, batch("c", "a"))


def test_ids_that_wait_are_kept_or_replaced_unless_a_poller_has_them(translated: Connection) -> None:
    assert stage().merge(translated, batch("a", "b", "c", destination="other"), "keep") == 1
    assert {key: row[0] for key, row in rows(translated).items()} == {"a": "billing", "b": "billing", "c": "other"}
    assert stage().merge(translated, batch("a", "b", "d", destination="new"), "replace") == 2
    assert {key: row[0] for key, row in rows(translated).items()} == {
        "a": "new",
        "b": "billing",
        "c": "other",
        "d": "new",
    }


def test_a_job_with_all_rows_at_once_is_refused(translated: Connection) -> None:
    with pytest.raises(ConfigurationError, match="takes the messages of a job in pieces"):
        stage().create(translated)
    with pytest.raises(ConfigurationError, match="use PostgreSQL, MariaDB or SQLite"):
        stage().write(1, [])


def test_tasks_share_the_lock_on_their_job_and_its_end_waits_for_them() -> None:
    server = dialect()
    jobs, pieces = job_tables(server.catalog.schema_of(None))
    state = select(jobs.c.state).where(jobs.c.job == 1)
    assert "WITH (REPEATABLEREAD, ROWLOCK)" in str(state.with_for_update(read=True).compile(dialect=server.sql))
    assert "WITH (UPDLOCK, ROWLOCK)" in str(state.with_for_update().compile(dialect=server.sql))
    new = str(server.words.insert_new(pieces, "piece").compile(dialect=server.sql))
    assert new.endswith("WHERE old.job = new.job AND old.piece = new.piece)")
    assert JobPieces(server, server.catalog.store_table("sales.timeouts", None)) is not None
