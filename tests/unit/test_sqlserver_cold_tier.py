"""A cold tier's catalog in SQL Server, and promotion into its store; run by SQLite, as no server runs here."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, cast

import pytest
from tests.integration.cold_rows import rows
from tests.unit.sqlserver_translation import Translated, dialect

from delayline import DelayedMessage, Message
from delayline.bulk import promotion
from delayline.bulk.cold_catalog import ColdFiles, FileState, Progress, cold_tables
from delayline.bulk.cold_folder import ColdFolder, HourWriter
from delayline.bulk.promotion import FilePromoter
from delayline.sql.journal import Journal, JournalEvent, journal_tables

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Connection

    from delayline.bulk.cold_catalog import ColdFile

NOON: Final = datetime(2030, 1, 2, 12, tzinfo=UTC)
IDS: Final = [f"m{number:02}" for number in range(25)]
URL: Final = "mssql://sa:s3cret@host/db"


class Tier:
    """The cold tier of `sales`."""

    def __init__(self, folder: Path) -> None:
        server = dialect()
        self.store = server.catalog.store_table("sales.timeouts", None)
        schema = self.store.schema
        self.translated = Translated([*cold_tables(schema).all, journal_tables(schema).entries])
        self.connection = cast("Connection", self.translated)
        self.catalog = ColdFiles(server, self.store)
        self.journal = Journal(self.store, server)
        self.folder = ColdFolder(str(folder), "tier")

    def hold(self, *ids: str, since: datetime = NOON) -> ColdFile:
        """Hold the messages, one each second."""
        writer = HourWriter(self.folder)
        writer.write(rows(*((key, since + position * timedelta(seconds=1)) for position, key in enumerate(ids))))
        [file] = writer.close()
        self.catalog.register(self.connection, [file])
        return file

    def promoter(self, job: int) -> FilePromoter:
        return FilePromoter(URL, "sales.timeouts", schema=None, folder=self.folder, job=job)

    def stored(self) -> list[str]:
        return sorted(self.translated.rows())


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tier:
    monkeypatch.setattr(ColdFiles, "_has", staticmethod(lambda connection, table: True))
    monkeypatch.setattr(Journal, "_found", lambda self, connection: set())
    monkeypatch.setattr(promotion, "ROWS_AT_ONCE", 10)
    return Tier(tmp_path)


def test_files_are_listed_cancelled_in_and_counted(tier: Tier) -> None:
    # Given two files, of which messages are cancelled
    first, second = tier.hold("a", "b"), tier.hold("c", since=NOON + timedelta(hours=2))
    catalog, connection = tier.catalog, tier.connection
    assert catalog.bury(connection, {first.name: {"b": "billing"}})
    # Then they are not cancelled again, and the others wait
    assert not catalog.bury(connection, {first.name: {"b": "billing"}})
    assert [file.name for file in catalog.list_files(connection)] == [first.name, second.name]
    assert [file.name for file in catalog.list_files(connection, until=first.max_due)] == [first.name]
    assert catalog.waiting(connection) == {("2030010212", "billing"): 1, ("2030010214", "billing"): 1}
    assert catalog.earliest(connection) == first.min_due
    where = catalog.whereabouts(connection, {first.name: ["a", "b"], "unknown": ["x"]})
    assert (set(where.held), where.dead, where.merged) == ({first.name}, {first.name: {"b"}}, set())
    # When a file leaves the tier, then it is not locked any more
    assert catalog.lock(connection, [first.name, second.name]) == {first.name, second.name}
    catalog.retire(connection, [first.name], FileState.PROMOTED)
    assert catalog.lock(connection, [first.name, second.name]) == {second.name}
    assert catalog.known(connection) >= {first.name, second.name}
    catalog.forget(connection, [first.name])
    assert first.name not in catalog.known(connection)


def test_indexes_of_ids_are_registered_and_retired(tier: Tier) -> None:
    file = tier.hold(*IDS)
    assert file.ids is not None
    snapshot = tier.catalog.ids_snapshot(tier.connection)
    assert [(index.name, index.entries) for index in snapshot.indexes] == [(file.ids, len(IDS))]
    assert snapshot.others == []
    assert tier.catalog.lock_ids(tier.connection, [file.ids]) == {file.ids}
    tier.catalog.retire(tier.connection, [file.name], FileState.PROMOTED)
    tier.catalog.retire_old_ids(tier.connection)
    assert tier.catalog.ids_snapshot(tier.connection).indexes == []
    assert tier.catalog.retired(tier.connection) == []  # since a moment only


def test_a_file_is_promoted_into_the_store_once(tier: Tier) -> None:
    # Given a file, one of whose messages is cancelled, and another waits in the store
    file = tier.hold(*IDS)
    tier.catalog.bury(tier.connection, {file.name: {"m20": "billing"}})
    tier.promoter(0)._put(tier.connection, next(tier.folder.batches(file)).slice(3, 1), "keep")
    # When two promotions take it one after the other
    stored = [tier.promoter(job)._store_in(tier.connection, file) for job in (1, 2)]
    # Then the first has moved the others, with headers as the document has them
    assert stored == [len(IDS) - 2, 0]
    assert tier.stored() == [key for key in IDS if key != "m20"]
    destination, headers, body = tier.translated.rows()["m07"]
    assert (destination, body) == ("billing", b"m07")
    assert b"<HeaderInfo>" in headers
    files, moved = tier.catalog.promoted(tier.connection, 1)
    assert (files, moved.stored, moved.duplicates, moved.cancelled) == (1, len(IDS) - 2, 1, 1)
    assert tier.catalog.list_files(tier.connection) == []


def test_a_broker_gets_a_file_in_parts_and_what_it_has_is_not_cancelled(tier: Tier) -> None:
    file, catalog, connection = tier.hold(*IDS), tier.catalog, tier.connection
    # Given a promotion that has sent some, and may have sent others
    assert catalog.begin_promotion(connection, file.name) == 0
    assert catalog.begin_sending(connection, file.name, 1, 0, 10)
    assert catalog.sent(connection, [file.name]) == {file.name: 10}
    catalog.record_promotion(connection, file.name, 1, Progress(10, 0, 9, 0, 1))
    # Then another goes on there, and the first does not
    assert not catalog.begin_sending(connection, file.name, 1, 0, 10)
    assert catalog.begin_sending(connection, file.name, 2, 10, 20)
    # And a cancel that has looked before is refused
    assert not catalog.bury(connection, {file.name: {"m15": "billing"}}, {file.name: 10})
    assert catalog.bury(connection, {file.name: {"m22": "billing"}}, {file.name: 20})


def test_the_journal_says_what_is_scheduled_in_files_and_promoted(tier: Tier) -> None:
    note: Any = [(key, "billing", NOON) for key in ("a", "b")]
    tier.journal.note_each(tier.connection, JournalEvent.SCHEDULED, note)
    since = tier.journal.last(tier.connection)
    tier.journal.note_one(tier.connection, JournalEvent.CANCELLED, DelayedMessage(Message("b", {}, b""), "x", NOON))
    tier.journal.note_each(tier.connection, JournalEvent.SCHEDULED, note[:1])
    tier.journal.rename(tier.connection, since, ["a"], JournalEvent.PROMOTED)
    found = tier.translated.database.execute("SELECT id, event FROM delayline_journal ORDER BY seq").fetchall()
    assert found == [("a", "scheduled"), ("b", "scheduled"), ("b", "cancelled"), ("a", "promoted")]
