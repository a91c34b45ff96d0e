"""A standalone Spark cluster on loopback: a master, and workers with one core each on separate addresses."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyspark
from tests import uv
from tests.servers.ports import free_port
from tests.spark.spark_settings import JAVA

from delayline.spark import find_java

if TYPE_CHECKING:
    from collections.abc import Sequence

BIN: Final = Path(pyspark.__file__).parent / "bin"
ROOT: Final = Path(__file__).parents[2]
PATIENCE: Final = 200.0
WORKERS: Final = 2
#: Hides delayline from a Python that has it installed: the cluster gets it from the job, as a cluster of users does.
HIDE: Final = """import sys
sys.path[:] = [place for place in sys.path if place.rstrip("/") != {source!r}]
sys.modules.update(dict.fromkeys({others!r}))
"""
HIDING: Final = "hiding"
PYTHON: Final = """#!/bin/sh
PYTHONPATH="{folder}:$PYTHONPATH" exec {python} "$@"
"""
#: Two hundred partitions, as Spark cuts the data of a cluster, would be for more than four thousand rows.
SETTINGS: Final = ["spark.driver.host=127.0.0.1", "spark.sql.shuffle.partitions=2"]


def python_without_delayline(folder: Path, *others: str) -> Path:
    """Return a Python with all that delayline needs, and not delayline, nor the other packages that are named."""
    python, hiding = folder / "python", folder / HIDING
    hiding.mkdir()
    (hiding / "sitecustomize.py").write_text(HIDE.format(source=str(ROOT / "src"), others=others))
    python.write_text(PYTHON.format(folder=hiding, python=sys.executable))
    python.chmod(0o755)
    lacking = subprocess.run([python, "-c", "import pyspark, delayline"], capture_output=True, text=True, check=False)
    assert "No module named 'delayline'" in lacking.stderr, lacking.stderr
    return python


def built_wheel(folder: Path) -> Path:
    """Return the wheel of this checkout."""
    command = [*uv.command(), "build", "--quiet", "--wheel", "--out-dir", str(folder / "dist")]
    subprocess.run([*command, str(ROOT)], check=True, timeout=120)
    [wheel] = (folder / "dist").glob("*.whl")
    return wheel


class Cluster:
    """Runs while entered."""

    def __init__(self, folder: Path, workers: int = WORKERS) -> None:
        self.folder = folder
        self.workers = workers
        self.port = free_port()
        self.url = f"spark://127.0.0.1:{self.port}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._environment = {
            **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_CONF_DIR")},
            "JAVA_HOME": str(find_java()),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": str(python_without_delayline(folder)),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": JAVA,
        }
        self.wheel = built_wheel(folder)
        self.archive = Path(shutil.copy(self.wheel, self.folder / "delayline.zip"))

    def __enter__(self) -> Cluster:
        ports = ["--webui-port", "0", "--host"]
        master = ["127.0.0.1", "--port", str(self.port)]
        self._start("master", "org.apache.spark.deploy.master.Master", *ports, *master)
        self._wait("master", "I have been elected leader")
        for number in range(self.workers):
            host = f"127.0.0.{number + 1}"  # a repeated task runs on another host
            work = [host, "--work-dir", str(self.work(number)), "--cores", "1", "--memory", "1g"]
            self._start(f"worker-{number}", "org.apache.spark.deploy.worker.Worker", *ports, *work, self.url)
        for number in range(self.workers):
            self._wait(f"worker-{number}", "Successfully registered with master")
        return self

    def __exit__(self, *exception: object) -> None:
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def work(self, number: int) -> Path:
        """Return where a worker keeps what its executors got and said."""
        return self.folder / f"work-{number}"

    @property
    def worker_pids(self) -> list[int]:
        """The processes of the workers, which start the executors."""
        return [process.pid for process in self._processes[1:]]

    def submit(
        self, program: str, *arguments: str, conf: Sequence[str] = (), shipped: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program through spark-submit, which ships delayline as a zip, or the file that is given."""
        job = self.folder / "job.py"
        job.write_text(program)
        settings = ["spark.executor.memory=512m", f"spark.executor.extraJavaOptions={JAVA}", *SETTINGS, *conf]
        command = [str(BIN / "spark-submit"), "--master", self.url, "--py-files", str(shipped or self.archive)]
        command += [word for one in settings for word in ("--conf", one)]
        return subprocess.run(
            [*command, str(job), *arguments],
            env=self._environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def _start(self, name: str, kind: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [str(BIN / "spark-class"), kind, *arguments],
                    env=self._environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _wait(self, name: str, text: str) -> None:
        log, deadline = self.folder / f"{name}.log", time.monotonic() + PATIENCE
        while text not in log.read_text(errors="replace"):
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
            time.sleep(0.2)
