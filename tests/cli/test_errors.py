from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from tests.cli.conftest import Result, messages_in, put

from delayline import Headers, Message
from delayline.failures import failure_headers

if TYPE_CHECKING:
    from collections.abc import Callable

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)


def failed(message_id: str, queue: str | None = "billing") -> Message:
    own = {"tenant": "acme", Headers.CONTENT_TYPE: "text/plain", Headers.RETRIES: "3"}
    why = failure_headers(ValueError(f"no price for {message_id}"), queue, "billing", AT) if queue else {}
    return Message(message_id, own | why, b"the body")


@pytest.fixture
def failures(ready: Callable[..., Result]) -> Callable[..., Result]:
    """The command line where messages are in the error queue."""
    put("error", [failed("a"), failed("b"), failed("lost", "gone"), failed("bare", None)])
    return ready


def ids(queue: str) -> list[str]:
    return [message.id for message in messages_in(queue)]


def test_failed_messages_are_listed_with_where_when_and_why(failures: Callable[..., Result]) -> None:
    document = failures("errors", "list", "--json").document
    assert document["total"] == 4
    assert [error["id"] for error in document["errors"]] == ["bare", "lost", "b", "a"]
    assert document["errors"][3] == {
        "id": "a",
        "failed_queue": "billing",
        "time_of_failure": "2026-03-01 12:00:00:000000 Z",
        "exception_type": "builtins.ValueError",
        "exception_message": "no price for a",
    }
    shown = failures("errors", "list", "--limit", "2").out
    assert "builtins.ValueError: no price for lost" in shown
    assert "4 in error, 2 shown\n" in shown


def test_a_list_goes_on_where_it_ended_and_has_what_a_filter_means(failures: Callable[..., Result]) -> None:
    # Given a list that ends before the oldest message
    first = failures("errors", "list", "--limit", "3", "--json").document
    text = failures("errors", "list", "--limit", "3").out
    assert f"older ones: delayline errors list --before {first['next_before']}" in text
    # When it goes on, then the rest is there
    rest = failures("errors", "list", "--before", str(first["next_before"]), "--json").document
    assert ([error["id"] for error in rest["errors"]], rest["next_before"]) == (["a"], None)
    # And a filter means what it means in a retry
    found = failures(
        "errors", "list", "--where", "exception=ValueError,header=tenant:ac*,destination=billing", "--json"
    )
    assert [error["id"] for error in found.document["errors"]] == ["b", "a"]
    assert "4 in error, 0 shown" in failures("errors", "list", "--where", "id=nothing").out
    refused = failures("errors", "list", "--where", "due=<now")
    assert (refused.code, "no due time" in refused.err) == (2, True)


def test_failed_messages_are_grouped(failures: Callable[..., Result]) -> None:
    # When they are grouped
    document = failures("errors", "groups", "--since", "2026-03-01T11:00Z", "--json").document
    # Then each counts, the newest group first
    assert (document["total"], document["read"]) == (4, 4)
    assert [group["exception"] for group in document["groups"]] == ["", "builtins.ValueError"]
    group = document["groups"][1]
    assert (group["messages"], group["new"], group["last"]) == (3, 3, AT.isoformat())
    assert [(kind["failed_queue"], kind["messages"]) for kind in group["kinds"]] == [("billing", 2), ("gone", 1)]
    # And a group is shown, sorted and filtered
    text = failures("errors", "groups", "--order", "largest", "--limit", "1", "--since", "2h").out
    assert "4 in 2 groups, 1 shown" in text
    assert group["group"] in text
    listed = failures("errors", "list", "--where", f"group={group['group']}", "--json").document
    assert [error["id"] for error in listed["errors"]] == ["lost", "b", "a"]
    assert "2 in 1 groups" in failures("errors", "groups", "--where", "destination=billing").out
    assert "in the list of messages" in failures("errors", "groups", "--where", "id=a").err
    assert "is neither a delay" in failures("errors", "groups", "--since", "soon").err


def test_one_is_shown_whole(failures: Callable[..., Result]) -> None:
    document = failures("errors", "show", "a", "--json").document
    assert (document["id"], document["body"], document["headers"]["tenant"]) == ("a", "the body", "acme")
    shown = failures("errors", "show", "a").out
    assert Headers.EXCEPTION_STACK_TRACE in shown
    assert shown.endswith("body, 8 B\nthe body\n")
    missing = failures("errors", "show", "nobody")
    assert (missing.code, missing.out) == (1, "")
    assert "no message 'nobody'" in missing.err


def test_a_retried_message_arrives_without_the_headers_of_its_failure(failures: Callable[..., Result]) -> None:
    ran = failures("errors", "retry", "b", "--json")
    assert (ran.code, ran.document) == (0, {"retried": [{"id": "b", "queue": "billing"}], "failed": []})
    [message] = messages_in("billing")
    assert message == Message("b", {"tenant": "acme", Headers.CONTENT_TYPE: "text/plain"}, b"the body")
    assert ids("error") == ["a", "lost", "bare"]


