"""The schedules of a SQL store: a row each, in the transactions of its messages."""

from __future__ import annotations

import json
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import (
    Column,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    bindparam,
    delete,
    inspect,
    select,
    update,
)

from delayline.delayed.schedules import MAXIMUM_SCHEDULE_NAME_LENGTH, Schedule
from delayline.message import MAXIMUM_DESTINATION_LENGTH
from delayline.sql.prepared import Prepared
from delayline.sql.schema import (
    CONTENT,
    DUE,
    JSON_TEXT,
    MAXIMUM_NAME_LENGTH,
    MAXIMUM_TABLE_NAME_LENGTH,
    TableGroup,
    register,
    text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    from delayline.sql.database import Database
    from delayline.sql.dialect import Dialect
    from delayline.transaction import Transaction

LONGEST_RECURRENCE: Final = 350


@lru_cache(maxsize=64)
def schedules_table(schema: str | None = None) -> Table:
    """Return the table of schedules in that schema, the connection's own where None."""
    return Table(
        "delayline_schedules",
        MetaData(schema=schema),
        Column("store", text(MAXIMUM_TABLE_NAME_LENGTH), nullable=False),
        Column("name", text(MAXIMUM_SCHEDULE_NAME_LENGTH), nullable=False),
        Column("recurrence", text(LONGEST_RECURRENCE), nullable=False),
        Column("destination", text(MAXIMUM_DESTINATION_LENGTH), nullable=False),
        Column("headers", CONTENT, nullable=False),
        Column("body", CONTENT, nullable=False),
        Column("missed", text(MAXIMUM_NAME_LENGTH), nullable=False),
        Column("since", DUE, nullable=False),
        Column("next_at", DUE),
        Column("last_at", DUE),
        Column("paused", Integer, nullable=False),
        Column("declared", text(MAXIMUM_NAME_LENGTH), nullable=False),
        Column("superseded", JSON_TEXT, nullable=False),
        PrimaryKeyConstraint("store", "name"),
    )


SCHEDULES: Final = register(TableGroup("schedules", lambda _, schema: [schedules_table(schema)]))


class ScheduleStatements:
    """The statements on schedules."""

    def __init__(self, table: Table, dialect: Dialect) -> None:
        columns, sql = table.c, dialect.sql
        self.names: list[str] = [column.name for column in columns]
        of_store, named = columns.store == bindparam("of"), columns.name == bindparam("key")
        read, changed = select(table).where(of_store), self.names[2:]
        values = {name: bindparam(f"new_{name}", type_=columns[name].type) for name in changed}
        self.all: Prepared = Prepared(read.order_by(columns.name), sql, ["of"])
        self.locked: Prepared = Prepared(read.where(named).with_for_update(), sql, ["of", "key"])
        self.insert: Prepared = Prepared(dialect.words.insert_counted(table, "name"), sql, self.names)
        self.update: Prepared = Prepared(
            update(table).where(of_store, named).values(**values),
            sql,
            [*(f"new_{name}" for name in changed), "of", "key"],
        )
        self.delete: Prepared = Prepared(delete(table).where(of_store, named), sql, ["of", "key"])


class SqlScheduleRows:
    """The schedules of a store.

    Args:
        database: Its database, which the store opens.
        schema: The schema of its tables.
        store: Returns the name of its table; raises NotStarted until it is open.
    """

    def __init__(self, database: Database, schema: str | None, store: Callable[[], str]) -> None:
        self._database = database
        self._store = store
        self.table: Table = schedules_table(schema)
        self.required: bool = False
        """Whether the store creates and checks the table."""

    @cached_property
    def _statements(self) -> ScheduleStatements:
        return ScheduleStatements(self.table, self._database.dialect)

    async def exist(self) -> bool:
        """Return whether the table exists."""
        name, schema = self.table.name, self.table.schema
        return await self._database.read(lambda connection: inspect(connection).has_table(name, schema=schema))

    def require(self) -> None:
        """Let the store create and check the table."""
        self.required = True

    async def all(self) -> Sequence[Schedule]:
        """Return the schedules by name."""
        rows = await self._database.read(lambda connection: self._statements.all.rows(connection, self._store()))
        return list(map(self._schedule_of, rows))

    async def locked(self, name: str, transaction: Transaction) -> Schedule | None:
        """Return the schedule with that name, locked until the transaction ends."""
        lock = partial(self._rows, name=name)
        rows = await self._database.write(lock, transaction)
        return self._schedule_of(rows[0]) if rows else None

    async def insert(self, schedule: Schedule, transaction: Transaction) -> bool:
        """Keep a new schedule; return False if there is one with its name."""

        def insert(connection: Connection) -> bool:
            try:
                return self._statements.insert.change(connection, *self._values_of(schedule)) > 0
            except self._database.dialect.errors.kinds as error:
                if self._database.dialect.errors.is_duplicate(error):
                    return False
                raise

        return await self._database.write(insert, transaction)

    async def update(self, schedule: Schedule, transaction: Transaction) -> None:
        """Replace the schedule with that name."""
        values = self._values_of(schedule)[2:]
        await self._database.write(
            lambda connection: self._statements.update.change(connection, *values, self._store(), schedule.name),
            transaction,
        )

    async def delete(self, name: str, transaction: Transaction) -> None:
        """Delete the schedule with that name."""
        await self._database.write(
            lambda connection: self._statements.delete.change(connection, self._store(), name), transaction
        )

    def _rows(self, connection: Connection, name: str) -> Sequence[Any]:
        return self._statements.locked.rows(connection, self._store(), name)

    def _values_of(self, schedule: Schedule) -> tuple[Any, ...]:
        values: dict[str, Any] = {name: getattr(schedule, name, None) for name in self._statements.names}
        return tuple(
            (
                {
                    **values,
                    "store": self._store(),
                    "headers": json.dumps(dict(schedule.headers)).encode(),
                    "since": self._kept(schedule.since),
                    "next_at": self._kept(schedule.next_at),
                    "last_at": self._kept(schedule.last_at),
                    "paused": int(schedule.paused),
                    "superseded": json.dumps(list(schedule.superseded)),
                }
            ).values()
        )

    def _schedule_of(self, row: Sequence[Any]) -> Schedule:
        _, *values = row
        kept = dict(zip(self._statements.names[1:], values, strict=True))
        due = self._database.dialect.values.from_due
        return Schedule(
            **kept
            | {
                "headers": json.loads(bytes(kept["headers"])),
                "body": bytes(kept["body"]),
                "since": due(kept["since"]),
                "next_at": None if kept["next_at"] is None else due(kept["next_at"]),
                "last_at": None if kept["last_at"] is None else due(kept["last_at"]),
                "paused": bool(kept["paused"]),
                "superseded": tuple(json.loads(kept["superseded"])),
            }
        )

    def _kept(self, instant: datetime | None) -> object:
        return None if instant is None else self._database.dialect.values.to_due(instant)
