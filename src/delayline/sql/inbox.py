"""The inbox in SQL: a row for each message that an endpoint has handled, kept for a while."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from datetime import timedelta
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Column, Index, MetaData, PrimaryKeyConstraint, Table, and_, bindparam, delete, select

from delayline.checks import time_span
from delayline.clock import EPOCH, ONE_DAY, ONE_SECOND
from delayline.errors import BackendUnavailable, ConfigurationError, DelaylineError, TransactionConflict
from delayline.events import Event, emit
from delayline.inbox import RecordKey
from delayline.message import MAXIMUM_DESTINATION_LENGTH, MAXIMUM_ID_LENGTH
from delayline.sql.deadlines import long_work
from delayline.sql.on_database import OnDatabase
from delayline.sql.outbox import SqlOutbox
from delayline.sql.prepared import Prepared
from delayline.sql.schema import DUE, QUEUES, TO_TAKE, TableGroup, register, text
from delayline.sql.setup import RequiredTables
from delayline.sql.workers import in_thread

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet
    from datetime import datetime

    from sqlalchemy import ColumnElement, Connection, Engine

    from delayline.external import ExternalTransaction
    from delayline.sql.claims import Claims
    from delayline.sql.databases import SqlDatabase
    from delayline.sql.dialect import Dialect
    from delayline.sql.transactions import EnlistedTransaction
    from delayline.transaction import Transaction

logger: logging.Logger = logging.getLogger(__name__)

LONGEST_WINDOW: Final = timedelta(days=3650)
#: Seconds between the ends of a removal of old records and the beginning of the next, at least and at most: processes
#: of an endpoint that start together do not remove together.
REMOVED_EVERY: Final = (30.0, 90.0)
#: Records that are removed together.
REMOVED_AT_ONCE: Final = 1000
#: Claims are numbers below this, as of rows.
CLAIMS: Final = 1 << 38


@lru_cache(maxsize=64)
def inbox_table(schema: str | None = None) -> Table:
    """Return the table of records in that schema, the connection's own where None."""
    return Table(
        "delayline_inbox",
        MetaData(schema=schema),
        Column("endpoint", text(MAXIMUM_DESTINATION_LENGTH), nullable=False),
        Column("id", text(MAXIMUM_ID_LENGTH), nullable=False),
        Column("sender", text(MAXIMUM_DESTINATION_LENGTH), nullable=False),
        Column("expires", DUE, nullable=False),
        PrimaryKeyConstraint("endpoint", "id", "sender", mssql_clustered=False),
        Index("delayline_inbox_expires", "expires"),
    )


INBOX: Final = register(TableGroup("inbox", lambda _, schema: [inbox_table(schema)]))


class InboxStatements:
    """The statements on records."""

    def __init__(self, table: Table, dialect: Dialect, window: timedelta) -> None:
        columns, sql = table.c, dialect.sql
        of_endpoint = columns.endpoint == bindparam("endpoint")
        known = select(columns.id, columns.sender).where(of_endpoint, dialect.words.one_of(columns.id, "ids"))
        until = dialect.values.in_seconds(int(window.total_seconds()))
        given = {name: bindparam(name, type_=columns[name].type) for name in ("endpoint", "id", "sender")}
        record = dialect.words.insert_counted(table, "id").values({**given, "expires": until})
        of_time = bindparam("after", type_=columns.expires.type), bindparam("until", type_=columns.expires.type)
        old = and_(columns.expires > of_time[0], columns.expires <= of_time[1])
        a_page = select(columns.expires).where(old).order_by(columns.expires).limit(1).offset(REMOVED_AT_ONCE - 1)
        self.known: Prepared = Prepared(known, sql, ["endpoint", "ids"])
        many_known = dialect.words.known_lists(table, ["id", "sender"], {"endpoint": given["endpoint"]})
        self.known_lists: Prepared | None = (
            None if many_known is None else Prepared(many_known, sql, ["endpoint", "id", "sender"])
        )
        self.record: Prepared = Prepared(record, sql, ["endpoint", "id", "sender"])
        same: dict[str, ColumnElement[Any]] = {"endpoint": given["endpoint"], "expires": until}
        many = dialect.words.insert_lists(table, "id", ["id", "sender"], same)
        self.record_lists: Prepared | None = None if many is None else Prepared(many, sql, ["endpoint", "id", "sender"])
        """Records many messages in a statement; None where each has its own."""
        self.end_of_page: Prepared = Prepared(a_page, sql, ["after", "until"])
        self.remove: Prepared = Prepared(delete(table).where(old), sql, ["after", "until"])


