"""What Spark forks its Python workers from in the tests: each would import these for a second or two otherwise.

Nothing that starts threads may be imported before a fork, so neither pyarrow nor numpy.
"""

from __future__ import annotations

import gc

import psycopg  # noqa: F401
import pyspark.sql.datasource
import pyspark.worker  # noqa: F401
import sqlalchemy.dialects.mysql
import sqlalchemy.dialects.postgresql
import sqlalchemy.dialects.sqlite  # noqa: F401
from pyspark.daemon import manager

import delayline.config
import delayline.sql.journal_export
import delayline.sql.taken
import delayline.sql.waiting  # noqa: F401

if __name__ == "__main__":
    gc.freeze()
    manager()
