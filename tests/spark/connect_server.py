"""A server of Spark Connect on loopback, in whose Python delayline is not installed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.eventually import eventually
from tests.servers.ports import free_port
from tests.spark.cluster import BIN, HIDING, PATIENCE, ROOT, built_wheel, python_without_delayline
from tests.spark.spark_settings import JAVA

from delayline.spark import find_java

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SERVER: Final = "org.apache.spark.sql.connect.service.SparkConnectServer"
#: What delayline needs, and its tasks and batches do not.
NOT_NEEDED: Final = ("aiohttp", "azure", "click", "httpx", "pymysql", "rich")
#: Of this process, and not for one that has to find its Python and its modules by itself.
OWN: Final = ("PYTHONPATH", "SPARK_CONF_DIR", "PYSPARK_PYTHON")


def client_variables(folder: Path) -> Mapping[str, str]:
    """Return the variables of a client, beside such a server, that imports delayline from a wheel."""
    places = (folder / HIDING, built_wheel(folder), ROOT)
    return {"PYTHONPATH": os.pathsep.join(map(str, places)), "PYSPARK_PYTHON": ""}


@contextlib.contextmanager
def connect_server(folder: Path) -> Iterator[str]:
    """Run the server; yield its URL. What it says is in the folder."""
    port, log = free_port(), folder / "connect.log"
    environment = {
        **{name: value for name, value in os.environ.items() if name not in OWN},
        "JAVA_HOME": str(find_java()),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": str(python_without_delayline(folder, *NOT_NEEDED)),
        "SPARK_SUBMIT_OPTS": JAVA,
    }
    settings = {
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.memory": "1g",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        "spark.python.authenticate.socketTimeout": "90s",  # on a busy machine
    }
    command = [str(BIN / "spark-submit"), "--master", "local[2]", "--class", SERVER]
    command += [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=output, stderr=output, start_new_session=True
        )
    try:
        eventually(
            lambda: process.poll() is not None or "Spark Connect server started" in log.read_text(errors="replace"),
            "the server of Spark Connect has started",
            PATIENCE,
        )
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        yield f"sc://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
