"""Spark settings for tests: JVMs that compile little, and forked Python workers that can import the tests."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

from tests.spark.daemon import BATCHES, BATCHES_MODULE, PLACE, ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

#: For JVMs that live for seconds.
JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
#: Settings for this machine.
DEFAULTS: Final = {
    "spark.python.daemon.module": "tests.spark.daemon",
    "spark.driver.memory": "1g",
    "spark.python.authenticate.socketTimeout": "90s",  # on a busy machine workers are slow to start
}
#: The setting above covers tasks. What plans, commits and is a foreachBatch cannot be set, so this Python replaces it.
PYTHON: Final = """#!/bin/sh
case "$1 $2" in
  "-m pyspark.daemon")
    shift 2
    set -- -m tests.spark.daemon "$@" ;;
  "-m {batches}")
    set -- -m tests.spark.daemon {argument} ;;
esac
exec "{python}" "$@"
"""


def variables(folder: Path, place: str) -> Mapping[str, str]:
    """Return the environment variables; the files that they name are written to the folder. place: from `forking`."""
    (folder / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in DEFAULTS.items()))
    python = folder / "python"
    python.write_text(PYTHON.format(python=sys.executable, batches=BATCHES_MODULE, argument=BATCHES))
    python.chmod(0o755)
    return {
        "SPARK_CONF_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "SPARK_SUBMIT_OPTS": JAVA,
        "PYSPARK_PYTHON": str(python),
        PLACE: place,
    }
