"""The example of a third party's back end, known by its entry point alone: every command, the dashboard, migrations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.dashboard.pages import client_of, csrf_of
from tests.installing import install

from delayline.composition import endpoint_from
from delayline.dashboard import Actor
from delayline.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLE = Path(__file__).parents[2] / "examples/folder_backend"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with the example, and the entry points of its distribution, as an installer puts them."""
    return install(EXAMPLE, tmp_path / "site")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"folder://{tmp_path / 'messages'}"


@pytest.fixture
def delayline(installed: Path, url: str, tmp_path: Path) -> Callable[..., Any]:
    """Return what runs `delayline` in a process of its own, and returns its exit code and its document or text."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DELAYLINE_")}
    environment |= {"DELAYLINE_URL": url, "DELAYLINE_ENDPOINT": "sales", "PYTHONPATH": str(installed)}

    def run(*words: str, patience: float = 60.0) -> tuple[int, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "delayline", *words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            timeout=patience,
            check=False,
        )
        if "--json" in words and done.stdout:
            return done.returncode, json.loads(done.stdout.splitlines()[-1])
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.slow
def test_every_command_works_on_such_a_back_end(delayline: Callable[..., Any], url: str, tmp_path: Path) -> None:
    # Given a back end that is not set up: commands say so
    code, text = delayline("pending")
    assert code == 1
    assert "there is no folder" in text
    # When it is set up, after a dry run that makes nothing
    code, planned = delayline("setup", "--queue", "billing", "--dry-run", "--json")
    assert code == 0
    assert len(planned["statements"]) == 3
    assert not (tmp_path / "messages").exists()
    code, made = delayline("setup", "--queue", "billing", "--json")
    assert (code, made["queues"]) == (0, ["sales", "error", "billing"])
    assert delayline("setup", "--queue", "billing", "--dry-run", "--json")[1]["statements"] == []
    # Then messages wait in it, and are listed, counted, moved to another time and cancelled
    assert delayline("send", "billing", "soon", "--delay", "1h", "--id", "a")[0] == 0
    assert delayline("send", "billing", "later", "--delay", "3h", "--id", "b")[0] == 0
    assert delayline("send", "nowhere", "lost", "--delay", "3h")[0] == 1
    pending = delayline("pending", "--json")[1]["pending"]
    assert [(row["id"], row["destination"]) for row in pending] == [("a", "billing"), ("b", "billing")]
    assert delayline("reschedule", "a", "--delay", "5h")[0] == 0
    assert [row["id"] for row in delayline("pending", "--json")[1]["pending"]] == ["b", "a"]
    assert delayline("cancel", "b", "--json") == (0, {"outcomes": {"b": "done"}})
    assert delayline("cancel", "b")[0] == 1
    assert delayline("pending", "--count", "--json")[1]["total"] == 1
    # and the doctor examines it
    code, health = delayline("doctor", "--json")
    findings = {finding["what"]: (finding["state"] == "ok", finding["text"]) for finding in health["findings"]}
    assert (code, health["state"]) == (0, "ok"), findings
    assert "FolderTransport with the queues themselves in RECEIVE_ONLY" in findings["guarantee"][1]
    assert findings["folder"] == (True, f"{tmp_path / 'messages'} can be written to")
    assert findings["pending"] == (True, "1 messages")
    assert findings["queue billing"] == (True, "0 messages; whether a process receives from it is unknown")


async def test_the_dashboard_shows_and_changes_what_waits_in_another_partys_back_end(
    installed: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(installed))
    settings = Settings(endpoint="sales", url=url)
    # Given a message that waits
    async with endpoint_from(settings, send_only=True) as endpoint:
        await endpoint.transport.setup_infrastructure(["billing", "sales"])
        await endpoint.send("billing", "soon", message_id="order-17", delay=timedelta(hours=1))
    with client_of(settings, read_only=False, authorize=lambda _: Actor("Ana", may_act=True)) as client:
        # When its pages are read, then it is counted, listed and shown
        page = client.get("/").text
        assert url in page
        assert '<dt>in the next hour</dt><dd class="value">1</dd>' in page
        assert "order-17" in client.get("/waiting").text
        assert "soon" in client.get("/waiting/message?id=order-17").text
        assert "can be written to" in client.get("/doctor").text
        # and it can be cancelled
        form = {"csrf": csrf_of(client, "/waiting"), "endpoint": "sales", "id": "order-17", "action": "cancel"}
        assert client.post("/waiting", data=form).status_code == 200
        assert "order-17" not in client.get("/waiting").text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_messages_move_to_another_partys_back_end(delayline: Callable[..., Any], url: str, tmp_path: Path) -> None:
    # Given messages that wait in a store, one of them for a queue that the new back end has not
    old = f"sqlite:///{tmp_path / 'old.db'}"
    assert delayline("setup", "--queue", "billing", "--queue", "gone", "--url", old)[0] == 0
    for message_id, queue, delay in (("a", "billing", "1h"), ("b", "sales", "30d"), ("c", "gone", "1h")):
        sent = delayline("send", queue, f"body of {message_id}", "--delay", delay, "--id", message_id, "--url", old)
        assert sent[0] == 0, sent
    assert delayline("setup", "--queue", "billing")[0] == 0
    before = {row["id"]: row for row in delayline("pending", "--url", old, "--json")[1]["pending"]}
    # When they are moved
    way = ["--from", "delayline", "--source", old, "--target", url]
    code, moved = delayline("migrate", "run", *way, "--endpoint", "sales", "--json", patience=200)
    # Then they wait there, due as before, and the one that could not move is back with the reason
    assert (code, moved["moved"], moved["rejected"]) == (1, 2, 1), moved
    assert {row["id"]: row for row in delayline("pending", "--json")[1]["pending"]} == {
        name: before[name] for name in ("a", "b")
    }
    assert [row["id"] for row in delayline("pending", "--url", old, "--json")[1]["pending"]] == ["c"]
    # and nothing is missing or doubled
    code, verified = delayline("migrate", "verify", *way, "--json", patience=200)
    assert (code, verified["ok"], verified["waiting"]) == (0, True, 2), verified
