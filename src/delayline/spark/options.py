"""Options of the data source, which are all texts, and the columns of a message."""

from __future__ import annotations

import difflib
import json
import os
import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import (
    BinaryType,
    DateType,
    IntegerType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
)

from delayline.bulk.connections import CONNECT_TIMEOUT, connection_limit, job_url
from delayline.bulk.level_pieces import LevelPieceWriter
from delayline.bulk.pieces import PieceWriter
from delayline.bulk.promotion import FilePromoter
from delayline.bulk.writer import BulkWriter
from delayline.delayed.columns import BULK_COLUMNS, ColumnKind
from delayline.errors import ConfigurationError
from delayline.masking import masked
from delayline.message import MAXIMUM_ID_LENGTH, in_utc
from delayline.sql.shards.backend import map_named
from delayline.sql.urls import read_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql.types import DataType

    from delayline.bulk.cold_folder import ColdFolder
    from delayline.delayed.columns import StoredColumn

Choice = TypeVar("Choice", bound=str)
FORMAT: Final = "delayed_messages"
#: The type for each kind of column, and the expression that casts a column to it.
SPARK_TYPES: Final[Mapping[ColumnKind, tuple[DataType, str]]] = {
    ColumnKind.NAME: (StringType(), "CAST({} AS STRING)"),
    ColumnKind.INSTANT: (TimestampType(), "a TIMESTAMP"),
    ColumnKind.HEADERS: (StringType(), "to_json({})"),
    ColumnKind.BYTES: (BinaryType(), "CAST({} AS BINARY)"),
    ColumnKind.COUNT: (IntegerType(), "CAST({} AS INT)"),
}


def fields_of(columns: Iterable[StoredColumn]) -> list[StructField]:
    """Return columns of messages as Spark's."""
    return [StructField(column.name, SPARK_TYPES[column.kind][0]) for column in columns]


SOURCE_COLUMNS: Final = StructType(fields_of(BULK_COLUMNS))
#: The columns that every message has, by which a store's table can be searched.
REQUIRED: Final = tuple(column.name for column in BULK_COLUMNS if not column.nullable and not column.is_content)
CASTS: Final = {column.name: SPARK_TYPES[column.kind][1].format(column.name) for column in BULK_COLUMNS}
#: Expressions that make an instant of a due time of another type, in any session's time zone.
INSTANT_EXPRESSIONS: Final[Mapping[type[DataType], str]] = {
    TimestampNTZType: "CAST(concat(due, ' Europe/Berlin') AS TIMESTAMP), with the zone of its times",
    DateType: "CAST(concat(due, ' 00:00:00 Europe/Berlin') AS TIMESTAMP), for the start of the day in a zone",
    StringType: "CAST(due AS TIMESTAMP) where all texts have their offset from UTC",
    NumericType: "timestamp_seconds(due) or timestamp_millis(due)",
}


#: All options, of reads and of writes: a table's are for both. With the option that Spark adds itself.
OPTIONS: Final = (
    "url", "endpoint", "table", "schema", "passwordEnv", "passwordFile", "maxConnections", "connectTimeout",
    "columns", "dueFrom", "dueTo", "destination", "filterPushdown", "numPartitions", "partitionBy", "fetchSize",
    "onConflict", "invalid", "sender", "contentType", "sentAt", "runId",
    "app", "maxMessagesPerTrigger", "txnAppId", "checkpointLocation",
)  # fmt: skip
#: What Spark puts before the names of a table's options, among its other properties.
OF_TABLE: Final = "option."
#: The key in the metadata of a table's columns that has its options.
TABLE_OPTIONS: Final = "delayline.options"


def check_names(options: Iterable[str]) -> None:
    """Raise ConfigurationError for a name that is no option."""
    known = {name.lower(): name for name in OPTIONS}
    for name in options:
        if name.lower() not in known:
            close = difflib.get_close_matches(name.lower(), known, 1)
            raise ConfigurationError(
                f"{FORMAT} has no option {name!r}"
                + (f": did you mean {known[close[0]]!r}?" if close else ".")
                + f" The options are {', '.join(OPTIONS)}"
            )


def chosen_columns(options: Mapping[str, str]) -> StructType:
    """Return the columns that the option `columns` names, by default all. Raises ConfigurationError."""
    given = options.get("columns")
    if given is None:
        return SOURCE_COLUMNS
    names = [name.strip() for name in given.split(",")]
    return StructType([StructField(name, column_of(name).dataType) for name in names])


