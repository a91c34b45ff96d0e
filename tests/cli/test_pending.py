from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cli.conftest import URL, Result
from tests.integration.cold_rows import hold

from delayline import Message, TransactionMode
from delayline.bulk import TwoTierStore
from delayline.timeouts import SqlTimeoutPersister, Timeout

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def three(ready: Callable[..., Result]) -> Callable[..., Result]:
    """The command line with three pending messages."""
    assert ready("setup", "--queue", "shipping").code == 0
    for message_id, destination, delay in (("a", "billing", "1h"), ("b", "billing", "3d"), ("c", "shipping", "2h")):
        assert ready("send", destination, "x" * 2000, "--delay", delay, "--id", message_id).code == 0
    return ready


def ids(ran: Result) -> list[str]:
    assert ran.code == 0
    return [one["id"] for one in ran.document["pending"]]


def test_pending_messages_are_listed_earliest_first(three: Callable[..., Result]) -> None:
    assert ids(three("pending", "--json")) == ["a", "c", "b"]
    assert ids(three("pending", "--json", "--destination", "billing")) == ["a", "b"]
    assert ids(three("pending", "--json", "--limit", "1")) == ["a"]
    lines = three("pending").out.splitlines()
    assert lines[0].split() == ["id", "destination", "due", "retries", "size"]
    assert "in 59 min" in lines[1]
    assert lines[1].split()[-2:] == ["2.0", "KB"]
    assert {len(line.rstrip()) for line in lines} == {len(lines[0].rstrip())}
    assert "\x1b" not in "".join(lines)


def test_nothing_waits(ready: Callable[..., Result]) -> None:
    assert ready("pending").out == "no pending messages\n"
    assert ready("pending", "--count").out == "0 pending messages\n"
    assert ids(ready("pending", "--json")) == []


def test_pending_messages_are_counted_by_due_time_and_destination(three: Callable[..., Result]) -> None:
    document = three("pending", "--count", "--bucket", "52w", "--json").document
    assert document["total"] == 3
    assert sorted((one["destination"], one["count"]) for one in document["counts"]) in (
        [("billing", 2), ("shipping", 1)],
        [("billing", 1), ("billing", 1), ("shipping", 1)],
    )
    shown = three("pending", "--count", "--bucket", "1d", "--destination", "shipping").out
    assert "█" in shown
    assert shown.endswith("1 pending message\n")
    assert three("pending", "--count", "--bucket", "0s").code == 2


def test_a_bucket_is_for_counts(ready: Callable[..., Result]) -> None:
    ran = ready("pending", "--bucket", "1d")
    assert ran.code == 2
    assert "--bucket is the width of what --count counts" in " ".join(ran.err.split())


def test_cancel_prints_each_outcome(three: Callable[..., Result]) -> None:
    ran = three("cancel", "a", "nobody", "--json")
    assert ran.code == 1
    assert ran.document == {"outcomes": {"a": "done", "nobody": "not pending"}}
    assert ids(three("pending", "--json")) == ["c", "b"]
    assert three("cancel", "b", "c").code == 0
    assert "✗ b: no pending message has this id" in three("cancel", "b").out


def test_reschedule_moves_the_due_time(three: Callable[..., Result]) -> None:
    ran = three("reschedule", "b", "--delay", "10m")
    assert (ran.code, ran.out[:10]) == (0, "✓ b: due 2")
    assert three("reschedule", "c", "--at", "2090-01-01T00:00:00Z", "--json").document == {"outcomes": {"c": "done"}}
    assert ids(three("pending", "--json")) == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["b"], 2, "one of --delay, --at and --by"),
        (["b", "--delay", "1h", "--at", "2090-01-01T00:00:00Z"], 2, "one of --delay, --at and --by"),
        (["b", "--at", "2020-01-01T00:00:00Z"], 2, "has passed"),
        (["b", "--delay", "0s"], 2, "has passed"),
        (["b", "--at", "2090-01-01"], 2, "no time zone"),
    ],
)
def test_a_wrong_due_time_changes_nothing(
    three: Callable[..., Result], arguments: list[str], code: int, error: str
) -> None:
    ran = three("reschedule", *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert error in ran.err
    assert ids(three("pending", "--json")) == ["a", "c", "b"]


def test_rescheduling_nothing_fails(three: Callable[..., Result]) -> None:
    assert three("reschedule", "nobody", "--delay", "1h").code == 1


def test_pending_messages_can_be_listed_without_the_queues(ready: Callable[..., Result]) -> None:
    ran = ready("pending", "--json", "--transport-url", "sqlite:///gone.db")
    assert ran.code == 0
    assert not Path("gone.db").exists()


def test_both_tiers_are_seen_and_changed_where_there_is_a_cold_one(
    three: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given messages in the store and in files
    due = datetime.now(UTC) + timedelta(days=2)

    async def far() -> None:
        store = TwoTierStore(URL, cold_tier="cold")
        await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
        await hold(store, ("x", due), ("y", due), ("z", due))
        await store.close()

    asyncio.run(far())
    assert ids(three("pending", "--json")) == ["a", "c", "b"]
    # When the command line gets their place
    monkeypatch.setenv("DELAYLINE_COLD_TIER", "cold")
    # Then it sees and changes both
    assert ids(three("pending", "--json")) == ["a", "c", "x", "y", "z", "b"]
    assert three("pending", "--count", "--bucket", "1d", "--json").document["total"] == 6
    assert three("cancel", "x", "a").code == 0
    assert three("reschedule", "y", "--delay", "5m").code == 0
    assert ids(three("pending", "--json")) == ["y", "c", "z", "b"]
    assert three("cancel", "x").code == 1
    assert three("pending", "--url", "memory:").code == 2


def test_timeouts_of_a_draining_timeout_manager_are_listed_and_changed(
    ready: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = ready("pending", "--timeouts")
    assert (refused.code, "timeouts_url" in refused.err) == (2, True)
    # Given two timeouts that .NET, or the endpoint before, has left
    monkeypatch.setenv("DELAYLINE_TIMEOUTS_URL", URL)
    assert ready("setup").code == 0
    asyncio.run(leave_timeouts("first", "second"))
    assert ids(ready("pending", "--json")) == []
    assert ids(ready("pending", "--json", "--timeouts")) == ["first", "second"]
    assert ready("pending", "--json", "--timeouts", "--count", "--bucket", "9d").document["total"] == 2
    # When one is cancelled, and the other one due sooner
    assert ready("cancel", "first", "gone", "--timeouts", "--json").document["outcomes"] == {
        "first": "done",
        "gone": "not pending",
    }
    assert ready("reschedule", "second", "--delay", "1h", "--timeouts").code == 0
    # Then
    [second] = ready("pending", "--json", "--timeouts").document["pending"]
    assert second["id"] == "second"
    assert datetime.fromisoformat(second["due"]) < datetime.now(UTC) + timedelta(hours=2)


async def leave_timeouts(*names: str) -> None:
    persister = SqlTimeoutPersister(URL)
    await persister.open("sales")
    for days, name in enumerate(names, start=1):
        message = Message(name, {"NServiceBus.MessageId": name}, b"")
        due = datetime.now(UTC) + timedelta(days=days)
        await persister.add(Timeout(str(uuid.uuid4()), message, "billing", due))
    await persister.close()
