"""Sources that are not tables: messages are collected into a table beside the journal, and moved from there.

A message is committed to that table before it leaves the source, and deleted from it once the target has it. Unmoved
messages return to the source.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from sqlalchemy import Column, Integer, and_, delete, false, func, inspect, null, or_, select, update

from delayline.bulk.writer import blocking
from delayline.migration.journal import chunks
from delayline.migration.rows import SourceRow, record_batch
from delayline.migration.source import SourcePartition, TableSource
from delayline.sql.schema import CONTENT, DUE, text
from delayline.sql.setup import RequiredTables

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    import pyarrow as pa
    from pyspark.sql import SparkSession
    from sqlalchemy import ColumnElement, Connection, Row, Table

    from delayline.migration.tally import Bounds, Tally

KEY: Final = 200
LONGEST_ENDPOINT: Final = 250
#: Texts of strangers, kept as bytes: not every database keeps every character.
TEXTS: Final = tuple(name for name in SourceRow._fields if name not in {"due", "body"})
#: State of a message that has left its source, and of a message that the source may have as well.
SURE: Final = 1
UNSURE: Final = 0
#: Messages, with their bodies, that are in memory at once.
ROWS_A_PAGE: Final = 200


@dataclass(frozen=True)
class CollectedMessage:
    """A message in the table beside the journal."""

    key: str
    """Its key in the source."""
    endpoint: str
    id: str | None
    destination: str | None
    due: datetime | None
    headers: str | None
    body: bytes | None
    why: str | None = None
    """Why it cannot become a message, if the source has found that."""
    original: bytes | None = None
    """The original record, which the source needs to restore it."""
    state: int = SURE

    def __post_init__(self) -> None:
        """Replace characters that not every database can store, such as a lone surrogate, with a question mark."""
        for name in ("key", "endpoint", *TEXTS):
            value = getattr(self, name)
            if value is not None and not value.isascii():
                object.__setattr__(self, name, value.encode("utf-8", "replace").decode())
        object.__setattr__(self, "endpoint", self.endpoint.replace("\0", "?"))


class Selection(NamedTuple):
    """The selection of messages to collect."""

    endpoints: Sequence[str] | None
    """As the user names them; None for all."""
    cutoff: datetime | None
    """Only messages due at this time or later."""

    def names(self, endpoint: str) -> bool:
        """Return whether the endpoint is selected."""
        return self.endpoints is None or endpoint.casefold() in {name.casefold() for name in self.endpoints}

    def includes(self, due: datetime | None) -> bool:
        """Return whether this due time is selected. Unreadable due times are always selected."""
        return self.cutoff is None or due is None or due >= self.cutoff


class CollectedSource(TableSource):
    """A source that is not a database. journal: URL of the database for collected messages and the journal.

    Migrations of it never run at the same time.
    """

    key: ClassVar[str] = "source_key"
    due: ClassVar[str] = "due"
    body: ClassVar[str] = "body"
    owner: ClassVar[str | None] = "endpoint"

    def __init__(self, place: str, journal: str, *, schema: str | None = None) -> None:
        super().__init__(journal, schema=schema)
        self.place = place

    @abstractmethod
    def __str__(self) -> str:
        """Return the source's kind and address, without secrets."""

    @abstractmethod
    async def drain(self, which: Selection, spark: SparkSession) -> None:
        """Collect the selected messages, each committed before it leaves the source. The journal is open.

        Called again after an interruption, it continues.
        """

    @abstractmethod
    async def restore(self, rows: Sequence[CollectedMessage]) -> Mapping[str, str]:
        """Return messages to the source; return the reasons of the messages that it refused, by key."""

    @abstractmethod
    def looked_at(self, which: Selection, bounds: Bounds, spark: SparkSession) -> Tally:
        """Return the messages that a run would collect; changes nothing."""

    def collect(self, endpoints: Sequence[str] | None, cutoff: datetime | None, spark: SparkSession) -> None:
        """Collect the selected messages from the source."""

        async def run() -> None:
            required = RequiredTables(self.dialect, self.schema, others=[self.kept])
            await self.database.set_up(required.plan, required.set_up)
            await self.drain(Selection(endpoints, cutoff), spark)

        self._opened(run)

    def put_back(self) -> int:
        """Return all unmoved messages to the source; return the number that it refused, which stay collected."""
        if not blocking(self.database.look(self.exists)):
            return 0
        failed: int = self._opened(self._put_back)
        return failed

    def must_exist(self) -> None:
        """No-op: the journal's tables are created if they are missing."""

    def columns(self) -> list[Column[Any]]:
        """Return the columns of a collected message."""
        return [
            Column(self.key, text(KEY), primary_key=True),
            Column("endpoint", text(LONGEST_ENDPOINT), nullable=False),
            *(Column(name, DUE if name == "due" else CONTENT) for name in SourceRow._fields),
            Column("original", CONTENT),
            Column("state", Integer, nullable=False),
        ]

    @property
    def kept(self) -> Table:
        """The table of collected messages beside the journal, of its own for each source."""
        digest = hashlib.sha1(str(self).encode(), usedforsecurity=False).hexdigest()[:12]
        return self.table(f"delayline_collected_{digest}")

    def exists(self, connection: Connection) -> bool:
        """Return whether any message was ever collected."""
        return inspect(connection).has_table(self.kept.name, schema=self.schema)

    def partitions(self, connection: Connection) -> list[SourcePartition]:
        """Return a partition for each endpoint whose messages were collected."""
        if not self.exists(connection):
            return []
        endpoint = self.kept.c.endpoint
        names = connection.execute(select(endpoint).distinct()).scalars()
        return [SourcePartition(name, self.kept.name, name) for name in sorted(names)]

    def check_columns(self, connection: Connection, name: str) -> None:
        """No-op: the table is delayline's own."""

    def movable(self, partition: SourcePartition, cutoff: datetime | None) -> ColumnElement[bool]:
        """Return the condition on the partition's rows, rows without a due time included: they are rejected."""
        due = self.kept.c.due
        later = and_(True) if cutoff is None else or_(due.is_(None), due >= self.kept_due(cutoff))
        return and_(self.owned(partition), later)

    def unmovable(self, partition: SourcePartition) -> ColumnElement[bool]:
        """Return a condition that is false."""
        del partition
        return false()

    def kept_due(self, due: datetime) -> Any:  # noqa: ANN401 - what the driver takes
        """Return the column's value."""
        return self.dialect.values.to_due(due)

    def read_due(self, kept: Any) -> datetime:  # noqa: ANN401 - what the driver gives
        """Return the instant."""
        return self.dialect.values.from_due(kept)

    def selected(self, table: Table, *, bodies: bool = True) -> Sequence[ColumnElement[Any]]:
        """Return the columns of a message, and the reason for its rejection."""
        return [table.c[name] if bodies or name != "body" else null() for name in SourceRow._fields]

    def messages(self, rows: Sequence[Sequence[Any]]) -> pa.RecordBatch:
        """Return the messages as they were collected."""
        return record_batch(map(self._source_row, starmap(SourceRow, rows)))

    def keep(self, connection: Connection, rows: Sequence[CollectedMessage]) -> None:
        """Insert messages; a message whose key exists already is unchanged."""
        if rows:
            connection.execute(self.dialect.words.insert_new(self.kept, self.key), [self._row(row) for row in rows])

    def forget(self, connection: Connection, keys: Sequence[str]) -> None:
        """Delete messages that the source has again."""
        for some in chunks(keys):
            connection.execute(delete(self.kept).where(self.kept.c[self.key].in_(some)))

    def set_state(self, connection: Connection, keys: Sequence[str], state: int) -> None:
        """Set the state of messages: SURE or IN_DOUBT."""
        for some in chunks(keys):
            connection.execute(update(self.kept).where(self.kept.c[self.key].in_(some)).values(state=state))

    def among(self, connection: Connection, column: str, values: Iterable[Any]) -> set[Any]:
        """Return the values that the column of collected messages contains."""
        contents = self.kept.c[column]
        return {
            value if isinstance(value, str) else bytes(value)
            for some in chunks(list(values))
            for value in connection.execute(select(contents).where(contents.in_(some))).scalars()
        }

    def doubtful(self, connection: Connection, name: str) -> list[str]:
        """Return the ids of rows in a holding table of which the source may have kept, or sent on, a copy."""
        columns = self.held(name).c
        in_doubt = connection.execute(select(columns.id, columns[self.key]).where(columns.state == UNSURE))
        return [_text(message_id) or key for message_id, key in in_doubt]

    def name_column(self, table: Table) -> ColumnElement[Any]:
        """Return the ids of the messages."""
        return table.c.id

    def shown_name(self, kept: Any) -> str:  # noqa: ANN401 - what the driver gives
        """Return the id; empty for none."""
        return _text(kept) or ""

    def number_kept(self, connection: Connection) -> int:
        """Return the number of collected messages that have neither moved nor been returned."""
        if not self.exists(connection):
            return 0
        return int(connection.execute(select(func.count()).select_from(self.kept)).scalar_one())

    async def _put_back(self) -> int:
        last, failed = "", 0
        while rows := await self.database.read(partial(self._kept_rows, after=last)):
            last = rows[-1].key
            refused = await self.restore(rows)
            failed += len(refused)
            gone = [row.key for row in rows if row.key not in refused]
            await self.database.write(partial(self.forget, keys=gone))
        return failed

    def _kept_rows(self, connection: Connection, after: str) -> list[CollectedMessage]:
        columns = self.kept.c
        query = select(self.kept).where(columns[self.key] > after).order_by(columns[self.key]).limit(ROWS_A_PAGE)
        return [self._from_row(row) for row in connection.execute(query)]

    def _row(self, message: CollectedMessage) -> dict[str, Any]:
        due = None if message.due is None else self.kept_due(message.due)
        contents = {name: _bytes(getattr(message, name)) for name in TEXTS}
        return {
            self.key: message.key, "endpoint": message.endpoint, "due": due, "body": message.body,
            "original": message.original, "state": message.state, **contents,
        }  # fmt: skip

    def _from_row(self, row: Row[*tuple[Any, ...]]) -> CollectedMessage:
        values = row._asdict()
        original = None if row.original is None else bytes(row.original)
        message = self._source_row(SourceRow(*(values[name] for name in SourceRow._fields)))
        return CollectedMessage(values[self.key], row.endpoint, original=original, state=row.state, **message._asdict())

    def _source_row(self, kept: SourceRow) -> SourceRow:
        texts = {name: _text(getattr(kept, name)) for name in TEXTS}
        due = None if kept.due is None else self.read_due(kept.due)
        return kept._replace(due=due, body=None if kept.body is None else bytes(kept.body), **texts)

    def _opened(self, work: Callable[[], Awaitable[Any]]) -> Any:  # noqa: ANN401 - what it returns
        async def run() -> Any:  # noqa: ANN401
            await self.database.open()
            try:
                return await work()
            finally:
                await self.database.close()

        return blocking(run())


def key_of(name: str) -> str:
    """Return the name, or its hash if it is too long for a key."""
    if len(name) <= KEY and name.isprintable():
        return name
    return "~" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


def _bytes(value: str | None) -> bytes | None:
    return None if value is None else value.encode("utf-8", "replace")


def _text(value: Any) -> str | None:  # noqa: ANN401 - what the driver gives
    return None if value is None else bytes(value).decode("utf-8", "replace")
