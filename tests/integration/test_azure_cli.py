"""The commands on Azure Storage: setup, send, list, cancel, reschedule, errors and doctor."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from azure.storage.queue import QueueClient
from click.testing import CliRunner
from tests.eventually import eventually_async

from delayline import Headers, MessageFilter
from delayline.actions import JobState, OperatorAction
from delayline.cli import main
from delayline.composition import endpoint_from
from delayline.dashboard.model import Unavailable
from delayline.dashboard.service import EndpointService
from delayline.masking import masked
from delayline.opening import open_waiting
from delayline.settings import Settings, load_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., Any]


@pytest.fixture
def run(azure_url: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a command with --json and returns its document; `code` is the exit code expected."""
    monkeypatch.setenv("DELAYLINE_URL", azure_url)
    monkeypatch.setenv("DELAYLINE_ENDPOINT", "sales")

    def run(*words: str, code: int = 0) -> Any:  # noqa: ANN401 - a JSON document
        result = CliRunner().invoke(main, [*words, "--json"])
        assert result.exit_code == code, result.output
        assert "AccountKey=a" not in result.output
        return json.loads(result.stdout or "null")

    return run


def test_pending_messages_are_listed_rescheduled_and_cancelled(run: Run) -> None:
    run("setup", "--queue", "billing")
    run("send", "billing", "hello", "--delay", "1h", "--id", "first")
    run("send", "billing", "hello", "--delay", "2h", "--id", "second")
    assert [one["id"] for one in run("pending")["pending"]] == ["first", "second"]
    run("reschedule", "first", "--delay", "3h")
    assert [one["id"] for one in run("pending")["pending"]] == ["second", "first"]
    run("cancel", "second")
    run("cancel", "second", code=1)
    assert [one["id"] for one in run("pending")["pending"]] == ["first"]


def test_doctor_looks_at_the_account(run: Run) -> None:
    unhealthy = run("doctor", code=1)
    assert any("delayline setup" in one["text"] for one in unhealthy["findings"])
    run("setup")
    findings = {one["what"]: one for one in run("doctor")["findings"]}
    assert {"queues", "tables", "containers", "clock", "queue sales", "queue error", "pending"} <= set(findings)
    assert "at least once" in findings["guarantee"]["text"]
    assert findings["index"]["text"] == "0 rows point at no message"


@pytest.mark.slow
def test_failed_messages_are_listed_retried_and_purged(run: Run) -> None:
    # Given 40 messages that failed: more than can be looked at without taking them
    run("setup")
    settings = load_settings()

    async def fail() -> None:
        async with endpoint_from(settings) as endpoint:
            for number in range(40):
                await endpoint.send("error", b"body", message_id=f"m{number}", headers={"NServiceBus.FailedQ": "sales"})

    asyncio.run(fail())
    assert run("errors", "list")["total"] == 40
    # When some are retried, and the others dropped
    assert [one["id"] for one in run("errors", "retry", "m7", "m9")["retried"]] == ["m7", "m9"]
    assert run("errors", "retry", "--all", "--yes")["done"] == 38
    run("errors", "retry", "m7", code=1)
    # Then
    with QueueClient.from_connection_string(settings.url.partition(":")[2], "sales") as queue:
        assert queue.get_queue_properties().approximate_message_count == 40
    asyncio.run(fail())
    assert run("errors", "purge", "--all", "--yes")["done"] == 40


async def keep(number: int) -> None:
    """Let messages wait: those with even numbers for `billing`, the others for `shipping`, an hour from now."""
    async with endpoint_from(load_settings(), polling=False) as endpoint:
        for each in range(number):
            await endpoint.send(
                ("billing", "shipping")[each % 2],
                b"please pay",
                delay=timedelta(hours=1),
                message_id=f"m-{each:02}",
                headers={"Tenant": f"t{each % 3}", Headers.ENCLOSED_MESSAGE_TYPES: "Shop.Reminder"},
            )


async def waiting() -> dict[str, datetime]:
    async with open_waiting(load_settings(), timeouts=False) as store:
        return {message.id: message.due for message in await store.pending(limit=1000)}


