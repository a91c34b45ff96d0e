"""Settings reach what programs can: a schema of one's own, two databases in one transaction, a timeout manager."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from click.testing import CliRunner

from delayline.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers.postgresql import PostgresqlServer


def delayline(*words: str, code: int = 0) -> Any:  # noqa: ANN401 - JSON
    result = CliRunner().invoke(main, [*words, "--json"], prog_name="delayline")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


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
    assert waiting == ([] if timeout_manager else ["a"])  # else it is in the queue of the satellite
    assert delayline("doctor")["healthy"]
    if not timeout_manager:
        assert delayline("cancel", "a")["outcomes"] == {"a": "done"}


def test_commands_take_part_in_a_two_phase_commit(
    settings: Path, postgresql: PostgresqlServer, postgresql_url: str
) -> None:
    store_url = postgresql.new_database()
    settings.write_text(
        f'endpoint = "sales"\nstore_url = "{store_url}"\ntransport_url = "{postgresql_url}"\ntwo_phase = true\n'
    )
    delayline("setup", "--queue", "billing")
    delayline("send", "billing", "x", "--delay", "1h", "--id", "a")
    assert [one["id"] for one in delayline("pending")["pending"]] == ["a"]
    found = {one["what"]: one["text"] for one in delayline("doctor")["findings"]}
    assert found["guarantee"].endswith("in TRANSACTION_SCOPE")
