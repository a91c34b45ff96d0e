"""Settings reach what programs can: a schema of one's own, two databases in one transaction, a timeout manager."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from click.testing import CliRunner

from delayline.cli import main
from delayline.sql.databases import database_at
from delayline.sql.server import run
from delayline.sql.transaction_names import new_name

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Connection

#: Milliseconds since 1970.
OLD = 1_767_312_000_000


def delayline(*words: str, code: int = 0) -> Any:  # noqa: ANN401 - JSON
    result = CliRunner().invoke(main, [*words, "--json"], prog_name="delayline")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def examined() -> dict[str, dict[str, Any]]:
    """Return the findings of `doctor`, which calls servers unhealthy that are less durable, for tests."""
    result = CliRunner().invoke(main, ["doctor", "--json"], prog_name="delayline")
    return {finding["what"]: finding for finding in json.loads(result.stdout)["findings"]}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "delayline.toml"


@pytest.mark.parametrize("timeout_manager", [False, True])
def test_commands_reach_tables_in_a_schema(settings: Path, postgresql_url: str, timeout_manager: bool) -> None:
    # Given a schema, named in the settings
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA my_schema")
    manager = str(timeout_manager).lower()
    url = postgresql_url.replace("postgresql:", "postgres:", 1)
    settings.write_text(f'endpoint = "sales"\nurl = "{url}"\nschema = "my_schema"\ntimeout_manager = {manager}\n')
    planned = delayline("setup", "--dry-run")["statements"]
    assert any("CREATE TABLE my_schema." in one for one in planned)
    # When it is set up
    delayline("setup", "--queue", "billing")
    # Then all tables are there, and every command finds them
    with psycopg.connect(postgresql_url) as connection:
        schemas = connection.execute(
            "SELECT DISTINCT schemaname FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
        ).fetchall()
    assert schemas == [("my_schema",)]
    assert delayline("setup", "--dry-run")["statements"] == []
    delayline("send", "billing", "x", "--delay", "1h", "--id", "a")
    waiting = [one["id"] for one in delayline("pending")["pending"]]
    if timeout_manager:  # it is in the queue of the satellite, which no process runs
        assert waiting == []
        findings = delayline("doctor", code=1)["findings"]
        assert [finding["what"] for finding in findings if finding["state"] != "ok"] == ["queue sales.Timeouts"]
        return
    assert waiting == ["a"]
    assert delayline("doctor")["state"] == "ok"
    assert delayline("cancel", "a")["outcomes"] == {"a": "done"}


@pytest.mark.parametrize("store_in", ["postgresql", "mariadb"])
def test_commands_take_part_in_a_two_phase_commit(
    settings: Path, postgresql_url: str, store_in: str, request: pytest.FixtureRequest
) -> None:
    store_url = request.getfixturevalue(store_in).new_database()
    settings.write_text(
        f'endpoint = "sales"\nstore_url = "{store_url}"\ntransport_url = "{postgresql_url}"\ntwo_phase = true\n'
    )
    delayline("setup", "--queue", "billing")
    delayline("send", "billing", "x", "--delay", "1h", "--id", "a")
    assert [one["id"] for one in delayline("pending")["pending"]] == ["a"]
    found = examined()
    assert found["guarantee"]["text"].endswith("in TRANSACTION_SCOPE")
    assert found["prepared transactions"]["text"] == "none"


@pytest.mark.parametrize("store_in", ["postgresql", "mariadb"])
def test_doctor_counts_prepared_transactions_and_names_old_ones(
    settings: Path, postgresql_url: str, store_in: str, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue(store_in)
    url = server.new_database()
    pair = f'endpoint = "sales"\nstore_url = "{url}"\ntransport_url = "{postgresql_url}"\n'
    settings.write_text(f"{pair}two_phase = true\n")
    delayline("setup")
    connections, mine = database_at(url).dialect.connections, database_at(url).dialect.transactions.two_phase
    assert mine is not None

    def prepare(connection: Connection, name: str) -> None:
        mine.control(name).begin(connection)
        run(connection, "DELETE FROM delayline_queues WHERE name = 'none'")
        mine.prepare(connection, name)

    # Given a transaction that was prepared a moment ago
    young, old = (
        new_name("0123456789abcdef", "0123456789ab"),
        f"delayline-0123456789abcdef-0123456789ab-{OLD:012x}{0:020x}",
    )
    with connections.look() as connection, connections.look() as another:
        prepare(connection, young)
        # When doctor looks, then it is counted, and healthy
        found = examined()["prepared transactions"]
        assert found["state"] == "ok"
        assert re.fullmatch(r"1 of delayline's, the oldest for \S+ s", found["text"])
        # And one that is old is named, whatever the settings say
        prepare(another, old)
        settings.write_text(pair)
        found = examined()["prepared transactions"]
        assert found["state"] == "problem"
        assert re.match(
            f"2 of delayline's, the oldest for [0-9]+ d[^:]*: {old}. An endpoint with the same", found["text"]
        )
        assert mine.roll_back_prepared(connection, young)
        assert mine.roll_back_prepared(another, old)
    assert "prepared transactions" not in examined()
    server.drop_database(url)
