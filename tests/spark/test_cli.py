"""`delayline spark`: the jobs as commands; what went wrong is one line and an exit code."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from click.testing import CliRunner
from sqlalchemy import make_url
from tests.conftest import not_installed
from tests.eventually import PATIENCE
from tests.spark.conftest import JDBC_DRIVER
from tests.spark.stores import ENDPOINT, PAST, StoreAt, many

from delayline.cli import main
from delayline.errors import BackendUnusable
from delayline.settings import Settings
from delayline.spark.dispatch import dispatcher_status, stop_dispatcher

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from click.testing import Result
    from pyspark.sql import SparkSession


@pytest.fixture
def run(spark: SparkSession, store: StoreAt) -> Callable[..., Result]:
    """Return what runs a command on the store, in the session that there is."""
    del spark
    place = ["--endpoint", ENDPOINT, "--url", store.url]

    def command(*words: str, json: bool = True) -> Result:
        return CliRunner().invoke(main, [*words, *place, *(["--json"] if json else [])])

    assert command("setup", "--queue", "billing", "--journal", "true").exit_code == 0
    return command


def document(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_file_is_scheduled_and_bad_rows_are_kept_apart(
    run: Callable[..., Result], store: StoreAt, tmp_path: Path
) -> None:
    file = tmp_path / "reminders.csv"
    file.write_text("id,queue,due\na,billing,2090-01-01T00:00:00Z\nb,billing,soon\n")
    result = run("spark", "schedule", str(file), "--column", "destination=queue", "--rejected", str(tmp_path / "bad"))
    assert result.exit_code == 1
    done = document(result)
    assert (done["stored"], done["rejected"], done["rejected_rows"][0]["line"]) == (1, 1, 3)
    assert store.ids() == ["a"]
    assert '"line":3' in "".join(part.read_text() for part in (tmp_path / "bad").glob("part-*"))


@pytest.mark.slow
def test_far_messages_are_stored_in_files_promoted_and_compacted(
    run: Callable[..., Result], store: StoreAt, tmp_path: Path
) -> None:
    place = ["--cold-tier", str(tmp_path / "cold")]
    file = tmp_path / "reminders.txt"
    # Given messages of which two are further away than the horizon
    for name, due in (("a", "2090-01-01T00:10:00Z"), ("b", "2090-01-01T00:20:00Z"), ("c", "2020-01-01T00:00:00Z")):
        file.write_text(json.dumps({"id": name, "destination": "billing", "due": due}) + "\n")
        result = run("spark", "schedule", str(file), "--format", "jsonl", "--hot-horizon", "2d", *place)
        assert document(result)["cold"] == (0 if name == "c" else 1), result.output
    assert store.ids() == ["c"]
    # When their files are merged, and near messages are promoted
    assert document(run("spark", "compact", *place)) == {"before": 2, "after": 1, "deleted": 0}
    assert document(run("spark", "promote", *place))["stored"] == 0

    def stop_when_promoted() -> None:
        deadline = time.monotonic() + PATIENCE
        while len(store.ids()) < 3 and time.monotonic() < deadline:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    # Then it is in the store once, and the command ends when it is asked to
    thread = threading.Thread(target=stop_when_promoted)
    thread.start()
    result = run("spark", "promote", "--every", "200ms", "--horizon", "36500d", *place, json=False)
    thread.join()
    assert result.exit_code == 0 and "2 promoted from 1 file, 0 there already" in result.output, result.output
    assert store.ids() == ["a", "b", "c"]


@pytest.mark.slow
def test_a_table_of_another_database_is_scheduled(run: Callable[..., Result], store: StoreAt) -> None:
    if not JDBC_DRIVER.exists():
        not_installed("PostgreSQL's JDBC driver", "apt-get install libpostgresql-jdbc-java")
    # Given a table with an instant, one with a time of no place, and headers as JSON
    at = make_url(store.url)
    with psycopg.connect(store.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (number uuid, at timestamptz, local timestamp, more jsonb, body bytea)")
        connection.execute(
            "INSERT INTO orders VALUES (gen_random_uuid(), '2090-01-01 10:00+02', '2090-01-01', %s, %s),"
            "(gen_random_uuid(), NULL, NULL, NULL, NULL)",
            ('{"a": "b"}', b"\x00\xff"),
        )
    jdbc = f"jdbc:postgresql://{at.host}:{at.port}/{at.database}"
    words = ["orders", "--format", "jdbc", "--option", f"url={jdbc}", "--option", f"user={at.username}"]
    words += ["--column", "id=number", "--column", "to=billing", "--column", "headers=more"]
    # When it is scheduled
    result = run("spark", "schedule", *words, "--column", "due=at")
    # Then the instant is unchanged, and the row without one is rejected
    assert result.exit_code == 1, result.output
    done = document(result)
    assert (done["stored"], done["rejected"], done["rejected_rows"][0]["reason"][:14]) == (1, 1, "due is missing")
    [message] = store.messages()
    assert message.due == datetime(2090, 1, 1, 8, tzinfo=UTC)
    assert (message.message.headers["a"], message.message.body) == ("b", b"\x00\xff")
    # And what names no instant, or has no driver, is refused in a line
    for more, said in (
        (["--column", "due=local"], "which is not an instant"),
        (["--column", "due=at", "--option", "url=jdbc:nonsense://x"], "Spark has no JDBC driver"),
        (["--column", "due=at", "--option", "url=jdbc:postgresql://127.0.0.1:1/x"], "127.0.0.1:1/x cannot be read: "),
        (["--column", "due=at", "--option", "passwordEnv=NOT_SET"], "passwordEnv='NOT_SET' is not set"),
    ):
        result = run("spark", "schedule", *words, *more)
        assert result.exit_code == 2 and said in result.stderr, result.output


@pytest.mark.slow
def test_the_journal_is_exported_and_audited(
    run: Callable[..., Result], spark: SparkSession, store: StoreAt, tmp_path: Path
) -> None:
    # Given messages of which one was due long ago
    file, page = tmp_path / "reminders.parquet", tmp_path / "report.html"
    many(spark, 100).write.parquet(str(file))
    assert run("spark", "schedule", str(file)).exit_code == 0
    store.put("late", due=PAST)
    # When the journal is exported and audited
    assert document(run("spark", "export", str(tmp_path / "journal")))["entries"] == 101
    result = run("spark", "audit", str(tmp_path / "journal"), "--report", str(page))
    # Then nothing is lost: it waits, for longer than it should
    assert result.exit_code == 1, result.output
    totals = document(result)
    assert (totals["scheduled"], totals["waiting"], totals["overdue"], totals["lost"]) == (101, 100, 1, 0)
    allowed = run("spark", "audit", str(tmp_path / "journal"), "--maximum-overdue", "1", json=False)
    assert allowed.exit_code == 0, allowed.output
    assert page.read_text().startswith("<!doctype html>")
    # And when the store is emptied from outside, the audit reports it
    remove_unseen(store)
    audited = run("spark", "audit", str(tmp_path / "journal"), json=False)
    assert audited.exit_code == 1 and "1 lost" in audited.output and "billing" in audited.output
    # And so it does where there is nothing to audit
    nothing = run("spark", "audit", str(tmp_path / "elsewhere"), json=False)
    assert nothing.exit_code == 1 and "the journal has no entries" in nothing.output


def remove_unseen(store: StoreAt) -> None:
    with psycopg.connect(store.url, autocommit=True) as connection:
        connection.execute('TRUNCATE "sales.timeouts"')


def test_a_dispatcher_runs_until_stopped(run: Callable[..., Result], store: StoreAt) -> None:
    # Given messages that are due
    store.put(*(f"m{number}" for number in range(50)), due=PAST)
    settings = Settings(endpoint=ENDPOINT, url=store.url)

    def stop_when_empty() -> None:
        deadline = time.monotonic() + PATIENCE
        while store.ids() and time.monotonic() < deadline:
            time.sleep(0.2)
        stop_dispatcher(settings)

    # When the command runs, and another process stops it
    thread = threading.Thread(target=stop_when_empty)
    thread.start()
    result = run("spark", "dispatch", "--shards", "1")
    thread.join()
    # Then all have left, and it says how many
    assert result.exit_code == 0, result.output
    assert document(result)["shards"][0]["dispatched"] == 50
    assert store.ids() == [] and dispatcher_status(settings)[0].dispatched == 50
    assert document(run("spark", "dispatch", "--status"))["shards"][0]["shard"] == 0


def test_stop_without_any_dispatcher_is_an_error(run: Callable[..., Result], store: StoreAt) -> None:
    result = run("spark", "dispatch", "--stop")
    assert result.exit_code == 1 and "no dispatcher has ever run" in result.stderr
    with pytest.raises(BackendUnusable, match="has ever run"):
        stop_dispatcher(Settings(endpoint=ENDPOINT, url=store.url))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "there", "--conf", "spark.x"], "must be NAME=VALUE"),
        (["schedule", "x.csv", "--column", "when=due"], "not a column of a message"),
        (["schedule", "/nowhere/x.csv"], "/nowhere/x.csv"),
        (["promote"], "the cold tier is missing: --cold-tier"),
        (["promote", "--cold-tier", "cold", "--every", "13h"], "longer than half of"),
    ],
)
def test_wrong_usage_is_one_line(run: Callable[..., Result], words: list[str], said: str) -> None:
    result = run("spark", *words)
    assert result.exit_code == 2 and said in result.stderr, result.stderr
    assert "Traceback" not in result.stderr and "\tat " not in result.stderr


def test_jobs_are_listed_with_what_they_have_stored(
    spark: SparkSession, run: Callable[..., Result], tmp_path: Path
) -> None:
    assert run("spark", "jobs", json=False).stdout == "no jobs\n"
    file = str(tmp_path / "rows.parquet")
    many(spark, 20).write.parquet(file)
    for version, more in (("1", []), ("2", ["--atomic", "job", "--job-folder", str(tmp_path / "jobs")])):
        assert run("spark", "schedule", file, "--run", "nightly", "--version", version, *more).exit_code == 0
    counts = [
        (job["job"], job["version"], job["state"], job["stored"], job["duplicates"])
        for job in document(run("spark", "jobs"))["jobs"]
    ]
    assert counts == [("nightly", 2, "done", 0, 20), ("nightly", 1, "done", 20, 0)]
    assert run("spark", "jobs", json=False).stdout.splitlines()[1].split()[:5] == ["nightly", "2", "done", "0", "20"]
