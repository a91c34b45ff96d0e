"""NHibernate's timeouts: one table for all endpoints, `TimeoutEntity`.

See https://docs.particular.net/persistence/nhibernate/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from sqlalchemy import Column, String, select

from delayline.migration.source import NO_ENDPOINT, SourcePartition
from delayline.migration.sources.nservicebus_sql import NServiceBusSql
from delayline.timeouts.nservicebus import timeout_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection

TABLE: Final = "TimeoutEntity"
LONGEST_DESTINATION: Final = 1024
LONGEST_ENDPOINT: Final = 440


class NHibernate(NServiceBusSql):
    """Timeouts stored by NHibernate; the column `Endpoint` has the endpoint's name."""

    kind: ClassVar[str] = "nhibernate"
    owner: ClassVar[str | None] = "Endpoint"

    def columns(self) -> list[Column[Any]]:
        """Return the columns that NHibernate maps."""
        types = {one.name: one.type for one in timeout_table("_", self.schema, self.dialect).columns}
        return [
            Column("Id", types["Id"], primary_key=True),
            Column("Destination", String(LONGEST_DESTINATION)),
            Column("SagaId", types["SagaId"]),
            Column("State", types["State"]),
            Column("Endpoint", String(LONGEST_ENDPOINT)),
            Column("Time", types["Time"]),
            Column("Headers", types["Headers"]),
        ]

    def partitions(self, connection: Connection) -> list[SourcePartition]:
        """Return a partition for each endpoint that has rows."""
        found = [name for name in self.table_names(connection) if name.casefold() == TABLE.casefold()]
        if not found:
            return []
        self.check_columns(connection, found[0])
        endpoint = self.table(found[0]).c.Endpoint
        rows = connection.execute(select(endpoint).distinct().where(endpoint.is_not(None)))
        return [SourcePartition(name, found[0], name) for name in sorted(rows.scalars())]

    def without_endpoint(self, connection: Connection) -> SourcePartition | None:
        """Return the rows whose `Endpoint` is NULL."""
        found = [name for name in self.table_names(connection) if name.casefold() == TABLE.casefold()]
        return SourcePartition(NO_ENDPOINT, found[0]) if found else None

    def names(self, partition: SourcePartition, endpoint: str) -> bool:
        """Tell whether they have the same name."""
        return partition.endpoint.casefold() == endpoint.casefold()

    def table_options(self) -> Mapping[str, Any]:
        """Return none: the table is of the database's own character set."""
        return {}