class SqlInbox(OnDatabase):
    """Inbox in a SQL database: `Endpoint(inbox=SqlInbox(url))`.

    What the handlers of the endpoint write there in `context.transaction()`, and what they send through their context,
    happens once, however often a message is delivered: a record of the message commits with it, in the table
    `delayline_inbox`, and their sends wait in an outbox beside it.

    Args:
        database: A URL, as `postgresql://user@host/name` or `sqlite:///file.db`; or a `SqlDatabase`, or an Engine of
            SQLAlchemy for a server, which say how connections are made.
        window: How long a record is kept from when its message was handled, a second to ten years; by default a day.
            A copy of the message that is delivered later is handled again.
        claims_first: True claims a message before it is handled: of two copies that are delivered at the same time,
            the second waits for the first. By default both may run, and the first that commits wins.
        schema: Schema of the tables; by default the connection's, on SQL Server `dbo`.

    Raises:
        ConfigurationError: The URL or another argument is invalid.
        MissingExtra: The database's driver is not installed.
    """

    def __init__(
        self,
        database: str | Engine | SqlDatabase,
        *,
        window: timedelta = ONE_DAY,
        claims_first: bool = False,
        schema: str | None = None,
    ) -> None:
        super().__init__(database, schema, None)
        self.window: timedelta = time_span("window", window)
        if not ONE_SECOND <= window <= LONGEST_WINDOW:
            raise ConfigurationError(f"window={window!r} must be a second to {LONGEST_WINDOW.days} days")
        self.claims_first = claims_first
        self._table = inbox_table(self._schema)
        self._required = RequiredTables(self._database.dialect, self._schema, QUEUES, INBOX)
        self._statements = InboxStatements(self._table, self._database.dialect, window)
        self._endpoint = ""
        self._removing: asyncio.Task[None] | None = None
        self._removed_until: datetime | None = None
        """Records that ended before are removed: the rows that they were are not read again."""

    def new_outbox(self) -> SqlOutbox:
        """Return an outbox in the same database."""
        return SqlOutbox(self._given, schema=self._schema)

    async def enlist(self, external: ExternalTransaction) -> EnlistedTransaction:
        """Return the external transaction if a record can be part of it."""
        return await self._database.enlist(external, self._table)

    @long_work
    async def setup_infrastructure(self) -> None:
        """Create the table. Raises NewerSchema, BackendUnusable or BackendUnavailable."""
        await self._open_database()
        try:
            await self._database.set_up(self._required.plan, self._required.set_up)
        finally:
            await self._close_database()

    async def planned_infrastructure(self, endpoint_name: str) -> Sequence[str]:
        """Return the SQL that `setup_infrastructure` would run; without running it. Raises the same errors."""
        del endpoint_name  # all endpoints share the table
        return await self._database.plan(self._required.plan, self._required.script)

    async def missing_rights(self, endpoint_name: str, *, takes: bool) -> Sequence[str]:
        """Return the GRANT statements for missing rights; see `SupportsRightsCheck`."""
        del endpoint_name, takes
        return await self._missing_rights({self._table: TO_TAKE})

    async def start(self, endpoint_name: str) -> None:
        """Open the database, check the table, and begin to remove records whose time is over."""
        if self._endpoint not in ("", endpoint_name):
            raise ConfigurationError(
                f"this SqlInbox belongs to endpoint {self._endpoint!r}; create another for endpoint {endpoint_name!r}"
            )
        self._endpoint = endpoint_name
        await self._open_database()
        try:
            await self._database.read(self._required.check)
        except BaseException:
            await self._close_database()
            raise
        self._removing = asyncio.create_task(self._remove_old_records(), name=f"delayline inbox {endpoint_name}")

    async def stop(self) -> None:
        """Undo a `start`."""
        if self._removing is not None:
            self._removing.cancel()
            await asyncio.wait([self._removing])
            self._removing = None
            await self._close_database()

    async def recorded(self, keys: Sequence[RecordKey]) -> AbstractSet[RecordKey]:
        """Return those of the keys that have a record."""
        return await self._database.read(partial(self._known, keys=keys))

    async def record(self, keys: Sequence[RecordKey], transaction: Transaction | None = None) -> AbstractSet[RecordKey]:
        """Record the keys, and return those that had no record before."""
        ordered = sorted(set(keys))  # so that transactions wait for each other, and never in a circle
        of_lists = self._statements.record_lists

        def record(connection: Connection) -> AbstractSet[RecordKey]:
            if of_lists is not None:
                ids, senders = map(list, zip(*ordered, strict=True))
                new = of_lists.rows(connection, self._endpoint, ids, senders)
                return set(ordered) if len(new) == len(ordered) else {RecordKey(*row) for row in new}
            if len(ordered) > 1 and self._database.dialect.words.fails_for_duplicates:
                return self._insert_unknown(connection, ordered)
            return {key for key in ordered if self._is_new(connection, key)}

        in_one = len(ordered) == 1 or of_lists is not None
        return await self._database.write(record, transaction, one_statement=in_one)

    def _is_new(self, connection: Connection, key: RecordKey) -> bool:
        try:
            return self._statements.record.change(connection, self._endpoint, *key) == 1
        except Exception as error:
            if self._database.dialect.errors.is_duplicate(error):
                return False
            raise

    def _insert_unknown(self, connection: Connection, keys: Sequence[RecordKey]) -> AbstractSet[RecordKey]:
        """Insert the keys that are not known, and return them. Raises TransactionConflict if another is faster."""
        known = self._known(connection, keys)
        new = [key for key in keys if key not in known]
        try:
            if new:
                self._statements.record.change_many(connection, [(self._endpoint, *key) for key in new])
        except Exception as error:
            if self._database.dialect.errors.is_duplicate(error):
                raise TransactionConflict("another transaction has recorded a message meanwhile") from error
            raise
        return set(new)

    def _known(self, connection: Connection, keys: Sequence[RecordKey]) -> AbstractSet[RecordKey]:
        if (known := self._statements.known_lists) is not None:
            ids, senders = map(list, zip(*keys, strict=True))
            return {RecordKey(*row) for row in known.rows(connection, self._endpoint, ids, senders)}
        ids = list({key.message_id for key in keys})
        rows = self._statements.known.rows_each(connection, self._endpoint, keys=ids)
        return {RecordKey(*row) for row in rows}.intersection(keys)

    async def claim(self, key: RecordKey) -> bool:
        """Claim a message; False if it is claimed already, here or by another process."""
        return bool(await in_thread(partial(self._claims.take, [self._number_of(key)], 1)))

    def release(self, key: RecordKey) -> None:
        """Give a claim up."""
        self._claims.release([self._number_of(key)])

    @property
    def _claims(self) -> Claims:
        return self._database.claims(f"{self._table.fullname} handled")

    def _number_of(self, key: RecordKey) -> int:
        """Return the number whose claim stands for the message; few others have the same."""
        digest = hashlib.sha256("\0".join((self._endpoint, *key)).encode()).digest()
        return int.from_bytes(digest[:8], "big") % CLAIMS + 1

    async def _remove_old_records(self) -> None:
        while True:
            await asyncio.sleep(random.uniform(*REMOVED_EVERY))  # noqa: S311 - spreads load
            try:
                await self.remove_old_records()
            except DelaylineError as error:
                log_text = "Old records of the inbox could not be removed: %s"
                level = logging.DEBUG if isinstance(error, BackendUnavailable) else logging.WARNING
                emit(logger, level, Event.BACKGROUND_TASK_FAILED, log_text, error)

    async def remove_old_records(self) -> int:
        """Remove the records whose time is over, of every endpoint, and return how many there were."""
        now, number = self._database.clock.now(), 0
        while True:
            removed, end = await self._database.write(partial(self._remove_page, now=now))
            number += removed
            self._removed_until = end
            if end >= now:
                return number

    def _remove_page(self, connection: Connection, now: datetime) -> tuple[int, datetime]:
        values = self._database.dialect.values
        after = values.to_due(self._removed_until or EPOCH)
        until = self._statements.end_of_page.one(connection, after, values.to_until(now))
        end = now if until is None else values.from_due(until)
        return self._statements.remove.change(connection, after, values.to_until(end)), end
