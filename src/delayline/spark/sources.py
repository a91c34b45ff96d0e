"""Read files and JDBC tables.

CSV and JSON Lines are read as lines of text, so that a rejected row can name its file and line.
"""

from __future__ import annotations

import csv
import os
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DateType,
    DayTimeIntervalType,
    MapType,
    NumericType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)
from pyspark.sql.window import Window

from delayline.clock import to_microseconds
from delayline.errors import ConfigurationError
from delayline.masking import masked
from delayline.message import encode_body
from delayline.shards import chosen
from delayline.spark.options import SOURCE_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import datetime

    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType

    from delayline.spark.headers import Validator


FILE_FORMATS: Final = ("parquet", "csv", "jsonl")
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
#: Java finds drivers by URL on its class path only; by class name, Spark finds drivers in `spark.jars` too.
DRIVERS: Final = {
    "jdbc:postgresql:": "org.postgresql.Driver",
    "jdbc:mariadb:": "org.mariadb.jdbc.Driver",
    "jdbc:mysql:": "com.mysql.cj.jdbc.Driver",
    "jdbc:sqlserver:": "com.microsoft.sqlserver.jdbc.SQLServerDriver",
    "jdbc:oracle:": "oracle.jdbc.OracleDriver",
}
#: Column: the name of the shard that a row belongs to.
SHARD_OF_ROW: Final = "_delayline_shard"
OWN_COLUMNS: Final = (FILE, BLOCK, LINE, CORRUPT, SHARD_OF_ROW)


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
    if form not in FILE_FORMATS:
        raise ConfigurationError(
            f"the name of {path!r} does not end in a format ({', '.join(ENDINGS)}): give form='parquet', 'csv' or "
            "'jsonl' (--format at the command line)"
        )
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
    hidden = [name for name in lines.columns if name in OWN_COLUMNS]
    rows = lines.where("trim(value) <> ''").select(parsed.alias("row"), *hidden).select("row.*", *hidden)
    return rows if header is not None else _with_fields(rows, names)


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
        raise _unreadable(masked(url.partition("?")[0]), masked(str(error))) from None


def _unreadable(url: str, text: str) -> ConfigurationError:
    if NO_DRIVER.search(text) is not None:
        return ConfigurationError(
            f"Spark has no JDBC driver for {url}: give it the driver's file, --conf "
            "spark.jars=/usr/share/java/postgresql.jar, or --conf spark.jars.packages=org.postgresql:postgresql:42.7.8"
        )
    match = EXCEPTION.search(text)
    return ConfigurationError(f"{url} cannot be read: {match[1] if match else text.partition(chr(10))[0]}")


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
    values = firsts.groupBy("value").agg(F.min(FILE).alias(FILE)).orderBy(FILE).limit(2).toArrow().to_pylist()
    if not values:
        raise ConfigurationError(f"{path!r} is empty: a CSV file begins with a line of column names")
    header = str(values[0]["value"])
    for value in values[1:]:
        raise ConfigurationError(
            f"{value[FILE]!r} begins with {value['value']!r}, and {values[0][FILE]!r} with {header!r}: schedule files "
            "with different columns in separate jobs"
        )
    return header


def _from_json(names: Sequence[str]) -> Column:
    wanted = dict.fromkeys([*names, *filter(None, map(_outer, names)), CORRUPT])
    fields = ", ".join(f"{_quoted(name)} STRING" for name in wanted)
    return F.from_json("value", fields, {"columnNameOfCorruptRecord": CORRUPT})


def _outer(name: str) -> str:
    """Return the key of the object that a name with a dot is a field of; empty without a dot."""
    outer, dot, _ = name.partition(".")
    return outer if dot else ""


def _with_fields(rows: DataFrame, names: Sequence[str]) -> DataFrame:
    """Return the rows of JSON with the fields of objects that are named, unless there is a key of the whole name."""
    for name in names:
        if outer := _outer(name):
            steps = "".join(f"['{step}']" for step in name.split(".")[1:])
            field = F.get_json_object(F.col(_quoted(outer)), f"${steps}")
            rows = rows.withColumn(name, F.coalesce(F.col(_quoted(name)), field))
    return rows.drop(*{_outer(name) for name in names}.difference(names, [""]))


