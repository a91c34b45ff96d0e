"""Sources that are database tables, with a partition for each endpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from sqlalchemy import BigInteger, Column, MetaData, Table, and_, case, func, inspect, select
from sqlalchemy.sql import quoted_name

from delayline.errors import BackendUnusable, ConfigurationError
from delayline.sql.database import Database
from delayline.sql.databases import database_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql import SparkSession
    from sqlalchemy import ColumnElement, Connection, FromClause

    from delayline.sql.dialect import Dialect

#: Columns that a held row has besides its own.
BATCH_COLUMN: Final = "delayline_batch"
NUMBER_COLUMN: Final = "delayline_number"
#: Rows without a due time that are named.
NAMES_SHOWN: Final = 10
#: How rows of a shared table that name no endpoint are called.
NO_ENDPOINT: Final = "(no endpoint)"
#: The range of times that every product supports; a preview lists rows outside it, and no run moves them.
EARLIEST_MOVABLE: Final = datetime(1753, 1, 1, tzinfo=UTC)
LATEST_MOVABLE: Final = datetime(9999, 12, 31, 23, 59, 58, tzinfo=UTC)


@dataclass(frozen=True)
class SourcePartition:
    """The pending messages of an endpoint in a source."""

    endpoint: str
    """As the source names it, which may be another spelling: `Sales_Orders` for Sales.Orders."""
    table: str
    owner: str | None = None
    """Whose rows of a table that endpoints share."""


class TableSource(ABC):
    """A kind of table in a database. Pickled to tasks; opens nothing by itself."""

    kind: ClassVar[str]
    key: ClassVar[str]
    """The column that names a row."""
    due: ClassVar[str]
    body: ClassVar[str]
    """The column with most of a row's bytes."""
    destination: ClassVar[str | None] = None
    """The column with the destination, if the table has one."""
    owner: ClassVar[str | None] = None
    """The column with the endpoint's name, if endpoints share the table."""
    outside: ClassVar[str] = "it has no due time, or one beyond the years 1753 to 9999"
    """Why some rows of an endpoint are never moved."""
    ownerless: ClassVar[str] = (
        "it names no endpoint, so no --endpoint has it: write its endpoint into its row, or delete it"
    )
    """Why rows of a shared table without an endpoint are never moved."""

    def __init__(self, url: str, *, schema: str | None = None) -> None:
        self.url = url
        self.schema: str | None = self.database.dialect.catalog.schema_of(schema)

    @property
    def database(self) -> Database:
        """This process's database for the URL."""
        database: Database | None = self.__dict__.get("_kept_database")
        if database is None:
            database = self.__dict__["_kept_database"] = database_at(self.url)
        return database

    @property
    def dialect(self) -> Dialect:
        """The database's."""
        return self.database.dialect

    def __str__(self) -> str:
        """Return the database, without secrets."""
        return str(self.dialect)

    def must_exist(self) -> None:
        """Raise BackendUnusable if the database does not exist and connecting would create an empty database."""
        self.dialect.connections.must_exist()

    def collect(self, endpoints: Sequence[str] | None, cutoff: datetime | None, spark: SparkSession) -> None:
        """No-op: rows of a table need no collecting."""
        del endpoints, cutoff, spark

    def put_back(self) -> int:
        """Do nothing, and return that nothing was left over."""
        return 0

    def size(self, rows: FromClause) -> ColumnElement[int]:
        """Return how many bytes a row's body has, null for none."""
        return func.length(rows.c[self.body])

    def name_column(self, table: Table) -> ColumnElement[Any]:
        """Return the text that identifies a row's message to users."""
        return table.c[self.key]

    def shown_name(self, kept: Any) -> str:  # noqa: ANN401 - what the driver gives
        """Return the name as people read it."""
        return str(kept)

    def number_kept(self, connection: Connection) -> int:
        """Return the number of messages collected from elsewhere that have not moved; 0 for tables."""
        del connection
        return 0

    def doubtful(self, connection: Connection, name: str) -> list[str]:
        """Return the ids of rows in a held table that may be where they came from as well: none of a table's are."""
        del connection, name
        return []

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_kept")}

    @abstractmethod
    def columns(self) -> list[Column[Any]]:
        """Return new columns, all that such a table has, in their order."""

    @abstractmethod
    def partitions(self, connection: Connection) -> list[SourcePartition]:
        """Return the partitions, ordered by name; raises BackendUnusable for tables of an unknown shape."""

    @abstractmethod
    def kept_due(self, due: datetime) -> Any:  # noqa: ANN401 - what the driver takes
        """Return the due column's value for an instant."""

    @abstractmethod
    def read_due(self, kept: Any) -> datetime:  # noqa: ANN401 - what the driver gives
        """Return the instant that the due column keeps."""

    @abstractmethod
    def selected(self, table: Table, *, bodies: bool = True) -> Sequence[ColumnElement[Any]]:
        """Return the columns that `messages` needs; null instead of bodies for a preview."""

    @abstractmethod
    def messages(self, rows: Sequence[Sequence[Any]]) -> pa.RecordBatch:
        """Return id, destination, due, headers and body of each row, null where it has none."""

    def names(self, partition: SourcePartition, endpoint: str) -> bool:
        """Return whether the user's name denotes this partition."""
        return partition.endpoint.casefold() == endpoint.casefold()

    def table(self, name: str) -> Table:
        """Return the source's table of that name, the same each time."""
        kept = self._kept(name)
        return self._made(name, self.columns()) if kept is None else kept

    def held(self, name: str) -> Table:
        """Return a table beside it, for rows that are on their way: as they are, in numbered batches."""
        kept = self._kept(name)
        if kept is not None:
            return kept
        own = [Column(column.name, column.type, nullable=True) for column in self.columns()]
        own[[column.name for column in own].index(self.key)].unique = not self.dialect.bulk.locks_tables
        batch, number = (
            Column(key, BigInteger, primary_key=True, autoincrement=False) for key in (BATCH_COLUMN, NUMBER_COLUMN)
        )
        return self._made(name, [batch, number, *own])

    def movable(self, partition: SourcePartition, cutoff: datetime | None) -> ColumnElement[bool]:
        """Return the condition on the partition's rows due at the cutoff or later; on all its rows for None."""
        columns = self.table(partition.table).c
        first = EARLIEST_MOVABLE if cutoff is None else max(cutoff, EARLIEST_MOVABLE)
        times = and_(columns[self.due] >= self.kept_due(first), columns[self.due] <= self.kept_due(LATEST_MOVABLE))
        return and_(times, self.owned(partition))

    def unmovable(self, partition: SourcePartition) -> ColumnElement[bool]:
        """Return the condition on the partition's rows that no run moves; `outside` has the reason."""
        if self.belongs_to_none(partition):
            return self.owned(partition)
        return and_(self.owned(partition), case((self.movable(partition, None), 1), else_=0) == 0)

    def belongs_to_none(self, partition: SourcePartition) -> bool:
        """Return whether the partition has the rows of a shared table that name no endpoint."""
        return self.owner is not None and partition.owner is None

    def without_endpoint(self, connection: Connection) -> SourcePartition | None:
        """Return the partition of a shared table's rows that name no endpoint; None if there cannot be any."""
        del connection
        return None

    def owned(self, partition: SourcePartition) -> ColumnElement[bool]:
        """Return the condition on the table's rows that they are the partition's."""
        table = self.table(partition.table)
        return and_(True, *([] if self.owner is None else [table.c[self.owner] == partition.owner]))  # IS NULL for None

    def check_columns(self, connection: Connection, name: str) -> None:
        """Raise BackendUnusable for a table with other columns than this kind's."""
        present = {column["name"] for column in inspect(connection).get_columns(name, schema=self.schema)}
        known = {column.name for column in self.columns()}
        for missing in sorted(known - present):
            raise BackendUnusable(self._unknown(name, f"it has no column {missing!r}"))
        for unknown in sorted(present - known):
            raise BackendUnusable(self._unknown(name, f"its column {unknown!r} is none that {self.kind} has"))

    def table_names(self, connection: Connection) -> list[str]:
        """Return the names of the schema's tables, sorted."""
        return sorted(inspect(connection).get_table_names(schema=self.schema))

    def _unknown(self, name: str, why: str) -> str:
        return (
            f"table {name!r} of {self.dialect} is of an unknown version: {why}. Nothing was changed; move the other "
            "endpoints one by one with --endpoint, or upgrade delayline"
        )

    def _kept(self, name: str) -> Table | None:
        table: Table | None = self.__dict__.setdefault("_kept_tables", {}).get(name)
        return table

    def _made(self, name: str, columns: Sequence[Column[Any]]) -> Table:
        made = Table(quoted_name(name, quote=True), MetaData(schema=self.schema), *columns, **self.table_options())
        self.__dict__["_kept_tables"][name] = made
        return made

    def table_options(self) -> Mapping[str, Any]:
        """Return SQLAlchemy's options for such a table."""
        return {}