def column_of(name: str) -> StructField:
    """Return the column of a message of that name, whatever its case. Raises ConfigurationError."""
    for column in SOURCE_COLUMNS:
        if column.name == name.lower():
            return column
    raise ConfigurationError(f"there is no column {name!r} to read; choose from {', '.join(SOURCE_COLUMNS.names)}")


def with_table_options(schema: StructType, options: Mapping[str, str]) -> StructType:
    """Return the columns of a new table of a catalog with its options, others as they are.

    Raises ConfigurationError for a password, which would be in files written from the table.
    """
    given = {name[len(OF_TABLE) :]: value for name, value in options.items() if name.startswith(OF_TABLE)}
    if not given:
        return schema
    check_names(given)
    store = StoreOptions.of(CaseInsensitiveDict(given))
    if read_url(store.url).password is not None:
        raise ConfigurationError(
            "the URL of a table may have no password, as tables are kept in a catalog: give its OPTIONS passwordEnv or "
            "passwordFile"
        )
    kept = {TABLE_OPTIONS: json.dumps(given)}
    # Spark hands the metadata of the columns to an INSERT only where it has to convert a column.
    ids = VarcharType(MAXIMUM_ID_LENGTH)
    return StructType(
        [StructField(column.name, ids if column.name == "id" else column.dataType, metadata=kept) for column in schema]
    )


def without_lengths(schema: StructType) -> StructType:
    """Return the columns of a table of a catalog as those of messages: texts of any length."""
    fields = [
        StructField(column.name, StringType() if isinstance(column.dataType, VarcharType) else column.dataType)
        for column in schema
    ]
    return StructType(fields)


def options_of_table(schema: StructType, options: Mapping[str, str]) -> Mapping[str, str]:
    """Return the options with those of the table that the columns belong to, if they belong to one."""
    kept = next((field.metadata[TABLE_OPTIONS] for field in schema if TABLE_OPTIONS in (field.metadata or {})), None)
    if kept is None:
        return options
    merged = CaseInsensitiveDict(json.loads(kept))
    merged.update(options)
    return merged


def must_be_single(url: str) -> None:
    """Raise ConfigurationError for the URL of a map of shards."""
    if map_named(url) is not None:
        raise ConfigurationError(
            f"{masked(url)!r} names a map of shards, and this takes a single store: give the URL of a shard"
        )


