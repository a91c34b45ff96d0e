"""Sources that are not tables: their options, the stored messages, and counts of a preview."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from tests.installing import install

from delayline.cli import main
from delayline.errors import ConfigurationError
from delayline.migration import source_at
from delayline.migration.collected import KEY, CollectedMessage, Selection, key_of
from delayline.migration.sources import SOURCE_GROUP
from delayline.migration.sources.celery_tasks import NoMessage, task_of
from delayline.migration.tally import Bounds, Tally

if TYPE_CHECKING:
    pass

NOW = datetime(2026, 5, 6, tzinfo=UTC)


@pytest.mark.parametrize(
    ("kind", "named", "said"),
    [
        ("mainframe", {}, "no source of kind 'mainframe': choose from nservicebus-sql, "),
        (
            "celery-levels",
            {},
            "a source of kind 'celery-levels' needs a database for the journal: name it with --journal",
        ),
        ("nhibernate", {"journal": "sqlite:///x.db"}, "the journal of a source of kind 'nhibernate' is in its own"),
        (
            "celery-levels",
            {"journal": "sqlite:///x.db", "table": "T"},
            "only a source of kind 'azure-storage' has a table",
        ),
    ],
)
def test_wrong_sources_are_reported(kind: str, named: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        source_at(kind, "sqlite:///y.db", **named)


def test_an_installed_distribution_adds_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an example's distribution on Python's path
    site = install(Path(__file__).parents[2] / "examples/ravendb_source", tmp_path / "site")
    monkeypatch.syspath_prepend(site)
    # When a source of its kind is asked for, it is made as the package's own are
    source = source_at("ravendb", "none.ravendbdump", journal="sqlite:///y.db")
    assert str(source) == "RavenDB's export none.ravendbdump"
    with pytest.raises(ConfigurationError, match="a source of kind 'ravendb' needs a database for the journal"):
        source_at("ravendb", "none.ravendbdump")
    words = ["migrate", "history", "--from", "ravendb", "--source", "none.ravendbdump"]
    words += ["--journal", f"sqlite:///{tmp_path}/journal.db"]
    result = CliRunner().invoke(main, words, prog_name="delayline")
    assert "no migration has run from RavenDB's export none.ravendbdump" in result.output
    with pytest.raises(ConfigurationError, match=r"'mainframe': choose from nservicebus-sql, .*, ravendb"):
        source_at("mainframe", "none")
    # and an entry point that leads to no source is the distribution's fault
    [points] = site.glob("*.dist-info/entry_points.txt")
    for value, said in (("ravendb_source:Gone", "cannot be imported: .*Reinstall"), ("json:loads", "is no subclass")):
        points.write_text(f"[{SOURCE_GROUP}]\nravendb = {value}\n")
        with pytest.raises(ConfigurationError, match=f"the source '{value}' of kind 'ravendb' {said}"):
            source_at("ravendb", "none.ravendbdump", journal="sqlite:///y.db")


def test_the_commands_list_the_kinds_of_sources() -> None:
    result = CliRunner().invoke(main, ["migrate", "history", "--from", "mainframe", "--source", "x"])
    assert result.exit_code == 2
    assert "no source of kind 'mainframe': choose from nservicebus-sql, " in " ".join(result.output.split())


def test_the_commands_take_a_journal(tmp_path: object) -> None:
    words = ["migrate", "history", "--from", "celery-scheduled", "--source", "none.json"]
    result = CliRunner().invoke(main, words, prog_name="delayline")
    assert (result.exit_code, "--journal" in result.output) == (2, True)
    result = CliRunner().invoke(main, [*words, "--journal", f"sqlite:///{tmp_path}/journal.db"], prog_name="delayline")
    assert "no migration has run from Celery's export none.json" in result.output


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


def test_a_hostile_header_of_a_celery_task_is_that_tasks_fault() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(NoMessage, match="headers cannot be kept"):
        task_of({"task": "t", "id": "a", "eta": "2030-01-01T00:00:00Z", "x": nested}, "application/json", b"[[],{},{}]")
    with pytest.raises(NoMessage, match="it expires at"):
        task_of({"task": "t", "id": "a", "expires": nested}, "application/json", b"[[],{},{}]")