def chosen(
    source: TableSource, partitions: Sequence[SourcePartition], endpoints: Sequence[str] | None, *, each: bool = True
) -> list[SourcePartition]:
    """Return the partitions of the endpoints, named as the user names them; all partitions for None.

    Args:
        source: names the endpoint of each partition.
        partitions: all partitions of the source.
        endpoints: as the user gave them; all if None.
        each: whether an endpoint without messages is an error.

    Raises:
        ConfigurationError: With `each`, naming an endpoint that has none.
    """
    if endpoints is None:
        return list(partitions)
    selected: list[SourcePartition] = []
    for endpoint in dict.fromkeys(endpoints):
        mine = [partition for partition in partitions if source.names(partition, endpoint)]
        if each and not mine:
            known = ", ".join(repr(partition.endpoint) for partition in partitions) or "none at all"
            raise ConfigurationError(f"no endpoint {endpoint!r} has timeouts in {source}; there are: {known}")
        selected += [SourcePartition(endpoint, partition.table, partition.owner) for partition in mine]
    return selected


class SkippedMessage(NamedTuple):
    """Rows that no run moves, for a common reason."""

    reason: str
    rows: int
    names: Sequence[str]
    """Of some of them."""


def skipped_rows(connection: Connection, source: TableSource, endpoints: Sequence[str] | None) -> list[SkippedMessage]:
    """Return the rows of the endpoints that no run moves, by reason; for None, of all rows."""
    partitions = chosen(source, source.partitions(connection), endpoints, each=False)
    ownerless = source.without_endpoint(connection) if endpoints is None else None
    skipped: list[SkippedMessage] = []
    for reason, those in ((source.outside, partitions), (source.ownerless, [] if ownerless is None else [ownerless])):
        rows, names = 0, list[str]()
        for partition in those:
            table, mine = source.table(partition.table), source.unmovable(partition)
            rows += int(connection.execute(select(func.count()).select_from(table).where(mine)).scalar_one())
            some = connection.execute(select(source.name_column(table)).where(mine).limit(NAMES_SHOWN)).scalars()
            names += [source.shown_name(value) for value in some]
        if rows:
            skipped.append(SkippedMessage(reason, rows, names[:NAMES_SHOWN]))
    return skipped
