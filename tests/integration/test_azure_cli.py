"""The commands on Azure Storage: setup, send, list, cancel, reschedule, errors and doctor."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from azure.storage.queue import QueueClient
from click.testing import CliRunner

from delayline.cli import main
from delayline.composition import endpoint_from
from delayline.masking import masked
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
