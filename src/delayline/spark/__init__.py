"""Schedule, promote, dispatch, export and audit delayed messages in bulk with PySpark.

The jobs use the same stores as endpoints. Every function takes the session as `spark`, or starts a session by
`spark_session`. Errors of Spark are raised as errors of delayline.
"""

from importlib.util import find_spec

from delayline.errors import ConfigurationError, MissingExtra

if any(find_spec(name) is None for name in ("pyspark", "pyarrow", "pandas")):
    raise MissingExtra("spark", "the data pipeline")

import pyspark

from delayline.spark.version import TOO_OLD, is_too_old

if is_too_old(pyspark.__version__):
    raise ConfigurationError(TOO_OLD.format(pyspark.__version__))

from delayline.spark.audit import Audit, Totals, audit
from delayline.spark.compact import Compacted, compact
from delayline.spark.delta import keep_delta_log
from delayline.spark.dispatch import Dispatcher
from delayline.spark.journal import Exported, export, read_journal, waiting_ids
from delayline.spark.promote import Promoted, promote, promote_every, promote_stream
from delayline.spark.report import write_report
from delayline.spark.schedule import JobTarget, Scheduled, schedule, schedule_stream
from delayline.spark.session import find_java, spark_session
from delayline.spark.sources import Columns

__all__ = [
    "Audit",
    "Columns",
    "Compacted",
    "Dispatcher",
    "Exported",
    "JobTarget",
    "Promoted",
    "Scheduled",
    "Totals",
    "audit",
    "compact",
    "export",
    "find_java",
    "keep_delta_log",
    "promote",
    "promote_every",
    "promote_stream",
    "read_journal",
    "schedule",
    "schedule_stream",
    "spark_session",
    "waiting_ids",
    "write_report",
]
