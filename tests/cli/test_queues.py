"""`delayline queues`, `pause`, `resume`, `limit`, `peek` and `purge`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.cli.conftest import Result, messages_in, put

from delayline import Message

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def shop(ready: Callable[..., Result]) -> Callable[..., Result]:
    """The command line where messages are in a queue."""
    put("billing", [Message("a", {"tenant": "acme"}, b'{"order": 1}'), Message("b", {}, "<b>ü\n</b>\x00".encode())])
    return ready


def test_queues_are_listed_with_their_limits(shop: Callable[..., Result]) -> None:
    """Given limits of a queue, when queues are listed, then messages and limits are shown."""
    assert (
        "✓ billing: received, 5 at once, 0.5 a second"
        in shop("limit", "billing", "--concurrency", "5", "--rate", ".5").out
    )
    assert "✓ billing: paused, 5 at once" in shop("pause", "billing").out
    listed = {one["queue"]: one for one in shop("queues", "--json").document["queues"]}
    limits: dict[str, object] = {"paused": True, "concurrency": 5, "rate": 0.5, "handlers": {}}
    assert listed["billing"] == {"queue": "billing", "messages": 2, **limits}
    limits |= {"paused": False, "concurrency": None, "rate": None}
    assert listed["error"] == {"queue": "error", "messages": 0, **limits}
    shown = next(line.split() for line in shop("queues").out.splitlines() if line.startswith("billing"))
    assert shown == ["billing", "2", "paused", "5", "0.5"]


def test_limits_are_taken_back(shop: Callable[..., Result]) -> None:
    shop("limit", "billing", "--concurrency", "5", "--rate", "20")
    shop("pause", "billing")
    assert shop("resume", "billing", "--json").document["paused"] is False
    cleared = shop("limit", "billing", "--concurrency", "none", "--rate", "none").out
    assert "✓ billing: received, any number at once, any number a second" in cleared


def test_types_of_messages_are_limited(shop: Callable[..., Result]) -> None:
    """Given limits of two types, when one is removed, then the other is listed, and the queue has no limit."""
    shop("limit", "billing", "--type", "shop.Note", "--concurrency", "3")
    both = shop("limit", "billing", "--type", "shop.Bill", "--concurrency", "4").out
    assert (
        "✓ billing: received, any number at once, any number a second; types at once: shop.Bill 4, shop.Note 3" in both
    )
    left = shop("limit", "billing", "--type", "shop.Note", "--concurrency", "none", "--json").document
    assert (left["concurrency"], left["handlers"]) == (None, {"shop.Bill": 4})
    shown = next(line.split() for line in shop("queues").out.splitlines() if line.startswith("billing"))
    assert shown == ["billing", "2", "received", "shop.Bill", "4"]


def test_dispatching_is_paused_and_resumed(shop: Callable[..., Result]) -> None:
    """To a destination and of the whole endpoint; what is so already is said."""
    sales = ("--endpoint", "sales")
    shop("setup", *sales)
    assert shop("pause", "--dispatch", "billing", *sales).out == "✓ dispatching to billing is paused\n"
    assert shop("pause", "--dispatch", "billing", *sales).out == "✓ dispatching to billing is paused already\n"
    assert shop("pause", "--dispatch-all", *sales).out == "✓ dispatching is paused\n"
    assert "dispatching is paused since" in shop("pending", *sales).out
    paused = shop("pending", *sales, "--json").document["paused"]
    assert [pause["destination"] for pause in paused] == [None, "billing"]
    unwell = shop("doctor", *sales)
    assert unwell.code == 1
    assert "Go on with: delayline resume --dispatch billing" in unwell.out
    shop("send", "billing", "wrong", "--delay", "1ms", *sales)
    assert "and paused: it is not known whether others are late" in shop("doctor", *sales).out
    recorded = shop("actions", "list", *sales).out
    assert recorded.count("dispatching to billing") == 1
    assert shop("resume", "--dispatch-all", *sales, "--json").document == {
        "destination": None,
        "paused": False,
        "changed": True,
    }
    resumed = shop("resume", "--dispatch", "billing", "--rate", "50", *sales).out
    assert resumed == "✓ dispatching to billing is resumed, overdue messages at 50 a second\n"
    assert shop("resume", "--dispatch", "billing", *sales).out == "✓ dispatching to billing was not paused\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Give one of QUEUE, --dispatch and --dispatch-all."),
        (["billing", "--dispatch", "billing"], "Give one of QUEUE, --dispatch and --dispatch-all."),
        (["--dispatch", "billing", "--rate", "-1"], "rate must be above 0"),
        (["billing", "--rate", "50"], "delayline limit"),
        (["--dispatch", ""], "1 to 200 characters"),
        (["--dispatch", "billing", "--url", "amqp://localhost:1/"], "cannot be held back: stop the endpoints"),
    ],
)
def test_a_pause_that_cannot_be_is_refused(shop: Callable[..., Result], arguments: list[str], says: str) -> None:
    shop("setup", "--endpoint", "sales")
    result = shop("resume", *arguments, "--endpoint", "sales")
    assert says in result.err
    assert result.code == 2


def test_messages_are_seen_without_receiving_them(shop: Callable[..., Result]) -> None:
    """Given messages with hard bodies, when peeked at, then they stay."""
    assert shop("peek", "billing", "--limit", "1").out.endswith("2 in billing, 1 shown\n")
    document = shop("peek", "billing", "--json").document
    assert [one["id"] for one in document["messages"]] == ["a", "b"]
    assert document["messages"][0]["headers"]["tenant"] == "acme"
    assert len(messages_in("billing")) == 2


def test_a_queue_is_emptied(shop: Callable[..., Result]) -> None:
    assert "✓ billing: 2 deleted" in shop("purge", "billing", "--yes").out
    assert messages_in("billing") == []


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        (["pause", "nowhere"], 1, "nowhere"),
        (["peek", "nowhere"], 1, "nowhere"),
        (["limit", "billing"], 2, "Give --concurrency, --rate or both"),
        (["limit", "billing", "--rate", "fast"], 2, "'fast' is not a number"),
        (["limit", "billing", "--rate", "nan"], 2, "rate must be messages a second"),
        (["limit", "billing", "--concurrency", "0"], 2, "concurrency"),
        (["limit", "billing", "--type", "Bill", "--rate", "2"], 2, "with --type, --concurrency"),
        (["limit", "billing", "--type", "Bill", "--concurrency", "0"], 2, "concurrency of 'Bill' must be"),
        (["limit", "billing", "--type", "", "--concurrency", "2"], 2, "by the name of a type"),
        (["limit", "nowhere", "--type", "Bill", "--concurrency", "2"], 1, "nowhere"),
    ],
)
def test_mistakes_are_explained(shop: Callable[..., Result], command: list[str], code: int, text: str) -> None:
    result = shop(*command)
    assert (result.code, text in result.err) == (code, True), result.err
    assert "Traceback" not in result.err
