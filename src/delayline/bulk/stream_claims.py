"""Due messages on their way into a stream: taken out of a store's table into a table where no poller looks for them.

Each gets a number. A stream reads ranges of numbers, repeatedly if need be, until it commits them.
"""

from __future__ import annotations

import hashlib
import uuid
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import BigInteger, Column, MetaData, Table, delete, func, insert, select, update

from delayline.bulk.scan import readings
from delayline.delayed.columns import BULK_NAMES, StoredRow, bulk_values
from delayline.errors import BackendUnavailable
from delayline.sql.databases import database_at
from delayline.sql.deadlines import job_work
from delayline.sql.prepared import Prepared
from delayline.sql.schema import TableGroup, message_columns, register, text
from delayline.sql.setup import RequiredTables
from delayline.sql.store import SqlDelayedMessageStore
from delayline.transaction import TransactionMode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    from delayline.message import DelayedMessage
    from delayline.sql.transactions import SqlTransaction

KEY_LENGTH: Final = 64
CLAIMS_AT_ONCE: Final = 1000
BYTES_AT_ONCE: Final = 64 * 1024 * 1024
#: Due messages that are counted at most.
MOST_COUNTED: Final = 1_000_000
CLAIM_COLUMNS: Final = ("reader", "claim", *BULK_NAMES)


@lru_cache(maxsize=64)
def stream_tables(schema: str | None = None) -> tuple[Table, Table]:
    """Return the tables of readers and of the messages they have claimed."""
    metadata = MetaData(schema=schema)
    readers = Table(
        "delayline_spark_readers",
        metadata,
        Column("reader", text(KEY_LENGTH), primary_key=True),
        Column("owner", text(KEY_LENGTH), nullable=False),
        Column("last", BigInteger, nullable=False),
    )
    claimed = Table(
        "delayline_spark_taken",
        metadata,
        Column("reader", text(KEY_LENGTH), primary_key=True),
        Column("claim", BigInteger, primary_key=True, autoincrement=False),
        *message_columns(),
    )
    return readers, claimed


STREAM_CLAIMS: Final = register(TableGroup("streams", lambda _, schema: stream_tables(schema)))


