"""The timeout tables of NServiceBus' SQL persistence, so that a .NET endpoint's table can be used as it is.

See https://docs.particular.net/persistence/sql/.
"""

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
    """JSON on MariaDB, where it is an alias of LONGTEXT."""

    __visit_name__ = "JSON"


@dataclass(frozen=True, slots=True)
class Shape:
    """Column types of the timeout table on one product."""

    key: TypeEngine[Any]
    destination: TypeEngine[str]
    time: TypeEngine[Any]
    headers: TypeEngine[Any]
    nullable: bool = False
    """Whether Headers and PersistenceVersion may be NULL."""
    of_table: bool = False
    """Whether index names begin with the table's name."""


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
    """Return the prefix of an endpoint's table names, as NServiceBus forms it."""
    return f"{endpoint_name.replace('.', '_')}_"


def timeout_table(prefix: str, schema: str | None, dialect: Dialect) -> Table:
    """Return the timeout table with this prefix. Raises ConfigurationError for a name that is too long."""
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
    """Converts due times from and to the Time column of one product: UTC without a time zone."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._rounded = _ROUNDED.get(dialect.sql.name)

    def kept(self, due: datetime) -> Any:  # noqa: ANN401 - a value of the driver
        """Return the column's value for `due`, rounded up to its precision."""
        return self._dialect.to_due(due) if self._rounded is None else self._rounded(due.astimezone(UTC))

    def until(self, at: datetime) -> Any:  # noqa: ANN401 - a value of the driver
        """Return the value to compare due times with: no timeout due after `at` compares as due."""
        return self._dialect.to_until(at) if self._rounded is None else at.astimezone(UTC).replace(tzinfo=None)

    def read(self, kept: Any) -> datetime:  # noqa: ANN401 - a value of the driver
        """Return the due time of a column's value."""
        return kept.replace(tzinfo=UTC) if isinstance(kept, datetime) else self._dialect.from_due(kept)


def _whole_seconds(due: datetime) -> datetime:
    down = due.replace(microsecond=0, tzinfo=None)
    return down + ONE_SECOND if due.microsecond else down


#: Products whose Time column has another type than the Due column of a delayed message store.
_ROUNDED: Final[dict[str, Callable[[datetime], datetime]]] = {
    "postgresql": lambda due: due.replace(tzinfo=None),
    "mysql": _whole_seconds,
    "mariadb": _whole_seconds,
}