@dataclass(frozen=True)
class StoreOptions:
    """The store of a job. Passwords are read where they are used, so that no plan, log or pickle contains them."""

    url: str = field(repr=False)
    table: str
    schema: str | None
    password_env: str | None
    password_file: str | None
    max_connections: int | None = None
    connect_timeout: int = CONNECT_TIMEOUT

    @classmethod
    def of(cls, options: Mapping[str, str]) -> StoreOptions:
        """Read the options. Raises ConfigurationError that names a missing option."""
        url, table, endpoint = options.get("url"), options.get("table"), options.get("endpoint")
        if not url:
            raise ConfigurationError(
                f'{FORMAT} needs the store: .option("url", "postgresql://user@host/database"). To CREATE TABLE, name '
                "no columns: Spark would not hand the table's OPTIONS on. OPTIONS (columns 'id, due') chooses them"
            )
        must_be_single(url)
        if table is None and endpoint is not None:
            table = f"{endpoint}.timeouts"
        if not table:
            raise ConfigurationError(f'{FORMAT} needs the endpoint: .option("endpoint", "sales"), or the "table"')
        return cls(
            url,
            table,
            options.get("schema"),
            options.get("passwordEnv"),
            options.get("passwordFile"),
            whole_option(options, "maxConnections", 1) if "maxConnections" in options else None,
            whole_option(options, "connectTimeout", CONNECT_TIMEOUT),
        )

    @property
    def options(self) -> Mapping[str, str]:
        """The values as options."""
        given = {
            "url": self.url,
            "table": self.table,
            "schema": self.schema,
            "passwordEnv": self.password_env,
            "passwordFile": self.password_file,
            "maxConnections": self.max_connections,
            "connectTimeout": self.connect_timeout,
        }
        return {name: str(value) for name, value in given.items() if value is not None}

    @property
    def connections(self) -> int:
        """How many connections the tasks of a job may have at a time; asks the server unless it was given."""
        return connection_limit(self.address, self.max_connections)

    @property
    def address(self) -> str:
        """The URL with its password, for the connections of a job.

        Raises ConfigurationError if the password is missing on this machine.
        """
        password: str | None = None
        if self.password_env is not None:
            password = os.environ.get(self.password_env)
            if password is None:
                raise ConfigurationError(f"passwordEnv={self.password_env!r} is not set on this machine: export it")
        elif self.password_file is not None:
            try:
                password = Path(self.password_file).read_text().strip()
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else "it is not text"
                raise ConfigurationError(
                    f"passwordFile={self.password_file!r} cannot be read on this machine: {why}"
                ) from None  # the cause may contain a part of the password
        url = self.url
        if password is not None:
            url = read_url(url).set(password=password).render_as_string(hide_password=False)
        return job_url(url, self.connect_timeout)

    def staging(self, name: str | None = None) -> BulkWriter:
        """Return a staging area of the store; a new area without a name."""
        return BulkWriter(self.address, self.table, schema=self.schema, name=name)

    def promoter(self, folder: ColdFolder, job: int) -> FilePromoter:
        """Return who promotes files of the store's cold tier, for a promotion of that number."""
        return FilePromoter(self.address, self.table, schema=self.schema, folder=folder, job=job)

    def pieces(self, folder: ColdFolder | None = None) -> PieceWriter:
        """Return a writer of pieces to the store, the files of whose cold tier are in that folder."""
        return PieceWriter(self.address, self.table, schema=self.schema, folder=folder)

    def level_pieces(self, folder: ColdFolder | None) -> LevelPieceWriter:
        """Return a writer of pieces to a broker and the store, the files of whose cold tier are in that folder."""
        return LevelPieceWriter(self.address, self.table, schema=self.schema, folder=folder)


def check_columns(schema: StructType) -> None:
    """Raise ConfigurationError for a missing, unknown or wrongly typed column."""
    wanted: dict[str, DataType] = {field.name: field.dataType for field in SOURCE_COLUMNS}
    given = {field.name.lower(): field.dataType for field in schema}
    if len(given) < len(schema):
        raise ConfigurationError(f"two columns of the DataFrame have one name: {', '.join(schema.names)}. Drop one")
    for name in REQUIRED:
        if name not in given:
            raise ConfigurationError(
                f"the DataFrame has no column {name!r}, only {', '.join(given)}: rename or add it. "
                f"The columns are {SOURCE_COLUMNS.simpleString()}"
            )
    for name, kind in given.items():
        if name not in wanted:
            raise ConfigurationError(
                f"column {name!r} is not a column of a message: drop it. The columns are {', '.join(wanted)}"
            )
        if not isinstance(kind, type(wanted[name])):
            use = CASTS[name]
            if name == "due":
                use = next(
                    (expression for type_, expression in INSTANT_EXPRESSIONS.items() if isinstance(kind, type_)), use
                )
            raise ConfigurationError(
                f"column {name!r} is {kind.simpleString()}, not {wanted[name].simpleString()}: use {use}"
            )


def whole_option(options: Mapping[str, str], name: str, default: int) -> int:
    """Return a whole number of 1 or more. Raises ConfigurationError."""
    given = options.get(name, str(default))
    if re.fullmatch("[0-9]{1,9}", given) is None or int(given) < 1:
        raise ConfigurationError(f"{name}={given[:80]!r} must be a whole number of 1 to 999999999")
    return int(given)


def choice(options: Mapping[str, str], name: str, choices: tuple[Choice, ...]) -> Choice:
    """Return the chosen value, by default the first. Raises ConfigurationError."""
    given = options.get(name, choices[0])
    for known in choices:
        if given == known:
            return known
    raise ConfigurationError(f"{name}={given!r} must be one of {', '.join(choices)}")


def instant_option(options: Mapping[str, str], name: str) -> datetime | None:
    """Return an instant, given with an offset from UTC; None if it is not given. Raises ConfigurationError."""
    given = options.get(name)
    if given is None:
        return None
    try:
        return in_utc(datetime.fromisoformat(given))
    except ValueError:
        raise ConfigurationError(f"{name}={given!r} must be an instant as in 2026-12-01T00:00:00Z") from None
