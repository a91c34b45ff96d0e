"""Sources that are not tables: their options, the stored messages, and counts of a preview."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from delayline.cli import main
from delayline.errors import BackendUnusable, ConfigurationError
from delayline.migration import source_at
from delayline.migration.collected import KEY, CollectedMessage, Selection, key_of
from delayline.migration.sources.celery_tasks import NoMessage, task_of
from delayline.migration.sources.ravendb import _collected, documents
from delayline.migration.tally import Bounds, Tally

if TYPE_CHECKING:
    from pathlib import Path

NOW = datetime(2026, 5, 6, tzinfo=UTC)


@pytest.mark.parametrize(
    ("kind", "named", "said"),
    [
        ("mainframe", {}, "no source of kind 'mainframe': choose from nservicebus-sql, "),
        ("ravendb", {}, "a source of kind 'ravendb' needs a database for the journal: name it with --journal"),
        ("nhibernate", {"journal": "sqlite:///x.db"}, "the journal of a source of kind 'nhibernate' is in its own"),
        ("ravendb", {"journal": "sqlite:///x.db", "table": "T"}, "only a source of kind 'azure-storage' has a table"),
    ],
)
def test_wrong_sources_are_reported(kind: str, named: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        source_at(kind, "sqlite:///y.db", **named)


def test_the_commands_take_a_journal(tmp_path: object) -> None:
    words = ["migrate", "history", "--from", "ravendb", "--source", "none.ravendbdump"]
    result = CliRunner().invoke(main, words, prog_name="delayline")
    assert (result.exit_code, "--journal" in result.output) == (2, True)
    result = CliRunner().invoke(main, [*words, "--journal", f"sqlite:///{tmp_path}/journal.db"], prog_name="delayline")
    assert "no migration has run from RavenDB's export none.ravendbdump" in result.output


def test_a_message_is_kept_under_names_that_databases_take() -> None:
    one = CollectedMessage("key", "sales\0\ud800", "id\ud800", "Größe", NOW, None, b"")
    assert (one.endpoint, one.id, one.destination) == ("sales??", "id?", "Größe")
    keys = {key_of("a" * KEY), key_of("a" * (KEY + 1)), key_of("\0"), key_of("\ud800"), key_of("\ud801")}
    assert len(keys) == 5
    assert all(len(key) <= KEY and key.isprintable() for key in keys)


def test_looks_in_several_tasks_add_up() -> None:
    # Given messages of two endpoints, in two looks
    def message(
        name: str, endpoint: str, due: datetime | None, destination: str | None = "billing"
    ) -> CollectedMessage:
        return CollectedMessage(name, endpoint, name, destination, due, "{}", b"")

    day = timedelta(days=1)
    which, bounds = Selection(("sales",), NOW - day), Bounds(NOW, NOW + 10 * day, 1 << 20, bodies=True)
    first, second = Tally(), Tally()
    first.add([message("a", "sales", NOW + 11 * day), message("b", "sales", NOW - 2 * day)], which, bounds)
    second.add([message("c", "sales", NOW, None), message("d", "sales", None), message("e", "x", NOW)], which, bounds)
    # When they are added up
    total = Tally()
    for one in (first, second):
        total.merge(one)
    # Then each is counted once
    sales = total.endpoints["sales"]
    assert (sales.rows, sales.before_cutoff, sales.too_far, sales.overdue) == (3, 1, 1, 0)
    assert (sales.first, sales.last) == (NOW, NOW + 11 * day)
    assert sales.destinations == {"billing": 2, None: 1}
    assert {why.partition(" ")[0]: sales.examples[why] for why in sales.reasons} == {"destination": "c", "due": "d"}
    assert total.endpoints["x"].rows == 1


def test_hostile_exports_of_ravendb_end_with_a_sentence(tmp_path: Path) -> None:
    for content in (
        b'{"Docs":[{"@metadata":{"@export-type":"Attachment"},"Size":-60}',
        b'{"Docs":[{"@metadata":{"@export-type":"Attachment"},"Size":' + b"9" * 4500 + b"}",
        b'{"Docs":[' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"]}",
    ):
        export = tmp_path / "x.ravendbdump"
        export.write_bytes(content)
        with pytest.raises(BackendUnusable, match="is not a complete RavenDB export"):
            list(documents(export))


@pytest.mark.parametrize(
    "changed",
    [
        {"@metadata": "x"},
        {"@metadata": {"@id": ["x"]}},
        {"OwningTimeoutManager": {"a": 1}},
        {"Destination": {"Queue": ["x"]}},
        {"Destination": ["x"]},
        {"Time": 9**4000},
        {"Headers": {"a": "\ud800"}},
        {"State": 5},
    ],
)
def test_a_hostile_document_of_ravendb_is_one_row(changed: dict[str, Any]) -> None:
    good = {"Destination": "billing", "Time": "2030-01-01T00:00:00Z", "State": "", "Headers": {}, "Id": "a"}
    one = _collected({**good, "OwningTimeoutManager": "sales", **changed})
    assert one.key
    assert one.id == "a"


def test_a_hostile_header_of_a_celery_task_is_that_tasks_fault() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(NoMessage, match="headers cannot be kept"):
        task_of({"task": "t", "id": "a", "eta": "2030-01-01T00:00:00Z", "x": nested}, "application/json", b"[[],{},{}]")
    with pytest.raises(NoMessage, match="it expires at"):
        task_of({"task": "t", "id": "a", "expires": nested}, "application/json", b"[[],{},{}]")
