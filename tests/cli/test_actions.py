"""`delayline cancel|reschedule|send-now --where`, and `delayline actions`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.cli.conftest import Result

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def three(ready: Callable[..., Result]) -> Callable[..., Result]:
    """The command line with three pending messages."""
    assert ready("setup", "--queue", "shipping").code == 0
    for message_id, destination, delay in (("a", "billing", "1h"), ("b", "billing", "3d"), ("c", "shipping", "2h")):
        assert ready("send", destination, "x", "--delay", delay, "--id", message_id).code == 0
    return ready


def waiting(run: Callable[..., Result]) -> dict[str, datetime]:
    rows: list[dict[str, Any]] = run("pending", "--json").document["pending"]
    return {row["id"]: datetime.fromisoformat(row["due"]) for row in rows}


def test_a_set_is_cancelled_once_its_number_is_typed(three: Callable[..., Result]) -> None:
    ran = three("cancel", "--where", "destination=billing", input="3\n")
    assert ran.code == 2
    assert "'3' is not the number of messages, 2: nothing was done" in ran.err
    assert len(waiting(three)) == 3
    ran = three("cancel", "--where", "destination=billing", input="2\n")
    assert ran.code == 0
    assert re.search(r"2 pending messages with destination=billing, counted \d+\.\d s ago: a, b", ran.out)
    assert "✓ 2 cancelled" in ran.out
    assert list(waiting(three)) == ["c"]


def test_sets_are_moved_by_a_delay_to_a_time_and_to_now(three: Callable[..., Result]) -> None:
    before = waiting(three)
    assert three("reschedule", "--where", "destination=billing", "--by", "-30m", "--yes").code == 0
    after = waiting(three)
    half_an_hour = timedelta(minutes=30)
    expected = {"a": before["a"] - half_an_hour, "b": before["b"] - half_an_hour, "c": before["c"]}
    assert after == expected
    assert three("reschedule", "--all", "--at", "2099-01-01T00:00:00Z", "--yes").code == 0
    assert set(waiting(three).values()) == {datetime(2099, 1, 1, tzinfo=UTC)}
    assert three("send-now", "--where", "id-prefix=c", "--yes").code == 0
    assert waiting(three)["c"] < datetime.now(UTC)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cancel"], "--where with a filter, or --all"),
        (["cancel", "--where", ""], "say --all if you mean it"),
        (["cancel", "--where", "id=a", "--all"], "--where with a filter, or --all"),
        (["cancel", "a", "--all"], "Give IDs, or --where or --all"),
        (["cancel", "--all", "--json"], "--json cannot ask"),
        (["cancel", "--where", "exception=ValueError", "--yes"], "pending messages have no exception"),
        (["cancel", "--where", "colour=red", "--yes"], "'colour' is nothing that a filter can ask for"),
        (["reschedule", "--all", "--yes"], "Give one of --delay, --at and --by"),
        (["reschedule", "a", "--by", "1h"], "--by is for --where and --all"),
        (["reschedule", "--all", "--by", "soon"], "delay 'soon' is not understood"),
        (["send-now", "--all", "--rate", "0"], "0 is not in the range"),
    ],
)
def test_a_wrong_set_is_refused_and_nothing_is_done(
    three: Callable[..., Result], arguments: list[str], said: str
) -> None:
    ran = three(*arguments)
    assert ran.code == 2
    assert said in (ran.err or ran.out)
    assert sorted(waiting(three)) == ["a", "b", "c"]


def test_a_filter_that_matches_nothing_is_no_failure(three: Callable[..., Result]) -> None:
    ran = three("cancel", "--where", "destination=nowhere")
    assert (ran.code, ran.out) == (0, "there are no pending messages with destination=nowhere: nothing to cancel\n")
    assert three("cancel", "--where", "id=z", "--yes", "--json").document == {"job": None, "done": 0, "failed": 0}


def test_every_action_is_recorded_with_who_what_and_outcome(three: Callable[..., Result]) -> None:
    # Given actions on sets, on one message, and on failed messages
    assert three("cancel", "--where", "destination=billing", "--yes").code == 0
    assert three("cancel", "c", "z").code == 1
    assert three("errors", "retry", "nobody").code == 1
    # Then all of them are listed, the latest first
    records = three("actions", "list", "--json").document["actions"]
    assert [(record["action"], record["messages"], record["result"]) for record in records] == [
        ("retry", "nobody", "not in error. See: delayline errors list"),
        ("cancel", "z", "no pending message has this id: it has left, was cancelled, or never existed"),
        ("cancel", "c", "done"),
        ("cancel", "pending messages with destination=billing", "2 cancelled"),
    ]
    assert {record["endpoint"] for record in records} == {"sales", "error"}
    assert all("@" in record["who"] for record in records)
    assert records[-1]["filter"] == "destination=billing"
    assert three("actions", "list").out.startswith("name ")
    # And a job that is over can neither be resumed nor stopped
    name = records[-1]["name"]
    assert three("actions", "resume", name).out == "✓ 2 cancelled\n"
    assert three("actions", "stop", name).code == 1
    assert "no action is named 'nothing'" in three("actions", "resume", "nothing").err


def test_nobody_has_done_anything(ready: Callable[..., Result]) -> None:
    assert ready("actions", "list").out == "no actions\n"
