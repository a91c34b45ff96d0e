"""`delayline migrate`: its output and exit codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from tests.spark.legacy import Legacy, Timeout, some

from delayline.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession
    from tests.spark.stores import StoreAt

ENDPOINT = "sales"


class Shell:
    """A command line with source and target in its variables, where no list of processes shows them."""

    def __init__(self, source: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DELAYLINE_MIGRATE_SOURCE", source)
        monkeypatch.setenv("DELAYLINE_MIGRATE_TARGET", target)

    def run(self, command: str, *arguments: str, code: int = 0) -> str:
        words = ["migrate", command, "--from", "nservicebus-sql", *arguments]
        result = CliRunner().invoke(main, words, prog_name="delayline")
        assert result.exit_code == code, result.output
        return result.output

    def document(self, command: str, *arguments: str, code: int = 0) -> Any:  # noqa: ANN401 - JSON
        import json

        return json.loads(self.run(command, *arguments, "--json", code=code))


@pytest.fixture
def legacy(mariadb_url: str) -> Legacy:
    return Legacy(mariadb_url, ENDPOINT)


@pytest.fixture
def shell(spark: SparkSession, legacy: Legacy, store: StoreAt, monkeypatch: pytest.MonkeyPatch) -> Shell:
    del spark
    return Shell(legacy.url, store.url, monkeypatch)


@pytest.mark.slow
def test_the_commands_report_the_same_run(shell: Shell, legacy: Legacy, tmp_path: Path) -> None:
    legacy.add(ENDPOINT, *some(5), Timeout(9, destination=None))
    assert "no migration has run" in shell.run("history")
    looked = shell.run("preview", "--all-endpoints", code=1)
    assert "sales: 6 messages, due 2031-05-06 07:08:09" in looked
    assert "destination must be a text" in looked
    [shown] = shell.document("preview", "--endpoint", ENDPOINT, code=1)["endpoints"]
    assert (shown["rows"], shown["destinations"]["billing"]) == (6, 5)

    page = tmp_path / "moved.html"
    assert "5 moved to PostgreSQL" in shell.run("run", "--endpoint", ENDPOINT, "--report", str(page), code=1)
    assert "destination must be a text" in page.read_text()
    status = shell.document("status")
    assert (status["state"], status["rows"], status["rejected"], status["to_go"]) == ("completed", 6, 1, 0)
    assert Timeout(9).id in shell.run("status")
    verified = shell.document("verify")
    assert (verified["ok"], verified["moved"], verified["waiting"]) == (True, 5, 5)
    assert "✓ nothing is missing" in shell.run("verify")
    assert "completed" in shell.run("history")
    assert shell.document("history")["runs"][0]["parameters"]["endpoints"] == ENDPOINT


def test_a_dry_run_and_a_whole_run_end_with_their_codes(shell: Shell, legacy: Legacy) -> None:
    legacy.add(ENDPOINT, *some(3))
    assert "3 would move, 0 would be rejected" in shell.run("run", "--all-endpoints", "--target", "noop")
    assert "no migration has run in" in shell.run("status", code=2)
    assert "no unfinished migration" in shell.run("resume", "--all-endpoints", code=2)
    assert "no unfinished migration" in shell.run("abort", "--all-endpoints", code=2)
    assert "3 moved" in shell.run("run", "--all-endpoints")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name the endpoints"),
        (["--endpoint", "a", "--all-endpoints"], "name the endpoints"),
        (["--all-endpoints", "--cutoff", "2026-05-01 00:00:00"], "zone"),
        (["--all-endpoints", "--target", "ftp://me:hunter2@host/x"], "nothing moves to 'ftp://me:***@host/x'"),
        (["--endpoint", "nobody"], "no endpoint 'nobody' has timeouts"),
    ],
)
def test_wrong_usage_is_reported_and_ends_with_2(shell: Shell, arguments: list[str], said: str) -> None:
    output = shell.run("run", *arguments, code=2)
    assert said in output
    assert "hunter2" not in output


@pytest.mark.slow
def test_a_row_without_a_due_time_is_reported_by_every_command(shell: Shell, legacy: Legacy) -> None:
    # Given a row that no run can take, beside those that it can
    legacy.add(ENDPOINT, *some(3), Timeout(9, time=None))
    why = legacy.source.outside
    assert "3 would move, 0 would be rejected, 1 skipped" in shell.run(
        "run", "--all-endpoints", "--target", "noop", code=1
    )
    # When the others have moved
    ran = shell.document("run", "--endpoint", ENDPOINT, code=1)
    # Then run, status and verify say that one stays, why, and which
    assert (ran["moved"], ran["rejected"], ran["skipped"], ran["reasons"]) == (3, 0, 1, {why: 1})
    assert ran["examples"] == [{"id": Timeout(9).id, "reason": why}]
    status = shell.document("status")
    assert (status["moved"], status["rejected"], status["skipped"], status["reasons"]) == (3, 0, 1, {why: 1})
    assert Timeout(9).id in shell.run("status")
    assert shell.document("verify")["skipped"] == 1
    assert "rows without a readable due time stay in the source" in shell.run("verify")
    # And also where there is nothing else
    again = shell.run("run", "--endpoint", ENDPOINT, code=1)
    assert "0 rejected, 1 skipped" in again
    assert Timeout(9).id in again
    assert legacy.ids(ENDPOINT) == [Timeout(9).id]


def test_a_run_that_moves_nothing_is_reported_and_leaves_no_table(shell: Shell, legacy: Legacy) -> None:
    # Given rows of which none can move
    legacy.add(ENDPOINT, *(Timeout(number, destination=None) for number in range(1, 7)))
    for _ in range(2):
        # When they are moved, once and again
        output = shell.run("run", "--endpoint", ENDPOINT, code=1)
        # Then run and status have the same counts, and name rows
        assert "0 moved" in output
        assert "6 rejected" in output
        assert Timeout(1).id in output
        status = shell.document("status")
        assert (status["moved"], status["rejected"]) == (0, 6)
        verified = shell.document("verify")
        assert (verified["ok"], verified["moved"], verified["rejected"]) == (True, 0, 6)
        # And nothing is left beside the journal
        assert [name for name in legacy.everything() if name.startswith("delayline_holding")] == []
        assert len(legacy.ids(ENDPOINT)) == 6
