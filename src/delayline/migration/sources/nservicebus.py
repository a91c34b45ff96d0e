"""Timeouts of .NET endpoints in SQL tables.

SQL persistence has a table `{prefix}TimeoutData` for each endpoint, NHibernate persistence a common table.
See https://docs.particular.net/persistence/sql/ and https://docs.particular.net/persistence/nhibernate/.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pyarrow as pa
from sqlalchemy import Column, String, Text, cast, null, select, type_coerce

from delayline.migration.rows import from_columns
from delayline.migration.source import NO_ENDPOINT, SourcePartition, TableSource
from delayline.timeouts.nservicebus import TimeoutTimes, table_prefix, timeout_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import ColumnElement, Connection, Table


TIMEOUT_DATA_SUFFIX: Final = "_TimeoutData"


class NServiceBusSql(TableSource):
    """Timeouts on PostgreSQL, MariaDB, MySQL or SQL Server as .NET has stored them.

    A table name has `_` for each `.` of its endpoint's name: give the endpoint's real name, and both are found.
    """

    kind: ClassVar[str] = "nservicebus-sql"
    key: ClassVar[str] = "Id"
    due: ClassVar[str] = "Time"
    body: ClassVar[str] = "State"
    destination: ClassVar[str | None] = "Destination"

    def columns(self) -> list[Column[Any]]:
        """Return the columns that .NET's installers make for this product."""
        made = timeout_table("_", self.schema, self.dialect).columns
        return [Column(own.name, own.type, primary_key=own.primary_key, nullable=own.nullable) for own in made]

    def partitions(self, connection: Connection) -> list[SourcePartition]:
        """Return a partition for each table with that suffix."""
        names = [
            name for name in self.table_names(connection) if name.casefold().endswith(TIMEOUT_DATA_SUFFIX.casefold())
        ]
        return [SourcePartition(name[: -len(TIMEOUT_DATA_SUFFIX)], name) for name in names]

    def names(self, partition: SourcePartition, endpoint: str) -> bool:
        """Return whether the table is the endpoint's, with or without dots."""
        prefix = table_prefix(endpoint).casefold()
        return partition.endpoint.casefold() in (endpoint.casefold(), prefix[:-1])

    def kept_due(self, due: datetime) -> Any:  # noqa: ANN401 - what the driver takes
        """Return the time without a zone, in UTC."""
        return TimeoutTimes(self.dialect).kept(due)

    def read_due(self, kept: Any) -> datetime:  # noqa: ANN401 - what the driver gives
        """Return the time in UTC."""
        return TimeoutTimes(self.dialect).read(kept)

    def selected(self, table: Table, *, bodies: bool = True) -> Sequence[ColumnElement[Any]]:
        """Return the columns that make a message; headers as the text they are, also where the column is JSON."""
        columns = table.c
        state = columns.State if bodies else null()
        key = cast(columns.Id, Text()) if self.dialect.timeouts.binary_keys else columns.Id
        return key, columns.Destination, columns.Time, type_coerce(columns.Headers, Text()), state

    def messages(self, rows: Sequence[Sequence[Any]]) -> pa.RecordBatch:
        """Return the messages, under the ids of their timeouts."""
        if not rows:
            return from_columns({})
        keys, destinations, dues, headers, bodies = zip(*rows, strict=True)
        ids = [str(key).lower() for key in keys]
        times = TimeoutTimes(self.dialect)
        if not times.is_exact:
            dues = tuple(
                None if due is None else times.exact(due, given) for due, given in zip(dues, headers, strict=True)
            )
        elif not all(
            isinstance(due, datetime) for due in dues
        ):  # Arrow reads times without a zone as UTC, which they are
            dues = tuple(map(times.read, dues))
        return from_columns({"id": ids, "destination": destinations, "due": dues, "headers": headers, "body": bodies})

    def table_options(self) -> Mapping[str, Any]:
        """Return the character set that .NET's installers give such a table."""
        return {"mysql_default_charset": "ascii", "mariadb_default_charset": "ascii"}


NHIBERNATE_TABLE: Final = "TimeoutEntity"
LONGEST_DESTINATION: Final = 1024
LONGEST_TIMEOUT_OWNER: Final = 440


class NHibernate(NServiceBusSql):
    """Timeouts stored by NHibernate; the column `Endpoint` has the endpoint's name."""

    kind: ClassVar[str] = "nhibernate"
    owner: ClassVar[str | None] = "Endpoint"

    def columns(self) -> list[Column[Any]]:
        """Return the columns that NHibernate maps."""
        types = {column.name: column.type for column in timeout_table("_", self.schema, self.dialect).columns}
        return [
            Column("Id", types["Id"], primary_key=True),
            Column("Destination", String(LONGEST_DESTINATION)),
            Column("SagaId", types["SagaId"]),
            Column("State", types["State"]),
            Column("Endpoint", String(LONGEST_TIMEOUT_OWNER)),
            Column("Time", types["Time"]),
            Column("Headers", types["Headers"]),
        ]

    def partitions(self, connection: Connection) -> list[SourcePartition]:
        """Return a partition for each endpoint that has rows."""
        tables = [name for name in self.table_names(connection) if name.casefold() == NHIBERNATE_TABLE.casefold()]
        if not tables:
            return []
        self.check_columns(connection, tables[0])
        endpoint = self.table(tables[0]).c.Endpoint
        rows = connection.execute(select(endpoint).distinct().where(endpoint.is_not(None)))
        return [SourcePartition(name, tables[0], name) for name in sorted(rows.scalars())]

    def without_endpoint(self, connection: Connection) -> SourcePartition | None:
        """Return the rows whose `Endpoint` is NULL."""
        tables = [name for name in self.table_names(connection) if name.casefold() == NHIBERNATE_TABLE.casefold()]
        return SourcePartition(NO_ENDPOINT, tables[0]) if tables else None

    def names(self, partition: SourcePartition, endpoint: str) -> bool:
        """Return whether both have the same name."""
        return partition.endpoint.casefold() == endpoint.casefold()

    def table_options(self) -> Mapping[str, Any]:
        """Return none: the table is of the database's own character set."""
        return {}
