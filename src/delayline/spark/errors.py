"""Translate errors of Spark into errors of delayline, without the stack trace of Java."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Final

from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger

from delayline import errors
from delayline.errors import ConfigurationError, DelaylineError
from delayline.spark.options import FORMAT

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The last line of a Python traceback inside an error of Java.
OURS: Final = re.compile(r"delayline\.errors\.(\w+): (.+)")
#: The condition of Spark when its Python cannot import delayline.
SOURCE_NOT_FOUND: Final = "DATA_SOURCE_NOT_FOUND"
MISSING: Final = re.compile(r"No module named '(delayline|pyspark_delayline|pyarrow|sqlalchemy|psycopg|pymysql)")
#: An error condition of Spark.
CONDITION: Final = re.compile(r"\[[A-Z][A-Z0-9_.]+\] .+")
#: The class of Java errors that PySpark does not convert; compared by name, as Spark Connect works without Py4J.
OF_JAVA: Final = "Py4JJavaError"
LONGEST_CAUSE: Final = 500
#: Loggers of PySpark that write errors with the stack trace of Java to stderr.
STACKS: Final = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")


@contextlib.contextmanager
def translated_errors() -> Iterator[None]:
    """Raise the error that delayline raised in a task or a commit; ConfigurationError for other failures of a job."""
    loggers = [PySparkLogger.getLogger(name) for name in STACKS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    except Exception as error:
        if isinstance(error, PySparkException) or type(error).__name__ == OF_JAVA:
            raise translate_error(error) from None
        raise
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def translate_error(error: Exception) -> DelaylineError:
    """Return the delayline error inside an error of Spark, or a ConfigurationError with its most specific line."""
    description = str(error)
    for name, message in reversed(OURS.findall(description)):
        if name == errors.MissingExtra.__name__:
            return ConfigurationError(f"on the executors, in the Python that PYSPARK_PYTHON names: {message.strip()}")
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, DelaylineError):
            rebuilt = kind.__new__(kind)
            rebuilt.args = (message.strip(),)
            return rebuilt
    missing = MISSING.search(description)
    if missing is not None:
        return ConfigurationError(
            f"the executors cannot import {missing[1]!r}: install 'delayline[spark]' with the store's extra there, or "
            "ship it with --archives, and delayline alone with --py-files as a .zip, or from a client of Spark Connect "
            "that imports it from a .zip"
        )
    if SOURCE_NOT_FOUND in description and FORMAT in description:
        return ConfigurationError(
            f"Spark finds no data source {FORMAT!r}: install 'delayline[spark]' in the Python that Spark's driver "
            "starts, which PYSPARK_PYTHON names"
        )
    lines = [line.strip() for line in description.splitlines() if line.strip() and not line.lstrip().startswith("at ")]
    named = (line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception)\b.*: ", line))
    condition = CONDITION.search(description)
    summary = next(named, condition[0] if condition else lines[0] if lines else type(error).__name__)
    return ConfigurationError(f"the Spark job failed: {summary[:LONGEST_CAUSE]}")