class StreamClaims:
    """A stream's way of taking messages out of a store; of two with the same name, the later goes on."""

    def __init__(self, url: str, table_name: str, schema: str | None, app: str) -> None:
        self._database = database_at(url)
        self._store = SqlDelayedMessageStore(url, table_name=table_name, schema=schema)
        self._table = self._database.dialect.catalog.store_table(table_name, schema)
        self._readers, self._claimed = stream_tables(self._database.dialect.catalog.schema_of(schema))
        self._app = app
        self._reader = hashlib.sha256(f"{table_name}\0{app}".encode()).hexdigest()[:KEY_LENGTH]
        self._owner = uuid.uuid4().hex

    @job_work
    async def open(self) -> None:
        """Connect and take over from an earlier reader of this name. Raises BackendUnusable without a store's table."""
        self._database.dialect.connections.must_exist()
        await self._store.initialize("", TransactionMode.RECEIVE_ONLY)
        required = RequiredTables(self._database.dialect, self._readers.schema, STREAM_CLAIMS)
        await self._database.set_up(required.plan, required.set_up)
        await self._database.write(self._own)

    async def close(self) -> None:
        """Disconnect; claims stay."""
        await self._store.close()

    @job_work
    async def first(self) -> int:
        """Return the number before the first that is not done with."""
        return await self._database.read(self._first)

    @job_work
    async def behind(self) -> int:
        """Return the last number given, plus how many messages are due by now, counted up to a million."""
        return await self._database.read(self._behind)

    @job_work
    async def take(self, done: int, limit: int | None, until: datetime | None = None) -> int:
        """Delete claims with numbers up to `done`, claim up to `limit` due messages; return the last number given.

        Args:
            done: the highest number whose message the stream has committed.
            limit: how many messages to claim at most; all due messages if None.
            until: claim no message due later.

        Raises:
            BackendUnavailable: Another stream has taken over.
        """
        async with self._database.transaction() as transaction:
            last = await transaction.run(partial(self._begin, done=done))
            at = self._store.clock().now()
            at = at if until is None else min(at, until)
            left = limit
            while left is None or left > 0:
                most = CLAIMS_AT_ONCE if left is None else min(left, CLAIMS_AT_ONCE)
                messages = await self._store.fetch_due(at, most, max_bytes=BYTES_AT_ONCE, transaction=transaction)
                if not messages:
                    break
                await self._move(messages, last, transaction)
                last += len(messages)
                left = None if left is None else left - len(messages)
            await transaction.run(partial(self._end, last=last))
        return last

    def rows(self, columns: Sequence[str], start: int, end: int, at_once: int) -> Iterator[list[list[Any]]]:
        """Yield the messages with numbers above `start` up to `end`, some at a time; blocks, in any process."""
        dialect, claimed = self._database.dialect, self._claimed.c
        reads = readings(columns, dialect)
        mine = (claimed.reader == self._reader, claimed.claim > start, claimed.claim <= end)
        query = select(*(claimed[name] for name in columns), claimed.claim).where(*mine).order_by(claimed.claim)
        try:
            with dialect.connections.look() as connection:
                while True:
                    rows = connection.execute(query.where(claimed.claim > start).limit(at_once)).all()
                    if not rows:
                        return
                    yield [[read(value) for read, value in zip(reads, row[:-1], strict=True)] for row in rows]
                    start = rows[-1].claim
        except dialect.errors.kinds as error:
            raise dialect.errors.translated(error) from error

    def _own(self, connection: Connection) -> None:
        row = {"reader": self._reader, "owner": self._owner, "last": 0}
        connection.execute(self._database.dialect.words.insert_new(self._readers, "reader").values(row))
        mine = self._readers.c.reader == self._reader
        connection.execute(update(self._readers).where(mine).values(owner=self._owner))

    def _first(self, connection: Connection) -> int:
        claimed = self._claimed.c
        first = connection.execute(select(func.min(claimed.claim)).where(claimed.reader == self._reader)).scalar()
        if first is not None:
            return int(first) - 1
        return int(connection.execute(self._mine()).one().last)

    def _mine(self) -> Any:  # noqa: ANN401 - a select of two columns
        readers = self._readers.c
        return select(readers.owner, readers.last).where(readers.reader == self._reader)

    def _behind(self, connection: Connection) -> int:
        until = self._database.dialect.values.to_until(self._store.clock().now())
        due = select(self._table.c.id).where(self._table.c.due <= until).limit(MOST_COUNTED).subquery()
        waiting = connection.execute(select(func.count()).select_from(due)).scalar_one()
        return int(connection.execute(self._mine()).one().last) + int(waiting)

    def _begin(self, connection: Connection, done: int) -> int:
        owner, last = connection.execute(self._mine().with_for_update()).one()
        if owner != self._owner:
            raise BackendUnavailable(
                f"another stream has begun to read as {self._app!r}: only one may. Stop it, or give yours another "
                '.option("app", ...)'
            )
        claimed = self._claimed
        connection.execute(delete(claimed).where(claimed.c.reader == self._reader, claimed.c.claim <= done))
        return int(last)

    async def _move(self, messages: Sequence[DelayedMessage], last: int, transaction: SqlTransaction) -> None:
        dialect = self._database.dialect
        to_due, headers_of = dialect.values.to_due, dialect.values.headers_of
        rows = [
            (self._reader, number, *bulk_values(StoredRow.of(message, to_due, headers_of)))
            for number, message in enumerate(messages, last + 1)
        ]
        statement = Prepared(insert(self._claimed), dialect.sql, CLAIM_COLUMNS)
        await transaction.run(lambda connection: statement.change_many(connection, rows))
        await self._store.remove_many(messages, transaction)

    def _end(self, connection: Connection, last: int) -> None:
        mine = self._readers.c.reader == self._reader
        connection.execute(update(self._readers).where(mine).values(last=last))
