"""`delayline find`: where it looks, what it prints, how it goes on, and its exit codes."""

from __future__ import annotations

import asyncio
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cli.conftest import URL
from tests.integration.cold_rows import hold

from delayline import TransactionMode
from delayline.bulk import TwoTierStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Result


@pytest.fixture
def shop(ready: Callable[..., Result]) -> Callable[..., Result]:
    """The command line with messages in two endpoints and a queue."""
    assert ready("setup", "--endpoint", "mail").code == 0
    assert ready("send", "billing", "thank you", "--id", "order-17").code == 0
    for number in range(5):
        sent = ready("send", "billing", f"please pay {number}", "--delay", "2d", "--id", f"reminder-{number}")
        assert sent.code == 0
    assert ready("send", "billing", "please pay", "--delay", "2d", "--id", "other", "--endpoint", "mail").code == 0
    return ready


def test_a_message_is_found_by_its_id_in_any_endpoint_and_queue(shop: Callable[..., Result]) -> None:
    # Then a message of the named endpoint, of another, and in a queue are found
    ran = shop("find", "order-17")
    assert ran.code == 0
    assert "queue billing" in ran.out
    assert "see also: delayline peek billing" in ran.out
    [match] = shop("find", "other", "--json").document["found"]
    assert match["place"] == "pending messages of mail"
    assert match["kind"] == "pending"
    # And the command that it names shows it
    assert "other" in shop(*shlex.split(match["see"])[1:]).out


def test_nothing_is_found(shop: Callable[..., Result]) -> None:
    ran = shop("find", "order-18")
    places = "pending messages of mail, pending messages of sales, queues, error queue error, journal"
    assert (ran.code, ran.out) == (1, f"no message found in {places}\n")
    # And a place that cannot have such messages leaves the answer sure
    ran = shop("find", "--where", "body=nothing like it", "--json")
    assert ran.code == 1
    assert [note["place"] for note in ran.document["left_out"]] == ["journal"]
    assert ran.document["not_searched"] == []


def test_a_place_that_cannot_be_searched_is_not_empty(shop: Callable[..., Result]) -> None:
    # Given an endpoint that was never set up
    ran = shop("find", "order-18", "--endpoint", "nowhere", "--json")
    # Then it is unknown whether there is such a message
    assert ran.code == 3
    assert [note["place"] for note in ran.document["not_searched"]] == ["pending messages of nowhere"]
    # But where it is not looked, it does not matter
    assert shop("find", "order-18", "--endpoint", "nowhere", "--in", "queues").code == 1
    # And a message that is found is found
    ran = shop("find", "order-17", "--endpoint", "nowhere")
    assert ran.code == 0
    assert "not searched: pending messages of nowhere" in ran.err


def test_a_limit_is_exact_and_a_search_goes_on(shop: Callable[..., Result]) -> None:
    # When searches find two messages each
    found: list[str] = []
    ran = shop("find", "--where", "body=please pay", "--limit", "2", "--json")
    for _ in range(3):
        found += [match["id"] for match in ran.document["found"]]
        position = ran.document["position"]
        if position is None:
            break
        assert len(ran.document["found"]) == 2
        ran = shop("find", "--from", position, "--limit", "2", "--json")
    found += [match["id"] for match in ran.document["found"]]
    # Then each message is found once
    assert sorted(found) == ["other", *(f"reminder-{number}" for number in range(5))]
    # And for people the command to go on is printed
    shown = shop("find", "--where", "id-prefix=rem", "--limit", "2").out.splitlines()[-1]
    command = shlex.split(shown.removeprefix("go on with: "))
    assert "reminder-2" in shop(*command[1:]).out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Give an ID"),
        (["a", "--from", "b"], "Give an ID"),
        (["--from", "b", "--in", "queues"], "leave it out"),
        (["--from", "bm90IG9uZQ"], "is no position of a search"),
        (["--from", "é"], "is no position of a search"),
        (["--where", "colour=red"], "nothing that a filter can ask for"),
        (["a", "--where", "id=b"], "id is given twice"),
        (["--where", "body="], "body= is empty"),
    ],
)
def test_wrong_usage_is_refused(shop: Callable[..., Result], arguments: list[str], said: str) -> None:
    ran = shop("find", *arguments)
    assert ran.code == 2
    assert said in ran.err


def test_ids_with_signs_of_filters_are_found(shop: Callable[..., Result]) -> None:
    for message_id in ("a,b", "a*b", r"a\b", "type=x", "🙂"):
        assert shop("send", "billing", "x", "--id", message_id).code == 0
        assert [match["id"] for match in shop("find", message_id, "--json").document["found"]] == [message_id]


def test_the_life_of_a_message_is_told_event_by_event(run: Callable[..., Result]) -> None:
    # Given an endpoint with a journal, and a message that was moved to another time and cancelled
    (Path.cwd() / "delayline.toml").write_text("journal = true\n")
    assert run("setup", "--queue", "billing").code == 0
    assert run("send", "billing", "x", "--delay", "2d", "--id", "moved").code == 0
    assert run("reschedule", "moved", "--delay", "3d").code == 0
    assert run("cancel", "moved").code == 0
    # Then the search has its last event, and its life all of them
    assert [match["state"] for match in run("find", "moved", "--json").document["found"]] == ["cancelled"]
    ran = run("find", "moved", "--life", "--json")
    assert [entry["event"] for entry in ran.document["life"]] == ["scheduled", "rescheduled", "cancelled"]
    shown = run("find", "moved", "--life").out
    assert shown.index("scheduled") < shown.index("rescheduled")
    # And a message without a journal has no life, but is found
    assert run("send", "billing", "x", "--id", "queued").code == 0
    ran = run("find", "queued", "--life", "--json")
    assert (ran.code, ran.document["life"], ran.document["found"][0]["place"]) == (0, [], "queue billing")
    assert run("find", "--life", "--where", "id=moved").code == 2


def test_the_cold_tier_is_searched_by_id_and_else_said_to_be_unsearched(
    shop: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a message in a file of the cold tier
    async def far() -> None:
        store = TwoTierStore(URL, cold_tier="cold")
        await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
        await hold(store, ("far", datetime.now(UTC) + timedelta(days=2)))
        await store.close()

    asyncio.run(far())
    monkeypatch.setenv("DELAYLINE_COLD_TIER", "cold")
    # Then its id is found, and another search says that it has not looked there
    [match] = shop("find", "far", "--json").document["found"]
    assert (match["place"], match["state"]) == ("pending messages of sales in the cold tier", "pending")
    ran = shop("find", "--where", "body=nothing like it", "--json")
    assert ran.code == 3
    assert "pending messages of sales in the cold tier" in [note["place"] for note in ran.document["not_searched"]]
    assert shop("find", "nowhere").code == 1