#: Microseconds in a unit of numbers since 1970.
EPOCHS: Final = {"seconds": 1_000_000, "milliseconds": 1_000}
FIXED_ZONE: Final = re.compile(r"[+-]\d{2}:\d{2}")
DAY_PATTERN: Final = r"^\d{4,}-\d{2}-\d{2}$"
LOCAL: Final = r"^\d{4,}-\d{2}-\d{2}[T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?$"
#: A text is an instant only with an offset from UTC.
OFFSET_PATTERN: Final = r"(Z|[+-]\d{2}(:?\d{2})?)\s*$"
KEPT_COLUMN: Final = "_delayline_row"
UNREADABLE_COLUMN: Final = "_delayline_unreadable"
REJECTED_SCHEMA: Final = "id STRING, reason STRING, file STRING, line INT, row STRING"


@dataclass(frozen=True)
class Columns:
    """The names of the source's columns.

    Args:
        id: Column of the message id.
        destination: Column of the destination queue.
        due: Column of the due time: TIMESTAMP, or text with an offset from UTC; others with `time_zone` or `epoch`.
        time_zone: The zone of due times that have none, as in `Europe/Berlin` or `+02:00`: of TIMESTAMP_NTZ, of DATE,
            which is the start of the day, and of texts without an offset. A time that clocks show twice when they are
            put back is the first of both; a skipped time is as much later.
        epoch: `seconds` or `milliseconds`, where due times are numbers since 1970-01-01 UTC.
        delay: Column of a delay, in place of `due`: seconds, or INTERVAL DAY TO SECOND.
        to: The destination of all messages, in place of a column.
        headers: Column of the headers: JSON text, or a MAP or STRUCT of texts. May be missing.
        body: Column of the body: BINARY, text, or a MAP, STRUCT or ARRAY, which becomes JSON. May be missing.

    Example:
        ```python
        Columns(id="reminder_id", delay="wait_seconds", to="billing")
        Columns(due="remind_at", time_zone="Europe/Berlin")
        ```

    Raises:
        ConfigurationError: The time zone or the epoch is unknown, or given where it has no meaning.
    """

    id: str = "id"
    destination: str = "destination"
    due: str = "due"
    delay: str | None = None
    to: str | None = None
    headers: str = "headers"
    body: str = "body"
    time_zone: str | None = None
    epoch: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("delay", "time_zone", "epoch") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigurationError(f"{given[0]} and {given[1]} are two kinds of due times: give one")
        if self.epoch is not None and self.epoch not in EPOCHS:
            raise ConfigurationError(f"epoch={self.epoch!r} must be one of {', '.join(EPOCHS)}")
        if self.time_zone is not None and FIXED_ZONE.fullmatch(self.time_zone) is None:
            try:
                ZoneInfo(self.time_zone)
            except (ZoneInfoNotFoundError, ValueError, OSError, TypeError):
                raise ConfigurationError(
                    f"time_zone={self.time_zone!r} is unknown: give a name as Europe/Berlin, or an offset as +02:00"
                ) from None

    @property
    def names(self) -> list[str]:
        """The names of all columns to read."""
        time = self.due if self.delay is None else self.delay
        names = [self.id, time, self.headers, self.body, *([] if self.to else [self.destination])]
        return list(dict.fromkeys(names))


def prepared(rows: DataFrame, columns: Columns, now: datetime) -> DataFrame:
    """Return the rows with the columns of a message, null for unreadable values, and their file and line if known.

    Raises ConfigurationError for a column that is missing or has an unsuitable type.
    """
    made = _made(rows, columns, now)
    hidden = [name for name in rows.columns if name in OWN_COLUMNS]
    return rows.select(*(column.alias(name) for name, column in made.items()), *hidden)


def with_shard(rows: DataFrame, columns: Columns, among: Sequence[str]) -> DataFrame:
    """Return the rows with the column SHARD_OF_ROW: where a first send of their ids goes among these shards."""

    def shard_of(message_id: str | None) -> str:
        return chosen(message_id or "", among)

    return rows.withColumn(SHARD_OF_ROW, F.udf(shard_of, StringType(), useArrow=True)(_text(rows, columns.id)))


def content_type(rows: DataFrame, columns: Columns) -> str:
    """Return the content type that `Endpoint.send` gives to bodies of this type."""
    found = _found(rows, columns.body)
    kind = BinaryType() if found is None else found.kind
    if isinstance(kind, BinaryType):
        return encode_body(b"")[1]
    return encode_body({} if isinstance(kind, MapType | StructType | ArrayType) else "")[1]


