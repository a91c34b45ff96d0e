"""Read files and JDBC tables.

CSV and JSON Lines are read as lines of text, so that a rejected row can name its file and line.
"""

from __future__ import annotations

import csv
import os
import re
from typing import TYPE_CHECKING, Final

from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.window import Window

from delayline.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

FORMATS: Final = ("parquet", "csv", "jsonl")
JDBC: Final = "jdbc"
ENDINGS: Final = {".parquet": "parquet", ".csv": "csv", ".json": "jsonl", ".jsonl": "jsonl", ".ndjson": "jsonl"}
FILE: Final = "_delayline_file"
BLOCK: Final = "_delayline_block"
LINE: Final = "_delayline_line"
#: Column: the text of a line that cannot be parsed.
CORRUPT: Final = "_delayline_corrupt"
#: Errors of Java for a missing driver.
NO_DRIVER: Final = re.compile(r"No suitable driver|ClassNotFoundException")
#: Errors of Spark for a missing driver or an unreachable database.
OF_JDBC: Final = re.compile(rf"{NO_DRIVER.pattern}|FAILED_JDBC")
#: The text of another error of a driver, after the name of the exception.
EXCEPTION: Final = re.compile(r"^:? *[\w.$]+Exception: (.+)$", re.MULTILINE)
#: Java finds drivers by URL on its class path only; by class name, Spark finds those in `spark.jars` too.
DRIVERS: Final = {
    "jdbc:postgresql:": "org.postgresql.Driver",
    "jdbc:mariadb:": "org.mariadb.jdbc.Driver",
    "jdbc:mysql:": "com.mysql.cj.jdbc.Driver",
    "jdbc:sqlserver:": "com.microsoft.sqlserver.jdbc.SQLServerDriver",
    "jdbc:oracle:": "oracle.jdbc.OracleDriver",
}
HIDDEN: Final = (FILE, BLOCK, LINE, CORRUPT)


def read_path(spark: SparkSession, path: str, form: str | None, names: Sequence[str], *, numbered: bool) -> DataFrame:
    """Return the rows of the files at a path, with the columns FILE and, if `numbered`, LINE (not for Parquet).

    Args:
        spark: the session.
        path: a file, folder or pattern, local or at a URI that Spark can read.
        form: parquet, csv (with a header line) or jsonl; by the path's ending if None.
        names: the fields of JSON.
        numbered: whether to add the column LINE.

    Raises:
        ConfigurationError: The format is unknown.
    """
    form = form or next((kind for ending, kind in ENDINGS.items() if path.rstrip("/").endswith(ending)), None)
    if form not in FORMATS:
        raise ConfigurationError(f"the format of {path!r} is unknown: give form='parquet', 'csv' or 'jsonl'")
    if form == "parquet":
        data = spark.read.parquet(path)
        return data.withColumn(FILE, F.col("_metadata.file_path"))
    lines = spark.read.text(path).withColumn(FILE, F.col("_metadata.file_path"))
    lines = lines.withColumn(BLOCK, F.col("_metadata.file_block_start"))
    header = _header(lines, path) if form == "csv" else None
    parsed = _from_json(names) if header is None else _from_csv(header, path)
    if numbered:
        in_file = Window.partitionBy(FILE).orderBy(BLOCK, F.monotonically_increasing_id())
        lines = lines.withColumn(LINE, F.row_number().over(in_file))
    lines = lines.drop(BLOCK) if header is None else lines.drop(BLOCK).where(F.col("value") != header)
    hidden = [name for name in lines.columns if name in HIDDEN]
    return lines.where("trim(value) <> ''").select(parsed.alias("row"), *hidden).select("row.*", *hidden)


def read_table(spark: SparkSession, table: str, options: Mapping[str, str]) -> DataFrame:
    """Return the rows of a table, or of a named query in brackets, through JDBC.

    Args:
        spark: the session.
        table: a table's name, or a named query in brackets.
        options: of Spark's JDBC source; `url` is required, and passwordEnv names the variable with the password. Times
            without a zone become TIMESTAMP_NTZ, unless preferTimestampNTZ is set.

    Raises:
        ConfigurationError: An option is missing or not valid.
    """
    given = {"dbtable": table, "preferTimestampNTZ": "true", **options}
    url, variable = given.get("url", ""), given.pop("passwordEnv", None)
    if not url.startswith("jdbc:"):
        raise ConfigurationError('a JDBC source needs its URL: url="jdbc:postgresql://host/database"')
    if variable is not None:
        password = os.environ.get(variable)
        if password is None:
            raise ConfigurationError(f"passwordEnv={variable!r} is not set on this machine: export it")
        given["password"] = password
    for start, driver in DRIVERS.items():
        if url.startswith(start):
            given.setdefault("driver", driver)
    try:
        return spark.read.format(JDBC).options(**given).load()
    except Exception as error:  # errors of a driver come as different classes from Py4J and Spark Connect
        if isinstance(error, PySparkException) and OF_JDBC.search(str(error)) is None:
            raise
        raise _unreadable(url.partition("?")[0], str(error)) from None


def _unreadable(url: str, said: str) -> ConfigurationError:
    if NO_DRIVER.search(said) is not None:
        return ConfigurationError(
            f"Spark has no JDBC driver for {url}: give it the driver's file, --conf "
            "spark.jars=/usr/share/java/postgresql.jar, or --conf spark.jars.packages=org.postgresql:postgresql:42.7.8"
        )
    found = EXCEPTION.search(said)
    return ConfigurationError(f"{url} cannot be read: {found[1] if found else said.partition(chr(10))[0]}")


def _from_csv(header: str, path: str) -> Column:
    try:
        names = next(csv.reader([header.removeprefix("\ufeff")]), [])
    except csv.Error as error:
        raise ConfigurationError(f"{path!r} begins with a line that is not CSV: {error}") from error
    if len(set(names)) != len(names) or not all(name.strip() for name in names):
        raise ConfigurationError(f"{path!r} begins with {header!r}, which is not a line of distinct column names")
    fields = ", ".join(f"`{name.strip().replace('`', '``')}` STRING" for name in [*names, CORRUPT])
    return F.from_csv("value", fields, {"columnNameOfCorruptRecord": CORRUPT, "escape": '"'})


def _header(lines: DataFrame, path: str) -> str:
    """Return the common first line of all files. Raises ConfigurationError if it is missing or differs."""
    firsts = lines.limit(1)
    if len(lines.inputFiles()) > 1:
        begins = lines.where(f"{BLOCK} = 0").withColumn(LINE, F.monotonically_increasing_id())
        firsts = begins.groupBy(FILE).agg(F.min_by("value", LINE).alias("value"))
    found = firsts.groupBy("value").agg(F.min(FILE).alias(FILE)).orderBy(FILE).limit(2).toArrow().to_pylist()
    if not found:
        raise ConfigurationError(f"{path!r} is empty: a CSV file begins with a line of column names")
    header = str(found[0]["value"])
    for other in found[1:]:
        raise ConfigurationError(
            f"{other[FILE]!r} begins with {other['value']!r}, and {found[0][FILE]!r} with {header!r}: schedule files "
            "with different columns in separate jobs"
        )
    return header


def _from_json(names: Sequence[str]) -> Column:
    fields = ", ".join(f"`{name.replace('`', '``')}` STRING" for name in [*names, CORRUPT])
    return F.from_json("value", fields, {"columnNameOfCorruptRecord": CORRUPT})
