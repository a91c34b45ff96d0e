"""The timeout tables of NServiceBus' SQL persistence, so that a .NET endpoint's table can be used as it is.

See https://docs.particular.net/persistence/sql/.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Column, Index, MetaData, String, Table
from sqlalchemy.sql import quoted_name

from delayline.sql.schema import CONTENT

if TYPE_CHECKING:
    from delayline.sql.dialect import Dialect

ONE_SECOND: Final = timedelta(seconds=1)
MAXIMUM_VERSION_LENGTH: Final = 23


def table_prefix(endpoint_name: str) -> str:
    """Return the prefix of an endpoint's table names, as NServiceBus forms it."""
    return f"{endpoint_name.replace('.', '_')}_"


def timeout_table(prefix: str, schema: str | None, dialect: Dialect) -> Table:
    """Return the timeout table with this prefix. Raises ConfigurationError for a name that is too long."""
    shape = dialect.timeout_shape
    name = f"{prefix}TimeoutData"
    saga_index, time_index = ("Index_SagaId", "Index_Time")
    if shape.named_by_table:
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
        self._rounded = dialect.timeout_shape.round_time

    def kept(self, due: datetime) -> Any:  # noqa: ANN401 - a value of the driver
        """Return the column's value for `due`, rounded up to its precision."""
        return self._dialect.to_due(due) if self._rounded is None else self._rounded(due.astimezone(UTC))

    def until(self, at: datetime) -> Any:  # noqa: ANN401 - a value of the driver
        """Return the value to compare due times with: no timeout due after `at` compares as due."""
        return self._dialect.to_until(at) if self._rounded is None else at.astimezone(UTC).replace(tzinfo=None)

    def read(self, kept: Any) -> datetime:  # noqa: ANN401 - a value of the driver
        """Return the due time of a column's value."""
        return kept.replace(tzinfo=UTC) if isinstance(kept, datetime) else self._dialect.from_due(kept)
