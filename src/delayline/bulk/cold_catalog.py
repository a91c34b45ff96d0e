"""The catalog of a store's cold tier: which files hold its messages, and which of them were cancelled.

Only files in the catalog count. It is kept in the store's database: a transaction moves messages between the tiers.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from datetime import timedelta
from enum import StrEnum
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    delete,
    func,
    insert,
    inspect,
    literal,
    select,
    update,
)

from delayline.clock import from_microseconds
from delayline.message import MAXIMUM_DESTINATION_LENGTH, MAXIMUM_ID_LENGTH
from delayline.sql.prepared import LONGEST_LIST
from delayline.sql.schema import COLD_FILES, DUE, FILE_HELD, MAXIMUM_TABLE_NAME_LENGTH, TableGroup, register, text
from delayline.sql.setup import RequiredTables

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from sqlalchemy import ColumnElement, Connection, Select

    from delayline.sql.dialect import Dialect

LONGEST_COLD_FILE_NAME: Final = 64
#: In place of a due hour: the folder of the indexes of ids, which is no part of the table for readers of Parquet.
IDS_FOLDER: Final = "_ids"
#: Parts of all hashes of ids, by their first byte.
BUCKETS: Final = 256
MICROS_A_HOUR: Final = 3_600_000_000  # microseconds
#: How long obsolete files are kept: a reader may still use them.
OBSOLETE_FILES_KEPT_FOR: Final = timedelta(days=1)


class FileState(StrEnum):
    """The state of a file."""

    HELD = FILE_HELD
    PROMOTED = "promoted"
    """Its messages are in the store."""
    COMPACTED = "compacted"
    """Its messages are in another file."""


class ColdFile(NamedTuple):
    """A file of messages that fall due within an hour, ordered by due time; times in microseconds since 1970."""

    name: str
    due_hour: str
    """The hour in UTC: YYYYMMDDHH."""
    messages: int
    min_due: int
    max_due: int
    destinations: Mapping[str, int]
    """Number of messages by destination; not filled in by `list_files`."""
    ids: str | None = None
    """The index that its ids were written to; not filled in by `list_files`."""


class IdsFile(NamedTuple):
    """An index of ids: a file of hashes, see `delayline.bulk.cold_ids`."""

    name: str
    entries: int
    first_bucket: int
    last_bucket: int


class IdsSnapshot(NamedTuple):
    """Where ids have to be looked for, at a moment."""

    indexes: list[IdsFile]
    others: list[ColdFile]
    """Files whose ids are in none of the indexes: those of an older delayline."""


class Whereabouts(NamedTuple):
    """What has become of messages in files."""

    held: dict[str, ColdFile]
    dead: dict[str, set[str]]
    """By file: which of the ids that were asked for are cancelled."""
    merged: set[str]
    """The files whose messages are in other files now."""


class Progress(NamedTuple):
    """How much of a file a promotion has moved, in messages."""

    sent: int
    """From the start of the file on: the position of the next."""
    stored: int
    published: int
    duplicates: int
    cancelled: int


class ColdTables:
    """The catalog's tables, for all stores of a schema."""

    def __init__(self, schema: str | None) -> None:
        metadata = MetaData(schema=schema)
        self.tiers: Table = Table(
            "delayline_cold_tiers",
            metadata,
            Column("store", text(MAXIMUM_TABLE_NAME_LENGTH), primary_key=True),
            Column("tier", String(16), nullable=False),  # prefix of the names of its files
        )
        self.files: Table = Table(
            COLD_FILES,
            metadata,
            Column("name", text(LONGEST_COLD_FILE_NAME), primary_key=True),
            Column("store", text(MAXIMUM_TABLE_NAME_LENGTH), nullable=False),
            Column("state", text(16), nullable=False),
            Column("due_hour", text(10), nullable=False),
            Column("messages", BigInteger, nullable=False),
            Column("min_due", BigInteger, nullable=False),
            Column("max_due", BigInteger, nullable=False),
            Column("changed", DUE, nullable=False),
            # Since revision 2: 1 if its ids are in the indexes, NULL for files of older code.
            Column("indexed", Integer),
            Index("delayline_cold_files_order", "store", "state", "min_due"),
        )
        #: The indexes of ids; since revision 2.
        self.ids: Table = Table(
            "delayline_cold_ids",
            metadata,
            Column("name", text(LONGEST_COLD_FILE_NAME), primary_key=True),
            Column("store", text(MAXIMUM_TABLE_NAME_LENGTH), nullable=False),
            Column("state", text(16), nullable=False),
            Column("entries", BigInteger, nullable=False),
            Column("first_bucket", Integer, nullable=False),
            Column("last_bucket", Integer, nullable=False),
            Column("max_due", BigInteger, nullable=False),  # of all of its files: when it is needed no more
            Column("changed", DUE, nullable=False),
            Index("delayline_cold_ids_order", "store", "state"),
        )
        self.counts: Table = Table(
            "delayline_cold_counts",
            metadata,
            Column("file", text(LONGEST_COLD_FILE_NAME), primary_key=True),
            Column("destination", text(MAXIMUM_DESTINATION_LENGTH), primary_key=True),
            Column("messages", BigInteger, nullable=False),
        )
        self.tombstones: Table = Table(
            "delayline_cold_tombstones",
            metadata,
            Column("file", text(LONGEST_COLD_FILE_NAME), primary_key=True),
            Column("id", text(MAXIMUM_ID_LENGTH), primary_key=True),
            Column("destination", text(MAXIMUM_DESTINATION_LENGTH), nullable=False),
        )

        #: What promotions have moved; since revision 3.
        self.promotions: Table = Table(
            "delayline_cold_promotions",
            metadata,
            Column("file", text(LONGEST_COLD_FILE_NAME), primary_key=True),
            Column("job", BigInteger, primary_key=True, autoincrement=False),
            *(Column(name, BigInteger, nullable=False) for name in Progress._fields),
            Column("begun", BigInteger, nullable=False),  # the position up to which messages may have been sent
        )

    @property
    def all(self) -> list[Table]:
        """All tables; the catalog's own last, so that where it is, all are."""
        return [self.tiers, self.counts, self.tombstones, self.ids, self.promotions, self.files]


