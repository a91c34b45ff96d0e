"""A driver in a process of its own that shares the JVM of the tests' session: it can be killed in a second or two.

For steps that the driver's Python takes while no task runs; where the JVM has to die too, a driver needs its own.
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
    "delayline.config",
    "delayline.bulk.journal_export",
]


def must_die(spark: SparkSession, work: Callable[..., object], *arguments: object) -> None:
    """Run a function of a module in a driver, given a session, and wait until it has died of its own hand."""
    gateway: Any = spark.sparkContext._gateway
    parameters = gateway.java_parameters
    place = (parameters.port, parameters.auth_token)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    process = processes.Process(target=_drive, args=(place, work, arguments))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL, process.exitcode


def killed(where: type, name: str, *, before: bool) -> None:
    """Have this process die, as with kill -9, when it comes to a method, or when it comes from it."""
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
    work(SparkSession(SparkContext(gateway=gateway, jsc=java, conf=conf)), *arguments)
