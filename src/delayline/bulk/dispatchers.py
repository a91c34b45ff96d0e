"""Control rows of dispatchers that run as jobs: continue or stop, and the progress of their tasks; calls block."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy import BigInteger, Column, Float, Integer, MetaData, Table, delete, insert, inspect, select, update

from delayline.bulk.writer import blocking
from delayline.clock import ONE_SECOND
from delayline.errors import BackendUnusable, ConfigurationError
from delayline.sql.databases import database_at
from delayline.sql.deadlines import long_work
from delayline.sql.schema import DUE, MAXIMUM_NAME_LENGTH, TableGroup, register, text
from delayline.sql.setup import RequiredTables
from delayline.sql.shards.backend import map_named

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from sqlalchemy import Connection


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ShardMetrics:
    """Progress of a task of a dispatcher in its generation; lateness in seconds, None if unknown."""

    shard: int
    generation: int
    place: str
    """The machine and the process."""
    dispatched: int
    retried: int
    failed: int
    p50: float | None
    p99: float | None
    longest: float | None
    seen: datetime | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A job of a dispatcher: its tasks end when it does."""

    dispatcher: str
    owner: str
    number: int


class DispatcherTables:
    """The dispatcher's current owner, and the progress of its tasks."""

    def __init__(self, schema: str | None) -> None:
        metadata = MetaData(schema=schema)
        self.dispatchers: Table = Table(
            "delayline_dispatchers",
            metadata,
            Column("name", text(MAXIMUM_NAME_LENGTH), primary_key=True),
            Column("owner", text(MAXIMUM_NAME_LENGTH), nullable=False),
            Column("wave", BigInteger, nullable=False, key="generation"),
            Column("stopping", Integer, nullable=False),
            Column("until", DUE, nullable=False),
        )
        self.shards: Table = Table(
            "delayline_dispatcher_shards",
            metadata,
            Column("dispatcher", text(MAXIMUM_NAME_LENGTH), primary_key=True),
            Column("shard", Integer, primary_key=True, autoincrement=False),
            Column("wave", BigInteger, nullable=False, key="generation"),
            Column("place", text(MAXIMUM_NAME_LENGTH), nullable=False),
            Column("dispatched", BigInteger, nullable=False),
            Column("retried", BigInteger, nullable=False),
            Column("failed", BigInteger, nullable=False),
            Column("p50", Float(53)),
            Column("p99", Float(53)),
            Column("longest", Float(53)),
            Column("seen", DUE, nullable=False),
        )


@lru_cache(maxsize=64)
def dispatcher_tables(schema: str | None = None) -> DispatcherTables:
    """Return the tables in that schema, the connection's own where None."""
    return DispatcherTables(schema)


def _tables_of(_: object, schema: str | None) -> list[Table]:
    tables = dispatcher_tables(schema)
    return [tables.dispatchers, tables.shards]


DISPATCHERS: Final = register(TableGroup("dispatchers", _tables_of))


