"""Bulk input is checked as `Endpoint.send` checks one message: columns, rows and options, without Spark."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark.sql import types

from delayline import ConfigurationError, InvalidMessage
from delayline.errors import DelaylineError
from delayline.migration import target_at
from delayline.outgoing import check_headers, check_name
from delayline.spark import JobTarget
from delayline.spark.headers import invalid_reasons, raise_for_invalid, valid_rows
from delayline.spark.options import SOURCE_COLUMNS, StoreOptions, check_columns, instant_option, whole_option

if TYPE_CHECKING:
    from pathlib import Path

GOOD: dict[str, Any] = {
    "id": "a",
    "destination": "billing",
    "due": datetime(2030, 1, 1, tzinfo=UTC),
    "headers": '{"x":"y"}',
    "body": b"hello",
}
KINDS = {
    "id": pa.string(),
    "destination": pa.string(),
    "due": pa.timestamp("us", "UTC"),
    "headers": pa.string(),
    "body": pa.binary(),
}


def batch(*rows: dict[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([GOOD | row for row in rows], schema=pa.schema(KINDS))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"id": ""}, "id must be a text of 1 to 250"),
        ({"id": None}, "id must be a text of 1 to 250"),
        ({"id": "x" * 251}, "id has more than 250 characters"),
        ({"id": "a\x00b"}, "id has control characters"),
        ({"destination": None}, "destination must be a text of 1 to 200"),
        ({"destination": "x" * 201}, "destination has more than 200 characters"),
        ({"destination": " billing"}, "destination has control characters, or spaces around it"),
        ({"destination": "bil\u00a0ling"}, "destination has control characters"),
        ({"headers": '{"a":1}'}, "header 'a': 1 must be str to str"),
        ({"headers": '{"":"1"}'}, "empty name"),
        ({"headers": "[]"}, "headers must be a mapping"),
        ({"headers": "{"}, "headers are not JSON"),
        ({"headers": "[" * 100_000}, "headers are not JSON"),
        ({"headers": '{"NServiceBus.TimeToBeReceived":"soon"}'}, "not a time as in"),
        ({"due": None}, "due is missing"),
        ({"body": bytes(200_001)}, "headers and body have more than 200,000 bytes"),
    ],
)
def test_a_faulty_row_has_a_reason(row: dict[str, Any], said: str) -> None:
    # Given a row with a fault between two without
    rows = batch({}, row, {"id": "b", "headers": None, "body": None})
    # When they are looked at
    reasons = invalid_reasons(rows, largest=200_000)
    # Then only that one has a reason, which names it
    assert reasons.is_valid().to_pylist() == [False, True, False]
    assert said in reasons[1].as_py()
    assert valid_rows(rows, reasons).column("id").to_pylist() == ["a", "b"]
    with pytest.raises(InvalidMessage, match="message "):
        raise_for_invalid(rows, reasons)


def test_due_times_beyond_the_range_of_datetime_are_refused() -> None:
    edges = [-62_135_596_800_000_000, 253_402_300_799_999_999]
    due = [edges[0] - 1, edges[0], edges[1], edges[1] + 1]
    rows = batch(*({"id": f"{number}"} for number in range(4)))
    rows = rows.set_column(2, "due", pa.array(due, pa.timestamp("us", "UTC")))
    assert invalid_reasons(rows, largest=1000).is_valid().to_pylist() == [True, False, False, True]


@pytest.mark.parametrize(
    "name", ["a", "a b", "naïve 日本 🚀", "a'\"\\%", "\u200b", "a\u2028b", "\ud7ff", "\u00ad", "a\tb", "é" * 250]
)
def test_names_are_taken_or_refused_as_one_message_would_be(name: str) -> None:
    try:
        check_name("id", name, 250)
        taken = True
    except InvalidMessage:
        taken = False
    assert invalid_reasons(batch({"id": name}), largest=1000)[0].is_valid is not taken


def test_no_rows_have_no_faults() -> None:
    empty = batch().slice(0, 0)
    assert len(invalid_reasons(empty, largest=1)) == 0
    raise_for_invalid(empty, invalid_reasons(empty, largest=1))


@pytest.mark.parametrize(
    ("column", "kind", "said"),
    [
        (
            "due",
            types.TimestampNTZType(),
            r"'due' is timestamp_ntz, not timestamp: use CAST\(concat\(due, ' Europe/Berlin'\) AS TIMESTAMP\)",
        ),
        ("due", types.DateType(), "column 'due' is date, not timestamp"),
        ("due", types.StringType(), "column 'due' is string, not timestamp"),
        ("due", None, "no column 'due', only id, destination"),
        ("id", types.IntegerType(), r"use CAST\(id AS STRING\)"),
        ("x", types.IntegerType(), "column 'x' is not a column of a message: drop it"),
        ("headers", types.MapType(types.StringType(), types.StringType()), r"use to_json\(headers\)"),
        ("body", types.StringType(), r"use CAST\(body AS BINARY\)"),
    ],
)
def test_columns_of_other_names_and_types_are_refused(column: str, kind: types.DataType | None, said: str) -> None:
    schema = types.StructType([one for one in SOURCE_COLUMNS if one.name != column])
    with pytest.raises(ConfigurationError, match=said):
        check_columns(schema if kind is None else schema.add(column, kind))
    check_columns(SOURCE_COLUMNS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"endpoint": "sales"}, "needs the store"),
        ({"url": "sqlite:///x.db"}, "needs the endpoint"),
    ],
)
def test_options_that_are_missing_are_named(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        StoreOptions.of(options)


def test_a_password_comes_from_a_file_or_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("p@ss/word\n")
    monkeypatch.setenv("STORE_PASSWORD", "other")
    options = {"url": "postgresql://me@host/db", "table": "t"}
    by_file = StoreOptions.of(options | {"passwordFile": str(tmp_path / "secret")})
    by_variable = StoreOptions.of(options | {"passwordEnv": "STORE_PASSWORD"})
    assert by_file.address.startswith("postgresql://me:p%40ss%2Fword@host/db?")
    assert by_variable.address.startswith("postgresql://me:other@host/db?")


def test_a_password_in_a_url_is_in_no_repr() -> None:
    target = JobTarget("postgresql://me:s3cret@host/db", endpoint="sales")
    assert "s3cret" not in repr(target) and "s3cret" not in repr(StoreOptions.of(target.options))


def test_a_target_may_be_written_as_hosting_services_write_it() -> None:
    target = JobTarget("postgres://me@host/db", endpoint="sales")
    assert StoreOptions.of(target.options).url == "postgres://me@host/db"
    store = target_at("postgres://me@host/db")
    assert store is not None
    assert str(store) == str(target_at("postgresql://me@host/db"))
    assert target_at("Postgres+psycopg://me@host/db") is not None


@pytest.mark.parametrize("options", [{"passwordFile": "/no/such/file"}, {"passwordEnv": "NO_SUCH_VARIABLE"}])
def test_a_password_that_is_not_on_this_machine_is_missed(options: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="on this machine"):
        _ = StoreOptions.of({"url": "postgresql://me@host/db", "table": "t", **options}).address


@pytest.mark.parametrize("given", ["0", "-1", "1.5", "many", "²"])
def test_numbers_are_whole(given: str) -> None:
    with pytest.raises(ConfigurationError, match=r"numPartitions=.* must be a whole number"):
        whole_option({"numPartitions": given}, "numPartitions", 1)


@pytest.mark.parametrize("given", ["tomorrow", "2030-01-01T00:00:00", ""])
def test_instants_have_an_offset(given: str) -> None:
    with pytest.raises(DelaylineError, match="dueFrom="):
        instant_option({"dueFrom": given}, "dueFrom")
    assert instant_option({}, "dueFrom") is None


def test_a_missing_extra_is_reported_with_its_install_command() -> None:
    text = (
        "import sys; sys.modules['pyspark'] = None\n"
        "import importlib.util as util; util.find_spec = lambda name: None if name == 'pyspark' else 1\n"
        "import delayline\n"
        "try:\n    import delayline.spark\nexcept delayline.errors.MissingExtra as error:\n    print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert "pip install 'delayline[spark]'" in ran.stdout


def test_delayline_itself_never_loads_spark() -> None:
    text = (
        "import sys, delayline; print([name for name in sys.modules if name.split('.')[0] in ('pyspark', 'pyarrow')])"
    )
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout == "[]\n"


def is_taken(headers: str) -> bool:
    """Return whether a send would take headers that read like that."""
    try:
        check_headers(json.loads(headers) if headers else {})
    except (ValueError, RecursionError, InvalidMessage):
        return False
    return True


@given(
    st.text('{}":,\\ \n\f\x00a1é', max_size=20)
    | st.text('":,\\ \na', max_size=9).map('{{"a":"b{}"}}'.format)
    | st.dictionaries(st.text(), st.text() | st.integers()).map(json.dumps)
    | st.dictionaries(st.text("é🚀 a"), st.text("é🚀 a")).map(lambda one: json.dumps(one, ensure_ascii=False, indent=2))
)
@example('{"NServiceBus.TimeToBeReceived":"soon"}')
@example('{"a":"b",}')
@example(" { } ")
def test_headers_are_taken_that_a_send_takes_and_no_others(headers: str) -> None:
    taken, other = invalid_reasons(batch({"headers": headers}, {"headers": None}), largest=10**6).is_null().to_pylist()
    assert (taken, other) == (is_taken(headers), True)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"time_zone": "Berlin"}, "time_zone='Berlin' is unknown: give a name as Europe/Berlin"),
        ({"time_zone": "../etc/passwd"}, "is unknown"),
        ({"time_zone": ""}, "is unknown"),
        ({"epoch": "days"}, "epoch='days' must be one of seconds, milliseconds"),
        ({"epoch": "seconds", "time_zone": "UTC"}, "time_zone and epoch are two kinds of due times"),
        ({"delay": "wait", "time_zone": "UTC"}, "delay and time_zone are two kinds of due times"),
    ],
)
def test_kinds_of_due_times_that_cannot_be_are_refused(columns: dict[str, str], said: str) -> None:
    from delayline.spark.sources import Columns

    with pytest.raises(ConfigurationError, match=said):
        Columns(**columns)
