"""Run a driver in a process of its own that shares the JVM of the tests' session, and kill it.

For steps of the driver's Python code while no task runs. To kill the JVM too, start a separate driver.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any, Final

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE: Final = 120
#: Imported once, for all drivers: nothing that starts threads.
PRELOADED: Final = [
    "pyspark.sql",
    "sqlalchemy.dialects.postgresql",
    "delayline.composition",
    "delayline.bulk.journal_export",
]


def run_until_killed(spark: SparkSession, work: Callable[..., object], *arguments: object) -> None:
    """Run a module-level function with a session in another process, and wait until it has killed itself."""
    gateway: Any = spark.sparkContext._gateway
    parameters = gateway.java_parameters
    place = (parameters.port, parameters.auth_token)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    process = processes.Process(target=_drive, args=(place, work, arguments))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL, process.exitcode


def kill_at(where: type, name: str, *, before: bool) -> None:
    """Kill this process with SIGKILL before or after its next call of the method."""
    work = getattr(where, name)

    def run(*arguments: Any, **settings: Any) -> None:  # noqa: ANN401 - as it takes
        if not before:
            work(*arguments, **settings)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(where, name, run)


def _drive(place: tuple[int, str], work: Callable[..., object], arguments: tuple[object, ...]) -> None:
    os.environ["PYSPARK_GATEWAY_PORT"], os.environ["PYSPARK_GATEWAY_SECRET"] = str(place[0]), place[1]
    gateway = launch_gateway()  # type: ignore[no-untyped-call]
    jvm: Any = gateway.jvm
    context = jvm.org.apache.spark.SparkContext.getOrCreate()
    java = jvm.org.apache.spark.api.java.JavaSparkContext(context)
    conf = SparkConf(_jvm=jvm, _jconf=context.getConf())
    # A session of its own: the data source that it registers reports to this process, and ends with it.
    session = SparkSession(SparkContext(gateway=gateway, jsc=java, conf=conf)).newSession()
    work(session, *arguments)
