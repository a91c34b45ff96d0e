"""The sample store of NServiceBus' documents, on PostgreSQL: six verbs, set-up, and a lock that is its transaction."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Self, cast

import psycopg
from psycopg import sql

from delayline import (
    BackendUnavailable,
    DelayedMessage,
    Endpoint,
    MemoryTransport,
    Message,
    MessageContext,
    StoredDelivery,
    TransactionMode,
)
from delayline.errors import ConfigurationError, UnsupportedTransactionMode
from delayline.spi import Transaction

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from types import TracebackType

    Connection = psycopg.AsyncConnection[tuple[Any, ...]]

LONGEST_NAME = 63  # bytes of an identifier in PostgreSQL
MOST_IDLE = 4

TABLE = """
CREATE TABLE IF NOT EXISTS {table} (
    id varchar(250) NOT NULL PRIMARY KEY,
    destination varchar(200) NOT NULL,
    state bytea NOT NULL,
    time timestamptz NOT NULL,
    headers bytea NOT NULL,
    retry_count int NOT NULL DEFAULT 0,
    seq bigint NOT NULL GENERATED ALWAYS AS IDENTITY,
    leased_until timestamptz
)"""
INDEX = "CREATE INDEX IF NOT EXISTS {index} ON {table} (time, seq)"
#: Two processes that create the same table at once would disturb each other.
ONE_AT_A_TIME = "SELECT pg_advisory_xact_lock(hashtext(%s))"
INSERT = """
INSERT INTO {table} (id, destination, time, headers, state) VALUES (%s, %s, %s, %s, %s) ON CONFLICT (id) DO NOTHING"""
COLUMNS = "id, destination, time, headers, state, retry_count"
#: FOR UPDATE locks the row until the transaction ends; SKIP LOCKED passes over those that others have locked.
FETCH = f"""
SELECT {COLUMNS} FROM {{table}}
WHERE time <= %s AND (leased_until IS NULL OR leased_until <= clock_timestamp())
ORDER BY time, seq LIMIT 1 FOR UPDATE SKIP LOCKED"""  # noqa: S608 - constants
#: Without a transaction a lease is the lock, for a minute.
LEASE = f"""
WITH due AS MATERIALIZED ({FETCH})
UPDATE {{table}} AS message SET leased_until = clock_timestamp() + interval '1 minute'
FROM due WHERE message.id = due.id
RETURNING message.id, message.destination, message.time, message.headers, message.state, message.retry_count
"""  # noqa: S608 - likewise
DELETE = "DELETE FROM {table} WHERE id = %s"
COUNT_FAILURE = "UPDATE {table} SET retry_count = retry_count + 1, leased_until = NULL WHERE id = %s"
NEXT = "SELECT min(time) FROM {table}"


class StoreTransaction(Transaction):
    """A transaction of the store: a connection of its own, from entering to the commit or rollback."""

    connection: Connection

    def __init__(self, store: PostgresqlStore) -> None:
        super().__init__(store.transaction_domain)
        self._store = store

    async def __aenter__(self) -> Self:
        self.connection = await self._store.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        finally:
            await self._store.give_back(self.connection)

    async def _commit(self) -> None:
        with outages():
            await self.connection.commit()

    async def _rollback(self) -> None:
        with outages():
            await self.connection.rollback()


class PostgresqlStore:
    """Keeps delayed messages in a table, `{endpoint}.timeouts` by default.

    A message is locked by the transaction that has fetched it: the poller fetches and removes it in one. Other
    instances of the endpoint pass over it meanwhile, and get it if this process ends before the commit.
    """

    #: It shares no transaction with queues, so the endpoint's default is not stronger.
    highest_transaction_mode = TransactionMode.SENDS_ATOMIC_WITH_RECEIVE
    #: A transaction may stay open while its message is sent: it locks nothing but that row.
    locks_rows = True

    def __init__(self, conninfo: str, *, schema: str = "public", table_name: str | None = None) -> None:
        self._conninfo = conninfo
        self._schema = schema
        self._table_name = table_name
        self._table = ""
        self._idle: list[Connection] = []

    @property
    def transaction_domain(self) -> tuple[str, ...]:
        """Equal to no transport's: it shares its transactions with none."""
        return ("postgresql_store", self._conninfo, self._schema)

    def transaction(self) -> StoreTransaction:
        """Return a new transaction, to be entered."""
        return StoreTransaction(self)

    async def setup_infrastructure(self, endpoint_name: str) -> None:
        """Create the table and its index. Idempotent, also in several processes at once."""
        name = self._name_of(endpoint_name)
        index = sql.Identifier(f"Index_Time_{hashlib.sha256(name.encode()).hexdigest()[:16]}").as_string()
        table = self._quoted(name)
        async with self._cursor(None) as cursor:
            await cursor.execute(ONE_AT_A_TIME, [name])
            for statement in (TABLE, INDEX):
                await cursor.execute(query(statement.format(table=table, index=index)), [])
        if not self._table:  # set up only, not opened
            await self.close()

    async def initialize(self, endpoint_name: str, mode: TransactionMode) -> None:
        """Take the name of the table; refuse the mode that needs a transaction over store and queues."""
        if mode > self.highest_transaction_mode:
            raise UnsupportedTransactionMode(
                "this store shares no transaction with queues: use TransactionMode.SENDS_ATOMIC_WITH_RECEIVE"
            )
        self._table = self._quoted(self._name_of(endpoint_name))

    async def store(self, message: DelayedMessage, transaction: Transaction | None = None) -> None:
        """Insert the message; nothing changes for an id that is there."""
        kept = message.message
        values = [message.id, message.destination, message.due.astimezone(UTC), kept.encoded_headers, kept.body]
        await self._change(INSERT, values, transaction)

    async def fetch_next_due(self, at: datetime, transaction: Transaction | None = None) -> DelayedMessage | None:
        """Lock the earliest due message that is not locked: in the transaction, or by a lease."""
        statement = LEASE if transaction is None else FETCH
        async with self._cursor(transaction) as cursor:
            await cursor.execute(self._statement(statement), [at.astimezone(UTC)])
            row = await cursor.fetchone()
        if row is None:
            return None
        id_, destination, due, headers, body, failures = row
        return DelayedMessage(
            Message.from_encoded(id_, bytes(headers), bytes(body)), destination, due.astimezone(UTC), failures
        )

    async def next_due(self) -> datetime | None:
        """Return the earliest time of any message, locked ones included."""
        async with self._cursor(None) as cursor:
            await cursor.execute(self._statement(NEXT), [])
            row = await cursor.fetchone()
        return None if row is None or row[0] is None else row[0].astimezone(UTC)

    async def remove(self, message: DelayedMessage, transaction: Transaction | None = None) -> bool:
        """Delete the message; False if it was gone."""
        return await self._change(DELETE, [message.id], transaction) == 1

    async def increment_failure_count(self, message: DelayedMessage) -> bool:
        """Count a failure, and end the lease if there is one; False if the message was gone."""
        return await self._change(COUNT_FAILURE, [message.id], None) == 1

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        while self._idle:
            await self._idle.pop().close()

    async def connect(self) -> Connection:
        """Return a connection that nobody uses."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        with outages():
            return await psycopg.AsyncConnection.connect(self._conninfo, options="-c TimeZone=UTC", connect_timeout=10)

    async def give_back(self, connection: Connection) -> None:
        """Keep the connection for later, or close it if its transaction is in an unknown state."""
        at_rest = connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
        if at_rest and len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            await connection.close()

    async def _change(self, statement: str, values: list[Any], transaction: Transaction | None) -> int:
        async with self._cursor(transaction) as cursor:
            await cursor.execute(self._statement(statement), values)
            return cursor.rowcount

    @contextlib.asynccontextmanager
    async def _cursor(self, transaction: Transaction | None) -> AsyncIterator[psycopg.AsyncCursor[tuple[Any, ...]]]:
        """Give a cursor in the transaction, or in one of its own that is committed at the end."""
        if isinstance(transaction, StoreTransaction):
            with outages():
                async with transaction.connection.cursor() as cursor:
                    yield cursor
            return
        async with self.transaction() as own:
            with outages():
                async with own.connection.cursor() as cursor:
                    yield cursor

    def _name_of(self, endpoint_name: str) -> str:
        name = self._table_name or f"{endpoint_name}.timeouts"
        if len(name.encode()) > LONGEST_NAME:
            raise ConfigurationError(
                f"table {name!r} has a name of over {LONGEST_NAME} bytes, which PostgreSQL would cut: give table_name="
            )
        return name

    def _quoted(self, name: str) -> str:
        return sql.Identifier(self._schema, name).as_string().replace("%", "%%")

    def _statement(self, statement: str) -> sql.SQL:
        return query(statement.format(table=self._table))


def query(text: str) -> sql.SQL:
    """Return a statement whose names have been quoted."""
    return sql.SQL(cast("Any", text))


@contextlib.contextmanager
def outages() -> Iterator[None]:
    """Raise BackendUnavailable for a server that is away or cannot now: that is no message's failure."""
    try:
        yield
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        raise BackendUnavailable(f"PostgreSQL cannot be reached: {error}") from error


async def main(conninfo: str) -> None:
    """Send three messages, due within two seconds, and print them as they arrive."""
    delays = [timedelta(seconds=2), timedelta(milliseconds=500), timedelta(seconds=1)]
    arrived: asyncio.Queue[Message] = asyncio.Queue()
    endpoint = Endpoint(
        "reminders",
        transport=MemoryTransport(),
        delayed_delivery=StoredDelivery(PostgresqlStore(conninfo), number_of_retries=7),
    )

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        await arrived.put(message)

    async with endpoint:
        for delay in delays:
            await endpoint.send("reminders", f"sent to arrive after {delay.total_seconds()} s", delay=delay)
        print(f"{len(delays)} messages wait in PostgreSQL, {endpoint.guarantee}")
        started = time.monotonic()
        for _ in delays:
            message = await arrived.get()
            print(f"after {time.monotonic() - started:.2f} s: {message.text}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
