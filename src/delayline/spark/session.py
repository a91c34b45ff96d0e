"""A Spark session on this machine that needs nothing but pip, or on the cluster that `spark-submit` has named."""

from __future__ import annotations

import os
import shlex
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.find_spark_home import _find_spark_home
from pyspark.sql import SparkSession, is_remote
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from delayline.errors import ConfigurationError
from delayline.spark.java import find_java

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Spark Connect: the variable that names a server, and how addresses begin.
REMOTE: Final = "SPARK_REMOTE"
CONNECT: Final = "sc://"
#: More than any cluster has slots.
MANY_ROWS: Final = 1_000_000
LOOPBACK: Final = "127.0.0.1"
#: What delayline's jobs want of a session wherever it runs.
EVERYWHERE: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.log.level": "ERROR",
}
#: What suits a session that lives in this process.
ON_THIS_MACHINE: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
    "spark.driver.host": LOOPBACK,
    "spark.driver.bindAddress": LOOPBACK,
    "spark.driver.memory": "2g",
}


def spark_session(master: str | None = None, *, conf: Mapping[str, str] | None = None) -> SparkSession:
    """Return a session for delayline's jobs: the existing one unchanged, or a new one.

    Blocks for seconds while Java starts.

    Args:
        master: By default `local[*]`, unless `conf`, `spark-submit` or `spark-defaults.conf` set another; with
            Spark Connect `sc://host:15002`, by default SPARK_REMOTE.
        conf: Settings that win over all others. delayline adds only settings that are missing.

    Raises:
        ConfigurationError: There is no usable Java.
    """
    there = session_there_is()
    given = dict(conf or {}) if master is None else {"spark.master": master, **(conf or {})}
    if there is not None:
        return _changed(there, given)
    server = master if master is not None and master.startswith(CONNECT) else None
    if server is not None or REMOTE in os.environ:
        builder = SparkSession.builder if server is None else SparkSession.builder.remote(server)
        return _configured(builder, conf or {})  # the rest is the server's
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        os.environ["JAVA_HOME"] = str(find_java())
    settled = _settled() | given
    where = settled.get("spark.master", "local[*]")
    wanted = {"spark.master": where, "spark.app.name": "delayline", **EVERYWHERE}
    if where.startswith("local"):
        wanted |= ON_THIS_MACHINE
        if "spark.pyspark.python" not in settled:  # else workers are the first python3 on PATH
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    try:
        return _configured(
            SparkSession.builder, {name: value for name, value in wanted.items() if name not in settled} | given
        )
    except PySparkException as error:
        raise ConfigurationError(
            f"Spark did not start on {where!r} with the Java in {os.environ.get('JAVA_HOME')}: "
            f"{str(error).splitlines()[0]}. What Java has said is above"
        ) from error


def session_there_is() -> SparkSession | None:
    """Return the session of this thread, or the one that another thread has begun; None where there is none."""
    if SparkContext._active_spark_context is None and not is_remote():
        return None
    try:
        return SparkSession.active()
    except PySparkException:
        return None


def activated(spark: SparkSession) -> SparkSession:
    """Return the session after it became this thread's own.

    Spark looks for data sources that are written in Python in the thread's session, and finds none in a thread without.
    """
    if SparkSession.getActiveSession() is None:
        spark.createDataFrame([], "nothing INT")  # nothing smaller does it that PySpark calls public
    return spark


def parallelism(spark: SparkSession) -> int:
    """Return how many tasks the session would cut its own data into: the slots it had when it was asked first."""
    if not is_remote():
        return spark.sparkContext.defaultParallelism
    places = spark.range(MANY_ROWS).select(F.spark_partition_id().alias("place")).agg(F.max("place"))
    return int(places.toArrow().column(0)[0].as_py()) + 1


def _changed(there: SparkSession, given: Mapping[str, str]) -> SparkSession:
    for name, value in given.items():
        if there.conf.isModifiable(name):
            there.conf.set(name, value)
    return there


def _configured(builder: SparkSession.Builder, settings: Mapping[str, str]) -> SparkSession:
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _settled() -> dict[str, str]:
    """Return the user's settings for every session: from `spark-submit`, its variable, or the defaults file."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # spark-submit has started this process
        SparkContext._ensure_initialized()
        return dict(SparkConf().getAll())
    return _defaults() | _submitted(os.environ.get("PYSPARK_SUBMIT_ARGS", ""))


def _defaults() -> dict[str, str]:
    folder = os.environ.get("SPARK_CONF_DIR") or Path(_find_spark_home(), "conf")
    file = Path(folder, "spark-defaults.conf")
    lines = file.read_text().splitlines() if file.is_file() else []
    pairs = [line.replace("=", " ", 1).split(None, 1) for line in lines if line.strip().startswith("spark.")]
    return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}


def _submitted(arguments: str) -> dict[str, str]:
    words, settled = shlex.split(arguments), {}
    for word, value in pairwise(words):
        match word:
            case "--conf" | "-c":
                name, _, setting = value.partition("=")
                settled[name] = setting
            case "--master":
                settled["spark.master"] = value
            case "--name":
                settled["spark.app.name"] = value
            case "--driver-memory":
                settled["spark.driver.memory"] = value
    return settled