def test_sets_of_pending_messages_are_changed_by_jobs(run: Run) -> None:
    # Given thirty messages that wait
    run("setup", "--queue", "billing", "--queue", "shipping")
    asyncio.run(keep(30))
    before = asyncio.run(waiting())
    # When those of one kind are rescheduled by two hours, at a rate
    done = run("reschedule", "--where", "destination=billing,header=Tenant:t0", "--by", "2h", "--yes", "--rate", "50")
    # Then each of them is later by that, once, and no other
    moved = {f"m-{each:02}" for each in range(0, 30, 6)}
    assert (done["state"], done["done"], done["failed"]) == ("done", 5, 0)
    after = asyncio.run(waiting())
    assert {each for each in after if after[each] != before[each]} == moved
    assert {after[each] - before[each] for each in moved} == {timedelta(hours=2)}
    # When others are cancelled, and sent now
    assert run("cancel", "--where", "destination=ship*,type=Reminder", "--yes")["done"] == 15
    assert run("send-now", "--where", "id-prefix=m-0", "--yes")["done"] == 5
    soon = datetime.now(UTC) + timedelta(minutes=1)  # the account's clock tells whole seconds
    left = asyncio.run(waiting())
    assert sorted(left) == [f"m-{each:02}" for each in range(0, 30, 2)]
    assert sorted(each for each in left if left[each] <= soon) == [f"m-{each:02}" for each in range(0, 10, 2)]
    # When a filter means nothing, and everything
    assert run("cancel", "--where", "destination=nowhere", "--yes") == {"job": None, "done": 0, "failed": 0}
    assert run("cancel", "--all", "--yes")["done"] == 15
    assert asyncio.run(waiting()) == {}


def test_sets_of_failed_messages_are_retried_and_purged_by_jobs(run: Run) -> None:
    # Given messages that failed in two ways
    run("setup", "--queue", "billing")

    async def fail() -> None:
        async with endpoint_from(load_settings(), polling=False) as endpoint:
            for each in range(12):
                kind = ("Refused", "Silent")[each % 2]
                headers = {Headers.FAILED_QUEUE: "billing", Headers.EXCEPTION_TYPE: kind}
                await endpoint.send("error", b"body", message_id=f"e-{each:02}", headers=headers)

    asyncio.run(fail())
    # When those of one kind are retried, and the others purged
    retried = run("errors", "retry", "--where", "exception=Refused", "--yes")
    purged = run("errors", "purge", "--where", "exception=Silent", "--yes")
    # Then each has gone where it should, once
    assert (retried["done"], retried["failed"], purged["done"], purged["failed"]) == (6, 0, 6, 0)
    assert run("errors", "list")["total"] == 0
    assert sorted(one["id"] for one in run("peek", "billing")["messages"]) == [
        f"e-{each:02}" for each in range(0, 12, 2)
    ]


async def test_jobs_in_code_and_the_page_say_that_nothing_records_them(run: Run) -> None:
    # Given an endpoint with messages that wait, on Azure alone
    await asyncio.to_thread(run, "setup", "--queue", "billing", "--queue", "shipping")
    await keep(6)
    # When code cancels some, and the dashboard the others
    async with endpoint_from(load_settings(), polling=False) as endpoint:
        job = await endpoint.delayed.cancel_all(MessageFilter(destination="billing"))
        assert (job.state, job.done, endpoint.delayed.jobs.is_recorded) == (JobState.DONE, 3, False)
    async with EndpointService(load_settings(), time_limit=60) as service:
        await service.pending.change_all(OperatorAction.CANCEL, MessageFilter(), actor="ana")

        async def is_over() -> bool:
            found = (await service.jobs.all()).actions
            assert not isinstance(found, Unavailable)
            return [(record.state, record.done) for record in found] == [(JobState.DONE, 3)]

        await eventually_async(is_over, "the job")
        # Then the page knows that they are recorded nowhere, and so does the command
        assert (await service.jobs.all()).are_kept is False
    assert await waiting() == {}
    listed = await asyncio.to_thread(CliRunner().invoke, main, ["actions", "list"])
    assert "in the log only" in listed.output
    await keep(1)
    cancelled = await asyncio.to_thread(CliRunner().invoke, main, ["cancel", "--all", "--yes"])
    assert "not recorded: no database here keeps actions" in cancelled.output


def test_a_dry_run_reports_that_there_is_no_sql(run: Run) -> None:
    result = CliRunner().invoke(main, ["setup", "--dry-run"])
    assert result.exit_code != 0
    assert "SQL" in result.output


def test_secrets_of_an_account_are_masked() -> None:
    for secret in (
        "AccountKey=c2VjcmV0",
        "SharedAccessSignature=sv=1&sig=c2VjcmV0",
        "BlobEndpoint=x?sv=1&sig=c2VjcmV0",
    ):
        assert "c2VjcmV0" not in masked(f"azure:AccountName=contoso;{secret};Other=1")
    assert "c2VjcmV0" not in repr(Settings(url="azure://contoso?sv=1&sig=c2VjcmV0"))
