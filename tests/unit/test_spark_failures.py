"""What Spark says of a failure is said again in delayline's words."""

from __future__ import annotations

import pytest
from pyspark.errors import PySparkException

from delayline import BackendUnavailable, ConfigurationError, DelaylineError, DuplicateMessage, QueueNotFound
from delayline.spark.errors import translate_error, translated_errors

JAVA = "\n\tat org.apache.spark.sql.Thing.run(Thing.scala:7)\n\tat java.base/java.lang.Thread.run(Thread.java:840)\n"
TRACEBACK = 'Traceback (most recent call last):\n  File "writer.py", line 7, in commit\n    raise\n'


@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [
        (f"[X] failed: {TRACEBACK}delayline.errors.BackendUnavailable: gone{JAVA}", BackendUnavailable, "gone"),
        (
            f"{TRACEBACK}delayline.errors.DuplicateMessage: message 'a' waits{JAVA}",
            DuplicateMessage,
            "message 'a' waits",
        ),
        (f"{TRACEBACK}delayline.errors.QueueNotFound: queue 'q'{JAVA}", QueueNotFound, "queue 'q'"),
        (
            f"{TRACEBACK}psycopg.errors.X: no\n\nThe above exception was the direct cause\n\n{TRACEBACK}"
            f"delayline.errors.ConfigurationError: choose another{JAVA}",
            ConfigurationError,
            "choose another",
        ),
        (f"{TRACEBACK}ValueError: odd{JAVA}", ConfigurationError, "the Spark job failed: ValueError: odd"),
        (
            "[PATH_NOT_FOUND] Path does not exist: x. SQLSTATE: 1" + JAVA,
            ConfigurationError,
            "the Spark job failed: [PATH",
        ),
        (
            f"{TRACEBACK}ModuleNotFoundError: No module named 'delayline'{JAVA}",
            ConfigurationError,
            "the executors cannot import 'delayline': install",
        ),
        ("delayline.errors.NoSuchError: x", ConfigurationError, "the Spark job failed: delayline.errors"),
        ("", ConfigurationError, "the Spark job failed"),
    ],
)
def test_one_line_of_ours_and_none_of_javas(said: str, kind: type[DelaylineError], text: str) -> None:
    error = translate_error(PySparkException(said))
    assert type(error) is kind
    assert str(error).startswith(text)
    assert "\n" not in str(error) and "Thread.java" not in str(error)


def test_other_errors_pass() -> None:
    with pytest.raises(LookupError), translated_errors():
        raise LookupError("not Spark's")
    with pytest.raises(ConfigurationError, match="the Spark job failed: x") as failure, translated_errors():
        raise PySparkException("x")
    assert failure.value.__cause__ is None
