"""The tables of NServiceBus' SQL persistence (reference 3.1), so that a .NET endpoint's can be taken over as it is."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import BigInteger, Column, Index, MetaData, String, Table, Text, Uuid
from sqlalchemy.dialects import mssql, mysql, postgresql
from sqlalchemy.sql import quoted_name

from delayline.message import MAXIMUM_DESTINATION_LENGTH
from delayline.sql.dialects.sqlserver_sql import DueTime
from delayline.sql.schema import CONTENT, untyped

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.types import TypeEngine

    from delayline.sql.dialect import Dialect

ONE_SECOND: Final = timedelta(seconds=1)
MAXIMUM_VERSION_LENGTH: Final = 23


class MariadbJson(mysql.LONGTEXT):
    """What MariaDB makes of JSON: a text."""

    __visit_name__ = "JSON"


@dataclass(frozen=True, slots=True)
class Shape:
    """How one product keeps timeouts."""

    key: TypeEngine[Any]
    destination: TypeEngine[str]
    time: TypeEngine[Any]
    headers: TypeEngine[Any]
    nullable: bool = False
    """Whether headers and version may be NULL."""
    of_table: bool = False
    """Whether the names of indexes begin with the table's."""


def _in_mysql(headers: TypeEngine[Any]) -> Shape:
    return Shape(mysql.VARCHAR(38), mysql.NVARCHAR(MAXIMUM_DESTINATION_LENGTH), mysql.DATETIME(), headers)


_DESTINATION: Final = String(MAXIMUM_DESTINATION_LENGTH)
_SHAPES: Final[dict[str, Shape]] = {
    "postgresql": Shape(Uuid(), _DESTINATION, postgresql.TIMESTAMP(), Text(), nullable=True, of_table=True),
    "mariadb": _in_mysql(MariadbJson()),
    "mysql": _in_mysql(mysql.JSON()),
    "mssql": Shape(
        untyped.UNIQUEIDENTIFIER(), mssql.NVARCHAR(MAXIMUM_DESTINATION_LENGTH), DueTime(), untyped.NVARCHAR("max")
    ),
    "sqlite": Shape(String(36), _DESTINATION, BigInteger(), Text(), nullable=True, of_table=True),
}


def table_prefix(endpoint_name: str) -> str:
    """Return what the names of an endpoint's tables begin with, as NServiceBus makes it."""
    return f"{endpoint_name.replace('.', '_')}_"


def timeout_table(prefix: str, schema: str | None, dialect: Dialect) -> Table:
    """Return an endpoint's table of timeouts. Raises ConfigurationError for a name too long."""
    shape = _SHAPES[dialect.sql.name]
    name = f"{prefix}TimeoutData"
    saga_index, time_index = ("Index_SagaId", "Index_Time")
    if shape.of_table:
        saga_index, time_index = f"{name}_SagaIdx", f"{name}_TimeIdx"
        dialect.kept_name(saga_index)
    return Table(
        quoted_name(dialect.kept_name(name), quote=True),
        MetaData(schema=schema),
        Column("Id", shape.key, primary_key=True),
        Column("Destination", shape.destination),
        Column("SagaId", shape.key),
        Column("State", CONTENT),
        Column("Time", shape.time),
        Column("Headers", shape.headers, nullable=shape.nullable),
        Column("PersistenceVersion", String(MAXIMUM_VERSION_LENGTH), nullable=shape.nullable),
        Index(saga_index, "SagaId"),
        Index(time_index, "Time"),
        mysql_default_charset="ascii",
        mariadb_default_charset="ascii",
    )


class TimeoutTimes:
    """How the Time column of one product keeps due times: without a zone, in UTC."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._rounded = _ROUNDED.get(dialect.sql.name)

    def kept(self, due: datetime) -> Any:  # noqa: ANN401 - what the driver takes
        """Return what the column keeps: never earlier than `due`."""
        return self._dialect.to_due(due) if self._rounded is None else self._rounded(due.astimezone(UTC))

    def until(self, at: datetime) -> Any:  # noqa: ANN401 - as above
        """Return what due times are compared with: nothing due after `at` is not after it."""
        return self._dialect.to_until(at) if self._rounded is None else at.astimezone(UTC).replace(tzinfo=None)

    def read(self, kept: Any) -> datetime:  # noqa: ANN401 - what the driver gives
        """Return the due time that the column keeps."""
        return kept.replace(tzinfo=UTC) if isinstance(kept, datetime) else self._dialect.from_due(kept)


def _whole_seconds(due: datetime) -> datetime:
    down = due.replace(microsecond=0, tzinfo=None)
    return down + ONE_SECOND if due.microsecond else down


#: Where the column is another one than that of a delayed message store.
_ROUNDED: Final[dict[str, Callable[[datetime], datetime]]] = {
    "postgresql": lambda due: due.replace(tzinfo=None),
    "mysql": _whole_seconds,
    "mariadb": _whole_seconds,
}
