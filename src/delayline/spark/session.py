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
from pyspark.sql import SparkSession

from delayline.errors import ConfigurationError
from delayline.spark.java import find_java

if TYPE_CHECKING:
    from collections.abc import Mapping

LOOPBACK: Final = "127.0.0.1"
#: What delayline's jobs want of a session wherever it runs (reference 7).
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
    """Return a session for delayline's jobs: the one there is already, as it is, or a new one.

    master: `local[*]` unless this, `conf`, `spark-submit` or `spark-defaults.conf` says something else.
    conf: wins over everything. Whatever is set anywhere is left as it is; delayline only adds what nobody has set.
    Blocks for seconds while Java starts. Raises ConfigurationError where there is no usable Java.
    """
    active = SparkSession.getActiveSession()
    given = dict(conf or {}) if master is None else {"spark.master": master, **(conf or {})}
    if active is not None:
        for name, value in given.items():
            if active.conf.isModifiable(name):
                active.conf.set(name, value)
        return active
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        os.environ["JAVA_HOME"] = str(find_java())
    settled = _settled() | given
    where = settled.get("spark.master", "local[*]")
    wanted = {"spark.master": where, "spark.app.name": "delayline", **EVERYWHERE}
    if where.startswith("local"):
        wanted |= ON_THIS_MACHINE
        if "spark.pyspark.python" not in settled:  # else workers are the first python3 on PATH
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder
    for name, value in ({name: value for name, value in wanted.items() if name not in settled} | given).items():
        builder = builder.config(name, value)
    try:
        return builder.getOrCreate()
    except PySparkException as error:
        raise ConfigurationError(
            f"Spark did not start on {where!r} with the Java in {os.environ.get('JAVA_HOME')}: "
            f"{str(error).splitlines()[0]}. What Java has said is above"
        ) from error


def _settled() -> dict[str, str]:
    """Return what the user has set for every session: through `spark-submit`, its variable, or the defaults' file."""
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