@lru_cache(maxsize=64)
def cold_tables(schema: str | None = None) -> ColdTables:
    """Return the catalog's tables in that schema, the connection's own where None."""
    return ColdTables(schema)


COLD_TIER: Final = register(TableGroup("cold_tier", lambda _, schema: cold_tables(schema).all, revision=3))


class ColdFiles:
    """The catalog of a store; every call is part of the caller's transaction."""

    def __init__(self, dialect: Dialect, store: Table) -> None:
        self._dialect = dialect
        self._store = store.name
        self.tables: ColdTables = cold_tables(store.schema)

    def exist(self, connection: Connection) -> bool:
        """Return whether the catalog's tables exist in this schema."""
        return inspect(connection).has_table(self.tables.files.name, schema=self.tables.files.schema)

    def create(self, connection: Connection) -> str:
        """Create missing tables; return the prefix of the names of the store's files."""
        tiers = self.tables.tiers
        RequiredTables(self._dialect, tiers.schema, COLD_TIER).set_up(connection)
        with self._dialect.catalog.setting_up(connection):
            made = {"store": self._store, "tier": secrets.token_hex(8)}
            connection.execute(self._dialect.words.insert_new(tiers, "store").values(made))
        tier: str = connection.execute(select(tiers.c.tier).where(tiers.c.store == self._store)).scalar_one()
        return tier

    def register(self, connection: Connection, files: Sequence[ColdFile]) -> None:
        """Make the files exist."""
        rows = [
            {
                "name": file.name,
                "store": self._store,
                "state": FileState.HELD.value,
                "due_hour": file.due_hour,
                "messages": file.messages,
                "min_due": file.min_due,
                "max_due": file.max_due,
                "indexed": None if file.ids is None else 1,
            }
            for file in files
        ]
        counts = [
            {"file": file.name, "destination": destination, "messages": number}
            for file in files
            for destination, number in file.destinations.items()
        ]
        if rows:
            connection.execute(insert(self.tables.files).values(changed=self._dialect.values.in_seconds(0)), rows)
            connection.execute(insert(self.tables.counts), counts)
        for name, some in groupby(sorted(files, key=lambda file: file.ids or ""), lambda file: file.ids):
            if name is not None:
                indexed = list(some)
                entries = sum(file.messages for file in indexed)
                index = IdsFile(name, entries, 0, BUCKETS - 1)
                self.register_ids(connection, [index], max(file.max_due for file in indexed))

    def register_ids(self, connection: Connection, indexes: Sequence[IdsFile], max_due: int) -> None:
        """Look for ids in these indexes too, from now on.

        Args:
            connection: In the transaction that registers their files, or retires the indexes that they replace.
            indexes: The files of hashes.
            max_due: When the last of their messages is due, in microseconds since 1970.
        """
        known = {"store": self._store, "state": FileState.HELD.value, "max_due": max_due}
        rows = [{**index._asdict(), **known} for index in indexes]
        if rows:
            connection.execute(insert(self.tables.ids).values(changed=self._dialect.values.in_seconds(0)), rows)

    def ids_snapshot(self, connection: Connection) -> IdsSnapshot:
        """Return where ids have to be looked for: the files of the indexes are kept for a day from now on."""
        if not self._has(connection, self.tables.ids):
            return IdsSnapshot([], self.list_files(connection))
        columns, files = self.tables.ids.c, self.tables.files.c
        query = select(*(columns[name] for name in IdsFile._fields))
        held = query.where(columns.store == self._store, columns.state == FileState.HELD.value)
        indexes = [IdsFile(*row) for row in connection.execute(held.order_by(columns.name))]
        return IdsSnapshot(indexes, self._list(connection, files.indexed.is_(None)))

    def whereabouts(self, connection: Connection, ids: Mapping[str, Iterable[str]]) -> Whereabouts:
        """Return what has become of messages; ids: what was looked for, by the file in which it was."""
        files, tombstones = self.tables.files.c, self.tables.tombstones.c
        held: dict[str, ColdFile] = {}
        dead: dict[str, set[str]] = defaultdict(set)
        merged: set[str] = set()
        listed = [files[name] for name in ColdFile._fields[:5]]
        for names in _parts(sorted(ids)):
            for row in connection.execute(select(*listed, files.state).where(files.name.in_(names))):
                if row.state == FileState.HELD:
                    held[row.name] = _cold_file(row)
                if row.state == FileState.COMPACTED:
                    merged.add(row.name)
        for name in held:
            for some in _parts(ids[name]):
                asked = (tombstones.file == name, tombstones.id.in_(some))
                dead[name].update(connection.execute(select(tombstones.id).where(*asked)).scalars())
        return Whereabouts(held, dict(dead), merged)

    def lock_ids(self, connection: Connection, names: Iterable[str]) -> set[str]:
        """Lock indexes against changes by other processes, and return those that are in use still."""
        columns = self.tables.ids.c
        locked: set[str] = set()
        for some in _parts(sorted(names)):
            query = select(columns.name).where(columns.name.in_(some), columns.state == FileState.HELD.value)
            locked |= set(connection.execute(query.order_by(columns.name).with_for_update()).scalars())
        return locked

    def retire_ids(self, connection: Connection, names: Sequence[str]) -> None:
        """Set the state of indexes whose entries are in others."""
        changes = {"state": FileState.COMPACTED.value, "changed": self._dialect.values.in_seconds(0)}
        for some in _parts(names):
            connection.execute(update(self.tables.ids).where(self.tables.ids.c.name.in_(some)).values(changes))

    def retire_old_ids(self, connection: Connection) -> None:
        """Set the state of indexes all of whose messages have been promoted."""
        if not self._has(connection, self.tables.ids):
            return
        earliest, columns = self.earliest(connection), self.tables.ids.c
        mine = (columns.store == self._store, columns.state == FileState.HELD.value)
        old = () if earliest is None else (columns.max_due < earliest,)
        names = connection.execute(select(columns.name).where(*mine, *old)).scalars().all()
        self.retire_ids(connection, names)

    def mark_indexed(self, connection: Connection, names: Iterable[str]) -> None:
        """Record that the ids of the files are in an index now."""
        columns = self.tables.files.c
        for some in _parts(names):
            connection.execute(update(self.tables.files).where(columns.name.in_(some)).values(indexed=1))

    def list_files(self, connection: Connection, *, until: int | None = None) -> list[ColdFile]:
        """Return the files with messages due not after `until`, all where None; earliest first."""
        return self._list(connection, *([] if until is None else [self.tables.files.c.min_due <= until]))

    def buried(self, connection: Connection, names: Sequence[str]) -> dict[str, dict[str, str]]:
        """Return the cancelled messages of the files: by file, the destination by id."""
        columns = self.tables.tombstones.c
        tombstones: dict[str, dict[str, str]] = defaultdict(dict)
        for some in _parts(names):
            query = select(columns.file, columns.id, columns.destination).where(columns.file.in_(some))
            for file, message_id, destination in connection.execute(query):
                tombstones[file][message_id] = destination
        return dict(tombstones)

    def lock(self, connection: Connection, names: Iterable[str]) -> set[str]:
        """Lock the files against changes by other processes, and return the files that still are in the tier."""
        columns = self.tables.files.c
        locked: set[str] = set()
        for some in _parts(sorted(names)):  # in the same order in all processes, so that they cannot deadlock
            query = select(columns.name).where(columns.name.in_(some), columns.state == FileState.HELD.value)
            locked |= set(connection.execute(query.order_by(columns.name).with_for_update()).scalars())
        return locked

    def retire(self, connection: Connection, names: Sequence[str], state: FileState) -> None:
        """Set the state of locked files whose messages have been moved."""
        tables = self.tables
        changes = {"state": state.value, "changed": self._dialect.values.in_seconds(0)}
        for some in _parts(names):
            connection.execute(update(tables.files).where(tables.files.c.name.in_(some)).values(changes))
            connection.execute(delete(tables.counts).where(tables.counts.c.file.in_(some)))
            connection.execute(delete(tables.tombstones).where(tables.tombstones.c.file.in_(some)))

    def begin_promotion(self, connection: Connection, name: str) -> int | None:
        """Lock a file, and return how many of its messages have left it; None if it is not in the tier any more."""
        if not self.lock(connection, [name]):
            return None
        columns = self.tables.promotions.c
        query = select(func.coalesce(func.max(columns.sent), 0)).where(columns.file == name)
        return int(connection.execute(query).scalar_one())

    def begin_sending(self, connection: Connection, name: str, job: int, start: int, end: int) -> bool:
        """Record that messages of a file may be sent from now on, so that they cannot be cancelled any more.

        Returns False if another process goes on with the file.
        """
        if self.begin_promotion(connection, name) != start:
            return False
        table = self.tables.promotions
        self._add_promotion(connection, name, job)
        connection.execute(update(table).where(table.c.file == name, table.c.job == job).values(begun=end))
        return True

    def sent(self, connection: Connection, names: Sequence[str]) -> dict[str, int]:
        """Return how many messages have left files or may have been sent, from the start of each file on."""
        columns = self.tables.promotions.c
        if not names or not self._has(connection, self.tables.promotions):
            return {}
        query = select(columns.file, func.max(columns.begun)).group_by(columns.file)
        rows = (connection.execute(query.where(columns.file.in_(some))) for some in _parts(names))
        return {name: sent for some in rows for name, sent in some}

    def record_promotion(self, connection: Connection, name: str, job: int, progress: Progress) -> None:
        """Record what a job has moved out of a locked file."""
        table = self.tables.promotions
        self._add_promotion(connection, name, job)
        added = {field: table.c[field] + getattr(progress, field) for field in Progress._fields[1:]}
        mine = (table.c.file == name, table.c.job == job)
        connection.execute(update(table).where(*mine).values(sent=progress.sent, begun=progress.sent, **added))

    def promoted(self, connection: Connection, job: int) -> tuple[int, Progress]:
        """Return how many files a job has promoted to their end, and what it has moved."""
        promotions, files = self.tables.promotions, self.tables.files
        sums = [func.coalesce(func.sum(promotions.c[field]), 0) for field in Progress._fields]
        row = connection.execute(select(*sums).where(promotions.c.job == job)).one()
        ended = select(func.count()).select_from(promotions.join(files, files.c.name == promotions.c.file))
        done = (promotions.c.job == job, promotions.c.sent == files.c.messages)
        return int(connection.execute(ended.where(*done)).scalar_one()), Progress(*map(int, row))

    def bury(
        self, connection: Connection, dead: Mapping[str, Mapping[str, str]], sent: Mapping[str, int] | None = None
    ) -> bool:
        """Cancel messages, by file the destination by id; False if files have left the tier, or are cancelled.

        Who promotes the files waits, and then leaves them out.

        Args:
            connection: In the transaction that cancels them.
            dead: The messages.
            sent: How much of the files had left them when the messages had not; if that is more now, it is looked
                at again.
        """
        names = self.lock(connection, dead)
        if sent is not None:
            now = self.sent(connection, sorted(names))
            names = {name for name in names if now.get(name) == sent.get(name)}
        before = self.buried(connection, sorted(names))
        rows = [
            {"file": name, "id": message_id, "destination": destination}
            for name in sorted(names)
            for message_id, destination in dead[name].items()
            if message_id not in before.get(name, {})
        ]
        if rows:
            connection.execute(insert(self.tables.tombstones), rows)
        return bool(rows)

    def waiting(self, connection: Connection) -> dict[tuple[str, str], int]:
        """Return how many messages wait, by due hour and destination."""
        files, counts, tombstones = self.tables.files, self.tables.counts, self.tables.tombstones
        waiting: dict[tuple[str, str], int] = defaultdict(int)
        number: Any = func.sum(counts.c.messages)
        for hour, destination, messages in connection.execute(self._by_hour(counts, number)):
            waiting[hour, destination] += int(messages)
        for hour, destination, messages in connection.execute(self._by_hour(tombstones, func.count(files.c.name))):
            waiting[hour, destination] -= messages
        return {key: messages for key, messages in waiting.items() if messages}

    def earliest(self, connection: Connection) -> int | None:
        """Return the earliest due time in files, of cancelled messages too; None where there are none."""
        columns = self.tables.files.c
        query = select(func.min(columns.min_due)).where(
            columns.store == self._store, columns.state == FileState.HELD.value
        )
        due = connection.execute(query).scalar()
        return None if due is None else int(due)

    def retired(self, connection: Connection) -> list[tuple[str, str]]:
        """Return the files that have been obsolete for a day, as `ColdFolder.delete` takes them."""
        files, ids = self.tables.files.c, self.tables.ids.c
        long_ago = self._dialect.values.in_seconds(-int(OBSOLETE_FILES_KEPT_FOR.total_seconds()))

        def of(columns: Any, folder: Any) -> list[tuple[str, str]]:  # noqa: ANN401 - columns
            mine = (columns.store == self._store, columns.state != FileState.HELD.value, columns.changed < long_ago)
            return [(name, place) for name, place in connection.execute(select(columns.name, folder).where(*mine))]

        indexes = of(ids, literal(IDS_FOLDER)) if self._has(connection, self.tables.ids) else []
        return [*of(files, files.due_hour), *indexes]

    def forget(self, connection: Connection, names: Sequence[str]) -> None:
        """Forget files that are deleted."""
        for some in _parts(names):
            connection.execute(delete(self.tables.files).where(self.tables.files.c.name.in_(some)))
            if self._has(connection, self.tables.ids):
                connection.execute(delete(self.tables.ids).where(self.tables.ids.c.name.in_(some)))
            if self._has(connection, self.tables.promotions):
                connection.execute(delete(self.tables.promotions).where(self.tables.promotions.c.file.in_(some)))

    def known(self, connection: Connection) -> set[str]:
        """Return the names of all files, whatever has become of them."""
        tables = (
            (self.tables.files, self.tables.ids) if self._has(connection, self.tables.ids) else (self.tables.files,)
        )
        queries = [select(table.c.name).where(table.c.store == self._store) for table in tables]
        return {name for query in queries for name in connection.execute(query).scalars()}

    @staticmethod
    def _has(connection: Connection, table: Table) -> bool:
        """Whether the catalog is of a revision with the table."""
        return inspect(connection).has_table(table.name, schema=table.schema)

    def _add_promotion(self, connection: Connection, name: str, job: int) -> None:
        table = self.tables.promotions
        row = {**dict.fromkeys([*Progress._fields, "begun"], 0), "file": name, "job": job}
        connection.execute(self._dialect.words.insert_new(table, "file").values(row))

    def _list(self, connection: Connection, *conditions: ColumnElement[bool]) -> list[ColdFile]:
        columns = self.tables.files.c
        query = select(*(columns[name] for name in ColdFile._fields[:5]))
        mine = (columns.store == self._store, columns.state == FileState.HELD.value, *conditions)
        rows = connection.execute(query.where(*mine).order_by(columns.min_due, columns.name))
        return [_cold_file(row) for row in rows]

    def _by_hour(self, table: Table, number: Any) -> Select[Any]:  # noqa: ANN401 - an aggregate
        files = self.tables.files
        query = select(files.c.due_hour, table.c.destination, number).join(table, table.c.file == files.c.name)
        query = query.where(files.c.store == self._store, files.c.state == FileState.HELD.value)
        return query.group_by(files.c.due_hour, table.c.destination)


def _cold_file(row: Any) -> ColdFile:  # noqa: ANN401 - a row with these columns
    return ColdFile(row.name, row.due_hour, row.messages, row.min_due, row.max_due, {})


def hour_of(due: int) -> str:
    """Return the due hour of an instant in microseconds since 1970."""
    hour = from_microseconds(due // MICROS_A_HOUR * MICROS_A_HOUR)
    return f"{hour.year:04}{hour.month:02}{hour.day:02}{hour.hour:02}"


def _parts(names: Iterable[str]) -> Iterator[list[str]]:
    names = list(names)
    for first in range(0, len(names), LONGEST_LIST):
        yield names[first : first + LONGEST_LIST]