def test_messages_that_cannot_be_retried_stay_in_the_error_queue(failures: Callable[..., Result]) -> None:
    ran = failures("errors", "retry", "--all", "--yes")
    assert ran.code == 1
    assert "queue 'gone' does not exist; it stays in error" in ran.out
    assert "bare: it has no NServiceBus.FailedQ header. Name the queue with --to QUEUE" in ran.out
    assert "✗ 2 retried, 2 not" in ran.out
    assert ids("billing") == ["a", "b"]
    assert ids("error") == ["lost", "bare"]
    assert failures("errors", "retry", "lost", "bare", "--to", "billing").code == 0
    assert ids("billing") == ["a", "b", "lost", "bare"]
    assert ids("error") == []


def test_a_message_that_failed_before_the_oldest_record_of_the_inbox_stays(failures: Callable[..., Result]) -> None:
    # Given an inbox that keeps records for a second, and a message that failed before
    inbox = ["--inbox-url", "sqlite:///billing.db", "--inbox-seconds", "1"]
    ran = failures("errors", "retry", "b", *inbox)
    # Then it stays, and the error says how to retry it all the same
    assert ran.code == 1
    assert "the inbox keeps records for 1.0 s" in ran.out
    assert "delayline errors retry --past-window" in ran.out
    assert "b" in ids("error")
    assert failures("errors", "retry", "b", "--past-window", *inbox).code == 0
    assert ids("billing") == ["b"]


def test_copies_are_retried_one_by_one(failures: Callable[..., Result]) -> None:
    put("error", [failed("a")])
    assert failures("errors", "retry", "a", "a").code == 0
    assert ids("error").count("a") == 1


def test_an_unknown_id_is_reported(failures: Callable[..., Result]) -> None:
    ran = failures("errors", "retry", "nobody", "a")
    assert ran.code == 1
    assert "✗ nobody: not in error" in ran.out
    assert ids("billing") == ["a"]


def test_damaged_headers_are_listed_and_can_be_sent_as_they_are(ready: Callable[..., Result]) -> None:
    put("error", [Message.from_encoded("damaged", b"{not json", b"body")])
    assert "corrupted headers" in ready("errors", "list").out
    assert ready("errors", "show", "damaged").code == 0
    assert "--to QUEUE" in ready("errors", "retry", "--all", "--yes").out
    assert ids("error") == ["damaged"]
    assert ready("errors", "retry", "--all", "--yes", "--to", "billing").code == 0
    [message] = messages_in("billing")
    assert message.encoded_headers == b"{not json"


def test_retry_needs_ids_or_all_but_not_both(failures: Callable[..., Result]) -> None:
    assert failures("errors", "retry").code == 2
    assert failures("errors", "retry", "a", "--all").code == 2


def test_a_set_is_retried_by_a_filter(failures: Callable[..., Result]) -> None:
    ran = failures("errors", "retry", "--where", "destination=billing,exception=ValueError", "--yes", "--json")
    assert ran.code == 0
    assert (ran.document["state"], ran.document["done"], ran.document["failed"]) == ("done", 2, 0)
    assert ids("billing") == ["a", "b"]
    assert ids("error") == ["lost", "bare"]


def test_purge_has_the_number_typed(failures: Callable[..., Result]) -> None:
    assert failures("errors", "purge").code == 2
    assert failures("errors", "purge", "--where", "").code == 2
    ran = failures("errors", "purge", "--all", input="3\n")
    assert ran.code == 2
    assert "4 failed messages, counted" in ran.out
    assert "'3' is not the number of messages, 4: nothing was done" in ran.err
    assert failures("errors", "purge", "--all", input="").code == 1
    assert failures("errors", "purge", "--all", "--json").code == 2
    assert len(ids("error")) == 4
    assert failures("errors", "purge", "--where", "id=bare", input="1\n").code == 0
    assert ids("error") == ["a", "b", "lost"]
    assert failures("errors", "purge", "--all", input="3\n").code == 0
    assert ids("error") == []


def test_purge_with_yes_does_not_ask(failures: Callable[..., Result]) -> None:
    assert failures("errors", "purge", "--all", "--yes", "--json").document["done"] == 4
    assert ids("error") == []


def test_what_pending_messages_only_have_is_refused(failures: Callable[..., Result]) -> None:
    ran = failures("errors", "purge", "--where", "due=<2030-01-01")
    assert ran.code == 2
    assert "failed messages have no due time" in ran.err


def test_an_error_queue_that_is_not_there_is_reported(ready: Callable[..., Result]) -> None:
    for command in (["list"], ["retry", "--all", "--yes"], ["purge", "--all", "--yes"]):
        ran = ready("errors", *command, "--error-queue", "oops")
        assert (ran.code, ran.out) == (1, "")
        assert "queue 'oops' does not exist" in ran.err
