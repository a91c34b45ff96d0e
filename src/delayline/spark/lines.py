"""CSV and JSON Lines as texts that know their file and line: a row that cannot be read is told from where it is."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.window import Window

from delayline.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

FORMATS: Final = ("parquet", "csv", "jsonl")
ENDINGS: Final = {".parquet": "parquet", ".csv": "csv", ".json": "jsonl", ".jsonl": "jsonl", ".ndjson": "jsonl"}
FILE: Final = "_delayline_file"
BLOCK: Final = "_delayline_block"
LINE: Final = "_delayline_line"
#: The text of a line that is no row.
CORRUPT: Final = "_delayline_corrupt"
HIDDEN: Final = (FILE, BLOCK, LINE, CORRUPT)


def read_path(spark: SparkSession, path: str, form: str | None, names: Sequence[str], *, numbered: bool) -> DataFrame:
    """Return the rows at the path, with their file, and, where asked for and there are lines, with their line.

    form: parquet, csv (with a header line) or jsonl; by the path's ending where None. names: the fields of JSON.
    """
    form = form or next((kind for ending, kind in ENDINGS.items() if path.rstrip("/").endswith(ending)), None)
    if form not in FORMATS:
        raise ConfigurationError(f"what is in {path!r}? Say form='parquet', 'csv' or 'jsonl'")
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


def _from_csv(header: str, path: str) -> Column:
    names = next(csv.reader([header.removeprefix("\ufeff")]), [])
    if len(set(names)) != len(names) or not all(name.strip() for name in names):
        raise ConfigurationError(f"{path!r} begins with {header!r}: that is no line of different column names")
    fields = ", ".join(f"`{name.strip().replace('`', '``')}` STRING" for name in [*names, CORRUPT])
    return F.from_csv("value", fields, {"columnNameOfCorruptRecord": CORRUPT, "escape": '"'})


def _header(lines: DataFrame, path: str) -> str:
    """Return the first line of all files. Raises ConfigurationError where there is none, or where they differ."""
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
            "with different columns in jobs of their own"
        )
    return header


def _from_json(names: Sequence[str]) -> Column:
    fields = ", ".join(f"`{name.replace('`', '``')}` STRING" for name in [*names, CORRUPT])
    return F.from_json("value", fields, {"columnNameOfCorruptRecord": CORRUPT})
