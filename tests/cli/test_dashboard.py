"""`delayline dashboard`: where it listens, what it asks for, what it refuses."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from tests.cli.conftest import delayline_process

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from tests.cli.conftest import Result

TOKEN = "a-token-of-enough-characters"  # noqa: S105 - not one


def started(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    process = delayline_process("dashboard", "--listen", "127.0.0.1:0", "--json", *arguments)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()
    return process, json.loads(line)["url"]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_the_endpoint_of_the_settings_until_a_signal(
    ready: Callable[..., Result], processes: list[subprocess.Popen[str]], end: signal.Signals
) -> None:
    process, url = started()
    processes.append(process)
    page = httpx.get(url)
    assert page.status_code == 200
    assert "sales" in page.text
    assert "read-only" in page.text
    assert httpx.get(url, headers={"host": "evil.example"}).status_code == 400
    process.send_signal(end)
    out, err = process.communicate(timeout=30)
    [refused] = err.splitlines()
    assert (process.returncode, out) == (0, "")
    assert "evil.example" in refused


def test_a_token_is_asked_for_and_never_shown(
    ready: Callable[..., Result], processes: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELAYLINE_DASHBOARD_TOKEN", TOKEN)
    process, url = started("--allow-actions")
    processes.append(process)
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, headers={"authorization": f"Bearer {TOKEN}x"}).status_code == 401
    answer = httpx.get(url, headers={"authorization": f"Bearer {TOKEN}"})
    assert (answer.status_code, "may act" in answer.text) == (200, True)
    process.terminate()
    out, err = process.communicate(timeout=30)
    assert TOKEN not in out + err


def test_another_address_than_loopback_needs_a_token_or_users(ready: Callable[..., Result]) -> None:
    refused = ready("dashboard", "--listen", "0.0.0.0:0")
    assert refused.code == 2
    assert "DELAYLINE_DASHBOARD_TOKEN" in refused.err


def test_a_port_in_use_is_refused_with_a_remedy(ready: Callable[..., Result]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = ready("dashboard", "--listen", f"127.0.0.1:{port}")
    assert refused.code == 2
    assert f"127.0.0.1:{port} is in use by another process: choose another port" in refused.err


@pytest.mark.parametrize("address", ["8080", ":8080", "localhost:", "localhost:x", "localhost:99999", "localhost:-1"])
def test_an_address_that_is_none_is_refused(ready: Callable[..., Result], address: str) -> None:
    refused = ready("dashboard", "--listen", address)
    assert refused.code == 2
    assert "HOST:PORT" in refused.err


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("DELAYLINE_DASHBOARD_TOKEN", "short", "5 characters"),
        ("DELAYLINE_DASHBOARD_TOKEN", " ", "is empty"),
        ("DELAYLINE_DASHBOARD_USERS", "ana", "line 1 of the users is not NAME:PASSWORD"),
        ("DELAYLINE_DASHBOARD_USERS", "ana:123", "has 3 characters"),
    ],
)
def test_secrets_that_cannot_work_are_refused(
    ready: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(variable, value)
    refused = ready("dashboard", "--listen", "127.0.0.1:0")
    assert refused.code == 2
    assert reason in refused.err


def test_files_with_secrets_and_settings_that_are_missing_are_named(ready: Callable[..., Result]) -> None:
    for arguments in (("--token-file", "missing.txt"), ("--users-file", "missing.txt"), ("missing.toml",)):
        refused = ready("dashboard", "--listen", "127.0.0.1:0", *arguments)
        assert refused.code == 2
        assert arguments[-1] in refused.err


def test_several_settings_files_and_endpoints_are_shown_together(
    ready: Callable[..., Result], processes: list[subprocess.Popen[str]]
) -> None:
    for name in ("billing", "email"):
        Path(f"{name}.toml").write_text(f'endpoint = "{name}"\nurl = "sqlite:///delayline.db"\n', encoding="utf-8")
        assert ready("setup", "--config", f"{name}.toml", "--endpoint", name).code == 0
    process, url = started("billing.toml", "email.toml")
    processes.append(process)
    page = httpx.get(url).text
    assert "billing" in page
    assert "email" in page