class DispatcherControl:
    """The rows of all dispatchers in a schema of a database, where their store is.

    Raises ConfigurationError for a map of shards, which has no place that is there whichever shard is down.
    """

    def __init__(self, url: str, *, schema: str | None = None) -> None:
        if map_named(url) is not None:
            raise ConfigurationError(
                "a dispatcher takes a single store, not a map of shards: use `delayline run`, whose processes have a "
                "poller in each shard"
            )
        self._database = database_at(url)
        self._dialect = self._database.dialect
        self._tables = dispatcher_tables(self._dialect.catalog.schema_of(schema))

    def create(self) -> None:
        """Create the tables, or upgrade them."""
        self._dialect.connections.must_exist()
        self._write(RequiredTables(self._dialect, self._tables.dispatchers.schema, DISPATCHERS).set_up)

    def begin(self, name: str, owner: str) -> None:
        """Take the dispatcher over: its former owner ends the generation and starts no other."""
        self._write(partial(self._begin, name=name, owner=owner))

    def next_generation(self, name: str, owner: str, lease: timedelta) -> Generation | None:
        """Begin the next generation, which lasts as long as the lease; None once stopped or taken over."""
        generation: Generation | None = self._write(partial(self._next_generation, name=name, owner=owner, lease=lease))
        return generation

    def goes_on(self, generation: Generation) -> bool:
        """Return whether the generation's tasks are to continue."""
        columns = self._tables.dispatchers.c
        query = select(
            columns.stopping, columns.generation, columns.owner, columns.until > self._dialect.values.in_seconds(0)
        )
        row = self._read(
            lambda connection: connection.execute(query.where(columns.name == generation.dispatcher)).first()
        )
        return row is not None and bool(row[3]) and tuple(row[:3]) == (0, generation.number, generation.owner)

    def stop(self, name: str) -> bool:
        """Ask the dispatcher to finish messages in flight and to stop; False if there is none of that name."""
        columns = self._tables.dispatchers.c
        change = update(self._tables.dispatchers).where(columns.name == name).values(stopping=1)
        # Not by the number of changed rows: MariaDB does not count a row that was 1 already.
        known = select(columns.name).where(columns.name == name)
        self._must_be_there()
        self._write(lambda connection: connection.execute(change))
        return self._read(lambda connection: connection.execute(known).first()) is not None

    def record_metrics(self, dispatcher: str, metrics: ShardMetrics) -> None:
        """Record a task's progress."""
        self._write(partial(self._record_metrics, dispatcher=dispatcher, metrics=metrics))

    def shards(self, name: str) -> list[ShardMetrics]:
        """Return the last progress of each task, by shard."""
        self._must_be_there()
        columns = self._tables.shards.c
        query = select(*(column.label(column.key) for column in columns if column.name != "dispatcher"))
        query = query.where(columns.dispatcher == name).order_by(columns.shard)
        rows = self._read(lambda connection: connection.execute(query).all())
        moment = self._dialect.values.from_due
        return [ShardMetrics(**{**row._mapping, "seen": moment(row.seen)}) for row in rows]

    def _begin(self, connection: Connection, *, name: str, owner: str) -> None:
        table, now = self._tables.dispatchers, self._dialect.values.in_seconds(0)
        nothing = {"name": name, "owner": owner, "generation": 0, "stopping": 0, "until": now}
        connection.execute(self._dialect.words.insert_new(table, "name").values(nothing))
        connection.execute(update(table).where(table.c.name == name).values(owner=owner, stopping=0))

    def _next_generation(self, connection: Connection, *, name: str, owner: str, lease: timedelta) -> Generation | None:
        table, seconds = self._tables.dispatchers, -(-lease // ONE_SECOND)
        query = (
            select(table.c.generation.label("number"), table.c.owner, table.c.stopping)
            .where(table.c.name == name)
            .with_for_update()
        )
        row = connection.execute(query).first()
        if row is None or row.owner != owner or row.stopping:
            return None
        until = self._dialect.values.in_seconds(seconds)
        connection.execute(update(table).where(table.c.name == name).values(generation=row.number + 1, until=until))
        return Generation(name, owner, row.number + 1)

    def _record_metrics(self, connection: Connection, *, dispatcher: str, metrics: ShardMetrics) -> None:
        table, now = self._tables.shards, self._dialect.values.in_seconds(0)
        values = {name: getattr(metrics, name) for name in ShardMetrics.__slots__ if name != "seen"}
        connection.execute(delete(table).where(table.c.dispatcher == dispatcher, table.c.shard == metrics.shard))
        connection.execute(insert(table).values(dispatcher=dispatcher, seen=now, **values))

    def _must_be_there(self) -> None:
        table = self._tables.dispatchers
        if not self._read(lambda connection: inspect(connection).has_table(table.name, schema=table.schema)):
            raise BackendUnusable(f"no dispatcher has ever run on {self._dialect}: start a dispatcher first")

    def _read(self, work: Callable[[Connection], Result]) -> Result:
        self._dialect.connections.must_exist()
        try:
            with self._dialect.connections.look() as connection:
                return work(connection)
        except self._dialect.errors.kinds as error:
            raise self._dialect.errors.translated(error) from error

    def _write(self, work: Callable[[Connection], Any]) -> Any:  # noqa: ANN401 - what the work returns
        return blocking(self._opened(work))

    @long_work
    async def _opened(self, work: Callable[[Connection], Any]) -> Any:  # noqa: ANN401
        await self._database.open()
        try:
            return await self._database.write(work)
        finally:
            await self._database.close()
