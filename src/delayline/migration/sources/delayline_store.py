"""delayline's own stores: a table an endpoint, `{endpoint}.timeouts`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from sqlalchemy import Column, null

from delayline.delayed.columns import BULK_COLUMNS, ColumnKind
from delayline.migration.rows import from_columns
from delayline.migration.source import SourcePartition, TableSource

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    import pyarrow as pa
    from sqlalchemy import ColumnElement, Connection, Table

TIMEOUTS_SUFFIX: Final = ".timeouts"


class DelaylineStore(TableSource):
    """Pending messages of delayed message stores; their endpoints must be stopped, as they hold messages in memory."""

    kind: ClassVar[str] = "delayline"
    key: ClassVar[str] = "id"
    due: ClassVar[str] = "due"
    body: ClassVar[str] = "body"
    destination: ClassVar[str | None] = "destination"

    def columns(self) -> list[Column[Any]]:
        """Return the columns of a store's table, but for its own numbering."""
        made = self.dialect.catalog.timeouts_table("_", self.schema).columns
        return [Column(column.name, column.type, nullable=column.nullable) for column in made if column.name != "seq"]

    def partitions(self, connection: Connection) -> list[SourcePartition]:
        """Return a partition for each store."""
        names = [name for name in self.table_names(connection) if name.endswith(TIMEOUTS_SUFFIX)]
        return [SourcePartition(name[: -len(TIMEOUTS_SUFFIX)], name) for name in names]

    def check_columns(self, connection: Connection, name: str) -> None:
        """Do nothing: the schema's version was checked."""

    def kept_due(self, due: datetime) -> Any:  # noqa: ANN401 - what the driver takes
        """Return the pending messages of a store."""
        return self.dialect.values.to_due(due)

    def read_due(self, kept: Any) -> datetime:  # noqa: ANN401 - what the driver gives
        """Return the instant."""
        return self.dialect.values.from_due(kept)

    def selected(self, table: Table, *, bodies: bool = True) -> Sequence[ColumnElement[Any]]:
        """Return the columns of a message."""
        return [
            table.c[column.name] if bodies or column.kind is not ColumnKind.BYTES else null() for column in BULK_COLUMNS
        ]

    def messages(self, rows: Sequence[Sequence[Any]]) -> pa.RecordBatch:
        """Return the messages as they are."""
        from_due = self.dialect.values.from_due
        reads: Mapping[ColumnKind, Callable[[Any], Any]] = {
            ColumnKind.INSTANT: lambda kept: None if kept is None else from_due(kept),
            ColumnKind.HEADERS: _text,
        }
        values_of = dict(zip(BULK_COLUMNS, zip(*rows, strict=True), strict=False))
        return from_columns(
            {
                column.name: [*map(reads[column.kind], values)] if column.kind in reads else values
                for column, values in values_of.items()
            }
        )


def _text(headers: bytes | None) -> str:
    """Return the headers as text; for damaged headers a text that no reader accepts."""
    try:
        return bytes(headers or b"").decode()
    except UnicodeDecodeError:
        return "damaged"