def rejected(rows: DataFrame, columns: Columns, now: datetime, validator: Validator) -> DataFrame:
    """Return the rows that cannot be messages: id, reason, file, line, and the row as JSON."""
    raw = [name for name in rows.columns if name not in OWN_COLUMNS]
    visible = F.coalesce(F.col(CORRUPT), _json(raw)) if CORRUPT in rows.columns else _json(raw)
    time = columns.due if columns.delay is None else columns.delay
    unreadable = F.concat(F.lit(f"{time} cannot be read: "), F.substring(_text(rows, time), 1, 80))
    if CORRUPT in rows.columns:
        unreadable = F.when(F.col(CORRUPT).isNotNull(), F.lit("the line cannot be read")).otherwise(unreadable)
    kept = rows.withColumn(KEPT_COLUMN, visible).withColumn(UNREADABLE_COLUMN, unreadable)
    wide = kept.select(
        *(made.alias(name) for name, made in _made(kept, columns, now).items()),
        (F.col(FILE) if FILE in rows.columns else F.lit(None).cast("string")).alias(FILE),
        (F.col(LINE) if LINE in rows.columns else F.lit(None).cast("int")).alias(LINE),
        KEPT_COLUMN,
        UNREADABLE_COLUMN,
    )
    return wide.mapInArrow(partial(_with_reasons, validator=validator), REJECTED_SCHEMA)


def _with_reasons(batches: Iterator[pa.RecordBatch], *, validator: Validator) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        reasons = validator.reasons(batch)
        unread = pc.and_(pc.is_null(batch.column("due")), pc.is_valid(batch.column(UNREADABLE_COLUMN)))
        reasons = pc.if_else(pc.and_(unread, pc.is_valid(reasons)), batch.column(UNREADABLE_COLUMN), reasons)
        names = ["id", FILE, LINE, KEPT_COLUMN]
        identity, file, line, kept = (batch.column(name) for name in names)
        rejects = pa.RecordBatch.from_arrays(
            [identity, reasons.cast(pa.string()), file, line, kept], names=["id", "reason", "file", "line", "row"]
        )
        yield rejects.filter(pc.is_valid(reasons))


def _made(rows: DataFrame, columns: Columns, now: datetime) -> dict[str, Column]:
    made = {
        "id": _text(rows, columns.id),
        "destination": F.lit(columns.to) if columns.to else _text(rows, columns.destination),
        "due": _due(rows, columns, now),
        "headers": _headers(rows, columns.headers),
        "body": _body(rows, columns.body),
    }
    made |= {field.name: F.lit(None).cast(field.dataType) for field in SOURCE_COLUMNS if field.name not in made}
    if CORRUPT in rows.columns:  # no field of a corrupt line can be trusted
        made["id"] = F.when(F.col(CORRUPT).isNull(), made["id"])
        made["due"] = F.when(F.col(CORRUPT).isNull(), made["due"])
    return made


class _Found(NamedTuple):
    """A column of the source, or a field of one of its structs."""

    path: str
    """As Spark takes it."""
    kind: DataType

    @property
    def values(self) -> Column:
        return F.col(self.path)


def _found(rows: DataFrame, name: str) -> _Found | None:
    """Return the column or field of that name, in any case unless Spark tells cases apart; None if there is none."""
    exactly = rows.sparkSession.conf.get("spark.sql.caseSensitive") == "true"
    found = _in_struct(rows.schema, name)
    return found if found is not None or exactly else _in_struct(rows.schema, name, str.lower)


def _in_struct(schema: StructType, name: str, spelling: Callable[[str], str] = str) -> _Found | None:
    wanted = spelling(name)
    for field in schema:
        path, here = _quoted(field.name), spelling(field.name)
        if here == wanted:
            return _Found(path, field.dataType)
        if isinstance(field.dataType, StructType) and wanted.startswith(f"{here}."):
            inner = _in_struct(field.dataType, name[len(field.name) + 1 :], spelling)
            if inner is not None:
                return _Found(f"{path}.{inner.path}", inner.kind)
    return None


def _needed(rows: DataFrame, name: str) -> _Found:
    found = _found(rows, name)
    if found is None:
        others = ", ".join(column for column in rows.columns if column not in OWN_COLUMNS)
        raise ConfigurationError(
            f"the source has no column {name!r}, only {others}: "
            "name the right column in Columns(...), or add it; order.id is the field id of a struct order"
        )
    return found


