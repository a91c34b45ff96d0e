"""The timeout tables of NServiceBus' SQL persistence, so that a .NET endpoint's table can be used as it is.

See https://docs.particular.net/persistence/sql/.
"""

from __future__ import annotations

import contextlib
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Column, Index, MetaData, String, Table
from sqlalchemy.sql import quoted_name

from delayline.message import TimeoutHeaders, from_wire_time
from delayline.sql.schema import CONTENT, HOLDS_MESSAGES

if TYPE_CHECKING:
    from delayline.sql.dialect import Dialect

MAXIMUM_VERSION_LENGTH: Final = 23
#: The value of the column PersistenceVersion; .NET writes the version of its persistence.
PERSISTENCE_VERSION: Final = "delayline"
SAME_TIME: Final = timedelta(seconds=2)
#: The due time of a row without a time: .NET never dispatches it either.
NEVER: Final = datetime.max.replace(tzinfo=UTC)
#: The exact due time, in headers as .NET writes them in JSON.
EXPIRE: Final = re.compile(rf'"{re.escape(TimeoutHeaders.EXPIRE)}"\s*:\s*"([^"]*)"')


def table_prefix(endpoint_name: str) -> str:
    """Return the prefix of an endpoint's table names, as NServiceBus forms it."""
    return f"{endpoint_name.replace('.', '_')}_"


def timeout_table(prefix: str, schema: str | None, dialect: Dialect) -> Table:
    """Return the timeout table with this prefix. Raises ConfigurationError for a name that is too long."""
    shape = dialect.timeouts
    name = f"{prefix}TimeoutData"
    saga_index, time_index = ("Index_SagaId", "Index_Time")
    if shape.named_by_table:
        saga_index, time_index = f"{name}_SagaIdx", f"{name}_TimeIdx"
        dialect.catalog.kept_name(saga_index)
    return Table(
        quoted_name(dialect.catalog.kept_name(name), quote=True),
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
        info={HOLDS_MESSAGES: True},
        mysql_default_charset="ascii",
        mariadb_default_charset="ascii",
    )


class TimeoutTimes:
    """Converts due times from and to the Time column of a product: UTC without a time zone."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._rounded = dialect.timeouts.round_time
        self._lost = dialect.timeouts.time_lost

    def kept(self, due: datetime) -> Any:  # noqa: ANN401 - a value of the driver
        """Return the column's value for `due`, rounded up to its precision."""
        return self._dialect.values.to_due(due) if self._rounded is None else self._rounded(due.astimezone(UTC))

    def until(self, at: datetime) -> Any:  # noqa: ANN401 - a value of the driver
        """Return the value to compare due times with: no timeout due after `at` compares as due."""
        return self._dialect.values.to_until(at) if self._rounded is None else at.astimezone(UTC).replace(tzinfo=None)

    @property
    def is_exact(self) -> bool:
        """Whether the column keeps what .NET stores without loss."""
        return not self._lost

    def exact(self, kept: Any, headers: str | bytes | None, version: str | None = None) -> datetime:  # noqa: ANN401
        """Return the due time of a row: that of its headers where the column may have lost a part of it.

        Rows of delayline's own, by their version, have lost nothing: their times are rounded up.

        .NET writes the exact time into a header too. Without that header, or if it cannot be read or names another
        time than the column can have come from, the most that may be lost is added.
        """
        time = self.read(kept)
        if kept is None or not self._lost or version == PERSISTENCE_VERSION:
            return time
        decoded = headers.decode("utf-8", "replace") if isinstance(headers, bytes) else headers or ""
        match = EXPIRE.search(decoded)
        with contextlib.suppress(ValueError):
            if match is not None and -self._lost <= (expire := from_wire_time(match[1])) - time < SAME_TIME:
                return max(time, expire)
        return time + self._lost

    def read(self, kept: Any) -> datetime:  # noqa: ANN401 - a value of the driver
        """Return the due time of a column's value, NEVER for NULL."""
        if kept is None:
            return NEVER
        return kept.replace(tzinfo=UTC) if isinstance(kept, datetime) else self._dialect.values.from_due(kept)
