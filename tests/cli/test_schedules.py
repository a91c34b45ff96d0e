"""`delayline schedules`: recurring messages on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Result

NINE = ("--cron", "0 9 * * MON-FRI", "--tz", "Europe/Berlin")


@pytest.fixture
def shop(ready: Callable[..., Result]) -> Callable[..., Result]:
    """The command line with two schedules."""
    assert ready("schedules", "list").out == "no schedules\n"
    added = ready("schedules", "add", "nightly", "billing", "report", *NINE, "--header", "tenant=acme")
    assert added.code == 0, added.err
    assert added.out.startswith("✓ nightly: added, next 2")
    assert ready("schedules", "add", "cleaning", "billing", "--every", "6h", "--missed", "all").code == 0
    return ready


def test_schedules_are_listed_and_shown(shop: Callable[..., Result]) -> None:
    cleaning, nightly = shop("schedules", "list", "--json").document["schedules"]
    assert nightly | {"next": ""} == {
        "name": "nightly",
        "recurrence": "0 9 * * MON-FRI Europe/Berlin",
        "destination": "billing",
        "missed": "one",
        "paused": False,
        "next": "",
        "last": None,
        "declared_in_code": False,
    }
    assert (cleaning["recurrence"], cleaning["missed"]) == ("every 21600 s", "all")
    assert "0 9 * * MON-FRI Europe/Berlin" in shop("schedules", "list").out
    shown = shop("schedules", "show", "nightly")
    assert "tenant" in shown.out
    assert "by hand" in shown.out
    document = shop("schedules", "show", "nightly", "--json").document
    assert (document["body"], document["headers"]["tenant"]) == ("report", "acme")
    (first, _) = shop("pending", "--json").document["pending"]
    assert first["id"].partition("@")[0] in ("cleaning", "nightly")


def test_a_schedule_is_paused_resumed_triggered_changed_and_removed(shop: Callable[..., Result]) -> None:
    assert shop("schedules", "pause", "cleaning").out == "✓ cleaning: paused\n"
    assert len(shop("pending", "--json").document["pending"]) == 1
    assert shop("schedules", "list", "--json").document["schedules"][0]["paused"]
    assert shop("schedules", "resume", "cleaning").out.startswith("✓ cleaning: resumed, next 2")
    triggered = shop("schedules", "trigger", "cleaning", "--json").document["id"]
    assert triggered in [one["id"] for one in shop("pending", "--json").document["pending"]]
    changed = shop("schedules", "change", "cleaning", "--every", "1h", "--body", "new", "--missed", "none", "--json")
    assert (changed.document["recurrence"], changed.document["missed"]) == ("every 3600 s", "none")
    assert shop("schedules", "remove", "cleaning").out == "✓ cleaning: removed\n"
    assert [one["name"] for one in shop("schedules", "list", "--json").document["schedules"]] == ["nightly"]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (
            ("pause", "nobody"),
            2,
            "there is no schedule 'nobody': the schedules of this endpoint are 'cleaning', 'night",
        ),
        (("add", "nightly", "billing", *NINE), 2, "there is a schedule 'nightly' already"),
        (("add", "other", "billing"), 2, "Give one of --cron and --every"),
        (("add", "other", "billing", *NINE, "--every", "6h"), 2, "Give one of --cron and --every"),
        (("add", "other", "billing", "--every", "6h", "--tz", "UTC"), 2, "--tz is for --cron"),
        (("add", "other", "biling", "--every", "6h"), 1, "biling"),
        (("add", "other", "billing", "--every", "0s"), 2, "a second to a hundred years"),
        (("add", "other", "billing", "--cron", "0 0 30 2 *"), 2, "cron expression '0 0 30 2 [*]'"),
        (("add", "other", "billing", "--cron", "0 9 * * *", "--tz", "Mars"), 2, "no time zone 'Mars'"),
        (("add", "x" * 250, "billing", "--every", "6h"), 2, "1 to 200 characters, and has 250"),
        (("change", "nightly"), 2, "Give what is to be changed"),
    ],
)
def test_mistakes_are_told(shop: Callable[..., Result], arguments: tuple[str, ...], code: int, text: str) -> None:
    ran = shop("schedules", *arguments)
    assert ran.code == code, ran.err
    assert text.replace("[*]", "*") in " ".join(ran.err.split())


def test_stores_without_schedules_refuse(run: Callable[..., Result]) -> None:
    ran = run("schedules", "list", "--url", "azure://account")
    assert ran.code == 2
    assert "keeps no schedules" in ran.err or "recurring messages need a store" in ran.err