def _text(rows: DataFrame, name: str) -> Column:
    return _needed(rows, name).values.cast("string")


def _due(rows: DataFrame, columns: Columns, now: datetime) -> Column:
    if columns.delay is not None:
        return _after(rows, columns.delay, now)
    found = _needed(rows, columns.due)
    kind, due = found.kind, found.values
    if columns.epoch is not None and isinstance(kind, NumericType | StringType):
        return _since_epoch(due, EPOCHS[columns.epoch])
    if columns.time_zone is not None and isinstance(kind, TimestampNTZType | DateType | StringType):
        return _in_zone(due, columns.time_zone)
    if columns.epoch is not None or (columns.time_zone is not None and not isinstance(kind, TimestampType)):
        raise ConfigurationError(
            f"column {columns.due!r} is {kind.simpleString()}: epoch is for numbers, and time_zone for times and dates "
            "without a zone"
        )
    if isinstance(kind, TimestampType):
        if columns.time_zone is not None:
            raise ConfigurationError(
                f"column {columns.due!r} is a timestamp, an instant in every zone: leave time_zone out"
            )
        return due
    if isinstance(kind, StringType):
        return F.when(due.rlike(OFFSET_PATTERN), due.try_cast("timestamp"))
    if isinstance(kind, TimestampNTZType | DateType):
        use = f"Columns(due={columns.due!r}, time_zone='Europe/Berlin'), with the zone that it was written in"
    elif isinstance(kind, NumericType):
        use = f"Columns(due={columns.due!r}, epoch='seconds') or epoch='milliseconds'"
    else:
        use = "a TIMESTAMP, or text with its offset from UTC"
    raise ConfigurationError(f"column {columns.due!r} is {kind.simpleString()}, which is not an instant: use {use}")


def _in_zone(due: Column, zone: str) -> Column:
    """Return the instants of local times in the zone, whatever the session's; of texts with an offset, their own."""
    given = F.trim(due.cast("string"))
    whole = F.when(given.rlike(DAY_PATTERN), F.concat(given, F.lit(" 00:00:00"))).when(given.rlike(LOCAL), given)
    local = F.concat(whole, F.lit(f" {zone}"))
    return F.when(given.rlike(OFFSET_PATTERN) & ~given.rlike(DAY_PATTERN), given).otherwise(local).try_cast("timestamp")


def _since_epoch(due: Column, factor: int) -> Column:
    """Return the instants, rounded up to the microsecond; null for what is no number, and beyond all years."""
    micros = F.ceil(due.try_cast("decimal(29,9)") * F.lit(factor)).try_cast("bigint")
    return F.timestamp_micros(micros)


def _after(rows: DataFrame, name: str, now: datetime) -> Column:
    """Return the due time of a delay that starts at `now`; null for a negative delay."""
    found = _needed(rows, name)
    kind, delay = found.kind, found.values
    if isinstance(kind, DayTimeIntervalType):
        return F.when(delay >= F.expr("INTERVAL '0' SECOND"), F.lit(now) + delay)
    if isinstance(kind, NumericType | StringType):
        seconds = delay.try_cast("decimal(20,6)")
        micros = (seconds * 1_000_000).cast("bigint") + F.lit(to_microseconds(now))
        return F.when(seconds >= 0, F.timestamp_micros(micros))
    raise ConfigurationError(
        f"column {name!r} is {kind.simpleString()}, which is not a delay: give seconds, or INTERVAL DAY TO SECOND"
    )


def _headers(rows: DataFrame, name: str) -> Column:
    found = _found(rows, name)
    if found is None:
        return F.lit(None).cast("string")
    if isinstance(found.kind, StringType):
        return found.values
    if isinstance(found.kind, MapType | StructType):
        return F.to_json(found.values)
    raise ConfigurationError(
        f"column {name!r} is {found.kind.simpleString()}: headers are JSON text, a MAP or a STRUCT"
    )


def _body(rows: DataFrame, name: str) -> Column:
    found = _found(rows, name)
    if found is None:
        return F.lit(None).cast("binary")
    if isinstance(found.kind, BinaryType):
        return found.values
    if isinstance(found.kind, MapType | StructType | ArrayType):
        return F.to_json(found.values).cast("binary")
    return found.values.cast("string").cast("binary")


def _json(names: list[str]) -> Column:
    return F.to_json(F.struct(*(F.col(_quoted(name)) for name in names)))


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
