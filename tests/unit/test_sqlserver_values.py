"""What SQL Server's columns keep: due times in steps, headers in XML, and what its errors mean."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.engine import make_url

from delayline.errors import (
    BackendUnavailable,
    BackendUnusable,
    ConfigurationError,
    InvalidDueTime,
    InvalidMessage,
    StorageFull,
    UnsupportedTransactionMode,
)
from delayline.header_xml import to_xml
from delayline.message import DelayedMessage, Message
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.sql.sqlserver.dialect import SqlServer
from delayline.sql.sqlserver.statements import EARLIEST, LATEST, rounded_down, rounded_up
from delayline.sql.statements import StoreStatements
from delayline.transaction import Guarantee, TransactionMode, guarantee

TICK = timedelta(seconds=1) / 300
AT = datetime(2026, 1, 1, tzinfo=UTC)
instants = st.datetimes(EARLIEST.replace(tzinfo=None), LATEST.replace(tzinfo=None), timezones=st.just(UTC))


def server() -> SqlServer:
    return SqlServer(make_url("mssql://sa:s3cret@host/db"))


def kept_by_datetime(value: datetime) -> int:
    """Return the number of thirds of a hundredth of a second that the server makes of a value, rounding to nearest."""
    return round(value.microsecond * 300 / 1_000_000)


@given(instants)
def test_a_due_time_is_rounded_up_by_less_than_a_step(due: datetime) -> None:
    up = rounded_up(due)
    assert timedelta(0) <= up - due < timedelta(milliseconds=4)
    assert rounded_up(up) == rounded_down(up) == up


@given(instants)
def test_the_compared_time_is_rounded_down(at: datetime) -> None:
    down = rounded_down(at)
    assert timedelta(0) <= at - down < timedelta(milliseconds=4)


@given(instants, instants)
def test_nothing_is_found_before_it_is_due(due: datetime, at: datetime) -> None:
    assert (rounded_up(due) <= rounded_down(at)) <= (due <= at)


@given(instants)
def test_the_server_keeps_rounded_due_times_exactly(due: datetime) -> None:
    up = rounded_up(due)
    step = up.microsecond % 10_000
    assert step in {0, 3_000, 7_000}
    # .000, .003 and .007 are one third, no third and two thirds of a hundredth, whichever way it rounds
    assert kept_by_datetime(up) % 3 == {0: 0, 3_000: 1, 7_000: 2}[step]


@pytest.mark.parametrize(
    ("due", "kept"),
    [(0, 0), (1, 3_000), (3_000, 3_000), (3_001, 7_000), (7_000, 7_000), (7_001, 10_000), (999_999, 1_000_000)],
)
def test_the_steps(due: int, kept: int) -> None:
    assert rounded_up(AT + timedelta(microseconds=due)) == AT + timedelta(microseconds=kept)


@pytest.mark.parametrize("due", [EARLIEST - timedelta(microseconds=1), LATEST + timedelta(microseconds=1)])
def test_due_times_that_the_column_cannot_keep_are_refused(due: datetime) -> None:
    with pytest.raises(InvalidDueTime, match="from 1753-01-01 to 9999-12-31"):
        server().values.to_due(due)
    assert server().values.to_until(due).year in {1753, 9999}


def test_due_times_travel_in_utc() -> None:
    zone = timezone(timedelta(hours=5, minutes=30))
    assert server().values.to_due(AT.astimezone(zone)) == datetime(2026, 1, 1)  # noqa: DTZ001
    assert server().values.from_due(datetime(2026, 1, 1)) == AT  # noqa: DTZ001
    assert server().values.from_due(None) == LATEST


def row_of(message: Message) -> tuple[Any, ...]:
    dialect = server()
    statements = StoreStatements(dialect.catalog.timeouts_table("t", None), dialect)
    return statements.row_of(DelayedMessage(message, "billing", AT))


def test_headers_are_kept_in_xml() -> None:
    assert row_of(Message("m", {"a": "b"}, b""))[3] == to_xml({"a": "b"})
    assert row_of(Message.from_encoded("m", b'{"a":"b"}', b""))[3] == to_xml({"a": "b"})
    assert row_of(Message.from_encoded("m", to_xml({"a": "b"}), b""))[3] == to_xml({"a": "b"})


@pytest.mark.parametrize("encoded", [b"", b"not json", b"\xff", b"[1]", b'{"a": null}', b'{"a" : "b"} ', b"<cut"])
def test_headers_that_would_not_come_back_as_they_are_stay_so(encoded: bytes) -> None:
    assert row_of(Message.from_encoded("m", encoded, b""))[3] == encoded


def test_a_row_of_another_program_may_have_nulls() -> None:
    dialect = server()
    statements = StoreStatements(dialect.catalog.timeouts_table("t", None), dialect)
    found = statements.message_of(("m", None, None, to_xml({"a": "b"}), None, 2))
    assert (found.destination, found.due, found.message.body) == ("", LATEST, b"")
    assert dict(found.message.headers) == {"a": "b"}


def of_microsoft(kind: str, state: str, text: str) -> Exception:
    import mssql_python

    error: Exception = getattr(mssql_python, kind)(
        state, f"[Microsoft][ODBC Driver 18 for SQL Server][SQL Server]{text}"
    )
    return error


def of_pymssql(number: int, text: str) -> Exception:
    import pymssql

    error: Exception = pymssql.OperationalError(
        number, f"{text}DB-Lib error message 20018, severity 16:\nGeneral SQL Server error".encode()
    )
    return error


ERRORS = [
    (208, "ProgrammingError", "Invalid object name 'dbo.t'.", BackendUnusable, "delayline setup"),
    (207, "ProgrammingError", "Invalid column name 'Id'.", BackendUnusable, "another shape"),
    (229, "ProgrammingError", "The SELECT permission was denied on the object 't'.", BackendUnusable, "SELECT"),
    (262, "ProgrammingError", "CREATE TABLE permission denied in database 'd'.", BackendUnusable, "CREATE TABLE"),
    (1105, "OperationalError", "Could not allocate space for object 't'", StorageFull, "no space left"),
    (9002, "OperationalError", "The transaction log for database 'd' is full", StorageFull, "no space left"),
    (1205, "OperationalError", "Transaction (Process ID 52) was deadlocked on lock", BackendUnavailable, "gave this"),
    (1222, "OperationalError", "Lock request time out period exceeded.", BackendUnavailable, "lock in time"),
    (2627, "IntegrityError", "Violation of PRIMARY KEY constraint 'PK'.", InvalidMessage, "another id"),
    (2628, "DataError", "String or binary data would be truncated in table", InvalidMessage, "count twice"),
    (2714, "ProgrammingError", "There is already an object named 't'", BackendUnusable, "something else"),
    (
        4060,
        "OperationalError",
        'Cannot open database "d" requested by the login. The login failed.',
        BackendUnavailable,
        "On Azure this may pass; else create it",
    ),
    (18456, "OperationalError", "Login failed for user 'sa'.", BackendUnusable, "user and the password"),
    (
        3906,
        "ProgrammingError",
        "Failed to update 'd' because the database is read-only.",
        BackendUnavailable,
        "primary",
    ),
    *(
        (number, "ProgrammingError", text, BackendUnavailable, "cannot do that now")
        for number, text in {
            233: "A connection was established, but then an error occurred during the login process.",
            601: "Could not continue scan with NOLOCK due to data movement.",
            10928: "Resource ID : 1. The request limit for the database is 90 and has been reached.",
            10929: "Resource ID : 1. The maximum limit for the database is 90; the server is too busy.",
            40197: "The service has encountered an error processing your request. Please try again.",
            40501: "The service is currently busy. Retry the request after 10 seconds.",
            40613: "Database 'd' on server 's' is not currently available.",
            49918: "Cannot process request. Not enough resources to process request.",
            49919: "Cannot process create or update request. Too many operations in progress.",
            49920: "Cannot process request. The service is busy processing multiple requests for subscription.",
        }.items()
    ),
    (
        334,
        "ProgrammingError",
        "The target table 't' of the DML statement cannot have any enabled triggers if it contains OUTPUT.",
        BackendUnusable,
        "Remove it",
    ),
    (
        2760,
        "ProgrammingError",
        'The specified schema name "x" either does not exist',
        BackendUnusable,
        "no such schema",
    ),
]


@pytest.mark.parametrize(
    ("number", "kind", "text", "translated", "remedy"), ERRORS, ids=[str(row[0]) for row in ERRORS]
)
def test_errors_have_a_remedy(number: int, kind: str, text: str, translated: type[Exception], remedy: str) -> None:
    for error in (of_microsoft(kind, "state", text), of_pymssql(number, text)):
        found = server().errors.translated(error)
        assert type(found) is translated
        assert text.rstrip(".") in str(found)
        assert remedy in str(found)
        assert "DB-Lib" not in str(found)
        assert "s3cret" not in str(found)


def test_a_lost_connection_is_worth_another_try() -> None:
    error = of_microsoft("OperationalError", "Communication link failure", "TCP Provider: Error code 0x68")
    assert type(server().errors.translated(error)) is BackendUnavailable
    assert server().errors.is_disconnect(error)


def test_a_certificate_that_is_not_trusted() -> None:
    error = of_microsoft("OperationalError", "Client unable to establish connection", "SSL: certificate verify failed")
    found = server().errors.translated(error)
    assert type(found) is BackendUnusable
    assert "TrustServerCertificate=yes" in str(found)


def test_pymssql_is_out_of_step_when_a_transaction_has_ended() -> None:
    deadlock = of_pymssql(1205, "deadlocked")
    assert SqlServer(make_url("mssql+pymssql://sa@host/db")).errors.is_disconnect(deadlock)
    assert server().errors.has_rolled_back(
        of_microsoft("OperationalError", "Serialization failure", "was deadlocked on lock")
    )


def test_an_unknown_option() -> None:
    from mssql_python.exceptions import ConnectionStringParseError

    error = ConnectionStringParseError(["Unknown keyword 'wrong' is not recognized"])
    assert isinstance(error, server().errors.kinds)
    assert isinstance(server().errors.translated(error), ConfigurationError)


def test_a_driver_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Failed to load the driver.")

    one = server()
    monkeypatch.setattr(one.connections.engine, "connect", fail)
    with pytest.raises(ConfigurationError, match="apt-get install libltdl7 libodbc2"):
        one.connections.check()


def test_a_mistake_in_the_program_is_not_hidden() -> None:
    error = of_microsoft("ProgrammingError", "Syntax error or access violation", "Incorrect syntax near 'x'.")
    assert server().errors.translated(error) is error


def test_two_databases_have_no_common_transaction() -> None:
    transport = SqlTransport("mssql://sa:s3cret@host/queues")
    here, there = (SqlDelayedMessageStore(f"mssql://sa:s3cret@host/{name}") for name in ("queues", "messages"))
    assert guarantee(transport, here, TransactionMode.TRANSACTION_SCOPE) is Guarantee.EXACTLY_ONCE
    with pytest.raises(UnsupportedTransactionMode, match="Keep both in the same database") as caught:
        guarantee(transport, there, TransactionMode.TRANSACTION_SCOPE)
    assert "s3cret" not in str(caught.value)


def test_a_store_moves_inside_the_server_where_the_queues_are_in_its_schema() -> None:
    store = SqlDelayedMessageStore("mssql://sa@host/db")
    assert store.forwards_to(SqlTransport("mssql://sa@host/db", schema="dbo"))
    assert not store.forwards_to(SqlTransport("mssql://sa@host/db", schema="other"))
